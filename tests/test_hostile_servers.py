"""Servers of files that answer nonsense: a fault of that file, in words; the others arrive, and nothing is read for ever."""

from __future__ import annotations

import hashlib
import itertools
import random
import socketserver
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fault_server import serving, web  # noqa: F401
from hub_server import TOKEN

from prepare.http_download import FileToFetch, fetch_all, is_http_url
from training import loggers
from weights.hub import fetch_dataset

CONTENT = random.Random(41).randbytes(300_000)
OTHER = random.Random(42).randbytes(300_000)
DIGITS = b"9" * 5000
TIME = "Tue, 24 Nov 2026 0{}:00:00 GMT"


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


@contextmanager
def sending(*blocks: bytes, then: bytes | None = None) -> Iterator[str]:
    """Serve the same bytes to everybody, with `then` repeated after them until the client leaves; yields the address."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            length = 0
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                length = int(line.split()[1]) if line.lower().startswith(b"content-length:") else length
            self.rfile.read(length)
            more: Iterable[bytes] = itertools.repeat(then) if then else ()
            try:
                for block in itertools.chain(blocks, more):
                    self.wfile.write(block)
            except OSError:
                pass  # the client has left

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, block_on_close = True, False

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/a.bin"
        server.shutdown()
        thread.join(10)


def moved(location: bytes) -> bytes:
    return b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: " + location + b"\r\n\r\n"


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = b"\0" * 2**14
FAILED = "failed after 1 tries ("


@pytest.mark.timeout(120, func_only=True)
@pytest.mark.parametrize(
    ("head", "then", "message"),
    [
        (moved(b"http://[::1/x"), None, "HTTP 302 (Found)"),
        (moved(b"file:///etc/passwd"), None, FAILED),
        (moved(b"/again"), None, "redirects without an end"),
        (OK + b"Content-Length: " + DIGITS + b"\r\n\r\nabc", None, FAILED),
        (b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 0-9/" + DIGITS + b"\r\n\r\n", None, "sends another range or "),
        (CHUNKED + b"-1\r\n", ENDLESS, f"{FAILED}RemoteProtocolError: illegal chunk header"),
        (b"", b"\0", FAILED),
        (b"HTTP/1.1 503 \x1b[31m\r\nRetry-After: " + DIGITS + b"\r\nContent-Length: 0\r\n\r\n", None, FAILED),
    ],
    ids=itertools.count(),
)
def test_an_answer_that_is_nonsense_fails_its_file_only(web, tmp_path, head, then, message):  # noqa: F811
    web.put("good", CONTENT)
    good = FileToFetch("good", (web.url("good"),), len(CONTENT), f"md5:{md5(CONTENT)}")
    with sending(head, then=then) as url:
        failed = fetch_all([FileToFetch("bad", (url,)), good], tmp_path, tries=1, timeout_sec=20.0, wait_sec=0.01)
    assert list(failed) == ["bad"] and failed["bad"].startswith(f"{url}: {message}")
    assert failed["bad"].isprintable() and len(failed["bad"]) < 300
    assert (tmp_path / "good").read_bytes() == CONTENT and not (tmp_path / "bad").exists()


def test_an_impossible_address_is_refused_before_anything_is_fetched():
    for url in ("http://[::1/x", "http://host:port/x", "http://host:99999999/x", "http:///x", "http:x", "ftp://h/x"):
        assert not is_http_url(url)
    assert all(map(is_http_url, ("http://h/x", "https://[::1]:80/x", "http://u:p@h/x")))


# --- another version ---


def break_off(web, folder: Path, **faults: object) -> FileToFetch:  # noqa: F811
    """Start a file of which nothing is known, and break off after 100,000 bytes."""
    file = FileToFetch("a.bin", (web.url("a.bin"),))
    web.put("a.bin", OTHER, cut_after=[100_000, 0], **faults)
    assert fetch_all([file], folder, tries=1)
    return file


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"etag": '"one"'}, {"etag": '"two"', "honours_if_range": False}),
        ({"etag": None, "modified": TIME.format(3)}, {"etag": None, "modified": TIME.format(4)}),
    ],
)
def test_the_rest_of_another_version_is_not_joined_to_the_first(web, tmp_path, first, then):  # noqa: F811
    file = break_off(web, tmp_path, **first)
    web.put("a.bin", CONTENT, **then)
    web.asked.clear()
    assert fetch_all([file], tmp_path) == {}
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert web.ranges("a.bin") == ["bytes=100000-"] + [None] * (not then.get("honours_if_range", True))


def test_a_range_of_another_or_unknown_length_is_not_taken_for_the_end(web, tmp_path):  # noqa: F811
    file = break_off(web, tmp_path, etag='"same"')
    web.put("a.bin", CONTENT + b"more", etag='"same"')
    assert fetch_all([file], tmp_path) == {} and (tmp_path / "a.bin").read_bytes() == CONTENT + b"more"


# --- passwords ---


def test_no_password_of_netrc_goes_to_a_host_that_a_redirect_names(web, tmp_path, monkeypatch):  # noqa: F811
    """Nor a token, even where a redirect leads back to its host by another one."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving() as elsewhere:
        web.put("moved", redirect=elsewhere.url("b/moved", "localhost"))
        web.put("here", redirect=web.url("a.bin"))
        elsewhere.put("b/moved", redirect=f"http://other:hunter2@localhost:{elsewhere.port}/back")
        elsewhere.put("back", redirect=web.url("a.bin"))
        web.put("a.bin", CONTENT)
        for name, token in (("moved", None), ("moved", "HF_TOKEN"), ("here", "HF_TOKEN")):
            web.asked.clear()
            assert fetch_all([FileToFetch(f"{name}-{token}", (web.url(name),), token=token)], tmp_path) == {}
            sent = [heads.get("authorization") for _, heads in web.asked]
            bearer = token and f"Bearer {TOKEN}"
            assert sent == [bearer, bearer if name == "here" else None]
        assert [name for name, _ in elsewhere.asked] == ["b/moved", "back"] * 2
        assert [heads.get("authorization") for _, heads in elsewhere.asked] == [None] * 4


def test_the_hubs_token_stays_with_the_hub(hub, tmp_path, monkeypatch):
    """Large files come over a redirect to another host."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.add("owner/films", {"1.bin": CONTENT, "prompts.txt": b"one\n"})
    hub.models["owner/films"].is_gated = True
    assert fetch_dataset("owner/films", "main", tmp_path / "films", 1) == 2
    assert (tmp_path / "films/1.bin").read_bytes() == CONTENT and hub.logins == [None]


def test_a_redirect_of_a_loggers_server_is_not_followed_with_a_password(web):  # noqa: F811
    with sending(moved(web.url("graphql", "localhost").encode())) as url:
        assert loggers._refusal(url.removesuffix("/a.bin"), "of a test") is None
    assert web.asked == []


@pytest.fixture(autouse=True)
def passwords(tmp_path, monkeypatch) -> None:
    """Passwords in ~/.netrc for both names of this machine."""
    path = tmp_path / "netrc"
    path.write_text("machine localhost login me password hunter2\nmachine 127.0.0.1 login me password hunter2\n")
    path.chmod(0o600)
    monkeypatch.setenv("NETRC", str(path))
