"""PRX: a 1.2 B parameter transformer, trained as a rectified flow; T5Gemma reads the caption.

Photoroom 2025 (github.com/Photoroom/PRX, Composer and Streaming as here): the configurations of its published models, and
diffusers' PRXPipeline. Captions are cleaned as its pipeline does.

    variant   latents
    flux      FLUX.1's: 16 channels, 8 px
    dc_ae     Sana's DC-AE: 32 channels, 32 px

Shapes: B batch, H W image height and width in px, p pixels per latent, C channels, L = 256 text tokens, D = 2304 width of
T5Gemma's states.
    flux      images (B, 3, H, W) -> moments (B, 32, H/8, W/8) -> latents (B, 16, H/8, W/8)
    dc_ae     images (B, 3, H, W) -> moments (B, 32, H/32, W/32) -> latents (B, 32, H/32, W/32)
    gemma_tokens (B, L) -> text (B, L, D), mask (B, L)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from common.value_types import ImageSize
from families import sana_autoencoder
from families.gemma_family import TINY_GEMMA, GemmaFamily
from families.language_models import language_model_in_folder
from families.spec import Pipeline, select_preset
from weights import hub_names, ldm_names

FLUX_SCALE, FLUX_SHIFT = 0.3611, 0.1159  # of FLUX.1's vae/config.json

TRANSFORMER = dict(hidden_size=1792, num_heads=28, depth=16, axes_dim=[32, 32])
TINY_TRANSFORMER = dict(hidden_size=32, num_heads=2, depth=2, axes_dim=[8, 8])
FULL: dict[str, Any] = dict(
    transformer=TRANSFORMER,
    flux_vae=dict(block_out_channels=(128, 256, 512, 512), norm_num_groups=32),
    dc_ae=sana_autoencoder.FULL,
    gemma={},
)
TINY: dict[str, Any] = dict(
    transformer=TINY_TRANSFORMER,
    flux_vae=dict(block_out_channels=(8, 16, 16, 16), norm_num_groups=8),
    dc_ae=sana_autoencoder.TINY,
    gemma=TINY_GEMMA,
)
PRESETS = {"full": FULL, "tiny": TINY}
ON_HUB = {"flux": hub_names.PRX_FLUX, "dc_ae": hub_names.PRX_DC_AE}


def build(preset: str, variant: str) -> PRX:
    """Return the family in a preset's size. Raises ValueError: an unknown preset or variant."""
    if variant == "stock":  # the default of the key
        variant = "flux"
    family = PRX(select_preset("prx", variant, preset, dict.fromkeys(ON_HUB, PRESETS)), variant)
    family.hub_name = ON_HUB[variant] if preset == "full" else None
    return family


class PRX(GemmaFamily):
    """Implements `families.spec.Family`."""

    name = "prx"
    num_tokens = 256
    pipeline = Pipeline("PRXPipeline", {"text_encoder": ["prx", "T5GemmaEncoder"], "default_sample_size": 512}, ())
    lora_targets = ("img_qkv_proj", "txt_kv_proj", "to_out.0")
    token_arguments: Mapping[str, int] | None = {"image_rotary_emb": 2}

    def __init__(self, sizes: Mapping[str, Any], variant: str):
        super().__init__(sizes, variant)
        if variant == "dc_ae":
            self.pixels_per_latent, self.latent_channels, self.has_posterior = 32, 32, False
            self.latent_scale = sana_autoencoder.SCALE
        else:
            self.pixels_per_latent, self.side_multiple, self.latent_channels = 8, 16, 16
            self.latent_scale, self.latent_shift = FLUX_SCALE, FLUX_SHIFT

    def build_denoiser(self) -> nn.Module:
        from diffusers.models.transformers.transformer_prx import PRXTransformer2DModel

        patch_size = 1 if self.variant == "dc_ae" else 2
        return PRXTransformer2DModel(self.latent_channels, patch_size, self.text_width, **self.sizes["transformer"])

    def build_encoders(self) -> dict[str, nn.Module]:
        if self.variant == "dc_ae":
            vae = sana_autoencoder.build(self.sizes["dc_ae"])
        else:
            no_convolutions = dict(use_quant_conv=False, use_post_quant_conv=False)
            vae = self.build_vae(shift_factor=FLUX_SHIFT, **no_convolutions, **self.sizes["flux_vae"])
        return {"vae": vae, "gemma": build_t5gemma(self.sizes["gemma"])}

    def network_names(self) -> dict[str, Callable[[nn.Module], ldm_names.NetworkNames]]:
        return {
            "vae": sana_autoencoder.names if self.variant == "dc_ae" else ldm_names.vae,
            "gemma": language_model_in_folder(),
            "denoiser": ldm_names.network_in_folder("transformer", "PRXTransformer2DModel", "num_heads"),
        }

    def clean_caption(self, caption: str) -> str:
        from diffusers.pipelines.prx.pipeline_prx import TextPreprocessor

        return TextPreprocessor().clean_text(caption)

    def pipeline_call(self, size: ImageSize, guidance: float) -> dict[str, Any]:
        width, height = size
        return {"width": width, "height": height, "guidance_scale": guidance, "use_resolution_binning": False}

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        return denoiser(noisy, times, condition["text"], attention_mask=condition["mask"].bool(), return_dict=False)[0]


def build_t5gemma(sizes: Mapping[str, Any]) -> nn.Module:
    """Build transformers' encoder of T5Gemma 2B with random weights, from torch's global generator."""
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaConfig, T5GemmaEncoder

    whole: Any = T5GemmaConfig(encoder=dict(sizes), decoder=dict(sizes), is_encoder_decoder=False)
    encoder: Any = T5GemmaEncoder(whole.encoder)
    encoder.published_config = whole  # what diffusers' pipeline reads
    return encoder
