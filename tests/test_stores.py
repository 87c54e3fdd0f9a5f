"""mds/stores.py: an SFTP server's threads and silences, an S3 client's threads; S3's faults are in tests/store."""

from __future__ import annotations

import contextlib
import http.server
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from conftest import in_child
from paramiko import SSHException

from mds import stores
from mds.stores import S3Client, build_client
from prepare.addresses import open_address
from tests.store.extras import sftp_server
from tests.store.server import end, free_ports, start_relay

LIMIT_SEC = 60.0


@pytest.fixture
def sftp(tmp_path, monkeypatch):
    """Address of a folder with eight files, on a real OpenSSH server."""
    home = tmp_path / "sshd"
    (home / "files").mkdir(parents=True)
    for number in range(8):
        (home / "files" / str(number)).write_bytes(bytes([number]) * 100_000)
    with sftp_server(home) as (address, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield f"{address}{home}/files"


def test_threads_that_download_at_once_share_one_sftp_connection(sftp, tmp_path):
    """Streaming's client hands a connection out while it is being made: both threads then wait forever."""
    client = build_client(sftp)
    assert download_at_once(client, sftp, tmp_path) == []
    assert [(tmp_path / str(number)).read_bytes() for number in range(8)] == [bytes([n]) * 100_000 for n in range(8)]
    client.clean_up()


@pytest.fixture
def serve_s3(monkeypatch):
    """Start a server with this handler, as S3_ENDPOINT_URL."""
    with contextlib.ExitStack() as stack:

        def serve(handler: type) -> None:
            server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.shutdown)
            monkeypatch.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                monkeypatch.setenv(name, "testing")

        yield serve


class Objects(http.server.BaseHTTPRequestHandler):
    """Answers as S3 does for /bucket/NUMBER, 300 kB each; there is no 3. A body comes in two halves."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        number = int(self.path.rpartition("/")[2].partition("?")[0])
        self.answer(404, b"") if number == 3 else self.answer(200, bytes([number]) * 300_000)

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"0"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:150_000])
            time.sleep(0.2)
            self.wfile.write(body[150_000:])

    def log_message(self, *words) -> None:
        pass


def test_threads_download_with_one_s3_client_and_the_failure_of_one_ends_no_other(serve_s3, tmp_path, monkeypatch):
    serve_s3(Objects)
    made, create = [], stores.s3_client
    monkeypatch.setattr(stores, "s3_client", lambda *args, **more: made.append(1) or create(*args, **more))
    [(number, text)] = download_at_once(build_client("s3://bucket"), "s3://bucket", tmp_path)
    assert number == 3 and "404" in text and len(made) <= 2  # the second one: for who came after the failure
    rest = [number for number in range(8) if number != 3]
    assert [(tmp_path / str(number)).read_bytes() for number in rest] == [bytes([n]) * 300_000 for n in rest]


@pytest.mark.long
@pytest.mark.timeout(200, func_only=True)
def test_a_server_that_falls_silent_is_left_after_the_limit(sftp, tmp_path, monkeypatch):
    port = str(urlsplit(sftp).port)
    behind = free_ports(1)
    hosts = tmp_path / "sshd" / "known_hosts"
    hosts.write_text(hosts.read_text() + hosts.read_text().replace(port, str(behind)))
    through, relay = sftp.replace(port, str(behind), 1), start_relay(behind, int(port))
    client = build_client(through)
    try:
        client.download(f"{through}/0", str(tmp_path / "0"), 5.0)
        os.kill(relay.pid, signal.SIGSTOP)
        for number in range(1, 3):  # on the connection that there is; and on a new one, of which no banner comes
            with pytest.raises((EOFError, OSError, SSHException)):
                client.download(f"{through}/{number}", str(tmp_path / str(number)), 5.0)
            client.clean_up()
        os.kill(relay.pid, signal.SIGCONT)
        client.download(f"{through}/3", str(tmp_path / "3"), 20.0)
    finally:
        end(relay)
        client.clean_up()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["0", "3"]


# --- forked workers ---

EMPTY = (
    b'<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    b"<IsTruncated>false</IsTruncated><KeyCount>0</KeyCount></ListBucketResult>"
)


@pytest.fixture
def keeps_alive(serve_s3):
    """A server that keeps connections, as stores do and moto does not; returns the client's ports of its requests."""
    ports: list[int] = []

    class Answer(Objects):
        def do_GET(self) -> None:
            ports.append(self.client_address[1])
            self.answer(200, EMPTY)

        do_HEAD = do_GET

    serve_s3(Answer)
    return ports


@pytest.mark.parametrize("kind", ["address", "download"])
def test_a_forked_worker_opens_a_separate_connection(keeps_alive, kind):
    """Through its parent's it would read the answers to another worker: an object would be missing, or another."""
    address, client = open_address("s3://bucket/stage"), S3Client()
    request = address.list_files if kind == "address" else lambda: client.list_objects("s3://bucket/stage", 10.0)

    def ask() -> int:
        request()
        return 0

    request()
    request()
    assert len(set(keeps_alive)) == 1  # the connection is kept
    for _ in range(2):
        assert in_child(ask, 60) == 0
    request()
    assert len(set(keeps_alive)) == 3 and keeps_alive[-1] == keeps_alive[0]


def download_at_once(client, address: str, out: Path) -> list[tuple[int, str]]:
    """Download eight objects in eight threads with one client; return what failed. As `fetch` does, clean up after that."""
    together = threading.Barrier(8)

    def get(number: int) -> list[tuple[int, str]]:
        together.wait(LIMIT_SEC)
        try:
            client.download(f"{address}/{number}", str(out / str(number)), 20.0)
        except Exception as error:
            client.clean_up()
            return [(number, str(error))]
        return []

    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(get, range(8), timeout=LIMIT_SEC), [])
