"""What a plan says of the files in a folder, so that a later start can name those that have changed."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import xxhash

FILES = "files"
MAX_NAMES = 5


def known_by_files(folder: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return what identifies some files of a folder in a plan. `sizes`: bytes of each, by name."""
    content = "\0".join(f"{size} {name}" for name, size in sizes.items()).encode(errors="surrogateescape")
    return {
        "bytes": sum(sizes.values()),
        "digest": xxhash.xxh3_64_hexdigest(content),
        "folder": folder,
        FILES: base64.b64encode(zlib.compress(content)).decode(),
    }


def _files_of(plan: Mapping[str, Any]) -> set[tuple[str, str, str]]:
    """Return (folder, name, size) of all files that a plan has so."""
    found = set()
    for part in plan["parts"]:
        text = zlib.decompress(base64.b64decode(part[FILES])).decode(errors="surrogateescape") if FILES in part else ""
        for line in text.split("\0") if text else ():
            size, name = line.split(" ", 1)
            found.add((part["folder"], name, size))
    return found


def changed_files(old: dict[str, Any], new: dict[str, Any]) -> tuple[str | None, dict[str, Any], dict[str, Any]]:
    """Compare the files in folders of two plans.

    Returns:
        What changed, in words; None: nothing, or there are other folders. Then the plans without what was compared.
    """
    was, now = _files_of(old), _files_of(new)
    if {folder for folder, _, _ in was} != {folder for folder, _, _ in now} or was == now:
        plans = [
            {**plan, "parts": [{k: v for k, v in p.items() if k != FILES} for p in plan["parts"]]}
            for plan in (old, new)
        ]
        return None, plans[0], plans[1]
    plans = [{**plan, "parts": [part for part in plan["parts"] if FILES not in part]} for plan in (old, new)]
    folders = ", ".join(sorted({folder for folder, _, _ in was ^ now}))
    names = sorted({ascii(name)[1:-1] if not name.isprintable() else name for _, name, _ in was ^ now})
    more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
    text = f"files in {folders} changed since it was started: {', '.join(names[:MAX_NAMES])}{more}"
    return text, plans[0], plans[1]
