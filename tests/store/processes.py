"""The harness's own processes, found by their group and by a variable that only they have, and what streaming's leave."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
from pathlib import Path

MARK = "EASEL_STORE_TEST"


def members(group: int) -> list[int]:
    """Return the living processes of a group that carry this harness's mark: a number may have been given away anew."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, its_group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
            is_ours = int(its_group) == group and state != "Z"
            if is_ours and mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def kill(group: int) -> None:
    """Kill what is left of a group."""
    for pid in members(group):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def inode_of_number(number: int) -> int | None:
    """Return what tells a use of a number of streaming's shared memory from a later one, or None: it is not in use."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/dev/shm/{number:06d}_locals").stat().st_ino
    return None


def remove_shared_memory(number: int, inode: int) -> None:
    """Remove what a reading has left of its number, segments and locks, unless it is another's by now.

    Args:
        inode: of `inode_of_number` while the reading had it. A run that takes the number has its segment mapped before it
            makes a lock, and takes none that still has locks: so what is neither mapped nor another segment is ours.
    """
    if is_mapped(number) or inode_of_number(number) not in (None, inode):
        return
    for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        for path in folder.glob(f"{number:06d}_*"):
            path.unlink(missing_ok=True)


def is_mapped(number: int) -> bool:
    """True while a process uses the number."""
    pattern = re.compile(rf"/dev/shm/{number:06d}_")
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if pattern.search(maps.read_text(errors="replace")):
                return True
    return False
