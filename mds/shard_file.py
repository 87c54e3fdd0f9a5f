"""The rows of one MDS shard, read by column without going through streaming's sample by sample.

The format, as streaming's writer has it: uint32 number of rows, uint32 where each begins and the last ends; a row is the
uint32 sizes of its columns of varying size, then all columns in order.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from streaming.base.format.mds.encodings import mds_decode

from mds.fetch import StreamFailure
from mds.shard_table import Shard

DAMAGED = "If it lies in data.local, remove that folder; otherwise rebuild the dataset."


START_BYTES = 4096  # of a row: as much as is read to know where its columns begin


class ShardError(StreamFailure):
    """A shard whose bytes are not those of its rows, which may lie in a cache or in the dataset itself."""


class ShardFile:
    """An MDS shard that is open; to be used in a `with`.

    Nothing of a shard is kept when it is closed: the edges of 1,000 rows are read in a microsecond, and an epoch may have
    400,000 shards.

    Raises:
        ShardError: it has another number of rows than its index says.
    """

    def __init__(self, shard: Shard):
        self.path, self._names, self._sizes = shard.path, shard.column_names, shard.column_sizes
        self._head_bytes = 4 * self._sizes.count(None)
        self._num_bytes = shard.raw_bytes
        self._descriptor = os.open(self.path, os.O_RDONLY)
        try:
            head, num_rows = os.pread(self._descriptor, 4 * (shard.samples + 2), 0), shard.samples
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

    def read(self, rows: Sequence[int]) -> Iterator[dict[str, memoryview]]:
        """Yield column -> bytes of each row; they are overwritten by those of the next.

        Raises:
            ShardError: the file ends within a row, or a row is not as long as its columns.
        """
        buffer = bytearray()  # used again: new memory for a row takes longer than reading it
        for row in rows:
            begin, length = self._place_of(row)
            if length > len(buffer):
                buffer = bytearray(length)
            data = memoryview(buffer)[:length]
            self._fill(data, begin, row)
            yield {name: data[at:end] for name, (at, end) in self._split(data, length, row).items()}

    def read_into(
        self, rows: Sequence[int], buffers: Mapping[str, Sequence[memoryview]], names: Sequence[str]
    ) -> list[dict[str, bytes]]:
        """Read columns of each row to where they are wanted, without a copy of the large ones; return others.

        Args:
            buffers: column -> one for each of the rows, of its size.
            names: the columns that are returned, by row.

        Raises:
            ShardError: as `read`; or a column is not as long as its buffer.
        """
        others, start = [], memoryview(bytearray(START_BYTES))
        for number, row in enumerate(rows):
            begin, length = self._place_of(row)
            head = start[: min(length, START_BYTES)]
            self._fill(head, begin, row)
            places = self._split(head, length, row)
            for name, of_rows in buffers.items():
                (at, end), buffer = places[name], of_rows[number]
                if end - at != len(buffer):
                    raise self._damaged(f"row {row} has {end - at} bytes of {name}, not {len(buffer)}")
                if end <= len(head):
                    buffer[:] = head[at:end]
                else:
                    self._fill(buffer, begin + at, row)
            others.append({name: self._bytes_of(head, begin, places[name], row) for name in names})
        return others

    def _bytes_of(self, head: memoryview, begin: int, place: tuple[int, int], row: int) -> bytes:
        at, end = place
        if end <= len(head):
            return bytes(head[at:end])
        content = bytearray(end - at)
        self._fill(memoryview(content), begin + at, row)
        return bytes(content)

    def _place_of(self, row: int) -> tuple[int, int]:
        """Return where a row begins, and its length."""
        begin = self._edges[row]
        length = self._edges[row + 1] - begin
        if not 0 <= length <= self._num_bytes:
            raise self._damaged(f"it ends within row {row}")
        return begin, length

    def _fill(self, buffer: memoryview, at: int, row: int) -> None:
        if os.preadv(self._descriptor, [buffer], at) != len(buffer):
            raise self._damaged(f"it ends within row {row}")

    def _split(self, head: memoryview, length: int, row: int) -> dict[str, tuple[int, int]]:
        """Return column -> where its bytes begin in a row, and end. `head`: the row's first bytes."""
        at, places = self._head_bytes, {}
        if len(head) >= at:
            varying = iter(struct.unpack_from(f"<{at // 4}I", head))
            for name, size in zip(self._names, self._sizes, strict=True):
                end = at + (next(varying) if size is None else size)
                places[name] = at, end
                at = end
        if at != length:
            raise self._damaged(f"row {row} is not as long as its columns")
        return places


def read_samples(shard: Shard, rows: Sequence[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yield rows of a shard that is here, all of them by default, decoded; of a third-party one as if it were ours.

    Raises:
        OSError: its file is gone, or cannot be read.
        ShardError: it is damaged.
        ValueError: a column is not what its encoding says.
    """
    rows = range(shard.samples) if rows is None else rows
    encodings = dict(zip(shard.column_names, shard.column_encodings, strict=True))
    with ShardFile(shard) as file:
        for row, columns in zip(rows, file.read(rows), strict=True):
            if shard.adopted is not None:
                yield shard.adopted.decode(columns, encodings, shard.first + row)
            else:
                yield {name: mds_decode(encodings[name], bytes(content)) for name, content in columns.items()}


def read_sample(shard: Shard, row: int) -> dict[str, Any]:
    """Return one row; see `read_samples`."""
    return next(read_samples(shard, [row]))
