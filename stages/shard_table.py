"""The shards that an index.json lists, as arrays: about 400 bytes a shard, where the index's own objects take 3 kB.

Arrays are shared by forked workers for good: nothing counts references in them. Streaming's readers of shards are made of
the table when they are asked for: streaming makes one a shard when it starts, 70 us and 3 kB each, in every process.
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
from streaming.base.format.base.reader import FileInfo, Reader
from streaming.base.format.mds.reader import MDSReader

from cli.private_api import require_private_api

if TYPE_CHECKING:
    from stages.adopted import Columns

KEPT = 1024  # readers, 1 kB each
OF_READER = ("dirname", "split", "compression", "hashes", "samples", "size_limit", "file_pairs", "raw_data", "zip_data")
OF_READER += ("column_names", "column_encodings", "column_sizes", "get_max_size", "evict")
require_private_api(MDSReader, *OF_READER, why="a reader of a shard is a view of a row of a table")

OWN = ("raw_data", "zip_data", "samples")
"""What an entry has for itself; the rest it has in common with others."""


@dataclass(frozen=True, eq=False, repr=False)
class ShardTable(Sequence[Mapping[str, Any]]):
    """A sequence of the entries that an index.json lists, each made when it is asked for."""

    kinds: tuple[Mapping[str, Any], ...]
    """What entries have in common: columns, compression and so on."""
    kind_of: NDArray[np.int32]
    """(N,) number of each shard's kind."""
    samples: NDArray[np.int64]
    raw_bytes: NDArray[np.int64]
    zip_bytes: NDArray[np.int64]
    """(N,) size of the compressed file; 0: there is none."""
    names: NDArray[np.str_]
    """(N,) of the files that are read, as the index has them."""
    hashes: NDArray[np.str_]
    """(N,) of these files, as JSON."""
    zips: NDArray[np.str_]
    """(N,) compressed files as JSON, null where there is none."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, at: Any) -> Any:
        """Return an entry, as json.loads gives it; what it has in common with others is shared with them."""
        number = range(len(self))[at]
        raw = {
            "basename": str(self.names[number]),
            "bytes": int(self.raw_bytes[number]),
            "hashes": self.raw_hashes(number),
        }
        own = {"raw_data": raw, "zip_data": self.zip_data(number), "samples": int(self.samples[number])}
        return {**self.kinds[self.kind_of[number]], **own}

    def raw_hashes(self, number: int) -> dict[str, str]:
        return json.loads(self.hashes[number])

    def zip_data(self, number: int) -> dict[str, Any] | None:
        return json.loads(self.zips[number])

    @property
    def is_compressed(self) -> bool:
        return bool(self.zip_bytes.any())

    @property
    def first_of_each_kind(self) -> list[int]:
        """Numbers, in order."""
        return sorted(np.unique(self.kind_of, return_index=True)[1].tolist())

    def stored(self) -> Iterator[tuple[str, int]]:
        """Yield (name, bytes) of the file that a store has of each shard: the compressed one, where there is one."""
        zips = map(json.loads, self.zips.tolist())
        for name, size, packed in zip(self.names.tolist(), self.raw_bytes.tolist(), zips, strict=True):
            yield (name, size) if packed is None else (packed["basename"], packed["bytes"])

    def folders(self) -> set[str]:
        """Return the folders that files of it lie in, in that of the stage, which is one of them."""
        names = itertools.chain(self.names.tolist(), (name for name, _ in self.stored()))
        return {"", *(name.rpartition("/")[0] for name in names)}

    def filled(self) -> ShardTable:
        """Return it without the shards that have no sample: streaming's writer leaves some, by which its reader divides."""
        kept = np.flatnonzero(self.samples)
        if len(kept) == len(self):
            return self
        names = ("kind_of", "samples", "raw_bytes", "zip_bytes", "names", "hashes", "zips")
        return replace(self, **{name: getattr(self, name)[kept] for name in names})


class TableWriter:
    """Makes a ShardTable, entry by entry."""

    def __init__(self) -> None:
        self.kinds: dict[str, int] = {}
        self.kind_of, self.samples, self.raw_bytes, self.zip_bytes = array("i"), array("q"), array("q"), array("q")
        self.texts: tuple[list[str], list[str], list[str]] = [], [], []  # names, hashes, compressed files

    def has_kind(self, shard: Mapping[str, Any]) -> bool:
        """True where an entry with the same in common is there."""
        return _kind(shard) in self.kinds

    def add(self, shard: Mapping[str, Any]) -> None:
        """Add an entry that has been looked at."""
        raw, packed = shard["raw_data"], shard["zip_data"]
        self.kind_of.append(self.kinds.setdefault(_kind(shard), len(self.kinds)))
        self.raw_bytes.append(raw["bytes"])
        self.samples.append(shard["samples"])
        self.zip_bytes.append(packed["bytes"] if packed else 0)
        texts = (raw["basename"], json.dumps(raw["hashes"]), "null" if packed is None else json.dumps(packed))
        for kept, text in zip(self.texts, texts, strict=True):
            kept.append(text)

    def done(self) -> ShardTable:
        samples, raw_bytes, zip_bytes = map(np.array, (self.samples, self.raw_bytes, self.zip_bytes))
        names, hashes, zips = (np.array(texts, np.str_) for texts in self.texts)
        kinds = tuple(map(json.loads, self.kinds))
        return ShardTable(kinds, np.array(self.kind_of), samples, raw_bytes, zip_bytes, names, hashes, zips)


def table_of(shards: Iterable[Mapping[str, Any]]) -> ShardTable:
    """Return the entries of an index as a table."""
    writer = TableWriter()
    for shard in shards:
        writer.add(shard)
    return writer.done()


def _kind(shard: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in shard.items() if key not in OWN})


NO_SHARDS = table_of([])


# --- streaming's readers ---


def _common(key: str) -> Any:
    """Return a property that a shard has in common with others."""
    return property(lambda self: self._table.kinds[self._table.kind_of[self._number]][key])


class TableReader(MDSReader):
    """A shard in a table. Its attributes are those that MDSReader's constructor sets, which is not called."""

    split = ""

    def __init__(self, table: ShardTable, number: int, dirname: str):
        self._table, self._number, self.dirname = table, number, dirname

    compression, hashes, size_limit = _common("compression"), _common("hashes"), _common("size_limit")
    column_names, column_encodings = _common("column_names"), _common("column_encodings")
    column_sizes = _common("column_sizes")

    @property
    def samples(self) -> int:  # type: ignore[override]
        return int(self._table.samples[self._number])

    @functools.cached_property
    def raw_data(self) -> FileInfo:  # type: ignore[override]
        table, number = self._table, self._number
        return FileInfo(str(table.names[number]), int(table.raw_bytes[number]), table.raw_hashes(number))

    @functools.cached_property
    def zip_data(self) -> FileInfo | None:  # type: ignore[override]
        packed = self._table.zip_data(self._number)
        return None if packed is None else FileInfo(**packed)

    @functools.cached_property
    def file_pairs(self) -> list[tuple[FileInfo, FileInfo | None]]:  # type: ignore[override]
        return [(self.raw_data, self.zip_data)]

    def get_max_size(self) -> int:
        return int(self._table.raw_bytes[self._number] + self._table.zip_bytes[self._number])


class Readers(Sequence[Reader]):
    """The readers of streams' shards, one stream after another; those that were asked for last are kept.

    Args:
        streams: (shards, folder, what a reader of others' shards has to know) of each.
        numbers: those of all that are in here.
    """

    def __init__(self, streams: Sequence[tuple[ShardTable, str, Columns | None]] = (), numbers: range | None = None):
        self.streams = list(streams)
        self._firsts = [np.cumsum(table.samples) - table.samples if of else None for table, _, of in streams]
        self._ends = np.cumsum([len(table) for table, _, _ in streams], dtype=np.int64)
        self._reader = functools.lru_cache(KEPT)(self._make)
        self._numbers = range(int(self._ends[-1]) if streams else 0) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return Readers(self.streams, self._numbers[at])
        return self._reader(self._numbers[at])

    def __iter__(self) -> Iterator[Reader]:
        return map(self._make, self._numbers)

    def _make(self, number: int) -> Reader:
        stream = int(self._ends.searchsorted(number, "right")) if len(self.streams) > 1 else 0
        (table, folder, adopted), firsts = self.streams[stream], self._firsts[stream]
        number -= int(self._ends[stream]) - len(table)
        reader = TableReader(table, number, folder)
        return reader if adopted is None else adopted.reader(reader, int(firsts[number]))

    def __iadd__(self, others: Readers) -> Readers:
        """Streaming puts together the shards of its streams so."""
        return Readers([*self.streams, *others.streams])


class ShardOfSample:
    """Number of a sample -> (number of its shard, its row), as streaming's Spanner, by bisection.

    That one makes an int64 for each sample, 0.8 GiB for a moment at 100 M, and keeps an array for each 1,024 of them.
    """

    def __init__(self, shard_sizes: NDArray[np.int64]):
        self._ends = np.cumsum(shard_sizes)
        self._begins = self._ends - shard_sizes

    def __getitem__(self, sample_id: int) -> tuple[int, int]:
        if not 0 <= sample_id < self._ends[-1]:
            raise IndexError(f"Invalid sample index `{sample_id}`: 0 <= {sample_id} < {self._ends[-1]}")
        shard_id = int(self._ends.searchsorted(sample_id, "right"))
        return shard_id, int(sample_id - self._begins[shard_id])
