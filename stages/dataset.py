"""A stage on disk or in a store: what `index.json` and `dataset.json` say of it, read and written.

A stage is an MDS dataset (`index.json` and shards, with hashes) with a `dataset.json` beside the index that says what
made it. A folder without both is not a stage: `index.json` is written last, so a half-written one has none.

A data set that others have written has an index of its own and a `dataset.json` of prepare.adopt's, which may lie elsewhere.
Its shards may be compressed, and have hashes of another kind or none, and columns of other names (stages/adopted.py).
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

from streaming.base.compression import get_compressions
from streaming.base.format.mds.encodings import get_mds_encoded_size, is_mds_encoding_safe
from streaming.base.storage.download import DOWNLOADER_MAPPINGS

from cli.files import write_json
from stages.adopted import Columns, columns_of, problem_of_columns
from stages.fetch import HASH, known_digest
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
ADOPT = "python -m prepare.adopt"
OF_OTHERS = "Others have written it: copy it anew, or write it again with streaming's MDSWriter."
STORE_SILENCE_SEC = 10.0  # a file of facts is asked for three times; a run then waits for its shards, this does not

MDS_VERSION = 2
COMPRESSIONS = sorted(get_compressions())  # zstd, zstd:1 and so on
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
OF_COLUMNS = ("column_names", "column_encodings", "column_sizes")
MISSING = object()
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
    index_bytes, index = read_index(location)
    facts_at = facts_at or f"{location.rstrip('/')}/{FACTS_FILE}"
    _, facts = read_json(*split_place(facts_at), or_adopt=f" If others have written it: {ADOPT} {location}")
    digest = hashlib.sha256(index_bytes).hexdigest()
    _check_facts(facts_at, location, facts, digest)
    if "buckets" in facts:
        return _read_buckets(location, facts_at, facts)
    shards = checked_shards(location, index, facts.get("columns") is not None)
    total = sum(shard["samples"] for shard in shards)
    if not _is(facts.get("samples"), total):
        raise _other(facts_at, "samples", facts.get("samples", MISSING), f"{total}, the sum of index.json")
    if (columns := columns_of(facts)) is not None:
        check_named_columns(location, columns, shards)
    sizes = {file["basename"]: file["bytes"] for file in map(stored_file, shards)}
    if not is_remote(location):
        _check_shards(location, sizes, OF_OTHERS if columns else None)
    return Stage(
        location=location,
        kind=facts["stage"],
        index_sha256=digest,
        num_samples=facts["samples"],
        columns=tuple(shards[0]["column_names"]),
        encodings=tuple(shards[0]["column_encodings"]),
        largest_shard_bytes=max(
            shard["raw_data"]["bytes"] + (shard["zip_data"] or {"bytes": 0})["bytes"] for shard in shards
        ),
        files=_files(index),
        facts=facts,
        facts_at=facts_at,
        is_compressed=any(shard["zip_data"] is not None for shard in shards),
    )


def _read_buckets(location: str, facts_at: str, facts: Mapping[str, Any]) -> Stage:
    """Read each stage of a set of buckets. Raises ValueError: one is not there, or is none of this set's."""
    names = facts["buckets"]
    if not _are_texts(names) or not names or not all(map(BUCKET.fullmatch, names)) or len(set(names)) < len(names):
        raise _other(facts_at, "buckets", names, "a list of sizes, e.g. 576x448", BUCKETS_AGAIN)
    stages = tuple(read_stage(f"{location.rstrip('/')}/{name}") for name in names)
    for name, stage in zip(names, stages, strict=True):
        if stage.kind != facts["stage"] or stage.facts.get("image_size") != [int(px) for px in name.split("x")]:
            given = f"{stage.kind} of {stage.facts.get('image_size')} px"
            raise ValueError(f"{stage.location} has {given}, and is no bucket of {facts_at}. {BUCKETS_AGAIN}")
    if not _is(facts.get("samples"), total := sum(stage.num_samples for stage in stages)):
        raise _other(
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


def read_index(location: str) -> tuple[bytes, dict[str, Any]]:
    """Return index.json of a folder or store address, as it is and read. Raises ValueError: nothing is there."""
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
    return read_json(location, "index.json")


def split_place(place: str) -> tuple[str, str]:
    """Return (folder or address, name) of a file's place."""
    folder, slash, name = place.rpartition("/")
    return folder or ("/" if slash else "."), name


def stored_file(shard: Mapping[str, Any]) -> dict[str, Any]:
    """Return name, size and hashes of the file that a store has of a shard: the compressed one, where there is one."""
    return shard["zip_data"] or shard["raw_data"]


def _check_facts(where: str, location: str, facts: Mapping[str, Any], digest: str) -> None:
    """Look at what dataset.json says of every stage, but for the number of samples."""
    schema, again = facts.get("schema", MISSING), AGAIN
    if facts.get("columns") is not None:
        again = f"Adopt the data set again: {ADOPT} {location}"
    if type(schema) is not int:
        raise _other(where, "schema", schema, f"{FACTS_SCHEMA}, a number")
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
    if encoders is not None and not _are_texts(known):  # null: of moments that others have made
        raise _other(where, "encoders", encoders, "an object of names and fingerprints")
    of_keys = facts.get(KEYS_DIGEST)
    if of_keys is not None and not (isinstance(of_keys, str) and DIGEST.fullmatch(of_keys)):
        raise _other(where, KEYS_DIGEST, of_keys, "16 hexadecimal digits")
    if facts.get("stage") not in list(KINDS):  # of a list: what is given may have no hash
        raise _other(where, "stage", facts.get("stage", MISSING), " or ".join(map(json.dumps, KINDS)))
    if facts.get("columns") is None:
        return
    columns, scale = columns_of(facts), facts.get("latent_scale")
    if columns is None or (columns.latents is None) != (facts["stage"] == "images"):
        possible = "an object of captions, of image or latents as the stage is, and key"
        raise _other(where, "columns", facts["columns"], possible, again)
    if columns.latents is not None and (type(scale) not in (int, float) or not 0.0 < scale < 1e4):
        raise _other(where, "latent_scale", facts.get("latent_scale", MISSING), "a number above 0", again)


def check_named_columns(location: str, columns: Columns, shards: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError where a shard has not the columns that are read, each of the same encoding."""
    if wrong := problem_of_columns(columns, shards):
        raise ValueError(f"{location}/index.json: {wrong[0]}. Possible: {wrong[1]}. {OF_OTHERS}")


def checked_shards(location: str, index: Mapping[str, Any], of_others: bool) -> list[dict[str, Any]]:
    """Return the shards of index.json. Raises ValueError: one could not be read, or they do not belong together."""
    where, shards, names = f"{location}/index.json", index.get("shards", MISSING), set()
    again = OF_OTHERS if of_others else AGAIN
    if not _is(index.get("version"), MDS_VERSION):
        raise _other(where, "version", index.get("version", MISSING), f"{MDS_VERSION}, a number", again)
    if not isinstance(shards, list):
        raise _other(where, "shards", shards, "a list", again)
    if not shards:
        raise ValueError(f"{where} lists no shard. {again}")
    for number, shard in enumerate(shards):
        if wrong := _wrong_in_shard(shard, of_others):
            raise _other(where, f"shards[{number}]{wrong[0]}", *wrong[1:], again)
        for file in filter(None, (shard["raw_data"], shard["zip_data"])):
            name = file["basename"]
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"{where} names a shard outside of its stage: {name}. {again}")
            if Path(name) in names:
                raise ValueError(f"{where} lists {name} twice. {again}")
            names.add(Path(name))
        is_as_first = all(_are_same(shard[key], shards[0][key]) for key in OF_COLUMNS)
        if not number or (of_others and not is_as_first):
            _check_columns(location, shard, number, again)
        for key in OF_COLUMNS if not of_others else ():
            if not _are_same(shard[key], shards[0][key]):
                first = f"{_shown(shards[0][key])} as in shards[0]: all shards have the same columns"
                raise _other(where, f"shards[{number}].{key}", shard[key], first)
    if not any(shard["samples"] for shard in shards):
        raise ValueError(f"{where} lists no sample. {again}")
    return shards


def _wrong_in_shard(shard: Any, of_others: bool) -> tuple[str, Any, str] | None:
    """Return (key, value, what is possible) of the first entry with which no reader could do anything, or None."""
    raw, packed = (shard.get(key) if isinstance(shard, dict) else None for key in ("raw_data", "zip_data"))
    looked_into = (("", shard, SHARD_KEYS), (".raw_data", raw, FILE_KEYS), (".zip_data", packed, FILE_KEYS))
    for key, given, wanted in looked_into if of_others and packed is not None else looked_into[:2]:
        if not isinstance(given, dict) or set(given) != wanted:
            return key, given, f"an object of {', '.join(sorted(wanted))}"
    if (wrong := _wrong_hashes(shard) if of_others else _wrong_own_hash(raw["hashes"])) is not None:
        return wrong
    samples = shard[
        "samples"
    ]  # streaming's writer leaves an empty shard where the first sample is larger than its limit
    limit, is_packed = shard["size_limit"], of_others and packed is not None
    of_compression = (
        (".compression", shard["compression"], shard["compression"] is None, "null: uncompressed"),
        (".zip_data", packed, packed is None, "null: uncompressed"),
    )
    if of_others:
        is_known = shard["compression"] in COMPRESSIONS if is_packed else shard["compression"] is None
        possible = f"with zip_data one of {', '.join(name for name in COMPRESSIONS if ':' not in name)}; else null"
        of_compression = ((".compression", shard["compression"], is_known, possible),)
    looked_at = (
        (".version", shard["version"], _is(shard["version"], MDS_VERSION), f"{MDS_VERSION}, a number"),
        (".format", shard["format"], shard["format"] == "mds", '"mds"'),
        *of_compression,
        (".hashes", shard["hashes"], _are_texts(shard["hashes"]), "a list of names"),
        (".size_limit", limit, limit is None or _is_count(limit, 2**63), "null, or a number of bytes"),
        (".samples", samples, _is_count(samples) or (of_others and _is(samples, 0)), COUNT),
        *_looked_at_in_file(".raw_data", raw),
        *(_looked_at_in_file(".zip_data", packed) if is_packed else ()),
        (".column_names", shard["column_names"], _are_texts(shard["column_names"]), "a list of names"),
        (".column_encodings", shard["column_encodings"], _are_texts(shard["column_encodings"]), "a list of names"),
    )
    if wrong := next(((key, given, possible) for key, given, is_right, possible in looked_at if not is_right), None):
        return wrong
    if (most := raw["bytes"] // BYTES_OF_AN_OFFSET - 2) < samples:
        return ".samples", samples, f"at most {most:,} in a shard of {raw['bytes']:,} bytes"
    return None


def _looked_at_in_file(key: str, file: Mapping[str, Any]) -> tuple[tuple[str, Any, bool, str], ...]:
    name, size = file["basename"], file["bytes"]
    of_name = (f"{key}.basename", name, _is_name(name), "the name of a file")
    return of_name, (f"{key}.bytes", size, _is_count(size), COUNT)


def _wrong_own_hash(hashes: Any) -> tuple[str, Any, str] | None:
    if isinstance(hashes, dict) and isinstance(hashes.get(HASH), str) and DIGEST.fullmatch(hashes[HASH]):
        return None
    return ".raw_data.hashes", hashes, f"the shard's {HASH}, 16 hexadecimal digits"


def _wrong_hashes(shard: Mapping[str, Any]) -> tuple[str, Any, str] | None:
    for key in ("raw_data", "zip_data"):
        hashes = {} if shard[key] is None else shard[key]["hashes"]
        if not isinstance(hashes, dict) or not _are_texts([*hashes, *hashes.values()]):
            return f".{key}.hashes", hashes, "an object of names and digests, which may be empty"
    return None


def _check_columns(location: str, shard: Mapping[str, Any], number: int, again: str) -> None:
    """Look at the columns of a shard: known encodings, none of which runs code, in their sizes."""
    where, names, encodings = f"{location}/index.json", shard["column_names"], shard["column_encodings"]
    if not names or len(set(names)) != len(names) or not all(map(_is_name, names)):
        raise _other(where, f"shards[{number}].column_names", names, "different names, at least one", again)
    if len(encodings) != len(names):
        raise _other(
            where, f"shards[{number}].column_encodings", encodings, f"one for each of {len(names)} columns", again
        )
    sizes = []
    for name, encoding in zip(names, encodings, strict=True):
        if not is_mds_encoding_safe(encoding.partition(":")[0]):
            text = f"{location}/{shard['raw_data']['basename']} has a pickled column, {name}, which could run code"
            raise ValueError(f"{text}. Make that stage again without it.")
        try:
            sizes.append(get_mds_encoded_size(encoding))
        except Exception as error:  # each encoding fails in its own way
            possible = "an encoding of MDS, e.g. str, bytes, ndarray:float16:8,64,64"
            raise _other(where, f"encoding of column {name}", encoding, possible, again) from error
    if not _are_same(shard["column_sizes"], sizes):
        possible = f"{_shown(sizes)}, as these are encoded"
        raise _other(where, f"shards[{number}].column_sizes", shard["column_sizes"], possible, again)


def _other(where: str, key: str, given: Any, possible: str, again: str = AGAIN) -> ValueError:
    return ValueError(f"{where}: {key} is {_shown(given)}. Possible: {possible}. {again}")


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


def _check_shards(folder: str, sizes: dict[str, int], of_others: str | None) -> None:
    """Look for shards that are not there or were cut; without this a run finds them hours later."""
    for name, size in sizes.items():
        path = Path(folder, name)
        of_part = f"Remove {path.parent}, and give the command that made it again."
        again = of_others or (AGAIN if path.parent == Path(folder) else of_part)
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
    digests = [known_digest(shard["hashes"]) or ("", "") for shard in raw]
    return frozenset(
        (shard["basename"], shard["bytes"], digest) for shard, (_, digest) in zip(raw, digests, strict=True)
    )


def holds_another_stage(local: str, stage: Stage) -> bool:
    """True where a cache folder was filled from another stage; an index that is only damaged has most shards of its own."""
    try:
        cached = _files(json.loads(Path(local, "index.json").read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False  # empty, or broken: it is fetched again
    return 2 * len(cached & stage.files) < len(cached)


def read_json(location: str, name: str, or_adopt: str = "") -> tuple[bytes, dict[str, Any]]:
    """Return a file of a stage, as it is and read. `or_adopt`: added to a message that it is not there."""
    if is_remote(location):
        with tempfile.TemporaryDirectory() as folder:
            try:
                download_once(f"{location.rstrip('/')}/{name}", f"{folder}/{name}", STORE_SILENCE_SEC)
            except Exception as error:  # each store's client has exceptions of its own
                raise ValueError(f"{explain_store_error(error, location)}{or_adopt}") from error
            text = Path(folder, name).read_bytes()
    else:
        path = Path(location, name)
        try:
            if not path.is_file():
                make = f"Make the stage: python -m prepare.shards --help{'.' * bool(or_adopt)}{or_adopt}"
                raise ValueError(f"no {name} under {location}. {make}")
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
