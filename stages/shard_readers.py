"""Streaming's readers of shards, made of a ShardTable when they are asked for, and its map of samples to shards.

Streaming makes a reader a shard when it starts: 70 us and 3 kB each, in every process of the machine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from streaming.base.format.base.reader import FileInfo, Reader
from streaming.base.format.mds.reader import MDSReader

from cli.private_api import require_private_api
from stages.shard_table import ShardTable

KEPT = 1024  # readers, 1 kB each
OF_READER = ("dirname", "split", "compression", "hashes", "samples", "size_limit", "file_pairs", "raw_data", "zip_data")
OF_READER += ("column_names", "column_encodings", "column_sizes", "get_max_size", "evict")
require_private_api(MDSReader, *OF_READER, why="a reader of a shard is a view of a row of a table")


class Adopted(Protocol):
    """What a reader has to know of a data set that others have made; see stages/adopted.py."""

    def kept_digest(self, name: str) -> tuple[str, str] | None:
        """Return (kind, digest) of a shard that has none in its index, once it was read before."""
        ...

    def keep_digest(self, name: str, digest: str) -> None:
        """Keep the digest of a shard, of the kind HASH."""
        ...

    def reader(self, shard: Reader, first: int) -> Reader:
        """Return a shard's reader that gives samples as those of a stage of our own are; `first`: number of its first."""
        ...


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
        return FileInfo(table.names[number], int(table.raw_bytes[number]), table.raw_hashes(number))

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

    def __init__(self, streams: Sequence[tuple[ShardTable, str, Adopted | None]] = (), numbers: range | None = None):
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
