"""Why a store did not give a file, in one line that says what to do: the clients' own words leave that open.

`address_problem` looks at an address, and at the variable that leads to S3, before anything is asked. REASONS says of an
error what it means, what to do, and whether it may pass: who starts a run or waits for a shard asks for that.

A client asks for an object's head first, and an answer to that has no body: an absent bucket, an empty prefix and a key that
nobody knows all arrive as "404" or "403". So where S3 refuses, the bucket is asked once more, for one name under the prefix;
that answer has a code. Nothing is written, and a password in an address is in no message (cli/masking.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from cli import masking
from cli.errors import Failed

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
    """What an error means, what to do, and whether the same may do well later; None: of a run that has read before alone."""

    what: str
    todo: str
    passes: bool | None = False


# Classes that a client raises, and codes that a store answers with; the first line that has one of an error's counts.
REASONS = {
    "NoCredentialsError": Reason("there are no credentials here", f"Set {KEYS}"),
    "PartialCredentialsError CredentialRetrievalError": Reason(
        "the credentials are incomplete ({error})", f"Set {KEYS}"
    ),
    "ProfileNotFound": Reason("{error}", "Set AWS_PROFILE to a profile of ~/.aws, or take it out"),
    "InvalidRegionError": Reason("the region is none ({error})", "Set AWS_DEFAULT_REGION to one such as us-east-1"),
    "SSLError": Reason(
        "TLS failed with {endpoint} ({error})",
        "Write http:// in S3_ENDPOINT_URL if it speaks plain HTTP, or set AWS_CA_BUNDLE to its authority's file",
    ),
    "NameResolutionError gaierror": Reason(
        "the name {host} does not resolve", "Check S3_ENDPOINT_URL for a typing error, and this machine's DNS", None
    ),
    "ProxyConnectionError": Reason("the proxy does not answer ({error})", "Check HTTPS_PROXY and NO_PROXY", None),
    "ConnectTimeoutError ReadTimeoutError TimeoutError RequestTimeout": Reason(
        "{endpoint} does not answer", "Check that it is a store, and that no firewall stands before it", True
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
        "these credentials may not do that there, or what is asked for is not there and they may not know it",
        "Ask for s3:GetObject and s3:ListBucket on bucket '{bucket}', to write also for s3:PutObject and s3:DeleteObject",
    ),
    "PermanentRedirect AuthorizationHeaderMalformed 301 307": Reason(
        "the bucket lies in another region", "Set AWS_DEFAULT_REGION to it"
    ),
    "NoSuchKey 404 400": Reason("{endpoint} does not have it", "Check the address"),
    f"SlowDown ServiceUnavailable {BUSY}": Reason("{endpoint} has too much to do", "Try again later", True),
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
        location: a folder (None: it is no address), or the address of a stage or of a file in it.
    """
    scheme, place, shown = scheme_of(location), _split(location), masking.masked(location)
    if not scheme:
        return None
    what, todo = None, f"Write {FORMS.get(scheme, f'{scheme}://...')}"
    if not location.isprintable() or location != location.strip():
        shown, what = repr(shown), "has a blank at an end, or a character that cannot be seen"
    elif mark := next((mark for mark in "#?" if mark in location), None):
        what = f"has a '{mark}', and what follows it would be left out"
    elif scheme == "hf" and not re.match(r"hf://datasets(/[^/]+){2}", location):
        what = "names no dataset of a hub"
    elif scheme in FORMS and not place.netloc:
        what = f"names no {'host' if scheme == 'sftp' else 'bucket'}"
    elif scheme == "s3" and "@" in place.netloc:
        what, todo = "has credentials in it", masking.where_it_belongs(shown)
    elif scheme == "sftp" and masking.is_lost(place):
        what = "is an address as a record shows it, without its password"
        todo = masking.where_it_belongs(shown)
    elif scheme == "s3" and not S3_BUCKET.fullmatch(place.netloc):
        what = "names no bucket that can be"
        todo = f"{todo}; the server's address goes into S3_ENDPOINT_URL"
    elif scheme == "s3" and (server := _wrong_server()):
        what = f"cannot be read: {server} is no address"
        todo = "Write http://HOST:PORT or https://HOST:PORT"
    return f"{shown} {what}. {todo}." if what else None


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
    return f"{name}={masking.masked(_without_password(with_password))}"


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
        location: address of a stage, e.g. s3://bucket/prefix; also of a file in it, or of a run.
        done: read or written.

    S3 is asked once more where the error alone does not say enough: at most some seconds, and nothing is changed.
    """
    if text := address_problem(location):
        return text
    scheme, place = scheme_of(location), _split(location)
    name, cause, reason = _reason_of(error)
    if scheme == "s3" and name in NOT_THERE:
        if isinstance(further := _second_look(location, "403" if name == "400" else name), str):
            return f"{location} cannot be {done}: {further}. Check the prefix, or make the stage there."
        name, cause, reason = _reason_of(further)
    server = next((os.environ[name] for name in ENDPOINT_VARIABLES if os.environ.get(name)), "AWS")
    endpoint = _without_password(server) if scheme == "s3" else f"{scheme}://{place.netloc}"
    inside = [kept for each in _causes(error) if isinstance(kept := getattr(each, "kwargs", None), dict)]
    asked = next((kept["endpoint_url"] for kept in inside if "endpoint_url" in kept), endpoint)
    host = _split(asked).hostname or asked
    names = {"bucket": place.netloc, "endpoint": endpoint, "host": host, "error": _line(cause)}
    code = f" ({name})" if _answer(cause) else ""
    todo = reason.todo if scheme == "s3" else reason.todo.replace("S3_ENDPOINT_URL", "the address")
    return masking.masked(f"{location} cannot be {done}: {reason.what.format(**names)}{code}. {todo.format(**names)}.")


def may_pass(error: BaseException) -> bool:
    """True where the same start may find the store well later: it is away, silent, or says that it is at fault."""
    return _reason_of(error)[2].passes is True


def is_passing(error: BaseException) -> bool:
    """True for what may become right in a run that has read before: no connection, "too busy", and the unknown."""
    return _reason_of(error)[2].passes is not False and type(error).__name__ not in HOPELESS


def refusal(error: BaseException, text: str) -> ValueError:
    """Return what to raise of a store's error: Failed, of which a job is started again, where it may pass."""
    return Failed(text) if may_pass(error) else ValueError(text)


def _reason_of(error: BaseException) -> tuple[str, BaseException, Reason]:
    """Return the name, class or code, by which an error is known, the error under it that has it, and what it means."""
    causes = list(_causes(error))
    named = [(name, cause) for cause in causes for name in _names(cause)]
    for names, reason in REASONS.items():
        if known := next(((name, cause) for name, cause in named if name in names.split()), None):
            return *known, reason
    answer = next((cause for cause in causes if _answer(cause)), None)
    if answer is not None:
        return _answer(answer)[0], answer, Reason("{endpoint} answers: {error}", "Ask who runs the store", None)
    return "", error, Reason("{error}", "Check the address and its credentials", None)


def _names(error: BaseException) -> Iterator[str]:
    """Yield what an error is known by: an answer's code and status, its class, and Python's own ones that it is of."""
    yield from _answer(error)
    for kind in type(error).__mro__:
        if kind is type(error) or kind.__module__ in ("builtins", "socket", "ssl"):
            yield kind.__name__


def _answer(error: BaseException) -> list[str]:
    """Return the code and the status of a store's answer; none: it is no answer."""
    answer = getattr(error, "response", None)
    if not isinstance(answer, dict):
        return []
    status = str(answer.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    return [str(answer.get("Error", {}).get("Code")), *([status] if status in BUSY else [])]


def _causes(error: BaseException) -> Iterator[BaseException]:
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


def _second_look(location: str, code: str) -> str | BaseException:
    """Ask for one name under the prefix: unlike a head's, the answer says why."""
    from botocore.exceptions import BotoCoreError, ClientError

    from stages.stores import s3_client

    address = _split(location)
    path = address.path.strip("/")
    prefix = path.rpartition("/")[0] if path.endswith((".mds", ".json")) else path
    try:
        folder = {"Bucket": address.netloc, "Prefix": f"{prefix}/" if prefix else "", "MaxKeys": 1}
        found = s3_client(SECOND_LOOK_SEC).list_objects_v2(**folder).get("Contents", [])
    except (BotoCoreError, ClientError) as error:
        error.__context__ = None  # the answer without a reason
        return error
    if code == "403":
        return ClientError({"Error": {"Code": "AccessDenied"}}, "GetObject")
    if not found:
        return f"nothing lies under s3://{address.netloc}/{prefix}; bucket '{address.netloc}' is there"
    return f"{found[0]['Key']} lies there, but not all that a stage has (index.json, dataset.json, shards)"


def _line(error: BaseException) -> str:
    text = (str(error).splitlines() or [""])[0].strip().rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
