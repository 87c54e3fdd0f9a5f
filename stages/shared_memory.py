"""Numbers under which runs share memory. A run holds a lock on its number, and what is left under a free one is removed.

streaming keeps its state in /dev/shm/NNNNNN_NAME with locks in the temporary folder; a run that is killed leaves both, and
streaming's own search for a number then fails on them (mosaicml/streaming issues 824 and 884). The library's own
`clean_stale_shared_memory()` removes them for the whole machine, from under other runs too. Here a run locks
/dev/shm/NNNNNN_easel before it makes anything else under its number: the kernel gives the lock back however the run ends,
and any process that sees the memory sees the lock. Numbers without that file are other programs', and are left alone.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import itertools
import os
import re
import tempfile
from collections import defaultdict
from pathlib import Path

SEGMENTS = Path("/dev/shm")
LOCK_FILE = ".in_use"  # in data.local, held by the run whose shards are there
NAME = re.compile(r"(\d{6})_[a-z_]+")
MARK, SEARCHED = "easel", "barrier_filelock"  # streaming's search passes over a number whose barrier_filelock is there


def take_number() -> int:
    """Return a number that nobody uses, locked until this process ends; what killed runs have left is removed first.

    For the first rank of a machine. Raises OSError: shared memory cannot be written.
    """
    remove_dead_segments()
    segments, locks = by_number(SEGMENTS), _locks()
    numbers = ((number, f"{number:06d}") for number in itertools.count())
    return next(number for number, six in numbers if six not in segments and _take(six, locks[six]))


def _take(number: str, locks: list[Path]) -> bool:
    """Lock a number that has no segments; False: another run was first, or its locks are another user's."""
    if any(path.stat().st_uid != os.geteuid() for path in locks if path.exists()):
        return False
    path = SEGMENTS / f"{number}_{MARK}"
    try:
        mark = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    if not _lock(mark):  # another run has taken it for a dead one's
        os.close(mark)
        return False
    atexit.register(_end, path, mark, os.getpid())
    for left in locks:
        left.unlink(missing_ok=True)
    Path(tempfile.gettempdir(), f"{number}_{SEARCHED}").touch()
    return True


def remove_dead_segments() -> list[str]:
    """Remove the segments and locks of runs that are gone, and return their numbers."""
    removed, locks = [], _locks()
    for number, files in by_number(SEGMENTS).items():
        with contextlib.suppress(OSError):  # another user's, or removed in the meantime
            mark = os.open(SEGMENTS / f"{number}_{MARK}", os.O_RDWR)
            try:
                if _lock(mark):
                    for path in sorted([*files, *locks[number]], key=lambda path: path.name.endswith(MARK)):  # it last
                        path.unlink(missing_ok=True)
                    removed.append(number)
            finally:
                os.close(mark)
    return removed


def by_number(folder: Path, suffix: str = "") -> dict[str, list[Path]]:
    """Group streaming's files in a folder by their six digits."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.glob(f"[0-9]*_*{suffix}")) if folder.is_dir() else ():
        if match := NAME.fullmatch(path.name):
            found[match.group(1)].append(path)
    return found


def dead_segments() -> dict[str, list[Path]]:
    """Return number -> files of runs that are gone. Removes nothing."""
    marks = {number: SEGMENTS / f"{number}_{MARK}" for number in by_number(SEGMENTS)}
    return {n: files for n, files in by_number(SEGMENTS).items() if marks[n] in files and not is_held(marks[n])}


def is_held(lock: Path) -> bool:
    """True when a process holds a lock file; takes it for an instant otherwise."""
    try:
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or it cannot be opened, which is told where it is needed
        return False
    return False


def _locks() -> dict[str, list[Path]]:
    return by_number(Path(tempfile.gettempdir()), suffix="_filelock")


def _lock(mark: int) -> bool:
    """Lock an open file; False: another process has it, or has removed it."""
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(mark).st_nlink > 0


def _end(path: Path, mark: int, owner: int) -> None:
    """Remove a run's mark, after streaming has removed its segments; a fork of the process leaves it."""
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
        os.close(mark)
