"""Sana: transformers with linear attention on DC-AE's latents of 32 x 32 px, trained as a rectified flow; Gemma 2 reads.

Xie et al. 2024 (arXiv:2410.10629): the configurations of Efficient-Large-Model/Sana_..._diffusers, and diffusers'
SanaPipeline. Captions are read without the long instruction of section 3.3: diffusers' training script has none, its
pipeline has one by default (complex_human_instruction).

    variant   parameters
    1600m     1.6 B
    600m      0.6 B

Shapes: B batch, H W image height and width in px, L = 300 text tokens, D = 2304 width of Gemma's states.
    images (B, 3, H, W) -> moments (B, 32, H/32, W/32) -> latents (B, 32, H/32, W/32), e.g. (B, 32, 32, 32) at 1024 px
    gemma_tokens (B, L) -> text (B, L, D), mask (B, L)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from common.value_types import ImageSize
from families import sana_autoencoder
from families.gemma_family import TINY_GEMMA, GemmaFamily
from families.language_models import build_language_model, language_model_in_folder
from families.lora import ATTENTION
from families.spec import Pipeline, select_preset
from weights import hub_names, ldm_names

FULL: dict[str, Any] = dict(dc_ae=sana_autoencoder.FULL, gemma={})
TINY: dict[str, Any] = dict(dc_ae=sana_autoencoder.TINY, gemma=TINY_GEMMA)
SMALL = dict(num_layers=2, num_attention_heads=4, attention_head_dim=8, num_cross_attention_heads=2)
SMALL |= dict(cross_attention_head_dim=16, cross_attention_dim=32)
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    # transformer/config.json; all else is the class's default, which is that of 1600m
    "1600m": {"full": FULL | {"transformer": {}}, "tiny": TINY | {"transformer": SMALL}},
    "600m": {
        "full": FULL | {"transformer": dict(
            num_layers=28, num_attention_heads=36, num_cross_attention_heads=16, cross_attention_head_dim=72,
            cross_attention_dim=1152,
        )},
        "tiny": TINY | {"transformer": SMALL},
    },
}  # fmt: skip
ON_HUB = {"1600m": hub_names.SANA_1600M, "600m": hub_names.SANA_600M}


def build(preset: str, variant: str) -> Sana:
    """Return the family in a preset's size. Raises ValueError: an unknown preset or variant."""
    if variant == "stock":  # the default of the key
        variant = "1600m"
    family = Sana(select_preset("sana", variant, preset, SIZES), variant)
    family.hub_name = ON_HUB[variant] if preset == "full" else None
    return family


class Sana(GemmaFamily):
    """Implements `families.spec.Family`."""

    name = "sana"
    pixels_per_latent, latent_channels, has_posterior = 32, 32, False
    latent_scale = sana_autoencoder.SCALE
    num_tokens = 300
    pipeline = Pipeline("SanaPipeline", {}, (), is_square=True)
    lora_targets = ATTENTION

    def build_denoiser(self) -> nn.Module:
        from diffusers.models import SanaTransformer2DModel

        return SanaTransformer2DModel(caption_channels=self.text_width, **self.sizes["transformer"])

    def build_encoders(self) -> dict[str, nn.Module]:
        gemma = build_language_model("Gemma2Model", "Gemma2Config", **self.sizes["gemma"])
        return {"vae": sana_autoencoder.build(self.sizes["dc_ae"]), "gemma": gemma}

    def network_names(self) -> dict[str, Callable[[nn.Module], ldm_names.NetworkNames]]:
        names = ldm_names.network_in_folder("transformer", "SanaTransformer2DModel", "num_attention_heads")
        return {"vae": sana_autoencoder.names, "gemma": language_model_in_folder(), "denoiser": names}

    def clean_caption(self, caption: str) -> str:
        return caption.lower().strip()

    def pipeline_call(self, size: ImageSize, guidance: float) -> dict[str, Any]:
        call = {"width": size[0], "height": size[1], "guidance_scale": guidance}
        return call | {"use_resolution_binning": False, "complex_human_instruction": None}

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        return denoiser(
            noisy, condition["text"], 1000.0 * times, encoder_attention_mask=condition["mask"], return_dict=False
        )[0]
