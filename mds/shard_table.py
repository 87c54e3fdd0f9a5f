"""The shards that an index.json lists, as arrays: about 400 bytes a shard, where the index's own objects take 3 kB.

Arrays are shared by forked workers for good: nothing counts references in them. A Shard is made when it is asked for.
"""

from __future__ import annotations

import functools
import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mds.adopted import AdoptedColumns

MAX_SHARDS = 1024  # that are kept as objects, 1 kB each
SHARD_FIELDS = ("raw_data", "zip_data", "samples")
"""What an entry has for itself; the rest it has in common with others."""


@dataclass(frozen=True, eq=False, repr=False)
class ShardTable(Sequence[Mapping[str, Any]]):
    """A sequence of the entries that an index.json lists, each made when it is asked for."""

    kinds: tuple[Mapping[str, Any], ...]
    """What entries have in common: columns, compression and so on."""
    kind_numbers: NDArray[np.int32]
    """(N,) number of each shard's kind."""
    samples: NDArray[np.int64]
    raw_bytes: NDArray[np.int64]
    zip_bytes: NDArray[np.int64]
    """(N,) size of the compressed file; 0: there is none."""
    names: NDArray[np.str_]
    """(N,) of the files that are read, as the index has them."""
    hashes: NDArray[np.str_]
    """(N,) of these files, as JSON."""
    zip_files: NDArray[np.str_]
    """(N,) compressed files as JSON, null where there is none."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, at: Any) -> Any:
        """Return an entry, as json.loads gives it; what it has in common with others is shared with them."""
        number = range(len(self))[at]
        raw = {
            "basename": str(self.names[number]),
            "bytes": int(self.raw_bytes[number]),
            "hashes": self.read_hashes(number),
        }
        fields = {"raw_data": raw, "zip_data": self.zip_data(number), "samples": int(self.samples[number])}
        return {**self.kinds[self.kind_numbers[number]], **fields}

    def read_hashes(self, number: int) -> dict[str, str]:
        return json.loads(self.hashes[number])

    def zip_data(self, number: int) -> dict[str, Any] | None:
        return json.loads(self.zip_files[number])

    @property
    def is_compressed(self) -> bool:
        return bool(self.zip_bytes.any())

    @property
    def first_by_kind(self) -> list[int]:
        """Numbers, in order."""
        return sorted(np.unique(self.kind_numbers, return_index=True)[1].tolist())

    def iterate_stored_files(self) -> Iterator[tuple[str, int]]:
        """Yield (name, bytes) of the file that a store has of each shard: the compressed one, where there is one."""
        zips = map(json.loads, self.zip_files.tolist())
        for name, size, packed in zip(self.names.tolist(), self.raw_bytes.tolist(), zips, strict=True):
            yield (name, size) if packed is None else (packed["basename"], packed["bytes"])

    def folders(self) -> set[str]:
        """Return the folders that files of it lie in, in that of the dataset, which is one of them."""
        names = itertools.chain(self.names.tolist(), (name for name, _ in self.iterate_stored_files()))
        return {"", *(name.rpartition("/")[0] for name in names)}

    def without_empty(self) -> ShardTable:
        """Return it without the shards that have no sample: streaming's writer leaves some, by which its reader divides."""
        numbers = np.flatnonzero(self.samples)
        if len(numbers) == len(self):
            return self
        names = ("kind_numbers", "samples", "raw_bytes", "zip_bytes", "names", "hashes", "zip_files")
        return replace(self, **{name: getattr(self, name)[numbers] for name in names})


class TableWriter:
    """Makes a ShardTable, entry by entry."""

    def __init__(self) -> None:
        self.kinds: dict[str, int] = {}
        self.kind_numbers, self.samples, self.raw_bytes, self.zip_bytes = array("i"), array("q"), array("q"), array("q")
        self.texts: tuple[list[str], list[str], list[str]] = [], [], []  # names, hashes, compressed files

    def has_kind(self, shard: Mapping[str, Any]) -> bool:
        """True if an entry of this kind was added."""
        return _kind(shard) in self.kinds

    def add(self, shard: Mapping[str, Any]) -> None:
        """Add an entry that has been checked."""
        raw, packed = shard["raw_data"], shard["zip_data"]
        self.kind_numbers.append(self.kinds.setdefault(_kind(shard), len(self.kinds)))
        self.raw_bytes.append(raw["bytes"])
        self.samples.append(shard["samples"])
        self.zip_bytes.append(packed["bytes"] if packed else 0)
        texts = (raw["basename"], json.dumps(raw["hashes"]), "null" if packed is None else json.dumps(packed))
        for column, text in zip(self.texts, texts, strict=True):
            column.append(text)

    def to_table(self) -> ShardTable:
        samples, raw_bytes, zip_bytes = map(np.array, (self.samples, self.raw_bytes, self.zip_bytes))
        names, hashes, zips = (np.array(texts, np.str_) for texts in self.texts)
        kinds = tuple(map(json.loads, self.kinds))
        return ShardTable(kinds, np.array(self.kind_numbers), samples, raw_bytes, zip_bytes, names, hashes, zips)


def build_table(shards: Iterable[Mapping[str, Any]]) -> ShardTable:
    """Return the entries of an index as a table."""
    writer = TableWriter()
    for shard in shards:
        writer.add(shard)
    return writer.to_table()


def _kind(shard: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in shard.items() if key not in SHARD_FIELDS})


NO_SHARDS = build_table([])


# --- one shard ---


class Shard:
    """A shard in a table: its file, and what a row has.

    Args:
        folder: where its dataset lies on this machine.
        adopted: the columns that are read of a third-party dataset; None: the dataset is ours, and all are.
        first: number of its first sample in the dataset.
    """

    def __init__(
        self, table: ShardTable, number: int, folder: str, adopted: AdoptedColumns | None = None, first: int = 0
    ):
        kind = table.kinds[table.kind_numbers[number]]
        self.name, self.folder, self.path = str(table.names[number]), folder, f"{folder}/{table.names[number]}"
        self.samples, self.raw_bytes = int(table.samples[number]), int(table.raw_bytes[number])
        self.max_bytes = self.raw_bytes + int(table.zip_bytes[number])
        """What it takes of a cache while it is decompressed."""
        self.compression: str | None = kind["compression"]
        self.column_names: tuple[str, ...] = tuple(kind["column_names"])
        self.column_encodings: tuple[str, ...] = tuple(kind["column_encodings"])
        self.column_sizes: tuple[int | None, ...] = tuple(kind["column_sizes"])
        self.adopted, self.first = adopted, first
        self._table, self._number = table, number

    @property
    def hashes(self) -> dict[str, str]:
        """Kind -> digest of its file."""
        return self._table.read_hashes(self._number)

    @property
    def zip_data(self) -> dict[str, Any] | None:
        """Its compressed file as index.json has it: basename, bytes, hashes; None: there is none."""
        return self._table.zip_data(self._number)


class Shards(Sequence[Shard]):
    """The shards of streams, one stream after another; those that were asked for last are kept.

    Args:
        streams: (shards, folder, the columns of a third-party dataset, or None) of each.
    """

    def __init__(self, streams: Sequence[tuple[ShardTable, str, AdoptedColumns | None]]):
        self.streams = list(streams)
        self._firsts = [np.cumsum(table.samples) - table.samples if of else None for table, _, of in streams]
        self._ends = np.cumsum([len(table) for table, _, _ in streams], dtype=np.int64)
        self._shard = functools.lru_cache(MAX_SHARDS)(self._make)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, at: Any) -> Any:
        return self._shard(range(len(self))[at])

    def _make(self, number: int) -> Shard:
        stream = int(self._ends.searchsorted(number, "right"))
        (table, folder, adopted), firsts = self.streams[stream], self._firsts[stream]
        number -= int(self._ends[stream]) - len(table)
        return Shard(table, number, folder, adopted, 0 if firsts is None else int(firsts[number]))
