"""Limits for what hosts send: img2dataset reads an answer to its end, and some have none.

`install()` gives urllib, with which img2dataset downloads, an opener that knows http and https alone: a list of URLs may
have file:// and ftp:// in it. An answer that is longer than `most_bytes` or takes longer than `most_sec` is left there.
"""

from __future__ import annotations

import functools
import http.client
import io
import time
import urllib.request
from typing import Any


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


def install(most_bytes: int, most_sec: float) -> None:
    """Make it urllib's opener in this process. `most_bytes`, `most_sec`: of one answer."""
    limited = type("LimitedResponse", (Response,), {"most_bytes": most_bytes, "most_sec": most_sec})

    class Http(urllib.request.HTTPHandler):
        def http_open(self, request: Any) -> Any:
            return self.do_open(functools.partial(_connection, http.client.HTTPConnection, limited), request)

    class Https(urllib.request.HTTPSHandler):
        def https_open(self, request: Any) -> Any:
            return self.do_open(functools.partial(_connection, http.client.HTTPSConnection, limited), request)

    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        Http,
        Https,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    urllib.request.install_opener(opener)


def _connection(kind: type, response: type, host: str, **more: Any) -> Any:
    made = kind(host, **more)
    made.response_class = response
    return made
