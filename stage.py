"""A stage on disk or in a store: what `index.json` and `dataset.json` say of it, read and written.

A stage is an MDS dataset (`index.json` and shards, with hashes) with a `dataset.json` beside the index that says what
made it. A folder without both is not a stage: `index.json` is written last, so a half-written one has none.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from streaming.base.storage.download import DOWNLOADER_MAPPINGS, CloudDownloader

from fetch import HASH
from store_errors import explain_store_error

FACTS_FILE = "dataset.json"
FACTS_SCHEMA = 1
AGAIN = "Make the stage again: python -m prepare.shards --help"


def is_remote(location: str) -> bool:
    """True for an address in a store (s3://bucket/prefix), False for a folder."""
    return bool(urlparse(location).scheme)


@dataclass(frozen=True)
class Stage:
    """What `index.json` and `dataset.json` say about a dataset."""

    location: str
    kind: str
    """images or moments."""
    index_sha256: str
    num_samples: int
    columns: tuple[str, ...]
    largest_shard_bytes: int
    files: frozenset[tuple[str, int, str]] = frozenset()
    """(name, bytes, hash) of every shard."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The rest of dataset.json: family, image_size, normalize, encoders, as far as the stage has them."""


def read_stage(location: str) -> Stage:
    """Read the facts of the stage at a folder or store address.

    Raises:
        ValueError: nothing is there, it is no stage, or a file cannot be read; says which and what to do.
    """
    scheme = urlparse(location).scheme
    if scheme and scheme not in DOWNLOADER_MAPPINGS:
        known = ", ".join(f"{name}://" for name in sorted(name for name in DOWNLOADER_MAPPINGS if name))
        raise ValueError(f"'{location}' is in no known store. Known: a folder, {known}.")
    if not scheme and not Path(location).is_dir():
        raise ValueError(f"no folder {location}. Check the path, or make the stage: python -m prepare.shards --help")
    index_bytes, index = _read_json(location, "index.json")
    _, facts = _read_json(location, FACTS_FILE)
    if facts.get("schema") != FACTS_SCHEMA:
        raise ValueError(
            f"{location}/{FACTS_FILE} has schema {facts.get('schema')}; this version reads {FACTS_SCHEMA}. {AGAIN}"
        )
    digest = hashlib.sha256(index_bytes).hexdigest()
    if facts.get("index_sha256") != digest:
        raise ValueError(
            f"{location}/index.json (sha256 {digest[:12]}) is not the one that {FACTS_FILE} was written for "
            f"({str(facts.get('index_sha256'))[:12]}). {AGAIN}"
        )
    try:
        if not index["shards"]:
            raise ValueError(f"{location}/index.json lists no shard. {AGAIN}")
        stage = Stage(
            location=location,
            kind=facts["stage"],
            index_sha256=digest,
            num_samples=sum(shard["samples"] for shard in index["shards"]),
            columns=tuple(index["shards"][0]["column_names"]),
            largest_shard_bytes=max(shard["raw_data"]["bytes"] for shard in index["shards"]),
            files=_files(index),
            facts=facts,
        )
        sizes = {shard["raw_data"]["basename"]: shard["raw_data"]["bytes"] for shard in index["shards"]}
        other = [
            s["raw_data"]["basename"] for s in index["shards"] if s["zip_data"] or HASH not in s["raw_data"]["hashes"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{location} has an index.json or {FACTS_FILE} of another kind ({error!r}). {AGAIN}"
        ) from error
    if other:
        raise ValueError(
            f"{location}/{other[0]} is not an uncompressed MDS shard with its {HASH} in index.json. {AGAIN}"
        )
    if outside := [name for name in sizes if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise ValueError(f"{location}/index.json names a shard outside of its stage: {outside[0]}. {AGAIN}")
    if not scheme:
        _check_shards(location, sizes)
    return stage


def _check_shards(folder: str, sizes: dict[str, int]) -> None:
    """Look for shards that are not there or were cut; without this a run finds them hours later."""
    for name, size in sizes.items():
        path = Path(folder, name)
        again = (
            AGAIN if path.parent == Path(folder) else f"Remove {path.parent}, and give the command that made it again."
        )
        if not path.is_file():
            raise ValueError(f"{path} is missing, index.json lists it. {again}")
        if path.stat().st_size != size:
            raise ValueError(f"{path} has {path.stat().st_size:,} bytes, index.json says {size:,}. {again}")


def _files(index: Mapping[str, Any]) -> frozenset[tuple[str, int, str]]:
    raw = [shard["raw_data"] for shard in index["shards"]]
    return frozenset((shard["basename"], shard["bytes"], shard["hashes"].get(HASH, "")) for shard in raw)


def holds_another_stage(local: str, stage: Stage) -> bool:
    """True where a cache folder was filled from another stage; an index that is only damaged has most shards of its own."""
    try:
        cached = _files(json.loads(Path(local, "index.json").read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # empty, or broken: it is fetched again
    return 2 * len(cached & stage.files) < len(cached)


def _read_json(location: str, name: str) -> tuple[bytes, dict[str, Any]]:
    """Return a file of a stage, as it is and read."""
    if is_remote(location):
        with tempfile.TemporaryDirectory() as folder:
            try:
                CloudDownloader.direct_download(f"{location.rstrip('/')}/{name}", f"{folder}/{name}")
            except Exception as error:  # each store's client has exceptions of its own
                raise ValueError(explain_store_error(error, location)) from error
            text = Path(folder, name).read_bytes()
    else:
        path = Path(location, name)
        if not path.is_file():
            raise ValueError(f"no {name} under {location}. Make the stage: python -m prepare.shards --help")
        try:
            text = path.read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}.") from error
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{location}/{name} is not JSON: {error}. {AGAIN}") from error
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
    (folder / FACTS_FILE).write_text(json.dumps(content, indent=2) + "\n")
