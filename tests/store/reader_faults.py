"""Faults of a real object store, and of the cache, while two ranks read: by hand, `make test-store`; CI has two of them.

A fault that heals has to end in the whole epoch, in the order of one without faults. One that stays has to end in an error
that names its cause, soon after patience has run out.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from conftest import started

from tests.store.dataset import NUM_SAMPLES, Stage
from tests.store.reader import DEVICE_BATCH
from tests.store.server import BUCKET, GUEST, SECRET, Store, free_ports

pytestmark = pytest.mark.timeout(300, func_only=True)

PREFIX, REMOTE = "stage", f"s3://{BUCKET}/stage"
EARLY = 0.2  # of the epoch: when what happens in its middle happens
LATE = "shard.00024.mds"  # the readers ask for it in the middle of the epoch
PATIENCE_SEC = 8.0  # for a store that stays away; one that comes back has a minute
GRACE_SEC = 60.0  # after which a reading must have ended
NUM_BATCHES = NUM_SAMPLES // DEVICE_BATCH


class Reading:
    """Two ranks that read the dataset once."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, environment: dict[str, str], **task: Any):
        folder.mkdir()
        self.folder, words = folder, json.dumps({**task, "folder": str(folder)})
        common = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": free_ports(1), "CUDA_VISIBLE_DEVICES": "", **environment}
        self.ranks = []
        for rank in range(2):
            variables = {name: str(of) for name, of in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
            command = (sys.executable, "-m", "tests.store.reader", str(rank), words)
            self.ranks.append(stack.enter_context(started(*command, **variables)))

    def lines(self, rank: int) -> list[dict[str, Any]]:
        """What a rank has noted so far."""
        with contextlib.suppress(FileNotFoundError):
            text = (self.folder / f"{rank}.jsonl").read_text()
            return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return []

    def batches(self) -> list[list[list[int]]]:
        """Rank -> batch -> numbers of its samples, each of which has its own content."""
        found = [[line for line in self.lines(rank) if "numbers" in line] for rank in range(2)]
        assert not any(line["wrong"] for lines in found for line in lines), "WRONG DATA"
        return [[line["numbers"] for line in lines] for lines in found]

    def wait_until_early(self) -> Reading:
        deadline = time.monotonic() + GRACE_SEC
        while sum(map(len, self.batches())) < EARLY * NUM_BATCHES:
            assert time.monotonic() < deadline and self.ranks[0].poll() is None, self.lines(0)[-1:]
            time.sleep(0.01)
        return self

    def end(self, limit_sec: float = GRACE_SEC) -> list[str]:
        """Wait for both to end; return their errors."""
        deadline = time.monotonic() + limit_sec
        for process in self.ranks:
            process.wait(max(0.1, deadline - time.monotonic()))
        return [line["error"] for rank in range(2) for line in self.lines(rank) if "error" in line]


@pytest.fixture(scope="module")
def stage(tmp_path_factory) -> Stage:
    return Stage(tmp_path_factory.mktemp("stage") / "stage")


@pytest.fixture(scope="module")
def s3(tmp_path_factory, stage) -> Iterator[Store]:
    store = Store(tmp_path_factory.mktemp("store") / "server")
    try:
        store.start()
        for name, content in stage.files.items():
            store.put(f"{PREFIX}/{name}", content)
        yield store
    finally:
        store.close()


@pytest.fixture
def start(s3, stage, tmp_path) -> Iterator[Callable[..., Reading]]:
    """Start the ranks, on a cold cache for the first time; afterwards the store is as before."""
    numbers = iter(range(9))
    with contextlib.ExitStack() as stack:

        def begin(environment: dict[str, str] | None = None, **changes: Any) -> Reading:
            task = {
                "remote": REMOTE,
                "local": str(tmp_path / "cache"),
                "workers": 2,
                "shuffle": False,
                "pace_sec": 0.03,
            }
            given = s3.environment() if environment is None else environment
            return Reading(tmp_path / str(next(numbers)), stack, given, **{**task, "patience_sec": 60.0, **changes})

        yield begin
    s3.heal()
    for name in (LATE, "index.json"):
        s3.put(f"{PREFIX}/{name}", stage.files[name])


@pytest.fixture(scope="module")
def order(s3, stage, tmp_path_factory) -> list[list[list[int]]]:
    """What each rank gets of the dataset in a folder, unshuffled; each sample once."""
    with contextlib.ExitStack() as stack:
        keys = dict(remote=None, local=str(stage.folder), workers=2, shuffle=False, pace_sec=0.0, patience_sec=60.0)
        reading = Reading(tmp_path_factory.mktemp("order") / "0", stack, {}, **keys)
        assert reading.end(120.0) == []
        assert sorted(n for rank in reading.batches() for batch in rank for n in batch) == list(range(NUM_SAMPLES))
        return reading.batches()


def assert_stopped(reading: Reading, order, *cause: set[str], limit_sec: float = GRACE_SEC + PATIENCE_SEC) -> None:
    """An error has a word of each set, and what had arrived was right."""
    errors = reading.end(limit_sec)
    assert any(all(any(word in text for word in words) for words in cause) for text in errors), errors
    assert all(batches == owed[: len(batches)] for batches, owed in zip(reading.batches(), order, strict=True))


# --- the store ---


def test_healthy_in_shuffled_order(start):
    reading = start(shuffle=True)
    assert reading.end() == []
    assert sorted(n for rank in reading.batches() for batch in rank for n in batch) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("act, seconds", [("stop", 5.0), ("freeze", 12.0)], ids=["stopped", "frozen"])
def test_away_for_a_while(start, s3, order, act, seconds):
    reading = start().wait_until_early()
    getattr(s3, act)()
    time.sleep(seconds)
    assert reading.ranks[0].poll() is None, "everything had been read by then"
    s3.heal()
    assert reading.end() == [] and reading.batches() == order


@pytest.mark.parametrize("act", ["stop", "freeze"])
def test_away_for_good(start, s3, order, act):
    reading = start(patience_sec=PATIENCE_SEC).wait_until_early()
    getattr(s3, act)()
    assert_stopped(reading, order, {s3.address, REMOTE})


# --- objects ---


def flipped(content: bytes) -> bytes:
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]


def names_of(content: bytes) -> set[str]:
    return {xxhash.xxh64_hexdigest(content), f"{len(content):,} bytes"}


def test_corrupted_for_a_while(start, s3, stage, order):
    s3.put(f"{PREFIX}/{LATE}", stage.files["shard.00007.mds"])
    reading = start().wait_until_early()
    time.sleep(3.0)
    s3.put(f"{PREFIX}/{LATE}", stage.files[LATE])
    assert reading.end() == [] and reading.batches() == order


@pytest.mark.parametrize("damage", [flipped, lambda content: content[:30_000], None], ids=["flipped", "cut", "missing"])
def test_corrupted_for_good(start, s3, stage, order, damage):
    cause = [{f"{REMOTE}/{LATE}"}]
    if damage is None:
        s3.delete(f"{PREFIX}/{LATE}")
    else:
        s3.put(f"{PREFIX}/{LATE}", bad := damage(stage.files[LATE]))
        cause += [names_of(stage.files[LATE]), names_of(bad)]
    assert_stopped(start(patience_sec=PATIENCE_SEC), order, *cause)


def test_broken_index(start, s3, stage, order):
    s3.put(f"{PREFIX}/index.json", stage.files["index.json"][:5000])
    assert_stopped(start(patience_sec=PATIENCE_SEC), order, {"index.json"})


# --- the cache and the trainer, at a second start ---


def test_a_damaged_cache_with_leftovers(start, stage, order, tmp_path):
    assert start(pace_sec=0.0).end() == []
    cache = tmp_path / "cache"
    shards = sorted(cache.rglob("shard.*.mds"))
    for path, damage in zip(shards[20:], (flipped, lambda content: content[:100], lambda content: b""), strict=False):
        times = path.stat()
        path.write_bytes(damage(path.read_bytes()))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    (cache / "index.json").write_bytes(stage.files["index.json"][:5000])
    (cache / f"{LATE}.4D2f8A1c").write_bytes(b"half")
    reading = start(pace_sec=0.0)
    assert reading.end() == [] and reading.batches() == order


def test_killed_trainers_take_their_workers_along_and_a_new_start_reads_everything(start, order):
    reading = start().wait_until_early()
    groups = [process.pid for process in reading.ranks]
    for process in reading.ranks:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
    deadline = time.monotonic() + 10
    while any(subprocess.run(["pgrep", "-g", str(group)], stdout=-3).returncode == 0 for group in groups):
        assert time.monotonic() < deadline, "their workers live on"
        time.sleep(0.1)
    again = start(pace_sec=0.0)
    assert again.end() == [] and again.batches() == order


def test_a_full_disk(start, order, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1400k", "easel-store-test", str(small)]
    if os.getuid() or subprocess.run(mount, capture_output=True, timeout=20).returncode:
        pytest.skip("no right to mount a small disk here")
    try:
        assert_stopped(
            start(local=str(small / "cache"), patience_sec=PATIENCE_SEC), order, {"No space left"}, {str(small)}
        )
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True, timeout=20)


# --- what a user gets wrong ---


def test_no_bucket(start, order):
    assert_stopped(start(remote="s3://easel-absent/stage", patience_sec=PATIENCE_SEC), order, {"easel-absent"})


@pytest.mark.parametrize("given", [{"secret": "another"}, {"user": GUEST, "secret": SECRET}], ids=["secret", "user"])
def test_no_permission(start, s3, order, given):
    if s3.kind == "moto":
        pytest.skip("moto asks for no credentials")
    denied = {"403", "Forbidden", "AccessDenied", "denied", "credential", "SignatureDoesNotMatch"}
    reading = start(s3.environment(**given), patience_sec=PATIENCE_SEC)
    assert_stopped(reading, order, {REMOTE, s3.address}, denied)
