"""The stage `moments` of a data set of others that has latents, and neither their mean and variance nor tokens.

mosaicml/diffusion stores a latent as it was drawn once from the VAE's posterior, float16, and multiplied by the VAE's scale.
It is read as a mean without variance: whatever is drawn from that is the stored latent, scaled once.

    stored    latents bytes, float16 (C, h, w); caption        scripts/precompute_latents.py there
    batch     moments float16 (B, 2C, h, w): latent / scale | -30, tokens int64 (B, L)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.batch_memory import BatchMemory
from stages.images import SampleError, captions_of
from stages.stream import BatchStream

NO_VARIANCE = -30.0  # its logarithm: the deviation is 3e-7; the VAE's own posterior is cut off there too


class LatentsStream(BatchStream):
    """Batches of latents: {"moments": float16 (B, 2C, h, w), each text column: int64 (B, L), "bad": [...]}.

    Args:
        shape: of a latent, (C, h, w).
        scale: what the stored latents were multiplied by.
        tokenize: captions -> text columns.
        arguments: keyword arguments of StreamingDataset.
    """

    def __init__(
        self,
        *,
        shape: Sequence[int],
        scale: float,
        tokenize: Callable[[Sequence[str]], Mapping[str, Tensor]],
        **arguments: Any,
    ):
        super().__init__(**arguments)
        self.latent_shape, self.scale, self.tokenize = tuple(shape), scale, tokenize
        self.memory = BatchMemory()

    def read_batch(self, sample_ids: np.ndarray) -> dict[str, Any]:
        """Return the latents as moments, and the captions tokenised in one call."""
        found = [self.first_good(sample_id, self._use) for sample_id in sample_ids.tolist()]
        channels, *rest = self.latent_shape
        shape = (len(found), 2 * channels, *rest)
        moments, receipt = self.memory.take(shape, torch.float16)
        torch.stack([mean for (mean, _), _ in found], out=moments[:, :channels])
        moments[:, channels:] = NO_VARIANCE
        return {
            "moments": moments,
            **self.tokenize([caption for (_, caption), _ in found]),
            "bad": [bad for _, passed_over in found for bad in passed_over],
            **receipt,
        }

    def _use(self, sample_id: int) -> tuple[Tensor, str]:
        sample = self[sample_id]
        caption = self.draw(sample_id).one_of(captions_of(sample))
        return read_latent(sample["latents"], self.latent_shape, self.scale), caption


def read_latent(content: bytes | memoryview, shape: Sequence[int], scale: float) -> Tensor:
    """# float16 bytes of a latent that was multiplied by `scale` -> float16 (C, h, w), not scaled.

    Raises:
        SampleError: there is none (of a picture that was too small), or it has another size, or is not finite.
    """
    if not len(content):
        raise SampleError("no latent")
    if len(content) != 2 * math.prod(shape):
        raise SampleError(f"a latent of {len(content):,} bytes, not float16 {tuple(shape)}")
    values = torch.frombuffer(bytearray(content), dtype=torch.float16).reshape(tuple(shape))
    latent = (values.float() / scale).to(torch.float16)
    if not latent.isfinite().all():
        raise SampleError("the latent is not finite")
    return latent
