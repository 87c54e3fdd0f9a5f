"""Scores as a table, a row each: a flat score (evaluation/scoring.py) with what was scored.

The table is kept whole: it is written under another name and renamed, so that a command that is killed leaves the rows
before it. Two commands add to it in turns.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from composer.utils import dist
from filelock import FileLock

from cli import ranks
from cli.files import whole
from record.summary import result_line, rounded

Row = dict[str, Any]

FIRST = ("model", "snapshot", "batch", "images", "seconds", "weights", "guidance", "fid", "clip", "clip_x100")
"""Columns that stand first; others follow as they come."""


NEEDED = (*FIRST, "num_images", "partial")

FIGURES = ("fid", "clip", "clip_x100")
"""What every row has; None where it was not measured. Of other columns an empty cell is one that its row does not have."""

OF_BEFORE = {"eval_precision": "fp32"}
"""What scores of older versions do not say."""

LOCK_WAIT_SEC = 60.0

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
    """Return the rows of a table as they were written, and what older ones do not say, or none where there is no file.

    Raises:
        ValueError: it is no table of scores, or not a whole one; names the line, and what to do.
    """
    if not path.exists():
        return []
    ways = "Mend it or move it away, or give another out=FOLDER"
    lines = _lines_of(path, ways)
    header = lines[0][1] if lines else []
    if missing := [name for name in NEEDED if name not in header]:
        raise ValueError(f"{path} is no table of scores: no column {', '.join(missing)} in its first line. {ways}.")
    rows = []
    for number, cells in lines[1:]:
        if len(cells) != len(header):
            given = f"{path}: line {number} has {len(cells)} cells, its header {len(header)}"
            raise ValueError(f"{given}. Remove that line: its score is then made again.")
        there = [(key, cell) for key, cell in zip(header, cells, strict=True) if cell or key in FIGURES]
        rows.append(OF_BEFORE | {key: _from_cell(f"{path}: line {number}", key, cell) for key, cell in there})
    return rows


def _lines_of(path: Path, ways: str) -> list[tuple[int, list[str]]]:
    """Return the lines of a CSV file with their numbers, the header's first. Raises ValueError: they cannot be read."""
    content = b""
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}. {ways}.") from error
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}: line {number} is not UTF-8 text. {ways}.") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        lines = [(reader.line_num, cells) for cells in reader if cells]
    except csv.Error as error:
        raise ValueError(f"{path}: line {reader.line_num} cannot be read: {error}. {ways}.") from error
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
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_WAIT_SEC):
            rows = read_rows(path)
            if not any(all(other.get(key) == row[key] for key in keys) for other in rows):
                write_rows(path, [*rows, row])
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror or error}. Make room, or give another out=FOLDER."
        ) from error


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write a table whole or not at all; numbers come back as they were, to the last digit."""
    columns = dict.fromkeys([*FIRST, *(key for row in rows for key in row)])
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: _to_cell(row.get(key)) for key in columns})


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
        raise ValueError(f"{where}, column {key}: '{cell[:40]}' is no value. Mend it, or remove that line.") from None


class Table:
    """The rows of eval.csv as they were found, the same on all ranks, and those of this command; rank 0 writes these.

    Raises:
        ConfigError: there is a file that is no table, or it cannot be written.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[Row] = ranks.on_rank_zero(lambda: read_rows(path))

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
