"""What an index.json may hold: everything that streaming's reader of a shard leans on is looked at here, before it is read.

An index of our own has shards that are not compressed, each with a digest. One that others have written may have compressed
ones, hashes of another kind or none, and columns that differ from shard to shard where they are not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streaming.base.compression import get_compressions
from streaming.base.format.mds.encodings import get_mds_encoded_size, is_mds_encoding_safe

from stages.adopted import Columns, problem_of_columns
from stages.fetch import HASH

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


def stored_file(shard: Mapping[str, Any]) -> dict[str, Any]:
    """Return name, size and hashes of the file that a store has of a shard: the compressed one, where there is one."""
    return shard["zip_data"] or shard["raw_data"]


def check_named_columns(location: str, columns: Columns, shards: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError where a shard has not the columns that are read, each of the same encoding."""
    if wrong := problem_of_columns(columns, shards):
        raise ValueError(f"{location}/index.json: {wrong[0]}. Possible: {wrong[1]}. {OF_OTHERS}")


def checked_shards(location: str, index: Mapping[str, Any], of_others: bool) -> list[dict[str, Any]]:
    """Return the shards of index.json. Raises ValueError: one could not be read, or they do not belong together."""
    where, shards, names = f"{location}/index.json", index.get("shards", MISSING), set()
    again = OF_OTHERS if of_others else AGAIN
    if not is_number(index.get("version"), MDS_VERSION):
        raise other(where, "version", index.get("version", MISSING), f"{MDS_VERSION}, a number", again)
    if not isinstance(shards, list):
        raise other(where, "shards", shards, "a list", again)
    if not shards:
        raise ValueError(f"{where} lists no shard. {again}")
    for number, shard in enumerate(shards):
        if wrong := _wrong_in_shard(shard, of_others):
            raise other(where, f"shards[{number}]{wrong[0]}", *wrong[1:], again)
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
                first = f"{shown_json(shards[0][key])} as in shards[0]: all shards have the same columns"
                raise other(where, f"shards[{number}].{key}", shard[key], first)
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
