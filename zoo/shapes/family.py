"""The miniature's family, `shapes`: Stable Diffusion 2, FLUX.1 or Wan 2.1 made small, for the scenes of zoo/shapes/.

The same classes as theirs, with trained encoders, in sizes that two CPU cores train in minutes. Each variant has an
autoencoder and the one CLIP text encoder, whose weights are in the repository (zoo/shapes_weights):

    variant   denoiser, of diffusers     trained as               conditioned on
    stock     UNet2DConditionModel       v, in 1000 steps         the text encoder's states
    flow      FluxTransformer2DModel     a rectified flow         the states, and that at the end mark for the whole caption
    moving    WanTransformer3DModel      a rectified flow         the states; it makes films, see zoo/shapes/moving.py

`tiny` has a smaller denoiser, for tests.

Shapes: B batch, H W image height and width in px, L = 16 text tokens, D = 64 text width.
    images (B, 3, H, W) -> moments (B, 8, H/4, W/4) -> latents (B, 4, H/4, W/4), e.g. (B, 4, 8, 8) at 32 px
    tokens (B, 16) -> text (B, 16, 64), pooled (B, 64)
    flow: latents (B, 4, 8, 8) -> packed (B, 16, 16), see zoo/packing.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weights import ldm_names
from zoo import packing, tokenizer_files
from zoo.lora import JOINT_ATTENTION
from zoo.shapes import moving, networks
from zoo.shapes.networks import NUM_TOKENS, PIXELS_PER_LATENT, TEXT_WIDTH, VOCABULARY
from zoo.spec import Column, Family, of_choice

LATENT_SCALE = 1.0242  # 1 / standard deviation of the shipped VAE's latents (vae/quality.json)

UNETS: dict[str, dict[str, Any]] = {
    "full": dict(block_out_channels=(64, 96), attention_head_dim=(4, 6), layers_per_block=1),
    "tiny": dict(block_out_channels=(32, 48), attention_head_dim=(2, 3), layers_per_block=1),
}
"""Preset -> the UNet's constructor arguments; diffusers calls the number of heads attention_head_dim. full: 2.77 M
parameters, 0.19 s of one core per step of 32 images; tiny: 0.72 M, 0.07 s."""
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "full": dict(
        num_layers=2, num_single_layers=4, num_attention_heads=3, attention_head_dim=32, axes_dims_rope=(4, 14, 14)
    ),
    "tiny": dict(
        num_layers=1, num_single_layers=1, num_attention_heads=2, attention_head_dim=16, axes_dims_rope=(4, 6, 6)
    ),
}
"""Preset -> the transformer's constructor arguments. full: 1.30 M parameters."""
OBJECTIVES = {
    "stock": dict(prediction="v", caption_dropout=0.1, timesteps="uniform"),
    "flow": dict(prediction="flow", caption_dropout=0.1, timesteps="uniform", shift=1.0),
}


def build(preset: str, variant: str) -> Shapes:
    """Return the family in a preset's size. Raises ValueError: an unknown preset or variant."""
    sizes = {"stock": UNETS, "flow": TRANSFORMERS, "moving": moving.TRANSFORMERS}
    size = of_choice("shapes", variant, preset, sizes)
    return VARIANTS[variant](size)


class Shapes(Family):
    """Implements `zoo.spec.Family`. `sizes`: constructor arguments of the denoiser."""

    name = "shapes"
    pixels_per_latent = PIXELS_PER_LATENT
    latent_scale = LATENT_SCALE
    num_tokens, vocabulary, text_width = NUM_TOKENS, VOCABULARY, TEXT_WIDTH
    variant = "stock"
    objective: Mapping[str, Any] = OBJECTIVES["stock"]
    shipped = networks.WEIGHTS
    tokenizers = ()

    def __init__(self, sizes: Mapping[str, Any]):
        self.sizes = sizes

    def build_denoiser(self) -> nn.Module:
        from diffusers.models import UNet2DConditionModel

        return UNet2DConditionModel(
            sample_size=networks.SIDE_PX // PIXELS_PER_LATENT,
            in_channels=4,
            out_channels=4,
            down_block_types=("CrossAttnDownBlock2D",) * 2,
            up_block_types=("CrossAttnUpBlock2D",) * 2,
            cross_attention_dim=TEXT_WIDTH,
            norm_num_groups=8,
            use_linear_projection=True,
            **self.sizes,
        )

    def build_encoders(self) -> dict[str, nn.Module]:
        return {"vae": networks.build_vae(LATENT_SCALE), "text": networks.build_text_encoder()}

    def published(self) -> dict[str, Callable[[nn.Module], ldm_names.Network]]:
        return {"vae": ldm_names.vae, "text": ldm_names.clip_text, "denoiser": ldm_names.unet}

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        return {"tokens": networks.tokenize(captions)}

    def save_tokenizers(self, folder: Path) -> dict[str, str]:
        words = (NUM_TOKENS, networks.TOKEN_OF, networks.SPECIAL)
        return {"tokenizer": tokenizer_files.save_words(folder / "tokenizer", *words)}

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # (B, 16) -> (B, 16, 64)
        return {"text": encoders["text"](input_ids=batch["tokens"].long()).last_hidden_state}


class ShapesFlow(Shapes):
    """The variant `flow`."""

    variant = "flow"
    predictions = ("flow",)
    objective = OBJECTIVES["flow"]
    side_step = 2 * PIXELS_PER_LATENT
    lora_targets = JOINT_ATTENTION
    pipeline = None  # FluxPipeline needs a T5

    def stored_columns(self) -> dict[str, Column]:
        return super().stored_columns() | {"pooled": Column((TEXT_WIDTH,), torch.float16)}

    def build_denoiser(self) -> nn.Module:
        from diffusers.models import FluxTransformer2DModel

        return FluxTransformer2DModel(
            in_channels=4 * self.latent_channels,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=TEXT_WIDTH,
            **self.sizes,
        )

    def published(self) -> dict[str, Callable[[nn.Module], ldm_names.Network]]:
        return super().published() | {"denoiser": ldm_names.flux_transformer}

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # (B, 16) -> text (B, 16, 64), pooled (B, 64): the state at the end mark
        states = encoders["text"](input_ids=batch["tokens"].long())
        return {"text": states.last_hidden_state, "pooled": states.pooler_output}

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        return packing.denoise(denoiser, noisy, times, condition)


class ShapesMoving(moving.Moving, Shapes):
    """The variant `moving`."""

    variant = "moving"


VARIANTS = {"stock": Shapes, "flow": ShapesFlow, "moving": ShapesMoving}
