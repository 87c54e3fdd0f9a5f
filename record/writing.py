"""Files of a run's record are written whole or not at all; lines are added."""

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


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    write_whole(path, json.dumps(content, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)
