"""What is done to a run, and what is seen of it: each row of the table is one of these with its moment (rows.py)."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from run_folder.mlperf_log import read_events
from tests.faults.compare import lines_of
from tests.faults.runs import END_SEC, RUN_SEC, STORE_PREFIX, At, Skipped, Started, Verdict, wait_for
from tests.store.server import BUCKET

SLOW_SEC = 3.0
STALL_SEC = 10.0  # health.stall_sec, in place of a quarter of an hour
STOPPED_SEC = END_SEC + STALL_SEC + 30.0  # after which the launcher kills a rank that hears no SIGTERM
AWAY_SEC = 6.0
PATIENCE = ["data.patience_sec=8"]
OOM_LIMIT_BYTES = 1 << 20
DISK_BYTES = 64 << 20  # the run wants 52
CLOCK_BACK_SEC = 3600


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


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Yield a cgroup with so much memory: for what is allocated from then on. Raises Skipped."""
    name = f"easel-faults-{os.getpid()}"
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    parent, limit = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    group = parent / name
    try:
        group.mkdir()
        (group / limit).write_text(str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise Skipped(f"no cgroup with a limit of memory can be made here: {error.strerror}") from error
    try:
        yield group
    finally:
        with contextlib.suppress(OSError):
            wait_for(lambda: not (group / "cgroup.procs").read_text(), 30.0, "an empty cgroup")
            group.rmdir()


def killed_by_the_kernel(moment: str, to: str, at: At) -> Verdict:
    """Put a rank into a cgroup without room: the kernel kills it at the next page that it wants."""
    with memory_group(OOM_LIMIT_BYTES) as group:
        verdict = hit_and_resumed(at, moment, to, lambda run: (group / "cgroup.procs").write_text(str(run.pids(to)[0])))
        kills = _oom_kills(group)
    if not any(kills):
        verdict.problems.append("the kernel has killed nothing")
    return verdict


def _oom_kills(group: Path) -> list[int]:
    """Return how many processes of a cgroup the kernel has killed, as its files count them."""
    found = []
    for name in ("memory.oom_control", "memory.events"):
        with contextlib.suppress(OSError):
            found += [int(count) for count in re.findall(r"^oom_kill (\d+)$", (group / name).read_text(), re.M)]
    return found


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


# --- the store ---


@contextlib.contextmanager
def from_store(at: At, port: int | None = None) -> Iterator[None]:
    """Let the run read its stage from the store."""
    store = at.setting.store
    store.heal()
    at.more = [f"data.remote=s3://{BUCKET}/{STORE_PREFIX}", *PATIENCE]
    at.environment = store.environment(port=port)
    try:
        yield
    finally:
        store.heal()
        for name, content in at.setting.stage.items():
            store.put(f"{STORE_PREFIX}/{name}", content)


def store_away(at: At) -> Verdict:
    """Stop the store for some seconds while shards are fetched."""
    with from_store(at):
        at.more[-1] = "data.patience_sec=120"
        run = at.halted("fetch 1")
        at.setting.store.stop()
        run.go()
        time.sleep(AWAY_SEC)
        at.setting.store.heal()
        return at.went_on(run)


def store_away_for_good(moment: str, at: At) -> Verdict:
    """Stop the store until the run has ended: before its start, or while shards are fetched."""
    with from_store(at):
        run = None if moment == "start" else at.halted(f"{moment} 1")
        at.setting.store.stop()
        run = run or at.start()
        run.go()
        run.process.wait(RUN_SEC * run.slack)
        run.ended()
        at.setting.store.heal()
        return at.refused(run, at.start()) if moment == "start" else at.resumed(run)


def store_slow(at: At) -> Verdict:
    """Let 20 kB/s pass: the stage takes ten seconds and more."""
    with at.setting.store.slowed(20_000.0) as port, from_store(at, port):
        at.more[-1] = "data.patience_sec=120"
        return at.went_on(at.start())


def store_wrong_bytes(heals: bool, at: At) -> Verdict:
    """Flip a bit in every shard of the store; put it right when the run has noticed, or when it has ended."""
    with from_store(at):
        store = at.setting.store
        run = at.halted("fetch 1")
        shards = {name: content for name, content in at.setting.stage.items() if name.endswith(".mds")}
        for name, content in shards.items():
            half = len(content) // 2
            store.put(f"{STORE_PREFIX}/{name}", content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :])
        run.go()
        if heals:
            wait_for(lambda: "is damaged" in run.said or run.code is not None, 60.0 * run.slack, "a damaged shard")
        else:
            run.process.wait(RUN_SEC * run.slack)
            run.ended()
        for name, content in shards.items():
            store.put(f"{STORE_PREFIX}/{name}", content)
        return at.went_on(run) if heals else at.resumed(run)


# --- the clock ---


def clock_back(moment: str, number: int | None, at: At) -> Verdict:
    """Set the clock of the run's processes back by an hour; then end it by a signal, or let it go on."""
    compiler, library, clock = shutil.which("cc"), at.home / "clock.so", at.home / "clock"
    if compiler is None:
        raise Skipped("no C compiler here, for the clock of the run's processes")
    build = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(Path(__file__).parent / "clock.c"), "-ldl"]
    subprocess.run(build, check=True, timeout=120)
    clock.write_bytes(struct.pack("l", 0))
    at.environment = {"LD_PRELOAD": str(library), "FAULTS_CLOCK": str(clock)}
    at.cold = True
    run = at.halted(f"{moment} 0")
    with open(clock, "r+b") as file:  # in place: it is mapped
        file.write(struct.pack("l", CLOCK_BACK_SEC))
    if number is None:
        run.go()
        verdict = at.went_on(run)
        verdict.problems += shorter_than_its_training(at.folder)
        return verdict
    run.send(number, "0")
    run.go()
    return at.resumed(run)


def shorter_than_its_training(run: Path) -> list[str]:
    """Say where an MLPerf log tells less time than the run's own clocks."""
    at = {event["key"]: event["time_ms"] for event in read_events(run / "mlperf.log")}
    told_sec = (at["run_stop"] - at["run_start"]) / 1000
    known_sec = max(line["seconds_with_eval"] for line in lines_of(run) if line.get("evaluation"))
    return [] if told_sec > 0.5 * known_sec else [f"mlperf.log: {told_sec:.1f} s, of a training of {known_sec:.1f} s"]


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
