"""Limits and forms of a key's field: what is accepted, and how the rest is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from composer import Time
from streaming.base import util

from common.command_line import parse_command_line
from common.errors import ConfigError
from common.value_types import bytes_to_int, read_duration
from config import load
from training.config import RunConfig

SIZE = "an integer or a list of 2 numbers. Usual: 512, or [width, height]"
PIXELS = "1 to 16,384 or a list of 2 such numbers. Usual: 512, or [width, height]"
SIZES = "500mb, 100gb, 1tb or null"


@pytest.mark.parametrize(
    ("words", "possible"),
    [
        ("image_size=: [64] a true null [64,a] 64.5", SIZE),
        ("image_size=: 80000 [64,0]", PIXELS),
        ("eval.guidance=: a [] [1,a] true", "a number or a list of numbers"),
        ("eval.guidance=: -1 [1,-2] nan", "0 and up or a list of such numbers"),
        ("ema.decay=: 1", "0 to below 1 or null. Usual: 0.999 to 0.9999"),
        ("ema.sigma_rel=: 0.3 0", "above 0, below 0.2887 or null. Usual: 0.05 to 0.25"),
        ("ema.half_life=: 3ep", "30ba (batches), 5120sp (samples), 1 and up or null"),
        ("ema.start=: soon", "30ba (batches), 5120sp (samples), 0 and up"),
        ("optimizer.betas=: [0.9,1.0]", "0 to below 1. Usual: [0.9, 0.999]"),
        ("data.cache_limit=: much '0' 0gb -1gb -infgb infgb nangb -1", SIZES),
    ],
)
def test_a_value_beyond_the_limits_of_its_key_is_refused_with_the_possible_ones(words, possible):
    key, *values = words.split()
    for value in values:
        word = f"{key.removesuffix(':')}{value}"
        with pytest.raises(ConfigError) as error:
            load(RunConfig, parse_command_line([word], {}), check=lambda config: [])
        [problem] = error.value.problems
        assert problem.startswith(f"command line: {word.partition('=')[0]} is "), word
        assert problem.endswith(f" Possible: {possible}."), word


def test_a_variable_in_a_list_is_read_as_a_number_or_stays_a_text(monkeypatch):
    monkeypatch.setenv("EASEL_SIDE", "64")
    monkeypatch.setenv("EASEL_TAG", "1e3")
    words = ["image_size=['${oc.env:EASEL_SIDE}',32]", "eval.guidance=['${oc.env:EASEL_SIDE}',2]"]
    words += ["loggers.wandb.project=p", "loggers.wandb.tags=['${oc.env:EASEL_TAG}',b]"]
    config = load(RunConfig, parse_command_line(words, {}), check=lambda config: [])
    assert (config.image_size, config.eval.guidance) == ([64, 32], [64, 2])
    assert config.loggers.wandb.tags == ["1e3", "b"]


def test_a_value_within_its_keys_limits_is_taken():
    values = {"image_size=[64,32]": [64, 32], "eval.image_size=null": None, "eval.guidance=[1,2.5]": [1, 2.5]}
    values |= {"ema.start=0ba": "0ba", "optimizer.betas=[0,0.5]": (0.0, 0.5), "data.cache_limit=1gb": "1gb"}
    for word, expected in values.items():
        config = load(RunConfig, parse_command_line([word], {}), check=lambda config: [])
        assert functools.reduce(getattr, word.partition("=")[0].split("."), config) == expected


DURATIONS = "30ba|30BA| 30ba|30 ba|3e2sp|1.5ba|1.50e1ba|-1ba|0ba|infba|ba||5|30sec|1h30m|2ep|2dur|3iter|3tok|1_0ba"
DURATIONS += "|1e400ba|x5ba|5baba|5ba |10Ep"
BYTES = "64mb|1.5GB| 7 kb |12|12b|12.5|1e3kb|infgb|nanmb||b|-3kb|-3|1_0|1_0kb|3pb|+3|5 b|\u00b2"


def value_of(reader: Callable[[str], Any], text: str) -> Any:
    try:
        return reader(text)
    except (ValueError, TypeError, OverflowError):
        return None


def test_durations_are_read_as_composer_and_sizes_as_streaming_reads_them():
    for text in DURATIONS.split("|"):
        time = value_of(Time.from_timestring, text)
        is_ours = time is not None and time.unit.value in ("ba", "sp", "ep") and time.value > 0
        assert read_duration(text, ("ba", "sp", "ep")) == ((time.value, time.unit.value) if is_ours else None), text
    for text in BYTES.split("|"):
        assert value_of(bytes_to_int, text) == value_of(util.bytes_to_int, text), text
