"""Atomic files: written under a temporary name in the same folder, synced to disk, then renamed."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import psutil

MAX_BYTES = 2**28  # of a file that is read whole, where its reader says nothing else


def cache_folder() -> Path:
    """Return the cache folder that all runs of this user share. Raises RuntimeError: there is no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "easel"


@contextlib.contextmanager
def atomic_path(path: Path, final: Callable[[], Path] | None = None) -> Iterator[Path]:
    """Give a path to write a file at, which takes its name when the block ends; where that fails, nothing is left of it.

    Args:
        path: the file; one that is there stays until then.
        final: its name, where that is known only at the end.

    Raises OSError: it cannot be written, or is a device or a pipe.
    """
    target = path.resolve() if path.is_symlink() else path  # a link stays one
    if target.exists() and not (target.is_file() or target.is_dir()):
        raise OSError(errno.EINVAL, "it is not a regular file", str(target))  # never replace /dev/null
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync_to_disk(temporary)
        temporary.replace(target if final is None else final())
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk's says no name
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder to write into, which takes its name when the block ends; where that fails, nothing is left of it.

    An earlier folder of the name stays until then. What a killed process left next to it is removed.
    """
    target = path.resolve()
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        number = leftover.suffixes[-2][1:]
        if not number.isdecimal() or psutil.pid_exists(int(number)):
            continue
        if leftover.name.endswith(f".before.{number}.tmp") and not target.exists():  # killed between the two renames
            leftover.rename(target)
        shutil.rmtree(leftover, ignore_errors=True)
    temporary, before = (target.with_name(f".{target.name}.{kind}{os.getpid()}.tmp") for kind in ("", "before."))
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for each in (*temporary.rglob("*"), temporary):
            sync_to_disk(each)
        if target.exists():
            target.rename(before)
        temporary.rename(target)
        sync_to_disk(target.parent)
    finally:
        if before.exists() and not target.exists():
            before.rename(target)
        for each in (temporary, before):
            shutil.rmtree(each, ignore_errors=True)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    write_atomic(path, json.dumps(content, indent=2) + "\n")


def open_regular(path: Path, most_bytes: int | None = MAX_BYTES) -> BinaryIO:
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
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if most_bytes is not None and at.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {at.st_size:,} bytes; at most {most_bytes:,} are read", str(path))
        return open(path, "rb", opener=lambda *_: descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most_bytes: int = MAX_BYTES) -> bytes:
    """Return the bytes of a regular file. Raises OSError: see `open_regular`."""
    with open_regular(path, most_bytes) as file:
        return file.read(most_bytes)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises OSError: see `open_regular`. ValueError: it is none."""
    try:
        return json.loads(read_regular(path))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def sync_to_disk(path: Path) -> None:
    """Bring a file's bytes, or a folder's entries, to the disk: a rename is not there before."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def nearest_existing(folder: str | Path) -> Path:
    """Return a folder, or the nearest above it that exists. Raises OSError: a loop of links, a name that is too long."""
    path = Path(folder).absolute()
    while not path.exists() and not path.is_symlink():
        path = path.parent
    return path


def write_problem(folder: str | Path) -> str | None:
    """Return why a folder, which may not exist yet, cannot be written, or None. Leaves no files."""
    path = Path(folder).absolute()
    try:
        path = nearest_existing(folder)
        if not path.exists():
            return f"{folder} cannot be written: {path} is a link to nothing. Remove it, or give another folder."
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return f"{folder} cannot be written: {path}: {error.strerror}. Give a folder that this user may write in."
