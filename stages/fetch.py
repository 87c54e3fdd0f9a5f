"""Files of a stage on this machine: waited for while their store is away, and compared with their digests.

A `RetryingStream` is streaming's Stream with three differences, each for what streaming 0.13 does with a store that fails:

    a store that goes away    waited for, with a line each half minute, up to a limit; then one error that says what was asked
                              for and what came (streaming gives up after its retries, and the epoch ends as if finished:
                              mosaicml/streaming issues 307 and 617)
    a shard's bytes           compared with index.json when this run first opens it, in the cache too; what is damaged is
                              fetched again (streaming looks at the presence of a cached file alone: issue 759)
    index.json                the same, before any process reads it

Raises StreamFailure with a text for the user; nothing else ends a wait.

Ours, not a library of retries: a wait is reported while it lasts, ends with its epoch, and its one error says why.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash
from streaming.base.format.base.reader import FileInfo
from streaming.base.stream import Stream

from cli.log import EVERY_RANK, log
from cli.private_api import require_private_api
from stages.store_errors import explain_store_error
from stages.stores import READ_TIMEOUT_SEC, client_of

HASH = "xxh64"  # of every shard
DIGESTS: dict[str, Callable[[], Any]] = {HASH: xxhash.xxh64, "sha256": hashlib.sha256}
INDEX = "index.json"
PATIENCE_SEC = 600.0
SAY_SEC = 30.0
# Waits between tries at what a store says is not there (all of them: half a minute), or gives with another digest (all but
# the last): a store that is starting, or an object that is being written anew, becomes right in the meantime.
SOON_SEC = (1.0, 2.0, 4.0, 8.0, 15.0)
LONGEST_WAIT_SEC = 10.0
DISK_ERRORS = {errno.EIO, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP}
DISK_ERRORS |= {errno.EACCES, errno.EPERM}
# What a store, or its client, will not say otherwise in a minute.
REFUSALS = {"301", "400", "403", "404", "AccessDenied", "AllAccessDisabled", "InvalidAccessKeyId", "NoSuchBucket"}
REFUSALS |= {"NoSuchKey", "SignatureDoesNotMatch"}
HOPELESS = {
    "AuthenticationException",
    "BadHostKeyException",
    "FileNotFoundError",
    "IsADirectoryError",
    "NoCredentialsError",
}
HOPELESS |= {"PartialCredentialsError", "PermissionError", "ProfileNotFound", "SSLError"}
LEFT_OVER = re.compile(r"(.+\.mds|index\.json)(\.(tmp|[0-9A-Fa-f]{8}))+")  # of a killed fetch: streaming's, boto3's


class StreamFailure(RuntimeError):
    """Data cannot be had; the text says which, from where, why, and what to do."""


class FetchCancelled(StreamFailure):
    """A wait that was given up because nobody waits for its end any more: no failure of the store's."""


def file_digest(path: Path, kind: str = HASH) -> str:
    """Return the digest of a file's bytes, `kind` one of DIGESTS, in hexadecimal digits. Raises OSError.

    Through a small buffer: new memory for a whole shard, 64 MiB, takes six times as long as hashing it (bench.store).
    """
    digest, buffer = DIGESTS[kind](), memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


OF_STREAM = ("_downloader", "_download_file", "_prepare_shard_part", "set_up_local", "get_shards")
require_private_api(Stream, *OF_STREAM, why="files are waited for, and compared with their digests")


@contextlib.contextmanager
def saying(what: Callable[[], str]) -> Iterator[None]:
    """Print a line each half minute while the block takes."""
    done, began = threading.Event(), time.monotonic()

    def say() -> None:
        while not done.wait(SAY_SEC):
            log.info(f"data: {time.monotonic() - began:.0f} s: {what()}", extra=EVERY_RANK)

    threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def fetch(
    download: Callable[[float], None],
    clean_up: Callable[[], None],
    remote: str,
    local: Path,
    *,
    patience_sec: float,
    is_wanted: Callable[[], bool],
    limit: str | None = "data.patience_sec",
) -> None:
    """Download a file, waiting for a store that is away.

    Args:
        download: tries once, given the longest silence of the store, seconds.
        clean_up: lets go of the connection after a failure.
        remote, local: of the file, for messages.
        patience_sec: longest wait for a store that does not answer, from its first failure on.
        is_wanted: False as soon as nobody waits for the file any more.
        limit: key that gives `patience_sec`, for a message; None: there is none.

    Raises:
        StreamFailure: the store has been away for too long, does not have the file, or the disk does not take it.
        FetchCancelled: it failed, and `is_wanted` says no.
    """
    first_failure, refusals, wait_sec, reason, waited_sec = None, 0, 0.5, "no answer yet", 0.0
    with saying(lambda: f"waiting for {remote} ({reason}), for {patience_sec:.0f} s at most"):
        while True:
            try:
                download(min(READ_TIMEOUT_SEC, max(1.0, patience_sec - waited_sec)))
                return
            except Exception as error:  # each store's client has exceptions of its own
                clean_up()
                _refuse_own_disk(error, local)
                reason = explain_store_error(error, remote)
                first_failure = time.monotonic() if first_failure is None else first_failure
                waited_sec = time.monotonic() - first_failure
                if is_passing(error):
                    wait_sec = min(2 * wait_sec, LONGEST_WAIT_SEC)
                elif refusals < len(SOON_SEC):
                    wait_sec, refusals = SOON_SEC[refusals], refusals + 1
                else:
                    raise StreamFailure(f"data: {reason}") from error
                if not is_wanted():
                    raise FetchCancelled(f"data: {reason}") from error
                if waited_sec >= patience_sec:
                    waited = f"waited for {waited_sec:.0f} s" + (f" ({limit}={patience_sec:g})" if limit else "")
                    raise StreamFailure(f"data: {reason} {waited}.") from error
                wait_sec = min(wait_sec, patience_sec - waited_sec)
            until = time.monotonic() + wait_sec
            while time.monotonic() < until and is_wanted():
                time.sleep(0.1)


def is_passing(error: Exception) -> bool:
    """True for what the absence of a store brings: no connection, no answer, "too busy"; the unknown counts as such."""
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):
        return str(answer.get("Error", {}).get("Code")) not in REFUSALS
    return type(error).__name__ not in HOPELESS


def _refuse_own_disk(error: BaseException | None, local: Path) -> None:
    """Stop for what this machine's disk says: no store would mend that. Errors of a connection name no file."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            name = "" if error.filename is None else str(error.filename)
            is_own = bool(name) and (name.startswith(str(local)) or str(local).startswith(name))
            if is_own or (not name and error.errno in (errno.EIO, errno.EROFS)):
                text = f"data.local: {name or local}: {error.strerror}, while {local.name} was fetched"
                raise StreamFailure(f"{text}. Mend or remove what is there, or give another folder.") from error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(local.parent).free
            text = (
                f"data.local: the disk of {local.parent} is full ({free:,} bytes free), while {local.name} was written"
            )
            raise StreamFailure(f"{text}. Make room, or give data.cache_limit.") from error
        error = error.__cause__ or error.__context__


class RetryingStream(Stream):
    """A stage that is read from `remote` through the folder `local`, or in place where remote is None.

    Args:
        patience_sec: how long a store that is away is waited for.
        index_sha256: of index.json, as dataset.json has it; None: not compared.
    """

    def __init__(self, *, remote: str | None, local: str, patience_sec: float, index_sha256: str | None):
        super().__init__(
            remote=None if remote is None else remote.rstrip("/"),
            local=local,
            download_retry=1,
            download_timeout=READ_TIMEOUT_SEC,
            validate_hash=HASH,
            keep_zip=False,
        )
        self.patience_sec = patience_sec
        self.index_sha256 = index_sha256
        self.is_wanted: Callable[[], bool] = lambda: True
        if remote is not None:
            self._downloader = client_of(remote)

    # --- index.json ---

    def fetch_index(self) -> None:
        """See that the folder has the stage's index.json; for one process of a machine, before the others read it."""
        if self.remote is not None:
            Path(self.local).mkdir(parents=True, exist_ok=True)
            Path(self.local, f"{INDEX}.tmp").unlink(missing_ok=True)
            self._fetch_compared(INDEX, "sha256", self.index_sha256)

    def remove_left_overs(self) -> None:
        """Remove what killed fetches left; for one process of a machine, once the folder is known to be its own."""
        if self.remote is not None:
            for path in Path(self.local).rglob("*"):
                if LEFT_OVER.fullmatch(path.name) and path.is_file():
                    path.unlink()

    # --- shards ---

    def set_up_local(self, shards: Any, cache_usage_per_shard: Any) -> None:
        """Report no shard as present: each goes through `prepare_shard`, and so through its digest, once in this run."""
        cache_usage_per_shard[:] = 0

    def _prepare_shard_part(
        self, raw_info: FileInfo, zip_info: FileInfo | None = None, compression: str | None = None
    ) -> int:
        assert zip_info is None, "read_stage refuses compressed shards"
        assert raw_info.hashes.get(HASH), "read_stage refuses shards without a digest"
        self._fetch_compared(raw_info.basename, HASH, raw_info.hashes[HASH])
        return raw_info.bytes

    # --- both ---

    def _fetch_compared(self, name: str, kind: str, wanted: str | None) -> None:
        """See that the folder has a file with this digest; fetch it where it is missing or another.

        Raises:
            StreamFailure: the store has it with another digest, does not have it, or is away for too long.
        """
        path = Path(self.local, name)
        if path.exists() and not path.is_file():
            raise StreamFailure(f"data: {path} is not a file, but the stage has one of that name. Remove it.")
        for tries in range(len(SOON_SEC) + 1):
            if not path.is_file():
                self._download_file(name)
            found = file_digest(path, kind)
            if wanted in (None, found):
                return
            damaged = f"{path} is damaged: its {kind} is {found}, that of the stage is {wanted}"
            if self.remote is None:
                raise StreamFailure(f"data: {damaged}. Make the stage again, or copy it anew.")
            path.unlink()
            if tries < len(SOON_SEC):
                log.warning(f"data: {damaged}; it is fetched again from {self.remote}.", extra=EVERY_RANK)
                if tries:  # the first was perhaps the cache's
                    time.sleep(SOON_SEC[tries - 1])
            if not self.is_wanted():
                raise FetchCancelled(f"data: {damaged}")
        source = f"{self.remote}/{name}"
        raise StreamFailure(
            f"data: {source} is damaged: its {kind} is {found}, that of the stage is {wanted}, in {tries + 1} tries. Make "
            f"the stage again, or copy it anew."
        )

    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        local = Path(self.local, to_basename or from_basename)
        remote = f"{self.remote}/{from_basename}"
        fetch(
            lambda timeout: self._downloader.download(remote, str(local), timeout),
            self._downloader.clean_up,
            remote,
            local,
            patience_sec=self.patience_sec,
            is_wanted=self.is_wanted,
        )
        return str(local)
