"""Memory of a CPU's tensors: kept by the process once it has been used, as torch keeps a GPU's."""

from __future__ import annotations

import ctypes

# malloc.h of glibc
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MMAP_THRESHOLDS = (2**30, 2**25)
"""Bytes from which a tensor is given back. glibc before 2.35 allows no more than the second."""


def keep_freed_memory() -> bool:
    """Have glibc keep freed memory for the next tensor; return whether it does. Other C libraries stay as they are.

    By default it gives a large tensor back to the kernel, which then clears each 4 KiB page of the next one anew. What that
    takes is in reports/NOTES.md. The memory is the process's to its end.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return any(mallopt(M_MMAP_THRESHOLD, size) for size in MMAP_THRESHOLDS) and bool(mallopt(M_TRIM_THRESHOLD, -1))
