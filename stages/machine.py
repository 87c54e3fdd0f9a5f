"""The stages that a machine's processes read together: folders, locks, and what each shard is doing.

What its processes share: where it lies, who sets it, who waits for it, and what ends it. The code is in the same order.

1. of the machine
    LOCK_FILE      file in data.local,      local rank 0, before it reads the index        nobody: a second run is refused
                   with data.remote alone
                                            ends with the process, or by `let_go`
    NNNNNN_easel   file in shared memory,   local rank 0: stages/shared_memory.py          nobody: a run takes a free one
                   locked                   ends with the process
    _reason_file   file, temporary folder   the thread that made a shard FAILED            nobody: read where FAILED is seen
                                            ends when the next run takes the same number of shared memory
2. of a shard, for all processes of the machine: `_shard_states` in shared memory. It is taken and evicted under the file
   lock at _cache_filelock_path; the thread that took it sets the outcome without the lock
    REMOTE         not opened by this run   the start; an eviction; a cancelled fetch      nobody
                   (its file may be here)
                                            ends with the next `prepare_shard`
    PREPARING      is being fetched         the first `prepare_shard` that finds REMOTE    who needs the shard: open_shard, in
                                                                                           any process
                                            ends by the same thread: LOCAL; FAILED; or REMOTE, where its epoch has ended
    LOCAL          here, digest compared    the thread that fetched it                     nobody
                                            ends with an eviction (data.cache_limit)
    FAILED         cannot be had            the thread that tried                          nobody
                                            ends with the run: every process looks for it, and fails (stages/stream.py)
    cache_usage    bytes that are LOCAL or  under the lock: who takes a shard, before a    `prepare_shard`, until another
                   PREPARING                byte of it is here; who evicts one             shard can be evicted
    _came          Condition of a process   a thread that sets a shard's outcome, or       open_shard; what other processes
                                            notes a failure                                fetch it sees POLL_SEC later
    and, where there is data.cache_limit, `_earlier_bytes` in shared memory: size of the file that an earlier run has left of
    a shard, set at the start; 0 from when this run wants the shard, or removes that file, under the same lock
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from composer.utils import dist
from filelock import FileLock, Timeout
from streaming import StreamingDataset
from streaming.base import dataset as streaming_dataset
from streaming.base.shared import SharedArray
from streaming.base.shared import prefix as streaming_prefix
from streaming.base.util import bytes_to_int

from cli import ranks
from cli.errors import ConfigError, Failed
from cli.private_api import require_private_api
from stages.fetch import INDEX, FetchCancelled, RetryingStream, StreamFailure
from stages.index_file import parsed_index
from stages.shard_table import Readers, ShardOfSample
from stages.shared_memory import LOCK_FILE, take_number

POLL_SEC = 0.01  # between two looks at what other processes do
ROOM_SEC = 0.1  # the same, of one that needs the lock: all that fits the cache is being fetched
FAILED = 255  # a state of a shard beside streaming's own
OWN_FOLDER = "Give each run a folder of its own, or wait for the other one."

OF_DATASET = (
    "_shard_states",
    "_shard_access_times",
    "_cache_filelock_path",
    "_shm_prefix_int",
    "prepare_shard",
    "get_item",
)
OF_DATASET += (
    "cache_usage",
    "cache_limit",
    "spanner",
    "shards",
    "stream_per_shard",
    "_evict_coldest_shard",
    "_evict_shard",
)
OF_MODULE = ("_ShardState.INVALID", "_ShardState.REMOTE", "_ShardState.LOCAL", "Spanner", "_get_path")
WHY = "shards that cannot be had are told from those that are waited for"
require_private_api(StreamingDataset, *OF_DATASET, why=WHY)
require_private_api("streaming.base.dataset", *OF_MODULE, why=WHY)
require_private_api("streaming.base.shared.prefix", "_check_and_find_retrying", why="a killed run is told by its lock")
ShardState: Any = getattr(streaming_dataset, "_ShardState", None)


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
        ranks.on_one_rank_of_each_machine(work_or_refuse)
    except Failed as error:
        raise StreamFailure(str(error)) from error


def _with_globals(function: Any, **changed: Any) -> Any:
    """Return a function of streaming's with other global names; nothing else in it is changed."""
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **changed},
        argdefs=function.__defaults__,
        closure=function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _construct(dataset: StreamingDataset, number: int, **arguments: Any) -> None:
    """Run streaming's constructor under this number of shared memory, with our map of samples to shards for its Spanner."""
    prefix = _with_globals(streaming_prefix.get_shm_prefix, _check_and_find_retrying=lambda *_, **__: number)
    _with_globals(StreamingDataset.__init__, Spanner=ShardOfSample, get_shm_prefix=prefix)(dataset, **arguments)


class MachineStages(StreamingDataset):
    """A StreamingDataset whose folders are this run's alone, and whose shards can fail.

    Fork: streaming's constructor keeps the client that it has fetched `index.json` with. Forked workers would share its
    socket, and their answers would mix: wrong data from a healthy store (seen with streaming 0.13.0).

    Args:
        streams: the stages, each in a folder of its own.
        cache_limit: most bytes of those that are not read in place, with index.json; or a text, e.g. 100gb.
        arguments: further keyword arguments of StreamingDataset.

    Raises:
        StreamFailure: on all ranks, when one of them cannot have a stage's index, or another run uses a folder.
        ConfigError: on all ranks, when a folder cannot be written.
    """

    def __init__(self, *, streams: Sequence[RetryingStream], cache_limit: int | str | None = None, **arguments: Any):
        folders = [Path(stream.local) for stream in streams if stream.remote is not None]
        self._locks = [FileLock(folder.resolve() / LOCK_FILE, is_singleton=True) for folder in folders]
        self._came = threading.Condition()
        self._number = 0
        _on_one_rank_of_each_machine(self._lock_folders)
        for stream in streams:
            _on_one_rank_of_each_machine(stream.fetch_index)
            if stream.table is None:
                text = Path(stream.local, INDEX).read_bytes()
                stream.table = parsed_index(stream.local, text, of_others=stream.adopted is not None).shards
        _on_one_rank_of_each_machine(self._take_number)
        number = dist.all_gather_object(self._number)[dist.get_global_rank() - dist.get_local_rank()]
        _construct(self, number, streams=list(streams), **arguments)
        # Beside streaming's own locks of this number; one that is left goes when the number is used again.
        name = f"{self._shm_prefix_int:06d}_reason_{os.getuid()}"
        self._reason_file = Path(self._cache_filelock_path).with_name(name)
        _on_one_rank_of_each_machine(lambda: self._reason_file.unlink(missing_ok=True))
        self._set_limit(cache_limit)
        self._is_cached = np.array([stream.remote is not None for stream in streams])[self.stream_per_shard]
        if self.cache_limit:
            name = streaming_dataset._get_path(self._shm_prefix_int, "earlier_bytes")
            self._earlier_bytes = SharedArray(self.num_shards, np.int64, name)
        _on_one_rank_of_each_machine(self._look_around)
        for stream in streams:
            stream._downloader.clean_up()

    # --- 1. the machine ---

    def _set_limit(self, given: int | str | None) -> None:
        """Set the cache's limit. Streaming's constructor compares it with what is read in place too, so it is given none."""
        self.cache_limit = bytes_to_int(given) if isinstance(given, str) else given
        cached = [stream for stream in self.streams if stream.remote is not None]
        sizes = (int((stream.table.raw_bytes + stream.table.zip_bytes).max()) for stream in cached)
        self.largest_bytes = max(sizes, default=0)

    def _lock_folders(self) -> None:
        """Keep other runs out of the cache folders, until the process ends or lets them go.

        streaming compares folders too, but not through a link, no longer once the other run has read its first batch (seen
        with 0.13.0), and with those of runs that were killed: its comparison is left out.
        """
        for lock in self._locks:
            folder = Path(lock.lock_file).parent
            folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except Timeout as error:
                given = f"{folder} is in use by another run on this machine"
                raise StreamFailure(f"data.local: {given}. {OWN_FOLDER}") from error

    def _take_number(self) -> None:
        self._number = take_number()

    def let_go(self) -> None:
        """Let another run have the cache folders, once all of this process's streams have let them go."""
        while self._locks:
            self._locks.pop().release()

    def _look_around(self) -> None:
        """Remove what killed fetches have left, and note what else earlier runs have."""
        for stream in self.streams:
            stream.remove_left_overs()
        if self.cache_limit:
            self._earlier_bytes[:] = np.concatenate([stream.bytes_here() for stream in self.streams])

    def _tell_others(self, text: str) -> None:
        """Leave the reason where every process of this machine finds it: any of them may be the first to report."""
        own = self._reason_file.with_name(f"{self._reason_file.name}_{os.getpid()}_{threading.get_ident()}")
        with contextlib.suppress(OSError):  # a full disk may be the reason
            own.write_text(text)
            own.replace(self._reason_file)  # whole: two threads may fail at once

    def _failed_elsewhere(self, shard_id: int) -> str:
        name = self.shards[shard_id].raw_data.basename
        with contextlib.suppress(OSError):
            if reason := self._reason_file.read_text():
                return reason
        return f"data: {name} could not be had by another process of this machine, whose message says why"

    # --- 2. a shard ---

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Fetch a shard and compare its digest, unless it is here, or another thread or process has begun with it.

        Args:
            blocking: wait for the end of what another one has begun, be it LOCAL or not; fetch a shard whose file is gone.

        Raises:
            StreamFailure: it cannot be had.
            FetchCancelled: nobody waits for it any more.
        """
        state = self._shard_states[shard_id]
        if state == FAILED:
            raise StreamFailure(self._failed_elsewhere(shard_id))
        if state == ShardState.INVALID:  # a thread has outlived its run, whose shared memory another one has taken
            raise FetchCancelled(f"data: {self.shards[shard_id].raw_data.basename} is of a run that has ended")
        is_open_to_all = state == ShardState.REMOTE or (state == ShardState.LOCAL and blocking)
        if is_open_to_all and self._take(shard_id):
            self._fetch(shard_id)
        while blocking and self._shard_states[shard_id] == ShardState.PREPARING:
            self._check_wanted(shard_id)
            with self._came:
                if self._shard_states[shard_id] == ShardState.PREPARING:
                    self._came.wait(POLL_SEC)

    def open_shard(self, shard_id: int) -> None:
        """Return when a shard is here: fetched ahead by another thread or process, or by this one, now. Raises: the same."""
        while int(self._shard_states[shard_id]) != ShardState.LOCAL:  # numpy's own comparison with an enum takes 4 us
            self.prepare_shard(shard_id)

    def _take(self, shard_id: int) -> bool:
        """Make a shard PREPARING, with room for it; False: it is here, or another one has begun with it."""
        shard = self.shards[shard_id]
        if self.cache_limit and self._is_cached[shard_id]:
            self._make_room(shard_id)
        while True:
            with FileLock(self._cache_filelock_path).acquire(poll_interval=POLL_SEC):
                is_here = self._shard_states[shard_id] == ShardState.LOCAL
                if is_here and not Path(shard.dirname, shard.raw_data.basename).is_file():  # somebody has removed it
                    self._shard_states[shard_id] = ShardState.REMOTE
                    self.cache_usage -= shard.raw_data.bytes if self._is_cached[shard_id] else 0
                if self._shard_states[shard_id] != ShardState.REMOTE:
                    return False
                if self._has_room(most := self._most_bytes(shard_id)):
                    self._shard_states[shard_id] = ShardState.PREPARING
                    self.cache_usage += most
                    return True
            self._check_wanted(shard_id)
            with self._came:
                self._came.wait(ROOM_SEC)

    def _has_room(self, num_bytes: int) -> bool:
        """Evict what was not read for the longest time; False: all is being fetched. The caller has the lock."""
        while self.cache_limit and self.cache_usage + num_bytes > self.cache_limit:
            states = self._shard_states.numpy()
            if ((states == ShardState.LOCAL) & self._is_cached).any():
                self._evict_coldest_shard()
            elif (states == ShardState.PREPARING).any():
                return False
            else:
                given = f"{self.cache_limit:,} bytes hold no shard of {num_bytes:,} beside {self.cache_usage:,} of index.json"
                raise StreamFailure(f"data.cache_limit: {given}. Give a larger one, or null.")
        return True

    def _fetch(self, shard_id: int) -> None:
        """Fetch a shard that this thread has taken; it is PREPARING no longer when this ends, however it does."""
        outcome, num_bytes, most = FAILED, 0, self._most_bytes(shard_id)
        try:
            num_bytes = self.streams[self.stream_per_shard[shard_id]].prepare_shard(self.shards[shard_id])
            outcome = ShardState.LOCAL
        except FetchCancelled:
            outcome = ShardState.REMOTE
            raise
        except StreamFailure as error:
            self._tell_others(str(error))
            raise
        except BaseException as error:
            text = f"data: {type(error).__name__}: {error}"
            self._tell_others(text)
            if not isinstance(error, Exception):
                raise
            raise StreamFailure(text) from error
        finally:
            self._shard_access_times[shard_id] = time.time_ns()
            with self._came:
                self._shard_states[shard_id] = outcome
                self._came.notify_all()
            if num_bytes != most:
                with FileLock(self._cache_filelock_path).acquire(poll_interval=POLL_SEC):
                    self.cache_usage += num_bytes - most

    def _most_bytes(self, shard_id: int) -> int:
        """Return what a shard takes of the cache at most; of one that is read in place, nothing."""
        return self.shards[shard_id].get_max_size() if self._is_cached[shard_id] else 0

    def _check_wanted(self, shard_id: int) -> None:
        """Raise FetchCancelled: nobody waits for a shard any more."""
        if not self.streams[self.stream_per_shard[shard_id]].is_wanted():
            raise FetchCancelled(f"data: {self.shards[shard_id].raw_data.basename} is waited for no longer")

    def _make_room(self, wanted_id: int) -> None:
        """Remove files of earlier runs that this one has not opened: streaming counts, and evicts, only what it has.

        The wanted shard's own stays, and so do, for as long as there is room, those with lower numbers: without shuffling
        they are wanted next.
        """
        with FileLock(self._cache_filelock_path):
            if self._shard_states[wanted_id] != ShardState.REMOTE:
                return  # another thread has begun with it: it would be counted twice
            earlier = self._earlier_bytes.numpy()
            own, earlier[wanted_id] = int(earlier[wanted_id]), 0
            num_bytes = own or self.shards[wanted_id].get_max_size()
            too_many = self.cache_usage + int(earlier.sum()) + num_bytes - self.cache_limit
            for shard_id in np.flatnonzero(earlier)[::-1] if too_many > 0 else ():
                shard = self.shards[shard_id]
                Path(shard.dirname, shard.raw_data.basename).unlink(missing_ok=True)
                too_many -= int(earlier[shard_id])
                earlier[shard_id] = 0
                if too_many <= 0:
                    break

    def _evict_coldest_shard(self) -> None:
        """Put the shard out of the cache that was read longest ago; never one of a stage that is read in place."""
        here = np.flatnonzero((self._shard_states.numpy() == ShardState.LOCAL) & self._is_cached)
        assert here.size, "_has_room has found one"
        self._evict_shard(int(here[self._shard_access_times.numpy()[here].argmin()]))

    @property
    def shards(self) -> Readers:
        """The readers of all shards; streaming's constructor sets an empty list, and adds those of each stream."""
        return self._readers

    @shards.setter
    def shards(self, given: Any) -> None:
        self._readers = given if isinstance(given, Readers) else Readers()

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        """Return a sample as streaming decodes it, from a shard whose digest this run has compared."""
        self.open_shard(int(self.spanner[sample_id][0]))
        return super().get_item(sample_id, retry)

    def places_of(self, sample_ids: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """# (B,) numbers of samples -> (B,) numbers of their shards, (B,) rows in these; int64."""
        sample_ids = np.asarray(sample_ids)
        shard_ids = np.searchsorted(self.sample_offset_per_shard, sample_ids, side="right") - 1
        return shard_ids, sample_ids - self.sample_offset_per_shard[shard_ids]
