"""What killed runs leave in shared memory, removed only where nobody can be using it.

streaming keeps its state in /dev/shm/NNNNNN_NAME with locks in the temporary folder; a run that is killed leaves both, and
the next one on that machine fails on them (mosaicml/streaming issues 824 and 884). The library's own
`clean_stale_shared_memory()` removes them for the whole machine, from under other runs too. Here a number counts as dead
only when no process maps one of its segments and every process could be inspected. Otherwise nothing is removed, and a
line says what was left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from cli.log import EVERY_RANK, log

SEGMENTS, PROCESSES, NAMESPACES = Path("/dev/shm"), Path("/proc"), Path("/proc/self/ns")
NAME = re.compile(r"(\d{6})_[a-z_]+")
TURN_SEC = 60.0
SETTLED_SEC = 2.0  # a segment is mapped microseconds after it is made
# Numbers of the kernel's first namespaces (include/linux/proc_ns.h): PROC_PID_INIT_INO and PROC_IPC_INIT_INO.
FIRST_PID_NAMESPACE, FIRST_IPC_NAMESPACE = 0xEFFFFFFC, 0xEFFFFFFF


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let one process of this user and machine at a time take a number: streaming's own search for a free one can collide.

    For the first rank of a machine, around the making of a dataset. Jobs over several machines could wait for one another
    in a circle: after a minute it continues without.
    """
    lock = FileLock(Path(tempfile.gettempdir(), f"easel-{os.getuid()}-streams.lock"))
    with contextlib.suppress(Timeout):
        lock.acquire(timeout=TURN_SEC)
    try:
        yield
    finally:
        lock.release()


def remove_dead_segments() -> list[str]:
    """Remove the segments and locks of runs that are gone, and return their numbers; prints what had to be left.

    To be called by one process of a machine before a dataset is built. Does nothing where there is no /dev/shm.
    """
    segments = by_number(SEGMENTS)
    locks = by_number(Path(tempfile.gettempdir()), suffix="_filelock")
    if not segments and not locks:
        return []
    mapped, hidden = mapped_numbers()
    dead = [number for number in sorted({*segments, *locks}) if number not in mapped]
    if any(is_young(path) for number in dead for path in segments[number]):
        time.sleep(SETTLED_SEC)
        mapped, hidden = mapped_numbers()
        dead = [number for number in dead if number not in mapped]
    if hidden:
        left = [number for number in dead if segments[number]]  # locks alone hold no memory
        if left:
            named = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
            six = "[0-9]" * 6
            log.warning(
                f"shared memory: {named} may be left from runs that are gone, but {hidden}: left as they are. If no other "
                f"run is alive on this machine: rm -f {SEGMENTS}/{six}_* {tempfile.gettempdir()}/{six}_*_filelock",
                extra=EVERY_RANK,
            )
        return []
    return [number for number in dead if _remove(segments[number], locks[number])]


def by_number(folder: Path, suffix: str = "") -> dict[str, list[Path]]:
    """Group streaming's files in a folder by their six digits."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.glob(f"[0-9]*_*{suffix}")) if folder.is_dir() else ():
        if match := NAME.fullmatch(path.name):
            found[match.group(1)].append(path)
    return found


def is_young(segment: Path) -> bool:
    """True when its maker may not have mapped it yet."""
    with contextlib.suppress(FileNotFoundError):
        return time.time() - segment.stat().st_mtime < SETTLED_SEC
    return False


def mapped_numbers() -> tuple[set[str], str | None]:
    """Return the numbers that a process maps, and why some process may not have been seen, or None."""
    mapped, unreadable = set(), 0
    for process in PROCESSES.glob("[0-9]*"):
        try:
            maps = (process / "maps").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue  # gone in the meantime
        except OSError:
            unreadable += 1
            continue
        mapped |= set(re.findall(rf"{SEGMENTS}/(\d{{6}})_", maps))
    if unreadable:
        return mapped, f"{unreadable} processes of other users could not be inspected"
    if _shares_memory_beyond_its_processes():
        return mapped, "this container shares its memory with processes that it cannot see"
    if re.search(r"\bhidepid=(?!0|off)", (PROCESSES / "mounts").read_text()):
        return mapped, "/proc is mounted with hidepid"
    return mapped, None


def _shares_memory_beyond_its_processes() -> bool:
    """True in a container with the host's shared memory (--ipc=host) and process numbers of its own."""
    return _namespace("ipc") == FIRST_IPC_NAMESPACE and _namespace("pid") != FIRST_PID_NAMESPACE


def _namespace(name: str) -> int:
    return (NAMESPACES / name).stat().st_ino


def _remove(segments: list[Path], locks: list[Path]) -> bool:
    """Remove one number's files, unless one of its locks is held; True when it did."""
    if any(is_held(path) for path in locks):
        return False
    try:
        for path in (*segments, *locks):
            path.unlink(missing_ok=True)
    except PermissionError:
        return False  # another user's
    return True


def is_held(lock: Path) -> bool:
    """True when a process holds a lock file; takes it for an instant otherwise."""
    try:
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
