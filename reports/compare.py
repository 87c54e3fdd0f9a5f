"""Compare records: how many times as fast, with the spread of that ratio, and what may be said of it.

    python -m reports.compare runs/A runs/B                         # folders of finished runs, or their summary.json
    python -m reports.compare A.json B.json C.json                  # records of a ladder's rungs, or of a command of bench
    python -m reports.compare A.json B.json across=stage            # this key may differ, though it says what is trained
    python -m reports.compare runs/a1,runs/a2,... runs/b1,...       # repeated runs; there a run is one value
    python -m reports.compare A.json B.json PAGE.md                 # the table between a page's marks

The first is what the others are set against. Machine, versions, commit and settings may differ, and are listed below the
table. What is trained has to be the same. docs/benchmarking.md has these keys and the rule of a verdict.

Exit code: 0, or 2 where records cannot be read, do not compare, or a page has no marks (each problem on a line of stderr).
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from common.command import command
from common.errors import ConfigError
from common.files import read_regular
from common.value_types import format_value, kind_of_path, truncate
from reports.formatting import RecordTable, Row, figure, in_markdown, in_text, plain, read_words, rewrite
from reports.page_content import differing
from run_folder.files import RUN_ONLY_KEYS, SUMMARY
from run_folder.history import COST_KEYS, RESULT_KEYS, VAL_LOSS, Line, is_run, number_of, read_history

MOST_RECORDS = 16
MADE_WITH = ("torch_version", "commit")
NO_SPEED_PREFIXES = ("loggers.", "cost.")
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
    if twice := [path for index, path in enumerate(paths) if files[index] in files[:index]]:
        problems.append(f"{truncate(str(twice[0]), 300)}: is given twice. Give each record once.")
    if others := [record for record in records if record.kind != first.kind]:
        problem = f"{others[0].name} is of {others[0].kind}, {first.name} of {first.kind}"
        return [*problems, f"command line: {problem}. Records of one kind compare. Leave one out."]
    known = list(dict.fromkeys(key for record in records for key in record.what))
    possible = list(map(plain, known))
    for key in across:
        if key not in known:
            problems.append(
                f"across: '{truncate(key)}' is not a key that has to be the same. Possible: {', '.join(possible)}."
            )
    problems += [
        f"{plain(key)}: {_side_by_side(records, values)}. The records measured different work, so they do not compare. "
        f"Give others, or allow it: across={key}."
        for key, values in other_work(records).items()
        if key not in across
    ]
    if not problems:
        apart = [record for record in records[1:] if not shared_figures(record, first)]
        problems = [f"{record.name}: has no figure that {first.name} has. Leave it out." for record in apart]
    return problems


def other_work(records: Sequence[Record]) -> dict[str, list[Any]]:
    """Return the keys by which records are of different work, each with its values."""
    different = {}
    for key in dict.fromkeys(key for record in records for key in record.what if key != WORK):
        values = [record.what.get(key, NOT_RECORDED) for record in records]
        if any(value is NOT_RECORDED or value != values[0] for value in values):
            different[key] = values
    work = [record.what.get(WORK) for record in records]
    known = [value for value in work if isinstance(value, int | float) and value > 0]
    if not different and known and max(known) > (1 + ALIKE_FRAC) * min(known):  # else it follows from another key
        different[WORK] = work
    return different


def _side_by_side(records: Sequence[Record], values: Sequence[Any]) -> str:
    return ", ".join(f"{_value(value)} in {record.name}" for record, value in zip(records, values, strict=True))


def _value(value: Any) -> str:
    return "none" if value is None else plain(value, 80)


def shared_figures(record: Record, first: Record) -> list[str]:
    """Return the figures that both have, in the first one's order."""
    return [key for key in first.figures if key in record.figures]


# --- the table ---


def better_direction(key: str) -> int:
    """Return 1 for a figure of which more is faster, -1 of which less is, 0 for one that is no speed and no time."""
    if "per_sec" in key or "speedup" in key:
        return 1
    return -1 if {"ms", "sec", "us", "seconds"} & set(re.split(r"[^a-z]+", key)) else 0


def verdict_of(key: str, ratio: Ratio) -> str:
    """Return the verdict on a figure in words."""
    side = better_direction(key)
    if ratio.verdict not in (MORE, LESS) or not side:
        return ratio.verdict
    return "faster" if (ratio.verdict == MORE) == (side > 0) else "slower"


def rows_of(records: Sequence[Record]) -> Iterator[Row]:
    """Yield the figure's name, the record's, its device, the figure with its extremes, how often measured, ratio, verdict."""
    first = records[0]
    for key in first.figures:
        measured = [record for record in records if key in record.figures]
        for record in measured if len(measured) > 1 else ():
            sample = record.figures[key]
            shown_as = (plain(key), record.name, plain(record.device, 120), _format_range(sample), _count(sample))
            if record is first:
                yield (*shown_as, None, FIRST)
                continue
            ratio = ratio_of(sample, first.figures[key])
            interval = f"{ratio.value:.3f} ({ratio.least:.3f} to {ratio.greatest:.3f})"
            yield (*shown_as, interval, verdict_of(key, ratio))


def _format_range(sample: Measurement) -> str:
    middle, least, greatest = map(figure, (sample.middle, sample.least, sample.greatest))
    return middle if sample.least == sample.greatest else f"{middle} ({least} to {greatest})"


def _count(sample: Measurement) -> str | None:
    return f"{sample.num} {sample.unit}{'s' * (sample.num != 1)}" if sample.num else None


def table_of(records: Sequence[Record]) -> RecordTable:
    """Return the table of records, each set against the first."""
    title = f"Set against {records[0].name}; the median, with the least and the greatest:"
    head: tuple[str, ...] = ("figure", "record", "device", "value", "of", "ratio to the first", "verdict")
    if records[0].kind == RUN:
        head = ("record", "device", "images/s per device", "of", "ratio to the first", "verdict")
        return RecordTable(title, head, "llrrrl", [row[1:] for row in rows_of(records)])
    return RecordTable(title, head, "lllrrrl", list(rows_of(records)))


# --- what stands below it ---


def notes_of(records: Sequence[Record]) -> list[str]:
    """Return a line for each key that differs, settings first, and for what has to be known of the records."""
    other = other_work(records)
    notes = [f"allowed by across: {key} {' | '.join(map(_value, values))}" for key, values in other.items()]
    settings = differing([record.settings for record in records])
    if all(record.config for record in records):
        named = {row.name for row in settings} | {key for record in records for key in (*record.what, *record.machine)}
        rows = differing([record.config for record in records], RUN_ONLY_KEYS)
        rows = [row for row in rows if not {row.name, row.name.rpartition(".")[2]} & named]
        settings += [row for row in rows if not row.name.startswith(NO_SPEED_PREFIXES)]
    for kind, rows in (("setting", settings), ("machine", differing([record.machine for record in records]))):
        notes += [f"differs, {kind}: {row.name} {' | '.join(text for text, _ in row.cells)}" for row in rows]
    if not notes:
        notes.append(
            "nothing that was recorded differs: two starts of the same. Join repeated runs with commas for a verdict"
        )
    if records[0].kind == RUN:
        notes.append(f"trained in all: {_alike([record.what for record in records], (*other, WORK))}")
    if made := _alike([record.machine for record in records], only=MADE_WITH):
        notes.append(f"made with: {made}")
    for remark in dict.fromkeys(remark for record in records for remark in record.remarks):
        notes.append(f"{', '.join(record.name for record in records if remark in record.remarks)}: {remark}")
    ratios = [
        ratio_of(record.figures[key], records[0].figures[key])
        for record in records[1:]
        for key in shared_figures(record, records[0])
    ]
    if not all(ratio.is_enough or ratio.is_one_start for ratio in ratios):
        notes.append("some figures have too few values for a verdict: five of each suffice")
    return notes


def _alike(all_of: Sequence[Mapping[str, Any]], without: Sequence[str] = (), only: Sequence[str] | None = None) -> str:
    """Return the keys that all have with the same value, and it, on a line."""
    first = all_of[0]
    keys = [key for key in first if key not in without and (only is None or key in only) and first[key] is not None]
    return ", ".join(f"{key} {_value(first[key])}" for key in keys if all(of.get(key) == first[key] for of in all_of))


def with_unique_names(records: Sequence[Record]) -> list[Record]:
    """Return the records; those of one name with the folder above in it."""
    names, labeled = [record.name for record in records], []
    for record in records:
        path = record.paths[0].resolve()
        folder = path.parent if path.name == SUMMARY else path.with_suffix("")
        name = "/".join(folder.parts[-2:]) if names.count(record.name) > 1 else record.name
        labeled.append(replace(record, name=plain(name, 120)))
    return labeled


# --- the command ---


def compare_records(sources: Sequence[str], across: Sequence[str] = ()) -> tuple[RecordTable, list[str]]:
    """Compare records.

    Args:
        sources: what each of them is read from; the first is what the others are set against.
        across: keys that have to be the same, and may differ all the same.

    Returns:
        the table, and the notes below it.

    Raises:
        ConfigError: they cannot be read, or do not compare; each problem.
    """
    records, problems = [], []
    for source in sources:
        try:
            records.append(read_record(source))
        except ValueError as error:
            problems.append(str(error))
    if not problems:
        records = with_unique_names(records)
        problems = problems_of(records, across)
    if problems:
        raise ConfigError(problems)
    return table_of(records), notes_of(records)


def markdown_of(table: RecordTable, notes: Sequence[str]) -> str:
    """Format a comparison for a page."""
    escaped = table._replace(
        rows=[tuple(cell if cell is None else cell.replace("|", r"\|") for cell in row) for row in table.rows]
    )
    return "\n".join(["", in_markdown(escaped), *(f"- {note}" for note in notes), *[""] * bool(notes), ""])


@command(keys=CompareKeys)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    sources, pages, across = read_line(argv)
    table, notes = compare_records(sources, across)
    rewrite(pages, " ".join(sources), markdown_of(table, notes))
    if not pages:
        print("\n".join([in_text(table), *notes]))
    return 0


# --- the records that reports.compare takes ---
#
# Two kinds: a run (its folder, its summary.json, or a record of bench.ladder), and a record of another command of bench
# whose figures have KEY, KEY_min and KEY_max.

SPEED = "images_per_sec_per_device"
RUN = "run"
NOT_RECORDED = "not recorded"
SCHEMA = 1
"""Of summary.json (callbacks/run_record.py)."""
WORK_KEYS = (
    *("family", "preset", "variant", "stage", "synthetic", "image_size", "bucket_sizes", "trained_parameters"),
    *("ema", "device_batch_size", "tflop_per_image"),
)
"""What is trained: these have to be the same. device_batch_size: images a device and step."""
ABSENT_IS_NONE = ("bucket_sizes",)
WORK = "tflop_per_image"
ALIKE_FRAC = 0.01  # by which two counts of WORK may differ: another torch counts the same network a little differently
CASE_KEYS = ("image_size", "batch_size", "preset", "precision")
"""What a record of bench has measured, beside its `config`; they have to be the same."""
NO_FIGURE_KEYS = ("results", "work", "rounds", "parts", "times", "other", "largest_gib")
"""Keys of a bench command that say which figures there are, or how often they were measured."""
MACHINE = (
    *("device", "num_devices", "device_memory_gib", "cpu", "cpu_sockets", "cpu_cores", "cpu_threads", "num_cpus"),
    *("memory_gib", "os", "platform", "commit"),
)
"""With all `..._version`."""
OUTCOMES = (
    *RESULT_KEYS,
    *COST_KEYS,
    VAL_LOSS,
    SPEED,
    WORK,
    *("schema", "call", "rung", "command", "run_name", "status", "process_seconds", "command_seconds", "wall_seconds"),
    *("starts", "history_lost", "target", "images_to_target", "seconds_to_target", "seconds_to_target_with_eval"),
    *("fid", "clip", "bad_samples", "points_not_evaluated", "compiled_graphs", "recompiled_graphs", "stopped_early"),
    "cmmd",
    *("first_step_seconds", "peak_tflops", "global_batch_size", "evaluations", "validations", "profile"),
)
"""What a run came to, and what it is called; with OUTCOME_PREFIXES and all `..._fingerprint`. Other keys are its settings."""
OUTCOME_PREFIXES = ("estimated_", "images_per_sec", "slowest_")


@dataclass(frozen=True)
class Record:
    """One that is compared."""

    paths: tuple[Path, ...]
    """The files that it was read from, of repeated runs several."""
    name: str
    kind: str
    """RUN, or the command of bench."""
    figures: Mapping[str, Measurement]
    what: Mapping[str, Any] = field(default_factory=dict)
    """Keys that have to be the same."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    """Every key of a run whose folder is there."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    """What a reader has to know of how it was made."""

    @property
    def device(self) -> str:
        num = self.machine.get("num_devices")
        device = str(self.machine.get("device", "not recorded"))
        return f"{num} x {device}" if isinstance(num, int) and num > 1 else device


def read_record(word: str) -> Record:
    """Read what a word of the command line names.

    Args:
        word: a path; or several with commas between, repeated runs.

    Raises:
        ValueError: there is none, it cannot be read, or has no figure; the message says what to do.
    """
    if "," in word and kind_of_path(word) is None:
        return _repeated(truncate(word, 300), [_read_one(part) for part in word.split(",")])
    return _read_one(word)


def _read_one(word: str) -> Record:
    path, kind, where = Path(word), kind_of_path(word), truncate(word, 300)
    if kind is None:
        raise ValueError(f"{where}: no such file or folder. Give runs/NAME or a record.")
    if kind == "folder":
        if not is_run(path):
            raise ValueError(f"{where}: is not a run: it has no config.yaml. Give a run's folder: runs/NAME.")
        path = path / SUMMARY
        if not path.is_file():
            raise ValueError(f"{where}: is not finished: it has no {SUMMARY}. Its own command resumes it.")
        where = truncate(str(path), 300)
    try:
        content = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: is no whole JSON ({type(error).__name__}: {error}). Give another one.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{where}: holds a {type(content).__name__}. Give a record, which is one object.")
    if content.get("status", "ok") != "ok":
        status = format_value(content["status"])
        raise ValueError(f"{where}: its status is {status}: no speed was measured. Give one whose status is ok.")
    # Committed records have the key's former name.
    content = {"async_loss" if key == "late_loss" else key: value for key, value in content.items()}
    name = path.parent.resolve().name if path.name == SUMMARY else path.stem
    record = (_run if SPEED in content else _of_bench)(where, path, name, content)
    is_of_folder = path.name == SUMMARY and is_run(path.parent)
    return replace(record, config=read_history(path.parent).config) if is_of_folder else record


# --- runs ---


def _run(where: str, path: Path, name: str, content: Line) -> Record:
    if (schema := content.get("schema", SCHEMA)) != SCHEMA:
        text = f"is of schema {format_value(schema)}. Possible: {SCHEMA}. Read it with the code of its commit"
        raise ValueError(f"{where}: {text}.")
    keys = (SPEED, "images_per_sec_min", "images_per_sec_max", "global_batch_size", "num_devices")
    for key in keys:
        if not _is_above_zero(content.get(key)):
            problem_text = f"its {key} is {format_value(content[key])}" if key in content else f"it has no {key}"
            raise ValueError(
                f"{where}: {problem_text}. Possible: a number above 0. Give a record that has measured it."
            )
    middle, least, greatest, batch, num = (float(content[key]) for key in keys)
    sample = Measurement(middle, least / num, greatest / num, int(number_of(content, "windows") or 0))
    if not sample.least <= 1.0001 * middle <= 1.0002 * sample.greatest:
        problem = f"its median {middle:g} is not between its extremes {sample.least:g} and {sample.greatest:g}"
        raise ValueError(f"{where}: {problem}. Give a record that nobody has changed.")
    derived = {**content, "device_batch_size": batch / num}
    lost = "a part of its record was lost" if content.get("history_lost") else ""
    return Record(
        (path,),
        name,
        RUN,
        {SPEED: sample},
        what={key: derived.get(key, None if key in ABSENT_IS_NONE else NOT_RECORDED) for key in WORK_KEYS},
        settings={key: value for key, value in content.items() if _is_setting(key)},
        machine=_machine(content),
        remarks=tuple(filter(None, (_of_commit(content), lost))),
    )


def _is_above_zero(value: Any) -> bool:
    return (number := number_of({"it": value}, "it")) is not None and number > 0.0


def _is_setting(key: str) -> bool:
    is_outcome = key in OUTCOMES or key.startswith(OUTCOME_PREFIXES) or key.endswith("_fingerprint")
    return not (is_outcome or key in WORK_KEYS or _is_machine(key))


def _is_machine(key: str) -> bool:
    return key in MACHINE or key.endswith("_version")


def _machine(content: Line) -> dict[str, Any]:
    machine = {key: value for key, value in content.items() if _is_machine(key)}
    if isinstance(commit := machine.get("commit"), str):
        machine["commit"] = re.sub(r"^([0-9a-f]{12})[0-9a-f]*", r"\1", commit)
    return machine


def _of_commit(content: Line) -> str:
    commit = content.get("commit")
    if commit is None:
        return "its commit was not recorded"
    return "made from a tree with uncommitted changes" if str(commit).endswith("+changes") else ""


def _repeated(where: str, runs: Sequence[Record]) -> Record:
    """Return repeated runs of one configuration as one record. Raises ValueError: they are none."""
    first = runs[0]
    if any(run.kind != RUN for run in runs):
        raise ValueError(f"{where}: commas join repeated runs. Give the folders of runs, or records of rungs.")
    of_first = {**first.what, **first.settings, **first.machine}
    for run in runs[1:]:
        values = {**run.what, **run.settings, **run.machine}
        for key in {**of_first, **values}:
            if key != "seed" and of_first.get(key) != values.get(key):
                problem = f"{key} is {format_value(of_first.get(key))} and {format_value(values.get(key))}"
                raise ValueError(
                    f"{where}: are not repeated runs: {problem}. Give runs that differ in their seed alone."
                )
    return replace(
        first,
        paths=tuple(path for run in runs for path in run.paths),
        name=", ".join(run.name for run in runs),
        figures={SPEED: sample_of([run.figures[SPEED].middle for run in runs], "run")},
        settings={key: value for key, value in first.settings.items() if key != "seed"},
        remarks=tuple(dict.fromkeys(text for run in runs for text in run.remarks)),
    )


# --- records of bench ---


def _of_bench(where: str, path: Path, name: str, content: Line) -> Record:
    config = content.get("config")
    config = config if isinstance(config, dict) else {}
    figures = dict(_figures(content, config))
    if not figures:
        wanted = f"{SPEED}, or figures with _min and _max"
        raise ValueError(
            f"{where}: is no record that can be compared. Wanted: {wanted}. Give a run, or a record of bench."
        )
    work = {f"config.{key}": value for key, value in config.items() if key not in NO_FIGURE_KEYS}
    work |= {key: content[key] for key in CASE_KEYS if key in content}
    work["schema"] = content.get("schema", NOT_RECORDED)
    measured = content.get("measured")
    kind = (
        f"bench.{truncate(measured)}"
        if isinstance(measured, str)
        else f"keys {truncate(', '.join(sorted(config)), 200)}"
    )
    load, num = number_of(content, "load_average_before"), number_of(content, "num_cpus")
    busy = load is not None and num is not None and load > 0.5 * num
    of_load = f"other work was going on: load average {load:g} before it, on {num:g} processors" if busy else ""
    remarks = tuple(filter(None, (_of_commit(content), of_load)))
    return Record((path,), name, kind, figures, what=work, machine=_machine(content), remarks=remarks)


def _figures(content: Line, config: Line) -> Iterator[tuple[str, Measurement]]:
    """Yield (key, sample) of each figure with its extremes; where rounds are kept, of each that has some: of no ratio."""
    rounds, num = content.get("by_round"), number_of(config, "rounds")
    for key in content:
        middle, least, most = (number_of(content, f"{key}{end}") or 0.0 for end in ("", "_min", "_max"))
        if not 0.0 < least <= middle <= most:
            continue
        if not isinstance(rounds, dict):
            yield key, Measurement(middle, least, most, int(num or 0), unit="round")
        elif isinstance(values := rounds.get(key), list) and values and all(map(_is_above_zero, values)):
            yield key, sample_of([float(value) for value in values], "round")


# --- whether one figure is beyond another ---
#
# Each figure was measured several times: in the windows of a run, the rounds of a contest, or in repeated runs. The
# spread of a ratio is the interval that belongs to the rank test of Mann and Whitney (1947), as Hodges and Lehmann
# (1963) have it: of all ratios between a value of the one and a value of the other, it leaves out at either end as many
# as chance may put there. Where only the least and the greatest value are known, or each side is one start's windows,
# none is left out. docs/benchmarking.md has the rule in plain words.

CHANCE = 0.01
"""How often figures that do not differ may be told apart."""
MOST_COUNTED = 10
"""Values of a sample of which only the extremes are known; more of them make the rule no stricter."""
MORE, LESS, ALIKE = "more", "less", "cannot be told apart"
ONE_START = f"{ALIKE} from one start each"
"""Two starts of the same run may differ by more than the windows of each: of two runs started once there is no verdict."""

Unit = Literal["window", "round", "run"]


@dataclass(frozen=True)
class Measurement:
    """What a record says of a figure. All values are above 0."""

    middle: float
    """The median."""
    least: float
    greatest: float
    num: int
    """How often it was measured; 0: the record does not say."""
    values: tuple[float, ...] = ()
    """In the order in which they were measured; empty: the record does not have them."""
    unit: Unit = "window"


def sample_of(values: Sequence[float], unit: Unit) -> Measurement:
    """Return the sample of values that are known."""
    return Measurement(float(np.median(values)), min(values), max(values), len(values), tuple(values), unit)


@dataclass(frozen=True)
class Ratio:
    """How a figure stands to another one."""

    value: float
    """Of the medians."""
    least: float
    greatest: float
    is_enough: bool
    """False: of so few values nothing can be said."""
    is_one_start: bool = False
    """Each side's values are the windows of one start."""

    @property
    def verdict(self) -> str:
        """MORE or LESS if the whole spread is, else ALIKE; ONE_START where each side was started once."""
        if self.is_one_start:
            return ONE_START
        if not self.is_enough or self.least <= 1.0 <= self.greatest:
            return ALIKE
        return MORE if self.least > 1.0 else LESS


def ratio_of(other: Measurement, first: Measurement) -> Ratio:
    """Return the ratio of a figure to the first one, with its spread."""
    is_one_start = first.unit == other.unit == "window"
    if first.unit != other.unit:
        first, other = _as_run(first), _as_run(other)
    value = other.middle / first.middle
    if is_one_start or not (first.values and other.values):
        nums = [min(sample.num, MOST_COUNTED) for sample in (first, other)]
        is_enough = min(nums) > 0 and left_out(*nums) > 0
        return Ratio(value, other.least / first.greatest, other.greatest / first.least, is_enough, is_one_start)
    ratios = sorted(b / a for a in first.values for b in other.values)
    out = left_out(first.num, other.num)
    end = max(out - 1, 0)
    return Ratio(value, ratios[end], ratios[-1 - end], out > 0)


def _as_run(sample: Measurement) -> Measurement:
    """Return what a single run is beside repeated ones: one value."""
    return sample if sample.unit == "run" else sample_of([sample.middle], "run")


@functools.cache
def left_out(num: int, other: int) -> int:
    """Return which of the sorted ratios, from either end, ends the spread: the first, the second, ...; 0: none may.

    Of the binomial(num + other, num) orders in which values that do not differ may lie, each is as likely. `counts[u]` is the
    number of those in which u of the num * other pairs have the second one's value below the first one's.
    """
    counts = [1] + [0] * (num * other)
    for step in range(1, other + 1):  # the Gaussian binomial coefficient, factor by factor
        for u in range(num * other, num + step - 1, -1):
            counts[u] -= counts[u - num - step]
        for u in range(step, num * other + 1):
            counts[u] += counts[u - step]
    num_extreme, most = 0, CHANCE / 2.0 * math.comb(num + other, num)
    for u, count in enumerate(counts):
        num_extreme += count
        if num_extreme > most:
            return u
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
