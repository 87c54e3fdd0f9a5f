"""Batches of one stage or several, from a StreamingDataset that is safe to fork and whose failures are heard.

Each process that reads a stage (a loader worker; the trainer itself where data.workers=0) has four threads in an epoch:

    thread     whose        what it does                                                   method
    reader     its own      takes the numbers of a batch, reads the samples                _each_sample_id, read_batch
    prepare    streaming's  runs ahead and fetches shards                                  _prepare_thread
    ready      streaming's  waits for the shard of each sample, in order                   _ready_thread
    watch      ours         looks each second at what other processes have set             _watch

What they share: where it lies, who sets it, who waits for it, and what ends it. This file's code is in the same order.

1. of the machine
    LOCK_FILE      file in data.local,      local rank 0, before it reads the index        nobody: a second run is refused
                   with data.remote alone
                                            ends with the process, or by `let_go`
    _reason_file   file, temporary folder   the thread that made a shard FAILED            nobody: read where FAILED is seen
                                            ends when the next run takes the same number of shared memory
2. of a shard, for all processes of the machine: `_shard_states` in shared memory. It is taken and evicted under the lock
   _cache_filelock; the thread that took it sets the outcome without the lock
    REMOTE         not opened by this run   the start; an eviction; a cancelled fetch      nobody
                   (its file may be here)
                                            ends with the next `prepare_shard`
    PREPARING      is being fetched         the first `prepare_shard` that finds REMOTE    `ready` of every process; a reader
                                                                                           that needs the shard (open_shard)
                                            ends by the same thread: LOCAL; FAILED; or REMOTE, where its epoch has ended
    LOCAL          here, digest compared    the thread that fetched it                     nobody
                                            ends with an eviction (data.cache_limit)
    FAILED         cannot be had            the thread that tried                          nobody
                                            ends with the run: `_watch` of every process sees it and fails
3. of a process: its own memory
    _failure       text of the first one    any of the four threads, by `_fail`            nobody: the reader gives it on
    _event         streaming's              the same                                       nobody: all threads see it and end
                                            both end with the process
4. of an epoch in a process: its own memory
    it.*_index     how far each thread is   each of reader, prepare and ready its own      the reader: for `ready`; these two:
                                                                                           for the reader (predownload)
    is_wanted      of the RetryingStream    the reader, when the epoch begins              `fetch`, between two tries
    ended          an Event                 the reader, when the epoch ends, however       `watch`
                                            ends a wait for a store: FetchCancelled, the shard is REMOTE again

`ready`'s wait would have no end with streaming alone: it waits for LOCAL, and sees neither FAILED nor a PREPARING that went
back to REMOTE. `_watch` sees both: it fails, or fetches the shard itself. A reader's wait ends with PREPARING.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from composer.utils import dist
from filelock import FileLock, Timeout
from streaming import StreamingDataset
from streaming.base import dataset as streaming_dataset

from cli.errors import ConfigError
from cli.masking import printable
from cli.private_api import require_private_api
from stages.buckets import in_buckets
from stages.draws import Draw, draw_of
from stages.fetch import FetchCancelled, RetryingStream, StreamFailure
from stages.images import SampleError

FAILED = 255  # a state of a shard beside streaming's own
WATCH_SEC = 1.0
LOCK_FILE = ".in_use"  # in data.local
OWN_FOLDER = "Give each run a folder of its own, or wait for the other one."

Bad = tuple[int, str, str]
"""Of a sample that cannot be used: its number, its key, why."""
Used = TypeVar("Used")

WHY = "its failures reach the run"
OF_DATASET = ("_shard_states", "_shard_access_times", "_cache_filelock", "_cache_filelock_path", "_shm_prefix_int")
OF_DATASET += (
    "_event",
    "_get_work",
    "_share_work",
    "_each_sample_id",
    "_prepare_thread",
    "_ready_thread",
    "prepare_shard",
    "get_item",
)
OF_DATASET += ("_resume_incr_epoch",)
OF_EPOCH = ("sample_ids", "total", "prepare_index", "ready_index", "should_exit", "on_exit")
require_private_api(StreamingDataset, *OF_DATASET, "cache_usage", "cache_limit", "spanner", "shards", why=WHY)
require_private_api("streaming.base.dataset", *(f"_Iterator.{name}" for name in OF_EPOCH), why=WHY)
require_private_api("streaming.base.dataset", "_ShardState.REMOTE", "_ShardState.LOCAL", why=WHY)
ShardState: Any = getattr(streaming_dataset, "_ShardState", None)


@dataclass(frozen=True)
class Failure:
    """What an iteration gives instead of the numbers of a batch when there will be none."""

    text: str


def _on_one_rank_of_each_machine(work: Callable[[], None]) -> None:
    """Let one process of each machine do what the others wait for.

    Raises:
        StreamFailure, ConfigError: on all ranks, if it does on one.
    """
    error: StreamFailure | ConfigError | None = None
    if dist.get_local_rank() == 0:
        try:
            work()
        except (StreamFailure, ConfigError) as failure:
            error = failure
        except OSError as failure:
            error = ConfigError([f"data.local: {failure}. Give a folder that this user may write in."])
    said = None if error is None else (isinstance(error, ConfigError), str(error))
    for is_refusal, text in filter(None, dist.all_gather_object(said)):
        raise ConfigError([text]) if is_refusal else StreamFailure(text)


class BatchStream(StreamingDataset):
    """A StreamingDataset that gives whole batches, is safe to fork, and whose failures are heard.

    Batches: the items of an iteration are what `read_batch` makes of `batch_size` sample numbers; a rest at the end of an
    epoch that is no whole batch is left out. To be loaded with DataLoader(batch_size=None).

    Fork: streaming's constructor keeps the client that it has fetched `index.json` with. Forked workers would share its
    socket, and their answers would mix: wrong data from a healthy store (seen with streaming 0.13.0).

    Failures: an error in a thread of streaming's is only logged, and the epoch ends as if it were finished, or waits for a
    shard that nobody fetches any more (seen; mosaicml/streaming issues 307, 617). Here the thread's error becomes the item
    {"failure": [text]}, in every process of this machine that waits for the shard, and so does an epoch that owes batches.

    Speed: plain streaming takes a file lock for every sample to ask whether its shard is there, and opens, seeks and reads
    each by itself; that, not the bytes, is what its time goes to.

    Several streams are mixed in one order of samples, by their proportion, repeat or choose, as streaming does it. With
    buckets, this order is dealt into batches of one bucket each (stages/buckets.py).

    Args:
        streams: the stages, each in a folder of its own.
        sources: the number of each stream's data set; None: there is one.
        buckets: the number of each stream's bucket; None: there is one, and no order but streaming's.
        arguments: further keyword arguments of StreamingDataset.

    Raises:
        StreamFailure: on all ranks, when one of them cannot have a stage's index.
        ConfigError: on all ranks, when a folder cannot be written, or is in use by another run.
    """

    def __init__(
        self,
        *,
        streams: Sequence[RetryingStream],
        sources: Sequence[int] | None = None,
        buckets: Sequence[int] | None = None,
        **arguments: Any,
    ):
        self._failure: str | None = None
        self.sources = None if sources is None else torch.tensor(sources)
        self.buckets = None if buckets is None else np.asarray(buckets)
        self._begin_at = 0  # sample of an epoch, where it is dealt into buckets
        self.epoch = 0  # that is read
        folders = [Path(stream.local) for stream in streams if stream.remote is not None]
        self._locks = [FileLock(folder.resolve() / LOCK_FILE, is_singleton=True) for folder in folders]
        _on_one_rank_of_each_machine(self._lock_folders)
        for stream in streams:
            _on_one_rank_of_each_machine(stream.fetch_index)
        try:
            super().__init__(streams=list(streams), **arguments)
        except ValueError as error:
            if "Reused local directory" not in str(error):
                raise
            local = ", ".join(map(str, folders))
            given = f"{local} is in use by another run on this machine, or by shared memory that a run has left"
            raise ConfigError([f"data.local: {given} (then a line above says so). {OWN_FOLDER}"]) from error
        # Beside streaming's own locks of this number; one that is left goes when the number is used again.
        name = f"{self._shm_prefix_int:06d}_reason_{os.getuid()}"
        self._reason_file = Path(self._cache_filelock_path).with_name(name)
        _on_one_rank_of_each_machine(lambda: self._reason_file.unlink(missing_ok=True))
        for stream in streams:
            _on_one_rank_of_each_machine(stream.remove_left_overs)
            stream._downloader.clean_up()

    # --- 1. the machine ---

    def _lock_folders(self) -> None:
        """Keep other runs out of the cache folders, until the process ends or lets them go.

        streaming compares folders too, but no longer once the other run has read its first batch (seen with 0.13.0), and
        not through a link.
        """
        for lock in self._locks:
            folder = Path(lock.lock_file).parent
            folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except Timeout as error:
                given = f"{folder} is in use by another run on this machine"
                raise ConfigError([f"data.local: {given}. {OWN_FOLDER}"]) from error

    def let_go(self) -> None:
        """Let another run have the cache folders, once all of this process's streams have let them go."""
        while self._locks:
            self._locks.pop().release()

    def _tell_others(self, text: str) -> None:
        """Leave the reason where every process of this machine finds it: any of them may be the first to report."""
        with contextlib.suppress(OSError):  # a full disk may be the reason
            self._reason_file.write_text(text)

    def _failed_elsewhere(self, shard_id: int) -> str:
        name = self.shards[shard_id].raw_data.basename
        with contextlib.suppress(OSError):
            if reason := self._reason_file.read_text():
                return reason
        return f"data: {name} could not be had by another process of this machine, whose message says why"

    # --- 2. a shard ---

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Fetch a shard and compare its digest, unless it is here. Raises StreamFailure: it cannot be had."""
        state = self._shard_states[shard_id]
        if state == ShardState.LOCAL and not blocking:
            self._shard_access_times[shard_id] = time.time_ns()
            return
        if state == FAILED:
            raise StreamFailure(self._failed_elsewhere(shard_id))
        if self.cache_limit and state == ShardState.REMOTE:
            self._make_room(shard_id)
        try:
            super().prepare_shard(shard_id, blocking)
        except BaseException as error:
            if not isinstance(error, FetchCancelled):
                self._tell_others(str(error))
            # Left as PREPARING, it would be waited for for ever.
            self._shard_states[shard_id] = ShardState.REMOTE if isinstance(error, FetchCancelled) else FAILED
            with contextlib.suppress(AttributeError):
                self._cache_filelock.release(force=True)
            raise

    def open_shard(self, shard_id: int) -> None:
        """Prepare a shard that no iteration has prepared, before single samples of it are read."""
        if self._shard_states[shard_id] != ShardState.LOCAL:
            self.prepare_shard(shard_id)

    def _make_room(self, wanted_id: int) -> None:
        """Remove files of earlier runs that this one has not opened: streaming counts, and evicts, only what it has.

        The wanted shard's own stays, and so do, for as long as there is room, those with lower numbers: without shuffling
        they are wanted next.
        """
        with FileLock(self._cache_filelock_path):
            if self._shard_states[wanted_id] != ShardState.REMOTE:
                return  # another thread has begun with it: it would be counted twice
            not_opened = {
                shard_id: path
                for shard_id, (shard, state) in enumerate(zip(self.shards, self._shard_states.numpy(), strict=True))
                if state == ShardState.REMOTE and (path := Path(shard.dirname, shard.raw_data.basename)).is_file()
            }
            own = not_opened.pop(wanted_id, None)
            num_bytes = self.shards[wanted_id].get_max_size() if own is None else own.stat().st_size
            used = self.cache_usage + sum(path.stat().st_size for path in not_opened.values())
            for path in reversed(not_opened.values()):
                if used + num_bytes <= self.cache_limit:
                    break
                used -= path.stat().st_size
                path.unlink()

    # --- 3. a process ---

    def _fail(self, text: str) -> str:
        """Note the first failure of this process, and end its threads; return that one's text."""
        self._failure = self._failure or text
        if hasattr(self, "_event"):  # made by an iteration
            self._event.set()
        return self._failure

    def _until_failure(self, work: Callable[[Any], None], it: Any) -> None:
        """Run one of streaming's threads; streaming would only log its error, and wait for its end for ever."""
        try:
            work(it)
        except Exception as error:
            if not isinstance(error, FetchCancelled):
                self._fail(str(error) if isinstance(error, StreamFailure) else f"data: {type(error).__name__}: {error}")
            it.on_exit()

    def _prepare_thread(self, it: Any) -> None:
        self._until_failure(super()._prepare_thread, it)

    def _ready_thread(self, it: Any) -> None:
        self._until_failure(super()._ready_thread, it)

    def _watch(self, it: Any, ended: threading.Event) -> None:
        """Look for a shard that another process could not fetch, or has given up: nobody else will fetch it."""
        while not (ended.wait(WATCH_SEC) or self._event.is_set()):
            if (shard_id := self._given_up(it)) is not None:
                self._until_failure(lambda it, shard_id=shard_id: self.prepare_shard(shard_id, False), it)
            if (failed := np.flatnonzero(self._shard_states.numpy() == FAILED)).size:
                self._fail(self._failed_elsewhere(int(failed[0])))

    def _given_up(self, it: Any) -> int | None:
        """Return the shard that this process waits for and that is not here, though it was prepared before.

        Another process's epoch ended while it fetched it, or it was put out of the cache before it was read.
        """
        at = it.ready_index
        if at >= min(it.prepare_index, it.total) or it.sample_ids[at] == -1:
            return None
        shard_id = int(self.spanner[it.sample_ids[at]][0])
        return shard_id if self._shard_states[shard_id] == ShardState.REMOTE else None

    # --- 4. an epoch, and what is read in it ---

    def resume(self, epoch: int, samples: int) -> None:
        """Begin the next iteration at a sample of an epoch, over all ranks; the epochs after it follow from there."""
        self.load_state_dict(
            {
                "epoch": epoch,
                "sample_in_epoch": samples,
                "num_canonical_nodes": self.num_canonical_nodes,
                "shuffle_seed": self.shuffle_seed,
                # The order is that of a first start: benchmark.py lets no number of nodes through that would change it.
                "initial_physical_nodes": None,
            }
        )

    def _resume_incr_epoch(self) -> tuple[int, int]:
        self.epoch, samples = super()._resume_incr_epoch()
        return self.epoch, samples

    def draw(self, sample_id: int) -> Draw:
        """Return what is drawn for a sample in the epoch that is read."""
        return draw_of(self.shuffle_seed, self.epoch, sample_id)

    def stream_of(self, sample_id: int) -> int:
        """Return the number of a sample's stream."""
        return int(self.stream_per_shard[self.spanner[sample_id][0]])

    def batches_of_epoch(self, global_batch_size: int) -> int:
        """Return the number of whole batches, over all ranks, of every epoch."""
        return (
            sum(self._batches_of_buckets(global_batch_size))
            if self.buckets is not None
            else self.epoch_size // global_batch_size
        )

    def _batches_of_buckets(self, global_batch_size: int) -> list[int]:
        chosen = np.array([stream.choose for stream in self.streams])
        return [
            int(chosen[self.buckets == bucket].sum()) // global_batch_size for bucket in range(max(self.buckets) + 1)
        ]

    def _get_work(self, epoch: int, sample_in_epoch: int) -> Any:
        if self.buckets is None:
            return super()._get_work(epoch, sample_in_epoch)
        self._begin_at = sample_in_epoch
        return super()._get_work(epoch, 0)  # which batches come first, the whole order says

    def _share_work(self, sample_ids: Any) -> Any:
        if self.buckets is not None:
            sample_ids[:] = self._in_buckets(
                sample_ids
            )  # in place: the process that shares it reads its own from there
        return super()._share_work(sample_ids)

    def _in_buckets(self, sample_ids: Any) -> Any:
        """# (nodes, ranks, workers, batches of a worker, batch) -> the same: streaming's order of an epoch, in buckets."""
        nodes, ranks, workers, of_worker, batch_size = sample_ids.shape
        # Streaming deals its order out sample by sample: to nodes, then to ranks; a rank's batches to its workers.
        order = sample_ids.transpose(3, 2, 4, 1, 0).reshape(-1)
        canonical = self.num_canonical_nodes * -(-self.epoch_size // self.num_canonical_nodes)
        order = order[order >= 0][:canonical]  # behind it, some are repeated so that all ranks have as many
        of_shard = self.buckets[self.stream_per_shard]
        shard_ends = self.sample_offset_per_shard + self.samples_per_shard
        buckets = of_shard[np.searchsorted(shard_ends, order, side="right")]
        size = nodes * ranks * batch_size
        batches = in_buckets(order, buckets, self._batches_of_buckets(size), size)[self._begin_at // size :]
        batches = np.concatenate([batches, np.full((of_worker * workers - len(batches), size), -1)])
        return batches.reshape(of_worker, workers, batch_size, ranks, nodes).transpose(4, 3, 1, 0, 2)

    def _each_sample_id(self, it: Any) -> Iterator[list[int] | Failure]:
        owed, ended = int((it.sample_ids != -1).sum()) // self.batch_size, threading.Event()
        for stream in self.streams:
            stream.is_wanted = lambda: not (ended.is_set() or it.should_exit() or self._event.is_set())
        threading.Thread(target=self._watch, args=(it, ended), daemon=True).start()
        sample_ids, given = super()._each_sample_id(it), 0
        try:
            while len(batch := list(itertools.islice(sample_ids, self.batch_size))) == self.batch_size:
                yield [int(sample_id) for sample_id in batch]
                given += 1
            if given < owed and not (self._failure or it.should_exit()):
                self._fail(f"data: the stream ended after {given} of {owed} batches of this process, without an error")
            while self._failure is not None:  # so is each further batch that is asked for
                yield Failure(self._failure)
        finally:
            ended.set()

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, Failure):
            return {"failure": [at.text]}
        if not isinstance(at, list):
            return super().__getitem__(at)
        try:
            batch = self.read_batch(at)
        except (RuntimeError, OSError) as error:  # streaming's own are RuntimeErrors; ours are StreamFailures
            return {"failure": [self._fail(str(error))]}
        if self.sources is not None:  # a bad sample's replacement is of the same shard
            shards = np.searchsorted(self.sample_offset_per_shard, at, side="right") - 1
            batch["stream"] = self.sources[self.stream_per_shard[shards]]
        return batch

    def read_batch(self, sample_ids: Sequence[int]) -> dict[str, Any]:
        """Return the batch of these samples."""
        raise NotImplementedError

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        """Return a sample as streaming decodes it, from a shard whose digest this run has compared."""
        self.open_shard(int(self.spanner[sample_id][0]))
        return super().get_item(sample_id, retry)

    def first_good(self, sample_id: int, use: Callable[[int], Used]) -> tuple[Used, list[Bad]]:
        """Return what `use` makes of the sample, or of the next of its shard that it can use, and those passed over.

        Args:
            use: takes a sample's number, raises SampleError where that one cannot be used.

        Raises:
            ValueError: no sample of the shard can be used.
        """
        shard_id, offset = self.spanner[sample_id]
        shard_start, shard_samples = sample_id - offset, self.shards[shard_id].samples
        bad: list[Bad] = []
        for step in range(shard_samples):
            candidate = int(shard_start + (offset + step) % shard_samples)
            try:
                return use(candidate), bad
            except SampleError as error:
                bad.append((candidate, str(super().__getitem__(candidate).get("key", candidate)), str(error)))
        named = "; ".join(f"{printable(key)}: {reason}" for _, key, reason in bad[:3])
        raise ValueError(f"data: no sample of shard {shard_id} can be used ({named}, ...). Make the stage again.")
