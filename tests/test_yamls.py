"""Every YAML resolves and keeps its header's contract; mcloud.yaml is what MosaicML's own classes accept."""

from __future__ import annotations

import re
import shlex

import pytest
from conftest import ROOT
from omegaconf import OmegaConf

import benchmark
from bench.ladder import read_ladder
from config import load, parse_command_line

RUNS = sorted((ROOT / "yamls").glob("*.yaml"))
LADDERS = sorted((ROOT / "yamls" / "ladders").glob("*.yaml"))
HEADER = ("# What: ", "# Hardware: ", "# Expected: ", "# Command: ")


def resolve(words: list[str], stage) -> benchmark.RunConfig:
    """Read a command of `composer benchmark.py` as the program does; real data is swapped for the tests' own."""
    command_line = parse_command_line(words, benchmark.ALIASES)
    config = load(benchmark.RunConfig, command_line, not_yet=benchmark.NOT_YET, check=lambda config: [])
    if not config.data.synthetic:
        words = [*words, f"data.remote={stage}", "data.local=null"]
    small = ["model.preset=tiny", "image_size=64", "global_batch_size=8", "device_train_microbatch_size=4"]
    command_line = parse_command_line([*words, *small], benchmark.ALIASES)
    return load(benchmark.RunConfig, command_line, not_yet=benchmark.NOT_YET, check=benchmark.check)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_every_run_resolves_and_passes_its_checks(path, stage, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert resolve([f"yamls/{path.name}"], stage).model.family in benchmark.load_family.__globals__["FAMILIES"]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_every_run_names_what_it_depends_on(path):
    """Complete for its run, no inheritance: whoever reads it need not know the defaults."""
    keys = OmegaConf.to_container(OmegaConf.load(path))
    assert {
        "max_duration",
        "global_batch_size",
        "image_size",
        "seed",
        "model",
        "objective",
        "data",
        "optimizer",
    } <= set(keys)
    assert "defaults" not in keys and "${" not in path.read_text()


@pytest.mark.parametrize("path", [*RUNS, *LADDERS], ids=lambda path: path.name)
def test_every_header_is_a_contract(path):
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert [word for word in HEADER if not any(line.startswith(word) for line in head)] == []
    command = next(line for line in head if line.startswith("# Command: "))
    assert path.name in command or re.search(r"make (demo|gpu-ladder)", command)


@pytest.mark.parametrize("path", LADDERS, ids=lambda path: path.name)
def test_every_rung_of_a_ladder_resolves(path, stage, monkeypatch):
    monkeypatch.chdir(ROOT)
    ladder = read_ladder(str(path))
    assert len({rung.name for rung in ladder.rungs}) == len(ladder.rungs)
    for rung in ladder.rungs:
        assert resolve([rung.yaml, *rung.keys], stage).data.synthetic


def mcloud_command() -> list[str]:
    config = OmegaConf.to_container(OmegaConf.load(ROOT / "mcloud.yaml"))
    lines = [line for line in config["command"].splitlines() if line.startswith("composer ")]
    assert len(lines) == 1
    return shlex.split(lines[0])


def test_mcloud_is_accepted_by_mosaicmls_own_classes():
    """By the way that `mcli run` itself takes, up to the call of their service."""
    from mcli import RunConfig
    from mcli.models.run_config import FinalRunConfig

    final = FinalRunConfig.finalize_config(RunConfig.from_file(str(ROOT / "mcloud.yaml")))
    sent = final.to_create_run_api_input()["runInput"]
    assert sent["runName"] == "easel-sd2-512-synthetic" and sent["compute"]["gpus"] == 8
    [integration] = sent["integrations"]
    assert integration["type"] == "git_repo" and "gitCommit" in str(integration)
    assert sent["command"].splitlines()[-1] == " ".join(mcloud_command())


def test_mosaicmls_own_classes_would_refuse_an_unknown_key(tmp_path):
    from mcli import RunConfig

    path = tmp_path / "mcloud.yaml"
    path.write_text((ROOT / "mcloud.yaml").read_text() + "platform: r1z1\n")
    with pytest.raises(Exception, match="platform"):
        RunConfig.from_file(str(path))


def test_the_command_of_mcloud_is_one_that_benchmark_understands(stage, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = mcloud_command()
    assert words[:2] == ["composer", "benchmark.py"]
    assert resolve(words[2:], stage).data.synthetic
    assert "parameters" not in OmegaConf.load(ROOT / "mcloud.yaml")
