"""A web server on loopback with the faults of the web: files that a test has put there, and what is wrong with each.

    with serving() as web:
        web.put("a.bin", content, cut_after=[1000, 500])     # the first two answers end early, the third is whole
        web.url("a.bin")

Each answer takes the next value of a list of faults; when the list is empty there is none.
"""

from __future__ import annotations

import hashlib
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest


@dataclass
class Served:
    """A file and its faults.

    statuses: of the next answers instead of the file, with `heads`; a status of 0 closes the connection without a word.
    cut_after: bytes after which the next answers break off, their length being that of all.
    pause_sec: before each block of `block` bytes.
    """

    content: bytes
    etag: str | None = None
    modified: str | None = None
    kind: str = "application/octet-stream"
    ranges: bool = True
    honours_if_range: bool = True
    statuses: list[int] = field(default_factory=list)
    heads: dict[str, str] = field(default_factory=dict)
    cut_after: list[int] = field(default_factory=list)
    redirect: str | None = None
    endless: bool = False
    chunked: bool = False
    token: str | None = None
    shift: int = 0
    pause_sec: float = 0.0
    block: int = 2**14


@dataclass
class Web:
    """The files, and what was asked."""

    port: int = 0
    files: dict[str, Served] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Of each request: the name, and its heads in lower case."""

    def put(self, name: str, content: bytes = b"", **faults: object) -> Served:
        faults.setdefault("etag", f'"{hashlib.sha256(content).hexdigest()[:12]}"')
        self.files[name] = Served(content, **faults)  # type: ignore[arg-type]
        return self.files[name]

    def url(self, name: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}/{name}"

    def ranges(self, name: str) -> list[str | None]:
        """Return what was asked of a file, request by request: the Range, or None for all of it."""
        return [heads.get("range") for asked, heads in self.asked if asked == name]


class Server(ThreadingHTTPServer):
    """One that says nothing of clients that leave, as killed ones do."""

    daemon_threads, block_on_close = True, False

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serving(address: str = "127.0.0.1") -> Iterator[Web]:
    """Serve on a free port of this machine."""
    web = Web()
    server = Server((address, 0), _handler(web))
    web.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.fixture
def web() -> Iterator[Web]:
    """A web of one server."""
    with serving() as server:
        yield server


def _handler(web: Web) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            name = unquote(urlsplit(self.path).path.lstrip("/"))
            web.asked.append((name, {key.lower(): value for key, value in self.headers.items()}))
            file = web.files.get(name)
            if file is None:
                self._say(404)
            elif file.token is not None and self.headers.get("Authorization") != f"Bearer {file.token}":
                self._say(403)
            elif file.statuses:
                self._say(file.statuses.pop(0), file.heads)
            elif file.redirect is not None:
                self._say(302, {"Location": file.redirect})
            else:
                self._send(file)

        def _send(self, file: Served) -> None:
            begin, size = 0, len(file.content)
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
            versions = {file.etag, file.modified} - {None}
            condition = self.headers.get("If-Range")
            if asked and file.ranges and (condition is None or condition in versions or not file.honours_if_range):
                begin = int(asked[1])
            if begin and begin >= size:
                self._say(416, {"Content-Range": f"bytes */{size}"})
            else:
                self._send_from(file, begin, size)

        def _send_from(self, file: Served, begin: int, size: int) -> None:
            self.send_response(206 if begin else 200)
            if begin:
                at = begin + file.shift
                self.send_header("Content-Range", f"bytes {at}-{size - 1}/{size}")
            heads = {"ETag": file.etag, "Last-Modified": file.modified, "Content-Type": file.kind, **file.heads}
            for key, value in heads.items():
                if value is not None:
                    self.send_header(key, value)
            if file.chunked:
                self.send_header("Transfer-Encoding", "chunked")
            elif not file.endless:
                self.send_header("Content-Length", str(size - begin))
            else:
                self.close_connection = True
            self.end_headers()
            cut = file.cut_after.pop(0) if file.cut_after else None
            self._body(file, file.content[begin:] if cut is None else file.content[begin:][:cut])
            if cut is not None:
                self.close_connection = True
            elif file.chunked:
                self.wfile.write(b"0\r\n\r\n")

        def _body(self, file: Served, content: bytes) -> None:
            try:
                for start in range(0, len(content), file.block):
                    time.sleep(file.pause_sec)
                    block = content[start : start + file.block]
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(block), block) if file.chunked else block)
                    self.wfile.flush()
                while file.endless:
                    self.wfile.write(b"\0" * file.block)
            except OSError:
                self.close_connection = True  # the client has left

        def _say(self, status: int, heads: dict[str, str] | None = None) -> None:
            if not status:
                self.close_connection = True
                return
            self.send_response(status)
            for key, value in {**(heads or {}), "Content-Length": "0"}.items():
                self.send_header(key, value)
            self.end_headers()

    return Handler
