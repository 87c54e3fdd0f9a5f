"""JSON lines, and how they are added to a file of a run's record; other files are written whole (cli/files.py)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def as_lines(content: Iterable[Mapping[str, Any]]) -> str:
    """Return JSON lines."""
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in content)


def append_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Add JSON lines to a file of a run's record. Raises OSError: which file, and what to do."""
    try:
        with open(path, "a") as file:
            file.write(as_lines(lines))
    except OSError as error:
        given = f"run_folder: {path} cannot be written: {error.strerror}"
        raise OSError(f"{given}. The run stops; make room, and start the same command again.") from error
