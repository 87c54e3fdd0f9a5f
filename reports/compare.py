"""Set records beside each other: how many times as fast, with the spread of that ratio, and what may be said of it.

    python -m reports.compare runs/A runs/B                         # folders of finished runs, or their summary.json
    python -m reports.compare A.json B.json C.json                  # records of a ladder's rungs, or of a command of bench
    python -m reports.compare A.json B.json across=stage            # this key may differ, though it says what is trained
    python -m reports.compare runs/a1,runs/a2,... runs/b1,...       # repeated runs; there a run is one value
    python -m reports.compare A.json B.json PAGE.md                 # the table between a page's marks

The first is what the others are set against. Machine, versions, commit and settings may differ, and are listed below the
table. What is trained has to be the same. docs/comparing.md says which keys these are, and by which rule a verdict is given.

Exit code: 0, or 2 where records cannot be read, do not compare, or a page has no marks (each problem on a line of stderr).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cli.command import command
from cli.errors import ConfigError
from cli.limits import shown
from record.files import SUMMARY
from reports.compare_records import ALIKE_FRAC, NOT_RECORDED, RUN, WORK, Record, read
from reports.marks import Row, Table, in_markdown, in_text, read_words, rewrite
from reports.page_facts import OWN_KEYS, differing
from reports.page_text import figure, plain
from reports.verdicts import LESS, MORE, Ratio, Sample, ratio_of

MOST_RECORDS = 16
MADE_WITH = ("torch_version", "commit")
OF_NO_SPEED = ("loggers.", "cost.")
"""Sections of a configuration whose differences are not listed."""
FIRST = "the first"


@dataclass(frozen=True)
class CompareKeys:
    """The keys of this command."""

    across: str | None = None
    """Keys that say what is trained, and may differ all the same, with commas between."""


def read_line(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return records, pages and the keys of across, and read no file. Raises ConfigError: each problem of the words."""

    def check(words: Sequence[str]) -> list[str]:
        num = sum(not word.endswith(".md") for word in words)
        possible = f"2 to {MOST_RECORDS}: runs/NAME, or files"
        return [] if 0 < num <= MOST_RECORDS else [f"command line: {num} records given. Possible: {possible}."]

    words, keys = read_words(argv, CompareKeys, check)
    pages = [word for word in words if word.endswith(".md")]
    across = [key for key in (keys.across or "").split(",") if key]
    return [word for word in words if word not in pages], pages, across


# --- what compares ---


def problems_of(records: Sequence[Record], across: Sequence[str]) -> list[str]:
    """Say why records do not compare: what is the same file, of another kind, or of other work, with its key."""
    first, problems = records[0], []
    if len(records) < 2:
        return [f"command line: one record given, {first.name}. Give another one to set against it."]
    paths = [path for record in records for path in record.paths]
    files = [path.resolve() for path in paths]
    if twice := [path for place, path in enumerate(paths) if files[place] in files[:place]]:
        problems.append(f"{shown(str(twice[0]), 300)}: is given twice. Give each record once.")
    if others := [record for record in records if record.kind != first.kind]:
        said = f"{others[0].name} is of {others[0].kind}, {first.name} of {first.kind}"
        return [*problems, f"command line: {said}. Records of one kind compare. Leave one out."]
    known = list(dict.fromkeys(key for record in records for key in record.what))
    possible = list(map(plain, known))
    for key in across:
        if key not in known:
            problems.append(
                f"across: '{shown(key)}' is no key that has to be the same. Possible: {', '.join(possible)}."
            )
    problems += [
        f"{plain(key)}: {_beside(records, values)}. It says what was measured, so they do not compare. "
        f"Give others, or say across={key}."
        for key, values in other_work(records).items()
        if key not in across
    ]
    if not problems:
        apart = [record for record in records[1:] if not common(record, first)]
        problems = [f"{record.name}: has no figure that {first.name} has. Leave it out." for record in apart]
    return problems


def other_work(records: Sequence[Record]) -> dict[str, list[Any]]:
    """Return the keys by which records are of different work, each with its values."""
    found = {}
    for key in dict.fromkeys(key for record in records for key in record.what if key != WORK):
        values = [record.what.get(key, NOT_RECORDED) for record in records]
        if any(value is NOT_RECORDED or value != values[0] for value in values):
            found[key] = values
    work = [record.what.get(WORK) for record in records]
    known = [value for value in work if isinstance(value, int | float) and value > 0]
    if not found and known and max(known) > (1 + ALIKE_FRAC) * min(known):  # else it follows from another key
        found[WORK] = work
    return found


def _beside(records: Sequence[Record], values: Sequence[Any]) -> str:
    return ", ".join(f"{_value(value)} in {record.name}" for record, value in zip(records, values, strict=True))


def _value(value: Any) -> str:
    return "none" if value is None else plain(value, 80)


def common(record: Record, first: Record) -> list[str]:
    """Return the figures that both have, in the first one's order."""
    return [key for key in first.figures if key in record.figures]


# --- the table ---


def better(key: str) -> int:
    """Return 1 for a figure of which more is faster, -1 of which less is, 0 for one that is no speed and no time."""
    if "per_sec" in key or "speedup" in key:
        return 1
    return -1 if {"ms", "sec", "us", "seconds"} & set(re.split(r"[^a-z]+", key)) else 0


def said_of(key: str, ratio: Ratio) -> str:
    """Return the verdict on a figure in words."""
    side = better(key)
    if ratio.verdict not in (MORE, LESS) or not side:
        return ratio.verdict
    return "faster" if (ratio.verdict == MORE) == (side > 0) else "slower"


def rows_of(records: Sequence[Record]) -> Iterator[Row]:
    """Yield the figure's name, the record's, its device, the figure with its extremes, how often measured, ratio, verdict."""
    first = records[0]
    for key in first.figures:
        there = [record for record in records if key in record.figures]
        for record in there if len(there) > 1 else ():
            sample = record.figures[key]
            shown_as = (plain(key), record.name, plain(record.device, 120), _spread(sample), _count(sample))
            if record is first:
                yield (*shown_as, None, FIRST)
                continue
            ratio = ratio_of(sample, first.figures[key])
            spread = f"{ratio.value:.3f} ({ratio.least:.3f} to {ratio.greatest:.3f})"
            yield (*shown_as, spread, said_of(key, ratio))


def _spread(sample: Sample) -> str:
    middle, least, greatest = map(figure, (sample.middle, sample.least, sample.greatest))
    return middle if sample.least == sample.greatest else f"{middle} ({least} to {greatest})"


def _count(sample: Sample) -> str | None:
    return f"{sample.num} {sample.unit}{'s' * (sample.num != 1)}" if sample.num else None


def table_of(records: Sequence[Record]) -> Table:
    """Return the table of records, each set against the first."""
    title = f"Set against {records[0].name}; the median, with the least and the greatest:"
    head: tuple[str, ...] = ("figure", "record", "device", "value", "of", "ratio to the first", "verdict")
    if records[0].kind == RUN:
        head = ("record", "device", "images/s a device", "of", "ratio to the first", "verdict")
        return Table(title, head, "llrrrl", [row[1:] for row in rows_of(records)])
    return Table(title, head, "lllrrrl", list(rows_of(records)))


# --- what stands below it ---


def notes_of(records: Sequence[Record]) -> list[str]:
    """Return a line for each key that differs, settings first, and for what has to be known of the records."""
    other = other_work(records)
    notes = [f"allowed by across: {key} {' | '.join(map(_value, values))}" for key, values in other.items()]
    settings = differing([record.settings for record in records])
    if all(record.config for record in records):
        named = {row.name for row in settings} | {key for record in records for key in (*record.what, *record.machine)}
        rows = differing([record.config for record in records], OWN_KEYS)
        rows = [row for row in rows if not {row.name, row.name.rpartition(".")[2]} & named]
        settings += [row for row in rows if not row.name.startswith(OF_NO_SPEED)]
    for what, rows in (("setting", settings), ("machine", differing([record.machine for record in records]))):
        notes += [f"differs, {what}: {row.name} {' | '.join(text for text, _ in row.cells)}" for row in rows]
    if not notes:
        notes.append("nothing that was recorded differs: two starts of the same. Repeated runs, with commas, say more")
    if records[0].kind == RUN:
        notes.append(f"trained in all: {_alike([record.what for record in records], (*other, WORK))}")
    if made := _alike([record.machine for record in records], only=MADE_WITH):
        notes.append(f"made with: {made}")
    for remark in dict.fromkeys(remark for record in records for remark in record.remarks):
        notes.append(f"{', '.join(record.name for record in records if remark in record.remarks)}: {remark}")
    ratios = [
        ratio_of(record.figures[key], records[0].figures[key])
        for record in records[1:]
        for key in common(record, records[0])
    ]
    if not all(ratio.is_enough or ratio.is_one_start for ratio in ratios):
        notes.append("some figures have too few values for a verdict: five of each suffice")
    return notes


def _alike(all_of: Sequence[Mapping[str, Any]], without: Sequence[str] = (), only: Sequence[str] | None = None) -> str:
    """Return the keys that all have with the same value, and it, on a line."""
    first = all_of[0]
    keys = [key for key in first if key not in without and (only is None or key in only) and first[key] is not None]
    return ", ".join(f"{key} {_value(first[key])}" for key in keys if all(of.get(key) == first[key] for of in all_of))


def told_apart(records: Sequence[Record]) -> list[Record]:
    """Return the records; those of one name with the folder above in it."""
    names, found = [record.name for record in records], []
    for record in records:
        place = record.paths[0].resolve()
        own = place.parent if place.name == SUMMARY else place.with_suffix("")
        name = "/".join(own.parts[-2:]) if names.count(record.name) > 1 else record.name
        found.append(replace(record, name=plain(name, 120)))
    return found


# --- the command ---


def compared(places: Sequence[str], across: Sequence[str] = ()) -> tuple[Table, list[str]]:
    """Compare records.

    Args:
        places: what each of them is read from; the first is what the others are set against.
        across: keys that have to be the same, and may differ all the same.

    Returns:
        the table, and the notes below it.

    Raises:
        ConfigError: they cannot be read, or do not compare; each problem.
    """
    records, problems = [], []
    for place in places:
        try:
            records.append(read(place))
        except ValueError as error:
            problems.append(str(error))
    if not problems:
        records = told_apart(records)
        problems = problems_of(records, across)
    if problems:
        raise ConfigError(problems)
    return table_of(records), notes_of(records)


def markdown_of(table: Table, notes: Sequence[str]) -> str:
    """Format a comparison for a page."""
    escaped = table._replace(
        rows=[tuple(cell if cell is None else cell.replace("|", r"\|") for cell in row) for row in table.rows]
    )
    return "\n".join(["", in_markdown(escaped), *(f"- {note}" for note in notes), *[""] * bool(notes), ""])


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    places, pages, across = read_line(argv)
    table, notes = compared(places, across)
    rewrite(pages, " ".join(places), markdown_of(table, notes))
    if not pages:
        print("\n".join([in_text(table), *notes]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
