"""Reasons for a run to fail: batch sizes that do not divide, too little disk space, folders that cannot be written."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from config import count
from record.checkpoint_files import FULL, WEIGHTS, listed
from record.checkpoint_folders import size_of

MAX_NAME_BYTES = 200  # file systems allow 255; loggers append to the name


def unwritable(folder: str | Path) -> str | None:
    """Say why a folder, which may not exist yet, cannot be written, or None. Leaves no files."""
    path = Path(folder).absolute()
    try:
        while not path.exists():
            if path.is_symlink():
                return f"{folder} cannot be written: {path} is a link to nothing. Remove it, or give another folder."
            path = path.parent
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return f"{folder} cannot be written: {path}: {error.strerror}. Give a folder that this user may write in."


def room_problem(
    folder: str | Path, checkpoint_gib: float, num: int, snapshot_gib: float = 0.0, num_snapshots: int = 0
) -> str | None:
    """Return the message that a disk has too little space for a run's checkpoints, or None.

    Args:
        folder: of the run; the files already in it count as free space, since they are replaced or part of the total.
        num: full checkpoints that exist at once: those kept, and the one being written.
        num_snapshots: by the end of the run.
    """
    if unwritable(folder):
        return None  # reported by its own check
    there = Path(folder).absolute()
    held_gib = sum(size_of(path) for kind in (FULL, WEIGHTS) for path in listed(there / "checkpoints", kind)) / 2**30
    while not there.exists():
        there = there.parent
    need_gib, free_gib = num * checkpoint_gib + num_snapshots * snapshot_gib, shutil.disk_usage(there).free / 2**30
    if need_gib <= free_gib + held_gib:
        return None
    named = {"full checkpoint": (num, checkpoint_gib), "snapshot": (num_snapshots, snapshot_gib)}
    needs = " and ".join(f"{count(n, what)} of {gib:.3g} GiB" for what, (n, gib) in named.items() if n)
    ways = ["lower save.keep"] * bool(num) + ["raise save.snapshot_every_images (0: none)"] * bool(num_snapshots)
    return (
        f"{needs} need {need_gib:.3g} GiB, {there} has {free_gib:.3g} free. Make room, {', '.join(ways)}, give another "
        f"run_folder, or save.every_images=0 for none."
    )


def run_folder_problem(run_folder: str, run_name: str | None) -> str | None:
    """Say why a run of this name cannot write its record there, or None."""
    for key, given in (("run_name", run_name or ""), ("run_folder", run_folder)):
        if not given.isprintable():
            return f"{key}: {given[:80]!r} has a character that cannot be seen. Give one without."
    fits = run_name is None or (run_name == Path(run_name).name and 0 < len(run_name.encode()) <= MAX_NAME_BYTES)
    if run_name is not None and (not fits or run_name.startswith(".")):
        return (
            f"run_name: '{run_name[:80]}' is not a folder name. Use letters, digits, - and _, {MAX_NAME_BYTES} at most."
        )
    folder = Path(run_folder, run_name or "")
    if run_name is not None and folder.exists() and not _is_begun(folder):
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
