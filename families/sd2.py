"""Stable Diffusion 2: an 866 M parameter UNet on 4-channel latents, OpenCLIP ViT-H text states, the SD VAE.

Rombach et al. 2022 (arXiv:2112.10752) and the configuration of stabilityai/stable-diffusion-2-base.

    variant   the network                                                           trained on   captions dropped
    stock     diffusers' UNet2DConditionModel as it is: published weights fit it    epsilon      10 %
    mlperf    MLPerf Training's: 16 groups in the residual blocks' norms, the last  v            none
              layer of every block starts at zero
    sd15      Stable Diffusion 1.5: CLIP ViT-L text states, convolutions around     epsilon      10 %
              the transformers, 8 heads at every width

Shapes: B batch, H W image height and width in px, L = 77 text tokens, D text width (1024; sd15: 768).
    images (B, 3, H, W) -> moments (B, 8, H/8, W/8) -> latents (B, 4, H/8, W/8), e.g. (B, 4, 64, 64) at 512 px
    tokens (B, 77) -> text (B, 77, D)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from families import pipeline_files
from families.spec import Family, select_preset
from weights import hub_names, ldm_names
from weights.encoder_networks import (
    CLIP_NUM_TOKENS,
    CLIP_VOCABULARY,
    build_clip_text,
    clip_text_config,
    pad_with_end_token,
)

LATENT_SCALE = 0.18215  # 1 / standard deviation of SD's latents; Rombach et al. 2022, appendix G, and the SD2 config
PIXELS_PER_LATENT = 8


@dataclass(frozen=True)
class SD2Sizes:
    """Constructor arguments of the three networks, and settings that are no constructor arguments."""

    unet: dict[str, Any]
    vae: dict[str, Any]
    text: dict[str, Any]
    mixed_norms: bool = False
    """The transformers' input norms have twice the groups of the residual blocks' (families/mixed_norms.py)."""
    zero_init: bool = False
    """Initialise the last layer of every residual block, every transformer and the whole network with zeros."""
    pads_with_end: bool = False
    """The text encoder was trained on captions padded with the end token instead of 0."""

    def replace(
        self, *, unet: dict[str, Any] | None = None, text: dict[str, Any] | None = None, **settings: Any
    ) -> SD2Sizes:
        """Return a copy with some arguments changed."""
        return dataclasses.replace(
            self, unet={**self.unet, **(unet or {})}, text={**self.text, **(text or {})}, **settings
        )


FULL = SD2Sizes(
    unet=dict(
        block_out_channels=(320, 640, 1280, 1280),
        attention_head_dim=(5, 10, 20, 20),  # diffusers' name for the number of heads; every head is 64 wide
        cross_attention_dim=1024,
        norm_num_groups=32,
        use_linear_projection=True,
    ),
    vae=dict(block_out_channels=(128, 256, 512, 512), norm_num_groups=32),
    # 23 of ViT-H-14's 24 blocks, then its final layer norm: "penultimate", as SD2 uses it.
    text=dict(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=23, num_attention_heads=16, hidden_act="gelu"
    ),
)
# The same code and block types. 1.98 M parameters with both encoders, of which the token table is 0.79 M.
TINY = SD2Sizes(
    unet=dict(
        block_out_channels=(32, 32, 32, 32),
        attention_head_dim=(2, 2, 2, 2),
        cross_attention_dim=16,
        norm_num_groups=8,
        use_linear_projection=True,
    ),
    vae=dict(block_out_channels=(8, 16, 16, 16), norm_num_groups=8),
    text=dict(hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, hidden_act="gelu"),
)
# mlcommons/training, retired_benchmarks/stable_diffusion: openaimodel.py, attention.py, util.py of its ldm/modules
MLPERF = FULL.replace(unet=dict(norm_num_groups=16), mixed_norms=True, zero_init=True)
MLPERF_TINY = TINY.replace(unet=dict(norm_num_groups=4), mixed_norms=True, zero_init=True)
# All blocks of CLIP ViT-L-14's text tower, and CompVis/stable-diffusion's v1-inference.yaml
SD15 = FULL.replace(
    unet=dict(use_linear_projection=False, attention_head_dim=8, cross_attention_dim=768),
    text=dict(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, hidden_act="quick_gelu"
    ),
    pads_with_end=True,
)
SD15_TINY = TINY.replace(
    unet=dict(use_linear_projection=False, cross_attention_dim=12),
    text=dict(hidden_size=12, intermediate_size=48, hidden_act="quick_gelu"),
    pads_with_end=True,
)
ARCHITECTURES = {
    "stock": {"full": FULL, "tiny": TINY},
    "mlperf": {"full": MLPERF, "tiny": MLPERF_TINY},
    "sd15": {"full": SD15, "tiny": SD15_TINY},
}
ON_HUB = {"stock": hub_names.SD2, "mlperf": hub_names.SD2, "sd15": hub_names.SD15}
"""SD2's four releases, and the benchmark, share their encoders."""
OBJECTIVES = {
    "stock": dict(prediction="epsilon", caption_dropout=0.1, timesteps="uniform"),
    "mlperf": dict(prediction="v", caption_dropout=0.0, timesteps="uniform"),
    "sd15": dict(prediction="epsilon", caption_dropout=0.1, timesteps="uniform"),
}


def build(preset: str, variant: str) -> SD2:
    """Return the family in a preset's size. Raises ValueError: an unknown preset or variant."""
    family = SD2(select_preset("sd2", variant, preset, ARCHITECTURES), variant, OBJECTIVES[variant])
    family.hub_name = ON_HUB[variant] if preset == "full" else None
    return family


class SD2(Family):
    """Implements `families.spec.Family`."""

    name = "sd2"
    pixels_per_latent = PIXELS_PER_LATENT
    latent_scale = LATENT_SCALE
    num_tokens, vocabulary_size = CLIP_NUM_TOKENS, CLIP_VOCABULARY

    def __init__(self, architecture: SD2Sizes, variant: str, objective: Mapping[str, Any]):
        self.architecture = architecture
        self.text_width = architecture.unet["cross_attention_dim"]
        self.variant = variant
        self.objective = objective
        if variant == "mlperf":
            self.image_dtype = torch.float32  # the benchmark does not round images after resizing

    def build_denoiser(self) -> nn.Module:
        from diffusers.models import Transformer2DModel, UNet2DConditionModel
        from diffusers.models.resnet import ResnetBlock2D

        if self.architecture.mixed_norms:
            from families.mixed_norms import UNet2DConditionMixedNorms as UNet2DConditionModel
        unet = UNet2DConditionModel(in_channels=4, out_channels=4, layers_per_block=2, **self.architecture.unet)
        ends: list[nn.Module] = [unet.conv_out]
        for module in unet.modules():
            if isinstance(module, ResnetBlock2D):
                ends.append(module.conv2)
            elif isinstance(module, Transformer2DModel):
                ends.append(module.proj_out)
        if self.architecture.zero_init:
            for parameter in (p for module in ends for p in module.parameters()):
                nn.init.zeros_(parameter)
        return unet

    def build_encoders(self) -> dict[str, nn.Module]:
        vae = self.build_vae(**self.architecture.vae)
        return {"vae": vae, "text": build_clip_text(clip_text_config(**self.architecture.text))}

    def network_names(self) -> dict[str, Callable[[nn.Module], ldm_names.NetworkNames]]:
        text = ldm_names.clip_text if self.variant == "sd15" else ldm_names.open_clip_text
        denoiser = ldm_names.unet_by_class if self.architecture.mixed_norms else ldm_names.unet
        return {"vae": ldm_names.vae, "text": text, "denoiser": denoiser}

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        return {"tokens": pipeline_files.tokenize_clip(captions)}

    def save_tokenizers(self, folder: Path) -> dict[str, str]:
        pad_token = pipeline_files.CLIP_END_TEXT if self.architecture.pads_with_end else pipeline_files.CLIP_ZERO_TEXT
        return {"tokenizer": pipeline_files.save_clip_tokenizer(folder / "tokenizer", pad_token)}

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # (B, 77) -> (B, 77, D)
        tokens = batch["tokens"].long()
        tokens = pad_with_end_token(tokens) if self.architecture.pads_with_end else tokens
        return {"text": encoders["text"](input_ids=tokens).last_hidden_state}
