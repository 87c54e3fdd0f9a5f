"""A checkpoint on disk: whole or not there, found by its digest, read without running any code.

    full-ba000000001200-DIGEST.pt        what a run needs to resume
    weights-im000000512000-DIGEST.pt     a snapshot of the weights
    full-ba000000001200-DIGEST.parts/    the same of a run whose weights are shared out (checkpointing/sharded.py)
    part-OF-000000000003-DIGEST.pt       what rank 3 has of an evaluation that is not whole yet (evaluation/metrics.py)

A file is written under another name, synced, and renamed to one that holds the digest of its bytes: a file whose digest is
not in its name is damaged, whatever ended its writer. No link points at "the latest". Reading is torch's `weights_only`:
tensors and plain containers, nothing else. A single file has no checksums of its zip records, so only torch can unzip it.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
import xxhash

from checkpointing import sharded
from common.errors import ConfigError
from common.files import atomic_path, sync_to_disk
from common.log import log
from weights.files import check_zip_records

SCHEMA = 1
FULL, WEIGHTS, PART = "full-ba", "weights-im", "part-"
NAME = re.compile(
    rf"(?P<kind>{FULL}|{WEIGHTS}|{PART}[0-9a-f]{{16}}-)(?P<number>\d{{12}})-(?P<digest>[0-9a-f]{{32}})\.(pt|parts)"
)


def file_stem(kind: str, number: int) -> str:
    """Return the beginning of a checkpoint's name: its kind, and its batch or images."""
    return f"{kind}{number:012d}"


class DigestingFile:
    """A file for `torch.save` that takes the digest of what goes through it."""

    def __init__(self, file: IO[bytes]):
        self.file = file
        self.digest = xxhash.xxh3_128()
        self.num_bytes = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = self.file.write(data)
        except OSError as error:  # torch reports it as a RuntimeError without the reason
            self.error = error
            raise
        self.digest.update(data)
        self.num_bytes += written
        return written

    def flush(self) -> None:
        self.file.flush()


def write_checkpoint(folder: Path, name: str, content: Mapping[str, Any]) -> Path:
    """Write a checkpoint; it has its name only when all of it lies on the disk.

    Args:
        name: from `file_stem`.

    Raises:
        OSError: it could not be written; nothing is left of it.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def path() -> Path:
        return folder / f"{name}-{digesting.digest.hexdigest()}.pt"

    with atomic_path(folder / name, path) as temporary, open(temporary, "wb") as file:
        digesting, had_checksums = DigestingFile(file), torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # they take longer than the digest, which sees more
        try:
            torch.save(dict(content), digesting)
        except RuntimeError as error:
            raise (digesting.error or error) from error
        finally:
            torch.serialization.set_crc32_options(had_checksums)
    sync_to_disk(folder)
    sharded.remove_others(path(), name)
    return path()


def list_checkpoints(folder: Path, kind: str) -> list[Path]:
    """Return the checkpoints of a kind (full-ba or weights-im), the newest first, by name alone."""
    matches = [match for path in folder.glob(f"{kind}*") if (match := NAME.fullmatch(path.name))]
    return [folder / m.string for m in sorted(matches, key=lambda m: int(m["number"]), reverse=True)]


def number_of(path: Path) -> int:
    """Return the batch or images in a checkpoint's name."""
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match["number"])


def is_whole(path: Path) -> bool:
    """True when the file's bytes have the digest that its name says."""
    return find_damage(path) is None


def find_damage(path: Path) -> str | None:
    """Say what is wrong with a checkpoint's bytes, or None: they have the digests that were taken when it was written."""
    if path.is_dir():
        return sharded.find_damage(path)
    is_as_named = sharded.digest_file(path) == path.stem.rpartition("-")[2]
    return None if is_as_named else "its bytes do not have the digest in its name"


def find_newest(folder: Path) -> Path | None:
    """Return the newest whole full checkpoint, or None if there is none. Only for the run's own process.

    What a killed writer left is removed. A damaged checkpoint is set aside as NAME.damaged, which is logged.

    Raises:
        ConfigError: there are checkpoints and not one is whole.
    """
    for temporary in folder.glob(".*.tmp"):
        sharded.remove_checkpoint(temporary)
    for path in list_checkpoints(folder, FULL):
        if (wrong := find_damage(path)) is None:
            return path
        aside = path.with_name(path.name + ".damaged")
        sharded.remove_checkpoint(aside)  # of an earlier start, before a copy was restored
        path.rename(aside)
        log.info(f"checkpoints: {path} is damaged ({wrong}); set aside.")
    if damaged := sorted(path.name for path in folder.glob(f"{FULL}*.damaged")):
        problem = (
            f"every one of the {len(damaged)} full checkpoints in {folder} is damaged, the newest is {damaged[-1]}"
        )
        raise ConfigError([f"checkpoints: {problem}. Restore a copy, or use another run_name to start over."])
    return None


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint's content; tensors lie on the CPU, mapped from the file. Of a folder, weights and EMA weights alone.

    Raises:
        ConfigError: it holds anything but tensors and plain containers, or is no checkpoint of this version.
    """
    content = read_outline(path)
    return sharded.fill_outline(path, content, ("model", "ema")) if path.is_dir() else content


def read_outline(path: Path) -> dict[str, Any]:
    """Read a checkpoint as `read_checkpoint` does, but of a folder only names and shapes of tensors in parts (on meta)."""
    file = path / sharded.RUN if path.is_dir() else path
    try:
        with zipfile.ZipFile(file) as archive:
            check_zip_records(file, archive)  # torch reads the small ones as long as they claim to be
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        global_name = re.search(r"GLOBAL ([\w.]+)", str(error))
        value = global_name.group(1) if global_name else str(error).splitlines()[0]
        text = f"{path}: holds more than tensors and plain values ({value}). No code from a file runs here. Remove it."
        raise ConfigError([text]) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0].removeprefix(f"{file}: ").rstrip(".")
        text = f"{path}: cannot be read as a checkpoint: {reason}. Remove it, or restore a copy."
        raise ConfigError([text]) from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        value = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise ConfigError([f"{path}: has schema {value}; this version reads {SCHEMA}. Use the version that wrote it."])
    return content
