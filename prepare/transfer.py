"""Fetch files over HTTP: resumed, several at once, each whole and compared with its digest before it takes its name.

    outcomes = fetch_all([Wanted("a.tar", ("https://...",), 123, "sha256:...")], Path("/data"))

    FOLDER/NAME                  a whole file
    FOLDER/.work/NAME.part       the bytes of an unfinished one; NAME has %2F for its slashes
    FOLDER/.work/NAME.json       its address, its version there (ETag, or time) and its size

A file is resumed by a Range for the same version (If-Range), or, where its digest is known, by any Range: the digest is
compared at the end. A server that ignores ranges sends it from the beginning. Nothing is decompressed, nothing is longer
than it may be, and a web page in place of a file is refused. After a mirror that fails the next one is asked. Only tries
that bring nothing are counted.

A token goes to the host of the first address alone, and to none that it redirects to. ~/.netrc is not read.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import httpx2
from tqdm import tqdm

from cli.errors import Failed, Refused
from cli.files import write_json
from cli.limits import shown
from cli.log import log
from prepare.places import Folder
from prepare.wanted import Memory, Wanted, check_wanted, wrong_digest

CONNECT_SEC, SILENCE_SEC, LONGEST_WAIT_SEC = 15.0, 60.0, 60.0
MOST_BYTES = 2**34  # of a file whose size is unknown
MAX_REDIRECTS = 30
BUSY = {408, 425, 429, 500, 502, 503, 504, 520, 522, 524}  # may be over in a minute; the last three are Cloudflare's
NO_ACCESS = {401, 403, 407, 451}
PAGE = re.compile(rb"\s*(<!--.*?-->\s*)*<(!doctype html|html)\b", re.I | re.S)
PAGE_SUFFIXES = (".html", ".htm", ".xhtml")
GO_ON = "What has come stays; the same command resumes from there"

logging.getLogger("httpx2").setLevel(logging.WARNING)  # its lines have whole addresses, with what is secret in them


@dataclass(frozen=True)
class Outcome:
    """What became of one file.

    is_fetched: it was fetched now; False: it was there, or it is not available.
    reason: why it is not available, for each address; None: it is there.
    is_refused: an address asked for access.
    """

    name: str
    is_fetched: bool = False
    reason: str | None = None
    is_refused: bool = False


class Fault(Exception):
    """An address does not give the file.

    again: it may in a while, `after_sec` by its own word; is_wrong: what has come is not the file; is_refused: no access.
    """

    def __init__(
        self,
        text: str,
        *,
        again: bool = False,
        after_sec: float = 0.0,
        is_wrong: bool = False,
        is_refused: bool = False,
    ):
        self.again, self.after_sec, self.is_wrong, self.is_refused = again, after_sec, is_wrong, is_refused
        super().__init__(text)


class _Stopped(Exception):
    """The end of another file, or the user, ends this one."""


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
    """Fetch what the folder lacks, and compare its contents. The folder is locked, as `Folder.only_writer` does it.

    Args:
        at_once: files.
        timeout_sec: longest silence of a server.
        tries: of one address that bring nothing, one after the other.
        wait_sec: before the second of them; then twice as long each, up to a minute.
        most_bytes: of a file whose size nobody says.
        about_bytes: of all files together, where their sizes are unknown: that much room has to be on the disk.
        word: key of the folder in messages.
        is_quiet: shows no progress.

    Returns:
        an outcome for each, in order; those with a reason are not there.

    Raises:
        ValueError: an entry is no good, see `check_wanted`.
        Refused: another command is at work in the folder, or it has no room, or cannot be written. Failed: the disk failed.
    """
    check_wanted(wanted)
    place, done, stop = Folder(str(folder)), {}, threading.Event()
    patience = httpx2.Timeout(timeout_sec, connect=min(CONNECT_SEC, timeout_sec))
    with place.only_writer(word), httpx2.Client(timeout=patience, headers={"User-Agent": "easel"}) as client:
        memory = Memory(folder)
        try:
            missing = _missing(wanted, memory, at_once)
            _check_room(wanted, missing, place, word, about_bytes)
        except OSError as error:
            raise Refused(f"{word}: {folder} cannot be read: {error}. Give another folder.") from error
        total, begun = sum(one.bytes or 0 for one in missing), _begun(missing, place)
        bar: dict[str, Any] = dict(unit="B", unit_scale=True, disable=is_quiet or not missing)
        with (
            tqdm(total=max(total, begun) or None, initial=begun, **bar) as progress,
            concurrent.futures.ThreadPoolExecutor(at_once) as pool,
        ):
            shared = place, memory, client, progress, stop, (tries, wait_sec, most_bytes)
            futures = [pool.submit(_Download(one, *shared).fetch) for one in missing]
            try:
                for number, future in enumerate(concurrent.futures.as_completed(futures), 1):
                    done[future.result().name] = future.result()
                    progress.set_description(f"{number} of {len(missing)} files", refresh=False)
            except OSError as error:
                raise Failed(f"{word}: {place.address} cannot be written: {error}. {GO_ON}.") from error
            finally:
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
    return [done.get(one.name, Outcome(one.name)) for one in wanted]


def _missing(wanted: Sequence[Wanted], memory: Memory, at_once: int) -> list[Wanted]:
    """Return what is not there, or not as it should be. Digests that were never compared are compared now."""
    unread = {one.name for one in wanted if memory.look(one).state == "unread"}
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        looks = pool.map(functools.partial(memory.look, read=True), wanted)
        seen = list(tqdm(looks, total=len(wanted), unit=" files", desc="compared", disable=not unread))
    for one, found in zip(wanted, seen, strict=True):
        if found.state == "wrong":
            log.warning(f"{memory.folder / one.name}: {found.text}. It is fetched again.")
    return [one for one, found in zip(wanted, seen, strict=True) if found.state != "there"]


def _part(place: Folder, name: str) -> Path:
    return place.scratch / f"{quote(name, safe='')}.part"


def _begun(missing: Sequence[Wanted], place: Folder) -> int:
    """Return how many bytes of unfinished files are there."""
    return sum(path.stat().st_size for one in missing if (path := _part(place, one.name)).is_file())


def _check_room(
    wanted: Sequence[Wanted], missing: Sequence[Wanted], place: Folder, word: str, about_bytes: int
) -> None:
    """Raise Refused if the disk has no room for the files."""
    have = sum((place.path / one.name).stat().st_size for one in wanted if one not in missing) if about_bytes else 0
    known, free = sum(one.bytes or 0 for one in missing), shutil.disk_usage(place.path).free
    need = max(known, about_bytes - have if missing else 0) - _begun(missing, place)
    if need > free:
        about = "about " if need > known else ""
        text = f"{about}{need / 2**30:.3g} GiB are to come, {free / 2**30:.3g} GiB are free"
        raise Refused(f"{word}: {place.address}: {text}. Make room there, or give another folder.")


# ---------------------------------------------------------------------------------------------------------------------
# One file
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """Bytes of a file from `begin` on. validator: its version, for If-Range; has_end: the answer says where it ends."""

    begin: int
    total: int | None
    blocks: Iterator[bytes]
    validator: str | None = None
    is_coded: bool = False
    has_end: bool = True


@dataclass
class _Download:
    """The resumable download of one file. ways: tries, wait_sec, most_bytes, as `fetch_all` takes them."""

    wanted: Wanted
    place: Folder
    memory: Memory
    client: httpx2.Client
    progress: Any
    stop: threading.Event
    ways: tuple[int, float, int]

    def __post_init__(self) -> None:
        self.part = _part(self.place, self.wanted.name)
        self.state = self.part.with_suffix(".json")

    @property
    def size(self) -> int:
        """Bytes that have come."""
        return self.part.stat().st_size if self.part.is_file() else 0

    def fetch(self) -> Outcome:
        """Try one address after the other. Raises OSError: the disk failed; _Stopped."""
        reasons, is_refused = [], False
        for url in self.wanted.urls:
            try:
                self._from(url)
                return Outcome(self.wanted.name, is_fetched=True)
            except Fault as fault:
                reasons.append(f"{shown(without_query(url), 160)}: {fault}")
                is_refused |= fault.is_refused
        return Outcome(self.wanted.name, reason="; ".join(reasons), is_refused=is_refused)

    def _from(self, url: str) -> None:
        """Fetch it from one address. Raises Fault, OSError, _Stopped."""
        (tries, wait_sec, _), most, idle, is_anew = self.ways, self.size, 0, False
        while True:
            begin = self.size
            try:
                self._bring(url)
                return self._finish()
            except Fault as fault:
                if fault.is_wrong:
                    self._drop()
                    if not begin or is_anew:
                        raise
                    most, is_anew = 0, True  # what was there before may have been another version: once more
                    continue
                idle = 0 if self.size > most else idle + 1
                most = max(most, self.size)
                if not fault.again or idle >= tries:
                    tried = f", {idle} times" if fault.again and idle > 1 else ""
                    raise Fault(f"{fault}{tried}", is_refused=fault.is_refused) from fault
                wait = max(wait_sec * 2 ** (idle - 1) if idle else 0.0, fault.after_sec)
                if self.stop.wait(min(wait, LONGEST_WAIT_SEC)):
                    raise _Stopped from fault

    def _count(self, num_bytes: int) -> None:
        with self.progress.get_lock():
            self.progress.update(num_bytes)

    def _drop(self) -> None:
        self._count(-self.size)
        self.part.unlink(missing_ok=True)
        self.state.unlink(missing_ok=True)

    def _bring(self, url: str) -> None:
        """Ask once, and append what comes. Raises Fault: there is more to come, or it is not the file."""
        state, wanted, address = {}, self.wanted, without_query(url)
        with contextlib.suppress(OSError, ValueError):
            state = dict(json.loads(self.state.read_text()))
        validator = state.get("validator") if state.get("url") == address else None
        if self.size and validator is None and wanted.digest is None:
            self._drop()  # nothing would say that the rest is of the same version
        begin = self.size
        if begin and begin in (wanted.bytes, state.get("bytes")):
            return
        is_first = urlsplit(url)[:2] == urlsplit(wanted.urls[0])[:2]
        token = os.environ.get(wanted.token) if wanted.token and is_first else None
        with _faults(self.client.timeout.read), _ask(self.client, url, begin, validator, token) as answer:
            total = self._total(answer)
            if not answer.begin:  # also where there is something: another version, or a server that ignores ranges
                self._drop()
                self.part.touch()
                write_json(self.state, {"url": address, "validator": answer.validator, "bytes": total})
            elif (known := state.get("bytes")) not in (None, total):
                raise Fault(f"has changed since it was begun: it has {total:,} bytes, had {known:,}", is_wrong=True)
            self._write(answer, total)
        if self.size < (total or 0):
            raise Fault(f"ends after {self.size:,} of {total:,} bytes", again=True)

    def _total(self, answer: Answer) -> int | None:
        """Return the whole file's size. Raises Fault: it is not the right one, has no end or no room."""
        total, wanted = answer.total, self.wanted
        if wanted.bytes is not None and total not in (None, wanted.bytes):
            raise Fault(f"has {total:,} bytes, {wanted.bytes:,} are wanted")
        if answer.is_coded and wanted.digest is None:
            raise Fault("is sent compressed, and no digest says whether that is the file")
        total = wanted.bytes if total is None else total
        if total is None and wanted.digest is None and not answer.has_end:
            raise Fault("comes without a size, and nothing says where it ends")
        if (total or 0) - self.size > (free := shutil.disk_usage(self.place.path).free):
            raise Fault(f"has {total:,} bytes, and {free:,} are free on the disk")
        return total

    def _write(self, answer: Answer, total: int | None) -> None:
        """Append an answer to the part. Raises Fault: it is longer than it may be."""
        size, most = self.size, self.ways[2] if total is None else total
        with open(self.part, "ab") as file:
            for block in answer.blocks:
                if self.stop.is_set():
                    raise _Stopped
                if (size := size + len(block)) > most:
                    text = f"does not end after {most:,} bytes{'' if total is not None else ', the most taken'}"
                    raise Fault(text, is_wrong=True)
                file.write(block)
                self._count(len(block))

    def _finish(self) -> None:
        """Compare what has come, and give it its name. Raises Fault, OSError."""
        wanted, size, target = self.wanted, self.size, self.place.path / self.wanted.name
        if wanted.bytes is not None and size != wanted.bytes:
            raise Fault(f"has {size:,} bytes, {wanted.bytes:,} are wanted", is_wrong=True)
        if wanted.digest is not None and (text := wrong_digest(self.part, wanted.digest)):
            raise Fault(text, is_wrong=True)
        with open(self.part, "rb") as file:
            is_page = PAGE.match(file.read(2**10)) and not wanted.name.endswith(PAGE_SUFFIXES)
        if is_page and wanted.digest is None:
            raise Fault("is a web page, as for a login or an error, and no file", is_wrong=True)
        if target.is_dir():
            raise Fault(f"{target} is a folder. Remove it")
        if wanted.digest is not None:
            self.memory.keep(wanted, path=self.part)
        self.place.put(wanted.name, self.part)
        self.state.unlink(missing_ok=True)


@contextlib.contextmanager
def _ask(client: httpx2.Client, url: str, begin: int, validator: str | None, token: str | None) -> Iterator[Answer]:
    """Ask for a file from a byte on; the bodies of redirects are not read. Raises Fault, and what httpx2 raises."""
    if url.startswith("file://"):
        try:
            file = open(unquote(urlsplit(url).path), "rb")  # noqa: SIM115
        except OSError as error:
            raise Fault(f"cannot be read ({error.strerror})") from error
        with file:
            file.seek(begin)
            yield Answer(begin, os.fstat(file.fileno()).st_size, iter(functools.partial(file.read, 2**17), b""))
        return
    headers = {"Accept-Encoding": "identity"}
    if begin:
        headers |= {"Range": f"bytes={begin}-"} | ({"If-Range": validator} if validator else {})
    if token:
        headers["Authorization"] = f"Bearer {token}"  # httpx2 drops it where a redirect names another host
    request = client.build_request("GET", url, headers=headers)
    for _ in range(MAX_REDIRECTS):
        # By this `auth` no password of an address is sent, which a redirect may have.
        response = client.send(request, auth=lambda request: request, stream=True)
        try:
            if response.next_request is None:
                yield _read_answer(response, begin, validator)
                return
            request = response.next_request
        finally:
            response.close()
    raise Fault("redirects without an end")


def _read_answer(response: httpx2.Response, begin: int, validator: str | None) -> Answer:
    """Read the headers of an answer. Raises Fault: there is no file, or another range or version of it."""
    status, heads = response.status_code, response.headers
    if status == 416:
        raise Fault(f"has no more than {begin:,} bytes", is_wrong=True)
    if status not in (200, 206):
        text = f"HTTP {status}" + (f" ({shown(response.reason_phrase, 40)})" if response.reason_phrase else "")
        after = heads.get("Retry-After", "")
        after_sec = float(after) if after.isdecimal() else 0.0
        raise Fault(text, again=status in BUSY, after_sec=after_sec, is_refused=status in NO_ACCESS)
    etag, length = heads.get("ETag", ""), heads.get("Content-Length")
    now = etag if etag.startswith('"') else heads.get("Last-Modified")
    total = int(length) if length is not None else None
    if status == 206:
        span = re.fullmatch(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18})", heads.get("Content-Range", ""))
        if span is None or int(span[1]) != begin:
            text = f"sends another range than bytes={begin}-: {shown(heads.get('Content-Range', 'none'))}"
            raise Fault(text, is_wrong=True)
        if validator and now and validator != now and validator.startswith('"') == now.startswith('"'):
            text = f"has changed since it was begun: it is {shown(now)}, was {shown(validator)}"
            raise Fault(text, is_wrong=True)
        total = int(span[2])
    has_end = length is not None or "chunked" in heads.get("Transfer-Encoding", "").lower()
    is_coded = heads.get("Content-Encoding", "identity").lower() != "identity"
    return Answer(begin if status == 206 else 0, total, response.iter_raw(), now, is_coded, has_end)


@contextlib.contextmanager
def _faults(timeout_sec: float | None) -> Iterator[None]:
    """Turn what httpx2 raises into Fault; an OSError that is left is the disk's."""
    try:
        yield
    except httpx2.TimeoutException as error:
        raise Fault(f"was silent for {timeout_sec:g} s", again=True) from error
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol, ValueError) as error:
        raise Fault(f"answers what cannot be read ({type(error).__name__}: {shown(str(error), 100)})") from error
    except httpx2.HTTPError as error:
        text = f"the connection failed ({type(error).__name__}: {shown(str(error), 100)})"
        raise Fault(text, again=True) from error


def without_query(url: str) -> str:
    """Return an address without what may be a secret, or changes each time: account, query, fragment."""
    place = urlsplit(url)
    return f"{place.scheme}://{place.netloc.rpartition('@')[2]}{place.path}"
