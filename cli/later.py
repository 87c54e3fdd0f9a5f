"""Libraries that others import wherever they are installed, kept out of the starts that do not use them.

    later.hide("peft")             # before Composer is imported: it finds none
    peft = later.load("peft")      # where it is wanted after all

Composer imports peft for its language models, and peft imports accelerate: 0.6 s of every start.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from types import ModuleType
from typing import Any


def hide(name: str) -> None:
    """Let everybody find that a library is not installed, unless it has been imported already."""
    modules: dict[str, Any] = sys.modules
    modules.setdefault(name, None)


def load(name: str) -> ModuleType:
    """Import a library, hidden or not. Raises ImportError: it is not installed."""
    if sys.modules.get(name, sys) is None:
        del sys.modules[name]
    return importlib.import_module(name)


def is_installed(name: str) -> bool:
    """True if a library is there, hidden or not."""
    return bool(sys.modules.get(name)) or importlib.machinery.PathFinder.find_spec(name) is not None
