"""The files of a run's folder, read: what a killed writer left is passed over, what is broken otherwise is named.

callbacks/run_record.py says what they are, and writes them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from common import masking
from common.command_line import Assignment, Problem, leaves, read_yaml
from common.errors import ConfigError
from common.files import open_regular, read_regular, write_atomic
from config import resolve_interpolations

STARTS, METRICS, CUT, BAD_SAMPLES = "starts.jsonl", "metrics.jsonl", "metrics.cut.jsonl", "bad_samples.jsonl"
SUMMARY, ENVIRONMENT = "summary.json", "environment.json"
CONFIG, OVERRIDES = "config.yaml", "overrides.yaml"
EVAL_PARTS = "eval_parts"
SCORES, SCORES_CSV = "eval.jsonl", "eval.csv"
"""Written by evaluation/table.py."""
ALL_FILES = (
    *(STARTS, METRICS, CUT, BAD_SAMPLES, SUMMARY, CONFIG, OVERRIDES, ENVIRONMENT),
    *("mlperf.log", SCORES, SCORES_CSV),
)
MOST_OF_LINE = 2**22  # bytes
MOST_OF_LINES = 2**30  # bytes of a file of lines: a million windows have some 2**29
REQUIRED_KEYS = {
    STARTS: ("start", "run_id", "device", "num_devices"),
    METRICS: ("batch", "images"),
    BAD_SAMPLES: ("sample", "key", "reason"),
}
"""File -> what every line of it has."""
CLOCKS = ("train_sec", "data_wait_sec", "eval_sec", "other_sec")


def remove_left_overs(folder: Path) -> None:
    """Remove the files that a killed start was writing. eval.py may be writing its own at this moment: they stay."""
    for name in (CONFIG, ENVIRONMENT, STARTS, METRICS, BAD_SAMPLES, SUMMARY):
        for left in folder.glob(f".{name}.*.tmp"):
            if left.is_file():
                left.unlink(missing_ok=True)


def parsed_lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Yield number, bytes and object of each line of a .jsonl file; None: it is no whole object. Raises OSError."""
    with open_regular(path, MOST_OF_LINES) as file:
        for number, text in enumerate(iter(lambda: file.readline(MOST_OF_LINE), b""), 1):
            try:
                content = json.loads(text)
            except (ValueError, RecursionError):
                content = None
            yield number, text, content if isinstance(content, dict) else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a .jsonl file, without a last one that a killed writer left unfinished.

    Raises:
        ConfigError: another line is no object, or is none of this file's; names it, and what to do.
    """
    objects = []
    fix = "Fix it, or remove that line: what it said is then lost, the others stay."
    try:
        for number, text, content in parsed_lines(path) if path.exists() else ():
            if content is None and not text.endswith(b"\n"):
                break
            if content is None:
                wrong = f"'{text[:-1][:40].decode(errors='replace')}' is no whole JSON object"
                raise ConfigError([f"{path}: line {number:,} cannot be read: {wrong}. {fix}"])
            if missing := [key for key in REQUIRED_KEYS.get(path.name, ()) if key not in content]:
                raise ConfigError([f"{path}: line {number:,} cannot be read: it has no {missing[0]}. {fix}"])
            objects.append(content)
    except OSError as error:
        raise ConfigError([f"{path} cannot be read: {error.strerror}. It belongs to the run: restore it."]) from error
    return objects


def read_object(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the object of a JSON file, and what is wrong with the file, or None; nothing if the file is missing."""
    if not path.exists():
        return {}, None
    try:
        content = json.loads(read_regular(path))
    except OSError as error:
        return {}, error.strerror or str(error)
    except (ValueError, RecursionError):
        return {}, "it is no whole JSON"
    return (content, None) if isinstance(content, dict) else ({}, f"it holds a {type(content).__name__}")


def is_window(line: Mapping[str, Any]) -> bool:
    """True for a window's line of metrics.jsonl, false for an evaluation's and a validation's."""
    return not (line.get("evaluation") or line.get("validation"))


def read_summary(folder: Path, *counts: str) -> dict[str, Any]:
    """Return what is in a run's summary.json, or nothing where the run is not finished.

    Args:
        counts: keys that it has to have, whole numbers.

    Raises:
        ConfigError: it is broken, or lacks one of them.
    """
    path = folder / SUMMARY
    summary, problem = read_object(path)
    if summary and (missing := [key for key in counts if not isinstance(summary.get(key), int)]):
        problem = f"its {missing[0]} is no whole number"
    if problem:
        fix = "Remove it: benchmark.py then resumes from the run's newest checkpoint, and writes it again"
        raise ConfigError([f"{path} cannot be read: {problem}. {fix}."])
    return summary


def run_id_of(folder: Path) -> str | None:
    """Return what distinguishes a run from others of its name, or None where its first start is not recorded."""
    starts = read_lines(folder / STARTS)
    return starts[0]["run_id"] if starts else None


def evaluations_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's evaluations in training."""
    return [line for line in read_lines(folder / METRICS) if line.get("evaluation")]


def validations_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's validations."""
    return [line for line in read_lines(folder / METRICS) if line.get("validation")]


def check_record(folder: Path) -> None:
    """Read what eval.py needs beside config.yaml, before anything is scored. Raises ConfigError: it is broken."""
    read_summary(folder)
    read_lines(folder / STARTS)


def lost_history(folder: Path, checkpoint: Mapping[str, Any] | None) -> dict[str, str]:
    """Return what a run's record lacks of what it had when a checkpoint was written: file -> what is to be said of it.

    Args:
        checkpoint: its content, or None where the run has none.
    """
    starts = [start["start"] for start in read_lines(folder / STARTS)]
    record = {} if checkpoint is None else checkpoint["callbacks"].get("RunRecord", {})
    num_starts, losses = max([record.get("starts", 0), *starts], default=0), {}
    if starts != list(range(1, num_starts + 1)):
        losses[STARTS] = f"has {len(starts)} of {num_starts} starts"
    if checkpoint is not None:
        batch, lines = checkpoint["progress"]["batch"], read_lines(folder / METRICS)
        num_lines = sum(line["batch"] <= batch and not line.get("unfinished") for line in lines)
        if num_lines < record.get("lines", 0):
            losses[METRICS] = f"has {num_lines} of {record['lines']} lines"
    return losses


# --- writing ---


def to_json_lines(content: Iterable[Mapping[str, Any]]) -> str:
    """Return JSON lines."""
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in content)


def append_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Add JSON lines to a file of a run's record. Raises OSError: which file, and what to do."""
    try:
        with open(path, "a") as file:
            file.write(to_json_lines(lines))
    except OSError as error:
        problem = f"run_folder: {path} cannot be written: {error.strerror}"
        raise OSError(f"{problem}. The run stops; make room, and start the same command again.") from error


# --- a run's configuration ---
#
# config.yaml has what the run was begun with, as it was given. overrides.yaml has what the newest start was given
# otherwise (a longer max_duration, more workers), and what the run has found for `auto` and null: the microbatch, the
# batch size of its evaluations. Both together are what the run is.

RUN_ONLY_KEYS = ("run_name", "run_folder")
"""What every run has for itself."""


@dataclass(frozen=True)
class ConfigFiles:
    """Key -> value of a start, as they may be written: as they were given, and those of them that were found otherwise."""

    values: Mapping[str, Any]
    changed: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, before: Mapping[str, Any], now: Mapping[str, Any]) -> ConfigFiles:
        """Keep what may be written of two configurations, before and after a start has found what fits its machine."""
        written = masking.restore_interpolations(now)
        return cls(
            masking.restore_interpolations(before), {key: written[key] for key in now if now[key] != before[key]}
        )

    def write(self, folder: Path) -> None:
        """Write config.yaml if there is none (or nothing in it), and what differs from it to overrides.yaml."""
        if not _read_unresolved(folder / CONFIG):
            write_atomic(folder / CONFIG, _yaml(self.values))
        _write_overrides(folder, {**self.values, **self.changed})


def keep_keys(folder: Path, keys: Mapping[str, Any], sections: tuple[str, ...] = ("",)) -> None:
    """Keep keys of some sections for a run that is not started again. Raises ConfigError: its files are broken."""
    read_config(folder)
    values = {key: value for key, value in masking.restore_interpolations(keys).items() if key.startswith(sections)}
    if values:
        _write_overrides(folder, {**_read_unresolved(folder / OVERRIDES), **values})


def _write_overrides(folder: Path, keys: Mapping[str, Any]) -> None:
    first = _read_unresolved(folder / CONFIG)
    later = {key: value for key, value in keys.items() if key not in first or first[key] != value}
    if not later:
        (folder / OVERRIDES).unlink(missing_ok=True)
    elif later != _read_unresolved(folder / OVERRIDES):
        write_atomic(folder / OVERRIDES, _yaml(later))


def _read_unresolved(path: Path) -> dict[str, Any]:
    """Return key -> value of a file without resolving it, or nothing where there is none."""
    keys = leaves(OmegaConf.to_container(OmegaConf.load(io.BytesIO(read_regular(path))))) if path.is_file() else []
    return dict(keys)


def _yaml(keys: Mapping[str, Any]) -> str:
    tree = OmegaConf.create()
    for key, value in keys.items():
        OmegaConf.update(tree, key, value, force_add=True)
    return OmegaConf.to_yaml(tree) if keys else ""


def saved_batch_size(folder: Path) -> int | None:
    """Return the batch size of evaluation that a run has, for all its starts, or None."""
    return read_config(folder).get("eval.batch_size")


def read_files(folder: Path) -> tuple[list[Assignment], list[Problem]]:
    """Read a run's keys from both files, the later ones last, and what is wrong with the files."""
    assignments: list[Assignment] = []
    problems: list[Problem] = []
    for path in (folder / CONFIG, folder / OVERRIDES):
        values, unreadable = read_yaml(str(path)) if path.is_file() else ([], [])
        assignments += values
        problems += unreadable
    return assignments, problems


def read_config(folder: Path) -> dict[str, Any]:
    """Return key -> value of a run, or nothing where it has no files. Raises ConfigError: one is broken.

    What stands for nothing in this environment (`${oc.env:...}`) is left out.
    """
    values, unreadable = read_files(folder)
    values, unresolved = resolve_interpolations(values, None)
    unreadable += [
        Problem(unresolved[id(at)]) for at in values if id(at) in unresolved and "${oc.env:" not in str(at.value)
    ]
    if unreadable:
        fix = "Restore a copy, or remove it and summary.json: benchmark.py then resumes from the newest checkpoint"
        raise ConfigError([f"{problem.text} {fix}, with the keys of its command." for problem in unreadable])
    return {at.key: at.value for at in values if id(at) not in unresolved}


def masked_text(folder: Path) -> str:
    """Return both files as one YAML without secrets."""
    return masking.mask_secrets(_yaml({**_read_unresolved(folder / CONFIG), **_read_unresolved(folder / OVERRIDES)}))
