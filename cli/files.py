"""Files that are there whole or not at all: written beside their place, brought to the disk, then renamed."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import psutil

MOST_BYTES = 2**28  # of a file that is read whole, where its reader says nothing else


def cache_folder() -> Path:
    """Return the folder that keeps what all runs of this user can have again. Raises RuntimeError: there is no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "easel"


@contextlib.contextmanager
def whole(path: Path, final: Callable[[], Path] | None = None) -> Iterator[Path]:
    """Give a path to write a file at, which takes its name when the block ends; where that fails, nothing is left of it.

    Args:
        path: the file; one that is there stays until then.
        final: its name, where that is known only at the end.

    Raises OSError: it cannot be written, or is a device or a pipe.
    """
    place = path.resolve() if path.is_symlink() else path  # a link stays one
    if place.exists() and not (place.is_file() or place.is_dir()):
        raise OSError(errno.EINVAL, "it is no regular file", str(place))  # /dev/null would be a page for everybody
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        to_disk(temporary)
        temporary.replace(place if final is None else final())
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk's says no name
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder to write into, which takes its name when the block ends; where that fails, nothing is left of it.

    An earlier folder of the name stays until then. What a killed process has left beside it is cleared up.
    """
    place = path.resolve()
    for left in place.parent.glob(f".{glob.escape(place.name)}.*.tmp"):
        number = left.suffixes[-2][1:]
        if not number.isdecimal() or psutil.pid_exists(int(number)):
            continue
        if left.name.endswith(f".before.{number}.tmp") and not place.exists():  # killed between the two renames
            left.rename(place)
        shutil.rmtree(left, ignore_errors=True)
    temporary, before = (place.with_name(f".{place.name}.{kind}{os.getpid()}.tmp") for kind in ("", "before."))
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for each in (*temporary.rglob("*"), temporary):
            to_disk(each)
        if place.exists():
            place.rename(before)
        temporary.rename(place)
        to_disk(place.parent)
    finally:
        if before.exists() and not place.exists():
            before.rename(place)
        for each in (temporary, before):
            shutil.rmtree(each, ignore_errors=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all."""
    with whole(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    write_whole(path, json.dumps(content, indent=2) + "\n")


def open_regular(path: Path, most_bytes: int | None = MOST_BYTES) -> BinaryIO:
    """Open a regular file for reading, links followed: a device or a pipe may have no end, or no writer.

    Args:
        most_bytes: that it may have; None: any number, of a file that is not read at once.

    Raises OSError: it is none, has more bytes than that, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer is not waited for
    try:
        at = os.fstat(descriptor)
        if stat.S_ISDIR(at.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(at.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if most_bytes is not None and at.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {at.st_size:,} bytes; at most {most_bytes:,} are read", str(path))
        return open(path, "rb", opener=lambda *_: descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the bytes of a regular file. Raises OSError: see `open_regular`."""
    with open_regular(path, most_bytes) as file:
        return file.read(most_bytes)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises OSError: see `open_regular`. ValueError: it is none."""
    try:
        return json.loads(read_regular(path))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def is_bounded(record: zipfile.ZipInfo) -> bool:
    """True for a zip file's record that gives no more bytes than it claims: of other methods zipfile reads all there is."""
    return record.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def to_disk(path: Path) -> None:
    """Bring a file's bytes, or a folder's entries, to the disk: a rename is not there before."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
