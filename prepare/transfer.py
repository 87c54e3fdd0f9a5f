"""Fetch files over HTTP: resumed, several at once, each whole and compared with its digest before it takes its name.

    outcomes = fetch_all([Wanted("a.tar", ("https://...",), 123, "sha256:...")], Path("/data"))

    FOLDER/NAME                  a whole file
    FOLDER/.work/NAME.part       what has come of another one; NAME has %2F for its slashes
    FOLDER/.work/NAME.json       from where, and which version of it: its ETag, or its time

A file goes on where it was stopped: by a Range for the same version (If-Range), or where its digest is known by any Range,
since the digest is then compared. A server that ignores ranges sends it from the beginning. Nothing is decompressed on the
way, nothing is longer than it may be, and a web page in place of a file is refused. A mirror that fails is followed by the
next one. Tries that bring something are not counted, so that a proxy that cuts every answer only takes time.

A token goes to the host of the first address alone. It is dropped where that one redirects to another host.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from tqdm import tqdm

from cli.errors import Failed, Refused
from cli.files import write_json
from cli.limits import shown
from cli.log import log
from prepare.answers import LONGEST_WAIT_SEC, Answer, Fault, Session, Wrong, ask, shown_url, without_query
from prepare.places import Folder
from prepare.wanted import Memory, Wanted, check_wanted, wrong_digest

SILENCE_SEC = 60.0
MOST_BYTES = 2**34  # of a file whose size nobody says
PAGE = re.compile(rb"\s*(<!--.*?-->\s*)*<(!doctype html|html)\b", re.I | re.S)
PAGE_SUFFIXES = (".html", ".htm", ".xhtml")
GO_ON = "What has come stays; the same command resumes from there"


@dataclass(frozen=True)
class Outcome:
    """What became of one file.

    is_fetched: it came now, or a newer one did; False: it was there, or it could not be had.
    reason: why it could not be had, of each address; None: it is there.
    is_refused: an address asked for access.
    """

    name: str
    is_fetched: bool = False
    reason: str | None = None
    is_refused: bool = False


class _Stopped(Exception):
    """Another file's end, or the user's, ends this one."""


@dataclass(frozen=True)
class _Ways:
    """How to fetch, as `fetch_all` takes it."""

    timeout_sec: float
    tries: int
    wait_sec: float
    most_bytes: int


def fetch_all(
    wanted: Sequence[Wanted],
    folder: Path,
    at_once: int = 4,
    timeout_sec: float = SILENCE_SEC,
    tries: int = 5,
    *,
    wait_sec: float = 1.0,
    most_bytes: int = MOST_BYTES,
    about_bytes: int = 0,
    word: str = "to",
    is_quiet: bool = False,
) -> list[Outcome]:
    """Fetch what the folder lacks, and compare what it has.

    The folder is locked meanwhile, as `Folder.only_writer` does it: a caller that has it locked takes another one inside it.

    Args:
        at_once: files.
        timeout_sec: longest silence of a server.
        tries: of one address that bring nothing, one after the other.
        wait_sec: before the second of them; then twice as long each, up to a minute.
        most_bytes: of a file whose size is not known and not said by its server.
        about_bytes: of all files together, where their sizes are not known: that much room has to be on the disk.
        word: key of the folder in messages.
        is_quiet: shows no progress.

    Returns:
        an outcome for each, in order; those with a reason are not there.

    Raises:
        ValueError: an entry is no good, see `check_wanted`.
        Refused: another command is at work in the folder, or it has no room, or cannot be written.
        Failed: the disk failed meanwhile.
    """
    check_wanted(wanted)
    place, ways = Folder(str(folder)), _Ways(timeout_sec, tries, wait_sec, most_bytes)
    with place.only_writer(word):
        memory = Memory(folder)
        try:
            missing = _missing(wanted, memory, at_once)
            _check_room(wanted, missing, place, word, about_bytes)
        except OSError as error:
            raise Refused(f"{word}: {folder} cannot be read: {error}. Give another folder.") from error
        total, began = sum(one.bytes or 0 for one in missing), _begun(missing, place)
        bar: dict[str, Any] = dict(unit="B", unit_scale=True, disable=is_quiet or not missing)
        with tqdm(total=max(total, began) or None, initial=began, **bar) as progress:
            done = _fetch_each(missing, place, memory, ways, at_once, progress, word)
    return [done.get(one.name, Outcome(one.name)) for one in wanted]


def _missing(wanted: Sequence[Wanted], memory: Memory, at_once: int) -> list[Wanted]:
    """Return what is not there, or not as it should be. Digests that were never compared are compared now."""
    seen = {one.name: memory.look(one) for one in wanted}
    unread = [one for one in wanted if seen[one.name].state == "unread"]
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        found = pool.map(lambda one: memory.look(one, read=True), unread)
        for one, now in zip(tqdm(unread, unit=" files", desc="compared", disable=not unread), found, strict=True):
            seen[one.name] = now
    for name, one in seen.items():
        if one.state == "wrong":
            log.warning(f"{memory.folder / name}: {one.text}. It is fetched again.")
    return [one for one in wanted if seen[one.name].state != "there"]


def _begun(missing: Sequence[Wanted], place: Folder) -> int:
    """Return how many bytes of files that are still to come have come."""
    return sum(path.stat().st_size for one in missing if (path := _part(place, one.name)).is_file())


def _check_room(
    wanted: Sequence[Wanted], missing: Sequence[Wanted], place: Folder, word: str, about_bytes: int
) -> None:
    """Raise Refused if the disk has not the room for the files."""
    to_come = {one.name for one in missing}
    have = sum((place.path / one.name).stat().st_size for one in wanted if one.name not in to_come)
    known, free = sum(one.bytes or 0 for one in missing), shutil.disk_usage(place.path).free
    need = max(known, about_bytes - have if missing else 0) - _begun(missing, place)
    if need > free:
        about = "about " if need > known else ""
        text = f"{about}{need / 2**30:.3g} GiB are to come, {free / 2**30:.3g} GiB are free"
        raise Refused(f"{word}: {place.address}: {text}. Make room there, or give another folder.")


def _fetch_each(
    missing: Sequence[Wanted], place: Folder, memory: Memory, ways: _Ways, at_once: int, progress: Any, word: str
) -> dict[str, Outcome]:
    """Fetch files in threads, each with a session of its own. Raises Failed: the disk failed."""
    stop, of_thread, done = threading.Event(), threading.local(), {}

    def fetch(one: Wanted) -> Outcome:
        if not hasattr(of_thread, "session"):
            of_thread.session = Session()
        return _File(one, place, memory, ways, of_thread.session, progress, stop).fetch()

    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        futures = {pool.submit(fetch, one): one for one in missing}
        try:
            for number, future in enumerate(concurrent.futures.as_completed(futures), 1):
                outcome = future.result()
                done[outcome.name] = outcome
                progress.set_description(f"{number} of {len(missing)} files", refresh=False)
        except OSError as error:
            raise Failed(f"{word}: {place.address} cannot be written: {error}. {GO_ON}.") from error
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
    return done


def _part(place: Folder, name: str) -> Path:
    return place.scratch / f"{quote(name, safe='')}.part"


# ---------------------------------------------------------------------------------------------------------------------
# One file
# ---------------------------------------------------------------------------------------------------------------------


class _File:
    """One file on its way."""

    def __init__(
        self,
        wanted: Wanted,
        place: Folder,
        memory: Memory,
        ways: _Ways,
        session: Session,
        progress: Any,
        stop: threading.Event,
    ) -> None:
        self.wanted, self.place, self.memory, self.ways = wanted, place, memory, ways
        self.session, self.progress, self.stop = session, progress, stop
        self.part = _part(place, wanted.name)
        self.state = self.part.with_suffix(".json")

    @property
    def size(self) -> int:
        """Bytes that have come."""
        return self.part.stat().st_size if self.part.is_file() else 0

    def fetch(self) -> Outcome:
        """Try one address after the other. Raises OSError: of the disk; _Stopped."""
        reasons, is_refused = [], False
        for url in self.wanted.urls:
            try:
                self._from(url)
                return Outcome(self.wanted.name, is_fetched=True)
            except Fault as fault:
                reasons.append(f"{shown_url(url)}: {fault}")
                is_refused |= fault.is_refused
        return Outcome(self.wanted.name, reason="; ".join(reasons), is_refused=is_refused)

    def _from(self, url: str) -> None:
        """Fetch it from one address. Raises Fault, OSError, _Stopped."""
        most, idle, is_anew = self.size, 0, False
        while True:
            begin = self.size
            try:
                self._bring(url)
                return self._finish()
            except Wrong as fault:
                self._drop()
                if not begin or is_anew:
                    raise Fault(str(fault)) from fault
                most, is_anew = 0, True  # what was there before may have been another version: once more
            except Fault as fault:
                idle = 0 if self.size > most else idle + 1
                most = max(most, self.size)
                if not fault.again or idle >= self.ways.tries:
                    tried = f", {idle} times" if fault.again and idle > 1 else ""
                    raise Fault(f"{fault}{tried}", is_refused=fault.is_refused) from fault
                self._wait(max(self.ways.wait_sec * 2 ** (idle - 1) if idle else 0.0, fault.after_sec))

    def _wait(self, wait_sec: float) -> None:
        if self.stop.wait(min(wait_sec, LONGEST_WAIT_SEC)):
            raise _Stopped

    def _count(self, num_bytes: int) -> None:
        with self.progress.get_lock():
            self.progress.update(num_bytes)

    def _drop(self) -> None:
        self._count(-self.size)
        self.part.unlink(missing_ok=True)
        self.state.unlink(missing_ok=True)

    def _finish(self) -> None:
        """Compare what has come, and give it its name. Raises Wrong, OSError."""
        wanted, size = self.wanted, self.size
        with open(self.part, "rb") as file:
            head = file.read(2**10)
        is_page = PAGE.match(head) and not wanted.name.endswith(PAGE_SUFFIXES)
        page = "; it is a web page" if is_page else ""
        if wanted.bytes is not None and size != wanted.bytes:
            raise Wrong(f"has {size:,} bytes, {wanted.bytes:,} are wanted{page}")
        if wanted.digest is not None and (text := wrong_digest(self.part, wanted.digest)):
            raise Wrong(f"{text}{page}")
        if is_page and wanted.digest is None:
            raise Wrong("is a web page, as for a login or an error, and no file")
        target = self.place.path / wanted.name
        if target.is_dir():
            raise Fault(f"{target} is a folder. Remove it")
        if wanted.digest is not None:
            self.memory.keep(wanted, path=self.part)
        self.place.put(wanted.name, self.part)
        self.state.unlink(missing_ok=True)

    # --- an answer ---

    def _bring(self, url: str) -> None:
        """Ask once, and write what comes to the end of the part. Raises Fault: there is more to come, or none; Wrong."""
        begin, validator = self._go_on_at(url)
        if begin and begin in (self.wanted.bytes, self._state().get("bytes")):
            return
        token = self._token(url)
        with ask(self.session, url, begin, validator, token, self.ways.timeout_sec) as answer:
            total = self._total(answer)
            if answer.begin:
                self._check_rest(answer)
            else:  # also where there is something: another version, or a server that ignores ranges
                self._drop()
                self.part.touch()
                write_json(self.state, {"url": without_query(url), "validator": answer.validator, "bytes": total})
            self._write(answer, total)
        if self.size < (total or 0):
            raise Fault(f"ends after {self.size:,} of {total:,} bytes", again=True)

    def _check_rest(self, answer: Answer) -> None:
        """Raise Wrong if an answer is not the rest of what has come, or nothing says where the file ends."""
        known = self._state().get("bytes")
        if answer.total is not None and known not in (None, answer.total):
            raise Wrong(f"has changed since it was begun: it has {answer.total:,} bytes, had {known:,}")
        if answer.total is None and known is None and self.wanted.digest is None:
            raise Wrong("sends a range of a file whose size it does not know")

    def _state(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            content = json.loads(self.state.read_text())
            return content if isinstance(content, dict) else {}
        return {}

    def _go_on_at(self, url: str) -> tuple[int, str | None]:
        """Return how many bytes of the file are there, and the version that a range has to be of; None: of any."""
        size, state = self.size, self._state()
        if not size or (self.wanted.bytes is not None and size > self.wanted.bytes):
            return self._none_of_it()
        validator = state.get("validator") if state.get("url") == without_query(url) else None
        if validator is None and self.wanted.digest is None:
            return self._none_of_it()
        return size, validator

    def _none_of_it(self) -> tuple[int, None]:
        self._drop()
        return 0, None

    def _total(self, answer: Answer) -> int | None:
        """Return the size that the whole file has to have. Raises Fault: it is not the right one, has no end or no room."""
        total, wanted = answer.total, self.wanted.bytes
        if total is None and answer.begin:
            total = self._state().get("bytes")
        if wanted is not None and total is not None and total != wanted:
            page = "; it is a web page" if answer.kind == "text/html" else ""
            raise Fault(f"has {total:,} bytes, {wanted:,} are wanted{page}")
        is_page = answer.kind == "text/html" and not self.wanted.name.endswith(PAGE_SUFFIXES)
        if is_page and self.wanted.digest is None:
            raise Fault("is a web page, as for a login or an error, and no file")
        if answer.coding and self.wanted.digest is None:
            raise Fault(f"is sent compressed ({shown(answer.coding, 20)}), and no digest says whether that is the file")
        if total is None and wanted is None and self.wanted.digest is None and not answer.has_end:
            raise Fault("comes without a size, and nothing says where it ends")
        if total is not None and total - self.size > (free := shutil.disk_usage(self.place.path).free):
            raise Fault(f"has {total:,} bytes, and {free:,} are free on the disk")
        return total if total is not None else wanted

    def _write(self, answer: Answer, total: int | None) -> None:
        """Write an answer to the end of the part. Raises Fault: it is longer than it may be."""
        most = self.ways.most_bytes if total is None else total
        size = self.size
        with open(self.part, "ab") as file:
            for block in answer.blocks:
                if self.stop.is_set():
                    raise _Stopped
                size += len(block)
                if size > most:
                    file.close()
                    self._drop()
                    raise Fault(f"does not end after {most:,} bytes{'' if total is not None else ', the most taken'}")
                file.write(block)
                self._count(len(block))

    def _token(self, url: str) -> str | None:
        is_of_first = urlsplit(url)[:2] == urlsplit(self.wanted.urls[0])[:2]
        return os.environ.get(self.wanted.token) if self.wanted.token and is_of_first else None
