"""Shared by the families of videos: a network on the latents of a video autoencoder, conditioned on states of captions.

Shapes: B batch, C latent channels, F frames, H W height and width in px, p pixels per latent, q frames per latent,
f = 1 + (F - 1) / q latent frames: the first one has a separate latent.
    videos (B, 3, F, H, W) -> moments (B, 2C, f, H/p, W/p) -> latents (B, C, f, H/p, W/p), e.g. (B, 16, 3, 68, 120)
"""

from __future__ import annotations

from typing import Any

import torch

from common.value_types import ImageSize
from families.spec import Column, Family, Pipeline

AMD_OBJECTIVE = dict(prediction="flow", timesteps="logit_normal", shift=3.0, caption_dropout=0.1)
"""None of the published models states how it was trained; AMD's benchmark trains all of them with these times."""


class VideoFamily(Family):
    """The methods of `families.spec.Family` that do not depend on the networks' sizes.

    Attributes:
        num_frames: the default F.
        frames_per_latent: q.
    """

    predictions = ("flow",)
    media = "videos"
    num_frames: int
    frames_per_latent: int
    latent_scale = 1.0
    pixels_per_latent, side_multiple = 8, 16
    pipeline: Pipeline | None = None

    def size_problem(self, size: ImageSize) -> str | None:
        return super().size_problem(size[:2])

    def frames_problem(self, num_frames: int) -> str | None:
        if (num_frames - 1) % self.frames_per_latent == 0:
            return None
        step = self.frames_per_latent
        nearest = num_frames - (num_frames - 1) % step
        reason = f"its first latent stands for one frame, each further one for {step}"
        text = f"{num_frames} frames do not fit {self.name}: {reason}"
        return f"{text}. Nearest: {nearest}, {nearest + step}."

    def media_shape(self, size: ImageSize) -> tuple[int, ...]:
        width, height, num_frames = size
        return (3, num_frames, height, width)

    def latent_shape(self, size: ImageSize) -> tuple[int, ...]:
        channels, height, width = super().latent_shape(size[:2])
        return (channels, 1 + (size[2] - 1) // self.frames_per_latent, height, width)

    def pipeline_call(self, size: ImageSize, guidance: float) -> dict[str, Any]:
        width, height, num_frames = size
        return {"width": width, "height": height, "num_frames": num_frames, "guidance_scale": guidance}

    def stored_mask(self) -> Column:
        """Return the column of `text`'s mask, 1 where a caption has a token."""
        return Column((self.num_tokens,), torch.float16)
