"""Scores of what `composer eval.py` is given: rows of a table, each made once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from callbacks import mlperf_log
from callbacks.quality_target import format_metrics, target_outcome
from checkpointing.files import number_of
from common import dist
from common.log import log
from common.value_types import ImageSize, limited, prose
from evaluation.image_folder import image_batches, list_images
from evaluation.metrics import Parts
from evaluation.prompts import read_prompts
from evaluation.scorer import FIGURES, EvalConfig, Scorer, TargetConfig
from evaluation.sources import (
    EvalSource,
    describe_published,
    describe_run,
    digest_files,
    load_snapshot,
    match_prompts,
    snapshots_of,
)
from evaluation.table import Row, ScoreTable
from families.sampling import split_by_rank
from model import LatentDiffusion
from ranks import collectives
from run_folder.files import EVAL_PARTS, OVERRIDES, keep_keys, read_config
from run_folder.history import result_line, rounded, write_outcome

# --- the keys ---


@dataclass(frozen=True)
class EvalKeys:
    """The keys of eval.py besides a run's."""

    snapshots: Literal["all", "to_target", "last"] | None = None
    """all; last; to_target: up to the first that meets the target. null: last for images or several guidances, to_target
    with a target, else all."""
    from_images: int = limited(0, 0)
    """Images seen where to_target begins: a hint that saves scoring early snapshots."""
    out: str | None = None
    """Folder of eval.jsonl, eval.csv and the plots. null: the run's own."""
    images: str | None = None
    """Folder for images of `prompts`. Nothing is scored then. null: scores."""
    prompts: str | None = prose(None, "[CAPTION, ...], a file")
    """Captions, in quotes where one has a comma; or a file as samples.prompts. A caption's place is its id."""
    images_per_prompt: int = limited(1, 1, 1000)
    """Images of each caption, with the seeds `seed`, `seed` + 1 and so on."""

    def chosen_snapshots(self, evaluation: EvalConfig, target: TargetConfig) -> str:
        """Return which snapshots of a run are scored, or used for images."""
        is_last = self.images is not None or len(evaluation.guidances()) > 1
        return self.snapshots or ("last" if is_last else "to_target" if target.is_of_scores else "all")

    def snapshot_problems(self, evaluation: EvalConfig, target: TargetConfig) -> list[tuple[str, str]]:
        """(key, message) where snapshots cannot be chosen so."""
        choice, is_curve = self.chosen_snapshots(evaluation, target), len(evaluation.guidances()) > 1
        if self.images is not None:
            text = "to_target, but nothing is scored where images are drawn. Say last or all, or give a snapshot's file"
            return [("snapshots", f"{text}.")] if choice == "to_target" else []
        if choice == "to_target" and (is_curve or not target.is_of_scores):
            return [("snapshots", "to_target needs a target.fid or target.clip, and one guidance. Give them, or all.")]
        if choice != "to_target" and self.from_images:
            text = f"{self.from_images:,}, but {choice} snapshots are scored. It is where snapshots=to_target begins"
            return [("from_images", f"{text}. Leave it out.")]
        return []


DECIDING_KEYS = {
    *("eval.statistics", "eval.inception", "eval.resize", "eval.precision", "eval.clip", "eval.prompts"),
    *("eval.num_prompts", "eval.guidance", "eval.steps", "eval.sampler", "eval.image_size", "eval.weights"),
    *("model.family", "model.preset", "model.variant", "objective.prediction", "image_size", "precision", "seed"),
    *("target.fid", "target.clip"),
}
"""What a target is met with: given in another way than in a run's files, its scores are a trial."""


@dataclass(frozen=True)
class ScoreRequest:
    """How one source is scored; eval.py makes it from the configuration.

    snapshots: of a run: all, to_target, last; size: of images where eval.image_size is null, px; seed: of the noise;
    model_settings: what a score depends on besides weights (precision, prediction); keys: key -> value of the whole
    configuration; build_model: builds the source's model on the device, a run's with its initial weights.
    """

    source: EvalSource
    device: torch.device
    build_model: Callable[[], LatentDiffusion]
    evaluation: EvalConfig
    target: TargetConfig
    snapshots: str
    from_images: int
    size: ImageSize
    seed: int
    model_settings: Mapping[str, Any]
    keys: Mapping[str, Any]
    has_own_table: bool
    """The table is in the run's folder: these are its scores, not a trial."""
    has_mlperf_log: bool
    show_progress: bool


# --- by the kind of source ---


def score(request: ScoreRequest, table: ScoreTable) -> list[Row]:
    """Score a source and return its rows. All ranks call it."""
    by_kind = {"run": score_run, "images": score_images}.get(request.source.kind, score_published)
    return by_kind(request, table)


def score_run(request: ScoreRequest, table: ScoreTable) -> list[Row]:
    """Score a run's snapshots and return their rows; where one meets the target, it is recorded in the run's summary."""
    model, scorer = _build(request, table.path.parent)
    paths, guidances = snapshots_of(request.source), request.evaluation.guidances()
    run = describe_run(request.source)

    def score_snapshot(path: Path) -> list[Row]:
        loaded = {**run, **load_snapshot(model, path, request.evaluation.weights)}
        return [_row_of(table, loaded, scorer, model, guidance) for guidance in guidances]

    def score_once(path: Path) -> Row:
        return score_snapshot(path)[0]

    choice = "last" if request.source.snapshot else request.snapshots
    if choice != "to_target":
        rows = [row for path in (paths if choice == "all" else paths[-1:]) for row in score_snapshot(path)]
    else:
        begin = next((n for n, path in enumerate(paths) if number_of(path) >= request.from_images), len(paths) - 1)
        scores = [functools.partial(score_once, path) for path in paths]
        rows = list(score_to_target(scores, begin, request.target.is_met))
    if request.target.is_of_scores and len(guidances) == 1 and choice != "last":
        record_target_outcome(
            request.source.path,
            rows,
            request.target,
            request.keys,
            has_own_table=request.has_own_table,
            has_mlperf_log=request.has_mlperf_log,
        )
    return rows


def score_to_target(snapshots: Sequence[Callable[[], Row]], begin: int, is_met: Callable[[Row], bool]) -> Iterator[Row]:
    """Score in order from `begin` to the first that meets the target; if `begin` itself does, backwards to one that does not.

    The rules ask for the first that passes and the one before it.
    """
    at, met = begin, False
    while at < len(snapshots) and not met:
        yield (row := snapshots[at]())
        met, at = is_met(row), at + 1
    if met and at - 1 == begin:
        for before in range(begin - 1, -1, -1):
            yield (row := snapshots[before]())
            if not is_met(row):
                return


def record_target_outcome(
    run: Path,
    rows: Sequence[Row],
    target: TargetConfig,
    keys: Mapping[str, Any],
    *,
    has_own_table: bool,
    has_mlperf_log: bool,
) -> None:
    """Log which snapshot met the target first, and write that into the summary of a run that is decided afterwards.

    Not from a part of the prompts, nor where the table goes elsewhere, nor with other keys than the run's own: a trial.
    """
    in_order = sorted(rows, key=lambda row: row["images"])
    reached = next((row for row in in_order if target.is_met(row)), None)
    if dist.get_global_rank() == 0:
        result, of_run = target_outcome(in_order, reached), {"eval.precision": "fp32", **read_config(run)}
        differing = sorted(key for key in DECIDING_KEYS if key in of_run and of_run[key] != keys[key])
        if differing:
            text = f"a trial: not as the run in {run}: {', '.join(differing)}. Its summary.json stays as it is"
            log.info(f"target: {text}. To decide the run so, start it with these keys: composer benchmark.py")
        elif has_own_table and not any(row["partial"] for row in rows):
            is_after = of_run.get("eval.when") == "after"
            if has_mlperf_log:
                mlperf_log.conclude(run, in_order, reached, afterwards=is_after)
            write_outcome(run, result, over=None if is_after else "pending")
        if reached is not None:
            log.info(f"target: {format_metrics(reached)}.")
        print(result_line({key: rounded(value) for key, value in result.items()}), flush=True)


def score_published(request: ScoreRequest, table: ScoreTable) -> list[Row]:
    """Score published weights."""
    model, scorer = _build(request, table.path.parent)
    loaded = describe_published(request.source, model, request.evaluation.weights)
    return [_row_of(table, loaded, scorer, model, guidance) for guidance in request.evaluation.guidances()]


def score_images(request: ScoreRequest, table: ScoreTable) -> list[Row]:
    """Score a folder of images; their captions are those of the prompts that their names give."""
    evaluation = request.evaluation
    paths = collectives.on_rank_zero(lambda: list_images(request.source.path))
    settings: Row = {"partial": False}
    labels: dict[Path, tuple[Any, str]] = {path: (path.name, "") for path in paths}
    if evaluation.prompts is not None:
        prompt_set = read_prompts(evaluation.prompts, evaluation.num_prompts)
        matched = zip(paths, match_prompts(paths, prompt_set), strict=True)
        labels = {path: (prompt.number, prompt.caption) for path, prompt in matched}
        settings = {"partial": prompt_set.partial, "prompts_sha256": prompt_set.sha256}
    meter = evaluation.meter()
    meter.log_warnings(len(paths))
    mine = [paths[index] for index in split_by_rank(len(paths), dist.get_global_rank(), dist.get_world_size())]

    def measure() -> Row:
        with meter.on(request.device):
            for names, images in image_batches(mine, evaluation.batch_size or 16):
                numbers, captions = zip(*[labels[name] for name in names], strict=True)
                meter.add(images.to(request.device).float() / 255.0, numbers, captions)
            return meter.figures()

    folder = {
        "model": request.source.name,
        "images_in_folder": len(paths),
        "images_fingerprint": digest_files(paths),
    }
    return [table.get({**folder, **settings, **meter.facts}, measure)]


def _row_of(table: ScoreTable, loaded: Row, scorer: Scorer, model: LatentDiffusion, guidance: float) -> Row:
    """Return the row of a model at a guidance. Raises collectives.Signalled: it was stopped, and what is scored is saved."""

    def measure() -> Row:
        return {key: value for key, value in scorer.score(model, guidance).items() if key in FIGURES}

    with collectives.stop_together() as scorer.signal:
        row = table.get({**loaded, **scorer.settings(guidance)}, measure)
        scorer.remove_parts()
        return row


def _build(request: ScoreRequest, table_folder: Path) -> tuple[LatentDiffusion, Scorer]:
    """Build the model and its scorer, and find the batch size: a run saves it in overrides.yaml."""
    model, source, evaluation = request.build_model(), request.source, request.evaluation
    is_as_run = source.kind == "run" and evaluation.image_size is None and request.has_own_table
    scorer = Scorer(
        evaluation,
        size=request.size,
        seed=request.seed,
        settings=request.model_settings,
        show_progress=request.show_progress,
        on_batch_size=functools.partial(save_batch_size, source.path) if is_as_run else None,
        parts=Parts(table_folder / EVAL_PARTS, is_alone=False),
    )
    scorer.find_batch_size(model)  # it is one of the settings by which rows are known
    return model, scorer


def save_batch_size(run: Path, batch_size: int) -> None:
    """Save the batch size that was found in a run's folder, or log that it cannot be saved."""
    try:
        keep_keys(run, {"eval.batch_size": batch_size})
    except OSError as error:
        text = f"eval.batch_size: {batch_size} was found, but {run / OVERRIDES} cannot be written: {error.strerror}"
        log.info(f"{text}. Another machine may find another one: give it with eval.batch_size.")
