"""Mochi 1: a 10 B parameter transformer on 12-channel video latents, trained as a rectified flow; T5 reads the caption.

Genmo 2024: genmo/mochi-1-preview, its configuration and code (github.com/genmoai/mochi). An AsymmDiT: its text stream is
narrower than its video stream. Its times run backwards: 0 is noise, and it predicts latent less noise.

Shapes: B batch, F frames, H W height and width in px, L = 256 text tokens, D = 4096 width of T5's states.
    videos (B, 3, F, H, W) -> moments (B, 24, f, H/8, W/8) -> latents (B, 12, f, H/8, W/8), f = 1 + (F - 1) / 6
    t5_tokens (B, L) -> text (B, L, D), mask (B, L)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weights import hub_names, ldm_names
from weights.t5_text import END, PAD, T5_VOCABULARY, TOKENIZER, T5Text, T5Tokenizer, t5_config
from zoo import tokenizer_files
from zoo.attention import MaskedMochiAttention
from zoo.lora import JOINT_ATTENTION
from zoo.spec import Column, of_choice
from zoo.video_family import AS_AMD, VideoFamily

LATENT_MEANS = (
    -0.06730895953510081,
    -0.038011381506090416,
    -0.07477820912866141,
    -0.05565264470995561,
    0.012767231469026969,
    -0.04703542746246419,
    0.043896967884726704,
    -0.09346305707025976,
    -0.09918314763016893,
    -0.008729793427399178,
    -0.011931556316503654,
    -0.0321993391887285,
)  # vae/config.json
LATENT_STDS = (
    0.9263795028493863,
    0.9248894543193766,
    0.9393059390890617,
    0.959253732819592,
    0.8244560132752793,
    0.917259975397747,
    0.9294154431013696,
    1.3720942357788521,
    0.881393668867029,
    0.9168315692124348,
    0.9185249279345552,
    0.9274757570805041,
)
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "full": dict(transformer={}, vae={}, t5=dict(d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64)),
    "tiny": dict(
        transformer=dict(
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            pooled_projection_dim=16,
            text_embed_dim=16,
            time_embed_dim=16,
        ),
        vae=dict(encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4, layers_per_block=(1,) * 5),
        t5=dict(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2),
    ),
}
"""Preset -> what it changes of diffusers' classes, whose own sizes are the published ones. tiny: 1.5 M parameters with its
encoders."""


def build(preset: str, variant: str) -> Mochi:
    """Return the family in a preset's size. Raises ValueError: an unknown preset or variant."""
    family = Mochi(of_choice("mochi", variant, preset, {"stock": PRESETS}))
    family.on_hub = hub_names.MOCHI if preset == "full" else None
    return family


class Mochi(VideoFamily):
    """Implements `zoo.spec.Family`."""

    name, variant = "mochi", "stock"
    objective = AS_AMD
    num_frames, frames_per_latent, frames_per_sec = 7, 6, 30.0
    latent_channels = 12
    num_tokens = 256
    tokenizers = ("tokenizer",)
    clip_tokenizer = None
    lora_targets = JOINT_ATTENTION
    wide_encoders = ("t5",)
    empty_is_zero = True  # Genmo's demos/fine_tuner/train.py zeroes a dropped caption's states and its mask
    sampling_spacing = "linear_quadratic"

    def __init__(self, sizes: Mapping[str, dict[str, Any]]):
        self.sizes = sizes
        self.text_width = sizes["t5"]["d_model"]
        self.t5_tokenizer = T5Tokenizer(self.num_tokens)
        self.latent_means, self.latent_stds = LATENT_MEANS, LATENT_STDS

    def text_columns(self) -> dict[str, Column]:
        return {"t5_tokens": Column((self.num_tokens,), torch.int64, below=T5_VOCABULARY)}

    def stored_columns(self) -> dict[str, Column]:
        return super().stored_columns() | {"mask": self.stored_mask()}

    def build_denoiser(self) -> nn.Module:
        from diffusers.models import MochiTransformer3DModel

        # Its angles ask for an autocast to float32, which a CPU does not have, and does not need.
        warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
        transformer = MochiTransformer3DModel(**self.sizes["transformer"])
        for block in transformer.transformer_blocks:
            block.attn1.processor = MaskedMochiAttention()
        return transformer

    def build_encoders(self) -> dict[str, nn.Module]:
        from diffusers.models import AutoencoderKLMochi

        return {"vae": AutoencoderKLMochi(**self.sizes["vae"]), "t5": T5Text(t5_config(**self.sizes["t5"]))}

    def published(self) -> dict[str, Callable[[nn.Module], ldm_names.Network]]:
        return {
            "vae": ldm_names.in_folder("vae", "AutoencoderKLMochi"),
            "t5": ldm_names.t5_text_in("text_encoder"),
            "denoiser": ldm_names.in_folder("transformer", "MochiTransformer3DModel", "num_attention_heads"),
        }

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        return {"t5_tokens": self.t5_tokenizer(captions)}

    def read_tokenizers(self, folder: Path) -> None:
        """T5's table of words is published with its weights; random ones read bytes."""
        self.t5_tokenizer = T5Tokenizer(self.num_tokens, folder / "tokenizer" / TOKENIZER)

    def save_tokenizers(self, folder: Path) -> dict[str, str]:
        words = self.t5_tokenizer.words
        return {"tokenizer": tokenizer_files.save_t5(folder / "tokenizer", words, self.num_tokens)}

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tokens = batch["t5_tokens"].long()
        text = encoders["t5"](tokens, tokens != PAD)
        return {"text": text, "mask": self.text_mask(batch)["mask"].to(text.dtype)}

    def text_mask(self, text: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """An empty caption's mask is all False, its end token's too: get_conditioning_for_prompts of Genmo's pipelines.py."""
        tokens = text["t5_tokens"]
        return {"mask": (tokens != PAD) & (tokens[:, :1] != END)}

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        towards_data = denoiser(
            noisy,
            encoder_hidden_states=condition["text"],
            timestep=1000.0 * (1.0 - times),
            encoder_attention_mask=condition["mask"].bool(),
            return_dict=False,
        )[0]
        return -towards_data
