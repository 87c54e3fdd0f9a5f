"""CLIP's image encoder with the tensor names of published weights, without its last layer, whose states are not read.

Wan's image-to-video model (Wan Team 2025, arXiv:2503.20314) is told its first frame so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import CLIPVisionConfig

NUM_UNREAD = 1
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of the pictures that CLIP was trained on; transformers' OPENAI_CLIP_MEAN and OPENAI_CLIP_STD."""


class ClipVision(nn.Module):
    """transformers' CLIPVisionModel. Args: config: num_hidden_layers is that of the published model less NUM_UNREAD."""

    def __init__(self, config: CLIPVisionConfig):
        super().__init__()
        from transformers import CLIPVisionModel

        before = torch.get_rng_state()
        model: Any = CLIPVisionModel(config)
        torch.set_rng_state(before)
        self.vision_model = getattr(model, "vision_model", model)  # transformers 5 leaves that name out
        self.config: Any = model.config
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=config.initializer_range)
        for norm in (module for module in self.modules() if isinstance(module, nn.LayerNorm)):
            norm.reset_parameters()

    def forward(self, images: Tensor) -> Tensor:  # (B, 3, H, W) in [-1, 1] -> (B, 1 + patches, D)
        """Return the states of the image's middle square."""
        own = next(self.parameters()).dtype
        return self.vision_model(pixel_values=self.prepared(images).to(own)).last_hidden_state

    def prepared(self, images: Tensor) -> Tensor:  # (B, 3, H, W) in [-1, 1] -> (B, 3, side, side)
        """Resize and normalise as transformers' CLIPImageProcessor does, which also rounds to bytes."""
        side = self.config.image_size
        covering = covering_size(images.shape[-2:], side)
        images = F.interpolate(images.float(), covering, mode="bicubic", antialias=True, align_corners=False)
        top, left = (covering[0] - side) // 2, (covering[1] - side) // 2
        unit = ((images[..., top : top + side, left : left + side] + 1.0) / 2.0).clamp(0.0, 1.0)
        mean, std = (torch.tensor(value, device=unit.device)[:, None, None] for value in (MEAN, STD))
        return (unit - mean) / std


def covering_size(size: Sequence[int], side: int) -> tuple[int, int]:
    """Return (height, width) of an image scaled so that its shorter side is `side`; the longer one is rounded down."""
    height, width = size
    return (side * height // min(size), side * width // min(size))
