"""Serve the page of a run, or of all runs, while they go on.

    python -m reports.live runs/NAME                # http://127.0.0.1:8765/
    python -m reports.live runs port=9000           # all runs: a table of them, and each one's page
    python -m reports.live runs host=0.0.0.0        # for every machine that reaches this one

The page renews itself: it is made again when the record has changed, at most so often that this takes a tenth of a core. A
folder that is not there yet is waited for. On another machine: `ssh -L 8765:127.0.0.1:8765 MACHINE`, and open the same
address here.

    port    8765; 0: any that is free
    host    127.0.0.1: for people on this machine alone

Only pages are served, by GET, and nothing else of a folder. Exit code: 130 after Ctrl-C, 2 where the address cannot be had.
"""

from __future__ import annotations

import contextlib
import html
import http.server
import ipaddress
import os
import secrets
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from cli.command import command
from cli.errors import ConfigError, Refused, text_of
from cli.limits import shown
from cli.log import log
from cli.masking import printable
from record.history import is_run, read_history
from record.standing import runs_under, signature
from reports import index, page
from reports.page_text import script_of

PORT, HOST = 8765, "127.0.0.1"
PAUSE, LEAST_SEC = 9.0, 1.0  # before a page is made again: so many times as long as that took, and no less than this
POLL_MS = 4000
MOST_PAGES = 32  # that are kept, of some MB each
IDLE_SEC = 30.0  # of a client that sends nothing
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
SAID = (
    "position: sticky; bottom: 0; margin: 0; padding: .5rem 1rem; max-width: none; "
    "background: var(--panel, Canvas); color: var(--ink, CanvasText)"
)
WAITING = "{}: there is no run yet. The page shows it as soon as there is."
_drawing = threading.Lock()  # matplotlib's settings are the process's


# --- pages ---


@dataclass
class Page:
    """A page as it was made last, and when it has to be made again."""

    sign: Callable[[], Any]
    """What changes with what the page shows."""
    make: Callable[[], str]
    tag: str = ""
    body: bytes = b""
    lock: threading.Lock = field(default_factory=threading.Lock)
    _signed: Any = None
    _rests_until: float = 0.0

    def current(self) -> tuple[str, bytes]:
        """Return tag and bytes, made again if they have changed, unless that was a moment ago; tabs share it."""
        with self.lock:
            if time.monotonic() >= self._rests_until and (signed := self.sign()) != self._signed:
                with _drawing:
                    began = time.monotonic()
                    try:
                        made = self.make()
                    except Exception as error:  # gone or broken meanwhile: the next one may be whole again
                        made = notice(text_of(error))
                        log.error(text_of(error))
                    took = time.monotonic() - began
                self.tag, self._signed = secrets.token_hex(8), signed
                self.body = with_renewal(made, self.tag).encode()
                self._rests_until = time.monotonic() + max(LEAST_SEC, PAUSE * took)
            return self.tag, self.body


def notice(text: str) -> str:
    """Return a page that says why there is no other one."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src ; base-uri 'none'; form-action 'none'"
    style = (
        "color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: min(40rem, 92vw)"
    )
    head = f"""<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Easel</title><style>body {{ {style} }}</style>"""
    said = f"<h1>Easel</h1><p>{html.escape(printable(text))}</p>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{said}</main></body></html>'


def with_renewal(made: str, tag: str) -> str:
    """Return a page with the script that asks for a newer one, and with a policy that lets it."""
    script, digest = script_of("live.js")
    made = made.replace("default-src 'none'; ", "default-src 'none'; connect-src 'self'; ", 1)
    made = made.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    said = f'<p id="live" role="status" data-tag="{tag}" data-poll="{POLL_MS}" style="{SAID}" hidden></p>'
    before, end, after = made.rpartition("</body>")
    return f"{before}{said}<script data-live>{script}</script>{end}{after}"


class Site:
    """The pages that there are: of one run, or of a folder of runs and each of them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._pages: dict[Path, Page] = {}
        self._lock = threading.Lock()

    def find(self, path: str) -> Page | None:
        """Return the page at a path of an address, or None. It is looked up: nothing of it reaches the file system."""
        if path == "/":
            return self._kept(self.folder, Page(self._sign, self._make))
        found = [] if is_run(self.folder) else runs_under(self.folder)
        run = next((run for run in found if path == f"/{index.link_of(self.folder, run)}"), None)
        return None if run is None else self._kept(run, Page(lambda: signature(run), lambda: page_of(run)))

    def _kept(self, folder: Path, new: Page) -> Page:
        with self._lock:
            self._pages[folder] = self._pages.pop(folder, new)  # the last asked for is the last to go
            while len(self._pages) > MOST_PAGES:
                del self._pages[next(iter(self._pages))]
            return self._pages[folder]

    def _sign(self) -> Any:
        return [(run, signature(run)) for run in ([self.folder] if is_run(self.folder) else runs_under(self.folder))]

    def _make(self) -> str:
        """The run's page, the table of runs, or what is waited for: what the folder is may change."""
        if is_run(self.folder):
            return page_of(self.folder)
        if runs := runs_under(self.folder):
            return index.html_of(self.folder, runs, is_live=True)
        return notice(WAITING.format(self.folder))


def page_of(run: Path) -> str:
    """Return the page of a run."""
    return page.html_of([read_history(run)])


# --- the server ---


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET and HEAD of a page's address."""

    server: Server
    timeout = IDLE_SEC
    server_version, sys_version = "Easel", ""

    def do_GET(self) -> None:
        """Send a page, or say that the client has it already."""
        if not is_own_name(self.headers.get("Host"), self.server.names):
            given = "Host: not a name of this machine. Possible: localhost, an IP address, or host= of reports.live."
            return self._say(HTTPStatus.MISDIRECTED_REQUEST, given)
        try:
            path = os.fsdecode(unquote_to_bytes(urlsplit(self.path).path))
        except ValueError:  # no address
            path = ""
        found = self.server.site.find(path)
        if found is None:
            return self._say(HTTPStatus.NOT_FOUND, "There is no such page here. / has what there is.")
        tag, body = found.current()
        if f'"{tag}"' in self.headers.get("If-None-Match", ""):
            return self._send(HTTPStatus.NOT_MODIFIED, b"", tag)
        return self._send(HTTPStatus.OK, body, tag)

    do_HEAD = do_GET

    def refuse(self) -> None:
        """Say what is possible: nothing can be changed here."""
        self._say(HTTPStatus.METHOD_NOT_ALLOWED, "Possible: GET and HEAD.")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = refuse

    def _say(self, status: HTTPStatus, text: str) -> None:
        self._send(status, notice(text).encode())

    def _send(self, status: HTTPStatus, body: bytes, tag: str | None = None) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if tag:
            self.send_header("ETag", f'"{tag}"')
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of each request."""


class Server(http.server.ThreadingHTTPServer):
    """Listens at one address."""

    daemon_threads = True
    allow_reuse_port = False

    def __init__(self, host: str, port: int, site: Site):
        self.site, self.names = site, {"localhost", host.lower(), socket.gethostname().lower()}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)

    def server_bind(self) -> None:
        """Bind, without asking a name server who this is."""
        socketserver.TCPServer.server_bind(self)

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{f'[{host}]' if ':' in str(host) else host}:{port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over clients that have gone; say all else."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            log.error(f"{client_address[0]}: {type(error).__name__}: {error}")


def is_own_name(host: str | None, names: Collection[str]) -> bool:
    """True for a request's Host that a page of another site cannot have: an IP address, or a name of this machine.

    Another site's name may be made to lead here (DNS rebinding): its pages could then read these.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name in names:
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    folder, host, port = read_words(argv)
    try:
        server = Server(host, port, Site(folder))
    except OSError as error:
        taken = f"port: {port} on {host} cannot be had: {error.strerror or error}"
        ways = "Possible: another port, 0 for any that is free, an address of this machine. Give port= or host="
        raise Refused(f"{taken}. {ways}.") from error
    with server, contextlib.suppress(KeyboardInterrupt):
        print(server.address, flush=True)
        if not is_loopback(host):
            log.warning(f"host: {host}: everyone who reaches this machine there sees these pages, without a password.")
        if not is_run(folder) and not runs_under(folder):
            log.info(WAITING.format(folder))
        log.info("Ctrl-C ends it.")
        server.serve_forever()
    return 128 + signal.SIGINT


def read_words(argv: Sequence[str]) -> tuple[Path, str, int]:
    """Return folder, host and port of a command line. Raises ConfigError: lists what is wrong."""
    keys = {"port": str(PORT), "host": HOST}
    given = dict(word.split("=", 1) for word in argv if "=" in word)
    places = [word for word in argv if "=" not in word]
    problems = [f"{key}: unknown key. Possible: {', '.join(keys)}." for key in given if key not in keys]
    keys |= given
    if len(places) != 1:
        problems.append(
            f"command line: {len(places)} folders given. Possible: one. Give a run's folder, or that of all runs."
        )
    elif not places[0]:
        problems.append("command line: a folder without a name. Give a run's folder, or that of all runs.")
    elif Path(places[0]).is_file():
        problems.append(f"{places[0]}: a file. Possible: a run's folder, or that of all runs. Give one.")
    if not keys["host"]:
        problems.append("host: nothing given. Give an address: host=127.0.0.1.")
    if not (keys["port"].isdecimal() and int(keys["port"]) <= 65535):
        problems.append(f"port: '{shown(keys['port'])}'. Possible: 0 to 65,535. Give such a number.")
    if problems:
        raise ConfigError(problems)
    return Path(places[0]), keys["host"], int(keys["port"])


def is_loopback(host: str) -> bool:
    """True for an address that other machines cannot reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
