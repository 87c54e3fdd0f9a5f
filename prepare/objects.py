"""Objects in a store that a source is made of: listed, and fetched to a file while a part is made.

With the clients and the patience of stages/: an object is waited for while its store is away. Stores: S3 alone, whose
listing says an object's size and entity tag, by which a plan knows it again.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from cli.errors import Failed
from prepare.parts import GO_ON
from stages.fetch import PATIENCE_SEC, StreamFailure, fetch
from stages.store_errors import address_problem, explain_store_error, scheme_of
from stages.stores import READ_TIMEOUT_SEC, BriefS3Downloader

MISSING = {"404", "NoSuchKey"}
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES}


@dataclass(frozen=True)
class StoreObject:
    """One object of a listing."""

    address: str
    num_bytes: int
    tag: str
    """Its entity tag: another one, another content."""

    @property
    def name(self) -> str:
        return PurePosixPath(self.address).name

    def known_by(self) -> dict[str, Any]:
        """Return what identifies it in a plan."""
        return {"name": self.name, "bytes": self.num_bytes, "digest": self.tag}


def list_objects(address: str) -> list[StoreObject]:
    """Return what lies at an address: that object, or all under it as a folder. Raises ValueError: it cannot be listed."""
    if text := address_problem(address):
        raise ValueError(f"SOURCE: {text}")
    if scheme_of(address) != "s3":
        raise ValueError(f"SOURCE: {address} is in no store that is read here. Possible: a folder, a file, s3://.")
    bucket, _, key = address.removeprefix("s3://").partition("/")
    client, key = BriefS3Downloader(attempts=3), key.rstrip("/")
    try:
        listed = client.list_objects(f"s3://{bucket}/{key}/" if key else f"s3://{bucket}/", READ_TIMEOUT_SEC)
        listed = listed or [one for one in client.list_objects(address, READ_TIMEOUT_SEC) if one[0] == key]
    except Exception as error:  # each client has exceptions of its own
        raise ValueError(f"SOURCE: {explain_store_error(error, address)}") from error
    found = [StoreObject(f"s3://{bucket}/{name}", *more) for name, *more in listed if not name.endswith("/")]
    if not found:
        raise ValueError(f"SOURCE: {address}: nothing lies there; bucket '{bucket}' is there. Check the address.")
    return found


class Objects:
    """A client of this process; make one for each part, since a client is not shared between processes."""

    def __init__(self) -> None:
        self._client = BriefS3Downloader()

    def fetch(self, address: str, folder: Path) -> Path:
        """Return the file in `folder` with an object's content. Raises FileNotFoundError; Failed: the store is away."""
        file = folder / PurePosixPath(address).name
        file.unlink(missing_ok=True)  # the client would accept it as the wanted one
        self._patiently(lambda timeout: self._client.download(address, str(file), timeout), address, file)
        return file

    def read(self, address: str, most: int) -> bytes:
        """Return an object's first bytes; raises as `fetch` does."""
        found: list[bytes] = []
        self._patiently(lambda timeout: found.append(self._client.read(address, most, timeout)), address, Path())
        return found[0]

    def _patiently(self, ask: Callable[[float], Any], address: str, file: Path) -> None:
        if text := address_problem(address):
            raise Failed(f"SOURCE: {text}")
        ended: list[Exception] = []

        def once(timeout: float) -> None:
            """Ask; what no other try would mend ends it."""
            try:
                ask(timeout)
            except Exception as error:
                if not (_is_missing(error) or (isinstance(error, OSError) and error.errno in DISK_ERRORS)):
                    raise
                ended.append(error)

        patience = {"patience_sec": PATIENCE_SEC, "is_wanted": lambda: True, "limit": None}
        try:
            fetch(once, self._client.clean_up, address, file, **patience)
        except StreamFailure as error:
            raise Failed(f"SOURCE: {str(error).removeprefix('data: ')} {GO_ON}.") from error
        for error in ended:
            if _is_missing(error):
                raise FileNotFoundError(errno.ENOENT, "no such object", address) from error
            raise Failed(f"SOURCE: {address} cannot be fetched to {file.parent}: {error}. {GO_ON}.") from error


def _is_missing(error: Exception) -> bool:
    answer = getattr(error, "response", None)
    return isinstance(answer, dict) and str(answer.get("Error", {}).get("Code")) in MISSING
