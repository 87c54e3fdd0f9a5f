"""A dataset `moments` whose every sample can be known again: it is a function of its number.

    moments   float16 (8, 16, 16)   noise from a generator seeded by the number
    tokens    uint16 (77,)          the number, then tokens from the same generator

40 shards of 16 samples, 68 kB each: with 4 samples a device and batch the workers read 8 shards ahead, so that a fault at a
fifth of the epoch meets half of the downloads still to come.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

NUM_SHARDS, SHARD_SAMPLES = 40, 16
NUM_SAMPLES = NUM_SHARDS * SHARD_SAMPLES
IMAGE_SIZE = (128, 128)
MOMENTS_SHAPE, NUM_TOKENS, VOCABULARY = (8, 16, 16), 77, 49408
SEED = 20


@cache
def truth() -> dict[str, np.ndarray]:
    """Return all samples by column, in the order of their numbers."""
    moments = np.empty((NUM_SAMPLES, *MOMENTS_SHAPE), np.float16)
    tokens = np.empty((NUM_SAMPLES, NUM_TOKENS), np.uint16)
    for number in range(NUM_SAMPLES):
        generator = np.random.default_rng([SEED, number])
        moments[number] = generator.standard_normal(MOMENTS_SHAPE)
        tokens[number] = generator.integers(0, VOCABULARY, NUM_TOKENS)
        tokens[number, 0] = number
    return {"moments": moments, "tokens": tokens}


def write(folder: Path) -> None:
    """Write the dataset, with the columns and facts that prepare.latents gives to its own."""
    from streaming import MDSWriter

    from families import load_family
    from mds.dataset import write_metadata
    from mds.fetch import HASH
    from prepare.moment_rows import mds_columns

    columns = mds_columns(load_family("sd2", "tiny", "stock"), IMAGE_SIZE, text={}, metadata=False)
    row_bytes = 2 * np.prod(MOMENTS_SHAPE) + 2 * NUM_TOKENS + 100  # 100: caption, key, sizes and edge
    with MDSWriter(
        out=str(folder), columns=columns, hashes=[HASH], size_limit=int(row_bytes * SHARD_SAMPLES)
    ) as writer:
        for number in range(NUM_SAMPLES):
            row = {name: values[number] for name, values in truth().items()}
            writer.write({**row, "caption": f"the caption of sample {number:06d}", "key": f"{number:09d}"})
    facts = {"family": "sd2", "preset": "tiny", "variant": "stock", "image_size": list(IMAGE_SIZE)}
    write_metadata(folder, "moments", {**facts, "normalize": "symmetric", "encoders": {}, "precision": "fp32"})


def unlike_truth(moments: np.ndarray, tokens: np.ndarray) -> tuple[list[int], list[int]]:
    """Return the numbers that the samples of a batch claim, and those of them whose content is not what was written.

    Args:
        moments: float16 (B, 8, 16, 16).
        tokens: (B, 77), of any integer type.
    """
    numbers, wrong = [int(number) for number in tokens[:, 0]], []
    for row, number in enumerate(numbers):
        same = number < NUM_SAMPLES and np.array_equal(tokens[row], truth()["tokens"][number])
        if not same or moments[row].tobytes() != truth()["moments"][number].tobytes():
            wrong.append(number)
    return numbers, wrong


class Stage:
    """A written stage, and the content of its files by name."""

    def __init__(self, folder: Path):
        write(folder)
        self.folder = folder
        self.files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
