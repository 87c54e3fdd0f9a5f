"""config.py: the order of the layers, and every message in full. Nothing of a run is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from config import Alias, ConfigError, Problem, load, parse_command_line, to_yaml


@dataclass(frozen=True)
class Inner:
    lr: float | None = None
    name: Literal["adamw", "sgd"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass(frozen=True)
class Optional:
    project: str | None = None


@dataclass(frozen=True)
class Outer:
    batch: int = 8
    text: str | None = None
    flag: bool = False
    optimizer: Inner = field(default_factory=Inner)
    logger: Optional | None = None


ALIASES = {
    "batch_size": Alias("batch"),
    "use_flag": Alias("flag", bare="true"),
    "use_ema": Alias("ema.enabled", bare="true"),
    "preset": Alias("text", choices={"a": ["text=x", "batch=3"], "b": ["text=y"]}),
}
NOT_YET = {"ema": "the moving average"}


def read(*argv: str, check=lambda config: []) -> Outer:
    return load(Outer, parse_command_line(argv, ALIASES), not_yet=NOT_YET, check=check)


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
            "command line: unknown key 'zzz'. Known: batch, flag, logger, optimizer, text. --print_config shows every key.",
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
        (["optimizer=sgd"], "command line: optimizer is 'sgd'. Possible: a section with the keys lr, name, betas."),
        (["batch="], "command line: 'batch=' has no value. Write batch=VALUE, or batch=null for none."),
        (["batch=[1"], "command line: the value of 'batch=[1' cannot be read as YAML: "),
        (["--batch_size"], "command line: '--batch_size' has no value. It stands for batch=VALUE."),
        (
            ["--batchsize", "3"],
            "command line: unknown flag '--batchsize'. Flags: --batch_size, --preset, --use_ema, --use_flag, "
            "--print_config. Every key is key=value.",
        ),
        (["--preset", "c"], "command line: '--preset c' is not known. Known: a, b."),
        (["batch"], "command line: 'batch' is neither a .yaml file nor key=value."),
        (["a.yaml", "b.yaml"], "command line: two YAML files, a.yaml and b.yaml. One run has one file."),
        (
            ["--use_ema"],
            "command line: '--use_ema' (ema.enabled) is not available: the moving average is not part of this version. "
            "Leave it out.",
        ),
        (
            ["ema.decay=0.9"],
            "command line: 'ema.decay' is not available: the moving average is not part of this version. Leave it out.",
        ),
    ],
)
def test_what_is_wrong_is_said_in_full(words: list[str], message: str):
    found = problems(*words)[0]
    assert found == message or (message.endswith(": ") and found.startswith(message))


@pytest.mark.parametrize("text", ["0123", "20261120_1316", "12:30:45", "1e3", "true", "a=b"])
def test_a_text_on_the_command_line_stays_as_it_was_typed(text: str):
    assert read(f"text={text}").text == text
    assert read("text=null").text is None and read("text='null'").text == "null"


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
    assert problems(str(path))[0].startswith(f"{path}: cannot be read as YAML: ")
    path.write_text("- batch\n")
    assert problems(str(path)) == [f"{path}: holds a list. A run is a mapping of keys to values."]


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
