"""Plots of the page: SVG that takes its colours and its font from the page, words for who cannot see it, and its figures.

matplotlib draws; its colours stand for variables of page.css, so that one picture is right in light, in dark and on paper.
Every run of points is thinned to what can be seen: of a bucket of windows stay least, mean and greatest, so that a spike
is never lost.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from markupsafe import Markup, escape

from reports.page_text import figure

WIDE_PX, TALL_PX = 360, 232
MOST_POINTS, MOST_ROWS = 400, 40
NUM_COLOURS = 8
COLOURS = {
    "ink": "#000101",
    "grid": "#000102",
    "muted": "#000103",
    **{f"s{number}": f"#0002{number:02x}" for number in range(NUM_COLOURS)},
}
"""Variable of page.css -> the colour that stands for it in what matplotlib writes."""
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "easel",
    "font.size": 11.0,
    "axes.axisbelow": True,
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), COLOURS["grid"]),
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), COLOURS["muted"]),
    "text.color": COLOURS["ink"],
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
Array = np.ndarray
Kind = Literal["line", "points", "reference"]


@dataclass(frozen=True)
class Series:
    """What is drawn in one colour.

    x, y: float64 (N,). low, high: what the values of a thinned point lie between, float64 (N,), or None.
    """

    name: str
    x: Array
    y: Array
    colour: str = "s0"
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
        """(variable of the colour, kind of the swatch, words) for what is named in it."""
        named = [
            (series.colour, "dashed" if series.dash else series.kind, series.name)
            for series in self.series
            if series.name and len(series.x)
        ]
        found = [*dict.fromkeys(named)] if len(named) > 1 or "reference" in [kind for _, kind, _ in named] else []
        return found + [("ink", "target", words) for _, words in self.targets]


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
    there = np.isfinite(x) & np.isfinite(y)
    x, y, low, high = (None if of is None else of[there] for of in (x, y, low, high))
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
    places = np.arange(len(values))
    begins, ends = np.maximum(0, places - width // 2), np.minimum(len(values), places + (width + 1) // 2)
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
            axes.axhline(value, color=COLOURS["ink"], linewidth=1.2, linestyle=(0, (4, 3)))
        _scale(axes, plot)
        file = io.StringIO()
        canvas.print_svg(file, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return Markup(_for_page(file.getvalue(), plot))


def _draw(axes: Any, series: Series) -> None:
    colour = COLOURS[series.colour]
    if not len(series.x):
        return
    if series.low is not None:
        axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.25, linewidth=0.0)
    style: dict[str, Any] = {"linestyle": DASHES[series.dash % len(DASHES)]}
    if series.kind == "points":
        style |= {"marker": "o", "markersize": 4.0, "linewidth": 1.4}
    elif series.kind == "reference":
        style |= {"linewidth": 1.2}
    elif len(series.x) == 1:
        style |= {"marker": "o", "markersize": 4.0}
    axes.plot(series.x, series.y, color=colour, **style)


def _scale(axes: Any, plot: Plot) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if plot.is_log:
        axes.set_yscale("log")
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
    """Make a file of matplotlib's an element of a page: own ids, the page's colours and font, words for who cannot see it."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r'id="([^"]+)"', rf'id="{plot.key}-\1"', text)
    text = re.sub(r'((?:xlink:)?href="#|url\(#)([^")]+)', rf"\1{plot.key}-\2", text).replace("xlink:href", "href")
    text = re.sub(r'font: ([\d.]+)px [^;"]*', r"font-size: \1px", text)
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    words = f'role="img" aria-label="{escape(words_of(plot))}"'
    text = re.sub(r"<svg[^>]*>", f'<svg class="plot" viewBox="0 0 {WIDE_PX} {TALL_PX}" {words}>', text, count=1)
    return re.sub(r">\s+<", "><", text).strip()


# --- words and figures ---


def words_of(plot: Plot) -> str:
    """Say what a plot shows; its figures are in a table below it."""
    targets = [f"Dashed line: {words}." for _, words in plot.targets]
    return " ".join([f"{plot.title}: {plot.y_label} over {plot.x_label}.", *targets])


class Table(NamedTuple):
    """The figures of a plot."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def table_of(plot: Plot) -> Table:
    """Return the figures of a plot, thinned once more where they are many: a mean then, with the least and the greatest."""
    shown = [series for series in plot.series if len(series.x)]
    thin = [thinned(s.name, s.x, s.y, MOST_ROWS, s.low, s.high) for s in shown]
    is_named, rows = len(shown) > 1, []
    bands = any(series.low is not None for series in thin)
    for series in thin:
        for x, *values in zip(series.x, series.y, series.lows, series.highs, strict=True):
            cells = [_whole(float(x)), *(figure(float(value), 6) for value in values[: 3 if bands else 1])]
            if bands and series.low is None:
                cells[2:] = ["", ""]
            rows.append([series.name, *cells] if is_named else cells)
    head = [*["series"] * is_named, plot.x_label, plot.y_label, *["least", "greatest"] * bands]
    return Table(head, rows)


def _whole(value: float) -> str:
    """Return a number of images, or a time, as it is."""
    return figure(int(value) if value.is_integer() else value, 6)
