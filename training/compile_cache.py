"""Inductor's cache on disk, cleared of what a killed process has left unfinished there.

torch 2.10 has g++ write each library to its final name (`CppBuilder.build`), and never looks at one that is there
(`_worker_compile_cpp`). Where the process was killed meanwhile, every later start ends with "file too short" or "invalid ELF
header". A probe of the CPU's vector instructions that is cut off is worse: it counts as "not supported", and the kernels
are slow without a word.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import struct
import tempfile
from pathlib import Path

from filelock import FileLock

from cli.log import EVERY_RANK, log


def remove_unfinished_libraries() -> None:
    """Remove the libraries that are cut off; inductor builds them again. Each rank calls it before it compiles.

    Inductor's lock of a library is taken meanwhile. One that is held is left alone: another process builds the library.
    """
    # torch's own default: https://docs.pytorch.org/docs/2.10/user_guide/torch_compiler/torch.compiler_faq.html
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    folder = Path(given or f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    for path in folder.rglob("*.so"):
        if _is_whole(path):
            continue
        with contextlib.suppress(OSError):  # held, another user's, or removed by another rank
            (folder / "locks").mkdir(exist_ok=True)
            with FileLock(folder / "locks" / f"{path.name.partition('.')[0]}.lock", timeout=0):
                if not _is_whole(path):
                    path.unlink()
                    text = f"{path} was cut off when an earlier process was killed. It is removed, and compiled again."
                    log.warning(f"compile: {text}", extra=EVERY_RANK)


def _is_whole(library: Path) -> bool:
    """True for an ELF file with its table of sections, which linkers write last; True where it cannot be read."""
    try:
        size = library.stat().st_size
        with open(library, "rb") as file:
            header = file.read(64)
    except OSError:
        return True
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return False
    (table,), (entry_bytes, num_entries) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return bool(table + entry_bytes * num_entries <= size)
