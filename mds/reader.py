"""Datasets in the MDS format as batches of a rank, in streaming's own order; mds/loader.py loads them."""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from common import dist
from common.masking import to_printable
from mds.cache import LOCAL, ShardCache
from mds.fetch import FetchCancelled, RetryingStream, StreamFailure
from mds.images import SampleDraw, SampleError, draw_sample
from mds.order import (
    BLOCK_SIZE,
    Array,
    Epoch,
    batch_by_bucket,
    count_chosen,
    dtype_of,
    order_of_node,
    order_of_rank,
    share_proportions,
)
from mds.shard_file import ShardError, read_sample
from ranks import collectives

# Each process that reads a dataset (a loader worker; the trainer itself where data.workers=0) has these threads in an
# epoch:
#
#  thread           what it does                                                             method
#  reader           takes the numbers of a batch, says which shards the next ones need,      __iter__, _plan_fetches,
#                   reads the samples; waits for a shard only there (ensure_shard)            _read_or_fail
#  fetch, FETCHES   each fetches one shard at a time, of those that the reader has named     _run_fetch_thread
#
# What they share, besides what all processes of the machine do (mds/cache.py): where it lies, who sets it, who waits for it,
# and what ends it.
#
#  of a process: its own memory
#  _failure       text of the first one    any thread, by `_note_failure`; the reader     nobody: the reader gives it on, and
#                                          too for what another process could not have    `is_wanted` ends all waits
#                                          ends with the process
#  of an epoch in a process: its own memory
#  shards         a queue: what is missing the reader, a window ahead of what it reads    fetch threads, without a limit
#                 for the next batches
#                                          ends with None, which each thread hands on
#  ended          an Event                 the reader, when the epoch ends, however       nobody: what is left in the queue
#                                                                                         is not begun any more
#  is_wanted      of each RetryingStream   the reader, when the epoch begins; false       a download, between tries; a wait
#                                          after a failure, and when it has ended         for another's fetch, or for room
#                                          ends a wait: FetchCancelled, the shard is REMOTE again
#
# A shard that another process has given up, or that was evicted before it was read, is REMOTE when the reader needs it:
# the reader then fetches it itself. So no wait depends on a thread that may be gone.

MAX_READS = 8  # of a shard that is put out again and again before it is open
FETCHES = 3
"""Shards that a process fetches at once. More gain nothing from a store on the same machine (bench.store)."""
WATCH_SEC = 1.0

BadSample = tuple[int, str, str]
"""Of a sample that cannot be used: its number, its key, why."""
Result = TypeVar("Result")


class EpochReader:
    """What a process's threads share while it reads an epoch; see the table above."""

    def __init__(self) -> None:
        self.shards: SimpleQueue[int | None] = SimpleQueue()
        self.ended = threading.Event()
        self.threads: list[threading.Thread] = []

    def end(self) -> None:
        """Let the threads go; what is being fetched ends with its try."""
        self.ended.set()
        self.shards.put(None)


class EpochOrder:
    """A rank's part of an epoch's order, in memory that its loader workers share: they may live for many epochs."""

    HEADER = 3  # numbers: how often an order was put there, its epoch, its length

    def __init__(self, max_samples: int, dtype: np.dtype[Any]):
        memory = mmap.mmap(-1, 8 * self.HEADER + max_samples * dtype.itemsize)
        self._header = np.frombuffer(memory, np.int64, self.HEADER)
        self._order = np.frombuffer(memory, dtype, max_samples, 8 * self.HEADER)

    def put(self, epoch: int, order: Array) -> None:
        """Replace what was there."""
        self._order[: len(order)] = order
        self._header[:] = self.count + 1, epoch, len(order)

    @property
    def count(self) -> int:
        """How often an order was put there."""
        return int(self._header[0])

    def get(self) -> tuple[int, Array]:
        """Return the epoch, and its order, a view."""
        return int(self._header[1]), self._order[: self._header[2]]


class BatchDataset(IterableDataset):
    """Datasets in the MDS format that give whole batches, in streaming's order, and whose failures reach the run.

    Order: several streams are mixed by their proportion, repeat or choose, as streaming does it. With buckets, that order is
    dealt into batches of one bucket each.

    Batches: the items of an iteration are what `read_batch` makes of `batch_size` sample numbers; a rest at the end of an
    epoch that is no whole batch is left out. To be loaded with DataLoader(batch_size=None).

    Failures: an error in a thread of streaming's is only logged, and the epoch ends as if it were finished, or waits for a
    shard that no thread fetches any longer (seen; mosaicml/streaming issues 307, 617). Here a thread's error becomes the item
    {"failure": [text]}, in every process of this machine, and so does each further batch that is asked for.

    Speed: plain streaming takes a file lock for every sample to ask whether its shard is there, and opens, seeks and reads
    each by itself; that, not the bytes, is what its time goes to. Here a batch is looked at once, as a whole.

    Args:
        streams: the datasets, each in a separate folder.
        batch_size: samples of a rank's batch.
        sources: the number of each stream's dataset; None: there is one.
        buckets: the number of each stream's bucket; None: there is one, and no order but streaming's.
        num_canonical_nodes: nodes that the order is made for; None: those of this run.
        shuffle_block_size: how far a sample is carried by shuffling, samples.
        sampling_granularity: samples that are picked at a time, where an epoch has a part of a stream.
        predownload: samples whose shards are fetched ahead; None: of eight batches.
        cache_limit: see ShardCache.

    Raises: see ShardCache.
    """

    def __init__(
        self,
        *,
        streams: Sequence[RetryingStream],
        batch_size: int,
        sources: Sequence[int] | None = None,
        buckets: Sequence[int] | None = None,
        num_canonical_nodes: int | None = None,
        shuffle: bool = False,
        shuffle_seed: int = 9176,
        shuffle_block_size: int = BLOCK_SIZE,
        sampling_granularity: int = 1,
        predownload: int | None = None,
        cache_limit: int | str | None = None,
    ):
        self.cache = ShardCache(streams, cache_limit)
        self.streams, self.shards, self.batch_size = self.cache.streams, self.cache.shards, batch_size
        self.sources = None if sources is None else torch.tensor(sources)
        self.buckets = None if buckets is None else np.asarray(buckets)
        self.ranks, self.nodes = dist.get_local_world_size(), collectives.num_nodes()
        self.num_canonical_nodes = num_canonical_nodes or self.nodes
        self.shuffle, self.shuffle_seed, self.shuffle_block_size = shuffle, shuffle_seed, shuffle_block_size
        self.sampling_granularity = sampling_granularity
        self.predownload = 8 * batch_size if predownload is None else predownload
        self.chosen = self._count_chosen()
        """Of each stream the samples that an epoch has of it."""
        self.epoch = 0  # that is read
        self._next_epoch, self._next_sample = 0, 0
        self._order: EpochOrder | None = None
        self._orders_read = 0
        self._failure: str | None = None
        self._looked_at = 0.0
        self._epoch_read = EpochReader()

    # --- the order of an epoch ---

    def _count_chosen(self) -> list[int]:
        samples = self.cache.samples_per_stream
        if "proportion" in self.streams[0].weight:  # then all have one
            parts = [stream.weight["proportion"] for stream in self.streams]
            return share_proportions(parts, sum(samples), self.shuffle_seed)
        return [count_chosen(stream.weight, num) for stream, num in zip(self.streams, samples, strict=True)]

    def resume(self, epoch: int, samples: int) -> None:
        """Begin the next iteration at a sample of an epoch, over all ranks; the epochs after it follow from there.

        The order is that of a first start: benchmark.py lets no number of nodes through that would change it.
        """
        self._next_epoch, self._next_sample = epoch, samples

    def begin_epoch(self) -> None:
        """Make the order of the next epoch, for all loader workers; in the process that has them, before they are asked."""
        if self._order is None:
            most = (
                sum(self.chosen) // (self.nodes * self.ranks) + self.num_canonical_nodes + self.nodes + self.ranks + 2
            )
            self._order = EpochOrder(most, dtype_of(int(self.cache.sample_ends[-1])))
        self._order.put(*self._make_order())

    def _make_order(self) -> tuple[int, Array]:
        """Return the next epoch, and the samples that this rank reads in it."""
        epoch, begin = self._next_epoch, self._next_sample
        self._next_epoch, self._next_sample = epoch + 1, 0
        is_weighted = self.chosen != self.cache.samples_per_stream
        of_epoch = Epoch(
            self.cache.samples_per_shard,
            canonical_nodes=self.num_canonical_nodes,
            node=dist.get_node_rank() if self.buckets is None else 0,
            nodes=self.nodes if self.buckets is None else 1,
            seed=self.shuffle_seed,
            epoch=epoch,
            shuffle=self.shuffle,
            block_size=self.shuffle_block_size,
            streams=list(zip(self.cache.shards_per_stream, self.chosen, strict=True)) if is_weighted else (),
            granularity=self.sampling_granularity,
        )
        order = order_of_node(of_epoch)
        if self.buckets is None:
            order = order[begin // self.nodes :]
        else:
            size = self.batch_size * self.ranks * self.nodes
            order = self._deal_buckets(order, size)[begin // size :].reshape(-1)[dist.get_node_rank() :: self.nodes]
        return epoch, order_of_rank(order, dist.get_local_rank(), self.ranks)

    def _deal_buckets(self, order: Array, batch_size: int) -> Array:
        """# (N,) of streaming's order of all samples -> (batches of an epoch, batch over all ranks): each of one bucket."""
        assert self.buckets is not None
        of_shard = self.buckets.astype(np.int16)[self.cache.stream_per_shard]
        of_sample = np.repeat(of_shard, self.cache.samples_per_shard)[order]
        return batch_by_bucket(order, of_sample, self._count_bucket_batches(batch_size), batch_size)

    def count_epoch_batches(self, global_batch_size: int) -> int:
        """Return the number of whole batches, over all ranks, of every epoch."""
        if self.buckets is None:
            return sum(self.chosen) // global_batch_size
        return sum(self._count_bucket_batches(global_batch_size))

    def _count_bucket_batches(self, global_batch_size: int) -> list[int]:
        assert self.buckets is not None
        chosen = np.array(self.chosen)
        return [int(chosen[self.buckets == at].sum()) // global_batch_size for at in range(max(self.buckets) + 1)]

    def draw(self, sample_id: int) -> SampleDraw:
        """Return what is drawn for a sample in the epoch that is read."""
        return draw_sample(self.shuffle_seed, self.epoch, sample_id)

    def stream_of(self, sample_id: int) -> int:
        """Return the number of a sample's stream."""
        return int(self.cache.stream_per_shard[self.cache.sample_ends.searchsorted(sample_id, "right")])

    # --- an epoch, and what is read in it ---

    def __iter__(self) -> Iterator[dict[str, Any]]:
        reader, batches = self._start_epoch()
        ahead = deque[tuple[np.ndarray, set[int]]]()
        try:
            while self._plan_fetches(reader, batches, ahead) or self._failure is not None:
                self._check_for_failures()
                if self._failure is not None:
                    yield {"failure": [self._failure]}
                else:
                    yield self._read_or_fail(ahead[0][0])
                    ahead.popleft()
        finally:
            reader.end()
        for thread in reader.threads:  # all is read, so none of them has anything to fetch
            thread.join(WATCH_SEC)

    def _start_epoch(self) -> tuple[EpochReader, Iterator[np.ndarray]]:
        """Start the threads of the next epoch; return it, and this process's batches of sample numbers."""
        self._epoch_read.end()  # of an iteration that was not read to its end
        self._epoch_read = reader = EpochReader()
        if self._order is not None and self._order.count > self._orders_read:
            self._orders_read = self._order.count
            self.epoch, order = self._order.get()
        else:  # of a loader that does not begin epochs
            self.epoch, order = self._make_order()
        whole = order[: len(order) // self.batch_size * self.batch_size].reshape(-1, self.batch_size)
        worker = get_worker_info()
        batches = np.array(
            whole if worker is None else whole[worker.id :: worker.num_workers]
        )  # the order is overwritten

        def is_wanted() -> bool:
            self._check_for_failures()
            return self._failure is None and not reader.ended.is_set()

        for stream in self.streams:
            stream.is_wanted = is_wanted
        for _ in range(FETCHES):
            reader.threads.append(threading.Thread(target=self._run_fetch_thread, args=(reader,), daemon=True))
            reader.threads[-1].start()
        return reader, (batch.astype(np.int64) for batch in batches)

    def _plan_fetches(
        self, reader: EpochReader, batches: Iterator[np.ndarray], ahead: deque[tuple[np.ndarray, set[int]]]
    ) -> bool:
        """Look ahead to the batches of the next `predownload` samples, and name the shards that they lack; False: no batch.

        With a cache limit only as many are fetched ahead as fill half of this process's part of it, so that none pushes
        out what is about to be read.
        """
        max_missing = len(self.shards)
        if self.cache.limit and self.cache.largest_bytes:
            worker = get_worker_info()
            processes = self.ranks * (1 if worker is None else worker.num_workers)
            max_missing = self.cache.limit // processes // (2 * self.cache.largest_bytes)
        while len(ahead) <= self.predownload // self.batch_size:
            if ahead and len(set().union(*(missing for _, missing in ahead))) >= max_missing:
                break
            if (sample_ids := next(batches, None)) is None:
                break
            shard_ids = np.unique(self.cache.locate(sample_ids)[0])
            is_here = self.cache.states[shard_ids] == LOCAL
            self.cache.touch(shard_ids[is_here])
            missing = shard_ids[~is_here].tolist()
            for shard_id in missing:
                reader.shards.put(shard_id)
            ahead.append((sample_ids, set(missing)))
        return bool(ahead)

    def _read_or_fail(self, sample_ids: np.ndarray) -> dict[str, Any]:
        try:
            batch = self.read_batch(sample_ids)
        except (RuntimeError, OSError) as error:  # ours are StreamFailures
            return {"failure": [self._note_failure(str(error))]}
        if self.sources is not None:  # a bad sample's replacement is of the same shard
            batch["stream"] = self.sources[self.cache.stream_per_shard[self.cache.locate(sample_ids)[0]]]
        return batch

    def read_batch(self, sample_ids: np.ndarray) -> dict[str, Any]:
        """Return the batch of these samples; `sample_ids`: int64 (B,)."""
        raise NotImplementedError

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        """Return a sample, decoded, from a shard whose digest this run has compared. Raises StreamFailure."""
        [shard_id], [row] = self.cache.locate([sample_id])
        return self.read_here(int(shard_id), lambda: read_sample(self.shards[shard_id], int(row)))

    def read_here(self, shard_id: int, read: Callable[[], Result]) -> Result:
        """Return what `read` makes of a shard that is here; it is fetched again where it was put out in the meantime."""
        for _ in range(MAX_READS):
            self.cache.ensure_shard(shard_id)
            try:
                return read()
            except FileNotFoundError:
                self.cache.prepare_shard(shard_id)
        raise ShardError(f"data: {self.shards[shard_id].name} cannot be kept: a larger data.cache_limit?")

    def read_first_good(self, sample_id: int, use: Callable[[int], Result]) -> tuple[Result, list[BadSample]]:
        """Return what `use` makes of the sample, or of the next of its shard that it can use, and those passed over.

        Args:
            use: takes a sample's number, raises SampleError where that one cannot be used.

        Raises:
            ValueError: no sample of the shard can be used.
        """
        [shard_id], [offset] = self.cache.locate([sample_id])
        shard_start, shard_samples = sample_id - int(offset), self.shards[shard_id].samples
        bad: list[BadSample] = []
        for step in range(shard_samples):
            candidate = shard_start + (int(offset) + step) % shard_samples
            try:
                return use(candidate), bad
            except SampleError as error:
                bad.append((candidate, str(self[candidate].get("key", candidate)), str(error)))
        examples = "; ".join(f"{to_printable(key)}: {reason}" for _, key, reason in bad[:3])
        raise ValueError(f"data: no sample of shard {shard_id} can be used ({examples}, ...). Rebuild the dataset.")

    # --- failures of a process ---

    def _note_failure(self, text: str) -> str:
        """Note the first failure of this process, and end its waits; return that one's text."""
        with self.cache.changed:
            self._failure = self._failure or text
            self.cache.changed.notify_all()
        return self._failure

    def _check_for_failures(self) -> None:
        """Fail if another process could not have a shard; looks once in WATCH_SEC."""
        if time.monotonic() - self._looked_at < WATCH_SEC:
            return
        self._looked_at = time.monotonic()
        if failure := self.cache.find_failure():
            self._note_failure(failure)

    def _run_fetch_thread(self, reader: EpochReader) -> None:
        while (shard_id := reader.shards.get()) is not None:
            if reader.ended.is_set() or self._failure is not None:
                break
            try:
                self.cache.prepare_shard(shard_id, blocking=False)
            except FetchCancelled:
                continue
            except Exception as error:  # a thread's own would only be printed
                self._note_failure(
                    str(error) if isinstance(error, StreamFailure) else f"data: {type(error).__name__}: {error}"
                )
        reader.shards.put(None)

    def close(self) -> None:
        """End what is being fetched, and let the folders go."""
        self._epoch_read.end()
        self.cache.close()
