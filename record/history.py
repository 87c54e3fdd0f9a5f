"""All that a run has left for those who look at it: as much as can be read, and in words what cannot.

A reader of this kind changes nothing and refuses nothing but a folder that is no run: lines that a killed writer left, keys
that an older version did not write, values that are not finite and files that are broken are passed over, and named.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cli import masking
from cli.files import read_regular
from record.config_file import CONFIG, LATER, read_files
from record.files import BAD_SAMPLES, CLOCKS, CUT, METRICS, STARTS, SUMMARY, is_window, parsed_lines
from record.mlperf_events import is_number

SCORES = "eval.jsonl"
FLAGS = ("warmup", "profiled", "unfinished")
COLUMNS = (
    *("batch", "images", "loss", "lr", "gradient_norm", "images_per_sec", "peak_mem_gib", "window_batches", "start"),
    *(*CLOCKS, "start_sec", *FLAGS),
)
"""What of a window's line is kept."""

MOST = 1e100  # sums and products of such numbers are finite

Line = Mapping[str, Any]


@dataclass(frozen=True)
class History:
    """What a run has left."""

    folder: Path
    config: Mapping[str, Any]
    """Key -> value as it was written, without secrets; `${...}` stays."""
    later: Mapping[str, Any]
    """Those of them that are otherwise than the run was begun with, or were found."""
    environment: Line
    summary: Line
    """Empty where the run is not finished."""
    starts: Sequence[Line]
    windows: Mapping[str, np.ndarray]
    """COLUMNS and `elapsed_sec` -> float64 (N,), nan for what a line does not have or is not finite."""
    streams: Mapping[str, np.ndarray]
    """Stream -> its loss, float64 (N,)."""
    evaluations: Sequence[Line]
    validations: Sequence[Line]
    scores: Sequence[Line]
    """Of eval.jsonl."""
    cut: Sequence[Line]
    """The windows that resumes removed."""
    bad_samples: Sequence[Line]
    seconds_of: Mapping[int, float]
    """Start -> all of its clocks, as far as it left word."""
    grids: Sequence[tuple[int, Path]]
    """(images seen, picture), ascending."""
    captions: Sequence[str]
    changed_at: float | None
    """When the record was last written, in seconds since 1970."""
    missing: Sequence[str] = field(default_factory=list)
    """What could not be read, a sentence each."""
    label: str = ""
    """Its name beside others of the same name."""

    @property
    def name(self) -> str:
        return self.label or self.folder.resolve().name

    @property
    def seconds(self) -> float:
        """All clocks of all starts."""
        return sum(self.seconds_of.values())

    @property
    def device_hours(self) -> float | None:
        """Those of all starts, times the devices of each; None: how many there were is not known."""
        now = number_of(self.environment, "num_devices")
        devices = {int(start["start"]): number_of(start, "num_devices") or now for start in self.starts}
        counts = [(seconds, devices.get(start, now)) for start, seconds in self.seconds_of.items()]
        if not counts or any(count is None for _, count in counts):
            return None
        return sum(seconds * (count or 0.0) for seconds, count in counts) / 3600.0

    @property
    def speeds(self) -> np.ndarray:
        """Images/s of the windows that count: whole ones, without warm-up and profile. float64 (N,)."""
        speeds = self.windows["images_per_sec"][sum(self.windows[flag] for flag in FLAGS) == 0.0]
        return speeds[np.isfinite(speeds)]


def number_of(line: Line, key: str) -> float | None:
    """Return a line's number, or None where there is none, or one that no figure can be (not finite, or beyond MOST)."""
    value = line.get(key)
    return float(value) if is_number(value) and abs(value) <= MOST else None  # type: ignore[arg-type]


def is_run(folder: Path) -> bool:
    """True for a folder that has what tells a run."""
    return any((folder / name).is_file() for name in (CONFIG, METRICS, SUMMARY))


def read_history(folder: Path) -> History:
    """Read a run's record. Raises ValueError: the folder is no run's."""
    if not is_run(folder):
        said = "is no run: it has no config.yaml" if folder.is_dir() else "is no folder"
        raise ValueError(f"{folder} {said}. Give a run's folder: runs/NAME.")
    missing: list[str] = []
    config, later = _config(folder, missing)
    starts = [line for line in _lines(folder / STARTS, missing) if number_of(line, "start") is not None]
    kept, cut = _lines(folder / METRICS, missing), _lines(folder / CUT, [], is_needed=False)
    seconds_of = _seconds_of(starts, [*kept, *cut])
    evaluations = [line for line in kept if line.get("evaluation")]
    of_windows = [line for line in kept if is_window(line) and number_of(line, "batch") is not None]
    windows = _columns(of_windows)
    found = History(
        folder=folder,
        config=config,
        later=later,
        environment=_object(folder / "environment.json", missing),
        summary=_object(folder / SUMMARY, missing, is_needed=False),
        starts=starts,
        windows={**windows, "elapsed_sec": _elapsed(windows, seconds_of)},
        streams=_streams(of_windows),
        evaluations=evaluations,
        validations=[line for line in kept if line.get("validation") and not line.get("evaluation")],
        scores=_lines(folder / SCORES, missing, is_needed=False),
        cut=[line for line in cut if is_window(line)],
        bad_samples=_lines(folder / BAD_SAMPLES, missing, is_needed=False),
        seconds_of=seconds_of,
        grids=_grids(folder),
        captions=_captions(folder, missing),
        changed_at=max(
            (path.stat().st_mtime for name in (METRICS, STARTS, SUMMARY) if (path := folder / name).is_file()),
            default=None,
        ),
        missing=missing,
    )
    if not of_windows and not evaluations and (folder / METRICS).is_file():
        missing.append("metrics.jsonl has no window yet: the run has not come to the end of its first one.")
    return found


def grid_bytes(path: Path) -> bytes:
    """Return a picture of sample images. Raises OSError: it cannot be read."""
    return read_regular(path)


# --- lines ---


def _lines(path: Path, missing: list[str], *, is_needed: bool = True) -> list[Line]:
    """Return the objects of a .jsonl file; name once how many of its lines are none. `is_needed`: every run has it."""
    if not path.exists():
        missing += [f"There is no {path.name}."] if is_needed else []
        return []
    found: list[Line] = []
    broken, is_unfinished = 0, False
    try:
        for _, text, line in parsed_lines(path):
            if line is not None:
                found.append(line)
            elif text.strip():
                is_unfinished = not text.endswith(b"\n")
                broken += not is_unfinished
    except OSError as error:
        missing.append(f"{path.name} cannot be read: {error.strerror}.")
    if is_unfinished:
        missing.append(f"The last line of {path.name} is cut off: its writer was stopped in the middle of it.")
    if broken:
        missing.append(f"{path.name}: {broken:,} of its lines cannot be read. They are left out.")
    return found


def _columns(lines: Sequence[Line]) -> dict[str, np.ndarray]:
    """Return COLUMNS of windows -> float64 (N,)."""
    columns = {key: [number_of(line, key) for line in lines] for key in COLUMNS}
    columns |= {key: [float(line.get(key) is True) for line in lines] for key in FLAGS}
    found = {key: np.array(values, dtype=np.float64) for key, values in columns.items()}
    found["start"] = np.nan_to_num(found["start"], nan=1.0)
    return found


def _streams(lines: Sequence[Line]) -> dict[str, np.ndarray]:
    """Return the loss of each stream in the windows, float64 (N,)."""
    found: dict[str, np.ndarray] = {}
    for at, line in enumerate(lines):
        streams = line.get("streams")
        for name, figures in streams.items() if isinstance(streams, dict) else ():
            column = found.setdefault(name, np.full(len(lines), math.nan))
            loss = number_of(figures, "loss") if isinstance(figures, dict) else None
            column[at] = math.nan if loss is None else loss
    return found


def _seconds_of(starts: Sequence[Line], lines: Sequence[Line]) -> dict[int, float]:
    """Return all clocks of each start: as it recorded them at its end, else in its last line."""
    seconds: dict[int, float] = {}
    ends = [(line["start"], number_of(line, "seconds") or 0.0) for line in starts]
    for start, last in [*ends, *((number_of(line, "start") or 1, number_of(line, "start_sec")) for line in lines)]:
        if last is not None:
            seconds[int(start)] = max(last, seconds.get(int(start), 0.0))
    return dict(sorted(seconds.items()))


def _elapsed(windows: Mapping[str, np.ndarray], seconds_of: Mapping[int, float]) -> np.ndarray:
    """Return the seconds of all clocks of all starts at each window's end."""
    elapsed, before = windows["start_sec"].copy(), 0.0
    for start, seconds in seconds_of.items():
        elapsed[windows["start"] == start] += before
        before += seconds
    return elapsed


# --- other files ---


def _config(folder: Path, missing: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return key -> value of a run as both files have it, and those of the later one."""
    if not (folder / CONFIG).is_file():
        missing.append(f"There is no {CONFIG}: what the run was given is not known.")
    given, problems = read_files(folder)
    missing += [masking.masked(problem.text) for problem in problems]
    later = {at.key: at.value for at in given if Path(at.where).name == LATER}
    return masking.written({at.key: at.value for at in given}), masking.written(later)


def _object(path: Path, missing: list[str], *, is_needed: bool = True) -> dict[str, Any]:
    """Return the object of a JSON file, or nothing where there is none."""
    if not path.exists():
        missing += [f"There is no {path.name}."] if is_needed else []
        return {}
    try:
        content = json.loads(read_regular(path))
    except OSError as error:
        said = error.strerror
    except (ValueError, RecursionError):
        said = "it is no whole JSON"
    else:
        if isinstance(content, dict):
            return content
        said = f"it holds a {type(content).__name__}"
    missing.append(f"{path.name} cannot be read: {said}.")
    return {}


def _grids(folder: Path) -> list[tuple[int, Path]]:
    """Return a run's pictures of samples, by images seen."""
    found = [(path.stem[2:], path) for path in (folder / "samples").glob("im*.png")]
    return sorted((int(images), path) for images, path in found if images.isdecimal() and path.is_file())


def _captions(folder: Path, missing: list[str]) -> list[str]:
    path = folder / "samples/captions.txt"
    try:
        return read_regular(path).decode(errors="replace").split("\n")[:-1] if path.is_file() else []
    except OSError as error:
        missing.append(f"{path.name} cannot be read: {error.strerror}.")
        return []
