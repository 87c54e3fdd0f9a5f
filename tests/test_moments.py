"""mds/moments.py and mds/shard_file.py: rows of any layout, what is damaged in them, what reading leaves behind."""

from __future__ import annotations

import gc
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from streaming import MDSWriter, StreamingDataset

from mds.cache import ShardState
from mds.dataset import write_metadata
from mds.fetch import RetryingStream
from mds.moments import FLIPPED_COLUMN, MomentsDataset, _find_non_finite
from mds.shard_file import DAMAGED, ShardError, ShardFile

ARRAYS = {"moments": "ndarray:float16:8,4,4", "tokens": "ndarray:uint16:77"}
LAYOUTS = {  # shards have their columns by name
    "around": {"caption": "str", "key": "str", "number": "int", "title": "json", "weight": "float32"},
    "none": {"height": "int"},
    "mirrored": {"caption": "str", "key": "str", FLIPPED_COLUMN: ARRAYS["moments"]},
}


def row_of(number: int) -> dict:
    values = np.random.default_rng(number)
    moments, mirrored = values.normal(size=(2, 8, 4, 4)).astype(np.float16)
    arrays = {"moments": moments, FLIPPED_COLUMN: mirrored, "tokens": values.integers(0, 49408, 77).astype(np.uint16)}
    numbers = {"number": number, "height": 1, "weight": np.float32(number), "title": [number] * (number % 3)}
    return {**arrays, **numbers, "caption": "ä" * (number % 5), "key": f"{number:03d}"}


def write_stage(out: Path, more: dict[str, str], num: int, size_limit: int = 4096) -> Path:
    columns = {**ARRAYS, **more}
    with MDSWriter(out=str(out), columns=columns, hashes=["xxh64"], size_limit=size_limit) as writer:
        for number in range(num):
            writer.write({name: value for name, value in row_of(number).items() if name in columns})
    write_metadata(out, "moments", {})
    return out


def stream_of(stage: Path, **options) -> MomentsDataset:
    columns = {"moments": ((8, 4, 4), "float16", "float16"), "tokens": ((77,), "uint16", "int64")}
    return MomentsDataset(columns=[columns], streams=[RetryingStream(local=str(stage))], batch_size=5, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_are_read_wherever_they_lie_in_a_row(tmp_path, layout):
    stage = write_stage(tmp_path / "stage", LAYOUTS[layout], 30)
    dataset, plain = stream_of(stage, flip=layout == "mirrored"), StreamingDataset(local=str(stage), batch_size=1)
    numbers = [29, 3, 4, 4, 0, 17, 11, 12]
    batch = dataset.read_batch(np.array(numbers))
    assert {type(each) for each in batch.values()} == {torch.Tensor, list} and batch["bad"] == []
    for place, number in enumerate(numbers):
        name = FLIPPED_COLUMN if layout == "mirrored" and dataset.draw(number).is_flipped else "moments"
        assert np.array_equal(batch["moments"][place].numpy(), plain[number][name])
        assert np.array_equal(batch["tokens"][place].numpy(), plain[number]["tokens"])
    shard, theirs = dataset.shards[0], plain.shards[0]
    with ShardFile(shard) as file:
        rows = [b"".join(map(bytes, columns.values())) for columns in file.read(range(shard.samples))]
    assert len(rows) == theirs.samples > 3 and min(map(len, rows)) > 400
    assert all(theirs.get_sample_data(row).endswith(joined) for row, joined in enumerate(rows))


def test_every_float16_that_is_not_finite_is_found_and_no_other():
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    found = [bool(_find_non_finite(every[at : at + 1])) for at in range(2**16)]
    assert np.array_equal(found, ~np.isfinite(every)) and sum(found) == 2**11
    batch = np.zeros((4, 8, 2), np.float16)
    batch[1, 7, 1], batch[3, 0, 0] = -np.inf, np.nan
    assert _find_non_finite(batch) == _find_non_finite(batch.astype(np.float32)) == [1, 3]
    assert _find_non_finite(np.ones((4, 2), np.uint16)) == []


def at_row_2(size: int):
    return lambda data, begin: data[:begin] + struct.pack("<I", size) + data[begin + 4 :]


OTHER_COUNTS = (lambda data, begin: data[:9], lambda data, begin: b"\5" + data[1:], lambda data, begin: b"")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda data, begin: data[: begin + 300], "it ends within row 2"),
        *((at_row_2(size), "row 2 is not as long as its columns") for size in (7, 2**32 - 1)),
        (lambda data, begin: data[:12] + bytes(4) + data[16:], "it ends within row 1"),  # where row 2 begins
        (lambda data, begin: data[:16] + b"\xff" * 4 + data[20:], "it ends within row 2"),
        *((change, "it has another number of rows than index.json says") for change in OTHER_COUNTS),
    ],
)
def test_a_row_that_is_damaged_after_its_shard_was_opened_is_named(tmp_path, change, what):
    stage = write_stage(tmp_path / "stage", LAYOUTS["around"], 30)
    dataset, path = stream_of(stage), stage / "shard.00000.mds"
    dataset.cache.ensure_shard(0)
    data = path.read_bytes()
    path.write_bytes(change(data, struct.unpack_from("<I", data, 12)[0]))
    with pytest.raises(ShardError) as error:
        dataset.read_batch(np.arange(5))
    assert str(error.value) == f"{path} is damaged: {what}. {DAMAGED}"


@pytest.mark.timeout(60, func_only=True)
def test_reading_through_many_shards_leaves_nothing_of_them_in_memory(tmp_path):
    """What is kept of a shard is kept 400,000 times in an epoch of 400 million samples, by each of a node's 32 workers."""
    dataset = stream_of(write_stage(tmp_path / "stage", {"key": "str"}, 2000, size_limit=1000))
    assert len(dataset.shards) == 2000
    dataset.cache.states[:] = ShardState.LOCAL  # as if each were opened, which takes seconds
    batches = np.random.default_rng(0).permutation(2000).reshape(-1, 50)
    for batch in batches[:20]:  # as many shards are kept of the first ones as ever
        dataset.read_batch(batch)
    dataset[0]
    gc.collect()
    before = sys.getallocatedblocks()
    for batch in batches[20:]:
        dataset.read_batch(batch)
    for number in batches[20:24].flat:  # one by one, as images and third-party latents are read
        dataset[int(number)]
    gc.collect()
    assert sys.getallocatedblocks() - before < 500
