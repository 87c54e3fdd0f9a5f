"""The faults: what is done to the store, the cache or the trainer, and what a trustworthy reader makes of it.

Each is a function of a round, which gives it a reader of one kind, a cache that is empty, and the store in order. It
returns the verdict. A fault that heals has to end in a whole epoch in the right order; one that stays, in an exception that
names what it was, soon after patience has run out.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from tests.store.dataset import NUM_SAMPLES, Stage
from tests.store.reader_outcomes import LEFT, MISSED, RIGHT, Orders, Reading, Verdict, judge
from tests.store.server import BUCKET, GUEST, SECRET, Store

PREFIX = "stage"
EARLY = 0.2  # of the epoch: when what happens in its middle happens
LATE_SHARD = "shard.00024.mds"  # the readers ask for it in the middle of the epoch
PATIENCE_SEC = 8.0  # of ours, for a store that stays away
LONG_PATIENCE_SEC = 60.0  # of ours, for one that comes back
GRACE_SEC = 60.0  # after which ours must have ended
PLAIN_LIMIT_SEC = 20.0
# Beyond the limit plain streaming waits for what never comes: a shard that a dead thread has left as being prepared. Only
# with mixed answers, on a healthy store, may it be waiting for its download_timeout (60 s) and then go on.
PLAIN_STALL_SEC = 90.0
PLAIN_TIMEOUT_SEC = 2.0  # streaming's download_timeout where a server is silent for ever; its default is 60
AWAY_SEC, FROZEN_SEC, BAD_SEC = 5.0, 12.0, 3.0
SLOW_BYTES_PER_SEC = 400_000.0
WORKERS_END_SEC = 10.0


class Skipped(Exception):
    """The fault cannot be made here; the message says why."""


class Round:
    """One try of a fault with one kind of reader.

    Attributes:
        number: counts from 0; faults that come in several forms take one after the other.
        cache: folder for data.local; not there yet.
    """

    def __init__(self, kind: str, number: int, store: Store, stage: Stage, folder: Path, orders: dict[bool, Orders]):
        self.kind, self.number, self.store, self.stage, self.folder = kind, number, store, stage, folder
        self.cache = folder / "cache"
        self.remote = f"s3://{BUCKET}/{PREFIX}"
        self.cause: list[set[str]] = []
        self._orders = orders
        self._readings: list[tuple[Reading, bool]] = []

    @property
    def is_ours(self) -> bool:
        return self.kind == "ours"

    @property
    def names_of_shard(self) -> set[str]:
        """How an error may call the shard that is hurt; from ours its whole address is expected."""
        return {f"{self.remote}/{LATE_SHARD}"} if self.is_ours else {LATE_SHARD}

    @property
    def files(self) -> dict[str, bytes]:
        """The stage as it was written: name -> content."""
        return self.stage.files

    def start(self, *, index: bytes | None = None, cold: bool = False, **changes: Any) -> Reading:
        """Start the ranks.

        Args:
            index: what plain streaming finds as index.json in its cache, where there is none; default: the right one. Its
                workers then share no connection with the rank, which mixes their answers on a healthy store too: that is a
                row of its own, and would cover up the others.
            cold: let plain streaming fetch its index too.
            changes: arguments of Reading.
        """
        given = {"remote": self.remote, "local": str(self.cache), "environment": self.store.environment(), **changes}
        if self.is_ours:
            given.setdefault("patience_sec", LONG_PATIENCE_SEC)
        else:
            given.pop("patience_sec", None)
            if not cold and not Path(given["local"], "index.json").exists():
                Path(given["local"]).mkdir(parents=True, exist_ok=True)
                Path(given["local"], "index.json").write_bytes(self.files["index.json"] if index is None else index)
        reading = Reading(self.kind, self.folder / f"reading{len(self._readings)}", **given)
        self._readings.append((reading, given.get("shuffle", False)))
        return reading

    def finish(self, reading: Reading, after_sec: float = 0.0, plain_sec: float = PLAIN_LIMIT_SEC) -> Verdict:
        """Wait for its end and judge it. `after_sec`: what ours may take beyond its grace."""
        limit_sec = GRACE_SEC + after_sec if self.is_ours else plain_sec + after_sec
        reading.finish(limit_sec, launcher=not self.is_ours)
        shuffle = next(shuffle for known, shuffle in self._readings if known is reading)
        return judge(reading, NUM_SAMPLES, self._orders[shuffle] if self.is_ours else None, self.cause)

    def fill_cache(self) -> Verdict | None:
        """Fill the cache as a first run does; return what went wrong, if anything did."""
        if not self.is_ours:  # by hand: its own first run may go wrong, which is another row of the table
            shutil.copytree(self.stage.folder, self.cache)
            (self.cache / "dataset.json").unlink()
            return None
        verdict = self.finish(self.start(pace_sec=0.0))
        return None if verdict.outcome == RIGHT else Verdict(verdict.outcome, f"at the first start: {verdict.detail}")

    def cached(self, name: str) -> Path:
        """Return the place of a file in the cache."""
        return next(self.cache.rglob(name))

    def put(self, name: str, content: bytes) -> None:
        """Put something else in an object's place."""
        self.store.put(f"{PREFIX}/{name}", content)

    def close(self) -> None:
        """Kill what is left of the readers."""
        for reading, _ in self._readings:
            reading.close()


@contextlib.contextmanager
def afterwards(act: Callable[[], None]) -> Iterator[None]:
    """Put something right again, whatever happens."""
    try:
        yield
    finally:
        act()


def in_the_middle(at: Round, **changes: Any) -> Reading:
    """Start the ranks and return when a fifth of the epoch has arrived, or it is clear that it will not."""
    reading = at.start(**changes)
    reading.wait_for(EARLY, GRACE_SEC if at.is_ours else PLAIN_LIMIT_SEC)
    return reading


def missed_unless(happened: bool, verdict: Verdict) -> Verdict:
    """A round whose fault came too late proves nothing."""
    return verdict if happened or verdict.outcome != RIGHT else Verdict(MISSED, "everything had been read by then")


# --- the store ---


def healthy(at: Round) -> Verdict:
    """No fault: a cold cache, in shuffled order, so that all workers want all shards at once."""
    return at.finish(at.start(shuffle=True, cold=True), plain_sec=PLAIN_STALL_SEC)


def _away_for_a_while(at: Round, leave: Callable[[], None], seconds: float) -> Verdict:
    at.cause = [{at.store.address, at.remote}]
    reading, began = in_the_middle(at), time.monotonic()
    with afterwards(at.store.heal):
        leave()
        time.sleep(seconds)
    seconds = time.monotonic() - began
    reading.look()
    happened = reading.progress < 1
    return missed_unless(happened, at.finish(reading, after_sec=seconds))


def stopped_for_a_while(at: Round) -> Verdict:
    """Refused connections, then the same store again."""
    return _away_for_a_while(at, at.store.stop, max(0.0, AWAY_SEC - at.store.start_sec))


def stopped_for_good(at: Round) -> Verdict:
    """Refused connections to the end."""
    at.cause = [{at.store.address, at.remote}]
    reading = in_the_middle(at, patience_sec=PATIENCE_SEC)
    with afterwards(at.store.heal):
        at.store.stop()
        return at.finish(reading, after_sec=PATIENCE_SEC)


def frozen_for_a_while(at: Round) -> Verdict:
    """Connections are accepted and nothing is answered, then everything is."""
    return _away_for_a_while(at, at.store.freeze, FROZEN_SEC)


def frozen_for_good(at: Round) -> Verdict:
    """Connections are accepted and nothing is ever answered."""
    at.cause = [{at.store.address, at.remote}]
    reading = in_the_middle(at, patience_sec=PATIENCE_SEC, timeout_sec=PLAIN_TIMEOUT_SEC)
    with afterwards(at.store.heal):
        at.store.freeze()
        return at.finish(reading, after_sec=PATIENCE_SEC, plain_sec=2 * PLAIN_LIMIT_SEC)


def slowed(at: Round) -> Verdict:
    """A narrow way to the store: the epoch takes three times as long."""
    with at.store.slowed(SLOW_BYTES_PER_SEC) as port:
        return at.finish(at.start(environment=at.store.environment(port=port)), after_sec=PLAIN_LIMIT_SEC)


# --- objects ---


def damage(content: bytes, other: bytes, form: int) -> bytes:
    """Return bad bytes: one bit flipped, cut, or those of another shard."""
    half = len(content) // 2
    flipped = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
    return [flipped, content[:half], other][form % 3]


def corrupt(at: Round) -> bytes:
    """Put bad bytes in the place of a shard that will be wanted in the middle of the epoch, and return them."""
    bad = damage(at.files[LATE_SHARD], at.files["shard.00007.mds"], at.number)
    at.put(LATE_SHARD, bad)
    return bad


def corrupted_for_a_while(at: Round) -> Verdict:
    """Bad bytes, and the good ones again some seconds after they were first fetched."""
    with afterwards(lambda: at.put(LATE_SHARD, at.files[LATE_SHARD])):
        corrupt(at)
        at.cause = [{LATE_SHARD}]
        reading = in_the_middle(at)
        time.sleep(BAD_SEC)
    return at.finish(reading, after_sec=BAD_SEC)


def corrupted_for_good(at: Round) -> Verdict:
    """Bad bytes to the end: the error names the object, and what it should have been and was."""
    with afterwards(lambda: at.put(LATE_SHARD, at.files[LATE_SHARD])):
        bad = corrupt(at)
        at.cause = [at.names_of_shard]
        if at.is_ours:
            at.cause += [_names_of(at.files[LATE_SHARD]), _names_of(bad)]
        return at.finish(at.start(patience_sec=PATIENCE_SEC), after_sec=PATIENCE_SEC)


def _names_of(content: bytes) -> set[str]:
    return {xxhash.xxh64_hexdigest(content), f"{len(content)} bytes", f"{len(content):,} bytes"}


def missing(at: Round) -> Verdict:
    """A shard that the index lists is not there."""
    at.cause = [at.names_of_shard]
    with afterwards(lambda: at.put(LATE_SHARD, at.files[LATE_SHARD])):
        at.store.delete(f"{PREFIX}/{LATE_SHARD}")
        return at.finish(at.start(patience_sec=PATIENCE_SEC), after_sec=PATIENCE_SEC)


def broken_index(at: Round) -> Verdict:
    """The store's index.json is cut, says something else, or is empty."""
    at.cause = [{"index.json"}]
    with afterwards(lambda: at.put("index.json", at.files["index.json"])):
        bad = _broken_index(at.files["index.json"], at.number)
        at.put("index.json", bad)
        return at.finish(at.start(index=bad, patience_sec=PATIENCE_SEC), after_sec=PATIENCE_SEC)


def _broken_index(content: bytes, form: int) -> bytes:
    """Return an index that is cut, that wants another digest of a shard, or that is empty."""
    changed = json.loads(content)
    hashes = changed["shards"][3]["raw_data"]["hashes"]
    hashes.update({name: digest[::-1] for name, digest in hashes.items()})
    return [content[: len(content) // 2], json.dumps(changed).encode(), b""][form % 3]


# --- the cache, at a second start ---


def cached_shard(at: Round, change: Callable[[Path], None]) -> Verdict:
    """Fill the cache, change a shard in it, start again."""
    if verdict := at.fill_cache():
        return verdict
    change(at.cached(LATE_SHARD))
    at.cause = [{LATE_SHARD}]
    return at.finish(at.start(pace_sec=0.0))


def _flip(path: Path) -> None:
    times = path.stat()
    path.write_bytes(damage(path.read_bytes(), b"", 0))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


CACHED_CHANGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "cache_cut": ("truncated", lambda path: os.truncate(path, path.stat().st_size // 2)),
    "cache_flipped": ("flipped", _flip),  # a disk that does this leaves the file's size and time as they are
    "cache_emptied": ("empty", lambda path: os.truncate(path, 0)),
}


def cached_index_broken(at: Round) -> Verdict:
    """The cache's index.json is cut, says something else, or is empty."""
    if verdict := at.fill_cache():
        return verdict
    path = at.cached("index.json")
    path.write_bytes(_broken_index(path.read_bytes(), at.number))
    at.cause = [{"index.json"}]
    return at.finish(at.start(pace_sec=0.0))


def leftovers(at: Round) -> Verdict:
    """The cache of a client that was killed in its first downloads: whole shards, pieces, half an index.json.tmp."""
    at.cache.mkdir()
    for name in ("shard.00000.mds", "shard.00001.mds"):
        (at.cache / name).write_bytes(at.files[name])
    half = at.files[LATE_SHARD][:30000]
    for name in (f"{LATE_SHARD}.4D2f8A1c", f"{LATE_SHARD}.tmp"):
        (at.cache / name).write_bytes(half)
    (at.cache / "index.json.tmp").write_bytes(at.files["index.json"][:5000])
    at.cause = [{"index.json"}]
    return at.finish(at.start(cold=True, pace_sec=0.0))


# --- the machine, and what a user gets wrong ---


def killed(at: Round) -> Verdict:
    """The trainers are killed in the middle; their workers have to end too, and a new start has to read everything."""
    reading = in_the_middle(at)
    reading.kill_trainers()
    left = reading.workers_left(WORKERS_END_SEC)
    if left:
        reading.close()
        return Verdict(LEFT, f"{left} of their processes lived on for {WORKERS_END_SEC:.0f} s")
    return at.finish(at.start(pace_sec=0.0))


def disk_full(at: Round) -> Verdict:
    """The cache's disk holds half of the stage."""
    small = at.folder / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1400k", "easel-store-test", str(small)]
    if os.getuid() or subprocess.run(mount, capture_output=True, timeout=20).returncode:
        raise Skipped("no right to mount a small disk here")
    at.cause = [{"No space left", "no space", "full"}, {str(small)}]
    with afterwards(lambda: _unmount(at, small)):
        return at.finish(at.start(local=str(small / "cache"), patience_sec=PATIENCE_SEC), after_sec=PATIENCE_SEC)


def _unmount(at: Round, folder: Path) -> None:
    at.close()
    if subprocess.run(["umount", str(folder)], capture_output=True, timeout=20).returncode:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


DENIED = {"403", "Forbidden", "AccessDenied", "denied", "permission", "credential", "SignatureDoesNotMatch"}


def no_bucket(at: Round) -> Verdict:
    """The address names a bucket that is not there."""
    at.remote = "s3://easel-absent/stage"
    at.cause = [{"easel-absent"}]
    return at.finish(at.start(cold=True, patience_sec=PATIENCE_SEC), after_sec=PATIENCE_SEC)


def wrong_credentials(at: Round) -> Verdict:
    """The secret is another one."""
    return _as_user(at, at.store.environment(secret="another"))


def no_permission(at: Round) -> Verdict:
    """The store knows the user, who may not read there."""
    return _as_user(at, at.store.environment(user=GUEST, secret=SECRET))


def _as_user(at: Round, environment: dict[str, str]) -> Verdict:
    if at.store.kind == "moto":
        raise Skipped("moto asks for no credentials")
    at.cause = [{at.remote, at.store.address}, DENIED]
    reading = at.start(cold=True, environment=environment, patience_sec=PATIENCE_SEC)
    return at.finish(reading, after_sec=PATIENCE_SEC)


@dataclass(frozen=True)
class Fault:
    """A row of the table."""

    text: str
    act: Callable[[Round], Verdict]
    heals: bool = True


FAULTS = {
    "healthy": Fault("no fault, cold cache", healthy),
    "stopped": Fault(f"store stopped for {AWAY_SEC:.0f} s in mid-epoch", stopped_for_a_while),
    "stopped_for_good": Fault("store stopped for good", stopped_for_good, heals=False),
    "frozen": Fault(f"store frozen for {FROZEN_SEC:.0f} s", frozen_for_a_while),
    "frozen_for_good": Fault("store frozen for good", frozen_for_good, heals=False),
    "slowed": Fault("store slowed", slowed),
    "corrupted": Fault("object corrupted for a while", corrupted_for_a_while),
    "corrupted_for_good": Fault("object corrupted for good", corrupted_for_good, heals=False),
    "missing": Fault("object missing", missing, heals=False),
    "index": Fault("index.json broken on the store", broken_index, heals=False),
    **{
        name: Fault(f"cached shard {text}", lambda at, change=change: cached_shard(at, change))
        for name, (text, change) in CACHED_CHANGES.items()
    },
    "cache_index": Fault("cached index.json broken", cached_index_broken),
    "cache_leftovers": Fault("left-over temporary files in the cache", leftovers),
    "killed": Fault("trainer killed (-9), started again", killed),
    "disk_full": Fault("cache's disk full", disk_full, heals=False),
    "no_bucket": Fault("bucket absent", no_bucket, heals=False),
    "wrong_credentials": Fault("wrong credentials", wrong_credentials, heals=False),
    "no_permission": Fault("no permission", no_permission, heals=False),
}
