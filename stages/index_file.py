"""What an index.json may hold: everything that streaming's reader of a shard leans on is looked at here, before it is read.

An index of our own has shards that are not compressed, each with a digest. One that others have written may have compressed
ones, hashes of another kind or none, and columns that differ from shard to shard where they are not read.

At 400,000 shards an index has 160 MB, and as objects of Python 2 GB. Writers give entry after entry the same but for name,
size, digest and number of samples. So an entry is read whole and looked at, and those like it are compared with its text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streaming.base.compression import get_compressions
from streaming.base.format.mds.encodings import get_mds_encoded_size, is_mds_encoding_safe

from cli.memory import host_bytes
from stages.adopted import Columns, problem_of_columns
from stages.fetch import HASH
from stages.shard_table import ShardTable, TableWriter, table_of

OF_OTHERS = "Others have written it: copy it anew, or write it again with streaming's MDSWriter."
AGAIN = "Make the stage again: python -m prepare.shards --help"
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
INDEX = "index.json"
HEAD_BYTES = 2**16
# Bytes of memory for one of an index: as text and table (2.8 were seen at 400,000 shards); as objects (7.1).
READ_PER_BYTE, OBJECTS_PER_BYTE = 3.0, 8.0
SPACE = r"[ \t\n\r]*"
VERSION = rf'(?P<version>"version"{SPACE}:{SPACE}{MDS_VERSION})'
BEGIN = re.compile(rf'{SPACE}\{{{SPACE}({VERSION}{SPACE},{SPACE})?"shards"{SPACE}:{SPACE}\[{SPACE}')
END = re.compile(rf"{SPACE}\]{SPACE}(,{SPACE}{VERSION}{SPACE})?\}}{SPACE}")
COMMA = re.compile(f"{SPACE},{SPACE}")
# What differs from entry to entry, as most have it: a path without anything that another spelling could be of, whole numbers.
PART = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"
VARYING = {
    "basename": rf'"(?P<basename>{PART}(?:/{PART})*)"',
    "bytes": "(?P<bytes>[1-9][0-9]{0,9})",
    "samples": "(?P<samples>[1-9][0-9]{0,9})",
    HASH: rf'"(?P<{HASH}>{DIGEST.pattern})"',
}
ONE_OF_VARYING = re.compile(rf'"(?P<key>{"|".join(VARYING)})"{SPACE}:{SPACE}(?P<value>"[^"\\]*"|[0-9]+)')


def stored_file(shard: Mapping[str, Any]) -> dict[str, Any]:
    """Return name, size and hashes of the file that a store has of a shard: the compressed one, where there is one."""
    return shard["zip_data"] or shard["raw_data"]


def check_named_columns(location: str, columns: Columns, shards: ShardTable) -> None:
    """Raise ValueError where a shard has not the columns that are read, each of the same encoding."""
    if wrong := problem_of_columns(columns, shards):
        raise ValueError(f"{location}/index.json: {wrong[0]}. Possible: {wrong[1]}. {OF_OTHERS}")


def is_compressed(folder: str) -> bool:
    """True if the first entry of a folder's index.json says so; of the file only its head is read."""
    try:
        path = Path(folder, INDEX)
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            return re.search(rb'"compression"\s*:\s*"', file.read(HEAD_BYTES)) is not None
    except (OSError, ValueError):  # it cannot be read, as `read_stage` will say
        return False


@dataclass(frozen=True)
class Index:
    """What an index.json holds."""

    location: str
    num_bytes: int
    sha256: str
    of_others: bool
    content: Mapping[str, Any] | None
    """The whole of it, where not all is as writers write it."""
    table: ShardTable | None
    """The shards, looked at already, where it is."""

    def shards(self) -> ShardTable:
        """Return its shards. Raises ValueError: one could not be read, or they do not belong together."""
        if self.table is not None:
            return self.table
        assert self.content is not None
        return table_of(_checked_shards(self.location, self.content, self.of_others))


def parsed_index(location: str, text: bytes, of_others: bool) -> Index:
    """Read an index.json. Raises ValueError: it is not JSON, or does not fit into memory."""
    decoded, content = _decoded(location, text), None
    if (table := _regular_shards(location, decoded, of_others)) is None:
        check_memory(f"{location}/{INDEX}", len(text), OBJECTS_PER_BYTE)
        content = parsed_object(f"{location}/{INDEX}", decoded)
    return Index(location, len(text), hashlib.sha256(text).hexdigest(), of_others, content, table)


def is_readable(num_bytes: int, per_byte: float = READ_PER_BYTE) -> bool:
    """True where the memory that is free is enough to read an index. `per_byte`: taken for one of it."""
    return per_byte * num_bytes <= host_bytes()[1]


def check_memory(where: str, num_bytes: int, per_byte: float = READ_PER_BYTE) -> None:
    """Raise ValueError where an index is not readable."""
    if not is_readable(num_bytes, per_byte):
        need, free = (max(0, size) / 2**30 for size in (per_byte * num_bytes, host_bytes()[1]))
        given = (
            f"{where} has {num_bytes / 2**30:.3g} GiB: to read it takes about {need:.3g}, and {free:.3g} are free here"
        )
        ways = "Use a machine with more memory, or make the stage again with larger shards (shard_size)"
        raise ValueError(f"{given}. {ways}.")


def _decoded(location: str, text: bytes) -> str:
    try:
        return text.decode(json.detect_encoding(text), "surrogatepass")
    except UnicodeDecodeError as error:
        raise ValueError(f"{location}/{INDEX} is not JSON: {error}. {AGAIN}") from error


def parsed_object(where: str, text: str | bytes) -> dict[str, Any]:
    """Return the object that a file holds. Raises ValueError: it holds none."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}. {AGAIN}") from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply to be read. {AGAIN}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{where} holds a {type(content).__name__}, not an object. {AGAIN}")
    return content


# --- an index as writers write it ---


def _regular_shards(location: str, text: str, of_others: bool) -> ShardTable | None:
    """Read and look at the shards, one after another; None: something is not as it should be, or not as it usually is."""
    begin, writer, seen = BEGIN.match(text), TableWriter(), set[str]()
    if begin is None:
        return None
    at, first, kind, alike = begin.end(), None, -1, None
    while True:
        if alike is not None and (found := alike.match(text, at)) and found["basename"] not in seen:
            name, num_bytes, samples = found["basename"], int(found["bytes"]), int(found["samples"])
            if num_bytes > MOST or samples > _most_samples(num_bytes):
                return None
            writer.add_alike(kind, name, num_bytes, f'{{"{HASH}": "{found[HASH]}"}}', samples)
            seen.add(name)
            end = found.end()
        else:
            try:
                shard, end = json.JSONDecoder().raw_decode(text, at)
                first = first or shard
                _check_shard(location, shard, len(writer.samples), first, seen, of_others)
            except (ValueError, RecursionError):
                return None
            if (own := writer.add(shard)) != kind:
                kind, alike = own, _pattern_of(text[at:end])
        if (comma := COMMA.match(text, end)) is None:
            break
        at = comma.end()
    last = END.fullmatch(text, end)
    is_whole = last is not None and (begin["version"] is None) != (last["version"] is None)
    return writer.done() if is_whole and any(writer.samples) else None


def _pattern_of(entry: str) -> re.Pattern[str] | None:
    """Return the pattern of entries that are like this one but in VARYING, where each of these is in it once."""
    parts, end, keys = [], 0, []
    for found in ONE_OF_VARYING.finditer(entry):
        keys.append(found["key"])
        parts += [re.escape(entry[end : found.start("value")]), VARYING[found["key"]]]
        end = found.end()
    return re.compile("".join(parts) + re.escape(entry[end:])) if sorted(keys) == sorted(VARYING) else None


# --- any index ---


def _checked_shards(location: str, index: Mapping[str, Any], of_others: bool) -> Iterator[Mapping[str, Any]]:
    """Yield the shards of index.json. Raises ValueError: one could not be read, or they do not belong together."""
    where, shards = f"{location}/{INDEX}", index.get("shards", MISSING)
    again = OF_OTHERS if of_others else AGAIN
    if not is_number(index.get("version"), MDS_VERSION):
        raise other(where, "version", index.get("version", MISSING), f"{MDS_VERSION}, a number", again)
    if not isinstance(shards, list):
        raise other(where, "shards", shards, "a list", again)
    if not shards:
        raise ValueError(f"{where} lists no shard. {again}")
    seen = set[str]()
    for number, shard in enumerate(shards):
        _check_shard(location, shard, number, shards[0], seen, of_others)
        yield shard
    if not any(shard["samples"] for shard in shards):
        raise ValueError(f"{where} lists no sample. {again}")


def _check_shard(location: str, shard: Any, number: int, first: Any, seen: set[str], of_others: bool) -> None:
    """Look at one shard. Raises ValueError: it could not be read. `seen`: the files of those before it, as paths."""
    where, again = f"{location}/{INDEX}", OF_OTHERS if of_others else AGAIN
    if wrong := _wrong_in_shard(shard, of_others):
        raise other(where, f"shards[{number}]{wrong[0]}", *wrong[1:], again)
    for file in filter(None, (shard["raw_data"], shard["zip_data"])):
        name = file["basename"]
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{where} names a shard outside of its stage: {name}. {again}")
        if str(Path(name)) in seen:
            raise ValueError(f"{where} lists {name} twice. {again}")
        seen.add(str(Path(name)))
    is_as_first = all(_are_same(shard[key], first[key]) for key in OF_COLUMNS)
    if not number or (of_others and not is_as_first):
        _check_columns(location, shard, number, again)
    for key in OF_COLUMNS if not of_others else ():
        if not _are_same(shard[key], first[key]):
            possible = f"{shown_json(first[key])} as in shards[0]: all shards have the same columns"
            raise other(where, f"shards[{number}].{key}", shard[key], possible)


def _wrong_in_shard(shard: Any, of_others: bool) -> tuple[str, Any, str] | None:
    """Return (key, value, what is possible) of the first entry with which no reader could do anything, or None."""
    raw, packed = (shard.get(key) if isinstance(shard, dict) else None for key in ("raw_data", "zip_data"))
    looked_into = (("", shard, SHARD_KEYS), (".raw_data", raw, FILE_KEYS), (".zip_data", packed, FILE_KEYS))
    for key, given, wanted in looked_into if of_others and packed is not None else looked_into[:2]:
        if not isinstance(given, dict) or set(given) != wanted:
            return key, given, f"an object of {', '.join(sorted(wanted))}"
    if (wrong := _wrong_hashes(shard) if of_others else _wrong_own_hash(raw["hashes"])) is not None:
        return wrong
    # streaming's writer leaves an empty shard where the first sample is larger than its limit
    samples = shard["samples"]
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
        (".version", shard["version"], is_number(shard["version"], MDS_VERSION), f"{MDS_VERSION}, a number"),
        (".format", shard["format"], shard["format"] == "mds", '"mds"'),
        *of_compression,
        (".hashes", shard["hashes"], are_texts(shard["hashes"]), "a list of names"),
        (".size_limit", limit, limit is None or _is_count(limit, 2**63), "null, or a number of bytes"),
        (".samples", samples, _is_count(samples) or (of_others and is_number(samples, 0)), COUNT),
        *_looked_at_in_file(".raw_data", raw),
        *(_looked_at_in_file(".zip_data", packed) if is_packed else ()),
        (".column_names", shard["column_names"], are_texts(shard["column_names"]), "a list of names"),
        (".column_encodings", shard["column_encodings"], are_texts(shard["column_encodings"]), "a list of names"),
    )
    if wrong := next(((key, given, possible) for key, given, is_right, possible in looked_at if not is_right), None):
        return wrong
    if (most := _most_samples(raw["bytes"])) < samples:
        return ".samples", samples, f"at most {most:,} in a shard of {raw['bytes']:,} bytes"
    return None


def _most_samples(num_bytes: int) -> int:
    return num_bytes // BYTES_OF_AN_OFFSET - 2


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
        if not isinstance(hashes, dict) or not are_texts([*hashes, *hashes.values()]):
            return f".{key}.hashes", hashes, "an object of names and digests, which may be empty"
    return None


def _check_columns(location: str, shard: Mapping[str, Any], number: int, again: str) -> None:
    """Look at the columns of a shard: known encodings, none of which runs code, in their sizes."""
    where, names, encodings = f"{location}/index.json", shard["column_names"], shard["column_encodings"]
    if not names or len(set(names)) != len(names) or not all(map(_is_name, names)):
        raise other(where, f"shards[{number}].column_names", names, "different names, at least one", again)
    if len(encodings) != len(names):
        raise other(
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
            raise other(where, f"encoding of column {name}", encoding, possible, again) from error
    if not _are_same(shard["column_sizes"], sizes):
        possible = f"{shown_json(sizes)}, as these are encoded"
        raise other(where, f"shards[{number}].column_sizes", shard["column_sizes"], possible, again)


def other(where: str, key: str, given: Any, possible: str, again: str = AGAIN) -> ValueError:
    """Return the error of an entry that is none of what is possible."""
    return ValueError(f"{where}: {key} is {shown_json(given)}. Possible: {possible}. {again}")


def shown_json(given: Any) -> str:
    """Return a value as JSON has it, so that a text is told from a number; the beginning of a long one."""
    text = "missing" if given is MISSING else json.dumps(given)
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_number(given: Any, wanted: int) -> bool:
    """True for this whole number; Python takes 2.0 for one, and true for 1."""
    return type(given) is int and given == wanted


def _are_same(given: Any, wanted: Sequence[Any]) -> bool:
    return given == wanted and list(map(type, given)) == list(map(type, wanted))


def _is_count(given: Any, most: int = MOST) -> bool:
    return type(given) is int and 0 < given <= most


def _is_name(given: Any) -> bool:
    return isinstance(given, str) and given.isprintable() and given not in ("", ".")


def are_texts(given: Any) -> bool:
    """True for a list of texts."""
    return isinstance(given, list) and all(isinstance(text, str) for text in given)
