"""Stable Diffusion XL: a 2.57 B parameter UNet on 4-channel latents, two CLIP text encoders, sizes as a condition.

Podell et al. 2023 (arXiv:2307.01952) and the configuration of stabilityai/stable-diffusion-xl-base-1.0. The UNet knows the
source image's size, the crop, and the size now: the model can train on small and cropped images without learning to
draw them (section 2.2).

    variant   trained on   captions dropped, to states of zeros
    stock     epsilon      10 %

Shapes: B batch, H W image height and width in px, L = 77 text tokens, D = D1 + D2 width of both text encoders (768 + 1280),
P width of the whole caption's state (1280).
    images (B, 3, H, W) -> moments (B, 8, H/8, W/8) -> latents (B, 4, H/8, W/8), e.g. (B, 4, 128, 128) at 1024 px
    tokens (B, 77) -> text (B, 77, D), pooled (B, P);  sizes (B, 4): height, width, top, left
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.value_types import ImageSize
from families import pipeline_files
from families.spec import Column, Family, Pipeline, select_preset
from weights import hub_names, ldm_names
from weights.encoder_networks import (
    CLIP_NUM_TOKENS,
    CLIP_VOCABULARY,
    build_clip_text,
    clip_text_config,
    pad_with_end_token,
)

LATENT_SCALE = 0.13025  # vae/config.json of the published model
NUM_SIZES = 6  # that the UNet gets: height, width, top, left; height and width of the image that it makes


@dataclass(frozen=True)
class SDXLSizes:
    """Constructor arguments of the networks that a preset changes."""

    unet: dict[str, Any]
    vae: dict[str, Any]
    texts: tuple[dict[str, Any], dict[str, Any]]
    """CLIP ViT-L's text encoder, OpenCLIP ViT-bigG's."""

    @property
    def pooled_width(self) -> int:
        return self.texts[1]["projection_dim"]


FULL = SDXLSizes(
    unet=dict(
        block_out_channels=(320, 640, 1280),
        attention_head_dim=(5, 10, 20),  # diffusers' name for the number of heads; every head is 64 wide
        transformer_layers_per_block=(1, 2, 10),
        cross_attention_dim=2048,
        addition_time_embed_dim=256,
        norm_num_groups=32,
    ),
    vae=dict(block_out_channels=(128, 256, 512, 512), norm_num_groups=32),
    texts=(
        dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12),
        dict(
            hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20, projection_dim=1280
        ),
    ),
)
# The same code and block types. 1.9 M parameters with its encoders, of which their two token tables are 1.2 M.
TINY = SDXLSizes(
    unet=dict(
        block_out_channels=(16, 16, 32),
        attention_head_dim=(1, 1, 2),
        transformer_layers_per_block=(1, 1, 2),
        cross_attention_dim=24,
        addition_time_embed_dim=8,
        norm_num_groups=8,
    ),
    vae=dict(block_out_channels=(8, 16, 16, 16), norm_num_groups=8),
    texts=(
        dict(hidden_size=8, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2),
        dict(hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, projection_dim=12),
    ),
)
PRESETS = {"full": FULL, "tiny": TINY}
OBJECTIVE = dict(prediction="epsilon", caption_dropout=0.1, timesteps="uniform")


def build(preset: str, variant: str) -> SDXL:
    """Return the family in a preset's size. Raises ValueError: an unknown preset or variant."""
    family = SDXL(select_preset("sdxl", variant, preset, {"stock": PRESETS}))
    family.hub_name = hub_names.SDXL if preset == "full" else None
    return family


class SDXL(Family):
    """Implements `families.spec.Family`."""

    name = "sdxl"
    variant = "stock"
    objective: Mapping[str, Any] = OBJECTIVE
    pixels_per_latent = 8
    latent_scale = LATENT_SCALE
    num_tokens, vocabulary_size = CLIP_NUM_TOKENS, CLIP_VOCABULARY
    has_zero_empty_condition = True  # as it was trained, and as diffusers' pipeline takes an empty caption
    fp32_encoders = ("vae",)  # as in diffusers' train_text_to_image_sdxl.py; its vae/config.json has force_upcast set
    pipeline = Pipeline(
        "StableDiffusionXLPipeline",
        {"force_zeros_for_empty_prompt": True, "add_watermarker": False},
        ("feature_extractor", "image_encoder"),
        is_square=True,
    )

    def __init__(self, architecture: SDXLSizes):
        self.architecture = architecture
        self.text_width = architecture.unet["cross_attention_dim"]

    def stored_columns(self) -> dict[str, Column]:
        return super().stored_columns() | {"pooled": Column((self.architecture.pooled_width,), torch.float16)}

    def passthrough_columns(self) -> dict[str, Column]:
        return {"sizes": Column((4,), torch.int64, below=2**16)}

    def passthrough_values(self, size: ImageSize) -> dict[str, Tensor]:
        """The sizes of an image of this size that was not cropped."""
        width, height = size
        return {"sizes": torch.tensor([[height, width, 0, 0]])}

    def build_denoiser(self) -> nn.Module:
        from diffusers.models import UNet2DConditionModel

        unet = self.architecture.unet
        return UNet2DConditionModel(
            sample_size=128,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=2,
            use_linear_projection=True,
            addition_embed_type="text_time",
            projection_class_embeddings_input_dim=(
                self.architecture.pooled_width + NUM_SIZES * unet["addition_time_embed_dim"]
            ),
            **unet,
        )

    def build_encoders(self) -> dict[str, nn.Module]:
        vae = self.build_vae(sample_size=1024, **self.architecture.vae)
        first = clip_text_config(hidden_act="quick_gelu", **self.architecture.texts[0])
        second = clip_text_config(hidden_act="gelu", **self.architecture.texts[1])
        return {"vae": vae, "text": build_clip_text(first), "text_2": build_clip_text(second, projected=True)}

    def network_names(self) -> dict[str, Callable[[nn.Module], ldm_names.NetworkNames]]:
        return {
            "vae": ldm_names.vae,
            "text": ldm_names.sdxl_clip_text,
            "text_2": ldm_names.sdxl_open_clip_text,
            "denoiser": ldm_names.unet,
        }

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        return {"tokens": pipeline_files.tokenize_clip(captions)}

    def save_tokenizers(self, folder: Path) -> dict[str, str]:
        pads = {"tokenizer": pipeline_files.CLIP_END_TEXT, "tokenizer_2": pipeline_files.CLIP_ZERO_TEXT}
        return {name: pipeline_files.save_clip_tokenizer(folder / name, pad) for name, pad in pads.items()}

    def pipeline_call(self, size: ImageSize, guidance: float) -> dict[str, Any]:
        width, height = size
        return {"guidance_scale": guidance, "width": width, "height": height}

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # (B, 77) -> text (B, 77, D), pooled (B, P). Of both the states before the last block, without the last norm.
        tokens = batch["tokens"].long()
        first = encoders["text"](input_ids=pad_with_end_token(tokens), output_hidden_states=True)
        second = encoders["text_2"](input_ids=tokens, output_hidden_states=True)
        states = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        return {"text": states, "pooled": second.text_embeds}

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        height, width = (side * self.pixels_per_latent for side in noisy.shape[-2:])
        sizes = condition["sizes"].to(torch.float32)
        target_size = torch.empty_like(sizes[:, :2])  # filled on the device: nothing is copied there
        target_size[:, 0], target_size[:, 1] = height, width
        added_conditions = {"text_embeds": condition["pooled"], "time_ids": torch.cat([sizes, target_size], dim=1)}
        return denoiser(
            noisy, times, encoder_hidden_states=condition["text"], added_cond_kwargs=added_conditions, return_dict=False
        )[0]
