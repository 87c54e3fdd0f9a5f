"""Files of a stage on this machine: waited for while their store is away, and compared with their digests.

A `RetryingStream` is streaming's Stream with three differences, each for what streaming 0.13 does with a store that fails:

    a store that goes away    waited for, with a line each half minute, up to a limit; then one error that says what was asked
                              for and what came (streaming gives up after its retries, and the epoch ends as if finished:
                              mosaicml/streaming issues 307 and 617)
    a shard's bytes           compared with index.json when this run first opens it, in the cache too; what is damaged is
                              fetched again (streaming looks at the presence of a cached file alone: issue 759)
    index.json                the same, before any process reads it

A data set of others (stages/adopted.py) may be compressed, and have hashes of another kind or none. What a store has is then
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
from streaming.base.format.base.reader import FileInfo
from streaming.base.hashing import is_hash
from streaming.base.stream import Stream

from cli.log import EVERY_RANK, log
from cli.private_api import require_private_api
from stages.shard_table import Readers, ShardTable
from stages.store_errors import explain_store_error, is_passing
from stages.stores import READ_TIMEOUT_SEC, client_of

if TYPE_CHECKING:
    from stages.adopted import Columns

HASH = "xxh64"  # of every shard of our own
FASTEST_FIRST = (HASH, "xxh3_64", "xxh3_128", "xxh128", "xxh32", "md5", "sha1", "sha256")  # then by name
INDEX = "index.json"
PATIENCE_SEC = 600.0
SAY_SEC = 30.0
# Waits between tries at what a store says is not there (all of them: half a minute), or gives with another digest (all but
# the last): a store that is starting, or an object that is being written anew, becomes right in the meantime.
SOON_SEC = (1.0, 2.0, 4.0, 8.0, 15.0)
LONGEST_WAIT_SEC = 10.0
DISK_ERRORS = {errno.EIO, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP}
FULL = {errno.ENOSPC, errno.EDQUOT}  # of a copy from another folder the error names that one's file
DISK_ERRORS |= {errno.EACCES, errno.EPERM, *FULL}
# Of a killed fetch: streaming's, boto3's.
LEFT_OVER = re.compile(r"(.+\.mds(\.(br|bz2|gz|snappy|zstd))?|index\.json)(\.(tmp|[0-9A-Fa-f]{8}))+")


class StreamFailure(RuntimeError):
    """Data cannot be had; the text says which, from where, why, and what to do."""


class FetchCancelled(StreamFailure):
    """A wait that was given up because nobody waits for its end any more: no failure of the store's."""


class Damaged(Exception):
    """A file that is not the data set's; the text says in what. `name`: of the file, where it is not the one looked for."""

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


def check_file(path: Path, num_bytes: int | None, wanted: tuple[str, str] | None) -> None:
    """Compare a file with what an index says of it. Raises Damaged, OSError.

    Args:
        num_bytes: its size; None: not compared.
        wanted: (kind, digest); None: not compared.
    """
    if num_bytes is not None and (size := path.stat().st_size) != num_bytes:
        raise Damaged(f"it has {size:,} bytes, index.json says {num_bytes:,}")
    if wanted is not None and (found := file_digest(path, wanted[0])) != wanted[1]:
        raise Damaged(f"its {wanted[0]} is {found}, that of the stage is {wanted[1]}")


def unpack(packed: Path, to: Path, compression: str | None) -> None:
    """Decompress a shard, whole or not at all, as streaming's writer has compressed it. Raises Damaged, OSError."""
    try:
        content = decompress(compression, packed.read_bytes())
    except MemoryError:
        raise
    except Exception as error:  # each library has exceptions of its own, some without a text
        raise Damaged(f"{compression} cannot decompress it: {str(error) or type(error).__name__}") from error
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = to.with_name(f"{to.name}.tmp")
    partial.write_bytes(content)
    partial.replace(to)


OF_STREAM = ("_downloader", "_download_file", "_prepare_shard_part", "set_up_local", "get_shards", "get_index_size")
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


def _refuse_own_disk(error: BaseException | None, local: Path) -> None:
    """Stop for what this machine's disk says: no store would mend that. Errors of a connection name no file."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            name = "" if error.filename is None else str(error.filename)
            is_own = bool(name) and (name.startswith(str(local)) or str(local).startswith(name))
            if is_own or error.errno in FULL or (not name and error.errno in (errno.EIO, errno.EROFS)):
                text = f"data.local: {name if is_own else local}: {error.strerror}, while {local.name} was written"
                raise StreamFailure(f"{text}. Make room, or give another folder or data.cache_limit.") from error
        error = error.__cause__ or error.__context__


class RetryingStream(Stream):
    """A stage that is read from `remote` through the folder `local`, or in place where remote is None.

    Args:
        patience_sec: how long a store that is away is waited for.
        index_sha256: of index.json, as dataset.json has it; None: not compared.
        adopted: of a data set that others have made; None: a stage of our own.
        table: the shards, as index.json lists them; None: whoever reads the stream reads that file.
        weight: proportion, repeat or choose, as streaming has them, where several streams are mixed.
    """

    def __init__(
        self,
        *,
        remote: str | None = None,
        local: str,
        patience_sec: float = PATIENCE_SEC,
        index_sha256: str | None = None,
        adopted: Columns | None = None,
        table: ShardTable | None = None,
        **weight: float,
    ):
        super().__init__(
            remote=None if remote is None else remote.rstrip("/"),
            local=local,
            download_retry=1,
            download_timeout=READ_TIMEOUT_SEC,
            validate_hash=HASH,
            keep_zip=False,
            **weight,
        )
        self.patience_sec = patience_sec
        self.index_sha256 = index_sha256
        self.adopted = adopted
        self.table = table
        self.is_wanted: Callable[[], bool] = lambda: True
        if remote is not None:
            self._downloader = client_of(remote)

    # --- index.json ---

    def fetch_index(self) -> None:
        """See that the folder has the stage's index.json; for one process of a machine, before the others read it."""
        if self.remote is not None:
            Path(self.local).mkdir(parents=True, exist_ok=True)
            Path(self.local, f"{INDEX}.tmp").unlink(missing_ok=True)
            wanted = None if self.index_sha256 is None else ("sha256", self.index_sha256)
            self._have(INDEX, lambda path: check_file(path, None, wanted), self._take_index)

    def _take_index(self) -> None:
        """Fetch the index, and remove shards without a digest: they may be of another data set, which nothing would show."""
        for number, name in enumerate(self.table.names if self.adopted and self.table else ()):
            if known_digest(self.table.raw_hashes(number)) is None:
                Path(self.local, name).unlink(missing_ok=True)
        self._download_file(INDEX)

    def remove_left_overs(self) -> None:
        """Remove what killed fetches left; for one process of a machine, once the folder is known to be its own."""
        assert self.table is not None
        for folder in self.table.folders() if self.remote else ():
            for path in Path(self.local, folder).glob("*"):
                if LEFT_OVER.fullmatch(path.name) and path.is_file():
                    path.unlink()

    def bytes_here(self) -> NDArray[np.int64]:
        """# -> (N,), size of each shard's file in the cache folder; 0: there is none."""
        assert self.table is not None
        found = np.zeros(len(self.table), np.int64)
        for number, name in enumerate(self.table.names if self.remote else ()):
            with contextlib.suppress(OSError):
                found[number] = os.stat(f"{self.local}/{name}").st_size  # noqa: PTH116  # a Path takes twice as long
        return found

    # --- shards ---

    def get_shards(self, world: Any, allow_unsafe_types: bool) -> Readers:  # type: ignore[override]
        """Return the shards' readers, each made when it is asked for; the table says what they are."""
        assert self.table is not None, "MachineStages reads it where it is not given"
        if self.adopted is not None:
            self.table = self.table.filled()
        return Readers([(self.table, self.local, self.adopted)])

    def get_index_size(self) -> int:
        """Return what index.json takes of a cache."""
        return 0 if self.remote is None else super().get_index_size()

    def set_up_local(self, shards: Any, cache_usage_per_shard: Any) -> None:
        """Report no shard as present: each goes through `prepare_shard`, and so through its digest, once in this run."""
        cache_usage_per_shard[:] = 0

    def _prepare_shard_part(
        self, raw_info: FileInfo, zip_info: FileInfo | None = None, compression: str | None = None
    ) -> int:
        path, wanted = Path(self.local, raw_info.basename), known_digest(raw_info.hashes)
        assert self.adopted or (wanted and zip_info is None), "read_stage refuses others"
        self._have(
            raw_info.basename,
            lambda path: check_file(path, raw_info.bytes if self.adopted else None, wanted),
            lambda: self._download_shard(path, raw_info, zip_info, compression),
        )
        return 0 if self.remote is None else raw_info.bytes  # what is read in place is no part of a cache

    def _download_shard(self, path: Path, raw: FileInfo, packed: FileInfo | None, compression: str | None) -> None:
        """Fetch a shard, and decompress it. Raises Damaged, StreamFailure."""
        if packed is None:
            self._download_file(raw.basename)
            return
        came = Path(self.local, packed.basename)
        came.unlink(missing_ok=True)  # of a killed run: a client takes what is there for what it was sent for
        self._download_file(packed.basename)
        try:
            check_file(came, packed.bytes, known_digest(packed.hashes))
            unpack(came, path, compression)
        except Damaged as error:
            error.name = packed.basename
            raise
        except OSError as error:
            _refuse_own_disk(error, path)
            raise
        finally:
            came.unlink(missing_ok=True)

    # --- both ---

    def _have(self, name: str, look: Callable[[Path], None], get: Callable[[], Any]) -> None:
        """See that the folder has a file as it should be; fetch it where it is missing or another.

        Args:
            look: raises Damaged where the file is another.
            get: fetches it; raises Damaged where what came is another.

        Raises:
            StreamFailure: the store has it damaged, does not have it, or is away for too long.
        """
        path = Path(self.local, name)
        if path.exists() and not path.is_file():
            raise StreamFailure(f"data: {path} is not a file, but the stage has one of that name. Remove it.")
        for tries in range(len(SOON_SEC) + 1):
            try:
                if not path.is_file():
                    get()
                return look(path)
            except Damaged as error:
                damaged = error
            said = f"{path.parent / Path(damaged.name).name if damaged.name else path} is damaged: {damaged}"
            if self.remote is None:
                raise StreamFailure(f"data: {said}. Make the stage again, or copy it anew.")
            path.unlink(missing_ok=True)
            if tries < len(SOON_SEC):
                log.warning(f"data: {said}; it is fetched again from {self.remote}.", extra=EVERY_RANK)
                if tries:  # the first was perhaps the cache's
                    time.sleep(SOON_SEC[tries - 1])
            if not self.is_wanted():
                raise FetchCancelled(f"data: {said}")
        source = f"{self.remote}/{damaged.name or name}"
        raise StreamFailure(
            f"data: {source} is damaged: {damaged}, in {tries + 1} tries. Make the stage again, or copy it anew."
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
