"""mds/dataset.py: which folders are accepted as a dataset, which are refused, and why."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from streaming import StreamingDataset

from mds.dataset import KEYS_FILE, column_problem, find_known_keys, is_remote, key_digest, read_dataset
from mds.index import format_json

AGAIN = "Rebuild the dataset: python -m prepare.shards --help"


@pytest.fixture
def copy(stage, tmp_path):
    return shutil.copytree(stage, tmp_path / "stage")


def message(location) -> str:
    with pytest.raises(ValueError) as error:
        read_dataset(str(location))
    return str(error.value)


def rewrite(copy: Path, change: Callable[[Any], Any] = lambda index: None, facts: dict[str, Any] | None = None) -> None:
    """Change the index and the facts of a dataset, and let them belong together again."""
    index = json.loads((copy / "index.json").read_text())
    change(index)
    (copy / "index.json").write_text(content := json.dumps(index))
    own = json.loads((copy / "dataset.json").read_text())
    own |= {"index_sha256": hashlib.sha256(content.encode()).hexdigest(), **(facts or {})}
    (copy / "dataset.json").write_text(json.dumps(own))


def test_a_path_that_is_not_there(tmp_path):
    path = tmp_path / "nowhere"
    assert message(path) == f"no folder {path}. Check the path, or make the dataset: python -m prepare.shards --help"
    text = message("ftp://host/stage")
    assert text.startswith("'ftp://host/stage' is in no known store. Known: a folder, ") and "s3://" in text
    assert is_remote("s3://bucket/x") and not is_remote("/data/x") and not is_remote("data/x")


@pytest.mark.parametrize("name", ["index.json", "dataset.json"])
def test_a_folder_without_index_or_facts_or_with_what_is_not_json_is_no_stage(copy, name):
    for content, problem in (("{", " is not JSON: "), ("[]", " holds a list, not"), ("[" * 100_000, " is nested too")):
        (copy / name).write_text(content)
        assert message(copy).startswith(f"{copy / name}{problem}") and message(copy).endswith(AGAIN)
    (copy / name).unlink()
    or_adopt = f". If others have written it: python -m prepare.adopt {copy}" if name == "dataset.json" else ""
    assert message(copy) == f"no {name} under {copy}. {AGAIN.replace('Rebuild', 'Make')}{or_adopt}"


def test_an_empty_index_and_one_of_another_dataset_are_refused(copy):
    metadata = json.loads((copy / "dataset.json").read_text())
    (copy / "dataset.json").write_text(json.dumps({**metadata, "index_sha256": "0" * 64}))
    assert message(copy) == (
        f"{copy}/index.json (sha256 {metadata['index_sha256'][:12]}) is not the one that {copy}/dataset.json was written "
        f"for (000000000000). {AGAIN}"
    )
    rewrite(copy, lambda index: index.update(shards=[]))
    assert message(copy).startswith(f"{copy}/index.json lists no sample. ")


def test_a_shard_that_is_missing_or_was_cut_is_found_before_the_run(copy):
    shard = sorted(copy.rglob("shard.*.mds"))[1]
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-7])
    again = f"Remove {shard.parent}, and give the command that made it again."
    assert message(copy) == f"{shard} has {size - 7:,} bytes, index.json says {size:,} bytes. {again}"
    shard.unlink()
    assert message(copy) == f"{shard} is missing or no file, index.json says {size:,} bytes. {again}"


COUNT = "a whole number from 1 to 4,294,967,295."
ENCODINGS, SIZES = "column_encodings", [8, None, None, None, None, None]
WRONG = [
    ("facts.schema", True, "1, a number."),
    ("facts.encoders", {"vae": 5}, "an object of names and finger"),
    ("facts.samples", 47, "48, the sum of index.json."),
    ("raw_data", None, "an object of basename, bytes, hashes."),
    *(("raw_data.basename", name, "") for name in ("a\0b", "../evil.mds", "/tmp/evil.mds", "a/../../evil.mds")),
    ("raw_data.bytes", 2**32, COUNT),
    ("samples", -24, COUNT),
    ("samples", 4 * 10**9, "at most "),  # drawing their order would take all memory, long before the shard was read
    ("compression", "zstd", "null: uncompressed."),
    ("column_names", ["a", "a"], ""),
    *((ENCODINGS, [name] * 6, "enco") for name in ("ndarray:float16:8,x", "pkl:x")),  # code in a pickle
    ("column_sizes", SIZES, "[null, 8, null, null, null, 8], as these "),
]


def test_a_value_that_no_reader_could_use_is_named_with_the_possible_ones(copy):
    index, facts = ((copy / f"{name}.json").read_text() for name in ("index", "dataset"))
    for key, value, possible in WRONG:
        (copy / "index.json").write_text(index)
        (copy / "dataset.json").write_text(facts)
        where, _, name = key.rpartition(".")
        if where == "facts":
            rewrite(copy, facts={name: value})
        else:
            rewrite(copy, lambda of, where=where, name=name, value=value: target(of, where).update({name: value}))
        at = {"facts": "dataset.json: ", "index": "index.json: "}.get(where, "index.json: shards[0].")
        text = message(copy)
        begin = f"{copy}/{at}{key.removeprefix('facts.').removeprefix('index.')} is {format_json(value)}. Possible: "
        assert text.startswith(begin + possible) and text.endswith(AGAIN), text


def target(index: dict, where: str) -> dict:
    """What has the key in an index: itself, its first shard, or a part of that."""
    return index if where == "index" else index["shards"][0][where] if where else index["shards"][0]


def test_shards_have_the_same_columns_and_each_is_listed_once(copy):
    index = (copy / "index.json").read_text()
    rewrite(copy, lambda index: index["shards"][1]["column_names"].reverse())
    assert message(copy).startswith(f'{copy}/index.json: shards[1].column_names is ["width", "metadata", "key", ')
    (copy / "index.json").write_text(index)
    rewrite(copy, lambda index: index["shards"].append(index["shards"][0]))
    name = json.loads(index)["shards"][0]["raw_data"]["basename"]
    assert message(copy) == f"{copy}/index.json lists {name} twice. {AGAIN}"


# --- columns that a run reads ---


def test_a_dataset_without_the_columns_of_a_run_or_with_other_types_is_refused(stage):
    def problem(columns: tuple[str, ...], *encodings: str, kind: str = "images") -> str | None:
        changed = dataclasses.replace(images, kind=kind, columns=columns, encodings=encodings)
        return column_problem(changed, {"moments": "ndarray:float16:8,4,4", "tokens": "ndarray:uint16:77"})

    images, moments = read_dataset(str(stage)), ("moments", "tokens")
    assert problem(("caption", "key"), "str", "str") == f"{stage} has no column jpg. Rebuild the dataset."
    assert "a column jpg of jpeg, this run reads bytes. " in problem(("caption", "jpg", "key"), "str", "jpeg", "str")
    assert problem(moments, "ndarray:float16:8,4,4", "ndarray:uint16:77", kind="moments") is None
    assert "column tokens of str, " in problem(moments, "ndarray:float16:8,4,4", "str", kind="moments")
    for encoding in ("ndarray:float32:8,4,4", "ndarray:float16:8,4,40"):
        text = problem(moments, encoding, "ndarray:uint16:77", kind="moments")
        assert text.startswith(f"{stage} has a column moments of {encoding}, this run reads ndarray:float16:8,4,4. ")


# --- keys.u64: which samples a dataset has, and whether others are among them ---


def stored_in(folder: Path) -> list[int]:
    """What the file has to hold, from the samples themselves."""
    dataset = StreamingDataset(local=str(folder), batch_size=1, shuffle=False)
    samples = [dataset[n] for n in range(len(dataset))]
    return sorted(xxhash.xxh3_64(f"{s['key']}\0{s['caption']}").intdigest() for s in samples)


def test_a_stage_has_the_sorted_digests_of_its_samples_keys_and_captions(miniature):
    for folder in (miniature.images, miniature.moments):
        found = np.fromfile(folder / KEYS_FILE, "<u8").tolist()
        assert found == stored_in(folder) and len(found) == 192
        digest = xxhash.xxh64((folder / KEYS_FILE).read_bytes()).hexdigest()
        assert json.loads((folder / "dataset.json").read_text())["keys_xxh64"] == digest
    assert (miniature.images / KEYS_FILE).read_bytes() == (miniature.moments / KEYS_FILE).read_bytes()


def test_samples_are_looked_up_by_key_and_caption(miniature):
    stage, known = read_dataset(str(miniature.moments)), np.fromfile(miniature.moments / KEYS_FILE, "<u8")
    others = [key_digest({"key": "000000000", "caption": caption}) for caption in ("", "a cat")]
    ends = np.array([0, 2**64 - 1, *others, known[0], known[-1]], np.uint64)
    assert find_known_keys(stage, ends, None).tolist() == [False, False, False, False, True, True]
    assert find_known_keys(stage, known[:0], None).tolist() == []
    assert find_known_keys(dataclasses.replace(stage, metadata={}), ends, None) is None


def test_a_missing_or_damaged_list_is_refused(miniature, tmp_path):
    stage = dataclasses.replace(read_dataset(str(miniature.moments)), location=str(tmp_path))
    path, wanted = tmp_path / KEYS_FILE, stage.metadata["keys_xxh64"]
    with pytest.raises(ValueError, match=f"^{path} cannot be read: No such file or directory; dataset.json names it. "):
        find_known_keys(stage, np.zeros(1, np.uint64), None)
    path.write_bytes(bytes(8))
    digest = xxhash.xxh64(bytes(8)).hexdigest()
    with pytest.raises(ValueError, match=f"^{path} is damaged: its xxh64 is {digest}, dataset.json says {wanted}. "):
        find_known_keys(stage, np.zeros(1, np.uint64), None)


def test_the_list_of_a_remote_dataset_is_fetched_once_and_compared(miniature, in_store, store, tmp_path):
    (tmp_path / "keys").mkdir()
    shutil.copy(miniature.moments / KEYS_FILE, tmp_path / "keys")
    remote, cache = in_store(tmp_path / "keys", "keys"), tmp_path / "cache"
    content = (miniature.moments / KEYS_FILE).read_bytes()
    stage, known = read_dataset(str(miniature.moments)), np.frombuffer(content, "<u8")
    with pytest.raises(ValueError, match="keys.u64"):
        find_known_keys(dataclasses.replace(stage, location=f"{remote}/none"), known, str(cache))
    stage = dataclasses.replace(stage, location=remote)
    assert find_known_keys(stage, known, str(cache)).all()
    (cache / KEYS_FILE).write_bytes(content[:-1])  # damaged: fetched again
    assert find_known_keys(stage, known, str(cache)).all()
    store[0].delete_object(Bucket="easel", Key=f"keys/{KEYS_FILE}")
    assert find_known_keys(stage, known, str(cache)).all()
    assert [path.name for path in cache.iterdir()] == [KEYS_FILE]


def test_of_several_captions_the_first_usable_one_counts():
    """As in a dataset that is made of such a dataset, whose caption it is."""
    one = key_digest({"key": "7", "caption": "a dog"})
    assert key_digest({"key": "7", "caption": ["", " a dog ", "another"]}) == one
    assert key_digest({"key": "7", "caption": []}) != one
