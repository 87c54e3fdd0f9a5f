"""The rows of one MDS shard, read by column without going through streaming's sample by sample.

The format, as streaming's writer has it: uint32 number of rows, uint32 where each begins and the last ends; a row is the
uint32 sizes of its columns of varying size, then all columns in order.

A row's front ends with the last column of varying size. The columns behind it, its tail, have their place from the row's end:
a row is read in one call that puts the front aside, and what is wanted of the tail where it is wanted.

    front: sizes, caption, key, metadata          tail: moments, tokens
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streaming.base.format.mds.reader import MDSReader

from stages.fetch import StreamFailure

DAMAGED = "If it lies in data.local, remove that folder; otherwise make the stage again."


class ShardError(StreamFailure):
    """A shard whose bytes are not those of its rows, which may lie in a cache or in the stage itself."""


def split_row(
    data: memoryview, names: Sequence[str], sizes: Sequence[int | None], header: struct.Struct | None = None
) -> dict[str, memoryview] | None:
    """Return column -> bytes of a row; None: it is not as long as its columns.

    Args:
        header: of `sizes`, where it is known: uint32, one for each column of varying size.
    """
    header = header or struct.Struct(f"<{sum(size is None for size in sizes)}I")
    if len(data) < header.size:
        return None
    varying, at, columns = iter(header.unpack_from(data)), header.size, {}
    for name, size in zip(names, sizes, strict=True):
        width = next(varying) if size is None else size
        columns[name] = data[at : at + width]
        at += width
    return columns if at == len(data) else None


@dataclass(frozen=True)
class _Plan:
    """How the rows of one layout are read, of which some columns are wanted."""

    front: tuple[tuple[str, int | None], ...]
    """Columns of the front, with their sizes."""
    tail: tuple[tuple[str, int], ...]
    header: struct.Struct
    fixed_bytes: int
    """Of the front without its columns of varying size: the header's, and of those between them."""
    tail_bytes: int
    runs: tuple[tuple[int, int, tuple[str, ...]], ...]
    """Neighbours of the tail that are wanted: bytes to the row's end, bytes, names. The first is read with the front."""


@functools.lru_cache(maxsize=64)  # all shards of a stage have one layout
def _plan(names: tuple[str, ...], sizes: tuple[int | None, ...], wanted: tuple[str, ...]) -> _Plan:
    assert set(wanted) <= set(names), "a run looks for its columns before it begins"
    varying = [at for at, size in enumerate(sizes) if size is None]
    split = varying[-1] + 1 if varying else 0
    front = tuple(zip(names[:split], sizes[:split], strict=True))
    tail = tuple((name, size) for name, size in zip(names[split:], sizes[split:], strict=True) if size is not None)
    header, tail_bytes = struct.Struct(f"<{len(varying)}I"), sum(size for _, size in tail)
    left, runs = tail_bytes, [(tail_bytes, 0, ())]  # a first one, even if nothing lies beside the front
    for name, size in tail:
        if name in wanted:
            to_end, num_bytes, of_run = runs.pop() if runs[-1][0] - runs[-1][1] == left else (left, 0, ())
            runs.append((to_end, num_bytes + size, (*of_run, name)))
        left -= size
    fixed_bytes = header.size + sum(size for _, size in front if size is not None)
    return _Plan(front, tail, header, fixed_bytes, tail_bytes, tuple(runs))


class ShardFile:
    """An MDS shard that is open; to be used in a `with`.

    Nothing of a shard is kept when it is closed: the edges of 1,000 rows are read in a microsecond, and an epoch may have
    400,000 shards.

    Raises:
        ShardError: it has another number of rows than its index says.
    """

    def __init__(self, reader: MDSReader):
        self.path = f"{reader.dirname}/{reader.raw_data.basename}"
        self.names, self.sizes = tuple(reader.column_names), tuple(reader.column_sizes)
        self._num_bytes = reader.raw_data.bytes
        self._descriptor = os.open(self.path, os.O_RDONLY)
        try:
            head, num_rows = os.pread(self._descriptor, 4 * (reader.samples + 2), 0), reader.samples
            if len(head) != 4 * (num_rows + 2) or int.from_bytes(head[:4], "little") != num_rows:
                raise self._damaged("it has another number of rows than index.json says")
            self._edges = memoryview(head).cast("I")[1:]  # of row n: where it begins; at n + 1: where it ends
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def _damaged(self, what: str) -> ShardError:
        return ShardError(f"{self.path} is damaged: {what}. {DAMAGED}")

    def read_into(self, rows: Sequence[int], places: Mapping[str, Sequence[Any]]) -> list[bytearray]:
        """Read some columns of each row to their places; return the fronts of the rows.

        Args:
            places: column -> for each row a buffer of uint8 that it just fills.

        Raises:
            ShardError: the file ends within a row, or a row is not as long as its columns.
        """
        plan, file, fronts = _plan(self.names, self.sizes, tuple(places)), self._descriptor, []
        (_, num_bytes, beside), *others = plan.runs
        for row, *buffers in zip(rows, *(places[name] for name in beside), strict=True):
            begin = self._edges[row]
            length = self._edges[row + 1] - begin - plan.tail_bytes
            if not plan.header.size <= length <= self._num_bytes:
                raise self._damaged(f"it ends within row {row}")
            front = bytearray(length)
            if os.preadv(file, [front, *buffers], begin) != length + num_bytes:
                raise self._damaged(f"it ends within row {row}")
            if plan.fixed_bytes + sum(plan.header.unpack_from(front)) != length:
                raise self._damaged(f"row {row} is not as long as its columns")
            fronts.append(front)
        for to_end, num_bytes, names in others:
            for row, *buffers in zip(rows, *(places[name] for name in names), strict=True):
                if os.preadv(file, buffers, self._edges[row + 1] - to_end) != num_bytes:
                    raise self._damaged(f"it ends within row {row}")
        if in_front := [name for name, _ in plan.front if name in places]:
            for at, columns in enumerate(map(self.columns_of, fronts)):
                for name in in_front:
                    memoryview(places[name][at])[:] = columns[name]
        return fronts

    def columns_of(self, front: bytearray) -> dict[str, memoryview]:
        """Return column -> bytes of a front that `read_into` has returned."""
        plan = _plan(self.names, self.sizes, ())
        columns = split_row(memoryview(front), *zip(*plan.front, strict=True), plan.header) if plan.front else {}
        assert columns is not None, "read_into has compared its length"
        return columns

    def read(self, rows: Sequence[int]) -> list[dict[str, memoryview]]:
        """Return column -> bytes for each row. Raises: see `read_into`."""
        tail = _plan(self.names, self.sizes, ()).tail
        places = {name: [bytearray(size) for _ in rows] for name, size in tail}
        fronts = self.read_into(rows, places)
        of_tail = [{name: memoryview(buffers[at]) for name, buffers in places.items()} for at in range(len(rows))]
        return [{**self.columns_of(front), **columns} for front, columns in zip(fronts, of_tail, strict=True)]
