"""This process's rank, from the launcher's variables. All else is Composer's `dist`, imported on first use.

Composer takes four seconds to import, and most commands have one rank.
"""

from __future__ import annotations

import os
from typing import Any


def get_global_rank() -> int:
    """Return this process's place among all, from 0."""
    return int(os.environ.get("RANK", "0"))


def get_world_size() -> int:
    """Return how many processes there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def get_local_rank() -> int:
    """Return this process's place on its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_local_world_size() -> int:
    """Return how many processes this machine has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def get_node_rank() -> int:
    """Return this machine's place among all, from 0."""
    return int(os.environ.get("NODE_RANK", "0"))


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    from composer.utils import dist

    return getattr(dist, name)
