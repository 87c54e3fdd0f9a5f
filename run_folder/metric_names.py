"""The names of all metrics that loggers are sent, the same in W&B and TensorBoard: GROUP/NAME.

docs/metrics.md says what each means. What follows the slash is the metric's key in metrics.jsonl, if it has one.
Loggers are sent nothing else (training/loggers.py).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.masking import mask_secrets


@dataclass(frozen=True)
class Metric:
    """One metric, or several whose names differ in NAME, NNN or KEY."""

    metric: str
    key: str
    """Of metrics.jsonl; Composer's own name for what it logs itself; else where it comes from."""


BATCH = (
    Metric("progress/batch", "time/batch"),
    Metric("progress/images", "time/sample"),
    Metric("progress/epoch", "time/epoch"),
    Metric("train/batch_loss", "loss/train/total"),
)
WINDOW = (
    Metric("train/loss", "loss"),
    Metric("train/lr", "lr"),
    Metric("train/gradient_norm", "gradient_norm"),
    Metric("speed/images_per_sec", "images_per_sec"),
    Metric("speed/images_per_sec_wall", "images_per_sec_wall"),
    Metric("speed/data_wait_frac", "data_wait_frac"),
    Metric("time/train_sec", "train_sec"),
    Metric("time/data_wait_sec", "data_wait_sec"),
    Metric("time/eval_sec", "eval_sec"),
    Metric("time/other_sec", "other_sec"),
    Metric("time/start_sec", "start_sec"),
    Metric("memory/peak_mem_gib", "peak_mem_gib"),
    Metric("data/bad_samples", "bad_samples"),
    Metric("ranks/slowest", "slowest_rank"),
    Metric("ranks/slowest_sec", "slowest_rank_sec"),
    Metric("ranks/median_sec", "median_rank_sec"),
    Metric("progress/start", "start"),
)
STREAMS = (Metric("streams/NAME/loss", "streams"), Metric("streams/NAME/samples", "streams"))
EVALUATION = (
    Metric("eval/fid", "fid"),
    Metric("eval/clip", "clip"),
    Metric("eval/clip_x100", "clip_x100"),
    Metric("eval/cmmd", "cmmd"),
    Metric("eval/eval_sec", "eval_sec"),
)
VALIDATION = (Metric("val/loss", "val_loss"), Metric("val/loss_tNNN", "val_loss_bins"))
SCORE_NAMES = {"fid": "FID", "clip": "CLIP score", "cmmd": "CMMD", "val_loss": "validation loss"}
SAMPLES, VIDEOS = "samples/grid", "samples/videos"
REST = (Metric(SAMPLES, "samples/"), Metric(VIDEOS, "samples/"), Metric("result/KEY", "summary.json"))
METRICS = (*BATCH, *WINDOW, *STREAMS, *EVALUATION, *VALIDATION, *REST)
USER = "user/"
"""Begins the name of what a user's own callback logs."""
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
    """Return what loggers are sent of some figures: Composer's under our names, those of the table, and a user's own."""
    ours = {FROM_COMPOSER.get(key, key): value for key, value in metrics.items()}
    return {name: value for name, value in ours.items() if row_of(name) or name.startswith(USER)}


def named(metrics: Sequence[Metric], line: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a line of metrics.jsonl under their names; those that are null are left out."""
    return {row.metric: line[row.key] for row in metrics if isinstance(line.get(row.key), int | float)}


def format_scores(line: Mapping[str, Any]) -> list[str]:
    """Return each score of an evaluation or a validation with its name, e.g. FID 38.1059."""
    return [f"{name} {line[key]:.6g}" for key, name in SCORE_NAMES.items() if line.get(key) is not None]


def streams_named(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of each stream of a window, under names that TensorBoard takes."""
    streams = line.get("streams", {})
    names = [re.sub(r"[^\w.-]", "_", stream, flags=re.ASCII).strip(".") or "_" for stream in streams]
    metrics = {}
    for number, (name, figures) in enumerate(zip(names, streams.values(), strict=True)):
        label = name if names.count(name) == 1 else f"{number}-{name}"
        metrics |= {f"streams/{label}/{key}": value for key, value in figures.items() if value is not None}
    return metrics


def bins_named(losses: Sequence[float | None]) -> dict[str, float]:
    """Return the validation losses of the bins, by the first timestep of each."""
    width = 1000 // len(losses)
    return {f"val/loss_t{width * number:03d}": loss for number, loss in enumerate(losses) if loss is not None}


def alert(destinations: Sequence[Any], title: str, text: str) -> None:
    """Have each logger that can tell people at once do so. `title`: less than 64 characters. The text is on stderr too."""
    for destination in destinations:
        if tell := getattr(destination, "alert", None):
            tell(title, mask_secrets(text))
