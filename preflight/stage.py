"""Checks of a stage before a run: is it reachable, are its shards intact, is there disk space for them. Nothing is changed.

Files fetched from a store for a check go to a temporary folder, which is removed.
"""

from __future__ import annotations

import contextlib
import os
import random
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming.base.util import bytes_to_int

from data import DataConfig
from preflight.machine import ERROR, OK, WARNING, Finding, free_gib
from stages.dataset import Stage, is_remote
from stages.fetch import file_digest, known_digest
from stages.index_file import INDEX, stored_file
from stages.mixture import StreamConfig
from stages.shard_table import ShardTable
from stages.store_errors import explain_store_error
from stages.stores import download_once

FIRST_SHARDS, RANDOM_SHARDS = 2, 2  # the ones that a run reads first, and some at random
MAX_DIGEST_BYTES = 1 << 30
NO_MORE_AFTER_SEC = 30.0
SILENCE_SEC = 10.0  # longest silence of a store when a shard is fetched
SPARE_FILES = 1000  # files of a run besides its shards
NOTHING, NO_FILE = -1, -2  # in place of a file's size


def _file(location: str, name: str, folder: Path) -> Path:
    """Return a file of a stage; from a store, fetch a copy into `folder` in one try. Raises ValueError: not possible."""
    if not is_remote(location):
        return Path(location, name)
    copy, remote = folder / Path(name).name, f"{location.rstrip('/')}/{name}"
    try:
        download_once(remote, str(copy), SILENCE_SEC)
    except Exception as error:  # each store's client has exceptions of its own
        raise ValueError(explain_store_error(error, remote)) from error
    return copy


def described(stage: Stage) -> str:
    """Describe a stage in one line."""
    size = int(stage.shards.raw_bytes.sum())
    readable = f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
    return f"{stage.location}: {stage.kind}, {stage.num_samples:,} samples in {len(stage.shards):,} shards, {readable}"


def chosen(shards: ShardTable, numbers: Sequence[int]) -> list[int]:
    """Return the first of some shards and some random ones, up to MAX_DIGEST_BYTES in all; always the first one."""
    others = numbers[FIRST_SHARDS:]
    some, size = [], 0
    for number in [*numbers[:FIRST_SHARDS], *random.sample(others, min(RANDOM_SHARDS, len(others)))]:
        if not some or size + shards.raw_bytes[number] <= MAX_DIGEST_BYTES:
            some.append(number)
            size += int(shards.raw_bytes[number])
    return some


def digests(stage: Stage) -> list[Finding]:
    """Read some shards of the stage itself, and compare their digests with the index."""
    begun, checked, found, shards = time.monotonic(), 0, [], stage.shards
    for file in (stored_file(shards[number]) for number in chosen(shards, range(len(shards)))):
        if time.monotonic() - begun > NO_MORE_AFTER_SEC:
            break
        with tempfile.TemporaryDirectory() as folder:
            try:
                text = _damage(_file(stage.location, file["basename"], Path(folder)), file)
            except (ValueError, OSError) as error:
                return [*found, Finding(ERROR, "digests", str(error))]
        if text:
            damaged = f"{stage.location.rstrip('/')}/{file['basename']} is damaged: {text}"
            found.append(Finding(ERROR, "digests", f"{damaged}. Make that stage again, or copy it anew."))
        checked += 1
    if found:
        return found
    given = f"{checked} of {len(shards):,} shards of the stage have their {_what(stored_file(shards[0]))}"
    return [Finding(OK, "digests", given)]


def _what(file: Mapping[str, Any]) -> str:
    digest = known_digest(file["hashes"])
    return digest[0] if digest else "size, and no digest in index.json"


def _damage(path: Path, file: Mapping[str, Any]) -> str | None:
    """Say how a file differs from its entry in the index, or None. Raises OSError."""
    size, digest = path.stat().st_size, known_digest(file["hashes"])
    if size != file["bytes"]:
        return f"{size:,} bytes, index.json says {file['bytes']:,}"
    if digest is None or (found := file_digest(path, digest[0])) == digest[1]:
        return None
    return f"{digest[0]} {found}, index.json says {digest[1]}"


def cache(config: StreamConfig, shards: ShardTable) -> list[Finding]:
    """Check the shards that are already in `data.local`: all sizes, and some digests.

    A run checks each shard again when it opens it, and fetches damaged ones again. So damage is only a warning here: of a
    bad disk, or of another program that writes there.
    """
    if config.remote is None or config.local is None:
        return [Finding(OK, "cache", "none: the stage is read in place")]
    local, sizes = Path(config.local), sizes_in(config.local, shards)
    if text := _in_the_way(local, shards, sizes):
        return [Finding(ERROR, "cache", f"data.local: {text}")]
    cut = np.flatnonzero((sizes >= 0) & (sizes != shards.raw_bytes)).tolist()
    checked = chosen(shards, np.flatnonzero(sizes == shards.raw_bytes).tolist())
    looked_at = ((shards.names[number], shards[number]["raw_data"]) for number in [*cut, *checked])
    damaged = {name: text for name, file in looked_at if (text := _damage(local / name, file))}
    if damaged:
        name, text = next(iter(damaged.items()))
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        text = f"data.local: {local / name}{more} is damaged: {text}. A run fetches it again; look at that disk."
        return [Finding(WARNING, "cache", text)]
    if not (num_there := int((sizes >= 0).sum())):
        return [Finding(OK, "cache", f"{local} holds no shard yet")]
    given = (
        f"{local} holds {num_there:,} of {len(shards):,} shards, all of their size; {len(checked)} have their "
        f"{_what(shards[0]['raw_data'])}"
    )
    return [Finding(OK, "cache", given)]


def sizes_in(local: str, shards: ShardTable) -> NDArray[np.int64]:
    """(N,) bytes of each shard's file in a folder; NOTHING, or NO_FILE where something else has its name."""
    found = np.full(len(shards), NOTHING)
    for number, name in enumerate(shards.names):
        with contextlib.suppress(OSError):  # a broken link will be replaced by the file
            there = os.stat(f"{local}/{name}")  # noqa: PTH116  # a Path takes twice as long as the call
            found[number] = there.st_size if stat.S_ISREG(there.st_mode) else NO_FILE
    return found


def _in_the_way(local: Path, shards: ShardTable, sizes: NDArray[np.int64]) -> str | None:
    """Say what blocks a folder or file that a run will create in `local`, or None. `local` itself is not checked."""
    folders = {parent for name in shards.folders() for parent in (Path(name), *Path(name).parents) if parent.name}
    for folder in sorted(folders):
        if os.path.lexists(local / folder) and not (local / folder).is_dir():
            return f"{local / folder} is not a folder, but the stage has one of that name. Remove it."
    index = [INDEX] if (local / INDEX).exists() and not (local / INDEX).is_file() else []
    for name in [*index, *map(shards.names.__getitem__, np.flatnonzero(sizes == NO_FILE).tolist())]:
        return f"{local / name} is not a file, but the stage has one of that name. Remove it."
    return None


# --- room ---


@dataclass(frozen=True)
class Need:
    """Data that a run will write to a folder, with its name and a way to need less space."""

    what: str
    way_out: str
    folder: Path
    gib: float
    files: int = 0


def need_of_cache(config: DataConfig, opened: Sequence[tuple[StreamConfig, Stage]]) -> list[Need]:
    """Return the expected growth of each `data.local`: the whole stage, minus what is already there; in all, the limit."""
    needs, room = [], float("inf") if config.cache_limit is None else bytes_to_int(config.cache_limit)
    for source, stage in opened:
        if source.remote is None or source.local is None:
            continue
        sizes, size = sizes_in(source.local, stage.shards), int(stage.shards.raw_bytes.sum())
        held = sizes[sizes >= 0]
        to_come = max(0, min(size, room) - int(held.sum())) / 2**30
        room = max(0, room - size)
        way_out = "Give data.cache_limit, or another data.local"
        needs.append(Need("shards in data.local", way_out, Path(source.local), to_come, len(sizes) - len(held)))
    return needs


def disk(needs: Sequence[Need]) -> list[Finding]:
    """Compare what a run will write with the free space on each disk, in bytes and in files."""
    by_disk: dict[int, list[Need]] = {}
    for need in needs:
        by_disk.setdefault(_device_of(need.folder), []).append(need)
    found, fine = [], []
    for wanted in by_disk.values():
        free, files = free_gib(wanted[0].folder)
        gib, num_files = sum(need.gib for need in wanted), sum(need.files for need in wanted)
        named = ", ".join(f"{need.what} {need.gib:.3g} GiB" for need in wanted)
        ways = "; ".join(dict.fromkeys(need.way_out for need in wanted if need.gib > 0.0))
        if gib > free:
            text = f"{wanted[0].folder} is on a disk with {free:.3g} GiB free, needed are {gib:.3g}: {named}. {ways}."
            found.append(Finding(ERROR, "disk", text))
        elif gib > 0.9 * free:
            text = f"{wanted[0].folder} is on a disk with {free:.3g} GiB free, needed are {gib:.3g}: {named}. Little is left."
            found.append(Finding(WARNING, "disk", text))
        if files is not None and num_files + SPARE_FILES > files:
            text = f"{wanted[0].folder} is on a disk that takes {files:,} more files, {num_files:,} shards will come. {ways}."
            found.append(Finding(ERROR, "disk", text))
        fine.append(f"{named} of {free:.3g} free")
    return found or [Finding(OK, "disk", "; ".join(fine) or "nothing large will be written")]


def _device_of(folder: Path) -> int:
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    return there.stat().st_dev
