"""What an index.json may hold: everything that streaming's reader of a shard leans on is looked at here, before it is read.

Our own index has shards that are not compressed, each with a digest. A third-party one may have compressed
ones, hashes of another kind or none, and columns that differ from shard to shard where they are not read.

At 400,000 shards an index has 160 MB, and as objects of Python 2 GB: each entry becomes a row of a table as it is read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streaming.base.compression import get_compressions
from streaming.base.format.mds.encodings import get_mds_encoded_size, is_mds_encoding_safe

from common.host_memory import read_host_bytes
from mds.adopted import AdoptedColumns, adopted_columns_problem
from mds.fetch import HASH, INDEX
from mds.shard_table import ShardTable, TableWriter

REMAKE_ADOPTED = "It is a third-party dataset: copy it again, or rewrite it with streaming's MDSWriter."
REMAKE = "Rebuild the dataset: python -m prepare.shards --help"
MDS_VERSION = 2
COMPRESSIONS = sorted(get_compressions())  # zstd, zstd:1 and so on
MAX_COUNT = 2**32 - 1  # a shard's rows, and the bytes of it, are counted in uint32
# A shard begins with the number of its samples, and where each of them and the last one's end is.
BYTES_OF_AN_OFFSET = 4
COUNT_RANGE = f"a whole number from 1 to {MAX_COUNT:,}"
DIGEST = re.compile(r"[0-9a-f]{16}")
# What streaming's reader of a shard takes, no more and no less.
COLUMN_KEYS = ("column_names", "column_encodings", "column_sizes")
SHARD_KEYS = {
    "version",
    "format",
    "compression",
    "hashes",
    "raw_data",
    "zip_data",
    "samples",
    "size_limit",
    *COLUMN_KEYS,
}
FILE_KEYS = {"basename", "bytes", "hashes"}
MISSING = object()
HEAD_BYTES = 2**16
MAX_TEXT_LENGTH = 1000  # characters of a name, and of digests
READ_PER_BYTE = 3.0  # bytes of memory for one of an index, as text and table: 2.8 were seen at 400,000 shards
Check = tuple[str, bool, Any, str]
IN_TABLE = object()  # in place of an entry that is in the table


def file_in_store(shard: Mapping[str, Any]) -> dict[str, Any]:
    """Return name, size and hashes of the file that a store has of a shard: the compressed one, where there is one."""
    return shard["zip_data"] or shard["raw_data"]


def check_adopted_columns(location: str, columns: AdoptedColumns, shards: ShardTable) -> None:
    """Raise ValueError where a shard has not the columns that are read, each of the same encoding."""
    if wrong := adopted_columns_problem(columns, shards):
        raise ValueError(f"{location}/index.json: {wrong[0]}. Possible: {wrong[1]}. {REMAKE_ADOPTED}")


def is_compressed(folder: str) -> bool:
    """True if the first entry of a folder's index.json is compressed; only the file's head is read."""
    try:
        path = Path(folder, INDEX)
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            return re.search(rb'"compression"\s*:\s*"', file.read(HEAD_BYTES)) is not None
    except (OSError, ValueError):  # it cannot be read, as `read_dataset` will say
        return False


@dataclass(frozen=True)
class Index:
    """What an index.json holds."""

    num_bytes: int
    sha256: str
    shards: ShardTable


def parse_index(location: str, text: bytes, is_adopted: bool, may_be_empty: bool = False) -> Index:
    """Read an index.json. Raises ValueError: it is not JSON, a shard could not be read, or they do not belong together."""
    where, advice = f"{location}/{INDEX}", REMAKE_ADOPTED if is_adopted else REMAKE
    writer, seen, first = TableWriter(), set[str](), dict[str, Any]()

    def take(entry: dict[str, Any]) -> Any:
        if "raw_data" not in entry:
            return entry
        checks = _check_shard(entry, first, writer, is_adopted)
        if wrong := next(((key, *details) for key, is_right, *details in checks if not is_right), None):
            raise value_error(where, f"shards[{len(writer.samples)}]{wrong[0]}", *wrong[1:], advice)
        for file in filter(None, (entry["raw_data"], entry["zip_data"])):
            if file["basename"] in seen:
                raise ValueError(f"{where} lists {file['basename']} twice. {advice}")
            seen.add(file["basename"])
        if not first:
            first.update(entry)
        writer.add(entry)
        return IN_TABLE

    content = parse_object(where, text, take, advice)
    version, shards = content.get("version", MISSING), content.get("shards", MISSING)
    if not is_integer(version, MDS_VERSION):
        raise value_error(where, "version", version, f"{MDS_VERSION}, a number", advice)
    if not isinstance(shards, list):
        raise value_error(where, "shards", shards, "a list", advice)
    for number, entry in enumerate(shards):
        if entry is not IN_TABLE:
            raise value_error(where, f"shards[{number}]", entry, _describe_object(SHARD_KEYS), advice)
    if not any(writer.samples) and not may_be_empty:
        raise ValueError(f"{where} lists no sample. {advice}")
    return Index(len(text), hashlib.sha256(text).hexdigest(), writer.to_table())


def fits_in_memory(num_bytes: int) -> bool:
    """True where the memory that is free is enough to read an index."""
    return READ_PER_BYTE * num_bytes <= read_host_bytes()[1]


def check_memory(where: str, num_bytes: int) -> None:
    """Raise ValueError if an index does not fit into memory."""
    if not fits_in_memory(num_bytes):
        need, free = (max(0, size) / 2**30 for size in (READ_PER_BYTE * num_bytes, read_host_bytes()[1]))
        problem = (
            f"{where} has {num_bytes / 2**30:.3g} GiB: to read it takes about {need:.3g}, and {free:.3g} are free here"
        )
        advice = "Use a machine with more memory, or rebuild the dataset with larger shards (shard_size)"
        raise ValueError(f"{problem}. {advice}.")


def parse_object(
    where: str, text: bytes, hook: Callable[[dict[str, Any]], Any] | None = None, advice: str = REMAKE
) -> dict[str, Any]:
    """Return the object that a file holds. Raises ValueError: it holds none. `hook`: see json.loads."""
    try:
        content = json.loads(text, object_hook=hook)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} is not JSON: {error}. {advice}") from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply to be read. {advice}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{where} holds a {type(content).__name__}, not an object. {advice}")
    return content


def _check_shard(
    shard: dict[str, Any], first: Mapping[str, Any], known: TableWriter, is_adopted: bool
) -> Iterator[Check]:
    """Yield (key, is it right, value, what is possible) of an entry, in an order in which each leans on those before.

    Args:
        first: entry of the index; empty: it is this one.
        known: the entries before.
    """
    yield "", set(shard) == SHARD_KEYS, shard, _describe_object(SHARD_KEYS)
    raw, compressed_file, samples = shard["raw_data"], shard["zip_data"], shard["samples"]
    is_zipped = is_adopted and compressed_file is not None
    yield ".zip_data", is_zipped or compressed_file is None, compressed_file, "null: uncompressed"
    for key, file in ((".raw_data", raw), (".zip_data", compressed_file))[: 1 + is_zipped]:
        yield key, isinstance(file, dict) and set(file) == FILE_KEYS, file, _describe_object(FILE_KEYS)
        name, size, hashes = file["basename"], file["bytes"], file["hashes"]
        yield f"{key}.basename", _is_name(name) and _is_inside(name), name, "the name of a file inside of the dataset"
        yield f"{key}.bytes", _is_count(size), size, COUNT_RANGE
        if is_adopted:
            texts = [*hashes, *hashes.values()] if isinstance(hashes, dict) else None
            is_right = is_list_of_str(texts) and sum(map(len, texts)) < MAX_TEXT_LENGTH
            yield f"{key}.hashes", is_right, hashes, "an object of names and digests, which may be empty"
        else:
            digest = hashes.get(HASH) if isinstance(hashes, dict) else None
            is_right = isinstance(digest, str) and DIGEST.fullmatch(digest) is not None
            yield f"{key}.hashes", is_right, hashes, f"the shard's {HASH}, 16 hexadecimal digits"
    # streaming's writer leaves an empty shard where the first sample is larger than its limit
    yield ".samples", _is_count(samples) or (is_adopted and is_integer(samples, 0)), samples, COUNT_RANGE
    max_samples = raw["bytes"] // BYTES_OF_AN_OFFSET - 2
    yield ".samples", samples <= max_samples, samples, f"at most {max_samples:,} in a shard of {raw['bytes']:,} bytes"
    if not known.has_kind(shard) or is_zipped or shard["compression"] is not None:
        yield from _check_shard_kind(shard, {} if is_adopted else first, is_zipped)


def _check_shard_kind(shard: dict[str, Any], first: Mapping[str, Any], is_zipped: bool) -> Iterator[Check]:
    """Yield the same of what an entry has in common with others. `first`: whose columns it has to have; empty: any."""
    compression, limit = shard["compression"], shard["size_limit"]
    names = ", ".join(name for name in COMPRESSIONS if ":" not in name)
    possible = f"one of {names}" if is_zipped else "null: uncompressed"
    yield ".compression", compression in COMPRESSIONS if is_zipped else compression is None, compression, possible
    yield ".version", is_integer(shard["version"], MDS_VERSION), shard["version"], f"{MDS_VERSION}, a number"
    yield ".format", shard["format"] == "mds", shard["format"], '"mds"'
    yield ".hashes", is_list_of_str(shard["hashes"]), shard["hashes"], "a list of names"
    yield ".size_limit", limit is None or _is_count(limit, 2**63), limit, "null, or a number of bytes"
    for key in COLUMN_KEYS if first else ():
        possible = f"{format_json(first[key])} as in shards[0]: all shards have the same columns"
        yield f".{key}", _are_same(shard[key], first[key]), shard[key], possible
    if not first:
        yield from _check_columns(*(shard[key] for key in COLUMN_KEYS))


def _check_columns(names: Any, encodings: Any, sizes: Any) -> Iterator[Check]:
    """Yield the same of a shard's columns: known encodings, none of which runs code, in their sizes."""
    is_right = is_list_of_str(names) and all(map(_is_name, names)) and 0 < len(names) == len(set(names))
    yield ".column_names", is_right, names, "different names, at least one"
    is_right = is_list_of_str(encodings) and len(encodings) == len(names)
    yield ".column_encodings", is_right, encodings, f"one for each of {len(names)} columns"
    expected = []
    for encoding in encodings:
        try:
            is_right = is_mds_encoding_safe(encoding.partition(":")[0])  # a pickled column could run code
            expected.append(get_mds_encoded_size(encoding))
        except Exception:  # each encoding fails in its own way
            is_right = False
        yield (
            ".column_encodings",
            is_right,
            encodings,
            "encodings of MDS, but none that could run code, as pkl",
        )
    yield ".column_sizes", _are_same(sizes, expected), sizes, f"{format_json(expected)}, as these are encoded"


def value_error(where: str, key: str, value: Any, possible: str, advice: str = REMAKE) -> ValueError:
    """Return the error of an entry that is none of what is possible."""
    return ValueError(f"{where}: {key} is {format_json(value)}. Possible: {possible}. {advice}")


def format_json(value: Any) -> str:
    """Return a value as JSON has it, so that a text can be distinguished from a number; the beginning of a long one."""
    text = "missing" if value is MISSING else json.dumps(value, default=lambda _: "a shard")
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_integer(value: Any, expected: int) -> bool:
    """True for this whole number; Python takes 2.0 for one, and true for 1."""
    return type(value) is int and value == expected


def _describe_object(keys: set[str]) -> str:
    return f"an object of {', '.join(sorted(keys))}"


def _are_same(values: Any, expected: Any) -> bool:
    return values == expected and list(map(type, values)) == list(map(type, expected))


def _is_count(value: Any, max_count: int = MAX_COUNT) -> bool:
    return type(value) is int and 0 < value <= max_count


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and value not in ("", ".")


def _is_inside(name: str) -> bool:
    return not {"", ".", ".."}.intersection(name.split("/")) and len(name) < MAX_TEXT_LENGTH


def is_list_of_str(value: Any) -> bool:
    """True for a list of texts."""
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
