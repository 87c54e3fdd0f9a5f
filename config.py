"""Typed configuration: dataclass defaults <- YAML <- command line.

    composer benchmark.py yamls/shapes.yaml max_duration=100ba optimizer.lr=3e-4

takes the defaults of the entry file's dataclass, lays the YAML over them, then each `key=value` in the order given.
A predecessor's flag (`--batch_size 256`) is an alias of a key. Every key is checked by name and type, and all problems
are reported in one `ConfigError`, each in the shape "where: what was given. What is possible. What to do."

A value may be `${oc.env:VARIABLE}` or `${another.key}`: it is resolved for use, and stays as it is wherever the
configuration is shown or written. A password in an address is masked. See common/masking.py.

This file knows OmegaConf and messages. It has no section itself: each section is a frozen dataclass next to the code
that owns it. OmegaConf, not a schema library: it brings the layers, `${...}` and YAML that takes them, in one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from omegaconf import OmegaConf

from common import masking
from common.command import wait_for_first_rank
from common.command_help import answer_help, read_command
from common.command_line import (
    Assignment,
    CommandLine,
    Problem,
    leaves,
    parse_command_line,
    read_value,
    read_yaml,
    split_section,
)
from common.errors import ConfigError
from common.log import EVERY_RANK, log
from common.static_schema import read_name
from common.value_types import MAX_PART_BYTES, Limits, format_value, limit_problem, truncate, type_hints

Config = TypeVar("Config")


def flatten(config: Any) -> dict[str, Any]:
    """Return every key of a configuration with its value, as plain values: tuples become lists."""
    plain: Any = OmegaConf.to_container(OmegaConf.structured(config))
    return {key: list(value) if isinstance(value, tuple) else value for key, value in leaves(plain)}


def replace_keys(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a configuration with other values of some keys, `name` or `section.name`."""
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        new = dataclasses.replace(getattr(config, section), **{name: value}) if section else value
        changed: Any = config
        config = dataclasses.replace(changed, **{section or name: new})
    return config


# --- resolving: what `${...}` stands for ---


def resolve_interpolations(
    assignments: Sequence[Assignment], schema: type | None
) -> tuple[list[Assignment], dict[int, str]]:
    """Resolve `${...}`: in the environment, and in the keys of the whole configuration.

    Args:
        schema: of the configuration; None: the assignments are all that there is.

    Returns:
        the assignments, without those that a later one of the same key replaces, and id -> why it cannot be resolved.
    """
    if not any(masking.is_interpolated(at.value) for at in assignments):
        return list(assignments), {}
    last = {at.key: at for at in assignments}
    keys: dict[str, Any] = dict.fromkeys(last, Any) if schema is None else schema_keys(schema)
    tree: Any = OmegaConf.create({} if schema is None else OmegaConf.to_container(OmegaConf.structured(schema)))
    for at in last.values():
        if at.key in keys:
            with contextlib.suppress(Exception):  # beneath a key that is no section: named where types are looked at
                OmegaConf.update(tree, at.key, at.value, force_add=True)
    remaining, unresolved = [], {}
    for at in assignments:
        if not masking.is_interpolated(at.value) or at.key not in keys:
            remaining.append(at)
        elif at is last[at.key]:
            value, reason = masking.resolve_interpolation(tree, at.key)
            remaining.append(at if reason else _as_typed(at, value, keys[at.key]))
            if reason:
                unresolved[id(at)] = f"{at.where}: {_format_key(at)}: {_format_text(at.value)} {reason}."
    return remaining, unresolved


def _as_typed(at: Assignment, value: Any, hint: Any) -> Assignment:
    """Return an assignment with its value, a variable's read as it would be on the command line."""
    kinds = (hint, *typing.get_args(hint))
    if isinstance(value, list | tuple):
        is_of_numbers = any(typing.get_origin(kind) is tuple for kind in kinds)
        value = [_as_yaml(part) for part in value] if is_of_numbers else value
    elif str not in kinds:
        value = _as_yaml(value)
    return dataclasses.replace(at, value=value, raw=None, text=at.value)


def _as_yaml(value: Any) -> Any:
    if isinstance(value, str):
        with contextlib.suppress(Exception):  # no YAML: a text
            return read_value(value)
    return value


# --- checking: names and types ---


def schema_keys(schema: type, prefix: str = "") -> dict[str, Any]:
    """Every key of a dataclass and its sections with its type; a section's own key maps to the section's class."""
    keys: dict[str, Any] = {}
    for name, hint in type_hints(schema).items():
        keys[f"{prefix}{name}"] = hint
        for section in _sections(hint)[:1]:
            keys.update(schema_keys(section, f"{prefix}{name}."))
    return keys


def _is_of_type(value: Any, hint: Any) -> bool:
    """True if a value has its key's type, where OmegaConf does not check it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_is_of_type(value, kind) for kind in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        kinds = typing.get_args(hint)
        kinds = kinds[:1] * max(1, len(value)) if isinstance(value, list | tuple) and Ellipsis in kinds else kinds
        is_alike = isinstance(value, list | tuple) and len(value) == len(kinds)
        return is_alike and all(map(_is_of_type, value, kinds))
    return type(value) in ((int, float) if hint is float else (hint,))


def _sections(hint: Any) -> list[type]:
    """The dataclasses of a key's type."""
    return [
        part for part in (hint, *typing.get_args(hint)) if isinstance(part, type) and dataclasses.is_dataclass(part)
    ]


def schema_limits(schema: type, prefix: str = "") -> dict[str, Limits]:
    """Key -> limits, for every number that has its own limits."""
    limits = {
        f"{prefix}{key.name}": key.metadata["limits"] for key in dataclasses.fields(schema) if "limits" in key.metadata
    }
    for name, hint in typing.get_type_hints(schema).items():
        for section in _sections(hint):
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
    return f"{at.where}: unknown key '{truncate(at.key)}'. {hint}"


def _describe_type(hint: Any) -> str:
    """Describe what a key takes, for messages: 'one of fp32, bf16', 'an integer or null'."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(_describe_type(arg) for arg in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        kinds = typing.get_args(hint)
        return "a list of numbers" if Ellipsis in kinds else f"a list of {len(kinds)} numbers"
    if typing.get_origin(hint) is list:
        return "a list"
    if dataclasses.is_dataclass(hint):
        return "a section with the keys " + ", ".join(field.name for field in dataclasses.fields(hint))
    names = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "a string (in quotes if it looks like a number)",
        types.NoneType: "null",
    }
    return names.get(hint, "a value")


def _nest(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _read(at: Assignment, hint: Any, limits: Limits) -> tuple[Any, str | None]:
    """Return the value as its key means it, or the problem that YAML's own typing would let through."""
    if (section := _list_section(hint)) is not None and at.value is not None:
        return _read_list(at, hint, section)
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
        # OmegaConf would take an empty list among numbers for None
        or (
            typing.get_origin(hint) is tuple
            and isinstance(value, list)
            and any(isinstance(v, list | dict) for v in value)
        )
    )
    if refused:
        return value, _misfit_message(at, hint, limits.of_text[1] if limits.of_text else None, limits.usual)
    is_choice = any(typing.get_origin(kind) is Literal for kind in kinds)
    kind = float if float in kinds else int if int in kinds else None if is_choice else str
    takes_list = any(typing.get_origin(part) is tuple for part in kinds)
    is_of_type = kind is str or takes_list or not isinstance(value, list | dict)
    possible = limit_problem(value, kind, limits) if is_of_type else None  # else its type says what is possible
    if possible is not None:
        return value, _misfit_message(at, hint, possible, limits.usual)
    if takes_list and typing.get_origin(hint) is not tuple and not _is_of_type(value, hint):
        return value, _misfit_message(at, hint, None, limits.usual)
    masked = masking.without_secrets(value)
    if masked != value and at.text is None:
        log.warning(masking.secret_warning(f"{at.where}: {_format_key(at)}", str(masked)))
    return masked, None


def _list_section(hint: Any) -> type | None:
    """Return the section that a key holds a list of, or None."""
    lists = [part for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) is list]
    return next((kind for part in lists for kind in _sections(part)), None)


def _read_list(at: Assignment, hint: Any, section: type) -> tuple[list[dict[str, Any]], str | None]:
    """Return a list of sections as plain values, and the problems in it, a line each."""
    names = [field.name for field in dataclasses.fields(section)]
    possible = f"[{{{names[0]}: ...}}, {{{names[0]}: ...}}], sections with some of {', '.join(names)}"
    if not isinstance(at.value, list) or not at.value or not all(isinstance(part, dict) for part in at.value):
        return [], _misfit_message(at, hint, possible)
    hints, limits = type_hints(section), schema_limits(section)
    read, problems = [], []
    for number, part in enumerate(at.value):
        values = {}
        for name, value in part.items():
            key = f"{at.key}[{number}].{name}"
            item = dataclasses.replace(at, key=key, typed=key, value=value, raw=None)
            if name not in hints:
                problems.append(f"{at.where}: unknown key '{truncate(key)}'. Known: {', '.join(names)}.")
                continue
            values[name], problem = _read(item, hints[name], limits.get(name, Limits()))
            item_values = [(dataclasses.replace(item, key=name), values[name])]
            if problem is None and _apply_values(OmegaConf.structured(section), item_values)[1]:
                problem = _misfit_message(item, hints[name])
            problems += [problem] if problem else []
        read.append(values)
    return read, "\n".join(problems) or None


def _misfit_message(at: Assignment, hint: Any, possible: str | None = None, usual: str | None = None) -> str:
    """Describe a value that its key does not take. `possible`: what its limits allow; None: its type is wrong."""
    if possible is not None:
        others = [
            part
            for part in (typing.get_args(hint) if typing.get_origin(hint) is not tuple else ())
            if typing.get_origin(part) in (Literal, tuple) or part is types.NoneType
        ]
        words = [_describe_type(part).replace(" numbers", " such numbers") for part in others]
        possible = " or ".join([possible, *words])
    value = format_value(at.value)
    if at.text is not None:  # what it stands for may be a secret
        value = f"{_format_text(at.text)}, which resolves to an invalid value"
    usual_text = f" Usual: {usual}." if usual else ""
    return f"{at.where}: {_format_key(at)} is {value}. Possible: {possible or _describe_type(hint)}.{usual_text}"


def _format_key(at: Assignment) -> str:
    return truncate(at.key) if at.typed == at.key else f"{at.typed} ({at.key})"


def _format_text(text: Any) -> str:
    return f"'{truncate(text)}'" if isinstance(text, str) else truncate(str(text))


def _merge(tree: Any, values: Sequence[tuple[Assignment, Any]]) -> Any:
    merged = OmegaConf.merge(tree, *(_nest(at.key, value) for at, value in values))
    OmegaConf.to_object(merged)
    return merged


def _apply_values(tree: Any, values: Sequence[tuple[Assignment, Any]]) -> tuple[Any, list[Assignment]]:
    """Lay values over the structured config, whose typing is OmegaConf's; return it and the values that do not fit.

    All at once, since each merge copies the whole config; one by one only where one does not fit.
    """
    misfits = []
    try:
        return _merge(tree, values), []
    except Exception:  # of a dozen classes; the key's type says better what is wrong
        for item in values:
            try:
                tree = _merge(tree, [item])
            except Exception:
                misfits.append(item[0])
    return tree, misfits


def load(
    schema: type[Config],
    command_line: CommandLine,
    *,
    check: Callable[[Config], Sequence[Problem]],
    unread: tuple[str, ...] = (),
) -> Config:
    """Return the resolved configuration of a run.

    Args:
        schema: the entry file's frozen dataclass; its fields are values or sections.
        command_line: from `parse_command_line`.
        check: all checks across keys, given the typed configuration: only where all names and types are right.
        unread: beginnings of keys that are not read: what cannot be resolved there is left out.

    Raises:
        ConfigError: with every problem of names and types at once, or with every one across keys.
    """
    problems = [problem.text for problem in command_line.problems]
    assignments = [part for at in command_line.assignments for part in split_section(at)]
    if command_line.yaml is not None:
        from_yaml, unreadable = read_yaml(command_line.yaml)
        problems += [problem.text for problem in unreadable]
        assignments = from_yaml + assignments

    keys, limits, values = schema_keys(schema), schema_limits(schema), []
    assignments, problem_by_id = resolve_interpolations(assignments, schema)
    assignments = [at for at in assignments if not (id(at) in problem_by_id and at.key.startswith(unread))]
    for at in assignments:
        if id(at) in problem_by_id:
            continue
        if at.key not in keys:
            problem_by_id[id(at)] = _unknown_key(at, keys)
        else:
            value, problem = _read(at, keys[at.key], limits.get(at.key, Limits()))
            if problem is None:
                values.append((at, value))
            else:
                problem_by_id[id(at)] = problem
    tree, misfits = _apply_values(OmegaConf.structured(schema), values)
    problem_by_id |= {id(at): _misfit_message(at, keys[at.key]) for at in misfits}
    problems += [problem_by_id[id(at)] for at in assignments if id(at) in problem_by_id]
    if problems:
        raise ConfigError(problems)

    config = typing.cast(Config, OmegaConf.to_object(tree))
    masking.remember_interpolations({at.key: at.text for at, _ in values if at.text is not None}, flatten(config))
    if problems := [problem.text for problem in check(config)]:
        raise ConfigError(problems, config)
    return config


def refuse_early(path: str, *, takes_arguments: bool = False) -> None:
    """Answer --help, or refuse an unreadable command line, before a command's slow imports; the process ends then.

    Args:
        path: the command's file.
        takes_arguments: as for `parse_command_line`.
    """
    answer_help(path)
    command, (words, _) = read_command(path), masking.remove_secrets(sys.argv[1:])
    assert command.keys is not None
    command_line = parse_command_line(words, read_name(command.module, "ALIASES"), takes_arguments=takes_arguments)
    log.disabled = True  # its warnings come when the command reads its words again
    try:
        load(command.keys, command_line, check=lambda config: ())
    except ConfigError as error:
        log.disabled = False
        wait_for_first_rank()
        log.error(error, extra=EVERY_RANK)
        sys.exit(2)
    log.disabled = False


def to_yaml(config: Any) -> str:
    """The whole configuration as YAML, each key with its value or `${...}`; reading it back gives the same configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(to_written_dict(config)))


def to_written_dict(config: Any) -> dict[str, Any]:
    """Return a configuration's sections as plain values that may be written or sent, see `masking.restore_interpolations`."""
    tree: dict[str, Any] = OmegaConf.to_container(OmegaConf.structured(config))  # type: ignore[assignment]
    for key, value in masking.restore_interpolations(flatten(config)).items():
        *sections, name = key.split(".")
        functools.reduce(dict.__getitem__, sections, tree)[name] = value
    return tree


def pluralize(num: int, one: str, many: str | None = None) -> str:
    """Return a number with its word, for messages: 1 rank, 2,048 ranks."""
    return f"{num:,} {one if num == 1 else many or one + 's'}"
