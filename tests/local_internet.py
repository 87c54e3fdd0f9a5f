"""A small local internet: a table of URLs as LAION publishes it, and the hosts that it names, with their faults.

What a URL gives depends on its path alone, so that two downloads give the same.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from conftest import picture

FAULTS = ("missing", "html", "empty", "text", "cut", "endless", "trickle", "forbidden", "refused", "file", "no_use")
"""Kinds of URLs that give no image."""
GOOD = ("picture", "redirect", "png")


class Handler(BaseHTTPRequestHandler):
    """GET /KIND/NUMBER, and /files/NAME from the server's folder."""

    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *args: Any) -> None:
        pass

    def send(self, content: bytes, status: int = 200, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        _, kind, name = self.path.split("/", 2)
        self.server.asked += 1
        try:
            if kind == "files":
                self.send((self.server.folder / name).read_bytes())
            else:
                self.answer(kind, int(name))
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def answer(self, kind: str, number: int) -> None:
        content = picture(number, (64, 64), "PNG" if kind == "png" else "JPEG")
        if kind in ("endless", "trickle"):
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(bytes(65_536) if kind == "endless" else b".")
                time.sleep(0.0 if kind == "endless" else 0.2)
        elif kind in ("picture", "png", "no_use"):
            robots = {"X_Robots_Tag": ("noai", "none", "img2dataset: noai")[number % 3]} if kind == "no_use" else {}
            self.send(content, **robots)
        elif kind == "cut":
            self.send(content[:-100], length=len(content))
            self.close_connection = True
        else:
            html = b"<!DOCTYPE html><html>gone</html>"
            status, content, headers = {
                "redirect": (302, b"", {"Location": f"/picture/{number}"}),
                "forbidden": (403, b"", {}),
                "html": (200, html, {"Content_Type": "image/jpeg"}),
                "empty": (200, b"", {}),
                "text": (200, b"no picture at all", {}),
            }.get(kind, (404, b"", {}))
            self.send(content, status, **headers)


class Internet(ThreadingHTTPServer):
    """The hosts, on one port of this machine.

    Args:
        folder: of /files/.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.folder, self.asked = folder, 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def internet(folder: Path) -> Iterator[Internet]:
    """Serve from a thread of this process."""
    server = Internet(folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def closed_port() -> int:
    """Return a port at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def url_of(address: str, number: int, closed: int) -> str:
    """Return the URL of a row: every fourth one has a fault, one kind after the other."""
    if number % 4:
        return f"{address}/{GOOD[number % len(GOOD)]}/{number}"
    kind = FAULTS[number // 4 % len(FAULTS)]
    if kind == "refused":
        return f"http://127.0.0.1:{closed}/picture/{number}"
    return "file:///etc/hostname" if kind == "file" else f"{address}/{kind}/{number}"


def rows(address: str, numbers: range, closed: int) -> dict[str, list[Any]]:
    """Return rows of LAION-400M's columns. Of ten, one has no licence, one is small, and one repeats an earlier URL."""
    urls = [url_of(address, number - 7 if number % 10 == 9 else number, closed) for number in numbers]
    return {
        "SAMPLE_ID": [float(number) for number in numbers],
        "URL": urls,
        "TEXT": [f"a picture of number {number}" for number in numbers],
        "HEIGHT": [64 if number % 10 != 5 else 16 for number in numbers],
        "WIDTH": [64] * len(numbers),
        "LICENSE": ["?" if number % 10 == 3 else "Creative Commons Attribution" for number in numbers],
        "NSFW": ["UNLIKELY"] * len(numbers),
        "similarity": [0.3 + number % 7 / 100 for number in numbers],
    }


def write_table(folder: Path, address: str, num_parts: int, rows_of_part: int) -> None:
    """Write the parts of a table of URLs."""
    import pyarrow as arrow
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    closed = closed_port()
    for part in range(num_parts):
        table = arrow.table(rows(address, range(part * rows_of_part, (part + 1) * rows_of_part), closed))
        parquet.write_table(table, folder / f"part-{part:05d}.parquet", row_group_size=64)
