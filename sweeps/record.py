"""All that a sweep has found, as one file: record.json, from which reports/study.py makes its table and picture anywhere."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cli.files import write_json
from record.environment import environment
from record.history import History, read_history
from record.summary import rounded
from reports.study import SCHEMA
from sweeps.file import Sweep
from sweeps.state import OK
from sweeps.table import FIGURES, Row

RECORD = "record.json"
MOST_POINTS = 200
"""Of a run's loss curve; several windows make a point where it has more."""


def record_of(sweep: Sweep, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the record of a sweep: its axes, and each run's values, figures and curves."""
    varying = [key for key in sweep.axes if key in sweep.of_points]
    return {
        "schema": SCHEMA,
        "measured": "sweep",
        "sweep": sweep.name,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **environment(),
        "yaml": sweep.own.yaml,
        "keys": [*sweep.keys, *sweep.typed],
        "axes": list(sweep.axes),
        "of_points": varying,
        "runs": [_run(row, list(sweep.axes), sweep.folder) for row in rows],
    }


def _run(row: Row, keys: Sequence[str], folder: Path) -> dict[str, Any]:
    found = {
        "run": row["run"],
        "status": row["status"],
        "values": {key: row[key] for key in keys if key in row},
        **{key: row[key] for key in (*FIGURES, "message", "identity", "commit") if row.get(key) not in (None, "")},
    }
    empty = {"curve": {"images": [], "loss": []}, "validations": {"images": [], "val_loss": []}}
    return {**found, **(curves_of(read_history(folder / row["run"])) if row["status"] == OK else empty)}


def curves_of(history: History) -> dict[str, dict[str, list[float]]]:
    """Return a run's loss over the images seen, thinned, and that of its validations; what is not finite is left out."""
    images, losses = history.windows["images"], history.windows["loss"]
    there = np.isfinite(images) & np.isfinite(losses) & ~(history.windows["unfinished"] == 1.0)
    images, losses = images[there], losses[there]
    pieces = np.array_split(np.arange(len(losses)), min(len(losses), MOST_POINTS)) if len(losses) else []
    lines = [line for line in history.validations if np.isfinite(line.get("val_loss") or np.nan)]
    return {
        "curve": {
            "images": [int(images[piece[-1]]) for piece in pieces],
            "loss": [rounded(float(losses[piece].mean())) for piece in pieces],
        },
        "validations": {
            "images": [line["images"] for line in lines],
            "val_loss": [rounded(line["val_loss"]) for line in lines],
        },
    }


def write_record(sweep: Sweep, record: dict[str, Any]) -> Path:
    """Write record.json whole, and return it."""
    path = sweep.folder / RECORD
    write_json(path, record)
    return path
