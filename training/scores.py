"""Scores of what `composer eval.py` is given: rows of a table, each made once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist

from callbacks import mlperf_log
from callbacks.quality_target import outcome, said
from cli import ranks
from cli.log import log
from config import flat
from evaluation import unfinished
from evaluation.image_folder import image_batches, list_images
from evaluation.prompts import read_prompts
from evaluation.score_table import Table
from evaluation.scoring import FIGURES, Scorer
from evaluation.unfinished import Parts
from model import LatentDiffusion
from record.config_file import LATER, keep_keys, read_config
from record.files import run_id_of
from record.summary import result_line, rounded, write_outcome
from training import speed, warm_start
from training.eval_keys import DECIDING, EvalCommand, which
from training.places import Place
from training.run_config import build
from training.snapshots import digest_of, load_snapshot, match_prompts, snapshots_of
from weights.tensors import fingerprint
from zoo.sampling import shard

Row = dict[str, Any]


def score(config: EvalCommand, place: Place, table: Table, device: torch.device) -> list[Row]:
    """Score what is at a place and return its rows. All ranks call it."""
    of_kind = {"run": score_run, "images": score_images}.get(place.kind, score_published)
    return of_kind(config, place, table, device)


def score_run(config: EvalCommand, place: Place, table: Table, device: torch.device) -> list[Row]:
    """Score a run's snapshots and return their rows; where one meets the target, the run's summary says so."""
    model, scorer = _ready(config, place, table.path.parent, device)
    paths, guidances = snapshots_at(place), config.eval.guidances()
    name = name_of_run(place)

    def scored(path: Path) -> list[Row]:
        where = {**name, **load_snapshot(model, path, config.eval.weights)}
        return [_scored(table, where, scorer, model, guidance) for guidance in guidances]

    def first(path: Path) -> Row:
        return scored(path)[0]

    kind = "last" if place.snapshot else which(config)
    if kind != "to_target":
        rows = [row for path in (paths if kind == "all" else paths[-1:]) for row in scored(path)]
    else:
        begin = next((n for n, path in enumerate(paths) if _images(path) >= config.from_images), len(paths) - 1)
        rows = list(to_target([functools.partial(first, path) for path in paths], begin, config.target.is_met))
    if config.target.is_of_scores and len(guidances) == 1 and kind != "last":
        conclude(config, place.path, rows)
    return rows


def to_target(snapshots: Sequence[Callable[[], Row]], begin: int, is_met: Callable[[Row], bool]) -> Iterator[Row]:
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


def _images(path: Path) -> int:
    return int(path.name.split("-")[1][2:])


def conclude(config: EvalCommand, folder: Path, rows: Sequence[Row]) -> None:
    """Say which snapshot met the target first, and write that into the summary of a run that is decided afterwards.

    Not from a part of the prompts, nor where the table goes elsewhere, nor with other keys than the run's own: a trial.
    """
    in_order = sorted(rows, key=lambda row: row["images"])
    reached = next((row for row in in_order if config.target.is_met(row)), None)
    if dist.get_global_rank() == 0:
        result, own = outcome(in_order, reached), {"eval.precision": "fp32", **read_config(folder)}
        differing = sorted(key for key in DECIDING if key in own and own[key] != flat(config)[key])
        if differing:
            given = f"a trial: not as the run in {folder}: {', '.join(differing)}. Its summary.json stays as it is"
            log.info(f"target: {given}. To decide the run so, start it with these keys: composer benchmark.py")
        elif config.out is None and not any(row["partial"] for row in rows):
            if config.mlperf.enabled:
                mlperf_log.conclude(folder, in_order, reached, afterwards=own.get("eval.when") == "after")
            write_outcome(folder, result, over=None if own.get("eval.when") == "after" else "pending")
        if reached is not None:
            log.info(f"target: {said(reached)}.")
        print(result_line({key: rounded(value) for key, value in result.items()}), flush=True)


def snapshots_at(place: Place) -> list[Path]:
    """Return a run's snapshots, the oldest first, or the one that was given. Raises ConfigError: there is none."""
    return [place.snapshot] if place.snapshot else ranks.on_rank_zero(lambda: snapshots_of(place.path))


def name_of_run(place: Place) -> Row:
    """Return what a run is called, and what tells it from another run of the same name."""
    return {"model": place.name, "model_id": ranks.on_rank_zero(lambda: run_id_of(place.path))}


def score_published(config: EvalCommand, place: Place, table: Table, device: torch.device) -> list[Row]:
    """Score others' weights."""
    model, scorer = _ready(config, place, table.path.parent, device)
    where = name_of_published(config, place, model)
    return [_scored(table, where, scorer, model, guidance) for guidance in config.eval.guidances()]


def name_of_published(config: EvalCommand, place: Place, model: LatentDiffusion) -> Row:
    """Return what others' weights are called, which of them are taken, and their fingerprints."""
    digests, which = fingerprints(model), "published"
    if place.kind == "file" and warm_start.has_average(place.path):
        which = config.eval.weights or "training"
    return {"model": place.name, "model_id": digests["denoiser_fingerprint"][:8], "weights": which, **digests}


def fingerprints(model: LatentDiffusion) -> Row:
    """Return the fingerprints of all networks that an image depends on."""
    encoders = {f"{name}_fingerprint": digest for name, digest in model.encoders.fingerprints.items()}
    return {"denoiser_fingerprint": fingerprint(model.denoiser), **encoders}


def score_images(config: EvalCommand, place: Place, table: Table, device: torch.device) -> list[Row]:
    """Score a folder of images; their captions are those of the prompts that their names give."""
    paths = ranks.on_rank_zero(lambda: list_images(place.path))
    facts: Row = {"partial": False}
    of: dict[Path, tuple[Any, str]] = {path: (path.name, "") for path in paths}
    if config.eval.prompts is not None:
        prompt_set = read_prompts(config.eval.prompts, config.eval.num_prompts)
        matched = zip(paths, match_prompts(paths, prompt_set), strict=True)
        of = {path: (prompt.number, prompt.caption) for path, prompt in matched}
        facts = {"partial": prompt_set.partial, "prompts_sha256": prompt_set.sha256}
    meter = config.eval.meter()
    meter.say_what_is_short(len(paths))
    mine = [paths[place] for place in shard(len(paths), dist.get_global_rank(), dist.get_world_size())]

    def score() -> Row:
        with meter.on(device):
            for names, images in image_batches(mine, config.eval.batch_size or 16):
                meter.add(images.to(device).float() / 255.0, *zip(*[of[name] for name in names], strict=True))
            return meter.figures()

    what = {"model": place.name, "images_in_folder": len(paths), "images_fingerprint": digest_of(paths)}
    return [table.get({**what, **facts, **meter.facts}, score)]


def _scored(table: Table, where: Row, scorer: Scorer, model: LatentDiffusion, guidance: float) -> Row:
    """Return the row of a model at a guidance. Raises ranks.Signalled: it was stopped, and what is scored is kept."""

    def figures() -> Row:
        return {key: value for key, value in scorer.score(model, guidance).items() if key in FIGURES}

    with ranks.stopping_together() as scorer.signal:
        row = table.get({**where, **scorer.settings(guidance)}, figures)
        scorer.written()
        return row


def build_at(config: EvalCommand, place: Place, device: torch.device) -> LatentDiffusion:
    """Build a place's model on the device; a run's still has its initial weights."""
    model = build(config)
    if config.lora.is_given:
        warm_start.add_adapter(config, model)
    if place.kind != "run":
        warm_start.load(model, str(config.model.denoiser), config.eval.weights or "training")
    model.place(device, config.precision or "fp32")
    speed.apply(model, config, config.precision)
    return model


def _ready(config: EvalCommand, place: Place, folder: Path, device: torch.device) -> tuple[LatentDiffusion, Scorer]:
    """Build the model and what scores it, the batch size found: a run keeps it in later.yaml; `folder`: of the table."""
    model = build_at(config, place, device)
    is_own = place.kind == "run" and config.eval.image_size is None and config.out is None
    scorer = Scorer(
        config.eval,
        size=config.size,
        seed=config.seed,
        settings={"precision": config.precision, **config.objective.of_scores()},
        show_progress=config.loggers.progress_bar,
        found=(lambda batch_size: keep(place.path, batch_size)) if is_own else lambda batch_size: None,
        parts=Parts(folder / unfinished.NAME, is_alone=False),
    )
    scorer.find_batch_size(model)  # it is one of the settings by which rows are known
    return model, scorer


def keep(run: Path, batch_size: int) -> None:
    """Keep the batch size that was found in a run's folder, or say that it cannot be kept."""
    try:
        keep_keys(run, {"eval.batch_size": batch_size})
    except OSError as error:
        given = f"eval.batch_size: {batch_size} was found, but {run / LATER} cannot be written: {error.strerror}"
        log.info(f"{given}. Another machine may find another one: give it with eval.batch_size.")
