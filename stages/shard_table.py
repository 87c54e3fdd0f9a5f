"""The shards that an index.json lists, as arrays: about 100 bytes a shard, where the index's own objects take 3 kB.

Arrays are shared by forked workers for good, and by the ranks of a machine (cli.ranks.once_a_machine): nothing counts
references in them.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

OWN = ("raw_data", "zip_data", "samples")
"""What an entry has for itself; the rest it has in common with others."""


class Texts(Sequence[str]):
    """Texts, one after another.

    Args:
        joined: uint8, the bytes of all.
        ends: int64, where each ends.
    """

    def __init__(self, joined: NDArray[np.uint8], ends: NDArray[np.int64]):
        self.joined, self.ends = joined, ends

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, at: Any) -> Any:
        begin = self.ends[at - 1] if at else 0
        return self.joined[begin : self.ends[at]].tobytes().decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        joined, begin = self.joined.tobytes(), 0
        for end in self.ends.tolist():
            yield joined[begin:end].decode("utf-8", "surrogatepass")
            begin = end

    def take(self, numbers: Iterable[int]) -> Texts:
        """Return some of them."""
        writer = _TextsWriter()
        for number in numbers:
            writer.add(self[number])
        return writer.done()


class _TextsWriter:
    def __init__(self) -> None:
        self.joined, self.ends = bytearray(), array("q")

    def add(self, text: str) -> None:
        self.joined += text.encode("utf-8", "surrogatepass")
        self.ends.append(len(self.joined))

    def done(self) -> Texts:
        return Texts(np.array(self.joined), np.array(self.ends))


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
    names: Texts
    """(N,) of the files that are read, as the index has them."""
    hashes: Texts
    """(N,) of these files, as JSON."""
    zips: Texts | None
    """(N,) compressed files as JSON; None: there are none."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, at: Any) -> Any:
        """Return an entry, as json.loads gives it; what it has in common with others is shared with them."""
        number = range(len(self))[at]
        raw = {"basename": self.names[number], "bytes": int(self.raw_bytes[number]), "hashes": self.raw_hashes(number)}
        own = {"raw_data": raw, "zip_data": self.zip_data(number), "samples": int(self.samples[number])}
        return {**self.kinds[self.kind_of[number]], **own}

    def raw_hashes(self, number: int) -> dict[str, str]:
        return json.loads(self.hashes[number])

    def zip_data(self, number: int) -> dict[str, Any] | None:
        return None if self.zips is None else json.loads(self.zips[number])

    @property
    def is_compressed(self) -> bool:
        return self.zips is not None

    @property
    def first_of_each_kind(self) -> list[int]:
        """Numbers, in order."""
        return sorted(np.unique(self.kind_of, return_index=True)[1].tolist())

    def stored(self) -> Iterator[tuple[str, int]]:
        """Yield (name, bytes) of the file that a store has of each shard: the compressed one, where there is one."""
        of_zips = (None for _ in self.names) if self.zips is None else map(json.loads, self.zips)
        for name, size, packed in zip(self.names, self.raw_bytes.tolist(), of_zips, strict=True):
            yield (name, size) if packed is None else (packed["basename"], packed["bytes"])

    def folders(self) -> set[str]:
        """Return the folders that files of it lie in, in that of the stage, which is one of them."""
        names = itertools.chain(self.names, (name for name, _ in self.stored()))
        return {"", *(name.rpartition("/")[0] for name in names)}

    def filled(self) -> ShardTable:
        """Return it without the shards that have no sample: streaming's writer leaves some, by which its reader divides."""
        kept = np.flatnonzero(self.samples)
        if len(kept) == len(self):
            return self
        arrays = {name: getattr(self, name)[kept] for name in ("kind_of", "samples", "raw_bytes", "zip_bytes")}
        zips = None if self.zips is None else self.zips.take(kept)
        return replace(self, **arrays, names=self.names.take(kept), hashes=self.hashes.take(kept), zips=zips)


class TableWriter:
    """Makes a ShardTable, entry by entry."""

    def __init__(self) -> None:
        self.kinds: dict[str, int] = {}
        self.kind_of, self.samples, self.raw_bytes, self.zip_bytes = array("i"), array("q"), array("q"), array("q")
        self.names, self.hashes, self.zips = _TextsWriter(), _TextsWriter(), _TextsWriter()

    def has_kind(self, shard: Mapping[str, Any]) -> bool:
        """True where an entry with the same in common is there."""
        return _kind(shard) in self.kinds

    def add(self, shard: Mapping[str, Any]) -> None:
        """Add an entry that has been looked at."""
        raw, packed = shard["raw_data"], shard["zip_data"]
        self.kind_of.append(self.kinds.setdefault(_kind(shard), len(self.kinds)))
        self.names.add(raw["basename"])
        self.raw_bytes.append(raw["bytes"])
        self.hashes.add(json.dumps(raw["hashes"]))
        self.samples.append(shard["samples"])
        self.zip_bytes.append(packed["bytes"] if packed else 0)
        self.zips.add("null" if packed is None else json.dumps(packed))

    def done(self) -> ShardTable:
        samples, raw_bytes, zip_bytes = map(np.array, (self.samples, self.raw_bytes, self.zip_bytes))
        return ShardTable(
            kinds=tuple(map(json.loads, self.kinds)),
            kind_of=np.array(self.kind_of),
            samples=samples,
            raw_bytes=raw_bytes,
            zip_bytes=zip_bytes,
            names=self.names.done(),
            hashes=self.hashes.done(),
            zips=self.zips.done() if zip_bytes.any() else None,
        )


def table_of(shards: Iterable[Mapping[str, Any]]) -> ShardTable:
    """Return the entries of an index as a table."""
    writer = TableWriter()
    for shard in shards:
        writer.add(shard)
    return writer.done()


def _kind(shard: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in shard.items() if key not in OWN})


NO_SHARDS = table_of([])
