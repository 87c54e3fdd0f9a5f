"""A run's folder in an object store: s3://BUCKET/PREFIX/RUN_NAME/, with the names that its files have on a disk.

    config.yaml metrics.jsonl mlperf.log ...                  the record; each object has the digest of its bytes (xxh3)
    checkpoints/full-ba000000001200-DIGEST.pt                 the digest is in the name
                full-ba000000001200-DIGEST.parts/files.json   put last: without it, no checkpoint

A store takes an object whole or not at all, also one that is sent in several parts. Nobody but the run's own process writes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from checkpointing.files import FULL, NAME, WEIGHTS, find_damage, number_of
from checkpointing.sharded import FILES, SUFFIX, digest_file, remove_checkpoint
from common.files import read_regular
from mds.stores import READ_TIMEOUT_SEC, s3_client

CHECKPOINTS = "checkpoints/"
DIGEST = "xxh3-128"  # of the metadata of an object
MIB = 1 << 20
PART_BYTES = 16 * MIB  # of an upload; of an object of more than 160 GiB boto3 takes larger ones
NUM_THREADS = 2  # of an upload: the step needs the other cores
DAMAGED = ".damaged"


@dataclass(frozen=True)
class StoredCheckpoint:
    """One that is whole in a store, as far as its names tell."""

    name: str
    """As on a disk: full-ba000000001200-DIGEST.pt, or .parts."""
    files: Mapping[str, int]
    """Name in the run's folder -> bytes."""

    @property
    def kind(self) -> str:
        return FULL if self.name.startswith(FULL) else WEIGHTS

    @property
    def number(self) -> int:
        return number_of(Path(self.name))

    @property
    def gib(self) -> float:
        return sum(self.files.values()) / 2**30


class RunStore:
    """A run's folder in a store. Each of its methods raises what boto3 raises, unless it says otherwise.

    Args:
        remote: s3://BUCKET/PREFIX, the parent of all runs.
        attempts: of each request, for a caller that does not try again by itself.
    """

    def __init__(self, remote: str, run_name: str, attempts: int = 1):
        self.address = f"{remote.rstrip('/')}/{run_name}"
        url = urlsplit(self.address)
        self.bucket, self._prefix = url.netloc, f"{url.path.strip('/')}/"
        self._attempts = attempts

    @functools.cached_property
    def client(self) -> Any:
        """The client, made when it is first needed: that takes a third of a second."""
        return s3_client(READ_TIMEOUT_SEC, self._attempts)

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": f"{self._prefix}{name}"}

    # --- listing ---

    def listed(self) -> dict[str, int]:
        """Return name -> bytes of all objects of the run."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self._prefix)
        return {one["Key"][len(self._prefix) :]: one["Size"] for page in pages for one in page.get("Contents", [])}

    def digest_of(self, name: str) -> str | None:
        """Return the digest that an object was put with, or None: it is not there, or has none."""
        from botocore.exceptions import ClientError

        try:
            return self.client.head_object(**self._at(name))["Metadata"].get(DIGEST)
        except ClientError as error:
            if error.response["Error"]["Code"] in ("404", "NoSuchKey"):
                return None
            raise

    # --- changes ---

    def put(self, path: Path, name: str, sent: Callable[[int], None] | None = None, *, has_digest: bool = True) -> None:
        """Put a file's bytes as an object, whole or not at all.

        Args:
            sent: called with the bytes of each piece that is sent.
            has_digest: take the digest of the bytes, and put it into the object's metadata.
        """
        from boto3.s3.transfer import TransferConfig

        how = TransferConfig(
            multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=NUM_THREADS
        )
        more = {"Metadata": {DIGEST: digest_file(path)}} if has_digest else {}
        at = self._at(name)
        self.client.upload_file(str(path), at["Bucket"], at["Key"], ExtraArgs=more, Config=how, Callback=sent)

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        self.client.delete_object(**self._at(name))

    def check_writable(self) -> None:
        """Put an object, and remove it."""
        self.client.put_object(**self._at(".is_writable"), Body=b"")
        self.remove(".is_writable")

    def remove_unfinished(self) -> None:
        """Remove what uploads of a killed process have sent of objects that they did not finish: a store charges for it."""
        from botocore.exceptions import ClientError

        with suppress(ClientError):  # not every store can list them
            pages = self.client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self.bucket, Prefix=self._prefix):
                for one in page.get("Uploads", []):
                    self.client.abort_multipart_upload(Bucket=self.bucket, Key=one["Key"], UploadId=one["UploadId"])

    # --- checkpoints ---

    def put_checkpoint(self, path: Path, sent: Callable[[int], None] | None = None) -> dict[str, int]:
        """Put a checkpoint's files, the one that makes a folder whole last; return name -> bytes.

        Raises:
            FileNotFoundError: it has been removed since.
        """
        files = files_of(path)
        for name, file in files.items():
            self.put(file, name, sent, has_digest=False)
        return {name: file.stat().st_size for name, file in files.items()}

    def remove_checkpoint(self, files: Mapping[str, int]) -> None:
        """Remove a checkpoint's objects, the one that makes a folder whole first."""
        for name in sorted(files, key=lambda name: not name.endswith(f"/{FILES}")):
            self.remove(name)

    def set_aside(self, checkpoint: StoredCheckpoint) -> None:
        """Give a damaged checkpoint's objects another name: NAME.damaged."""
        for name in checkpoint.files:
            aside = name.replace(checkpoint.name, f"{checkpoint.name}{DAMAGED}")
            self.client.copy(self._at(name), *self._at(aside).values())
        self.remove_checkpoint(checkpoint.files)

    def fetch_checkpoint(self, checkpoint: StoredCheckpoint, folder: Path) -> str | None:
        """Download a checkpoint into a folder of checkpoints; it is there if its bytes have the digest in its name.

        Returns:
            what is wrong with it, or None.

        Raises:
            OSError: the disk does not take it.
        """
        aside = folder / ".from-store.tmp"
        remove_checkpoint(aside)
        path = aside / checkpoint.name
        try:
            for name in checkpoint.files:
                self.get(name, aside / name.removeprefix(CHECKPOINTS))
            if (wrong := find_damage(path)) is None:
                remove_checkpoint(folder / checkpoint.name)
                path.rename(folder / checkpoint.name)
            return wrong
        finally:
            remove_checkpoint(aside)

    def get(self, name: str, path: Path) -> None:
        """Download an object, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.client.download_file(*self._at(name).values(), str(path))


def store_errors() -> tuple[type[Exception], ...]:
    """Return what boto3 and its parts raise; they are imported when they are needed."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    return Boto3Error, BotoCoreError, ClientError


def files_of(path: Path) -> dict[str, Path]:
    """Return name in the run's folder -> file of a checkpoint, the one that makes a folder whole last."""
    if not path.name.endswith(SUFFIX):
        return {f"{CHECKPOINTS}{path.name}": path}
    files = [*json.loads(read_regular(path / FILES)), FILES]
    return {f"{CHECKPOINTS}{path.name}/{name}": path / name for name in files}


def checkpoints_in(listed: Mapping[str, int]) -> tuple[list[StoredCheckpoint], list[StoredCheckpoint]]:
    """Return those that a listing has, the newest first, and those of which files are missing."""
    files: dict[str, dict[str, int]] = {}
    for name, num_bytes in listed.items():
        of = name.removeprefix(CHECKPOINTS).split("/")[0]
        if name.startswith(CHECKPOINTS) and NAME.fullmatch(of):
            files.setdefault(of, {})[name] = num_bytes
    checkpoints = sorted((StoredCheckpoint(*each) for each in files.items()), key=lambda one: one.number, reverse=True)
    whole = [
        one for one in checkpoints if not one.name.endswith(SUFFIX) or f"{CHECKPOINTS}{one.name}/{FILES}" in one.files
    ]
    return whole, [one for one in checkpoints if one not in whole]
