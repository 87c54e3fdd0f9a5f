"""Write the tables of keys of the pages under docs/: each key with its default, what is possible and what it means.

    python -m common.key_reference docs/*.md         (make report)

A page says where a table goes, and of which dataclass:

    <!-- keys of benchmark.RunConfig -->              the keys of a dataclass and of its sections
    <!-- own keys of evaluation.scores.EvalKeys -->   only those that it declares itself, without sections
    <!-- end of keys -->

What lies between the marks is replaced. What a key means is the text under its field in the code.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.command import command
from common.command_help import Key, keys_of
from common.errors import Refused
from common.files import write_atomic
from common.static_schema import read_name

BLOCK = re.compile(r"(<!-- (own )?keys of ([\w.]+) -->\n).*?(<!-- end of keys -->)", re.S)


def format_table(keys: Sequence[Key]) -> str:
    """Return a table in Markdown, a row a key."""
    rows = [(f"`{key.name}`", f"`{key.default}`", key.possible, key.text) for key in keys]
    lines = [("key", "default", "possible", "meaning"), ("---",) * 4, *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def format_page(schema: type, own_only: bool = False) -> str:
    """Return the tables of a dataclass's keys.

    Args:
        own_only: only the keys that the class declares itself, in one table.
    """
    entries = list(keys_of(schema))
    if own_only:
        return (
            "\n"
            + format_table(
                [key for key in entries if isinstance(key, Key) and key.owner is schema and "." not in key.name]
            )
            + "\n"
        )
    groups: list[tuple[str, type, list[Key]]] = []
    for entry in entries:
        if isinstance(entry, tuple):
            groups.append((f"`{entry[0]}`", entry[1], []))
            continue
        if "." not in entry.name and (not groups or groups[-1][1] is not entry.owner):
            groups.append(("Keys without a section", entry.owner, []))
        groups[-1][2].append(entry)
    parts, last = [], None
    for heading, owner, keys in groups:
        text = " ".join((inspect.getdoc(owner) or "").split("\n\n")[0].split())
        heads = [] if heading == last else [f"### {heading}"]
        parts += [*heads, text, *([format_table(keys).rstrip()] if keys else [])]
        last = heading
    return "\n" + "\n\n".join(parts) + "\n\n"


def _read(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return read_name(module, last)


def update_tables(text: str) -> str:
    """Return a page with its tables made again."""

    def block(match: re.Match[str]) -> str:
        return match[1] + format_page(_read(match[3]), own_only=bool(match[2])) + match[4]

    return BLOCK.sub(block, text)


@command()
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    for path in map(Path, argv):
        try:
            before = path.read_text()
        except OSError as error:
            raise Refused(f"{path}: {error.strerror}. Give pages of docs/.") from error
        if (after := update_tables(before)) != before:
            write_atomic(path, after)
            print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
