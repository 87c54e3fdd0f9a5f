"""Random command lines and YAML files: each gives a configuration or readable problems, and nothing else.

    FUZZ_EXAMPLES=2000 FUZZ_SEED=1 python -m pytest -q tests/test_fuzz_config.py      # some minutes

Without FUZZ_SEED the examples are always the same. A command line goes through parser, types, limits and all checks across
keys, but not through the estimate of the memory, which traces a network.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from conftest import ROOT, picture
from hypothesis import HealthCheck, Phase, event, given, seed, settings
from hypothesis import strategies as st

import config as configuration
import eval as evaluation
from common.command_line import parse_command_line
from common.errors import ConfigError
from config import load, schema_keys, to_yaml
from evaluation.sources import EvalSource
from mds import dataset as stage
from preflight.config_checks import expected_metadata, quick_problems
from prepare import adopt, fid_statistics, latents, look, shards
from training.config import ALIASES, RunConfig, resolve

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "300"))
SEED = os.environ.get("FUZZ_SEED")
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
def named(schema: type) -> st.SearchStrategy[str]:
    """A key with a value, every second time one that fits."""
    keys = schema_keys(schema)
    return st.sampled_from(sorted(keys)).flatmap(
        lambda key: st.one_of(fitting(keys[key]), ODD).map(lambda value: f"{key}={value}")
    )


@functools.cache
def unnamed(schema: type) -> st.SearchStrategy[str]:
    """A word without a key of this schema: misspelt, a flag, or neither."""
    keys, flags = sorted(schema_keys(schema)), (*(f"--{name}" for name in ALIASES), "--print_config", "--batchsize")
    misspelt = st.builds(
        lambda key, at, odd: f"{key[:at]}{odd}{key[at:]}=1", st.sampled_from(keys), st.integers(0, 9), ODD
    )
    words = st.sampled_from((*flags, "--", "-x", "=", "=1", "a.yaml", "FILE.yml"))
    return st.one_of(misspelt, st.builds("{}={}".format, st.one_of(st.sampled_from(flags), ODD), ODD), words, ODD)


ANY_VALUE = st.sampled_from((None, True, 3, 1.5, "a: b", [1, "a"], {"a": [0]}))
SLIPS = ("\t", "  ", "\n", "[", "]", "{", ":", "- ", "&a ", "*a", "\x00", "\ufeff", "#", "|\n", "'", "${", "---\n")
FILES = ["a: &a\n  b: *a\n", "", "- a\n", "3\n", "---\n---\n"]
FILES += [path.read_text() for path in sorted((ROOT / "yamls").glob("*.yaml"))]


@st.composite
def yaml_files(draw: st.DrawFn, schema: type) -> bytes:
    """A file as it is meant, or with slips: cut, flipped, a line twice, misplaced letters."""
    if draw(st.booleans()):
        text = draw(st.sampled_from(FILES))
    else:
        keys = draw(st.lists(st.sampled_from(sorted(schema_keys(schema))), max_size=4))
        tree: dict[str, Any] = {}
        for key in keys:
            *sections, name = key.split(".")
            inner = tree
            for section in sections:
                inner = inner.setdefault(section, {}) if isinstance(inner.get(section, {}), dict) else {}
            inner[name] = draw(st.one_of(ANY_VALUE, fitting(schema_keys(schema)[key])))
        text = yaml.safe_dump(tree, allow_unicode=True)
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
    encoding = draw(st.sampled_from(("utf-8", "utf-8", "utf-8", "utf-16", "latin-1")))
    return text.encode(encoding, errors="replace")


# --- the outcome ---


def quick(config: RunConfig) -> list[configuration.Problem]:
    wanted = expected_metadata(config.model, config.data, config.size)
    return quick_problems(config, config.data.problems(config.global_batch_size, *wanted))


def run_of(words: list[str]) -> Any:
    config = load(RunConfig, parse_command_line(words, ALIASES), check=quick)
    resolved = resolve(config)
    assert resolve(resolved) == resolved
    return resolved


def scored(kind: Literal["run", "images"]) -> Callable[[list[str]], Any]:
    def read(words: list[str]) -> Any:
        command = parse_command_line(words, ALIASES, takes_arguments=True)
        place = "RUN" if kind == "run" else "IMAGES"
        return evaluation.read_source_config(EvalSource(str(PLACES[place]), PLACES[place], kind), command)

    return read


def command_of(schema: type, check: Callable[[Any], Any] = lambda config: []) -> Callable[[list[str]], Any]:
    return lambda words: load(schema, parse_command_line(words, {}), check=check)


COMMANDS: dict[str, tuple[type, Callable[[list[str]], Any]]] = {
    "benchmark": (RunConfig, run_of),
    "eval run": (evaluation.EvalCommand, scored("run")),
    "eval images": (evaluation.EvalCommand, scored("images")),
    "latents": (latents.LatentsConfig, command_of(latents.LatentsConfig, latents.check)),
    "shards": (shards.ShardsConfig, command_of(shards.ShardsConfig, lambda config: [])),
    "statistics": (
        fid_statistics.FidStatisticsConfig,
        command_of(fid_statistics.FidStatisticsConfig, fid_statistics.check),
    ),
    "adopt": (adopt.AdoptConfig, command_of(adopt.AdoptConfig)),
    "look": (look.LookConfig, command_of(look.LookConfig)),
}
PLACES: dict[str, Path] = {}
BASE = {
    "benchmark": ["run_folder=FOLDER", "model.preset=tiny", "image_size=64", "global_batch_size=8", "data.synthetic=true"],
    "eval run": ["eval.prompts=PROMPTS", "eval.clip=random", "model.preset=tiny", "image_size=64"],
    "eval images": ["eval.prompts=PROMPTS", "eval.clip=random", "out=FOLDER"],
}  # fmt: skip
"""Words with which a command is possible, for every second example."""
COMMON = ("benchmark", "benchmark", "benchmark", "eval run", "eval images")


@st.composite
def command_lines(draw: st.DrawFn, among: tuple[str, ...]) -> tuple[str, list[str], bytes | None]:
    """Command, words, and what its YAML file holds: `run.yaml`, or the config.yaml of the run that is scored."""
    name = draw(st.sampled_from(among))
    schema = COMMANDS[name][0]
    base = BASE.get(name, []) if draw(st.booleans()) else []
    words = [*base, *draw(st.lists(named(schema), max_size=2 if base else 6))]
    if draw(st.integers(0, 3)) == 0:
        words.insert(draw(st.integers(0, len(words))), draw(unnamed(schema)))
    has_file = draw(st.integers(0, 2)) == 0 and name != "eval images"
    content = draw(yaml_files(RunConfig if name == "eval run" else schema)) if has_file else None
    return name, words, content


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files and folders that the words name."""
    folder = tmp_path_factory.mktemp("fuzz")
    for name in ("FOLDER", "IMAGES", "RUN"):
        PLACES[name] = folder / name
        PLACES[name].mkdir()
    (folder / "IMAGES" / "1.png").write_bytes(picture(1, kind="PNG"))
    (folder / "FILE").write_text("nothing\n")
    (folder / "PROMPTS").write_text("image_id\tid\tcaption\n1\t1\ta cat\n2\t2\ta dog\n")
    (folder / "LOOP").symlink_to(folder / "LOOP")
    os.mkfifo(folder / "PIPE")
    PLACES.update({name: folder / name for name in ("FILE", "PIPE", "LOOP", "PROMPTS")})
    return folder


def placed(word: str) -> str:
    """The word with the names of files in their places."""
    for name, path in PLACES.items():
        word = word.replace(name, str(path))
    return word


def write_yaml(name: str, words: list[str], content: bytes | None, folder: Path) -> list[str]:
    (folder / "RUN" / "config.yaml").write_bytes(content or b"run_folder: runs\n")
    if content is None or name == "eval run":
        return words
    (folder / "run.yaml").write_bytes(content)
    return [str(folder / "run.yaml"), *words]


def is_plain(line: str) -> bool:
    return all(ord(letter) >= 32 for letter in line)


def names_a_key(problem: str) -> bool:
    """True where it begins with a key or file and a reason follows."""
    where, colon, text = problem.partition(":")
    return bool(colon and where.strip() and text.strip())


ABOUT = settings(
    max_examples=EXAMPLES,
    derandomize=SEED is None,
    deadline=None,
    database=None,
    phases=[Phase.generate] if SEED is None else [Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
seeded: Callable[[Any], Any] = seed(int(SEED)) if SEED else lambda function: function


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address is as far as a command line goes: no store is asked."""

    def away(remote: str, *_: Any) -> None:
        raise ConnectionError(f"no network here for {remote}")

    monkeypatch.setattr(stage, "download_once", away)


@pytest.mark.timeout(150 if EXAMPLES <= 300 else 7200, func_only=True)
@pytest.mark.usefixtures("no_network")
@seeded
@settings(ABOUT)
@given(example=command_lines((*COMMON, *COMMANDS)))
def test_any_command_line_gives_a_configuration_or_readable_problems(places, example):
    name, words, content = example
    words = write_yaml(name, [placed(word) for word in words], content, places)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            config = COMMANDS[name][1](words)
    except ConfigError as error:
        event(f"{name}: refused")
        assert error.problems
        for problem in error.problems:
            assert is_plain(problem) and names_a_key(problem) and len(problem) < MAX_PROBLEM, repr(problem)
    else:
        event(f"{name}: possible")
        (places / "again.yaml").write_text(to_yaml(config))
        again = load(type(config), parse_command_line([str(places / "again.yaml")], {}), check=lambda config: [])
        assert to_yaml(again) == to_yaml(config)
    assert printed.getvalue() == ""
