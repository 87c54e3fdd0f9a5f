"""A frozen image encoder of transformers, for methods that compare with its features."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KNOWN = ("dinov2", "dinov2_with_registers", "dinov3_vit", "clip_vision_model", "siglip_vision_model")
"""transformers' encoders whose last states are those of an image's patches, after class and register tokens."""
WITH_FIXED_POSITIONS = ("clip_vision_model", "siglip_vision_model")
"""transformers' encoders that take other sizes only when they are asked to."""


class ImageFeatures(nn.Module):
    """A frozen encoder of transformers: images (B, 3, H, W) in [0, 1] -> its patches' features (B, N, E) float32."""

    image_mean: Tensor
    image_std: Tensor

    def __init__(self, name: str):
        from transformers import AutoModel
        from transformers.models.auto.image_processing_auto import get_image_processor_config
        from transformers.utils import logging

        super().__init__()
        config, processor = self.read_config(name), get_image_processor_config(name)
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # no report of what else the files have
        network, loaded = AutoModel.from_pretrained(name, config=config, output_loading_info=True)
        logging.set_verbosity(verbosity)
        if missing := sorted(loaded["missing_keys"]):
            raise ValueError(f"{name} lacks {len(missing)} of the encoder's tensors: {', '.join(missing[:3])}")
        self.network = network.eval().requires_grad_(False)
        self.options = dict(interpolate_pos_encoding=True) if config.model_type in WITH_FIXED_POSITIONS else {}
        self.patch, self.width = config.patch_size, config.hidden_size
        for key in ("image_mean", "image_std"):  # without them: pixels from -1 to 1
            self.register_buffer(key, torch.tensor(processor.get(key, [0.5] * 3)).reshape(3, 1, 1))

    @staticmethod
    def read_config(name: str) -> Any:
        """Return the configuration of the encoder of images. Raises OSError, ValueError: there is none."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(name)
        config = getattr(config, "vision_config", config)
        if config.model_type not in KNOWN:
            raise ValueError(f"a {config.model_type} is none of {', '.join(KNOWN)}")
        return config

    @torch.no_grad()
    def forward(self, images: Tensor, rows: int, columns: int) -> Tensor:
        """Resize to `rows` x `columns` patches and encode."""
        size = (rows * self.patch, columns * self.patch)
        if images.shape[-2:] != size:
            images = F.interpolate(images, size, mode="bicubic", antialias=True).clamp(0.0, 1.0)
        pixels = (images - self.image_mean) / self.image_std
        states = self.network(pixel_values=pixels, **self.options).last_hidden_state
        return states[:, -rows * columns :].float()  # before them: class and register tokens
