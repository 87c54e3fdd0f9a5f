"""Libraries that others import wherever they are installed, kept out of the starts that do not use them.

    later.hide("peft", "accelerate")    # before Composer is imported: it finds none
    peft = later.load("peft")           # where it is wanted after all, with those that it imports

Composer imports peft for its language models, diffusers accelerate, and that one boto3: 0.6 s of every start.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

_hidden: set[str] = set()


def hide(*names: str) -> None:
    """Let everybody find that libraries are not installed, unless they have been imported already."""
    modules: dict[str, Any] = sys.modules
    for name in names:
        if modules.setdefault(name, None) is None:
            _hidden.add(name)


def load(name: str) -> ModuleType:
    """Import a library, hidden or not, and hide none any more. Raises ImportError: it is not installed."""
    while _hidden:
        sys.modules.pop(_hidden.pop(), None)
    return importlib.import_module(name)


def is_installed(name: str) -> bool:
    """True if a library is there, hidden or not."""
    return bool(sys.modules.get(name)) or importlib.machinery.PathFinder.find_spec(name) is not None
