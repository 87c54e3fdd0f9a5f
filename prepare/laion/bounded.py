"""Limits for what hosts send: img2dataset reads an answer to its end, and some have none.

`install()` gives urllib, with which img2dataset downloads, an opener that knows http and https alone: a list of URLs may
have file:// and ftp:// in it. It asks public hosts alone, and leaves what they forbid to use (prepare/laion/hosts.py). An
answer that is longer than `most_bytes` or takes longer than `most_sec` is left there.
"""

from __future__ import annotations

import functools
import http.client
import io
import socket
import time
import urllib.request
from typing import Any
from urllib.parse import unquote, urlsplit

from cli.private_api import require_private_api
from prepare.laion import hosts

WHY = "a host's address is checked where a socket connects to it"
require_private_api(http.client.HTTPConnection, "_create_connection", why=WHY)
require_private_api(urllib.request.Request, "_tunnel_host", why=WHY)


class Bounded(io.RawIOBase):
    """What comes from a host, up to a number of bytes and a time: its headers and the lengths of its chunks too."""

    def __init__(self, raw: Any, most_bytes: int, most_sec: float):
        self._raw, self._left, self._most_bytes = raw, most_bytes, most_bytes
        self._until, self._most_sec = time.monotonic() + most_sec, most_sec

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read what there is. Raises OSError: it was too much, or took too long."""
        if time.monotonic() > self._until:
            raise TimeoutError(f"took more than {self._most_sec:g} s")
        num = self._raw.readinto(buffer)
        self._left -= num or 0
        if self._left < 0:
            raise OSError(f"more than {self._most_bytes / 2**20:g} MiB")
        return num

    def close(self) -> None:
        self._raw.close()
        super().close()


class Response(http.client.HTTPResponse):
    """An answer with an end."""

    most_bytes, most_sec = 2**26, 60.0

    def __init__(self, *given: Any, **more: Any):
        super().__init__(*given, **more)
        self.fp = io.BufferedReader(Bounded(self.fp.detach(), self.most_bytes, self.most_sec))


def install(most_bytes: int, most_sec: float, *, allow_private: bool = False) -> None:
    """Make it urllib's opener in this process.

    Args:
        most_bytes, most_sec: of one answer.
        allow_private: asks hosts whose addresses are not public too.
    """
    limited = type("LimitedResponse", (Response,), {"most_bytes": most_bytes, "most_sec": most_sec})

    def connection(kind: type, request: urllib.request.Request) -> Any:
        """Return what makes a connection. A proxy may be anywhere; whom it is asked for may not."""
        is_proxy = request.has_proxy() or request._tunnel_host is not None
        if is_proxy and not allow_private:
            hosts.check_for_proxy(unquote(urlsplit(request.full_url).hostname or ""))
        connect = socket.create_connection if is_proxy or allow_private else hosts.connect
        return functools.partial(_connection, kind, limited, connect)

    class Http(urllib.request.HTTPHandler):
        def http_open(self, request: Any) -> Any:
            return self.do_open(connection(http.client.HTTPConnection, request), request)

    class Https(urllib.request.HTTPSHandler):
        def https_open(self, request: Any) -> Any:
            return self.do_open(connection(http.client.HTTPSConnection, request), request)

    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        Http,
        Https,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
        OptOuts,
    ):
        opener.add_handler(handler())
    urllib.request.install_opener(opener)


class OptOuts(urllib.request.BaseHandler):
    """Leaves a picture whose use its host forbids. What img2dataset looks for misses `none`, and names of agents."""

    handler_order = urllib.request.HTTPErrorProcessor.handler_order + 1  # which follows redirects

    def http_response(self, request: Any, response: Any) -> Any:
        if hosts.forbids_use(response.headers.get_all("X-Robots-Tag", [])):
            response.close()
            raise OSError(hosts.FORBIDDEN)
        return response

    https_response = http_response


def _connection(kind: type, response: type, connect: Any, host: str, **more: Any) -> Any:
    made = kind(host, **more)
    made.response_class, made._create_connection = response, connect
    return made
