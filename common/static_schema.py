"""Build a command's configuration classes from the source, without importing their modules.

    RunConfig = read_name("training.config", "RunConfig")      # 0.2 s; to import training.config takes seconds

A module that declares a configuration may import torch. Here only what a class needs is run: its fields with their types,
limits and defaults, its bases, and the constants that these name, in whatever module of this project. Methods are left out.
Names of common/ and of libraries are imported.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import functools
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCES: dict[type, ast.ClassDef] = {}
"""A class that was built here -> its statement, since `inspect` cannot find it."""


class _Names(dict[str, Any]):
    """A module's builtins: Python looks there last, and a missing name then runs its statement."""

    def __init__(self, module: str):
        self.module, self.statements = module, statements_of(module)
        self.globals: dict[str, Any] = {"__name__": module, "__builtins__": self}
        super().__init__({name: value for name, value in vars(builtins).items() if name not in self.statements})

    def __missing__(self, name: str) -> Any:
        node = self.statements[name]
        if isinstance(node, ast.ImportFrom):
            self.globals[name] = _import(
                str(node.module), next(a.name for a in node.names if name in (a.asname, a.name))
            )
        elif isinstance(node, ast.ClassDef):
            node.body = [part for part in node.body if not isinstance(part, ast.FunctionDef)] or [ast.Pass()]
            self._run(node, flags=0)  # so that a field's type is not a text
            SOURCES[self.globals[name]] = node
        else:
            self._run(node, flags=__future__.annotations.compiler_flag)
        return self.globals[name]

    def _run(self, node: ast.stmt, flags: int) -> None:
        exec(compile(ast.Module([node], []), self.module, "exec", flags, dont_inherit=True), self.globals)


@functools.cache
def _names_of(module: str) -> _Names:
    return _Names(module)


def read_name(module: str, name: str) -> Any:
    """Return what a name stands for at the top level of a module. Raises KeyError: the module does not bind it."""
    names = _names_of(module)
    return names.globals[name] if name in names.globals else names[name]


def statements_of(module: str) -> dict[str, ast.stmt]:
    """Return a module's top-level statements by the names that they bind."""
    statements: dict[str, ast.stmt] = {}
    for node in ast.parse(path_of(module).read_bytes()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names = [node.name]
        else:
            names = [
                part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            ]
        statements |= dict.fromkeys(names, node)
    return statements


def path_of(module: str) -> Path:
    """Return the file of a module of this project, whether it exists or not."""
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _import(module: str, name: str) -> Any:
    if module.split(".")[0] == "common" or not path_of(module).is_file():
        return getattr(importlib.import_module(module), name)
    return _Module(f"{module}.{name}") if path_of(f"{module}.{name}").is_file() else read_name(module, name)


class _Module(SimpleNamespace):
    """A module of this project, of which each name is read when it is asked for."""

    def __init__(self, module: str):
        super().__init__()
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return read_name(self._module, name)
