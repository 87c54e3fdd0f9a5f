"""Whole runs with weights by name: fetched, recorded with their commit, resumed without the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import TINY_RUN, cost_made_up, run
from hub_server import hub, serving, variables  # noqa: F401
from miniature import WEIGHTS
from test_hub import REPO, published  # noqa: F401

import benchmark
from record.config_file import read_config
from weights.hub import _listing

pytestmark = [pytest.mark.timeout(60, func_only=True), pytest.mark.usefixtures("quick_estimate")]


def words(stage: Path, runs: Path, *more: str) -> list[str]:
    """A short run on real pictures."""
    data = [f"data.remote={stage}", "data.workers=0", "schedule.name=constant", "schedule.warmup_batches=0"]
    return [*TINY_RUN, *data, f"run_folder={runs}", "run_name=a", "save.every_images=16", "max_duration=2ba", *more]


def new_process() -> None:
    _listing.cache_clear()


def test_a_run_records_the_commit_and_resumes_with_it_and_without_the_hub(hub, published, stage, tmp_path, capsys):  # noqa: F811
    commit = hub.add(REPO, published)
    named = [f"model.weights={REPO}", f"model.denoiser={REPO}"]
    assert benchmark.main(words(stage, tmp_path / "runs", *named)) == 0
    said = capsys.readouterr().err
    assert f"model.weights: {REPO}@{commit}: 6 files to download" in said
    assert f"model.denoiser: {REPO}@{commit}: 3 files to download" in said
    assert len(hub.sent) == len(set(hub.sent)) == 9
    config = read_config(tmp_path / "runs/a")
    assert config["model.weights"] == config["model.denoiser"] == f"{REPO}@{commit}"
    summary = json.loads((tmp_path / "runs/a/summary.json").read_text())
    assert summary["weights"] == summary["denoiser_start"] == f"{REPO}@{commit}"

    hub.add(REPO, {"README.md": b"all is new"})
    hub.asked.clear()
    new_process()
    for given in (named, [f"model.denoiser={REPO}"]):
        longer = words(stage, tmp_path / "runs", *given, f"max_duration={4 if given is named else 6}ba")
        assert benchmark.main(longer) == 0, capsys.readouterr().err
    assert hub.asked == [] and read_config(tmp_path / "runs/a")["model.weights"] == f"{REPO}@{commit}"
    assert json.loads((tmp_path / "runs/a/summary.json").read_text())["batches"] == 6
