"""Show a record of preflight.scaling: its tables, its pictures, and both in a page.

    python -m reports.scaling RECORD.json                           # for the terminal
    python -m reports.scaling RECORD.json FOLDER PAGE.md            # the pictures; the tables between a page's marks

A page says by marks where the tables go (reports/marks.py). Pages and pictures of the project: `make report`.
Exit code: 0, or 2 where a file cannot be read, is no such record, or a page has no marks.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cli.command import command
from cli.errors import Refused
from cli.files import read_json
from cli.table import as_table
from reports.marks import rewrite
from reports.record_table import Row, Table
from reports.scaling_pictures import draw
from reports.tables import in_markdown

Record = Mapping[str, Any]


class Section(NamedTuple):
    """A heading, its table, and lines below it."""

    heading: str
    table: Table
    notes: tuple[str, ...] = ()


def sections_of(record: Record) -> Iterator[Section]:
    """Yield the sections in the order in which they are shown."""
    yield _mosaicml(record)
    yield _nvidia(record)
    yield _around(record)
    yield from _best(record)
    yield _errors(record)
    yield _sizes(record)
    yield _rows(record)
    yield _parameters(record)
    yield _sensitivity(record)
    yield _evaluation(record)
    yield _laid_over(record)


def _number(value: float | None, digits: int = 0, never: str = "never") -> str:
    """A figure with so many decimals, three digits where it is below 10 or huge; null is a time without an end."""
    if value is None:
        return never
    if value and (abs(value) < 10 or abs(value) >= 1e12):
        return f"{value:#.3g}"
    return f"{value:,.{digits}f}" if value else "0"


def _ends(of: Record, name: str, digits: int = 0, factor: float = 1.0) -> str:
    """A figure with its interval, as `_number` shows it; `never` alone where none of it has an end."""
    given = [of[f"{name}{end}"] for end in ("", "_low", "_high")]
    texts = [_number(None if value is None else factor * value, digits) for value in given]
    return texts[0] if len(set(given)) == 1 else f"{texts[0]} ({texts[1]} to {texts[2]})"


def _share(value: float | None) -> str:
    return "never ends" if value is None else f"{100 * value:.3g}%" if value >= 100 else f"{value:.1%}"


def _range(of: Record, name: str, digits: str, factor: float = 1.0) -> str:
    middle, low, high = (format(factor * of[f"{name}{end}"], digits) for end in ("", "_low", "_high"))
    return f"{middle} ({low} to {high})"


def _efficiency(row: Record) -> str:
    middle, low, high = (f"{row[f'times{end}'] * 8 / row['num']:.0%}" for end in ("", "_low", "_high"))
    return middle if row["times_low"] == row["times_high"] else f"{middle} ({low} to {high})"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:+.1%}"


# --- the two tables that people know ---


def _mosaicml(record: Record) -> Section:
    """MosaicML's columns: GPUs, images/s, days, GPU-hours, cost; theirs beside ours."""
    run, theirs = record["run"], {row["num"]: row for row in record["published"]["mosaicml"]}
    price = record["config"]["price_per_gpu_hour"]
    head = ("GPUs", "images/s", "efficiency", "days", "GPU-hours")
    head += () if price is None else (f"cost, at {price:g} an hour",)
    head += ("MosaicML: images/s", "of it predicted", "days", "GPU-hours", "cost, USD")
    rows: list[Row] = []
    for row in record["estimates"]:
        raised = "" if row["global_batch_size"] == run["batch"] else f", batch {row['global_batch_size']:,}"
        cells: list[str | None] = [f"{row['num']:,}{raised}", _ends(row, "images_per_sec"), _efficiency(row)]
        cells += [_ends(row, "days", 2), _ends(row, "gpu_hours")]
        cells += [] if price is None else [_ends(row, "cost")]
        of = theirs.get(row["num"])
        if of is None:
            cells += [None] * 5
        else:
            cells += [_number(of["images_per_sec"], 1), _ends(of, "predicted"), _number(of["days"], 1)]
            cells += [_number(of["gpu_hours"]), _number(of["cost"])]
        rows.append(tuple(cells))
    title = f"{run['name']}: {run['images']:,} images at a global batch of {run['batch']:,} on {run['gpu']}; "
    title += f"speed of a GPU: {run['rate']}:"
    return Section("MosaicML's table", Table(title, head, "l" + "r" * (len(head) - 1), rows), _of_table(record))


def _of_table(record: Record) -> tuple[str, ...]:
    """The lines below MosaicML's table: what differs from the run, what efficiency is of, and whose days and money."""
    run, images, notes = record["run"], record["published"]["mosaicml_images"], []
    price, date = (record["config"][key] for key in ("price_per_gpu_hour", "price_date"))
    if run["differs"]:
        notes.append(f"The record differs from the run in: {', '.join(run['differs'])}; its TFLOP/s is carried over.")
    node = _ends(record["base"], "images_per_sec")
    notes.append(f"Efficiency is that over one node of 8 GPUs, at {node} images/s.")
    if any(row["global_batch_size"] != run["batch"] for row in record["estimates"]):
        notes.append(
            "A row with a batch trains with another batch than the run: one image a GPU, as many images in all."
        )
    if price is None:
        notes.append("No price was given, so there is no cost: price_per_gpu_hour and price_date.")
    else:
        notes.append(
            f"The price of a GPU-hour is of {date}. MosaicML's is 160,000 USD over 79,000 A100-hours, January 2023."
        )
    said = f"MosaicML's days, hours and cost are those of {run['images']:,} images at its rate."
    said += "" if run["images"] == images else f" It trained {images:,} in all."
    return (*notes, f"{said} Its rows are of A100, with the encoders in the step.")


def _nvidia(record: Record) -> Section:
    head = ("of", "nodes", "images/s", "times one node", "efficiency", "predicted without this row")
    run = record["run"]
    rows: list[Row] = []
    for row in record["estimates"]:
        cells = (_number(row["images_per_sec"]), _ends(row, "times", 1), _efficiency(row))
        rows.append((f"{run['name']}, {run['gpu']}", f"{row['num'] / 8:g}", *cells, None))
    for row in record["published"]["nvidia"]:
        cells = (_number(row["images_per_sec"]), _number(row["times"], 1), f"{row['times'] / row['nodes']:.0%}")
        rows.append((row["title"], str(row["nodes"]), *cells, _ends(row, "predicted")))
    title = "The speed-up against one node of 8; NVIDIA's own rows below:"
    return Section("NVIDIA's table", Table(title, head, "lrrrrr", rows))


# --- what else a run takes ---


def _around(record: Record) -> Section:
    """Failures, checkpoints, evaluations and data."""
    run, config = record["run"], record["config"]
    has_own = bool(run["save_images"])
    head: tuple[str, ...] = ("GPUs", "a failure every", "best cadence", "its cost")
    head += (f"at save.every_images={run['save_images']}",) if has_own else ()
    head += ("training, h", "evaluations, h", "MB/s a node", "cores a node", "limit")
    rows: list[Row] = []
    for row in record["estimates"]:
        every = _minutes(row["save_every_sec"]) if run["checkpoint_gib"] else "saves none"
        cells = [f"{row['num']:,}", f"{_number(row['mtbf_hours'])} h", every, _share(row["overhead_frac"])]
        if has_own:
            cells.append(f"{_minutes(row['own_every_sec'])}: {_share(row['own_frac'])}")
        cells += [_number(row[key], 1) for key in ("train_hours", "eval_hours")]
        data = (row["node_mb_per_sec"], 0), (row["node_cores"], 1)
        rows.append((*cells, *(None if of is None else _number(of, digits) for of, digits in data), row["limit"]))
    saved = f"A checkpoint of {run['checkpoint_gib']:.1f} GiB at {config['write_gib_per_sec']:g} GiB/s, "
    title = saved if run["checkpoint_gib"] else "The run saves no checkpoints, so that a failure loses all of it; "
    title += f"{config['resume_sec']:g} s to resume, {config['mtbf_hours']:,.0f} GPU-hours a failure; "
    title += f"{run['num_evals']} evaluations in training:"
    table = Table(title, head, "r" * (len(head) - 1) + "l", rows)
    return Section("Failures, checkpoints, evaluation and data", table, _of_samples(run))


def _of_samples(run: Record) -> tuple[str, ...]:
    """What bytes and processor time of a sample are by."""
    if run["stage"] == "images":
        return (
            f"Bytes and processor time of an image are those measured at 512 px, times its area: {run['area']:.3g}.",
        )
    if run["stage"] is None:
        return ()
    said = (
        f"Bytes of a sample: as measured of SD2 at 512 px, with {run['floats']:.3g} times its moments and text states."
    )
    return (f"{said} Its processor time is that of SD2 at 512 px.",)


def _minutes(seconds: float | None) -> str:
    return "never" if seconds is None else f"{_number(seconds / 60)} min"


def _best(record: Record) -> Iterator[Section]:
    for target in record["targets"]:
        price = target["price"]
        head = ("GPUs", "best global batch", "images", "minutes to the target", "GPU-hours")
        head += () if price is None else (f"cost, at {price:g} an hour",)
        rounds = {point["title"] for point in target["published"]}
        rows: list[Row] = []
        for curve in target["curves"]:
            of = curve["best"]
            said = [point for point in target["published"] if point["num"] == curve["num"]]
            shown = ", ".join(_submitted(point, len(rounds) > 1) for point in _fastest(said))
            edge = ", the last tried" if of["global_batch_size"] == curve["tried"][-1]["global_batch_size"] else ""
            cells = [f"{of['global_batch_size']:,}{edge}", f"{of['images']:,.0f}", _ends(of, "minutes", 1)]
            cells += [_ends(of, "device_hours", 1)] + ([] if price is None else [_ends(of, "cost")])
            rows.append((f"{curve['num']:,}", *cells, shown or None))
        images = target["images"]
        e, c = _range(images, "e", ",.2f", 1e-6), _range(images, "c", ",.0f")
        title = f"By ruleset {target['ruleset']}. The target is {target['target']}. "
        title += f"Images to it are E (1 + batch / C). E: {e} million. C: {c}:"
        table = Table(title, (*head, "published, minutes at batch"), "r" * (len(head) + 1), rows)
        yield Section(f"The best batch: {target['title']}", table)


def _submitted(point: Record, has_rounds: bool) -> str:
    of_round = f" ({point['title'].split(',')[0]})" if has_rounds else ""
    return f"{point['minutes']:.2f} at {point['global_batch_size'] or '?'}{of_round}"


def _fastest(points: Sequence[Record]) -> list[Record]:
    """The fastest of each round and batch."""
    found: dict[Any, Record] = {}
    for point in sorted(points, key=lambda each: -each["minutes"]):
        found[point["title"], point["global_batch_size"]] = point
    return list(found.values())


# --- the law and its errors ---


def _errors(record: Record) -> Section:
    of = record["errors"]
    head = ("series", "places", "from", "to", "median error, held out", "worst")
    head += ("from the smallest alone: median", "worst", "the largest")
    rows: list[Row] = []
    for title in dict.fromkeys(row["title"] for row in record["rows"]):
        own = [row for row in record["rows"] if row["title"] == title]
        errors = [abs(row["error"]) for row in own]
        alone = [row["alone_error"] for row in own if "alone_error" in row]
        nums, sizes = [row["num"] for row in own], [abs(error) for error in alone]
        cells = [statistics.median(errors), max(errors), statistics.median(sizes), max(sizes)]
        texts = (f"{value:.1%}" for value in cells)
        rows.append((title, str(len(own)), str(min(nums)), f"{max(nums):,}", *texts, _percent(alone[-1])))
    whole = of["alone"][-1]
    cells = [of["median"], of["worst"], whole["median"], whole["worst"]]
    rows.append(("all", str(of["places"]), None, None, *(f"{value:.1%}" for value in cells), None))
    title = f"{of['rows']} published rows, {of['fitted']} fitted numbers. A place is a series at a number of devices. "
    title += (
        "Each was held out in turn. Then all of a series but the smallest were, as a run is predicted from one record:"
    )
    note = f"The residuals' deviation is {of['noise']:.1%}. {of['covered']:.0%} of the held-out places lie in their interval."
    note += f" For that {of['by_doubling']:.1%} are added to the deviation with each doubling of the domains."
    return Section("Error against published rows", Table(title, head, "lrrrrrrrr", rows), (note,))


def _sizes(record: Record) -> Section:
    head = ("GPUs", "places", "median error", "worst", "in their interval")
    rows: list[Row] = [
        (
            f"{of['from']:,} to {of['to']:,}",
            str(of["places"]),
            f"{of['median']:.1%}",
            f"{of['worst']:.1%}",
            f"{of['covered']:.0%}",
        )
        for of in record["errors"]["alone"]
    ]
    title = "The same by the number of GPUs, each predicted from the smallest place of its series:"
    return Section("Error by size", Table(title, head, "lrrrr", rows))


def _rows(record: Record) -> Section:
    head = ("series", "GPUs", "global batch", "systems", "published", "predicted without it", "error", "fitted")
    head += ("from the smallest alone", "error")
    rows: list[Row] = []
    for row in sorted(record["rows"], key=lambda row: (row["title"], row["num"])):
        cells = (
            f"{row['num']:,}",
            f"{row['global_batch_size']:,}",
            str(row["systems"]),
            f"{row['images_per_sec']:,.0f}",
        )
        ends = (_range(row, "predicted", ",.0f"), _percent(row["error"]), _percent(row["fitted_error"]))
        alone = (_range(row, "alone", ",.0f"), _percent(row["alone_error"])) if "alone" in row else (None, None)
        rows.append((row["title"], *cells, *ends, *alone))
    title = "Images/s of every place; of several systems the geometric mean:"
    return Section("Every held-out row", Table(title, head, "lrrrrrrrrr", rows))


def _parameters(record: Record) -> Section:
    head = ("parameter", "what", "prior, times or over", "fitted, 90 %")
    rows: list[Row] = [
        (of["name"], of["text"], f"{of['prior']:g}, {of['factor']:g}", _range(of, "value", ".3g"))
        for of in record["parameters"]
    ]
    title = "Shared parameters; a rate of each series comes to them:"
    return Section("Parameters", Table(title, head, "llrr", rows))


def _sensitivity(record: Record) -> Section:
    of = record["sensitivity"]
    head = ("parameter", "1 % more of it, %", "one deviation more, %")
    ranked = sorted(of["of"], key=lambda each: -abs(each["for_1_deviation"]))
    rows: list[Row] = [
        (each["name"], f"{each['for_1_percent']:+.3f}", f"{each['for_1_deviation']:+.2f}") for each in ranked
    ]
    title = f"Change of the images/s of {of['num']:,} GPUs; what moves them most comes first:"
    return Section("Sensitivity", Table(title, head, "lrr", rows))


def _evaluation(record: Record) -> Section:
    head = ("series", "GPUs", "published, s", "by FLOPs, s", "at the others' share, s", "error")
    rows: list[Row] = [
        (
            of["title"],
            str(of["num"]),
            *(f"{of[key]:,.0f}" for key in ("seconds", "by_flops", "predicted")),
            _percent(of["error"]),
        )
        for of in record["evaluation"]["rows"]
    ]
    title = "30,000 images of 50 steps with guidance, beside MLPerf's logs; by FLOPs: at training's utilisation:"
    note = f"An evaluation delivers {record['evaluation']['share']:.0%} of training's TFLOP/s; the estimates above take that."
    return Section("Evaluation", Table(title, head, "lrrrrr", rows), (note,))


def _laid_over(record: Record) -> Section:
    over = record["laid_over"]
    head = ("record", "device", "number", "global batch", "images/s", "perfect", "predicted", "error")
    rows: list[Row] = []
    for row in over["rows"]:
        speed = f"{row['images_per_sec']:,.1f} ({row['least']:,.1f} to {row['greatest']:,.1f})"
        told = _range(row, "predicted", ",.1f") if "predicted" in row else None
        error = _percent(row["predicted"] / row["images_per_sec"] - 1) if told else None
        cells = (
            row["device"],
            str(row["num"]),
            str(row["global_batch_size"]),
            speed,
            f"{row['perfect']:,.1f}",
            told,
            error,
        )
        rows.append((row["name"], *cells))
    title = f"Records of one run on several numbers of devices: {over['what']}; the least and the greatest window:"
    notes = ("The law has no link of this kind, so nothing is predicted for them.",) if over["is_cpu"] else ()
    return Section("Records laid over", Table(title, head, "llrrrrrr", rows), (*notes, *_of_gpus(record)))


def _of_gpus(record: Record) -> list[str]:
    """Say how far the law's prediction for a GPU is from records of one, or that there is none; and what was passed over."""
    told = [
        f"{of['num']} {of['device']}, record {of['name']}: {of['measured']:,.1f} images/s measured, "
        f"{_range(of, 'predicted', ',.1f')} predicted, {_percent(of['error'])}."
        for of in record["gpu_records"]
    ]
    over = [f"{of['name']} was passed over: {of['why'].removesuffix('.')}." for of in record["passed_over"]]
    if not told:
        of, none = record["single"], "none can be compared" if over else "there is none yet"
        ends = _range(of, "predicted", ",.1f")
        told = [
            f"A single {of['gpu']} at a batch of {of['global_batch_size']}: {ends} images/s. "
            f"The comparison waits for the first record of a GPU under reports/results: {none}."
        ]
    return told + over


# --- the whole ---


def text_of(record: Record) -> str:
    """Format a record for the terminal."""
    parts = []
    for section in sections_of(record):
        table = as_table(section.table.head, section.table.rows, section.table.align)
        parts += [f"=== {section.heading}", section.table.title, table, *section.notes, ""]
    return "\n".join(parts)


def markdown_of(record: Record) -> str:
    """Format a record for a page."""
    parts = ["", f"By `preflight.scaling` of commit {record['commit'][:12]}."]
    for section in sections_of(record):
        parts += ["", f"### {section.heading}", "", in_markdown(section.table).rstrip("\n")]
        parts += [line for note in section.notes for line in ("", note)]
    return "\n".join([*parts, "", ""])


def read_record(place: str) -> dict[str, Any]:
    """Read a record. Raises ValueError: it is none."""
    try:
        record: dict[str, Any] = read_json(Path(place))
        text_of(record)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, StopIteration) as error:
        what = f"no record of preflight.scaling ({type(error).__name__}: {error})"
        raise ValueError(f"{place}: is {what}. Give its scaling.json.") from error
    return record


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    if len(argv) not in (1, 3) or not argv[0].endswith(".json") or not all(word.endswith(".md") for word in argv[2:]):
        raise Refused(f"command line: {' '.join(argv)}. Possible: RECORD.json, or RECORD.json FOLDER PAGE.md.")
    try:
        record = read_record(argv[0])
        rewrite(argv[2:], argv[0], markdown_of(record))
        for folder in argv[1:2]:
            draw(record, Path(folder))
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}. Check the path.") from error
    except ValueError as error:
        raise Refused(str(error)) from error
    if len(argv) == 1:
        print(text_of(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
