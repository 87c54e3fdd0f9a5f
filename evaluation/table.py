"""Scores as a table, a row each: a flat score (evaluation/scorer.py) with what was scored.

    eval.jsonl    the table: one JSON object a row
    eval.csv      the same rows for spreadsheets, written from eval.jsonl and never read

Each file is written under another name and renamed, so a killed command leaves the rows before it. A lock keeps two commands
from adding to a table at the same time.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from common import dist
from common.files import read_regular, write_atomic
from ranks import collectives
from run_folder.history import finite, result_line, rounded

Row = dict[str, Any]

FIRST = ("model", "snapshot", "batch", "images", "seconds", "weights", "guidance", "fid", "clip", "clip_x100")
"""Columns that stand first; others follow as they come."""
NEEDED = (*FIRST, "num_images", "partial")
FIGURES = ("fid", "clip", "clip_x100")
"""What every row has; None where it was not measured."""
LOCK_WAIT_SEC = 60.0


def read_rows(path: Path) -> list[Row]:
    """Return the rows of eval.jsonl; none where there is no table.

    Raises:
        ValueError: it is no table of scores, or a damaged one; names the line, and what to do.
    """
    path, rows = path.with_suffix(".jsonl"), []
    if not path.exists():
        return []
    try:
        lines = read_regular(path).decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Move it away, or give another out=FOLDER.") from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not {*NEEDED} <= row.keys():
            text = f"{path}: line {number} is not a row of scores: '{line[:40]}'"
            raise ValueError(f"{text}. Remove that line: its score is then made again.")
        rows.append(_without_nulls(row))
    return rows


def _without_nulls(row: Row) -> Row:
    """Return a row as it is read: without what it does not have."""
    return {key: value for key, value in row.items() if value is not None or key in FIGURES}


def add_row(path: Path, row: Row, known_by: Iterable[str]) -> None:
    """Add a row to a table that other commands may be adding to at the same time.

    Args:
        known_by: keys; a row that has the same values of all of them is the same one, and stays.

    Raises:
        ValueError: the table cannot be read, or not be written.
    """
    keys = list(known_by)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.stem}.csv.lock"), timeout=LOCK_WAIT_SEC):
            rows = read_rows(path)
            if not any(all(other.get(key) == row[key] for key in keys) for other in rows):
                write_rows(path, [*rows, row])
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror or error}. Make room, or give another out=FOLDER."
        ) from error


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write eval.csv, then eval.jsonl, each whole or not at all; numbers are read back exactly.

    A row that a killed command has written only to the first is scored again, and both are written again.
    """
    rows = [_without_nulls({key: finite(value) for key, value in row.items()}) for row in rows]  # JSON has no nan
    empty = dict.fromkeys(FIRST)
    lines = "".join(json.dumps(empty | row | {key: None for key in NEEDED if key not in row}) + "\n" for row in rows)
    table = _as_csv(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path.with_suffix(".csv"), table)
    write_atomic(path.with_suffix(".jsonl"), lines)


def _as_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV: FIRST, then the other columns as they come."""
    columns = dict.fromkeys([*FIRST, *(key for row in rows for key in row)])
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _to_cell(row.get(key)) for key in columns} for row in rows)
    return text.getvalue()


def _to_cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value)


class ScoreTable:
    """The rows of a table as they were found, the same on all ranks, and those of this command; rank 0 writes these.

    Raises:
        ConfigError: there is a file that is no table, or it cannot be written.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[Row] = collectives.on_rank_zero(lambda: read_rows(path))

    def get(self, identity: Row, score: Callable[[], Row]) -> Row:
        """Return the row of what was scored before in the same way, or score it and keep it.

        Args:
            identity: everything that the figures depend on.
        """
        same = (row for row in self.rows if all(row.get(key) == value for key, value in identity.items()))
        if (row := next(same, None)) is None:
            row = {**identity, **score()}
            self.rows.append(row)
            collectives.on_rank_zero(lambda: add_row(self.path, row, identity))
        if dist.get_global_rank() == 0:
            print(result_line(_printable_row(row)), flush=True)
        return row


def _printable_row(row: Row) -> Row:
    keys = ("model", "images", "weights", "guidance", "fid", "clip", "clip_x100", "cmmd", "num_images", "partial")
    return {key: rounded(row[key]) for key in keys if key in row}
