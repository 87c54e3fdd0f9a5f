"""summary.json, and the result line that shows the same figures with six digits."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from cli.files import write_json
from record.files import METRICS, STARTS, read_summary
from record.history import read_history

RESULT_KEYS = (
    "images_per_sec",
    "images_per_sec_min",
    "images_per_sec_max",
    "images_per_sec_per_device",
    "images_per_sec_wall",
    "mfu",
    "data_wait_frac",
    "peak_mem_gib",
    "batches",
    "warmup_batches",
    "windows",
    "seconds",
    "loss",
)
VAL_LOSS = "val_loss"
"""Further key of a run with validation: the last one's loss."""
WINDOWS = "images_per_sec_windows"
"""Further key of a rung's record (bench/ladder.py): the speed of each window that counts, in order."""
COST_KEYS = ("device_hours", "cost")
"""Further keys of a run with a price."""


def spent(folder: Path, per_device_hour: float | None, lost: Collection[str] = ()) -> dict[str, Any]:
    """Return COST_KEYS of a run so far: hours on the clocks of all its starts, times the devices of each, and their price.

    Args:
        per_device_hour: price of a device for an hour; None: there is no cost.
        lost: files of the record with missing parts; without the starts or the metrics the hours are None.
    """
    hours = None if {STARTS, METRICS} & {*lost} else read_history(folder).device_hours
    price = {} if per_device_hour is None else {"cost": None if hours is None else hours * per_device_hour}
    return {key: rounded(value) for key, value in {"device_hours": hours, **price}.items()}


def write_outcome(folder: Path, outcome: Mapping[str, Any], *, over: str | None = None) -> None:
    """Write what a finished run came to, after all, into its summary.json.

    Args:
        over: only where its `target` is this.
    """
    summary = read_summary(folder)
    if summary and over in (None, summary.get("target")):
        write_json(folder / "summary.json", {**summary, **outcome})


def result_line(result: Mapping[str, Any]) -> str:
    """Format the last line that benchmark.py prints: key=value, `none` for a figure that there is not."""
    return " ".join(f"{key}={'none' if value is None else value}" for key, value in result.items())


def finite(value: Any) -> Any:
    """JSON has no infinity: fp16's skipped first steps have an infinite gradient norm, which is written as null."""
    if isinstance(value, list):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rounded(value: Any) -> Any:
    """Return a figure as the result line shows it, with six digits."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
