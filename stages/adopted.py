"""A data set that others have written with streaming's MDSWriter, read as if it were a stage of our own.

`dataset.json`, which prepare.adopt writes for it, says which of its columns are read:

    "columns": {"image": "picture", "captions": ["text", "alt"], "key": "id"}

    what       encodings                              read as
    image      bytes, jpeg, png: a picture's file     jpg, the file's bytes
               pil: width, height, mode, pixels       jpg, stages.images.Pixels
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

from streaming.base.format.base.reader import Reader
from streaming.base.format.mds.encodings import mds_decode
from streaming.base.format.mds.reader import MDSReader

from stages.images import Pixels
from stages.shard_file import ShardError, split_row
from stages.shard_table import ShardTable

ENCODINGS = {
    "image": (r"bytes|jpeg|png|pil", "bytes, jpeg, png, pil"),
    "captions": (r"str|json", "str, json"),
    "key": (r"str|str_int|u?int\d*", "str, str_int, int"),
}
"""What is read -> the encodings that it can be read from: as a pattern, in words."""
OF_READER = (
    "dirname split column_encodings column_names column_sizes compression hashes raw_data samples size_limit zip_data"
)


@dataclass(frozen=True)
class Columns:
    """Which columns are read."""

    captions: tuple[str, ...]
    image: str
    key: str | None = None

    @property
    def named(self) -> dict[str, str]:
        """Column -> what it is read as, of ENCODINGS."""
        one = {self.image: "image", **({self.key: "key"} if self.key else {})}
        return {**one, **dict.fromkeys(self.captions, "captions")}

    def reader(self, shard: Reader, first: int) -> MappedReader:
        """Return a shard's reader of the named columns alone. `first`: number of its first sample in the data set."""
        reader = MappedReader(**{name: getattr(shard, name) for name in OF_READER.split()})
        reader.columns, reader.first = self, first
        return reader

    def as_facts(self) -> dict[str, Any]:
        """Return them as dataset.json has them."""
        given = {"image": self.image, "captions": list(self.captions), "key": self.key}
        return {name: value for name, value in given.items() if value}

    @classmethod
    def of_facts(cls, given: Any) -> Columns | None:
        """Read what dataset.json has; None: it cannot be read."""
        if not isinstance(given, dict) or not set(given) <= {"image", "captions", "key"}:
            return None
        captions = given.get("captions")
        ones = [given[name] for name in ("image", "key") if name in given]
        is_text = isinstance(captions, list) and all(isinstance(name, str) for name in [*captions, *ones])
        if not is_text or not captions or "image" not in given:
            return None
        return cls(**{**given, "captions": tuple(captions)})


def wrong_encoding(what: str, encoding: str) -> str | None:
    """Say what is possible where a column cannot be read as `what`, or None."""
    pattern, possible = ENCODINGS[what]
    return None if re.fullmatch(pattern, encoding) else possible


class MappedReader(MDSReader):
    """A shard whose samples are those of a stage of our own: jpg, caption (a list), key.

    columns: the named ones. first: number of its first sample in the data set.
    """

    columns: Columns
    first: int

    def get_item(self, idx: int) -> dict[str, Any]:
        return {"key": str(self.first + idx), **super().get_item(idx)}

    def decode_sample(self, data: bytes) -> dict[str, Any]:
        """Decode a row's named columns. Raises ShardError: its parts do not fit its length."""
        row = split_row(memoryview(data), self.column_names, self.column_sizes)
        if row is None:
            given = f"data: a row of {self.raw_data.basename} is not as long as its columns"
            raise ShardError(f"{given}. Write that data set again.")
        encodings = dict(zip(self.column_names, self.column_encodings, strict=True))
        sample: dict[str, Any] = {}
        content = bytes(row[self.columns.image])
        sample["jpg"] = Pixels(content) if encodings[self.columns.image] == "pil" else content
        sample["caption"] = [
            text for name in self.columns.captions for text in texts_of(encodings[name], bytes(row[name]))
        ]
        if (key := self.columns.key) is not None:
            sample["key"] = _key_of(encodings[key], bytes(row[key]))
        return sample


def texts_of(encoding: str, content: bytes) -> list[str]:
    """Return the texts of a column of captions; what is none is left out."""
    try:
        value = json.loads(content) if encoding == "json" else content.decode()
    except (ValueError, RecursionError):
        return []
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def _key_of(encoding: str, content: bytes) -> str:
    try:
        return str(mds_decode(encoding, content))
    except ValueError:
        return ascii(content)


def columns_of(facts: Mapping[str, Any]) -> Columns | None:
    """Return the columns that dataset.json names; None: a stage of our own."""
    return Columns.of_facts(facts["columns"]) if "columns" in facts else None


def problem_of_columns(columns: Columns, shards: ShardTable) -> tuple[str, str] | None:
    """Return (what is wrong, what is possible) of the first shard that has a named column not as it should be, or None."""
    encodings = dict(zip(shards[0]["column_names"], shards[0]["column_encodings"], strict=True))
    for number in shards.first_of_each_kind:
        shard = shards[number]
        has = dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
        for name, what in columns.named.items():
            at = f"shards[{number}], {shard['raw_data']['basename']}"
            if name not in has:
                return f"{at}, has no column {name}", f"a column for {what}; it has {', '.join(has)}"
            if text := wrong_encoding(what, has[name]):
                return f"{at}: column {name} is {has[name]}", f"for {what}: {text}"
            if has[name] != encodings[name]:
                return f"{at}: column {name} is {has[name]}", f"{encodings[name]}, as in shards[0]"
    return None
