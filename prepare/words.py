"""The words of a command of this room: places, and keys as KEY=VALUE."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from cli import masking
from cli.command_line import Problem, parse_command_line
from cli.errors import ConfigError
from cli.limits import text_possible
from config import load, to_yaml

Config = TypeVar("Config")


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into places and keys (KEY=VALUE and --flags). ./a=b is a place, a=b is a key."""
    keys = [word for word in argv if re.match(r"--|[\w.]+=", word) or text_possible(word)]
    return [masking.without_secrets(word) for word in argv if word not in keys], keys


def read_words(
    argv: Sequence[str],
    schema: type[Config],
    check: Callable[[Config], Sequence[Problem]] = lambda config: [],
) -> tuple[list[str], Config | None, list[str]]:
    """Return the places, the configuration and the problems of a command line; None: the configuration was shown instead.

    With problems it is the default one, so that more of them can be found.
    """
    places, words = split_words(argv)
    command_line = parse_command_line(words, {})
    try:
        config = load(schema, command_line, check=check)
    except ConfigError as error:
        return places, schema(), list(error.problems)
    if command_line.print_config:
        print(to_yaml(config), end="")
        return places, None, []
    return places, config, []
