"""A command's --help: the head of its file, and its keys, read from the source without importing it.

    python benchmark.py --help              # the head, the keys without a section, the names of the sections
    python benchmark.py --help optimizer    # the keys of a section
    python -m prepare.shards --help

`@command(keys=ShardsConfig)` in the file names the class of the keys. What a key means is the text under its field.
"""

from __future__ import annotations

import ast
import dataclasses
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

from common import interrupts
from common.log import log
from common.static_schema import ROOT, SOURCES, path_of, read_name
from common.value_types import type_hints

NAMES = {int: "an integer", float: "a number", str: "text", types.NoneType: "null", Any: "see meaning"}
WIDTH = 110  # of a line of text


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
        yield Key(f"{prefix}{field.name}", owners[field.name], _format_default(default), possible, texts[field.name])
    for name, section in sections:
        yield name, section
        yield from keys_of(section, f"{name}.")


def _texts(owner: type) -> dict[str, str]:
    """Return field -> the text under it, for the fields that a class declares itself."""
    if not dataclasses.is_dataclass(owner):
        return {}
    of_class = SOURCES.get(owner) or ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    assert isinstance(of_class, ast.ClassDef)
    texts = {}
    for node, after in zip(of_class.body, [*of_class.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            texts[node.target.id] = " ".join(str(after.value.value).split()) if is_text else ""
    return texts


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


def _format_default(value: Any) -> str:
    """Return a default as YAML has it."""
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-")
    return value if isinstance(value, str) else json.dumps(value)


# --- the help of a command ---


@dataclass(frozen=True)
class CommandSource:
    """What a command's file says of it."""

    module: str
    head: str
    keys: type | None
    needs_words: bool


def read_command(path: str | Path) -> CommandSource:
    """Read a command's file: its head, and what its `@command(...)` says."""
    tree = ast.parse(Path(path).read_bytes())
    module = ".".join(Path(path).resolve().relative_to(ROOT).with_suffix("").parts)
    calls = (part for node in tree.body if isinstance(node, ast.FunctionDef) for part in node.decorator_list)
    call = next(part for part in calls if isinstance(part, ast.Call) and ast.unparse(part.func) == "command")
    words = {word.arg: ast.unparse(word.value) for word in call.keywords}
    keys = read_name(module, words["keys"]) if "keys" in words else None
    return CommandSource(module, ast.get_docstring(tree) or "", keys, words.get("needs_words") != "False")


def print_help(path: str | Path, argv: Sequence[str]) -> int | None:
    """Print a command's help if requested. Returns its exit code, None: the command is to be run."""
    asked = next((number for number, word in enumerate(argv) if word in ("-h", "--help")), None)
    if asked is None and argv:
        return None
    source = read_command(path)
    if asked is None and not source.needs_words:
        return None
    entries = list(keys_of(source.keys)) if source.keys else []
    keys = [entry for entry in entries if isinstance(entry, Key)]
    sections = [entry[0] for entry in entries if not isinstance(entry, Key) and "." not in entry[0]]
    word = argv[asked + 1] if asked is not None and asked + 1 < len(argv) else ""
    if sections and re.fullmatch(r"[a-z0-9_.]+", word) and not word.endswith(".yaml"):
        chosen = [key for key in keys if re.match(rf"{re.escape(word)}($|[.\[])", key.name)]
        if not chosen:
            log.error(f"command line: no section or key '{word}'. Sections: {', '.join(sections)}.")
            return 2
        print(format_keys(chosen))
        return 0
    print("\n\n".join([source.head, *_format_own(source, keys), *_format_sections(sections)]))
    return 0 if argv else 2


def _format_own(source: CommandSource, keys: Sequence[Key]) -> list[str]:
    """Return the keys without a section, but not those that a command has in common with benchmark.py."""
    bases = source.keys.__mro__[1:] if source.keys else ()
    of_run = {owner for base in bases if _has_sections(base) for owner in base.__mro__}
    own = [key for key in keys if "." not in key.name and key.owner not in of_run]
    return [f"Keys, as KEY=VALUE, with their defaults:\n{format_keys(own)}"] if own else []


def _format_sections(names: Sequence[str]) -> list[str]:
    return [f"Sections (--help SECTION lists their keys): {', '.join(names)}."] if names else []


def _has_sections(schema: type) -> bool:
    fields = dataclasses.fields(schema) if dataclasses.is_dataclass(schema) else ()
    return any(dataclasses.is_dataclass(field.default_factory) for field in fields)


def format_keys(keys: Sequence[Key]) -> str:
    """Return keys for the terminal: a line `key=default  (possible)` and what it means below."""
    lines = []
    for key in keys:
        lines.append(f"  {key.name}={key.default}   ({key.possible.replace('`', '')})")
        lines += textwrap.wrap(key.text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def answer_help(path: str | Path) -> None:
    """Print help and exit, if requested, before the slow imports."""
    with interrupts.end_with_reader():
        code = print_help(path, sys.argv[1:])
    if code is not None:
        sys.exit(code)


def answer_help_of_module(package: str) -> None:
    """The same for `python -m PACKAGE.NAME`, while Python imports the package to find the module."""
    name = module_to_run()
    if name is not None and f"{name}.".startswith(f"{package}."):
        path = path_of(name)
        answer_help(path.with_name("__main__.py") if path.name == "__init__.py" else path)


def module_to_run() -> str | None:
    """Return the module that Python looks for to run it with -m, or None."""
    return sys.orig_argv[sys.orig_argv.index("-m") + 1] if sys.argv[:1] == ["-m"] else None
