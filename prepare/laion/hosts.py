"""Which hosts are asked for a picture, and which answers forbid its use.

A table of URLs is anybody's: it may name a router, a machine of this network or a cloud's metadata service, also by a
redirect, by a name that resolves to it, or as `http://2130706433/`. So each address is checked just before a socket connects.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import Any

NOT_PUBLIC = "not a public address"
FORBIDDEN = "Use of image disallowed by X-Robots-Tag directive"  # img2dataset's words
PROTOCOLS = ipaddress.IPv4Network("192.0.0.0/24")  # RFC 6890; older Pythons know parts of it
UNICAST = ipaddress.IPv6Network("2000::/3")  # all that IANA gives out: iana.org/assignments/ipv6-address-space
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address

# developers.google.com/search/docs/crawling-indexing/robots-meta-tag: `none` is noindex and nofollow; noai and noimageai are
# DeviantArt's, which img2dataset heeds by default, as noindex and noimageindex.
OPT_OUTS = {"noai", "noimageai", "noindex", "noimageindex", "none"}
AGENTS = {"img2dataset", "*"}
WITH_VALUE = {"max-image-preview", "max-snippet", "max-video-preview", "unavailable_after"}


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


def forbids_use(values: Iterable[str]) -> bool:
    """True where headers X-Robots-Tag forbid to index an image or to train on it, to everybody or to img2dataset.

    `BOT: noindex, nofollow, OTHER: noai`: a name is that of all directives up to the next name.
    """
    for value in values:
        is_for_us = True
        for part in re.split("[,;]", value.lower()):
            name, colon, rest = (text.strip() for text in part.partition(":"))
            if colon and (name in WITH_VALUE or re.search(r"\s", name)):  # a value, or the time of day of a date
                continue
            if colon:
                is_for_us, name = name.partition("/")[0] in AGENTS, rest
            if is_for_us and name in OPT_OUTS:
                return True
    return False
