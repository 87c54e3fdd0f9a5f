"""What a server answers to the request for a file, or for the rest of one: its heads read, its faults in words.

Nothing is decompressed: the bytes are the server's. A token goes to the host it was given for, and to none that this one
redirects to; a password of ~/.netrc goes to no host at all.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import requests
import urllib3

from cli.limits import shown

CONNECT_SEC = 15.0
USER_AGENT = "easel"
LONGEST_WAIT_SEC = 60.0
BLOCK_BYTES = 2**17
MAX_REDIRECTS = 30
MAX_LINES = 1000  # of headers, of answers 100 before them, and of trailers
BUSY = {408, 425, 429, 500, 502, 503, 504, 520, 522, 524}  # may be over in a minute; the last three are Cloudflare's
NO_ACCESS = {401, 403, 407, 451}
NO_MORE = 416


class _Reader(io.BufferedReader):
    """What a server sends, without what http.client and urllib3 would read for ever or into memory whole."""

    _lines = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        self._lines += 1
        if self._lines > MAX_LINES:
            raise http.client.HTTPException(f"more than {MAX_LINES:,} lines of headers")
        return super().readline(size)

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:  # files are read in blocks: only the length of a chunk is negative
            raise http.client.HTTPException("a chunk of negative length")
        self._lines = 0
        return super().read(size)


class _Response(http.client.HTTPResponse):
    def __init__(self, *given: Any, **more: Any):
        super().__init__(*given, **more)
        self.fp: Any = _Reader(self.fp.detach())


class _Plain(urllib3.connection.HTTPConnection):
    response_class = _Response


class _Secure(urllib3.connection.HTTPSConnection):
    response_class = _Response


class _PlainPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Plain


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _Secure


class _Adapter(requests.adapters.HTTPAdapter):
    def init_poolmanager(self, *given: Any, **more: Any) -> None:
        super().init_poolmanager(*given, **more)
        self.poolmanager.pool_classes_by_scheme = POOLS

    def proxy_manager_for(self, proxy: str, **more: Any) -> Any:
        manager = super().proxy_manager_for(proxy, **more)
        if not proxy.lower().startswith("socks"):  # which has pools of its own
            manager.pool_classes_by_scheme = POOLS
        return manager


POOLS = {"http": _PlainPool, "https": _SecurePool}


class Session(requests.Session):
    """A session that follows no redirect by itself: requests would read the whole body of one, see `_followed`."""

    def __init__(self) -> None:
        super().__init__()
        for scheme in POOLS:
            self.mount(f"{scheme}://", _Adapter())

    def get_redirect_target(self, resp: requests.Response) -> None:
        return None


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
    session: Session, url: str, begin: int, validator: str | None, token: str | None, timeout_sec: float
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
        with _followed(session, url, headers, token, patience) as response:
            _check_status(response, begin)
            yield _read_answer(response, begin, validator)


@contextlib.contextmanager
def _followed(
    session: Session, url: str, headers: dict[str, str], token: str | None, patience: tuple[float, float]
) -> Iterator[requests.Response]:
    """Ask, and follow redirects, whose bodies are left unread. Raises Fault: they do not end."""
    for _ in range(MAX_REDIRECTS):
        with session.get(url, headers=headers, auth=_bearer(token), stream=True, timeout=patience) as response:
            if not response.is_redirect:
                yield response
                return
            target = urljoin(response.url, response.headers["Location"].encode("latin1").decode())
        if session.should_strip_auth(url, target):
            token = None
        url = target
    raise Fault("redirects without an end")


def _bearer(token: str | None) -> Any:
    """Return what gives a request its token. Without one it is there too: no password of ~/.netrc is sent in its place."""

    def add(request: Any) -> Any:
        if token:
            request.headers["Authorization"] = f"Bearer {token}"
        return request

    return add


def _read_answer(response: requests.Response, begin: int, validator: str | None) -> Answer:
    """Read the heads of an answer 200 or 206. Raises Wrong: another range was asked for, or of another version."""
    heads = response.headers
    etag, coding = heads.get("ETag", ""), heads.get("Content-Encoding", "").lower().replace("identity", "")
    now = (etag if etag.startswith('"') else None) or heads.get("Last-Modified")
    length = total = _number(heads.get("Content-Length", ""))
    if response.status_code == 206:
        span = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", heads.get("Content-Range", ""))
        if span is None or int(span[1]) != begin:
            raise Wrong(f"sends another range than bytes={begin}-: {shown(heads.get('Content-Range', 'none'))}")
        if validator and now and validator != now and validator.startswith('"') == now.startswith('"'):
            raise Wrong(f"has changed since it was begun: it is {shown(now)}, was {shown(validator)}")
        total = _number(span[3])
    else:
        begin = 0
    return Answer(
        begin,
        total,
        response.raw.stream(BLOCK_BYTES, decode_content=False),
        validator=now,
        kind=heads.get("Content-Type", "").partition(";")[0].strip().lower(),
        coding=coding,
        has_end=length is not None or "chunked" in heads.get("Transfer-Encoding", "").lower(),
    )


def _number(text: str) -> int | None:
    """Read a number of bytes; None for anything else, such as one of thousands of digits, which int() refuses."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


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
    with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError):
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
    except requests.exceptions.SSLError as error:
        raise Fault(f"its certificate is not accepted ({_cause(error)})") from error
    except (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError) as error:
        raise Fault(f"was silent for {timeout_sec:g} s", again=True) from error
    except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
        raise Fault(f"the connection failed ({_cause(error)})", again=True) from error
    except ValueError as error:  # of urllib.parse, of a decoder, of int(): a Location, a length
        raise Fault(f"answers what cannot be read ({_cause(error)})") from error


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
