"""A small local internet: a table of URLs as LAION publishes it, and the hosts that it names, with their faults.

What a URL gives depends on its path alone, so that two downloads give the same.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import picture
from fault_server import Web, serving

FAULTS = ("missing", "html", "empty", "text", "cut", "endless", "trickle", "forbidden", "refused", "file", "no_use")
"""Kinds of URLs that give no image."""
GOOD = ("picture", "redirect", "png")
CONTENTS = {
    "html": b"<!DOCTYPE html><html>gone</html>",
    "empty": b"",
    "text": b"no picture at all",
    "trickle": bytes(999),
}


@contextmanager
def internet() -> Iterator[Web]:
    """Serve pictures 0 to 199; `write_table` adds what its rows name."""
    with serving() as hosts:
        for number in range(200):
            hosts.put(f"picture/{number}", picture(number, (64, 64)))
        yield hosts


def put_page(hosts: Web, kind: str, number: int) -> str:
    """Put what the URL of a row gives, and return it."""
    content = CONTENTS.get(kind, picture(number, (64, 64), "PNG" if kind == "png" else "JPEG"))
    faults: dict[str, Any] = {
        "redirect": {"redirect": f"/picture/{number}"},
        "cut": {"cut_after": [len(content) - 100] * 99},
        "endless": {"endless": True},
        "trickle": {"pause_sec": 0.2, "block": 1},
        "forbidden": {"token": "none"},
        "html": {"kind": "image/jpeg"},
        "no_use": {"heads": {"X-Robots-Tag": ("noai", "none", "img2dataset: noai")[number % 3]}},
    }
    if kind != "missing":
        hosts.put(f"{kind}/{number}", content, **faults.get(kind, {}))
    return hosts.url(f"{kind}/{number}")


def closed_port() -> int:
    """Return a port at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def url_of(hosts: Web, number: int, closed: int) -> str:
    """Return the URL of a row: every fourth one has a fault, one kind after the other."""
    kind = GOOD[number % len(GOOD)] if number % 4 else FAULTS[number // 4 % len(FAULTS)]
    if kind == "refused":
        return f"http://127.0.0.1:{closed}/picture/{number}"
    return "file:///etc/hostname" if kind == "file" else put_page(hosts, kind, number)


def rows(hosts: Web, numbers: range, closed: int) -> dict[str, list[Any]]:
    """Return rows of LAION-400M's columns. Of ten, one has no licence, one is small, and one repeats an earlier URL."""
    return {
        "SAMPLE_ID": [float(number) for number in numbers],
        "URL": [url_of(hosts, number - 7 if number % 10 == 9 else number, closed) for number in numbers],
        "TEXT": [f"a picture of number {number}" for number in numbers],
        "HEIGHT": [64 if number % 10 != 5 else 16 for number in numbers],
        "WIDTH": [64] * len(numbers),
        "LICENSE": ["?" if number % 10 == 3 else "Creative Commons Attribution" for number in numbers],
        "NSFW": ["UNLIKELY"] * len(numbers),
        "similarity": [0.3 + number % 7 / 100 for number in numbers],
    }


def write_table(folder: Path, hosts: Web, num_parts: int, rows_of_part: int) -> None:
    """Write the parts of a table of URLs, and serve them under /files/."""
    import pyarrow as arrow
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    closed = closed_port()
    for part in range(num_parts):
        table = arrow.table(rows(hosts, range(part * rows_of_part, (part + 1) * rows_of_part), closed))
        path = folder / f"part-{part:05d}.parquet"
        parquet.write_table(table, path, row_group_size=64)
        hosts.put(f"files/{path.name}", path.read_bytes())
