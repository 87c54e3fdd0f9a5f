"""Shapes: Stable Diffusion 2 in miniature, real in every part, for the world of zoo/shapes_world.py.

The same classes as SD2's, trained encoders included, in sizes that two CPU cores train in minutes: diffusers'
UNet2DConditionModel on the latents of an AutoencoderKL, conditioned on the states of a CLIP text encoder. The encoders'
weights lie in the repository (zoo/shapes_weights) and need not be given. `tiny` is the same with a smaller UNet, for tests.

Shapes: B batch, H W image height and width in px, L = 16 text tokens, D = 64 text width.
    images (B, 3, H, W) -> moments (B, 8, H/4, W/4) -> latents (B, 4, H/4, W/4), e.g. (B, 4, 8, 8) at 32 px
    tokens (B, 16) -> text (B, 16, 64)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import zoo.ldm_names as ldm_names
import zoo.shapes_networks as networks
from zoo.objectives import DiscreteDiffusion, ObjectiveConfig
from zoo.shapes_networks import NUM_TOKENS, PIXELS_PER_LATENT, TEXT_WIDTH, VOCABULARY
from zoo.spec import Column, ImageSize

LATENT_SCALE = 1.0242  # 1 / standard deviation of the shipped VAE's latents (vae/quality.json)

UNETS: dict[str, dict[str, Any]] = {
    "full": dict(block_out_channels=(64, 96), attention_head_dim=(4, 6), layers_per_block=1),
    "tiny": dict(block_out_channels=(32, 48), attention_head_dim=(2, 3), layers_per_block=1),
}
"""Preset -> the UNet's constructor arguments; diffusers calls the number of heads attention_head_dim. 2.77 M parameters,
0.19 s of one core a step of 32 pictures; and 0.72 M, 0.07 s."""
OBJECTIVE = dict(prediction="v", caption_dropout=0.1)


def build(preset: str, variant: str) -> Shapes:
    """Return the family in a preset's size. Raises ValueError: an unknown preset or variant."""
    if variant != "stock":
        raise ValueError(f"model.variant: shapes has no variant '{variant}'. Known: stock.")
    if preset not in UNETS:
        raise ValueError(f"model.preset: unknown preset '{preset}'. Known: {', '.join(UNETS)}.")
    return Shapes(UNETS[preset])


class Shapes:
    """Implements `zoo.spec.Family`."""

    name = "shapes"
    variant = "stock"
    predictions = ("epsilon", "v")
    objective: Mapping[str, Any] = OBJECTIVE
    shipped = networks.WEIGHTS

    def __init__(self, unet: Mapping[str, Any]):
        self.unet = unet

    def size_problem(self, size: ImageSize) -> str | None:
        if all(side > 0 and side % PIXELS_PER_LATENT == 0 for side in size):
            return None
        width, height = size
        return f"{width} x {height} px does not fit shapes. Both sides have to be multiples of {PIXELS_PER_LATENT}."

    def columns(self, stage: str, size: ImageSize) -> dict[str, Column]:
        channels, height, width = self.latent_shape(size)
        pictures = {
            "images": {"images": Column((3, size[1], size[0]), torch.uint8, below=256)},
            "moments": {"moments": Column((2 * channels, height, width), torch.float16)},
        }
        if stage not in pictures:
            raise ValueError(f"data.stage: shapes has no stage '{stage}'. Known: {', '.join(pictures)}.")
        return {**pictures[stage], "tokens": Column((NUM_TOKENS,), torch.int64, below=VOCABULARY)}

    def latent_shape(self, size: ImageSize) -> tuple[int, ...]:
        width, height = size
        return (4, height // PIXELS_PER_LATENT, width // PIXELS_PER_LATENT)

    def build_denoiser(self) -> nn.Module:
        from diffusers import UNet2DConditionModel

        return UNet2DConditionModel(
            sample_size=networks.SIDE_PX // PIXELS_PER_LATENT,
            in_channels=4,
            out_channels=4,
            down_block_types=("CrossAttnDownBlock2D",) * 2,
            up_block_types=("CrossAttnUpBlock2D",) * 2,
            cross_attention_dim=TEXT_WIDTH,
            norm_num_groups=8,
            use_linear_projection=True,
            **self.unet,
        )

    def build_encoders(self) -> dict[str, nn.Module]:
        return {"vae": networks.build_vae(LATENT_SCALE), "text": networks.build_text_encoder()}

    def published(self) -> dict[str, Callable[[nn.Module], ldm_names.Network]]:
        return {"vae": ldm_names.vae, "text": ldm_names.clip_text, "denoiser": ldm_names.unet}

    def build_objective(self, config: ObjectiveConfig) -> DiscreteDiffusion:
        prediction = config.filled(self.objective).prediction
        if prediction not in self.predictions:
            possible = ", ".join(self.predictions)
            raise ValueError(f"objective.prediction: shapes cannot be trained on '{prediction}'. Possible: {possible}.")
        return DiscreteDiffusion(config, prediction)

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        return {"tokens": networks.tokenize(captions)}

    def encode_images(self, encoders: Mapping[str, nn.Module], images: Tensor) -> Tensor:
        # (B, 3, H, W) -> (B, 8, H/4, W/4) mean | logvar
        return encoders["vae"].encode(images).latent_dist.parameters

    def sample_latents(self, moments: Tensor, noise: Tensor) -> Tensor:
        # (B, 8, h, w) -> (B, 4, h, w). The clamp is that of the VAE's own posterior.
        mean, logvar = moments.chunk(2, dim=1)
        return (mean + torch.exp(0.5 * logvar.clamp(-30.0, 20.0)) * noise) * LATENT_SCALE

    def decode_latents(self, encoders: Mapping[str, nn.Module], latents: Tensor) -> Tensor:
        # (B, 4, h, w) -> (B, 3, 4h, 4w)
        vae = encoders["vae"]
        return vae.decode((latents / LATENT_SCALE).to(vae.dtype), return_dict=False)[0]

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # (B, 16) -> (B, 16, 64)
        return {"text": encoders["text"](input_ids=batch["tokens"].long()).last_hidden_state}

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        return denoiser(noisy, times, encoder_hidden_states=condition["text"], return_dict=False)[0]
