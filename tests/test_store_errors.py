"""mds/stores.py: the messages about addresses that cannot be used, before any request is made."""

from __future__ import annotations

import os
import re
import socket
import ssl

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError

from mds.dataset import is_remote, read_dataset
from mds.stores import address_problem, explain_store_error, is_retryable, is_temporary

S3 = "Write s3://BUCKET/PREFIX"
ADDRESSES = [
    ("s3://", f"s3:// names no bucket. {S3}."),
    ("s3://AKIA:hunter2@bucket/p", "s3://AKIA:***@bucket/p has credentials in it. "),
    ("sftp://nobody:***@host/x", "sftp://nobody:***@host/x is an address as a record shows it, without its password."),
    ("s3://easel/mom?token=hunter2", f"s3://easel/mom?*** has a '?', and what follows it would be left out. {S3}."),
    ("s3://[easel/mom", f"s3://[easel/mom names no bucket. {S3}."),
    ("s3://easel/m\nom", "'s3://easel/m\\nom' has a space at an end, or a "),
    ("hf://b/x", "hf://b/x is not the address of a hub dataset. Write hf://datasets/OWNER/NAME/FOLDER."),
    ("sftp:///mom", "sftp:///mom names no host. Write sftp://USER@HOST/FOLDER."),
]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in [*os.environ]:
        if name.startswith(("AWS_", "S3_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(("address", "message"), ADDRESSES, ids=[repr(address) for address, _ in ADDRESSES])
def test_an_impossible_address_is_refused_before_a_request(address, message):
    text = address_problem(address)
    assert is_remote(address) and text.startswith(message)
    assert explain_store_error(ValueError("Invalid IPv6 URL"), address) == text
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        read_dataset(address)


GOOD = """data/s3 /data/a#b /data/[x C# s3://easel/ S3://easel/x gs://b/p oci://b@n/p hf://datasets/o/n/f
          sftp://me@host:22/p dbfs:/Volumes/c/s/v alipan:///p"""


def test_a_folder_and_an_address_that_can_be_are_let_through():
    assert [address for address in [*GOOD.split(), "s3://easel/a b/c"] if address_problem(address)] == []


ENDPOINTS = ("http://[::1:80", "http://h:99999", "http://h:abc", "h:9000", "ftp://h:9", "http://", "http://h: 9")


@pytest.mark.parametrize("name", ["S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"])
def test_an_impossible_server_is_named_with_its_variable(monkeypatch, name):
    may = "Write http://HOST:PORT or https://HOST:PORT."
    for endpoint in ENDPOINTS:
        monkeypatch.setenv(name, endpoint)
        text = f"s3://easel/mom cannot be read: {name}={endpoint} is no address. {may}"
        assert address_problem("s3://easel/mom") == text
        assert explain_store_error(ValueError("Invalid IPv6 URL"), "s3://easel/mom") == text
    for endpoint in ("", "http://127.0.0.1:9000", "http://[::1]:9000", "https://h/path"):
        monkeypatch.setenv(name, endpoint)
        assert address_problem("s3://easel/mom") is None
    monkeypatch.setenv(name, "me:secret@host:9000")
    assert "secret" not in address_problem("s3://easel/mom")


def answer(code: str, status: int) -> Exception:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject")


ERRORS = [
    *((error, True, True) for error in (EndpointConnectionError(endpoint_url="http://h"), ConnectionResetError())),
    *((answer(code, status), True, True) for code, status in (("InternalError", 500), ("SlowDown", 503))),
    *((error, False, True) for error in (socket.gaierror(-2, "Name or service not known"), RuntimeError("unknown"))),
    *((answer(code, status), False, False) for code, status in (("AccessDenied", 403), ("404", 404))),
    *((error("x"), False, False) for error in (ssl.SSLCertVerificationError, FileNotFoundError)),
    (NoCredentialsError(), False, False),
]


@pytest.mark.parametrize(("error", "at_a_start", "in_a_run"), ERRORS, ids=repr)
def test_what_may_pass_is_waited_for_and_the_rest_refused(error, at_a_start, in_a_run):
    """A name that does not resolve is a typing error at a start; in a run that has read before it may be back."""
    assert (is_temporary(error), is_retryable(error)) == (at_a_start, in_a_run)
    wrapped = RuntimeError("of a library")
    wrapped.__cause__ = error
    assert is_temporary(wrapped) is at_a_start
