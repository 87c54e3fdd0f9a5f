"""Where a dataset is read or written: a folder, or a prefix in a store that streaming can list.

A file appears at an address whole or not at all. In a folder it is created in `.work`, synced to disk and renamed; for a
store it is created on this machine and uploaded as one object. The last file makes the dataset complete, so a killed writer
leaves nothing that a reader would accept as a dataset.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from filelock import FileLock, Timeout
from streaming.base.storage import upload
from streaming.base.storage.download import DOWNLOADER_MAPPINGS
from streaming.base.util import retry

from common.errors import Failed, Refused
from common.files import sync_to_disk, write_problem
from mds import stores
from mds.dataset import is_remote
from mds.stores import download_once
from prepare.arguments import RESUME_HINT

WORK = ".work"
LOCK_WAIT_SEC = 10.0  # workers of a killed command notice that and end within a second
NUM_TRIES = 5  # 1, 2, 4, 8 s apart: a store may be unreachable for some seconds


class Address:
    """Base of folders and stores: files are moved there from a scratch folder on this machine.

    Attributes:
        location: the path or store address as given by the user, for messages.
        scratch: folder of unfinished files and locks; removed when a dataset is finished.
        poll_sec: least time between two listings.
    """

    poll_sec = 2.0

    def __init__(self, location: str, scratch: Path):
        self.location = location
        self.scratch = scratch

    def list_files(self, prefix: str = "") -> set[str]:
        """Return the files under a prefix ("" or "part-00001/"), as paths below the address."""
        raise NotImplementedError

    def fetch(self, name: str, folder: Path) -> Path:
        """Return a local path with a file's content, in `folder` if it had to be downloaded.

        Raises:
            OSError: the file does not exist or is unreadable.
        """
        raise NotImplementedError

    def put(self, name: str, file: Path) -> None:
        """Move a complete file from the scratch folder to its name; an existing file is replaced. Raises OSError."""
        raise NotImplementedError

    def read(self, name: str) -> bytes:
        """Return a small file's content. Raises OSError."""
        with tempfile.TemporaryDirectory() as folder:
            return self.fetch(name, Path(folder)).read_bytes()

    def put_bytes(self, name: str, content: bytes) -> None:
        """Write a small file. Raises OSError."""
        with self.scratch_folder() as folder:
            file = folder / Path(name).name
            file.write_bytes(content)
            self.put(name, file)

    @contextlib.contextmanager
    def scratch_folder(self) -> Iterator[Path]:
        """Yield a new folder for files to `put`; it is removed afterwards."""
        self.make_scratch_folder()
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            yield Path(folder)

    def make_scratch_folder(self) -> None:
        self.scratch.mkdir(parents=True, exist_ok=True)

    def lock(self, name: str, timeout_sec: float) -> FileLock:
        """Return a lock between this machine's processes that write here; the system releases it when one dies."""
        self.make_scratch_folder()
        return FileLock(self.scratch / f"{name}.lock", timeout=timeout_sec)

    @contextlib.contextmanager
    def lock_for_writing(self, argument_name: str = "OUT") -> Iterator[None]:
        """Lock the address for one command. Raises Refused: another command holds it, or it is not writable.

        Args:
            argument_name: what the command calls the address, for messages.
        """
        try:
            lock = self._command_lock()
        except Timeout as error:
            text = "is being written by another command on this machine. Let that one end, or stop it"
            raise Refused(f"{argument_name}: {self.location} {text}.") from error
        except OSError as error:
            raise Refused(
                f"{argument_name}: {self.location} cannot be written: {error}. Give another folder or store."
            ) from error
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                (self.scratch / "command.lock").unlink()
                self.scratch.rmdir()  # fails if it has unfinished work
            lock.release()

    def _command_lock(self) -> FileLock:
        """Acquire and return the lock. If a command that is ending removes the lock's folder, try again."""
        deadline = time.monotonic() + LOCK_WAIT_SEC
        while True:
            lock = self.lock("command", LOCK_WAIT_SEC)
            try:
                lock.acquire()
                if Path(lock.lock_file).exists():
                    return lock
                lock.release()
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise

    def clear_scratch(self) -> None:
        """Remove files left by this and by killed commands. Call it with the address locked, after all work is done."""
        for path in self.scratch.iterdir() if self.scratch.is_dir() else ():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != "command.lock":
                path.unlink(missing_ok=True)


class Folder(Address):
    """A folder on disk."""

    def __init__(self, location: str):
        super().__init__(location, Path(location, WORK))
        self.path = Path(location)

    def list_files(self, prefix: str = "") -> set[str]:
        names = set()
        for folder, folders, files in os.walk(self.path / prefix):  # tolerates files that other ranks are moving
            if WORK in folders:
                folders.remove(WORK)
            names |= {Path(folder, file).relative_to(self.path).as_posix() for file in files}
        return names

    def fetch(self, name: str, folder: Path) -> Path:
        return self.path / name

    def put(self, name: str, file: Path) -> None:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        sync_to_disk(file)
        file.replace(target)
        sync_to_disk(target.parent)  # sync the rename: a part's last file must not appear before the others


class Store(Address):
    """A prefix in a store, through streaming's own clients (for S3: `S3_ENDPOINT_URL` and the usual AWS variables).

    A store has no locks. Two machines with the same plan do the same work twice, with the same bytes. With two plans, one
    is refused at the start, or both at the finish.
    """

    poll_sec = 15.0

    def __init__(self, location: str):
        digest = hashlib.sha256(location.rstrip("/").encode()).hexdigest()[:16]
        super().__init__(location.rstrip("/"), Path(tempfile.gettempdir(), f"easel-{os.getuid()}-{digest}"))
        self.prefix = urlparse(self.location).path.lstrip("/") + "/"
        self._client_of: tuple[int, Any] = (0, None)

    def __reduce__(self) -> tuple[type[Store], tuple[str]]:
        return Store, (self.location,)  # a client cannot be pickled

    def make_scratch_folder(self) -> None:
        # Its name is predictable: in a folder that everybody can write to, check that it is ours.
        self.scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.scratch.is_symlink() or self.scratch.stat().st_uid != os.getuid():
            raise PermissionError(f"{self.scratch} belongs to another user")

    @property
    def _uploader(self) -> Any:
        """This process's client: a forked worker with its parent's client would read other processes' answers."""
        if self._client_of[0] != os.getpid():
            self._client_of = (os.getpid(), self._new_uploader())
        return self._client_of[1]

    def _new_uploader(self) -> Any:
        with tempfile.TemporaryDirectory() as empty:  # it requires an empty folder; each put gives the real one
            return upload.CloudUploader.get((empty, self.location), keep_local=True, retry=NUM_TRIES)

    def list_files(self, prefix: str = "") -> set[str]:
        with _as_os_error(f"{self.location} cannot be listed"):
            names = self._uploader.list_objects(prefix) or []
        return {name.lstrip("/").removeprefix(self.prefix) for name in names}

    def fetch(self, name: str, folder: Path) -> Path:
        file = folder / Path(name).name
        file.unlink(missing_ok=True)  # the client would accept an existing file as the wanted one
        with _as_os_error(f"{self.location}/{name} cannot be read"):
            retry(num_attempts=NUM_TRIES)(lambda: download_once(f"{self.location}/{name}", str(file)))()
        return file

    def put(self, name: str, file: Path) -> None:
        folder, _, base = f"{self.location}/{name}".rpartition("/")
        assert file.name == base
        with _as_os_error(f"{self.location}/{name} cannot be put"):
            self._uploader.local, self._uploader.remote = str(file.parent), folder
            try:
                self._uploader.upload_file(base)
            finally:
                self._uploader.remote = self.location
        file.unlink()


@contextlib.contextmanager
def _as_os_error(what: str) -> Iterator[None]:
    """Convert the exceptions of each store's client to OSError."""
    try:
        yield
    except Exception as error:
        raise OSError(f"{what}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def report_write_errors(out: str | Path) -> Iterator[None]:
    """Turn an OSError of a command's work into one message. Raises Failed."""
    try:
        yield
    except OSError as error:
        raise Failed(f"OUT: {out} cannot be written: {error}. {RESUME_HINT}.") from error


def open_address(location: str) -> Address:
    """Return the Address of a folder or a prefix in a store (see `writable_store_problem`)."""
    return Store(location) if is_remote(location) else Folder(location)


def writable_store_problem(location: str) -> str | None:
    """Return the message that an address is in no store that can be listed, read and written, or None."""
    known_schemes = {
        scheme
        for scheme, name in upload.UPLOADERS.items()
        if scheme in DOWNLOADER_MAPPINGS and getattr(upload, name).list_objects is not upload.CloudUploader.list_objects
    }
    scheme = stores.scheme_of(location)
    if not scheme or scheme in known_schemes:
        return stores.address_problem(location)
    possible = ", ".join(f"{name}://" for name in sorted(known_schemes - {""}))
    return f"{location} is in no known store. Possible: a folder, {possible}."


def out_problem(out: str, inputs: Sequence[str]) -> str | None:
    """Say, before any work, why a dataset made from these inputs could not be written there; or None."""
    if text := writable_store_problem(out):
        return f"OUT: {text}"
    for source in inputs:
        if _is_inside(out, source):
            return f"OUT: {out} lies in {source}, which is only read. Give one outside of it."
    if is_remote(out):
        return None
    path = Path(out)
    if path.is_symlink() and not path.exists():
        return f"OUT: {out} is a link to nothing. Give a folder, or remove the link."
    if path.exists() and not path.is_dir():
        return f"OUT: {out} is a file. Give a folder."
    text = write_problem(out)
    return f"OUT: {text}" if text else None


def _is_inside(inner: str, outer: str) -> bool:
    """True if `inner` is `outer` or lies in it."""
    if is_remote(inner) or is_remote(outer):
        return f"{inner.rstrip('/')}/".startswith(f"{outer.rstrip('/')}/")
    inside, around = Path(inner).resolve(), Path(outer).resolve()
    return around == inside or around in inside.parents
