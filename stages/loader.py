"""The loader of a stage's batches: epochs of a fixed length, waits that are told, unusable samples counted.

torch's DataLoader knows one limit, from the asking for a batch to its coming. The first batch of a stage may have to wait
for nearly every shard that is shuffled together: that is hours from a slow store, and nothing is wrong. So a wait is told
while it lasts, ended by a signal, and by the clock only when nothing arrives any more.
"""

from __future__ import annotations

import ctypes
import functools
import math
import multiprocessing.util
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from streaming import StreamingDataLoader
from torch import Tensor
from torch.utils.data import DataLoader

from cli.log import EVERY_RANK, log
from cli.masking import printable
from cli.private_api import require_private_api
from stages.batch_memory import RECEIPT
from stages.fetch import SAY_SEC, StreamFailure
from stages.stream import BatchStream

require_private_api(DataLoader, "_iterator", why="worker processes are ended with the run")
OF_ITERATOR = ("_BaseDataLoaderIter._timeout", "_MultiProcessingDataLoaderIter._shutdown_workers")
require_private_api(
    "torch.utils.data.dataloader", *OF_ITERATOR, why="a wait for workers is interrupted, and they are ended"
)
require_private_api(multiprocessing.util, "Finalize", why="a worker leaves at once at its end")

SLICE_SEC = 1.0  # of a wait: so late a signal is heard, by the ranks that have their batch too
LOOK_SEC = 5.0  # between two looks at what has arrived: a walk over the cache, which may have 400,000 files
LOOK_PART = 10  # of a wait the looks take one in so many seconds
END = object()
"""What `next_batch` returns after the last batch."""
NOT_YET = object()


class Loader(StreamingDataLoader):
    """A StreamingDataLoader with epochs of a fixed length; it removes the report of unusable samples from each batch.

    An epoch is the stage's number of whole batches. Streaming itself pads the samples to a multiple of the number of ranks.
    Then an epoch's length, and from the second epoch on the batches, would depend on that number. With a fixed length, a run
    can resume on another number of ranks at the same place (mosaicml/streaming issue 869).

    `bad_samples`: sample id -> (key, reason), of this rank so far; callbacks/run_record.py gathers them from all ranks.
    `all_ready`: called about once a second with false while this rank waits for its next batch, then with true. It returns
    whether all ranks have theirs; no rank starts its batch earlier. An error that it raises ends the wait.
    """

    def __init__(
        self,
        dataset: BatchStream,
        *,
        epoch_batches: int,
        max_bad_samples: int,
        all_ready: Callable[[bool], bool] = lambda is_here: is_here,
        **arguments: Any,
    ):
        super().__init__(dataset, batch_size=None, worker_init_fn=live_as_worker, **arguments)
        self.all_ready = all_ready
        self.epoch_batches = epoch_batches
        self.max_bad_samples = max_bad_samples
        self.bad_samples: dict[int, tuple[str, str]] = {}
        self._batches_before = 0

    def __len__(self) -> int:
        return self.epoch_batches

    def resume(self, epoch: int, batch_in_epoch: int, global_batch_size: int) -> None:
        """Let the next iteration begin within an epoch, after that many of its batches."""
        self.dataset.resume(epoch, batch_in_epoch * global_batch_size)
        self._batches_before = batch_in_epoch

    def close(self) -> None:
        """End the worker processes; the garbage collector would wait five seconds for each, for nothing."""
        if self._iterator is not None and self.num_workers:
            self._iterator._shutdown_workers()
        self.dataset.let_go()

    def check(self, bad_samples: Mapping[int, tuple[str, str]]) -> None:
        """Raise ValueError, with the first few names, if these are more than the limit."""
        if len(bad_samples) <= self.max_bad_samples:
            return
        named = "; ".join(f"{printable(key)}: {reason}" for key, reason in list(bad_samples.values())[:5])
        raise ValueError(
            f"data.max_bad_samples: {len(bad_samples)} samples cannot be used, {self.max_bad_samples} are allowed. First: "
            f"{named}. Raise data.max_bad_samples, or make the stage again without them."
        )

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        num_batches, self._batches_before = self._batches_before, 0
        batches = DataLoader.__iter__(self)  # not StreamingDataLoader's generator: an error in a wait would end that
        caches = [stream.local for stream in self.dataset.streams if stream.remote is not None]
        arrived = functools.partial(files_and_bytes, caches)  # nothing arrives in what is read in place
        while num_batches < self.epoch_batches:
            batch = next_batch(batches, arrived, self.timeout, lambda: self.all_ready(False))
            if batch is END:
                break
            if "failure" in batch:
                raise StreamFailure(batch["failure"][0])
            if RECEIPT in batch:
                self.dataset.memory.collect(batch)
            self.bad_samples.update({sample_id: (key, reason) for sample_id, key, reason in batch.pop("bad", ())})
            self.check(self.bad_samples)
            while not self.all_ready(True):
                pass  # each pass: the others have waited for another second
            num_batches += 1
            yield batch
        if num_batches < self.epoch_batches:
            given = f"the epoch ended after {num_batches} of {self.epoch_batches} batches, without an error"
            raise StreamFailure(f"data: {given}. Nothing was trained on less than it should; start the run again.")


# --- the wait for a batch ---


def next_batch(
    iterator: Iterator[Any], arrived: Callable[[], Any], limit_sec: float, while_waiting: Callable[[], None]
) -> Any:
    """Return what a loader gives next, or END.

    Args:
        iterator: of a torch DataLoader.
        arrived: its value changes when more of the stage has come.
        limit_sec: longest wait for workers in which nothing has come; without workers the stream has its own limit.
        while_waiting: called about once a second; what it raises ends the wait.

    Raises:
        StreamFailure: nothing has come for too long.
    """
    usual, began, said_at, look_at = iterator._timeout, time.monotonic(), 0.0, -math.inf
    seen, since = None, began
    poll = _of_workers(iterator) if usual else _of_a_thread(iterator)
    limit_sec = limit_sec if usual else math.inf
    iterator._timeout = min(SLICE_SEC, usual)
    try:
        while (batch := poll()) is NOT_YET:
            while_waiting()
            now = time.monotonic()
            if now >= look_at or now - since > limit_sec:
                if (here := arrived()) != seen:
                    seen, since = here, now if seen is not None else began
                look_at = now + max(LOOK_SEC, LOOK_PART * (time.monotonic() - now))
            if now - since > limit_sec:
                text = f"no batch for {now - began:.0f} s, and nothing of the stage has arrived for {now - since:.0f} s"
                raise StreamFailure(f"data: {text}: the loader's workers hang. Start the run again: it resumes.")
            if now - began - said_at >= SAY_SEC:
                said_at = now - began
                log.info(f"data: {said_at:.0f} s: waiting for a batch ({here[1]:,} bytes are here)", extra=EVERY_RANK)
        return batch
    finally:
        iterator._timeout = usual


def _of_workers(iterator: Iterator[Any]) -> Callable[[], Any]:
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


def _of_a_thread(iterator: Iterator[Any]) -> Callable[[], Any]:
    """The same where there are no workers: the main thread would not hear a signal while it reads."""
    given: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()

    def read() -> None:
        try:
            given.put((next(iterator, END), None))
        except BaseException as error:  # the caller's
            given.put((None, error))

    def poll() -> Any:
        try:
            batch, error = given.get(timeout=SLICE_SEC)
        except queue.Empty:
            return NOT_YET
        if error is not None:
            raise error
        return batch

    threading.Thread(target=read, daemon=True).start()
    return poll


def files_and_bytes(folders: Sequence[str]) -> tuple[int, int]:
    """Return how many files lie under some folders, unfinished ones included, and their bytes."""
    files = num_bytes = 0
    for place, _, names in (entry for folder in folders for entry in os.walk(folder)):
        for name in names:
            try:
                num_bytes += Path(place, name).stat().st_size
                files += 1
            except OSError:
                continue  # renamed or removed in the meantime
    return files, num_bytes


# --- a worker process ---


def live_as_worker(worker_id: int) -> None:
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
        threading.Thread(target=_end_when_the_trainer_says_so, daemon=True).start()
    # At its end leave at once: threads that a store's client has made may be joined only when its answer comes, and the
    # loader gives each worker five seconds for that.
    multiprocessing.util.Finalize(None, os._exit, args=(0,), exitpriority=-100)


def _end_when_the_trainer_says_so() -> None:
    trainer = os.getppid()
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)
