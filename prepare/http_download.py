"""Download files over HTTP: resumed by ranges, several at once, each compared with its digest before it gets its name.

    outcomes = fetch_all([FileToFetch("a.tar", ("https://...",), 123, "sha256:...")], Path("/data"))

    FOLDER/NAME                  a whole file
    FOLDER/.work/NAME.part       the bytes of an unfinished one; NAME has %2F for its slashes
    FOLDER/.work/NAME.version    the address and the ETag (or time) of a part whose digest is not published

A file with a digest is resumed from any of its addresses, since the digest is compared at the end. One without is resumed
only if its address still has the same version (If-Range). A web page in place of a file is refused, and so are bytes past
its end.

A token is sent to the host of the first address only, and to none that it redirects to. ~/.netrc is not read.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2
from tqdm import tqdm

from common.errors import Failed, Refused
from common.value_types import truncate
from mds.fetch import file_digest
from prepare.addresses import WORK, Folder
from prepare.arguments import RESUME_HINT

CONNECT_SEC, SILENCE_SEC, LONGEST_WAIT_SEC = 15.0, 60.0, 60.0
MAX_BYTES = 2**34  # of a file whose size is unknown
MAX_REDIRECTS = 30
MISSING = "missing"
BUSY_STATUSES = {408, 425, 429, 500, 502, 503, 504, 520, 522, 524}
"""May be over in a minute; the last three are Cloudflare's."""
WEB_PAGE = re.compile(rb"\s*(<!--.*?-->\s*)*<(!doctype html|html)\b", re.I | re.S)
DIGITS = {"sha256": 64, "sha1": 40, "sha512": 128, "md5": 32}
"""Kind of a digest -> number of its hexadecimal digits."""
MAX_NAME_BYTES = 180  # of a part's name in `.work`, with what is added to it: Linux takes 255

logging.getLogger("httpx2").setLevel(logging.WARNING)  # its lines have whole addresses, with what is secret in them


@dataclass(frozen=True)
class FileToFetch:
    """One file that a folder should have.

    name: its path in the folder, with slashes.
    urls: its addresses, in order of preference: http:// or https://.
    bytes: its size; None: not known.
    digest: KIND:DIGITS, the kind one of DIGITS; None: not published.
    token: name of the environment variable with a token for the host of the first URL.
    """

    name: str
    urls: tuple[str, ...]
    bytes: int | None = None
    digest: str | None = None
    token: str | None = None

    def problem(self) -> str | None:
        """Say what is wrong with an entry, which may come from a list on the web; or None."""
        name, parts = self.name, self.name.split("/")
        is_odd = not name.isprintable() or "\\" in name or any(part in ("", ".", "..", WORK) for part in parts)
        if is_odd or len(quote(name, safe="")) > MAX_NAME_BYTES:
            possible = f"NAME, or FOLDER/NAME, up to {MAX_NAME_BYTES} bytes"
            return f"{truncate(name)}: is no path inside a folder. Possible: {possible}."
        if not self.urls or not all(map(is_http_url, self.urls)):
            return f"{name}: its addresses are {list(self.urls)}. Possible: http:// and https://."
        kind, _, digits = (self.digest or "").partition(":")
        if self.digest is not None and not re.fullmatch(rf"[0-9a-f]{{{DIGITS.get(kind, 0)}}}", digits or "-"):
            return f"{name}: its digest is {truncate(self.digest)}. Possible: KIND:DIGITS, with {', '.join(DIGITS)}."
        return None

    def find_fault(self, path: Path, *, read: bool) -> str | None:
        """Say how a file differs from the wanted one, or None. Raises OSError.

        Args:
            read: compare its digest, not only its size.
        """
        if not path.is_file():
            return MISSING
        if self.bytes is not None and (size := path.stat().st_size) != self.bytes:
            return f"has {size:,} bytes, {self.bytes:,} are wanted"
        kind, _, wanted = (self.digest or "").partition(":")
        if read and self.digest and (digest := file_digest(path, kind)) != wanted:
            return f"its {kind} is {digest}, {wanted} is wanted"
        return None


def is_http_url(url: str) -> bool:
    """True for an address that a file can be fetched from: http:// or https://."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:  # a port that is not a number
        return False


def check_files(files: Sequence[FileToFetch]) -> None:
    """Raise ValueError, a problem a line, if an entry is no good, or one folder cannot have both of two."""
    problems = [text for file in files if (text := file.problem())]
    names = Counter(file.name for file in files)
    folders = {str(folder) for name in names for folder in PurePosixPath(name).parents}
    problems += [f"{name}: is wanted twice. Leave one out." for name, count in names.items() if count > 1]
    problems += [f"{name}: is a folder of other files too. Leave it out." for name in folders & names.keys()]
    if problems:
        raise ValueError("\n".join(problems))


class DownloadFault(Exception):
    """An address does not give the file."""


class WrongContent(DownloadFault):
    """The bytes that were sent are not the file."""


class _Stopped(Exception):
    """The end of another file, or the user, ends this one."""


def fetch_all(
    wanted: Sequence[FileToFetch],
    folder: Path,
    at_once: int = 4,
    tries: int = 5,
    *,
    timeout_sec: float = SILENCE_SEC,
    wait_sec: float = 1.0,
    most_bytes: int = MAX_BYTES,
    about_bytes: int = 0,
    argument_name: str = "to",
) -> dict[str, str]:
    """Fetch what the folder lacks. A file that is there with the right size is left as it is.

    Args:
        at_once: files.
        tries: of one address that bring nothing, one after the other.
        timeout_sec: longest silence of a server.
        wait_sec: before the second try; then twice as long each, up to a minute.
        most_bytes: of a file whose size nobody says.
        about_bytes: of all files together, where their sizes are unknown: the disk must have room for those that are missing.
        argument_name: key of the folder in messages.

    Returns:
        name -> why it is not available, for each address; of those that are not there.

    Raises:
        ValueError: an entry is no good, see `check_files`.
        Refused: another command is at work in the folder, or it has no room, or cannot be written. Failed: the disk failed.
    """
    check_files(wanted)
    address, stop = Folder(str(folder)), threading.Event()
    patience = httpx2.Timeout(timeout_sec, connect=min(CONNECT_SEC, timeout_sec))
    with (
        address.lock_for_writing(argument_name),
        httpx2.Client(timeout=patience, headers={"User-Agent": "easel"}) as client,
    ):
        missing = [file for file in wanted if file.find_fault(folder / file.name, read=False)]
        begun_bytes = sum(part.stat().st_size for file in missing if (part := _part_path(address, file)).is_file())
        known_bytes = sum(file.bytes or 0 for file in missing)
        need = max(known_bytes, about_bytes * len(missing) // max(len(wanted), 1)) - begun_bytes
        if need > (free := shutil.disk_usage(folder).free):
            text = f"about {need / 2**30:.3g} GiB are to come, {free / 2**30:.3g} GiB are free"
            raise Refused(f"{argument_name}: {folder}: {text}. Make room there, or give another folder.")
        bar: dict[str, Any] = dict(unit="B", unit_scale=True, desc=f"{len(missing)} files", disable=not missing)
        with (
            tqdm(total=max(known_bytes, begun_bytes) or None, initial=begun_bytes, **bar) as progress,
            concurrent.futures.ThreadPoolExecutor(at_once) as pool,
        ):
            shared_arguments = address, client, progress, stop, tries, wait_sec, most_bytes
            try:
                reasons = list(pool.map(lambda file: _Download(file, *shared_arguments).fetch(), missing))
            except OSError as error:
                raise Failed(f"{argument_name}: {folder} cannot be written: {error}. {RESUME_HINT}.") from error
            finally:
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
    return {file.name: reason for file, reason in zip(missing, reasons, strict=True) if reason}


def _part_path(address: Folder, wanted: FileToFetch) -> Path:
    return address.scratch / f"{quote(wanted.name, safe='')}.part"


@dataclass
class _Download:
    """The resumable download of one file; see `fetch_all`."""

    wanted: FileToFetch
    address: Folder
    client: httpx2.Client
    progress: Any
    stop: threading.Event
    tries: int
    wait_sec: float
    most_bytes: int

    def __post_init__(self) -> None:
        self.part = _part_path(self.address, self.wanted)
        self.version = self.part.with_suffix(".version")

    @property
    def size(self) -> int:
        """Bytes that have come."""
        return self.part.stat().st_size if self.part.is_file() else 0

    def fetch(self) -> str:
        """Try one address after the other; return why none gives it, or "". Raises OSError: the disk failed; _Stopped."""
        reasons = []
        for url in self.wanted.urls:
            try:
                self._fetch_from(url)
                return ""
            except DownloadFault as fault:
                reasons.append(f"{truncate(without_query(url), 160)}: {fault}")
        return "; ".join(reasons)

    def _fetch_from(self, url: str) -> None:
        """Fetch it from one address. Raises Fault, OSError, _Stopped."""
        most, idle, is_anew = self.size, 0, False
        while True:
            begin = self.size
            try:
                self._append(url)
                return self._finish()
            except WrongContent:
                self._drop()
                if not begin or is_anew:
                    raise
                most, is_anew = 0, True  # what was there before may have been another version: once more
            except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:  # an OSError is the disk's
                idle = 0 if self.size > most else idle + 1
                most = max(most, self.size)
                if idle >= self.tries:
                    text = f"{type(error).__name__}: {truncate(str(error), 100)}"
                    raise DownloadFault(f"failed after {idle} tries ({text})") from error
                if self.stop.wait(min(self.wait_sec * 2 ** max(idle - 1, 0), LONGEST_WAIT_SEC)):
                    raise _Stopped from error

    def _drop(self) -> None:
        self.progress.update(-self.size)
        self.part.unlink(missing_ok=True)
        self.version.unlink(missing_ok=True)

    def _append(self, url: str) -> None:
        """Ask once, and append the answer. Raises Fault: it is incomplete, or it is not the file."""
        wanted, address, validator, old_total = self.wanted, without_query(url), "", ""
        if wanted.digest is None and self.size:  # only the server knows whether the rest is of the same version
            version_text = self.version.read_text() if self.version.is_file() else ""
            of_part, validator, old_total, *_ = [*version_text.split("\n"), "", ""]
            if of_part != address or not validator:
                self._drop()
        if (begin := self.size) and begin == wanted.bytes:
            return
        headers = {"Accept-Encoding": "identity"}
        if begin:
            headers |= {"Range": f"bytes={begin}-"} | ({"If-Range": validator} if validator else {})
        is_first = urlsplit(url)[:2] == urlsplit(wanted.urls[0])[:2]
        if wanted.token and is_first and (token := os.environ.get(wanted.token)):
            headers["Authorization"] = f"Bearer {token}"  # httpx2 drops it where a redirect names another host
        with _open_response(self.client, url, headers) as answer:
            heads, length = answer.headers, answer.headers.get("Content-Length")
            if answer.status_code == 416:  # nothing follows what has come: that is the whole file, or another version
                if begin and heads.get("Content-Range") == f"bytes */{begin}":
                    return
                raise WrongContent(f"has no bytes from {begin:,} on")
            etag, total = heads.get("ETag", ""), wanted.bytes if length is None else int(length)
            now = etag if etag.startswith('"') else heads.get("Last-Modified", "")
            if answer.status_code == 206:
                span = re.fullmatch(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18})", heads.get("Content-Range", ""))
                is_other = bool(validator) and (
                    now not in ("", validator) or (old_total and span and span[2] != old_total)
                )
                if span is None or int(span[1]) != begin or is_other:
                    raise WrongContent(f"sends another range or version than bytes={begin}- of before")
                total = int(span[2])
            elif begin:  # another version, or a server that ignores ranges
                self._drop()
            if wanted.bytes is not None and total != wanted.bytes:
                raise DownloadFault(f"has {total:,} bytes, {wanted.bytes:,} are wanted")
            if wanted.digest is None:
                is_coded = heads.get("Content-Encoding", "identity").lower() != "identity"
                if is_coded or (total is None and "chunked" not in heads.get("Transfer-Encoding", "").lower()):
                    raise DownloadFault(
                        "is sent without a size, or compressed, and no digest says whether that is the file"
                    )
                self.version.write_text(f"{address}\n{now}\n{total or ''}")
            self._write(answer, total)

    def _write(self, answer: httpx2.Response, total: int | None) -> None:
        """Append an answer to the part. Raises Fault: it is longer or shorter than it should be."""
        size, most = self.size, self.most_bytes if total is None else total
        with open(self.part, "ab") as file:
            for block in answer.iter_raw():
                if self.stop.is_set():
                    raise _Stopped
                if (size := size + len(block)) > most:
                    raise WrongContent(f"does not end after {most:,} bytes")
                file.write(block)
                self.progress.update(len(block))
        if size < (total or 0):
            raise httpx2.RemoteProtocolError(f"it ends after {size:,} of {total:,} bytes")

    def _finish(self) -> None:
        """Compare what has come, and give it its name. Raises Fault, OSError."""
        wanted = self.wanted
        if text := wanted.find_fault(self.part, read=True):
            raise WrongContent(text)
        with open(self.part, "rb") as file:
            if wanted.digest is None and WEB_PAGE.match(file.read(2**10)):
                raise WrongContent("is a web page, as for a login or an error, and no file")
        self.address.put(wanted.name, self.part)
        self.version.unlink(missing_ok=True)


@contextlib.contextmanager
def _open_response(client: httpx2.Client, url: str, headers: dict[str, str]) -> Iterator[httpx2.Response]:
    """Ask for a file, following redirects whose bodies are not read. Raises Fault: there is none; what httpx2 raises."""
    request = client.build_request("GET", url, headers=headers)
    for _ in range(MAX_REDIRECTS):
        # By this `auth` no password of an address is sent, which a redirect may have, and none of ~/.netrc.
        response = client.send(request, auth=lambda request: request, stream=True)
        try:
            if response.next_request is None:
                if (status := response.status_code) not in (200, 206, 416):
                    text = f"HTTP {status} ({truncate(response.reason_phrase, 40)})"
                    raise httpx2.RemoteProtocolError(text) if status in BUSY_STATUSES else DownloadFault(text)
                yield response
                return
            request = response.next_request
        finally:
            response.close()
    raise DownloadFault("redirects without an end")


def without_query(url: str) -> str:
    """Return an address without what may be a secret, or changes each time: account, query, fragment."""
    address = urlsplit(url)
    return f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"
