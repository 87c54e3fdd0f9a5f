"""stage.py: what is a stage, what is not, and why."""

from __future__ import annotations

import hashlib
import json
import re
import shutil

import pytest

from stage import is_remote, read_stage


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
    assert message("s3://bucket/stage") == (
        "s3://bucket/stage cannot be read: nothing listens at http://127.0.0.1:9. Check the port in S3_ENDPOINT_URL, and "
        "that the store runs."
    )
