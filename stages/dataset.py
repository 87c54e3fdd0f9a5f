"""A stage on disk or in a store: what `index.json` and `dataset.json` say of it, read and written.

A stage is an MDS dataset (`index.json` and shards, with hashes) with a `dataset.json` beside the index that says what
made it. A folder without both is not a stage: `index.json` is written last, so a half-written one has none.

A data set that others have written has an index of its own and a `dataset.json` of prepare.adopt's, which may lie elsewhere.
Its shards may be compressed, and have hashes of another kind or none, and columns of other names (stages/adopted.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from streaming.base.storage.download import DOWNLOADER_MAPPINGS

from cli.files import write_json
from stages.adopted import Columns, columns_of
from stages.fetch import known_digest
from stages.index_file import (
    AGAIN,
    DIGEST,
    INDEX,
    MISSING,
    OF_OTHERS,
    Index,
    are_texts,
    check_memory,
    check_named_columns,
    is_number,
    is_readable,
    other,
    parsed_index,
    parsed_object,
)
from stages.shard_table import NO_SHARDS, ShardTable, fingerprints
from stages.store_errors import address_problem, explain_store_error, refusal, scheme_of
from stages.stores import download_once, stored_size

FACTS_FILE = "dataset.json"
FACTS_SCHEMA = 1
KEYS_DIGEST = "keys_xxh64"
"""Fact: the digest of keys.u64, see stages/keys.py."""
EMPTY_DIGEST = "empty_text_xxh64"
"""Fact: the digest of empty_text.safetensors, see stages/empty_text.py."""
KINDS = {
    "images": {"jpg": "bytes", "caption": "str", "key": ""},
    "videos": {"mp4": "bytes", "caption": "str", "key": "", "num_frames": "int", "fps": "float64"},
    "moments": {"moments": "ndarray"},
}
"""Kind of stage -> the columns that every run reads, and how their encodings begin."""
ADOPT = "python -m prepare.adopt"
STORE_SILENCE_SEC = 10.0  # a file of facts is asked for three times; a run then waits for its shards, this does not
Fetched = MutableMapping[str, BinaryIO]
"""index.json of stages in a store, by their address: open files, whose names are gone, so that none is left behind."""

BUCKET = re.compile(r"[1-9]\d*x[1-9]\d*")
BUCKETS_AGAIN = "Make the buckets again: python -m prepare.buckets --help"


def is_remote(location: str) -> bool:
    """True for an address in a store (s3://bucket/prefix), False for a folder."""
    return bool(scheme_of(location))


@dataclass(frozen=True)
class Stage:
    """What `index.json` and `dataset.json` say about a dataset."""

    location: str
    kind: str
    """images, videos or moments."""
    index_sha256: str
    num_samples: int
    columns: tuple[str, ...]
    encodings: tuple[str, ...]
    """Of the columns, as MDS names them: str, ndarray:float16:8,64,64."""
    largest_shard_bytes: int
    shards: ShardTable = field(default=NO_SHARDS, repr=False, compare=False)
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The rest of dataset.json: family, image_size, normalize, encoders, as far as the stage has them."""
    facts_at: str = ""
    """The place of dataset.json."""
    is_compressed: bool = False
    buckets: tuple[Stage, ...] = ()
    """The stages of a set of buckets, one for each size (stages/buckets.py)."""

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels of a bucket's pictures."""
        return tuple(self.facts["image_size"])

    @property
    def has_captions(self) -> bool:
        """A picture may have several captions."""
        if self.adopted is None:
            return "captions" in self.columns
        encodings = dict(zip(self.columns, self.encodings, strict=True))
        return len(self.adopted.captions) > 1 or encodings[self.adopted.captions[0]] == "json"

    def digests(self) -> Iterator[str]:
        """Yield the digest of each shard, of the kind that is computed fastest; "" where it has none."""
        return ((known_digest(json.loads(hashes)) or ("", ""))[1] for hashes in self.shards.hashes)

    @property
    def adopted(self) -> Columns | None:
        """The columns that are read of a data set of others; None: a stage of our own."""
        return columns_of(self.facts)


def array_encoding(stored: str, shape: Sequence[int]) -> str:
    """Return the encoding of a column of arrays of one shape, e.g. ndarray:float16:8,64,64."""
    return f"ndarray:{stored}:{','.join(map(str, shape))}"


def column_problem(stage: Stage, encodings: Mapping[str, str]) -> str | None:
    """Say that a stage has not the columns that a run reads, or None.

    Args:
        encodings: column -> its encoding, of a stage of moments; those that the run knows.
    """
    if stage.adopted is not None:
        return None  # read_stage has looked at them
    wanted = {**KINDS[stage.kind], **(encodings if stage.kind == "moments" else {})}
    wanted |= {"captions": "json"} if "captions" in stage.columns else {}
    if missing := [name for name in wanted if name not in stage.columns]:
        return f"{stage.location} has no column {', '.join(missing)}. Make the stage again."
    has = dict(zip(stage.columns, stage.encodings, strict=True))
    for name, encoding in wanted.items():
        if not has[name].startswith(encoding) or (name in encodings and has[name] != encoding):
            return (
                f"{stage.location} has a column {name} of {has[name]}, this run reads {encoding}. Make the stage again."
            )
    return None


def read_stage(location: str, facts_at: str | None = None, fetched: Fetched | None = None) -> Stage:
    """Read the facts of the stage at a folder or store address.

    All that a reader of the stage leans on is looked at here, so that nothing of it fails later: what both files hold, that
    they belong together, and in a folder that every shard is there in its size.

    Args:
        facts_at: place of dataset.json, if it lies elsewhere: a file, or an address.
        fetched: gets each index.json that was fetched from a store.

    Raises:
        ValueError: nothing is there, it is no stage, or a file cannot be read; says which and what to do.
    """
    facts_at = facts_at or f"{location.rstrip('/')}/{FACTS_FILE}"
    problem, text = None, _index_text(location, fetched)
    try:
        _, facts = read_json(*split_place(facts_at), or_adopt=f" If others have written it: {ADOPT} {location}")
    except ValueError as error:  # the index comes first
        facts, problem = {}, error
    index = parsed_index(location, text, facts.get("columns") is not None)
    del text
    if problem is not None:
        raise problem
    _check_facts(facts_at, location, facts, index.sha256)
    if "buckets" in facts:
        return _read_buckets(location, facts_at, facts, fetched)
    return _read_shards(index, facts_at, facts)


def _read_shards(index: Index, facts_at: str, facts: Mapping[str, Any]) -> Stage:
    location, shards = index.location, index.shards()
    total = int(shards.samples.sum())
    if not is_number(facts.get("samples"), total):
        raise other(facts_at, "samples", facts.get("samples", MISSING), f"{total}, the sum of index.json")
    if (columns := columns_of(facts)) is not None:
        check_named_columns(location, columns, shards)
    if not is_remote(location):
        _check_shards(location, shards, OF_OTHERS if columns else None)
    return Stage(
        location=location,
        kind=facts["stage"],
        index_sha256=index.sha256,
        num_samples=facts["samples"],
        columns=tuple(shards[0]["column_names"]),
        encodings=tuple(shards[0]["column_encodings"]),
        largest_shard_bytes=int((shards.raw_bytes + shards.zip_bytes).max()),
        shards=shards,
        facts=facts,
        facts_at=facts_at,
        is_compressed=shards.is_compressed,
    )


def _read_buckets(location: str, facts_at: str, facts: Mapping[str, Any], fetched: Fetched | None) -> Stage:
    """Read each stage of a set of buckets. Raises ValueError: one is not there, or is none of this set's."""
    names = facts["buckets"]
    if not are_texts(names) or not names or not all(map(BUCKET.fullmatch, names)) or len(set(names)) < len(names):
        raise other(facts_at, "buckets", names, "a list of sizes, e.g. 576x448", BUCKETS_AGAIN)
    stages = tuple(read_stage(f"{location.rstrip('/')}/{name}", fetched=fetched) for name in names)
    for name, stage in zip(names, stages, strict=True):
        if stage.kind != facts["stage"] or stage.facts.get("image_size") != [int(px) for px in name.split("x")]:
            given = f"{stage.kind} of {stage.facts.get('image_size')} px"
            raise ValueError(f"{stage.location} has {given}, and is no bucket of {facts_at}. {BUCKETS_AGAIN}")
    if not is_number(facts.get("samples"), total := sum(stage.num_samples for stage in stages)):
        raise other(
            facts_at, "samples", facts.get("samples", MISSING), f"{total}, the sum of its buckets", BUCKETS_AGAIN
        )
    digests = "".join(f"{name} {stage.index_sha256}\n" for name, stage in zip(names, stages, strict=True))
    return Stage(
        location=location,
        kind=facts["stage"],
        index_sha256=hashlib.sha256(digests.encode()).hexdigest(),
        num_samples=total,
        columns=stages[0].columns,
        encodings=stages[0].encodings,
        largest_shard_bytes=max(stage.largest_shard_bytes for stage in stages),
        facts=facts,
        facts_at=facts_at,
        buckets=stages,
    )


def read_index(location: str) -> Index:
    """Return index.json of a folder or store address that others have written. Raises ValueError: nothing is there."""
    return parsed_index(location, _index_text(location), of_others=True)


def _index_text(location: str, fetched: Fetched | None = None) -> bytes:
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
    return _text_of(location, INDEX, fetched=fetched)


def split_place(place: str) -> tuple[str, str]:
    """Return (folder or address, name) of a file's place."""
    folder, slash, name = place.rpartition("/")
    return folder or ("/" if slash else "."), name


def _check_facts(where: str, location: str, facts: Mapping[str, Any], digest: str) -> None:
    """Look at what dataset.json says of every stage, but for the number of samples."""
    schema, again = facts.get("schema", MISSING), AGAIN
    if facts.get("columns") is not None:
        again = f"Adopt the data set again: {ADOPT} {location}"
    if type(schema) is not int:
        raise other(where, "schema", schema, f"{FACTS_SCHEMA}, a number")
    if schema != FACTS_SCHEMA:
        raise ValueError(f"{where} has schema {schema}; this version reads {FACTS_SCHEMA}. {AGAIN}")
    if facts.get("index_sha256") != digest:
        name = FACTS_FILE if where == f"{location.rstrip('/')}/{FACTS_FILE}" else where
        raise ValueError(
            f"{location}/index.json (sha256 {digest[:12]}) is not the one that {name} was written for "
            f"({str(facts.get('index_sha256'))[:12]}). {again}"
        )
    encoders = facts.get("encoders")
    known = [digest for digest in encoders.values() if digest is not None] if isinstance(encoders, dict) else None
    if encoders is not None and not are_texts(known):  # null: of moments that others have made
        raise other(where, "encoders", encoders, "an object of names and fingerprints")
    for name in (KEYS_DIGEST, EMPTY_DIGEST):
        of_file = facts.get(name)
        if of_file is not None and not (isinstance(of_file, str) and DIGEST.fullmatch(of_file)):
            raise other(where, name, of_file, "16 hexadecimal digits")
    if facts.get("stage") not in list(KINDS):  # of a list: what is given may have no hash
        raise other(where, "stage", facts.get("stage", MISSING), " or ".join(map(json.dumps, KINDS)))
    if facts.get("columns") is None:
        return
    if columns_of(facts) is None or facts["stage"] != "images":
        raise other(
            where, "columns", facts["columns"], "of a stage of images, an object of captions, image and key", again
        )


def _check_shards(folder: str, shards: ShardTable, of_others: str | None) -> None:
    """Look for shards that are not there or were cut; without this a run finds them hours later."""
    for name, size in shards.stored():
        with contextlib.suppress(OSError):
            found = os.stat(f"{folder}/{name}")  # noqa: PTH116  # a Path takes twice as long as the call
            if found.st_size == size and stat.S_ISREG(found.st_mode):
                continue
        raise ValueError(_wrong_file(Path(folder, name), Path(folder), size, of_others))


def _wrong_file(path: Path, folder: Path, size: int, of_others: str | None) -> str:
    of_part = f"Remove {path.parent}, and give the command that made it again."
    again = of_others or (AGAIN if path.parent == folder else of_part)
    try:
        if not path.is_file():
            what = "is no file" if os.path.lexists(path) else "is missing"
            return f"{path} {what}, index.json lists it. {again}"
        return f"{path} has {path.stat().st_size:,} bytes, index.json says {size:,}. {again}"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}, index.json lists it. {again}"


def holds_another_stage(local: str, stage: Stage) -> bool:
    """True where a cache folder was filled from another stage; an index that is only damaged has most shards of its own."""
    try:
        path = Path(local, INDEX)
        check_memory(str(path), path.stat().st_size)
        if hashlib.sha256(text := path.read_bytes()).hexdigest() == stage.index_sha256:
            return False
        index = parsed_index(local, text, of_others=True)
        cached = fingerprints((index.content or {})["shards"] if index.table is None else index.table)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # empty, or broken: it is fetched again
    return 2 * int(np.isin(cached, fingerprints(stage.shards)).sum()) < len(cached)


def read_json(location: str, name: str, or_adopt: str = "") -> tuple[bytes, dict[str, Any]]:
    """Return a file of a stage, as it is and read. `or_adopt`: added to a message that it is not there."""
    text = _text_of(location, name, or_adopt)
    return text, parsed_object(f"{location}/{name}", text)


def _text_of(location: str, name: str, or_adopt: str = "", fetched: Fetched | None = None) -> bytes:
    """Return a file of a stage. Raises ValueError: it is not there, or would not fit into memory.

    Args:
        fetched: gets it, where it is fetched.
    """
    if not is_remote(location):
        path = Path(location, name)
        try:
            if not path.is_file():
                make = f"Make the stage: python -m prepare.shards --help{'.' * bool(or_adopt)}{or_adopt}"
                raise ValueError(f"no {name} under {location}. {make}")
            check_memory(f"{location}/{name}", path.stat().st_size)
            return path.read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}.") from error
    place = f"{location.rstrip('/')}/{name}"
    # On NFS an open file keeps its folder until it is closed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            size = stored_size(place, STORE_SILENCE_SEC) if name == INDEX else None
            if size is None or is_readable(size):
                download_once(place, f"{folder}/{name}", STORE_SILENCE_SEC)
                size = Path(folder, name).stat().st_size
        except Exception as error:  # each store's client has exceptions of its own
            raise refusal(error, f"{explain_store_error(error, location)}{or_adopt}") from error
        check_memory(place, size)
        if fetched is not None:
            fetched[location.rstrip("/")] = open(Path(folder, name), "rb")  # noqa: SIM115 (until it is taken)
        return Path(folder, name).read_bytes()


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
