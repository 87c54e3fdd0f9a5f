"""Checks of a stage before a run: is it reachable, are its shards intact, is there disk space for them. Nothing is changed.

Files fetched from a store for a check go to a temporary folder, which is removed.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streaming.base.util import bytes_to_int

from data import DataConfig
from preflight.machine import ERROR, OK, WARNING, Finding, free_gib
from stages.dataset import Stage, is_remote
from stages.fetch import file_digest, known_digest
from stages.mixture import StreamConfig
from stages.store_errors import explain_store_error
from stages.stores import download_once

FIRST_SHARDS, RANDOM_SHARDS = 2, 2  # the ones that a run reads first, and some at random
MAX_DIGEST_BYTES = 1 << 30
NO_MORE_AFTER_SEC = 30.0
SILENCE_SEC = 10.0  # longest silence of a store when a shard is fetched
SPARE_FILES = 1000  # files of a run besides its shards


@dataclass(frozen=True)
class Shard:
    """A file as an index lists it; of a shard, the one that a run reads."""

    name: str
    num_bytes: int
    digest: tuple[str, str] | None
    """(kind, digest); None: the index has none."""
    stored: Shard | None = None
    """The file that a store has instead, compressed; None: the same."""

    @classmethod
    def of(cls, file: Mapping[str, Any], stored: Shard | None = None) -> Shard:
        return cls(file["basename"], file["bytes"], known_digest(file["hashes"]), stored)


def shards_of(stage: Stage) -> list[Shard]:
    """Return a stage's shards, from a folder or a store. Raises ValueError: the store did not return its index."""
    with tempfile.TemporaryDirectory() as folder:
        index = json.loads(_file(stage.location, "index.json", Path(folder)).read_bytes())
    packed = [None if shard["zip_data"] is None else Shard.of(shard["zip_data"]) for shard in index["shards"]]
    return [Shard.of(shard["raw_data"], of) for shard, of in zip(index["shards"], packed, strict=True)]


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


def described(stage: Stage, shards: Sequence[Shard]) -> str:
    """Describe a stage in one line."""
    size = sum(shard.num_bytes for shard in shards)
    readable = f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
    return f"{stage.location}: {stage.kind}, {stage.num_samples:,} samples in {len(shards):,} shards, {readable}"


def chosen(shards: Sequence[Shard]) -> list[Shard]:
    """Return the first shards and some random ones, up to MAX_DIGEST_BYTES in all; always the first one."""
    others = list(shards[FIRST_SHARDS:])
    some, size = [], 0
    for shard in [*shards[:FIRST_SHARDS], *random.sample(others, min(RANDOM_SHARDS, len(others)))]:
        if not some or size + shard.num_bytes <= MAX_DIGEST_BYTES:
            some.append(shard)
            size += shard.num_bytes
    return some


def digests(location: str, shards: Sequence[Shard]) -> list[Finding]:
    """Read some shards of the stage itself, and compare their digests with the index."""
    begun, checked, found = time.monotonic(), 0, []
    for shard in (shard.stored or shard for shard in chosen(shards)):
        if time.monotonic() - begun > NO_MORE_AFTER_SEC:
            break
        with tempfile.TemporaryDirectory() as folder:
            try:
                text = _damage(_file(location, shard.name, Path(folder)), shard)
            except (ValueError, OSError) as error:
                return [*found, Finding(ERROR, "digests", str(error))]
        if text:
            damaged = f"{location.rstrip('/')}/{shard.name} is damaged: {text}"
            found.append(Finding(ERROR, "digests", f"{damaged}. Make that stage again, or copy it anew."))
        checked += 1
    if found:
        return found
    given = f"{checked} of {len(shards):,} shards of the stage have their {_what(shards[0].stored or shards[0])}"
    return [Finding(OK, "digests", given)]


def _what(shard: Shard) -> str:
    return shard.digest[0] if shard.digest else "size, and no digest in index.json"


def _damage(file: Path, shard: Shard) -> str | None:
    """Say how a file differs from its entry in the index, or None. Raises OSError."""
    size = file.stat().st_size
    if size != shard.num_bytes:
        return f"{size:,} bytes, index.json says {shard.num_bytes:,}"
    if shard.digest is None or (found := file_digest(file, shard.digest[0])) == shard.digest[1]:
        return None
    return f"{shard.digest[0]} {found}, index.json says {shard.digest[1]}"


def cache(config: StreamConfig, shards: Sequence[Shard]) -> list[Finding]:
    """Check the shards that are already in `data.local`: all sizes, and some digests.

    A run checks each shard again when it opens it, and fetches damaged ones again. So damage is only a warning here: of a
    bad disk, or of another program that writes there.
    """
    if config.remote is None or config.local is None:
        return [Finding(OK, "cache", "none: the stage is read in place")]
    local = Path(config.local)
    if text := _in_the_way(local, shards):
        return [Finding(ERROR, "cache", f"data.local: {text}")]
    there = [shard for shard in shards if (local / shard.name).is_file()]
    cut = [shard for shard in there if (local / shard.name).stat().st_size != shard.num_bytes]
    checked = chosen([shard for shard in there if shard not in cut])
    damaged = {shard.name: text for shard in [*cut, *checked] if (text := _damage(local / shard.name, shard))}
    if damaged:
        name, text = next(iter(damaged.items()))
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        text = f"data.local: {local / name}{more} is damaged: {text}. A run fetches it again; look at that disk."
        return [Finding(WARNING, "cache", text)]
    if not there:
        return [Finding(OK, "cache", f"{local} holds no shard yet")]
    given = (
        f"{local} holds {len(there):,} of {len(shards):,} shards, all of their size; {len(checked)} have their "
        f"{_what(shards[0])}"
    )
    return [Finding(OK, "cache", given)]


def _in_the_way(local: Path, shards: Sequence[Shard]) -> str | None:
    """Say what blocks a folder or file that a run will create in `local`, or None. `local` itself is not checked."""
    names = [Path("index.json"), *(Path(shard.name) for shard in shards)]
    for folder in sorted({parent for name in names for parent in name.parents if parent.name}):
        if os.path.lexists(local / folder) and not (local / folder).is_dir():
            return f"{local / folder} is not a folder, but the stage has one of that name. Remove it."
    for name in names:  # a broken link will be replaced by the file
        if (local / name).exists() and not (local / name).is_file():
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


def need_of_cache(config: DataConfig, opened: Sequence[tuple[StreamConfig, Sequence[Shard]]]) -> list[Need]:
    """Return the expected growth of each `data.local`: the whole stage, minus what is already there; in all, the limit."""
    needs, room = [], float("inf") if config.cache_limit is None else bytes_to_int(config.cache_limit)
    for source, shards in opened:
        if source.remote is None or source.local is None:
            continue
        local, size = Path(source.local), sum(shard.num_bytes for shard in shards)
        held = [(local / shard.name).stat().st_size for shard in shards if (local / shard.name).is_file()]
        to_come = max(0, min(size, room) - sum(held)) / 2**30
        room = max(0, room - size)
        way_out = "Give data.cache_limit, or another data.local"
        needs.append(Need("shards in data.local", way_out, local, to_come, max(0, len(shards) - len(held))))
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
