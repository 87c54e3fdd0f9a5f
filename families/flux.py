"""FLUX.1: an 11.9 B parameter transformer on 16-channel latents, trained as a rectified flow; T5 and CLIP read the caption.

Black Forest Labs 2024, the configuration of black-forest-labs/FLUX.1-dev and -schnell, and MLPerf Training's benchmark
(v5.1 on: mlcommons/training, text_to_image/torchtitan, a fork of pytorch/torchtitan's experiments/flux).

    variant   text tokens   the guidance scale   times in training                  weights begin as
    dev       512           is an input          logit-normal, shifted by 3         torch's default
    schnell   256           is none              logit-normal, shifted by 3         torch's default
    mlperf    256           is none              uniform                            the benchmark's

How the published weights were trained is not known: times of dev and schnell are those that AMD's benchmark trains with
(arXiv:2403.03206 for both). Where guidance is an input, it is 1 in training, as there.

Shapes: B batch, H W image height and width in px, L text tokens, D width of T5's states (4096), P of CLIP's (768),
h w latent height and width, S = h w / 4 image tokens.
    images (B, 3, H, W) -> moments (B, 32, H/8, W/8) -> latents (B, 16, H/8, W/8), e.g. (B, 16, 32, 32) at 256 px
    latents (B, 16, h, w) -> packed (B, S, 64): each 2 x 2 block is one token
    t5_tokens (B, L) -> text (B, L, D);  tokens (B, 77) -> pooled (B, P)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.value_types import ImageSize
from families import packing, pipeline_files
from families.lora import JOINT_ATTENTION
from families.spec import Column, Family, Pipeline, select_preset
from weights import hub_names, ldm_names
from weights.encoder_networks import (
    CLIP_NUM_TOKENS,
    CLIP_VOCABULARY,
    T5_VOCABULARY,
    TOKENIZER_FILE,
    T5Text,
    T5Tokenizer,
    build_clip_text,
    clip_text_config,
    pad_with_end_token,
    t5_config,
)

LATENT_SCALE, LATENT_SHIFT = 0.3611, 0.1159  # vae/config.json of the published models
LATENT_CHANNELS = 16
GUIDANCE_IN_TRAINING = 1.0

# Of dev's scheduler_config.json: the logarithm of the shift grows with the number of image tokens.
SCHEDULER_OF_DEV: dict[str, Any] = dict(
    use_dynamic_shifting=True,
    shift=3.0,
    base_image_seq_len=256,
    base_shift=0.5,
    max_image_seq_len=4096,
    max_shift=1.15,
)


@dataclass(frozen=True)
class FluxSizes:
    """Constructor arguments of the networks that a preset changes."""

    transformer: dict[str, Any]
    vae: dict[str, Any]
    clip: dict[str, Any]
    t5: dict[str, Any]


FULL = FluxSizes(
    transformer=dict(
        num_layers=19,
        num_single_layers=38,
        attention_head_dim=128,
        num_attention_heads=24,
        joint_attention_dim=4096,
        pooled_projection_dim=768,
        axes_dims_rope=(16, 56, 56),
    ),
    vae=dict(block_out_channels=(128, 256, 512, 512), norm_num_groups=32),
    clip=dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12),
    t5=dict(d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64),
)
# The same code and block types. 1.4 M parameters with its encoders, of which their two token tables are 0.9 M.
TINY = FluxSizes(
    transformer=dict(
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 6, 6),
    ),
    vae=dict(block_out_channels=(8, 16, 16, 16), norm_num_groups=8),
    clip=dict(hidden_size=8, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2),
    t5=dict(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2),
)
PRESETS = {"full": FULL, "tiny": TINY}
FLOW = dict(prediction="flow", caption_dropout=0.1)
AMD_TIMES = dict(timesteps="logit_normal", shift=3.0)
OBJECTIVES = {
    "dev": FLOW | AMD_TIMES,
    "schnell": FLOW | AMD_TIMES,
    "mlperf": FLOW | dict(timesteps="uniform", shift=1.0),
}
NUM_TOKENS = {"dev": 512, "schnell": 256, "mlperf": 256}
ON_HUB = {"dev": hub_names.FLUX_DEV, "schnell": hub_names.FLUX_SCHNELL, "mlperf": hub_names.FLUX_SCHNELL}


def build(preset: str, variant: str) -> Flux:
    """Return the family in a preset's size. Raises ValueError: an unknown preset or variant."""
    if variant == "stock":  # the default of the key
        variant = "dev"
    family = Flux(select_preset("flux", variant, preset, dict.fromkeys(OBJECTIVES, PRESETS)), variant)
    family.hub_name = ON_HUB[variant] if preset == "full" else None
    return family


class Flux(Family):
    """Implements `families.spec.Family`."""

    name = "flux"
    predictions = ("flow",)
    pixels_per_latent, side_multiple = 8, 16
    latent_channels, latent_scale, latent_shift = LATENT_CHANNELS, LATENT_SCALE, LATENT_SHIFT
    vocabulary_size = CLIP_VOCABULARY  # of CLIP
    pipeline = Pipeline("FluxPipeline", {}, ("feature_extractor", "image_encoder"))
    tokenizer_folders = ("tokenizer", "tokenizer_2")
    lora_targets = JOINT_ATTENTION
    token_arguments: Mapping[str, int] | None = {"image_rotary_emb": 0}
    overflow_encoders = ("t5",)  # transformers clips its states in float16 (T5Block), which changes them

    def __init__(self, architecture: FluxSizes, variant: str):
        self.architecture, self.variant = architecture, variant
        self.objective: Mapping[str, Any] = OBJECTIVES[variant]
        self.scheduler_settings = SCHEDULER_OF_DEV if variant == "dev" else {}
        self.num_tokens = NUM_TOKENS[variant]
        self.text_width = architecture.transformer["joint_attention_dim"]
        self.has_guidance_input = variant == "dev"
        self.t5_tokenizer = T5Tokenizer(self.num_tokens)

    def text_columns(self) -> dict[str, Column]:
        tokens = Column((CLIP_NUM_TOKENS,), torch.int64, below=CLIP_VOCABULARY)
        return {"tokens": tokens, "t5_tokens": Column((self.num_tokens,), torch.int64, below=T5_VOCABULARY)}

    def stored_columns(self) -> dict[str, Column]:
        pooled = Column((self.architecture.transformer["pooled_projection_dim"],), torch.float16)
        return super().stored_columns() | {"pooled": pooled}

    def build_denoiser(self) -> nn.Module:
        from diffusers.models import FluxTransformer2DModel

        transformer = FluxTransformer2DModel(
            in_channels=4 * LATENT_CHANNELS, guidance_embeds=self.has_guidance_input, **self.architecture.transformer
        )
        if self.variant == "mlperf":
            draw_mlperf_weights(transformer)
        return transformer

    def build_encoders(self) -> dict[str, nn.Module]:
        no_convolutions = dict(use_quant_conv=False, use_post_quant_conv=False)  # between posterior and latent
        vae = self.build_vae(shift_factor=LATENT_SHIFT, **no_convolutions, **self.architecture.vae)
        clip = clip_text_config(hidden_act="quick_gelu", **self.architecture.clip)
        t5 = T5Text(t5_config(**self.architecture.t5))
        return {"vae": vae, "text": build_clip_text(clip), "t5": t5}

    def network_names(self) -> dict[str, Callable[[nn.Module], ldm_names.NetworkNames]]:
        return {
            "vae": ldm_names.vae,
            "text": ldm_names.clip_text,
            "t5": ldm_names.t5_text_in_folder("text_encoder_2"),
            "denoiser": ldm_names.flux_transformer,
        }

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        return {"tokens": pipeline_files.tokenize_clip(captions), "t5_tokens": self.t5_tokenizer(captions)}

    def read_tokenizers(self, folder: Path) -> None:
        """Read the tokenizer of published weights; with random weights each byte is a token."""
        self.t5_tokenizer = T5Tokenizer(self.num_tokens, folder / "tokenizer_2" / TOKENIZER_FILE)

    def save_tokenizers(self, folder: Path) -> dict[str, str]:
        clip = pipeline_files.save_clip_tokenizer(folder / "tokenizer", pipeline_files.CLIP_END_TEXT)
        t5 = pipeline_files.save_t5_tokenizer(folder / "tokenizer_2", self.t5_tokenizer.published, self.num_tokens)
        return {"tokenizer": clip, "tokenizer_2": t5}

    def pipeline_call(self, size: ImageSize, guidance: float) -> dict[str, Any]:
        width, height = size  # its own defaults are 1024 px and 512 tokens, whatever the folder has
        call = {"width": width, "height": height, "max_sequence_length": self.num_tokens}
        if self.has_guidance_input or guidance == 1.0:
            return call | {"guidance_scale": guidance}
        return call | {"negative_prompt": "", "true_cfg_scale": guidance}

    def pipeline_latents(self, noise: Tensor) -> Tensor:
        return packing.pack(noise)

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # (B, L), (B, 77) -> text (B, L, D), pooled (B, P): CLIP's last state at the end mark, which the rest repeats
        pooled = encoders["text"](input_ids=pad_with_end_token(batch["tokens"].long())).pooler_output
        return {"text": encoders["t5"](batch["t5_tokens"].long()), "pooled": pooled}

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        guidance = condition.get("guidance")
        if guidance is None and self.has_guidance_input:
            guidance = torch.full((len(noisy),), GUIDANCE_IN_TRAINING, device=noisy.device)
        return packing.denoise(denoiser, noisy, times, condition, guidance)


def draw_mlperf_weights(transformer: nn.Module) -> None:
    """Draw the weights that MLPerf's reference begins with, from torch's global generator.

    torchtitan's flux/model (init_weights): Glorot's uniform numbers for linear layers (queries, keys and values are one
    matrix there, in a single block with the first layer of its network), deviation 0.02 in the two embeddings of time and
    caption, zeros for what modulates and for the last layer; biases 0.
    """
    for name, layer in transformer.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        nn.init.zeros_(layer.bias)
        if "norm" in name or name == "proj_out":
            nn.init.zeros_(layer.weight)
        elif name.startswith("time_text_embed."):
            nn.init.normal_(layer.weight, std=0.02)
        else:
            outputs, inputs = layer.weight.shape
            limit = math.sqrt(6.0 / (inputs + _reference_outputs(name, transformer, outputs)))
            nn.init.uniform_(layer.weight, -limit, limit)


QKV = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")


def _reference_outputs(name: str, transformer: Any, outputs: int) -> int:
    """Return the outputs of the matrix that a layer is a part of in the reference."""
    last = name.rpartition(".")[2]
    if name.startswith("single_transformer_blocks.") and last in (*QKV, "proj_mlp"):
        return 3 * transformer.inner_dim + 4 * transformer.inner_dim
    return 3 * outputs if last in QKV else outputs
