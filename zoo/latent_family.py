"""Shared by the families that train a UNet on the latents of a KL autoencoder, conditioned on one text encoder's states.

Shapes: B batch, H W image height and width in px, p pixels per latent, L text tokens, D text width.
    images (B, 3, H, W) -> moments (B, 8, H/p, W/p) -> latents (B, 4, H/p, W/p)
    tokens (B, L) -> text (B, L, D)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cli.limits import ImageSize
from zoo.objectives import DiscreteDiffusion, ObjectiveConfig
from zoo.spec import Column

LATENT_CHANNELS = 4


class LatentFamily:
    """The methods of `zoo.spec.Family` that do not depend on the networks' sizes.

    Attributes:
        name, objective: see `zoo.spec.Family`.
        image_dtype: type of images in a batch; float32: not rounded, see `stages.images.resize_and_crop`.
        pixels_per_latent: p.
        latent_scale: 1 / standard deviation of the latents.
        num_tokens, vocabulary: of the tokenizer: L, and its largest token plus one.
        text_width: of the text encoder's states: D.
    """

    name: str
    objective: Mapping[str, Any]
    predictions = ("epsilon", "v")
    image_dtype = torch.uint8
    pixels_per_latent: int
    latent_scale: float
    on_hub: str | None = None
    num_tokens: int
    vocabulary: int
    text_width: int

    def size_problem(self, size: ImageSize) -> str | None:
        step, (width, height) = self.pixels_per_latent, size
        if all(side > 0 and side % step == 0 for side in size):
            return None
        return f"{width} x {height} px does not fit {self.name}. Both sides have to be multiples of {step}."

    def columns(self, stage: str, size: ImageSize, *, stored_text: bool = False) -> dict[str, Column]:
        channels, height, width = self.latent_shape(size)
        images = Column((3, size[1], size[0]), self.image_dtype, below=256 if self.image_dtype == torch.uint8 else None)
        pictures = {
            "images": {"images": images},
            "moments": {"moments": Column((2 * channels, height, width), torch.float16)},
        }
        if stage not in pictures:
            raise ValueError(f"data.stage: {self.name} has no stage '{stage}'. Known: {', '.join(pictures)}.")
        if stored_text:
            return {**pictures[stage], "text": Column((self.num_tokens, self.text_width), torch.float16)}
        return {**pictures[stage], "tokens": Column((self.num_tokens,), torch.int64, below=self.vocabulary)}

    def latent_shape(self, size: ImageSize) -> tuple[int, ...]:
        width, height = size
        return (LATENT_CHANNELS, height // self.pixels_per_latent, width // self.pixels_per_latent)

    def build_objective(self, config: ObjectiveConfig) -> DiscreteDiffusion:
        prediction = config.resolved(self.objective).prediction
        if prediction not in self.predictions:
            given = f"objective.prediction: {self.name} cannot be trained on '{prediction}'"
            raise ValueError(f"{given}. Possible: {', '.join(self.predictions)}.")
        return DiscreteDiffusion(config, prediction)

    def encode_images(self, encoders: Mapping[str, nn.Module], images: Tensor) -> Tensor:
        # (B, 3, H, W) -> (B, 8, H/p, W/p) mean | logvar
        vae: Any = encoders["vae"]
        return vae.encode(images).latent_dist.parameters

    def sample_latents(self, moments: Tensor, noise: Tensor) -> Tensor:
        # (B, 8, h, w) -> (B, 4, h, w). The clamp is that of the VAE's own posterior.
        mean, logvar = moments.chunk(2, dim=1)
        return (mean + torch.exp(0.5 * logvar.clamp(-30.0, 20.0)) * noise) * self.latent_scale

    def decode_latents(self, encoders: Mapping[str, nn.Module], latents: Tensor) -> Tensor:
        # (B, 4, h, w) -> (B, 3, p h, p w)
        vae: Any = encoders["vae"]
        return vae.decode((latents / self.latent_scale).to(vae.dtype), return_dict=False)[0]

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        return denoiser(noisy, times, encoder_hidden_states=condition["text"], return_dict=False)[0]
