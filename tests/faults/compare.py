"""A finished run beside the unbroken one: weights to the bit, scores, the record's lines and the MLPerf log."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.files import FULL, WEIGHTS, list_checkpoints, read_checkpoint
from run_folder.files import EVAL_PARTS
from run_folder.mlperf_log import read_events

TRAINED = ("model", "ema", "optimizer", "schedule", "scaler")
RESULT = ("target", "images_to_target", "fid", "clip", "batches", "loss")
WINDOW = ("images", "loss", "lr", "gradient_norm")
SCORE = ("images", "fid", "clip", "num_images", "eval_weights")
MAY_DIFFER = {"tracked_stats", "block_start", "block_stop", "restart"}
"""Events that a resume may add, or whose value is a speed."""


def bits_apart(one: Any, two: Any) -> int:
    """Count the bits in which two nested contents differ; what only one of them has counts in full, a plain value as 64."""
    if isinstance(one, Tensor) and isinstance(two, Tensor) and (one.shape, one.dtype) == (two.shape, two.dtype):
        either = one.contiguous().flatten().view(torch.uint8) ^ two.contiguous().flatten().view(torch.uint8)
        return sum(int(((either >> bit) & 1).sum()) for bit in range(8)) if either.numel() else 0
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return sum(bits_apart(one.get(key), two.get(key)) for key in one.keys() | two.keys())
    if isinstance(one, list | tuple) and isinstance(two, list | tuple) and len(one) == len(two):
        return sum(bits_apart(*pair) for pair in zip(one, two, strict=True))
    is_same = not isinstance(one, Tensor | Mapping) and not isinstance(two, Tensor | Mapping) and one == two
    return 0 if is_same else max(_num_bits(one), _num_bits(two))


def _num_bits(content: Any) -> int:
    if isinstance(content, Tensor):
        return 8 * content.nbytes
    if isinstance(content, Mapping | list | tuple):
        return sum(map(_num_bits, content.values() if isinstance(content, Mapping) else content))
    return 0 if content is None else 64


def bits_lost(run: Path, whole: Path) -> int:
    """Count the bits in which a run's last checkpoint and its snapshots differ from those of the unbroken run."""
    lost = 0
    for kind in (FULL, WEIGHTS):
        of_each = (list_checkpoints(of / "checkpoints", kind) for of in (run, whole))
        own, theirs = ({path.name.rpartition("-")[0]: path for path in paths} for paths in of_each)
        wanted = sorted(theirs)[-1:] if kind == FULL else sorted(theirs)
        for name in wanted:
            there = read_checkpoint(theirs[name])
            here = read_checkpoint(own[name]) if name in own else {}
            lost += bits_apart(*({key: each.get(key) for key in TRAINED if key in there} for each in (here, there)))
    return lost


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl; one that is not whole raises ValueError."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def record_problems(run: Path, whole: Path) -> Iterator[str]:
    """Say where metrics.jsonl is not the unbroken run's: a step twice, a step missing, another figure."""
    own, theirs = lines_of(run), lines_of(whole)
    for kind, keys in (("evaluation", SCORE), ("window", WINDOW)):
        is_score = kind == "evaluation"
        of_kind = [[line for line in lines if bool(line.get("evaluation")) == is_score] for lines in (own, theirs)]
        at = [[line["batch"] for line in lines] for lines in of_kind]
        if at[0] != at[1]:
            yield f"metrics.jsonl: {kind}s at batches {at[0]}, not {at[1]}"
            continue
        for line, other in zip(*of_kind, strict=True):
            if differing := [key for key in keys if line[key] != other[key]]:
                yield f"metrics.jsonl: the {kind} at batch {line['batch']} has another {', '.join(differing)}"
    clocks = [line["seconds"] for line in own if line.get("evaluation")]
    if any(later < sooner for sooner, later in zip([0.0, *clocks], clocks, strict=False)):
        yield f"metrics.jsonl: the clock of training goes back: {clocks}"


def log_problems(run: Path, whole: Path) -> Iterator[str]:
    """Say where mlperf.log is not that of one run: a start or an end too many, a gap, another score."""
    own, theirs = (read_events(of / "mlperf.log") for of in (run, whole))
    for key in ("init_start", "init_stop", "run_start", "run_stop"):
        if (found := sum(event["key"] == key for event in own)) != 1:
            yield f"mlperf.log: {found} {key}"
    times = [event["time_ms"] for event in own]
    if times != sorted(times):
        yield "mlperf.log: its times go back"
    yield from _gaps(own)
    values = [dict(_lasting(events)) for events in (own, theirs)]
    if differing := [key for key in values[0].keys() | values[1].keys() if values[0].get(key) != values[1].get(key)]:
        yield f"mlperf.log: otherwise than the unbroken run's: {sorted(map(str, differing))[:3]}"
    scored = [event["metadata"]["samples_count"] for event in own if event["key"] == "eval_stop"]
    if scored != sorted(set(scored)):
        yield f"mlperf.log: evaluations at {scored}"


def _lasting(events: list[dict[str, Any]]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (key, images, metric) -> value of what a log says of the training; a later word of the same images counts."""
    for event in events:
        metadata = event["metadata"]
        if event["key"] not in MAY_DIFFER:
            is_own_time = event["key"] in ("loss", "lr_abs") or event["key"].startswith(("eval", "run_"))
            at = metadata.get("samples_count") if is_own_time else None
            yield (event["key"], at, metadata.get("metric")), (event["value"], metadata.get("status"))


def _gaps(events: list[dict[str, Any]]) -> Iterator[str]:
    """Say where images are missing: a block begins at the last one's end, or after a restart where that says."""
    at, begun = 0, None
    for event in events:
        images = event["metadata"].get("samples_count")
        if event["key"] == "restart":
            furthest = max(at, begun or 0)
            if images > furthest and begun is None:
                yield f"mlperf.log: a restart at {images} images, but blocks up to {at}"
            at, begun = images, None
        elif event["key"] == "block_start":
            if images != at:
                yield f"mlperf.log: a block begins at {images} images, the last one ended at {at}"
            begun = images
        elif event["key"] == "block_stop":
            at, begun = images, None
        elif event["key"] == "run_stop" and images != at:
            yield f"mlperf.log: it ends at {images} images, its blocks at {at}"


def left_over(run: Path) -> Iterator[str]:
    """Name what a finished run should not have kept."""
    for path in (run / "checkpoints").iterdir():
        if path.name.endswith((".tmp", ".damaged")):
            yield f"left in checkpoints/: {path.name}"
    if any((run / EVAL_PARTS).glob("*")):
        yield f"left: {EVAL_PARTS}/ of a finished evaluation"
    if not (run / "summary.json").is_file():
        yield "no summary.json"


def problems(run: Path, whole: Path) -> list[str]:
    """Return everything in which a finished run is not the unbroken one, its weights apart."""
    return [*record_problems(run, whole), *log_problems(run, whole), *left_over(run)]


def result_problems(own: str, whole: str) -> list[str]:
    """Compare two result lines, apart from their times."""
    both = [dict(word.partition("=")[::2] for word in line.split()) for line in (own, whole)]
    pairs = {key: [of.get(key) for of in both] for key in RESULT}
    return [f"result: {key}={ours}, not {theirs}" for key, (ours, theirs) in pairs.items() if ours != theirs]
