"""Sana: transformers with linear attention on DC-AE's latents of 32 x 32 px, trained as a rectified flow; Gemma 2
encodes the text.

Xie et al. 2024 (arXiv:2410.10629): the configurations of Efficient-Large-Model/Sana_..._diffusers, and diffusers'
SanaPipeline. Gemma reads a caption after the instruction of section 3.3, whose states are dropped, except the start token's.
The empty caption has no instruction, as in the pipeline's unconditional call and the authors' null embedding. For random
weights the instruction is one token.

    variant   parameters
    1600m     1.6 B
    600m      0.6 B

Shapes: B batch, H W image height and width in px, L = 300 text tokens, N of the instruction, D = 2304 width of Gemma's
states.
    images (B, 3, H, W) -> moments (B, 32, H/32, W/32) -> latents (B, 32, H/32, W/32), e.g. (B, 32, 32, 32) at 1024 px
    gemma_tokens (B, L): start mark, caption -> with the instruction (B, L + N - 2) -> text (B, L, D), mask (B, L)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.value_types import ImageSize
from families import sana_autoencoder
from families.gemma_family import PAD, TINY_GEMMA, GemmaFamily
from families.language_models import build_language_model, language_model_in_folder
from families.lora import ATTENTION
from families.spec import Pipeline, select_preset
from weights import hub_names, ldm_names
from weights.tensors import copy_to_device

# complex_human_instruction of SanaPipeline, chi_prompt of the authors' configurations
INSTRUCTION = "\n".join((
    "Given a user prompt, generate an 'Enhanced prompt' that provides detailed visual descriptions suitable for image "
    "generation. Evaluate the level of detail in the user prompt:",
    "- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, textures, and spatial relationships "
    "to create vivid and concrete scenes.",
    "- If the prompt is already detailed, refine and enhance the existing details slightly without overcomplicating.",
    "Here are examples of how to transform or refine prompts:",
    "- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat curled up in a round shape, sleeping peacefully "
    "on a warm sunny windowsill, surrounded by pots of blooming red flowers.",
    "- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, featuring glowing street lamps, a "
    "diverse crowd of people in colorful clothing, and a double-decker bus passing by towering glass skyscrapers.",
    "Please generate only the enhanced description for the prompt below and avoid including any additional commentary or "
    "evaluations:",
    "User Prompt: ",
))  # fmt: skip
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
    prefix = INSTRUCTION.rstrip()

    def __init__(self, sizes: Mapping[str, Any], variant: str):
        super().__init__(sizes, variant)
        self.instruction = self.tokenizer.encode(INSTRUCTION)

    def read_tokenizers(self, folder: Path) -> None:
        super().read_tokenizers(folder)
        self.instruction = self.tokenizer.encode(INSTRUCTION)

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

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        tokens = torch.full((len(captions), self.num_tokens), PAD)
        for row, caption in zip(tokens, map(self.clean_caption, captions), strict=True):
            numbers = self.tokenizer.encode(INSTRUCTION + caption if caption else "")
            # The instruction's last token is a space, which becomes a part of the caption's first word.
            numbers = [*numbers[:1], *numbers[len(self.instruction) - 1 :]][: self.num_tokens]
            row[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        return {"gemma_tokens": tokens}

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        first, others = batch["gemma_tokens"].long().split((1, self.num_tokens - 1), dim=1)
        instruction = copy_to_device(torch.tensor(self.instruction[1:-1]), first.device).expand(len(first), -1)
        tokens = torch.cat([first, instruction.where(others[:, :1] != PAD, PAD), others], dim=1)
        states = encoders["gemma"](input_ids=tokens, attention_mask=tokens != PAD).last_hidden_state
        text = torch.cat([states[:, :1], states[:, -others.shape[1] :]], dim=1)
        return {"text": text, "mask": self.text_mask(batch)["mask"].to(text.dtype)}

    def pipeline_call(self, size: ImageSize, guidance: float) -> dict[str, Any]:
        width, height = size
        return {"width": width, "height": height, "guidance_scale": guidance, "use_resolution_binning": False}

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        return denoiser(
            noisy, condition["text"], 1000.0 * times, encoder_attention_mask=condition["mask"], return_dict=False
        )[0]
