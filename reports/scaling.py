"""Show a record of preflight.scaling: its tables, its pictures, and both in a page.

    python -m reports.scaling RECORD.json                           # for the terminal
    python -m reports.scaling RECORD.json FOLDER PAGE.md            # the pictures; the tables between a page's marks

A page says by marks where the tables go (reports/marks.py). Pages and pictures of the project: `make report`.
Exit code: 0, or 2 where a file cannot be read, is no such record, or a page has no marks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cli.command import command
from reports.marks import Record, Row, Table, in_markdown, in_text, show_record
from reports.scaling_pictures import draw

Head = tuple[str, ...]
ENDS = ("", "_low", "_high")
MOSAICML, MOSAICML_PRICE = "mosaicml_online_512", 160_000 / 79_000  # USD an A100-hour, of January 2023
MOSAICML_IMAGES = 2_867_200_000  # 1,126,400,000 at 256 px and 1,740,800,000 at 512


class Section(NamedTuple):
    """A heading, its table, and lines below it."""

    heading: str
    table: Table
    notes: tuple[str, ...] = ()


def sections_of(record: Record) -> Iterator[Section]:
    """Yield the sections in the order in which they are shown."""
    yield _mosaicml(record)
    yield _around(record)
    yield from (_best(target) for target in record["targets"])
    yield _errors(record["errors"])
    yield _rows(record["rows"])
    yield _parameters(record["parameters"])
    if record["records"]:
        yield _records(record["records"])


def _number(value: float | None, digits: int = 0) -> str:
    """A figure with so many decimals, three digits where it is below 10 or huge; null is a time without an end."""
    if value is None:
        return "never"
    if value and (abs(value) < 10 or abs(value) >= 1e12):
        return f"{value:#.3g}"
    return f"{value:,.{digits}f}" if value else "0"


def _share(value: float | None) -> str:
    return "never ends" if value is None else f"{100 * value:.3g}%" if value >= 1 else f"{value:.1%}"


def _ends(row: Record, name: str, digits: int | str = 0, factor: float = 1.0) -> str:
    """A figure with its interval, as `_number` shows it or in a format; alone where its ends are no others."""
    values = [row[f"{name}{end}"] for end in ENDS]
    texts = [format(factor * of, digits) if isinstance(digits, str) else _number(of, digits) for of in values]
    return texts[0] if len({*values}) == 1 else f"{texts[0]} ({texts[1]} to {texts[2]})"


def _right(head: Sequence[str]) -> str:
    return "l" + "r" * (len(head) - 1)


def _mosaicml(record: Record) -> Section:
    """MosaicML's columns: GPUs, images/s, days, GPU-hours, cost; theirs beside ours."""
    run = record["run"]
    theirs = {row["num"]: row for row in record["rows"] if row["series"] == MOSAICML}
    price = record["config"]["price_per_gpu_hour"]
    head: Head = ("GPUs", "images/s", "times one node", "efficiency", "days", "GPU-hours")
    head += () if price is None else (f"cost, at {price:g} an hour",)
    head += ("MosaicML: images/s", "of it predicted", "days", "GPU-hours", "cost, USD")
    rows: list[Row] = []
    for row in record["estimates"]:
        raised = "" if row["global_batch_size"] == run["batch"] else f", batch {row['global_batch_size']:,}"
        cells: list[str | None] = [f"{row['num']:,}{raised}", _ends(row, "images_per_sec"), _number(row["times"], 1)]
        cells += [_ends(row, "times", ".0%", 8 / row["num"]), _ends(row, "days", 2), _ends(row, "gpu_hours")]
        cells += [] if price is None else [_ends(row, "cost")]
        of = theirs.get(row["num"])
        if of is None:
            cells += [None] * 5
        else:
            hours = run["images"] / of["images_per_sec"] / 3600
            cells += [_number(of["images_per_sec"], 1), _ends(of, "predicted"), _number(hours / 24, 1)]
            cells += [_number(of["num"] * hours), _number(of["num"] * hours * MOSAICML_PRICE)]
        rows.append(tuple(cells))
    title = f"{run['name']}: {run['images']:,} images at a global batch of {run['batch']:,} on {run['gpu']}; "
    title += f"speed of a GPU: {run['rate']}:"
    return Section("MosaicML's table", Table(title, head, _right(head), rows), _of_table(record))


def _of_table(record: Record) -> tuple[str, ...]:
    """The lines below MosaicML's table: what differs from the run, what efficiency is of, and whose days and money."""
    run, notes = record["run"], []
    price, date = (record["config"][key] for key in ("price_per_gpu_hour", "price_date"))
    if run["differs"]:
        notes.append(f"The record differs from the run in: {', '.join(run['differs'])}; its TFLOP/s is carried over.")
    notes.append(f"Efficiency is that over one node of 8 GPUs, at {_ends(record['base'], 'images_per_sec')} images/s.")
    if any(row["global_batch_size"] != run["batch"] for row in record["estimates"]):
        said = "A row with a batch trains with another batch than the run: one image a GPU, as many images in all."
        notes.append(said)
    if price is not None:
        said = f"The price of a GPU-hour is of {date}."
        notes.append(f"{said} MosaicML's is 160,000 USD over 79,000 A100-hours, January 2023.")
    said = f"MosaicML's days, hours and cost are those of {run['images']:,} images at its rate."
    said += "" if run["images"] == MOSAICML_IMAGES else f" It trained {MOSAICML_IMAGES:,} in all."
    return (*notes, f"{said} Its rows are of A100, with the encoders in the step.")


def _around(record: Record) -> Section:
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
    table = Table(title, head, "r" * (len(head) - 1) + "l", rows)
    return Section("Failures, checkpoints, evaluation and data", table, notes)


def _best(target: Record) -> Section:
    """The batch that is there first, for each number of devices, and the fastest published result of as many."""
    price = target["price"]
    head: Head = ("GPUs", "best global batch", "images", "minutes to the target", "GPU-hours")
    head += () if price is None else (f"cost, at {price:g} an hour",)
    head += ("published, minutes at batch",)
    rows: list[Row] = []
    for curve in target["curves"]:
        of, published = curve["best"], [point for point in target["published"] if point["num"] == curve["num"]]
        first = min(published, key=lambda point: point["minutes"], default=None)
        edge = ", the last tried" if of["global_batch_size"] == curve["tried"][-1]["global_batch_size"] else ""
        cells = [f"{of['global_batch_size']:,}{edge}", f"{of['images']:,.0f}", _ends(of, "minutes", 1)]
        cells += [_ends(of, "device_hours", 1)] + ([] if price is None else [_ends(of, "cost")])
        shown = first and f"{first['minutes']:.2f} at {first['global_batch_size'] or '?'}"
        rows.append((f"{curve['num']:,}", *cells, shown))
    e, c = _ends(target["images"], "e", ",.2f", 1e-6), _ends(target["images"], "c", ",.0f")
    title = f"By ruleset {target['ruleset']}. The target is {target['target']}. "
    title += f"Images to it are E (1 + batch / C). E: {e} million. C: {c}:"
    return Section(f"The best batch: {target['title']}", Table(title, head, "r" * len(head), rows))


def _errors(errors: Record) -> Section:
    """Errors by the number of devices, of both ways of holding places out."""
    head: Head = ("GPUs",)
    for way in ("held out one by one", "from the smallest alone"):
        head += (f"{way}: places", "median error", "worst", "in their interval")
    rows: list[Row] = []
    for of in errors["sizes"]:
        cells: list[str] = []
        for way in (of["predicted"], of["alone"]):
            cells += [str(way["places"]), *(f"{way[key]:.1%}" for key in ("median", "worst")), f"{way['covered']:.0%}"]
        rows.append((f"{of['from']:,} to {of['to']:,}", *cells))
    title = f"{errors['rows']} published rows, {errors['fitted']} fitted numbers. A place is a series on so many GPUs. "
    title += "Each was held out alone; then all of a series but the smallest, as a run is predicted from one record:"
    note = f"The residuals deviate by {errors['noise']:.1%}. Each doubling of the domains adds {errors['by_doubling']:.1%}."
    return Section("Error against published rows", Table(title, head, _right(head), rows), (note,))


def _rows(held: Sequence[Record]) -> Section:
    head: Head = ("series", "GPUs", "global batch", "systems", "published", "predicted without it", "error", "fitted")
    head += ("from the smallest alone", "error")
    rows: list[Row] = []
    for row in sorted(held, key=lambda row: (row["title"], row["num"])):
        cells = [f"{row[key]:,.0f}" for key in ("num", "global_batch_size", "systems", "images_per_sec")]
        cells += [_ends(row, "predicted", ",.0f"), *(f"{row[key]:+.1%}" for key in ("error", "fitted_error"))]
        alone = (_ends(row, "alone", ",.0f"), f"{row['alone_error']:+.1%}") if "alone" in row else (None, None)
        rows.append((row["title"], *cells, *alone))
    title = "Images/s of every place; of several systems the geometric mean:"
    return Section("Every held-out row", Table(title, head, _right(head), rows))


def _parameters(parameters: Sequence[Record]) -> Section:
    head = ("parameter", "what", "prior, times or over", "fitted, 90 %", "1 % more of it, %", "one deviation more, %")
    rows: list[Row] = []
    for of in sorted(parameters, key=lambda each: -abs(each["for_1_deviation"])):
        has_prior = "prior" in of
        about = (
            (of["text"], f"{of['prior']:g}, {of['factor']:g}", _ends(of, "value", ".3g")) if has_prior else [None] * 3
        )
        rows.append((of["name"], *about, f"{of['for_1_percent']:+.3f}", f"{of['for_1_deviation']:+.2f}"))
    title = "Shared parameters, and the rate of a series; what changes the images/s of 1,024 GPUs most comes first:"
    return Section("Parameters", Table(title, head, "llrrrr", rows))


def _records(records: Sequence[Record]) -> Section:
    head: Head = ("record", "device", "number", "global batch", "images/s", "perfect", "from the smallest", "error")
    head += ("by published rows alone", "error")
    rows: list[Row] = []
    for row in records:
        cells = [row["device"], str(row["num"]), str(row["global_batch_size"]), _ends(row, "images_per_sec", ",.1f")]
        cells.append(f"{row['perfect']:,.1f}")
        for way in ("predicted", "published"):
            cells += [_ends(row, way, ",.1f"), f"{row[way] / row['images_per_sec'] - 1:+.1%}"]
        rows.append((row["name"], *cells))
    title = "Records of one run on several numbers of devices; the least and the greatest window:"
    return Section("Records laid over", Table(title, head, "llrrrrrrrr", rows))


# --- the whole ---


def text_of(record: Record) -> str:
    """Format a record for the terminal."""
    parts = []
    for section in sections_of(record):
        parts += [f"=== {section.heading}", in_text(section.table), *section.notes, ""]
    return "\n".join(parts)


def markdown_of(record: Record) -> str:
    """Format a record for a page."""
    parts = ["", f"By `preflight.scaling` of commit {record['commit'][:12]}."]
    for section in sections_of(record):
        parts += ["", f"### {section.heading}", "", in_markdown(section.table).rstrip("\n")]
        parts += [line for note in section.notes for line in ("", note)]
    return "\n".join([*parts, "", ""])


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    return show_record(argv, "preflight.scaling", text_of, markdown_of, draw, "RECORD.json, FOLDER, PAGE.md")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
