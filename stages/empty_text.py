"""The empty text's states, which a stage with text states may have beside them: captions are then dropped without an encoder.

    empty_text.safetensors    a float16 tensor for each column of text states, of the shape of one sample

dataset.json has the file's digest (`empty_text_xxh64`). From a stage without it, a run encodes the empty text by itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping

import numpy as np
import xxhash
from torch import Tensor

from stages.dataset import EMPTY_DIGEST, FACTS_FILE, Stage, file_beside, read_json, split_place
from stages.mixture import StreamConfig

EMPTY_FILE = "empty_text.safetensors"


def as_bytes(states: Mapping[str, np.ndarray]) -> bytes:
    """Return the file's content, the same bytes for the same states."""
    from safetensors.numpy import save

    return save(dict(states))


def digest_of(content: bytes) -> str:
    """Return a file's digest, as dataset.json has it."""
    return xxhash.xxh64(content).hexdigest()


def has_empty_text(source: StreamConfig) -> bool:
    """Say whether a stage has the empty text's states; reads dataset.json alone. Raises ValueError: it cannot be read."""
    if "contents" in vars(source):  # it was read
        return EMPTY_DIGEST in source.contents.facts
    at = source.facts or f"{(source.location or '').rstrip('/')}/{FACTS_FILE}"
    return EMPTY_DIGEST in read_json(*split_place(at))[1]


def read_empty_text(stage: Stage) -> dict[str, Tensor]:
    """Return the empty text's states, float16 (1, ...) each. Raises ValueError: they are not there, or damaged."""
    from safetensors.torch import load

    with tempfile.TemporaryDirectory() as folder:
        content = file_beside(stage, EMPTY_FILE, stage.facts[EMPTY_DIGEST], folder).read_bytes()
    return {name: states[None] for name, states in load(content).items()}
