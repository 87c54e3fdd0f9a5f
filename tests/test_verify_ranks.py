"""training/verify_ranks.py: ranks that are to do different things are refused, with both values and who has them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from common.command_line import parse_command_line
from common.errors import ConfigError
from config import flatten, load
from ranks import rendezvous
from training import verify_ranks
from training.config import RunConfig
from training.verify_ranks import index_digests

NEED = verify_ranks.TEXTS


@pytest.fixture
def beside(monkeypatch):
    """Two more ranks, on one machine: what they have as the first, changed as is given."""
    monkeypatch.setattr(verify_ranks.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(rendezvous, "_hosts", ["a", "b", "b"])

    def put(**changed: str) -> None:
        def gather(own):
            if isinstance(own, str):
                return [own, str(changed), str(changed)] if changed else [own] * 3
            return [own, {**own, **changed}, {**own, **changed}]

        monkeypatch.setattr(verify_ranks.dist, "all_gather_object", gather)

    return put


def problems() -> list[str]:
    with pytest.raises(ConfigError) as error:
        verify_ranks.check(flatten(RunConfig()))
    return error.value.problems


def test_ranks_that_are_the_same_agree(beside):
    beside()
    verify_ranks.check(flatten(RunConfig()))
    verify_ranks.check_index_digests(index_digests([], [], None))


def test_what_differs_is_named_with_both_values(beside):
    code = "files of sha256 0123456789ab"
    beside(**{"optimizer.lr": "0.003", "torch_version": "2.7.0", "device": "NVIDIA A100", "zzz.new": "1", "code": code})
    others = "ranks 1 (b), 2 (b)"
    assert problems() == [
        f"code: {verify_ranks.code()} on rank 0 (a), {code} on {others}. {NEED['code']}",
        f"torch_version: {verify_ranks._versions()['torch_version']} on rank 0 (a), 2.7.0 on {others}. {NEED['version']}",
        f"device: CPU on rank 0 (a), NVIDIA A100 on {others}. {NEED['device']}",
        f"optimizer.lr: null on rank 0 (a), 0.003 on {others}. {NEED['config']}",
        f"zzz.new: none on rank 0 (a), 1 on {others}. {NEED['config']}",  # a key that only a newer version has
    ]


def test_the_digest_is_of_the_projects_files_without_its_tests(tmp_path, monkeypatch):
    for name in ("common/__init__.py", "common/a.py", "b.py", "tests/__init__.py", "docs/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(verify_ranks, "ROOT", tmp_path)
    result = [verify_ranks.code()]
    for name in ("tests/__init__.py", "docs/c.py", "common/a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n")
        result.append(verify_ranks.code())
    assert result[0] == result[1] == result[2] != result[3] != result[4]


def test_another_index_of_the_data_is_named(beside):
    beside(**{"data.remote": "an index.json of sha256 ffffffffffff"})
    stage = SimpleNamespace(index_sha256="0123456789abcdef")
    text = "^data.remote: an index.json of sha256 0123456789ab on rank 0 .a., an index.json"
    with pytest.raises(ConfigError, match=text):
        verify_ranks.check_index_digests(index_digests([("data", None)], [stage], None))


def test_places_of_a_machine_and_secrets_are_not_compared():
    def keys(*words: str) -> dict[str, str]:
        config = load(RunConfig, parse_command_line(words, {}), check=lambda config: [])
        return verify_ranks._comparable(flatten(config))

    result = keys("data.local=/scratch/1", "data.remote=s3://key:hunter2@b/x")
    assert "data.local" not in result and "hunter2" not in str(result) and result["seed"] == "17"
    result = keys("data.streams=[{remote: s3://b/x, local: /a, proportion: 0.5}]")
    assert "/a" not in result["data.streams"] and "s3://b/x" in result["data.streams"]
