"""Batches of one stage or several, from a StreamingDataset whose failures are heard.

Each process that reads a stage (a loader worker; the trainer itself where data.workers=0) has four threads in an epoch:

    thread     whose        what it does                                                   method
    reader     its own      takes the numbers of a batch, reads the samples                _each_sample_id, read_batch
    prepare    streaming's  runs ahead and fetches shards                                  _prepare_thread
    ready      streaming's  waits for the shard of each sample, in order                   _ready_thread
    watch      ours         looks each second at what other processes have set             _watch

What they share, besides what all processes of the machine do (stages/machine.py): where it lies, who sets it, who waits for
it, and what ends it.

    of a process: its own memory
    _failure       text of the first one    any of the four threads, by `_fail`            nobody: the reader gives it on
    _event         streaming's              the same                                       nobody: all threads see it and end
                                            both end with the process
    of an epoch in a process: its own memory
    it.*_index     how far each thread is   each of reader, prepare and ready its own      the reader: for `ready`; these two:
                                                                                           for the reader (predownload)
    is_wanted      of the RetryingStream    the reader, when the epoch begins              `fetch`, between two tries
    ended          an Event                 the reader, when the epoch ends, however       `watch`
                                            ends a wait for a store: FetchCancelled, the shard is REMOTE again

`ready`'s wait would have no end with streaming alone: it waits for LOCAL, and sees neither FAILED nor a PREPARING that went
back to REMOTE. `_watch` sees both: it fails, or fetches the shard itself. A reader's wait ends with PREPARING.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from streaming import StreamingDataset

from cli.masking import printable
from cli.private_api import require_private_api
from stages.fetch import FetchCancelled, StreamFailure
from stages.images import SampleError
from stages.machine import FAILED, ShardState
from stages.order import OrderedStages

WATCH_SEC = 1.0

Bad = tuple[int, str, str]
"""Of a sample that cannot be used: its number, its key, why."""
Used = TypeVar("Used")

WHY = "its failures reach the run"
OF_EPOCH = ("sample_ids", "total", "prepare_index", "ready_index", "should_exit", "on_exit")
require_private_api(StreamingDataset, "_event", "_each_sample_id", "_prepare_thread", "_ready_thread", why=WHY)
require_private_api("streaming.base.dataset", *(f"_Iterator.{name}" for name in OF_EPOCH), why=WHY)


@dataclass(frozen=True)
class Failure:
    """What an iteration gives instead of the numbers of a batch when there will be none."""

    text: str


class BatchStream(OrderedStages):
    """Stages that give whole batches, and whose failures are heard.

    Batches: the items of an iteration are what `read_batch` makes of `batch_size` sample numbers; a rest at the end of an
    epoch that is no whole batch is left out. To be loaded with DataLoader(batch_size=None).

    Failures: an error in a thread of streaming's is only logged, and the epoch ends as if it were finished, or waits for a
    shard that nobody fetches any more (seen; mosaicml/streaming issues 307, 617). Here the thread's error becomes the item
    {"failure": [text]}, in every process of this machine that waits for the shard, and so does an epoch that owes batches.

    Speed: plain streaming takes a file lock for every sample to ask whether its shard is there, and opens, seeks and reads
    each by itself; that, not the bytes, is what its time goes to.

    Args: see OrderedStages. Raises: see MachineStages.
    """

    def __init__(self, **arguments: Any):
        self._failure: str | None = None
        super().__init__(**arguments)

    # --- a process ---

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

    # --- an epoch, and what is read in it ---

    def _each_sample_id(self, it: Any) -> Iterator[np.ndarray | Failure]:
        owed, ended = int((it.sample_ids != -1).sum()) // self.batch_size, threading.Event()
        for stream in self.streams:
            stream.is_wanted = lambda: not (ended.is_set() or it.should_exit() or self._event.is_set())
        threading.Thread(target=self._watch, args=(it, ended), daemon=True).start()
        sample_ids, given = super()._each_sample_id(it), 0
        try:
            while len(batch := list(itertools.islice(sample_ids, self.batch_size))) == self.batch_size:
                yield np.array(batch, np.int64)
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
        if not isinstance(at, np.ndarray):
            return super().__getitem__(at)
        try:
            batch = self.read_batch(at)
        except (RuntimeError, OSError) as error:  # streaming's own are RuntimeErrors; ours are StreamFailures
            return {"failure": [self._fail(str(error))]}
        if self.sources is not None:  # a bad sample's replacement is of the same shard
            batch["stream"] = self.sources[self.stream_per_shard[self.places_of(at)[0]]]
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
                bad.append((candidate, str(super().__getitem__(candidate).get("key", candidate)), str(error)))
        named = "; ".join(f"{printable(key)}: {reason}" for _, key, reason in bad[:3])
        raise ValueError(f"data: no sample of shard {shard_id} can be used ({named}, ...). Make the stage again.")
