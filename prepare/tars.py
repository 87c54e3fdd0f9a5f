"""Read a tar's members as a stream, to the end of the file: plain, or compressed by gzip, bzip2 or xz.

`tarfile` takes a tar that is cut off in a header for a shorter one, stops where the first of two joined tars ends, and fills
memory as a header asks. Here every end is either an end of archive or an error, what follows an end is read, and extended
headers are limited.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import re
import tarfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cli.private_api import require_private_api
from prepare.samples import SourceError

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
MAX_MEMBER_BYTES = 2**28  # 256 MiB, far more than any image
MAX_HEADER_BYTES = 2**20  # of an extended header or a long name; a path has at most some thousand bytes
MAX_EXTENDED = 8  # headers of one file; each is held while the next one is read
BLOCK = tarfile.BLOCKSIZE
COMPRESSED = ((rb"\x1f\x8b\x08", gzip.open), (rb"BZh[1-9]1AY&SY", bz2.open), (rb"\xfd7zXZ|\x5d\0\0\x80", lzma.open))
EXTENDED = {
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
}

SPARSE = "_proc_sparse", "_proc_gnusparse_10", "_sparse_structs"
require_private_api(tarfile.TarInfo, *SPARSE, why="the map of a sparse file is not held in memory")


def is_tar(name: str) -> bool:
    """Tell by a file's name."""
    return name.lower().endswith(TAR_SUFFIXES)


class Header(tarfile.TarInfo):
    """A member's header, which raises where `tarfile` would see the end of the tar."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Header:
        info = super().frombuf(buf, encoding, errors)
        if info.size < 0:
            raise tarfile.ReadError("damaged header")
        if info.type in EXTENDED and info.size > MAX_HEADER_BYTES:
            raise SourceError(f"has an extended header of more than {MAX_HEADER_BYTES // 2**20} MiB")
        return info

    @classmethod
    def fromtarfile(cls, tarfile: Any) -> Header:
        return tarfile.checked(super().fromtarfile)

    # The map of a sparse file, which is not read, can have any length: it is skipped.

    _sparse_structs: Any

    def _proc_sparse(self, tarfile: Any) -> Any:
        is_more = self._sparse_structs[1]
        while is_more:
            is_more = tarfile.fileobj.read(BLOCK)[504]
        self._sparse_structs = [], False, 0
        return super()._proc_sparse(tarfile)  # type: ignore[misc]

    def _proc_gnusparse_10(self, next: Any, pax_headers: Any, tarfile: Any) -> None:
        next.sparse = []


class StrictTar(tarfile.TarFile):
    """A tar whose end has to be an end of archive."""

    tarinfo = Header
    is_ended, depth = False, 0

    def checked(self, read_header: Any) -> Header:
        """Read a header. Raises tarfile.ReadError: it is damaged, or the tar ends before its end of archive.

        It is called within itself for the header that follows an extended one.
        """
        if self.depth > MAX_EXTENDED:
            raise SourceError(f"has more than {MAX_EXTENDED} extended headers of one file")
        self.pax_headers = {}  # what a global header says of all files is not used, and could fill memory
        self.depth += 1
        try:
            header = read_header(self)
        except tarfile.HeaderError as error:
            is_end = isinstance(error, tarfile.EOFHeaderError)  # type: ignore[attr-defined]
            if not is_end and not (self.is_ended and isinstance(error, tarfile.EmptyHeaderError)):  # type: ignore[attr-defined]
                raise tarfile.ReadError("damaged header, or no end of archive") from error
            self.is_ended = True
            raise
        finally:
            self.depth -= 1
        self.is_ended = False
        return header


@contextlib.contextmanager
def open_tar(path: Path) -> Iterator[StrictTar]:
    """Open a tar, decompressed if need be."""
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(open(path, "rb"))
        for magic, decompressed in COMPRESSED:
            if re.match(magic, file.peek(16)):
                file = stack.enter_context(decompressed(path, "rb"))
                break
        keys: dict[str, Any] = {"ignore_zeros": True, "encoding": "utf-8", "errors": "surrogateescape"}
        stream: Any = types.SimpleNamespace(read=file.read1)  # a damaged file gives what lies before the damage
        yield stack.enter_context(StrictTar.open(fileobj=stream, mode="r|", bufsize=2**16, **keys))


def members(tar: StrictTar) -> Iterator[tuple[tarfile.TarInfo, str | None]]:
    """Yield a tar's members but its folders, and why one is not read; None: it can be, by `extractfile`.

    Raises:
        tarfile.ReadError: the tar is cut off or damaged.
        SourceError: a header is too large to be read.
    """
    for info in tar:
        tar.members = []  # type: ignore[attr-defined]  # a tar may have millions
        if not info.isdir():
            yield info, _problem_of(info)


def _problem_of(info: tarfile.TarInfo) -> str | None:
    if info.islnk() or info.issym():
        return "is a link"  # a stream cannot go back to its target
    if info.issparse():
        return "is a sparse file"  # a few bytes can claim any size
    if not info.isreg():
        return "is no plain file"
    return f"has more than {MAX_MEMBER_BYTES // 2**20} MiB" if info.size > MAX_MEMBER_BYTES else None
