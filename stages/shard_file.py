"""The rows of one MDS shard, read by column without going through streaming's sample by sample.

The format, as streaming's writer has it: uint32 number of rows, uint32 where each begins and the last ends; a row is the
uint32 sizes of its columns of varying size, then all columns in order.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence

from streaming.base.format.mds.reader import MDSReader

from stages.fetch import StreamFailure

DAMAGED = "If it lies in data.local, remove that folder; otherwise make the stage again."


class ShardError(StreamFailure):
    """A shard whose bytes are not those of its rows, which may lie in a cache or in the stage itself."""


def split_row(data: memoryview, names: Sequence[str], sizes: Sequence[int | None]) -> dict[str, memoryview] | None:
    """Return column -> bytes of a row; None: it is not as long as its columns."""
    header = struct.Struct(f"<{sum(size is None for size in sizes)}I")
    if len(data) < header.size:
        return None
    varying, at, columns = iter(header.unpack_from(data)), header.size, {}
    for name, size in zip(names, sizes, strict=True):
        width = next(varying) if size is None else size
        columns[name] = data[at : at + width]
        at += width
    return columns if at == len(data) else None


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

    def read(self, rows: Sequence[int]) -> Iterator[dict[str, memoryview]]:
        """Yield column -> bytes of each row; they are overwritten by those of the next.

        Raises:
            ShardError: the file ends within a row, or a row is not as long as its columns.
        """
        buffer = bytearray()  # used again: new memory for a row takes longer than reading it
        for row in rows:
            length = self._edges[row + 1] - self._edges[row]
            if not 0 <= length <= self._num_bytes:
                raise self._damaged(f"it ends within row {row}")
            if length > len(buffer):
                buffer = bytearray(length)
            data = memoryview(buffer)[:length]
            if os.preadv(self._descriptor, [data], self._edges[row]) != length:
                raise self._damaged(f"it ends within row {row}")
            columns = split_row(data, self.names, self.sizes)
            if columns is None:
                raise self._damaged(f"row {row} is not as long as its columns")
            yield columns
