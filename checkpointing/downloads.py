"""What a start takes from a run's object store: what the store has of the run, and this machine does not.

Rank 0 looks before anything is built. If the store's newest full checkpoint is newer than this machine's, or this machine
has nothing, the record is downloaded, then the newest checkpoint that is whole, and the snapshots if they are to be scored
here. A folder that is as new, or newer, stays as it is: checkpointing/uploads.py brings the store up to it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from checkpointing.files import FULL, WEIGHTS, find_newest, number_of
from checkpointing.resume import is_begun, locked
from checkpointing.sharded import digest_file, remove_checkpoint
from checkpointing.shared_folder import replace_record
from checkpointing.store import CHECKPOINTS, RunStore, StoredCheckpoint, checkpoints_in, store_errors
from checkpointing.uploads import Uploads
from common.errors import ConfigError
from common.log import log
from mds.stores import address_problem, as_user_error, explain_store_error, scheme_of
from run_folder.files import CONFIG, STARTS, run_id_of

ATTEMPTS = 3  # of each request, before the run

Result = TypeVar("Result")


def problems(remote: str, *, is_saving: bool) -> list[tuple[str, str]]:
    """(key, message) for what is wrong with save.remote, without asking the store.

    Args:
        is_saving: the run writes full checkpoints.
    """
    if scheme_of(remote) != "s3":
        return [("save.remote", f"'{remote}' is not a store's address. Write s3://BUCKET/PREFIX.")]
    if text := address_problem(remote):
        return [("save.remote", text)]
    if not is_saving:
        why = "given, but no full checkpoint is written: save.every_images is 0, its default with synthetic data"
        return [("save.remote", f"{why}. Give save.every_images, or leave save.remote out.")]
    return []


def restore_from_store(
    remote: str, folder: Path, *, with_snapshots: bool, find_result: Callable[[], Result | None]
) -> tuple[bool, Result | None]:
    """Download what the store has of a run and rank 0's folder does not. Rank 0 calls it.

    Args:
        remote: s3://BUCKET/PREFIX, the parent of all runs.
        with_snapshots: the snapshots are scored here.
        find_result: returns a finished run's result, or None. It is called when the record is here, before a full checkpoint
            is downloaded, and raises ConfigError if the run was begun with another configuration.

    Returns:
        whether anything was downloaded, and that result.

    Raises:
        ConfigError: the store cannot be read or written, or has another run of this name; or what find_result raises.
        Failed: the store is away, or another process uses the run's folder.
    """
    store = RunStore(remote, folder.name, ATTEMPTS)
    was_there, lock = folder.exists(), FileLock(folder / ".lock")
    try:
        with _explain_store_errors(store, "written"):
            store.check_writable()
            with locked(lock, folder):
                return _download(store, folder, with_snapshots, find_result)
    except OSError as error:
        todo = f"The run in {store.address} is downloaded there: give a folder that this user may write"
        raise ConfigError([f"run_folder: {error}. {todo}."]) from error
    finally:
        lock.release()
        if not was_there and not _has_files(folder):
            shutil.rmtree(folder, ignore_errors=True)


def upload_now(uploads: Uploads | None) -> None:
    """Upload what rank 0's folder has. Raises Failed, ConfigError: the store cannot be written."""
    assert uploads is not None
    with _explain_store_errors(uploads.store, "written"):
        uploads.upload_new()


def fetch_newest(remote: str, folder: Path) -> None:
    """Download the store's record and its newest checkpoint into a folder that rank 0 does not write."""
    store = RunStore(remote, folder.name, ATTEMPTS)
    with _explain_store_errors(store):
        stored = store.listed()
        if CONFIG in stored:
            folder.mkdir(parents=True, exist_ok=True)
            _fetch_record(store, stored, folder)
            for newest in _newer(stored, find_newest(folder / CHECKPOINTS))[:1]:
                _fetch(store, newest, folder)


@contextlib.contextmanager
def _explain_store_errors(store: RunStore, done: str = "read") -> Iterator[None]:
    """Raise Failed or ConfigError instead of what the store's client raises."""
    try:
        yield
    except store_errors() as error:
        raise as_user_error(error, f"save.remote: {explain_store_error(error, store.address, done)}") from error


def _has_files(folder: Path) -> bool:
    """True if a run's folder has anything but its lock."""
    return folder.exists() and any(path.name != ".lock" for path in folder.iterdir())


def _newer(stored: Mapping[str, int], newest: Path | None) -> list[StoredCheckpoint]:
    """Return the store's full checkpoints that are newer than this machine's, the newest first."""
    full = [checkpoint for checkpoint in checkpoints_in(stored)[0] if checkpoint.kind == FULL]
    return [checkpoint for checkpoint in full if newest is None or checkpoint.number > number_of(newest)]


def _download(
    store: RunStore, folder: Path, with_snapshots: bool, find_result: Callable[[], Result | None]
) -> tuple[bool, Result | None]:
    stored, was_empty, newest, damaged = store.listed(), not _has_files(folder), None, None
    try:
        newest = find_newest(folder / CHECKPOINTS)
    except ConfigError as error:  # every one is damaged: the store may have a whole one
        damaged = error
    _check_is_same_run(store, stored, folder)
    newer = _newer(stored, newest)
    if not any(name in stored for name in (CONFIG, STARTS)) or (is_begun(folder) and not newer):
        if damaged is not None:
            raise damaged
        return False, find_result()
    try:
        _fetch_record(store, stored, folder)
        for snapshot in checkpoints_in(stored)[0] if with_snapshots else ():
            if snapshot.kind == WEIGHTS and not (folder / CHECKPOINTS / snapshot.name).exists():
                _fetch(store, snapshot, folder)
        if (result := find_result()) is not None:
            return True, result
        if not any(_fetch(store, checkpoint, folder) for checkpoint in newer) and newest is None and (newer or damaged):
            text = f"save.remote: every one of the {len(newer)} full checkpoints in {store.address} is damaged"
            again = ConfigError([f"{text}. Restore a copy, or use another run_name to start over."])
            raise damaged or again
    except BaseException:
        for path in folder.iterdir() if was_empty else ():
            remove_checkpoint(path)
        raise
    return True, None


def _check_is_same_run(store: RunStore, stored: Mapping[str, int], folder: Path) -> None:
    """Compare the ids of two runs of one name. Raises ConfigError: they are two."""
    here = run_id_of(folder)
    if here is None or STARTS not in stored:
        return
    aside = folder / ".from-store.tmp"
    try:
        store.get(STARTS, aside / STARTS)
        other = run_id_of(aside)
    finally:
        remove_checkpoint(aside)
    if other not in (None, here):
        problem = f"{folder} is the run {here}, {store.address} has another one of this name, {other}"
        raise ConfigError([f"save.remote: {problem}. Take another run_name, or another save.remote."])


def _fetch_record(store: RunStore, stored: Mapping[str, int], folder: Path) -> None:
    """Download all files but checkpoints. Files of this machine that differ are kept in the folder `replaced`.

    Raises:
        ConfigError: one is not as it was put; nothing has been changed then.
    """
    aside = folder / ".record.tmp"
    names = [name for name in stored if _is_of_record(name)]
    log.info(f"save.remote: {store.address} is newer than {folder}: {len(names)} files of its record are fetched.")
    remove_checkpoint(aside)
    try:
        for name in names:
            store.get(name, aside / name)
            digest = store.digest_of(name)
            if digest is not None and digest_file(aside / name) != digest:
                problem = f"{store.address}/{name} is damaged: its bytes are not those that were put"
                advice = "Restore a copy, or remove it and lose its contents"
                raise ConfigError([f"save.remote: {problem}. {advice}."])
        replace_record(folder, aside, names)
    finally:
        remove_checkpoint(aside)


def _is_of_record(name: str) -> bool:
    """True for the name of a record's file; a name in the store cannot lead out of the folder."""
    parts = name.split("/")
    return not name.startswith(CHECKPOINTS) and all(parts) and not any(part.startswith(".") for part in parts)


def _fetch(store: RunStore, checkpoint: StoredCheckpoint, folder: Path) -> bool:
    """Download a checkpoint, and return whether it is whole. A damaged one is renamed in the store, with a line."""
    log.info(f"save.remote: {checkpoint.name} ({checkpoint.gib:.3g} GiB) is fetched from {store.address}.")
    wrong = store.fetch_checkpoint(checkpoint, folder / CHECKPOINTS)
    if wrong is not None:
        store.set_aside(checkpoint)
        log.info(f"save.remote: {store.address}/{CHECKPOINTS}{checkpoint.name} is damaged ({wrong}); set aside there.")
    return wrong is None
