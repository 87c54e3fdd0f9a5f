"""The MLPerf log as a file: events in mlperf-logging's form, appended and read. Which, and when: callbacks/mlperf_log.py."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.files import read_regular, write_atomic
from common.log import log

Line = Mapping[str, Any]

LOG_FILE = "mlperf.log"
TOKEN = ":::MLLOG "
METRICS = {"fid": "FID", "clip": "CLIP", "val_loss": "VAL_LOSS"}
"""Our names -> those of the log. The CLIP score is the mean cosine, not times 100. A loss has none in the checkers."""
OPEN_LOSS = "averaged_validation_loss"
"""The key by which the checker of the open division looks for the loss of flux1, beside eval_accuracy."""
MADE_WITH = ("eval_sec", "num_images", "inception", "clip_model", "eval_precision")
"""What an eval_stop says of its scores: how long they took, of how many images, by which networks and in which precision."""
FIELDS = {"key", "value", "metadata", "time_ms"}
UNFINISHED = "its log ends in the middle of a line: it is being written, or its run was killed: then start that again, "
UNFINISHED += "with the same command"


class _LineHandler(logging.Handler):
    """Hands each line of mlperf-logging to the file at once, so that a killed run has lost none."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self.error: OSError | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno > logging.INFO:  # mlperf-logging catches what went wrong, and would log that instead
            raise self.error or ValueError(record.getMessage())
        try:
            with open(self.path, "a") as file:
                file.write(record.getMessage() + "\n")
        except OSError as error:
            problem = f"run_folder: {self.path} cannot be written: {error.strerror}"
            self.error = OSError(f"{problem}. The run stops; make room, and start the same command again.")
            raise


def steady_time() -> Callable[[], float]:
    """Return a clock of seconds since 1970: the machine's at this moment, from then on one that only goes forward."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


class EventLog:
    """Appends events to a log.

    Args:
        path: of the log; made by the first event.
        now: seconds since 1970; None: `steady_time`, since a run's time is between two events.
    """

    def __init__(self, path: Path, now: Callable[[], float] | None = None):
        from mlperf_logging.mllog.mllog import MLLogger

        # Not in logging's table: two logs of one process have nothing in common.
        logger = logging.Logger("easel.mlperf")
        logger.addHandler(_LineHandler(path))
        self.now, self.path = now or steady_time(), path
        self._last_ms: int | None = None  # of the last event; None: not read yet
        root = re.escape(str(Path(__file__).resolve().parent.parent))
        # Each line names the place that asks for the event: the checker of seeds compares them there.
        self._events = MLLogger(logger=logger, default_stack_offset=2, root_dir=root)

    def event(
        self, key: str, value: Any = None, *, at: float | None = None, dated_back: bool = False, **metadata: Any
    ) -> None:
        """Append one; an interval's first or last where its name ends so.

        Args:
            at: seconds since 1970; None: now. Not before the last event, unless `dated_back`.
        """
        kind = {"start": self._events.start, "stop": self._events.end}.get(key.rpartition("_")[2], self._events.event)
        if self._last_ms is None:
            self._last_ms = max((event["time_ms"] for event in read_events(self.path)), default=0)
        time_ms = round(1000 * (self.now() if at is None else at))
        if not dated_back:
            time_ms = self._last_ms = max(time_ms, self._last_ms)
        kind(key, value, metadata=metadata, time_ms=time_ms)

    def evaluation(self, line: Line, began: float, *, is_open: bool = False) -> None:
        """Append an evaluation: its line in the record, or its row in the table of eval.py.

        One that earlier starts had a part in began before the last event: its eval_sec says how long it took.
        """
        where = {"samples_count": line["images"]}
        self.event("eval_start", line["images"], at=began, **where)
        for key, metric in METRICS.items():
            if line.get(key) is not None:
                self.event("eval_accuracy", line[key], metric=metric, **where)
                if is_open and key == "val_loss":
                    self.event(OPEN_LOSS, line[key], **where)
        made_with = {key: line[key] for key in MADE_WITH if line.get(key) is not None}
        self.event("eval_stop", line["images"], **made_with, **where)


def as_evaluation(line: Line) -> dict[str, Any]:
    """Return a validation's line of the record as an evaluation's, as far as a log goes."""
    return {**line, "eval_sec": line["val_sec"], "num_images": line["num_samples"]}


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a log, without a last line that a killed writer left unfinished; none if the file is missing.

    Raises:
        ConfigError: another line is no event, or it is a folder; names it, and what to do.
    """
    if path.is_dir():
        raise ConfigError(
            [f"{path}: a folder, where the log of the run belongs. Take it away, or take another run_name."]
        )
    events, fault = events_to_fault(path)
    if fault is not None and fault != UNFINISHED:
        raise ConfigError([f"{path}: {fault}. Fix it or take it out, or run without a log (mlperf.enabled=false)."])
    return events or []


def events_to_fault(path: Path) -> tuple[list[dict[str, Any]] | None, str | None]:
    """Return the events of a log up to the first that cannot be read, and what is wrong with that; None: there is no log."""
    if not path.is_file():
        return None, None
    events = []
    for number, line in enumerate(_text_of(path).splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            return events, UNFINISHED
        try:
            event = json.loads(line.removeprefix(TOKEN)) if line.startswith(TOKEN) else None
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict) or not event.keys() >= FIELDS or not isinstance(event["metadata"], dict):
            return events, f"line {number:,} of its log is no event of MLPerf's: Easel has not written it so"
        events.append(event)
    return events, None


def _text_of(path: Path) -> str:
    return read_regular(path).decode(errors="replace")


def is_begun(folder: Path) -> bool:
    """True where a run's log has come to run_start. Raises ConfigError as `read_events` does."""
    return any(event["key"] == "run_start" for event in read_events(folder / LOG_FILE))


def lost_events(folder: Path, checkpoint: Mapping[str, Any] | None) -> dict[str, str]:
    """Return what a run's log lacks of what it had when a checkpoint was written, as run_folder.files.lost_history does."""
    had = (checkpoint or {"callbacks": {}})["callbacks"].get("MLPerfLog", {}).get("events", 0)
    num_events = num_lasting(folder / LOG_FILE)
    return {LOG_FILE: f"has {num_events} of {had} events"} if num_events < had else {}


def num_lasting(path: Path) -> int:
    """Return how many events a log has; a run_stop does not count: it is removed when the run resumes."""
    return sum(event["key"] != "run_stop" for event in read_events(path))


def reopen(path: Path) -> list[dict[str, Any]]:
    """Leave the whole lines of a log without its run_stop, and return their events."""
    events = read_events(path)
    lines = _text_of(path).splitlines(keepends=True)[: len(events)]
    whole_lines = [line for line, event in zip(lines, events, strict=True) if event["key"] != "run_stop"]
    write_atomic(path, "".join(whole_lines))
    return [event for event in events if event["key"] != "run_stop"]


def evaluated_points(events: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the points, in images seen, whose evaluation a log has."""
    return {event["metadata"]["samples_count"] for event in events if event["key"] == "eval_stop"}


def close(log: EventLog, reached: Line | None, images: int, at: float | None = None) -> None:
    """Append run_stop, and log it.

    Args:
        reached: the evaluation that met the target, None: the run is aborted.
        images: seen by now, of a run that is aborted.
        at: seconds since 1970; None: now.
    """
    status, images = ("aborted", images) if reached is None else ("success", reached["images"])
    log.event("run_stop", at=at, dated_back=at is not None, status=status, samples_count=images)
    log_status(f"the log is closed: {status} at {images:,} images")


def log_status(text: str) -> None:
    """Tell the person who started the run."""
    log.info(f"mlperf: {text}.")
