"""What a server answers to the request for a file, or for the rest of one: its heads read, its faults in words.

Nothing is decompressed: the bytes are the server's. A token goes to the host it was given for; requests drops it where that
one redirects to another.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import requests
import urllib3

from cli.limits import shown

CONNECT_SEC = 15.0
USER_AGENT = "easel"
LONGEST_WAIT_SEC = 60.0
BLOCK_BYTES = 2**17
BUSY = {408, 425, 429, 500, 502, 503, 504, 520, 522, 524}  # may be over in a minute; the last three are Cloudflare's
NO_ACCESS = {401, 403, 407, 451}
NO_MORE = 416


class Fault(Exception):
    """An address that does not give the file. `again`: it may in a while; `after_sec`: when, by its own word."""

    def __init__(self, text: str, *, again: bool = False, after_sec: float = 0.0, is_refused: bool = False):
        self.again, self.after_sec, self.is_refused = again, after_sec, is_refused
        super().__init__(text)


class Wrong(Exception):
    """What has come is not the file."""


@dataclass(frozen=True)
class Answer:
    """Bytes from `begin` on of a file that has `total` of them.

    validator: of its version, for If-Range; kind: its media type; coding: its compression, "" for none.
    has_end: the answer itself says where it ends.
    """

    begin: int
    total: int | None
    blocks: Iterator[bytes]
    validator: str | None = None
    kind: str = ""
    coding: str = ""
    has_end: bool = True


@contextlib.contextmanager
def ask(
    session: requests.Session, url: str, begin: int, validator: str | None, token: str | None, timeout_sec: float
) -> Iterator[Answer]:
    """Ask for a file from a byte on.

    Args:
        validator: of the version that the rest has to be of; another one is then sent from its beginning.
        token: for this host alone.
        timeout_sec: longest silence.

    Raises:
        Fault: there is none, or the way there failed, also while its blocks are read.
        Wrong: the file ends before that byte, or another part of it is sent.
    """
    with _faults_of_the_way(timeout_sec):
        if url.startswith("file://"):
            with _open_file(url) as file:
                file.seek(begin)
                blocks = iter(functools.partial(file.read, BLOCK_BYTES), b"")
                yield Answer(begin, os.fstat(file.fileno()).st_size, blocks)
            return
        headers = {"Accept-Encoding": "identity", "User-Agent": USER_AGENT}
        if begin:
            headers |= {"Range": f"bytes={begin}-"} | ({"If-Range": validator} if validator else {})
        patience = (min(CONNECT_SEC, timeout_sec), timeout_sec)
        with session.get(url, headers=headers, auth=_bearer(token), stream=True, timeout=patience) as response:
            _check_status(response, begin)
            yield _read_answer(response, begin)


def _bearer(token: str | None) -> Any:
    """Return what gives a request its token. Without one it is there too: no password of ~/.netrc is sent in its place."""

    def add(request: Any) -> Any:
        if token:
            request.headers["Authorization"] = f"Bearer {token}"
        return request

    return add


def _read_answer(response: requests.Response, begin: int) -> Answer:
    """Read the heads of an answer 200 or 206. Raises Wrong: it is another range than was asked for."""
    heads = response.headers
    etag, coding = heads.get("ETag", ""), heads.get("Content-Encoding", "").lower().replace("identity", "")
    length = heads.get("Content-Length", "")
    total = int(length) if length.isdecimal() else None
    if response.status_code == 206:
        span = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", heads.get("Content-Range", ""))
        if span is None or int(span[1]) != begin:
            raise Wrong(f"sends another range than bytes={begin}-: {shown(heads.get('Content-Range', 'none'))}")
        total = int(span[3]) if span[3] != "*" else None
    else:
        begin = 0
    return Answer(
        begin,
        total,
        response.raw.stream(BLOCK_BYTES, decode_content=False),
        validator=(etag if etag.startswith('"') else None) or heads.get("Last-Modified"),
        kind=heads.get("Content-Type", "").partition(";")[0].strip().lower(),
        coding=coding,
        has_end=bool(length) or "chunked" in heads.get("Transfer-Encoding", "").lower(),
    )


def _check_status(response: requests.Response, begin: int) -> None:
    """Raise Fault or Wrong if an answer has no file."""
    status = response.status_code
    if status in (200, 206):
        return
    if status == NO_MORE:
        raise Wrong(f"has no more than {begin:,} bytes")
    said = f"HTTP {status}" + (f" ({shown(response.reason, 40)})" if response.reason else "")
    if status in BUSY:
        raise Fault(said, again=True, after_sec=_retry_after(response.headers.get("Retry-After", "")))
    raise Fault(said, is_refused=status in NO_ACCESS)


def _retry_after(text: str) -> float:
    """Read a header Retry-After: seconds, or a date; 0 where there is none, a minute at most."""
    if text.strip().isdecimal():
        return min(float(text), LONGEST_WAIT_SEC)
    with contextlib.suppress(ValueError, TypeError, IndexError):
        return min(max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0), LONGEST_WAIT_SEC)
    return 0.0


@contextlib.contextmanager
def _faults_of_the_way(timeout_sec: float) -> Iterator[None]:
    """Turn what requests and urllib3 raise into Fault; an OSError that is left is the disk's."""
    try:
        yield
    except (
        requests.exceptions.InvalidURL,
        requests.exceptions.MissingSchema,
        requests.exceptions.InvalidSchema,
    ) as error:
        raise Fault(f"is no address ({shown(str(error))})") from error
    except requests.exceptions.TooManyRedirects as error:
        raise Fault("redirects without an end") from error
    except requests.exceptions.SSLError as error:
        raise Fault(f"its certificate is not accepted ({_cause(error)})") from error
    except (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError) as error:
        raise Fault(f"was silent for {timeout_sec:g} s", again=True) from error
    except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
        raise Fault(f"the connection failed ({_cause(error)})", again=True) from error


def _cause(error: BaseException) -> str:
    """Return the innermost reason in a few words: libraries wrap them three deep."""
    while isinstance(inner := getattr(error, "reason", None) or error.__context__, BaseException):
        error = inner
    return f"{type(error).__name__}: {shown(str(error), 100)}"


@contextlib.contextmanager
def _open_file(url: str) -> Iterator[Any]:
    """Open a file of this machine. Raises Fault."""
    path = Path(unquote(urlsplit(url).path))
    try:
        if not path.is_file():
            raise Fault("there is no such file")
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise Fault(f"cannot be read ({error.strerror})") from error
    with file:
        yield file


def without_query(url: str) -> str:
    """Return an address without what may be a secret, or changes each time: account, query, fragment."""
    place = urlsplit(url)
    return f"{place.scheme}://{place.netloc.rpartition('@')[2]}{place.path}"


def shown_url(url: str) -> str:
    """Return an address for a message."""
    return shown(without_query(url), 160)
