"""preflight/stage.py: files that block a run's cache folder. The other checks are tested in test_doctor.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from data import DataConfig
from preflight import stage as stage_checks
from preflight.machine import ERROR, OK, Finding
from stages.dataset import read_stage


@pytest.fixture
def filled(stage, tmp_path):
    """A cache folder with the whole stage in it, its configuration, and the stage's shards."""
    local = shutil.copytree(stage, tmp_path / "local")
    return local, DataConfig(remote=str(stage), local=str(local)), read_stage(str(stage)).shards


def put_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put_file(path: Path) -> None:
    shutil.rmtree(path)
    path.touch()


def put_link_to_nothing(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to(path.parent / "nowhere")


@pytest.mark.parametrize(
    ("which", "put", "wanted"),
    [
        ("index.json", put_folder, "file"),
        ("shard", put_folder, "file"),
        ("part", put_file, "folder"),
        ("part", put_link_to_nothing, "folder"),
    ],
)
def test_what_lies_in_the_way_of_a_run_is_an_error(filled, which, put, wanted):
    local, config, shards = filled
    shard = local / shards.names[len(shards) - 1]
    path = {"index.json": local / "index.json", "shard": shard, "part": shard.parent}[which]
    put(path)
    text = f"data.local: {path} is not a {wanted}, but the stage has one of that name. Remove it."
    assert stage_checks.cache(config, shards) == [Finding(ERROR, "cache", text)]


def test_what_a_run_replaces_is_no_error(filled):
    local, config, shards = filled
    (local / shards.names[0]).unlink()
    (local / shards.names[0]).symlink_to(local / "nowhere")
    (local / "index.json").unlink()
    (found,) = stage_checks.cache(config, shards)
    given = f"{local} holds {len(shards) - 1} of {len(shards)} shards, all of their size; "
    assert found.level == OK and found.text.startswith(given)
