"""The table: fault x moment, what is done, and what has to come of it.

Each row is a function of a row under way (runs.At). It returns a verdict, whose outcome has to be the row's:

    resumed    the run ended; the same command again ended as the unbroken run
    went on    the run did not end, and ended as the unbroken run
    refused    a start was refused with a message that says why; what was there is as it was
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import resource
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.faults.compare import lines_of
from tests.faults.runs import END_SEC, ROOT, RUN_SEC, STORE_PREFIX, At, Skipped, Started, Verdict, wait_for
from tests.store.server import BUCKET

Outcome = Literal["resumed", "went on", "refused"]

MOMENTS = {
    "start": "start",
    "first-step": "first step",
    "mid-epoch": "mid-epoch",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint, half written",
    "target": "target reached",
    "after": "after the end",
    "data": "waiting for data",
    "fetch": "waiting for data",
}
SLOW_SEC = 3.0
COLLECTIVE_SEC = 20.0  # in place of half an hour
STOPPED_SEC = END_SEC + COLLECTIVE_SEC + 30.0  # after which the launcher kills a rank that hears no SIGTERM
AWAY_SEC = 6.0
PATIENCE = ["data.patience_sec=8"]
OOM_LIMIT_BYTES = 1 << 20
DISK_BYTES = 64 << 20  # the run wants 52
CLOCK_BACK_SEC = 3600
FAKETIME = "*/faketime/libfaketimeMT.so.1"


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    fault: str
    moment: str
    """A key of MOMENTS."""
    act: Callable[[At], Verdict]
    outcome: Outcome
    said: str | None = None
    """Pattern of the message that has to come; None: none can, or none is needed."""
    ranks: int = 2
    end_sec: float | None = END_SEC
    """Within which the last process has to have ended; None: the run goes on."""


# --- signals ---


def hit(at: At, number: int, to: str, moment: str, halted: int, then: tuple[int, ...] = ()) -> Started:
    """Send a signal, or several, when the run has come to a moment, and wait until nothing of it is left."""
    run = at.start(f"{moment} {halted}")
    run.halted()
    for each in (number, *then):
        run.send(each, to)
        time.sleep(0.3)
    run.go()
    return run


def signalled(
    number: int, to: str, moment: str, halted: int, at: At, then: tuple[int, ...] = (), end_sec: float = END_SEC
) -> Verdict:
    """Hit the run, see that all of it ends, and start it again."""
    run = hit(at, number, to, moment, halted, then)
    took = run.ended(end_sec)
    return at.resumed(run, took)


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
    took = run.ended()
    at.cold = False
    return at.resumed(run, took)


def launcher_killed(moment: str, halted: int, at: At) -> Verdict:
    """Kill the launcher alone: its ranks train on. Meanwhile the same command is refused; afterwards the run is finished."""
    run = at.start(f"{moment} {halted}")
    run.halted()
    run.send(signal.SIGKILL, "launcher")
    time.sleep(1.0)
    second = at.start()
    took = second.ended()
    run.go()
    run.ended(RUN_SEC)
    return at.refused(second, took, at.start())


def same_name_twice(moment: str, halted: int, at: At) -> Verdict:
    """Start the same command beside the run: it is refused, and the first goes on."""
    run = at.start(f"{moment} {halted}")
    run.halted()
    second = at.start()
    took = second.ended()
    run.go()
    return at.refused(second, took, run)


def slowed(moment: str, to: str, at: At) -> Verdict:
    """Stop a rank for some seconds."""
    run = at.start(f"{moment} 0")
    run.halted()
    run.send(signal.SIGSTOP, to)
    run.go()
    time.sleep(SLOW_SEC)
    run.send(signal.SIGCONT, to)
    return at.went_on(run)


def stopped_for_good(moment: str, at: At) -> Verdict:
    """Stop a rank for ever: the other waits for it in a collective, until that has taken too long."""
    run = at.start(f"{moment} 0", FAULTS_TIMEOUT=f"{COLLECTIVE_SEC:g}")
    run.halted()
    run.send(signal.SIGSTOP, "1")
    run.go()
    took = run.ended(STOPPED_SEC)
    return at.resumed(run, took)


def worker_killed(moment: str, at: At) -> Verdict:
    """Kill a loader worker of rank 1."""
    run = at.start(f"{moment} 1")
    run.halted()
    run.send(signal.SIGKILL, "worker")
    run.go()
    took = run.ended()
    return at.resumed(run, took)


def not_a_number(batch: int, at: At) -> Verdict:
    """Let one rank's loss be no number in a batch."""
    run = at.start(FAULTS_POISON=f"{batch} 1")
    run.process.wait(RUN_SEC * run.slack)
    took = run.ended()
    return at.resumed(run, took)


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
    except OSError as error:
        raise Skipped(f"no cgroup can be made here: {error.strerror}") from error
    try:
        try:
            (group / limit).write_text(str(limit_bytes))
        except OSError as error:
            raise Skipped(f"no cgroup with a limit of memory can be made here: {error.strerror}") from error
        yield group
    finally:
        with contextlib.suppress(OSError):
            wait_for(lambda: not (group / "cgroup.procs").read_text(), 30.0, "an empty cgroup")
        with contextlib.suppress(OSError):
            group.rmdir()


def killed_by_the_kernel(moment: str, to: str, at: At) -> Verdict:
    """Put a rank into a cgroup without room: the kernel kills it at the next page that it wants."""
    with memory_group(OOM_LIMIT_BYTES) as group:
        run = at.start(f"{moment} {to}")
        run.halted()
        [pid] = run.pids(to)
        (group / "cgroup.procs").write_text(str(pid))
        run.go()
        took = run.ended()
        kills = _oom_kills(group)
    verdict = at.resumed(run, took)
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
    run = at.start(f"{moment} {to}")
    run.halted()
    [pid] = run.pids(to)
    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (used, used))
    run.go()
    took = run.ended()
    return at.resumed(run, took)


# --- the disk ---


def disk_full(moment: str, at: At) -> Verdict:
    """Fill the disk of the run's folder, and make room again."""
    at.runs.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "easel-faults", str(at.runs)]
    if os.getuid() or subprocess.run(mount, capture_output=True, timeout=20).returncode:
        raise Skipped("no right to mount a small disk here")
    try:
        run = at.start(f"{moment} 0")
        run.halted()
        filler = at.runs / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        run.go()
        took = run.ended()
        filler.unlink()
        return at.resumed(run, took)
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
        run = at.start("fetch 1")
        run.halted()
        at.setting.store.stop()
        run.go()
        time.sleep(AWAY_SEC)
        at.setting.store.heal()
        return at.went_on(run)


def store_away_for_good(moment: str, at: At) -> Verdict:
    """Stop the store until the run has ended: before its start, or while shards are fetched."""
    with from_store(at):
        run = None if moment == "start" else at.start(f"{moment} 1")
        if run is not None:
            run.halted()
        at.setting.store.stop()
        run = run or at.start()
        run.go()
        run.process.wait(RUN_SEC * run.slack)
        took = run.ended()
        at.setting.store.heal()
        return at.refused(run, took, at.start()) if moment == "start" else at.resumed(run, took)


def store_slow(at: At) -> Verdict:
    """Let 20 kB/s pass: the stage takes ten seconds and more."""
    with at.setting.store.slowed(20_000.0) as port, from_store(at, port):
        at.more[-1] = "data.patience_sec=120"
        return at.went_on(at.start())


def store_wrong_bytes(heals: bool, at: At) -> Verdict:
    """Flip a bit in every shard of the store; put it right when the run has noticed, or when it has ended."""
    with from_store(at):
        store = at.setting.store
        run = at.start("fetch 1")
        run.halted()
        shards = {name: content for name, content in at.setting.stage.items() if name.endswith(".mds")}
        for name, content in shards.items():
            half = len(content) // 2
            store.put(f"{STORE_PREFIX}/{name}", content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :])
        run.go()
        took = 0.0
        if heals:
            wait_for(lambda: "is damaged" in run.said or run.code is not None, 60.0 * run.slack, "a damaged shard")
        else:
            run.process.wait(RUN_SEC * run.slack)
            took = run.ended()
        for name, content in shards.items():
            store.put(f"{STORE_PREFIX}/{name}", content)
        return at.went_on(run) if heals else at.resumed(run, took)


# --- the clock ---


def clock_back(moment: str, number: int | None, at: At) -> Verdict:
    """Set the clock of the run's processes back by an hour; then end it by a signal, or let it go on."""
    libraries = sorted(Path("/usr/lib").glob(FAKETIME))
    if not libraries:
        raise Skipped("no libfaketime here (Debian: apt-get install faketime)")
    clock = at.home / "clock"
    clock.write_text("+0\n")
    faked = {"LD_PRELOAD": str(libraries[0]), "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1"}
    at.environment = {**faked, "FAKETIME_DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1"}
    at.cold = True
    run = at.start(f"{moment} 0")
    run.halted()
    clock.write_text(f"-{CLOCK_BACK_SEC}\n")
    if number is None:
        run.go()
        return at.went_on(run)
    run.send(number, "0")
    run.go()
    took = run.ended()
    return at.resumed(run, took)


# --- older versions ---


def older_checkpoint(at: At) -> Verdict:
    """Resume a run that an older version began, kill it, and start it again: it ends as it would have there."""
    from test_older_runs import EMA_SUM, KEYS, LOSS, WEIGHTS_SUM, absolute_sum

    from record.checkpoint_files import find_newest, read

    with tarfile.open(ROOT / "tests/golden/run_of_before.tar.xz") as tar:
        tar.extractall(at.runs, filter="data")
    at.own_words = [*KEYS, f"run_folder={at.runs}"]
    run = at.start("first-step 0")  # the third batch of that run
    run.halted()
    run.send(signal.SIGKILL, "0")
    took = run.ended()
    again = at.start()
    at.finish(again)
    folder = at.runs / "of_before"
    content, found = read(find_newest(folder / "checkpoints")), []  # type: ignore[arg-type]
    for name, wanted in (("model", WEIGHTS_SUM), ("ema", EMA_SUM)):
        if abs(absolute_sum(content[name]) / wanted - 1) > 1e-7:
            found.append(f"{name}: the sum is {absolute_sum(content[name])}, not {wanted}")
    found += [] if f"loss={LOSS} " in f"{again.result} " else [f"no loss={LOSS}: {again.result}"]
    batches = [line["batch"] for line in lines_of(folder)]
    found += [] if batches == [1, 2, 3, 4] else [f"metrics.jsonl: windows at batches {batches}"]
    return Verdict("resumed", found, 0, took, again.said)


def other_schema(at: At) -> Verdict:
    """Let the newest checkpoint be one of a version to come, with its own digest: it is refused, and stays."""
    import torch

    from record.checkpoint_files import FULL, find_newest, listed, stem, write

    hit(at, signal.SIGTERM, "0", "mid-epoch", 0).ended()
    newest = find_newest(at.folder / "checkpoints")
    assert newest is not None
    content = torch.load(newest, weights_only=True)
    aside = at.home / newest.name
    shutil.copy(newest, aside)
    of_later = write(newest.parent, stem(FULL, content["progress"]["batch"]), {**content, "schema": 2})
    second = at.start()
    took = second.ended()
    stays = of_later in listed(of_later.parent, FULL)
    of_later.unlink()
    shutil.move(aside, newest)
    verdict = at.refused(second, took, at.start())
    verdict.problems += [] if stays else ["the checkpoint of the later version is gone"]
    return verdict


# --- the table ---


def _signals(
    name: str, number: int, outcome: dict[str, Outcome], said: dict[str, str | None], to: dict[str, str]
) -> dict[str, Row]:
    """Return the rows of one signal. `to`: moment -> whom; rank 1 halts where it is hit, or waits for data, else rank 0."""
    rows = {}
    for moment, whom in to.items():
        halted = 1 if (whom == "1" and moment != "checkpoint") or moment == "data" else 0
        act = functools.partial(signalled, number, whom, moment, halted)
        text = f"{signal.Signals(number).name} to {NAMES[whom]}"
        rows[f"{name}_{moment}".replace("-", "_")] = Row(
            text, moment, act, outcome.get(moment, "resumed"), said.get(moment)
        )
    return rows


NAMES = {"0": "rank 0", "1": "rank 1", "all": "every process", "launcher": "the launcher"}
EIGHT = ("start", "first-step", "mid-epoch", "evaluation", "checkpoint", "target", "after", "data")
IN_FIT = ("first-step", "mid-epoch", "evaluation", "checkpoint", "data")


def _each(whom: str) -> dict[str, str]:
    return dict.fromkeys(EIGHT, whom)


SAVED = r"SIGTERM: stopped after batch \d+; .* The same command resumes it\."
STOPPED_TERM = dict.fromkeys(IN_FIT, SAVED)
TERM_TO = dict(zip(EIGHT, ("1", "0", "1", "0", "all", "0", "0", "0"), strict=True))
INT_TO = dict.fromkeys(EIGHT, "all")

ROWS: dict[str, Row] = {
    **_signals("sigterm", signal.SIGTERM, {"target": "went on"}, STOPPED_TERM, TERM_TO),
    **_signals("sigint", signal.SIGINT, {}, {}, INT_TO),
    **_signals("kill_rank_0", signal.SIGKILL, {}, {}, _each("0")),
    **_signals("kill_rank_1", signal.SIGKILL, {}, {}, _each("1")),
    **_signals(
        "kill_all", signal.SIGKILL, {}, {}, dict.fromkeys(("mid-epoch", "evaluation", "checkpoint", "target"), "all")
    ),
}
for _moment in ("start", "mid-epoch", "evaluation", "checkpoint"):
    ROWS[f"kill_launcher_{_moment}".replace("-", "_")] = Row(
        "SIGKILL of the launcher",
        _moment,
        functools.partial(launcher_killed, _moment, 0),
        "refused",
        "another process is training in",
    )
ROWS |= {
    "sigterm_imports": Row(
        "SIGTERM to every process", "start", functools.partial(cold_start, signal.SIGTERM, "all"), "resumed"
    ),
    "kill_imports": Row(
        "SIGKILL of both ranks", "start", functools.partial(cold_start, signal.SIGKILL, "ranks"), "resumed"
    ),
    "sigusr1_mid_epoch": Row(
        "SIGUSR1 to rank 1",
        "mid-epoch",
        functools.partial(signalled, signal.SIGUSR1, "1", "mid-epoch", 1),
        "resumed",
        SAVED.replace("TERM", "USR1"),
    ),
    "sigterm_launcher_mid_epoch": Row(
        "SIGTERM to the launcher",
        "mid-epoch",
        functools.partial(signalled, signal.SIGTERM, "launcher", "mid-epoch", 0),
        "resumed",
        SAVED,
    ),
    "sigterm_one_process": Row(
        "SIGTERM, one rank without a launcher",
        "mid-epoch",
        functools.partial(signalled, signal.SIGTERM, "0", "mid-epoch", 0),
        "resumed",
        SAVED,
        ranks=1,
    ),
    "kill_one_process": Row(
        "SIGKILL, one rank without a launcher",
        "checkpoint",
        functools.partial(signalled, signal.SIGKILL, "0", "checkpoint", 0),
        "resumed",
        ranks=1,
    ),
    "sigterm_twice": Row(
        "two signals: SIGTERM twice",
        "mid-epoch",
        functools.partial(signalled, signal.SIGTERM, "0", "mid-epoch", 0, then=(signal.SIGTERM,)),
        "resumed",
        SAVED,
    ),
    "sigterm_sigint": Row(
        "two signals: SIGTERM, then Ctrl-C",
        "evaluation",
        functools.partial(signalled, signal.SIGTERM, "all", "evaluation", 0, then=(signal.SIGINT,)),
        "resumed",
    ),
    "sigterm_sigkill": Row(
        "two signals: SIGTERM, then SIGKILL, to rank 0",
        "checkpoint",
        functools.partial(signalled, signal.SIGTERM, "0", "checkpoint", 0, then=(signal.SIGKILL,)),
        "resumed",
    ),
    "kill_worker_mid_epoch": Row(
        "SIGKILL of a loader worker",
        "mid-epoch",
        functools.partial(worker_killed, "mid-epoch"),
        "resumed",
        "DataLoader worker",
    ),
    "kill_worker_data": Row(
        "SIGKILL of a loader worker", "data", functools.partial(worker_killed, "data"), "resumed", "DataLoader worker"
    ),
    "kill_worker_evaluation": Row(
        "SIGKILL of a loader worker",
        "evaluation",
        functools.partial(worker_killed, "evaluation"),
        "resumed",
        "DataLoader worker",
    ),
    "oom_mid_epoch": Row(
        "out of memory: the kernel kills rank 1 (cgroup)",
        "mid-epoch",
        functools.partial(killed_by_the_kernel, "mid-epoch", "1"),
        "resumed",
        "Another rank has ended without a word",
    ),
    "oom_evaluation": Row(
        "out of memory: the kernel kills rank 0 (cgroup)",
        "evaluation",
        functools.partial(killed_by_the_kernel, "evaluation", "0"),
        "resumed",
    ),
    "oom_checkpoint": Row(
        "out of memory: the kernel kills rank 0 (cgroup)",
        "checkpoint",
        functools.partial(killed_by_the_kernel, "checkpoint", "0"),
        "resumed",
    ),
    "no_memory_mid_epoch": Row(
        "out of memory: an allocation of rank 1 fails (RLIMIT_AS)",
        "mid-epoch",
        functools.partial(no_address_space, "mid-epoch", "1"),
        "resumed",
    ),
    **{
        f"disk_full_{moment}".replace("-", "_"): Row(
            "disk full", moment, functools.partial(disk_full, moment), "resumed", "cannot be written"
        )
        for moment in ("start", "first-step", "mid-epoch", "evaluation", "checkpoint", "target")
    },
    "store_away_start": Row(
        "store away", "start", functools.partial(store_away_for_good, "start"), "refused", r"127\.0\.0\.1"
    ),
    "store_away": Row(f"store away for {AWAY_SEC:.0f} s", "fetch", store_away, "went on", end_sec=None),
    "store_away_for_good": Row(
        "store away for longer than data.patience_sec",
        "fetch",
        functools.partial(store_away_for_good, "fetch"),
        "resumed",
        r"data\.patience_sec=8",
    ),
    "store_slow": Row("store slow", "fetch", store_slow, "went on", end_sec=None),
    "store_wrong_bytes": Row(
        "wrong bytes from the store for a while",
        "fetch",
        functools.partial(store_wrong_bytes, True),
        "went on",
        "is damaged",
        end_sec=None,
    ),
    "store_wrong_for_good": Row(
        "wrong bytes from the store for good",
        "fetch",
        functools.partial(store_wrong_bytes, False),
        "resumed",
        "is damaged: .* tries",
    ),
    "nan_first_step": Row(
        "loss not a number, on rank 1 alone",
        "first-step",
        functools.partial(not_a_number, 1),
        "resumed",
        "not finite|nan",
    ),
    "nan_mid_epoch": Row(
        "loss not a number, on rank 1 alone",
        "mid-epoch",
        functools.partial(not_a_number, 3),
        "resumed",
        "not finite|nan",
    ),
    "slow_mid_epoch": Row(
        f"rank 1 stopped for {SLOW_SEC:.0f} s",
        "mid-epoch",
        functools.partial(slowed, "mid-epoch", "1"),
        "went on",
        end_sec=None,
    ),
    "slow_evaluation": Row(
        f"rank 1 stopped for {SLOW_SEC:.0f} s",
        "evaluation",
        functools.partial(slowed, "evaluation", "1"),
        "went on",
        end_sec=None,
    ),
    "stopped_mid_epoch": Row(
        f"rank 1 stopped for good (SIGSTOP; collectives wait {COLLECTIVE_SEC:.0f} s)",
        "mid-epoch",
        functools.partial(stopped_for_good, "mid-epoch"),
        "resumed",
        end_sec=STOPPED_SEC,
    ),
    "clock_back_mid_epoch": Row(
        "clock set back by an hour",
        "mid-epoch",
        functools.partial(clock_back, "mid-epoch", None),
        "went on",
        end_sec=None,
    ),
    "clock_back_evaluation": Row(
        "clock set back by an hour",
        "evaluation",
        functools.partial(clock_back, "evaluation", None),
        "went on",
        end_sec=None,
    ),
    "clock_back_and_killed": Row(
        "clock set back by an hour, then SIGKILL of rank 0",
        "mid-epoch",
        functools.partial(clock_back, "mid-epoch", signal.SIGKILL),
        "resumed",
    ),
    "twice_start": Row(
        "the same run name twice at once",
        "start",
        functools.partial(same_name_twice, "start", 0),
        "refused",
        "another process is training in",
    ),
    "twice_mid_epoch": Row(
        "the same run name twice at once",
        "mid-epoch",
        functools.partial(same_name_twice, "mid-epoch", 0),
        "refused",
        "another process is training in",
    ),
    "older_version": Row(
        "checkpoint of an older version, then SIGKILL",
        "first-step",
        older_checkpoint,
        "resumed",
        "resumes from batch 2",
        ranks=1,
    ),
    "later_version": Row(
        "checkpoint of a version to come", "start", other_schema, "refused", "has schema 2; this version reads 1"
    ),
}
