"""The shards on this machine: fetched once for all its processes, checked against their digests, evicted under a limit.

Several processes read a dataset together: the ranks of a run, their loader workers, and maybe other runs. They share:

1. within a run on this machine, anonymous memory (`SharedStates`), of which nothing is left however the run ends
    states         a state for each shard:
      REMOTE       not checked by this run, although its file may be here: at the start, after an eviction or a canceled fetch
      PREPARING    a thread is fetching it or checking its digest; processes that need it wait in `ensure_shard`
      LOCAL        here, and its digest was checked by this run
      FAILED       unavailable until the run ends; every process looks for this state and fails (mds/reader.py)
    failure        the message of the first failure
    locked()       held while a shard is claimed and while room is made
2. among all runs that use a cache folder, two files in it (`CacheFolder`)
    .in_use        each run holds a shared lock; a run that starts alone holds an exclusive one while it cleans up
    .cache_state   for each shard its bytes in the folder, reserved ones included, and the time when it was last read. The
                   byte with a shard's number is locked by the process that fetches or evicts it

The kernel releases the locks of a killed process.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from common import dist
from common.errors import ConfigError, Failed
from common.value_types import bytes_to_int
from mds.fetch import INDEX, FetchCancelled, RetryingStream, StreamFailure, log_while_waiting
from mds.index import parse_index
from mds.shard_table import Shards, ShardTable
from ranks import collectives

POLL_SEC = 0.01  # between two looks at another process's progress
ROOM_SEC = 0.1  # the same while the cache is full of shards that are being fetched
FAILURE_BYTES = 4096
MARK_FILE, STATE_FILE = ".in_use", ".cache_state"
IN_USE = "data.local: {} is in use by a run that reads another dataset. Give each dataset a separate folder."
MAX_TRIED = 64  # candidates for an eviction in a folder: other runs may be fetching some of them


class ShardState(enum.IntEnum):
    """What a run knows of a shard; see above."""

    REMOTE = 0
    PREPARING = 1
    LOCAL = 2
    FAILED = 3


REMOTE, PREPARING, LOCAL, FAILED = map(int, ShardState)  # comparing numpy's numbers with an enum takes 4 us


def _on_one_rank_of_each_machine(work: Callable[[], None]) -> None:
    """Let one process of each machine do what the others wait for.

    Raises:
        StreamFailure, ConfigError: on all ranks, if it does on one.
    """

    def work_or_refuse() -> None:
        try:
            work()
        except StreamFailure as error:
            raise Failed(str(error)) from error
        except OSError as error:
            raise ConfigError([f"data.local: {error}. Give a folder that this user may write in."]) from error

    try:
        collectives.on_one_rank_of_each_machine(work_or_refuse)
    except Failed as error:
        raise StreamFailure(str(error)) from error


class SharedStates:
    """What the processes of a run share on this machine; all ranks construct it together."""

    def __init__(self, num_shards: int):
        num_bytes, path = FAILURE_BYTES + num_shards, ""

        def make() -> None:
            nonlocal path
            self._file = open(os.memfd_create("easel"), "r+b")  # noqa: SIM115  # as long as this lives
            self._file.truncate(num_bytes)
            path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

        _on_one_rank_of_each_machine(make)
        path = dist.all_gather_object(path)[dist.get_global_rank() - dist.get_local_rank()]
        if dist.get_local_rank():
            self._file = open(path, "r+b")  # noqa: SIM115  # as long as this lives
        self._memory = mmap.mmap(self._file.fileno(), num_bytes)
        self._lock = threading.Lock()
        self.states = np.frombuffer(self._memory, np.uint8, num_shards, FAILURE_BYTES)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude all other threads, of this process and of the others."""
        with self._lock:
            _lock(self._file, 0, 0)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    @property
    def failure(self) -> str:
        """The message of the first failure; "": there is none."""
        return self._memory[:FAILURE_BYTES].rstrip(b"\0").decode(errors="ignore")

    def note_failure(self, text: str) -> None:
        """Keep the first message where every process of this machine finds it: any of them may be the first to report."""
        with self.locked():
            if not self.failure:
                content = text.encode()[:FAILURE_BYTES]
                self._memory[: len(content)] = content


class CacheFolder:
    """What the runs that use a cache folder share; one rank of each machine calls `reset` or `check` first."""

    def __init__(self, folder: Path, num_shards: int):
        self._file = open(folder / STATE_FILE, "r+b")  # noqa: SIM115  # as long as this lives
        memory = mmap.mmap(self._file.fileno(), 16 * num_shards)
        self.num_bytes = np.frombuffer(memory, np.int64, num_shards)
        self.read_at = np.frombuffer(memory, np.int64, num_shards, 8 * num_shards)
        """Nanoseconds since 1970; negative: not read since the folder was cleaned up."""

    @staticmethod
    def enter(folder: Path) -> tuple[IO[bytes], bool]:
        """Return a lock on a folder, and whether it is exclusive: no other run uses the folder, and new ones wait."""
        folder.mkdir(parents=True, exist_ok=True)
        mark = open(folder / MARK_FILE, "a+b")  # noqa: SIM115  # as long as the run uses the folder
        _share_with_users_of(folder, mark)
        with log_while_waiting(lambda: f"waiting for another run that is cleaning up {folder}"):
            while True:
                for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):
                    with contextlib.suppress(BlockingIOError):
                        fcntl.flock(mark, kind | fcntl.LOCK_NB)
                        return mark, kind == fcntl.LOCK_EX
                time.sleep(ROOM_SEC)

    @staticmethod
    def reset(folder: Path, bytes_here: NDArray[np.int64]) -> None:
        """Record the bytes that earlier runs have left of each shard; under an exclusive lock."""
        # A new file: a thread of a run that has just left the folder may still write to the memory of the old one.
        partial = folder / f"{STATE_FILE}.tmp"
        partial.unlink(missing_ok=True)
        with open(partial, "wb") as file:
            # These are evicted first, in reverse order: without shuffling the last shards are needed last.
            file.write(np.concatenate([bytes_here, -1 - np.arange(len(bytes_here))]).tobytes())
            _share_with_users_of(folder, file)
        partial.replace(folder / STATE_FILE)

    @staticmethod
    def check(folder: Path, num_shards: int) -> None:
        """Raise StreamFailure if the other runs in the folder read another dataset."""
        if (folder / STATE_FILE).stat().st_size != 16 * num_shards:
            raise StreamFailure(IN_USE.format(folder))

    def try_lock(self, number: int) -> bool:
        """Lock a shard; False: another process holds the lock. The states exclude the other threads of this process."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self, number: int) -> None:
        """Unlock a shard."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs from making room in this folder."""
        byte = 16 * len(self.num_bytes)
        _lock(self._file, byte, 1)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)


class ShardCache:
    """The shards of streams, on this machine.

    Fork: a store's client keeps its connection open. Forked workers would share its socket and get one another's answers:
    wrong data from a healthy store (seen with streaming 0.13.0). So each client is closed here; the next fetch opens another.

    Args:
        streams: the datasets, each in a separate folder.
        limit: of the bytes in the cache folders, index.json included; also as text, e.g. 100gb.

    Raises:
        StreamFailure: on all ranks, when a dataset's index is unavailable to one of them.
        ConfigError: on all ranks, when a folder cannot be written.
    """

    def __init__(self, streams: Sequence[RetryingStream], limit: int | str | None = None):
        self.streams = list(streams)
        self.limit = bytes_to_int(limit) if isinstance(limit, str) else limit
        self.changed = threading.Condition()  # notified when a shard's state changes, or this process fails
        self._marks: list[IO[bytes]] = []
        _on_one_rank_of_each_machine(self._open_folders)
        tables = [_read_table(stream) for stream in streams]
        self.shards = Shards([(table, of.local, of.adopted) for table, of in zip(tables, streams, strict=True)])
        self.samples_per_stream = [int(table.samples.sum()) for table in tables]
        self.samples_per_shard = np.concatenate([table.samples for table in tables])
        self.sample_ends = np.cumsum(self.samples_per_shard)
        """(shards,) number of the first sample after each shard."""
        self.shards_per_stream = [len(table) for table in tables]
        self.stream_per_shard = np.repeat(np.arange(len(tables), dtype=np.int32), self.shards_per_stream)
        cached = [table for table, of in zip(tables, streams, strict=True) if of.remote is not None]
        self.largest_bytes = max((int((table.raw_bytes + table.zip_bytes).max()) for table in cached), default=0)
        self._run = SharedStates(len(self.shards))
        self.states = self._run.states
        self._firsts = np.cumsum(self.shards_per_stream) - self.shards_per_stream
        self._folders = [
            None if of.remote is None else CacheFolder(Path(of.local), len(table))
            for table, of in zip(tables, streams, strict=True)
        ]
        self.index_bytes = sum(stream.index_bytes() for stream in streams)
        for stream in streams:
            if stream.client is not None:
                stream.client.clean_up()

    def _open_folders(self) -> None:
        """Fetch each dataset's index, and clean up the folders that no other run uses.

        One folder at a time, and without waiting for other ranks: another machine of this run may share the folders.

        Raises:
            StreamFailure: an index is unavailable, or other runs read another dataset in its folder.
        """
        for stream in self.streams:
            if stream.remote is None:
                continue
            folder = Path(stream.local)
            mark, is_alone = CacheFolder.enter(folder)
            self._marks.append(mark)
            if not is_alone and stream.has_other_index():
                raise StreamFailure(IN_USE.format(folder))
            stream.fetch_index()
            num_shards = len(_read_table(stream))
            if is_alone:
                stream.remove_leftovers()
                CacheFolder.reset(folder, stream.list_cached_bytes())
            else:
                CacheFolder.check(folder, num_shards)
            fcntl.flock(mark, fcntl.LOCK_SH)

    def close(self) -> None:
        """Release this run's locks on the folders."""
        while self._marks:
            mark = self._marks.pop()
            fcntl.flock(mark, fcntl.LOCK_UN)  # of the forked workers too
            mark.close()

    # --- a shard ---

    def locate(self, sample_ids: Sequence[int] | NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """# (B,) numbers of samples -> (B,) numbers of their shards, (B,) rows in these; int64. Raises IndexError."""
        ids = np.asarray(sample_ids, np.int64)
        shard_ids = np.searchsorted(self.sample_ends, ids, side="right")
        if ids.size and (ids.min() < 0 or shard_ids.max() == len(self.shards)):
            raise IndexError(f"samples {ids.min()} to {ids.max()}: the first is 0, the last {self.sample_ends[-1] - 1}")
        return shard_ids, ids - self.sample_ends[shard_ids] + self.samples_per_shard[shard_ids]

    def touch(self, shard_ids: NDArray[np.int64]) -> None:
        """Record that these shards are read now."""
        now = time.time_ns()
        for number, folder in enumerate(self._folders):
            if folder is not None:
                own = shard_ids if len(self._folders) == 1 else shard_ids[self.stream_per_shard[shard_ids] == number]
                folder.read_at[own - self._firsts[number]] = now

    def find_failure(self) -> str | None:
        """Return why a shard is unavailable to this run; None: none is."""
        return self._explain() if (self.states == FAILED).any() else None

    def _explain(self) -> str:
        return (
            self._run.failure
            or "data: a shard is unavailable to another process of this machine, whose message says why"
        )

    def ensure_shard(self, shard_id: int) -> None:
        """Return when a shard is here, fetched by another thread or process or by this one.

        Raises:
            StreamFailure: it is unavailable.
            FetchCancelled: nobody needs it any longer.
        """
        while self.states[shard_id] != LOCAL:
            self.prepare_shard(shard_id)

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Fetch a shard and check its digest, unless it is here, or another thread or process has claimed it.

        Args:
            blocking: wait until a claimed shard is no longer PREPARING; fetch a LOCAL shard whose file is gone.

        Raises: as `ensure_shard`.
        """
        state = self.states[shard_id]
        if state == FAILED:
            raise StreamFailure(self._explain())
        if (state == REMOTE or (state == LOCAL and blocking)) and self._claim(shard_id):
            self._fetch_claimed(shard_id)
        while blocking and self.states[shard_id] == PREPARING:
            self._wait(shard_id, POLL_SEC)

    def _claim(self, shard_id: int) -> bool:
        """Make a shard PREPARING; False: it is here, or already claimed."""
        with self._run.locked():
            state = self.states[shard_id]
            if state == REMOTE or (state == LOCAL and not Path(self.shards[shard_id].path).is_file()):
                self.states[shard_id] = PREPARING
                return True
            return False

    def _fetch_claimed(self, shard_id: int) -> None:
        """Fetch a shard that this thread has claimed. It is no longer PREPARING when this ends, by an error too."""
        outcome = FAILED
        try:
            with self._reserved(shard_id):
                self.streams[self.stream_per_shard[shard_id]].prepare_shard(self.shards[shard_id])
                outcome = LOCAL
        except FetchCancelled:
            outcome = REMOTE
            raise
        except StreamFailure as error:
            self._run.note_failure(str(error))
            raise
        except BaseException as error:
            text = f"data: {type(error).__name__}: {error}"
            self._run.note_failure(text)
            if not isinstance(error, Exception):
                raise
            raise StreamFailure(text) from error
        finally:
            with self.changed:
                self.states[shard_id] = outcome
                self.changed.notify_all()

    def _wait(self, shard_id: int, seconds: float) -> None:
        """Wait for a change, or for some time. Raises FetchCancelled: nobody needs the shard any longer."""
        if not self.streams[self.stream_per_shard[shard_id]].is_wanted():
            raise FetchCancelled(f"data: {self.shards[shard_id].name} is not needed any longer")
        with self.changed:
            self.changed.wait(seconds)

    # --- room ---

    @contextlib.contextmanager
    def _reserved(self, shard_id: int) -> Iterator[None]:
        """Lock a shard against other runs, and reserve room for it."""
        stream = int(self.stream_per_shard[shard_id])
        folder, number, shard = self._folders[stream], shard_id - int(self._firsts[stream]), self.shards[shard_id]
        if folder is None:  # it is read in place
            yield
            return
        while not folder.try_lock(number):
            self._wait(shard_id, POLL_SEC)
        try:
            while not self._make_room(folder, number, shard.max_bytes):
                self._wait(shard_id, ROOM_SEC)
            yield
        finally:
            folder.num_bytes[number] = _size_of(shard.path)
            folder.read_at[number] = time.time_ns()
            folder.unlock(number)

    def _make_room(self, folder: CacheFolder, number: int, max_bytes: int) -> bool:
        """Evict the shards that were read longest ago, and reserve room; False: what is left is being fetched.

        Raises:
            StreamFailure: the shard is larger than the limit.
        """
        with self._run.locked(), folder.locked():
            needed = int(folder.num_bytes[number]) or max_bytes
            usage = self.usage() - int(folder.num_bytes[number])
            while self.limit and usage + needed > self.limit:
                if (evicted := self._evict_coldest()) is None:
                    if folder.num_bytes[number]:
                        break  # its file is here and needs no more room
                    if usage > self.index_bytes:
                        return False
                    problem = (
                        f"{self.limit:,} bytes cannot hold a shard of {needed:,} next to index.json ({usage:,} bytes)"
                    )
                    raise StreamFailure(f"data.cache_limit: {problem}. Give a larger one, or null.")
                usage -= evicted
            folder.num_bytes[number] = needed
            return True

    def usage(self) -> int:
        """Return the bytes in the run's cache folders, reserved ones included."""
        return self.index_bytes + sum(int(folder.num_bytes.sum()) for folder in self._folders if folder is not None)

    def _evict_coldest(self) -> int | None:
        """Evict the shard that was read longest ago, and return its bytes; None: all are being fetched."""
        coldest: list[tuple[int, CacheFolder, int, int]] = []
        for stream, folder in enumerate(self._folders):
            if folder is not None:
                own = slice(int(self._firsts[stream]), int(self._firsts[stream]) + self.shards_per_stream[stream])
                numbers = np.flatnonzero((folder.num_bytes > 0) & (self.states[own] != PREPARING))
                some = numbers[np.argsort(folder.read_at[numbers], kind="stable")[:MAX_TRIED]]
                coldest += [(int(folder.read_at[number]), folder, int(number), own.start) for number in some]
        for _, folder, number, first in sorted(coldest, key=lambda each: each[0]):
            if not folder.try_lock(number):
                continue  # another run is fetching it
            Path(self.shards[first + number].path).unlink(missing_ok=True)
            num_bytes, folder.num_bytes[number] = int(folder.num_bytes[number]), 0
            if self.states[first + number] == LOCAL:
                self.states[first + number] = REMOTE
            folder.unlock(number)
            return num_bytes
        return None


def _lock(file: IO[bytes], begin: int, length: int) -> None:
    """Lock bytes of a file for this process. `length` 0: all bytes from `begin` on.

    These locks belong to processes, not threads. So the kernel may report a deadlock (EDEADLK) where two threads of each of
    two processes wait for one another, although another of their threads will release its lock.
    """
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX, length, begin)
            return
        except OSError as error:
            if error.errno != errno.EDEADLK:
                raise
        time.sleep(POLL_SEC)


def _read_table(stream: RetryingStream) -> ShardTable:
    """Return a dataset's shards; of a third-party one without empty ones."""
    if stream.table is None:
        text = Path(stream.local, INDEX).read_bytes()
        stream.table = parse_index(stream.local, text, is_adopted=stream.adopted is not None).shards
    if stream.adopted is not None:
        stream.table = stream.table.without_empty()
    return stream.table


def _share_with_users_of(folder: Path, file: IO[bytes]) -> None:
    """Let every user who may write in a folder write to this file in it."""
    status = folder.stat()
    with contextlib.suppress(PermissionError):  # this user is not of the folder's group
        os.fchown(file.fileno(), -1, status.st_gid)
    with contextlib.suppress(PermissionError):  # another user made the file, and has shared it
        os.fchmod(file.fileno(), status.st_mode & 0o666)


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116  # as elsewhere: a Path takes twice as long
    except OSError:
        return 0
