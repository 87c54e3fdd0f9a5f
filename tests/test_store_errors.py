"""stages/store_errors.py: the messages about addresses that cannot be used, before any request is made."""

from __future__ import annotations

import http.server
import os
import socket
import ssl
import threading

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError

from stages.dataset import is_remote, read_stage
from stages.store_errors import address_problem, explain_store_error, is_passing, may_pass

S3 = "Write s3://BUCKET/PREFIX"
ADDRESSES = [
    ("s3://", f"s3:// names no bucket. {S3}."),
    ("s3:///mom", f"s3:///mom names no bucket. {S3}."),
    ("s3:easel/mom", f"s3:easel/mom names no bucket. {S3}."),
    ("s3://easel/ha#sh", f"s3://easel/ha#sh has a '#', and what follows it would be left out. {S3}."),
    ("s3://easel/mom?x=1", f"s3://easel/mom?*** has a '?', and what follows it would be left out. {S3}."),
    (
        "s3://host:9000/mom",
        f"s3://host:9000/mom names no bucket that can be. {S3}; the server's address goes into S3_ENDPOINT_URL.",
    ),
    ("s3://[easel/mom", f"s3://[easel/mom names no bucket. {S3}."),
    (
        "s3://easel/mom ",
        f"'s3://easel/mom ' has a blank at an end, or a character that cannot be seen. {S3}.",
    ),
    (
        "s3://easel/m\nom",
        f"'s3://easel/m\\nom' has a blank at an end, or a character that cannot be seen. {S3}.",
    ),
    ("hf://b/x", "hf://b/x names no dataset of a hub. Write hf://datasets/OWNER/NAME/FOLDER."),
    ("gs:///mom", "gs:///mom names no bucket. Write gs://BUCKET/PREFIX."),
    ("sftp:///mom", "sftp:///mom names no host. Write sftp://USER@HOST/FOLDER."),
]
ENDPOINTS = [
    "http://[::1:80",
    "http://h:99999",
    "http://h:abc",
    "http://h:0",
    "h:9000",
    "ftp://h:9",
    "http://",
    "http://h: 9",
]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in [*os.environ]:
        if name.startswith(("AWS_", "S3_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(("address", "told"), ADDRESSES, ids=[repr(address) for address, _ in ADDRESSES])
def test_an_address_that_cannot_be_is_refused_before_it_is_asked(address, told):
    assert is_remote(address) and address_problem(address) == told
    assert explain_store_error(ValueError("Invalid IPv6 URL"), address) == told
    with pytest.raises(ValueError) as error:
        read_stage(address)
    assert str(error.value) == told


@pytest.mark.parametrize(
    "address",
    [
        *("data/s3", "/data/a#b", "/data/[x", "C#"),
        *("s3://easel", "s3://easel/", "s3://easel/a b/c", "S3://easel/x", "gs://b/p", "oci://b@n/p"),
        *("hf://datasets/o/n", "hf://datasets/o/n/f", "sftp://me@host:22/p", "dbfs:/Volumes/c/s/v", "alipan:///p"),
    ],
)
def test_a_folder_and_an_address_that_can_be_are_let_through(address):
    assert address_problem(address) is None


@pytest.mark.parametrize("name", ["S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_server_that_cannot_be_is_named_with_its_variable(monkeypatch, name, endpoint):
    monkeypatch.setenv(name, endpoint)
    given = (
        f"s3://easel/mom cannot be read: {name}={endpoint} is no address. Write http://HOST:PORT or https://HOST:PORT."
    )
    assert address_problem("s3://easel/mom") == given
    assert explain_store_error(ValueError("Invalid IPv6 URL"), "s3://easel/mom") == given
    assert address_problem("gs://easel/mom") is None and address_problem("mom") is None


def test_a_server_that_can_be_is_let_through_and_a_password_is_not_shown(monkeypatch):
    for endpoint in ("", "http://127.0.0.1:9000", "https://s3.example.org", "http://[::1]:9000", "https://h/path"):
        monkeypatch.setenv("S3_ENDPOINT_URL", endpoint)
        assert address_problem("s3://easel/mom") is None
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://me:secret@host:99999")
    assert "S3_ENDPOINT_URL=http://host:99999 is no address" in address_problem("s3://easel/mom")
    monkeypatch.setenv("S3_ENDPOINT_URL", "me:secret@host:9000")
    assert "secret" not in address_problem("s3://easel/mom")


class Refusing(http.server.BaseHTTPRequestHandler):
    """A store that answers 400 to everything; streaming's own download asks such a one again and again, and never ends."""

    def do_HEAD(self) -> None:
        self.server.num_asked += 1
        body = b"<Error><Code>InvalidRequest</Code><Message>no</Message></Error>" if self.command == "GET" else b""
        self.send_response(400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_HEAD

    def log_message(self, *words) -> None:
        pass


def test_a_store_that_answers_400_is_asked_some_times_and_no_more(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        server.num_asked = 0
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        for name, value in (("S3_ENDPOINT_URL", address), ("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "x")):
            monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match="^s3://easel/mom") as error:
            read_stage("s3://easel/mom")
        server.shutdown()
    assert server.num_asked <= 7  # with the size, which is asked first, and looks at the bucket, which say why
    assert f"cannot be read: {address} answers: InvalidRequest: An error occurred (InvalidRequest)" in str(error.value)


def test_a_region_that_cannot_be_is_named_with_its_variable(monkeypatch):
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "bad region!")
    with pytest.raises(ValueError) as error:
        read_stage("s3://easel/mom")
    told = str(error.value)
    assert told.startswith("s3://easel/mom cannot be read: the region is none (") and "Set AWS_DEFAULT_REGION" in told


def test_a_server_of_aws_whose_name_does_not_resolve_is_named():
    error = EndpointConnectionError(endpoint_url="https://easel.s3.amazonaws.com/mom", error=socket.gaierror(-2, "no"))
    told = explain_store_error(error, "s3://easel/mom")
    assert told.startswith("s3://easel/mom cannot be read: the name easel.s3.amazonaws.com does not resolve. ")


def answer(code: str, status: int) -> Exception:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject")


@pytest.mark.parametrize(
    ("error", "at_a_start", "in_a_run"),
    [
        (EndpointConnectionError(endpoint_url="http://h"), True, True),
        (ConnectionResetError(), True, True),
        (answer("InternalError", 500), True, True),
        (answer("SlowDown", 503), True, True),
        (socket.gaierror(-2, "Name or service not known"), False, True),
        (RuntimeError("unknown"), False, True),
        (answer("AccessDenied", 403), False, False),
        (answer("404", 404), False, False),
        (NoCredentialsError(), False, False),
        (ssl.SSLCertVerificationError("refused"), False, False),
        (FileNotFoundError("/x"), False, False),
    ],
)
def test_what_may_pass_is_waited_for_and_the_rest_refused(error, at_a_start, in_a_run):
    """A name that does not resolve is a typing error at a start; in a run that has read before it may be back."""
    assert (may_pass(error), is_passing(error)) == (at_a_start, in_a_run)
    wrapped = RuntimeError("of a library")
    wrapped.__cause__ = error
    assert may_pass(wrapped) is at_a_start
