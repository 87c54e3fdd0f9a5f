"""Scores as a table and as pictures: FID against CLIP score over guidance, and both over the images seen.

A row is a flat score (scoring.py) with what was scored. The table is kept whole: it is written under another name and
renamed, so that a command that is killed leaves the rows before it. Two commands add to it in turns.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]

FIRST = ("model", "snapshot", "batch", "images", "seconds", "weights", "guidance", "fid", "clip", "clip_x100")
"""Columns that stand first; others follow as they come."""

APART = (
    "model",
    "model_id",
    "snapshot",
    "weights",
    "guidance",
    "sampler",
    "steps",
    "eval_image_size",
    "precision",
    "eval_precision",
    "resize",
)
"""What has a line of its own in a picture; model_id tells two models of one name apart."""

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

DPI = 120
COLOURS = ("#31688e", "#d95f02", "#35864a", "#a6368c", "#8a6d1d", "#666666")


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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(columns), lineterminator="\n")
            writer.writeheader()
            for row in rows:
                writer.writerow({key: _to_cell(row.get(key)) for key in columns})
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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


def draw_guidance(rows: Sequence[Row], path: Path) -> None:
    """Draw FID (down is better) over CLIP score (right is better) over guidance, a line a model and snapshot."""

    def draw(axes: Axes) -> None:
        for (label, of_line), colour in zip(lines_of(rows, "guidance"), itertools.cycle(COLOURS), strict=False):
            points = sorted(of_line, key=lambda row: row["guidance"])
            clip, fid = [row["clip"] for row in points], [row["fid"] for row in points]
            axes.plot(clip, fid, marker="o", label=label, color=colour)
            for row in points:
                place = (row["clip"], row["fid"])
                axes.annotate(f"{row['guidance']:g}", place, textcoords="offset points", xytext=(5, 5), fontsize=8)
        axes.set_xlabel("CLIP score (mean cosine)")
        axes.set_ylabel("FID")

    _draw([draw], path, _title(rows, "guidance at each point"))


def draw_over_images(rows: Sequence[Row], path: Path, target: Mapping[str, float | None] | None = None) -> None:
    """Draw FID and CLIP score over the images seen, a line a model and guidance, the target as a dashed line."""

    def over_images(axes: Axes, key: str, label: str) -> None:
        for (name, of_line), colour in zip(lines_of(rows, "snapshot"), itertools.cycle(COLOURS), strict=False):
            points = sorted((row for row in of_line if row[key] is not None), key=lambda row: row["images"])
            images, figures = [row["images"] for row in points], [row[key] for row in points]
            axes.plot(images, figures, marker="o", label=name, color=colour)
        if target and target.get(key) is not None:
            axes.axhline(target[key], linestyle="--", color="#666666", label=f"target {target[key]:g}")
        axes.set_xlabel("images seen")
        axes.set_ylabel(label)

    kinds = [(key, label) for key, label in (("fid", "FID"), ("clip", "CLIP score (mean cosine)")) if _has(rows, key)]
    panels = [lambda axes, key=key, label=label: over_images(axes, key, label) for key, label in kinds]
    _draw(panels, path, _title(rows, ""))


def _has(rows: Sequence[Row], key: str) -> bool:
    return any(row.get(key) is not None for row in rows)


def lines_of(rows: Sequence[Row], along: str) -> list[tuple[str, list[Row]]]:
    """Return (label, rows) for each line of a picture: one model, in one way, and only what it is drawn along differs."""
    keys = [key for key in APART if key != along]
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(str(row.get(key)) for key in keys), []).append(row)
    differing = {key for key, values in zip(keys, zip(*found, strict=True), strict=True) if len(set(values)) > 1}
    if len({line[:2] for line in found}) == len({line[0] for line in found}):
        differing.discard("model_id")  # the names tell them apart

    def label(row: Row) -> str:
        words = {key: f"{key} {row[key]}" for key in keys if row.get(key) is not None}
        words |= {key: row[key] for key in ("model", "model_id") if key in words}
        if "snapshot" in words:
            words["snapshot"] = f"{row['images']:,} images"
        return ", ".join(words[key] for key in keys if key in words and (key == "model" or key in differing))

    return [(label(of_line[0]), of_line) for of_line in found.values()]


def _title(rows: Sequence[Row], more: str) -> str:
    """Say what the figures are of, as far as it is the same for all of them."""
    parts = [
        f"{key} {values.pop()}"
        for key in ("sampler", "steps")
        if len(values := {str(row.get(key)) for row in rows}) == 1
    ]
    numbers = {row["num_images"] for row in rows}
    parts += [f"{numbers.pop():,} images"] if len(numbers) == 1 else []
    parts += ["partial: no score"] if any(row["partial"] for row in rows) else []
    return ", ".join([*parts, more] if more else parts)


def _draw(panels: Sequence[Any], path: Path, title: str) -> None:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(matplotlib.rcParamsDefault):
        figure = Figure(figsize=(6.4 * len(panels), 4.4), layout="constrained")
        FigureCanvasAgg(figure)
        for number, draw in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), number + 1)
            axes.grid(alpha=0.3)
            draw(axes)
            legend = axes.legend(fontsize=8, ncols=1 + len(axes.lines) // 16)
            legend.set_in_layout(False)  # many lines would leave no room for the axes
        figure.suptitle(title, fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI)
