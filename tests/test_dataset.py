"""mds/dataset.py: which folders are accepted as a stage, which are refused, and why."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mds.dataset import column_problem, is_remote, read_dataset
from mds.index import format_json

AGAIN = "Make the stage again: python -m prepare.shards --help"


@pytest.fixture
def copy(stage, tmp_path):
    return shutil.copytree(stage, tmp_path / "stage")


def message(location) -> str:
    with pytest.raises(ValueError) as error:
        read_dataset(str(location))
    return str(error.value)


def rewrite(copy: Path, change: Callable[[Any], Any] = lambda index: None, facts: dict[str, Any] | None = None) -> None:
    """Change the index and the facts of a stage, and let them belong together again."""
    index = json.loads((copy / "index.json").read_text())
    change(index)
    (copy / "index.json").write_text(content := json.dumps(index))
    own = {
        **json.loads((copy / "dataset.json").read_text()),
        "index_sha256": hashlib.sha256(content.encode()).hexdigest(),
    }
    (copy / "dataset.json").write_text(json.dumps({**own, **(facts or {})}))


def test_a_stage_says_what_it_holds(stage):
    facts = read_dataset(str(stage))
    assert facts.num_samples == 48 and facts.kind == "images"
    assert facts.columns == ("caption", "height", "jpg", "key", "metadata", "width")
    assert 0 < facts.largest_shard_bytes <= 40_000


def test_a_path_that_is_not_there(tmp_path):
    path = tmp_path / "nowhere"
    assert message(path) == f"no folder {path}. Check the path, or make the stage: python -m prepare.shards --help"
    text = message("ftp://host/stage")
    assert text.startswith("'ftp://host/stage' is in no known store. Known: a folder, ") and "s3://" in text
    assert is_remote("s3://bucket/x") and not is_remote("/data/x") and not is_remote("data/x")


@pytest.mark.parametrize("name", ["index.json", "dataset.json"])
def test_a_folder_without_index_or_facts_is_no_stage(copy, name):
    (copy / name).unlink()
    or_adopt = f". If others have written it: python -m prepare.adopt {copy}" if name == "dataset.json" else ""
    assert message(copy) == f"no {name} under {copy}. Make the stage: python -m prepare.shards --help{or_adopt}"


@pytest.mark.parametrize("name", ["index.json", "dataset.json"])
def test_a_file_that_is_not_json_is_named(copy, name):
    for content, problem in (("{", " is not JSON: "), ("[]", " holds a list, not"), ("[" * 100_000, " is nested too")):
        (copy / name).write_text(content)
        assert message(copy).startswith(f"{copy / name}{problem}") and message(copy).endswith(AGAIN)


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


def of_facts(key: str, value):
    """A change of dataset.json."""
    return lambda copy: rewrite(copy, facts={key: value})


def of_index(key: str, value):
    """A change of the first shard in index.json, or of the index itself (index.version)."""

    def change(index) -> None:
        *path, last = key.removeprefix("index.").split(".")
        at = index if key.startswith("index.") else index["shards"][0]
        for name in path:
            at = at[name]
        at[last] = value

    return lambda copy: rewrite(copy, change)


COUNT = "Possible: a whole number from 1 to 4,294,967,295."
SHARD, HASHES, ENCODINGS = "shards[0].", "raw_data.hashes", "column_encodings"
OUTSIDE = ("../evil.mds", "/tmp/evil.mds", "part-00000/../../evil.mds")
WRONG = [
    (of_facts("schema", "1"), 'dataset.json: schema is "1". Possible: 1, a number.'),
    (of_facts("schema", True), "dataset.json: schema is true."),
    (of_facts("schema", 99), "dataset.json: schema is 99."),
    (
        of_facts("stage", ["moments"]),
        'dataset.json: stage is ["moments"]. Possible: "images" or "videos" or "moments".',
    ),
    (of_facts("stage", "films"), 'dataset.json: stage is "films".'),
    (of_facts("encoders", {"vae": 5}), 'dataset.json: encoders is {"vae": 5}. Possible: an object of names and finger'),
    (of_facts("samples", 47), "dataset.json: samples is 47. Possible: 48, the sum of index.json."),
    (of_facts("samples", 48.0), "dataset.json: samples is 48.0."),
    (of_index("index.version", "2"), 'version is "2". Possible: 2, a number.'),
    (of_index("index.shards", "x"), 'shards is "x". Possible: a list.'),
    (of_index("index.shards", [5]), "shards[0] is 5. Possible: an object of column_encodings, column_names, "),
    (of_index("index.shards", [{}]), "shards[0] is {}. Possible: an object of "),
    (of_index("raw_data", None), SHARD + "raw_data is null. Possible: an object of basename, bytes, hashes."),
    *((of_index("raw_data.basename", name), SHARD + "raw_data.basename is ") for name in (5, "", "a\0b")),
    *((of_index("raw_data.basename", name), f'{SHARD}raw_data.basename is "{name}". Poss') for name in OUTSIDE),
    *((of_index("raw_data.bytes", value), SHARD + "raw_data.bytes is ") for value in ("9", 0)),
    (of_index("raw_data.bytes", 2**32), f"{SHARD}raw_data.bytes is 4294967296. {COUNT}"),
    (of_index(HASHES, {"xxh64": 5}), SHARD + 'raw_data.hashes is {"xxh64": 5}. Possible: the shard\'s xxh64, 16 hexa'),
    (of_index(HASHES, {"sha1": "00"}), SHARD + 'raw_data.hashes is {"sha1": "00"}.'),
    *((of_index("samples", value), f"{SHARD}samples is {value}. {COUNT}") for value in (-24, 24.0)),
    # Drawing their order would take all memory, long before the shard was read.
    (of_index("samples", 4 * 10**9), SHARD + "samples is 4000000000. Possible: at most "),
    (of_index("format", "json"), SHARD + 'format is "json". Possible: "mds".'),
    (of_index("version", 2.0), SHARD + "version is 2.0. Possible: 2, a number."),
    (of_index("compression", "zstd"), SHARD + 'compression is "zstd". Possible: null: uncompressed.'),
    (of_index("zip_data", {}), SHARD + "zip_data is {}. Possible: null: uncompressed."),
    (of_index("hashes", "xxh64"), SHARD + 'hashes is "xxh64". Possible: a list of names.'),
    (of_index("size_limit", "x"), SHARD + 'size_limit is "x". Possible: null, or a number of bytes.'),
    *((of_index("column_names", names), SHARD + "column_names is ") for names in ([], ["a", "a"])),
    *((of_index(ENCODINGS, value), SHARD + "column_encodings is ") for value in (["str"], [None] * 6)),
    *(
        (
            of_index(ENCODINGS, [encoding] * 6),
            f"{SHARD}column_encodings is {format_json([encoding] * 6)}. Possible: enco",
        )
        for encoding in ("string", "ndarray:float16:8,x", "pkl", "pkl:x")  # a pickle could run code
    ),
    (
        of_index("column_sizes", [8, None, None, None, None, None]),
        SHARD
        + "column_sizes is [8, null, null, null, null, null]. Possible: [null, 8, null, null, null, 8], as these ",
    ),
]


@pytest.mark.parametrize(("change", "problem"), WRONG, ids=[f"{n} {text}" for n, (_, text) in enumerate(WRONG)])
def test_a_value_that_no_reader_could_use_is_named_with_the_possible_ones(copy, change, problem):
    change(copy)
    text = message(copy).removeprefix(f"{copy}/").removeprefix("index.json: ")
    assert text.startswith(problem) and text.endswith(AGAIN)


def test_shards_have_the_same_columns_and_each_is_listed_once(copy):
    index = (copy / "index.json").read_text()
    rewrite(copy, lambda index: index["shards"][1]["column_names"].reverse())
    assert message(copy).startswith(
        f'{copy}/index.json: shards[1].column_names is ["width", "metadata", "key", "jpg", '
    )
    (copy / "index.json").write_text(index)
    rewrite(copy, lambda index: index["shards"].append(index["shards"][0]))
    name = json.loads(index)["shards"][0]["raw_data"]["basename"]
    assert message(copy) == f"{copy}/index.json lists {name} twice. {AGAIN}"
    (copy / "index.json").write_text(index)
    rewrite(copy, lambda index: index.pop("version"))
    assert message(copy) == f"{copy}/index.json: version is missing. Possible: 2, a number. {AGAIN}"


# --- columns that a run reads ---


def test_a_dataset_without_the_columns_of_a_run_or_with_other_types_is_refused(stage):
    def problem(columns: tuple[str, ...], *encodings: str, kind: str = "images") -> str | None:
        changed = dataclasses.replace(images, kind=kind, columns=columns, encodings=encodings)
        return column_problem(changed, {"moments": "ndarray:float16:8,4,4", "tokens": "ndarray:uint16:77"})

    images, moments = read_dataset(str(stage)), ("moments", "tokens")
    assert problem(images.columns, *images.encodings) is None
    assert problem(("caption", "key"), "str", "str") == f"{stage} has no column jpg. Make the stage again."
    assert problem(("caption", "jpg", "key"), "str", "jpeg", "str") == (
        f"{stage} has a column jpg of jpeg, this run reads bytes. Make the stage again."
    )
    assert problem(moments, "ndarray:float16:8,4,4", "ndarray:uint16:77", kind="moments") is None
    assert "column tokens of str, " in problem(moments, "ndarray:float16:8,4,4", "str", kind="moments")
    for encoding in ("ndarray:float16:8,8,8", "ndarray:float32:8,4,4", "ndarray:float16:8,4,40", "ndarray"):
        text = problem(moments, encoding, "ndarray:uint16:77", kind="moments")
        assert text.startswith(f"{stage} has a column moments of {encoding}, this run reads ndarray:float16:8,4,4. ")
