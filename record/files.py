"""The files of a run's folder, read: what a killed writer left is passed over, what is broken otherwise is named.

callbacks/run_record.py says what they are, and writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cli.errors import ConfigError
from cli.files import open_regular, read_regular

STARTS, METRICS, CUT, BAD_SAMPLES = "starts.jsonl", "metrics.jsonl", "metrics.cut.jsonl", "bad_samples.jsonl"
SUMMARY = "summary.json"
SCORES = ("eval.jsonl", "eval.csv")
"""Written by evaluation/score_table.py."""
OTHERS = ("config.yaml", "later.yaml", "environment.json", "mlperf.log", *SCORES)
ALL = (STARTS, METRICS, CUT, BAD_SAMPLES, SUMMARY, *OTHERS)
MOST_OF_LINE = 2**22  # bytes
MOST_OF_LINES = 2**30  # bytes of a file of lines: a million windows have some 2**29
NEEDED = {
    STARTS: ("start", "run_id", "device", "num_devices"),
    METRICS: ("batch", "images"),
    BAD_SAMPLES: ("sample", "key", "reason"),
}
"""File -> what every line of it has."""
CLOCKS = ("train_sec", "data_wait_sec", "eval_sec", "other_sec")


def remove_left_overs(folder: Path) -> None:
    """Remove the files that a killed start was writing. eval.py may be writing its own at this moment: they stay."""
    for name in ("config.yaml", "environment.json", STARTS, METRICS, BAD_SAMPLES, SUMMARY):
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
    found = []
    fix = "Fix it, or remove that line: what it said is then lost, the others stay."
    try:
        for number, text, content in parsed_lines(path) if path.exists() else ():
            if content is None and not text.endswith(b"\n"):
                break
            if content is None:
                wrong = f"'{text[:-1][:40].decode(errors='replace')}' is no whole JSON object"
                raise ConfigError([f"{path}: line {number:,} cannot be read: {wrong}. {fix}"])
            if missing := [key for key in NEEDED.get(path.name, ()) if key not in content]:
                raise ConfigError([f"{path}: line {number:,} cannot be read: it has no {missing[0]}. {fix}"])
            found.append(content)
    except OSError as error:
        raise ConfigError([f"{path} cannot be read: {error.strerror}. It is the run's own: bring it back."]) from error
    return found


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
    path, said = folder / SUMMARY, ""
    try:
        summary = json.loads(read_regular(path)) if path.is_file() else {}
        if not isinstance(summary, dict):
            said = f"it holds a {type(summary).__name__}"
        elif summary and (missing := [key for key in counts if not isinstance(summary.get(key), int)]):
            said = f"its {missing[0]} is no whole number"
    except (ValueError, RecursionError, OSError) as error:
        said = getattr(error, "strerror", None) or str(error)
    if said:
        ways = "Remove it: benchmark.py then resumes from the run's newest checkpoint, and writes it again"
        raise ConfigError([f"{path} is no whole summary: {said}. {ways}."])
    return summary


def run_id_of(folder: Path) -> str | None:
    """Return what tells a run from others of its name, or None where its first start is not recorded."""
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
    num_starts, found = max([record.get("starts", 0), *starts], default=0), {}
    if starts != list(range(1, num_starts + 1)):
        found[STARTS] = f"has {len(starts)} of {num_starts} starts"
    if checkpoint is not None:
        batch, lines = checkpoint["progress"]["batch"], read_lines(folder / METRICS)
        num_lines = sum(line["batch"] <= batch and not line.get("unfinished") for line in lines)
        if num_lines < record.get("lines", 0):
            found[METRICS] = f"has {num_lines} of {record['lines']} lines"
    return found


# --- writing ---


def as_lines(content: Iterable[Mapping[str, Any]]) -> str:
    """Return JSON lines."""
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in content)


def append_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Add JSON lines to a file of a run's record. Raises OSError: which file, and what to do."""
    try:
        with open(path, "a") as file:
            file.write(as_lines(lines))
    except OSError as error:
        given = f"run_folder: {path} cannot be written: {error.strerror}"
        raise OSError(f"{given}. The run stops; make room, and start the same command again.") from error
