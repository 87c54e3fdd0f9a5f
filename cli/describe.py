"""Write the tables of keys of the pages under docs/: each key with its default, what is possible and what it means.

    python -m cli.describe docs/*.md         (make report)

A page says where a table goes, and of which dataclass:

    <!-- keys of benchmark.RunConfig -->           the keys of a dataclass and of its sections
    <!-- own keys of eval.EvalCommand -->          only those that it declares itself, without sections
    <!-- end of keys -->

    <!-- rows of record.metric_names.METRICS -->   a row for each of these dataclasses, a column for each field
    <!-- end of rows -->

What lies between the marks is replaced. What a key means is the text under its field in the code.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cli.command import command
from cli.errors import Refused
from cli.files import write_whole
from cli.limits import type_hints

BLOCK = re.compile(r"(<!-- (own )?keys of ([\w.]+) -->\n).*?(<!-- end of keys -->)", re.S)
ROWS = re.compile(r"(<!-- rows of ([\w.]+) -->\n).*?(<!-- end of rows -->)", re.S)
NAMES = {int: "an integer", float: "a number", str: "text", types.NoneType: "null", Any: "see meaning"}


@dataclass(frozen=True)
class Key:
    """One key: where it is declared, its default, what is possible, and the text under its field."""

    name: str
    owner: type
    default: str
    possible: str
    text: str


def keys_of(schema: type, prefix: str = "") -> Iterator[Key | tuple[str, type]]:
    """Yield a dataclass's keys in their order, then each section's name and class, followed by its keys."""
    hints, texts, owners = type_hints(schema), {}, {}
    for owner in reversed(schema.__mro__):
        for name, text in _texts(owner).items():
            texts[name], owners[name] = text, owner
    sections = []
    for field in dataclasses.fields(schema):
        hint = hints[field.name]
        section = next((h for h in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(h)), None)
        if section is not None:
            sections.append((f"{prefix}{field.name}", section))
            continue
        kinds = [kind for part in (hint, *typing.get_args(hint)) for kind in typing.get_args(part)]
        sections += [(f"{prefix}{field.name}[]", kind) for kind in kinds if dataclasses.is_dataclass(kind)]
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        possible = _possible(hint, field.metadata.get("limits"))
        yield Key(f"{prefix}{field.name}", owners[field.name], _written(default), possible, texts[field.name])
    for name, section in sections:
        yield name, section
        yield from keys_of(section, f"{name}.")


def _texts(owner: type) -> dict[str, str]:
    """Return field -> the text under it, for the fields that a class declares itself."""
    if not dataclasses.is_dataclass(owner):
        return {}
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body
    found = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            found[node.target.id] = " ".join(str(after.value.value).split()) if is_text else ""
    return found


def _possible(hint: Any, limits: Any) -> str:
    """Say what a key takes: `fp32`, `bf16`; 0 to 512, null."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return ", ".join(dict.fromkeys(_possible(kind, limits) for kind in typing.get_args(hint)))
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        kinds = typing.get_args(hint)
        return "a list of numbers" if Ellipsis in kinds else f"a list of {len(kinds)} numbers"
    if typing.get_origin(hint) is list:
        return "a list of sections" if dataclasses.is_dataclass(typing.get_args(hint)[0]) else "a list"
    if hint is bool:
        return "`true`, `false`"
    if hint in (int, float) and limits is not None:
        return limits.possible(hint(0))
    if hint is str and limits is not None and limits.of_text:
        return limits.of_text[1]
    return NAMES[hint]


def _written(value: Any) -> str:
    """Return a default as YAML has it."""
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-")
    return value if isinstance(value, str) else json.dumps(value)


def table(keys: Sequence[Key]) -> str:
    """Return a table in Markdown, a row a key."""
    rows = [(f"`{key.name}`", f"`{key.default}`", key.possible, key.text) for key in keys]
    return _as_markdown(("key", "default", "possible", "meaning"), rows)


def _as_markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def page_of(schema: type, own: bool = False) -> str:
    """Return the tables of a dataclass's keys.

    Args:
        own: only the keys that the class declares itself, in one table.
    """
    entries = list(keys_of(schema))
    if own:
        return (
            "\n"
            + table([key for key in entries if isinstance(key, Key) and key.owner is schema and "." not in key.name])
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
        parts += [*heads, text, *([table(keys).rstrip()] if keys else [])]
        last = heading
    return "\n" + "\n\n".join(parts) + "\n\n"


def rows_of(entries: Sequence[Any]) -> str:
    """Return a table of some dataclasses of one kind; what each begins with is a name."""
    heads = [field.name for field in dataclasses.fields(entries[0])]
    rows = [[f"`{getattr(each, heads[0])}`", *(getattr(each, head) for head in heads[1:])] for each in entries]
    return "\n" + _as_markdown(heads, rows) + "\n"


def _named(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def described(text: str) -> str:
    """Return a page with its tables made anew."""

    def block(found: re.Match[str]) -> str:
        return found[1] + page_of(_named(found[3]), own=bool(found[2])) + found[4]

    text = BLOCK.sub(block, text)
    return ROWS.sub(lambda found: found[1] + rows_of(_named(found[2])) + found[3], text)


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    for path in map(Path, argv):
        try:
            before = path.read_text()
        except OSError as error:
            raise Refused(f"{path}: {error.strerror}. Give pages of docs/.") from error
        if (after := described(before)) != before:
            write_whole(path, after)
            print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
