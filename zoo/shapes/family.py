"""The miniature's family, `shapes`: Stable Diffusion 2 made small, for the scenes of zoo/shapes/scenes.py.

The same classes as SD2's, with trained encoders, in sizes that two CPU cores train in minutes: diffusers'
UNet2DConditionModel on the latents of an AutoencoderKL, conditioned on the states of a CLIP text encoder. The encoders'
weights are in the repository (zoo/shapes_weights). `tiny` has a smaller UNet, for tests.

Shapes: B batch, H W image height and width in px, L = 16 text tokens, D = 64 text width.
    images (B, 3, H, W) -> moments (B, 8, H/4, W/4) -> latents (B, 4, H/4, W/4), e.g. (B, 4, 8, 8) at 32 px
    tokens (B, 16) -> text (B, 16, 64)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from weights import ldm_names
from zoo import tokenizer_files
from zoo.latent_family import LatentFamily
from zoo.shapes import networks
from zoo.shapes.networks import NUM_TOKENS, PIXELS_PER_LATENT, TEXT_WIDTH, VOCABULARY

LATENT_SCALE = 1.0242  # 1 / standard deviation of the shipped VAE's latents (vae/quality.json)

UNETS: dict[str, dict[str, Any]] = {
    "full": dict(block_out_channels=(64, 96), attention_head_dim=(4, 6), layers_per_block=1),
    "tiny": dict(block_out_channels=(32, 48), attention_head_dim=(2, 3), layers_per_block=1),
}
"""Preset -> the UNet's constructor arguments; diffusers calls the number of heads attention_head_dim. full: 2.77 M
parameters, 0.19 s of one core per step of 32 images; tiny: 0.72 M, 0.07 s."""
OBJECTIVE = dict(prediction="v", caption_dropout=0.1, timesteps="uniform")


def build(preset: str, variant: str) -> Shapes:
    """Return the family in a preset's size. Raises ValueError: an unknown preset or variant."""
    if variant != "stock":
        raise ValueError(f"model.variant: shapes has no variant '{variant}'. Known: stock.")
    if preset not in UNETS:
        raise ValueError(f"model.preset: unknown preset '{preset}'. Known: {', '.join(UNETS)}.")
    return Shapes(UNETS[preset])


class Shapes(LatentFamily):
    """Implements `zoo.spec.Family`."""

    name = "shapes"
    pixels_per_latent = PIXELS_PER_LATENT
    latent_scale = LATENT_SCALE
    num_tokens, vocabulary, text_width = NUM_TOKENS, VOCABULARY, TEXT_WIDTH
    variant = "stock"
    objective: Mapping[str, Any] = OBJECTIVE
    shipped = networks.WEIGHTS
    tokenizers = ()

    def __init__(self, unet: Mapping[str, Any]):
        self.unet = unet

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
            **self.unet,
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
