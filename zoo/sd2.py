"""Stable Diffusion 2: an 866 M parameter UNet on 4-channel latents, OpenCLIP ViT-H text states, the SD VAE.

Rombach et al. 2022 (arXiv:2112.10752) and the configuration of stabilityai/stable-diffusion-2-base.

Shapes: B batch, H W image height and width in px, L = 77 text tokens, D text width (1024).
    images (B, 3, H, W) -> moments (B, 8, H/8, W/8) -> latents (B, 4, H/8, W/8), e.g. (B, 4, 64, 64) at 512 px
    tokens (B, 77) -> text (B, 77, 1024)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.objectives import DiscreteDiffusion, ObjectiveConfig
from zoo.spec import Column, ImageSize

LATENT_SCALE = 0.18215  # 1 / standard deviation of SD's latents; Rombach et al. 2022, appendix G, and the SD2 config
PIXELS_PER_LATENT = 8
NUM_TOKENS = 77
VOCABULARY = 49408  # of OpenCLIP's byte-pair encoder


@dataclass(frozen=True)
class Architecture:
    """Constructor arguments of the three networks."""

    unet: dict[str, Any]
    vae: dict[str, Any]
    text: dict[str, Any]


FULL = Architecture(
    unet=dict(
        block_out_channels=(320, 640, 1280, 1280),
        attention_head_dim=(5, 10, 20, 20),  # diffusers' name for the number of heads; every head is 64 wide
        cross_attention_dim=1024,
        norm_num_groups=32,
    ),
    vae=dict(block_out_channels=(128, 256, 512, 512), norm_num_groups=32),
    # 23 of ViT-H-14's 24 blocks, then its final layer norm: "penultimate", as SD2 uses it.
    text=dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=23, num_attention_heads=16),
)
# The same code and block types. 1.98 M parameters with both encoders, of which the token table is 0.79 M.
TINY = Architecture(
    unet=dict(
        block_out_channels=(32, 32, 32, 32),
        attention_head_dim=(2, 2, 2, 2),
        cross_attention_dim=16,
        norm_num_groups=8,
    ),
    vae=dict(block_out_channels=(8, 16, 16, 16), norm_num_groups=8),
    text=dict(hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2),
)
PRESETS = {"full": FULL, "tiny": TINY}
VARIANTS = ("stock",)


def build(preset: str, variant: str) -> SD2:
    """Return the family in a preset's size. Raises ValueError: an unknown preset or variant."""
    if preset not in PRESETS:
        raise ValueError(f"model.preset: unknown preset '{preset}'. Known: {', '.join(PRESETS)}.")
    if variant not in VARIANTS:
        raise ValueError(f"model.variant: sd2 has no variant '{variant}'. Known: {', '.join(VARIANTS)}.")
    return SD2(PRESETS[preset], variant)


class SD2:
    """Implements `zoo.spec.Family`."""

    name = "sd2"
    predictions = ("epsilon", "v")

    def __init__(self, architecture: Architecture, variant: str):
        self.architecture = architecture
        self.variant = variant

    def size_problem(self, size: ImageSize) -> str | None:
        if all(side > 0 and side % PIXELS_PER_LATENT == 0 for side in size):
            return None
        width, height = size
        return f"{width} x {height} px does not fit sd2. Both sides have to be multiples of {PIXELS_PER_LATENT}."

    def columns(self, stage: str, size: ImageSize) -> dict[str, Column]:
        channels, height, width = self.latent_shape(size)
        pictures = {
            "images": {"images": Column((3, size[1], size[0]), torch.uint8, below=256)},
            "moments": {"moments": Column((2 * channels, height, width), torch.float16)},
        }
        if stage not in pictures:
            raise ValueError(f"data.stage: sd2 has no stage '{stage}'. Known: {', '.join(pictures)}.")
        return {**pictures[stage], "tokens": Column((NUM_TOKENS,), torch.int64, below=VOCABULARY)}

    def latent_shape(self, size: ImageSize) -> tuple[int, ...]:
        width, height = size
        return (4, height // PIXELS_PER_LATENT, width // PIXELS_PER_LATENT)

    def build_denoiser(self) -> nn.Module:
        from diffusers import UNet2DConditionModel

        return UNet2DConditionModel(
            in_channels=4, out_channels=4, layers_per_block=2, use_linear_projection=True, **self.architecture.unet
        )

    def build_encoders(self) -> dict[str, nn.Module]:
        from diffusers import AutoencoderKL
        from transformers import CLIPTextConfig, CLIPTextModel

        depth = len(self.architecture.vae["block_out_channels"])
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * depth,
            up_block_types=("UpDecoderBlock2D",) * depth,
            layers_per_block=2,
            latent_channels=4,
            scaling_factor=LATENT_SCALE,
            **self.architecture.vae,
        )
        config = CLIPTextConfig(
            vocab_size=VOCABULARY, max_position_embeddings=NUM_TOKENS, hidden_act="gelu", **self.architecture.text
        )
        return {"vae": vae, "text": CLIPTextModel(config)}

    def build_objective(self, config: ObjectiveConfig) -> DiscreteDiffusion:
        prediction = config.prediction or self.predictions[0]
        if prediction not in self.predictions:
            raise ValueError(
                f"objective.prediction: sd2 cannot be trained on '{prediction}'. Possible: {', '.join(self.predictions)}."
            )
        return DiscreteDiffusion(config, prediction)

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        import open_clip

        return {"tokens": open_clip.tokenize(list(captions), context_length=NUM_TOKENS)}

    def encode_images(self, encoders: Mapping[str, nn.Module], images: Tensor) -> Tensor:
        # (B, 3, H, W) -> (B, 8, H/8, W/8) mean | logvar
        return encoders["vae"].encode(images).latent_dist.parameters

    def sample_latents(self, moments: Tensor, noise: Tensor) -> Tensor:
        # (B, 8, h, w) -> (B, 4, h, w). The clamp is that of the VAE's own posterior.
        mean, logvar = moments.chunk(2, dim=1)
        return (mean + torch.exp(0.5 * logvar.clamp(-30.0, 20.0)) * noise) * LATENT_SCALE

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # (B, 77) -> (B, 77, D)
        return {"text": encoders["text"](input_ids=batch["tokens"].long()).last_hidden_state}

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        return denoiser(noisy, times, encoder_hidden_states=condition["text"], return_dict=False)[0]
