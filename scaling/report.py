"""Show a record of scaling: its tables, its plots, and both in a page.

    python -m scaling.report RECORD.json                           # for the terminal
    python -m scaling.report RECORD.json FOLDER                    # the plots
    python -m scaling.report RECORD.json OUT.csv                   # every held-out row
    python -m scaling.report RECORD.json PAGE.md                   # the estimates between a page's marks

A page says by marks where the table goes (reports/formatting.py). Pages and plots of the project: `make report`.
Exit code: 0, or 2 where a file cannot be read, is no such record, or a page has no marks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.command import command
from reports.formatting import Record, RecordTable, Row, in_markdown, in_text, show_record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Head = tuple[str, ...]
ENDS = ("", "_low", "_high")
MOSAICML, MOSAICML_PRICE = "mosaicml_online_512", 160_000 / 79_000  # USD an A100-hour, of January 2023
MOSAICML_IMAGES = 2_867_200_000  # 1,126,400,000 at 256 px and 1,740,800,000 at 512


class Section(NamedTuple):
    """A heading, its table, and lines below it."""

    heading: str
    table: RecordTable
    notes: tuple[str, ...] = ()


def sections_of(record: Record) -> Iterator[Section]:
    """Yield the sections in the order in which they are shown."""
    yield _mosaicml(record)
    yield _failures_and_data(record)
    yield from (_best_batch(target) for target in record["targets"])
    yield _errors(record["errors"])
    yield _rows(record["rows"])
    yield _parameters(record["parameters"])
    if record["records"]:
        yield _records(record["records"])


def _number(value: float | None, digits: int = 0) -> str:
    """A figure with so many decimals, three digits if below 10 or huge; null is a time without an end."""
    if value is None:
        return "never"
    if value and (abs(value) < 10 or abs(value) >= 1e12):
        return f"{value:#.3g}"
    return f"{value:,.{digits}f}" if value else "0"


def _share(value: float | None) -> str:
    return "never ends" if value is None else f"{100 * value:.3g}%" if value >= 1 else f"{value:.1%}"


def _with_interval(row: Record, name: str, digits: int | str = 0, factor: float = 1.0) -> str:
    """A figure with its interval, as `_number` shows it or in a format; alone where its ends are no others."""
    values = [row[f"{name}{end}"] for end in ENDS]
    texts = [format(factor * value, digits) if isinstance(digits, str) else _number(value, digits) for value in values]
    return texts[0] if len({*values}) == 1 else f"{texts[0]} ({texts[1]} to {texts[2]})"


def _right(head: Sequence[str]) -> str:
    return "l" + "r" * (len(head) - 1)


def _estimates(record: Record) -> RecordTable:
    """A row for each number of GPUs: images/s, efficiency, days, GPU-hours and cost."""
    run, price = record["run"], record["config"]["price_per_gpu_hour"]
    head: Head = ("GPUs", "images/s", "efficiency", "days", "GPU-hours")
    head += () if price is None else (f"cost, at {price:g} an hour",)
    rows: list[Row] = []
    for row in record["estimates"]:
        raised = "" if row["global_batch_size"] == run["batch"] else f", batch {row['global_batch_size']:,}"
        cells = [f"{row['num']:,}{raised}", _with_interval(row, "images_per_sec")]
        cells += [_with_interval(row, "times", ".0%", 8 / row["num"]), _with_interval(row, "days", 2)]
        cells += [_with_interval(row, "gpu_hours")] + ([] if price is None else [_with_interval(row, "cost")])
        rows.append(tuple(cells))
    title = f"{run['name']}: {run['images']:,} images at a global batch of {run['batch']:,} on {run['gpu']}; "
    return RecordTable(f"{title}speed of a GPU: {run['rate']}:", head, _right(head), rows)


def _mosaicml(record: Record) -> Section:
    """The estimates, and MosaicML's columns beside them."""
    run, table = record["run"], _estimates(record)
    theirs = {row["num"]: row for row in record["rows"] if row["series"] == MOSAICML}
    head: Head = (*table.head, "MosaicML: images/s", "of it predicted", "days", "GPU-hours", "cost, USD")
    rows: list[Row] = []
    for row, estimates in zip(table.rows, record["estimates"], strict=True):
        cells: list[str | None] = [None] * 5
        if published := theirs.get(estimates["num"]):
            hours = run["images"] / published["images_per_sec"] / 3600
            cells = [_number(published["images_per_sec"], 1), _with_interval(published, "predicted")]
            cells += [_number(hours / 24, 1), _number(published["num"] * hours)]
            cells += [_number(published["num"] * hours * MOSAICML_PRICE)]
        rows.append((*row, *cells))
    return Section("MosaicML's table", RecordTable(table.title, head, _right(head), rows), _notes(record))


def _notes(record: Record) -> tuple[str, ...]:
    """The lines below MosaicML's table: what differs from the run, what efficiency is of, and whose days and money."""
    run, notes = record["run"], []
    price, date = (record["config"][key] for key in ("price_per_gpu_hour", "price_date"))
    if run["differs"]:
        notes.append(f"The record differs from the run in: {', '.join(run['differs'])}; its TFLOP/s is carried over.")
    notes.append(
        f"Efficiency is that over one node of 8 GPUs, at {_with_interval(record['base'], 'images_per_sec')} images/s."
    )
    if any(row["global_batch_size"] != run["batch"] for row in record["estimates"]):
        note = "A row with a batch trains with another batch than the run: one image a GPU, as many images in all."
        notes.append(note)
    if price is not None:
        note = f"The price of a GPU-hour is of {date}."
        notes.append(f"{note} MosaicML's is 160,000 USD over 79,000 A100-hours, January 2023.")
    note = f"MosaicML's days, hours and cost are those of {run['images']:,} images at its rate."
    note += "" if run["images"] == MOSAICML_IMAGES else f" It trained {MOSAICML_IMAGES:,} in all."
    return (*notes, f"{note} Its rows are of A100, with the encoders in the step.")


def _failures_and_data(record: Record) -> Section:
    """Failures, checkpoints, evaluations and data."""
    run, config, evaluation = record["run"], record["config"], record["evaluation"]
    head: Head = ("GPUs", "a failure every", "best cadence", "its cost", f"at save.every_images={run['save_images']}")
    head += ("training, h", "evaluations, h", "MB/s a node", "cores a node", "limit")
    rows: list[Row] = []
    for row in record["estimates"]:
        every, own = (of and f"{_number(of / 60)} min" for of in (row["save_every_sec"], row["own_every_sec"]))
        cells: list[str | None] = [f"{row['num']:,}", f"{_number(row['mtbf_hours'])} h", every or "saves none"]
        cells += [_share(row["overhead_frac"]), own and f"{own}: {_share(row['own_frac'])}"]
        cells += [_number(row[key], 1) for key in ("train_hours", "eval_hours")]
        data = (row["node_mb_per_sec"], 0), (row["node_cores"], 1)
        rows.append((*cells, *(None if of is None else _number(of, digits) for of, digits in data), row["limit"]))
    saved = f"A checkpoint of {run['checkpoint_gib']:.1f} GiB at {config['write_gib_per_sec']:g} GiB/s, "
    title = saved if run["checkpoint_gib"] else "The run saves no checkpoints, so that a failure loses all of it; "
    title += f"{config['resume_sec']:g} s to resume, {config['mtbf_hours']:,.0f} GPU-hours a failure; "
    title += f"{run['num_evals']} evaluations in training:"
    worst = max(abs(of["error"]) for of in evaluation["rows"])
    notes = (
        f"An evaluation delivers {evaluation['share']:.0%} of training's TFLOP/s: by {len(evaluation['rows'])} of MLPerf's "
        f"logs, of which the worst is missed by {worst:.1%} from the others.",
        "Bytes and processor time of a sample are those measured at 512 px, scaled by its size.",
    )
    table = RecordTable(title, head, "r" * (len(head) - 1) + "l", rows)
    return Section("Failures, checkpoints, evaluation and data", table, notes)


def _best_batch(target: Record) -> Section:
    """The batch that is there first, for each number of devices, and the fastest published result of as many."""
    price = target["price"]
    head: Head = ("GPUs", "best global batch", "images", "minutes to the target", "GPU-hours")
    head += () if price is None else (f"cost, at {price:g} an hour",)
    head += ("published, minutes at batch",)
    rows: list[Row] = []
    for curve in target["curves"]:
        best, published = curve["best"], [point for point in target["published"] if point["num"] == curve["num"]]
        first = min(published, key=lambda point: point["minutes"], default=None)
        edge = ", the last tried" if best["global_batch_size"] == curve["tried"][-1]["global_batch_size"] else ""
        cells = [f"{best['global_batch_size']:,}{edge}", f"{best['images']:,.0f}", _with_interval(best, "minutes", 1)]
        cells += [_with_interval(best, "device_hours", 1)] + ([] if price is None else [_with_interval(best, "cost")])
        first_point = first and f"{first['minutes']:.2f} at {first['global_batch_size'] or '?'}"
        rows.append((f"{curve['num']:,}", *cells, first_point))
    e, c = _with_interval(target["images"], "e", ",.2f", 1e-6), _with_interval(target["images"], "c", ",.0f")
    title = f"By ruleset {target['ruleset']}. The target is {target['target']}. "
    title += f"Images to it are E (1 + batch / C). E: {e} million. C: {c}:"
    return Section(f"The best batch: {target['title']}", RecordTable(title, head, "r" * len(head), rows))


def _errors(errors: Record) -> Section:
    """Errors by the number of devices, of both ways of holding places out."""
    head: Head = ("GPUs",)
    for method in ("held out one by one", "from the smallest alone"):
        head += (f"{method}: places", "median error", "worst", "in their interval")
    rows: list[Row] = []
    for size in errors["sizes"]:
        cells: list[str] = []
        for method in (size["predicted"], size["alone"]):
            cells += [
                str(method["places"]),
                *(f"{method[key]:.1%}" for key in ("median", "worst")),
                f"{method['covered']:.0%}",
            ]
        rows.append((f"{size['from']:,} to {size['to']:,}", *cells))
    title = f"{errors['rows']} published rows, {errors['fitted']} fitted numbers. A place is a series on so many GPUs. "
    title += "Each was held out alone; then all of a series but the smallest, as a run is predicted from one record:"
    note = f"The residuals deviate by {errors['noise']:.1%}. Each doubling of the domains adds {errors['by_doubling']:.1%}."
    return Section("Error against published rows", RecordTable(title, head, _right(head), rows), (note,))


def _rows(held: Sequence[Record]) -> Section:
    head: Head = ("series", "GPUs", "global batch", "systems", "published", "predicted without it", "error")
    head += ("error of the fit", "predicted from the smallest alone", "its error")
    rows: list[Row] = []
    for row in sorted(held, key=lambda row: (row["title"], row["num"])):
        cells = [f"{row[key]:,.0f}" for key in ("num", "global_batch_size", "systems", "images_per_sec")]
        cells += [_with_interval(row, "predicted", ",.0f"), *(f"{row[key]:+.1%}" for key in ("error", "fitted_error"))]
        alone = (_with_interval(row, "alone", ",.0f"), f"{row['alone_error']:+.1%}") if "alone" in row else (None, None)
        rows.append((row["title"], *cells, *alone))
    title = "Images/s of every place; of several systems the geometric mean:"
    return Section("Every held-out row", RecordTable(title, head, _right(head), rows))


def _parameters(parameters: Sequence[Record]) -> Section:
    head = ("parameter", "what", "prior, times or over", "fitted, 90 %", "1 % more of it, %", "one deviation more, %")
    rows: list[Row] = []
    for parameter in sorted(parameters, key=lambda each: -abs(each["for_1_deviation"])):
        has_prior = "prior" in parameter
        about = (
            (
                parameter["text"],
                f"{parameter['prior']:g}, {parameter['factor']:g}",
                _with_interval(parameter, "value", ".3g"),
            )
            if has_prior
            else [None] * 3
        )
        rows.append(
            (parameter["name"], *about, f"{parameter['for_1_percent']:+.3f}", f"{parameter['for_1_deviation']:+.2f}")
        )
    title = "Shared parameters, and the rate of a series; what changes the images/s of 1,024 GPUs most comes first:"
    return Section("Parameters", RecordTable(title, head, "llrrrr", rows))


def _records(records: Sequence[Record]) -> Section:
    head: Head = ("record", "device", "number", "global batch", "images/s", "perfect", "from the smallest", "error")
    head += ("by published rows alone", "error")
    rows: list[Row] = []
    for row in records:
        cells = [
            row["device"],
            str(row["num"]),
            str(row["global_batch_size"]),
            _with_interval(row, "images_per_sec", ",.1f"),
        ]
        cells.append(f"{row['perfect']:,.1f}")
        for prediction in ("predicted", "published"):
            cells += [_with_interval(row, prediction, ",.1f"), f"{row[prediction] / row['images_per_sec'] - 1:+.1%}"]
        rows.append((row["name"], *cells))
    title = "Records of one run on several numbers of devices; the least and the greatest window:"
    return Section("Records laid over", RecordTable(title, head, "llrrrrrrrr", rows))


# --- the whole ---


def text_of(record: Record) -> str:
    """Format a record for the terminal."""
    parts = []
    for section in sections_of(record):
        parts += [f"=== {section.heading}", in_text(section.table), *section.notes, ""]
    return "\n".join(parts)


def markdown_of(record: Record) -> str:
    """Format the estimates for a page."""
    return f"\n{in_markdown(_estimates(record))}\n"


@command()
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    words = "RECORD.json, FOLDER, OUT.csv, PAGE.md"
    return show_record(argv, "scaling", text_of, markdown_of, draw, lambda record: _rows(record["rows"]).table, words)


# --- plots of a record of scaling ---

Rows = Sequence[Mapping[str, Any]]

DPI = 110
COLORS = ("#31688e", "#d95f02", "#35864a", "#a6368c", "#8a6d1d", "#666666", "#1b9e9e", "#c0392b", "#7570b3", "#4d4d4d")
MARKS = "os^Dv"
"""Of the rounds of published results, the newest first."""
SPEED_SERIES = (
    *("mosaicml_online_512", "mosaicml_latents_256", "nemo_h100"),
    *("mlperf_h100_v31", "mlperf_h100_v40", "mlperf_gb200"),
)
"""Series in the plot of speeds; the tables have all."""


def draw(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw both plots into a folder; return the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    speed, axes = pyplot.subplots(1, 2, figsize=(14, 6), layout="constrained")
    _draw_published(axes[0], record["rows"])
    _draw_run(axes[1], record)
    to_target, panel = pyplot.subplots(figsize=(10, 6), layout="constrained")
    _draw_target(panel, next(target for target in record["targets"] if target["curves"]))
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
    for name, color in zip(SPEED_SERIES, COLORS, strict=False):
        points = [row for row in rows if row["series"] == name]
        first, nums = points[0]["images_per_sec"] / points[0]["num"], [row["num"] for row in points]
        keys = ("images_per_sec", "predicted", "predicted_low", "predicted_high")
        measured, predicted, low, high = ([row[key] / row["num"] / first for row in points] for key in keys)
        axes.plot(nums, measured, "o-", color=color, label=points[0]["title"], markersize=5)
        ends = [
            [t - e for t, e in zip(predicted, low, strict=True)],
            [e - t for t, e in zip(predicted, high, strict=True)],
        ]
        axes.errorbar(nums, predicted, ends, fmt="x", color=color, alpha=0.6, capsize=2, elinewidth=0.8)
    axes.axhline(1.0, color="#000000", linestyle="--", linewidth=0.8, label="perfect")
    _over_nums(axes, [4, 8, 16, 32, 64, 128, 256, 512, 1024])
    axes.set_ylim(0, 1.35)
    title = "Published (dots) and predicted without that row (crosses, 90 %)"
    _name(axes, "devices", "images/s per device, over those of the series' smallest row", title)
    axes.legend(fontsize=7, loc="lower left")


def _draw_run(axes: Axes, record: Mapping[str, Any]) -> None:
    """The run's images/s: predicted with its interval, perfect, measured, and MosaicML's rows."""

    def plot(rows: Rows, key: str, mark: str, color: int, label: str) -> None:
        axes.plot([row["num"] for row in rows], [row[key] for row in rows], mark, color=COLORS[color], label=label)

    rows, run, key = record["estimates"], record["run"], "images_per_sec"
    nums = [row["num"] for row in rows]
    perfect = [record["base"][key] * num / record["base"]["num"] for num in nums]
    axes.plot(nums, perfect, "--", color="#000000", linewidth=0.8, label="perfect, from one node of 8")
    low, high = ([row[f"{key}_{end}"] for row in rows] for end in ("low", "high"))
    axes.fill_between(nums, low, high, color=COLORS[0], alpha=0.2, label="90 %")
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


def _draw_target(axes: Axes, target: Mapping[str, Any]) -> None:
    """A curve for each number of devices, its best batch, and the published results of known batches by their round."""
    titles = sorted({point["title"] for point in target["published"]}, reverse=True)
    marks, labelled = dict(zip(titles, MARKS, strict=False)), set()
    for index, curve in enumerate(target["curves"]):
        tried, best, color = curve["tried"], curve["best"], COLORS[index % len(COLORS)]
        batches = [each["global_batch_size"] for each in tried]
        axes.plot(batches, [each["minutes"] for each in tried], "-", color=color, label=f"{curve['num']:,} devices")
        low, high = ([each[f"minutes_{end}"] for each in tried] for end in ("low", "high"))
        axes.fill_between(batches, low, high, color=color, alpha=0.12, linewidth=0)
        axes.plot([best["global_batch_size"]], [best["minutes"]], "*", color=color, markersize=13)
        for point in (point for point in target["published"] if point["num"] == curve["num"]):
            if batch := point["global_batch_size"]:
                axes.plot([batch], [point["minutes"]], marks[point["title"]], color=color, markerfacecolor="none")
            else:
                axes.axhline(point["minutes"], color=color, linestyle=":", linewidth=1)
            labelled.add(point["title"] if batch else None)
    for title, mark in marks.items():
        if title in labelled:
            axes.plot([], [], mark, color="#000000", markerfacecolor="none", label=f"published: {title}")
    if None in labelled:
        axes.plot([], [], ":", color="#000000", linewidth=1, label="published, batch not known")
    _plain_log(axes)
    _over_nums(axes, target["points"])
    axes.grid(alpha=0.3, which="both")
    _name(
        axes,
        "global batch; star: the best; band: 90 %",
        "minutes to the target",
        f"{target['title']}\nTarget: {target['target']}",
    )
    axes.legend(fontsize=8)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
