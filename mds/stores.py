"""Clients that report a dead store within seconds: our own where streaming's hang.

s3://      with the limits that were asked for (streaming's retries internally, without a report), one for the threads of a
           process, and an end after an answer 400, after which streaming's calls itself without end
sftp://    one connection for the threads of a process, given to them once it stands (streaming's gives it while it is
           being made: a thread that asks for a file too early waits for ever, seen with 0.13.0 and paramiko 3.5), and
           a limit on every answer, of which streaming's has none
the rest   streaming's
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import SplitResult, urlsplit

from streaming.base.storage.download import CloudDownloader

from common import masking
from common.errors import Failed

READ_TIMEOUT_SEC = 20.0  # without a byte


class Downloader(Protocol):
    """A client that downloads files of a store; several threads may share one."""

    def download(self, remote: str, local: str, timeout: float) -> None:
        """Download a file unless it exists, whole or not at all. `timeout`: longest silence of the store, seconds."""

    def clean_up(self) -> None:
        """Close the connection; the next download opens another."""


@functools.cache
def _service_descriptions() -> Any:
    """Return botocore's loader, which keeps the descriptions of services that it has read: most of a client's time."""
    from botocore.session import get_session

    return get_session().get_component("data_loader")


class S3Client:
    """Reports a dead store within seconds; `download_with_retries` waits and logs it.

    Several threads download with one client, which boto3 allows: each has a connection of its pool. After `clean_up` by one
    whose download failed the next download makes a new client; the others end theirs with the old one.

    Args:
        attempts: of each request, for a caller that does not wait.
    """

    def __init__(self, attempts: int = 1):
        self.attempts = attempts
        self.requester_pays = os.environ.get("MOSAICML_STREAMING_AWS_REQUESTER_PAYS", "").replace(" ", "").split(",")
        """Buckets, by the variable of streaming's."""
        self._lock = threading.Lock()
        self._client: Any = None
        self._process = os.getpid()

    def clean_up(self) -> None:
        """Close the connection; the next download opens another."""
        with self._lock:
            self._client = None

    def download(self, remote: str, local: str, timeout: float) -> None:
        """Download a file; after an answer 400 once more without credentials, for a public bucket.

        streaming's own does that again and again, each time from within the last: it never ends (seen with 0.13.0, where
        the region is another one, and with a bucket's name that cannot be).
        """
        from boto3.s3.transfer import TransferConfig
        from botocore.exceptions import ClientError

        if _is_there(local):
            return
        where = self._request_for(remote)
        bucket, key = where.pop("Bucket"), where.pop("Key")

        def download(client: Any) -> None:
            client.download_file(bucket, key, local, ExtraArgs=where, Config=TransferConfig(use_threads=False))

        try:
            download(self._connect(timeout))
        except ClientError as error:
            if error.response["Error"]["Code"] != "400":
                raise
            try:
                download(self._connect(timeout, unsigned=True))
            except Exception:
                self.clean_up()
                raise error from None

    def read(self, remote: str, most: int, timeout: float) -> bytes:
        """Return an object's first bytes, in one request: a download asks for its size first."""
        with self._connect(timeout).get_object(**self._request_for(remote))["Body"] as body:
            return body.read(most)

    def size_of(self, remote: str, timeout: float) -> int | None:
        """Return an object's bytes; None: the store answers with an error, of which a download says more."""
        from botocore.exceptions import ClientError

        try:
            return self._connect(timeout).head_object(**self._request_for(remote))["ContentLength"]
        except ClientError:
            return None

    def list_objects(self, remote: str, timeout: float) -> list[tuple[str, int, str]]:
        """Return (key, bytes, entity tag) of every object whose key begins as `remote` does, in the order of the keys."""
        parts = urlsplit(remote)
        pages = self._connect(timeout).get_paginator("list_objects_v2")
        listing = pages.paginate(Bucket=parts.netloc, Prefix=parts.path.lstrip("/"))
        return [
            (entry["Key"], entry["Size"], entry["ETag"].strip('"'))
            for page in listing
            for entry in page.get("Contents", [])
        ]

    def _request_for(self, remote: str) -> dict[str, str]:
        """Return what an object's requests are given."""
        parts = urlsplit(remote)
        payer = {"RequestPayer": "requester"} if parts.netloc in self.requester_pays else {}
        return {"Bucket": parts.netloc, "Key": parts.path.lstrip("/"), **payer}

    def _connect(self, timeout: float, unsigned: bool = False) -> Any:
        """Return the client of this process; the first thread makes it. `unsigned`: make it again, without credentials."""
        with self._lock:
            if self._client is None or unsigned or self._process != os.getpid():  # a forked one has its own sockets
                self._client = s3_client(timeout, self.attempts, unsigned=unsigned)
                self._process = os.getpid()
            return self._client


def s3_client(timeout: float = READ_TIMEOUT_SEC, attempts: int = 1, *, unsigned: bool = False) -> Any:
    """Return a client of S3 that reports a dead store within seconds. Threads may share it.

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
    session.register_component("data_loader", _service_descriptions())
    config = Config(
        read_timeout=timeout,
        connect_timeout=timeout,
        retries={"total_max_attempts": attempts},
        signature_version=UNSIGNED if unsigned else None,
    )
    return Session(botocore_session=session).client(
        "s3", config=config, endpoint_url=os.environ.get("S3_ENDPOINT_URL") or None
    )


class SFTPClient:
    """For several threads at once, with a limit on every answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client: Any = None

    def clean_up(self) -> None:
        """Close the connection; the next download opens another."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    def download(self, remote: str, local: str, timeout: float) -> None:
        """Download a file. Raises what paramiko raises."""
        if _is_there(local):
            return
        parts, partial = urlsplit(remote), f"{local}.tmp"
        connection = self._connection(parts, timeout)
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
            session.get(parts.path, partial)
        Path(partial).replace(local)

    def _connection(self, parts: SplitResult, timeout: float) -> Any:
        """Return the connection of this process; the first thread makes it, the others wait until it stands."""
        from paramiko import SSHClient

        with self._lock:
            if self._client is None:
                client = SSHClient()
                try:
                    client.load_system_host_keys(os.environ.get("COMPOSER_SFTP_KNOWN_HOSTS_FILE"))
                    client.connect(
                        str(parts.hostname),
                        parts.port or 22,
                        parts.username,
                        masking.password_of(parts),
                        key_filename=os.environ.get("COMPOSER_SFTP_KEY_FILE"),
                        timeout=timeout,
                        banner_timeout=timeout,
                        auth_timeout=timeout,
                        channel_timeout=timeout,
                    )
                except BaseException:
                    client.close()
                    raise
                self._client = client
            return self._client


def _is_there(local: str) -> bool:
    Path(local).parent.mkdir(parents=True, exist_ok=True)
    return Path(local).exists()


def build_client(remote: str, attempts: int = 1) -> Downloader:
    """Return a client for an address. Raises ValueError: streaming knows no such store.

    Args:
        attempts: of each request, for a caller that does not wait; s3 only.
    """
    scheme = urlsplit(remote).scheme
    if scheme == "s3":
        return S3Client(attempts)
    return SFTPClient() if scheme == "sftp" else CloudDownloader.get(remote)


def download_once(remote: str, local: str, timeout: float = READ_TIMEOUT_SEC) -> None:
    """Download one file for a caller that does not wait for a store. Raises what the store's client raises."""
    client = build_client(remote, attempts=3)
    try:
        client.download(remote, local, timeout)
    finally:
        client.clean_up()


def read_stored_size(remote: str, timeout: float) -> int | None:
    """Return a file's bytes if its store reports them in one request (s3), or None. Raises what the store's client raises."""
    client = build_client(remote, attempts=3)
    try:
        return client.size_of(remote, timeout) if isinstance(client, S3Client) else None
    finally:
        client.clean_up()


# --- why a store did not give a file ---
#
# `address_problem` looks at an address, and at the variable that leads to S3, before anything is asked. REASONS says of
# an error what it means, what to do, and whether it may pass: who starts a run or waits for a shard asks for that.
#
# A client asks for an object's head first, and an answer to that has no body: an absent bucket, an empty prefix and a
# key that nobody knows all arrive as "404" or "403". So where S3 refuses, the bucket is asked once more, for one name
# under the prefix; that answer has a code. Nothing is written, and a password in an address is in no message
# (common/masking.py).

SECOND_LOOK_SEC = 5.0  # for a connection, and again for an answer

FORMS = {  # of addresses; the other stores of streaming's are left to their clients
    "s3": "s3://BUCKET/PREFIX",
    "gs": "gs://BUCKET/PREFIX",
    "oci": "oci://BUCKET@NAMESPACE/PREFIX",
    "sftp": "sftp://USER@HOST/FOLDER",
    "hf": "hf://datasets/OWNER/NAME/FOLDER",
}
S3_BUCKET = re.compile(r"[a-zA-Z0-9.\-_]{1,255}")  # botocore refuses others unasked
ENDPOINT_VARIABLES = ("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")  # the first that is set counts
BUSY = "429 500 502 503 504"
KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile in AWS_PROFILE"


class Reason(NamedTuple):
    """What an error means, what to do, and whether a retry may work; None: only in a run that has already read data."""

    meaning: str
    advice: str
    is_temporary: bool | None = False


# Classes that a client raises, and codes that a store answers with; the first line that has one of an error's counts.
REASONS = {
    "NoCredentialsError": Reason("there are no credentials here", f"Set {KEYS}"),
    "PartialCredentialsError CredentialRetrievalError": Reason(
        "the credentials are incomplete ({error})", f"Set {KEYS}"
    ),
    "ProfileNotFound": Reason("{error}", "Set AWS_PROFILE to a profile of ~/.aws, or take it out"),
    "InvalidRegionError": Reason("the region is invalid ({error})", "Set AWS_DEFAULT_REGION to one such as us-east-1"),
    "SSLError": Reason(
        "TLS failed with {endpoint} ({error})",
        "Write http:// in S3_ENDPOINT_URL if it speaks plain HTTP, or set AWS_CA_BUNDLE to its authority's file",
    ),
    "NameResolutionError gaierror": Reason(
        "the name {host} does not resolve", "Check S3_ENDPOINT_URL for a typing error, and this machine's DNS", None
    ),
    "ProxyConnectionError": Reason("the proxy does not answer ({error})", "Check HTTPS_PROXY and NO_PROXY", None),
    "ConnectTimeoutError ReadTimeoutError TimeoutError RequestTimeout": Reason(
        "{endpoint} does not answer", "Check that it is a store, and that no firewall blocks it", True
    ),
    "EndpointConnectionError ConnectionRefusedError NoValidConnectionsError": Reason(
        "nothing listens at {endpoint}", "Check the port in S3_ENDPOINT_URL, and that the store runs", True
    ),
    "ConnectionClosedError ConnectionError ResponseStreamingError IncompleteReadError": Reason(
        "{endpoint} broke the connection off", "Check that it is a store, and http:// or https:// as it speaks", True
    ),
    "NoSuchBucket": Reason(
        "there is no bucket '{bucket}' at {endpoint}", "Check the name, S3_ENDPOINT_URL, or make the bucket"
    ),
    "InvalidAccessKeyId InvalidClientTokenId": Reason("{endpoint} does not know the access key", f"Check {KEYS}"),
    "SignatureDoesNotMatch": Reason("the secret does not belong to the access key", f"Check {KEYS}"),
    "InvalidToken ExpiredToken ExpiredTokenException TokenRefreshRequired": Reason(
        "the session token is not valid, or has expired", "Get a new AWS_SESSION_TOKEN, or take it out", None
    ),
    "AccessDenied AllAccessDisabled AccountProblem 403": Reason(
        "access is denied, or it does not exist and these credentials may not list the bucket",
        "Ask for s3:GetObject and s3:ListBucket on bucket '{bucket}', to write also for s3:PutObject and s3:DeleteObject",
    ),
    "PermanentRedirect AuthorizationHeaderMalformed 301 307": Reason(
        "the bucket lies in another region", "Set AWS_DEFAULT_REGION to it"
    ),
    "NoSuchKey 404 400": Reason("{endpoint} does not have it", "Check the address"),
    f"SlowDown ServiceUnavailable {BUSY}": Reason("{endpoint} is overloaded", "Try again later", True),
}
NOT_THERE = ("400", "403", "404", "NoSuchKey")  # answers without a reason
HOPELESS = (
    *("AuthenticationException", "BadHostKeyException"),
    *("FileNotFoundError", "IsADirectoryError", "PermissionError"),
)


def scheme_of(location: str) -> str:
    """Return s3 of s3://bucket/prefix, "" of a folder; also of an address that cannot be taken apart."""
    return _split(location).scheme


def address_problem(location: str) -> str | None:
    """Say why nothing can be asked for at an address, or None; of S3, the variables that name the server count.

    Args:
        location: a folder (None: it is no address), or the address of a dataset or of a file in it.
    """
    scheme, parts, masked = scheme_of(location), _split(location), masking.mask_secrets(location)
    if not scheme:
        return None
    problem, advice = None, f"Write {FORMS.get(scheme, f'{scheme}://...')}"
    if not location.isprintable() or location != location.strip():
        masked, problem = repr(masked), "has a space at an end, or a character that does not print"
    elif mark := next((mark for mark in "#?" if mark in location), None):
        problem = f"has a '{mark}', and what follows it would be left out"
    elif scheme == "hf" and not re.match(r"hf://datasets(/[^/]+){2}", location):
        problem = "is not the address of a hub dataset"
    elif scheme in FORMS and not parts.netloc:
        problem = f"names no {'host' if scheme == 'sftp' else 'bucket'}"
    elif scheme == "s3" and "@" in parts.netloc:
        problem, advice = "has credentials in it", masking.secret_advice(masked)
    elif scheme == "sftp" and masking.is_password_missing(parts):
        problem = "is an address as a record shows it, without its password"
        advice = masking.secret_advice(masked)
    elif scheme == "s3" and not S3_BUCKET.fullmatch(parts.netloc):
        problem = "has an invalid bucket name"
        advice = f"{advice}; the server's address goes into S3_ENDPOINT_URL"
    elif scheme == "s3" and (server := _wrong_server()):
        problem = f"cannot be read: {server} is no address"
        advice = "Write http://HOST:PORT or https://HOST:PORT"
    return f"{masked} {problem}. {advice}." if problem else None


def _wrong_server() -> str | None:
    """Return the variable that names S3's server, and its value without a password, where no server can be there."""
    name = next((name for name in ENDPOINT_VARIABLES if os.environ.get(name)), None)
    if name is None:
        return None
    with_password = os.environ[name]
    try:
        parts = urlsplit(with_password)
        is_server = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # half a pair of brackets, or a port beyond 65535
        is_server = False
    if is_server and not re.search(r"\s", with_password):
        return None
    return f"{name}={masking.mask_secrets(_without_password(with_password))}"


def _split(address: str) -> SplitResult:
    """Take an address apart; unlike urlsplit, also one with half of a pair of brackets."""
    try:
        return urlsplit(address)
    except ValueError:
        return SplitResult(address.partition(":")[0].lower(), "", "", "", "")


def _without_password(address: str) -> str:
    return re.sub(r"^([a-z]+://)?.*@", r"\1", address)


def explain_store_error(error: BaseException, location: str, done: str = "read") -> str:
    """Return why a store did not give what was asked for, or did not take it, and what to do.

    Args:
        error: as the store's client raised it, or one that was raised from it.
        location: address of a dataset, e.g. s3://bucket/prefix; also of a file in it, or of a run.
        done: read or written.

    S3 is asked once more where the error alone does not say enough: at most some seconds, and nothing is changed.
    """
    if text := address_problem(location):
        return text
    scheme, parts = scheme_of(location), _split(location)
    name, cause, reason = _find_reason(error)
    if scheme == "s3" and name in NOT_THERE:
        if isinstance(answer := _ask_again(location, "403" if name == "400" else name), str):
            return f"{location} cannot be {done}: {answer}. Check the prefix, or make the dataset there."
        name, cause, reason = _find_reason(answer)
    server = next((os.environ[name] for name in ENDPOINT_VARIABLES if os.environ.get(name)), "AWS")
    endpoint = _without_password(server) if scheme == "s3" else f"{scheme}://{parts.netloc}"
    all_kwargs = [
        kwargs for each in _iterate_causes(error) if isinstance(kwargs := getattr(each, "kwargs", None), dict)
    ]
    asked = next((kwargs["endpoint_url"] for kwargs in all_kwargs if "endpoint_url" in kwargs), endpoint)
    host = _split(asked).hostname or asked
    names = {"bucket": parts.netloc, "endpoint": endpoint, "host": host, "error": _first_line(cause)}
    code = f" ({name})" if _answer_codes(cause) else ""
    advice = reason.advice if scheme == "s3" else reason.advice.replace("S3_ENDPOINT_URL", "the address")
    return masking.mask_secrets(
        f"{location} cannot be {done}: {reason.meaning.format(**names)}{code}. {advice.format(**names)}."
    )


def is_temporary(error: BaseException) -> bool:
    """True where the same start may find the store well later: it is away, silent, or says that it is at fault."""
    return _find_reason(error)[2].is_temporary is True


def is_retryable(error: BaseException) -> bool:
    """True for what may become right in a run that has read before: no connection, "too busy", and the unknown."""
    return _find_reason(error)[2].is_temporary is not False and type(error).__name__ not in HOPELESS


def as_user_error(error: BaseException, text: str) -> ValueError:
    """Return what to raise of a store's error: Failed, of which a job is started again, where it may pass."""
    return Failed(text) if is_temporary(error) else ValueError(text)


def _find_reason(error: BaseException) -> tuple[str, BaseException, Reason]:
    """Return the name, class or code, by which an error is known, the error under it that has it, and what it means."""
    causes = list(_iterate_causes(error))
    named = [(name, cause) for cause in causes for name in _error_names(cause)]
    for names, reason in REASONS.items():
        if match := next(((name, cause) for name, cause in named if name in names.split()), None):
            return *match, reason
    answer = next((cause for cause in causes if _answer_codes(cause)), None)
    if answer is not None:
        return _answer_codes(answer)[0], answer, Reason("{endpoint} answers: {error}", "Ask who runs the store", None)
    return "", error, Reason("{error}", "Check the address and its credentials", None)


def _error_names(error: BaseException) -> Iterator[str]:
    """Yield what an error is known by: an answer's code and status, its class, and Python's own ones that it is of."""
    yield from _answer_codes(error)
    for kind in type(error).__mro__:
        if kind is type(error) or kind.__module__ in ("builtins", "socket", "ssl"):
            yield kind.__name__


def _answer_codes(error: BaseException) -> list[str]:
    """Return the code and the status of a store's answer; none: it is no answer."""
    answer = getattr(error, "response", None)
    if not isinstance(answer, dict):
        return []
    status = str(answer.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    return [str(answer.get("Error", {}).get("Code")), *([status] if status in BUSY else [])]


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what lies under it: what it was raised from, and what botocore and urllib3 keep inside."""
    waiting, seen = [error], set()
    while waiting:
        at = waiting.pop(0)
        if id(at) in seen:
            continue
        seen.add(id(at))
        yield at
        inside = getattr(at, "kwargs", None)
        under = [inside.get("error") if isinstance(inside, dict) else None, getattr(at, "reason", None)]
        under += [getattr(at, "last_exception", None)]  # boto3's, of a download that was tried several times
        waiting += [e for e in (*under, *at.args, at.__cause__, at.__context__) if isinstance(e, BaseException)]


def _ask_again(location: str, code: str) -> str | BaseException:
    """Ask for one name under the prefix: unlike a head's, the answer says why."""
    from botocore.exceptions import BotoCoreError, ClientError

    address = _split(location)
    path = address.path.strip("/")
    prefix = path.rpartition("/")[0] if path.endswith((".mds", ".json")) else path
    try:
        folder = {"Bucket": address.netloc, "Prefix": f"{prefix}/" if prefix else "", "MaxKeys": 1}
        objects = s3_client(SECOND_LOOK_SEC).list_objects_v2(**folder).get("Contents", [])
    except (BotoCoreError, ClientError) as error:
        error.__context__ = None  # the answer without a reason
        return error
    if code == "403":
        return ClientError({"Error": {"Code": "AccessDenied"}}, "GetObject")
    if not objects:
        return f"nothing lies under s3://{address.netloc}/{prefix}; bucket '{address.netloc}' is there"
    return f"{objects[0]['Key']} lies there, but not all that a dataset has (index.json, dataset.json, shards)"


def _first_line(error: BaseException) -> str:
    text = (str(error).splitlines() or [""])[0].strip().rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
