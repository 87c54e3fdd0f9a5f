"""Private names of libraries that this code relies on: each declared once, next to its use, and compared when it is loaded.

    require_private_api(DataLoader, "_iterator", why="worker processes are ended with the run")

So a new release that lacks one ends a command at once, with one line and exit code 2. A library that a run does not load is
not loaded for this.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from common.log import EVERY_RANK, log

DECLARED: dict[str, set[str]] = defaultdict(set)
"""Owner -> its names that were declared."""


def require_private_api(owner: Any, *names: str, why: str) -> None:
    """Declare names that are private to a library. Ends the process with exit code 2 where one is missing.

    Args:
        owner: a class, an object, or the name of a module.
        names: of it; `_Iterator.total` is of its `_Iterator`. What only an instance has counts as there where a method of
            the class, or of a class that it comes from, sets it.
        why: what it is used for.
    """
    where = owner if isinstance(owner, str) else f"{_module_of(owner)}.{getattr(owner, '__qualname__', '')}".strip(".")
    DECLARED[where] |= set(names)
    try:
        owner = importlib.import_module(owner) if isinstance(owner, str) else owner
        lacking = [name for name in names if not has(owner, name)]
    except ImportError:
        lacking = list(names)
    if lacking:
        packages = metadata.packages_distributions().get(where.split(".")[0], [])
        library = " ".join(f"{name} {metadata.version(name)}" for name in packages[:1]) or "Python"
        problem = f"libraries: {library} has no {', '.join(lacking)} of {where} ({why})"
        possible = "Possible: the versions of requirements.lock or requirements/newest.lock"
        log.error(f"{problem}. {possible}. Install one: pip install --no-deps -r LOCK", extra=EVERY_RANK)
        sys.exit(2)


def has(owner: Any, name: str) -> bool:
    """True where an object has an attribute, or, being a class, sets it in one of its methods or of a base."""
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
