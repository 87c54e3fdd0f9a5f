"""Checks of a run that writes an MLPerf log: what the log needs, and what the closed division asks for."""

from __future__ import annotations

import contextlib
from pathlib import Path

from cli.command_line import Problem
from cli.errors import ConfigError
from cli.limits import kind_of_path
from config import flat
from evaluation.prompts import read_prompts
from evaluation.scoring import EvalConfig
from record import mlperf_events
from record.checkpoint_files import FULL, listed
from stages.dataset import read_stage
from training.run_config import RunConfig, resolve
from zoo import mlperf
from zoo.mlperf_sd import SD


def log_problems(config: RunConfig) -> list[Problem]:
    """A log needs a target and what it is measured by. In the closed division it also needs the benchmark's constants."""
    if not config.mlperf.enabled:
        return []
    folder = Path(config.run_folder, config.run_name or "")
    benchmark = mlperf.logged_as(config.model.family, config.model.variant)
    found = _loss_problems(config) if "val_loss" in benchmark.target else _score_problems(config)
    of_log: list[str] = []
    try:
        if config.run_name and not mlperf_events.is_begun(folder) and listed(folder / "checkpoints", FULL):
            text = (
                f"{folder} was trained before its log was begun, or it was cut. Leave it out, or take another run_name."
            )
            found.append(("run_name", text))
    except ConfigError as error:
        of_log = error.problems
    problems = [Problem(f"mlperf.enabled: true, but {text}", ("mlperf.enabled", key)) for key, text in found]
    problems += [Problem(text, ("mlperf.enabled", "run_name")) for text in of_log]
    if config.mlperf.division == "closed":
        with contextlib.suppress(ValueError):  # values that cannot be resolved are reported elsewhere
            prompts = _prompts_deviation(config.eval) if benchmark is SD else []
            for text in [*benchmark.not_closed(flat(resolve(config))), *prompts]:
                fix = "Use the reference's value, or mlperf.division=open."
                problems.append(Problem(f"mlperf.division: closed, but {text}. {fix}", (text.partition(":")[0],)))
    return problems


def _score_problems(config: RunConfig) -> list[tuple[str, str]]:
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


def _loss_problems(config: RunConfig) -> list[tuple[str, str]]:
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
    benchmark, found = mlperf.logged_as(config.model.family, config.model.variant), []
    fix = "Give the stage of all of them; a subset, if it is meant, is mlperf.division=open"

    def compare(name: str, num: int, where: str, wanted: int, key: str) -> None:
        if num != wanted:
            given = f"{name}: {num:,} at {where}; the benchmark: {wanted:,}"
            found.append(Problem(f"mlperf.division: closed, but {given}. {fix}.", ("mlperf.division", key)))

    with contextlib.suppress(ValueError):  # named by the section
        if stages := config.data.read():
            where = ", ".join(stage.location for stage in stages)
            num = sum(stage.num_samples for stage in stages)
            compare("train_samples", num, where, benchmark.train_samples, "data.remote")
    with contextlib.suppress(ValueError):
        if config.validation.remote and "val_loss" in benchmark.target:
            stage = read_stage(config.validation.remote)
            num = min(stage.num_samples, config.validation.num_samples)
            compare("eval_samples", num, stage.location, benchmark.eval_samples, "validation.num_samples")
    return found


def _prompts_deviation(given: EvalConfig) -> list[str]:
    """The closed division requires all of the benchmark's prompts; return deviations as `Benchmark.deviations` does."""
    if given.prompts is None or kind_of_path(given.prompts) != "file":
        return []  # named by the section
    with contextlib.suppress(ValueError):  # named by the section too
        if (num := len(read_prompts(given.prompts).prompts)) != SD.eval_samples:
            return [f"eval.prompts: {num:,} prompts; the reference: {SD.eval_samples:,}"]
    return []
