"""Limits and forms that stand beside a key's field: what is taken, and what is said of the rest."""

from __future__ import annotations

import functools

import pytest

from cli.command_line import parse_command_line
from cli.errors import ConfigError
from config import load
from training.run_config import RunConfig

SIZE = "an integer or a list of 2 numbers. Usual: 512, or [width, height]"
PIXELS = "1 to 16,384 or a list of 2 such numbers. Usual: 512, or [width, height]"
SIZES = "500mb, 100gb, 1tb or null"


@pytest.mark.parametrize(
    ("word", "possible"),
    [
        *((f"image_size={value}", SIZE) for value in ("[64]", "[1,2,3]", "a", "true", "null", "[64,a]", "[]", "64.5")),
        *((f"image_size={value}", PIXELS) for value in ("80000", "0", "[64,0]", "[16385,64]")),
        *(
            (f"eval.guidance={value}", "a number or a list of numbers")
            for value in ("a", "[]", "[1,a]", "true", "null")
        ),
        *((f"eval.guidance={value}", "0 and up or a list of such numbers") for value in ("-1", "[1,-2]", "nan")),
        ("ema.decay=1", "0 to below 1 or null. Usual: 0.999 to 0.9999"),
        ("ema.sigma_rel=0.3", "above 0, below 0.2887 or null. Usual: 0.05 to 0.25"),
        ("ema.sigma_rel=0", "above 0, below 0.2887 or null. Usual: 0.05 to 0.25"),
        ("ema.half_life=3ep", "30ba (batches), 5120sp (samples), 1 and up or null"),
        ("ema.start=soon", "30ba (batches), 5120sp (samples), 0 and up"),
        ("optimizer.betas=[0.9,1.0]", "0 to below 1. Usual: [0.9, 0.999]"),
        ("eval.steps=1", "2 to 500"),
        ("gradient_checkpointing=1.5", "0 to 1"),
        ("max_duration=null", "30ba (batches), 5120sp (samples), 2ep (epochs), 1 and up"),
        ("eval.sampler=heun", "one of ddim, plms, dpm++, euler or null"),
        ("target.fid=nan", "0 and up or null"),
        *(
            (f"data.cache_limit={value}", SIZES)
            for value in ("much", "'0'", "0gb", "-1gb", "-infgb", "infgb", "nangb", "-1")
        ),
    ],
)
def test_a_value_beyond_its_keys_limits_is_refused_with_what_is_possible(word, possible):
    with pytest.raises(ConfigError) as error:
        load(RunConfig, parse_command_line([word], {}), check=lambda config: [])
    [said] = error.value.problems
    assert said.startswith(f"command line: {word.partition('=')[0]} is ") and said.endswith(f" Possible: {possible}.")


def test_a_variable_in_a_list_is_read_as_a_number(monkeypatch):
    monkeypatch.setenv("EASEL_SIDE", "64")
    words = ["image_size=['${oc.env:EASEL_SIDE}',32]", "eval.guidance=['${oc.env:EASEL_SIDE}',2]"]
    config = load(RunConfig, parse_command_line(words, {}), check=lambda config: [])
    assert (config.image_size, config.eval.guidance) == ([64, 32], [64, 2])


def test_a_variable_in_a_list_of_texts_stays_the_text_that_it_is(monkeypatch):
    monkeypatch.setenv("EASEL_TAG", "1e3")
    words = ["loggers.wandb.project=p", "loggers.wandb.tags=['${oc.env:EASEL_TAG}',b]"]
    config = load(RunConfig, parse_command_line(words, {}), check=lambda config: [])
    assert config.loggers.wandb.tags == ["1e3", "b"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("image_size=64", 64),
        ("image_size=[64,32]", [64, 32]),
        ("eval.image_size=null", None),
        ("eval.guidance=3", 3),
        ("eval.guidance=[1,2.5]", [1, 2.5]),
        ("ema.decay=0", 0.0),
        ("ema.start=0ba", "0ba"),
        ("optimizer.betas=[0,0.5]", (0.0, 0.5)),
        ("data.cache_limit=1gb", "1gb"),
    ],
)
def test_a_value_within_its_keys_limits_is_taken(word, expected):
    config = load(RunConfig, parse_command_line([word], {}), check=lambda config: [])
    value = functools.reduce(getattr, word.partition("=")[0].split("."), config)
    assert value == expected and type(value) is type(expected)
