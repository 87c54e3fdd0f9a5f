"""A run's checkpoints and record on their way into an object store, behind the step.

A thread of rank 0 brings the store to what the run's folder has: first the record, then the snapshots, then the newest
`save.keep` full checkpoints, the newest first. So a checkpoint that the store has comes after a record that is at least as
new. What it has beyond that is removed. Nothing waits in memory: what is missing lies on the disk. A store that is away is
asked again until it is back, while the run goes on. At its end the run waits, until nothing has moved for
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

from cli.log import log
from evaluation import unfinished
from record.checkpoint_files import FULL, WEIGHTS, listed, number_of
from record.checkpoint_folders import digest_of
from record.files import STARTS, SUMMARY
from record.run_store import CHECKPOINTS, RunStore, checkpoints_in, files_of
from stages.store_errors import explain_store_error

FIRST_WAIT_SEC, LONGEST_WAIT_SEC = 1.0, 20.0  # between two tries
SAY_SEC = 600.0  # between two lines about a store that is away
ASK_SEC = 0.2
REPLACED = "replaced"
"""Folder of what this machine had of a record before the store's took its place."""
NOT_UPLOADED = {CHECKPOINTS.rstrip("/"), unfinished.NAME, REPLACED}


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
        """Why nothing is uploaded any more: the run has been started elsewhere."""
        self.is_started = False
        self.sending: str | None = None
        """Name of the checkpoint that is on its way: it is not removed meanwhile."""
        self._there: dict[str, int] | None = None  # name -> bytes
        self._record: dict[str, tuple[int, int]] = {}  # name -> size and time of what was put last
        self._own: set[str] = set()  # digests of starts.jsonl that this process has put, or tried to
        self._asked = self._done = 0
        self._moved_at = time.monotonic()
        self._most_sent: dict[str, int] = {}  # name -> bytes in the best try
        self._away_since: float | None = None
        self._said_at = 0.0
        self._why = "no answer yet"
        self._wake, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)

    # --- the run's side ---

    def start(self) -> None:
        """Begin with what there is."""
        self.is_started = True
        self.ask()
        self._thread.start()

    def ask(self) -> None:
        """Say that there is something new."""
        self._asked += 1
        self._wake.set()

    def is_kept(self, path: Path) -> bool:
        """True for a checkpoint that must stay on the disk: it is on its way."""
        return path.name == self.sending

    def wait(self, limit_sec: float | None = None) -> str | None:
        """Wait until the store has what the run's folder has now.

        Args:
            limit_sec: however much it moves; None: until nothing has moved for `patience_sec`.

        Returns:
            what it does not have, and why; None: it has all.
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
    def until_there(self) -> Iterator[None]:
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
            f"save.remote: {self.store.address} does not have all of this run: {some or 'its newest files'} not there after "
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
                    self.bring()
                except Replaced as error:
                    self.replaced = str(error)
                    return
                except Exception as error:  # each layer of the client has exceptions of its own
                    self._note(error)
                    self._is_over.wait(wait_sec)
                    wait_sec = min(2 * wait_sec, LONGEST_WAIT_SEC)
                else:
                    self._done = asked
                    break

    def _note(self, error: Exception) -> None:
        """Say that the store is away, once in SAY_SEC."""
        self._there = None
        now = time.monotonic()
        self._why = explain_store_error(error, self.store.address, "written")
        if self._away_since is None:
            self._away_since = now
        elif now - self._said_at < SAY_SEC:
            return
        self._said_at = now
        log.warning(f"save.remote: {self._why} Training goes on, and it is tried again.")

    def _sending(self, name: str) -> Callable[[int], None]:
        """Return what notes bytes of an object on their way. Those that a try before had sent too are no progress: a
        socket takes some unheard.
        """
        sent = 0

        def note(num_bytes: int) -> None:
            nonlocal sent
            sent += num_bytes
            if sent > self._most_sent.get(name, 0):
                self._most_sent[name], self._moved_at = sent, time.monotonic()

        return note

    def _moved(self) -> None:
        """Note that the store has done what it was asked for."""
        self._moved_at = now = time.monotonic()
        if self._away_since is not None:
            log.info(f"save.remote: {self.store.address} is back after {now - self._away_since:.0f} s.")
            self._away_since = None

    def bring(self) -> None:
        """Bring the store to what the folder has. Raises Replaced, and what the store's client raises."""
        if self._there is None:
            self._there = self.store.listed()
            self.store.remove_unfinished()
            self._moved()
        self._bring_record()
        while lacking := self._lacking():
            path = lacking[0]
            self.sending = path.name
            try:
                self._there |= self.store.put_checkpoint(path, self._sending(path.name))
            except FileNotFoundError:
                if path.exists():
                    raise
                continue  # removed since: a newer one is there
            finally:
                self.sending = None
            self._moved()
            self._prune(path)
        self._prune(None)

    def _bring_record(self) -> None:
        assert self._there is not None
        if self._own and self.store.digest_of(STARTS) not in self._own:
            given = f"another start of this run writes into {self.store.address}"
            raise Replaced(f"save.remote: {given}. This one stops: what it has since then is in {self.folder}.")
        # The start first: from then on the run is this process's.
        for name in sorted(self._changed(), key=lambda name: name != STARTS):
            with contextlib.suppress(FileNotFoundError):
                self._put_file(name)
        if SUMMARY in self._there and not (self.folder / SUMMARY).exists():
            self.store.remove(SUMMARY)  # it would say that the run is finished
            del self._there[SUMMARY]

    def _put_file(self, name: str) -> None:
        """Put a file of the record as it is now: a copy, since the run may be appending to it."""
        assert self._there is not None
        path, copy = self.folder / name, self.folder / f".upload.{os.getpid()}.tmp"
        stamp = _stamp(path)
        try:
            shutil.copyfile(path, copy)
            if name == STARTS:
                self._own.add(digest_of(copy))
            self.store.put(copy, name, self._sending(name))
            self._most_sent.pop(name, None)  # it is sent again when it has grown
            self._there[name], self._record[name] = copy.stat().st_size, stamp
        finally:
            copy.unlink(missing_ok=True)
        self._moved()

    def _changed(self) -> set[str]:
        """Return the files of the record that the store does not have as they are."""
        found = set()
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder)
            is_own = name.parts[0] not in NOT_UPLOADED and not any(part.startswith(".") for part in name.parts)
            with contextlib.suppress(FileNotFoundError):
                if is_own and path.is_file() and not path.is_symlink() and self._record.get(str(name)) != _stamp(path):
                    found.add(str(name))
        return found

    def _local(self) -> list[Path]:
        """Return the checkpoints that the store is to have, in the order in which they are uploaded."""
        folder = self.folder / CHECKPOINTS
        full = listed(folder, FULL)
        of_store = [one.number for one in checkpoints_in(self._there or {})[0] if one.kind == FULL]
        kept = sorted({*of_store, *map(number_of, full)})[-self.keep :]
        return [*listed(folder, WEIGHTS)[::-1], *(path for path in full if number_of(path) in kept)]

    def _lacking(self) -> list[Path]:
        """Return the checkpoints that the store is to have, and has not."""
        found = []
        for path in self._local():
            with contextlib.suppress(FileNotFoundError):
                if files_of(path).keys() - (self._there or {}).keys():
                    found.append(path)
        return found

    def _prune(self, newest: Path | None) -> None:
        """Remove full checkpoints beyond `keep`, those of the newest's batch with other bytes, and halves."""
        assert self._there is not None
        whole, halves = checkpoints_in(self._there)
        old = [one for one in whole if one.kind == FULL][self.keep :]
        if newest is not None:
            stem = newest.name.rpartition("-")[0]
            old += [one for one in whole if one.name.rpartition("-")[0] == stem and one.name != newest.name]
        for one in [*halves, *old]:
            self.store.remove_checkpoint(one.files)
            for name in one.files:
                self._there.pop(name, None)
            self._moved()


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
