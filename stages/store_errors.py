"""Why a store did not give a file, in one line that says what to do: the clients' own words leave that open.

`address_problem` looks at an address, and at what leads to S3, before anything is asked: a client says no word of what it
leaves out after a '#', and none that could be understood of a port that cannot be.

A client asks for an object's head first, and an answer to that has no body: an absent bucket, an empty prefix and a key that
nobody knows all arrive as "404" or "403". So where S3 refuses, the bucket is asked once more, for one name under the prefix;
that answer has a code. Nothing is written, and a password in an address is in no message (cli/masking.py).
"""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Iterator
from typing import Any
from urllib.parse import SplitResult, urlsplit

from cli import masking
from cli.errors import Failed

SECOND_LOOK_SEC = 5.0  # for a connection, and again for an answer
FILES_OF_A_STAGE = (".mds", ".json")

FORMS = {  # of addresses; the other stores of streaming's are left to their clients
    "s3": "s3://BUCKET/PREFIX",
    "gs": "gs://BUCKET/PREFIX",
    "oci": "oci://BUCKET@NAMESPACE/PREFIX",
    "sftp": "sftp://USER@HOST/FOLDER",
    "hf": "hf://datasets/OWNER/NAME/FOLDER",
}
S3_BUCKET = re.compile(r"[a-zA-Z0-9.\-_]{1,255}")  # botocore refuses others unasked
ENDPOINT_VARIABLES = ("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")  # the first that is set counts

# What S3 and its likes answer, by code: (what it means, what to do).
KEY_VARIABLES = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile in AWS_PROFILE"
CODES = {
    "NoSuchBucket": (
        "there is no bucket '{bucket}' at {endpoint}",
        "Check the name, S3_ENDPOINT_URL, or make the bucket",
    ),
    "InvalidBucketName": ("'{bucket}' cannot be the name of a bucket", "Check the address"),
    "InvalidAccessKeyId": ("{endpoint} does not know the access key", f"Check {KEY_VARIABLES}"),
    "SignatureDoesNotMatch": ("the secret does not belong to the access key", f"Check {KEY_VARIABLES}"),
    "InvalidToken": ("the session token is not valid", "Check AWS_SESSION_TOKEN, or take it out of the environment"),
    "ExpiredToken": ("the credentials have expired", "Get new ones"),
    "AccessDenied": (
        "these credentials may not read there, or what is asked for is not there and they may not know it",
        "Ask for s3:GetObject and s3:ListBucket on bucket '{bucket}', and check the prefix",
    ),
    "RequestTimeTooSkewed": ("this machine's clock is wrong", "Set it"),
    "PermanentRedirect": ("the bucket lies in another region", "Set AWS_DEFAULT_REGION to it"),
    "AuthorizationHeaderMalformed": (
        "the request names another region than the store's",
        "Set AWS_DEFAULT_REGION to it",
    ),
    "SlowDown": ("{endpoint} has too much to do", "Try again later"),
}
AWAY = {
    *("ConnectTimeoutError", "ReadTimeoutError", "EndpointConnectionError", "ConnectionClosedError"),
    *("ConnectionRefusedError", "ConnectionResetError", "TimeoutError", "NoValidConnectionsError"),
    *("ResponseStreamingError", "IncompleteReadError"),
}
"""Names of what clients raise of a store that is not there at the moment; a name that does not resolve is none of them."""
PASSING = {429, 500, 502, 503, 504}
"""Answers of a store that has too much to do, or is at fault at the moment."""
MAY_NOT_WRITE = (
    "these credentials may not write there",
    "Ask for s3:PutObject, s3:GetObject, s3:DeleteObject and s3:ListBucket on bucket '{bucket}'",
)
SAME_AS = {
    "AllAccessDisabled": "AccessDenied",
    "AccountProblem": "AccessDenied",
    "403": "AccessDenied",
    "InvalidClientTokenId": "InvalidAccessKeyId",
    "TokenRefreshRequired": "ExpiredToken",
    "ExpiredTokenException": "ExpiredToken",
    "301": "PermanentRedirect",
    "307": "PermanentRedirect",
    "503": "SlowDown",
    "ServiceUnavailable": "SlowDown",
}


def scheme_of(location: str) -> str:
    """Return s3 of s3://bucket/prefix, "" of a folder; also of an address that cannot be taken apart."""
    return _split(location).scheme


def address_problem(location: str) -> str | None:
    """Say why nothing can be asked for at an address, or None; of S3, the variables that name the server count.

    Args:
        location: a folder (None: it is no address), or the address of a stage or of a file in it.
    """
    scheme = scheme_of(location)
    if not scheme:
        return None
    write, place, location = f"Write {FORMS.get(scheme, f'{scheme}://...')}", _split(location), masking.masked(location)
    if not location.isprintable() or location != location.strip():
        return f"{location!r} is no address: there is a blank at an end, or a character that cannot be seen. {write}."
    if mark := next((mark for mark in "#?" if mark in location), None):
        left_out = location[location.index(mark) :]
        return f"{location} has a '{mark}', and '{left_out}' would be left out. {write}, with other names."
    if scheme == "hf" and not re.match(r"hf://datasets(/[^/]+){2}", location):
        return f"{location} names no dataset of a hub. {write}."
    if scheme in FORMS and not place.netloc:
        return f"{location} names no {'host' if scheme == 'sftp' else 'bucket'}. {write}."
    if scheme == "s3" and "@" in place.netloc:
        return f"{location} has credentials in it. {masking.where_it_belongs(location)}. {write}."
    if scheme == "sftp" and masking.is_lost(place):
        return f"{location} is an address as a record shows it, without its password. {masking.where_it_belongs(location)}."
    if scheme != "s3":
        return None
    if not S3_BUCKET.fullmatch(place.netloc):
        server = "; the server's address goes into S3_ENDPOINT_URL"
        return f"{location}: '{place.netloc}' cannot be the name of a bucket. {write}{server}."
    text = _endpoint_problem()
    return f"{location} cannot be read: {text}" if text else None


def _endpoint_problem() -> str | None:
    ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
    names = ENDPOINT_VARIABLES[:1] if ignored else ENDPOINT_VARIABLES
    name = next((name for name in names if os.environ.get(name)), None)
    if os.environ.get(ENDPOINT_VARIABLES[0]) == "":  # it is handed on as it is
        return f"{ENDPOINT_VARIABLES[0]} is set, and empty. Give it an address, or take it out of the environment."
    if name is None:
        return None
    parts = _split(os.environ[name])
    given = f"{name}={masking.masked(_without_password(os.environ[name]))} is no address"
    todo = "Write http://HOST:PORT or https://HOST:PORT"
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", os.environ[name]):
        return f"{given}. {todo}."
    try:
        port = parts.port
    except ValueError:  # no number, or beyond 65535
        port = 0
    return f"{given}: its port is not from 1 to 65535. {todo}." if port == 0 else None


def _split(address: str) -> SplitResult:
    """Take an address apart; unlike urlsplit, also one with half of a pair of brackets."""
    try:
        return urlsplit(address)
    except ValueError:
        return SplitResult(address.partition(":")[0].lower(), "", "", "", "")


def _without_password(address: str) -> str:
    return re.sub(r"^([a-z]+://)?.*@", r"\1", address)


def explain_store_error(error: Exception, location: str, done: str = "read") -> str:
    """Return why a store did not give what was asked for, or did not take it, and what to do.

    Args:
        error: as the store's client raised it, or one that was raised from it.
        location: address of a stage, e.g. s3://bucket/prefix; also of a file in it, or of a run.
        done: read or written.

    S3 is asked once more where the error alone does not say enough: at most some seconds, and nothing is changed.
    """
    if text := address_problem(location):
        return text
    causes = list(_causes(error))
    name = {type(cause).__name__: cause for cause in reversed(causes)}  # the outermost of a kind wins
    what, todo = (
        _of_credentials(name)
        or _of_tls(causes, name, location)
        or _of_connection(causes, name, location)
        or _of_answer(causes, location)
        or (_first_line(causes[0]), "Check the address and its credentials")
    )
    if _split(location).scheme != "s3":
        todo = todo.replace("S3_ENDPOINT_URL", "the address")
    if done == "written" and what.startswith(may_not := CODES["AccessDenied"][0]):
        what = what.replace(may_not, MAY_NOT_WRITE[0])
        todo = MAY_NOT_WRITE[1].format(bucket=_split(location).netloc)
    return masking.masked(f"{location} cannot be {done}: {what}. {todo}.")


def may_pass(error: BaseException) -> bool:
    """True where the same start may find the store well later: it is away, silent, or says that it is at fault."""
    causes = list(_causes(error))
    names = {type(cause).__name__ for cause in causes}
    if "NameResolutionError" in names or any(isinstance(cause, ssl.SSLError | socket.gaierror) for cause in causes):
        return False
    answers = [cause.response for cause in causes if isinstance(getattr(cause, "response", None), dict)]
    statuses = [int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0) for answer in answers]
    codes = [str(answer.get("Error", {}).get("Code")) for answer in answers]
    return bool(names & AWAY) or bool(PASSING.intersection(statuses)) or "RequestTimeout" in codes


def refusal(error: BaseException, text: str) -> ValueError:
    """Return what to raise of a store's error: Failed, of which a job is started again, where it may pass."""
    return Failed(text) if may_pass(error) else ValueError(text)


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


def _of_credentials(name: dict[str, BaseException]) -> tuple[str, str] | None:
    if "NoCredentialsError" in name:
        return "there are no credentials here", f"Set {KEY_VARIABLES}"
    if "PartialCredentialsError" in name or "CredentialRetrievalError" in name:
        error = name.get("PartialCredentialsError") or name["CredentialRetrievalError"]
        return f"the credentials are incomplete ({_first_line(error)})", f"Set {KEY_VARIABLES}"
    if "ProfileNotFound" in name:
        return _first_line(name["ProfileNotFound"]), "Set AWS_PROFILE to a profile of ~/.aws, or take it out"
    return None


def _of_tls(causes: list[BaseException], name: dict[str, BaseException], location: str) -> tuple[str, str] | None:
    inner = next((cause for cause in causes if isinstance(cause, ssl.SSLError)), None)
    if inner is None and "SSLError" not in name:
        return None
    text, endpoint = str(inner or name["SSLError"]), _endpoint(causes, location)
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text or "HTTP_REQUEST" in text:
        plain = endpoint.replace("https://", "http://", 1)
        return f"TLS failed: {endpoint} does not speak it", f"If it is plain HTTP, write S3_ENDPOINT_URL={plain}"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        reason = getattr(inner, "verify_message", "") or "not trusted"
        todo = "Set AWS_CA_BUNDLE to the file of its authority, or use the name that it was issued for"
        return f"TLS failed: the certificate of {endpoint} is refused ({reason})", todo
    return f"TLS failed with {endpoint}: {_first_line(inner or name['SSLError'])}", "Check S3_ENDPOINT_URL and proxies"


def _of_connection(
    causes: list[BaseException], name: dict[str, BaseException], location: str
) -> tuple[str, str] | None:
    endpoint = _endpoint(causes, location)
    host = _split(endpoint).hostname or endpoint
    if "NameResolutionError" in name or any(isinstance(cause, socket.gaierror) for cause in causes):
        return f"the name {host} does not resolve", "Check S3_ENDPOINT_URL for a typing error, and this machine's DNS"
    if "ProxyConnectionError" in name:
        return (
            f"the proxy does not answer ({_first_line(name['ProxyConnectionError'])})",
            "Check HTTPS_PROXY and NO_PROXY",
        )
    if "ConnectTimeoutError" in name:
        return f"{endpoint} does not answer", "Check S3_ENDPOINT_URL, and that no firewall stands before it"
    if "ReadTimeoutError" in name:
        return f"{endpoint} takes the connection and does not answer", "Check that it is a store, and well"
    if "EndpointConnectionError" in name or any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        return f"nothing listens at {endpoint}", "Check the port in S3_ENDPOINT_URL, and that the store runs"
    if "ConnectionClosedError" in name or any(isinstance(cause, ConnectionError) for cause in causes):
        return f"{endpoint} broke the connection off", "Check that it is a store, and http:// or https:// as it speaks"
    if any(isinstance(cause, ValueError) and str(cause).startswith("Invalid endpoint") for cause in causes):
        return f"S3_ENDPOINT_URL={endpoint} is no address", "Write http://HOST:PORT or https://HOST:PORT"
    if "InvalidRegionError" in name:
        what = f"the region is none ({_first_line(name['InvalidRegionError'])})"
        return what, "Set AWS_DEFAULT_REGION, or region in ~/.aws/config, to a name such as us-east-1"
    return None


def _of_answer(causes: list[BaseException], location: str) -> tuple[str, str] | None:
    """Read the code of a store that answered."""
    answer = next((cause.response for cause in causes if isinstance(getattr(cause, "response", None), dict)), None)
    if answer is None:
        return None
    code = str(answer.get("Error", {}).get("Code", ""))
    if code in ("400", "403", "404", "NoSuchKey") and _split(location).scheme == "s3":
        return _second_look(location, code)
    return _of_code(code, str(answer["Error"].get("Message", "")), location)


def _of_code(code: str, message: str, location: str) -> tuple[str, str]:
    places = {"bucket": _split(location).netloc, "endpoint": _endpoint([], location)}
    if (known := SAME_AS.get(code, code)) in CODES:
        what, todo = CODES[known]
        return f"{what.format(**places)} ({code})", todo.format(**places)
    return f"{places['endpoint']} answers {code or 'with an error'}: {message or 'no reason'}", "Ask who runs the store"


def _second_look(location: str, code: str) -> tuple[str, str]:
    """Ask for one name under the prefix: unlike a head's, the answer says why."""
    from boto3.session import Session
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    once = Config(
        connect_timeout=SECOND_LOOK_SEC, read_timeout=SECOND_LOOK_SEC, retries={"mode": "standard", "max_attempts": 1}
    )
    address = _split(location)
    path = address.path.strip("/")
    is_file = path.endswith(FILES_OF_A_STAGE)
    prefix = path.rpartition("/")[0] if is_file else path
    try:
        client = Session().client("s3", config=once, endpoint_url=os.environ.get("S3_ENDPOINT_URL"))
        folder = {"Bucket": address.netloc, "Prefix": f"{prefix}/" if prefix else "", "MaxKeys": 1}
        found = client.list_objects_v2(**folder).get("Contents", [])
    except ClientError as error:
        return _of_code(str(error.response["Error"]["Code"]), str(error.response["Error"].get("Message", "")), location)
    except (BotoCoreError, ValueError):
        return _of_code(code, "", location)
    if code in ("400", "403"):
        return _of_code("AccessDenied", "", location)
    if not found:
        under = f"s3://{address.netloc}/{prefix}"
        return (
            f"nothing lies under {under}; bucket '{address.netloc}' is there",
            "Check the prefix, or make the stage there",
        )
    if is_file:
        return f"it is not there, though {found[0]['Key']} is", "Make that stage again, or copy it anew"
    there = (
        f"{found[0]['Key']} lies under it, and perhaps more, but not what every stage has (index.json, dataset.json)"
    )
    return there, "Check the prefix; a stage whose making was stopped is finished by the same command again"


def _endpoint(causes: list[BaseException], location: str) -> str:
    """Return scheme, host and port that were asked, without a password that stands in them."""
    kept: list[Any] = [getattr(cause, "kwargs", None) for cause in causes]
    asked = next(
        (values["endpoint_url"] for values in kept if isinstance(values, dict) and "endpoint_url" in values), ""
    )
    scheme = _split(location).scheme
    address = asked or (
        os.environ.get("S3_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT_URL_S3") if scheme == "s3" else ""
    )
    if not address:
        return "AWS" if scheme == "s3" else f"{scheme}://{_split(location).netloc}"
    parts = _split(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else _without_password(address)


def _first_line(error: BaseException) -> str:
    text = (str(error).splitlines() or [""])[0].strip().rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
