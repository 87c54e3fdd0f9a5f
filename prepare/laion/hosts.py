"""Which hosts are asked for a picture, and how much of an answer is read.

A table of URLs is anybody's: it may name a router, a machine of this network or a cloud's metadata service, also by a
redirect, by a name that resolves to it, or as `http://2130706433/`. So each address is checked just before a socket connects.

`install()` gives urllib, with which img2dataset downloads, an opener that knows http and https alone, asks public hosts
alone, and leaves an answer that is longer than `most_bytes` or takes longer than `most_sec`.
"""

from __future__ import annotations

import functools
import http.client
import io
import ipaddress
import socket
import time
import urllib.request
from typing import Any
from urllib.parse import unquote, urlsplit

from cli.private_api import require_private_api

NOT_PUBLIC = "not a public address"
PROTOCOLS = ipaddress.IPv4Network("192.0.0.0/24")  # RFC 6890; older Pythons know parts of it
UNICAST = ipaddress.IPv6Network("2000::/3")  # all that IANA gives out: iana.org/assignments/ipv6-address-space
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address

WHY = "a host's address is checked where a socket connects to it"
require_private_api(http.client.HTTPConnection, "_create_connection", why=WHY)
require_private_api(urllib.request.Request, "_tunnel_host", why=WHY)


def is_public(address: str) -> bool:
    """True for an address of the public internet; one of IPv6 that stands for one of IPv4 counts as that one."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv4Address):
        return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip in PROTOCOLS)
    inner = ipaddress.IPv4Address(int(ip) % 2**32) if ip in NAT64 else ip.ipv4_mapped or ip.sixtofour
    return is_public(str(inner)) if inner else ip in UNICAST and ip.is_global


def public_addresses(host: str, port: int | None) -> list[str]:
    """Return the public addresses of a host. Raises OSError: it has none, or is not known."""
    resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    public = [str(address) for address in dict.fromkeys(found[4][0] for found in resolved) if is_public(str(address))]
    if not public:
        raise OSError(NOT_PUBLIC)
    return public


def connect(place: tuple[str, int], *given: Any) -> socket.socket:
    """Connect as socket.create_connection does, but to public addresses alone. Raises OSError."""
    *others, last = public_addresses(*place)
    for address in others:
        try:
            return socket.create_connection((address, place[1]), *given)
        except OSError:
            continue
    return socket.create_connection((last, place[1]), *given)


def check_for_proxy(host: str) -> None:
    """Raise OSError if a host that a proxy would be asked for is not public. Names that it alone can resolve pass."""
    try:
        public_addresses(host, None)
    except socket.gaierror:
        return


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
            check_for_proxy(unquote(urlsplit(request.full_url).hostname or ""))
        way = socket.create_connection if is_proxy or allow_private else connect
        return functools.partial(_connection, kind, limited, way)

    class Http(urllib.request.HTTPHandler):
        def http_open(self, request: Any) -> Any:
            return self.do_open(connection(http.client.HTTPConnection, request), request)

    class Https(urllib.request.HTTPSHandler):
        def https_open(self, request: Any) -> Any:
            return self.do_open(connection(http.client.HTTPSConnection, request), request)

    opener, known = urllib.request.OpenerDirector(), urllib.request
    others = known.HTTPDefaultErrorHandler, known.HTTPRedirectHandler, known.HTTPErrorProcessor
    for handler in (known.ProxyHandler, known.UnknownHandler, Http, Https, *others):
        opener.add_handler(handler())
    urllib.request.install_opener(opener)


def _connection(kind: type, response: type, connect: Any, host: str, **more: Any) -> Any:
    made = kind(host, **more)
    made.response_class, made._create_connection = response, connect
    return made
