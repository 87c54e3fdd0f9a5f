"""A stage on disk or in a store: what `index.json` and `dataset.json` say of it, read and written.

A stage is an MDS dataset (`index.json` and shards, with hashes) with a `dataset.json` beside the index that says what
made it. A folder without both is not a stage: `index.json` is written last, so a half-written one has none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streaming.base.format.mds.encodings import get_mds_encoded_size, is_mds_encoding_safe
from streaming.base.storage.download import DOWNLOADER_MAPPINGS

from cli.files import write_json
from stages.fetch import HASH
from stages.store_errors import address_problem, explain_store_error, scheme_of
from stages.stores import download_once

FACTS_FILE = "dataset.json"
FACTS_SCHEMA = 1
KEYS_DIGEST = "keys_xxh64"
"""Fact: the digest of keys.u64, see stages/keys.py."""
KINDS = {
    "images": {"jpg": "bytes", "caption": "str", "key": ""},
    "moments": {"moments": "ndarray", "tokens": "ndarray"},
}
"""Kind of stage -> the columns that every run reads, and how their encodings begin."""
AGAIN = "Make the stage again: python -m prepare.shards --help"
STORE_SILENCE_SEC = 10.0  # a file of facts is asked for three times; a run then waits for its shards, this does not

MDS_VERSION = 2
MOST = 2**32 - 1  # a shard's rows, and the bytes of it, are counted in uint32
# A shard begins with the number of its samples, and where each of them and the last one's end is.
BYTES_OF_AN_OFFSET = 4
COUNT = f"a whole number from 1 to {MOST:,}"
DIGEST = re.compile(r"[0-9a-f]{16}")
# What streaming's reader of a shard takes, no more and no less.
SHARD_KEYS = {
    *("version", "format", "compression", "hashes", "raw_data", "zip_data", "samples", "size_limit"),
    *("column_encodings", "column_names", "column_sizes"),
}
FILE_KEYS = {"basename", "bytes", "hashes"}
MISSING = object()


def is_remote(location: str) -> bool:
    """True for an address in a store (s3://bucket/prefix), False for a folder."""
    return bool(scheme_of(location))


@dataclass(frozen=True)
class Stage:
    """What `index.json` and `dataset.json` say about a dataset."""

    location: str
    kind: str
    """images or moments."""
    index_sha256: str
    num_samples: int
    columns: tuple[str, ...]
    encodings: tuple[str, ...]
    """Of the columns, as MDS names them: str, ndarray:float16:8,64,64."""
    largest_shard_bytes: int
    files: frozenset[tuple[str, int, str]] = frozenset()
    """(name, bytes, hash) of every shard."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The rest of dataset.json: family, image_size, normalize, encoders, as far as the stage has them."""


def array_encoding(stored: str, shape: Sequence[int]) -> str:
    """Return the encoding of a column of arrays of one shape, e.g. ndarray:float16:8,64,64."""
    return f"ndarray:{stored}:{','.join(map(str, shape))}"


def column_problem(stage: Stage, encodings: Mapping[str, str]) -> str | None:
    """Say that a stage has not the columns that a run reads, or None.

    Args:
        encodings: column -> its encoding, of a stage of moments; those that the run knows.
    """
    wanted = {**KINDS[stage.kind], **(encodings if stage.kind == "moments" else {})}
    if missing := [name for name in wanted if name not in stage.columns]:
        return f"{stage.location} has no column {', '.join(missing)}. Make the stage again."
    has = dict(zip(stage.columns, stage.encodings, strict=True))
    for name, encoding in wanted.items():
        if not has[name].startswith(encoding) or (name in encodings and has[name] != encoding):
            return (
                f"{stage.location} has a column {name} of {has[name]}, this run reads {encoding}. Make the stage again."
            )
    return None


def read_stage(location: str) -> Stage:
    """Read the facts of the stage at a folder or store address.

    All that a reader of the stage leans on is looked at here, so that nothing of it fails later: what both files hold, that
    they belong together, and in a folder that every shard is there in its size.

    Raises:
        ValueError: nothing is there, it is no stage, or a file cannot be read; says which and what to do.
    """
    if text := address_problem(location):
        raise ValueError(text)
    scheme = scheme_of(location)
    if scheme not in DOWNLOADER_MAPPINGS:
        known = ", ".join(f"{name}://" for name in sorted(name for name in DOWNLOADER_MAPPINGS if name))
        raise ValueError(f"'{location}' is in no known store. Known: a folder, {known}.")
    try:
        if not scheme and not Path(location).is_dir():
            raise ValueError(
                f"no folder {location}. Check the path, or make the stage: python -m prepare.shards --help"
            )
    except OSError as error:
        raise ValueError(
            f"{location} cannot be read: {error.strerror}. Check the path, and who may read it."
        ) from error
    index_bytes, index = _read_json(location, "index.json")
    _, facts = _read_json(location, FACTS_FILE)
    digest = hashlib.sha256(index_bytes).hexdigest()
    _check_facts(location, facts, digest)
    shards = _checked_shards(location, index, facts)
    sizes = {shard["raw_data"]["basename"]: shard["raw_data"]["bytes"] for shard in shards}
    if not scheme:
        _check_shards(location, sizes)
    return Stage(
        location=location,
        kind=facts["stage"],
        index_sha256=digest,
        num_samples=facts["samples"],
        columns=tuple(shards[0]["column_names"]),
        encodings=tuple(shards[0]["column_encodings"]),
        largest_shard_bytes=max(sizes.values()),
        files=_files(index),
        facts=facts,
    )


def _check_facts(location: str, facts: Mapping[str, Any], digest: str) -> None:
    """Look at what dataset.json says of every stage, but for the number of samples."""
    where, schema = f"{location}/{FACTS_FILE}", facts.get("schema", MISSING)
    if type(schema) is not int:
        raise _other(where, "schema", schema, f"{FACTS_SCHEMA}, a number")
    if schema != FACTS_SCHEMA:
        raise ValueError(f"{where} has schema {schema}; this version reads {FACTS_SCHEMA}. {AGAIN}")
    if facts.get("index_sha256") != digest:
        raise ValueError(
            f"{location}/index.json (sha256 {digest[:12]}) is not the one that {FACTS_FILE} was written for "
            f"({str(facts.get('index_sha256'))[:12]}). {AGAIN}"
        )
    encoders = facts.get("encoders")
    known = [digest for digest in encoders.values() if digest is not None] if isinstance(encoders, dict) else None
    if encoders is not None and not _are_texts(known):  # null: of moments that others have made
        raise _other(where, "encoders", encoders, "an object of names and fingerprints")
    of_keys = facts.get(KEYS_DIGEST)
    if of_keys is not None and not (isinstance(of_keys, str) and DIGEST.fullmatch(of_keys)):
        raise _other(where, KEYS_DIGEST, of_keys, "16 hexadecimal digits")
    if facts.get("stage") not in list(KINDS):  # of a list: what is given may have no hash
        raise _other(where, "stage", facts.get("stage", MISSING), " or ".join(map(json.dumps, KINDS)))


def _checked_shards(location: str, index: Mapping[str, Any], facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the shards of index.json. Raises ValueError: one could not be read, or they do not belong together."""
    where, shards, names = f"{location}/index.json", index.get("shards", MISSING), set()
    if not _is(index.get("version"), MDS_VERSION):
        raise _other(where, "version", index.get("version", MISSING), f"{MDS_VERSION}, a number")
    if not isinstance(shards, list):
        raise _other(where, "shards", shards, "a list")
    if not shards:
        raise ValueError(f"{where} lists no shard. {AGAIN}")
    for number, shard in enumerate(shards):
        if wrong := _wrong_in_shard(shard):
            raise _other(where, f"shards[{number}]{wrong[0]}", *wrong[1:])
        name = shard["raw_data"]["basename"]
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{where} names a shard outside of its stage: {name}. {AGAIN}")
        if Path(name) in names:
            raise ValueError(f"{where} lists {name} twice. {AGAIN}")
        names.add(Path(name))
        if not number:
            _check_columns(location, shard)
        for key in ("column_names", "column_encodings", "column_sizes"):
            if not _are_same(shard[key], shards[0][key]):
                first = f"{_shown(shards[0][key])} as in shards[0]: all shards have the same columns"
                raise _other(where, f"shards[{number}].{key}", shard[key], first)
    total = sum(shard["samples"] for shard in shards)
    if not _is(facts.get("samples"), total):
        total_given = f"{total}, the sum of index.json"
        raise _other(f"{location}/{FACTS_FILE}", "samples", facts.get("samples", MISSING), total_given)
    return shards


def _wrong_in_shard(shard: Any) -> tuple[str, Any, str] | None:
    """Return (key, value, what is possible) of the first entry with which no reader could do anything, or None."""
    raw = shard.get("raw_data") if isinstance(shard, dict) else None
    for key, given, wanted in (("", shard, SHARD_KEYS), (".raw_data", raw, FILE_KEYS)):
        if not isinstance(given, dict) or set(given) != wanted:
            return key, given, f"an object of {', '.join(sorted(wanted))}"
    hashes = raw["hashes"]
    if not isinstance(hashes, dict) or not isinstance(hashes.get(HASH), str) or not DIGEST.fullmatch(hashes[HASH]):
        return ".raw_data.hashes", hashes, f"the shard's {HASH}, 16 hexadecimal digits"
    name, limit = raw["basename"], shard["size_limit"]
    looked_at = (
        (".version", shard["version"], _is(shard["version"], MDS_VERSION), f"{MDS_VERSION}, a number"),
        (".format", shard["format"], shard["format"] == "mds", '"mds"'),
        (".compression", shard["compression"], shard["compression"] is None, "null: uncompressed"),
        (".zip_data", shard["zip_data"], shard["zip_data"] is None, "null: uncompressed"),
        (".hashes", shard["hashes"], _are_texts(shard["hashes"]), "a list of names"),
        (".size_limit", limit, limit is None or _is_count(limit, 2**63), "null, or a number of bytes"),
        (".samples", shard["samples"], _is_count(shard["samples"]), COUNT),
        (".raw_data.basename", name, _is_name(name), "the name of a file"),
        (".raw_data.bytes", raw["bytes"], _is_count(raw["bytes"]), COUNT),
        (".column_names", shard["column_names"], _are_texts(shard["column_names"]), "a list of names"),
        (".column_encodings", shard["column_encodings"], _are_texts(shard["column_encodings"]), "a list of names"),
    )
    if wrong := next(((key, given, possible) for key, given, is_right, possible in looked_at if not is_right), None):
        return wrong
    if (most := raw["bytes"] // BYTES_OF_AN_OFFSET - 2) < shard["samples"]:
        return ".samples", shard["samples"], f"at most {most:,} in a shard of {raw['bytes']:,} bytes"
    return None


def _check_columns(location: str, shard: Mapping[str, Any]) -> None:
    """Look at the columns of a shard: known encodings, none of which runs code, in their sizes."""
    where, names, encodings = f"{location}/index.json", shard["column_names"], shard["column_encodings"]
    if not names or len(set(names)) != len(names) or not all(map(_is_name, names)):
        raise _other(where, "shards[0].column_names", names, "different names, at least one")
    if len(encodings) != len(names):
        raise _other(where, "shards[0].column_encodings", encodings, f"one for each of {len(names)} columns")
    sizes = []
    for name, encoding in zip(names, encodings, strict=True):
        if not is_mds_encoding_safe(encoding.partition(":")[0]):
            text = f"{location}/{shard['raw_data']['basename']} has a pickled column, {name}, which could run code"
            raise ValueError(f"{text}. Make that stage again without it.")
        try:
            sizes.append(get_mds_encoded_size(encoding))
        except Exception as error:  # each encoding fails in its own way
            possible = "an encoding of MDS, e.g. str, bytes, ndarray:float16:8,64,64"
            raise _other(where, f"encoding of column {name}", encoding, possible) from error
    if not _are_same(shard["column_sizes"], sizes):
        raise _other(where, "shards[0].column_sizes", shard["column_sizes"], f"{_shown(sizes)}, as these are encoded")


def _other(where: str, key: str, given: Any, possible: str) -> ValueError:
    return ValueError(f"{where}: {key} is {_shown(given)}. Possible: {possible}. {AGAIN}")


def _shown(given: Any) -> str:
    """Return a value as JSON has it, so that a text is told from a number; the beginning of a long one."""
    text = "missing" if given is MISSING else json.dumps(given)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is(given: Any, wanted: int) -> bool:
    """True for this whole number; Python takes 2.0 for one, and true for 1."""
    return type(given) is int and given == wanted


def _are_same(given: Any, wanted: Sequence[Any]) -> bool:
    return given == wanted and list(map(type, given)) == list(map(type, wanted))


def _is_count(given: Any, most: int = MOST) -> bool:
    return type(given) is int and 0 < given <= most


def _is_name(given: Any) -> bool:
    return isinstance(given, str) and given.isprintable() and given not in ("", ".")


def _are_texts(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(text, str) for text in given)


def _check_shards(folder: str, sizes: dict[str, int]) -> None:
    """Look for shards that are not there or were cut; without this a run finds them hours later."""
    for name, size in sizes.items():
        path = Path(folder, name)
        again = (
            AGAIN if path.parent == Path(folder) else f"Remove {path.parent}, and give the command that made it again."
        )
        try:
            if not path.is_file():
                what = "is no file" if os.path.lexists(path) else "is missing"
                raise ValueError(f"{path} {what}, index.json lists it. {again}")
            found = path.stat().st_size
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}, index.json lists it. {again}") from error
        if found != size:
            raise ValueError(f"{path} has {found:,} bytes, index.json says {size:,}. {again}")


def _files(index: Mapping[str, Any]) -> frozenset[tuple[str, int, str]]:
    raw = [shard["raw_data"] for shard in index["shards"]]
    return frozenset((shard["basename"], shard["bytes"], shard["hashes"].get(HASH, "")) for shard in raw)


def holds_another_stage(local: str, stage: Stage) -> bool:
    """True where a cache folder was filled from another stage; an index that is only damaged has most shards of its own."""
    try:
        cached = _files(json.loads(Path(local, "index.json").read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False  # empty, or broken: it is fetched again
    return 2 * len(cached & stage.files) < len(cached)


def _read_json(location: str, name: str) -> tuple[bytes, dict[str, Any]]:
    """Return a file of a stage, as it is and read."""
    if is_remote(location):
        with tempfile.TemporaryDirectory() as folder:
            try:
                download_once(f"{location.rstrip('/')}/{name}", f"{folder}/{name}", STORE_SILENCE_SEC)
            except Exception as error:  # each store's client has exceptions of its own
                raise ValueError(explain_store_error(error, location)) from error
            text = Path(folder, name).read_bytes()
    else:
        path = Path(location, name)
        try:
            if not path.is_file():
                raise ValueError(f"no {name} under {location}. Make the stage: python -m prepare.shards --help")
            text = path.read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}.") from error
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{location}/{name} is not JSON: {error}. {AGAIN}") from error
    except RecursionError as error:
        raise ValueError(f"{location}/{name} is nested too deeply to be read. {AGAIN}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{location}/{name} holds a {type(content).__name__}, not an object. {AGAIN}")
    return text, content


def write_facts(folder: Path, stage: str, facts: dict[str, Any]) -> None:
    """Write `dataset.json` beside an index that is already there; its digest covers every shard through its hash."""
    index = (folder / "index.json").read_bytes()
    content = {
        "schema": FACTS_SCHEMA,
        "stage": stage,
        "samples": sum(shard["samples"] for shard in json.loads(index)["shards"]),
        "index_sha256": hashlib.sha256(index).hexdigest(),
        **facts,
    }
    write_json(folder / FACTS_FILE, content)
