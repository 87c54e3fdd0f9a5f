"""A command line, and the YAML file that it names, in their parts: which values were given for which keys, and where.

    [RUN.yaml] [key=value ...] [--flag [value] ...]

What cannot be read becomes a problem, "where: what was given. What is possible. What to do.". `${...}` stays as it is. What
the keys mean is config.py's to say.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError

from common.files import read_regular
from common.value_types import file_problem, kind_of_path, text_problem, truncate

MAX_YAML_BYTES = 2**20
YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class Problem:
    """What a cross-check found: `text` for the reader, and the `keys` that it is about."""

    text: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Alias:
    """A flag as users of the predecessors type it, and what it stands for."""

    key: str
    value_if_bare: str | None = None
    """The value where none follows the flag; None: a value has to follow."""
    choices: Mapping[str, Sequence[str]] | None = None
    """For a flag that stands for several keys: what each value sets, as `key=value`."""
    advice: str | None = None
    """For a flag of another trainer, which is refused: what to use in its place."""


@dataclass(frozen=True)
class Assignment:
    """One value for one key, and the place that a message names."""

    where: str
    key: str
    value: Any
    typed: str
    """The key as it was typed (a flag keeps its own name in messages)."""
    raw: str | None = None
    """The value as it was typed on the command line: a text is taken from here, so that 0123 stays 0123."""
    text: Any = None
    """The value with `${...}` in it, where `value` is what that stands for."""


@dataclass(frozen=True)
class CommandLine:
    """A command line in its parts."""

    yaml: str | None
    assignments: list[Assignment]
    print_config: bool
    problems: list[Problem]
    arguments: list[str] = field(default_factory=list)
    """Words that are neither a YAML file, a key nor a flag, for a command that takes them."""


def parse_command_line(
    argv: Sequence[str], aliases: Mapping[str, Alias], *, takes_arguments: bool = False
) -> CommandLine:
    """Split `[RUN.yaml] [key=value ...] [--flag [value] ...]` into its parts; what cannot be read becomes a problem.

    Args:
        takes_arguments: arguments are allowed: folders that exist, and words that are neither a key nor a flag.
    """
    file, print_config, assignments, problems, arguments = None, False, [], [], []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if "=" not in word and (possible := text_problem(word)):
            problems.append(Problem(f"command line: '{truncate(word)}' is not a path. Possible: {possible}."))
        elif takes_arguments and (kind_of_path(word) == "folder" or not (word.startswith("-") or "=" in word)):
            arguments.append(word)
        elif word in ("--print_config", "--print-config"):
            print_config = True
        elif word.startswith("--"):
            flag_assignments, problem = _read_flag(word, rest, aliases)
            assignments += flag_assignments
            problems += [Problem(problem)] if problem else []
        elif "=" in word and (alias := aliases.get(word.partition("=")[0])) and alias.advice:
            text = f"unknown key '{word.partition('=')[0]}'. Use {alias.advice}"
            problems.append(Problem(f"command line: {text}."))
        elif "=" in word:
            assignment, problem = _read_pair(word)
            assignments += [assignment] if assignment else []
            problems += [Problem(problem)] if problem else []
        elif word.endswith(YAML):
            if file is not None:
                text = f"two YAML files, {truncate(file)} and {truncate(word)}"
                problems.append(Problem(f"command line: {text}. One run has one file."))
            file = word
        else:
            problems.append(Problem(f"command line: '{truncate(word)}' is neither a .yaml file nor key=value."))
    return CommandLine(file, assignments, print_config, problems, arguments)


def _read_flag(word: str, rest: list[str], aliases: Mapping[str, Alias]) -> tuple[list[Assignment], str | None]:
    """Read `--name value`, `--name=value` or `--name`; takes its value off `rest`."""
    name, has_value, value = word[2:].replace("-", "_").partition("=")
    if name not in aliases or aliases[name].advice:
        if not has_value and rest and not (rest[0].startswith("--") or "=" in rest[0] or rest[0].endswith(YAML)):
            rest.pop(0)  # its value, most likely, and no separate problem
        text = f"command line: unknown flag '--{truncate(name)}'"
        if name in aliases:
            return [], f"{text}. Use {aliases[name].advice}."
        known = ", ".join(f"--{flag}" for flag in sorted(aliases) if not aliases[flag].advice)
        return [], f"{text}. Flags: {known}{', ' if known else ''}--print_config. Every key is key=value."
    alias = aliases[name]
    if not has_value:
        follows = bool(rest) and not rest[0].startswith("--")
        if alias.value_if_bare is not None and not (follows and rest[0].lower() in ("true", "false")):
            value = alias.value_if_bare
        elif follows:
            value = rest.pop(0)
        else:
            return [], f"command line: '--{name}' has no value. It stands for {alias.key}=VALUE."
    if alias.choices is not None:
        if value not in alias.choices:
            return (
                [],
                f"command line: '--{name} {truncate(value)}' is not known. Known: {', '.join(sorted(alias.choices))}.",
            )
        pairs = [_read_pair(pair)[0] for pair in alias.choices[value]]
        return [dataclasses.replace(pair, typed=f"--{name}") for pair in pairs if pair], None
    assignment, problem = _read_pair(f"{alias.key}={value}")
    return ([dataclasses.replace(assignment, typed=f"--{name}")] if assignment else []), problem


def _read_pair(word: str) -> tuple[Assignment | None, str | None]:
    """`key=value`, the value as `read_value` reads it."""
    key, _, raw = word.partition("=")
    if not raw.strip():
        return (
            None,
            f"command line: '{truncate(word)}' has no value. Write {truncate(key)}=VALUE, or {truncate(key)}=null for none.",
        )
    try:
        value = read_value(raw)
    except GrammarParseError:
        advice = "Write ${oc.env:VARIABLE}, or ${KEY} of another key"
        return None, f"command line: '{truncate(word)}' has a '${{' that cannot be read. {advice}."
    except Exception as error:  # the YAML reader's own exceptions, of several unrelated classes
        return (
            None,
            f"command line: the value of '{truncate(word)}' cannot be read as YAML: {_explain_error(error, b'')}",
        )
    return Assignment("command line", key, value, key, raw), None


def read_value(raw: str) -> Any:
    """Return a typed value as YAML reads it: 1e-4 is a number, null is None, [64, 64] is a list.

    Where YAML would drop a part of what was typed, the text as it was typed: `#x`, `~`, `a #b`, `&x a`. Only the word null
    is None. Raises the YAML reader's exceptions, of several unrelated classes.
    """
    typed = raw.strip()
    tree: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={raw}"]))
    value = tree["value"]
    if value is None:
        return None if typed.lower() == "null" else typed
    return typed if isinstance(value, str) and not typed.startswith(("'", '"')) else value


def read_yaml(path: str) -> tuple[list[Assignment], list[Problem]]:
    """All leaf values of a YAML file, in its order; `${...}` stays as it is."""
    where = truncate(path, 300)
    if text := file_problem(path):
        problem = text.removeprefix(f"{where} ")
        return [], [Problem(f"{where}: {problem if kind_of_path(path) else _no_such_yaml(Path(path).parent)}")]
    content = b""
    try:
        content = read_regular(Path(path).expanduser(), MAX_YAML_BYTES)
        tree = OmegaConf.to_container(OmegaConf.load(io.StringIO(content.decode())))
    except OSError as error:
        return [], [Problem(f"{where}: {error.strerror}. Give a run's file.")]
    except Exception as error:  # of several unrelated classes
        return [], [Problem(f"{where}: cannot be read as YAML: {_explain_error(error, content)}")]
    if not isinstance(tree, dict):
        return [], [Problem(f"{where}: holds a {type(tree).__name__}. A run is a mapping of keys to values.")]
    return [Assignment(where, key, value, key) for key, value in leaves(tree)], []


def _no_such_yaml(folder: Path) -> str:
    names = sorted(file.name for file in folder.glob("*.yaml")) if kind_of_path(folder) == "folder" else []
    others = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return "no such file. " + (f"In {folder}: {others}." if names else "Check the path.")


def leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the keys of a nested mapping with their values; an empty section is a value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def split_section(at: Assignment) -> list[Assignment]:
    """Return the keys of a section that was given as one value, `optimizer={lr: 1e-4}`, each by itself."""
    if not isinstance(at.value, Mapping) or not at.value:
        return [at]
    return [Assignment(at.where, key, value, key) for key, value in leaves(at.value, f"{at.key}.")]


def _explain_error(error: Exception, content: bytes) -> str:
    """Say in a line what the YAML reader found, and in which line of the content."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    # The position of a byte that is not valid.
    begin = getattr(error, "start" if isinstance(error, UnicodeDecodeError) else "position", None)
    parts = [getattr(error, name, None) for name in ("context", "problem")]
    text = ": ".join(part for part in parts if part) or (str(error).splitlines() or [type(error).__name__])[0]
    line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    line = line or ("" if begin is None else f"line {content[:begin].count(10) + 1}: ")
    return line + truncate(text.strip().rstrip("."), 200) + "."
