"""The names of all figures that loggers are sent, the same in W&B, TensorBoard and MLflow: GROUP/NAME.

docs/metrics.md has them as a table, `make report` writes it. What follows the slash is the figure's key in metrics.jsonl,
wherever it has one. Loggers are sent nothing else (training/loggers.py).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cli.masking import masked


@dataclass(frozen=True)
class Metric:
    """One figure, or several whose names differ in NAME, NNN or KEY."""

    metric: str
    unit: str
    meaning: str
    when: str
    key: str
    """Of metrics.jsonl; Composer's own name for what it logs itself; else where it comes from."""


def _each(when: str, rows: Sequence[tuple[str, str, str, str]]) -> tuple[Metric, ...]:
    return tuple(Metric(name, unit, meaning, when, key) for name, unit, meaning, key in rows)


BATCH = _each(
    "batch",
    [
        ("progress/batch", "batches", "batches trained so far", "time/batch"),
        ("progress/images", "images", "images seen so far, by all ranks", "time/sample"),
        ("progress/epoch", "epochs", "whole epochs so far", "time/epoch"),
        ("train/batch_loss", "-", "loss of one batch, mean over all ranks; later with async_loss", "loss/train/total"),
    ],
)
WINDOW = _each(
    "window",
    [
        ("train/loss", "-", "mean loss of the window's batches, over all ranks", "loss"),
        ("train/lr", "-", "learning rate of the window's last batch", "lr"),
        ("train/gradient_norm", "-", "mean norm of all gradients, before clipping", "gradient_norm"),
        ("speed/images_per_sec", "images/s", "images over the training clock, all ranks", "images_per_sec"),
        ("speed/images_per_sec_wall", "images/s", "images over all four clocks, all ranks", "images_per_sec_wall"),
        ("speed/data_wait_frac", "0 to 1", "waiting for data, over waiting and training", "data_wait_frac"),
        ("time/train_sec", "s", "the window's training clock", "train_sec"),
        ("time/data_wait_sec", "s", "the window's wait for data", "data_wait_sec"),
        ("time/eval_sec", "s", "the window's evaluation, validation and sample grids", "eval_sec"),
        ("time/other_sec", "s", "the rest of the window: checkpoints, logging", "other_sec"),
        ("time/start_sec", "s", "all clocks of this start so far", "start_sec"),
        ("memory/peak_mem_gib", "GiB", "peak on the fullest GPU; resident on a CPU", "peak_mem_gib"),
        ("data/bad_samples", "samples", "unusable samples so far, of all ranks", "bad_samples"),
        ("ranks/slowest", "rank", "which rank took longest over its own work; with several ranks", "slowest_rank"),
        ("ranks/slowest_sec", "s", "what it took: forward passes, and until its data was here", "slowest_rank_sec"),
        ("ranks/median_sec", "s", "the same of the median rank", "median_rank_sec"),
        ("progress/start", "starts", "which start of the run this is, from 1: a step is a resume", "start"),
    ],
)
STREAMS = _each(
    "window",
    [
        ("streams/NAME/loss", "-", "mean loss of one of several streams", "streams"),
        ("streams/NAME/samples", "samples", "its samples in the window", "streams"),
    ],
)
EVALUATION = _each(
    "evaluation",
    [
        ("eval/fid", "-", "FID, lower is better", "fid"),
        ("eval/clip", "-", "CLIP score, higher is better", "clip"),
        ("eval/clip_x100", "-", "the same, times 100", "clip_x100"),
        ("eval/eval_sec", "s", "how long the evaluation took", "eval_sec"),
    ],
)
VALIDATION = _each(
    "validation",
    [
        ("val/loss", "-", "loss on the held-out stage", "val_loss"),
        ("val/loss_tNNN", "-", "the same, of the timesteps from NNN on: a tenth of them each", "val_loss_bins"),
    ],
)
SAMPLES, FILM = "samples/grid", "samples/film"
REST = (
    Metric(SAMPLES, "picture", "samples of fixed prompts, with their captions", "grid", "samples/"),
    Metric(FILM, "film", "samples of a family of videos, in motion", "grid", "samples/"),
    Metric("result/KEY", "as there", "each key of the result line", "end", "summary.json"),
)
METRICS = (*BATCH, *WINDOW, *STREAMS, *EVALUATION, *VALIDATION, *REST)
FROM_COMPOSER = {row.key: row.metric for row in BATCH}
IMAGES = FROM_COMPOSER["time/sample"]

_PLACES = {"NAME": r".+", "NNN": r"\d{3}", "KEY": r"\w+"}
_PATTERNS = {
    row.metric: re.compile(
        "".join(_PLACES.get(part, re.escape(part)) for part in re.split("(NAME|NNN|KEY)", row.metric))
    )
    for row in METRICS
}


@functools.cache
def row_of(name: str) -> str | None:
    """Return the metric of the table that a logged name is one of, or None."""
    return next((metric for metric, pattern in _PATTERNS.items() if pattern.fullmatch(name)), None)


def as_sent(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return what loggers are sent of some figures: Composer's under our names, and none that the table does not have."""
    ours = {FROM_COMPOSER.get(key, key): value for key, value in metrics.items()}
    return {name: value for name, value in ours.items() if row_of(name)}


def named(metrics: Sequence[Metric], line: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a line of metrics.jsonl under their names; those that are null are left out."""
    return {row.metric: line[row.key] for row in metrics if isinstance(line.get(row.key), int | float)}


def streams_named(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of each stream of a window, under names that TensorBoard and MLflow take."""
    streams = line.get("streams", {})
    names = [re.sub(r"[^\w.-]", "_", stream, flags=re.ASCII).strip(".") or "_" for stream in streams]
    found = {}
    for number, (name, figures) in enumerate(zip(names, streams.values(), strict=True)):
        place = name if names.count(name) == 1 else f"{number}-{name}"
        found |= {f"streams/{place}/{key}": value for key, value in figures.items() if value is not None}
    return found


def bins_named(losses: Sequence[float | None]) -> dict[str, float]:
    """Return the validation losses of the bins, by the first timestep of each."""
    width = 1000 // len(losses)
    return {f"val/loss_t{width * number:03d}": loss for number, loss in enumerate(losses) if loss is not None}


def alert(destinations: Sequence[Any], title: str, text: str) -> None:
    """Have each logger that can tell people at once do so. `title`: less than 64 characters. The text is on stderr too."""
    for destination in destinations:
        if tell := getattr(destination, "alert", None):
            tell(title, masked(text))
