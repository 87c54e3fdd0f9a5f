"""The order in which an epoch reads the samples of its stages: streaming's own, resumed anywhere, dealt into buckets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from streaming import StreamingDataset
from streaming.base.batching import batching_methods, generate_work_random_batching
from streaming.base.world import World

from cli.private_api import require_private_api
from stages.buckets import in_buckets
from stages.draws import Draw, draw_of
from stages.fetch import RetryingStream
from stages.machine import MachineStages
from stages.shared_memory import SEGMENTS

Array = np.ndarray[Any, Any]
OF_ORDER = ("_share_work", "_resume_incr_epoch")
require_private_api(StreamingDataset, *OF_ORDER, why="an epoch's order is resumed and dealt into buckets here")

NUMBER_BYTES = 8  # of each sample of an epoch, in /dev/shm
ORDERS = (
    10  # memory in all: streaming's py1e takes 57 to 65 bytes a sample (seen at 5 million), /dev/shm and workers 8 each
)


def memory_gib(num_samples: int) -> tuple[float, float]:
    """Return what an epoch's order takes on a node, GiB: of /dev/shm while an epoch begins; of all its memory."""
    shared = num_samples * NUMBER_BYTES / 2**30
    return shared, ORDERS * shared


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
        self.epoch = 0  # that is read
        super().__init__(streams=streams, **arguments)
        if self.buckets is not None:
            self.batching_method = BUCKETS

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
        if self.buckets is None:
            return self.epoch_size // global_batch_size
        return sum(self._batches_of_buckets(global_batch_size))

    def _batches_of_buckets(self, global_batch_size: int) -> list[int]:
        assert self.buckets is not None
        chosen = np.array([stream.choose for stream in self.streams])
        return [int(chosen[self.buckets == at].sum()) // global_batch_size for at in range(max(self.buckets) + 1)]

    def in_buckets(self, order: Array, batch_size: int) -> Array:
        """# (N,) of streaming's order of all samples -> (batches of an epoch, batch over all ranks): each of one bucket."""
        assert self.buckets is not None
        of_shard = self.buckets.astype(np.int16)[self.stream_per_shard]
        buckets = np.repeat(of_shard, self.samples_per_shard)[order]
        return in_buckets(order, buckets, self._batches_of_buckets(batch_size), batch_size)

    def _share_work(self, sample_ids: Array) -> Any:
        """Share an epoch's order. Raises ValueError: /dev/shm has no room, which would end the process without a word."""
        room = os.statvfs(SEGMENTS)
        if sample_ids.nbytes > room.f_bavail * room.f_frsize:
            size = f"the order of {sample_ids.size:,} samples, {sample_ids.nbytes / 2**30:.3g} GiB"
            todo = "Enlarge it (docker run --shm-size=16g or --ipc=host)"
            raise ValueError(f"data: {SEGMENTS} has no room for {size}. {todo}.")
        return super()._share_work(sample_ids)


def work_in_buckets(dataset: OrderedStages, world: World, epoch: int, sample_in_epoch: int) -> Array:
    """Deal streaming's order into batches of one bucket each; -> int64 (nodes, ranks, workers, batches, B), -1: none."""
    order = generate_work_random_batching(dataset, World(1, 1, 1, 0), epoch, 0).reshape(-1)
    ranks, workers, batch_size = world.ranks_per_node, world.workers_per_rank, dataset.batch_size
    assert batch_size is not None
    size = world.num_ranks * batch_size
    batches = dataset.in_buckets(order[order != -1], size)[sample_in_epoch // size :]
    dealt = batches.reshape(-1, batch_size, ranks, world.num_nodes).transpose(3, 2, 0, 1)
    dealt = np.pad(dealt, ((0, 0), (0, 0), (0, -len(batches) % workers), (0, 0)), constant_values=-1)
    return dealt.reshape(world.num_nodes, ranks, -1, workers, batch_size).transpose(0, 1, 3, 2, 4)


BUCKETS = "buckets"
batching_methods[BUCKETS] = work_in_buckets  # type: ignore[assignment]
