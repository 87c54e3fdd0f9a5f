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
import torch.nn.functional as F
from torch import Tensor, nn

from families import pipeline_files
from families.lora import JOINT_ATTENTION
from families.spec import Column, Pipeline, select_preset
from families.video_family import AMD_OBJECTIVE, VideoFamily
from weights import hub_names, ldm_names
from weights.encoder_networks import T5_END, T5_PAD, T5_VOCABULARY, TOKENIZER_FILE, T5Text, T5Tokenizer, t5_config

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
    family = Mochi(select_preset("mochi", variant, preset, {"stock": PRESETS}))
    family.hub_name = hub_names.MOCHI if preset == "full" else None
    return family


class Mochi(VideoFamily):
    """Implements `families.spec.Family`."""

    name, variant = "mochi", "stock"
    objective = AMD_OBJECTIVE
    num_frames, frames_per_latent, frames_per_sec = 7, 6, 30.0
    latent_channels = 12
    num_tokens = 256
    tokenizer_folders = ("tokenizer",)
    clip_tokenizer_folder = None
    lora_targets = JOINT_ATTENTION
    token_arguments: Mapping[str, int] | None = {"image_rotary_emb": 0}
    overflow_encoders = ("t5",)
    has_zero_empty_condition = True  # Genmo's demos/fine_tuner/train.py zeroes a dropped caption's states and its mask
    sampling_spacing = "linear_quadratic"
    scheduler_settings: Mapping[str, Any] = dict(invert_sigmas=True)
    pipeline = Pipeline("MochiPipeline", {"force_zeros_for_empty_prompt": True}, ())

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

    def network_names(self) -> dict[str, Callable[[nn.Module], ldm_names.NetworkNames]]:
        return {
            "vae": ldm_names.network_in_folder("vae", "AutoencoderKLMochi"),
            "t5": ldm_names.t5_text_in_folder("text_encoder"),
            "denoiser": ldm_names.network_in_folder("transformer", "MochiTransformer3DModel", "num_attention_heads"),
        }

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        return {"t5_tokens": self.t5_tokenizer(captions)}

    def read_tokenizers(self, folder: Path) -> None:
        """T5's table of words is published with its weights; random ones read bytes."""
        self.t5_tokenizer = T5Tokenizer(self.num_tokens, folder / "tokenizer" / TOKENIZER_FILE)

    def save_tokenizers(self, folder: Path) -> dict[str, str]:
        published = self.t5_tokenizer.published
        return {"tokenizer": pipeline_files.save_t5_tokenizer(folder / "tokenizer", published, self.num_tokens)}

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tokens = batch["t5_tokens"].long()
        text = encoders["t5"](tokens, tokens != T5_PAD)
        return {"text": text, "mask": self.text_mask(batch)["mask"].to(text.dtype)}

    def text_mask(self, text: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """An empty caption's mask is all False, its end token's too: get_conditioning_for_prompts of Genmo's pipelines.py."""
        tokens = text["t5_tokens"]
        return {"mask": (tokens != T5_PAD) & (tokens[:, :1] != T5_END)}

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        towards_data = denoiser(
            noisy,
            encoder_hidden_states=condition["text"],
            timestep=1000.0 * (1.0 - times),
            encoder_attention_mask=condition["mask"].bool(),
            return_dict=False,
        )[0]
        return -towards_data


# --- attention over video and text, with a mask ---
#
# diffusers' own selects each sample's text tokens by index: torch.compile would build a graph for each caption length, and
# a step could not be traced on meta tensors. Here a mask hides the padding. The results at text tokens are the same; those
# at padding differ, and nothing reads them.


class MaskedMochiAttention:
    """Replaces diffusers' MochiAttnProcessor2_0."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """# (B, S, D) of video, (B, L, E) of text, (B, L) bool -> (B, S, D), (B, L, E)."""

        def heads(states: Tensor) -> Tensor:  # (B, S, heads x d) -> (B, S, heads, d)
            return states.unflatten(2, (attn.heads, -1))

        queries, keys = attn.norm_q(heads(attn.to_q(hidden_states))), attn.norm_k(heads(attn.to_k(hidden_states)))
        if image_rotary_emb is not None:
            queries, keys = rotate_pairs(queries, *image_rotary_emb), rotate_pairs(keys, *image_rotary_emb)
        text_states = encoder_hidden_states
        text_queries = attn.norm_added_q(heads(attn.add_q_proj(text_states)))
        text_keys = attn.norm_added_k(heads(attn.add_k_proj(text_states)))
        values, text_values = heads(attn.to_v(hidden_states)), heads(attn.add_v_proj(text_states))
        pairs = ((queries, text_queries), (keys, text_keys), (values, text_values))
        query, key, value = (torch.cat(pair, dim=1).transpose(1, 2) for pair in pairs)
        num_video_tokens = hidden_states.shape[1]
        seen = F.pad(attention_mask.bool(), (num_video_tokens, 0), value=True)[:, None, None]  # (B, 1, 1, S + L)
        states = F.scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(1, 2).flatten(2, 3)
        video, text = states.split((num_video_tokens, text_states.shape[1]), dim=1)
        video = attn.to_out[1](attn.to_out[0](video))
        return video, (attn.to_add_out(text) if hasattr(attn, "to_add_out") else text)


def rotate_pairs(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """# (B, S, heads, d), (S, heads, d / 2) each -> (B, S, heads, d): turn each pair of neighbours by its angle."""
    even, odd = states.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cosines - odd * sines, even * sines + odd * cosines], dim=-1)
    return turned.flatten(-2).to(states.dtype)
