"""The order in which an epoch reads the samples of its stages: streaming's own, resumed anywhere, dealt into buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from streaming import StreamingDataset

from cli.private_api import require_private_api
from stages.buckets import in_buckets
from stages.draws import Draw, draw_of
from stages.fetch import RetryingStream
from stages.machine import MachineStages

require_private_api(
    StreamingDataset, "_get_work", "_share_work", "_resume_incr_epoch", why="an epoch's order is dealt into buckets"
)


class OrderedStages(MachineStages):
    """Several streams mixed in one order of samples, by their proportion, repeat or choose, as streaming does it.

    With buckets, this order is dealt into batches of one bucket each (stages/buckets.py).

    Args:
        streams: the stages, each in a folder of its own.
        sources: the number of each stream's data set; None: there is one.
        buckets: the number of each stream's bucket; None: there is one, and no order but streaming's.
        arguments: further keyword arguments of StreamingDataset.

    Raises: see MachineStages.
    """

    def __init__(
        self,
        *,
        streams: Sequence[RetryingStream],
        sources: Sequence[int] | None = None,
        buckets: Sequence[int] | None = None,
        **arguments: Any,
    ):
        self.sources = None if sources is None else torch.tensor(sources)
        self.buckets = None if buckets is None else np.asarray(buckets)
        self._begin_at = 0  # sample of an epoch, where it is dealt into buckets
        self.epoch = 0  # that is read
        super().__init__(streams=streams, **arguments)

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
