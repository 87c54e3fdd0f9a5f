"""Plots of the page: SVG that takes its colors and its font from the page, words for who cannot see it, and its figures.

matplotlib draws; its colors stand for variables of page.css, so that one plot is right in light, in dark and on paper.
Every run of points is thinned to what can be seen: of a bucket of windows stay least, mean and greatest, so that a spike
is never lost.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from markupsafe import Markup, escape

from reports.formatting import figure, plain
from run_folder.files import CLOCKS
from run_folder.history import History, Line, number_of

WIDE_PX, TALL_PX = 360, 232
MOST_POINTS, MOST_ROWS = 400, 40
NUM_COLORS = 8
COLORS = {
    "ink": "#000101",
    "grid": "#000102",
    "muted": "#000103",
    **{f"s{number}": f"#0002{number:02x}" for number in range(NUM_COLORS)},
}
"""Variable of page.css -> the color that stands for it in what matplotlib writes."""
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "easel",
    "font.size": 11.0,
    "axes.axisbelow": True,
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), COLORS["grid"]),
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), COLORS["muted"]),
    "text.color": COLORS["ink"],
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
Array = np.ndarray
Kind = Literal["line", "points", "reference"]


@dataclass(frozen=True)
class Series:
    """What is drawn in one color.

    x, y: float64 (N,). low, high: what the values of a thinned point lie between, float64 (N,), or None.
    """

    name: str
    x: Array
    y: Array
    color: str = "s0"
    kind: Kind = "line"
    low: Array | None = None
    high: Array | None = None
    dash: int = 0

    @property
    def lows(self) -> Array:
        return self.y if self.low is None else self.low

    @property
    def highs(self) -> Array:
        return self.y if self.high is None else self.high


@dataclass(frozen=True)
class Plot:
    """A plot: what is on its axes, its lines, and what is marked."""

    key: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    targets: Sequence[tuple[float, str]] = ()
    """(value, words) of horizontal lines."""
    note: str = ""
    is_log: bool = False
    y_range: tuple[float, float] | None = None

    @property
    def has_points(self) -> bool:
        return any(len(series.x) for series in self.series)

    @property
    def legend(self) -> list[tuple[str, str, str]]:
        """(variable of the color, kind of the swatch, words) for what is named in it."""
        named = [
            (series.color, "dashed" if series.dash else series.kind, series.name)
            for series in self.series
            if series.name and len(series.x)
        ]
        names = [*dict.fromkeys(named)] if len(named) > 1 or "reference" in [kind for _, kind, _ in named] else []
        return names + [("ink", "target", words) for _, words in self.targets]


# --- thinning ---


def thinned(
    name: str,
    x: Array,
    y: Array,
    most: int = MOST_POINTS,
    low: Array | None = None,
    high: Array | None = None,
    **more: Any,
) -> Series:
    """Return a series of `most` points at most; of each bucket of equally many points: mean of x, least, mean and greatest y.

    Points without x or y are left out.

    Args:
        low, high: of points that are means themselves.
    """
    is_finite = np.isfinite(x) & np.isfinite(y)
    x, y, low, high = (None if values is None else values[is_finite] for values in (x, y, low, high))
    assert x is not None and y is not None
    if len(x) <= most:
        return Series(name, x, y, low=low, high=high, **more)
    begins = np.linspace(0, len(x), most, endpoint=False).astype(int)
    sizes = np.diff([*begins, len(x)])
    means = [np.add.reduceat(values, begins) / sizes for values in (x, y)]
    low = np.minimum.reduceat(y if low is None else low, begins)
    high = np.maximum.reduceat(y if high is None else high, begins)
    return Series(name, *means, low=low, high=high, **more)


def smoothed(values: Array, width: int) -> Array:
    """Return the mean over `width` neighbours, fewer at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    indices = np.arange(len(values))
    begins, ends = np.maximum(0, indices - width // 2), np.minimum(len(values), indices + (width + 1) // 2)
    return (sums[ends] - sums[begins]) / (ends - begins)


# --- SVG ---


def svg_of(plot: Plot) -> Markup:
    """Return a plot as an SVG element for a page, without ids that another one has."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        drawn = Figure(figsize=(WIDE_PX / 72, TALL_PX / 72), layout="constrained")
        canvas = FigureCanvasSVG(drawn)
        axes = drawn.add_subplot()
        axes.grid(axis="y")
        axes.tick_params(length=0)
        for series in plot.series:
            _draw(axes, series)
        for value, _ in plot.targets:
            axes.axhline(value, color=COLORS["ink"], linewidth=1.2, linestyle=(0, (4, 3)))
        _scale(axes, plot)
        file = io.StringIO()
        canvas.print_svg(file, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return Markup(_for_page(file.getvalue(), plot))


def _draw(axes: Any, series: Series) -> None:
    color = COLORS[series.color]
    if not len(series.x):
        return
    if series.low is not None:
        axes.fill_between(series.x, series.low, series.high, color=color, alpha=0.25, linewidth=0.0)
    style: dict[str, Any] = {"linestyle": DASHES[series.dash % len(DASHES)]}
    if series.kind == "points":
        style |= {"marker": "o", "markersize": 4.0, "linewidth": 1.4}
    elif series.kind == "reference":
        style |= {"linewidth": 1.2}
    elif len(series.x) == 1:
        style |= {"marker": "o", "markersize": 4.0}
    axes.plot(series.x, series.y, color=color, **style)


def _scale(axes: Any, plot: Plot) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    if plot.is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if plot.y_range:
        axes.set_ylim(*plot.y_range)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)


def tick(value: float) -> str:
    """Return a number for an axis: 12800 -> 12.8 k; 0.0004 -> 4e-4."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    if not value or abs(value) >= 1e-2:
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    return f"{value / 10**exponent:.3g}e{exponent}"


def _for_page(text: str, plot: Plot) -> str:
    """Make a file of matplotlib's an element of a page: own ids, the page's colors and font, words for who cannot see it."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r'id="([^"]+)"', rf'id="{plot.key}-\1"', text)
    text = re.sub(r'((?:xlink:)?href="#|url\(#)([^")]+)', rf"\1{plot.key}-\2", text).replace("xlink:href", "href")
    text = re.sub(r'font: ([\d.]+)px [^;"]*', r"font-size: \1px", text)
    for name, color in COLORS.items():
        text = text.replace(color, f"var(--{name})")
    words = f'role="img" aria-label="{escape(words_of(plot))}"'
    text = re.sub(r"<svg[^>]*>", f'<svg class="plot" viewBox="0 0 {WIDE_PX} {TALL_PX}" {words}>', text, count=1)
    return re.sub(r">\s+<", "><", text).strip()


# --- words and figures ---


def words_of(plot: Plot) -> str:
    """Say what a plot shows; its figures are in a table below it."""
    targets = [f"Dashed line: {words}." for _, words in plot.targets]
    return " ".join([f"{plot.title}: {plot.y_label} over {plot.x_label}.", *targets])


class PlotTable(NamedTuple):
    """The figures of a plot."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def table_of(plot: Plot) -> PlotTable:
    """Return the figures of a plot, thinned once more where they are many: a mean then, with the least and the greatest."""
    drawn = [series for series in plot.series if len(series.x)]
    thin = [thinned(s.name, s.x, s.y, MOST_ROWS, s.low, s.high) for s in drawn]
    is_named, rows = len(drawn) > 1, []
    bands = any(series.low is not None for series in thin)
    for series in thin:
        for x, *values in zip(series.x, series.y, series.lows, series.highs, strict=True):
            cells = [_whole(float(x)), *(figure(float(value), 6) for value in values[: 3 if bands else 1])]
            if bands and series.low is None:
                cells[2:] = ["", ""]
            rows.append([series.name, *cells] if is_named else cells)
    head = [*["series"] * is_named, plot.x_label, plot.y_label, *["least", "greatest"] * bands]
    return PlotTable(head, rows)


def _whole(value: float) -> str:
    """Return a number of images, or a time, as it is."""
    return figure(int(value) if value.is_integer() else value, 6)


# --- which plots a page has ---

LABELS = {"fid": "FID", "clip": "CLIP score (mean cosine)", "cmmd": "CMMD"}
SIDE = {"fid": "at most", "clip": "at least", "val_loss": "at most"}
IMAGES = "images seen"
CLOCK_NAMES = dict(zip(CLOCKS, ("training", "waiting for data", "evaluation", "checkpoints and the rest"), strict=True))
CLOCK_COLORS = dict(zip(CLOCKS, ("s0", "s5", "s1", "s7"), strict=True))
REFERENCE = Path(__file__).with_name("mlperf_reference_runs.csv")
"""Every published run of MLPerf's reference: 14 at a global batch of 512, 13 at 1024, 13 at 2048.

Source: the README of mlcommons/training at aa344c7f, retired_benchmarks/stable_diffusion/. The learning rate is 1.25e-7 per
image in all of them.
"""
NUM_MEANS = 100  # of a figure that differs much between neighboring windows
WIDE_RANGE = 30.0  # greatest over least: from there on an axis is logarithmic


class PlotGroup(NamedTuple):
    """A section of plots."""

    key: str
    title: str
    plots: Sequence[Plot]


def groups_of(runs: Sequence[History]) -> list[PlotGroup]:
    """Return the sections of plots that these runs have figures for."""
    groups = [
        PlotGroup("quality", "Quality", [_score(runs, key) for key in LABELS]),
        PlotGroup("learning", "Loss and learning", [*_losses(runs), *_validation(runs)]),
        PlotGroup("speed", "Speed and memory", _speed(runs)),
    ]
    groups = [group._replace(plots=[plot for plot in group.plots if plot.has_points]) for group in groups]
    return [group for group in groups if group.plots]


def _series_style(index: int, runs: Sequence[History], name: str = "") -> dict[str, Any]:
    """Return name, color and dashes of a run's series; alone it needs no name."""
    if len(runs) == 1:
        return {"name": name, "color": "s0"}
    return {"name": plain(runs[index].name), "color": f"s{index % NUM_COLORS}", "dash": index // NUM_COLORS}


def column(lines: Sequence[Line], key: str) -> Array:
    """Return a key of all lines, float64 (N,), nan where there is none."""
    return np.array([math.nan if (value := number_of(line, key)) is None else value for line in lines])


# --- FID, CLIP score and CMMD ---


def reference_bands(key: str, batches: Collection[float | None]) -> list[Series]:
    """Return the mean of a metric over the reference's runs, with its extremes, for each of these global batches."""
    rows, bands = np.genfromtxt(REFERENCE, delimiter=",", names=True), []
    for batch in np.unique(rows["global_batch_size"]) if key in (rows.dtype.names or ()) else ():
        batch_rows = rows[rows["global_batch_size"] == batch]
        if batch in batches:
            images = np.unique(batch_rows["images"])
            values = np.array([batch_rows[key][batch_rows["images"] == each] for each in images])
            name = f"MLPerf reference, batch {batch:.0f}: {values.shape[1]} runs"
            ends = {"low": values.min(1), "high": values.max(1)}
            bands.append(Series(name, images, values.mean(1), **ends, kind="reference", color="muted"))
    return bands


def _score(runs: Sequence[History], key: str) -> Plot:
    series = reference_bands(key, {number_of(run.config, "global_batch_size") for run in runs if is_mlperf(run)})
    for index, run in enumerate(runs):
        series_keys = _series_style(index, runs, "in training")
        series.append(_points(run.evaluations, key, **series_keys))
        if rows := later_scores(run):
            one = {"name": "scored later (eval.py)", "color": "s1"}
            more = {"name": f"{series_keys['name']}, scored later"} if len(runs) > 1 else one
            series.append(_points(rows, key, **series_keys | more | {"dash": 1}))
    title, is_log = LABELS[key].split(" (")[0], key == "fid" and _least(series) > 0.0
    return Plot(f"{key}-over-images", title, IMAGES, LABELS[key], series, _targets(runs, key), is_log=is_log)


def _points(lines: Sequence[Line], key: str, **own: Any) -> Series:
    return thinned(x=column(lines, "images"), y=column(lines, key), kind="points", **own)


def _targets(runs: Sequence[History], key: str) -> list[tuple[float, str]]:
    """Return each value that is a target once; whose it is where they are not all the same."""
    names_by_target: dict[float, list[str]] = {}
    for run in runs:
        if (value := number_of(run.config, f"target.{key}")) is not None:
            names_by_target.setdefault(value, []).append(plain(run.name))
    whose = {
        value: f" of {', '.join(names)}" if len(names_by_target) > 1 else "" for value, names in names_by_target.items()
    }
    return [(value, f"target{whose[value]}: {SIDE[key]} {value:g}") for value in sorted(names_by_target)]


def later_scores(run: History) -> list[Line]:
    """Return the rows of eval.py over a run's snapshots, in the way in which the run was configured."""
    guidance = run.config.get("eval.guidance")
    rows = [
        row for row in run.scores if number_of(row, "images") is not None and row.get("guidance") in (guidance, None)
    ]
    known = [[line.get(key) for key in ("images", *LABELS)] for line in run.evaluations]
    rows = [row for row in rows if [row.get(key) for key in ("images", *LABELS)] not in known]
    return sorted(rows, key=lambda row: number_of(row, "images") or 0.0)


def is_mlperf(run: History) -> bool:
    """True for a run of the benchmark's model, which the reference's curves are of."""
    is_variant = run.config.get("model.variant") == "mlperf"
    return run.config.get("model.family", "sd2") == "sd2" and (is_variant or run.config.get("mlperf.enabled") is True)


# --- loss ---


def _losses(runs: Sequence[History]) -> list[Plot]:
    plots = [_plain(runs, "loss", "Training loss", "loss", NUM_MEANS)]
    if len(runs) == 1 and len(runs[0].streams) > 1:
        images, streams = runs[0].windows["images"], list(runs[0].streams.items())
        series = [
            thinned(plain(name), images, loss, NUM_MEANS, color=f"s{index}")
            for index, (name, loss) in enumerate(streams[:NUM_COLORS])
        ]
        note = f"The first {NUM_COLORS} of {len(streams)} streams." if len(streams) > NUM_COLORS else ""
        plots.append(Plot("streams", "Loss by stream", IMAGES, "loss", series, note=note))
    plots.append(_plain(runs, "lr", "Learning rate", "learning rate"))
    return [*plots, _plain(runs, "gradient_norm", "Gradient norm", "gradient norm", NUM_MEANS)]


def _plain(runs: Sequence[History], key: str, title: str, label: str, most: int = MOST_POINTS) -> Plot:
    series = [
        thinned(x=run.windows["images"], y=run.windows[key], most=most, **_series_style(index, runs))
        for index, run in enumerate(runs)
    ]
    return Plot(key.replace("_", "-"), title, IMAGES, label, series, is_log=most == NUM_MEANS and _is_wide(series))


def _least(series: Sequence[Series]) -> float:
    """Return the least value that is drawn; 0: none is."""
    return min((float(line.lows.min()) for line in series if len(line.y)), default=0.0)


def _is_wide(series: Sequence[Series]) -> bool:
    """True where the values are positive and of very different sizes."""
    least = _least(series)
    return least > 0.0 and max(float(line.highs.max()) for line in series if len(line.y)) / least > WIDE_RANGE


def _validation(runs: Sequence[History]) -> list[Plot]:
    losses = [_points(run.validations, "val_loss", **_series_style(index, runs)) for index, run in enumerate(runs)]
    label, targets = "loss on held-out samples", _targets(runs, "val_loss")
    return [Plot("validation", "Validation loss", IMAGES, label, losses, targets)]


# --- speed, memory ---


def _speed(runs: Sequence[History]) -> list[Plot]:
    speeds = []
    for index, run in enumerate(runs):
        measured = run.windows["warmup"] + run.windows["profiled"] == 0.0
        measured = measured if measured.any() else ~measured
        x, y = run.windows["images"][measured], run.windows["images_per_sec"][measured]
        speeds.append(thinned(x=x, y=y, **_series_style(index, runs)))
    memory = _plain(runs, "peak_mem_gib", "Peak memory", "GiB")
    note = "Of the training clock alone, without warm-up windows."
    return [
        Plot("images-per-sec", "Throughput", IMAGES, "images/s", speeds, note=note, y_range=_from_zero(speeds)),
        replace(memory, y_range=_from_zero(memory.series)),
    ]


def _from_zero(series: Sequence[Series]) -> tuple[float, float] | None:
    top = max((float(line.highs.max()) for line in series if len(line.y)), default=0.0)
    return (0.0, 1.08 * top) if top > 0.0 else None
