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
from mds.loader import Loader
from mds.order import Epoch, order_memory_gib, order_of_node, order_of_rank
from mds.reader import BatchDataset


class Numbers(BatchDataset):
    """Batches of the numbers of samples."""

    def read_batch(self, sample_ids):
        return {"numbers": list(map(int, sample_ids))}


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """Two stages of 47 and 30 samples, in shards of some samples each."""
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
    return Numbers(streams=streams, batch_size=batch_size, **arguments)


class PlainNumbers(StreamingDataset):
    """The numbers of samples, as streaming itself reads them."""

    def __getitem__(self, at):
        return int(at)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("weights", [({}, {}), ({"choose": 20}, {"repeat": 1.5})])
def test_epochs_have_the_samples_of_streaming_in_its_order_after_a_resume_too(stages, weights, shuffle):
    ours = stream_of(stages, weights=weights, shuffle=shuffle)
    arguments = dict(shuffle=shuffle, shuffle_seed=5, shuffle_block_size=16, num_canonical_nodes=1, batch_size=3)
    arguments |= dict(partition_algo="relaxed", shuffle_algo="py1e", sampling_granularity=1)
    streams = [Stream(local=str(f), **weight) for f, weight in zip(stages, weights, strict=True)]
    plain = PlainNumbers(streams=streams, **arguments)
    whole = [epoch[: len(epoch) // 3 * 3] for epoch in (list(plain) for _ in range(2))]
    assert [numbers_of(ours) for _ in range(2)] == whole
    ours.close()
    resumed = stream_of(stages, weights=weights, shuffle=shuffle)
    resumed.resume(1, 12)
    assert numbers_of(resumed) == whole[1][12:]
    resumed.close()


def numbers_of(batches) -> list[int]:
    return [number for batch in batches for number in batch["numbers"]]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "weights", [({}, {}), ({"repeat": 2.4}, {"choose": 11}), ({"proportion": 0.3}, {"proportion": 0.7})]
)
def test_each_rank_of_each_node_reads_what_streaming_gives_it(stages, weights, shuffle):
    """Also from within an epoch, and where nodes are more or fewer than the canonical ones."""
    arguments = dict(shuffle=shuffle, shuffle_seed=5, shuffle_block_size=16, batch_size=3)
    ours = stream_of(stages, weights=weights, **arguments)
    streams = [Stream(local=str(f), **weight) for f, weight in zip(stages, weights, strict=True)]
    plain = PlainNumbers(streams=streams, num_canonical_nodes=1, partition_algo="relaxed", **arguments)
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
    assert order_memory_gib(2**28, 2) == pytest.approx(
        4 + 2 * 64 * 2**20 / 2**30
    )  # 4 bytes a sample, twice for workers


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
                for name, value in variables.items():
                    patch.setenv(name, str(value))
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


def epochs_of(folder, num=3, *, resume=None, **loader_arguments):
    """What is read in some epochs: (epochs, batches, 3) numbers."""
    stream = stream_of([folder])
    batches = stream.count_epoch_batches(3)
    loader = Loader(stream, epoch_batches=batches, max_bad_samples=0, **loader_arguments)
    if resume is not None:
        loader.resume(*resume, 3)
    epochs = [[batch["numbers"] for batch in loader] for _ in range(num)]
    loader.close()
    return epochs


@pytest.mark.parametrize("persistent", [True, False])
def test_epochs_are_the_same_in_loader_processes_and_after_a_resume(stages, persistent):
    expected, workers = epochs_of(stages[0]), dict(num_workers=2, persistent_workers=persistent)
    assert [len(set(sum(epoch, []))) for epoch in expected] == [45] * 3 and expected[0] != expected[1]
    assert epochs_of(stages[0], **workers) == expected
    assert epochs_of(stages[0], 2, **workers, resume=(1, 13)) == [expected[1][13:], expected[2]]
