"""Pictures of a record of preflight.scaling: speed over GPUs; time and GPU-hours to the target over the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 110
COLOURS = ("#31688e", "#d95f02", "#35864a", "#a6368c", "#8a6d1d", "#666666", "#1b9e9e", "#c0392b", "#7570b3", "#4d4d4d")
MARKS = ("o", "s", "^", "D", "v")
"""Of the rounds of published results, the newest first."""
SHOWN = (
    "mosaicml_online_512",
    "mosaicml_latents_256",
    "nemo_h100",
    "mlperf_h100_v31",
    "mlperf_h100_v40",
    "mlperf_gb200",
)
"""Series of the picture of speeds; the tables have all."""
SPEED, TARGET = "scaling_speed.png", "scaling_target.png"


def draw(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw both pictures into a folder; return the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(1, 2, figsize=(14, 6), layout="constrained")
    _draw_published(axes[0], record["rows"])
    _draw_run(axes[1], record)
    figure.savefig(folder / SPEED, dpi=DPI)
    pyplot.close(figure)
    drawn = [target for target in record["targets"] if target["curves"]]
    figure, grid = pyplot.subplots(2, len(drawn), figsize=(7 * len(drawn), 10), layout="constrained", squeeze=False)
    for column, target in enumerate(drawn):
        _draw_target(grid[0][column], target, "minutes", "minutes to the target")
        _draw_target(grid[1][column], target, "device_hours", "device-hours to the target")
    figure.savefig(folder / TARGET, dpi=DPI)
    pyplot.close(figure)
    return [folder / SPEED, folder / TARGET]


def _over_nums(axes: Axes, nums: Sequence[int]) -> None:
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


def _draw_published(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Efficiency against the smallest place of each series: measured, and predicted without the place."""
    for name, colour in zip(SHOWN, COLOURS, strict=False):
        own = [row for row in rows if row["series"] == name]
        first = own[0]["images_per_sec"] / own[0]["num"]
        nums = [row["num"] for row in own]

        def each(key: str, own: Sequence[Mapping[str, Any]] = own, first: float = first) -> list[float]:
            return [row[key] / row["num"] / first for row in own]

        axes.plot(nums, each("images_per_sec"), "o-", color=colour, label=own[0]["title"], markersize=5)
        told, low, high = (each(f"predicted{end}") for end in ("", "_low", "_high"))
        ends = [[t - e for t, e in zip(told, low, strict=True)], [e - t for t, e in zip(told, high, strict=True)]]
        axes.errorbar(nums, told, ends, fmt="x", color=colour, alpha=0.6, capsize=2, elinewidth=0.8)
    axes.axhline(1.0, color="#000000", linestyle="--", linewidth=0.8, label="perfect")
    _over_nums(axes, [4, 8, 16, 32, 64, 128, 256, 512, 1024])
    axes.set_ylim(0, 1.35)
    axes.set_xlabel("devices")
    axes.set_ylabel("images/s a device, over those of the series' smallest row")
    axes.set_title("Published (dots) and predicted without that row (crosses, 90 %)", fontsize=10)
    axes.legend(fontsize=7, loc="lower left")


def _draw_run(axes: Axes, record: Mapping[str, Any]) -> None:
    """The run's images/s: predicted with its interval, perfect, and MosaicML's rows."""
    rows, run = record["estimates"], record["run"]
    nums = [row["num"] for row in rows]
    ends = [[row[f"images_per_sec{end}"] for row in rows] for end in ("", "_low", "_high")]
    perfect = [record["base"]["images_per_sec"] * num / record["base"]["num"] for num in nums]
    axes.plot(nums, perfect, "--", color="#000000", linewidth=0.8, label="perfect, from one node of 8")
    axes.fill_between(nums, ends[1], ends[2], color=COLOURS[0], alpha=0.2, label="90 %")
    axes.plot(nums, ends[0], "-", color=COLOURS[0], marker="x", label=f"predicted: {run['name']} on {run['gpu']}")
    theirs = record["published"]["mosaicml"]
    for key, mark, label in (("images_per_sec", "o", "published"), ("predicted", "x", "predicted without that row")):
        points = [(row["num"], row[key]) for row in theirs]
        axes.plot(*zip(*points, strict=True), mark, color=COLOURS[1], label=f"MosaicML's A100, {label}")
    over = record["laid_over"]
    if not over["is_cpu"]:
        points = [(row["num"], row["images_per_sec"]) for row in over["rows"]]
        axes.plot(*zip(*points, strict=True), "s", color=COLOURS[2], label=f"measured: {over['what']}")
    _over_nums(axes, nums)
    _plain_log(axes)
    raised = [row["num"] for row in rows if row["global_batch_size"] != run["batch"]]
    more = f"; from {raised[0]:,} on one image a GPU" if raised else ""
    axes.set_xlabel(f"GPUs, global batch {run['batch']:,}{more}")
    axes.set_ylabel("images/s")
    axes.set_title("The run, predicted, beside perfect scaling", fontsize=10)
    axes.legend(fontsize=8, loc="upper left")


def _draw_target(axes: Axes, target: Mapping[str, Any], key: str, label: str) -> None:
    """A curve for each number of devices, its best batch, and the published results, each round by its mark."""
    from matplotlib.ticker import NullLocator

    titles = sorted({point["title"] for point in target["published"]}, reverse=True)
    marks = dict(zip(titles, MARKS, strict=False))
    for place, curve in enumerate(target["curves"]):
        tried, of, colour = curve["tried"], curve["best"], COLOURS[place % len(COLOURS)]
        batches = [each["global_batch_size"] for each in tried]
        axes.plot(batches, [each[key] for each in tried], "-", color=colour, label=f"{curve['num']:,} devices")
        low, high = ([each[f"{key}_{end}"] for each in tried] for end in ("low", "high"))
        axes.fill_between(batches, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.plot([of["global_batch_size"]], [of[key]], "*", color=colour, markersize=13)
        for point in (point for point in target["published"] if point["num"] == curve["num"]):
            if point["global_batch_size"]:
                mark = marks[point["title"]]
                axes.plot([point["global_batch_size"]], [point[key]], mark, color=colour, markerfacecolor="none")
            else:
                axes.axhline(point[key], color=colour, linestyle=":", linewidth=1)
    nums = [curve["num"] for curve in target["curves"]]
    of_curves = [point for point in target["published"] if point["num"] in nums]
    for title, mark in marks.items():
        if any(point["title"] == title and point["global_batch_size"] for point in of_curves):
            axes.plot([], [], mark, color="#000000", markerfacecolor="none", label=f"published: {title}")
    if any(not point["global_batch_size"] for point in of_curves):
        axes.plot([], [], ":", color="#000000", linewidth=1, label="published, batch not known")
    axes.set_xscale("log", base=2)
    _plain_log(axes)
    ticks = [point["global_batch_size"] for point in target["points"]]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3, which="both")
    axes.set_xlabel("global batch; star: the best; band: 90 %")
    axes.set_ylabel(label)
    axes.set_title(f"{target['title']}\nTarget: {target['target']}", fontsize=10)
    axes.legend(fontsize=8)
