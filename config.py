"""Typed configuration: dataclass defaults <- YAML <- command line.

    composer benchmark.py yamls/shapes.yaml max_duration=100ba optimizer.lr=3e-4

takes the defaults of the entry file's dataclass, lays the YAML over them, then each `key=value` in the order given.
A predecessor's flag (`--batch_size 256`) is an alias of a key. Every key is checked by name and type, and all problems
are reported in one `ConfigError`, each in the shape "where: what was given. What is possible. What to do."

A value may be `${oc.env:VARIABLE}` or `${another.key}`: it is resolved for use, and stays as it is wherever the
configuration is shown or written. A password in an address is masked. See masking.py.

This file knows OmegaConf and messages. It has no section of its own: each section is a frozen dataclass beside the code
that owns it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import io
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError

import masking
from limits import MAX_PART_BYTES, Limits, beyond, file_problem, given_as, kind_of_path, shown, text_possible

Config = TypeVar("Config")

MAX_YAML_CHARACTERS, MAX_YAML_DEPTH = 2**20, 50
YAML = (".yaml", ".yml")


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one problem a line.

    config: the typed configuration where every name and type was right and only checks across keys failed, else None.
    """

    def __init__(self, problems: Sequence[str], config: Any = None):
        self.problems = [masking.hidden(text) for text in problems]
        self.config = config
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Problem:
    """What a cross-check found: `text` for the reader, and the `keys` that it is about.

    A problem is dropped when one of its keys was already refused: its value is then only the default.
    """

    text: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Alias:
    """A flag as users of the predecessors type it, and what it stands for."""

    key: str
    bare: str | None = None
    """The value where none follows the flag; None: a value has to follow."""
    choices: Mapping[str, Sequence[str]] | None = None
    """For a flag that stands for several keys: what each value sets, as `key=value`."""


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
    places: list[str] = field(default_factory=list)
    """Words that are neither: what a command is about, where it takes such."""


# ---------------------------------------------------------------------------------------------------------------------
# Reading: where values come from
# ---------------------------------------------------------------------------------------------------------------------


def parse_command_line(argv: Sequence[str], aliases: Mapping[str, Alias], *, takes_places: bool = False) -> CommandLine:
    """Split `[RUN.yaml] [key=value ...] [--flag [value] ...]` into its parts; what cannot be read becomes a problem.

    Args:
        takes_places: folders come in place of the YAML file: a folder that is there, and whatever is neither key nor flag.
    """
    file, print_config, assignments, problems, places = None, False, [], [], []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if "=" not in word and (possible := text_possible(word)):
            problems.append(Problem(f"command line: '{shown(word)}' is no path. Possible: {possible}."))
        elif takes_places and (kind_of_path(word) == "folder" or not (word.startswith("-") or "=" in word)):
            places.append(word)
        elif word in ("--print_config", "--print-config"):
            print_config = True
        elif word.startswith("--"):
            found, problem = _read_flag(word, rest, aliases)
            assignments += found
            problems += [Problem(problem)] if problem else []
        elif "=" in word:
            assignment, problem = _read_pair(word)
            assignments += [assignment] if assignment else []
            problems += [Problem(problem)] if problem else []
        elif word.endswith(YAML):
            if file is not None:
                given = f"two YAML files, {shown(file)} and {shown(word)}"
                problems.append(Problem(f"command line: {given}. One run has one file."))
            file = word
        else:
            problems.append(Problem(f"command line: '{shown(word)}' is neither a .yaml file nor key=value."))
    return CommandLine(file, assignments, print_config, problems, places)


def _read_flag(word: str, rest: list[str], aliases: Mapping[str, Alias]) -> tuple[list[Assignment], str | None]:
    """Read `--name value`, `--name=value` or `--name`; takes its value off `rest`."""
    name, has_value, value = word[2:].replace("-", "_").partition("=")
    if name not in aliases:
        if not has_value and rest and not (rest[0].startswith("--") or "=" in rest[0] or rest[0].endswith(YAML)):
            rest.pop(0)  # its value, most likely, and no problem of its own
        known = ", ".join(f"--{flag}" for flag in sorted(aliases))
        given = f"unknown flag '--{shown(name)}'. Flags: {known}{', ' if known else ''}--print_config"
        return [], f"command line: {given}. Every key is key=value."
    alias = aliases[name]
    if not has_value:
        follows = bool(rest) and not rest[0].startswith("--")
        if alias.bare is not None and not (follows and rest[0].lower() in ("true", "false")):
            value = alias.bare
        elif follows:
            value = rest.pop(0)
        else:
            return [], f"command line: '--{name}' has no value. It stands for {alias.key}=VALUE."
    if alias.choices is not None:
        if value not in alias.choices:
            return (
                [],
                f"command line: '--{name} {shown(value)}' is not known. Known: {', '.join(sorted(alias.choices))}.",
            )
        pairs = [_read_pair(pair)[0] for pair in alias.choices[value]]
        return [dataclasses.replace(pair, typed=f"--{name}") for pair in pairs if pair], None
    assignment, problem = _read_pair(f"{alias.key}={value}")
    return ([dataclasses.replace(assignment, typed=f"--{name}")] if assignment else []), problem


def _read_pair(word: str) -> tuple[Assignment | None, str | None]:
    """`key=value`, the value read as YAML reads it (1e-4 is a number, null is None, [64, 64] is a list)."""
    key, _, raw = word.partition("=")
    if not raw.strip():
        return (
            None,
            f"command line: '{shown(word)}' has no value. Write {shown(key)}=VALUE, or {shown(key)}=null for none.",
        )
    try:
        _check_depth(raw)
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={raw}"]))["value"]
    except GrammarParseError:
        ways = "Write ${oc.env:VARIABLE}, or ${KEY} of another key"
        return None, f"command line: '{shown(word)}' has a '${{' that cannot be read. {ways}."
    except Exception as error:  # the YAML reader's own exceptions, of several unrelated classes
        return None, f"command line: the value of '{shown(word)}' cannot be read as YAML: {_why(error, b'')}"
    return Assignment("command line", key, value, key, raw), None


def read_yaml(path: str) -> tuple[list[Assignment], list[Problem]]:
    """All leaf values of a YAML file, in its order; `${...}` stays as it is."""
    where = shown(path, 300)
    if text := file_problem(path):
        there = text.removeprefix(f"{where} ")
        return [], [Problem(f"{where}: {there if kind_of_path(path) else _no_such_yaml(Path(path).parent)}")]
    content = b""
    try:
        content = Path(path).expanduser().read_bytes()
        text = content.decode()
        if len(text) > MAX_YAML_CHARACTERS:
            given = f"{len(text):,} characters. Possible: {MAX_YAML_CHARACTERS:,} at most"
            return [], [Problem(f"{where}: {given}. Give a run's file.")]
        _check_depth(text)
        tree = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except Exception as error:  # of several unrelated classes
        return [], [Problem(f"{where}: cannot be read as YAML: {_why(error, content)}")]
    if not isinstance(tree, dict):
        return [], [Problem(f"{where}: holds a {type(tree).__name__}. A run is a mapping of keys to values.")]
    return [Assignment(where, key, value, key) for key, value in _leaves(tree)], []


def _no_such_yaml(folder: Path) -> str:
    there = sorted(file.name for file in folder.glob("*.yaml")) if kind_of_path(folder) == "folder" else []
    others = ", ".join(there[:20]) + (f" and {len(there) - 20} more" if len(there) > 20 else "")
    return "no such file. " + (f"In {folder}: {others}." if there else "Check the path.")


def _leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _spread(at: Assignment) -> list[Assignment]:
    """Return the keys of a section that was given as one value, `optimizer={lr: 1e-4}`, each by itself."""
    if not isinstance(at.value, Mapping) or not at.value:
        return [at]
    return [Assignment(at.where, key, value, key) for key, value in _leaves(at.value, f"{at.key}.")]


def flat(config: Any) -> dict[str, Any]:
    """Return every key of a configuration with its value, as plain values: tuples become lists."""
    leaves = _leaves(OmegaConf.to_container(OmegaConf.structured(config)))
    return {key: list(value) if isinstance(value, tuple) else value for key, value in leaves}


def _check_depth(text: str) -> None:
    """Look for nesting before a reader recurses into it: libyaml's ends the process at some 25,000 levels."""
    depth = 0
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_YAML_DEPTH:
            given = f"it is nested more than {MAX_YAML_DEPTH} levels deep"
            raise yaml.MarkedYAMLError(problem=given, problem_mark=event.start_mark)


def _why(error: Exception, content: bytes) -> str:
    """Say in a line what the YAML reader found, and in which line of the content."""
    if isinstance(error, ValueError) and "integer string conversion" in str(error):
        return "it has a number of more than 4,300 digits. Give a smaller one, or a text in quotes."
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    begin = getattr(
        error, "start" if isinstance(error, UnicodeDecodeError) else "position", None
    )  # a byte that cannot be
    parts = [getattr(error, name, None) for name in ("context", "problem")]
    text = ": ".join(part for part in parts if part) or (str(error).splitlines() or [type(error).__name__])[0]
    line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    line = line or ("" if begin is None else f"line {content[:begin].count(10) + 1}: ")
    return line + shown(text.strip().rstrip("."), 200) + "."


# ---------------------------------------------------------------------------------------------------------------------
# Resolving: what `${...}` stands for
# ---------------------------------------------------------------------------------------------------------------------


def resolved(assignments: Sequence[Assignment], schema: type | None) -> tuple[list[Assignment], dict[int, str]]:
    """Resolve `${...}`: in the environment, and in the keys of the whole configuration.

    Args:
        schema: of the configuration; None: the assignments are all that there is.

    Returns:
        the assignments, without those that a later one of their key takes the place of, and id -> why it cannot be resolved.
    """
    if not any(masking.is_interpolated(at.value) for at in assignments):
        return list(assignments), {}
    last = {at.key: at for at in assignments}
    keys: dict[str, Any] = dict.fromkeys(last, Any) if schema is None else schema_keys(schema)
    tree = OmegaConf.create({} if schema is None else OmegaConf.to_container(OmegaConf.structured(schema)))
    for at in last.values():
        if at.key in keys:
            with contextlib.suppress(Exception):  # beneath a key that is no section: named where types are looked at
                OmegaConf.update(tree, at.key, at.value, force_add=True)
    found, unresolved = [], {}
    for at in assignments:
        if not masking.is_interpolated(at.value) or at.key not in keys:
            found.append(at)
        elif at is last[at.key]:
            value, reason = masking.look_up(tree, at.key)
            found.append(at if reason else _as_typed(at, value, keys[at.key]))
            if reason:
                unresolved[id(at)] = f"{at.where}: {_named(at)}: {_quoted(at.value)} {reason}."
    return found, unresolved


def _as_typed(at: Assignment, value: Any, hint: Any) -> Assignment:
    """Return an assignment with its value, a variable's read as it would be on the command line."""
    if isinstance(value, str) and str not in (hint, *typing.get_args(hint)):
        with contextlib.suppress(Exception):  # no YAML: a text
            value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))["value"]
    return dataclasses.replace(at, value=value, raw=None, text=at.value)


# ---------------------------------------------------------------------------------------------------------------------
# Checking: names and types
# ---------------------------------------------------------------------------------------------------------------------


def schema_keys(schema: type, prefix: str = "") -> dict[str, Any]:
    """Every key of a dataclass and its sections with its type; a section's own key maps to the section's class."""
    keys: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(schema).items():
        keys[f"{prefix}{name}"] = hint
        section = next((h for h in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(h)), None)
        if section is not None:
            keys.update(schema_keys(section, f"{prefix}{name}."))
    return keys


def schema_limits(schema: type, prefix: str = "") -> dict[str, Limits]:
    """Key -> limits, for every number that has some of its own."""
    limits = {
        f"{prefix}{key.name}": key.metadata["limits"] for key in dataclasses.fields(schema) if "limits" in key.metadata
    }
    for name, hint in typing.get_type_hints(schema).items():
        for section in (h for h in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(h)):
            limits |= schema_limits(section, f"{prefix}{name}.")
    return limits


def _unknown_key(at: Assignment, keys: Mapping[str, Any]) -> str:
    """Name the likeliest key: the same last part first, then the nearest spelling of the whole path."""
    typed = at.key[:MAX_PART_BYTES]
    leaf = typed.rpartition(".")[2]
    same_leaf = [key for key in keys if key.rpartition(".")[2] == leaf]
    close_leaf = [key for key in keys if difflib.get_close_matches(leaf, [key.rpartition(".")[2]], n=1, cutoff=0.8)]
    near = same_leaf or difflib.get_close_matches(typed, keys, n=1, cutoff=0.75) or close_leaf
    if near:
        hint = "Did you mean " + " or ".join(f"'{key}'" for key in near[:3]) + "?"
    else:
        hint = f"Known: {', '.join(sorted({key.partition('.')[0] for key in keys}))}. --print_config shows every key."
    return f"{at.where}: unknown key '{shown(at.key)}'. {hint}"


def _possible(hint: Any) -> str:
    """Describe what a key takes, for messages: 'one of fp32, bf16', 'an integer or null'."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(_possible(arg) for arg in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a list of {len(typing.get_args(hint))} numbers"
    if dataclasses.is_dataclass(hint):
        return "a section with the keys " + ", ".join(field.name for field in dataclasses.fields(hint))
    names = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "a text (in quotes where it looks like a number)",
        types.NoneType: "null",
    }
    return names.get(hint, "a value")


def _nest(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _read(at: Assignment, hint: Any, limits: Limits) -> tuple[Any, str | None]:
    """Return the value as its key means it, or the problem that YAML's own typing would let through."""
    kinds = (hint, *typing.get_args(hint))
    value = at.value
    if str in kinds and at.raw is not None and not isinstance(value, str | types.NoneType):
        value = at.raw  # YAML read a number, a date or a truth value where a text was meant
    if value is False and "off" in kinds:
        value = "off"  # YAML reads the bare word as a truth value
    refused = (
        value == "???"  # OmegaConf's sign for "no value", which it would take without a word
        or (value is None and types.NoneType not in kinds and hint is not Any)
        or (bool in kinds and not isinstance(value, bool | types.NoneType))
        or (str in kinds and not isinstance(value, str | types.NoneType))
    )
    if refused:
        return value, _misfit(at, hint)
    is_choice = any(typing.get_origin(kind) is Literal for kind in kinds)
    kind = float if float in kinds else int if int in kinds else None if is_choice else str
    is_of_type = kind is str or typing.get_origin(hint) is tuple or not isinstance(value, list | dict)
    possible = beyond(value, kind, limits) if is_of_type else None  # else its type says what is possible
    if possible is not None:
        return value, _misfit(at, hint, possible)
    masked = masking.without_secrets(value)
    if masked != value and at.text is None and os.environ.get("RANK", "0") == "0":
        given = f"{at.where}: {_named(at)}: a secret stands in {masked}. It is neither shown nor kept"
        print(f"{given}. {masking.where_it_belongs(str(masked))}.", file=sys.stderr, flush=True)
    return masked, None


def _misfit(at: Assignment, hint: Any, possible: str | None = None) -> str:
    """Say that a value is none of its key's. `possible`: what its limits leave; None: it is of another type."""
    if possible is not None:
        others = [
            part for part in typing.get_args(hint) if typing.get_origin(part) is Literal or part is types.NoneType
        ]
        possible = " or ".join([possible, *map(_possible, others)])
    given = given_as(at.value)
    if at.text is not None:  # what it stands for may be a secret
        given = f"{_quoted(at.text)}, which stands for something else"
    return f"{at.where}: {_named(at)} is {given}. Possible: {possible or _possible(hint)}."


def _named(at: Assignment) -> str:
    return shown(at.key) if at.typed == at.key else f"{at.typed} ({at.key})"


def _quoted(text: Any) -> str:
    return f"'{shown(text)}'" if isinstance(text, str) else shown(str(text))


def _merged(tree: Any, values: Sequence[tuple[Assignment, Any]]) -> Any:
    merged = OmegaConf.merge(tree, *(_nest(at.key, value) for at, value in values))
    OmegaConf.to_object(merged)
    return merged


def _lay(tree: Any, values: Sequence[tuple[Assignment, Any]]) -> tuple[Any, list[Assignment]]:
    """Lay values over the structured config, whose typing is OmegaConf's; return it and the values that do not fit.

    As many at once as name different keys, since each merge copies the whole config; one by one only where one does not fit.
    """
    misfits, begin = [], 0
    while begin < len(values):
        seen: set[str] = set()
        end = begin
        while end < len(values) and values[end][0].key not in seen:
            seen.add(values[end][0].key)
            end += 1
        try:
            tree = _merged(tree, values[begin:end])
        except Exception:  # of a dozen classes; the key's type says better what is wrong
            for one in values[begin:end]:
                try:
                    tree = _merged(tree, [one])
                except Exception:
                    misfits.append(one[0])
        begin = end
    return tree, misfits


def load(
    schema: type[Config],
    command_line: CommandLine,
    *,
    not_yet: Mapping[str, str],
    check: Callable[[Config], Sequence[Problem]],
    unread: tuple[str, ...] = (),
) -> Config:
    """Return the resolved configuration of a run.

    Args:
        schema: the entry file's frozen dataclass; its fields are values or sections.
        command_line: from `parse_command_line`.
        not_yet: key or section -> what it is, for keys of the design whose room does not stand: refused by name.
        check: all checks across keys, given the typed configuration.
        unread: beginnings of keys that nobody reads: what cannot be resolved there is left out.

    Raises:
        ConfigError: with every problem of names, types and cross-checks at once.
    """
    problems = [problem.text for problem in command_line.problems]
    assignments = [part for at in command_line.assignments for part in _spread(at)]
    if command_line.yaml is not None:
        from_yaml, unreadable = read_yaml(command_line.yaml)
        problems += [problem.text for problem in unreadable]
        assignments = from_yaml + assignments

    is_read = not problems  # what could not be read may have said what would be missed: nothing is checked across keys
    keys, limits, values = schema_keys(schema), schema_limits(schema), []
    assignments, found = resolved(assignments, schema)
    assignments = [at for at in assignments if not (id(at) in found and at.key.startswith(unread))]
    for at in assignments:
        if id(at) in found:
            continue
        room = next((text for key, text in not_yet.items() if at.key == key or at.key.startswith(f"{key}.")), None)
        if room is not None:
            name = f"'{shown(at.key)}'" if at.typed == at.key else f"'{at.typed}' ({at.key})"
            found[id(at)] = f"{at.where}: {name} is not available: {room} is not part of this version. Leave it out."
        elif at.key not in keys:
            found[id(at)] = _unknown_key(at, keys)
        else:
            value, problem = _read(at, keys[at.key], limits.get(at.key, Limits()))
            if problem is None:
                values.append((at, value))
            else:
                found[id(at)] = problem
    tree, misfits = _lay(OmegaConf.structured(schema), values)
    found |= {id(at): _misfit(at, keys[at.key]) for at in misfits}
    problems += [found[id(at)] for at in assignments if id(at) in found]
    refused = {at.key for at in assignments if id(at) in found}

    config, is_readable = OmegaConf.to_object(tree), not problems
    masking.keep({at.key: at.text for at, _ in values if at.text is not None and id(at) not in found}, flat(config))
    of_keys = [problem for problem in (check(config) if is_read else ()) if not refused.intersection(problem.keys)]
    problems += [masking.hidden_of(problem.keys, problem.text) for problem in of_keys]
    if problems:
        raise ConfigError(problems, config if is_readable else None)
    return config


def to_yaml(config: Any) -> str:
    """The whole configuration as YAML, each key with its value or `${...}`; reading it back gives the same configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(as_written(config)))


def as_written(config: Any) -> dict[str, Any]:
    """Return a configuration's sections as plain values that may be written or sent, see `masking.written`."""
    tree: dict[str, Any] = OmegaConf.to_container(OmegaConf.structured(config))  # type: ignore[assignment]
    for key, value in masking.written(flat(config)).items():
        *sections, name = key.split(".")
        functools.reduce(dict.__getitem__, sections, tree)[name] = value
    return tree


def count(num: int, one: str, many: str | None = None) -> str:
    """Return a number with its word, for messages: 1 rank, 2,048 ranks."""
    return f"{num:,} {one if num == 1 else many or one + 's'}"
