"""Reads what W&B's client has written offline: run-ID.wandb, records of its own protocol in LevelDB's log format.

Source of the format: LevelDB's doc/log_format.md; W&B puts seven bytes before it, which count in the first block.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, struct.Struct("<IHB")  # checksum, length, kind
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """Yield its records."""
    from wandb.proto import wandb_internal_pb2

    content, at, parts = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + HEADER.size <= len(content):
        if (room := BLOCK - at % BLOCK) < HEADER.size:
            at += room
            continue
        _, length, kind = HEADER.unpack_from(content, at)
        part = content[at + HEADER.size : at + HEADER.size + length]
        at += HEADER.size + length
        parts = part if kind in (FULL, FIRST) else parts + part
        if kind in (FULL, LAST):
            yield wandb_internal_pb2.Record.FromString(parts)


@dataclass
class Offline:
    """What the starts of a run have logged."""

    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    alerts: list[tuple[str, str, str]] = field(default_factory=list)
    """Title, text, level."""
    group: str = ""

    def names(self) -> set[str]:
        """Of all that was logged, without W&B's own ones."""
        return {name for row in [*self.history, self.summary] for name in row if not name.startswith("_")}


def offline(run: Path) -> Offline:
    """Read the starts of a run's folder, in their order."""
    paths, found = sorted((run / "wandb").glob("offline-run-*/run-*.wandb")), Offline()

    def values(items: Any) -> dict[str, Any]:
        # Of the parts of an image, the last.
        return {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}

    for record in itertools.chain.from_iterable(map(records, paths)):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            found.history.append(values(record.history.item))
        elif kind == "summary":
            found.summary |= values(record.summary.update)
        elif kind == "config":
            found.config |= values(record.config.update)
        elif kind == "run":
            found.group = record.run.run_group
            found.config |= values(record.run.config.update)
        elif kind == "alert":
            found.alerts.append((record.alert.title, record.alert.text, record.alert.level))
    return found
