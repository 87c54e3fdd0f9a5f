"""Stable Diffusion 3.5: a transformer on 16-channel latents, trained as a rectified flow; two CLIPs and T5 read the caption.

Esser et al. 2024 (arXiv:2403.03206) and the configurations of stabilityai/stable-diffusion-3.5-medium and -large. Times in
training are logit-normal, shifted by 3 (sections 3.1 and 5.3.2). The paper drops each encoder's caption in 46.4 % of the
steps, all three in 10 %; here a caption is dropped for all three together.

    variant   parameters   attention
    medium    2.2 B        the image attends to itself a second time in the first 13 blocks
    large     8.1 B        image and text together

Shapes: B batch, H W image height and width in px, L = 256 T5 tokens, D = 4096 width of T5's states, P = P1 + P2 width of
both CLIP encoders' projected states (768 + 1280).
    images (B, 3, H, W) -> moments (B, 32, H/8, W/8) -> latents (B, 16, H/8, W/8), e.g. (B, 16, 128, 128) at 1024 px
    tokens (B, 77), t5_tokens (B, L) -> text (B, 77 + L, D): CLIP's states, filled up with zeros to D, then T5's
    tokens (B, 77) -> pooled (B, P)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.value_types import ImageSize
from families import pipeline_files
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

LATENT_SCALE, LATENT_SHIFT = 1.5305, 0.0609  # vae/config.json
T5_NUM_TOKENS = 256
SHIFT = 3.0  # scheduler_config.json

FULL: dict[str, Any] = dict(
    vae=dict(block_out_channels=(128, 256, 512, 512), norm_num_groups=32),
    texts=(
        dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, projection_dim=768),
        dict(
            hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20, projection_dim=1280
        ),
    ),
    t5=dict(d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64),
)
TINY: dict[str, Any] = dict(
    vae=dict(block_out_channels=(8, 16, 16, 16), norm_num_groups=8),
    texts=(
        dict(hidden_size=8, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, projection_dim=8),
        dict(hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, projection_dim=12),
    ),
    t5=dict(d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2),
)
# transformer/config.json; all else is the class's default
MEDIUM = dict(num_layers=24, num_attention_heads=24, pos_embed_max_size=384, dual_attention_layers=tuple(range(13)))
LARGE = dict(num_layers=38, num_attention_heads=38, pos_embed_max_size=192)
SMALL = dict(num_layers=2, num_attention_heads=2, attention_head_dim=16, pos_embed_max_size=64)
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "medium": {
        "full": FULL | {"transformer": MEDIUM},
        "tiny": TINY | {"transformer": SMALL | {"dual_attention_layers": (0,)}},
    },
    "large": {"full": FULL | {"transformer": LARGE}, "tiny": TINY | {"transformer": SMALL}},
}
"""Variant -> preset -> what it sets of the libraries' classes. tiny: 2.4 M parameters with its encoders, of which 2.3 M
are token tables."""
ON_HUB = {"medium": hub_names.SD35_MEDIUM, "large": hub_names.SD35_LARGE}


def build(preset: str, variant: str) -> SD3:
    """Return the family in a preset's size. Raises ValueError: an unknown preset or variant."""
    if variant == "stock":  # the default of the key
        variant = "medium"
    family = SD3(select_preset("sd3", variant, preset, SIZES), variant)
    family.hub_name = ON_HUB[variant] if preset == "full" else None
    return family


class SD3(Family):
    """Implements `families.spec.Family`."""

    name = "sd3"
    predictions = ("flow",)
    objective: Mapping[str, Any] = dict(prediction="flow", timesteps="logit_normal", shift=SHIFT, caption_dropout=0.1)
    pixels_per_latent, side_multiple = 8, 16
    latent_channels, latent_scale, latent_shift = 16, LATENT_SCALE, LATENT_SHIFT
    num_tokens, vocabulary_size = CLIP_NUM_TOKENS + T5_NUM_TOKENS, CLIP_VOCABULARY
    pipeline = Pipeline("StableDiffusion3Pipeline", {}, ("feature_extractor", "image_encoder"), is_square=True)
    tokenizer_folders = ("tokenizer", "tokenizer_2", "tokenizer_3")
    lora_targets = JOINT_ATTENTION
    token_arguments: Mapping[str, int] | None = {}
    overflow_encoders = ("t5",)
    fp32_encoders = ("vae",)  # vae/config.json has force_upcast set
    scheduler_settings: Mapping[str, Any] = dict(shift=SHIFT)
    sampling_spacing = "inclusive"

    def __init__(self, sizes: Mapping[str, Any], variant: str):
        self.sizes, self.variant = sizes, variant
        self.text_width = sizes["t5"]["d_model"]
        self.pooled_width = sum(text["projection_dim"] for text in sizes["texts"])
        self.t5_tokenizer = T5Tokenizer(T5_NUM_TOKENS)

    def size_problem(self, size: ImageSize) -> str | None:
        most = self.sizes["transformer"]["pos_embed_max_size"] * self.side_multiple
        if max(size) > most:
            return f"{size[0]} x {size[1]} px is more than {self.name} has positions for. Possible: sides of at most {most}."
        return super().size_problem(size)

    def text_columns(self) -> dict[str, Column]:
        tokens = Column((CLIP_NUM_TOKENS,), torch.int64, below=CLIP_VOCABULARY)
        return {"tokens": tokens, "t5_tokens": Column((T5_NUM_TOKENS,), torch.int64, below=T5_VOCABULARY)}

    def stored_columns(self) -> dict[str, Column]:
        return super().stored_columns() | {"pooled": Column((self.pooled_width,), torch.float16)}

    def build_denoiser(self) -> nn.Module:
        from diffusers.models import SD3Transformer2DModel

        sizes = self.sizes["transformer"]
        return SD3Transformer2DModel(
            joint_attention_dim=self.text_width,
            caption_projection_dim=sizes["num_attention_heads"] * sizes.get("attention_head_dim", 64),
            pooled_projection_dim=self.pooled_width,
            qk_norm="rms_norm",
            **{"attention_head_dim": 64, **sizes},
        )

    def build_encoders(self) -> dict[str, nn.Module]:
        no_convolutions = dict(use_quant_conv=False, use_post_quant_conv=False)  # between posterior and latent
        vae = self.build_vae(shift_factor=LATENT_SHIFT, **no_convolutions, **self.sizes["vae"])
        first, second = (
            clip_text_config(hidden_act=activation, **sizes)
            for activation, sizes in zip(("quick_gelu", "gelu"), self.sizes["texts"], strict=True)
        )
        texts = {"text": build_clip_text(first, projected=True), "text_2": build_clip_text(second, projected=True)}
        return {"vae": vae, **texts, "t5": T5Text(t5_config(**self.sizes["t5"]))}

    def network_names(self) -> dict[str, Callable[[nn.Module], ldm_names.NetworkNames]]:
        return {
            "vae": ldm_names.vae,
            "text": ldm_names.clip_text_in_folder("text_encoder"),
            "text_2": ldm_names.clip_text_in_folder("text_encoder_2"),
            "t5": ldm_names.t5_text_in_folder("text_encoder_3"),
            "denoiser": ldm_names.network_in_folder("transformer", "SD3Transformer2DModel", "num_attention_heads"),
        }

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        return {"tokens": pipeline_files.tokenize_clip(captions), "t5_tokens": self.t5_tokenizer(captions)}

    def read_tokenizers(self, folder: Path) -> None:
        """T5's table of words is published with its weights; random ones read bytes."""
        self.t5_tokenizer = T5Tokenizer(T5_NUM_TOKENS, folder / "tokenizer_3" / TOKENIZER_FILE)

    def save_tokenizers(self, folder: Path) -> dict[str, str]:
        pads = {"tokenizer": pipeline_files.CLIP_END_TEXT, "tokenizer_2": pipeline_files.CLIP_ZERO_TEXT}
        classes = {name: pipeline_files.save_clip_tokenizer(folder / name, pad) for name, pad in pads.items()}
        t5 = pipeline_files.save_t5_tokenizer(folder / "tokenizer_3", self.t5_tokenizer.published, T5_NUM_TOKENS)
        return {**classes, "tokenizer_3": t5}

    def pipeline_call(self, size: ImageSize, guidance: float) -> dict[str, Any]:
        return {"width": size[0], "height": size[1], "max_sequence_length": T5_NUM_TOKENS, "guidance_scale": guidance}

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # (B, 77), (B, L) -> text (B, 77 + L, D), pooled (B, P). Of CLIP the states before the last block.
        tokens = batch["tokens"].long()
        first = encoders["text"](input_ids=pad_with_end_token(tokens), output_hidden_states=True)
        second = encoders["text_2"](input_ids=tokens, output_hidden_states=True)
        clip = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        t5 = encoders["t5"](batch["t5_tokens"].long())
        text = torch.cat([F.pad(clip, (0, self.text_width - clip.shape[-1])), t5.to(clip.dtype)], dim=1)
        return {"text": text, "pooled": torch.cat([first.text_embeds, second.text_embeds], dim=-1)}

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        return denoiser(
            noisy,
            timestep=1000.0 * times,
            encoder_hidden_states=condition["text"],
            pooled_projections=condition["pooled"],
            return_dict=False,
        )[0]
