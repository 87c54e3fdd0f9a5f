"""The table of a sweep: a row a point, in the file's order, for the terminal and as summary.csv."""

from __future__ import annotations

import csv
import datetime
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.files import write_atomic, write_json
from common.log import log, readable_time, render_table
from config import pluralize
from reports.study import SCHEMA
from run_folder.environment import environment
from run_folder.files import read_summary
from run_folder.history import TARGET_METRICS, VAL_LOSS, History, read_history, rounded
from sweeps.plan import Point, Sweep, as_text
from sweeps.running import OK, SweepState

CSV = "summary.csv"
SPEED = "images_per_sec_per_device"
FIGURES = (
    SPEED,
    f"{SPEED}_min",
    f"{SPEED}_max",
    "windows",
    "step_ms",
    "mfu",
    "peak_mem_gib",
    "loss",
    "loss_tail",
    "loss_tail_std",
    VAL_LOSS,
    *TARGET_METRICS,
    "target",
    "images_to_target",
    "seconds_to_target",
    "seconds",
)
"""Columns after those of the keys, the run and its status: figures of a run that is ok."""
LAST = ("message", "identity", "commit")
PRINTED = (SPEED, f"{SPEED}_min", f"{SPEED}_max", "mfu", "peak_mem_gib", "loss", VAL_LOSS, *TARGET_METRICS)
TAIL = 4  # the last quarter of the windows
FORMULA = ("=", "+", "-", "@", "\t", "\r")

RECORD = "record.json"
MOST_POINTS = 200
"""Of a run's loss curve; several windows make a point where it has more."""

Row = dict[str, Any]


def rows_of(points: Sequence[Point], state: SweepState) -> list[Row]:
    """Return the row of each point: figures of those that are ok, and why the others have none."""
    rows = []
    for point in points:
        status, message = state.status_of(point)
        code = state.line_of(point).get("commit")
        row: Row = {"run": point.name, "status": status, "message": message, "identity": point.identity, "commit": code}
        row |= point.values
        if status == OK:
            row |= _figures(state.folder / point.name, row)
        rows.append(row)
    return rows


def _figures(folder: Path, row: Row) -> Row:
    """Return a finished run's figures, and what cannot be read."""
    try:
        summary, history = read_summary(folder), read_history(folder)
    except ValueError as error:
        return {"message": " ".join(str(error).split())}
    devices, speed = summary.get("num_devices") or 1, summary.get("images_per_sec")
    figures = {key: summary.get(key) for key in (*FIGURES, "commit")}
    for end in ("min", "max"):
        extreme = summary.get(f"images_per_sec_{end}")
        figures[f"{SPEED}_{end}"] = None if extreme is None else rounded(extreme / devices)
    batch = summary.get("global_batch_size")
    figures["step_ms"] = rounded(1000.0 * batch / speed) if batch and speed else None
    lines = [*history.evaluations, *history.scores]
    for key in TARGET_METRICS:  # a run without a target has them in its evaluations alone
        scores = [line[key] for line in lines if line.get(key) is not None]
        figures[key] = rounded(scores[-1]) if figures[key] is None and scores else rounded(figures[key])
    return {**figures, **_last_values(history)}


def _last_values(history: History) -> Row:
    """Return mean and standard deviation of the loss over the last quarter of the windows."""
    losses = history.windows["loss"][~(history.windows["unfinished"] == 1.0)]
    tail = losses[len(losses) - max(1, len(losses) // TAIL) :] if len(losses) else losses
    tail = tail[np.isfinite(tail)]
    if not len(tail):
        return {}
    deviation = rounded(float(tail.std(ddof=1))) if len(tail) > 1 else None
    return {"loss_tail": rounded(float(tail.mean())), "loss_tail_std": deviation}


# --- as text ---


def as_csv(rows: Sequence[Row], keys: Sequence[str]) -> str:
    """Return the table as CSV: the keys that vary, then run, status, figures, message, identity and commit."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = (*keys, "run", "status", *FIGURES, *LAST)
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row[key]) if key in row else "" for key in columns])
    return text.getvalue()


def _cell(value: Any) -> Any:
    """Return a value as a cell: no line ends, and no text that a spreadsheet would take for a formula."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return "" if value is None else value
    text = " ".join(as_text(value).split())
    return f"'{text}" if text.startswith(FORMULA) else text


def write_csv(folder: Path, rows: Sequence[Row], keys: Sequence[str]) -> None:
    """Write summary.csv whole; if that fails, log it: the next end of a run tries again."""
    try:
        write_atomic(folder / CSV, as_csv(rows, keys))
    except OSError as error:
        log.warning(f"{folder / CSV}: cannot be written: {error.strerror}. The runs continue; close what has it open.")


def format_table(rows: Sequence[Row]) -> str:
    """Return the table for the terminal, with the columns that any row has."""
    columns = [key for key in PRINTED if any(row.get(key) is not None for row in rows)]
    cells = [[row["run"], row["status"], *(row.get(key) for key in columns)] for row in rows]
    return render_table(("run", "status", *columns), cells, "ll" + "r" * len(columns))


def messages(rows: Sequence[Row]) -> list[str]:
    """Return a line for each run that has a message."""
    return [f"{row['run']}: {row['status']}: {row['message']}" for row in rows if row["message"]]


def progress(point: Point, status: str, seconds: float, *, done: int, of: int, took: Sequence[float], jobs: int) -> str:
    """Return the line after a run: how many are done, and how long the others will take by the median of what ran."""
    left = statistics.median(took) * -(-(of - done) // jobs)
    more = f"; about {readable_time(left)} left" if done < of else ""
    return f"{done} of {of} done; {point.name}: {status} after {readable_time(seconds)}{more}"


def format_counts(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how many runs have which status."""
    statuses = [row["status"] for row in rows]
    return f"{pluralize(len(rows), 'run')}: " + ", ".join(
        f"{statuses.count(each)} {each}" for each in dict.fromkeys(statuses)
    )


# --- all that a sweep has found, as one file, from which reports/study.py makes its table and plot anywhere ---


def record_of(sweep: Sweep, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the record of a sweep: its axes, and each run's values, figures and curves."""
    varying = [key for key in sweep.axes if key in sweep.of_points]
    return {
        "schema": SCHEMA,
        "measured": "sweep",
        "sweep": sweep.name,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **environment(),
        "yaml": sweep.command.yaml,
        "keys": [*sweep.keys, *sweep.typed],
        "axes": list(sweep.axes),
        "of_points": varying,
        "runs": [_run(row, list(sweep.axes), sweep.folder) for row in rows],
    }


def _run(row: Row, keys: Sequence[str], folder: Path) -> dict[str, Any]:
    run = {
        "run": row["run"],
        "status": row["status"],
        "values": {key: row[key] for key in keys if key in row},
        **{key: row[key] for key in (*FIGURES, "message", "identity", "commit") if row.get(key) not in (None, "")},
    }
    if row["status"] != OK:
        return {**run, "curve": {"images": [], "loss": []}}
    history = read_history(folder / row["run"])
    return {
        **run,
        "curve": curve_of(history),
        "validations": _columns_of(history.validations, VAL_LOSS),
        "evaluations": _columns_of(history.evaluations, *TARGET_METRICS),
    }


def _columns_of(lines: Sequence[Mapping[str, Any]], *keys: str) -> dict[str, list[float]]:
    """Return the images seen and these keys, a list each, of the lines that have them all."""
    whole = [line for line in lines if all(line.get(key) is not None for key in keys)]
    return {key: [line[key] for line in whole] for key in ("images", *keys)}


def curve_of(history: History) -> dict[str, list[float]]:
    """Return a run's loss over the images seen, thinned; what is not finite is left out."""
    images, losses = history.windows["images"], history.windows["loss"]
    is_finite = np.isfinite(images) & np.isfinite(losses) & ~(history.windows["unfinished"] == 1.0)
    images, losses = images[is_finite], losses[is_finite]
    pieces = np.array_split(np.arange(len(losses)), min(len(losses), MOST_POINTS)) if len(losses) else []
    return {
        "images": [int(images[piece[-1]]) for piece in pieces],
        "loss": [rounded(float(losses[piece].mean())) for piece in pieces],
    }


def write_record(sweep: Sweep, record: dict[str, Any]) -> Path:
    """Write record.json whole, and return it."""
    path = sweep.folder / RECORD
    write_json(path, record)
    return path
