"""mds/order.py: the order of an epoch is the same on any number of ranks and nodes, and after a resume."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from streaming import MDSWriter, Stream, StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.world import World

from mds.fetch import RetryingStream
from mds.order import Epoch, order_memory_gib, order_of_node, order_of_rank
from mds.reader import BatchDataset


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """Two datasets of 47 and 30 samples, in shards of some samples each."""
    folders = []
    for num in (47, 30):
        folders.append(tmp_path_factory.mktemp("order") / "stage")
        with MDSWriter(out=str(folders[-1]), columns={"key": "str"}, hashes=["xxh64"], size_limit=250) as writer:
            for number in range(num):
                writer.write({"key": "x" * (number % 5)})
    return folders


def stream_of(folders, *, weights=({}, {}), batch_size=3, **arguments):
    streams = [RetryingStream(local=str(f), **weight) for f, weight in zip(folders, weights, strict=False)]
    arguments = {"shuffle": True, "shuffle_seed": 5, "shuffle_block_size": 16, "num_canonical_nodes": 1, **arguments}
    return BatchDataset(streams=streams, batch_size=batch_size, **arguments)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "weights", [({}, {}), ({"repeat": 2.4}, {"choose": 11}), ({"proportion": 0.3}, {"proportion": 0.7})]
)
def test_each_rank_of_each_node_reads_what_streaming_gives_it(stages, weights, shuffle):
    """Also from within an epoch, and where nodes are more or fewer than the canonical ones."""
    arguments = dict(shuffle=shuffle, shuffle_seed=5, shuffle_block_size=16, batch_size=3)
    ours = stream_of(stages, weights=weights, **arguments)
    streams = [Stream(local=str(f), **weight) for f, weight in zip(stages, weights, strict=True)]
    plain = StreamingDataset(streams=streams, num_canonical_nodes=1, partition_algo="relaxed", **arguments)
    num_compared = 0
    for canonical, nodes, ranks in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4)):
        for epoch, drop in ((0, 0), (2, 12)):
            plain.num_canonical_nodes = canonical
            work = generate_work("random", plain, World(nodes, ranks, 1, 0), epoch, drop)
            for node in range(nodes):
                order = order_of_node(epoch_of(ours, canonical, node, nodes, epoch))[drop // nodes :]
                for rank in range(ranks):
                    expected = work[node, rank].reshape(-1)
                    assert order_of_rank(order, rank, ranks).tolist() == expected[expected != -1].tolist()
                    num_compared += 1
    assert num_compared == 392
    ours.close()


def epoch_of(dataset, canonical, node, nodes, epoch):
    """What the dataset asks for, on another number of nodes."""
    weighted = dataset.chosen != dataset.cache.samples_per_stream
    streams = list(zip(dataset.cache.shards_per_stream, dataset.chosen, strict=True)) if weighted else ()
    sizes, block = dataset.cache.samples_per_shard, dataset.shuffle_block_size
    return Epoch(sizes, canonical, node, nodes, dataset.shuffle_seed, epoch, dataset.shuffle, block, streams)


def test_nodes_that_cannot_share_the_order_are_refused_and_its_memory_is_known(stages):
    with (
        contextlib.closing(stream_of(stages)) as ours,
        pytest.raises(ValueError, match=r"^data.num_canonical_nodes: 3 "),
    ):
        order_of_node(epoch_of(ours, 3, 0, 2, 0))
    # 4 bytes a sample, twice for workers
    assert order_memory_gib(2**28, 2) == pytest.approx(4 + 2 * 64 * 2**20 / 2**30)


@pytest.mark.parametrize("sizes", [None, [0, 1]], ids=["one size", "buckets"])
def test_a_batch_of_two_nodes_has_the_samples_that_one_node_reads_after_a_resume(stages, sizes, monkeypatch):
    """Both with the number of canonical nodes that the run began with."""
    orders = {}
    for nodes, drop in ((2, 0), (1, 0), (2, 24), (1, 24)):
        parts = []
        for rank in range(4):
            variables = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4 // nodes}
            variables |= {"LOCAL_RANK": rank % (4 // nodes), "NODE_RANK": rank // (4 // nodes)}
            stream = stream_of(stages, buckets=sizes, num_canonical_nodes=2)
            with monkeypatch.context() as patch:
                [patch.setenv(name, str(value)) for name, value in variables.items()]
                stream.ranks, stream.nodes = 4 // nodes, nodes
                stream.resume(1, drop)
                epoch, order = stream._make_order()
            assert epoch == 1
            parts.append(order[: len(order) // 3 * 3].reshape(-1, 3))
            stream.close()
        shortest = min(map(len, parts))
        batches = np.concatenate([part[:shortest] for part in parts], axis=1).tolist()
        orders[nodes, drop] = [sorted(batch) for batch in batches]
    shortest = min(map(len, orders.values())) + 2
    assert orders[2, 0][:shortest] == orders[1, 0][:shortest] and len(orders[2, 0]) >= 5
    assert orders[2, 24] == orders[1, 24] == orders[2, 0][2:]
