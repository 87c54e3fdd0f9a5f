"""A run that goes on from an object store: what the store has of it, and this machine has not.

Rank 0 looks before anything is built. Where the store's newest full checkpoint is newer than this machine's, or this machine
has nothing, the record comes from there, then the newest checkpoint that is whole, and the snapshots where they are to be
scored here. A folder that is as new, or newer, stays as it is: training/uploads.py brings the store to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer.utils import dist
from filelock import FileLock, Timeout

from cli import ranks
from cli.errors import ConfigError, Failed
from cli.log import log
from record.checkpoint_files import FULL, WEIGHTS, find_newest, number_of
from record.checkpoint_folders import digest_of, remove
from record.config_file import CONFIG
from record.files import STARTS, run_id_of
from record.run_store import CHECKPOINTS, RunStore, StoredCheckpoint, checkpoints_in, store_errors
from stages.store_errors import address_problem, explain_store_error, refusal, scheme_of
from training import published
from training.resume import check_begun
from training.run_config import RunConfig, resolve
from training.sharding import is_sharded
from training.shared_folder import fetch_to_all, replace_record
from training.uploads import Uploads

ATTEMPTS = 3  # of each request, before the run


def problems(config: RunConfig) -> list[tuple[str, str]]:
    """(key, message) for what is wrong with save.remote, as far as nobody has to be asked."""
    remote = config.save.remote
    if remote is None:
        return []
    if scheme_of(remote) != "s3":
        return [("save.remote", f"'{remote}' is no address of a store. Write s3://BUCKET/PREFIX.")]
    if text := address_problem(remote):
        return [("save.remote", text)]
    with contextlib.suppress(ValueError):  # one of the run's other problems
        if not resolve(config).save.is_on:
            why = "given, but no full checkpoint is written: save.every_images is 0, its default with synthetic data"
            return [("save.remote", f"{why}. Give save.every_images, or leave save.remote out.")]
    return []


def asks_all(config: RunConfig) -> bool:
    """True where no machine reads its run folder before the ranks have met: each may have one of its own."""
    return config.save.remote is not None and ranks.num_nodes() > 1


def as_begun(config: RunConfig) -> RunConfig:
    """Return the configuration with what its run was begun with, as far as this machine alone may ask its folder."""
    return config if asks_all(config) else published.as_begun(config)


def bring_back(config: RunConfig, uploads: Uploads | None = None) -> tuple[RunConfig, dict[str, Any] | None]:
    """Bring what a resolved run takes to this machine: from its store, and from the hub. All ranks call it.

    Args:
        uploads: of rank 0; of a finished run it brings what the store has not.

    Returns:
        the configuration, with what the run was begun with; the result, of a run that is finished, else None.

    Raises:
        ConfigError: on all ranks: the run was begun with another configuration; the store cannot be read or written, or
            has another run of this name.
        Failed: on all ranks: the store is away, or another process uses the run's folder.
    """
    folder, came = Path(config.run_folder, config.run_name or ""), False
    if config.save.remote is None:
        result = ranks.on_rank_zero(lambda: check_begun(config, folder))
    else:
        came, result = ranks.on_rank_zero(lambda: _brought(config, folder))
        if result is None and not is_sharded(config):
            fetch_to_all(folder, lambda: _upload(uploads), lambda: _fetch_newest(config, folder))
        config = _as_begun(config) if came or asks_all(config) else config
    if result is None:
        return published.fetched(config), None
    if not came:
        start(uploads)
    return config, result


def _as_begun(config: RunConfig) -> RunConfig:
    """Return the configuration as a start resolves it that finds the run on its disk."""
    data = config.data
    if data.num_canonical_nodes == ranks.num_nodes():  # the default
        config = dataclasses.replace(config, data=dataclasses.replace(data, num_canonical_nodes=None))
    return resolve(published.as_begun(config))


@contextlib.contextmanager
def uploading(config: RunConfig) -> Iterator[Uploads | None]:
    """Give what uploads a resolved run, or None: save.remote is not given, or this is another rank.

    At the end of the context, also after an error, rank 0 waits until all is there, if it was started.

    Raises:
        Missing: not all of it could be uploaded.
    """
    if config.save.remote is None or dist.get_global_rank() != 0:
        yield None
        return
    store = RunStore(config.save.remote, config.run_name or "")
    folder = Path(config.run_folder, config.run_name or "")
    uploads = Uploads(store, folder, config.save.keep, config.save.patience_sec)
    with uploads.until_there():
        yield uploads


def start(uploads: Uploads | None) -> None:
    """Begin to upload what the run's folder has, where this rank is to."""
    if uploads is not None:
        uploads.start()


# --- on rank 0 ---


@contextlib.contextmanager
def _asking(store: RunStore, done: str = "read") -> Iterator[None]:
    """Raise Failed or ConfigError instead of what the store's client raises."""
    try:
        yield
    except store_errors() as error:
        raise refusal(error, f"save.remote: {explain_store_error(error, store.address, done)}") from error


def _brought(config: RunConfig, folder: Path) -> tuple[bool, dict[str, Any] | None]:
    """Return whether anything has come, and the result of a finished run."""
    assert config.save.remote is not None
    store = RunStore(config.save.remote, folder.name, ATTEMPTS)
    was_there, lock = folder.exists(), FileLock(folder / ".lock")
    try:
        with _asking(store, "written"):
            store.check_writable()
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
            return _fetched(store, store.listed(), folder, config)
    except Timeout as error:
        given = f"another process is training in {folder}"
        raise Failed(f"run_name: {given}. Wait for it, or take another run_name.") from error
    except OSError as error:
        raise ConfigError([f"run_folder: {error}. What {store.address} has of this run goes there."]) from error
    finally:
        lock.release()
        if not was_there and not _has_files(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _upload(uploads: Uploads | None) -> None:
    """Give the store what rank 0's folder has. Raises Failed, ConfigError: it cannot be written."""
    assert uploads is not None
    with _asking(uploads.store, "written"):
        uploads.bring()


def _fetch_newest(config: RunConfig, folder: Path) -> None:
    """Bring the store's record and its newest checkpoint into a folder that rank 0 does not write."""
    assert config.save.remote is not None
    store = RunStore(config.save.remote, folder.name, ATTEMPTS)
    with _asking(store):
        there = store.listed()
        if CONFIG in there:
            folder.mkdir(parents=True, exist_ok=True)
            _fetch_record(store, there, folder)
            for newest in _newer(there, find_newest(folder / CHECKPOINTS))[:1]:
                _fetch(store, newest, folder)


def _has_files(folder: Path) -> bool:
    """True if a run's folder has anything but its lock."""
    return folder.exists() and any(path.name != ".lock" for path in folder.iterdir())


def _newer(there: Mapping[str, int], newest: Path | None) -> list[StoredCheckpoint]:
    """Return the store's full checkpoints that are newer than this machine's, the newest first."""
    full = [one for one in checkpoints_in(there)[0] if one.kind == FULL]
    return [one for one in full if newest is None or one.number > number_of(newest)]


def _fetched(
    store: RunStore, there: Mapping[str, int], folder: Path, config: RunConfig
) -> tuple[bool, dict[str, Any] | None]:
    was_empty, newest, damaged = not _has_files(folder), None, None
    try:
        newest = find_newest(folder / CHECKPOINTS)
    except ConfigError as error:  # every one is damaged: the store may have a whole one
        damaged = error
    _check_is_same_run(store, there, folder)
    newer = _newer(there, newest)
    if not any(name in there for name in (CONFIG, STARTS)) or ((folder / CONFIG).is_file() and not newer):
        if damaged is not None:
            raise damaged
        return False, check_begun(_as_begun(config), folder)
    try:
        _fetch_record(store, there, folder)
        if config.eval.when == "after":
            for one in checkpoints_in(there)[0]:
                if one.kind == WEIGHTS and not (folder / CHECKPOINTS / one.name).exists():
                    _fetch(store, one, folder)
        if (result := check_begun(_as_begun(config), folder)) is not None:
            return True, result
        if not any(_fetch(store, one, folder) for one in newer) and newest is None and (newer or damaged):
            text = f"save.remote: every one of the {len(newer)} full checkpoints in {store.address} is damaged"
            again = ConfigError([f"{text}. Bring back a copy, or take another run_name to begin anew."])
            raise damaged or again
    except BaseException:
        for path in folder.iterdir() if was_empty else ():
            remove(path)
        raise
    return True, None


def _check_is_same_run(store: RunStore, there: Mapping[str, int], folder: Path) -> None:
    """Compare the ids of two runs of one name. Raises ConfigError: they are two."""
    here = run_id_of(folder)
    if here is None or STARTS not in there:
        return
    aside = folder / ".from-store.tmp"
    try:
        store.get(STARTS, aside / STARTS)
        other = run_id_of(aside)
    finally:
        remove(aside)
    if other not in (None, here):
        given = f"{folder} is the run {here}, {store.address} has another one of this name, {other}"
        raise ConfigError([f"save.remote: {given}. Take another run_name, or another save.remote."])


def _fetch_record(store: RunStore, there: Mapping[str, int], folder: Path) -> None:
    """Download all files but checkpoints. Those of this machine that are others are kept in the folder `replaced`.

    Raises:
        ConfigError: one is not as it was put; nothing has been changed then.
    """
    aside = folder / ".record.tmp"
    names = [name for name in there if _is_of_record(name)]
    log.info(f"save.remote: {store.address} is newer than {folder}: {len(names)} files of its record are fetched.")
    remove(aside)
    try:
        for name in names:
            store.get(name, aside / name)
            digest = store.digest_of(name)
            if digest is not None and digest_of(aside / name) != digest:
                given = f"{store.address}/{name} is damaged: its bytes are not those that were put"
                ways = "Bring back a copy, or remove it: what it said is then lost"
                raise ConfigError([f"save.remote: {given}. {ways}."])
        replace_record(folder, aside, names)
    finally:
        remove(aside)


def _is_of_record(name: str) -> bool:
    """True for the name of a record's file; whoever may write into the store cannot lead it out of the folder."""
    parts = name.split("/")
    return not name.startswith(CHECKPOINTS) and all(parts) and not any(part.startswith(".") for part in parts)


def _fetch(store: RunStore, one: StoredCheckpoint, folder: Path) -> bool:
    """Download a checkpoint; one that is damaged is set aside in the store, with a line. Returns whether it is here."""
    log.info(f"save.remote: {one.name} ({one.gib:.3g} GiB) is fetched from {store.address}.")
    wrong = store.fetch_checkpoint(one, folder / CHECKPOINTS)
    if wrong is not None:
        store.set_aside(one)
        log.info(f"save.remote: {store.address}/{CHECKPOINTS}{one.name} is damaged ({wrong}); set aside there.")
    return wrong is None
