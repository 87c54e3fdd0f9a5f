"""The miniature's variant `moving`: Wan 2.1's text to video made small, for the films of zoo/shapes/motion.py.

Its video VAE is diffusers' class with shipped weights, its text encoder is that of the still variants, and its network is
diffusers' WanTransformer3DModel, trained as a rectified flow. Beside the latent it is told where each place of it lies.

Shapes: B batch, F = 9 frames, H W height and width in px, L = 16 text tokens, D = 64 text width.
    videos (B, 3, F, H, W) -> moments (B, 8, f, H/4, W/4) -> latents (B, 4, f, H/4, W/4), f = 1 + (F - 1) / 4,
    e.g. (B, 4, 3, 8, 8) at 32 px
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weights import ldm_names
from zoo.lora import ATTENTION
from zoo.shapes import motion, networks
from zoo.shapes.networks import PIXELS_PER_LATENT, TEXT_WIDTH
from zoo.video_family import VideoFamily

# of the shipped video VAE's latents: video_vae/config.json
LATENT_MEANS = (-0.037969, 0.17183, 0.19201, 0.25409)
LATENT_STDS = (0.68537, 0.90229, 2.898, 3.233)

TRANSFORMERS: dict[str, dict[str, Any]] = {
    "full": dict(num_layers=4, num_attention_heads=4, attention_head_dim=32, ffn_dim=384, freq_dim=64),
    "tiny": dict(num_layers=1, num_attention_heads=2, attention_head_dim=12, ffn_dim=48, freq_dim=32),
}
"""Preset -> the transformer's constructor arguments. full: 1.09 M parameters."""


NUM_AXES = 3
SHIFT = 3.0  # as Wan has it for 480 lines: where things are is settled in the noise


def positions_like(latents: Tensor) -> Tensor:  # (B, C, f, h, w) -> (B, 3, f, h, w)
    """Return where each latent lies, from -1 to 1 along time, height and width, as further input channels.

    Wan's rotary embeddings tell distances alone, and in noise nothing else tells a token where it is: a large network learns
    it from the latents' borders, a small one would take far longer to learn a place by its name.
    """
    sides = [torch.linspace(-1.0, 1.0, side, device=latents.device, dtype=latents.dtype) for side in latents.shape[2:]]
    return torch.stack(torch.meshgrid(*sides, indexing="ij")).expand(len(latents), -1, -1, -1, -1)


class Moving(VideoFamily):
    """What `zoo.spec.Family` asks of films, beside what all variants of the miniature share."""

    variant = "moving"
    objective: Mapping[str, Any] = dict(prediction="flow", caption_dropout=0.1, timesteps="uniform", shift=SHIFT)
    num_frames, frames_per_latent, frames_per_sec = motion.NUM_FRAMES, 4, motion.FRAMES_PER_SEC
    pixels_per_latent, side_step = PIXELS_PER_LATENT, 2 * PIXELS_PER_LATENT
    latent_channels = len(LATENT_MEANS)
    latent_means, latent_stds = LATENT_MEANS, LATENT_STDS
    shipped = networks.WEIGHTS
    lora_targets = ATTENTION
    sizes: Mapping[str, Any]

    def sampling_shift(self, latent: tuple[int, ...]) -> float:
        return SHIFT

    def build_denoiser(self) -> nn.Module:
        from diffusers.models import WanTransformer3DModel

        channels = self.latent_channels
        return WanTransformer3DModel(
            in_channels=channels + NUM_AXES, out_channels=channels, text_dim=TEXT_WIDTH, **self.sizes
        )

    def build_encoders(self) -> dict[str, nn.Module]:
        return {"vae": networks.build_video_vae(), "text": networks.build_text_encoder()}

    def published(self) -> dict[str, Callable[[nn.Module], ldm_names.Network]]:
        return {
            "vae": ldm_names.in_folder("video_vae", "AutoencoderKLWan"),
            "text": ldm_names.clip_text,
            "denoiser": ldm_names.in_folder("transformer", "WanTransformer3DModel", "num_attention_heads"),
        }

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        noisy = torch.cat([noisy, positions_like(noisy)], dim=1)
        return denoiser(noisy, timestep=1000.0 * times, encoder_hidden_states=condition["text"], return_dict=False)[0]
