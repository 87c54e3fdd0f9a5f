"""Uploads of a run's checkpoints and record to an object store, in the background.

A thread of rank 0 uploads what is new in the run's folder: first the record, then the snapshots, then the newest
`save.keep` full checkpoints, the newest first. So each checkpoint in the store has a record that is at least as new.
Older full checkpoints are removed there. Nothing waits in memory: what is missing lies on the disk. An unreachable store is
asked again until it is back, while the run continues. At its end the run waits, until nothing has moved for
`save.patience_sec`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from checkpointing.files import FULL, WEIGHTS, list_checkpoints, number_of
from checkpointing.sharded import digest_file
from checkpointing.store import CHECKPOINTS, RunStore, checkpoints_in, files_of
from common import dist
from common.log import log
from mds.stores import explain_store_error
from run_folder.files import EVAL_PARTS, STARTS, SUMMARY

FIRST_WAIT_SEC, LONGEST_WAIT_SEC = 1.0, 20.0  # between two tries
LOG_INTERVAL_SEC = 600.0  # between two lines about an unreachable store
ASK_SEC = 0.2
REPLACED = "replaced"
"""Folder of what this machine had of a record before the store's took its place."""
NOT_UPLOADED = {CHECKPOINTS.rstrip("/"), EVAL_PARTS, REPLACED}


class Missing(OSError):
    """A run has ended, and not all of it is in the store; the text says what, and what to do."""


class Replaced(Exception):
    """Another start of the run writes into the store."""


class Uploads:
    """The thread, and what is known of the store.

    Args:
        store: of this run.
        folder: of this run on the disk.
        keep: number of full checkpoints.
        patience_sec: without a byte that the store takes, at the end of the run.
    """

    def __init__(self, store: RunStore, folder: Path, keep: int, patience_sec: float):
        self.store, self.folder, self.keep, self.patience_sec = store, folder, keep, patience_sec
        self.replaced: str | None = None
        """Why uploads have stopped: the run has been started elsewhere."""
        self.is_started = False
        self.sending: str | None = None
        """Name of the checkpoint that is being uploaded: it is not removed until that is done."""
        self._stored: dict[str, int] | None = None  # name -> bytes
        self._record: dict[str, tuple[int, int]] = {}  # name -> size and time of what was put last
        self._own: set[str] = set()  # digests of starts.jsonl that this process has put, or tried to
        self._asked = self._done = 0
        self._moved_at = time.monotonic()
        self._most_sent: dict[str, int] = {}  # name -> bytes in the best try
        self._unreachable_since: float | None = None
        self._logged_at = 0.0
        self._why = "no answer yet"
        self._wake, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)

    # --- the run's side ---

    def start(self) -> None:
        """Begin to upload."""
        self.is_started = True
        self.ask()
        self._thread.start()

    def ask(self) -> None:
        """Let the thread look for something new."""
        self._asked += 1
        self._wake.set()

    def is_kept(self, path: Path) -> bool:
        """True for a checkpoint that must stay on the disk: it is being uploaded."""
        return path.name == self.sending

    def wait(self, limit_sec: float | None = None) -> str | None:
        """Wait until the store has what the run's folder has now.

        Args:
            limit_sec: however much it moves; None: until nothing has moved for `patience_sec`.

        Returns:
            what is missing there, and why; None: nothing.
        """
        self.ask()
        began, asked = time.monotonic(), self._asked
        self._moved_at = began
        while self._done < asked and self.replaced is None:
            now = time.monotonic()
            is_late = now - self._moved_at > self.patience_sec if limit_sec is None else now - began > limit_sec
            if is_late or not self._thread.is_alive():
                return self._missing(now - (began if limit_sec is not None else self._moved_at))
            time.sleep(ASK_SEC)
        return self.replaced

    @contextlib.contextmanager
    def wait_at_end(self) -> Iterator[None]:
        """Wait at the end of the context if it was started, also after an error; not where the process has to end at once.

        Raises:
            Missing: not all is in the store; after an error it is a line, and the error is raised.
        """
        try:
            yield
        except Exception:
            if self.is_started and (text := self.wait()) is not None:
                log.error(text)
            raise
        else:
            if self.is_started and (text := self.wait()) is not None:
                raise Missing(text)
        finally:  # the thread ends as soon as it waits for something
            self._is_over.set()
            self._wake.set()

    def _missing(self, waited_sec: float) -> str:
        names = [*(path.name for path in self._lacking()), *sorted(self._changed())]
        some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return (
            f"save.remote: {self.store.address} lacks {some or 'the newest files'} of this run after "
            f"{waited_sec:.0f} s; {self._why} {self.folder} is whole: the same command uploads the rest."
        )

    # --- the thread's side ---

    def _work(self) -> None:
        while not self._is_over.is_set():
            self._wake.wait()
            self._wake.clear()
            asked, wait_sec = self._asked, FIRST_WAIT_SEC
            while not self._is_over.is_set():
                try:
                    self.upload_new()
                except Replaced as error:
                    self.replaced = str(error)
                    return
                except Exception as error:  # each layer of the client has its own exceptions
                    self._note(error)
                    self._is_over.wait(wait_sec)
                    wait_sec = min(2 * wait_sec, LONGEST_WAIT_SEC)
                else:
                    self._done = asked
                    break

    def _note(self, error: Exception) -> None:
        """Log that the store is unreachable, at most every LOG_INTERVAL_SEC."""
        self._stored = None
        now = time.monotonic()
        self._why = explain_store_error(error, self.store.address, "written")
        if self._unreachable_since is None:
            self._unreachable_since = now
        elif now - self._logged_at < LOG_INTERVAL_SEC:
            return
        self._logged_at = now
        log.warning(f"save.remote: {self._why} Training continues, and the upload is tried again.")

    def _sending(self, name: str) -> Callable[[int], None]:
        """Return a callback that counts uploaded bytes. Bytes that are sent again after a failed attempt are not progress:
        a socket buffers some.
        """
        sent = 0

        def note(num_bytes: int) -> None:
            nonlocal sent
            sent += num_bytes
            if sent > self._most_sent.get(name, 0):
                self._most_sent[name], self._moved_at = sent, time.monotonic()

        return note

    def _moved(self) -> None:
        """Note that the store has completed a request."""
        self._moved_at = now = time.monotonic()
        if self._unreachable_since is not None:
            log.info(f"save.remote: {self.store.address} is back after {now - self._unreachable_since:.0f} s.")
            self._unreachable_since = None

    def upload_new(self) -> None:
        """Upload what the store does not have, and prune it. Raises Replaced, and what the store's client raises."""
        if self._stored is None:
            self._stored = self.store.listed()
            self.store.remove_unfinished()
            self._moved()
        self._upload_record()
        while lacking := self._lacking():
            path = lacking[0]
            self.sending = path.name
            try:
                self._stored |= self.store.put_checkpoint(path, self._sending(path.name))
            except FileNotFoundError:
                if path.exists():
                    raise
                continue  # removed since: a newer one is there
            finally:
                self.sending = None
            self._moved()
            self._prune(path)
        self._prune(None)

    def _upload_record(self) -> None:
        assert self._stored is not None
        if self._own and self.store.digest_of(STARTS) not in self._own:
            problem = f"another start of this run writes into {self.store.address}"
            raise Replaced(f"save.remote: {problem}. This one stops. Its own files are in {self.folder}.")
        # The start first: from then on the run is this process's.
        for name in sorted(self._changed(), key=lambda name: name != STARTS):
            with contextlib.suppress(FileNotFoundError):
                self._put_file(name)
        if SUMMARY in self._stored and not (self.folder / SUMMARY).exists():
            self.store.remove(SUMMARY)  # it would say that the run is finished
            del self._stored[SUMMARY]

    def _put_file(self, name: str) -> None:
        """Put a file of the record as it is now: a copy, since the run may be appending to it."""
        assert self._stored is not None
        path, copy = self.folder / name, self.folder / f".upload.{os.getpid()}.tmp"
        stamp = _stamp(path)
        try:
            shutil.copyfile(path, copy)
            if name == STARTS:
                self._own.add(digest_file(copy))
            self.store.put(copy, name, self._sending(name))
            self._most_sent.pop(name, None)  # it is sent again when it has grown
            self._stored[name], self._record[name] = copy.stat().st_size, stamp
        finally:
            copy.unlink(missing_ok=True)
        self._moved()

    def _changed(self) -> set[str]:
        """Return the files of the record that the store does not have as they are."""
        names = set()
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder)
            is_own = name.parts[0] not in NOT_UPLOADED and not any(part.startswith(".") for part in name.parts)
            with contextlib.suppress(FileNotFoundError):
                if is_own and path.is_file() and not path.is_symlink() and self._record.get(str(name)) != _stamp(path):
                    names.add(str(name))
        return names

    def _local(self) -> list[Path]:
        """Return the checkpoints that the store is to have, in the order in which they are uploaded."""
        folder = self.folder / CHECKPOINTS
        full = list_checkpoints(folder, FULL)
        of_store = [one.number for one in checkpoints_in(self._stored or {})[0] if one.kind == FULL]
        newest = sorted({*of_store, *map(number_of, full)})[-self.keep :]
        return [*list_checkpoints(folder, WEIGHTS)[::-1], *(path for path in full if number_of(path) in newest)]

    def _lacking(self) -> list[Path]:
        """Return the checkpoints that the store is to have, and has not."""
        lacking = []
        for path in self._local():
            with contextlib.suppress(FileNotFoundError):
                if files_of(path).keys() - (self._stored or {}).keys():
                    lacking.append(path)
        return lacking

    def _prune(self, newest: Path | None) -> None:
        """Remove full checkpoints beyond `keep`, those of the newest's batch with other bytes, and halves."""
        assert self._stored is not None
        whole, halves = checkpoints_in(self._stored)
        old = [one for one in whole if one.kind == FULL][self.keep :]
        if newest is not None:
            stem = newest.name.rpartition("-")[0]
            old += [one for one in whole if one.name.rpartition("-")[0] == stem and one.name != newest.name]
        for one in [*halves, *old]:
            self.store.remove_checkpoint(one.files)
            for name in one.files:
                self._stored.pop(name, None)
            self._moved()


@contextlib.contextmanager
def uploading(remote: str | None, folder: Path, *, keep: int, patience_sec: float) -> Iterator[Uploads | None]:
    """Yield the uploads of a run on rank 0; None on other ranks, or if save.remote is not given.

    At the end of the context, also after an error, rank 0 waits until all is uploaded, if uploads were started.

    Raises:
        Missing: not all of it could be uploaded.
    """
    if remote is None or dist.get_global_rank() != 0:
        yield None
        return
    uploads = Uploads(RunStore(remote, folder.name), folder, keep, patience_sec)
    with uploads.wait_at_end():
        yield uploads


def start_uploads(uploads: Uploads | None) -> None:
    """Begin to upload what the run's folder has, if this rank does."""
    if uploads is not None:
        uploads.start()


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
