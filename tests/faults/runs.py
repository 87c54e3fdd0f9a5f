"""Runs of the table: what all have in common, and one that is under way, with a fault for it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.faults import compare

if TYPE_CHECKING:
    from miniature import Miniature

TRAINER = "tests/faults/trainer.py"
HALT_SEC = 180.0  # from a start to the moment at which it halts
END_SEC = 25.0  # from a fault to the end of the last process
RUN_SEC = 240.0  # of a start that nothing stops
BATCH = 32  # images; six an epoch

# Batches of 32, six an epoch. A checkpoint each second batch, an evaluation and a snapshot each fourth; the target is met
# by the second evaluation, in the second epoch.
WORDS = [
    f"global_batch_size={BATCH}",
    "max_duration=12ba",
    "measure.window_batches=1",
    f"save.every_images={2 * BATCH}",
    f"save.snapshot_every_images={4 * BATCH}",
    "eval.when=in_training",
    f"eval.every_images={4 * BATCH}",
    "eval.batch_size=4",
    "eval.weights=training",
    "target.fid=900",  # 1129 after 4 batches, 679 after 8
    "mlperf.enabled=true",
    "data.workers=1",
]


class Skipped(Exception):
    """This machine cannot do a row; says why."""


@dataclass
class Started:
    """A start of a run: its processes, from outside."""

    process: subprocess.Popen
    folder: Path
    """Where it says what it does, see trainer.py."""
    slack: float = 1.0
    seen: dict[int, psutil.Process] = field(default_factory=dict)
    hit_at: float | None = None
    """When the first fault hit it."""
    took_sec: float | None = None
    """From then to the end of its last process."""

    @property
    def said(self) -> str:
        """What it has printed so far, of rank 0 and the launcher."""
        return (self.folder / "said").read_text(errors="replace")

    @property
    def result(self) -> str:
        """Its result line."""
        lines = [line for line in self.said.splitlines() if line.startswith("images_per_sec=")]
        return lines[-1] if lines else ""

    def _wait_for(self, name: str, limit_sec: float) -> int:
        """Return the process id that a file of its folder says."""
        deadline, path = time.monotonic() + limit_sec * self.slack, self.folder / name
        while not path.exists() or not path.read_text():
            if self.process.poll() is not None:
                raise RuntimeError(f"it ended with {self.process.returncode} before {name}: {self.said[-3000:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {name} after {limit_sec * self.slack:.0f} s: {self.said[-3000:]}")
            time.sleep(0.02)
        return int(path.read_text())

    def halted(self) -> psutil.Process:
        """Return the process that has come to its moment, when it has; note all processes of the run."""
        pid = self._wait_for("halted", HALT_SEC)
        time.sleep(0.3)  # the others come to where they wait for it
        self.look()
        return psutil.Process(pid)

    def go(self) -> None:
        """Let who has halted go on."""
        self.hit_at = self.hit_at or time.monotonic()
        (self.folder / "go").touch()

    def look(self) -> None:
        """Note the run's processes, so that none is overlooked when its parent has gone."""
        for pid in (self.process.pid, *self.ranks):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                for each in (process, *process.children(recursive=True)):
                    self.seen[each.pid] = each

    def children(self) -> list[int]:
        """Return the launcher's children, which are ranks, also while they import libraries."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(self.process.pid).children()]
        return []

    @property
    def ranks(self) -> list[int]:
        """Process ids of the ranks that have begun, by rank."""
        paths = sorted(self.folder.glob("rank-*"))
        return [int(path.read_text()) for path in paths if path.read_text()]

    def pids(self, to: str) -> list[int]:
        """Return whom a signal is for: a rank (0, 1), the launcher, a worker of rank 1, or all."""
        self.look()
        if to == "launcher":
            return [self.process.pid]
        if to == "worker":
            children = psutil.Process(self.ranks[-1]).children()
            return [child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())][:1]
        if to == "all":
            return list(self.seen)
        return [self._wait_for(f"rank-{to}", HALT_SEC)]

    def send(self, number: int, to: str) -> None:
        """Send a signal."""
        self.hit_at = self.hit_at or time.monotonic()
        for pid in self.pids(to):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def ended(self, limit_sec: float = END_SEC) -> None:
        """Wait until no process of it is left. Raises TimeoutError: some lived on."""
        if self.took_sec is not None:
            return
        self.look()
        began, limit = time.monotonic(), limit_sec * self.slack
        while alive := [each for each in self.seen.values() if self._lives(each)]:
            if time.monotonic() - began > limit:
                raise TimeoutError(f"{len(alive)} of its processes lived on for {limit:.0f} s: {self.said[-1000:]}")
            time.sleep(0.05)
        self.took_sec = time.monotonic() - (self.hit_at or began)

    def _lives(self, process: psutil.Process) -> bool:
        if process.pid == self.process.pid:
            return self.process.poll() is None
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    @property
    def code(self) -> int | None:
        """The launcher's exit code."""
        return self.process.poll()


@dataclass
class Verdict:
    """What became of a row."""

    outcome: str
    """`resumed`, `went on` or `refused`; else what went wrong."""
    problems: list[str] = field(default_factory=list)
    bits_lost: int = 0
    ended_sec: float | None = None
    """From the fault to the end of the last process; None: it did not end."""
    said: str = ""
    """What the start that was hit, or refused, has printed."""
    code: int | None = None
    """Its exit code."""


class Setting:
    """What all rows have in common: the miniature and the unbroken run.

    Args:
        home: a folder of its own.
        miniature: its data.
        slack: how many times the limits are stretched.
    """

    def __init__(self, home: Path, miniature: Miniature, slack: float = 1.0):
        self.home, self.miniature, self.slack = home, miniature, slack
        self._whole: dict[int, tuple[Path, str]] = {}

    def whole(self, ranks: int) -> tuple[Path, str]:
        """Return the folder and the result line of the unbroken run on so many ranks, whose noise depends on the rank."""
        if ranks not in self._whole:
            at = At(self, f"whole-{ranks}", ranks)
            run = at.start()
            at.finish(run)
            self._whole[ranks] = at.folder, run.result
        return self._whole[ranks]


class At:
    """A row under way: a folder, a command, and starts of it."""

    def __init__(self, setting: Setting, row: str, ranks: int = 2):
        self.setting, self.row, self.ranks = setting, row, ranks
        self.name = row.replace("_", "-")
        self.home = setting.home / self.name
        self.runs = self.home / "runs"
        self.home.mkdir()
        self.more: list[str] = []
        self.cold = False
        self.stack = contextlib.ExitStack()
        self._starts = 0

    @property
    def folder(self) -> Path:
        """The run's."""
        return self.runs / self.name

    @property
    def words(self) -> list[str]:
        own = [*WORDS, f"data.local={self.home}/cache", *self.more]
        return self.setting.miniature.small(self.runs, self.name, *own)

    def start(self, halt: str | None = None, **variables: str) -> Started:
        """Start the command.

        Args:
            halt: moment and rank, see trainer.py.
            variables: of the environment of this start.
        """
        from conftest import started

        folder = self.home / f"start{self._starts}"
        self._starts += 1
        folder.mkdir()
        launcher = ["python"] if self.ranks == 1 else ["composer", "-n", str(self.ranks)]
        command = [*(["env"] if self.cold else []), *launcher, TRAINER, *self.words]
        own = {"FAULTS_FOLDER": str(folder), "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
        own |= {"FAULTS_AT": halt} if halt else {}
        own |= variables
        with open(folder / "said", "w") as said:
            process = self.stack.enter_context(started(*command, output=said.fileno(), **own))
        run = Started(process, folder, self.setting.slack)
        self.stack.callback(self._kill, run)
        return run

    def halted(self, moment: str) -> Started:
        """Start the command, and wait until it has come to a moment (and rank)."""
        run = self.start(moment)
        run.halted()
        return run

    @staticmethod
    def _kill(run: Started) -> None:
        """Leave nothing of a start, whose group is killed too (conftest.started)."""
        with contextlib.suppress(psutil.NoSuchProcess):
            run.look()
        for each in run.seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()

    def finish(self, run: Started) -> None:
        """Wait for the end of a start that nothing stops. Raises RuntimeError, TimeoutError: it failed."""
        limit_sec = RUN_SEC * self.setting.slack
        try:
            run.process.wait(limit_sec)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it has not ended after {limit_sec:.0f} s: {run.said[-2000:]}") from None
        if run.code or not run.result:
            raise RuntimeError(f"it ended with {run.code}: {run.said[-3000:]}")

    # --- verdicts ---

    def compared(self, outcome: str, run: Started, hit: Started) -> Verdict:
        """Compare the finished run with the unbroken one.

        Args:
            run: the start that finished it.
            hit: the start that was hit, or refused.
        """
        whole, result = self.setting.whole(self.ranks)
        found = compare.problems(self.folder, whole) + compare.result_problems(run.result, result)
        return Verdict(outcome, found, compare.bits_lost(self.folder, whole), hit.took_sec, hit.said, hit.code)

    def went_on(self, run: Started) -> Verdict:
        """Wait for the end of a run that a fault has not ended, and compare."""
        self.finish(run)
        return self.compared("went on", run, run)

    def resumed(self, hit: Started, end_sec: float = END_SEC) -> Verdict:
        """Wait for the end of a run that was hit, start the same command again, to its end, and compare."""
        hit.ended(end_sec)
        again = self.start()
        self.finish(again)
        outcome = "went on" if hit.code == 0 else "resumed"  # the fault came too late, or was none to it
        return self.compared(outcome, again, hit)

    def refused(self, refused: Started, run: Started) -> Verdict:
        """Wait for the run's end, compare, and see that the other start was refused, by exit code 1 or 2."""
        self.finish(run)
        outcome = "refused" if refused.code in (1, 2) else f"not refused: exit code {refused.code}"
        return self.compared(outcome, run, refused)

    def close(self) -> None:
        """End what is left of it."""
        self.stack.close()


def wait_for(condition, limit_sec: float, what: str) -> None:
    """Return when a condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + limit_sec
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not after {limit_sec:.0f} s")
        time.sleep(0.02)
