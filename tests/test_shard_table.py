"""mds/shard_table.py and the reading of an index: as json.loads and streaming's own classes have it."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import pickle
import random
from typing import Any

import numpy as np
import pytest
from streaming.base.format import reader_from_json
from streaming.base.spanner import Spanner

from data import DataConfig
from mds import dataset, index
from mds.cache import ShardCache
from mds.dataset import read_dataset, write_metadata
from mds.fetch import RetryingStream
from mds.index import parse_index
from mds.shard_table import NO_SHARDS, Shards, ShardTable, build_table


def entry(number: int, **changes: Any) -> dict[str, Any]:
    """A shard's entry, as our own commands write it."""
    digest = hashlib.blake2b(str(number).encode(), digest_size=8).hexdigest()
    name = f"part-{number // 1000:05d}/shard.{number % 1000:05d}.mds"
    return {
        "column_encodings": ["str", "ndarray:float16:8,4,4", "uint16"],
        "column_names": ["key", "moments", "bytes"],
        "column_sizes": [None, 256, 2],
        "compression": None,
        "format": "mds",
        "hashes": ["xxh64"],
        "raw_data": {"basename": name, "bytes": 60_000 + number, "hashes": {"xxh64": digest}},
        "samples": 24 + number % 3,
        "size_limit": 65536,
        "version": 2,
        "zip_data": None,
        **changes,
    }


def theirs(number: int) -> dict[str, Any]:
    """A third-party entry: compressed, with other kinds of hashes, in some cases without a sample."""
    hashes = [{}, {"md5": "0f"}, {"sha1": "a", "xxh64": "1" * 16}][number % 3]
    packed = {"basename": f"ö {number}.mds.zstd", "bytes": 30 + number, "hashes": hashes}
    raw = {"basename": f"ö {number}.mds", "bytes": 50_000, "hashes": {}}
    more = {"compression": "zstd:3", "zip_data": packed} if number % 4 else {}
    return entry(number, raw_data=raw, samples=0 if number == 3 else 5, column_names=["key", "moments", "x"], **more)


def text_of(shards: list[dict[str, Any]], **more: Any) -> str:
    return json.dumps({"shards": shards, "version": 2}, **{"sort_keys": True, **more})


def own_index(num: int) -> str:
    return text_of([*(entry(number) for number in range(num)), entry(num, size_limit=None)])


def shards_of(text: str, of_others: bool = False) -> ShardTable:
    return parse_index("/stage", text.encode(), of_others).shards


LAYOUTS = ({}, {"sort_keys": False}, {"indent": 1}, {"separators": (",", ":")})
"""Our own, that of streaming's merge, with spaces, and without any."""


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("make", [entry, theirs])
def test_a_table_has_the_entries_of_its_index(make, layout):
    shards = [make(number) for number in range(40)]
    table = shards_of(text_of(shards, **layout), of_others=make is theirs)
    assert list(table) == shards and table[-1] == shards[-1] and len(table) == 40
    assert table.samples.tolist() == [shard["samples"] for shard in shards]
    stored = [shard["zip_data"] or shard["raw_data"] for shard in shards]
    assert list(table.iterate_stored_files()) == [(file["basename"], file["bytes"]) for file in stored]
    assert list(table.without_empty()) == [shard for shard in shards if shard["samples"]]
    assert list(pickle.loads(pickle.dumps(table))) == shards and len(NO_SHARDS) == 0


@pytest.mark.parametrize("seed", range(2))
def test_however_an_index_is_changed_it_is_read_as_json_or_refused(seed):
    generator, whole, num_read = random.Random(seed), own_index(6), 0
    for _ in range(400):
        at, begin, kind = generator.randrange(len(whole)), generator.randrange(len(whole)), generator.randrange(4)
        cut, inserted = [
            (1, generator.choice('0123456789abcdef"\\{}[],:.-/ u\n\u0662é')),
            (generator.randrange(1, 60), ""),
            (0, generator.choice(["..", "0", "9999999999", "/", '"samples": 3, ', "e1", ".0"])),
            (0, whole[begin : begin + generator.randrange(1, 500)]),
        ][kind]
        text = whole[:at] + inserted + whole[at + cut :]
        try:
            table = shards_of(text)
        except ValueError as error:
            assert str(error).startswith("/stage/index.json") and str(error).endswith("--help"), text
        else:
            num_read += 1
            assert list(table) == json.loads(text)["shards"], text
    assert num_read > 10  # of those, e.g., with another digit


@pytest.mark.parametrize("make", [entry, theirs])
def test_a_shard_of_a_table_is_what_streaming_reads_of_its_entry(make):
    entries = [make(number) for number in range(9)]
    shards = Shards([(build_table(entries[:4]), "/a", None), (build_table(entries[4:]), "/b", None)])
    assert len(shards) == len(list(shards)) == 9 and shards[-1] is shards[8]
    for number, each in enumerate(entries):
        folder = "/a" if number < 4 else "/b"
        shard, plain = shards[np.int64(number)], reader_from_json(folder, None, copy.deepcopy(each))
        raw, packed = plain.raw_data, plain.zip_data
        assert (shard.name, shard.folder, shard.path) == (raw.basename, folder, f"{folder}/{raw.basename}")
        assert (shard.samples, shard.raw_bytes, shard.max_bytes) == (len(plain), raw.bytes, plain.get_max_size())
        assert (shard.hashes, shard.compression) == (raw.hashes, plain.compression)
        assert shard.zip_data == (None if packed is None else vars(packed))
        for name in ("column_names", "column_encodings", "column_sizes"):
            assert list(getattr(shard, name)) == getattr(plain, name)
    with pytest.raises(IndexError):
        shards[9]


def test_samples_are_located_where_streamings_spanner_has_them(tmp_path):
    sizes = np.random.default_rng(0).integers(1, 3000, 40)
    tables = [build_table(entry(at, samples=int(sizes[at])) for at in part) for part in (range(25), range(25, 40))]
    cache = ShardCache([RetryingStream(local=str(tmp_path / str(at)), table=table) for at, table in enumerate(tables)])
    ids, plain = [*range(0, sizes.sum(), 7), sizes.sum() - 1, 5, *np.cumsum(sizes)[:-1]], Spanner(sizes.copy())
    assert list(zip(*(numbers.tolist() for numbers in cache.locate(ids)), strict=True)) == [plain[at] for at in ids]
    assert [len(numbers) for numbers in cache.locate([])] == [0, 0]
    for wrong in (-1, int(sizes.sum())):
        with pytest.raises(IndexError) as error:
            cache.locate([3, wrong])
        first, last = sorted([3, wrong])
        assert str(error.value) == f"samples {first} to {last}: the first is 0, the last {sizes.sum() - 1}"


# --- memory ---


@pytest.fixture
def made_up(tmp_path):
    """A dataset of 30 shards, with no byte in them."""
    (tmp_path / "index.json").write_text(own_index(29))
    for number in range(30):
        (path := tmp_path / entry(number)["raw_data"]["basename"]).parent.mkdir(exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(60_000 + number)
    write_metadata(tmp_path, "moments", {})
    return tmp_path


def test_an_index_that_does_not_fit_into_memory_is_refused_before_it_is_read_or_fetched(made_up, in_store, monkeypatch):
    remote, size = in_store(made_up, "large"), (made_up / "index.json").stat().st_size
    monkeypatch.setattr(index, "read_host_bytes", lambda: (2**30, 2 * size))
    monkeypatch.setattr(dataset, "download_once", None)
    gib = [f"{part * size / 2**30:.3g}" for part in (1, 3, 2)]
    for location in (made_up, remote):
        text = f"index.json has {gib[0]} GiB: to read it takes about {gib[1]}, and {gib[2]}"
        with pytest.raises(ValueError, match=text):
            read_dataset(str(location))


def test_a_run_reads_an_index_once(made_up, monkeypatch):
    """Each rank read it twice, and once more as streaming's readers: 175 MB each at 400,000 shards."""
    read = []
    monkeypatch.setattr(dataset, "parse_index", lambda *given: read.append(given[0]) or parse_index(*given))
    config = DataConfig(stage="moments", remote=str(made_up))
    [stage] = config.read()
    config.problems(8, {})  # it has no tokens
    assert config.read() == [stage]
    assert read == [str(made_up)] and stage.num_samples == 750 == stage.shards.samples.sum()
    assert config.with_num_nodes(3).read() == [stage] and len(read) == 1  # as a run's is resolved
    assert dataclasses.replace(config, workers=0).read() == [stage] and len(read) == 2
