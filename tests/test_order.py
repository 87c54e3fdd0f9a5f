"""stages/order.py, shuffling.py: the order of an epoch is streaming's, however it is made."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, TINY_RUN, run
from streaming import MDSWriter, StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.partition import get_partitions
from streaming.base.shuffle import get_shuffle
from streaming.base.world import World

from bench import scale
from stages import shuffling
from stages.fetch import RetryingStream
from stages.loader import Loader
from stages.sampling import sampled
from stages.shuffling import Epoch, order_of, padded_for, part_of_worker
from stages.stream import BatchStream


class Numbers(BatchStream):
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


def dealt(order, drop, nodes, ranks, workers, batch_size):
    """(ranks, workers) -> what each worker of a node reads, after the samples that all nodes have read before."""
    order = padded_for(order[drop // nodes :], ranks)
    of = dict(ranks=ranks, workers=workers, batch_size=batch_size)
    return np.array([[part_of_worker(order, rank=r, worker=w, **of) for w in range(workers)] for r in range(ranks)])


# --- the same as streaming's ---


@pytest.mark.parametrize("window", [shuffling.WINDOW, 50])
def test_the_order_is_streamings_bit_for_bit_on_any_number_of_nodes_ranks_and_workers(window, monkeypatch):
    monkeypatch.setattr(shuffling, "WINDOW", window)
    random, seen = np.random.default_rng(window), 0
    warnings.simplefilter("ignore")  # blocks smaller than a shard: both say so
    while seen < 60:
        nodes, ranks, workers, batch = random.integers(1, 5, 4).tolist()
        canonical = nodes * int(random.integers(1, 4)) if random.random() < 0.7 else 1
        sizes = random.integers(1, random.choice([3, 50, 400]), random.integers(1, 60))
        total, device_batches = int(sizes.sum()), nodes * ranks * batch
        if total < max(canonical, 2 * device_batches):
            continue
        block, drop = int(random.choice([4, 64, 1000, 1 << 18])), int(random.integers(0, total // device_batches))
        drop, shuffle, seed, epoch = drop * device_batches, random.random() < 0.8, seen, int(random.integers(0, 5))
        expected = get_partitions("relaxed", total, canonical, nodes, ranks, workers, batch, drop)
        if shuffle:
            expected = np.where(expected >= 0, get_shuffle("py1e", sizes, canonical, seed, epoch, block)[expected], -1)
        for node in range(nodes):
            given = Epoch(sizes, canonical, node, nodes, seed, epoch, block)
            found = dealt(order_of(given, shuffle=shuffle), drop, nodes, ranks, workers, batch)
            assert np.array_equal(found, expected[node].reshape(found.shape)), (given, ranks, workers, batch, drop)
        seen += 1


@pytest.mark.parametrize("new_picks", [True, False])
def test_what_an_epoch_has_of_each_stream_is_streamings_bit_for_bit(new_picks):
    random = np.random.default_rng(int(new_picks))
    for seed in range(60):
        counts = random.integers(1, 40, random.integers(1, 5))
        sizes = random.integers(1, random.choice([3, 50, 12_000]), counts.sum())  # numpy chooses otherwise above 10,000
        begins = np.cumsum(counts) - counts
        totals = np.add.reduceat(sizes, begins)
        repeats = random.choice([0.001, 0.3, 0.5, 0.97, 1.0, 1.6, 3.0], len(counts))
        chosen, epoch = (totals * repeats).astype(int), int(random.integers(0, 9))
        plain = SimpleNamespace(
            num_streams=len(counts),
            streams=[SimpleNamespace(choose=num) for num in chosen],
            shard_offset_per_stream=begins,
            shards_per_stream=counts,
            samples_per_shard=sizes,
            sample_offset_per_shard=np.cumsum(sizes) - sizes,
            sampling_method="balanced",
            sampling_granularity=int(random.choice([1, 7, 400])),
            epoch_seed_change=new_picks,
            shuffle_seed=seed,
        )
        if not chosen.any():
            continue
        expected = StreamingDataset.resample_streams(plain, epoch)
        streams = list(zip(counts.tolist(), chosen.tolist(), strict=True))
        of_run = dict(granularity=plain.sampling_granularity, seed=seed, epoch=epoch, new_picks=new_picks)
        found = sampled(sizes, streams, **of_run)
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True)), plain


def test_a_shard_without_a_sample_is_no_unit():
    for choose in (12, 5, 29):
        with_none = sampled(np.array([0, 7, 0, 5, 0]), [(5, choose)], granularity=2, seed=1, epoch=0, new_picks=True)
        without = sampled(np.array([7, 5]), [(2, choose)], granularity=2, seed=1, epoch=0, new_picks=True)
        assert all(np.array_equal(a, b) for a, b in zip(with_none, without, strict=True)) and without[0].all()
    given, without = np.array([0, 70, 0, 50, 20]), np.array([70, 50, 20])
    orders = [order_of(Epoch(sizes, 1, 0, 1, 7, 3, 256)) for sizes in (given, without)]
    assert np.array_equal(*orders)


def test_a_larger_one_is_streamings_too():
    sizes = np.random.default_rng(0).integers(900, 1100, 2000)
    assert np.array_equal(
        order_of(Epoch(sizes, 1, 0, 1, 17, 3, 1 << 18)), get_shuffle("py1e", sizes, 1, 17, 3, 1 << 18)
    )


@pytest.mark.parametrize(
    "weights",
    [({}, {}), ({"repeat": 2.0}, {}), ({"choose": 20}, {"repeat": 1.5}), ({"proportion": 0.3}, {"proportion": 0.7})],
)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_mixture_is_dealt_out_as_streaming_does_it(stages, weights, nodes, shuffle):
    stream = stream_of(stages, weights=weights, num_canonical_nodes=nodes, shuffle=shuffle)
    for epoch, drop in ((0, 0), (3, 24)):
        expected = generate_work("random", stream, World(nodes, 2, 2, 0), epoch, drop)
        for node in range(nodes):
            stream._parallel_worker_world = World(nodes, 2, 2, node * 4)
            found = dealt(stream._order_of_node(epoch, drop), 0, nodes, 2, 2, 3)
            assert np.array_equal(found, expected[node].reshape(found.shape))
    stream.let_go()


@pytest.mark.parametrize("sizes", [None, [0, 1]], ids=["one size", "buckets"])
def test_a_batch_of_two_nodes_has_the_samples_that_one_node_reads_there_after_a_resume(stages, sizes):
    """Both with the number of canonical nodes that the run began with."""
    stream, found = stream_of(stages, buckets=sizes, num_canonical_nodes=2), {}
    for nodes, drop in ((2, 0), (1, 0), (2, 24), (1, 24)):
        parts = []
        for node in range(nodes):
            stream._parallel_worker_world = World(nodes, 4 // nodes, 1, node * 4 // nodes)
            parts.append(dealt(stream._order_of_node(1, drop), 0, nodes, 4 // nodes, 1, 3).reshape(4 // nodes, -1, 3))
        batches = np.concatenate(parts).transpose(1, 0, 2).reshape(-1, 12)  # of the four ranks together
        found[nodes, drop] = [sorted(batch) for batch in batches.tolist() if -1 not in batch]
    assert found[2, 0] == found[1, 0] and len(found[2, 0]) >= 5
    assert found[2, 24] == found[1, 24] == found[2, 0][2:]
    stream.let_go()


def test_samples_that_are_shifted_to_one_place_keep_the_order_of_their_row():
    places = np.random.default_rng(0).integers(0, 50, 5000).astype(np.float64)
    assert np.array_equal(shuffling._argsorted(places), np.argsort(places, kind="stable"))


def test_a_block_smaller_than_a_shard_is_warned_of():
    with pytest.warns(UserWarning) as warned:
        order_of(Epoch(np.array([100, 20]), 1, 0, 1, 0, 0, 64))
    said = "data: shards of 100 samples are shuffled within themselves, as a block has 64"
    assert [str(each.message) for each in warned] == [said]


def test_an_order_takes_four_bytes_a_sample_and_eight_above_two_thousand_million():
    assert shuffling.dtype_of(2**31 - 1) == np.int32 and shuffling.dtype_of(2**31) == np.int64
    assert shuffling.memory_gib(2**28) == (1.0, 3.0625) and shuffling.memory_gib(2**28, 2) == (0.5, 1.5625)
    assert shuffling.memory_gib(2**31, 4)[0] == 4.0
    assert shuffling.memory_gib(2**28, 2, has_weights=True) == (0.5, 2.5625)
    assert shuffling.memory_gib(2**28, has_buckets=True, has_weights=True) == (1.0, 8.0625)


def test_a_part_of_an_order_is_shared_whole(tmp_path):
    every_third = np.arange(20, dtype=np.int32)[::3]
    shuffling.share(every_third, tmp_path / "order")
    assert np.array_equal(np.fromfile(tmp_path / "order", np.int32), every_third)


def epochs_of(folder, num=3, *, workers=0, persistent=True, resume=None):
    """What is read in some epochs: (epochs, batches, 3) numbers."""
    stream = stream_of([folder])
    loader = Loader(
        stream,
        epoch_batches=stream.batches_of_epoch(3),
        max_bad_samples=0,
        num_workers=workers,
        persistent_workers=persistent and workers > 0,
    )
    if resume is not None:
        loader.resume(*resume, 3)
    found = [[batch["numbers"] for batch in loader] for _ in range(num)]
    loader.close()
    return found


@pytest.mark.parametrize(("workers", "persistent"), [(2, True), (2, False)])
def test_epochs_are_the_same_in_loader_processes_and_after_a_resume(stages, workers, persistent):
    expected = epochs_of(stages[0])
    assert [len(set(sum(epoch, []))) for epoch in expected] == [45] * 3 and expected[0] != expected[1]
    assert epochs_of(stages[0], workers=workers, persistent=persistent) == expected
    rest = epochs_of(stages[0], 2, workers=workers, persistent=persistent, resume=(1, 13))
    assert rest == [expected[1][13:], expected[2]]


@pytest.mark.timeout(60, func_only=True)
def test_a_shared_memory_too_small_for_the_order_is_an_error_with_the_figure():
    """A real one of 64 MB, as Docker's: 20 million samples need 80 MB."""
    program = "import numpy as np; from pathlib import Path; from stages.shuffling import share; "
    program += "share(np.zeros(20_000_000, np.int32), Path('/dev/shm/000000_order'))"
    mounted = f'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {sys.executable} -c "{program}"; ls /dev/shm'
    command = ["unshare", "-m", "bash", "-c", mounted]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    if "unshare failed" in done.stderr or "mount:" in done.stderr:
        pytest.skip("no mount namespace here")
    assert done.stderr.splitlines()[-1] == (
        "ValueError: data: /dev/shm has no room for the order of 20,000,000 samples, 0.0745 GiB (No space left on device). "
        "Enlarge it (docker run --shm-size=16g or --ipc=host)."
    )


@pytest.mark.slow
@pytest.mark.timeout(400, func_only=True)
def test_ranks_that_wait_for_an_order_without_room_end_with_the_one_that_makes_it(tmp_path):
    """Where others have filled /dev/shm since the start looked at it; 3 million samples, of which 8 MB hold two."""
    scale.make_stage(tmp_path, 3000, 1000, (64, 64))
    program = "from cli.command import start; from preflight.checks import CHECKS; import benchmark; "
    program += "CHECKS['configuration'] = [one for one in CHECKS['configuration'] if one.name != '/dev/shm']; "
    program += "start(benchmark.main)"
    (tmp_path / "program.py").write_text(program)
    words = ["data.stage=moments", f"data.remote={tmp_path}/stage", f"data.local={tmp_path}/cache", "data.workers=1"]
    words += [*TINY_RUN, "model.weights=random", f"run_folder={tmp_path}/runs", "run_name=a"]
    mounted = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec composer -n 2 "$@"'
    done = run("unshare", "-m", "bash", "-c", mounted, "_", str(tmp_path / "program.py"), *words, timeout=300)
    said = done.stdout + done.stderr
    if "unshare failed" in said or "mount:" in said:
        pytest.skip("no mount namespace here")
    text = "data: /dev/shm has no room for the order of 3,000,000 samples, 0.0112 GiB (No space left on device). "
    assert done.returncode == 1 and len(re.findall(f"(?m)^{re.escape(text)}", done.stderr)) == 1, said
    assert said.count(f"rank 0 has stopped: {text}") == 1 and "Traceback" not in said, said
