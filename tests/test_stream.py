"""stream.py: what is a stage, what is not, and what a reader is told."""

from __future__ import annotations

import hashlib
import json
import re
import shutil

import numpy as np
import pytest
import torch
from streaming import MDSWriter, StreamingDataset

from stream import DAMAGED, BatchStream, MomentsStream, ShardError, is_remote, read_stage, write_facts


@pytest.fixture
def copy(stage, tmp_path):
    return shutil.copytree(stage, tmp_path / "stage")


def message(location) -> str:
    with pytest.raises(ValueError) as error:
        read_stage(str(location))
    return str(error.value)


def test_a_stage_says_what_it_holds(stage):
    facts = read_stage(str(stage))
    assert facts.num_samples == 48 and facts.kind == "images"
    assert facts.columns == ("caption", "height", "jpg", "key", "metadata", "width")
    assert 0 < facts.largest_shard_bytes <= 40_000


def test_a_path_that_is_not_there(tmp_path):
    path = tmp_path / "nowhere"
    assert message(path) == (f"no folder {path}. Check the path, or make the stage: python -m prepare.shards --help")


@pytest.mark.parametrize("name", ["index.json", "dataset.json"])
def test_a_folder_without_index_or_facts_is_no_stage(copy, name):
    (copy / name).unlink()
    assert message(copy) == f"no {name} under {copy}. Make the stage: python -m prepare.shards --help"


@pytest.mark.parametrize("name", ["index.json", "dataset.json"])
def test_a_file_that_is_not_json_is_named(copy, name):
    (copy / name).write_text("{")
    assert re.match(rf"{re.escape(str(copy / name))} is not JSON: .*\. Make the stage again: ", message(copy))
    (copy / name).write_text("[]")
    assert (
        message(copy)
        == f"{copy / name} holds a list, not an object. Make the stage again: python -m prepare.shards --help"
    )


def test_an_empty_index_and_another_schema_are_refused(copy):
    facts = json.loads((copy / "dataset.json").read_text())
    (copy / "dataset.json").write_text(json.dumps({**facts, "schema": 99}))
    assert message(copy) == (
        f"{copy}/dataset.json has schema 99; this version reads 1. Make the stage again: python -m prepare.shards --help"
    )
    (copy / "index.json").write_text('{"shards": []}')
    digest = hashlib.sha256(b'{"shards": []}').hexdigest()
    (copy / "dataset.json").write_text(json.dumps(facts))
    assert message(copy) == (
        f"{copy}/index.json (sha256 {digest[:12]}) is not the one that dataset.json was written for "
        f"({facts['index_sha256'][:12]}). Make the stage again: python -m prepare.shards --help"
    )
    (copy / "dataset.json").write_text(json.dumps({**facts, "index_sha256": digest}))
    assert message(copy) == f"{copy}/index.json lists no shard. Make the stage again: python -m prepare.shards --help"


def test_a_shard_that_is_missing_or_was_cut_is_found_before_the_run(copy):
    shard = sorted(copy.rglob("shard.*.mds"))[1]
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-7])
    again = f"Remove {shard.parent}, and give the command that made it again."
    assert message(copy) == f"{shard} has {size - 7:,} bytes, index.json says {size:,}. {again}"
    shard.unlink()
    assert message(copy) == f"{shard} is missing, index.json lists it. {again}"


def test_a_shard_outside_of_its_stage_is_refused(copy):
    for name in ("../evil.mds", "/tmp/evil.mds", "part-00000/../../evil.mds"):
        index = json.loads((copy / "index.json").read_text())
        index["shards"][0]["raw_data"]["basename"] = name
        content = json.dumps(index)
        (copy / "index.json").write_text(content)
        facts = json.loads((copy / "dataset.json").read_text())
        digest = hashlib.sha256(content.encode()).hexdigest()
        (copy / "dataset.json").write_text(json.dumps({**facts, "index_sha256": digest}))
        assert message(copy) == (
            f"{copy}/index.json names a shard outside of its stage: {name}. Make the stage again: python -m prepare.shards "
            f"--help"
        )


@pytest.mark.parametrize(
    "content", ['{"shards": [{}]}', '{"shards": "x"}', "{}", '{"shards": [{"samples": 1, "raw_data": null}]}']
)
def test_an_index_of_another_kind_is_refused(copy, content):
    (copy / "index.json").write_text(content)
    facts = json.loads((copy / "dataset.json").read_text())
    digest = hashlib.sha256(content.encode()).hexdigest()
    (copy / "dataset.json").write_text(json.dumps({**facts, "index_sha256": digest}))
    assert message(copy).startswith(f"{copy} has an index.json or dataset.json of another kind (")


def test_an_unknown_store_lists_the_known_ones():
    text = message("ftp://host/stage")
    assert text.startswith("'ftp://host/stage' is in no known store. Known: a folder, ") and "s3://" in text
    assert is_remote("s3://bucket/x") and not is_remote("/data/x") and not is_remote("data/x")


def test_an_unreachable_store_names_what_it_was_asked_for(monkeypatch):
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")  # the discard port: refused at once
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert re.match(r"cannot read index.json under s3://bucket/stage: .*127\.0\.0\.1:9", message("s3://bucket/stage"))


def test_store_connections_are_closed_before_workers_can_inherit_them(stage, monkeypatch):
    """A forked worker would share the parent's socket: wrong data from a healthy store."""
    closed = []
    from streaming.base.storage.download import LocalDownloader

    monkeypatch.setattr(LocalDownloader, "clean_up", lambda self: closed.append(self))
    dataset = BatchStream(local=str(stage), batch_size=4)
    assert [stream._downloader for stream in dataset.streams] == closed[-1:]


# --- moments in batches ---

COLUMNS = {"moments": ((8, 4, 4), "float16", "float16"), "tokens": ((77,), "uint16", "int64")}


def moments_row(number: int) -> dict:
    values = np.random.default_rng(number)
    return {
        "moments": values.normal(size=(8, 4, 4)).astype(np.float16),
        "tokens": values.integers(0, 49408, 77).astype(np.uint16),
        "caption": "ä" * (number % 5),  # rows of several lengths, an empty column among them
        "key": f"{number:03d}",
        "metadata": {"number": number},
    }


@pytest.fixture(scope="module")
def moments(tmp_path_factory):
    """47 rows in several shards, with columns of fixed and of varying size around one another."""
    out = tmp_path_factory.mktemp("moments") / "stage"
    columns = {"moments": "ndarray:float16:8,4,4", "tokens": "ndarray:uint16:77", "caption": "str", "key": "str"}
    with MDSWriter(out=str(out), columns={**columns, "metadata": "json"}, hashes=["xxh64"], size_limit=4096) as writer:
        for number in range(47):
            writer.write(moments_row(number))
    write_facts(out, "moments", {})
    return out


def stream_of(location, **arguments) -> MomentsStream:
    return MomentsStream(columns=COLUMNS, local=str(location), batch_size=5, **arguments)


def test_a_batch_of_moments_holds_the_rows_that_plain_streaming_reads(moments):
    batch = stream_of(moments).read_batch([40, 3, 3, 46, 0])
    plain = StreamingDataset(local=str(moments), batch_size=1)
    assert batch["moments"].dtype == torch.float16 and batch["tokens"].dtype == torch.int64
    for place, number in enumerate([40, 3, 3, 46, 0]):
        assert np.array_equal(batch["moments"][place].numpy(), plain[number]["moments"])
        assert np.array_equal(batch["tokens"][place].numpy(), plain[number]["tokens"])
        assert np.array_equal(batch["moments"][place].numpy(), moments_row(number)["moments"])


def test_an_iteration_gives_whole_batches_in_the_order_of_plain_streaming(moments):
    arguments = {"shuffle": True, "shuffle_seed": 3, "num_canonical_nodes": 1}
    plain = StreamingDataset(local=str(moments), batch_size=5, **arguments)
    expected = [row["moments"] for row in plain]
    found = [row for batch in stream_of(moments, **arguments) for row in batch["moments"].numpy()]
    assert len(found) == 45 and all(np.array_equal(*pair) for pair in zip(found, expected, strict=False))


def test_it_resumes_within_an_epoch_at_the_next_batch(moments):
    arguments = {"shuffle": True, "shuffle_seed": 3, "num_canonical_nodes": 1}
    whole = stream_of(moments, **arguments)
    epochs = [[batch["moments"] for batch in whole] for _ in range(3)]
    resumed = stream_of(moments, **arguments)
    resumed.resume(epoch=1, samples=15)
    rest, after = [batch["moments"] for batch in resumed], [batch["moments"] for batch in resumed]
    assert len(rest) == 6 and all(torch.equal(*pair) for pair in zip(rest, epochs[1][3:], strict=True))
    assert all(torch.equal(*pair) for pair in zip(after, epochs[2], strict=True))


def test_two_runs_that_keep_their_shards_in_one_folder_are_told_so(moments, tmp_path):
    first = stream_of(tmp_path / "cache", remote=str(moments))
    with pytest.raises(ValueError) as error:
        stream_of(tmp_path / "cache", remote=str(moments))
    assert len(first) == 47 and str(error.value) == (
        f"data.local: {tmp_path}/cache is in use by another run on this machine, or by shared memory that a run has left "
        f"(then a line above says so). Give each run a folder of its own, or wait for the other one."
    )


def test_a_shard_that_left_the_cache_is_fetched_again(moments, tmp_path):
    dataset = stream_of(tmp_path / "cache", remote=str(moments))
    one = dataset.read_batch([0, 10, 20, 30, 40])
    for path in (tmp_path / "cache").rglob("shard.*.mds"):
        path.unlink()
    assert torch.equal(dataset.read_batch([0, 10, 20, 30, 40])["moments"], one["moments"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-100], "{shard} is damaged: it ends within row 1. {again}"),
        (
            lambda data: b"\5" + data[1:],
            "{shard} is damaged: it has another number of rows than index.json says. {again}",
        ),
        (lambda data: b"", "{shard} is damaged: it has another number of rows than index.json says. {again}"),
        (lambda data: data[:8], "{shard} is damaged: it has another number of rows than index.json says. {again}"),
    ],
)
def test_a_damaged_shard_is_named(moments, tmp_path, change, message):
    copy = shutil.copytree(moments, tmp_path / "stage")
    shard = copy / "shard.00000.mds"
    rows = json.loads((copy / "index.json").read_text())["shards"][0]["samples"]
    shard.write_bytes(change(shard.read_bytes()))
    with pytest.raises(ShardError) as error:
        stream_of(copy).read_batch(list(range(rows)))
    assert str(error.value) == message.format(shard=shard, again=DAMAGED).replace("row 1.", f"row {rows - 1}.")
