"""A third-party dataset, written with streaming's MDSWriter, read as if it were one of ours.

`dataset.json`, which prepare.adopt writes for it, says which of its columns are read:

    "columns": {"image": "picture", "captions": ["text", "alt"], "key": "id"}

    what       encodings                              read as
    image      bytes, jpeg, png: an image's file     jpg, the file's bytes
               pil: width, height, mode, pixels       jpg, mds.images.RawImage
    captions   str; json: a text, or a list of them   caption: all of them that are texts, in order
    key        str, str_int, any whole number         key; none: the sample's number

Other columns are not decoded. A shard that has no digest in its index is compared with its size alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streaming.base.format.mds.encodings import mds_decode

from mds.images import RawImage
from mds.shard_table import ShardTable

ENCODINGS = {
    "image": (r"bytes|jpeg|png|pil", "bytes, jpeg, png, pil"),
    "captions": (r"str|json", "str, json"),
    "key": (r"str|str_int|u?int\d*", "str, str_int, int"),
}
"""What is read -> the encodings that it can be read from: as a pattern, in words."""


@dataclass(frozen=True)
class AdoptedColumns:
    """Which columns are read."""

    captions: tuple[str, ...]
    image: str
    key: str | None = None

    @property
    def named(self) -> dict[str, str]:
        """Column -> what it is read as, of ENCODINGS."""
        columns = {self.image: "image", **({self.key: "key"} if self.key else {})}
        return {**columns, **dict.fromkeys(self.captions, "captions")}

    def decode(self, row: Mapping[str, memoryview], encodings: Mapping[str, str], number: int) -> dict[str, Any]:
        """Return a row as a sample of a dataset of our own: jpg, caption (a list), key.

        Args:
            row: column -> bytes.
            number: of the sample in its dataset: its key, where no column has one.
        """
        content = bytes(row[self.image])
        captions = [text for name in self.captions for text in decode_captions(encodings[name], bytes(row[name]))]
        key = str(number) if self.key is None else _decode_key(encodings[self.key], bytes(row[self.key]))
        jpg = RawImage(content) if encodings[self.image] == "pil" else content
        return {"key": key, "jpg": jpg, "caption": captions}

    def as_metadata(self) -> dict[str, Any]:
        """Return them as dataset.json has them."""
        columns = {"image": self.image, "captions": list(self.captions), "key": self.key}
        return {name: value for name, value in columns.items() if value}

    @classmethod
    def from_metadata(cls, columns: Any) -> AdoptedColumns | None:
        """Read what dataset.json has; None: it cannot be read."""
        if not isinstance(columns, dict) or not set(columns) <= {"image", "captions", "key"}:
            return None
        captions = columns.get("captions")
        ones = [columns[name] for name in ("image", "key") if name in columns]
        is_text = isinstance(captions, list) and all(isinstance(name, str) for name in [*captions, *ones])
        if not is_text or not captions or "image" not in columns:
            return None
        return cls(**{**columns, "captions": tuple(captions)})


def encoding_problem(role: str, encoding: str) -> str | None:
    """Say what is possible where a column cannot be read as `role`, or None."""
    pattern, possible = ENCODINGS[role]
    return None if re.fullmatch(pattern, encoding) else possible


def decode_captions(encoding: str, content: bytes) -> list[str]:
    """Return the texts of a column of captions; what is none is left out."""
    try:
        value = json.loads(content) if encoding == "json" else content.decode()
    except (ValueError, RecursionError):
        return []
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def _decode_key(encoding: str, content: bytes) -> str:
    try:
        return str(mds_decode(encoding, content))
    except ValueError:
        return ascii(content)


def parse_adopted_columns(metadata: Mapping[str, Any]) -> AdoptedColumns | None:
    """Return the columns that dataset.json names; None: the dataset is ours."""
    return AdoptedColumns.from_metadata(metadata["columns"]) if "columns" in metadata else None


def adopted_columns_problem(columns: AdoptedColumns, shards: ShardTable) -> tuple[str, str] | None:
    """Return (what is wrong, what is possible) of the first shard that has a named column not as it should be, or None."""
    encodings = dict(zip(shards[0]["column_names"], shards[0]["column_encodings"], strict=True))
    for number in shards.first_by_kind:
        shard = shards[number]
        has = dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
        for name, role in columns.named.items():
            where = f"shards[{number}], {shard['raw_data']['basename']}"
            if name not in has:
                return f"{where}, has no column {name}", f"a column for {role}; it has {', '.join(has)}"
            if text := encoding_problem(role, has[name]):
                return f"{where}: column {name} is {has[name]}", f"for {role}: {text}"
            if has[name] != encodings[name]:
                return f"{where}: column {name} is {has[name]}", f"{encodings[name]}, as in shards[0]"
    return None
