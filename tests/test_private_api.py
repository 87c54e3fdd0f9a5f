"""common/private_api.py: what this code uses of libraries' insides is declared, and what a new release lacks is one line."""

from __future__ import annotations

import ast
import collections
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Iterator

import pytest
import torch
from conftest import ROOT
from test_layout import floor_of, module_of, sources

from common import private_api
from common.private_api import has, require_private_api

OF_PYTHON = {"_abc_impl", "_is_protocol"}
"""What Python gives a class."""
DOCUMENTED = {"_exit", "_replace"}
"""Of `os` and of named tuples: public in spite of their underscore."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def own_names(tree: ast.AST) -> Iterator[str]:
    """Names that a file defines: functions, classes, variables, attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def foreign_names(tree: ast.AST, own: set[str]) -> Iterator[tuple[str, int]]:
    """Private names of libraries that a file reads, imports or, in a class within a function, overrides; with their lines."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    nested = {kind for function in functions for kind in ast.walk(function) if isinstance(kind, ast.ClassDef)}
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Attribute) and node.attr not in own:
            found = [node.attr]
        elif isinstance(node, ast.ImportFrom) and floor_of(node.module or "") is None:
            found = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            found = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ClassDef) and node in nested and node.bases:
            found = [step.name for step in node.body if isinstance(step, ast.FunctionDef)]
        yield from ((name, node.lineno) for name in found if is_private(name) and name not in DOCUMENTED)


def overridden() -> Iterator[tuple[str, str]]:
    """(class, name) where a class of ours and a library's class that it comes from set or define the same private name."""
    for module in [sys.modules[name] for name in map(module_of, sources()) if name in sys.modules]:
        for kind in vars(module).values():
            if not inspect.isclass(kind) or kind.__module__ != module.__name__:
                continue
            foreign = [base for base in kind.__mro__ if floor_of(base.__module__) is None and base.__module__ != "enum"]
            theirs = {name for base in foreign for name in (*vars(base), *private_api._set_by(base))}
            mine = {name for name in (*vars(kind), *private_api._set_by(kind)) if is_private(name)}
            yield from ((f"{module.__name__}.{kind.__name__}", name) for name in sorted(mine & theirs - OF_PYTHON))


def declared(trees: dict[str, ast.AST]) -> set[str]:
    """All that is declared, also within functions: names with dots in them in their parts and whole."""
    texts = [text for names in private_api.DECLARED.values() for text in names] + list(private_api.DECLARED)
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require_private_api":
                texts += [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return {part for text in texts for part in (text, *text.split("."))}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.AST]:
    for module in map(module_of, sources()):
        if not module.endswith("__main__"):
            importlib.import_module(module)
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sources()}


def test_every_private_name_of_a_library_is_declared(trees):
    own, known, ours = {name for tree in trees.values() for name in own_names(tree)}, declared(trees), [*overridden()]
    used = [(name, f"{path}:{line} {name}") for path, tree in trees.items() for name, line in foreign_names(tree, own)]
    assert [text for name, text in used if name not in known] == []
    assert [text for text in ours if text[1] not in known] == []
    assert {"_found_inf_per_device", "_dynamo"} <= {name for name, _ in used}
    assert ("mds.loader.Loader", "_iterator") in ours


def test_every_declared_name_is_used(trees):
    text, names = "\n".join(ast.unparse(tree) for tree in trees.values()), declared(trees)
    owners = {part for name in names for part in name.split(".")[:-1]}
    single = [name for name in sorted(names - owners) if "." not in name and is_private(name)]
    assert [name for name in single if text.count(name) < 2] == []


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
        (
            "torch.utils.data.dataloader",
            ("_BaseDataLoaderIter._old",),
            f"{torch_version} has no _BaseDataLoaderIter._old",
        ),
        ("threading", ("_gone",), "Python has no _gone of threading (why)"),
        ("torch.gone", ("_all",), f"{torch_version} has no _all of torch.gone (why)"),
    ):
        with pytest.raises(SystemExit, match="2"):
            require_private_api(owner, *names, why="why")
        told = capsys.readouterr().err
        assert told.startswith(f"libraries: {said}")
        assert told.endswith("Install one: pip install --no-deps -r LOCK\n") and told.count("\n") == 1
