"""Shared by the families that train a network on the latents of a KL autoencoder, conditioned on states of captions.

Shapes: B batch, C latent channels (4; FLUX: 16), H W image height and width in px, p pixels per latent, L text tokens,
D text width.
    images (B, 3, H, W) -> moments (B, 2C, H/p, W/p) -> latents (B, C, H/p, W/p)
    tokens (B, L) -> text (B, L, D)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cli.limits import ImageSize
from zoo.lora import ATTENTION
from zoo.objectives import Objective, ObjectiveConfig, build
from zoo.sampling import OF_PUBLISHED, Spacing, build_scheduler
from zoo.spec import Column, Pipeline

T = TypeVar("T")


def of_choice(family: str, variant: str, preset: str, sizes: Mapping[str, Mapping[str, T]]) -> T:
    """Return what a family has for a variant and a preset, of `sizes`. Raises ValueError: it has none; lists the others."""
    if variant not in sizes:
        raise ValueError(f"model.variant: {family} has no variant '{variant}'. Known: {', '.join(sizes)}.")
    if preset not in sizes[variant]:
        raise ValueError(f"model.preset: unknown preset '{preset}'. Known: {', '.join(sizes[variant])}.")
    return sizes[variant][preset]


class LatentFamily:
    """The methods of `zoo.spec.Family` that do not depend on the networks' sizes.

    Attributes:
        name, objective: see `zoo.spec.Family`.
        pictures, num_frames, frames_per_sec: see `zoo.spec.Family`.
        image_dtype: type of pictures in a batch; float32: not rounded, see `stages.images.resize_and_crop`.
        pixels_per_latent: p.
        latent_channels: C.
        latent_scale: 1 / standard deviation of the latents.
        latent_shift: their mean, which is subtracted first.
        num_tokens, vocabulary: of the tokenizer: L, and its largest token plus one.
        text_width: of the text encoder's states: D.
    """

    name: str
    objective: Mapping[str, Any]
    pictures = "images"
    num_frames: int | None = None
    frames_per_sec = 1.0
    predictions: tuple[str, ...] = ("epsilon", "v")
    image_dtype = torch.uint8
    pixels_per_latent: int
    side_step: int | None = None
    """Sides of images are multiples of this, px; None: of pixels_per_latent."""
    latent_channels = 4
    latent_scale: float
    latent_shift = 0.0
    embeds_guidance = False
    empty_is_zero = False
    wide_encoders: tuple[str, ...] = ()
    exact_encoders: tuple[str, ...] = ()
    lora_targets: tuple[str, ...] = ATTENTION
    on_hub: str | None = None
    sampling_spacing: Spacing = "linear"
    tokenizers: tuple[str, ...] = ("tokenizer",)
    clip_tokenizer: str | None = "tokenizer"
    pipeline: Pipeline | None = Pipeline(
        "StableDiffusionPipeline",
        {"requires_safety_checker": False},
        ("safety_checker", "feature_extractor", "image_encoder"),
    )
    num_tokens: int
    vocabulary: int
    text_width: int

    def size_problem(self, size: ImageSize) -> str | None:
        step, (width, height) = self.side_step or self.pixels_per_latent, size
        if all(side > 0 and side % step == 0 for side in size):
            return None
        return f"{width} x {height} px does not fit {self.name}. Both sides have to be multiples of {step}."

    def frames_problem(self, num_frames: int) -> str | None:
        return None

    def columns(self, stage: str, size: ImageSize, *, stored_text: bool = False) -> dict[str, Column]:
        channels, *sides = self.latent_shape(size)
        below = 256 if self.image_dtype == torch.uint8 else None
        moments = Column((2 * channels, *sides), torch.float16)
        of_stage = {
            self.pictures: {self.pictures: Column(self.picture_shape(size), self.image_dtype, below=below)},
            "moments": {"moments": moments, **self.beside(size)},
        }
        if stage not in of_stage:
            raise ValueError(f"data.stage: {self.name} has no stage '{stage}'. Known: {', '.join(of_stage)}.")
        text = self.stored_columns() if stored_text else self.text_columns()
        return {**of_stage[stage], **text, **self.further_columns()}

    def picture_shape(self, size: ImageSize) -> tuple[int, ...]:
        """Return the shape of one picture in a batch."""
        width, height = size
        return (3, height, width)

    def beside(self, size: ImageSize) -> dict[str, Column]:
        return {}

    def encode_beside(self, encoders: Mapping[str, nn.Module], pictures: Tensor) -> dict[str, Tensor]:
        return {}

    def text_columns(self) -> dict[str, Column]:
        """Return the columns that `tokenize` makes."""
        return {"tokens": Column((self.num_tokens,), torch.int64, below=self.vocabulary)}

    def stored_columns(self) -> dict[str, Column]:
        """Return what `encode_text` makes, as it is stored."""
        return {"text": Column((self.num_tokens, self.text_width), torch.float16)}

    def text_mask(self, text: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}

    def read_tokenizers(self, folder: Path) -> None:
        """All is in code."""

    def latent_shape(self, size: ImageSize) -> tuple[int, ...]:
        width, height = size
        return (self.latent_channels, height // self.pixels_per_latent, width // self.pixels_per_latent)

    def further(self, size: ImageSize) -> dict[str, Tensor]:
        return {}

    def sampling_shift(self, latent: tuple[int, ...]) -> float:
        return 1.0

    def pipeline_scheduler(self, sampler: str, prediction: str, *, zero_terminal_snr: bool) -> Any:
        scheduler: Any = build_scheduler(sampler, prediction, zero_terminal_snr=zero_terminal_snr)
        scheduler.register_to_config(**OF_PUBLISHED)
        return scheduler

    def pipeline_call(self, size: ImageSize, guidance: float) -> dict[str, Any]:
        return {"guidance_scale": guidance}

    def pipeline_latents(self, noise: Tensor) -> Tensor:
        return noise

    def further_columns(self) -> dict[str, Column]:
        """Return the columns of `further`."""
        return {}

    def build_vae(self, **arguments: Any) -> nn.Module:
        """Build the autoencoder: `block_out_channels`, its width at each level, and further arguments of diffusers' class."""
        from diffusers.models import AutoencoderKL

        depth = len(arguments["block_out_channels"])
        return AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * depth,
            up_block_types=("UpDecoderBlock2D",) * depth,
            layers_per_block=2,
            latent_channels=self.latent_channels,
            scaling_factor=self.latent_scale,
            **arguments,
        )

    def build_objective(self, config: ObjectiveConfig) -> Objective:
        config = config.resolved(self.objective)
        prediction = config.prediction
        if prediction not in self.predictions:
            given = f"objective.prediction: {self.name} cannot be trained on '{prediction}'"
            raise ValueError(f"{given}. Possible: {', '.join(self.predictions)}.")
        return build(config)

    def encode_images(self, encoders: Mapping[str, nn.Module], images: Tensor) -> Tensor:
        # (B, 3, H, W) -> (B, 2C, H/p, W/p) mean | logvar
        vae: Any = encoders["vae"]
        return vae.encode(images.to(vae.dtype)).latent_dist.parameters

    def sample_latents(self, moments: Tensor, noise: Tensor) -> Tensor:
        # (B, 2C, h, w) -> (B, C, h, w). The clamp is that of the VAE's own posterior.
        mean, logvar = moments.chunk(2, dim=1)
        latents = mean + torch.exp(0.5 * logvar.clamp(-30.0, 20.0)) * noise
        return (latents - self.latent_shift if self.latent_shift else latents) * self.latent_scale

    def decode_latents(self, encoders: Mapping[str, nn.Module], latents: Tensor) -> Tensor:
        # (B, C, h, w) -> (B, 3, p h, p w)
        vae: Any = encoders["vae"]
        latents = latents / self.latent_scale
        latents = latents + self.latent_shift if self.latent_shift else latents
        return vae.decode(latents.to(vae.dtype), return_dict=False)[0]

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        return denoiser(noisy, times, encoder_hidden_states=condition["text"], return_dict=False)[0]
