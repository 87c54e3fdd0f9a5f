"""The records that reports.compare takes, read: figures with their values, and which keys have to be the same.

Two kinds: a run (its folder, its summary.json, or a record of bench.ladder), and a record of another command of bench whose
figures have KEY, KEY_min and KEY_max.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cli.files import read_regular
from cli.limits import given_as, kind_of_path, shown
from record.files import SUMMARY
from record.history import Line, is_run, number_of, read_history
from record.summary import COST_KEYS, RESULT_KEYS, VAL_LOSS
from reports.verdicts import Sample, sample_of

SPEED = "images_per_sec_per_device"
RUN = "run"
NOT_RECORDED = "not recorded"
SCHEMA = 1
"""Of summary.json (callbacks/run_record.py)."""
OF_A_RUN = (
    *("family", "preset", "variant", "stage", "synthetic", "image_size", "bucket_sizes", "trained_parameters"),
    *("ema", "device_batch_size", "tflop_per_image"),
)
"""What is trained: these have to be the same. device_batch_size: images a device and step."""
ABSENT_IS_NONE = ("bucket_sizes",)
WORK = "tflop_per_image"
ALIKE_FRAC = 0.01  # by which two counts of WORK may differ: another torch counts the same network a little differently
OF_A_CASE = ("image_size", "batch_size", "preset", "precision")
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
    """RUN, or the command of bench."""
    figures: Mapping[str, Sample]
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


def read(word: str) -> Record:
    """Read what a word of the command line names.

    Args:
        word: a path; or several with commas between, repeated runs.

    Raises:
        ValueError: there is none, it cannot be read, or has no figure; the message says what to do.
    """
    if "," in word and kind_of_path(word) is None:
        return _repeated(shown(word, 300), [_read_one(part) for part in word.split(",")])
    return _read_one(word)


def _read_one(word: str) -> Record:
    path, kind, where = Path(word), kind_of_path(word), shown(word, 300)
    if kind is None:
        raise ValueError(f"{where}: no such file or folder. Give runs/NAME or a record.")
    if kind == "folder":
        if not is_run(path):
            raise ValueError(f"{where}: is no run: it has no config.yaml. Give a run's folder: runs/NAME.")
        path = path / SUMMARY
        if not path.is_file():
            raise ValueError(f"{where}: is not finished: it has no {SUMMARY}. Its own command resumes it.")
        where = shown(str(path), 300)
    try:
        content = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: is no whole JSON ({type(error).__name__}: {error}). Give another one.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{where}: holds a {type(content).__name__}. Give a record, which is one object.")
    if content.get("status", "ok") != "ok":
        status = given_as(content["status"])
        raise ValueError(f"{where}: its status is {status}: no speed was measured. Give one whose status is ok.")
    content = {
        "async_loss" if key == "late_loss" else key: value for key, value in content.items()
    }  # committed records
    name = path.parent.resolve().name if path.name == SUMMARY else path.stem
    record = (_run if SPEED in content else _of_bench)(where, path, name, content)
    is_of_folder = path.name == SUMMARY and is_run(path.parent)
    return replace(record, config=read_history(path.parent).config) if is_of_folder else record


# --- runs ---


def _run(where: str, path: Path, name: str, content: Line) -> Record:
    if (schema := content.get("schema", SCHEMA)) != SCHEMA:
        text = f"is of schema {given_as(schema)}. Possible: {SCHEMA}. Read it with the code of its commit"
        raise ValueError(f"{where}: {text}.")
    keys = (SPEED, "images_per_sec_min", "images_per_sec_max", "global_batch_size", "num_devices")
    for key in keys:
        if not _is_above_zero(content.get(key)):
            given = f"its {key} is {given_as(content[key])}" if key in content else f"it has no {key}"
            raise ValueError(f"{where}: {given}. Possible: a number above 0. Give a record that has measured it.")
    middle, least, greatest, batch, num = (float(content[key]) for key in keys)
    sample = Sample(middle, least / num, greatest / num, int(number_of(content, "windows") or 0))
    if not sample.least <= 1.0001 * middle <= 1.0002 * sample.greatest:
        said = f"its median {middle:g} is not between its extremes {sample.least:g} and {sample.greatest:g}"
        raise ValueError(f"{where}: {said}. Give a record that nobody has changed.")
    derived = {**content, "device_batch_size": batch / num}
    lost = "a part of its record was lost" if content.get("history_lost") else ""
    return Record(
        (path,),
        name,
        RUN,
        {SPEED: sample},
        what={key: derived.get(key, None if key in ABSENT_IS_NONE else NOT_RECORDED) for key in OF_A_RUN},
        settings={key: value for key, value in content.items() if _is_setting(key)},
        machine=_machine(content),
        remarks=tuple(filter(None, (_of_commit(content), lost))),
    )


def _is_above_zero(value: Any) -> bool:
    return (found := number_of({"it": value}, "it")) is not None and found > 0.0


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


def _repeated(where: str, runs: Sequence[Record]) -> Record:
    """Return repeated runs of one configuration as one record. Raises ValueError: they are none."""
    first = runs[0]
    if any(run.kind != RUN for run in runs):
        raise ValueError(f"{where}: commas join repeated runs. Give the folders of runs, or records of rungs.")
    of_first = {**first.what, **first.settings, **first.machine}
    for run in runs[1:]:
        of = {**run.what, **run.settings, **run.machine}
        for key in {**of_first, **of}:
            if key != "seed" and of_first.get(key) != of.get(key):
                said = f"{key} is {given_as(of_first.get(key))} and {given_as(of.get(key))}"
                raise ValueError(f"{where}: are not repeated runs: {said}. Give runs that differ in their seed alone.")
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
    what = {f"config.{key}": value for key, value in config.items() if key not in OF_NO_FIGURE}
    what |= {key: content[key] for key in OF_A_CASE if key in content}
    what["schema"] = content.get("schema", NOT_RECORDED)
    measured = content.get("measured")
    kind = f"bench.{shown(measured)}" if isinstance(measured, str) else f"keys {shown(', '.join(sorted(config)), 200)}"
    load, num = number_of(content, "load_average_before"), number_of(content, "num_cpus")
    busy = load is not None and num is not None and load > 0.5 * num
    of_load = f"other work was going on: load average {load:g} before it, on {num:g} processors" if busy else ""
    remarks = tuple(filter(None, (_of_commit(content), of_load)))
    return Record((path,), name, kind, figures, what=what, machine=_machine(content), remarks=remarks)


def _figures(content: Line, config: Line) -> Iterator[tuple[str, Sample]]:
    """Yield (key, sample) of each figure with its extremes; where rounds are kept, of each that has some: of no ratio."""
    rounds, num = content.get("by_round"), number_of(config, "rounds")
    for key in content:
        middle, least, most = (number_of(content, f"{key}{end}") or 0.0 for end in ("", "_min", "_max"))
        if not 0.0 < least <= middle <= most:
            continue
        if not isinstance(rounds, dict):
            yield key, Sample(middle, least, most, int(num or 0), unit="round")
        elif isinstance(values := rounds.get(key), list) and values and all(map(_is_above_zero, values)):
            yield key, sample_of([float(value) for value in values], "round")
