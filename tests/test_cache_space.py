"""mds/cache.py: room in the cache folder, whatever else lies there and however many shards the dataset has."""

from __future__ import annotations

import contextlib
import shutil
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from streaming import MDSWriter
from test_shard_table import entry, text_of

from mds.cache import CacheFolder, ShardState
from mds.dataset import write_metadata
from mds.fetch import RetryingStream
from mds.moments import MomentsDataset
from mds.reader import BatchDataset
from mds.shard_table import ShardTable, build_table

COLUMNS = {"moments": ((4,), "float16", "float16")}


def write_stage(folder: Path, num: int, size_limit: int = 280) -> Path:
    """Write shards of three rows each, or larger ones."""
    columns = {"moments": "ndarray:float16:4", "key": "str"}
    with MDSWriter(out=str(folder), columns=columns, hashes=["xxh64"], size_limit=size_limit) as writer:
        for number in range(num):
            writer.write({"moments": np.full(4, number, np.float16), "key": f"{number:03d}"})
    write_metadata(folder, "moments", {})
    return folder


def bytes_of_shards(cache: Path) -> int:
    """Return what shards take there, those that are on their way included; each counts once, while it is renamed too."""
    sizes: dict[str, int] = {}
    for path in cache.glob("shard.*"):
        with contextlib.suppress(FileNotFoundError):  # just renamed or evicted
            name = path.name.partition(".mds")[0]
            sizes[name] = max(sizes.get(name, 0), path.stat().st_size)
    return sum(sizes.values())


def test_a_limit_neither_counts_nor_evicts_a_dataset_that_is_read_in_place(tmp_path):
    """Streaming evicted the least recently read shard of any dataset, which was the user's only copy.

    It also counted the index and the largest shard of such a dataset, and refused a limit that was large enough.
    """
    ours, in_place = write_stage(tmp_path / "a", 60), write_stage(tmp_path / "b", 120, size_limit=1 << 20)
    whole = {path.name: path.read_bytes() for path in in_place.iterdir()}
    limit = (ours / "index.json").stat().st_size + 5 * max(path.stat().st_size for path in ours.glob("*.mds"))
    assert 4 * len(whole["shard.00000.mds"]) > limit
    streams = [RetryingStream(remote=str(ours), local=str(tmp_path / "cache")), RetryingStream(local=str(in_place))]
    arguments = dict(batch_size=6, cache_limit=limit, predownload=6, num_canonical_nodes=1, shuffle=True)
    batches = list(MomentsDataset(columns=[COLUMNS] * 2, streams=streams, **arguments))
    assert len(batches) == 30 and all(batch["moments"].shape == (6, 4) for batch in batches)
    assert {path.name: path.read_bytes() for path in in_place.iterdir()} == whole
    assert len(list((tmp_path / "cache").glob("*.mds"))) < len(list(ours.glob("*.mds"))) / 2


def test_third_party_files_in_the_cache_are_neither_counted_nor_removed(tmp_path):
    """A file of an earlier run is both."""
    stage, cache = write_stage(tmp_path / "stage", 30), tmp_path / "cache"
    shards = sorted(stage.glob("*.mds"))
    shutil.copytree(stage, cache)
    (cache / "theirs").mkdir()
    foreign = [*(cache / f"foreign-{number}.mds" for number in range(200)), cache / "theirs" / "shard.00000.mds"]
    for path in foreign:
        path.write_bytes(b"123456789")
    sizes = [path.stat().st_size for path in shards]
    limit = (stage / "index.json").stat().st_size + sum(sizes[:5]) + sizes[9]
    stream = RetryingStream(remote=str(stage), local=str(cache))
    with contextlib.closing(BatchDataset(streams=[stream], batch_size=3, cache_limit=limit)) as dataset:
        assert dataset.cache._folders[0].num_bytes.tolist() == sizes
        dataset.cache.prepare_shard(9)
        assert sorted(path.name for path in cache.glob("shard.*")) == [path.name for path in [*shards[:5], shards[9]]]
        assert all(path.is_file() for path in foreign)
        expected = [size if number in (0, 1, 2, 3, 4, 9) else 0 for number, size in enumerate(sizes)]
        assert dataset.cache._folders[0].num_bytes.tolist() == expected and dataset.cache.usage() == limit


def test_a_stream_of_a_hundred_million_samples_takes_little_memory(tmp_path):
    """Streaming's map of samples to shards takes 0.8 GiB for a moment, and its readers 3 kB a shard."""
    one = build_table(entry(number, samples=5000) for number in range(200))
    names = ("kind_numbers", "samples", "raw_bytes", "zip_bytes", "names", "hashes", "zip_files")
    table = ShardTable(kinds=one.kinds, **{name: np.tile(getattr(one, name), 100) for name in names})
    (tmp_path / "index.json").write_text(text_of([entry(0)]))
    stream = RetryingStream(remote=str(tmp_path), local=str(tmp_path / "cache"), table=table)
    tracemalloc.start()
    dataset = BatchDataset(streams=[stream], batch_size=8, num_canonical_nodes=1)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(dataset.shards) == 20_000 and dataset.cache.sample_ends[-1] == 100_000_000
    shard_ids, rows = dataset.cache.locate([99_999_999, 5000, 0])
    assert shard_ids.tolist() == [19_999, 1, 0] and rows.tolist() == [4999, 0, 0]
    assert kept < 8 * 2**20 and peak < 24 * 2**20
    dataset.close()


def test_shards_of_an_earlier_run_without_a_limit_are_all_read(tmp_path, monkeypatch):
    """Each fetch waited for room that the others held, where all were there before: for ever."""
    stage, cache, num = write_stage(tmp_path / "stage", 60), tmp_path / "cache", 5
    shutil.copytree(stage, cache)
    largest = max(path.stat().st_size for path in stage.glob("*.mds"))
    limit = (stage / "index.json").stat().st_size + (num - 1) * largest
    stream = RetryingStream(remote=str(stage), local=str(cache))
    dataset = MomentsDataset(columns=[COLUMNS], streams=[stream], batch_size=12, cache_limit=limit)
    together, try_lock = threading.Barrier(num), CacheFolder.try_lock

    def lock_with_the_others(folder, number):
        if threading.current_thread().name.startswith("all at once") and not together.broken:
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(5)
                together.abort()
        return try_lock(folder, number)

    monkeypatch.setattr(CacheFolder, "try_lock", lock_with_the_others)
    with ThreadPoolExecutor(num, "all at once") as pool:
        list(pool.map(dataset.cache.prepare_shard, range(num), timeout=30))
    assert ShardState.PREPARING not in dataset.cache.states and dataset.cache.usage() <= limit + largest
    dataset.close()
