"""Serve the page of a run, or of all runs, while they train.

    python -m reports.live runs/NAME                # http://127.0.0.1:8765/
    python -m reports.live runs port=9000           # all runs: a table of them, and each one's page
    python -m reports.live runs host=0.0.0.0        # for every machine that reaches this one

A page is made again when the record has changed, at most so often that this takes a tenth of a core; the browser replaces
it. A folder that is not there yet is waited for. From elsewhere: `ssh -L 8765:127.0.0.1:8765 MACHINE`, and the same address.

    port    8765; 0: any that is free
    host    127.0.0.1: for people on this machine alone

Only pages are served, by GET. Exit code: 130 after Ctrl-C, 2 where the address cannot be used.
"""

from __future__ import annotations

import contextlib
import html
import http.server
import ipaddress
import os
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit

from common.command import command
from common.errors import Refused, error_text
from common.log import log
from common.masking import to_printable
from common.value_types import limited, truncate
from reports import page
from reports.formatting import read_words, script_of
from run_folder.history import is_run, read_history, runs_under, signature

PAUSE, LEAST_SEC = 9.0, 1.0  # before a page is made again: so many times as long as that took, and no less than this
STATUS = '<p id="live" role="status" data-tag="{tag}" data-poll="4000" hidden></p>'  # asks every 4000 ms
MOST_PAGES = 32  # that are kept, of some MB each
HEADERS = {"Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
HEADERS |= {"X-Frame-Options": "DENY", "Cross-Origin-Resource-Policy": "same-origin"}
WAITING = "no run has started yet. The page shows it as soon as it does."


class Page(NamedTuple):
    """A page as it was made last. signed: what it was made from; rests_until: when it may be made again."""

    signed: Any
    tag: str
    body: bytes
    rests_until: float


def notice(text: str) -> str:
    """Return a page that says why there is no other one."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src ; base-uri 'none'; form-action 'none'"
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Easel</title>
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark"></head>
<body><main><h1>Easel</h1><p>{html.escape(to_printable(text))}</p></main></body></html>"""


def with_renewal(made: str, tag: str) -> bytes:
    """Return a page with the script that asks for a newer one, and with a policy that lets it."""
    script, digest = script_of("live.js")
    made = made.replace("default-src 'none'; ", "default-src 'none'; connect-src 'self'; ", 1)
    made = made.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    before, end, after = made.rpartition("</body>")
    return f"{before}{STATUS.format(tag=tag)}<script data-live>{script}</script>{end}{after}".encode()


def page_of(run: Path) -> str:
    """Return the page of a run."""
    return page.html_of([read_history(run)])


class Site:
    """The pages of one run, or of a folder of runs and each of them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._pages: dict[str, Page] = {}
        self._lock = threading.Lock()  # one page at a time is made: matplotlib's settings are the process's

    def find(self, path: str) -> Page | None:
        """Return the page at a path of an address, or None. It is looked up: nothing of it reaches the file system."""
        with self._lock:
            is_one = is_run(self.folder)
            runs = [self.folder] if is_one else runs_under(self.folder)
            selected = [run for run in runs if path in ("/", f"/{page.link_of(self.folder, run)}")]
            if path != "/" and (is_one or not selected):
                return None
            old = self._pages.pop(path, Page(None, "", b"", 0.0))
            if time.monotonic() >= old.rests_until:
                signed = [(run, signature(run)) for run in selected]
                old = old if signed == old.signed else self._made(selected, signed, is_table=path == "/" and not is_one)
            self._pages[path] = old  # the last asked for is the last to go
            if len(self._pages) > MOST_PAGES:
                del self._pages[next(iter(self._pages))]
            return old

    def _made(self, runs: Sequence[Path], signed: Any, *, is_table: bool) -> Page:
        began, tag, made = time.monotonic(), f"{time.time_ns():x}", notice(f"{self.folder}: {WAITING}")
        try:
            if runs:
                made = page.html_of_all(self.folder, runs, is_live=True) if is_table else page_of(runs[0])
        except Exception as error:  # removed or half written: the next one may be whole again
            made = notice(error_text(error))
            log.error(error_text(error))
        took = time.monotonic() - began
        return Page(signed, tag, with_renewal(made, tag), began + took + max(LEAST_SEC, PAUSE * took))


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET and HEAD of a page's address."""

    server: Server
    timeout = 30.0  # s, of a client that sends nothing
    server_version, sys_version = "Easel", ""

    def do_GET(self) -> None:
        """Send a page, or say that the client has it already."""
        if not is_own_name(self.headers.get("Host"), self.server.names):
            problem = "Host: not a name of this machine. Possible: localhost, an IP address, or host= of reports.live."
            return self._send(HTTPStatus.MISDIRECTED_REQUEST, notice(problem).encode())
        try:
            page = self.server.site.find(os.fsdecode(unquote_to_bytes(urlsplit(self.path).path)))
        except ValueError:  # no address
            page = None
        if page is None:
            return self._send(HTTPStatus.NOT_FOUND, notice("No such page. / lists all.").encode())
        if f'"{page.tag}"' in self.headers.get("If-None-Match", ""):
            return self._send(HTTPStatus.NOT_MODIFIED, b"", page.tag)
        return self._send(HTTPStatus.OK, page.body, page.tag)

    do_HEAD = do_GET

    def _send(self, status: HTTPStatus, body: bytes, tag: str = "") -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Length": str(len(body)), "ETag": f'"{tag}"'}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle(self) -> None:
        """Answer a client; one that has gone is passed over."""
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Log no request."""


class Server(socketserver.ThreadingTCPServer):
    """Listens at one address."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, host: str, port: int, site: Site):
        self.site, self.names = site, {"localhost", host.lower(), socket.gethostname().lower()}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/"


def is_own_name(host: str | None, names: Collection[str]) -> bool:
    """True for a request's Host that a page of another site cannot have: an IP address, or a name of this machine.

    Another site's name may be made to lead here (DNS rebinding): its pages could then read these.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in names or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


@dataclass(frozen=True)
class LiveKeys:
    """The keys of this command."""

    port: int = limited(8765, 0, 65535)
    """0: any that is free."""
    host: str = "127.0.0.1"
    """The address; the default is for people on this machine alone."""


@command(keys=LiveKeys)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""

    def wrong(folders: Sequence[str]) -> list[str]:
        text = truncate(" ".join(folders))
        is_one = len(folders) == 1 and text and not Path(text).is_file()
        return [] if is_one else [f"command line: '{text}'. Possible: one folder. Give a run's, or that of all runs."]

    [folder], keys = read_words(argv, LiveKeys, wrong)
    host, port = keys.host, keys.port
    try:
        server = Server(host, port, Site(Path(folder)))
    except OSError as error:
        fixes = "Give another port=, 0 for any that is free, or host=, an address of this machine"
        raise Refused(f"port: {port} on {host} cannot be used: {error.strerror or error}. {fixes}.") from error
    with server, contextlib.suppress(KeyboardInterrupt):
        print(server.address, flush=True)
        if host not in ("localhost", "127.0.0.1", "::1"):
            log.warning(f"host: {host}: everyone who reaches this machine there sees these pages, without a password.")
        server.serve_forever()
    return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
