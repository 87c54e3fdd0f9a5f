"""HunyuanVideo: a 13 B parameter transformer on 16-channel video latents, trained as a rectified flow; Llama and CLIP read.

Tencent 2024 (Kong et al., arXiv:2412.03603): hunyuanvideo-community/HunyuanVideo, its configuration, and diffusers'
HunyuanVideoPipeline. The guidance scale is an input of the network; in training it is 1, as in AMD's benchmark.

Shapes: B batch, F frames, H W height and width in px, L = 256 text tokens, D = 4096 width of Llama's states,
P = 768 of CLIP's.
    videos (B, 3, F, H, W) -> moments (B, 32, f, H/8, W/8) -> latents (B, 16, f, H/8, W/8), f = 1 + (F - 1) / 4
    llama_tokens (B, 95 + L) -> text (B, L, D), mask (B, L);  tokens (B, 77) -> pooled (B, P)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from families import pipeline_files
from families.lora import JOINT_ATTENTION
from families.spec import Column, Pipeline, select_preset
from families.video_family import AMD_OBJECTIVE, VideoFamily
from weights import hub_names, ldm_names
from weights.encoder_networks import (
    CLIP_NUM_TOKENS,
    CLIP_VOCABULARY,
    LLAMA_PAD,
    LLAMA_VOCABULARY,
    NUM_UNREAD_LLAMA,
    TOKENIZER_FILE,
    LlamaText,
    LlamaTokenizer,
    build_clip_text,
    clip_text_config,
    pad_with_end_token,
)

LATENT_SCALE = 0.476986  # vae/config.json
GUIDANCE_IN_TRAINING = 1.0
# What the text encoder is asked with, and was trained on: a part of the published model (diffusers' DEFAULT_PROMPT_TEMPLATE).
DESCRIBED_ASPECTS = (
    "The main content and theme of the video.",
    "The color, shape, size, texture, quantity, text, and spatial relationships of the objects.",
    "Actions, events, behaviors temporal relationships, physical movement changes of the objects.",
    "background environment, light, style and atmosphere.",
    "camera angles, movements, and transitions used in the video:",
)
TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
    + "".join(f"{number}. {aspect}" for number, aspect in enumerate(DESCRIBED_ASPECTS, 1))
    + "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)
TEMPLATE_TOKENS = 95  # before the caption
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "full": dict(
        transformer={},
        vae={},
        clip=dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12),
        llama=dict(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32 - NUM_UNREAD_LLAMA,
            num_attention_heads=32,
            num_key_value_heads=8,
        ),
    ),
    "tiny": dict(
        transformer=dict(
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=1,
            num_attention_heads=2,
            attention_head_dim=16,
            text_embed_dim=8,
            pooled_projection_dim=8,
            rope_axes_dim=(4, 6, 6),
        ),
        vae=dict(block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=8),
        clip=dict(hidden_size=8, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2),
        llama=dict(
            hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
        ),
    ),
}
"""Preset -> what it changes of the libraries' classes. tiny: 1.7 M parameters with its encoders, of which their token tables
are 1.4 M."""


def build(preset: str, variant: str) -> HunyuanVideo:
    """Return the family in a preset's size. Raises ValueError: an unknown preset or variant."""
    family = HunyuanVideo(select_preset("hunyuan_video", variant, preset, {"stock": PRESETS}))
    family.hub_name = hub_names.HUNYUAN_VIDEO if preset == "full" else None
    return family


class HunyuanVideo(VideoFamily):
    """Implements `families.spec.Family`."""

    name, variant = "hunyuan_video", "stock"
    objective = AMD_OBJECTIVE
    num_frames, frames_per_latent, frames_per_sec = 9, 4, 24.0
    latent_channels, latent_scale = 16, LATENT_SCALE
    scheduler_settings: Mapping[str, Any] = dict(shift=7.0)
    num_tokens = 256
    tokenizer_folders = ("tokenizer", "tokenizer_2")
    clip_tokenizer_folder = "tokenizer_2"
    lora_targets = JOINT_ATTENTION
    has_guidance_input = True
    pipeline = Pipeline("HunyuanVideoPipeline", {}, ())

    def __init__(self, sizes: Mapping[str, dict[str, Any]]):
        self.sizes = sizes
        self.text_width = sizes["llama"]["hidden_size"]
        self.llama_tokenizer = self._tokenizer(None)

    def _tokenizer(self, file: Path | None) -> LlamaTokenizer:
        return LlamaTokenizer(TEMPLATE_TOKENS + self.num_tokens, TEMPLATE, TEMPLATE_TOKENS, file)

    def text_columns(self) -> dict[str, Column]:
        tokens = Column((CLIP_NUM_TOKENS,), torch.int64, below=CLIP_VOCABULARY)
        length = TEMPLATE_TOKENS + self.num_tokens
        return {
            "tokens": tokens,
            "llama_tokens": Column((length,), torch.int64, below=LLAMA_VOCABULARY),
        }

    def stored_columns(self) -> dict[str, Column]:
        pooled = Column((self.sizes["clip"]["hidden_size"],), torch.float16)
        return super().stored_columns() | {"mask": self.stored_mask(), "pooled": pooled}

    def build_denoiser(self) -> nn.Module:
        from diffusers.models import HunyuanVideoTransformer3DModel

        return HunyuanVideoTransformer3DModel(**self.sizes["transformer"])

    def build_encoders(self) -> dict[str, nn.Module]:
        from diffusers.models import AutoencoderKLHunyuanVideo
        from transformers import LlamaConfig

        vae = AutoencoderKLHunyuanVideo(scaling_factor=LATENT_SCALE, **self.sizes["vae"])
        text = build_clip_text(clip_text_config(hidden_act="quick_gelu", **self.sizes["clip"]))
        llama = LlamaConfig(
            vocab_size=LLAMA_VOCABULARY,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            **self.sizes["llama"],
        )
        return {"vae": vae, "text": text, "llama": LlamaText(llama)}

    def network_names(self) -> dict[str, Callable[[nn.Module], ldm_names.NetworkNames]]:
        kind = "HunyuanVideoTransformer3DModel"
        return {
            "vae": ldm_names.network_in_folder("vae", "AutoencoderKLHunyuanVideo", "scaling_factor", "norm_num_groups"),
            "text": ldm_names.clip_text_in_folder("text_encoder_2"),
            "llama": ldm_names.llama_text,
            "denoiser": ldm_names.network_in_folder(
                "transformer", kind, "num_attention_heads", "rope_axes_dim", "rope_theta"
            ),
        }

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        return {"tokens": pipeline_files.tokenize_clip(captions), "llama_tokens": self.llama_tokenizer(captions)}

    def read_tokenizers(self, folder: Path) -> None:
        """Llama's table of words is published with its weights; random ones read bytes."""
        self.llama_tokenizer = self._tokenizer(folder / "tokenizer" / TOKENIZER_FILE)

    def save_tokenizers(self, folder: Path) -> dict[str, str]:
        llama = pipeline_files.save_llama_tokenizer(folder / "tokenizer", self.llama_tokenizer)
        clip = pipeline_files.save_clip_tokenizer(folder / "tokenizer_2", pipeline_files.CLIP_END_TEXT)
        return {"tokenizer": llama, "tokenizer_2": clip}

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tokens = batch["llama_tokens"].long()
        text = encoders["llama"](tokens)[:, TEMPLATE_TOKENS:]
        mask = self.text_mask(batch)["mask"]
        pooled = encoders["text"](input_ids=pad_with_end_token(batch["tokens"].long())).pooler_output
        return {"text": text, "mask": mask.to(text.dtype), "pooled": pooled}

    def text_mask(self, text: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"mask": (text["llama_tokens"] != LLAMA_PAD)[:, TEMPLATE_TOKENS:]}

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        guidance = condition.get("guidance")
        if guidance is None:
            guidance = torch.full((len(noisy),), GUIDANCE_IN_TRAINING, device=noisy.device)
        return denoiser(
            noisy,
            timestep=1000.0 * times,
            encoder_hidden_states=condition["text"],
            encoder_attention_mask=condition["mask"].bool(),
            pooled_projections=condition["pooled"],
            guidance=1000.0 * guidance,
            return_dict=False,
        )[0]
