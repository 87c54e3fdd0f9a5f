"""stages/dataset.py: which folders are accepted as a stage, which are refused, and why."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.dataset import column_problem, is_remote, read_stage
from stages.index_file import shown_json

AGAIN = "Make the stage again: python -m prepare.shards --help"


@pytest.fixture
def copy(stage, tmp_path):
    return shutil.copytree(stage, tmp_path / "stage")


def message(location) -> str:
    with pytest.raises(ValueError) as error:
        read_stage(str(location))
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
    or_adopt = f". If others have written it: python -m prepare.adopt {copy}" if name == "dataset.json" else ""
    assert message(copy) == f"no {name} under {copy}. Make the stage: python -m prepare.shards --help{or_adopt}"


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
        f"{copy}/dataset.json: schema is 99. Possible: 1, a number. Make the stage again: python -m prepare.shards --help"
    )
    (copy / "dataset.json").write_text(json.dumps({**facts, "index_sha256": "0" * 64}))
    assert message(copy) == (
        f"{copy}/index.json (sha256 {facts['index_sha256'][:12]}) is not the one that {copy}/dataset.json was written for "
        "(000000000000). Make the stage again: python -m prepare.shards --help"
    )
    (copy / "index.json").write_text('{"version": 2, "shards": []}')
    digest = hashlib.sha256(b'{"version": 2, "shards": []}').hexdigest()
    (copy / "dataset.json").write_text(json.dumps({**facts, "index_sha256": digest}))
    assert message(copy) == f"{copy}/index.json lists no sample. Make the stage again: python -m prepare.shards --help"


def test_a_shard_that_is_missing_or_was_cut_is_found_before_the_run(copy):
    shard = sorted(copy.rglob("shard.*.mds"))[1]
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-7])
    again = f"Remove {shard.parent}, and give the command that made it again."
    assert message(copy) == f"{shard} has {size - 7:,} bytes, index.json says {size:,} bytes. {again}"
    shard.unlink()
    assert message(copy) == f"{shard} is missing or no file, index.json says {size:,} bytes. {again}"


def test_a_shard_outside_of_its_stage_is_refused(copy):
    for name in ("../evil.mds", "/tmp/evil.mds", "part-00000/../../evil.mds"):
        rewrite(copy, lambda index, name=name: index["shards"][0]["raw_data"].update(basename=name))
        assert message(copy) == (
            f'{copy}/index.json: shards[0].raw_data.basename is "{name}". Possible: the name of a file inside of the stage. '
            f"{AGAIN}"
        )


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


FACTS, INDEX, SHARD = "dataset.json: ", "index.json: ", "index.json: shards[0]."
NAME = "the name of a file inside of the stage."
COUNT = "Possible: a whole number from 1 to 4,294,967,295."
NAMES = '["caption", "height", "jpg", "key", "metadata", "width"]'
SHARD_KEYS = (
    "column_encodings, column_names, column_sizes, compression, format, hashes, raw_data, samples, size_limit, "
)
SHARD_KEYS += "version, zip_data"
WRONG = [
    (of_facts("schema", "1"), FACTS + 'schema is "1". Possible: 1, a number.'),
    (of_facts("schema", True), FACTS + "schema is true. Possible: 1, a number."),
    (of_facts("schema", None), FACTS + "schema is null. Possible: 1, a number."),
    (of_facts("stage", ["moments"]), FACTS + 'stage is ["moments"]. Possible: "images" or "videos" or "moments".'),
    (of_facts("stage", None), FACTS + 'stage is null. Possible: "images" or "videos" or "moments".'),
    (of_facts("encoders", 5), FACTS + "encoders is 5. Possible: an object of names and fingerprints."),
    (
        of_facts("encoders", {"vae": 5}),
        FACTS + 'encoders is {"vae": 5}. Possible: an object of names and fingerprints.',
    ),
    (of_facts("stage", "films"), FACTS + 'stage is "films". Possible: "images" or "videos" or "moments".'),
    (of_facts("samples", 47), FACTS + "samples is 47. Possible: 48, the sum of index.json."),
    (of_facts("samples", 48.0), FACTS + "samples is 48.0. Possible: 48, the sum of index.json."),
    (of_facts("samples", "48"), FACTS + 'samples is "48". Possible: 48, the sum of index.json.'),
    (of_index("index.version", 1), INDEX + "version is 1. Possible: 2, a number."),
    (of_index("index.version", "2"), INDEX + 'version is "2". Possible: 2, a number.'),
    (of_index("index.shards", "x"), INDEX + 'shards is "x". Possible: a list.'),
    (of_index("index.shards", [5]), INDEX + f"shards[0] is 5. Possible: an object of {SHARD_KEYS}."),
    (of_index("index.shards", [{}]), INDEX + f"shards[0] is {{}}. Possible: an object of {SHARD_KEYS}."),
    (of_index("raw_data", None), SHARD + "raw_data is null. Possible: an object of basename, bytes, hashes."),
    (
        of_index("raw_data.basename", 5),
        SHARD + "raw_data.basename is 5. Possible: the name of a file inside of the stage.",
    ),
    (
        of_index("raw_data.basename", None),
        SHARD + "raw_data.basename is null. Possible: the name of a file inside of the stage.",
    ),
    (
        of_index("raw_data.basename", ""),
        SHARD + 'raw_data.basename is "". Possible: the name of a file inside of the stage.',
    ),
    (
        of_index("raw_data.basename", "a\0b"),
        SHARD + 'raw_data.basename is "a\\u0000b". Possible: the name of a file inside of the stage.',
    ),
    (of_index("raw_data.bytes", "9"), SHARD + f'raw_data.bytes is "9". {COUNT}'),
    (of_index("raw_data.bytes", 0), SHARD + f"raw_data.bytes is 0. {COUNT}"),
    (of_index("raw_data.bytes", 2**32), SHARD + f"raw_data.bytes is 4294967296. {COUNT}"),
    (
        of_index("raw_data.hashes", {"xxh64": None}),
        SHARD + 'raw_data.hashes is {"xxh64": null}. Possible: the shard\'s xxh64, 16 hexadecimal digits.',
    ),
    (
        of_index("raw_data.hashes", {"xxh64": 5}),
        SHARD + 'raw_data.hashes is {"xxh64": 5}. Possible: the shard\'s xxh64, 16 hexadecimal digits.',
    ),
    (
        of_index("raw_data.hashes", {"sha1": "00"}),
        SHARD + 'raw_data.hashes is {"sha1": "00"}. Possible: the shard\'s xxh64, 16 hexadecimal digits.',
    ),
    (of_index("samples", -24), SHARD + f"samples is -24. {COUNT}"),
    (of_index("samples", 24.0), SHARD + f"samples is 24.0. {COUNT}"),
    (of_index("samples", True), SHARD + f"samples is true. {COUNT}"),
    (of_index("format", "json"), SHARD + 'format is "json". Possible: "mds".'),
    (of_index("version", 2.0), SHARD + "version is 2.0. Possible: 2, a number."),
    (of_index("compression", "zstd"), SHARD + 'compression is "zstd". Possible: null: uncompressed.'),
    (of_index("zip_data", {}), SHARD + "zip_data is {}. Possible: null: uncompressed."),
    (of_index("hashes", "xxh64"), SHARD + 'hashes is "xxh64". Possible: a list of names.'),
    (of_index("size_limit", "x"), SHARD + 'size_limit is "x". Possible: null, or a number of bytes.'),
    (of_index("column_names", []), SHARD + "column_names is []. Possible: different names, at least one."),
    (
        of_index("column_names", ["a", "a"]),
        SHARD + 'column_names is ["a", "a"]. Possible: different names, at least one.',
    ),
    (
        of_index("column_encodings", ["str"]),
        SHARD + 'column_encodings is ["str"]. Possible: one for each of 6 columns.',
    ),
    (
        of_index("column_encodings", [None] * 6),
        SHARD + "column_encodings is [null, null, null, null, null, null]. Possible: one for each of 6 columns.",
    ),
    *(
        (
            of_index("column_encodings", [encoding] * 6),
            SHARD
            + f"column_encodings is {shown_json([encoding] * 6)}. Possible: encodings of MDS, but none that could run "
            "code, as pkl.",
        )
        for encoding in ("string", "ndarray:float16:8,x", "pkl", "pkl:x")
    ),
    (
        of_index("column_sizes", [8, None, None, None, None, None]),
        SHARD + "column_sizes is [8, null, null, null, null, null]. Possible: [null, 8, null, null, null, 8], "
        "as these are encoded.",
    ),
]


@pytest.mark.parametrize(("change", "told"), WRONG, ids=[told for _, told in WRONG])
def test_what_no_reader_could_use_is_named_with_what_is_possible(copy, change, told):
    change(copy)
    assert message(copy) == f"{copy}/{told} {AGAIN}"


def test_more_samples_than_a_shard_can_hold_are_refused(copy):
    """Drawing their order would take all memory there is, long before the shard was read."""
    rewrite(copy, lambda index: index["shards"][0].update(samples=4 * 10**9))
    size = json.loads((copy / "index.json").read_text())["shards"][0]["raw_data"]["bytes"]
    at_most = f"at most {size // 4 - 2:,} in a shard of {size:,} bytes"
    assert message(copy) == f"{copy}/index.json: shards[0].samples is 4000000000. Possible: {at_most}. {AGAIN}"


def test_what_is_missing_is_said_to_be(copy):
    facts = json.loads((copy / "dataset.json").read_text())
    (copy / "dataset.json").write_text(json.dumps({key: facts[key] for key in facts if key != "schema"}))
    assert message(copy) == f"{copy}/dataset.json: schema is missing. Possible: 1, a number. {AGAIN}"
    rewrite(copy, lambda index: index.pop("version"))
    assert message(copy) == f"{copy}/index.json: version is missing. Possible: 2, a number. {AGAIN}"


def test_shards_have_the_same_columns_and_each_is_listed_once(copy):
    def swap(index) -> None:
        index["shards"][1]["column_names"] = index["shards"][1]["column_names"][::-1]

    index = (copy / "index.json").read_text()
    rewrite(copy, swap)
    assert message(copy) == (
        f'{copy}/index.json: shards[1].column_names is ["width", "metadata", "key", "jpg", "height", "caption"]. Possible: '
        f"{NAMES} as in shards[0]: all shards have the same columns. {AGAIN}"
    )
    (copy / "index.json").write_text(index)
    rewrite(copy, lambda index: index["shards"].append(index["shards"][0]))
    name = json.loads(index)["shards"][0]["raw_data"]["basename"]
    assert message(copy) == f"{copy}/index.json lists {name} twice. {AGAIN}"


@pytest.mark.parametrize("name", ["index.json", "dataset.json"])
def test_a_file_of_brackets_is_refused(copy, name):
    (copy / name).write_text("[" * 100_000)
    assert message(copy) == f"{copy}/{name} is nested too deeply to be read. {AGAIN}"


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


# --- columns that a run reads ---


def test_a_stage_without_the_columns_of_a_run_or_with_others_is_refused(stage):
    def told(**changes) -> str | None:
        return column_problem(
            dataclasses.replace(images, **changes), {"moments": "ndarray:float16:8,4,4", "tokens": "ndarray:uint16:77"}
        )

    images = read_stage(str(stage))
    assert told() is None
    assert told(columns=("caption", "key"), encodings=("str", "str")) == (
        f"{stage} has no column jpg. Make the stage again."
    )
    assert told(columns=("caption", "jpg", "key"), encodings=("str", "jpeg", "str")) == (
        f"{stage} has a column jpg of jpeg, this run reads bytes. Make the stage again."
    )
    moments = {"kind": "moments", "columns": ("moments", "tokens")}
    assert told(**moments, encodings=("ndarray:float16:8,4,4", "ndarray:uint16:77")) is None
    assert told(**moments, encodings=("ndarray:float16:8,4,4", "str")) == (
        f"{stage} has a column tokens of str, this run reads ndarray:uint16:77. Make the stage again."
    )
    for encoding in ("ndarray:float16:8,8,8", "ndarray:float32:8,4,4", "ndarray:float16:8,4,40", "ndarray"):
        assert told(**moments, encodings=(encoding, "ndarray:uint16:77")) == (
            f"{stage} has a column moments of {encoding}, this run reads ndarray:float16:8,4,4. Make the stage again."
        )
