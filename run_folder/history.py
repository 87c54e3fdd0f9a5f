"""All that a run has left for those who look at it: as much as can be read, and in words what cannot.

A reader of this kind changes nothing and refuses only a folder that is not a run: lines that a killed writer left, keys
that an older version did not write, values that are not finite and files that are broken are passed over, and named.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from common import masking
from common.files import read_regular, write_json
from run_folder.files import (
    BAD_SAMPLES,
    CLOCKS,
    CONFIG,
    CUT,
    ENVIRONMENT,
    METRICS,
    OVERRIDES,
    SCORES,
    STARTS,
    SUMMARY,
    is_window,
    parsed_lines,
    read_files,
    read_object,
    read_summary,
)

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
    overrides: Mapping[str, Any]
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
    """Start -> seconds on all of its clocks, as far as they are recorded."""
    grids: Sequence[tuple[int, Path]]
    """(images seen, image), ascending."""
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
    return float(value) if type(value) in (int, float) and abs(value) <= MOST else None


def is_run(folder: Path) -> bool:
    """True for a folder with a file that only a run has."""
    return any((folder / name).is_file() for name in (CONFIG, METRICS, SUMMARY))


def read_history(folder: Path) -> History:
    """Read a run's record. Raises ValueError: the folder is not a run's."""
    if not is_run(folder):
        problem = "is not a run: it has no config.yaml" if folder.is_dir() else "is not a folder"
        raise ValueError(f"{folder} {problem}. Give a run's folder: runs/NAME.")
    missing: list[str] = []
    config, overrides = _config(folder, missing)
    starts = [line for line in _read_objects(folder / STARTS, missing) if number_of(line, "start") is not None]
    lines, cut = _read_objects(folder / METRICS, missing), _read_objects(folder / CUT, [], is_needed=False)
    seconds_of = _seconds_of(starts, [*lines, *cut])
    evaluations = [line for line in lines if line.get("evaluation")]
    of_windows = [line for line in lines if is_window(line) and number_of(line, "batch") is not None]
    windows = _columns(of_windows)
    history = History(
        folder=folder,
        config=config,
        overrides=overrides,
        environment=_read_object(folder / ENVIRONMENT, missing),
        summary=_read_object(folder / SUMMARY, missing, is_needed=False),
        starts=starts,
        windows={**windows, "elapsed_sec": _elapsed(windows, seconds_of)},
        streams=_streams(of_windows),
        evaluations=evaluations,
        validations=[line for line in lines if line.get("validation") and not line.get("evaluation")],
        scores=_read_objects(folder / SCORES, missing, is_needed=False),
        cut=[line for line in cut if is_window(line)],
        bad_samples=_read_objects(folder / BAD_SAMPLES, missing, is_needed=False),
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
    return history


def grid_bytes(path: Path) -> bytes:
    """Return a grid of sample images. Raises OSError: it cannot be read."""
    return read_regular(path)


# --- lines ---


def _read_objects(path: Path, missing: list[str], *, is_needed: bool = True) -> list[Line]:
    """Return the objects of a .jsonl file; name once how many of its lines are none. `is_needed`: every run has it."""
    if not path.exists():
        missing += [f"There is no {path.name}."] if is_needed else []
        return []
    objects: list[Line] = []
    broken, is_unfinished = 0, False
    try:
        for _, text, line in parsed_lines(path):
            if line is not None:
                objects.append(line)
            elif text.strip():
                is_unfinished = not text.endswith(b"\n")
                broken += not is_unfinished
    except OSError as error:
        missing.append(f"{path.name} cannot be read: {error.strerror}.")
    if is_unfinished:
        missing.append(f"The last line of {path.name} is cut off: its writer was stopped in the middle of it.")
    if broken:
        missing.append(f"{path.name}: {broken:,} of its lines cannot be read. They are left out.")
    return objects


def _columns(lines: Sequence[Line]) -> dict[str, np.ndarray]:
    """Return COLUMNS of windows -> float64 (N,)."""
    columns = {key: [number_of(line, key) for line in lines] for key in COLUMNS}
    columns |= {key: [float(line.get(key) is True) for line in lines] for key in FLAGS}
    arrays = {key: np.array(values, dtype=np.float64) for key, values in columns.items()}
    arrays["start"] = np.nan_to_num(arrays["start"], nan=1.0)
    return arrays


def _streams(lines: Sequence[Line]) -> dict[str, np.ndarray]:
    """Return the loss of each stream in the windows, float64 (N,)."""
    losses: dict[str, np.ndarray] = {}
    for row, line in enumerate(lines):
        streams = line.get("streams")
        for name, figures in streams.items() if isinstance(streams, dict) else ():
            column = losses.setdefault(name, np.full(len(lines), math.nan))
            loss = number_of(figures, "loss") if isinstance(figures, dict) else None
            column[row] = math.nan if loss is None else loss
    return losses


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
    assignments, problems = read_files(folder)
    missing += [masking.mask_secrets(problem.text) for problem in problems]
    overrides = {at.key: at.value for at in assignments if Path(at.where).name == OVERRIDES}
    return masking.restore_interpolations({at.key: at.value for at in assignments}), masking.restore_interpolations(
        overrides
    )


def _read_object(path: Path, missing: list[str], *, is_needed: bool = True) -> dict[str, Any]:
    """Return the object of a JSON file, or nothing where there is none."""
    content, problem = read_object(path)
    if problem:
        missing.append(f"{path.name} cannot be read: {problem}.")
    elif is_needed and not path.exists():
        missing.append(f"There is no {path.name}.")
    return content


def _grids(folder: Path) -> list[tuple[int, Path]]:
    """Return a run's sample grids, by images seen."""
    grids = [(path.stem[2:], path) for path in (folder / "samples").glob("im*.png")]
    return sorted((int(images), path) for images, path in grids if images.isdecimal() and path.is_file())


def _captions(folder: Path, missing: list[str]) -> list[str]:
    path = folder / "samples/captions.txt"
    try:
        return read_regular(path).decode(errors="replace").split("\n")[:-1] if path.is_file() else []
    except OSError as error:
        missing.append(f"{path.name} cannot be read: {error.strerror}.")
        return []


# --- runs under a folder ---
#
# finished    summary.json is there
# running     a process holds the run's lock, or its record was written a moment ago and says of no end
# failed      its last start says with which error it ended
# stopped     none of these: by a signal, or killed without a word

State = Literal["running", "finished", "failed", "stopped"]
FRESH_SEC = 600.0  # a record may rest so long while its run, on another machine, has a lock that is not seen here
LOCKS = Path("/proc/locks")
MOST_DEPTH = 3  # of runs under their folder: runs/controls/seed17 is at 2


def runs_under(folder: Path) -> list[Path]:
    """Return the folders of runs in a folder, by name; a run's own folders are not looked into."""
    runs: set[Path] = set()
    for depth in range(1, MOST_DEPTH + 1):
        for path in folder.glob("/".join("*" * depth)):
            is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
            if not (is_hidden or runs.intersection(path.parents)) and is_run(path):
                runs.add(path)
    return sorted(runs)


def signature(folder: Path) -> tuple[Any, ...]:
    """Return what changes whenever a run's record does, or its state; it is cheap."""
    names = CONFIG, OVERRIDES, ENVIRONMENT, STARTS, METRICS, SUMMARY, SCORES, BAD_SAMPLES, "samples"
    stats = []
    for name in names:
        try:
            stat = (folder / name).stat()
            stats.append((name, stat.st_mtime_ns, stat.st_size))
        except OSError:
            continue
    return (*stats, is_held(folder), _is_fresh(folder))


def is_held(folder: Path) -> bool:
    """True where a process of this machine trains in a run's folder. The lock is not touched: its run would be refused."""
    try:
        stat = (folder / ".lock").stat()
        device_and_inode = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
        return any(device_and_inode in line.split() for line in LOCKS.read_text().splitlines())
    except OSError:
        return False


def _is_fresh(folder: Path) -> bool:
    times = [path.stat().st_mtime for name in (METRICS, STARTS) if (path := folder / name).is_file()]
    return bool(times) and time.time() - max(times) < FRESH_SEC


def state_of(folder: Path, starts: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> State:
    """Return a run's state by its record and its lock."""
    last = starts[-1] if starts else {}
    if summary:
        return "finished"
    if is_held(folder):
        return "running"
    if "failed" in last:
        return "failed"
    return "running" if "seconds" not in last and _is_fresh(folder) else "stopped"


# --- summary.json ---

RESULT_KEYS = (
    "images_per_sec",
    "images_per_sec_min",
    "images_per_sec_max",
    "images_per_sec_per_device",
    "images_per_sec_wall",
    "mfu",
    "data_wait_frac",
    "peak_mem_gib",
    "batches",
    "warmup_batches",
    "windows",
    "seconds",
    "loss",
)
TARGET_RESULTS = ("target", "images_to_target", "seconds_to_target", "seconds_to_target_with_eval")
TARGET_METRICS = ("fid", "clip")
TARGET_KEYS = (*TARGET_RESULTS, *TARGET_METRICS)
"""Further keys of a run with a target; one of validation loss has val_loss instead of scores."""
VAL_LOSS = "val_loss"
"""Further key of a run with validation: the last one's loss."""
WINDOWS = "images_per_sec_windows"
"""Further key of a rung's record (bench/ladder.py): the speed of each window that counts, in order."""
COST_KEYS = ("device_hours", "cost")
"""Further keys of a run with a price."""


def cost_so_far(folder: Path, per_device_hour: float | None, lost: Collection[str] = ()) -> dict[str, Any]:
    """Return COST_KEYS of a run so far: hours on the clocks of all its starts, times the devices of each, and their price.

    Args:
        per_device_hour: price of a device for an hour; None: there is no cost.
        lost: files of the record with missing parts; without the starts or the metrics the hours are None.
    """
    hours = None if {STARTS, METRICS} & {*lost} else read_history(folder).device_hours
    price = {} if per_device_hour is None else {"cost": None if hours is None else hours * per_device_hour}
    return {key: rounded(value) for key, value in {"device_hours": hours, **price}.items()}


def write_outcome(folder: Path, outcome: Mapping[str, Any], *, over: str | None = None) -> None:
    """Write what a finished run came to, after all, into its summary.json.

    Args:
        over: only where its `target` is this.
    """
    summary = read_summary(folder)
    if summary and over in (None, summary.get("target")):
        write_json(folder / SUMMARY, {**summary, **outcome})


def result_line(result: Mapping[str, Any]) -> str:
    """Format the last line that benchmark.py prints: key=value, `none` for a figure that there is not."""
    return " ".join(f"{key}={'none' if value is None else value}" for key, value in result.items())


def finite(value: Any) -> Any:
    """JSON has no infinity: fp16's skipped first steps have an infinite gradient norm, which is written as null."""
    if isinstance(value, list):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rounded(value: Any) -> Any:
    """Return a figure as the result line shows it, with six digits."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
