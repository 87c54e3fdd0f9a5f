"""Batches of one stage or several, from a StreamingDataset whose failures are heard.

Each process that reads a stage (a loader worker; the trainer itself where data.workers=0) has these threads in an epoch:

    thread           what it does                                                             method
    reader           takes the numbers of a batch, says which shards the next ones need,      __iter__, _plan, _batch_of
                     reads the samples; waits for a shard only there (open_shard)
    fetch, FETCHES   each fetches one shard at a time, of those that the reader has named     _fetch_ahead

streaming's own three, which go from sample to sample through locks and sleeps, do not run. What ours share, besides what all
processes of the machine do (stages/machine.py): where it lies, who sets it, who waits for it, and what ends it.

    of a process: its own memory
    _failure       text of the first one    any of the threads, by `_fail`; the reader     nobody: the reader gives it on, and
                                            too for what another process could not have    `is_wanted` ends all waits
                                            ends with the process
    of an epoch in a process: its own memory
    shards         a queue: what is missing the reader, a window ahead of what it reads    fetch threads, without a limit
                   for the next batches
                                            ends with None, which each thread hands on
    ended          an Event                 the reader, when the epoch ends, however       nobody: what is left in the queue
                                                                                           is not begun any more
    is_wanted      of each RetryingStream   the reader, when the epoch begins; false       `fetch`, between two tries; a wait
                                            after a failure, and when it has ended         for another's fetch, or for room
                                            ends a wait: FetchCancelled, the shard is REMOTE again

A shard that another process has given up, or that was evicted before it was read, is REMOTE when the reader needs it: the
reader then fetches it itself. So no wait depends on a thread that may be gone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
from streaming import StreamingDataset

from cli.masking import printable
from cli.private_api import require_private_api
from stages.fetch import FetchCancelled, StreamFailure
from stages.images import SampleError
from stages.machine import FAILED, ShardState
from stages.order import OrderedStages

FETCHES = 3
"""Shards that a process fetches at once. More gain nothing from a store on the same machine (bench.store)."""
WATCH_SEC = 1.0

Bad = tuple[int, str, str]
"""Of a sample that cannot be used: its number, its key, why."""
Used = TypeVar("Used")

OF_DATASET = ("_unique_rank_world", "_parallel_rank_world", "_unique_worker_world", "_parallel_worker_world")
OF_DATASET += ("_get_work", "_resume_incr_epoch")
require_private_api(StreamingDataset, *OF_DATASET, why="an epoch is read by batches, and its failures reach the run")


class Epoch:
    """What a process's threads share while it reads an epoch; see the head of this file."""

    def __init__(self) -> None:
        self.shards: SimpleQueue[int | None] = SimpleQueue()
        self.ended = threading.Event()
        self.threads: list[threading.Thread] = []

    def end(self) -> None:
        """Let the threads go; what is being fetched ends with its try."""
        self.ended.set()
        self.shards.put(None)


class BatchStream(OrderedStages):
    """Stages that give whole batches, and whose failures are heard.

    Batches: the items of an iteration are what `read_batch` makes of `batch_size` sample numbers; a rest at the end of an
    epoch that is no whole batch is left out. To be loaded with DataLoader(batch_size=None).

    Failures: an error in a thread of streaming's is only logged, and the epoch ends as if it were finished, or waits for a
    shard that nobody fetches any more (seen; mosaicml/streaming issues 307, 617). Here a thread's error becomes the item
    {"failure": [text]}, in every process of this machine, and so does each further batch that is asked for.

    Speed: plain streaming takes a file lock for every sample to ask whether its shard is there, and opens, seeks and reads
    each by itself; that, not the bytes, is what its time goes to. Here a batch is looked at once, as a whole.

    Args: see OrderedStages. Raises: see MachineStages.
    """

    def __init__(self, **arguments: Any):
        self._failure: str | None = None
        self._looked_at = 0.0
        self._epoch_read = Epoch()
        super().__init__(**arguments)

    # --- a process ---

    def _fail(self, text: str) -> str:
        """Note the first failure of this process, and end its waits; return that one's text."""
        with self._came:
            self._failure = self._failure or text
            self._came.notify_all()
        return self._failure

    def _look(self) -> None:
        """Fail if another process could not have a shard; looks once in WATCH_SEC."""
        if time.monotonic() - self._looked_at < WATCH_SEC:
            return
        self._looked_at = time.monotonic()
        if (failed := np.flatnonzero(self._shard_states.numpy() == FAILED)).size:
            self._fail(self._failed_elsewhere(int(failed[0])))

    def _fetch_ahead(self, epoch: Epoch) -> None:
        while (shard_id := epoch.shards.get()) is not None:
            if epoch.ended.is_set() or self._failure is not None:
                break
            try:
                self.prepare_shard(shard_id, blocking=False)
            except FetchCancelled:
                continue
            except Exception as error:  # a thread's own would only be printed
                self._fail(str(error) if isinstance(error, StreamFailure) else f"data: {type(error).__name__}: {error}")
        epoch.shards.put(None)

    def let_go(self) -> None:
        self._epoch_read.end()
        super().let_go()

    # --- an epoch, and what is read in it ---

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch, sample_ids = self._begin()
        batches, ahead = whole_batches(sample_ids, self.batch_size), deque[tuple[np.ndarray, set[int]]]()
        try:
            while self._plan(epoch, batches, ahead) or self._failure is not None:
                self._look()
                if self._failure is not None:
                    yield {"failure": [self._failure]}
                else:
                    yield self._batch_of(ahead[0][0])
                    ahead.popleft()
        finally:
            epoch.end()
        for thread in epoch.threads:  # all is read, so none of them has anything to fetch
            thread.join(WATCH_SEC)

    def _begin(self) -> tuple[Epoch, np.ndarray]:
        """Start the threads of the next epoch; return it and this process's sample numbers, -1 where there is none."""
        self._epoch_read.end()  # of an iteration that was not read to its end
        self._epoch_read = epoch = Epoch()
        self._unique_worker_world = self._unique_rank_world.detect_workers()
        self._parallel_worker_world = self._parallel_rank_world.detect_workers()
        sample_ids = self._get_work(*self._resume_incr_epoch())

        def is_wanted() -> bool:
            self._look()
            return self._failure is None and not epoch.ended.is_set()

        for stream in self.streams:
            stream.is_wanted = is_wanted
        for _ in range(FETCHES):
            epoch.threads.append(threading.Thread(target=self._fetch_ahead, args=(epoch,), daemon=True))
            epoch.threads[-1].start()
        return epoch, sample_ids

    def _plan(self, epoch: Epoch, batches: Iterator[np.ndarray], ahead: deque[tuple[np.ndarray, set[int]]]) -> bool:
        """Look ahead to the batches of the next `predownload` samples, and name the shards that they lack; False: no batch.

        With a cache limit only as many are fetched ahead as fill half of this process's part of it, so that none pushes
        out what is about to be read.
        """
        assert self.predownload is not None and self.batch_size is not None
        most = len(self.shards)
        if self.cache_limit and self.largest_bytes:
            of_process = self.cache_limit // self._unique_worker_world.workers_per_node
            most = of_process // (2 * self.largest_bytes)
        while len(ahead) <= self.predownload // self.batch_size:
            if ahead and len(set().union(*(missing for _, missing in ahead))) >= most:
                break
            if (sample_ids := next(batches, None)) is None:
                break
            shard_ids = np.unique(self.places_of(sample_ids)[0])
            is_here = self._shard_states.numpy()[shard_ids] == ShardState.LOCAL
            self._shard_access_times.numpy()[shard_ids[is_here]] = time.time_ns()
            missing = shard_ids[~is_here].tolist()
            for shard_id in missing:
                epoch.shards.put(shard_id)
            ahead.append((sample_ids, set(missing)))
        return bool(ahead)

    def _batch_of(self, sample_ids: np.ndarray) -> dict[str, Any]:
        try:
            batch = self.read_batch(sample_ids)
        except (RuntimeError, OSError) as error:  # streaming's own are RuntimeErrors; ours are StreamFailures
            return {"failure": [self._fail(str(error))]}
        if self.sources is not None:  # a bad sample's replacement is of the same shard
            batch["stream"] = self.sources[self.stream_per_shard[self.places_of(sample_ids)[0]]]
        return batch

    def read_batch(self, sample_ids: np.ndarray) -> dict[str, Any]:
        """Return the batch of these samples; `sample_ids`: int64 (B,)."""
        raise NotImplementedError

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
                bad.append((candidate, str(self[candidate].get("key", candidate)), str(error)))
        named = "; ".join(f"{printable(key)}: {reason}" for _, key, reason in bad[:3])
        raise ValueError(f"data: no sample of shard {shard_id} can be used ({named}, ...). Make the stage again.")


def whole_batches(sample_ids: np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
    """Yield int64 (batch_size,) of the numbers that are not -1, in order; a rest that fills no batch is left out."""
    rest = sample_ids[:0]
    for begin in range(0, len(sample_ids), batch_size):
        part = sample_ids[begin : begin + batch_size]
        rest = np.concatenate([rest, part[part != -1]])
        if len(rest) >= batch_size:
            yield rest[:batch_size]
            rest = rest[batch_size:]
