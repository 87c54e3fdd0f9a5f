"""The runs of a sweep: each composer process in a group and a folder of its own, some side by side, none left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from filelock import FileLock, Timeout

from cli import masking
from cli.errors import Refused
from cli.files import open_regular
from cli.log import log
from record import processes
from record.environment import commit
from record.files import STARTS, SUMMARY, read_lines
from stages.mixture import StreamConfig
from sweeps.file import Sweep, as_word
from sweeps.points import Point
from sweeps.state import LOGS, OK, STARTED, State
from training.run_config import RunConfig

POLL_SEC = 0.2
GRACE_SEC = 30.0  # for a last checkpoint, where the sweep is stopped
READ_BYTES = 200_000  # of the end of what a run said
MAX_MESSAGE = 300
TRAIN, SCORE = (str(processes.ROOT / name) for name in ("benchmark.py", "eval.py"))
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass
class Running:
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

    on_end: is told each that has ended, its status and seconds, and how many are left.
    """

    sweep: Sweep
    state: State
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

    def _begin(self, point: Point, slot: int, variables: dict[str, str]) -> Running:
        self.state.put_aside(point)
        self.state.add(point, STARTED, commit=(code := commit()))
        logs = self.sweep.folder / LOGS
        logs.mkdir(exist_ok=True)
        output = open(logs / f"{point.name}.txt", "ab")  # noqa: SIM115  # until the run has ended
        first, *others = self.commands_of(point, slot)
        process = processes.begin(first, output, folder=Path.cwd(), variables=variables)
        return Running(point, slot, variables, process, output, time.monotonic(), others, output.tell(), code)

    def commands_of(self, point: Point, slot: int) -> list[list[str]]:
        """Return what runs a point, with this interpreter: a training, and its scores where they are for afterwards."""
        ranks, folder = self.sweep.own.ranks, str(self.sweep.folder / point.name)
        scored = [processes.of_composer(ranks, SCORE, folder)] if point.config.eval.when == "after" else []
        return [processes.of_composer(ranks, TRAIN, *point.words, *own_folders(point.config, slot)), *scored]

    def _is_over(self, one: Running) -> bool:
        """Return whether a run has ended, or had to be; then its line is written."""
        seconds, code = time.monotonic() - one.began, one.process.poll()
        if code is None and seconds < self.sweep.own.limit_sec:
            return False
        processes.end(one.process)  # a launcher that was killed leaves its ranks
        if code == 0 and one.to_do:
            command = one.to_do.pop(0)
            one.process = processes.begin(command, one.output, folder=Path.cwd(), variables=one.variables)
            return False
        one.output.close()
        folder = self.sweep.folder / one.point.name
        said = end_of_text(Path(one.output.name), one.from_byte)
        is_ok = code == 0 and (folder / SUMMARY).is_file()
        status = OK if is_ok else processes.status_of(code, said)
        message = "" if is_ok else message_of(status, code, said, folder, self.sweep.own.limit_sec)
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
    """Return the variables of each of the runs that go on side by side: which GPUs it has."""
    ranks, jobs = sweep.own.ranks, sweep.own.jobs
    if not torch.cuda.is_available():
        return [{} for _ in range(jobs or 1)]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",") if given else [str(number) for number in range(torch.cuda.device_count())]
    each = [gpus[first : first + ranks] for first in range(0, len(gpus) - ranks + 1, ranks)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(of)} for of in each[: jobs or len(each)]]


def own_folders(config: RunConfig, slot: int) -> list[str]:
    """Return the words by which a run keeps its shards apart from the runs beside it: a folder of shards has one user."""
    data, held_out = config.data, config.validation.held_out if config.validation.is_given else None

    def own(source: StreamConfig) -> str | None:
        keeps = source.remote is not None and source.local is not None
        return f"{str(source.local).rstrip('/')}-{slot + 1}" if keeps else source.local

    found: dict[str, Any] = {}
    if slot and data.streams is not None and not data.synthetic:
        found["data.streams"] = [_given({**asdict(stream), "local": own(stream)}) for stream in data.streams]
    elif slot and data.sources:
        found["data.local"] = own(data.sources[0])
    if slot and held_out is not None:
        found["validation.local"] = own(held_out)
    return [f"{key}={as_word(value)}" for key, value in found.items() if value is not None]


def _given(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if value is not None}


# --- what a run said ---


def end_of_text(path: Path, from_byte: int) -> str:
    """Return the last of what a run said, from a byte of its file on."""
    with contextlib.suppress(OSError), open_regular(path, None) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(from_byte, size - READ_BYTES))
        return file.read().decode(errors="replace")
    return ""


def message_of(status: str, code: int | None, said: str, folder: Path, limit_sec: int) -> str:
    """Return in one line why a run did not end well: what its record says, or its last words."""
    if status == "timeout":
        return f"it was ended after {limit_sec} s (limit_sec)"
    if status == "killed":
        assert code is not None
        number = processes.signal_of(code)
        why = "; the kernel ends a process so where memory is short" if number == signal.SIGKILL else ""
        return f"ended from outside by {number.name if number else code}{why}"
    text = ""
    if status != "refused":  # then the record is of an earlier start
        with contextlib.suppress(ValueError, OSError):
            text = str((read_lines(folder / STARTS) or [{}])[-1].get("failed", ""))
    lines = processes.own_lines(said)
    if status == "out_of_memory" and not text:
        lines = [line for line in lines if any(part in line for part in processes.OUT_OF_MEMORY)]
    text = text or (lines[-1] if lines else f"it ended with exit code {code} and said nothing")
    line = masking.masked(masking.printable(text))
    return line if len(line) <= MAX_MESSAGE else f"{line[: MAX_MESSAGE - 3]}..."


# --- one at a time ---


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other calls from a sweep's folder. Raises Refused: another one is at it, or it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire(timeout=0)
    except Timeout as error:
        raise Refused(
            f"runs: another sweep.py is at {folder}. Wait for it, or give another folder: runs=FOLDER."
        ) from error
    except OSError as error:
        raise Refused(f"runs: {folder} cannot be written: {error.strerror}. Give another one: runs=FOLDER.") from error
    try:
        yield
    finally:
        lock.release()


def end_left_overs(folder: Path, names: Collection[str]) -> None:
    """End what goes on of the runs of a sweep that was killed itself: processes whose words name one of its runs."""
    trained, scored, found = {f"run_name={name}" for name in names}, {str(folder / name) for name in names}, []
    for process in psutil.process_iter(["cmdline"]):
        words = {*(process.info["cmdline"] or [])}
        is_own = (f"run_folder={folder}" in words and trained & words) or (SCORE in words and scored & words)
        if is_own and process.pid != os.getpid():
            with contextlib.suppress(psutil.Error):
                process.kill()
                found.append(process)
    if found:
        psutil.wait_procs(found, timeout=processes.END_SEC)
        given = f"{folder}: {len(found)} processes of a sweep that was killed went on"
        log.info(f"{given}. They are ended, and their runs resume.")
