"""Clients of stores that tell of a dead store within seconds: streaming's own, mended where they hang.

s3://      a client with the limits that were asked for (streaming's retries within itself, so that nobody hears of it), one
           for the threads of a process, and an end after an answer 400, after which streaming's calls itself without end
sftp://    one connection for the threads of a process, given to them once it stands (streaming's gives it while it is
           being made: a thread that asks for a file too early waits for ever, seen with 0.13.0 and paramiko 3.5), and
           a limit on every answer, of which streaming's has none
the rest   as they are in streaming
"""

from __future__ import annotations

import functools
import os
import threading
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from streaming.base.storage.download import CloudDownloader, S3Downloader, SFTPDownloader

from cli import masking
from cli.private_api import require_private_api

READ_TIMEOUT_SEC = 20.0  # without a byte


OF_S3 = ("_create_s3_client", "_download_file_impl", "_s3_client", "_requester_pays_buckets", "clean_up")
require_private_api(S3Downloader, *OF_S3, why="a store that is away is noticed within seconds")
OF_SFTP = ("_download_file_impl", "_ssh_client", "clean_up")
require_private_api(SFTPDownloader, *OF_SFTP, why="one connection for all threads, a limit on every answer")


@functools.cache
def _descriptions() -> Any:
    """Return botocore's loader, which keeps the descriptions of services that it has read: most of a client's time."""
    from botocore.session import get_session

    return get_session().get_component("data_loader")


class BriefS3Downloader(S3Downloader):
    """streaming's, with a client that tells of a dead store within seconds: whoever waits is `fetch`, who says so.

    Several threads download with one client, which boto3 allows: each has a connection of its pool. After `clean_up` by one
    whose download failed the next download makes a client anew; the others end theirs with the old one.

    Args:
        attempts: of each request, for a caller that does not wait.
    """

    def __init__(self, attempts: int = 1):
        super().__init__()
        self.attempts = attempts
        self._lock = threading.Lock()
        self._process = os.getpid()

    def clean_up(self) -> None:
        with self._lock:
            super().clean_up()

    def _download_file_impl(self, remote: str, local: str, timeout: float) -> None:
        """Download a file; after an answer 400 once more as nobody, for a public bucket.

        streaming's own does that again and again, each time from within the last: it never ends (seen with 0.13.0, where
        the region is another one, and with a bucket's name that cannot be).
        """
        from boto3.s3.transfer import TransferConfig
        from botocore.exceptions import ClientError

        where = self._place(remote)
        bucket, key = where.pop("Bucket"), where.pop("Key")

        def download(client: Any) -> None:
            client.download_file(bucket, key, local, ExtraArgs=where, Config=TransferConfig(use_threads=False))

        try:
            download(self._client(timeout))
        except ClientError as error:
            if error.response["Error"]["Code"] != "400":
                raise
            try:
                download(self._client(timeout, unsigned=True))
            except Exception:
                self.clean_up()
                raise error from None

    def read(self, remote: str, most: int, timeout: float) -> bytes:
        """Return an object's first bytes, in one request: a download asks for its size first."""
        with self._client(timeout).get_object(**self._place(remote))["Body"] as body:
            return body.read(most)

    def size_of(self, remote: str, timeout: float) -> int | None:
        """Return an object's bytes; None: the store answers with an error, of which a download says more."""
        from botocore.exceptions import ClientError

        try:
            return self._client(timeout).head_object(**self._place(remote))["ContentLength"]
        except ClientError:
            return None

    def list_objects(self, remote: str, timeout: float) -> list[tuple[str, int, str]]:
        """Return (key, bytes, entity tag) of every object whose key begins as `remote` does, in the order of the keys."""
        place = urlsplit(remote)
        pages = self._client(timeout).get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=place.netloc, Prefix=place.path.lstrip("/"))
        return [(one["Key"], one["Size"], one["ETag"].strip('"')) for page in found for one in page.get("Contents", [])]

    def _place(self, remote: str) -> dict[str, str]:
        """Return what an object's requests are given."""
        place = urlsplit(remote)
        payer = {"RequestPayer": "requester"} if place.netloc in self._requester_pays_buckets else {}
        return {"Bucket": place.netloc, "Key": place.path.lstrip("/"), **payer}

    def _client(self, timeout: float, unsigned: bool = False) -> Any:
        """Return the client of this process; the first thread makes it. `unsigned`: make it anew, without credentials."""
        with self._lock:
            if self._s3_client is None or unsigned or self._process != os.getpid():  # a forked one has its own sockets
                self._create_s3_client(unsigned, timeout)
                self._process = os.getpid()
            return self._s3_client

    def _create_s3_client(self, unsigned: bool = False, timeout: float = READ_TIMEOUT_SEC) -> None:
        self._s3_client = s3_client(timeout, self.attempts, unsigned=unsigned)


def s3_client(timeout: float = READ_TIMEOUT_SEC, attempts: int = 1, *, unsigned: bool = False) -> Any:
    """Return a client of S3 that tells of a dead store within seconds. Threads may share it.

    Args:
        timeout: longest silence of the store, seconds.
        attempts: of each request.
        unsigned: without credentials.
    """
    from boto3.session import Session
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import get_session

    session = get_session()
    session.register_component("data_loader", _descriptions())
    config = Config(
        read_timeout=timeout,
        connect_timeout=timeout,
        retries={"total_max_attempts": attempts},
        signature_version=UNSIGNED if unsigned else None,
    )
    return Session(botocore_session=session).client(
        "s3", config=config, endpoint_url=os.environ.get("S3_ENDPOINT_URL") or None
    )


class BriefSFTPDownloader(SFTPDownloader):
    """streaming's, for several threads at once, and with a limit on every answer."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def clean_up(self) -> None:
        with self._lock:
            super().clean_up()

    def _download_file_impl(self, remote: str, local: str, timeout: float) -> None:
        place, partial = urlsplit(remote), f"{local}.tmp"
        connection = self._connection(place, timeout)
        too_long = threading.Timer(timeout, connection.close)  # paramiko opens a session without a limit
        too_long.start()
        try:
            session = connection.open_sftp()
        finally:
            too_long.cancel()
        with session:
            channel = session.get_channel()
            assert channel is not None
            channel.settimeout(timeout)
            session.get(place.path, partial)
        Path(partial).replace(local)

    def _connection(self, place: SplitResult, timeout: float) -> Any:
        """Return the connection of this process; the first thread makes it, the others wait until it stands."""
        from paramiko import SSHClient

        with self._lock:
            if self._ssh_client is None:
                client = SSHClient()
                try:
                    client.load_system_host_keys(os.environ.get("COMPOSER_SFTP_KNOWN_HOSTS_FILE"))
                    client.connect(
                        str(place.hostname),
                        place.port or 22,
                        place.username,
                        masking.password_of(place),
                        key_filename=os.environ.get("COMPOSER_SFTP_KEY_FILE"),
                        timeout=timeout,
                        banner_timeout=timeout,
                        auth_timeout=timeout,
                        channel_timeout=timeout,
                    )
                except BaseException:
                    client.close()
                    raise
                self._ssh_client = client
            return self._ssh_client


def client_of(remote: str, attempts: int = 1) -> CloudDownloader:
    """Return a client for a place. Raises ValueError: streaming knows no such place.

    Args:
        attempts: of each request, for a caller that does not wait; s3 only.
    """
    scheme = urlsplit(remote).scheme
    if scheme == "s3":
        return BriefS3Downloader(attempts)
    return BriefSFTPDownloader() if scheme == "sftp" else CloudDownloader.get(remote)


def download_once(remote: str, local: str, timeout: float = READ_TIMEOUT_SEC) -> None:
    """Download one file for a caller that does not wait for a store. Raises what the store's client raises."""
    client = client_of(remote, attempts=3)
    try:
        client.download(remote, local, timeout)
    finally:
        client.clean_up()


def stored_size(remote: str, timeout: float) -> int | None:
    """Return a file's bytes, where its store says so in one request (s3), or None. Raises what the store's client raises."""
    client = client_of(remote, attempts=3)
    try:
        return client.size_of(remote, timeout) if isinstance(client, BriefS3Downloader) else None
    finally:
        client.clean_up()
