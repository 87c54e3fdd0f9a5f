"""All files of a run that a report needs, read once; what cannot be read is named.

A report never changes a run, so it needs less than a start does: record/files.py asks for more and says how to mend it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.command_line import Assignment
from cli.files import read_regular
from config import resolved
from record.config_file import CONFIG, read_files
from record.files import METRICS, MOST_OF_LINES, SUMMARY
from record.mlperf_events import NAME, events_to_fault, is_number


@dataclass(frozen=True)
class RunFiles:
    """What a run has left."""

    folder: Path
    config: Mapping[str, Any]
    """Key -> value of config.yaml and later.yaml."""
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    """Empty where the run is not finished."""
    recorded: Sequence[Mapping[str, Any]]
    """The evaluations and validations of metrics.jsonl, without partial scores."""
    events: Sequence[Mapping[str, Any]] | None
    """Events of the MLPerf log, up to the first that cannot be read; None: there is no log."""
    fault: str | None = None
    """What is wrong with that event."""

    @property
    def log(self) -> Path:
        return self.folder / NAME


def read_run_files(folder: Path) -> RunFiles | None:
    """Return the files of a run, or None where the folder has no config.yaml. Raises ValueError: names one that is broken."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    assignments, problems = read_files(folder)
    if problems:
        raise ValueError(problems[0].text.rstrip("."))
    summary = _object(folder / SUMMARY)
    config = _resolved(assignments, summary)
    if not is_number(config.get("global_batch_size")):
        raise ValueError(f"{path} has no global_batch_size: it is no run's")
    evaluations = [line for line in _evaluations(folder / METRICS) if not line.get("partial")]
    events, fault = events_to_fault(folder / NAME)
    return RunFiles(folder, config, _object(folder / "environment.json"), summary, evaluations, events, fault)


def _resolved(assignments: Sequence[Assignment], summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's keys; one with `${...}` as the summary has it, else as this environment does, else None."""
    found, unresolved = resolved(assignments, None)
    config = {at.key: None if id(at) in unresolved else at.value for at in found}
    variable = {at.key for at in found if at.text is not None or id(at) in unresolved}
    return {**config, **{key: summary[key] for key in variable & summary.keys()}}


def _object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file, empty where there is no file."""
    try:
        content = json.loads(read_regular(path)) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} cannot be read: it holds a {type(content).__name__}")
    return content


def _evaluations(path: Path) -> list[dict[str, Any]]:
    """Return the evaluations and validations of metrics.jsonl, without a last line that a killed writer left unfinished."""
    found = []
    lines = (
        read_regular(path, MOST_OF_LINES).decode(errors="replace").splitlines(keepends=True) if path.is_file() else []
    )
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            content = None
        is_one = isinstance(content, dict) and bool(content.get("evaluation") or content.get("validation"))
        is_whole = isinstance(content, dict) and (not is_one or is_number(content.get("images")))
        if not is_whole and line.endswith("\n"):
            raise ValueError(f"{path} cannot be read: line {number:,} is none of a run's")
        found += [content] if is_whole and is_one else []
    return found
