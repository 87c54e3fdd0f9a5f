"""A run as processes: begun in a separate group, ended with all their children; and what their end says of the run.

command = processes.composer_command(8, "benchmark.py", "yamls/shapes.yaml")
code, output = processes.run(command, limit_sec=600)
status = processes.status_of(code, output)
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from weights.tensors import OUT_OF_MEMORY_MESSAGES

ROOT = Path(__file__).resolve().parent.parent
OUT_OF_MEMORY = ("out of memory", "OutOfMemoryError", *OUT_OF_MEMORY_MESSAGES)
FROM_OUTSIDE = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1)
"""Signals from outside; of the others (a segmentation fault, an abort) the run itself is the cause."""
END_SEC = 30.0  # that the kernel is given to end a group
OF_LAUNCHER = (
    "Waiting up to ",
    "Global rank ",
    "ERROR:composer",
    "WARNING:composer",
    "----------",
    "[rank",
    "Killing training",
    *("slurm: ", "srun: ", "slurmstepd: "),
)
"""What Composer's launcher and Slurm say of a run that has ended, after the run's own last words."""


def composer_command(ranks: int, *words: str) -> list[str]:
    """Return the command of Composer's launcher with this interpreter. `words`: program and arguments."""
    return [sys.executable, "-m", "composer.cli", "-n", str(ranks), *words]


def begin(
    command: Sequence[str], output: IO[Any], *, folder: Path = ROOT, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[Any]:
    """Begin a command in a separate process group.

    Args:
        output: file of all that it says.
        folder: that it works in.
        variables: of its environment, besides this process's.
    """
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **(variables or {})},
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run(command: Sequence[str], limit_sec: float, folder: Path = ROOT) -> tuple[int | None, str]:
    """Run a command in a folder to its end or its limit; return its code, None where it had to be ended, and all it said."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = begin(command, output, folder=folder)
        try:
            code: int | None = process.wait(timeout=limit_sec)
        except subprocess.TimeoutExpired:
            code = None
            end(process)
        except BaseException:  # who is interrupted leaves no run behind that would hold the GPU
            end(process)
            raise
        output.seek(0)
        return code, output.read()


def end(process: subprocess.Popen[Any], grace_sec: float = 0.0) -> None:
    """End a command with all its children.

    Args:
        grace_sec: how long they may take to end by themselves after SIGTERM, as a run does that writes checkpoints.
    """
    if grace_sec:
        _send(process.pid, signal.SIGTERM)
        until = time.monotonic() + grace_sec
        while is_alive(process.pid) and time.monotonic() < until:
            process.poll()
            time.sleep(0.1)
    _send(process.pid, signal.SIGKILL)
    process.wait(timeout=END_SEC)


def is_alive(group: int) -> bool:
    """True while a process of this group has not ended; one that nobody has waited for counts as ended."""
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group:
                return True
    return False


def _send(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def signal_of(code: int) -> signal.Signals | None:
    """Return the signal that an exit code stands for, or None. Python, a shell and Composer's launcher differ there."""
    number = -code if code < 0 else 256 - code if code >= 192 else code - 128  # -9, 247 and 137 are the same
    try:
        return signal.Signals(number)
    except ValueError:
        return None


def own_lines(output: str) -> list[str]:
    """Return what a run said itself, in lines: the last ones are its last words."""
    return [line for line in output.splitlines() if line.strip() and not line.startswith(OF_LAUNCHER)]


def status_of(code: int | None, output: str) -> str:
    """Return what became of a run that left no result.

    timeout           it had to be ended at its limit: `code` is None
    refused           its configuration cannot run: code 2
    out_of_memory     it says so
    killed            by a signal from outside: a user, a scheduler, the kernel where the machine's memory is short
    failed            all else
    """
    if code is None:
        return "timeout"
    if code == 2:
        return "refused"
    if any(text in output for text in OUT_OF_MEMORY):
        return "out_of_memory"
    return "killed" if signal_of(code) in FROM_OUTSIDE else "failed"
