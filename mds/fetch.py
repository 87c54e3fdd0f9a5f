"""Files of a dataset on this machine: waited for while their store is away, and compared with their digests.

What a `RetryingStream` does where streaming 0.13 leaves a run alone with its store:

    a store that goes away    waited for, with a line each half minute, up to a limit; then one error that says what was asked
                              for and what arrived (streaming gives up after its retries, and the epoch ends as if finished:
                              mosaicml/streaming issues 307 and 617)
    a shard's bytes           compared with index.json when this run first opens it, in the cache too; what is damaged is
                              fetched again (streaming looks at the presence of a cached file alone: issue 759)
    index.json                the same, before any process reads it

A third-party dataset (mds/adopted.py) may be compressed, and have hashes of another kind or none. What a store has is then
compared and decompressed in the same way. A file that has no digest in index.json is compared with its size alone.

Raises StreamFailure with a text for the user; nothing else ends a wait.

Ours, not a library of retries: a wait is reported while it lasts, ends with its epoch, and its one error says why.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from streaming.base.compression import decompress
from streaming.base.hashing import is_hash

from common.log import EVERY_RANK, log
from mds.shard_table import Shard, ShardTable
from mds.stores import READ_TIMEOUT_SEC, build_client, explain_store_error, is_retryable

if TYPE_CHECKING:
    from mds.adopted import AdoptedColumns

HASH = "xxh64"  # of every shard of our own
FASTEST_FIRST = (HASH, "xxh3_64", "xxh3_128", "xxh128", "xxh32", "md5", "sha1", "sha256")  # then by name
INDEX = "index.json"
PATIENCE_SEC = 600.0
LOG_INTERVAL_SEC = 30.0
# Waits between tries at what a store says is not there (all of them: half a minute), or gives with another digest (all but
# the last): a store that is starting, or an object that is being written again, becomes right in the meantime.
RETRY_WAITS_SEC = (1.0, 2.0, 4.0, 8.0, 15.0)
LONGEST_WAIT_SEC = 10.0
DISK_ERRORS = {errno.EIO, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP}
DISK_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT}  # of a copy from another folder the error names that one's file
DISK_ERRORS |= {errno.EACCES, errno.EPERM, *DISK_FULL_ERRORS}
# Of a killed fetch: streaming's, boto3's.
LEFTOVER_NAME = re.compile(r"(.+\.mds(\.(br|bz2|gz|snappy|zstd))?|index\.json)(\.(tmp|[0-9A-Fa-f]{8}))+")


class StreamFailure(RuntimeError):
    """Data is unavailable; the text says which, from where, why, and what to do."""


class FetchCancelled(StreamFailure):
    """A wait that was abandoned because no one needs the file any longer: no failure of the store."""


class DamagedFile(Exception):
    """A file that differs from the dataset's; the text says how. `name`: of the file, if it is not the one looked for."""

    name: str | None = None


def known_digest(hashes: Mapping[str, str]) -> tuple[str, str] | None:
    """Return (kind, digest) of the hash that is computed fastest, of those that streaming knows; None: there is none."""
    kinds = [kind for kind in (*FASTEST_FIRST, *sorted(hashes)) if kind in hashes and is_hash(kind)]
    return (kinds[0], hashes[kinds[0]]) if kinds else None


def file_digest(path: Path, kind: str = HASH) -> str:
    """Return the digest of a file's bytes, `kind` one that streaming knows, in hexadecimal digits. Raises OSError.

    Through a small buffer: new memory for a whole shard, 64 MiB, takes six times as long as hashing it (bench.store).
    """
    digest: Any = getattr(xxhash, kind)() if kind in xxhash.algorithms_available else hashlib.new(kind)
    buffer = memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def check_file(path: Path, num_bytes: int | None, expected: tuple[str, str] | None) -> None:
    """Compare a file with what an index says of it. Raises DamagedFile, OSError.

    Args:
        num_bytes: its size; None: not compared.
        expected: (kind, digest); None: not compared.
    """
    if num_bytes is not None and (size := path.stat().st_size) != num_bytes:
        raise DamagedFile(f"it has {size:,} bytes, index.json says {num_bytes:,}")
    if expected is not None and (digest := file_digest(path, expected[0])) != expected[1]:
        raise DamagedFile(f"its {expected[0]} is {digest}, that of the dataset is {expected[1]}")


def decompress_file(packed: Path, to: Path, compression: str | None) -> None:
    """Decompress a shard, whole or not at all, as streaming's writer has compressed it. Raises DamagedFile, OSError."""
    try:
        content = decompress(compression, packed.read_bytes())
    except MemoryError:
        raise
    except Exception as error:  # each library has its own exceptions, some without a text
        raise DamagedFile(f"{compression} cannot decompress it: {str(error) or type(error).__name__}") from error
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = to.with_name(f"{to.name}.tmp")
    partial.write_bytes(content)
    partial.replace(to)


@contextlib.contextmanager
def log_while_waiting(describe: Callable[[], str]) -> Iterator[None]:
    """Print a line each half minute while the block takes."""
    done, began = threading.Event(), time.monotonic()

    def log_progress() -> None:
        while not done.wait(LOG_INTERVAL_SEC):
            log.info(f"data: {time.monotonic() - began:.0f} s: {describe()}", extra=EVERY_RANK)

    threading.Thread(target=log_progress, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def download_with_retries(
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
        is_wanted: False as soon as no one waits for the file any longer.
        limit: key that gives `patience_sec`, for a message; None: there is none.

    Raises:
        StreamFailure: the store has been away for too long, does not have the file, or the disk does not take it.
        FetchCancelled: it failed, and `is_wanted` says no.
    """
    first_failure, refusals, wait_sec, reason, waited_sec = None, 0, 0.5, "no answer yet", 0.0
    with log_while_waiting(lambda: f"waiting for {remote} ({reason}), for {patience_sec:.0f} s at most"):
        while True:
            try:
                download(min(READ_TIMEOUT_SEC, max(1.0, patience_sec - waited_sec)))
                return
            except Exception as error:  # each store's client has its own exceptions
                clean_up()
                _raise_disk_error(error, local)
                reason = explain_store_error(error, remote)
                first_failure = time.monotonic() if first_failure is None else first_failure
                waited_sec = time.monotonic() - first_failure
                if is_retryable(error):
                    wait_sec = min(2 * wait_sec, LONGEST_WAIT_SEC)
                elif refusals < len(RETRY_WAITS_SEC):
                    wait_sec, refusals = RETRY_WAITS_SEC[refusals], refusals + 1
                else:
                    raise StreamFailure(f"data: {reason}") from error
                if not is_wanted():
                    raise FetchCancelled(f"data: {reason}") from error
                if waited_sec >= patience_sec:
                    waited = f"Waited for {waited_sec:.0f} s" + (f" ({limit}={patience_sec:g})" if limit else "")
                    raise StreamFailure(f"data: {reason} {waited}.") from error
                wait_sec = min(wait_sec, patience_sec - waited_sec)
            until = time.monotonic() + wait_sec
            while time.monotonic() < until and is_wanted():
                time.sleep(0.1)


def _raise_disk_error(error: BaseException | None, local: Path) -> None:
    """Stop at an error of this machine's disk: no store could fix that. Errors of a connection name no file."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            name = "" if error.filename is None else str(error.filename)
            is_own = bool(name) and (name.startswith(str(local)) or str(local).startswith(name))
            if is_own or error.errno in DISK_FULL_ERRORS or (not name and error.errno in (errno.EIO, errno.EROFS)):
                text = f"data.local: {name if is_own else local}: {error.strerror}, while {local.name} was written"
                raise StreamFailure(
                    f"{text}. Check its space and permissions, or set another data.local or data.cache_limit."
                ) from error
        error = error.__cause__ or error.__context__


class RetryingStream:
    """A dataset that is read from `remote` through the folder `local`, or in place where remote is None.

    Args:
        patience_sec: how long a store that is away is waited for.
        index_sha256: of index.json, as dataset.json has it; None: not compared.
        adopted: the columns of a third-party dataset; None: the dataset is ours.
        table: the shards, as index.json lists them; None: the reader of the stream reads that file.
        weight: proportion, repeat or choose (mds/mixture.py); none of them: each sample once.
    """

    def __init__(
        self,
        *,
        remote: str | None = None,
        local: str,
        patience_sec: float = PATIENCE_SEC,
        index_sha256: str | None = None,
        adopted: AdoptedColumns | None = None,
        table: ShardTable | None = None,
        **weight: float,
    ):
        self.remote = None if remote is None else remote.rstrip("/")
        self.local = local
        self.weight = weight
        self.patience_sec = patience_sec
        self.index_sha256 = index_sha256
        self.adopted = adopted
        self.table = table
        self.is_wanted: Callable[[], bool] = lambda: True
        self.client = None if remote is None else build_client(remote)

    # --- index.json ---

    def fetch_index(self) -> None:
        """Ensure that the folder has the dataset's index.json; for one process of a machine, before the others read it."""
        if self.remote is not None:
            Path(self.local).mkdir(parents=True, exist_ok=True)
            expected = None if self.index_sha256 is None else ("sha256", self.index_sha256)
            self._ensure_file(INDEX, lambda path: check_file(path, None, expected), self._fetch_index_file)

    def has_other_index(self) -> bool:
        """Return whether the folder has the index of another dataset, or a damaged one."""
        path = Path(self.local, INDEX)
        return self.index_sha256 is not None and path.is_file() and file_digest(path, "sha256") != self.index_sha256

    def _fetch_index_file(self) -> Path:
        """Fetch the index; remove shards without a digest: they may be of another dataset, which nothing would show."""
        for number, name in enumerate(self.table.names if self.adopted and self.table else ()):
            if known_digest(self.table.read_hashes(number)) is None:
                Path(self.local, name).unlink(missing_ok=True)
        return self._download_file(INDEX)

    def remove_leftovers(self) -> None:
        """Remove what killed fetches left; for one process of a machine, once the folder is known to be its own."""
        assert self.table is not None
        for folder in self.table.folders() if self.remote else ():
            for path in Path(self.local, folder).glob("*"):
                if LEFTOVER_NAME.fullmatch(path.name) and path.is_file():
                    path.unlink()

    def list_cached_bytes(self) -> NDArray[np.int64]:
        """# -> (N,), size of each shard's file in the cache folder; 0: there is none."""
        assert self.table is not None
        sizes = np.zeros(len(self.table), np.int64)
        for number, name in enumerate(self.table.names if self.remote else ()):
            with contextlib.suppress(OSError):
                sizes[number] = os.stat(f"{self.local}/{name}").st_size  # noqa: PTH116  # a Path takes twice as long
        return sizes

    # --- shards ---

    def index_bytes(self) -> int:
        """Return what index.json takes of a cache."""
        return 0 if self.remote is None else Path(self.local, INDEX).stat().st_size

    def prepare_shard(self, shard: Shard) -> None:
        """Ensure that a shard is here, as its index says; for one thread of a machine at a time.

        Raises:
            StreamFailure: it is unavailable.
            FetchCancelled: no one waits for it any longer.
        """
        expected = known_digest(shard.hashes)
        assert self.adopted or (expected and shard.zip_data is None), "read_dataset refuses others"
        self._ensure_file(
            shard.name,
            lambda path: check_file(path, shard.raw_bytes if self.adopted else None, expected),
            lambda: self._download_shard(shard),
        )

    def _download_shard(self, shard: Shard) -> Path:
        """Fetch a shard, decompress it, and return the file under a temporary name. Raises DamagedFile, StreamFailure."""
        packed = shard.zip_data
        if packed is None:
            return self._download_file(shard.name)
        packed_path, path = self._download_file(packed["basename"]), Path(f"{shard.path}.tmp")
        try:
            check_file(packed_path, packed["bytes"], known_digest(packed["hashes"]))
            decompress_file(packed_path, path, shard.compression)
        except DamagedFile as error:
            error.name = packed["basename"]
            raise
        except OSError as error:
            _raise_disk_error(error, path)
            raise
        finally:
            packed_path.unlink(missing_ok=True)
        return path

    # --- both ---

    def _ensure_file(self, name: str, check: Callable[[Path], None], download: Callable[[], Path]) -> None:
        """Ensure that the folder has a file as it should be; fetch it if it is missing or differs.

        What was fetched gets its name when it is checked: other runs read the folder too.

        Args:
            check: raises DamagedFile if the file differs.
            download: fetches it, and returns its path; raises DamagedFile if what arrived differs.

        Raises:
            StreamFailure: the store has it damaged, does not have it, or is away for too long.
        """
        path = Path(self.local, name)
        if path.exists() and not path.is_file():
            raise StreamFailure(f"data: {path} is not a file, but the dataset has one of that name. Remove it.")
        for tries in range(len(RETRY_WAITS_SEC) + 1):
            try:
                if path.is_file() or self.remote is None:
                    check(path)
                else:
                    arrived = download()
                    check(arrived)
                    arrived.replace(path)
                return
            except FileNotFoundError as error:
                if self.remote is not None:
                    raise
                raise StreamFailure(f"data: {path} is missing. Rebuild the dataset, or copy it again.") from error
            except DamagedFile as error:
                damaged = error
            problem = f"{path.parent / Path(damaged.name).name if damaged.name else path} is damaged: {damaged}"
            if self.remote is None:
                raise StreamFailure(f"data: {problem}. Rebuild the dataset, or copy it again.")
            for wrong in (path, Path(f"{path}.tmp")):
                wrong.unlink(missing_ok=True)
            if tries < len(RETRY_WAITS_SEC):
                log.warning(f"data: {problem}; it is fetched again from {self.remote}.", extra=EVERY_RANK)
                if tries:  # the first was perhaps the cache's
                    time.sleep(RETRY_WAITS_SEC[tries - 1])
            if not self.is_wanted():
                raise FetchCancelled(f"data: {problem}")
        source = f"{self.remote}/{damaged.name or name}"
        raise StreamFailure(
            f"data: {source} is damaged: {damaged}, in {tries + 1} tries. Rebuild the dataset, or copy it again."
        )

    def _download_file(self, name: str) -> Path:
        """Fetch a file, and return its temporary path."""
        local, remote, client = Path(self.local, name), f"{self.remote}/{name}", self.client
        assert client is not None
        temporary = Path(f"{local}.tmp")
        temporary.unlink(missing_ok=True)  # of a killed run: a client mistakes an existing file for a finished download
        download_with_retries(
            lambda timeout: client.download(remote, str(temporary), timeout),
            client.clean_up,
            remote,
            local,
            patience_sec=self.patience_sec,
            is_wanted=self.is_wanted,
        )
        return temporary
