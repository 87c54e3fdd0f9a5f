"""common/private_api.py: what a new release of a library lacks is one line."""

from __future__ import annotations

import collections
import importlib
import importlib.metadata
import sys

import pytest
import torch

from common import private_api
from common.private_api import has, require_private_api

# --- what a new release lacks ---


class Base:
    """Has what its methods set, and so has a class of it."""

    def start(self) -> None:
        self._event, _local = 1, 2


class Further(Base):
    pass


def test_what_a_class_and_its_bases_set_is_found_and_of_an_object_what_it_has_by_now():
    module = sys.modules[__name__]
    assert has(Further, "_event") and has(module, "Further._event") and has({"a": 1}, "a")
    assert not any((has(Further, "_local"), has(Further(), "_event"), has(module, "Gone._event"), has({}, "a")))


def test_what_is_missing_ends_a_command_with_one_line_and_the_librarys_version(monkeypatch, capsys):
    monkeypatch.setattr(private_api, "DECLARED", collections.defaultdict(set))
    torch_version = f"torch {importlib.metadata.version('torch')}"
    for owner, names, said in (
        (torch, ("_foreach_lerp_", "_gone", "_lost"), f"{torch_version} has no _gone, _lost of torch (why)"),
        ("threading", ("_gone",), "Python has no _gone of threading (why)"),
        ("torch.gone", ("_all",), f"{torch_version} has no _all of torch.gone (why)"),
    ):
        with pytest.raises(SystemExit, match="2"):
            require_private_api(owner, *names, why="why")
        told = capsys.readouterr().err
        assert told.startswith(f"libraries: {said}")
        assert told.endswith("Install one: pip install --no-deps -r LOCK\n") and told.count("\n") == 1
