"""Private names of libraries that this code relies on: each declared once, beside its use, and all compared at the start.

    require_private_api(StreamingDataset, "_get_work", "_shard_states", why="an epoch is read by batches")

A declaration only notes what is missing, and `@command` calls `check_private_api` before it reads its words: so a new release
fails at once, with one line that names all that it lacks. A module that a command loads later has its names compared while it
is loaded. A library that a run does not load is not loaded for this.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import platform
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

DECLARED: dict[str, set[str]] = defaultdict(set)
"""Owner -> its names that were declared."""
_missing: dict[str, list[str]] = {}
"""Library, with its version -> what it lacks."""
_begun = threading.Event()


class PrivateAPIMissing(ImportError):
    """A library has changed inside."""


def require_private_api(owner: Any, *names: str, why: str) -> None:
    """Declare names that are private to a library.

    Args:
        owner: a class, an object, or the name of a module.
        names: of it; `_Iterator.total` is of its `_Iterator`. What only an instance has counts as there where a method of
            the class, or of a class that it comes from, sets it.
        why: what it is used for.

    Raises:
        PrivateAPIMissing: a name is missing, and the command has begun.
    """
    where = owner if isinstance(owner, str) else f"{_module_of(owner)}.{getattr(owner, '__qualname__', '')}".strip(".")
    DECLARED[where] |= set(names)
    try:
        owner = importlib.import_module(owner) if isinstance(owner, str) else owner
        lacking = [name for name in names if not has(owner, name)]
    except ImportError:
        lacking = list(names)
    if lacking:
        _missing.setdefault(_library(where), []).append(f"{', '.join(lacking)} of {where} ({why})")
        if _begun.is_set():
            check_private_api()


def check_private_api() -> None:
    """Raise PrivateAPIMissing where anything that has been declared is missing; from now on a declaration does so itself."""
    _begun.set()
    if _missing:
        given = "; ".join(f"{library} has no {', no '.join(texts)}" for library, texts in _missing.items())
        possible = "Possible: the versions of requirements.lock or requirements/newest.lock"
        todo = f"{possible}. Install one: pip install --no-deps -r LOCK"
        raise PrivateAPIMissing(f"libraries: {given}. {todo}")


def has(owner: Any, name: str) -> bool:
    """True where an object has an attribute, or, being a class, sets it in a method of its own or of a base."""
    *path, last = name.split(".")
    for part in path:
        owner = owner.get(part) if isinstance(owner, Mapping) else getattr(owner, part, None)
    if isinstance(owner, Mapping):
        return last in owner
    if owner is None or hasattr(owner, last) or not isinstance(owner, type):
        return owner is not None and hasattr(owner, last)
    return any(last in _set_by(kind) for kind in owner.__mro__)


def _set_by(kind: type) -> Iterator[str]:
    """Yield the attributes that a class's methods set, and those that it annotates."""
    yield from kind.__dict__.get("__annotations__", {})
    for method in map(inspect.unwrap, kind.__dict__.values()):
        if inspect.isfunction(method):
            yield from (step.argval for step in dis.get_instructions(method) if step.opname == "STORE_ATTR")


def _module_of(owner: Any) -> str:
    return owner.__name__ if inspect.ismodule(owner) else getattr(owner, "__module__", None) or type(owner).__module__


def _library(where: str) -> str:
    """Return the distribution that a name is of, with its version; Python where it is the standard library's."""
    package = where.split(".")[0]
    for name in metadata.packages_distributions().get(package, []):
        return f"{name} {metadata.version(name)}"
    return f"Python {platform.python_version()}"
