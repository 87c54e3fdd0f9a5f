"""What is done to a run, and what is seen of it: each row of the table is one of these with its moment (rows.py)."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.runs import END_SEC, RUN_SEC, At, Skipped, Started, Verdict, wait_for

SLOW_SEC = 3.0
STALL_SEC = 10.0  # health.stall_sec, in place of a quarter of an hour
STOPPED_SEC = END_SEC + STALL_SEC + 30.0  # after which the launcher kills a rank that hears no SIGTERM
DISK_BYTES = 64 << 20  # the run wants 52


# --- signals ---


def hit(at: At, number: int, to: str, moment: str, halted: int, then: tuple[int, ...] = ()) -> Started:
    """Send a signal, or several, when the run has come to a moment."""
    run = at.halted(f"{moment} {halted}")
    for each in (number, *then):
        run.send(each, to)
        time.sleep(0.3)
    run.go()
    return run


def signalled(number: int, to: str, moment: str, halted: int, at: At, then: tuple[int, ...] = ()) -> Verdict:
    """Hit the run, see that all of it ends, and start it again."""
    run = hit(at, number, to, moment, halted, then)
    return at.resumed(run)


def cold_start(number: int, to: str, at: At) -> Verdict:
    """Hit the ranks while they import libraries: nothing is there yet but their processes."""
    at.cold = True
    run = at.start()
    wait_for(lambda: len(run.children()) == 2, 120.0 * run.slack, "two ranks")
    time.sleep(1.0)
    run.look()
    for pid in run.children() if to == "ranks" else run.pids(to):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    run.ended()
    at.cold = False
    return at.resumed(run)


def launcher_killed(moment: str, halted: int, at: At) -> Verdict:
    """Kill the launcher alone: its ranks train on. Meanwhile the same command is refused; afterwards the run is finished."""
    run = at.halted(f"{moment} {halted}")
    run.send(signal.SIGKILL, "launcher")
    time.sleep(1.0)
    second = at.start()
    second.ended()
    run.go()
    run.ended(RUN_SEC)
    return at.refused(second, at.start())


def same_name_twice(moment: str, halted: int, at: At) -> Verdict:
    """Start the same command beside the run: it is refused, and the first goes on."""
    run = at.halted(f"{moment} {halted}")
    second = at.start()
    second.ended()
    run.go()
    return at.refused(second, run)


def hit_and_resumed(
    at: At, moment: str, halted: int | str, act: Callable[[Started], object], end_sec: float = END_SEC
) -> Verdict:
    """Do something to the run at a moment, see that all of it ends, and start it again."""
    run = at.halted(f"{moment} {halted}")
    act(run)
    run.go()
    return at.resumed(run, end_sec)


def slowed(moment: str, to: str, at: At) -> Verdict:
    """Stop a rank for some seconds."""
    run = at.halted(f"{moment} 0")
    run.send(signal.SIGSTOP, to)
    run.go()
    time.sleep(SLOW_SEC)
    run.send(signal.SIGCONT, to)
    return at.went_on(run)


def stopped_for_good(moment: str, at: At) -> Verdict:
    """Stop a rank for ever: nothing is heard of it, and the other ends."""
    at.more = [f"health.stall_sec={STALL_SEC:g}"]
    return hit_and_resumed(at, moment, 0, lambda run: run.send(signal.SIGSTOP, "1"), STOPPED_SEC)


def worker_killed(moment: str, at: At) -> Verdict:
    """Kill a loader worker of rank 1."""
    return hit_and_resumed(at, moment, 1, lambda run: run.send(signal.SIGKILL, "worker"))


def not_a_number(batch: int, at: At) -> Verdict:
    """Let one rank's loss be no number in a batch."""
    run = at.start(FAULTS_POISON=f"{batch} 1")
    run.process.wait(RUN_SEC * run.slack)
    return at.resumed(run)


# --- memory ---


def no_address_space(moment: str, to: str, at: At) -> Verdict:
    """Take a rank's address space away (RLIMIT_AS): its next large allocation fails."""

    def limit(run: Started) -> None:
        [pid] = run.pids(to)
        used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (used, used))

    return hit_and_resumed(at, moment, to, limit)


# --- the disk ---


def disk_full(moment: str, at: At) -> Verdict:
    """Fill the disk of the run's folder, and make room again."""
    at.runs.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "easel-faults", str(at.runs)]
    if os.getuid() or subprocess.run(mount, capture_output=True, timeout=20).returncode:
        raise Skipped("no right to mount a small disk here")
    try:
        run = at.halted(f"{moment} 0")
        filler = at.runs / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        run.go()
        run.ended()
        filler.unlink()
        return at.resumed(run)
    finally:
        at.close()
        subprocess.run(["umount", "-l", str(at.runs)], capture_output=True, timeout=20)


# --- a version to come ---


def other_schema(at: At) -> Verdict:
    """Let the newest checkpoint be one of a version to come, with its own digest: it is refused, and stays."""
    import torch

    from checkpointing.files import FULL, file_stem, find_newest, list_checkpoints, write_checkpoint

    hit(at, signal.SIGTERM, "0", "mid-epoch", 0).ended()
    newest = find_newest(at.folder / "checkpoints")
    assert newest is not None
    content = torch.load(newest, weights_only=True)
    aside = at.home / newest.name
    shutil.copy(newest, aside)
    of_later = write_checkpoint(newest.parent, file_stem(FULL, content["progress"]["batch"]), {**content, "schema": 2})
    second = at.start()
    second.ended()
    stays = of_later in list_checkpoints(of_later.parent, FULL)
    of_later.unlink()
    shutil.move(aside, newest)
    verdict = at.refused(second, at.start())
    verdict.problems += [] if stays else ["the checkpoint of the later version is gone"]
    return verdict
