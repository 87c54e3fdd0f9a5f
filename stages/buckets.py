"""Aspect-ratio buckets: a picture's size in training, and an order of samples whose batches have one size each.

A set of buckets is a folder with a stage for each size, e.g. OUT/576x448 (prepare/buckets.py). The sizes are those of SDXL
(Podell et al. 2023, arXiv:2307.01952, appendix I), about 1024 x 1024 pixels each, scaled to the run's size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cli.limits import ImageSize

SDXL_PX = 1024
# Landscape sizes, (width, height); the paper's columns are height and width. Each has its portrait counterpart there, but for
# 1344 x 704.
LANDSCAPE = [(2048, 512), (1984, 512), (1920, 512), (1856, 512), (1792, 576), (1728, 576), (1664, 576), (1600, 640)]
LANDSCAPE += [(1536, 640), (1472, 704), (1408, 704), (1344, 704), (1344, 768), (1280, 768), (1216, 832), (1152, 832)]
LANDSCAPE += [(1152, 896), (1088, 896), (1088, 960), (1024, 960)]
PORTRAIT = [(height, width) for width, height in LANDSCAPE if (width, height) != (1344, 704)]
SDXL = (*PORTRAIT, (SDXL_PX, SDXL_PX), *reversed(LANDSCAPE))


def bucket_sizes(side_px: int, *, step_px: int, max_aspect: float = math.inf) -> list[ImageSize]:
    """Return SDXL's sizes, (width, height), for a square of another side; each once.

    Args:
        step_px: sides are rounded to multiples of it.
        max_aspect: sizes whose longer side is more than that times the shorter one are left out.
    """
    scaled = [tuple(max(1, round(px * side_px / SDXL_PX / step_px)) * step_px for px in size) for size in SDXL]
    return list(dict.fromkeys((w, h) for w, h in scaled if max(w, h) <= max_aspect * min(w, h)))


def bucket_of(size: ImageSize, buckets: Sequence[ImageSize]) -> int:
    """Return the number of the bucket whose aspect is nearest to a picture's, by their ratio; the first of equals."""
    aspect = math.log(size[0] / size[1])
    return min(range(len(buckets)), key=lambda number: abs(math.log(buckets[number][0] / buckets[number][1]) - aspect))


def cropped_frac(size: ImageSize, bucket: ImageSize) -> float:
    """Return the part of a picture that is cut off where it is scaled so that it just covers a bucket."""
    (width, height), (wide, high) = size, bucket
    return 1.0 - min(width * high, wide * height) / max(width * high, wide * height)


def in_buckets(
    order: NDArray[np.int64], buckets: NDArray[np.int64], num_batches: Sequence[int], batch_size: int
) -> NDArray[np.int64]:
    """# (N,) samples in their order -> (sum of num_batches, batch_size): each batch is of one bucket.

    Samples wait in their bucket's queue, in the order given. A batch leaves when its last sample comes; what is left in the
    queues at the end is left out.

    Args:
        buckets: (N,), the bucket of each of the samples.
        num_batches: of each bucket.
    """
    batches, ready_at = [], []
    for bucket, num in enumerate(num_batches):
        places = np.flatnonzero(buckets == bucket)[: num * batch_size].reshape(num, batch_size)
        batches.append(order[places])
        ready_at.append(places[:, -1])
    return np.concatenate(batches)[np.argsort(np.concatenate(ready_at), kind="stable")]
