"""What a record's table is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Record = Mapping[str, Any]
Row = tuple[str | None, ...]


class Table(NamedTuple):
    """A record's table: what stands above it, its head and sides (l or r), its rows."""

    title: str
    head: tuple[str, ...]
    align: str
    rows: list[Row]


def spread(record: Record, key: str, digits: str) -> str:
    """Return a figure's median, with the least and the greatest value."""
    middle, least, most = (format(record[f"{key}{end}"], digits) for end in ("", "_min", "_max"))
    return f"{middle} ({least} to {most})"
