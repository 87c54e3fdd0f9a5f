"""stages/machine.py: room in the cache folder, whatever else lies there and however many shards the stage has."""

from __future__ import annotations

import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from streaming import MDSWriter
from test_shard_table import entry, text_of

from stages.dataset import write_facts
from stages.fetch import RetryingStream
from stages.machine import MachineStages
from stages.moments import MomentsStream
from stages.shard_table import ShardTable, table_of

COLUMNS = {"moments": ((4,), "float16", "float16")}


def write_stage(folder: Path, num: int) -> Path:
    """Shards of three rows each."""
    columns = {"moments": "ndarray:float16:4", "key": "str"}
    with MDSWriter(out=str(folder), columns=columns, hashes=["xxh64"], size_limit=250) as writer:
        for number in range(num):
            writer.write({"moments": np.full(4, number, np.float16), "key": f"{number:03d}"})
    write_facts(folder, "moments", {})
    return folder


def test_a_limit_puts_out_no_shard_of_a_stage_that_is_read_in_place(tmp_path):
    """Streaming put out the shard that was read longest ago, whosever it was: the user's only copy of it."""
    ours, in_place = write_stage(tmp_path / "a", 60), write_stage(tmp_path / "b", 60)
    whole = {path.name: path.read_bytes() for path in in_place.iterdir()}
    size = max(len(content) for name, content in whole.items() if name.endswith(".mds"))
    limit = (ours / "index.json").stat().st_size + 5 * size
    streams = [RetryingStream(remote=str(ours), local=str(tmp_path / "cache")), RetryingStream(local=str(in_place))]
    arguments = dict(batch_size=6, cache_limit=limit, predownload=6, num_canonical_nodes=1, shuffle=True)
    read = list(MomentsStream(columns=[COLUMNS] * 2, streams=streams, **arguments))
    assert len(read) == 20 and all(batch["moments"].shape == (6, 4) for batch in read)
    assert {path.name: path.read_bytes() for path in in_place.iterdir()} == whole
    assert len(list((tmp_path / "cache").glob("*.mds"))) < len(list(ours.glob("*.mds"))) / 2


def test_a_limit_is_compared_with_what_it_is_for(tmp_path):
    """Streaming counted a stage that is read in place, its index and its largest shard, and refused a limit with room."""
    ours, in_place = write_stage(tmp_path / "a", 12), tmp_path / "b"
    with MDSWriter(
        out=str(in_place), columns={"moments": "ndarray:float16:4", "key": "str"}, hashes=["xxh64"]
    ) as writer:
        for _ in range(60):
            writer.write({"moments": np.zeros(4, np.float16), "key": "large"})
    write_facts(in_place, "moments", {})
    largest, index = max(path.stat().st_size for path in ours.glob("*.mds")), (ours / "index.json").stat().st_size
    limit = index + 4 * largest

    def read(**arguments):
        streams = [RetryingStream(remote=str(ours), local=str(tmp_path / "cache")), RetryingStream(local=str(in_place))]
        return MomentsStream(columns=[COLUMNS] * 2, streams=streams, batch_size=6, num_canonical_nodes=1, **arguments)

    assert 4 * next(in_place.glob("*.mds")).stat().st_size > limit
    assert len(list(read(cache_limit=limit))) == 12


def test_the_cache_is_counted_without_what_lies_there_of_others(tmp_path):
    """Theirs is neither counted nor removed; a file of an earlier run in a folder of the stage is both."""
    stage, cache = write_stage(tmp_path / "stage", 30), tmp_path / "cache"
    shards = sorted(stage.glob("*.mds"))
    shutil.copytree(stage, cache)
    for number in range(2000):
        (cache / f"foreign-{number}.mds").write_bytes(b"123456789")
    (cache / "theirs").mkdir()
    (cache / "theirs" / "shard.00000.mds").touch()
    sizes = [path.stat().st_size for path in shards]
    limit = (stage / "index.json").stat().st_size + sum(sizes[:5]) + sizes[9]
    dataset = MachineStages(
        streams=[RetryingStream(remote=str(stage), local=str(cache))], batch_size=3, cache_limit=limit
    )
    assert dataset._earlier_bytes.numpy().tolist() == sizes
    dataset.prepare_shard(9)
    assert sorted(path.name for path in cache.glob("shard.*")) == [path.name for path in [*shards[:5], shards[9]]]
    assert len(list(cache.glob("foreign-*"))) == 2000 and (cache / "theirs" / "shard.00000.mds").is_file()
    assert dataset._earlier_bytes.numpy().tolist() == [*sizes[:5], *[0] * (len(sizes) - 5)]
    dataset.let_go()


def made_up(folder: Path, table: ShardTable, **arguments) -> MachineStages:
    """A stage of which only the index is there."""
    folder.mkdir(exist_ok=True)
    (folder / "index.json").write_text(text_of([entry(0)]))
    stream = RetryingStream(remote=str(folder), local=str(folder.with_name(f"{folder.name}-cache")), table=table)
    return MachineStages(streams=[stream], batch_size=8, num_canonical_nodes=1, **arguments)


@pytest.mark.parametrize("num_shards", [20, 20_000])
def test_a_fetch_asks_the_disk_for_no_other_shard(tmp_path, monkeypatch, num_shards):
    """It asked for each of the stage's, under a lock of the whole machine: 1.1 s at 100,000 shards."""
    table = table_of(entry(number) for number in range(num_shards))
    dataset = made_up(tmp_path / "stage", table, cache_limit=10**6)
    earlier = [tmp_path / "stage-cache" / table.names[number] for number in (3, 7)]
    for number, path in zip((3, 7), earlier, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(400_000))
        dataset._earlier_bytes[number] = 400_000
    asked = []
    for name in ("stat", "lstat", "scandir", "listdir"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, real=real, **more: asked.append(given) or real(*given, **more))
    dataset._make_room(5)  # there is room
    dataset._make_room(num_shards - 1)  # still
    assert len(asked) < 8 and all(path.exists() for path in earlier)
    dataset.cache_usage += 300_000
    dataset._make_room(5)
    assert len(asked) < 12 and [path.exists() for path in earlier] == [True, False]
    dataset.let_go()


def test_a_stream_of_a_hundred_million_samples_takes_little_memory(tmp_path):
    """Streaming's map of samples to shards takes 0.8 GiB for a moment, and its readers 3 kB a shard."""
    one = table_of(entry(number, samples=5000) for number in range(200))
    names = ("kind_of", "samples", "raw_bytes", "zip_bytes", "names", "hashes", "zips")
    table = ShardTable(kinds=one.kinds, **{name: np.tile(getattr(one, name), 100) for name in names})
    tracemalloc.start()
    dataset = made_up(tmp_path / "stage", table)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(dataset.shards) == 20_000 and dataset.num_samples == 100_000_000
    assert dataset.spanner[99_999_999] == (19_999, 4999) and dataset.places_of([5000])[0].tolist() == [1]
    assert kept < 8 * 2**20 and peak < 24 * 2**20
    dataset.let_go()
