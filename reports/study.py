"""Show the record of a sweep: a table whose rows are means over the seeds, and loss curves with the band of the seeds.

    python -m reports.study runs/sweeps/NAME/record.json             # for the terminal
    python -m reports.study RECORD.json OUT.png PAGE.md              # the plot; the table between a page's marks

A page says by marks where the table goes (reports/formatting.py). Runs of one seed see the same images, noise and times, so
where a sweep has `points`, each is also set against the first one with the same seed: what both draw at random cancels out.
Curves are of the validation loss or FID if the runs have it, else of the training loss. Of runs with a target, the table has
the median images and seconds to it over the seeds, with 95 % bootstrap intervals; a run that missed it counts as infinite.
Exit code: 0, or 2 where a file cannot be read, is no such record, or a page has no marks.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.command import command
from reports.charts import smoothed
from reports.formatting import Record, RecordTable, Row, about, in_markdown, in_text, show_record
from run_folder.history import VAL_LOSS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Lines = Mapping[str, "np.ndarray"]

Run = Mapping[str, Any]

SCHEMA = 1
"""Of record.json (sweeps/table.py)."""
SEED, OK = "seed", "ok"
FID = "FID"
QUALITY = (("val_loss", "validation loss", ".4f"), ("fid", FID, ".1f"), ("clip", "CLIP score", ".3f"))
SPEED = (("images_per_sec_per_device", "images/s per device", ".4g"),)
MOST_PANELS = 4
SMOOTH_WINDOWS = 5
RESAMPLES = 10_000  # of the bootstrap
COLORS = ("#31688e", "#d95f02", "#35864a", "#a6368c", "#8a6d1d", "#666666")
DPI = 120


# --- groups: what differs in nothing but the seed ---


def label_of(run: Run, keys: Sequence[str]) -> str:
    """Return a run's values of some keys in words: precision=bf16, states=bf16."""
    values, short = run["values"], short_names(keys)
    return ", ".join(f"{short[key]}={_word(values[key])}" for key in keys if key in values) or "all"


def groups_of(runs: Sequence[Run], keys: Sequence[str]) -> dict[str, list[Run]]:
    """Return label -> the runs that are ok and have the same values of these keys, in the record's order."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run["status"] == OK:
            groups.setdefault(label_of(run, keys), []).append(run)
    return groups


def first_of(record: Record, run: Run) -> Run | None:
    """Return the run of the first point whose other values, seed included, are this one's; None: none, or itself."""
    same = [key for key in record["axes"] if key not in _of_points(record)]
    for other in record["runs"]:
        if all(other["values"].get(key) == run["values"].get(key) for key in same):
            return None if other is run or other["status"] != OK or not _of_points(record) else other
    return None


def _of_points(record: Record) -> list[str]:
    """Return the keys by which points differ; their seeds may be given there as well as in the matrix."""
    return [key for key in record["of_points"] if key != SEED]


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return key -> its last part; the whole key where another one ends in the same part."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: part if last.count(part) == 1 else key for key, part in zip(keys, last, strict=True)}


def _word(value: Any) -> str:
    if isinstance(value, list):  # of algorithms: package.module:Class(...)
        return ", ".join(re.sub(r"^[\w.]+:", "", str(item)) for item in value) or "none"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# --- the table ---


def table_of(record: Record) -> RecordTable:
    """A row for each group: means over its seeds, with the least and the greatest."""
    keys = [key for key in record["axes"] if key != SEED]
    ran = [run for run in record["runs"] if run["status"] == OK]
    figures = [each for each in QUALITY if any(run.get(each[0]) is not None for run in ran)] or list(SPEED)
    is_set_against = bool(_of_points(record)) and figures[0] in QUALITY[:1]
    head = (*short_names(keys).values(), "runs", *(name for _, name, _ in figures))
    head += ("loss over the first's, by seed",) if is_set_against else ()
    has_target = any(run.get("target") is not None for run in ran)
    head += ("images to the target", "seconds to the target") if has_target else ()
    rows: list[Row] = []
    for group_runs in groups_of(record["runs"], keys).values():
        cells = [_word(group_runs[0]["values"][key]) if key in group_runs[0]["values"] else "-" for key in keys]
        cells += [
            str(len(group_runs)),
            *(_format_range([run.get(key) for run in group_runs], digits) for key, _, digits in figures),
        ]
        if is_set_against:
            cells.append(_over_first(record, group_runs))
        if has_target:
            for key in ("images_to_target", "seconds_to_target"):
                cells.append(_format_median([run.get(key, math.inf) for run in group_runs]))
        rows.append(tuple(cells))
    lost = len(record["runs"]) - len(ran)
    title = f"Sweep {record['sweep']}: mean over the seeds (least to greatest)"
    title += "; to the target: median (95 % interval)" if has_target else ""
    title += f"; {lost} of {len(record['runs'])} runs did not end well" if lost else ""
    return RecordTable(f"{title}:", head, "l" * len(keys) + "r" * (len(head) - len(keys)), rows)


def _format_range(values: Sequence[float | None], digits: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean, least, most = (format(value, digits) for value in (statistics.fmean(known), min(known), max(known)))
    return mean if len(known) == 1 else f"{mean} ({least} to {most})"


def _format_median(images: Sequence[float]) -> str:
    draws = np.random.default_rng(0).choice(images, (RESAMPLES, len(images)))
    of_draws = np.sort(np.median(draws, axis=1))  # np.quantile would take infinity less infinity
    ends = of_draws[int(0.025 * RESAMPLES)], of_draws[int(0.975 * RESAMPLES)]
    median, low, high = (f"{value:,.0f}" if value < math.inf else "missed" for value in (np.median(images), *ends))
    return f"{median} ({low} to {high})" if len(images) > 1 and low != "missed" else median


def _over_first(record: Record, of: Sequence[Run]) -> str:
    pairs = [(run, first_of(record, run)) for run in of]
    known = [(run.get("val_loss"), first.get("val_loss")) for run, first in pairs if first is not None]
    ratios = [100.0 * (value / other - 1.0) for value, other in known if value is not None and other]
    return _format_range(ratios, "+.2f").replace(" (", " % (") if ratios else "-"


def text_of(record: Record) -> str:
    """Format a record for the terminal. Raises ValueError: it is of another schema."""
    if record["schema"] != SCHEMA:
        raise ValueError(f"its schema is {record['schema']}; possible: {SCHEMA}, else the code of its commit")
    return f"{about(record)}\n{in_text(table_of(record))}"


def markdown_of(record: Record) -> str:
    """Format a record for a page."""
    return f"\n{about(record)} {in_markdown(table_of(record))}\n"


# --- the plot ---


def bands_of(groups: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]]) -> dict[str, np.ndarray]:
    """Return label -> (4, N): images seen, mean over the seeds, least and greatest; as far as all of its seeds came."""
    bands = {}
    for label, group_curves in groups.items():
        first, last = max(images[0] for images, _ in group_curves), min(images[-1] for images, _ in group_curves)
        images = group_curves[0][0][(group_curves[0][0] >= first) & (group_curves[0][0] <= last)]
        values = np.stack([np.interp(images, *curve) for curve in group_curves])
        bands[label] = np.stack([images, values.mean(0), values.min(0), values.max(0)])
    return bands


def losses_of(runs: Sequence[Run], keys: Sequence[str]) -> dict[str, np.ndarray]:
    """Return label -> the band of its losses, see `bands_of`; running means of SMOOTH_WINDOWS windows."""
    return bands_of(
        {label: curves for label, group_runs in groups_of(runs, keys).items() if (curves := _curves(group_runs))}
    )


def differences_of(record: Record, runs: Sequence[Run], keys: Sequence[str]) -> dict[str, np.ndarray]:
    """Return label -> the band of how far its losses are over the first point's with the same seed, in percent."""
    curves_by_label: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for label, group_runs in groups_of(runs, keys).items():
        for run in group_runs:
            first = first_of(record, run)
            if first is None or not (these := _curves([run])) or not (theirs := _curves([first])):
                continue
            [(images, losses)], [other] = these, theirs
            curves_by_label.setdefault(label, []).append((images, 100.0 * (losses / np.interp(images, *other) - 1.0)))
    return bands_of(curves_by_label)


def _curves(runs: Sequence[Run]) -> list[tuple[np.ndarray, np.ndarray]]:
    curves = [(np.array(run["curve"]["images"], float), np.array(run["curve"]["loss"], float)) for run in runs]
    windows = [1 if run["curve"].get("is_score") else SMOOTH_WINDOWS for run in runs]
    return [
        (images, smoothed(losses, num))
        for (images, losses), num in zip(curves, windows, strict=True)
        if len(images) > 1
    ]


def with_scores(record: Record) -> tuple[Record, str]:
    """Return a record whose curves are a score that each run that is ok has several times, and the score's name.

    Else the record itself, whose curves are the training loss.
    """
    ran = [run for run in record["runs"] if run["status"] == OK]
    for lines, key, name in (("validations", VAL_LOSS, "validation loss"), ("evaluations", "fid", FID)):
        if all(sum(images > 0 for images in run.get(lines, {}).get("images", ())) > 1 for run in ran):
            runs = [
                {**run, "curve": _scores(run[lines], key)} if run["status"] == OK else run for run in record["runs"]
            ]
            return {**record, "runs": runs}, name
    return record, "training loss"


def _scores(line: Mapping[str, Sequence[float]], key: str) -> dict[str, Any]:
    first = 1 if line["images"][0] == 0 else 0  # the untrained network's score would fill the panel
    return {"images": line["images"][first:], "loss": line[key][first:], "is_score": True}


def has_curves(record: Record) -> bool:
    """False where no run has left enough for a curve."""
    return any(run["status"] == OK and len(run["curve"]["images"]) > 1 for run in record["runs"])


def draw(record: Record, path: Path) -> None:
    """Draw the losses, a panel for each combination of the other axes where the sweep has points; below, the differences.

    Raises ValueError: no run has left enough for a curve.
    """
    if not has_curves(record):
        raise ValueError(f"no run has a loss curve, so there is nothing to draw. Leave {path} out.")
    record, what = with_scores(record)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    keys = [key for key in record["axes"] if key in _of_points(record)]
    others = [key for key in record["axes"] if key not in (*keys, SEED)]
    panels = groups_of(record["runs"], others if keys else [])
    drawn = dict(itertools.islice(panels.items(), MOST_PANELS))
    lines = keys or others
    losses = [losses_of(group_runs, lines) for group_runs in drawn.values()]
    below = [differences_of(record, group_runs, lines) for group_runs in drawn.values()]
    labels = list(dict.fromkeys(label for bands in losses for label in bands))
    looks = dict(zip(labels, itertools.product(("-", "--"), COLORS), strict=False))
    num_rows, num = 2 if any(below) else 1, len(drawn)
    size = (max(8, 5.5 * num), 1 + 3.6 * num_rows + 0.16 * len(looks))
    figure, axes = pyplot.subplots(num_rows, num, squeeze=False, figsize=size, layout="constrained")
    for column, name in enumerate(drawn):
        _draw(axes[0, column], losses[column], looks, f"{what}, mean and extremes of the seeds")
        axes[0, column].set_title(name if keys and others else "")
        if what == FID:
            axes[0, column].set_yscale("log")
            for set_formatter in (axes[0, column].yaxis.set_major_formatter, axes[0, column].yaxis.set_minor_formatter):
                set_formatter("{x:.0f}")
        if num_rows > 1:
            _draw(axes[1, column], below[column], looks, "over the first, same seed, %")
            axes[1, column].axhline(0.0, color="#808080", linewidth=0.8)
        axes[-1, column].set_xlabel("images seen")
    if len(labels) > 1:  # a panel may lack a line: its runs did not end well
        lines_of = {line.get_label(): line for panel in axes[0] for line in panel.get_lines()}
        figure.legend([lines_of[label] for label in looks], [*looks], fontsize=7, loc="outside upper left")
    if len(drawn) < len(panels) or len(looks) < len(labels):
        figure.suptitle(f"{len(drawn)} of {len(panels)} panels, {len(looks)} of {len(labels)} lines", fontsize=9)
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


def _draw(axes: Axes, bands: Lines, looks: Mapping[str, tuple[str, str]], what: str) -> None:
    for label, (style, color) in looks.items():
        if label not in bands:
            continue
        images, mean, least, greatest = bands[label]
        axes.plot(images, mean, label=label, color=color, linestyle=style, linewidth=1.2)
        axes.fill_between(images, least, greatest, color=color, alpha=0.2, linewidth=0)
    axes.set_ylabel(what)
    axes.grid(alpha=0.3)


# --- the command ---


@command()
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    return show_record(argv, "sweep.py", text_of, markdown_of, draw, "RECORD.json, OUT.png, PAGE.md")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
