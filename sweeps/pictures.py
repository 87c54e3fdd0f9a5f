"""Pictures of a sweep's speed: throughput over each axis. Those of its losses: reports/study.py."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evaluation.plots import COLOURS, DPI
from sweeps.file import as_text, labels
from sweeps.state import OK
from sweeps.table import SPEED, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEED = "seed"
MOST_LINES = 12


def draw(rows: Sequence[Row], axes: Mapping[str, Sequence[Any]], folder: Path) -> list[Path]:
    """Draw what there is to draw of the runs that are ok; return the files."""
    import matplotlib

    matplotlib.use("Agg")
    ran, called, made = [row for row in rows if row["status"] == OK], labels([*axes]), []
    for key, values in axes.items():
        if key == SEED:
            continue
        words = None if _are_numbers(values) else [as_text(value) for value in values]
        lines = speed_lines(ran, key, [*axes], words)
        if len({x for points in lines.values() for x, *_ in points}) > 1:
            path = folder / f"throughput_{called[key]}.png"
            _figure(path, lambda of, lines=lines, key=key, words=words: _draw_speed(of, lines, key, words))
            made.append(path)
    return made


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _label(row: Row, keys: Sequence[str]) -> str:
    called = labels(keys)
    return ", ".join(f"{called[key]}={as_text(row[key])}" for key in keys if key in row) or "all"


def speed_lines(
    rows: Sequence[Row], key: str, keys: Sequence[str], words: Sequence[str] | None = None
) -> dict[str, list[tuple[float, float, float, float]]]:
    """Return line -> its points (value of the key, median, least, greatest), ascending.

    A line is what the other keys are; over its seeds there is the median of medians, and the extremes of all.

    Args:
        words: the key's values where they are no numbers; a point is then at its value's place among them.
    """
    others = [each for each in keys if each not in (key, SEED)]
    found: dict[str, dict[float, list[Row]]] = {}
    for row in rows:
        if key in row and row.get(SPEED) is not None:
            place = float(row[key]) if words is None else float(words.index(as_text(row[key])))
            found.setdefault(_label(row, others), {}).setdefault(place, []).append(row)
    return {
        line: [
            (
                x,
                float(np.median([row[SPEED] for row in of])),
                min(_extreme(row, "min") for row in of),
                max(_extreme(row, "max") for row in of),
            )
            for x, of in sorted(points.items())
        ]
        for line, points in found.items()
    }


def _extreme(row: Row, end: str) -> float:
    value = row.get(f"{SPEED}_{end}")
    return row[SPEED] if value is None else value


# --- drawing ---


def _figure(path: Path, draw_on: Any) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    draw_on(axes)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


def _legend(axes: Axes, num: int) -> None:
    title = f"{MOST_LINES} of {num}" if num > MOST_LINES else None
    if num > 1:
        axes.legend(fontsize=8, title=title)


def _draw_speed(
    axes: Axes,
    lines: Mapping[str, Sequence[tuple[float, float, float, float]]],
    key: str,
    words: Sequence[str] | None = None,
) -> None:
    between, apart = ("-", 0.0) if words is None else ("", 0.5 / MOST_LINES)  # nothing lies between two words
    shown = min(len(lines), MOST_LINES)
    for number, ((line, points), colour) in enumerate(zip(lines.items(), itertools.cycle(COLOURS), strict=False)):
        if number == shown:
            break
        x, median, least, greatest = map(np.array, zip(*points, strict=True))
        x = x + apart * (number - (shown - 1) / 2)
        axes.errorbar(
            x,
            median,
            yerr=[median - least, greatest - median],
            marker="o",
            linestyle=between,
            capsize=3,
            label=line,
            color=colour,
        )
    if words is not None:
        axes.set_xticks(range(len(words)), words)
        axes.set_xlim(-0.5, len(words) - 0.5)
    axes.set_xlabel(key)
    axes.set_ylabel("images/s a device, median and extremes of the windows")
    axes.set_ylim(bottom=0)
    _legend(axes, len(lines))
