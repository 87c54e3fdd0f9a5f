"""stages/order.py: the order of an epoch is the same on any number of ranks and nodes, and after a resume."""

from __future__ import annotations

import re

import pytest
from conftest import TINY_RUN, run
from streaming import MDSWriter, Stream, StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.world import World

from bench import scale
from stages.fetch import RetryingStream
from stages.loader import Loader
from stages.order import memory_gib
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


class PlainNumbers(StreamingDataset):
    """The numbers of samples, as streaming itself reads them."""

    def __getitem__(self, at):
        return int(at)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "weights",
    [({}, {}), ({"repeat": 2.0}, {}), ({"choose": 20}, {"repeat": 1.5}), ({"proportion": 0.3}, {"proportion": 0.7})],
)
def test_epochs_have_the_samples_of_streaming_in_its_order_after_a_resume_too(stages, weights, shuffle):
    ours = stream_of(stages, weights=weights, shuffle=shuffle)
    arguments = dict(shuffle=shuffle, shuffle_seed=5, shuffle_block_size=16, num_canonical_nodes=1, batch_size=3)
    streams = [Stream(local=str(f), **weight) for f, weight in zip(stages, weights, strict=True)]
    plain = PlainNumbers(
        streams=streams, partition_algo="relaxed", shuffle_algo="py1e", sampling_granularity=1, **arguments
    )
    expected = [list(plain) for _ in range(2)]
    whole = [epoch[: len(epoch) // 3 * 3] for epoch in expected]
    assert [[number for batch in ours for number in batch["numbers"]] for _ in range(2)] == whole
    ours.let_go()
    resumed = stream_of(stages, weights=weights, shuffle=shuffle)
    resumed.resume(1, 12)
    assert [number for batch in resumed for number in batch["numbers"]] == whole[1][12:]
    resumed.let_go()


@pytest.mark.parametrize("sizes", [None, [0, 1]], ids=["one size", "buckets"])
def test_a_batch_of_two_nodes_has_the_samples_that_one_node_reads_there_after_a_resume(stages, sizes):
    """Both with the number of canonical nodes that the run began with."""
    stream, found = stream_of(stages, buckets=sizes, num_canonical_nodes=2), {}
    for nodes, drop in ((2, 0), (1, 0), (2, 24), (1, 24)):
        work = generate_work(stream.batching_method, stream, World(nodes, 4 // nodes, 1, 0), 1, drop)
        batches = work.reshape(4, -1, 3).transpose(1, 0, 2).reshape(-1, 12)  # of the four ranks together
        found[nodes, drop] = [sorted(batch) for batch in batches.tolist() if -1 not in batch]
    assert found[2, 0] == found[1, 0] and len(found[2, 0]) >= 5
    assert found[2, 24] == found[1, 24] == found[2, 0][2:]
    stream.let_go()


def test_an_order_takes_eight_bytes_a_sample_of_shared_memory():
    assert memory_gib(2**27) == (1.0, 10.0)


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


@pytest.mark.slow
@pytest.mark.timeout(400, func_only=True)
def test_ranks_that_wait_for_an_order_without_room_end_with_the_one_that_makes_it(tmp_path):
    """Where others have filled /dev/shm since the start looked at it; 3 million samples, of which 8 MB hold one."""
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
    text = "data: /dev/shm has no room for the order of 3,000,000 samples, 0.0224 GiB. Enlarge it (docker run "
    assert done.returncode == 1 and len(re.findall(f"(?m)^{re.escape(text)}", done.stderr)) == 1, said
    assert said.count(f"rank 0 has stopped: {text}") == 1 and "Traceback" not in said, said
