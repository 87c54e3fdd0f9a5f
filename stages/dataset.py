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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streaming.base.storage.download import DOWNLOADER_MAPPINGS

from cli.files import whole, write_json
from stages.adopted import Columns, columns_of
from stages.fetch import HASH, file_digest, known_digest
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
from stages.shard_table import NO_SHARDS, ShardTable
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


def read_stage(location: str, facts_at: str | None = None) -> Stage:
    """Read the facts of the stage at a folder or store address.

    All that a reader of the stage leans on is looked at here, so that nothing of it fails later: what both files hold, that
    they belong together, and in a folder that every shard is there in its size.

    Args:
        facts_at: place of dataset.json, if it lies elsewhere: a file, or an address.

    Raises:
        ValueError: nothing is there, it is no stage, or a file cannot be read; says which and what to do.
    """
    facts_at = facts_at or f"{location.rstrip('/')}/{FACTS_FILE}"
    text = _index_text(location)
    _, facts = read_json(*split_place(facts_at), or_adopt=f" If others have written it: {ADOPT} {location}")
    index = parsed_index(location, text, facts.get("columns") is not None, "buckets" in facts)
    _check_facts(facts_at, location, facts, index)
    if "buckets" in facts:
        return _read_buckets(location, facts_at, facts)
    shards, columns = index.shards, columns_of(facts)
    if columns is not None:
        check_named_columns(location, columns, shards)
    if not is_remote(location):
        _check_shards(location, shards, OF_OTHERS if columns else AGAIN)
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


def _read_buckets(location: str, facts_at: str, facts: Mapping[str, Any]) -> Stage:
    """Read each stage of a set of buckets. Raises ValueError: one is not there, or is none of this set's."""
    names = facts["buckets"]
    if not are_texts(names) or not names or not all(map(BUCKET.fullmatch, names)) or len(set(names)) < len(names):
        raise other(facts_at, "buckets", names, "a list of sizes, e.g. 576x448", BUCKETS_AGAIN)
    stages = tuple(read_stage(f"{location.rstrip('/')}/{name}") for name in names)
    for name, stage in zip(names, stages, strict=True):
        if stage.kind != facts["stage"] or stage.facts.get("image_size") != [int(px) for px in name.split("x")]:
            given = f"{stage.kind} of {stage.facts.get('image_size')} px"
            raise ValueError(f"{stage.location} has {given}, and is no bucket of {facts_at}. {BUCKETS_AGAIN}")
    if not is_number(facts.get("samples"), total := sum(stage.num_samples for stage in stages)):
        given = facts.get("samples", MISSING)
        raise other(facts_at, "samples", given, f"{total}, the sum of its buckets", BUCKETS_AGAIN)
    digests = "".join(f"{name} {stage.index_sha256}\n" for name, stage in zip(names, stages, strict=True))
    return Stage(
        location=location,
        kind=facts["stage"],
        index_sha256=hashlib.sha256(digests.encode()).hexdigest(),
        num_samples=facts["samples"],
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


def _index_text(location: str) -> bytes:
    if text := address_problem(location):
        raise ValueError(text)
    scheme = scheme_of(location)
    if scheme not in DOWNLOADER_MAPPINGS:
        known = ", ".join(f"{name}://" for name in sorted(name for name in DOWNLOADER_MAPPINGS if name))
        raise ValueError(f"'{location}' is in no known store. Known: a folder, {known}.")
    if not scheme and not os.path.isdir(location):  # noqa: PTH112  # a Path raises where a name is too long
        raise ValueError(f"no folder {location}. Check the path, or make the stage: python -m prepare.shards --help")
    return _text_of(location, INDEX)


def split_place(place: str) -> tuple[str, str]:
    """Return (folder or address, name) of a file's place."""
    folder, slash, name = place.rpartition("/")
    return folder or ("/" if slash else "."), name


def _check_facts(where: str, location: str, facts: Mapping[str, Any], index: Index) -> None:
    """Look at what dataset.json says of every stage. Raises ValueError."""
    is_adopted = facts.get("columns") is not None
    again = f"Adopt the data set again: {ADOPT} {location}" if is_adopted else AGAIN
    of_index = facts.get("index_sha256")
    if facts.get("schema") == FACTS_SCHEMA and of_index != index.sha256:
        raise ValueError(
            f"{location}/{INDEX} (sha256 {index.sha256[:12]}) is not the one that {where} was written for "
            f"({str(of_index)[:12]}). {again}"
        )
    encoders, total, columns = facts.get("encoders"), int(index.shards.samples.sum()), columns_of(facts)
    known = [digest for digest in encoders.values() if digest is not None] if isinstance(encoders, dict) else None
    checks = [
        ("schema", is_number(facts.get("schema"), FACTS_SCHEMA), f"{FACTS_SCHEMA}, a number"),
        ("encoders", encoders is None or are_texts(known), "an object of names and fingerprints"),
        ("stage", facts.get("stage") in list(KINDS), " or ".join(map(json.dumps, KINDS))),
        ("samples", "buckets" in facts or is_number(facts.get("samples"), total), f"{total}, the sum of {INDEX}"),
    ]
    for name in (KEYS_DIGEST, EMPTY_DIGEST):
        digest = facts.get(name)
        is_right = digest is None or (isinstance(digest, str) and DIGEST.fullmatch(digest) is not None)
        checks.append((name, is_right, "16 hexadecimal digits"))
    if is_adopted:
        is_right = columns is not None and facts.get("stage") == "images"
        checks.append(("columns", is_right, "of a stage of images, an object of captions, image and key"))
    for key, is_right, possible in checks:
        if not is_right:
            raise other(where, key, facts.get(key, MISSING), possible, again)


def _check_shards(folder: str, shards: ShardTable, again: str) -> None:
    """Look for shards that are not there or were cut; without this a run finds them hours later."""
    for name, size in shards.stored():
        what = "is missing or no file"
        with contextlib.suppress(OSError):
            found = os.stat(f"{folder}/{name}")  # noqa: PTH116  # a Path takes twice as long as the call
            if stat.S_ISREG(found.st_mode):
                what = f"has {found.st_size:,} bytes"
                if found.st_size == size:
                    continue
        part = Path(folder, name).parent
        todo = again if part == Path(folder) else f"Remove {part}, and give the command that made it again."
        raise ValueError(f"{folder}/{name} {what}, {INDEX} says {size:,} bytes. {todo}")


def read_json(location: str, name: str, or_adopt: str = "") -> tuple[bytes, dict[str, Any]]:
    """Return a file of a stage, as it is and read. `or_adopt`: added to a message that it is not there."""
    text = _text_of(location, name, or_adopt)
    return text, parsed_object(f"{location}/{name}", text)


def _text_of(location: str, name: str, or_adopt: str = "") -> bytes:
    """Return a file of a stage. Raises ValueError: it is not there, or would not fit into memory."""
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
        return Path(folder, name).read_bytes()


def file_beside(stage: Stage, name: str, wanted: str, folder: str | None) -> Path:
    """Return a local path of a file beside dataset.json. Raises ValueError: it is not there, or another.

    Args:
        wanted: its digest, of the kind HASH.
        folder: where that of a stage in a store is kept.
    """
    source = f"{stage.location.rstrip('/')}/{name}"
    path = Path(source)
    if is_remote(stage.location):
        assert folder is not None
        path = Path(folder, name)
        if path.is_file() and file_digest(path) == wanted:
            return path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole(path) as temporary:
                download_once(source, str(temporary))
        except Exception as error:  # each store's client has exceptions of its own
            raise refusal(error, explain_store_error(error, source)) from error
    try:
        found = file_digest(path)
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror}; dataset.json names it. Copy it anew.") from error
    if found != wanted:
        raise ValueError(f"{source} is damaged: its {HASH} is {found}, dataset.json says {wanted}. Copy it anew.")
    return path


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
