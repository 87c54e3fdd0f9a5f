"""Hosts that are not asked for an image, however a table names them."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator

import pytest
from fault_server import Web, serving, web  # noqa: F401

from prepare.laion import images


@pytest.fixture(autouse=True)
def opener(monkeypatch) -> Iterator[None]:
    """No proxy of this machine's, and the opener of before afterwards."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    yield
    urllib.request.install_opener(None)


def get(url: str, *, allow_private: bool = False) -> bytes:
    """Ask for a URL as img2dataset does. Raises OSError."""
    images.install_bounded_opener(2**20, 20.0, allow_private=allow_private)
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read()


def refusal(url: str) -> str:
    with pytest.raises(OSError) as error:
        get(url)
    return str(getattr(error.value, "reason", error.value))


# --- addresses ---


PUBLIC = """
    8.8.8.8 1.1.1.1 172.32.0.1 100.63.255.255 100.128.0.1 2606:4700::1111 2a00:1450:4001::5 ::ffff:8.8.8.8
    64:ff9b::808:808
"""


def test_addresses_are_public_or_not():
    assert [address for address in PUBLIC.split() if not images.is_public(address)] == []
    assert [address for address in NOT_PUBLIC.split() if images.is_public(address)] == []


NOT_PUBLIC = """
    127.0.0.1 127.255.255.254 0.0.0.0 0.1.2.3 10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254
    100.64.0.1 100.127.255.255 192.0.0.8 192.0.0.170 192.0.2.1 198.18.0.1 224.0.0.1 239.255.255.250 240.0.0.1
    255.255.255.255 :: ::1 fe80::1 fe80::1%1 fec0::1 fc00::1 fd00:ec2::254 ff02::1 100::1 2001:db8::1 2001::1
    ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:169.254.169.254 ::ffff:10.0.0.1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe
    64:ff9b:1::7f00:1 2002:7f00:1:: 2002:a9fe:a9fe::1
"""


OF_THIS_MACHINE = """
    127.0.0.1 localhost 2130706433 0177.0.0.1 0x7f.0.0.1 0x7f000001 017700000001 127.1 127.0.1 0 [::1] [::]
    [::ffff:127.0.0.1] [::ffff:7f00:1] %31%32%37.0.0.1
"""


@pytest.mark.parametrize("host", OF_THIS_MACHINE.split())
def test_a_host_of_this_machine_is_not_asked_however_it_is_written(web, host):  # noqa: F811
    web.put("a.jpg", b"secret")
    assert refusal(web.url("a.jpg", host)) == images.NOT_PUBLIC
    assert web.asked == []


@pytest.fixture
def names(monkeypatch) -> dict[str, list[str]]:
    """Names of hosts, and what each resolves to, the first time and later, or []; 127.0.0.2 and on are public here."""
    resolve, known = socket.getaddrinfo, {}

    def getaddrinfo(host, *args, **options):
        addresses = known.get(host, [host])
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(addresses.pop(0) if len(addresses) > 1 else addresses[0], *args, **options)

    is_public = images.is_public
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(images, "is_public", lambda address: address in LOOPBACK or is_public(address))
    return known


LOOPBACK = [f"127.0.0.{number}" for number in range(2, 10)]


@pytest.fixture
def public() -> Iterator[Web]:
    """A host whose address counts as public."""
    with serving("127.0.0.2") as server:
        yield server


def test_a_redirect_or_a_name_that_leads_to_this_machine_is_not_followed(web, public, names):  # noqa: F811
    names["inside.test"] = ["127.0.0.1"]
    names["public.test"] = ["127.0.0.2"]
    web.put("a.jpg", b"secret")
    public.put("a.jpg", b"picture")
    assert get(public.url("a.jpg", "public.test")) == b"picture"
    assert refusal(web.url("a.jpg", "inside.test")) == images.NOT_PUBLIC
    for host in ("127.0.0.1", "inside.test", "2130706433"):
        public.put("moved", redirect=web.url("a.jpg", host))
        assert refusal(public.url("moved", "public.test")) == images.NOT_PUBLIC
    assert web.asked == []


def test_a_name_that_resolves_to_another_address_the_second_time_is_asked_at_the_first_one(web, public, names):  # noqa: F811
    web.put("a.jpg", b"secret")
    names["rebinds.test"] = ["127.0.0.2", "127.0.0.1"]
    with pytest.raises(OSError, match="refused"):
        get(web.url("a.jpg", "rebinds.test"))  # nobody listens there at this port
    assert web.asked == [] and names["rebinds.test"] == ["127.0.0.1"]


def test_behind_a_proxy_the_host_is_checked_and_not_the_proxy(web, names, monkeypatch):  # noqa: F811
    monkeypatch.setenv("http_proxy", web.url(""))
    web.put("a.jpg", b"picture")  # for a proxy a path is a whole URL, which this one takes for a path
    names |= {"public.test": ["127.0.0.2"], "only-the-proxy-knows.test": []}
    assert get("http://public.test/a.jpg") == b"picture" == get("http://only-the-proxy-knows.test/a.jpg")
    for host in ("127.0.0.1", "169.254.169.254", "2130706433", "[::ffff:10.0.0.1]", "%31%32%37.0.0.1"):
        assert images.NOT_PUBLIC in refusal(f"http://{host}/a.jpg")
    monkeypatch.setenv("https_proxy", web.url(""))
    assert images.NOT_PUBLIC in refusal("https://169.254.169.254/a.jpg") and len(web.asked) == 2
