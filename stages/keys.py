"""Which samples a stage has, as digests: `keys.u64` beside dataset.json, to see that two stages have none in common.

    keys.u64    a little-endian uint64 for each sample, sorted: xxh3_64 of its key, a zero byte and its caption

The caption belongs to it: img2dataset numbers the samples of every data set alike. dataset.json has the file's digest
(`keys_xxh64`). A stage that was made before, or by others, has neither.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import xxhash

from stages.dataset import KEYS_DIGEST, Stage, file_beside

KEYS_FILE = "keys.u64"
NUMBER = np.dtype("<u8")


def key_digest(sample: Mapping[str, Any]) -> int:
    """Return a sample's digest, 64 bits, from its columns."""
    caption = sample.get("caption", "")
    if isinstance(caption, list):  # of a data set of others; a stage that is made of it has the first usable one
        caption = next((text.strip() for text in caption if text.strip()), "")
    return xxhash.xxh3_64_intdigest(f"{sample['key']}\0{caption}".encode())


def as_numbers(digests: Collection[int]) -> np.ndarray:
    """Return digests as `keys.u64` has them."""
    return np.sort(np.fromiter(digests, NUMBER, len(digests)))


def are_in(stage: Stage, digests: np.ndarray, folder: str | None) -> np.ndarray | None:
    """Say for each digest whether a sample of the stage has it, bool (N,); None: the stage has no list of them.

    Args:
        digests: uint64 (N,).
        folder: where the list of a stage in a store is kept.

    Raises:
        ValueError: the list that dataset.json names is not there, or is damaged.
    """
    wanted = stage.facts.get(KEYS_DIGEST)
    if wanted is None:
        return None
    path = file_beside(stage, KEYS_FILE, wanted, folder)
    known = np.memmap(path, NUMBER, "r")  # of a large stage some GiB, of which a search reads a few pages
    places = np.minimum(np.searchsorted(known, digests), len(known) - 1)
    return known[places] == digests
