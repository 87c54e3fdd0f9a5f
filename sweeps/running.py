"""The runs of a sweep: each composer process in a separate group and folder, some side by side, none left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from filelock import FileLock, Timeout

from common import masking
from common.errors import Refused
from common.files import open_regular, write_atomic
from common.log import log
from run_folder import processes
from run_folder.environment import commit
from run_folder.files import STARTS, SUMMARY, append_lines, read_lines, to_json_lines
from sweeps.plan import Point, Sweep

POLL_SEC = 0.2
GRACE_SEC = 30.0  # for a last checkpoint, where the sweep is stopped
READ_BYTES = 200_000  # of the end of what a run said
MAX_MESSAGE = 300
TRAIN, SCORE = (str(processes.ROOT / name) for name in ("benchmark.py", "eval.py"))
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass
class ActiveRun:
    """A run that has begun and not ended."""

    point: Point
    slot: int
    variables: dict[str, str]
    process: subprocess.Popen[Any]
    output: IO[Any]
    began: float
    to_do: list[Sequence[str]]
    """The commands that follow."""
    from_byte: int
    """Where this start begins in the file of all that the run said."""
    code: str | None
    """The commit at its beginning."""
    ended: tuple[str, float] = ("", 0.0)
    """Its status, and how many seconds it took."""


@dataclass
class Runner:
    """Runs points, some side by side, until all have ended or a signal has come.

    on_end: called with each run that has ended, its status and seconds, and how many are left.
    """

    sweep: Sweep
    state: SweepState
    on_end: Callable[[Point, str, float, int], None]
    stopped: int | None = field(default=None, init=False)
    """Number of the signal that has come."""

    def run(self, wanted: Sequence[Point]) -> None:
        """Run these points in this order."""
        waiting, active, slots = list(wanted), [], slots_of(self.sweep)
        with self._heard():
            try:
                while (waiting or active) and self.stopped is None:
                    free = [slot for slot in range(len(slots)) if slot not in [one.slot for one in active]]
                    while waiting and free and self.stopped is None:
                        point = waiting.pop(0)
                        active.append(self._begin(point, free[0], slots[free.pop(0)]))
                    time.sleep(POLL_SEC)
                    for one in [one for one in active if self._is_over(one)]:
                        active.remove(one)
                        self.on_end(one.point, *one.ended, len(waiting) + len(active))
            finally:
                for one in active:  # their lines say that they have begun: the next call resumes them
                    processes.end(one.process, GRACE_SEC if self.stopped is not None else 0.0)
                    one.output.close()

    def _begin(self, point: Point, slot: int, variables: dict[str, str]) -> ActiveRun:
        self.state.put_aside(point)
        self.state.add(point, STARTED, commit=(code := commit()))
        logs = self.sweep.folder / LOGS
        logs.mkdir(exist_ok=True)
        output = open(logs / f"{point.name}.txt", "ab")  # noqa: SIM115  # until the run has ended
        first, *others = self.commands_of(point)
        process = processes.begin(first, output, folder=Path.cwd(), variables=variables)
        return ActiveRun(point, slot, variables, process, output, time.monotonic(), others, output.tell(), code)

    def commands_of(self, point: Point) -> list[list[str]]:
        """Return what runs a point, with this interpreter: a training, and its scores where they are for afterwards."""
        ranks, folder = self.sweep.command.ranks, str(self.sweep.folder / point.name)
        scored = [processes.composer_command(ranks, SCORE, folder)] if point.config.eval.when == "after" else []
        return [processes.composer_command(ranks, TRAIN, *point.words), *scored]

    def _is_over(self, one: ActiveRun) -> bool:
        """Return whether a run has ended, or had to be; then its line is written."""
        seconds, code = time.monotonic() - one.began, one.process.poll()
        if code is None and seconds < self.sweep.command.limit_sec:
            return False
        processes.end(one.process)  # a launcher that was killed leaves its ranks
        if code == 0 and one.to_do:
            command = one.to_do.pop(0)
            one.process = processes.begin(command, one.output, folder=Path.cwd(), variables=one.variables)
            return False
        one.output.close()
        folder = self.sweep.folder / one.point.name
        text = end_of_text(Path(one.output.name), one.from_byte)
        is_ok = code == 0 and (folder / SUMMARY).is_file()
        status = OK if is_ok else processes.status_of(code, text)
        message = "" if is_ok else message_of(status, code, text, folder, self.sweep.command.limit_sec)
        made_of = one.code if (now := commit()) == one.code else f"{one.code} to {now}"
        self.state.add(one.point, status, seconds=round(seconds, 1), message=message, commit=made_of)
        one.ended = (status, seconds)
        return True

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        """Hear signals between two looks at the runs, so that none comes between a run's start and its place in the list."""

        def hear(number: int, frame: Any) -> None:
            self.stopped = number

        before = {number: signal.signal(number, hear) for number in STOPS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def slots_of(sweep: Sweep) -> list[dict[str, str]]:
    """Return the variables of each of the runs side by side: which GPUs it has."""
    ranks, jobs = sweep.command.ranks, sweep.command.jobs
    if not torch.cuda.is_available():
        return [{} for _ in range(jobs or 1)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    each = [gpus[first : first + ranks] for first in range(0, len(gpus) - ranks + 1, ranks)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in each[: jobs or len(each)]]


# --- what a run said ---


def end_of_text(path: Path, from_byte: int) -> str:
    """Return the last of what a run said, from a byte of its file on."""
    with contextlib.suppress(OSError), open_regular(path, None) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(from_byte, size - READ_BYTES))
        return file.read().decode(errors="replace")
    return ""


def message_of(status: str, code: int | None, output: str, folder: Path, limit_sec: int) -> str:
    """Return in one line why a run did not end well: what its record says, or its last words."""
    if status == "timeout":
        return f"it was ended after {limit_sec} s (limit_sec)"
    if status == "killed":
        assert code is not None
        number = processes.signal_of(code)
        why = "; the kernel does this when memory runs out" if number == signal.SIGKILL else ""
        return f"ended from outside by {number.name if number else code}{why}"
    text = ""
    if status != "refused":  # then the record is of an earlier start
        with contextlib.suppress(ValueError, OSError):
            text = str((read_lines(folder / STARTS) or [{}])[-1].get("failed", ""))
    lines = processes.own_lines(output)
    if status == "out_of_memory" and not text:
        lines = [line for line in lines if any(part in line for part in processes.OUT_OF_MEMORY)]
    text = text or (lines[-1] if lines else f"it ended with exit code {code} and said nothing")
    line = masking.mask_secrets(masking.to_printable(text))
    return line if len(line) <= MAX_MESSAGE else f"{line[: MAX_MESSAGE - 3]}..."


# --- one at a time ---


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other calls from a sweep's folder. Raises Refused: another one uses it, or it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire(timeout=0)
    except Timeout as error:
        raise Refused(
            f"runs: another sweep.py uses {folder}. Wait for it, or give another folder: runs=FOLDER."
        ) from error
    except OSError as error:
        raise Refused(f"runs: {folder} cannot be written: {error.strerror}. Give another one: runs=FOLDER.") from error
    try:
        yield
    finally:
        lock.release()


def end_left_overs(folder: Path, names: Collection[str]) -> None:
    """End the runs that outlived a killed sweep: processes whose words name one of its runs."""
    trained, scored, killed = {f"run_name={name}" for name in names}, {str(folder / name) for name in names}, []
    for process in psutil.process_iter(["cmdline"]):
        words = {*(process.info["cmdline"] or [])}
        is_of_sweep = (f"run_folder={folder}" in words and trained & words) or (SCORE in words and scored & words)
        if is_of_sweep and process.pid != os.getpid():
            with contextlib.suppress(psutil.Error):
                process.kill()
                killed.append(process)
    if killed:
        psutil.wait_procs(killed, timeout=processes.END_SEC)
        problem = f"{folder}: {len(killed)} processes outlived a killed sweep"
        log.info(f"{problem}. They are ended, and their runs resume.")


# --- what a sweep remembers of its runs ---
#
# NAME/sweep.jsonl        the lines; the last one of a run counts
#      RUN/               the run of a point (callbacks/run_record.py says what is in it)
#      logs/RUN.txt       all that its processes said, of every start
#      stale/             runs of other configurations, data or code under today's names, and ok ones that were started over
#      summary.csv, *.png, page.html

STATE, LOGS, STALE = "sweep.jsonl", "logs", "stale"
STARTED = "started"
OK, OVER_PLAN, PENDING, OLD = "ok", "over_plan", "pending", "stale"
ERRORS = ("refused", "out_of_memory", "timeout", "failed", "killed")
STATUSES = (OK, *ERRORS, OVER_PLAN, PENDING, OLD)
UNFINISHED = (PENDING, OLD, "killed")
"""What a call without `only` runs; any other error would come again."""


class SweepState:
    """The lines of a sweep's file, and what follows from them for each point.

    Args:
        folder: of the sweep; nothing is written into it before the first run.
        code: the commit of this call. What ran while the code was another one is of no point of today's. None: not looked at.
    """

    def __init__(self, folder: Path, code: str | None = None):
        self.folder = folder
        lines = read_lines(folder / STATE)
        self._last: dict[str, Mapping[str, Any]] = {
            line["run"]: line if code in (None, line.get("commit", code)) else {**line, "identity": line["commit"]}
            for line in lines
            if "run" in line
        }
        self._is_whole = False
        self._lines = lines

    def add(self, point: Point, status: str, **more: Any) -> None:
        """Remember a start or an end of a point's run."""
        line = {"run": point.name, "identity": point.identity, "status": status, "unix_time": time.time(), **more}
        self._last[point.name] = line
        self._lines.append(line)
        path = self.folder / STATE
        if self._is_whole:
            append_lines(path, [line])
        else:  # a killed sweep may have left half a line at its end
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(path, to_json_lines(self._lines))
            self._is_whole = True

    @property
    def names(self) -> list[str]:
        """Of all runs that were ever started, those of points that the file has no more among them."""
        return list(self._last)

    def line_of(self, point: Point) -> Mapping[str, Any]:
        """Return the last line of a point's run, or nothing where that is of another identity."""
        line = self._last.get(point.name, {})
        return line if line.get("identity") == point.identity else {}

    def status_of(self, point: Point) -> tuple[str, str]:
        """Return a point's status, and a note on it."""
        line = self.line_of(point)
        status, message = str(line.get("status", STARTED)), str(line.get("message", ""))
        if status == OK and not (self.folder / point.name / SUMMARY).is_file():
            status, message = STARTED, "its folder was removed"
        if status not in (STARTED, "killed"):
            return status, message
        if point.over_plan is not None:
            return OVER_PLAN, point.over_plan
        if status == "killed":
            return status, message
        if not line and (point.name in self._last or (self.folder / point.name).exists()):
            return OLD, "what lies there is of another configuration, data, code or device"
        return PENDING, message

    def put_aside(self, point: Point) -> None:
        """Move what has a point's name and is not of this point, or is ok: no start would change it.

        Of a run that is the folder, and all that it said.
        """
        if self.line_of(point).get("status", OK) != OK:
            return
        before = str(self._last.get(point.name, {}).get("identity", "unknown"))[:8]
        for path, suffix in ((self.folder / point.name, ""), (self.folder / LOGS / f"{point.name}.txt", ".txt")):
            if not path.exists():
                continue
            stale = self.folder / STALE
            stale.mkdir(exist_ok=True)
            names = (f"{path.stem if suffix else path.name}-{before}-{n}{suffix}" for n in range(1, 10**6))
            free = next(stale / name for name in names if not (stale / name).exists())
            path.rename(free)
            if not suffix:
                log.info(f"{point.name}: an earlier run was moved to {free}")
