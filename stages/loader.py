"""The loader of a stage's batches: epochs of a fixed length, waits that are told, unusable samples counted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from streaming import StreamingDataLoader
from torch import Tensor
from torch.utils.data import DataLoader

from cli.masking import printable
from cli.private_api import require_private_api
from stages.batch_memory import RECEIPT
from stages.batch_wait import END, files_and_bytes, next_batch
from stages.fetch import StreamFailure
from stages.stream import BatchStream
from stages.workers import live_as_worker

require_private_api(DataLoader, "_iterator", why="worker processes are ended with the run")
require_private_api(
    "torch.utils.data.dataloader",
    "_MultiProcessingDataLoaderIter._shutdown_workers",
    why="worker processes are ended with the run",
)


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
