"""Pictures of a record of preflight.scaling: speed over GPUs; time and GPU-hours to the target over the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]

DPI = 110
COLOURS = ("#31688e", "#d95f02", "#35864a", "#a6368c", "#8a6d1d", "#666666", "#1b9e9e", "#c0392b", "#7570b3", "#4d4d4d")
MARKS = "os^Dv"
"""Of the rounds of published results, the newest first."""
SHOWN = (
    *("mosaicml_online_512", "mosaicml_latents_256", "nemo_h100"),
    *("mlperf_h100_v31", "mlperf_h100_v40", "mlperf_gb200"),
)
"""Series of the picture of speeds; the tables have all."""


def draw(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw both pictures into a folder; return the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    speed, axes = pyplot.subplots(1, 2, figsize=(14, 6), layout="constrained")
    _draw_published(axes[0], record["rows"])
    _draw_run(axes[1], record)
    drawn = [target for target in record["targets"] if target["curves"]]
    to_target, grid = pyplot.subplots(2, len(drawn), figsize=(7 * len(drawn), 10), layout="constrained", squeeze=False)
    for column, target in enumerate(drawn):
        _draw_target(grid[0][column], target, "minutes", "minutes to the target")
        _draw_target(grid[1][column], target, "device_hours", "device-hours to the target")
    paths = [folder / "scaling_speed.png", folder / "scaling_target.png"]
    for figure, path in zip((speed, to_target), paths, strict=True):
        figure.savefig(path, dpi=DPI)
        pyplot.close(figure)
    return paths


def _over_nums(axes: Axes, nums: Sequence[int]) -> None:
    """A logarithmic axis of numbers, each of which is named."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(nums, [f"{num:,}" for num in nums])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)


def _plain_log(axes: Axes) -> None:
    """A logarithmic axis with plain numbers: 20, 50, 100."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _name(axes: Axes, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)


def _draw_published(axes: Axes, rows: Rows) -> None:
    """Efficiency against the smallest place of each series: measured, and predicted without the place."""
    for name, colour in zip(SHOWN, COLOURS, strict=False):
        own = [row for row in rows if row["series"] == name]
        first, nums = own[0]["images_per_sec"] / own[0]["num"], [row["num"] for row in own]
        keys = ("images_per_sec", "predicted", "predicted_low", "predicted_high")
        measured, told, low, high = ([row[key] / row["num"] / first for row in own] for key in keys)
        axes.plot(nums, measured, "o-", color=colour, label=own[0]["title"], markersize=5)
        ends = [[t - e for t, e in zip(told, low, strict=True)], [e - t for t, e in zip(told, high, strict=True)]]
        axes.errorbar(nums, told, ends, fmt="x", color=colour, alpha=0.6, capsize=2, elinewidth=0.8)
    axes.axhline(1.0, color="#000000", linestyle="--", linewidth=0.8, label="perfect")
    _over_nums(axes, [4, 8, 16, 32, 64, 128, 256, 512, 1024])
    axes.set_ylim(0, 1.35)
    title = "Published (dots) and predicted without that row (crosses, 90 %)"
    _name(axes, "devices", "images/s a device, over those of the series' smallest row", title)
    axes.legend(fontsize=7, loc="lower left")


def _draw_run(axes: Axes, record: Mapping[str, Any]) -> None:
    """The run's images/s: predicted with its interval, perfect, measured, and MosaicML's rows."""

    def plot(rows: Rows, key: str, mark: str, colour: int, label: str) -> None:
        axes.plot([row["num"] for row in rows], [row[key] for row in rows], mark, color=COLOURS[colour], label=label)

    rows, run, key = record["estimates"], record["run"], "images_per_sec"
    nums = [row["num"] for row in rows]
    perfect = [record["base"][key] * num / record["base"]["num"] for num in nums]
    axes.plot(nums, perfect, "--", color="#000000", linewidth=0.8, label="perfect, from one node of 8")
    low, high = ([row[f"{key}_{end}"] for row in rows] for end in ("low", "high"))
    axes.fill_between(nums, low, high, color=COLOURS[0], alpha=0.2, label="90 %")
    plot(rows, key, "x-", 0, f"predicted: {run['name']} on {run['gpu']}")
    mosaicml = [row for row in record["rows"] if row["series"] == "mosaicml_online_512"]
    plot(mosaicml, key, "o", 1, "MosaicML's A100, published")
    plot(mosaicml, "predicted", "x", 1, "MosaicML's A100, predicted without that row")
    if record["records"]:
        plot(record["records"], key, "s", 2, f"measured: {record['records'][0]['device']}")
    _over_nums(axes, nums)
    _plain_log(axes)
    raised = [row["num"] for row in rows if row["global_batch_size"] != run["batch"]]
    more = f"; from {raised[0]:,} on one image a GPU" if raised else ""
    _name(axes, f"GPUs, global batch {run['batch']:,}{more}", "images/s", "The run, predicted, beside perfect scaling")
    axes.legend(fontsize=8, loc="upper left")


def _draw_target(axes: Axes, target: Mapping[str, Any], key: str, label: str) -> None:
    """A curve for each number of devices, its best batch, and the published results of known batches by their round."""
    titles = sorted({point["title"] for point in target["published"]}, reverse=True)
    marks, shown = dict(zip(titles, MARKS, strict=False)), set()
    for place, curve in enumerate(target["curves"]):
        tried, best, colour = curve["tried"], curve["best"], COLOURS[place % len(COLOURS)]
        batches = [each["global_batch_size"] for each in tried]
        axes.plot(batches, [each[key] for each in tried], "-", color=colour, label=f"{curve['num']:,} devices")
        low, high = ([each[f"{key}_{end}"] for each in tried] for end in ("low", "high"))
        axes.fill_between(batches, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.plot([best["global_batch_size"]], [best[key]], "*", color=colour, markersize=13)
        for point in (point for point in target["published"] if point["num"] == curve["num"]):
            if batch := point["global_batch_size"]:
                axes.plot([batch], [point[key]], marks[point["title"]], color=colour, markerfacecolor="none")
            else:
                axes.axhline(point[key], color=colour, linestyle=":", linewidth=1)
            shown.add(point["title"] if batch else None)
    for title, mark in marks.items():
        if title in shown:
            axes.plot([], [], mark, color="#000000", markerfacecolor="none", label=f"published: {title}")
    if None in shown:
        axes.plot([], [], ":", color="#000000", linewidth=1, label="published, batch not known")
    _plain_log(axes)
    _over_nums(axes, target["points"])
    axes.grid(alpha=0.3, which="both")
    _name(axes, "global batch; star: the best; band: 90 %", label, f"{target['title']}\nTarget: {target['target']}")
    axes.legend(fontsize=8)
