"""config.py: the order of the layers, and the full text of every message. No code of a run is imported here."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from cli.command_line import MAX_YAML_BYTES, Alias, Problem, parse_command_line
from cli.errors import ConfigError
from cli.limits import limited
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
    "use_flag": Alias("flag", bare="true"),
    "preset": Alias("text", choices={"a": ["text=x", "batch=3"], "b": ["text=y"]}),
}
ALL = "-1,000,000,000,000 to 1,000,000,000,000"
NEITHER = "at most 1,024 bytes, 255 between slashes or null."
KNOWN = "Known: batch, flag, logger, optimizer, scale, text, workers. --print_config shows every key."
LINE = "a text without control characters and line ends or null."


def read(*argv: str, check=lambda config: []) -> Outer:
    return load(Outer, parse_command_line(argv, ALIASES), check=check)


def problems(*argv: str, check=lambda config: []) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(*argv, check=check)
    return error.value.problems


def test_defaults_then_yaml_then_command_line(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("batch: 16\noptimizer:\n  lr: 1e-3\n  name: sgd\n")
    config = read(str(path), "optimizer.lr=2e-4")
    assert config == Outer(batch=16, optimizer=Inner(lr=2e-4, name="sgd"))


def test_the_last_value_of_a_key_counts():
    assert read("batch=1", "--batch_size", "2", "batch=3").batch == 3


def test_a_section_that_is_null_by_default_is_made_by_its_first_key():
    assert read("logger.project=easel").logger == Optional(project="easel")
    assert read("logger.project=easel", "logger=null").logger is None


def test_printed_configuration_reads_back_as_the_same(tmp_path: Path):
    config = read("batch=3", "optimizer.betas=[0.8, 0.9]", "logger.project=easel")
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert read(str(path)) == config


@pytest.mark.parametrize("words", [["--use_flag"], ["--use_flag", "true"], ["--use_flag=true"], ["--use-flag"]])
def test_a_flag_without_a_value_is_true(words: list[str]):
    assert read(*words, "batch=2") == Outer(flag=True, batch=2)


def test_a_flag_takes_the_next_word_as_its_value():
    assert read("--batch_size", "4", "--use_flag", "--preset", "b") == Outer(batch=4, flag=True, text="y")
    assert read("--batch_size=4").batch == 4


def test_a_flag_can_stand_for_several_keys():
    assert read("--preset", "a") == Outer(text="x", batch=3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.lrr=1"], "command line: unknown key 'optimizer.lrr'. Did you mean 'optimizer.lr'?"),
        (["lr=1"], "command line: unknown key 'lr'. Did you mean 'optimizer.lr'?"),
        (
            ["zzz=1"],
            f"command line: unknown key 'zzz'. {KNOWN}",
        ),
        (["batch=many"], "command line: batch is 'many'. Possible: an integer."),
        (["batch=1.5"], "command line: batch is 1.5. Possible: an integer."),
        (["batch=null"], "command line: batch is null. Possible: an integer."),
        (["--batch_size", "many"], "command line: --batch_size (batch) is 'many'. Possible: an integer."),
        (["flag=3"], "command line: flag is 3. Possible: true or false."),
        (
            ["text=???"],
            "command line: text is '???'. Possible: a text (in quotes where it looks like a number) or null.",
        ),
        (["batch=???"], "command line: batch is '???'. Possible: an integer."),
        (["optimizer.name=adam"], "command line: optimizer.name is 'adam'. Possible: one of adamw, sgd."),
        (["optimizer.lr=fast"], "command line: optimizer.lr is 'fast'. Possible: a number or null."),
        (["optimizer.betas=[0.9]"], "command line: optimizer.betas is [0.9]. Possible: a list of 2 numbers."),
        (
            ["optimizer=sgd"],
            "command line: optimizer is 'sgd'. Possible: a section with the keys lr, share, name, betas.",
        ),
        (["batch="], "command line: 'batch=' has no value. Write batch=VALUE, or batch=null for none."),
        (["batch=[1"], "command line: the value of 'batch=[1' cannot be read as YAML: "),
        (["--batch_size"], "command line: '--batch_size' has no value. It stands for batch=VALUE."),
        (
            ["--batchsize", "3"],
            "command line: unknown flag '--batchsize'. Flags: --batch_size, --preset, --use_flag, "
            "--print_config. Every key is key=value.",
        ),
        (["--preset", "c"], "command line: '--preset c' is not known. Known: a, b."),
        (["a\nb"], "command line: 'a\\nb' is not a path. Possible: a text without control characters and line ends."),
        (["batch"], "command line: 'batch' is neither a .yaml file nor key=value."),
        (["a.yaml", "b.yaml"], "command line: two YAML files, a.yaml and b.yaml. One run has one file."),
    ],
)
def test_what_is_wrong_is_said_in_full(words: list[str], message: str):
    found = problems(*words)[0]
    assert found == message or (message.endswith(": ") and found.startswith(message))


@pytest.mark.parametrize("text", ["0123", "20261120_1316", "12:30:45", "1e3", "true", "a=b"])
def test_a_text_on_the_command_line_stays_as_it_was_typed(text: str):
    assert read(f"text={text}").text == text
    assert read("text=null").text is None and read("text='null'").text == "null"


@pytest.mark.parametrize("text", ["#x", "~", "a #b", "&x a", "&x", "---", "--- a", "!!str a", "!!null a", "!"])
def test_what_yaml_would_drop_of_a_word_is_text_and_no_value_of_another_type(text: str, monkeypatch):
    assert read(f"text={text}").text == text
    for key, possible in (("batch", "an integer"), ("optimizer.lr", "a number or null"), ("flag", "true or false")):
        assert problems(f"{key}={text}") == [f"command line: {key} is {text!r}. Possible: {possible}."]
    monkeypatch.setenv("LR", text)
    assert "which stands for something else. Possible: a number or null." in problems("optimizer.lr=${oc.env:LR}")[0]


def test_only_the_word_null_stands_for_none_and_quotes_make_any_word_a_text():
    assert read("text=Null").text is None and read("optimizer.lr=null").optimizer.lr is None
    for text in ("null", "~", "#x", "a #b"):
        assert read(f"text='{text}'").text == read(f'text="{text}"').text == text


def test_a_number_in_a_yaml_where_a_text_is_meant_is_refused(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("text: 0123\n")
    assert problems(str(path)) == [
        f"{path}: text is 83. Possible: a text (in quotes where it looks like a number) or null."
    ]


def test_a_yaml_that_is_not_there_names_those_that_are(tmp_path: Path):
    (tmp_path / "real.yaml").write_text("batch: 1\n")
    path = tmp_path / "unreal.yaml"
    assert problems(str(path)) == [f"{path}: no such file. In {tmp_path}: real.yaml."]


def test_a_yaml_that_cannot_be_read_says_so(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("batch: [1\n")
    assert problems(str(path)) == [
        f"{path}: cannot be read as YAML: line 2, column 1: while parsing a flow sequence: did not find expected ',' or "
        "']'."
    ]
    path.write_text("- batch\n")
    assert problems(str(path)) == [f"{path}: holds a list. A run is a mapping of keys to values."]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("batch: 1\nbatch: 2\n", "line 2, column 1: while constructing a mapping: found duplicate key batch."),
        ("\ta: 1\n", "line 1, column 1: while scanning for the next token: found character that cannot start any token."),
        ("a: *b\n", "line 1, column 4: found undefined alias."),
        ("a: !o 1\n", "line 1, column 4: could not determine a constructor for the tag '!o'."),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_yaml_is_said_with_its_line(tmp_path: Path, content: str, message: str):
    path = tmp_path / "run.yaml"
    path.write_text(content)
    assert problems(str(path)) == [f"{path}: cannot be read as YAML: {message}"]


@pytest.mark.timeout(30, func_only=True)
def test_a_yaml_that_grows_without_end_or_is_none_is_refused_at_once(tmp_path: Path):
    path = tmp_path / "run.yaml"
    names = "abcdefghijklmnopqr"
    steps = (f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in itertools.pairwise(names))
    path.write_text("a: &a [1, 1]\n" + "".join(steps))
    [bomb] = problems(str(path))
    assert "alias" in bomb and len(bomb) < 400
    path.write_text("a: &a [*a]\n")
    assert len(problems(str(path))) == 1
    path.write_bytes(b"a: 1\na: \xc3\xa4 \xff\n")
    said = "line 2: 'utf-8' codec can't decode byte 0xff in position 11: invalid start byte."
    assert problems(str(path)) == [f"{path}: cannot be read as YAML: {said}"]
    path.write_text("batch: 1\ntext: a\0b\n")
    said = "line 2: unacceptable character #x0000: control characters are not allowed."
    assert problems(str(path)) == [f"{path}: cannot be read as YAML: {said}"]
    path.write_text("#" * (MAX_YAML_BYTES + 1))
    assert problems(str(path)) == [f"{path}: it has 1,048,577 bytes; at most 1,048,576 are read. Give a run's file."]
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    assert problems(str(pipe)) == [f"{pipe}: is a device, pipe or socket. Give a file."]
    (tmp_path / "folder.yaml").mkdir()
    assert problems(str(tmp_path / "folder.yaml")) == [f"{tmp_path}/folder.yaml: is a folder. Give a file."]


@pytest.mark.parametrize("words", [["none.yaml"], ["--batchsize", "3"], ["batch"], ["batch=[1"]])
def test_what_cannot_be_read_stands_alone(words: list[str]):
    def check(config: Outer) -> list[Problem]:
        pytest.fail("what is missing may have been in it")

    assert len(problems(*words, check=check)) == 1
    assert len(problems(*words, "flag=7", check=check)) == 2


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("batch=0", "batch is 0. Possible: 1 and up."),
        ("batch='0'", "batch is '0'. Possible: 1 and up."),
        ("batch=1000000000001", "batch is 1000000000001. Possible: 1 to 1,000,000,000,000."),
        (f"batch={'9' * 400}", f"batch is {'9' * 60}... (400 characters). Possible: 1 to 1,000,000,000,000."),
        ("workers=-1", "workers is -1. Possible: 0 to 512 or one of auto or null."),
        ("workers=513", "workers is 513. Possible: 0 to 512 or one of auto or null."),
        ("optimizer.lr=0", "optimizer.lr is 0. Possible: above 0 or null."),
        ("optimizer.lr=.nan", "optimizer.lr is nan. Possible: above 0 or null."),
        ("optimizer.lr=.inf", "optimizer.lr is inf. Possible: above 0, to 1e+30 or null."),
        ("optimizer.lr=1e400", "optimizer.lr is inf. Possible: above 0, to 1e+30 or null."),
        ("workers=1.5", "workers is 1.5. Possible: an integer or one of auto or null."),
        ("batch=.inf", "batch is inf. Possible: an integer."),
        ("batch=[0]", "batch is [0]. Possible: an integer."),
        (f"batch={'a' * 300}", f"batch is '{'a' * 59}... (302 characters). Possible: an integer."),
        (
            f"optimizer.name={'a' * 300}",
            f"optimizer.name is '{'a' * 59}... (302 characters). Possible: one of adamw, sgd.",
        ),
        (
            f"optimizer.betas=[0.9, 1{'0' * 400}]",
            f"optimizer.betas is [0.9, 1{'0' * 53}... (408 characters). Possible: {ALL}.",
        ),
        ("optimizer.share=1.5", "optimizer.share is 1.5. Possible: 0 to 1."),
        ("optimizer={share: 2}", "optimizer.share is 2. Possible: 0 to 1."),
        (
            f"scale=[1, {'9' * 400}]",
            f"scale is [1, {'9' * 56}... (405 characters). Possible: -1,000,000,000,000 to 1,000,000,000,000.",
        ),
        ('text="a\\0b"', f"text is 'a\\x00b'. Possible: {LINE}"),
        ('text="a\\nb"', f"text is 'a\\nb'. Possible: {LINE}"),
        ('logger={tags: ["\\e[2J"]}', f"logger.tags is ['\\x1b[2J']. Possible: {LINE}"),
        (f"text={'a/' * 2500}", f"text is '{'a/' * 29}a... (5,002 characters). Possible: {NEITHER}"),
        (f"text={'a' * 256}", f"text is '{'a' * 59}... (258 characters). Possible: {NEITHER}"),
        (
            f"{'k' * 5000}=1",
            f"unknown key '{'k' * 60}... (5,000 characters)'. {KNOWN}",
        ),
    ],
)
def test_numbers_and_texts_that_make_no_sense_are_refused_with_what_does(word: str, message: str):
    assert problems(word) == [f"command line: {message}"]


def test_the_limits_themselves_are_possible_and_an_address_may_have_long_parts():
    assert read("batch=1", "workers=512", "workers=0", "optimizer.share=1.0", f"text={'a' * 255}").workers == 0
    assert read("batch=1000000000000", "workers=auto", "optimizer.lr=1e-300").workers == "auto"
    assert read(f"text=s3://bucket/{'a' * 600}", "scale=.inf").scale == float("inf")


def test_a_problem_in_a_yaml_names_the_file(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("optimizer:\n  lrr: 1\n")
    assert problems(str(path)) == [f"{path}: unknown key 'optimizer.lrr'. Did you mean 'optimizer.lr'?"]


def test_the_error_carries_the_configuration_where_only_a_cross_check_failed():
    def check(config: Outer) -> list[Problem]:
        return [Problem("batch: 9 is too large.", ("batch",))]

    def carried(*words: str) -> Outer | None:
        with pytest.raises(ConfigError) as error:
            read(*words, check=check)
        return error.value.config

    assert carried("batch=9", "text=x") == Outer(batch=9, text="x")
    for unreadable in ("zzz=1", "batch=many", "ema.decay=0.9", "--batchsize=9", "none.yaml", "batch="):
        assert carried("text=x", unreadable) is None
    assert ConfigError(["anything"]).config is None


def test_all_problems_are_reported_at_once_and_none_twice():
    def check(config: Outer) -> list[Problem]:
        return [Problem("batch: 8 is too large.", ("batch",)), Problem("text: not given.", ("text",))]

    assert problems("batch=many", "lr=1", check=check) == [
        "command line: batch is 'many'. Possible: an integer.",
        "command line: unknown key 'lr'. Did you mean 'optimizer.lr'?",
        "text: not given.",  # the check of batch would have been about its default, which nobody asked for
    ]


def test_values_that_do_not_fit_are_named_in_their_order_though_a_later_one_of_the_key_would_fit():
    said = problems("optimizer.lr=fast", "zzz=1", "batch=many", "text=a", "flag=7", "batch=3", "optimizer.lr=1e-3")
    assert [text.split(". ")[0] for text in said] == [
        "command line: optimizer.lr is 'fast'",
        "command line: unknown key 'zzz'",
        "command line: batch is 'many'",
        "command line: flag is 7",
    ]


def test_a_section_that_is_removed_and_given_again_is_what_came_last():
    assert read("logger.project=a", "batch=2", "logger=null", "logger.project=b").logger == Optional("b")
    assert read("logger.project=a", "logger=null", "batch=2").logger is None
