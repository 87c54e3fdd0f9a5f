"""Scores as a table, a row each: a flat score (evaluation/scoring.py) with what was scored.

    eval.jsonl    the table: one JSON object a row
    eval.csv      the same rows for spreadsheets; written from eval.jsonl, and read only where there is no eval.jsonl

Earlier versions wrote eval.csv alone; the first row that is added writes both. Each file is written under another name and
renamed, so that a killed command leaves the rows before it. Two commands add to a table in turns.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from composer.utils import dist
from filelock import FileLock

from cli import ranks
from cli.files import read_regular, write_whole
from record.mlperf_events import is_number
from record.summary import finite, result_line, rounded

Row = dict[str, Any]

FIRST = ("model", "snapshot", "batch", "images", "seconds", "weights", "guidance", "fid", "clip", "clip_x100")
"""Columns that stand first; others follow as they come."""


NEEDED = (*FIRST, "num_images", "partial")

NUMBERS = ("batch", "images", "seconds", "guidance", "fid", "clip", "clip_x100", "num_images")
FIGURES = ("fid", "clip", "clip_x100")
"""What every row has; None where it was not measured. Of other columns an empty cell is one that its row does not have."""

LOCK_WAIT_SEC = 60.0

WAYS = "Fix it or move it away, or give another out=FOLDER"
AGAIN = "Remove that line: its score is then made again"

TEXTS = {
    "model",
    "model_id",
    "snapshot",
    "weights",
    "sampler",
    "inception",
    "clip_model",
    "resize",
    "precision",
    "eval_precision",
    "prediction",
}


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a table as they were written; none where there is no table.

    Args:
        path: eval.jsonl or eval.csv: both names mean the same table.

    Raises:
        ValueError: it is no table of scores, or not a whole one; names the line, and what to do.
    """
    source, table = path.with_suffix(".jsonl"), path.with_suffix(".csv")
    found = _rows_of_lines(source) if source.exists() else _rows_of_csv(table) if table.exists() else []
    return [_row(row) for row in found]


def _row(given: Row) -> Row:
    """Return a row as it is read: without what it does not have."""
    return {key: value for key, value in given.items() if value is not None or key in FIGURES}


def _rows_of_lines(path: Path) -> list[Row]:
    """Return the rows of eval.jsonl; each has NEEDED, null for what it has not."""
    rows = []
    for number, line in enumerate(_text_of(path).split("\n"), 1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"{path}: line {number} is not a whole JSON object: '{line[:40]}'. {AGAIN}.")
        if missing := [name for name in NEEDED if name not in row]:
            raise ValueError(f"{path}: line {number} is not a row of scores: it has no {', '.join(missing)}. {AGAIN}.")
        for key in NUMBERS:
            if row[key] is not None and not (is_number(row[key]) and math.isfinite(row[key])):
                raise ValueError(f"{path}: line {number}: {key} is {str(row[key])[:40]!r}, not a number. {AGAIN}.")
        rows.append(row)
    return rows


def _rows_of_csv(path: Path) -> list[Row]:
    """Return the rows of eval.csv, None for an empty cell."""
    lines = _lines_of(path)
    header = lines[0][1] if lines else []
    if missing := [name for name in NEEDED if name not in header]:
        raise ValueError(f"{path} is not a table of scores: no column {', '.join(missing)} in its first line. {WAYS}.")
    rows = []
    for number, cells in lines[1:]:
        if len(cells) != len(header):
            given = f"{path}: line {number} has {len(cells)} cells, its header {len(header)}"
            raise ValueError(f"{given}. {AGAIN}.")
        there = zip(header, cells, strict=True)
        rows.append({key: _from_cell(f"{path}: line {number}", key, cell) for key, cell in there})
    return rows


def _text_of(path: Path) -> str:
    """Return a file's text. Raises ValueError: it cannot be read."""
    content = b""
    try:
        content = read_regular(path)
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}. {WAYS}.") from error
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}: line {number} is not UTF-8 text. {WAYS}.") from error


def _lines_of(path: Path) -> list[tuple[int, list[str]]]:
    """Return the lines of a CSV file with their numbers, the header's first. Raises ValueError: they cannot be read."""
    text = _text_of(path)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        lines = [(reader.line_num, cells) for cells in reader if cells]
    except csv.Error as error:
        raise ValueError(f"{path}: line {reader.line_num} cannot be read: {error}. {WAYS}.") from error
    if text and not text.endswith("\n"):
        cut_off = "does not end: it may be cut off. Remove it, or end it if it is whole"
        raise ValueError(f"{path}: line {reader.line_num} {cut_off}.")
    return lines


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
        with _alone(path):
            rows = read_rows(path)
            if not any(all(other.get(key) == row[key] for key in keys) for other in rows):
                write_rows(path, [*rows, row])
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror or error}. Make room, or give another out=FOLDER."
        ) from error


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write eval.jsonl, then eval.csv, each whole or not at all; numbers come back as they were, to the last digit."""
    rows = [_row({key: finite(value) for key, value in row.items()}) for row in rows]  # JSON has no nan
    empty = dict.fromkeys(FIRST)
    lines = "".join(json.dumps(empty | row | {key: None for key in NEEDED if key not in row}) + "\n" for row in rows)
    table = _as_csv(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path.with_suffix(".jsonl"), lines)
    write_whole(path.with_suffix(".csv"), table)


def open_table(path: Path) -> list[Row]:
    """Return the rows of a table, its eval.csv written again where that does not say the same: a writer was killed between.

    Raises:
        ValueError: as read_rows does.
    """
    rows = read_rows(path)
    source, table = path.with_suffix(".jsonl"), path.with_suffix(".csv")
    with contextlib.suppress(OSError):  # a folder that can only be read has its rows all the same
        if source.exists() and not (table.exists() and read_regular(table) == _as_csv(rows).encode()):
            with _alone(path):
                write_whole(table, _as_csv(read_rows(path)))
    return rows


def _alone(path: Path) -> FileLock:
    """Keep other commands from a table."""
    return FileLock(path.with_name(f".{path.stem}.csv.lock"), timeout=LOCK_WAIT_SEC)


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


def _from_cell(where: str, key: str, cell: str) -> Any:
    if not cell:
        return None
    if key in TEXTS or key.endswith(("_sha256", "_fingerprint")):
        return cell
    try:
        return json.loads(cell)
    except ValueError:
        raise ValueError(f"{where}, column {key}: '{cell[:40]}' is no value. Fix it, or remove that line.") from None


class Table:
    """The rows of a table as they were found, the same on all ranks, and those of this command; rank 0 writes these.

    Raises:
        ConfigError: there is a file that is no table, or it cannot be written.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[Row] = ranks.on_rank_zero(lambda: open_table(path))

    def get(self, what: Row, score: Callable[[], Row], written: Callable[[], None] = lambda: None) -> Row:
        """Return the row of what was scored before in the same way, or score it and keep it.

        Args:
            what: everything that the figures depend on.
            written: is called when it is in the table, also where it was there before.
        """
        same = (row for row in self.rows if all(row.get(key) == value for key, value in what.items()))
        if (row := next(same, None)) is None:
            row = {**what, **score()}
            self.rows.append(row)
            ranks.on_rank_zero(lambda: add_row(self.path, row, what))
        written()
        if dist.get_global_rank() == 0:
            print(result_line(_shown(row)), flush=True)
        return row


def _shown(row: Row) -> Row:
    keys = ("model", "images", "weights", "guidance", "fid", "clip", "clip_x100", "num_images", "partial")
    return {key: rounded(row[key]) for key in keys if key in row}
