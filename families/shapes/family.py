"""The miniature's family, `shapes`: Stable Diffusion 2, FLUX.1 or Wan 2.1 made small, for the scenes of families/shapes/.

The same classes as theirs, with trained encoders, in sizes that two CPU cores train in minutes. Each variant has an
autoencoder and the one CLIP text encoder, whose weights are in the repository (families/shapes_weights):

    variant   denoiser, of diffusers     trained as               conditioned on
    stock     UNet2DConditionModel       v, in 1000 steps         the text encoder's states
    flow      FluxTransformer2DModel     a rectified flow         the states, and the end token's as the pooled state
    moving    WanTransformer3DModel      a rectified flow         the states; it makes videos

`tiny` has a smaller denoiser, for tests.

Shapes: B batch, H W image height and width in px, L = 16 text tokens, D = 64 text width.
    images (B, 3, H, W) -> moments (B, 8, H/4, W/4) -> latents (B, 4, H/4, W/4), e.g. (B, 4, 8, 8) at 32 px
    tokens (B, 16) -> text (B, 16, 64), pooled (B, 64)
    flow: latents (B, 4, 8, 8) -> packed (B, 16, 16), see families/packing.py
    moving, with F = 9 frames: videos (B, 3, F, H, W) -> moments (B, 8, f, H/4, W/4) -> latents (B, 4, f, H/4, W/4),
    f = 1 + (F - 1) / 4, e.g. (B, 4, 3, 8, 8) at 32 px
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from families import packing, pipeline_files
from families.lora import ATTENTION, JOINT_ATTENTION
from families.shapes import networks, scenes
from families.shapes.networks import NUM_TOKENS, PIXELS_PER_LATENT, TEXT_WIDTH, VOCABULARY
from families.spec import Column, Family, select_preset
from families.video_family import VideoFamily
from weights import ldm_names

LATENT_SCALE = 1.0242  # 1 / standard deviation of the shipped VAE's latents (vae/quality.json)
# Of the latents of the shipped video VAE (video_vae/config.json)
MOVING_LATENT_MEANS = (-0.037969, 0.17183, 0.19201, 0.25409)
MOVING_LATENT_STDS = (0.68537, 0.90229, 2.898, 3.233)
MOVING_SHIFT = 3.0  # as Wan has it for 480 lines: where things are is settled in the noise
NUM_AXES = 3  # time, height, width

UNETS: dict[str, dict[str, Any]] = {
    "full": dict(block_out_channels=(64, 96), attention_head_dim=(4, 6), layers_per_block=1),
    "tiny": dict(block_out_channels=(32, 48), attention_head_dim=(2, 3), layers_per_block=1),
}
"""Preset -> the UNet's constructor arguments; diffusers calls the number of heads attention_head_dim. full: 2.77 M
parameters, 0.19 s of one core per step of 32 images; tiny: 0.72 M, 0.07 s."""
FLOW_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "full": dict(
        num_layers=2, num_single_layers=4, num_attention_heads=3, attention_head_dim=32, axes_dims_rope=(4, 14, 14)
    ),
    "tiny": dict(
        num_layers=1, num_single_layers=1, num_attention_heads=2, attention_head_dim=16, axes_dims_rope=(4, 6, 6)
    ),
}
"""Preset -> the constructor arguments of `flow`'s transformer. full: 1.30 M parameters."""
MOVING_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "full": dict(num_layers=4, num_attention_heads=4, attention_head_dim=32, ffn_dim=384, freq_dim=64),
    "tiny": dict(num_layers=1, num_attention_heads=2, attention_head_dim=12, ffn_dim=48, freq_dim=32),
}
"""Preset -> the constructor arguments of `moving`'s transformer. full: 1.09 M parameters."""
OBJECTIVES = {
    "stock": dict(prediction="v", caption_dropout=0.1, timesteps="uniform"),
    "flow": dict(prediction="flow", caption_dropout=0.1, timesteps="uniform", shift=1.0),
    "moving": dict(prediction="flow", caption_dropout=0.1, timesteps="uniform", shift=MOVING_SHIFT),
}


def build(preset: str, variant: str) -> Shapes:
    """Return the family in a preset's size. Raises ValueError: an unknown preset or variant."""
    sizes = {"stock": UNETS, "flow": FLOW_TRANSFORMERS, "moving": MOVING_TRANSFORMERS}
    size = select_preset("shapes", variant, preset, sizes)
    return VARIANTS[variant](size)


class Shapes(Family):
    """Implements `families.spec.Family`. `sizes`: constructor arguments of the denoiser."""

    name = "shapes"
    pixels_per_latent = PIXELS_PER_LATENT
    latent_scale = LATENT_SCALE
    num_tokens, vocabulary_size, text_width = NUM_TOKENS, VOCABULARY, TEXT_WIDTH
    variant = "stock"
    objective: Mapping[str, Any] = OBJECTIVES["stock"]
    shipped_weights = networks.WEIGHTS
    tokenizer_folders = ()

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

    def network_names(self) -> dict[str, Callable[[nn.Module], ldm_names.NetworkNames]]:
        return {"vae": ldm_names.vae, "text": ldm_names.clip_text, "denoiser": ldm_names.unet}

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        return {"tokens": networks.tokenize(captions)}

    def save_tokenizers(self, folder: Path) -> dict[str, str]:
        words = (NUM_TOKENS, networks.WORD_TOKENS, networks.SPECIAL_TOKENS)
        return {"tokenizer": pipeline_files.save_word_tokenizer(folder / "tokenizer", *words)}

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # (B, 16) -> (B, 16, 64)
        return {"text": encoders["text"](input_ids=batch["tokens"].long()).last_hidden_state}


class ShapesFlow(Shapes):
    """The variant `flow`."""

    variant = "flow"
    predictions = ("flow",)
    objective = OBJECTIVES["flow"]
    side_multiple = 2 * PIXELS_PER_LATENT
    lora_targets = JOINT_ATTENTION
    token_arguments: Mapping[str, int] | None = {"image_rotary_emb": 0}
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

    def network_names(self) -> dict[str, Callable[[nn.Module], ldm_names.NetworkNames]]:
        return super().network_names() | {"denoiser": ldm_names.flux_transformer}

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # (B, 16) -> text (B, 16, 64), pooled (B, 64): the state at the end mark
        states = encoders["text"](input_ids=batch["tokens"].long())
        return {"text": states.last_hidden_state, "pooled": states.pooler_output}

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        return packing.denoise(denoiser, noisy, times, condition)


class ShapesMoving(VideoFamily, Shapes):
    """The variant `moving`: Wan 2.1's text to video made small, for the videos of families/shapes/scenes.py.

    Each latent's position is an input of the network, next to the latent.
    """

    variant = "moving"
    objective: Mapping[str, Any] = OBJECTIVES["moving"]
    num_frames, frames_per_latent, frames_per_sec = scenes.NUM_FRAMES, 4, scenes.FRAMES_PER_SEC
    pixels_per_latent, side_multiple = PIXELS_PER_LATENT, 2 * PIXELS_PER_LATENT
    latent_channels = len(MOVING_LATENT_MEANS)
    latent_means, latent_stds = MOVING_LATENT_MEANS, MOVING_LATENT_STDS
    scheduler_settings: Mapping[str, Any] = dict(shift=MOVING_SHIFT)
    lora_targets = ATTENTION
    token_arguments: Mapping[str, int] | None = {"rotary_emb": 1}

    def build_denoiser(self) -> nn.Module:
        from diffusers.models import WanTransformer3DModel

        channels = self.latent_channels
        return WanTransformer3DModel(
            in_channels=channels + NUM_AXES, out_channels=channels, text_dim=TEXT_WIDTH, **self.sizes
        )

    def build_encoders(self) -> dict[str, nn.Module]:
        return {"vae": networks.build_video_vae(), "text": networks.build_text_encoder()}

    def network_names(self) -> dict[str, Callable[[nn.Module], ldm_names.NetworkNames]]:
        return {
            "vae": ldm_names.network_in_folder("video_vae", "AutoencoderKLWan"),
            "text": ldm_names.clip_text,
            "denoiser": ldm_names.network_in_folder("transformer", "WanTransformer3DModel", "num_attention_heads"),
        }

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        noisy = torch.cat([noisy, positions_like(noisy)], dim=1)
        return denoiser(noisy, timestep=1000.0 * times, encoder_hidden_states=condition["text"], return_dict=False)[0]


def positions_like(latents: Tensor) -> Tensor:  # (B, C, f, h, w) -> (B, 3, f, h, w)
    """Return where each latent lies, from -1 to 1 along time, height and width, as further input channels.

    Wan's rotary embeddings encode only distances, and in noise nothing else shows a token's position: a large network learns
    it from the latents' borders, a small one would take far longer to learn a caption's positions.
    """
    sides = [torch.linspace(-1.0, 1.0, side, device=latents.device, dtype=latents.dtype) for side in latents.shape[2:]]
    return torch.stack(torch.meshgrid(*sides, indexing="ij")).expand(len(latents), -1, -1, -1, -1)


VARIANTS = {"stock": Shapes, "flow": ShapesFlow, "moving": ShapesMoving}
