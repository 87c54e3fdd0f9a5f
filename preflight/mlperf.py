"""Checks of a run that writes an MLPerf log: what the log needs, and what the closed division asks for."""

from __future__ import annotations

import contextlib
from pathlib import Path

from cli.command_line import Problem
from cli.errors import ConfigError
from cli.limits import kind_of_path
from config import flat
from evaluation.prompts import read_prompts
from record import mlperf_events
from record.checkpoint_files import FULL, listed
from stages.dataset import read_stage
from training.run_config import RunConfig, resolve
from zoo import mlperf
from zoo.mlperf_rules import Benchmark
from zoo.mlperf_sd import SD

FIX_VALUE = "Use the reference's value, or mlperf.division=open."
FIX_DATA = "Give the stage of all of them; a subset, if it is meant, is mlperf.division=open."


def log_problems(config: RunConfig) -> list[Problem]:
    """A log needs a target and what it is measured by. In the closed division it also needs the benchmark's constants."""
    if not config.mlperf.enabled:
        return []
    folder, benchmark = Path(config.run_folder, config.run_name or ""), _benchmark(config)
    missing = _missing_loss(config) if "val_loss" in benchmark.target else _missing_scores(config)
    problems = [Problem(f"mlperf.enabled: true, but {text}", ("mlperf.enabled", key)) for key, text in missing]
    try:
        if config.run_name and not mlperf_events.is_begun(folder) and listed(folder / "checkpoints", FULL):
            text = f"true, but {folder} was trained before its log was begun, or it was cut"
            text = f"mlperf.enabled: {text}. Leave it out, or take another run_name."
            problems.append(Problem(text, ("mlperf.enabled", "run_name")))
    except ConfigError as error:
        problems += [Problem(text, ("mlperf.enabled", "run_name")) for text in error.problems]
    if config.mlperf.division == "closed":
        with contextlib.suppress(ValueError):  # values that cannot be resolved, or read, are reported elsewhere
            texts = benchmark.not_closed(flat(resolve(config)))
            problems += [_not_closed(text.partition(":")[0], text, FIX_VALUE) for text in texts]
            given = config.eval.prompts if benchmark is SD else None
            if kind_of_path(given or "") == "file" and (num := len(read_prompts(given).prompts)) != SD.eval_samples:
                text = f"eval.prompts: {num:,} prompts; the reference: {SD.eval_samples:,}"
                problems.append(_not_closed("eval.prompts", text, FIX_VALUE))
    return problems


def _benchmark(config: RunConfig) -> Benchmark:
    return mlperf.logged_as(config.model.family, config.model.variant)


def _not_closed(key: str, text: str, fix: str) -> Problem:
    return Problem(f"mlperf.division: closed, but {text}. {fix}", ("mlperf.division", key))


def _missing_scores(config: RunConfig) -> list[tuple[str, str]]:
    """(key, message) where FID and CLIP score could not be in the log."""
    given = config.eval
    missing = [f"eval.{key}" for key in ("prompts", "statistics", "inception", "clip") if getattr(given, key) is None]
    if given.when == "off":
        return [("eval.when", "nothing is evaluated. Say eval.when=after, or in_training.")]
    if missing:
        return [("eval.prompts", f"{', '.join(missing)}: not given. FID and CLIP score belong in the log.")]
    if kind_of_path(given.prompts or "") != "file":
        return [("eval.prompts", f"no file {given.prompts}, whose prompts the log counts. Check the path.")]
    if not config.target.is_of_scores:
        return [("target.fid", "no target, so no run could succeed. The benchmark's: 90 and 0.15.")]
    return []


def _missing_loss(config: RunConfig) -> list[tuple[str, str]]:
    """(key, message) where the validation loss could not be in the log."""
    if not config.validation.is_given:
        return [("validation.remote", "nothing is validated. Give the held-out stage: validation.remote=FOLDER.")]
    if config.target.val_loss is None:
        return [("target.val_loss", "no target.val_loss, so no run could succeed. The benchmark's: 0.586.")]
    return []


def closed_data_problems(config: RunConfig) -> list[Problem]:
    """The closed division requires all of the benchmark's samples; read the stages' numbers."""
    if not (config.mlperf.enabled and config.mlperf.division == "closed") or config.data.synthetic:
        return []
    benchmark, held_out, has = _benchmark(config), config.validation, []
    with contextlib.suppress(ValueError):  # named by the section
        if stages := config.data.read():
            num, where = sum(stage.num_samples for stage in stages), ", ".join(stage.location for stage in stages)
            has.append(("data.remote", "train_samples", num, where, benchmark.train_samples))
    with contextlib.suppress(ValueError):
        if held_out.remote and "val_loss" in benchmark.target:
            stage = read_stage(held_out.remote)
            num = min(stage.num_samples, held_out.num_samples)
            has.append(("validation.num_samples", "eval_samples", num, stage.location, benchmark.eval_samples))
    return [
        _not_closed(key, f"{name}: {num:,} at {where}; the benchmark: {wanted:,}", FIX_DATA)
        for key, name, num, where, wanted in has
        if num != wanted
    ]
