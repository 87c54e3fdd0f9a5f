"""Changes of what a denoiser's blocks receive in training, around their whole calls.

Compiled graphs, recomputation and the gathering of sharded weights happen inside such a call and see no difference. Names of
parameters stay as they are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Change = Callable[[dict[str, Any]], dict[str, Any]]


def change_inputs(block: nn.Module, change: Change, *, first: bool = False) -> None:
    """In training, let a block receive what `change` returns for its arguments by name.

    Args:
        first: it comes before the block's other changes, which come in their order.
    """
    watched: Any = block
    if not hasattr(watched, "input_changes"):
        kind: Any = type(block)
        watched.__class__ = changed_class(kind)
        watched.input_changes = []
    watched.input_changes.insert(0 if first else len(watched.input_changes), change)


@functools.cache
def changed_class(block: Any) -> type[nn.Module]:  # block: a class of modules
    """Return the class whose calls in training pass their arguments through `input_changes`."""
    names = argument_names(block)

    class ChangedBlock(block):
        input_changes: list[Change]

        def __call__(self, *args: Any, **more: Any) -> Any:
            if not (self.training and torch.is_grad_enabled()):
                return super().__call__(*args, **more)
            arguments = dict(zip(names, args, strict=False)) | more
            for change in self.input_changes:
                arguments = change(arguments)
            return super().__call__(**arguments)

    ChangedBlock.__name__ = f"Changed{block.__name__}"
    return ChangedBlock


def argument_names(block: Any) -> list[str]:  # block: a class of modules
    """Return the names of a block's arguments, as diffusers has them: a class around its own may take any."""
    names = [list(inspect.signature(kind.forward).parameters)[1:] for kind in block.__mro__ if "forward" in vars(kind)]
    return next(each for each in names if "hidden_states" in each)
