"""The loader of a dataset's batches: epochs of a fixed length, waits that are logged, unusable samples counted.

torch's DataLoader has a single timeout, from requesting a batch to receiving it. The first batch of a dataset may have to
wait for nearly every shard that is shuffled together: that is hours from a slow store, and nothing is wrong. So a wait is
logged while it lasts, ended by a signal, and by the clock only when nothing arrives any longer.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import multiprocessing.util
import os
import queue
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from common.log import EVERY_RANK, log
from common.masking import to_printable
from common.private_api import require_private_api
from mds.fetch import LOG_INTERVAL_SEC, StreamFailure
from mds.reader import BatchDataset

WORKERS = "DataLoader._iterator", "_MultiProcessingDataLoaderIter._shutdown_workers"
require_private_api("torch.utils.data.dataloader", *WORKERS, why="worker processes are ended with the run")

SLICE_SEC = 1.0  # of a wait: a signal is noticed this late, also by ranks that have their batch
ARRIVAL_CHECK_SEC = 5.0  # between two looks at what has arrived: a walk over the cache, which may have 400,000 files
ARRIVAL_CHECK_RATIO = 10  # checking takes at most a tenth of the wait
END = object()
"""What `wait_for_batch` returns after the last batch."""
NOT_YET = object()


class Loader(DataLoader):
    """A DataLoader of a BatchDataset; it removes the report of unusable samples from each batch.

    An epoch is the dataset's number of whole batches. Streaming pads the samples to a multiple of the number of ranks. Then
    an epoch's length, and from the second epoch on the batches, would depend on that number. With a fixed length, a run can
    resume on another number of ranks at the same place (mosaicml/streaming issue 869).

    `bad_samples`: sample id -> (key, reason), of this rank so far; callbacks/run_record.py gathers them from all ranks.
    `limit_sec`: see `wait_for_batch`.
    `all_ready`: called about once a second with false while this rank waits for its next batch, then with true. It returns
    whether all ranks have theirs; no rank starts its batch earlier. An error that it raises ends the wait.
    """

    def __init__(
        self,
        dataset: BatchDataset,
        *,
        epoch_batches: int,
        max_bad_samples: int,
        limit_sec: float = math.inf,
        all_ready: Callable[[bool], bool] = lambda is_here: is_here,
        num_workers: int = 0,
        **arguments: Any,
    ):
        arguments |= dict(num_workers=num_workers, timeout=SLICE_SEC if num_workers else 0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")  # data.workers is the user's choice
            super().__init__(dataset, batch_size=None, worker_init_fn=init_worker, **arguments)
        self.limit_sec = limit_sec if num_workers else None
        self.all_ready = all_ready
        self.epoch_batches = epoch_batches
        self.max_bad_samples = max_bad_samples
        self.bad_samples: dict[int, tuple[str, str]] = {}
        self._batches_before = 0

    def __len__(self) -> int:
        return self.epoch_batches

    def resume(self, epoch: int, batch_in_epoch: int, global_batch_size: int) -> None:
        """Let the next iteration begin within an epoch, after that many of its batches."""
        self._end_workers()
        self.dataset.resume(epoch, batch_in_epoch * global_batch_size)
        self._batches_before = batch_in_epoch

    def close(self) -> None:
        """End the worker processes, and let the dataset go."""
        self._end_workers()
        self.dataset.close()

    def _end_workers(self) -> None:
        """End them now: the garbage collector would wait five seconds for each, for nothing."""
        if self._iterator is not None and self.num_workers:
            self._iterator._shutdown_workers()
            self._iterator = None

    def check(self, bad_samples: Mapping[int, tuple[str, str]]) -> None:
        """Raise ValueError, with the first few names, if these are more than the limit."""
        if len(bad_samples) <= self.max_bad_samples:
            return
        examples = "; ".join(f"{to_printable(key)}: {reason}" for key, reason in list(bad_samples.values())[:5])
        raise ValueError(
            f"data.max_bad_samples: {len(bad_samples)} samples cannot be used, {self.max_bad_samples} are allowed. First: "
            f"{examples}. Raise data.max_bad_samples, or rebuild the dataset without them."
        )

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        num_batches, self._batches_before = self._batches_before, 0
        self._begin_epoch()
        batches = super().__iter__()
        caches = [stream.local for stream in self.dataset.streams if stream.remote is not None]
        arrived = functools.partial(count_files_and_bytes, caches)  # nothing arrives in what is read in place
        while num_batches < self.epoch_batches:
            batch = wait_for_batch(batches, arrived, self.limit_sec, lambda: self.all_ready(False))
            if batch is END:
                break
            if "failure" in batch:
                raise StreamFailure(batch["failure"][0])
            if RECEIPT in batch:
                self.dataset.memory.release(batch)
            self.bad_samples.update({sample_id: (key, reason) for sample_id, key, reason in batch.pop("bad", ())})
            self.check(self.bad_samples)
            while not self.all_ready(True):
                pass  # each pass: the others have waited for another second
            num_batches += 1
            yield batch
        if num_batches < self.epoch_batches:
            problem = f"the epoch ended after {num_batches} of {self.epoch_batches} batches, without an error"
            raise StreamFailure(f"data: {problem}. The epoch is incomplete; start the run again.")

    def _begin_epoch(self) -> None:
        """Make the epoch's order in a thread: 100 million samples take many seconds, and the other ranks need a heartbeat."""
        poll = _poll_thread(iter(self.dataset.begin_epoch, None))
        while poll() is NOT_YET:
            self.all_ready(False)


# --- the wait for a batch ---


def wait_for_batch(
    iterator: Iterator[Any], arrived: Callable[[], Any], limit_sec: float | None, while_waiting: Callable[[], None]
) -> Any:
    """Return what a loader gives next, or END.

    Args:
        iterator: of a torch DataLoader, whose workers time out after SLICE_SEC.
        arrived: its value changes when more of the dataset has come.
        limit_sec: longest wait for workers in which nothing arrives; None: no workers, and the stream has its own limit.
        while_waiting: called about once a second; what it raises ends the wait.

    Raises:
        StreamFailure: nothing has come for too long.
    """
    began, logged_at, look_at = time.monotonic(), 0.0, -math.inf
    arrived_before, since = None, began
    poll = _poll_thread(iterator) if limit_sec is None else _poll_workers(iterator)
    limit_sec = math.inf if limit_sec is None else limit_sec
    while (batch := poll()) is NOT_YET:
        while_waiting()
        now = time.monotonic()
        if now >= look_at or now - since > limit_sec:
            if (arrived_now := arrived()) != arrived_before:
                arrived_before, since = arrived_now, now if arrived_before is not None else began
            look_at = now + max(ARRIVAL_CHECK_SEC, ARRIVAL_CHECK_RATIO * (time.monotonic() - now))
        if now - since > limit_sec:
            text = f"no batch for {now - began:.0f} s, and nothing of the dataset has arrived for {now - since:.0f} s"
            raise StreamFailure(f"data: {text}: the loader's workers hang. Start the run again: it resumes.")
        if now - began - logged_at >= LOG_INTERVAL_SEC:
            logged_at = now - began
            text = f"data: {logged_at:.0f} s: waiting for a batch ({arrived_now[1]:,} bytes are here)"
            log.info(text, extra=EVERY_RANK)
    return batch


def _poll_workers(iterator: Iterator[Any]) -> Callable[[], Any]:
    """Return what gives the next batch, or NOT_YET after the iterator's own timeout."""

    def poll() -> Any:
        try:
            return next(iterator, END)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader timed out"):
                raise
            return NOT_YET
        except ValueError as error:  # of a worker: torch puts its whole trace into the text
            text = str(error).rstrip().rpartition("\nValueError: ")[2]
            if not text.startswith("data"):
                raise
            raise StreamFailure(text) from error

    return poll


def _poll_thread(iterator: Iterator[Any]) -> Callable[[], Any]:
    """The same where there are no workers: the main thread would not hear a signal while it reads."""
    results: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()

    def read() -> None:
        try:
            results.put((next(iterator, END), None))
        except BaseException as error:  # the caller's
            results.put((None, error))

    def poll() -> Any:
        try:
            batch, error = results.get(timeout=SLICE_SEC)
        except queue.Empty:
            return NOT_YET
        if error is not None:
            raise error
        return batch

    threading.Thread(target=read, daemon=True).start()
    return poll


def count_files_and_bytes(folders: Sequence[str]) -> tuple[int, int]:
    """Return how many files lie under some folders, unfinished ones included, and their bytes."""
    files = num_bytes = 0
    for folder_path, _, names in (entry for folder in folders for entry in os.walk(folder)):
        for name in names:
            try:
                num_bytes += Path(folder_path, name).stat().st_size
                files += 1
            except OSError:
                continue  # renamed or removed in the meantime
    return files, num_bytes


# --- a worker process ---


def init_worker(worker_id: int) -> None:
    """Let a loader worker end with its trainer, whatever ended that, and by nothing but its trainer.

    A batch system sends SIGTERM to every process of a job, and a terminal SIGINT (Ctrl-C); a worker that obeyed would take
    the trainer down before it has written its checkpoint. A worker whose trainer was killed would live on, and hold the
    shared memory that a restart needs.
    """
    if hasattr(signal, "sigwaitinfo"):  # Linux
        PR_SET_PDEATHSIG = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_on_sigterm_from_trainer, daemon=True).start()
    # At its end leave at once: threads that a store's client has made may be joined only when its answer comes, and the
    # loader gives each worker five seconds for that.
    multiprocessing.util.Finalize(None, os._exit, args=(0,), exitpriority=-100)


def _exit_on_sigterm_from_trainer() -> None:
    trainer = os.getppid()
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)


# --- shared memory of batches that loader workers hand over ---
#
# A new page of shared memory costs a worker some microseconds: for an image of 512 px as much as decoding it, for
# stored moments several times what reading them does. So a worker takes an earlier batch's memory for the next one, as
# soon as the training process says that it has its own copy.
#
#     worker              allocate: memory and a receipt; writes the batch; hands over both
#     training process    release: copies the batch unless pinning did; notes the receipt's number

MAX_WORKERS = 512
MAX_BUFFERS = 3  # of a worker: one that is written, and two that wait, as many as torch's DataLoader lets it work ahead
RECEIPT = "receipt"
ALIGNED = 64  # bytes: where a column of several begins


class BatchMemory:
    """What a stream's loader workers write their batches to. It is made before they start, and shared by all."""

    def __init__(self) -> None:
        self.collected = torch.zeros(MAX_WORKERS, dtype=torch.int64).share_memory_()
        """Number of each worker's last batch that the training process has copied; a worker counts its own from 1."""
        self._number: int | None = None
        self._kept: deque[tuple[int, Tensor]] = deque()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, dict[str, tuple[int, int]]]:
        """Return memory for a batch, and what the batch needs in addition: a receipt (worker, number), in workers alone."""
        worker, num_bytes = get_worker_info(), math.prod(shape) * dtype.itemsize
        if worker is None:
            # numpy asks the system for large pages, torch does not: the first touch of each costs a reader time.
            return torch.from_numpy(np.empty(num_bytes, np.uint8)).view(dtype).view(*shape), {}
        collected = int(self.collected[worker.id])
        self._number = (collected if self._number is None else self._number) + 1
        memory = self._kept.popleft()[1] if self._kept and self._kept[0][0] <= collected else None
        if memory is None or len(memory) < num_bytes:
            memory = torch.empty(num_bytes, dtype=torch.uint8).share_memory_()
        if len(self._kept) < MAX_BUFFERS:
            self._kept.append((self._number, memory))
        return memory[:num_bytes].view(dtype).view(*shape), {RECEIPT: (worker.id, self._number)}

    def allocate_columns(
        self, columns: Mapping[str, tuple[Sequence[int], torch.dtype]]
    ) -> tuple[dict[str, Tensor], dict[str, tuple[int, int]]]:
        """Return memory for several columns, name -> (shape, type), cut from one piece; and the receipt of `allocate`."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in columns.values()]
        begins = [0, *itertools.accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]
        memory, receipt = self.allocate((begins.pop(),), torch.uint8)
        cut = {
            name: memory[begin : begin + size].view(dtype).view(*shape)
            for (name, (shape, dtype)), begin, size in zip(columns.items(), begins, sizes, strict=True)
        }
        return cut, receipt

    def release(self, batch: dict[str, Any]) -> None:
        """Make a batch the training process's own, in place, and let its worker have the memory again."""
        worker, number = batch.pop(RECEIPT)
        for name, column in batch.items():
            if isinstance(column, Tensor) and column.is_shared():
                batch[name] = column.clone()
        self.collected[worker] = number
