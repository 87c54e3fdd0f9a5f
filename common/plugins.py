"""A user's own classes: in a file, `path/to/file.py:Class`, or in an installed package, `package.module:Class`.

    model.family=my_family.py:MyDiT
    objective.name='my_loss.py:Huber(delta=0.1)'
    optimizer.name='torch.optim:RAdam(decoupled_weight_decay=true)'
    callbacks='[my_callbacks.py:LogAttention, {class: my_callbacks.py:Other, args: {every: 100}}]'

Arguments are literals: numbers, texts in quotes, true or True, null or None, lists. What the class receives besides is said
where it is used. A file is imported once in a process, and its folder is not searched for other modules.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from common.errors import ConfigError

T = TypeVar("T")

FORM = re.compile(r"(?P<source>[^()]+):(?P<name>[A-Za-z_]\w*)(?:\((?P<arguments>.*)\))?", re.S)
EXAMPLE = "Give path/to/file.py:Class or package.module:Class, with arguments as Class(name=value)"
ONE_CLASS = ("model.family", "objective.name", "optimizer.name")
LISTS = ("algorithms", "callbacks")
WORDS = {"true": True, "false": False, "null": None}
"""YAML's words, which are names in Python."""


def is_plugin(name: str | None) -> bool:
    """True for the name of a class, and not of something that Easel has."""
    return name is not None and ":" in name


@dataclass(frozen=True)
class Plugin:
    """A class that a user names under a configuration key."""

    key: str
    source: str
    """A file that ends in .py, or a module."""
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return f"{self.source}:{self.name}"

    def load(self, base: type[T]) -> type[T]:
        """Import the class. Raises ValueError: there is none, its file raises, or it is not a subclass of `base`."""
        module = _import_module(self.key, self.source)
        classes = {name: value for name, value in vars(module).items() if inspect.isclass(value)}
        if self.name not in classes:
            near = difflib.get_close_matches(self.name, classes, n=3, cutoff=0.5)
            near = near or [name for name, value in classes.items() if issubclass(value, base) and value is not base]
            hint = f"Did you mean {' or '.join(near[:3])}?" if near else f"It has no subclass of {_name_of(base)}."
            raise ValueError(f"{self.key}: {self.source} has no class {self.name}. {hint}")
        loaded = classes[self.name]
        if not issubclass(loaded, base):
            bases = ", ".join(_name_of(each) for each in loaded.__bases__)
            raise ValueError(f"{self.key}: {self.text} is not a subclass of {_name_of(base)}. Its bases: {bases}.")
        return loaded

    def check(self, base: type[T], *given: Any, **more: Any) -> type[T]:
        """Import the class and compare its arguments. Raises ValueError: see `load`; or they do not fit its signature."""
        loaded = self.load(base)
        try:
            inspect.signature(loaded).bind(*given, **{**more, **self.arguments})
        except TypeError as error:
            takes = f"It takes {inspect.signature(loaded)}"
            raise ValueError(f"{self.key}: {self.text}: {error}. {takes}.") from error
        return loaded

    def build(self, base: type[T], *given: Any, **more: Any) -> T:
        """Build the object. Raises ValueError: see `check`; or its constructor raises."""
        loaded = self.check(base, *given, **more)
        try:
            return loaded(*given, **{**more, **self.arguments})
        except (Exception, SystemExit) as error:
            raise ValueError(f"{self.key}: {self.text} raised {_describe_error(error)}.") from error

    @property
    def digest(self) -> str | None:
        """SHA-256 of the class's own file, its first 16 digits; None: it has none. Raises ValueError: see `load`."""
        module = sys.modules.get(self.load(object).__module__)
        file = getattr(module, "__file__", None)
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]


def parse_plugin(key: str, value: Any) -> Plugin:
    """Read a class and its arguments from text, or from {class: ..., args: {...}}. Raises ValueError: it is neither."""
    if isinstance(value, Mapping):
        if not isinstance(value.get("class"), str) or set(value) - {"class", "args"}:
            raise ValueError(
                f"{key}: {dict(value)} does not name a class. Possible: a text, or {{class: ..., args: {{...}}}}."
            )
        plugin, arguments = parse_plugin(key, value["class"]), value.get("args") or {}
        if not isinstance(arguments, Mapping) or plugin.arguments:
            raise ValueError(
                f"{key}: the arguments of {plugin.text} are given twice, or are not a section. Give args: {{name: value}}."
            )
        return Plugin(key, plugin.source, plugin.name, {str(name): each for name, each in arguments.items()})
    match = FORM.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{key}: '{value}' does not name a class. {EXAMPLE}.")
    return Plugin(key, match["source"], match["name"], _read_arguments(key, match["arguments"] or ""))


def plugins_of(key: str, values: Iterable[Any]) -> list[Plugin]:
    """Read a list of classes. Raises ValueError: one does not name a class."""
    return [parse_plugin(f"{key}[{number}]", value) for number, value in enumerate(values)]


def build_all(key: str, values: Iterable[Any], base: Any) -> list[Any]:
    """Build a list of classes; `saved_as` becomes the name of each one's state in checkpoints. Raises ValueError."""
    built = []
    for plugin in plugins_of(key, values):
        built.append(plugin.build(base))
        built[-1].saved_as = f"{plugin.key} {plugin.name}"
    return built


def plugin_digests(keys: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the digest of each file whose class a run trains with, for its identity. Raises ValueError.

    Args:
        keys: key -> value of a run's configuration.
    """
    plugins = [parse_plugin(key, keys[key]) for key in ONE_CLASS if is_plugin(keys.get(key))]
    plugins += [plugin for key in LISTS for plugin in plugins_of(key, keys.get(key) or ())]
    return {f"{plugin.key} (digest of its file)": plugin.digest for plugin in plugins}


class _AsPython(ast.NodeTransformer):
    """Replaces YAML's words by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(WORDS[node.id]) if node.id in WORDS else node


def _read_arguments(key: str, text: str) -> dict[str, Any]:
    """Read `name=value, ...`. Raises ValueError: a value is not a literal."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(part.arg is None for part in call.keywords):
            raise ValueError("no names")
        return {str(part.arg): ast.literal_eval(_AsPython().visit(part.value)) for part in call.keywords}
    except (SyntaxError, ValueError) as error:
        allowed = "name=value, with numbers, texts in quotes, true, false, null or lists of them"
        raise ValueError(f"{key}: the arguments ({text}) cannot be read. Possible: {allowed}.") from error


@functools.cache
def _import_file(path: Path) -> ModuleType:
    name = f"easel_plugin_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(key: str, source: str) -> ModuleType:
    """Import a plug-in's file or module. Raises ValueError."""
    path = Path(source).expanduser()
    if source.endswith(".py") and not path.is_file():
        raise ValueError(f"{key}: there is no file {source} (in {Path.cwd()}). {EXAMPLE}.")
    try:
        return _import_file(path.resolve()) if source.endswith(".py") else importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name and (source == error.name or source.startswith(f"{error.name}.")):
            raise ValueError(f"{key}: there is no module {source}. {EXAMPLE}.") from error
        raise ValueError(f"{key}: {source} raised {_describe_error(error)}.") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"{key}: {source} raised {_describe_error(error)}.") from error


@contextlib.contextmanager
def name_plugin(key: str, value: str | None) -> Iterator[None]:
    """Turn any error within into a ConfigError that names the class under this key, if there is one."""
    try:
        yield
    except Exception as error:
        if not is_plugin(value):
            raise
        plugin = parse_plugin(key, value)
        raise ConfigError([f"{key}: {plugin.text} raised {_describe_error(error, plugin.source)}."]) from error


def _describe_error(error: BaseException, source: str = "") -> str:
    """Return an error with the place that raised it: the last line of the file `source`, or else of any file."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    path = str(Path(source).expanduser().resolve())
    frames = [frame for frame in frames if frame.filename == path] or frames
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def _name_of(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
