"""Read a tar's members as a stream, to the end of the file: plain, or compressed by gzip, bzip2 or xz.

Not by `tarfile`, which fills memory as a header asks, takes a tar that is cut off in a header for a shorter one, and stops
where the first of two joined tars ends. Here an extended header is limited, every end is either an end of archive or an
error, and what follows an end is read. Sources: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Interchange Format";
GNU tar's src/tar.h for long names and sparse files.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from prepare.samples import SourceError

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
BLOCK = tarfile.BLOCKSIZE
MAX_MEMBER_BYTES = 2**28  # 256 MiB, far more than any image
MAX_HEADER_BYTES = 2**20  # of an extended header or a long name; a path has at most some thousand bytes
SKIP_BYTES = 2**20  # read at once of what is not wanted
COMPRESSED = ((rb"\x1f\x8b\x08", gzip.open), (rb"BZh[1-9]1AY&SY", bz2.open), (rb"\xfd7zXZ|\x5d\0\0\x80", lzma.open))
PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
NOT_NEEDED = (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK)  # comments and the targets of links
SPARSE, SPARSE_NAME = "sparse", "GNU.sparse.name"
PAX_RECORD = re.compile(rb"(\d{1,9}) ([^=\n]+)=")


@dataclass(frozen=True)
class Member:
    """A file of a tar.

    problem: why its content is not read; None: it can be.
    """

    name: str
    size: int
    problem: str | None


def is_tar(name: str) -> bool:
    """Tell by a file's name."""
    return name.lower().endswith(TAR_SUFFIXES)


def open_tar(path: Path) -> BinaryIO:
    """Open a tar's own bytes, decompressed if need be."""
    file = open(path, "rb")  # noqa: SIM115 (returned)
    for magic, opened in COMPRESSED:
        if re.match(magic, file.peek(16)):
            file.close()
            return opened(path, "rb")  # type: ignore[return-value]  # their stubs name the classes
    return file


class TarStream:
    """Iterate over a tar's members. `read` returns the content of the last one.

    Raises, while it is iterated over:
        tarfile.ReadError: the tar is cut off or damaged.
        SourceError: a header is too large to be read.
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self._size = self._left = 0
        """Bytes of the member's content, and those that were not read yet, with what fills its last block."""

    def __iter__(self) -> Iterator[Member]:
        is_ended, records = False, dict[str, bytes]()
        while block := self._file.read(BLOCK):
            if not block.strip(b"\0"):  # an end of archive, or what fills the file's last record
                is_ended = True
                continue
            info = _parse_header(block)
            is_ended = False
            if info.type in PAX or info.type == tarfile.GNUTYPE_LONGNAME:
                records |= self._extended(info)
                continue
            if info.type in NOT_NEEDED:
                self._begin(info.size)
                self._skip()
                continue
            self._begin(_size_of(info, records))
            is_sparse = info.type == tarfile.GNUTYPE_SPARSE or SPARSE in records
            if info.type == tarfile.GNUTYPE_SPARSE:
                self._skip_sparse_map(block)
            if not info.isdir():
                yield Member(_name_of(info, records), self._size, _problem_of(info, self._size, is_sparse))
            self._skip()
            records = {}
        if not is_ended:
            raise tarfile.ReadError("no end of archive")

    def read(self) -> bytes:
        """Return the content of the member that was yielded last. Raises tarfile.ReadError: the tar ends in it."""
        content = self._file.read(self._size)
        if len(content) < self._size:
            raise tarfile.ReadError("cut off in a member")
        self._left -= self._size
        return content

    def _begin(self, size: int) -> None:
        self._size, self._left = size, -(-size // BLOCK) * BLOCK

    def _skip(self) -> None:
        while self._left:
            skipped = len(self._file.read(min(self._left, SKIP_BYTES)))
            if not skipped:
                raise tarfile.ReadError("cut off in a member")
            self._left -= skipped

    def _extended(self, info: tarfile.TarInfo) -> dict[str, bytes]:
        """Return what an extended header says of the next member. Raises SourceError: it is too large."""
        if info.size > MAX_HEADER_BYTES:
            raise SourceError(f"has an extended header of more than {MAX_HEADER_BYTES // 2**20} MiB")
        self._begin(info.size)
        content = self.read()
        self._skip()
        return _pax_records(content.rstrip(b"\0")) if info.type in PAX else {"path": content.partition(b"\0")[0]}

    def _skip_sparse_map(self, block: bytes) -> None:
        at = 482  # of the byte that says whether a block of the map follows, see GNU tar's src/tar.h
        while block[at]:
            block, at = self._file.read(BLOCK), 504
            if len(block) < BLOCK:
                raise tarfile.ReadError("cut off in a sparse map")


def _parse_header(block: bytes) -> tarfile.TarInfo:
    """Return a member's header. Raises tarfile.ReadError: it is none, or is cut off."""
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise tarfile.ReadError("damaged header") from error
    if info.size < 0:
        raise tarfile.ReadError("damaged header")
    return info


def _pax_records(content: bytes) -> dict[str, bytes]:
    """Return the needed records of an extended header, LENGTH NAME=VALUE and a line feed each. Raises tarfile.ReadError."""
    records, at = {}, 0
    while at < len(content):
        match = PAX_RECORD.match(content, at)
        end = at + int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(content) or content[end - 1] != ord("\n"):
            raise tarfile.ReadError("damaged extended header")
        name = match[2].decode("utf-8", "replace")
        if name in ("path", "size", SPARSE_NAME):
            records[name] = content[match.end() : end - 1]
        if name.startswith("GNU.sparse."):
            records[SPARSE] = b""
        at = end
    return records


def _size_of(info: tarfile.TarInfo, records: Mapping[str, bytes]) -> int:
    """Return how many bytes of content follow. Raises tarfile.ReadError: the header does not say."""
    if info.type in tarfile.SUPPORTED_TYPES and not info.isreg():
        return 0  # links, folders and devices have no content, whatever their headers say
    try:
        size = int(records.get("size", info.size))
    except ValueError as error:
        raise tarfile.ReadError("damaged extended header") from error
    if size < 0:
        raise tarfile.ReadError("damaged header")
    return size


def _name_of(info: tarfile.TarInfo, records: Mapping[str, bytes]) -> str:
    name: Any = records.get(SPARSE_NAME, records.get("path"))
    return info.name if name is None else name.decode("utf-8", "surrogateescape")


def _problem_of(info: tarfile.TarInfo, size: int, is_sparse: bool) -> str | None:
    if info.islnk() or info.issym():
        return "is a link"  # a stream cannot go back to its target
    if is_sparse:
        return "is a sparse file"  # a few bytes can claim any size
    if not info.isreg():
        return "is no plain file"
    return f"has more than {MAX_MEMBER_BYTES // 2**20} MiB" if size > MAX_MEMBER_BYTES else None
