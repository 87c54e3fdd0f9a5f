"""config.py: the order of the layers, and the full text of every message. No code of a run is imported here."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from common.command_line import MAX_YAML_BYTES, Alias, Problem, parse_command_line
from common.errors import ConfigError
from common.value_types import limited
from config import load, to_yaml


@dataclass(frozen=True)
class Inner:
    lr: float | None = limited(None, 0.0, above=True)
    share: float = limited(0.5, 0.0, 1.0)
    name: Literal["adamw", "sgd"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass(frozen=True)
class Optional:
    project: str | None = None
    tags: list[str] | None = None


@dataclass(frozen=True)
class Outer:
    batch: int = limited(8, 1)
    workers: int | Literal["auto"] | None = limited(2, 0, 512)
    scale: Any = 1.0
    text: str | None = None
    flag: bool = False
    optimizer: Inner = field(default_factory=Inner)
    logger: Optional | None = None


ALIASES = {
    "batch_size": Alias("batch"),
    "use_flag": Alias("flag", value_if_bare="true"),
    "preset": Alias("text", choices={"a": ["text=x", "batch=3"], "b": ["text=y"]}),
}


def read(*argv: str, check=lambda config: []) -> Outer:
    return load(Outer, parse_command_line(argv, ALIASES), check=check)


def problems(*argv: str, check=lambda config: []) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(*argv, check=check)
    return error.value.problems


def test_defaults_then_yaml_then_command_line(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("batch: 16\noptimizer:\n  lr: 1e-3\n  name: sgd\n")
    assert read(str(path), "optimizer.lr=2e-4") == Outer(batch=16, optimizer=Inner(lr=2e-4, name="sgd"))


def test_the_first_key_of_a_section_creates_it_and_null_removes_it():
    assert read("logger.project=easel", "logger=null", "batch=2").logger is None
    assert read("logger.project=a", "logger=null", "logger.project=b").logger == Optional("b")


def test_printed_configuration_reads_back_as_the_same(tmp_path: Path):
    config = read("batch=3", "optimizer.betas=[0.8, 0.9]", "logger.project=easel")
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert read(str(path)) == config


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--use_flag batch=2", Outer(flag=True, batch=2)),
        ("--use_flag true", Outer(flag=True)),
        ("--use-flag=true", Outer(flag=True)),
        ("--batch_size 4 --use_flag --preset b", Outer(batch=4, flag=True, text="y")),
        ("batch=1 --batch_size 2 batch=3", Outer(batch=3)),
    ],
)
def test_a_flag_takes_the_next_word_unless_it_is_bare(words: str, expected: Outer):
    assert read(*words.split()) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lr=1"], "unknown key 'lr'. Did you mean 'optimizer.lr'?"),
        (["zzz=1"], "unknown key 'zzz'. Known: batch, flag, logger, optimizer, scale, text, workers."),
        (["batch=1.5"], "batch is 1.5. Possible: an integer."),
        (["--batch_size", "many"], "--batch_size (batch) is 'many'. Possible: an integer."),
        (["optimizer.name=adam"], "optimizer.name is 'adam'. Possible: one of adamw, sgd."),
        (["optimizer.betas=[0.9]"], "optimizer.betas is [0.9]. Possible: a list of 2 numbers."),
        (["optimizer=sgd"], "optimizer is 'sgd'. Possible: a section with the keys lr, share, name, betas."),
        (["batch="], "'batch=' has no value. Write batch=VALUE, or batch=null for none."),
        (["batch=[1"], "the value of 'batch=[1' cannot be read as YAML: "),
        (["--batch_size"], "'--batch_size' has no value. It stands for batch=VALUE."),
        (["--batchsize", "3"], "unknown flag '--batchsize'. Flags: --batch_size, --preset, --use_flag, "),
        (["--preset", "c"], "'--preset c' is not known. Known: a, b."),
        (["a\nb"], "'a\\nb' is not a path. Possible: a string without control characters and line ends."),
        (["batch"], "'batch' is neither a .yaml file nor key=value."),
        (["a.yaml", "b.yaml"], "two YAML files, a.yaml and b.yaml. One run has one file."),
    ],
)
def test_an_invalid_word_is_refused_with_what_is_possible(words: list[str], message: str):
    assert problems(*words)[0].startswith(f"command line: {message}")


def test_a_text_on_the_command_line_stays_as_it_was_typed():
    for text in ("0123", "20261120_1316", "12:30:45", "1e3", "true", "a=b"):
        assert read(f"text={text}").text == text
    assert read("text=null").text is read("text=Null").text is None and read("text='null'").text == "null"


@pytest.mark.parametrize("text", ["#x", "~", "a #b", "&x a", "--- a", "!!null a", "!"])
def test_what_yaml_would_drop_of_a_word_is_text(text: str, monkeypatch):
    assert read(f"text={text}").text == read(f"text='{text}'").text == read(f'text="{text}"').text == text
    for key, possible in (("batch", "an integer"), ("optimizer.lr", "a number or null"), ("flag", "true or false")):
        assert problems(f"{key}={text}") == [f"command line: {key} is {text!r}. Possible: {possible}."]
    monkeypatch.setenv("LR", text)
    assert "which resolves to an invalid value. Possible: a number or null." in problems("optimizer.lr=${oc.env:LR}")[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("batch: [1\n", "cannot be read as YAML: line 2, column 1: while parsing a flow sequence: did not find "),
        ("- batch\n", "holds a list. A run is a mapping of keys to values."),
        ("batch: 1\nbatch: 2\n", "cannot be read as YAML: line 2, column 1: while constructing a mapping: found dup"),
        ("text: 0123\n", "text is 83. Possible: a string (in quotes if it looks like a number) or null."),
    ],
)
def test_an_invalid_yaml_is_refused_with_its_name_and_line(tmp_path: Path, content: str, message: str):
    path, other = tmp_path / "run.yaml", tmp_path / "other.yaml"
    path.write_text(content)
    [problem] = problems(str(path))
    assert problem.startswith(f"{path}: {message}")
    assert problems(str(other)) == [f"{other}: no such file. In {tmp_path}: run.yaml."]


@pytest.mark.timeout(30, func_only=True)
def test_a_yaml_that_grows_without_end_or_is_not_text_is_refused_at_once(tmp_path: Path):
    path = tmp_path / "run.yaml"
    steps = (f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in itertools.pairwise("abcdefghijklmnopqr"))
    contents = {
        ("a: &a [1, 1]\n" + "".join(steps)).encode(): "alias",
        b"a: &a [*a]\n": "",
        b"a: 1\na: \xc3\xa4 \xff\n": "line 2: 'utf-8' codec can't decode byte 0xff in position 11: invalid start byte.",
        b"batch: 1\ntext: a\0b\n": "line 2: unacceptable character #x0000: control characters are not allowed.",
        b"#" * (MAX_YAML_BYTES + 1): "it has 1,048,577 bytes; at most 1,048,576 are read. Give a run's file.",
    }
    for content, message in contents.items():
        path.write_bytes(content)
        [problem] = problems(str(path))
        assert message in problem and len(problem) < 400
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    assert problems(str(pipe)) == [f"{pipe}: is a device, pipe or socket. Give a file."]
    (tmp_path / "folder.yaml").mkdir()
    assert problems(str(tmp_path / "folder.yaml")) == [f"{tmp_path}/folder.yaml: is a folder. Give a file."]


@pytest.mark.parametrize("words", [["none.yaml"], ["--batchsize", "3"], ["batch"], ["batch=[1"]])
def test_an_unreadable_word_is_reported_without_the_checks_across_keys(words: list[str]):
    def check(config: Outer) -> list[Problem]:
        pytest.fail("the missing words may matter")

    assert len(problems(*words, check=check)) == 1
    with_others = problems(*words, "optimizer.lr=fast", "zzz=1", "flag=7", "optimizer.lr=1e-3", check=check)
    expected = ["optimizer.lr is 'fast'", "unknown key 'zzz'", "flag is 7"]
    assert {f"command line: {text}" for text in expected} < {text.split(". ")[0] for text in with_others}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("batch=0", "batch is 0. Possible: 1 and up."),
        (f"batch={'9' * 400}", f"batch is {'9' * 60}... (400 characters). Possible: 1 to 1,000,000,000,000."),
        ("workers=513", "workers is 513. Possible: 0 to 512 or one of auto or null."),
        ("optimizer.lr=0", "optimizer.lr is 0. Possible: above 0 or null."),
        ("optimizer.lr=1e400", "optimizer.lr is inf. Possible: above 0, to 1e+30 or null."),
        ("optimizer={share: 2}", "optimizer.share is 2. Possible: 0 to 1."),
        ('text="a\\0b"', "text is 'a\\x00b'. Possible: a string without control characters and line ends or null."),
        (f"text={'a' * 256}", f"text is '{'a' * 59}... (258 characters). Possible: at most 1,024 bytes, 255 between "),
    ],
)
def test_values_beyond_their_limits_are_refused_with_what_is_possible(word: str, message: str):
    [problem] = problems(word)
    assert problem.startswith(f"command line: {message}")


def test_the_limits_themselves_are_possible_and_an_address_may_have_long_parts():
    assert read("batch=1", "workers=512", "workers=0", "optimizer.share=1.0", f"text={'a' * 255}").workers == 0
    assert read("batch=1000000000000", "workers=auto", "optimizer.lr=1e-300").workers == "auto"
    assert read(f"text=s3://bucket/{'a' * 600}", "scale=.inf").scale == float("inf")


def test_the_error_has_the_configuration_if_only_a_check_across_keys_failed():
    def config_in_error(*words: str) -> Outer | None:
        with pytest.raises(ConfigError) as error:
            read(*words, check=lambda config: [Problem("batch: 9 is too large.", ("batch",))])
        return error.value.config

    assert config_in_error("batch=9", "text=x") == Outer(batch=9, text="x")
    for unreadable in ("batch=many", "--batchsize=9", "none.yaml"):
        assert config_in_error("text=x", unreadable) is None
