"""training/agreement.py: ranks that are to do different things are refused, with both values and who has them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cli import meeting
from cli.command_line import parse_command_line
from cli.errors import ConfigError
from config import load
from training import agreement
from training.run_config import RunConfig

NEED = agreement.TEXTS


@pytest.fixture
def beside(monkeypatch):
    """Two more ranks, on one machine: what they have as the first, changed as is given."""
    monkeypatch.setattr(agreement.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(meeting, "_hosts", ["a", "b", "b"])

    def put(**changed: str) -> None:
        def gather(own):
            if isinstance(own, str):
                return [own, str(changed), str(changed)] if changed else [own] * 3
            return [own, {**own, **changed}, {**own, **changed}]

        monkeypatch.setattr(agreement.dist, "all_gather_object", gather)

    return put


def problems(config: RunConfig) -> list[str]:
    with pytest.raises(ConfigError) as error:
        agreement.check(config)
    return error.value.problems


def test_ranks_that_are_the_same_agree(beside):
    beside()
    agreement.check(RunConfig())
    agreement.check_stages(RunConfig(), [], None)


def test_a_key_a_version_and_a_device_that_differ_are_named_with_both_values(beside):
    beside(**{"optimizer.lr": "0.003", "torch_version": "2.7.0", "device": "NVIDIA A100"})
    others = "ranks 1 (b), 2 (b)"
    assert problems(RunConfig()) == [
        f"torch_version: {agreement._versions()['torch_version']} on rank 0 (a), 2.7.0 on {others}. {NEED['version']}",
        f"device: CPU on rank 0 (a), NVIDIA A100 on {others}. {NEED['device']}",
        f"optimizer.lr: null on rank 0 (a), 0.003 on {others}. {NEED['config']}",
    ]


def test_a_key_that_only_a_newer_version_has_differs_too(beside):
    beside(**{"zzz.new": "1"})
    assert problems(RunConfig()) == [f"zzz.new: none on rank 0 (a), 1 on ranks 1 (b), 2 (b). {NEED['config']}"]


def test_other_code_is_named_by_its_digest(beside):
    beside(code="files of sha256 0123456789ab")
    given = f"code: {agreement.code()} on rank 0 (a), files of sha256 0123456789ab on ranks 1 (b), 2 (b)"
    assert problems(RunConfig()) == [f"{given}. {NEED['code']}"]


def test_the_digest_is_of_the_projects_files_without_its_tests(tmp_path, monkeypatch):
    for name in ("cli/__init__.py", "cli/a.py", "b.py", "tests/__init__.py", "docs/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(agreement, "ROOT", tmp_path)
    found = [agreement.code()]
    for name in ("tests/__init__.py", "docs/c.py", "cli/a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n")
        found.append(agreement.code())
    assert found[0] == found[1] == found[2] != found[3] != found[4]


def test_another_index_of_the_data_is_named(beside):
    beside(**{"data.remote": "an index.json of sha256 ffffffffffff"})
    stage = SimpleNamespace(index_sha256="0123456789abcdef")
    config = SimpleNamespace(data=SimpleNamespace(named_sources=lambda: [("data", None)]))
    with pytest.raises(ConfigError) as error:
        agreement.check_stages(config, [stage], None)
    given = (
        "an index.json of sha256 0123456789ab on rank 0 (a), an index.json of sha256 ffffffffffff on ranks 1 (b), 2 (b)"
    )
    assert error.value.problems == [f"data.remote: {given}. {NEED['data']}"]


def test_places_of_a_machine_and_secrets_are_not_compared():
    def keys(*words: str) -> dict[str, str]:
        return agreement._keys(load(RunConfig, parse_command_line(words, {}), check=lambda config: []))

    found = keys("data.local=/scratch/1", "data.remote=s3://key:hunter2@b/x")
    assert "data.local" not in found and "hunter2" not in str(found) and found["seed"] == "17"
    found = keys("data.streams=[{remote: s3://b/x, local: /a, proportion: 0.5}]")
    assert "/a" not in found["data.streams"] and "s3://b/x" in found["data.streams"]
