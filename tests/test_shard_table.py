"""stages/shard_table.py and the reading of an index: as json.loads and streaming's own classes have it."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import pickle
import random
from typing import Any

import numpy as np
import pytest
from streaming.base.format import reader_from_json
from streaming.base.spanner import Spanner

from data import DataConfig
from stages import dataset, index_file
from stages.dataset import read_stage, write_facts
from stages.index_file import parsed_index
from stages.shard_table import NO_SHARDS, Readers, ShardOfSample, ShardTable, table_of


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
    """One of others: compressed, with hashes of its own kinds, in some cases without a sample."""
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
    return parsed_index("/stage", text.encode(), of_others).shards


LAYOUTS = {
    "of our own": {},
    "of streaming's merge": {"sort_keys": False},
    "with spaces": {"indent": 1},
    "without any": {"separators": (",", ":")},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [entry, theirs])
def test_a_table_has_the_entries_of_its_index(make, layout):
    shards = [make(number) for number in range(40)]
    table = shards_of(text_of(shards, **LAYOUTS[layout]), of_others=make is theirs)
    assert list(table) == shards and table[-1] == shards[-1] and len(table) == 40
    assert table.samples.tolist() == [shard["samples"] for shard in shards]
    stored = [shard["zip_data"] or shard["raw_data"] for shard in shards]
    assert list(table.stored()) == [(file["basename"], file["bytes"]) for file in stored]
    assert list(table.filled()) == [shard for shard in shards if shard["samples"]]
    assert list(pickle.loads(pickle.dumps(table))) == shards and len(NO_SHARDS) == 0


@pytest.mark.parametrize("seed", range(4))
def test_however_an_index_is_changed_it_is_read_as_json_or_refused(seed):
    generator, whole, read = random.Random(seed), own_index(6), 0
    for _ in range(500):
        at, text = generator.randrange(len(whole)), whole
        kind = generator.randrange(4)
        if kind == 0:
            text = whole[:at] + generator.choice('0123456789abcdef"\\{}[],:.-/ u\n\u0662é') + whole[at + 1 :]
        elif kind == 1:
            text = whole[:at] + whole[at + generator.randrange(1, 60) :]
        elif kind == 2:
            text = (
                whole[:at] + generator.choice(["..", "0", "9999999999", "/", '"samples": 3, ', "e1", ".0"]) + whole[at:]
            )
        else:
            begin = generator.randrange(len(whole))
            text = whole[:at] + whole[begin : begin + generator.randrange(1, 500)] + whole[at:]
        try:
            table = shards_of(text)
        except ValueError as error:
            assert str(error).startswith("/stage/index.json") and str(error).endswith("--help"), text
        else:
            read += 1
            assert list(table) == json.loads(text)["shards"], text
    assert read > 15  # of those, e.g., with another digit


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"bytes": 2**32}, "shards[3].raw_data.bytes is 4294967296. Possible: a whole number from 1 to 4,294,967,295"),
        ({"bytes": 40}, "shards[3].samples is 24. Possible: at most 8 in a shard of 40 bytes"),
        ({"basename": "../x.mds"}, 'shards[3].raw_data.basename is "../x.mds". Possible: the name of a file inside'),
        ({"basename": "part-00000/shard.00001.mds"}, "lists part-00000/shard.00001.mds twice"),
        ({"basename": "a//x.mds"}, 'shards[3].raw_data.basename is "a//x.mds". Possible: the name of a file inside'),
    ],
)
def test_a_wrong_entry_among_others_is_named(change, told):
    shards = [entry(number) for number in range(6)]
    shards[3]["raw_data"] |= change
    with pytest.raises(ValueError) as error:
        shards_of(text_of(shards))
    text = str(error.value)
    assert text.startswith(f"/stage/index.json{': ' if 'Possible' in told else ' '}{told}") and text.endswith("--help")


@pytest.mark.parametrize("make", [entry, theirs])
def test_a_reader_of_a_table_is_that_of_streaming(make):
    shards = [make(number) for number in range(9)]
    readers = Readers([(table_of(shards[:4]), "/a", None)])
    readers += Readers([(table_of(shards[4:]), "/b", None)])
    assert len(readers) == 9 and len(readers[2:7]) == 5 and readers[2:7][3].dirname == "/b"
    for number, shard in enumerate(shards):
        own, other = (
            readers[np.int64(number)],
            reader_from_json("/a" if number < 4 else "/b", None, copy.deepcopy(shard)),
        )
        assert {name: getattr(own, name) for name in vars(other)} == vars(other)
        assert (own.get_max_size(), own.get_raw_size(), len(own)) == (
            other.get_max_size(),
            other.get_raw_size(),
            len(other),
        )
    with pytest.raises(IndexError):
        readers[9]


def test_the_shard_of_a_sample_is_that_of_streamings_spanner():
    sizes = np.random.default_rng(0).integers(1, 3000, 40)
    own, other = ShardOfSample(sizes), Spanner(sizes.copy())
    for sample_id in [*range(0, sizes.sum(), 7), sizes.sum() - 1, np.int64(5), *np.cumsum(sizes)[:-1]]:
        assert own[sample_id] == other[sample_id]
    for wrong in (-1, sizes.sum()):
        told = []
        for one in (own, other):
            with pytest.raises(IndexError) as error:
                one[wrong]
            told.append(str(error.value))
        assert told[0] == told[1]


# --- memory ---


@pytest.fixture
def made_up(tmp_path):
    """A stage of 30 shards, with no byte in them."""
    (tmp_path / "index.json").write_text(own_index(29))
    for number in range(30):
        (path := tmp_path / entry(number)["raw_data"]["basename"]).parent.mkdir(exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(60_000 + number)
    write_facts(tmp_path, "moments", {})
    return tmp_path


def test_an_index_that_does_not_fit_into_memory_is_refused_before_it_is_read(made_up):
    os.truncate(made_up / "index.json", 2**43)  # of a disk that takes no room
    with pytest.raises(ValueError) as error:
        read_stage(str(made_up))
    given, free = str(error.value).split(", and ")
    assert given == f"{made_up}/index.json has 8.19e+03 GiB: to read it takes about 2.46e+04"
    assert free.endswith(
        " are free here. Use a machine with more memory, or make the stage again with larger shards (shard_size)."
    )


def test_one_of_a_store_is_refused_before_it_is_fetched(made_up, store, monkeypatch):
    client, variables = store
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    size = (made_up / "index.json").stat().st_size
    client.put_object(Bucket="easel", Key="large/index.json", Body=(made_up / "index.json").read_bytes())
    monkeypatch.setattr(index_file, "host_bytes", lambda: (2**30, 2 * size))
    monkeypatch.setattr(dataset, "download_once", None)
    with pytest.raises(ValueError) as error:
        read_stage("s3://easel/large")
    gib = [f"{part * size / 2**30:.3g}" for part in (1, 3, 2)]
    assert str(error.value) == (
        f"s3://easel/large/index.json has {gib[0]} GiB: to read it takes about {gib[1]}, and {gib[2]} are free here. Use a "
        "machine with more memory, or make the stage again with larger shards (shard_size)."
    )


def test_a_run_reads_an_index_once(made_up, monkeypatch):
    """Each rank read it twice, and once more as streaming's readers: 175 MB each at 400,000 shards."""
    read = []
    monkeypatch.setattr(dataset, "parsed_index", lambda *given: read.append(given[0]) or parsed_index(*given))
    config = DataConfig(stage="moments", remote=str(made_up))
    [stage] = config.read()
    config.problems(8, {})  # it has no tokens
    assert config.read() == [stage]
    assert read == [str(made_up)] and stage.num_samples == 750 == stage.shards.samples.sum()
    assert config.on_nodes(3).read() == [stage] and len(read) == 1  # as a run's is resolved
    assert dataclasses.replace(config, workers=0).read() == [stage] and len(read) == 2
