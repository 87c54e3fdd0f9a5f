"""Parse the command line of a command of `prepare`: paths, then KEY=VALUE."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from common import masking
from common.command_line import Problem, parse_command_line
from common.errors import ConfigError
from common.value_types import text_problem
from config import load, to_yaml

RESUME_HINT = "Finished work is kept; the same command resumes from there"


Config = TypeVar("Config")


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into paths and keys (KEY=VALUE and --flags). ./a=b is a path, a=b is a key."""
    keys = [word for word in argv if re.match(r"--|[\w.]+=", word) or text_problem(word)]
    return [masking.without_secrets(word) for word in argv if word not in keys], keys


def parse_arguments(
    argv: Sequence[str],
    schema: type[Config],
    check: Callable[[Config], Sequence[Problem]] = lambda config: [],
) -> tuple[list[str], Config | None, list[str]]:
    """Return the paths, the configuration and the problems of a command line; None: the configuration was printed instead.

    With problems it is the default one, so that more of them can be found.
    """
    paths, keys = split_arguments(argv)
    command_line = parse_command_line(keys, {})
    try:
        config = load(schema, command_line, check=check)
    except ConfigError as error:
        return paths, schema(), list(error.problems)
    if command_line.print_config:
        print(to_yaml(config), end="")
        return paths, None, []
    return paths, config, []
