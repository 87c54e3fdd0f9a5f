"""The order in which an epoch reads the samples of its stages: streaming's own, resumed anywhere, dealt into buckets.

Its random part is made in stages/shuffling.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from streaming import StreamingDataset

from cli.private_api import require_private_api
from stages.buckets import in_buckets
from stages.draws import Draw, draw_of
from stages.fetch import RetryingStream
from stages.machine import MachineStages
from stages.shared_memory import SEGMENTS
from stages.shuffling import Array, Epoch, dtype_of, order_of, padded_for, part_of_worker, share

OF_ORDER = ("_get_work", "_resume_incr_epoch", "_shared_barrier", "_unique_worker_world", "_parallel_worker_world")
require_private_api(StreamingDataset, *OF_ORDER, "_shm_prefix_int", why="an epoch's order is made and shared here")


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
        assert not self.shuffle or self.shuffle_algo == "py1e"  # the one that is made here
        assert self.sampling_method == "balanced"  # the same

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

    # --- the order of an epoch ---

    def _get_work(self, epoch: int, sample_in_epoch: int) -> Array:
        """Return this worker's samples: one process of the machine makes the order, and the others take theirs from it.

        As streaming does it, with one difference: a node's own part alone is shared, in 4 bytes a sample.
        """
        leads, world = self._unique_worker_world.is_local_leader, self._parallel_worker_world
        if not hasattr(self._shared_barrier, "lock"):
            self._shared_barrier.lock = FileLock(self._shared_barrier.filelock_path)
        shared = SEGMENTS / f"{self._shm_prefix_int:06d}_order"
        if leads:
            share(padded_for(self._order_of_node(epoch, sample_in_epoch), world.ranks_per_node), shared)
        self._shared_barrier(self._unique_worker_world.workers_per_node)
        order = np.memmap(shared, dtype_of(self.num_samples), mode="r") if shared.stat().st_size else np.empty(0, int)
        rank, worker = world.rank_of_node, world.worker_of_rank
        all_of = {"ranks": world.ranks_per_node, "workers": world.workers_per_rank, "batch_size": self.batch_size}
        own = part_of_worker(order, rank=rank, worker=worker, **all_of)
        self._shared_barrier(self._unique_worker_world.workers_per_node)
        if leads:
            shared.unlink()
        return own

    def _order_of_node(self, epoch: int, sample_in_epoch: int) -> Array:
        """Return the samples that this node reads, in their order, from a sample of the epoch (over all nodes) on."""
        order = order_of(self._epoch_of(epoch), shuffle=self.shuffle)
        nodes = self._parallel_worker_world.num_nodes
        if self.buckets is None:
            return order[sample_in_epoch // nodes :]
        size = nodes * self._parallel_worker_world.ranks_per_node * self.batch_size
        return self._in_buckets(order, size)[sample_in_epoch // size :].reshape(-1)[
            self._parallel_worker_world.node :: nodes
        ]

    @property
    def has_weights(self) -> bool:
        """True where an epoch has a sample several times, or not at all."""
        return any(stream.choose != num for stream, num in zip(self.streams, self.samples_per_stream, strict=True))

    def _epoch_of(self, epoch: int) -> Epoch:
        world, streams = self._parallel_worker_world, []
        if self.has_weights:
            chosen = [int(stream.choose) for stream in self.streams]
            streams = list(zip(self.shards_per_stream.tolist(), chosen, strict=True))
        node, nodes = (
            (world.node, world.num_nodes) if self.buckets is None else (0, 1)
        )  # batches are dealt from all of it
        return Epoch(
            self.samples_per_shard,
            canonical_nodes=self.num_canonical_nodes,
            node=node,
            nodes=nodes,
            seed=self.shuffle_seed,
            epoch=epoch,
            block_size=self.shuffle_block_size,
            streams=streams,
            granularity=self.sampling_granularity,
        )

    def _in_buckets(self, order: Array, batch_size: int) -> Array:
        """# (N,) of streaming's order of all samples -> (batches of an epoch, batch over all ranks): each of one bucket."""
        assert self.buckets is not None
        of_shard = self.buckets.astype(np.int16)[self.stream_per_shard]
        buckets = np.repeat(of_shard, self.samples_per_shard)[order]
        return in_buckets(order, buckets, self._batches_of_buckets(batch_size), batch_size)
