"""The records that reports.compare takes, read: figures with their values, and which keys have to be the same.

Two kinds: a run (its folder, its summary.json, or a record of bench.ladder), and a record of another command of bench whose
figures have KEY, KEY_min and KEY_max. Figures that others have published are a form of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.files import read_regular
from cli.limits import given_as, kind_of_path, shown, text_possible
from record.files import METRICS, SUMMARY
from record.history import History, Line, is_run, number_of, read_history
from record.summary import COST_KEYS, RESULT_KEYS, VAL_LOSS
from reports.verdicts import Sample, sample_of

SPEED = "images_per_sec_per_device"
RUN, PUBLISHED = "run", "published"
SCHEMA = 1
"""Of summary.json (callbacks/run_record.py) and of published figures."""
OF_A_RUN = (
    *("family", "preset", "variant", "stage", "synthetic", "image_size", "bucket_sizes", "trained_parameters"),
    *("ema", "device_batch_size", "tflop_per_image"),
)
"""What is trained: these have to be the same. device_batch_size: images a device and step."""
ABSENT_IS_NONE = ("bucket_sizes",)
WORK = "tflop_per_image"
ALIKE_FRAC = 0.01  # by which two counts of WORK may differ: another torch counts the same network a little differently
OF_A_CASE = (
    *("what", "image_size", "num_frames", "batch_size", "parameters", "preset", "precision", "film_size", "clip_size"),
)
"""What a record of bench has measured, beside its `config`; they have to be the same."""
OF_NO_FIGURE = ("results", "work", "rounds", "parts", "times", "other", "largest_gib")
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
    *("first_step_seconds", "peak_tflops", "global_batch_size", "evaluations", "validations", "profile"),
)
"""What a run came to, and what it is called; with all `estimated_...`, `images_per_sec...` and `..._fingerprint`. Other keys
are its settings."""


@dataclass(frozen=True)
class Record:
    """One that is compared."""

    paths: tuple[Path, ...]
    """The files that it was read from, of repeated runs several."""
    name: str
    kind: str
    """RUN, PUBLISHED, or the command of bench."""
    figures: Mapping[str, Sample]
    what: Mapping[str, Any] = field(default_factory=dict)
    """Keys that have to be the same."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    """The whole configuration of a run whose folder is there."""
    remarks: tuple[str, ...] = ()
    """What a reader has to know of how it was made."""

    @property
    def device(self) -> str:
        num = self.machine.get("num_devices")
        device = str(self.machine.get("device", "not recorded"))
        return f"{num} x {device}" if isinstance(num, int) and num > 1 else device


def read(word: str) -> Record:
    """Read what a word of the command line names.

    Args:
        word: a path; or several with commas between, repeated runs.

    Raises:
        ValueError: there is none, it cannot be read, or has no figure; the message says what to do.
    """
    if "," in word and kind_of_path(word) is None:
        return _repeated(word, [_read_one(part) for part in word.split(",")])
    return _read_one(word)


def _read_one(word: str) -> Record:
    if possible := text_possible(word):
        raise ValueError(f"command line: '{shown(word)}' is not a path. Possible: {possible}.")
    path, kind = Path(word), kind_of_path(word)
    if kind is None or not word:
        raise ValueError(f"{shown(word, 300) or 'command line'}: no such file or folder. Give runs/NAME or a record.")
    folder = path if kind == "folder" else path.parent if path.name == SUMMARY else None
    if kind == "folder":
        if not is_run(path):
            raise ValueError(f"{shown(word, 300)}: is no run: it has no config.yaml. Give a run's folder: runs/NAME.")
        path = path / SUMMARY
        if not path.is_file():
            ways = "Run it to its end: its own command resumes it"
            raise ValueError(f"{shown(word, 300)}: is not finished: it has no {SUMMARY}. {ways}.")
    where, content = shown(str(path), 300), _content(path)
    history = read_history(folder) if folder and (folder / METRICS).is_file() else None
    name = (path.parent.resolve().name if path.name == SUMMARY else path.stem) or where
    if "published" in content:
        raise ValueError(f"{where}: has published figures, which no key says how they were made. Give it alone.")
    if content.get("status", "ok") != "ok":
        status = given_as(content["status"])
        raise ValueError(f"{where}: its status is {status}: no speed was measured. Give one whose status is ok.")
    if SPEED in content:
        return _run(where, path, name, content, history)
    return _of_bench(where, path, name, content)


def _content(path: Path) -> dict[str, Any]:
    where = shown(str(path), 300)
    if (kind := kind_of_path(path)) != "file":
        raise ValueError(f"{where}: is a {kind}. Give runs/NAME or a record.")
    try:
        content = json.loads(read_regular(path))
    except OSError as error:
        raise ValueError(f"{where}: cannot be read: {error.strerror}. Check its rights.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: is no whole JSON ({type(error).__name__}: {error}). Give another one.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{where}: holds a {type(content).__name__}. Give a record, which is one object.")
    return content


# --- runs ---


def _run(where: str, path: Path, name: str, content: Line, history: History | None) -> Record:
    _check_schema(where, content)
    num = _above_zero(where, content, "num_devices")
    middle, least, greatest, batch = (
        _above_zero(where, content, key)
        for key in (SPEED, "images_per_sec_min", "images_per_sec_max", "global_batch_size")
    )
    sample = Sample(middle, least / num, greatest / num, int(number_of(content, "windows") or 0))
    if not sample.least <= 1.0001 * middle <= 1.0002 * sample.greatest:
        said = f"its median {middle:g} is not between its extremes {sample.least:g} and {sample.greatest:g}"
        raise ValueError(f"{where}: {said}. Give a record that nobody has changed.")
    remarks = [_of_commit(content)]
    if content.get("history_lost"):
        remarks.append("a part of its record was lost")
    derived = {**content, "device_batch_size": batch / num}
    return Record(
        (path,),
        name,
        RUN,
        {SPEED: sample},
        what={key: derived.get(key, None if key in ABSENT_IS_NONE else NOT_RECORDED) for key in OF_A_RUN},
        settings={key: value for key, value in content.items() if _is_setting(key)},
        machine=_machine(content),
        config={} if history is None else history.config,
        remarks=tuple(filter(None, remarks)),
    )


def _is_above_zero(value: Any) -> bool:
    return (found := number_of({"it": value}, "it")) is not None and found > 0.0


def _check_schema(where: str, content: Line) -> None:
    if (schema := content.get("schema", SCHEMA)) != SCHEMA:
        raise ValueError(
            f"{where}: is of schema {given_as(schema)}. Possible: {SCHEMA}. Read it with the code of its commit."
        )


def _above_zero(where: str, content: Line, key: str) -> float:
    value = number_of(content, key)
    if value is None or value <= 0.0:
        given = f"its {key} is {given_as(content[key])}" if key in content else f"it has no {key}"
        raise ValueError(f"{where}: {given}. Possible: a number above 0. Give a record that has measured it.")
    return value


def _is_setting(key: str) -> bool:
    is_outcome = key in OUTCOMES or key.startswith(("estimated_", "images_per_sec")) or key.endswith("_fingerprint")
    return not (is_outcome or key in OF_A_RUN or _is_machine(key))


def _is_machine(key: str) -> bool:
    return key in MACHINE or key.endswith("_version")


def _machine(content: Line) -> dict[str, Any]:
    found = {key: value for key, value in content.items() if _is_machine(key)}
    if isinstance(commit := found.get("commit"), str):
        found["commit"] = re.sub(r"^([0-9a-f]{12})[0-9a-f]*", r"\1", commit)
    return found


def _of_commit(content: Line) -> str:
    commit = content.get("commit")
    if commit is None:
        return "of which code it is was not recorded"
    return "made of a tree with changes that are in no commit" if str(commit).endswith("+changes") else ""


def _repeated(word: str, runs: Sequence[Record]) -> Record:
    """Return repeated runs of one configuration as one record. Raises ValueError: they are none."""
    if any(run.kind != RUN for run in runs):
        raise ValueError(
            f"{shown(word, 300)}: commas join repeated runs. Give the folders of runs, or records of rungs."
        )
    first = runs[0]
    for run in runs[1:]:
        keys = [(key, first.what[key], value) for key, value in run.what.items() if value != first.what[key]]
        for one, other in ((first.settings, run.settings), (first.machine, run.machine)):
            keys += [(key, one.get(key), other.get(key)) for key in {**one, **other} if one.get(key) != other.get(key)]
        if keys := [key for key in keys if key[0] != "seed"]:
            key, one, other = keys[0]
            said = f"{key} is {given_as(one)} and {given_as(other)}"
            raise ValueError(
                f"{shown(word, 300)}: are not repeated runs: {said}. Give runs that differ in their seed alone."
            )
    return Record(
        tuple(path for run in runs for path in run.paths),
        ", ".join(run.name for run in runs),
        RUN,
        {SPEED: sample_of([run.figures[SPEED].middle for run in runs], "run")},
        what=first.what,
        settings={key: value for key, value in first.settings.items() if key != "seed"},
        machine=first.machine,
        remarks=tuple(dict.fromkeys(text for run in runs for text in run.remarks if "window" not in text)),
    )


class _NotRecorded:
    """In place of a value that a record does not have; it is no other record's."""

    def __repr__(self) -> str:
        return "not recorded"


NOT_RECORDED = _NotRecorded()


# --- records of bench ---


def _of_bench(where: str, path: Path, name: str, content: Line) -> Record:
    config = content.get("config")
    config = config if isinstance(config, dict) else {}
    figures = dict(_figures("", content, config))
    what = {f"config.{key}": value for key, value in config.items() if key not in OF_NO_FIGURE}
    what |= {key: content[key] for key in OF_A_CASE if key in content}
    for case in _cases(content):
        figures |= _figures(f"{case['case']}: ", case, config)
        what |= {f"{case['case']}: {key}": case[key] for key in OF_A_CASE if key in case}
    if not figures:
        wanted = f"{SPEED}, or figures with _min and _max"
        raise ValueError(
            f"{where}: is no record that can be compared. Wanted: {wanted}. Give a run, or a record of bench."
        )
    measured = content.get("measured")
    kind = f"bench.{shown(measured)}" if isinstance(measured, str) else f"keys {shown(', '.join(sorted(config)), 200)}"
    load, num = number_of(content, "load_average_before"), number_of(content, "num_cpus")
    busy = load is not None and num is not None and load > 0.5 * num
    of_load = f"other work was going on: load average {load:g} before it, on {num:g} processors" if busy else ""
    what["schema"] = content.get("schema", NOT_RECORDED)
    remarks = tuple(filter(None, (_of_commit(content), of_load)))
    return Record((path,), name, kind, figures, what=what, machine=_machine(content), remarks=remarks)


def _cases(content: Line) -> list[dict[str, Any]]:
    cases = content.get("cases")
    return [case for case in cases if isinstance(case, dict) and "case" in case] if isinstance(cases, list) else []


def _figures(before: str, content: Line, config: Line) -> Iterator[tuple[str, Sample]]:
    """Yield (key, sample) of each figure with its extremes; where rounds are kept, of each that has some: of no ratio."""
    rounds, num = content.get("by_round"), number_of(config, "rounds")
    for key in content:
        middle, least, most = (number_of(content, f"{key}{end}") or 0.0 for end in ("", "_min", "_max"))
        if not 0.0 < least <= middle <= most:
            continue
        if not isinstance(rounds, dict):
            yield f"{before}{key}", Sample(middle, least, most, int(num or 0), unit="round")
        elif isinstance(values := rounds.get(key), list) and values and all(map(_is_above_zero, values)):
            yield f"{before}{key}", sample_of([float(value) for value in values], "round")


# --- published figures ---


@dataclass(frozen=True)
class Published:
    """Figures of others, which were not measured here."""

    title: str
    groups: Sequence[Sequence[Record]]
    """Records of one configuration on several devices."""


def read_published(word: str) -> Published:
    """Read a file of published figures. Raises ValueError: it cannot be read, or is none."""
    path, where = Path(word), shown(word, 300)
    content = _content(path)
    _check_schema(where, content)
    try:
        by, source, read_on = (content[key] for key in ("published", "source", "read"))
        title = f"Published by {by}, not measured here: {content['what']}. {content['not_stated']} {source}, {read_on}"
        groups = [
            [
                Record(
                    (path,),
                    f"{by}, {row['name']}",
                    PUBLISHED,
                    {SPEED: Sample(value, value, value, 0)},
                    machine={"device": device},
                )
                for device in row[SPEED]
                if (value := _above_zero(where, row[SPEED], device))
            ]
            for row in content["rows"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"{where}: has no published figures ({said}). See reports/nvidia_published.json.") from error
    if not groups or any(len(group) < 2 for group in groups):
        said = "each row needs two devices"
        raise ValueError(f"{where}: has no published figures ({said}). See reports/nvidia_published.json.")
    return Published(title, groups)


def is_published(word: str) -> bool:
    """True for a file of published figures; what cannot be read is none."""
    try:
        return "published" in _content(Path(word))
    except ValueError:
        return False
