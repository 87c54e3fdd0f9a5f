"""The memory of this machine, or of the container that this process is in."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
# Of memory.stat: the page cache, which the kernel reclaims when memory is needed.
RECLAIMED = ("inactive_file", "active_file")


def read_host_bytes() -> tuple[int, int]:
    """Return (total, free now) bytes, within a container's limit."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    with contextlib.suppress(OSError, ValueError):  # "max", or no such control group
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        with contextlib.suppress(OSError):
            lines = (line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
            used -= sum(int(size) for name, size in lines if name in RECLAIMED)
        total, free = min(total, limit), min(free, limit - used)
    return total, free
