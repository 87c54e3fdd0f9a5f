"""Random command lines and YAML files: each gives a configuration or readable problems, and nothing else.

    FUZZ_EXAMPLES=2000 python -m pytest -q tests/test_fuzz_config.py      # some minutes, other examples each time

A command line goes through parser, types, limits and all checks across keys, but not through the estimate of the memory,
which traces a network.
"""

from __future__ import annotations

import functools
import os
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import pytest
from conftest import ROOT, picture
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import config as configuration
import eval as evaluation
from common.command_line import parse_command_line
from common.errors import ConfigError
from config import load, schema_keys, to_yaml
from evaluation.sources import EvalSource
from mds import dataset as stage
from preflight.config_checks import expected_metadata, quick_problems
from training.config import ALIASES, RunConfig, resolve

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "20"))
MAX_PROBLEM = 3000  # characters

# --- what is typed ---

NUMBERS = "0 1 -1 7 64 1.5 1e-4 -0.0 1_000 0123 0x10 1:30:00 .5 1e inf .inf nan 1e400 2147483648 ²".split()  # noqa: SIM905
DURATIONS = "30ba infba nanep -1ba 0sp 1.5ep 1e3ba 1dur 10tok ba 30BA 1h infgb 1gb".split()  # noqa: SIM905
YAMLISH = "null ~ true off [] {} [[[]]] [1 { ' *a ??? << | @x `x` !x ${a.b} ${oc.env:X} ${ $ ${seed}".split()  # noqa: SIM905
YAMLISH += ["[1, 2]", "{a: 1}", "a: b", "# c", "a #b", "? a", "!!python/object:os.system x", "2020-01-01"]
PATHS = "FILE PROMPTS FOLDER PIPE IMAGES RUN LOOP FILE/a / .. . ~ random shipped s3:// gs://a@b:c/d http://[".split()  # noqa: SIM905
PATHS += ["s3://bucket/a", "", " ", "a" * 300, "a\nb", "a\x1b[2J", "\udcff"]
ODD = st.one_of(*map(st.sampled_from, (NUMBERS, DURATIONS, YAMLISH, PATHS)), st.text(max_size=20))


def fitting(hint: Any) -> st.SearchStrategy[str]:
    """Values that a key of this type takes, most of them also within its limits."""
    kinds = (hint, *typing.get_args(hint))
    choices = [str(choice) for kind in kinds if typing.get_origin(kind) is Literal for choice in typing.get_args(kind)]
    by_type = {
        int: ("-2", "0", "1", "8", "1000"),
        float: ("0.1", "1", "1e-4", "-3.5", "1e300"),
        bool: ("true", "false"),
        str: (*PATHS, *DURATIONS, "tiny", "sd2", "ddim", "v"),
    }
    values = [value for kind in kinds for value in by_type.get(kind, ())]
    return st.sampled_from((*choices, *values, "null", "[64, 64]", "[0.9, 0.99]"))


@functools.cache
def words_of(schema: type) -> st.SearchStrategy[str]:
    """A key with a value, every second time one that fits; or a word without a key: misspelt, a flag, or neither."""
    keys = schema_keys(schema)
    named = st.sampled_from(sorted(keys)).flatmap(
        lambda key: st.one_of(fitting(keys[key]), ODD).map(lambda value: f"{key}={value}")
    )
    misspelt = st.builds("{}{}=1".format, st.sampled_from(sorted(keys)), ODD)
    flags = st.sampled_from((*(f"--{name}" for name in ALIASES), "--print_config", "--", "-x", "=", "=1", "a.yaml"))
    unnamed = st.one_of(misspelt, st.builds("{}={}".format, st.one_of(flags, ODD), ODD), flags, ODD)
    return st.integers(0, 7).flatmap(lambda number: named if number else unnamed)


SLIPS = ("\t", "  ", "\n", "[", "]", "{", ":", "- ", "&a ", "*a", "\x00", "\ufeff", "#", "|\n", "'", "${", "---\n")
FILES = ["a: &a\n  b: *a\n", "", "- a\n", "3\n", "---\n---\n", "a: [1, a]\nseed: {a: 0}\n", "optimizer:\n  lr: true\n"]
FILES += [path.read_text() for path in sorted((ROOT / "yamls").glob("*.yaml"))]


@st.composite
def yaml_files(draw: st.DrawFn) -> bytes:
    """A file as it is meant, or with slips: cut, flipped, a line twice, misplaced letters."""
    text = draw(st.sampled_from(FILES))
    for _ in range(max(0, draw(st.integers(-2, 3)))):
        at, kind = draw(st.integers(0, len(text))), draw(st.sampled_from(("cut", "slip", "twice", "flip", "indent")))
        lines = text.splitlines(keepends=True)
        line = at % len(lines) if lines else 0
        text = {
            "cut": text[:at],
            "slip": text[:at] + draw(st.sampled_from(SLIPS)) + text[at:],
            "twice": "".join([*lines[: line + 1], *lines[line:]]),
            "flip": text[:at] + text[at : at + 1].swapcase() + chr(draw(st.integers(0, 0x2FF))) + text[at + 2 :],
            "indent": "".join([*lines[:line], " ", *lines[line:]]),
        }[kind]
    return text.encode(draw(st.sampled_from(("utf-8", "utf-8", "utf-16", "latin-1"))), errors="replace")


# --- the outcome ---


def run_of(words: list[str]) -> Any:
    def quick(config: RunConfig) -> list[configuration.Problem]:
        wanted = expected_metadata(config.model, config.data, config.size)
        return quick_problems(config, config.data.problems(config.global_batch_size, *wanted))

    resolved = resolve(load(RunConfig, parse_command_line(words, ALIASES), check=quick))
    assert resolve(resolved) == resolved
    return resolved


def scored(words: list[str]) -> Any:
    folder = Path(words[0])
    source = EvalSource(str(folder), folder, "run" if folder.name == "RUN" else "images")
    return evaluation.read_source_config(source, parse_command_line(words[1:], ALIASES, takes_arguments=True))


TINY = "model.preset=tiny image_size=64"
COMMANDS: list[tuple[type, Callable[[list[str]], Any], list[str], str]] = [
    *3 * [(RunConfig, run_of, [], f"{TINY} run_folder=FOLDER global_batch_size=8 data.synthetic=true")],
    (evaluation.EvalCommand, scored, ["RUN"], f"{TINY} eval.prompts=PROMPTS eval.clip=random"),
    (evaluation.EvalCommand, scored, ["IMAGES"], "eval.prompts=PROMPTS eval.clip=random out=FOLDER"),
]
"""Keys, command, first words, and words with which it is possible, for every second example."""


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[Callable[[list[str]], Any], list[str], bytes | None]:
    """A command, its words, and what its YAML file holds: `run.yaml`, or the config.yaml of the run that is scored."""
    schema, command, first, base = draw(st.sampled_from(COMMANDS))
    words = base.split() if draw(st.booleans()) else []
    words += draw(st.lists(words_of(schema), max_size=2 if words else 6))
    return command, [*first, *words], draw(yaml_files()) if draw(st.integers(0, 2)) == 0 else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files and folders that the words name."""
    folder = tmp_path_factory.mktemp("fuzz")
    for name in ("FOLDER", "IMAGES", "RUN"):
        (folder / name).mkdir()
    (folder / "IMAGES" / "1.png").write_bytes(picture(1, kind="PNG"))
    (folder / "FILE").write_text("nothing\n")
    (folder / "PROMPTS").write_text("image_id\tid\tcaption\n1\t1\ta cat\n2\t2\ta dog\n")
    (folder / "LOOP").symlink_to(folder / "LOOP")
    os.mkfifo(folder / "PIPE")
    return folder


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address is as far as a command line goes: no store is asked."""
    monkeypatch.setattr(stage, "download_once", Mock(side_effect=ConnectionError("no network here")))


@pytest.mark.timeout(150 if EXAMPLES <= 20 else 7200, func_only=True)
@pytest.mark.usefixtures("no_network")
@settings(
    max_examples=EXAMPLES,
    derandomize=EXAMPLES <= 20,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(example=command_lines())
def test_any_command_line_gives_a_configuration_or_readable_problems(folder, capsys, example):
    command, words, content = example
    for path in sorted(folder.iterdir()):
        words = [word.replace(path.name, str(path)) if path.name.isupper() else word for word in words]
    (folder / "RUN" / "config.yaml").write_bytes(content or b"run_folder: runs\n")
    if content is not None and command is not scored:
        (folder / "run.yaml").write_bytes(content)
        words = [str(folder / "run.yaml"), *words]
    try:
        config = command(words)
    except ConfigError as error:
        assert error.problems
        for problem in error.problems:
            where, _, text = problem.partition(":")  # a key or file, and a reason
            assert where.strip() and text.strip() and len(problem) < MAX_PROBLEM, repr(problem)
            assert all(ord(letter) >= 32 for letter in problem), repr(problem)
    else:
        (folder / "again.yaml").write_text(to_yaml(config))
        again = load(type(config), parse_command_line([str(folder / "again.yaml")], {}), check=lambda config: [])
        assert to_yaml(again) == to_yaml(config)
    assert capsys.readouterr().out == ""
