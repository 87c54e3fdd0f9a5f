"""The rows of one MDS shard, read by column without going through streaming's sample by sample."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
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


class ShardFile:
    """Reads the rows of one MDS shard.

    The format, as streaming's writer has it: uint32 number of rows, uint32 where each begins and the last ends; a row is
    the uint32 sizes of its columns of varying size, then all columns in order.
    """

    def __init__(self, reader: MDSReader):
        self.path = Path(reader.dirname, reader.split, reader.raw_data.basename)
        self.names, self.sizes = reader.column_names, reader.column_sizes
        self.header = struct.Struct(f"<{sum(size is None for size in self.sizes)}I")
        with open(self.path, "rb") as file:
            num_rows = int.from_bytes(file.read(4), "little")
            self.edges = np.fromfile(file, np.uint32, reader.samples + 1)
        if num_rows != reader.samples or len(self.edges) != num_rows + 1:
            raise ShardError(f"{self.path} is damaged: it has another number of rows than index.json says. {DAMAGED}")

    def read(self, rows: Sequence[int]) -> list[dict[str, memoryview]]:
        """Return column -> bytes for each row."""
        found = []
        with open(self.path, "rb", buffering=0) as file:
            for row in rows:
                begin, end = int(self.edges[row]), int(self.edges[row + 1])
                data = memoryview(os.pread(file.fileno(), max(0, end - begin), begin))
                if len(data) != end - begin or len(data) < self.header.size:
                    raise ShardError(f"{self.path} is damaged: it ends within row {row}. {DAMAGED}")
                columns = split_row(data, self.names, self.sizes, self.header)
                if columns is None:
                    raise ShardError(f"{self.path} is damaged: row {row} is not as long as its columns. {DAMAGED}")
                found.append(columns)
        return found
