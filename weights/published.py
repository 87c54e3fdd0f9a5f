"""Load published weights into a network, without running any code from the file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import nn

from weights.files import WeightsFile
from weights.tensors import canonical_name, difference

RANDOM = "random"
RANDOM_SEED = 20160617  # any fixed number: random networks are the same in every command and for every `seed`
OPTIONAL = "num_batches_tracked"  # counted in training only; files before torch 0.4.1 have none


def file_digest(path: str | Path, kind: str) -> str:
    """Return a file's digest in hexadecimal digits; `kind` is hashlib's name. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def fill(module: nn.Module, weights: WeightsFile, what: str) -> None:
    """Copy a file's tensors into a network, one by one, in the network's own type.

    Args:
        what: the network's name in the message.

    Raises:
        ValueError: names or shapes differ from the network's, or a tensor is unreadable.
    """
    own = {name: tensor for name, tensor in module.state_dict().items() if not name.endswith(OPTIONAL)}
    names = {canonical_name(name): name for name in weights.entries if not name.endswith(OPTIONAL)}
    expected = {name: f"{tuple(tensor.shape)}" for name, tensor in own.items()}
    given = {name: f"{weights.entries[at][1]}" for name, at in names.items()}
    if text := difference(expected, given):
        raise ValueError(f"{weights.path}: does not fit {what}: {text}. Give the weights of that network.")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights.tensor(names[name]))
