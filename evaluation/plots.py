"""Plots of scores: FID against CLIP score over guidance, and both over the images seen.

    python -m evaluation.plots runs/NAME/eval.jsonl OUT.png                          # a table of eval.py
    python -m evaluation.plots A.json B.json OUT.png target.fid=60 target.clip=0.8   # records of bench.ladder

Rows of several guidances are drawn over guidance, others over the images seen, with the target as dashed lines.
Exit code: 0, or 2 where a file cannot be read or has no scores.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.command import command
from common.errors import Refused
from common.files import read_json
from evaluation.table import Row, read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE_KEYS = (
    *("model", "model_id", "snapshot", "weights", "guidance", "sampler", "steps", "eval_image_size"),
    *("precision", "eval_precision", "resize"),
)
"""Rows that differ in one of these have separate lines in a plot; model_id tells two models of one name apart."""
DPI = 120
COLORS = ("#31688e", "#d95f02", "#35864a", "#a6368c", "#8a6d1d", "#666666")


def plot_guidance(rows: Sequence[Row], path: Path) -> None:
    """Draw FID (down is better) over CLIP score (right is better) over guidance, a line a model and snapshot."""

    def draw(axes: Axes) -> None:
        for (label, of_line), color in zip(lines_of(rows, "guidance"), itertools.cycle(COLORS), strict=False):
            points = sorted(of_line, key=lambda row: row["guidance"])
            clip, fid = [row["clip"] for row in points], [row["fid"] for row in points]
            axes.plot(clip, fid, marker="o", label=label, color=color)
            for row in points:
                point = (row["clip"], row["fid"])
                axes.annotate(f"{row['guidance']:g}", point, textcoords="offset points", xytext=(5, 5), fontsize=8)
        axes.set_xlabel("CLIP score (mean cosine)")
        axes.set_ylabel("FID")

    _draw([draw], path, _title(rows, "guidance at each point"))


def plot_over_images(rows: Sequence[Row], path: Path, target: Mapping[str, float | None] | None = None) -> None:
    """Draw FID (log axis), CLIP score and CMMD over the images seen, a line a model and guidance; targets are dashed lines.

    A model whose images seen are not known, such as published weights, is a dashed line across, at its score.
    """

    def over_images(axes: Axes, key: str, label: str) -> None:
        for (name, of_line), color in zip(lines_of(rows, "snapshot"), itertools.cycle(COLORS), strict=False):
            scored = [row for row in of_line if row.get(key) is not None]
            points = sorted((row for row in scored if row.get("images") is not None), key=lambda row: row["images"])
            images, figures = [row["images"] for row in points], [row[key] for row in points]
            if points:
                axes.plot(images, figures, marker="o", label=name, color=color)
            for row in (row for row in scored if row.get("images") is None):
                axes.axhline(row[key], linestyle=(0, (6, 2)), color=color, label=f"{name}: {row[key]:.3g}")
        if target and (wanted := target.get(key)) is not None:
            axes.axhline(wanted, linestyle="--", color="#666666", label=f"target {wanted:g}")
        if key == "fid":
            _set_log_scale(axes)
        axes.set_xlabel("images seen")
        axes.set_ylabel(label)

    panels = [
        lambda axes, key=key, label=label: over_images(axes, key, label)
        for key, label in (("fid", "FID"), ("clip", "CLIP score (mean cosine)"), ("cmmd", "CMMD"))
        if any(row.get(key) is not None for row in rows)
    ]
    _draw(panels, path, _title(rows, ""))


def lines_of(rows: Sequence[Row], along: str) -> list[tuple[str, list[Row]]]:
    """Return (label, rows) for each line of a plot: one model and its settings, of which only `along` differs."""
    keys = [key for key in LINE_KEYS if key != along]
    lines: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        lines.setdefault(tuple(str(row.get(key)) for key in keys), []).append(row)
    differing = {key for key, values in zip(keys, zip(*lines, strict=True), strict=True) if len(set(values)) > 1}
    if len({line[:2] for line in lines}) == len({line[0] for line in lines}):
        differing.discard("model_id")  # the names tell them apart

    def label(row: Row) -> str:
        words = {key: f"{key} {row[key]}" for key in keys if row.get(key) is not None}
        words |= {key: row[key] for key in ("model", "model_id") if key in words}
        if "snapshot" in words and row.get("images") is not None:
            words["snapshot"] = f"{row['images']:,} images"
        return ", ".join(words[key] for key in keys if key in words and (key == "model" or key in differing))

    return [(label(of_line[0]), of_line) for of_line in lines.values()]


def _set_log_scale(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _title(rows: Sequence[Row], more: str) -> str:
    """Say what the figures are of, as far as it is the same for all of them."""
    parts = [
        f"{key} {values.pop()}"
        for key in ("sampler", "steps")
        if len(values := {str(row[key]) for row in rows if key in row}) == 1
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
        figure.savefig(path, dpi=DPI, metadata={"Software": None})  # the same bytes from the same rows


@command()
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    targets = {word.partition("=")[0]: word.partition("=")[2] for word in argv if word.startswith("target.")}
    *sources, out = [Path(word) for word in argv if not word.startswith("target.")] or [Path()]
    if not sources or out.suffix != ".png" or not {*targets} <= {"target.fid", "target.clip"}:
        possible = "SCORES.jsonl or RECORD.json, one OUT.png, target.fid=NUMBER, target.clip=NUMBER"
        raise Refused(f"command line: {' '.join(argv)}. Possible: {possible}.")
    rows: list[Row] = []
    try:
        for source in sources:
            record = {"evaluations": read_rows(source)} if source.suffix == ".jsonl" else read_json(source)
            rows += [{"model": record.get("rung"), "partial": False, **row} for row in record["evaluations"]]
        if not rows:
            raise ValueError("it has no scores")
        if len({row["guidance"] for row in rows}) > 1:
            plot_guidance(rows, out)
        else:
            plot_over_images(rows, out, {key.removeprefix("target."): float(value) for key, value in targets.items()})
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{source}: cannot be drawn ({type(error).__name__}: {error})"
        raise Refused(f"{text}. Give eval.jsonl of eval.py, or a record of bench.ladder.") from error
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
