"""Where a stage is read or written: a folder, or a prefix in a store that streaming can list.

A file appears in a place whole or not at all. In a folder it is created in `.work`, synced to disk and renamed; for a store
it is created on this machine and uploaded as one object. The last file makes the stage complete, so a killed writer leaves
nothing that a reader would accept as a stage.
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

from cli.errors import Failed, Refused
from cli.files import to_disk
from cli.private_api import require_private_api
from preflight.limits import unwritable
from prepare.names import GO_ON
from stages import store_errors
from stages.dataset import is_remote
from stages.stores import download_once

WORK = ".work"
LOCK_WAIT_SEC = 10.0  # workers of a killed command notice that and end within a second
NUM_TRIES = 5  # 1, 2, 4, 8 s apart: a store may be unreachable for some seconds

require_private_api(upload.CloudUploader, "local", "remote", "upload_file", why="one client puts files from any folder")


class Place:
    """Base of folders and stores: files are moved there from a scratch folder on this machine.

    Attributes:
        address: as given by the user, for messages.
        scratch: folder of unfinished files and locks; removed when a stage is finished.
        poll_sec: least time between two listings.
    """

    poll_sec = 2.0

    def __init__(self, address: str, scratch: Path):
        self.address = address
        self.scratch = scratch

    def names(self, prefix: str = "") -> set[str]:
        """Return the files under a prefix ("" or "part-00001/"), as paths inside the place."""
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
        self.make_scratch()
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            yield Path(folder)

    def make_scratch(self) -> None:
        self.scratch.mkdir(parents=True, exist_ok=True)

    def lock(self, name: str, timeout_sec: float) -> FileLock:
        """Return a lock between this machine's processes that write here; the system releases it when one dies."""
        self.make_scratch()
        return FileLock(self.scratch / f"{name}.lock", timeout=timeout_sec)

    @contextlib.contextmanager
    def only_writer(self, word: str = "OUT") -> Iterator[None]:
        """Lock the place for one command. Raises Refused: another one holds it, or it is not writable.

        Args:
            word: what the command calls the place, for messages.
        """
        try:
            lock = self._command_lock()
        except Timeout as error:
            text = "is being written by another command on this machine. Let that one end, or stop it"
            raise Refused(f"{word}: {self.address} {text}.") from error
        except OSError as error:
            raise Refused(f"{word}: {self.address} cannot be written: {error}. Give another place.") from error
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                (self.scratch / "command.lock").unlink()
                self.scratch.rmdir()  # fails if it has unfinished work
            lock.release()

    def _command_lock(self) -> FileLock:
        """Acquire and return the lock. If a command that ends meanwhile removes the lock's folder, try again."""
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
        """Remove files left by this and by killed commands. Call it with the place locked, after all work is done."""
        for path in self.scratch.iterdir() if self.scratch.is_dir() else ():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != "command.lock":
                path.unlink(missing_ok=True)


class Folder(Place):
    """A folder on disk."""

    def __init__(self, address: str):
        super().__init__(address, Path(address, WORK))
        self.path = Path(address)

    def names(self, prefix: str = "") -> set[str]:
        found = set()
        for folder, folders, files in os.walk(self.path / prefix):  # tolerates files that other ranks move meanwhile
            if WORK in folders:
                folders.remove(WORK)
            found |= {Path(folder, file).relative_to(self.path).as_posix() for file in files}
        return found

    def fetch(self, name: str, folder: Path) -> Path:
        return self.path / name

    def put(self, name: str, file: Path) -> None:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        to_disk(file)
        file.replace(target)
        to_disk(target.parent)  # sync the rename: a part's last file must not appear before the others


class Store(Place):
    """A prefix in a store, through streaming's own clients (for S3: `S3_ENDPOINT_URL` and the usual AWS variables).

    A store has no locks. Two machines with the same plan do the same work twice, with the same bytes. With two plans, one
    is refused at the start, or both at the finish.
    """

    poll_sec = 15.0

    def __init__(self, address: str):
        digest = hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:16]
        super().__init__(address.rstrip("/"), Path(tempfile.gettempdir(), f"easel-{os.getuid()}-{digest}"))
        self.prefix = urlparse(self.address).path.lstrip("/") + "/"
        self._client_of: tuple[int, Any] = (0, None)

    def __reduce__(self) -> tuple[type[Store], tuple[str]]:
        return Store, (self.address,)  # a client cannot be pickled

    def make_scratch(self) -> None:
        # Its name is predictable: in a folder that everybody can write to, check that it is ours.
        self.scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.scratch.is_symlink() or self.scratch.stat().st_uid != os.getuid():
            raise PermissionError(f"{self.scratch} belongs to another user")

    @property
    def _uploader(self) -> Any:
        """This process's client: a forked worker that took its parent's would read the answers of others."""
        if self._client_of[0] != os.getpid():
            self._client_of = (os.getpid(), self._new_uploader())
        return self._client_of[1]

    def _new_uploader(self) -> Any:
        with tempfile.TemporaryDirectory() as empty:  # it requires an empty folder; each put gives the real one
            return upload.CloudUploader.get((empty, self.address), keep_local=True, retry=NUM_TRIES)

    def names(self, prefix: str = "") -> set[str]:
        with _as_os_error(f"{self.address} cannot be listed"):
            found = self._uploader.list_objects(prefix) or []
        return {name.lstrip("/").removeprefix(self.prefix) for name in found}

    def fetch(self, name: str, folder: Path) -> Path:
        file = folder / Path(name).name
        file.unlink(missing_ok=True)  # the client would accept an existing file as the wanted one
        with _as_os_error(f"{self.address}/{name} cannot be read"):
            retry(num_attempts=NUM_TRIES)(lambda: download_once(f"{self.address}/{name}", str(file)))()
        return file

    def put(self, name: str, file: Path) -> None:
        folder, _, base = f"{self.address}/{name}".rpartition("/")
        assert file.name == base
        with _as_os_error(f"{self.address}/{name} cannot be put"):
            self._uploader.local, self._uploader.remote = str(file.parent), folder
            try:
                self._uploader.upload_file(base)
            finally:
                self._uploader.remote = self.address
        file.unlink()


@contextlib.contextmanager
def _as_os_error(what: str) -> Iterator[None]:
    """Convert the exceptions of each store's client to OSError."""
    try:
        yield
    except Exception as error:
        raise OSError(f"{what}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def writing(out: str | Path) -> Iterator[None]:
    """Turn an OSError of a command's work into one message. Raises Failed."""
    try:
        yield
    except OSError as error:
        raise Failed(f"OUT: {out} cannot be written: {error}. {GO_ON}.") from error


def open_place(address: str) -> Place:
    """Return the place at a folder or a store's address (see `address_problem`)."""
    return Store(address) if is_remote(address) else Folder(address)


def address_problem(address: str) -> str | None:
    """Return the message that an address is in no store that can be listed, read and written, or None."""
    known = {
        scheme
        for scheme, name in upload.UPLOADERS.items()
        if scheme in DOWNLOADER_MAPPINGS and getattr(upload, name).list_objects is not upload.CloudUploader.list_objects
    }
    scheme = store_errors.scheme_of(address)
    if not scheme or scheme in known:
        return store_errors.address_problem(address)
    named = ", ".join(f"{name}://" for name in sorted(known - {""}))
    return f"{address} is in no known store. Possible: a folder, {named}."


def out_problem(out: str, inputs: Sequence[str]) -> str | None:
    """Say, before any work, why a stage made from these inputs could not be written there; or None."""
    if text := address_problem(out):
        return f"OUT: {text}"
    for given in inputs:
        if _lies_in(out, given):
            return f"OUT: {out} lies in {given}, which is only read. Give a place outside of it."
    if is_remote(out):
        return None
    path = Path(out)
    if path.is_symlink() and not path.exists():
        return f"OUT: {out} is a link to nothing. Give a folder, or remove the link."
    if path.exists() and not path.is_dir():
        return f"OUT: {out} is a file. Give a folder."
    text = unwritable(out)
    return f"OUT: {text}" if text else None


def _lies_in(inner: str, outer: str) -> bool:
    """True if `inner` is `outer` or lies in it."""
    if is_remote(inner) or is_remote(outer):
        return f"{inner.rstrip('/')}/".startswith(f"{outer.rstrip('/')}/")
    inside, around = Path(inner).resolve(), Path(outer).resolve()
    return around == inside or around in inside.parents
