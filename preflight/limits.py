"""Reasons for a run to fail: batch sizes that do not divide, names of runs, folders that cannot be written."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from record.checkpoint_files import FULL, listed
from record.checkpoint_folders import size_of

MAX_NAME_BYTES = 200  # file systems allow 255; loggers append to the name


def existing(folder: str | Path) -> Path:
    """Return a folder, or the nearest above it that exists. Raises OSError: a loop of links, a name that is too long."""
    path = Path(folder).absolute()
    while not path.exists() and not path.is_symlink():
        path = path.parent
    return path


def unwritable(folder: str | Path) -> str | None:
    """Say why a folder, which may not exist yet, cannot be written, or None. Leaves no files."""
    path = Path(folder).absolute()
    try:
        path = existing(folder)
        if not path.exists():
            return f"{folder} cannot be written: {path} is a link to nothing. Remove it, or give another folder."
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return f"{folder} cannot be written: {path}: {error.strerror}. Give a folder that this user may write in."


def held_gib(folder: str | Path, kind: str) -> float:
    """Return what a run's files of a kind take, which are replaced by later ones, or part of what it will have."""
    return sum(size_of(path) for path in listed(Path(folder).absolute() / "checkpoints", kind)) / 2**30


def run_folder_problem(run_folder: str, run_name: str | None) -> str | None:
    """Say why a run of this name cannot write its record there, or None."""
    folder = Path(run_folder, run_name or "")
    if run_name is not None:
        fits = run_name == Path(run_name).name and 0 < len(run_name.encode()) <= MAX_NAME_BYTES
        if not fits or run_name.startswith(".") or not run_name.isprintable():
            given = f"run_name: {run_name[:80]!r} is not a folder name"
            return f"{given}. Use letters, digits, - and _, {MAX_NAME_BYTES} at most."
        if folder.exists() and not _is_begun(folder):
            given = f"{folder} exists and is not a run (it has no config.yaml)"
            return f"run_name: {given}. Take another run_name, or remove it."
    text = unwritable(run_folder)
    return f"run_folder: {text}" if text else None


def _is_begun(folder: Path) -> bool:
    """True for a run's folder, even if the run was killed before writing anything, or its config.yaml is lost."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    is_killed = all(re.fullmatch(r"\.lock|\.seen-\w+|\.config\.yaml\.(\d+\.)?tmp", name) for name in names)
    return "config.yaml" in names or is_killed or bool(listed(folder / "checkpoints", FULL))


def batch_problem(global_batch_size: int, num_ranks: int, microbatch: int) -> str | None:
    """Return the message that a batch size does not divide into ranks and microbatches, with the nearest ones; or None."""
    step = num_ranks * microbatch
    if global_batch_size >= 1 and global_batch_size % step == 0:
        return None
    below = max(0, global_batch_size // step * step)
    nearest = ", ".join(str(size) for size in (below, below + step) if size > 0)
    product = f"{num_ranks} ranks x {microbatch} microbatch = {step}"
    return f"{global_batch_size} is not a multiple of {product}. Nearest: {nearest}."
