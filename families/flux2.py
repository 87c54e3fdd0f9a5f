"""FLUX.2: transformers on 32-channel latents in blocks of 2 x 2, trained as a rectified flow; a language model
encodes the text.

Black Forest Labs 2025: the configurations of black-forest-labs/FLUX.2-dev and FLUX.2-klein-base-4B and -9B, and diffusers'
pipelines. The states of three layers of the language model are the text; its later layers are not built.

    variant    parameters   caption read by    the guidance scale
    dev        32 B         Mistral Small 3    is an input
    klein_4b   4 B          Qwen3 4B           is none
    klein_9b   9 B          Qwen3 8B           is none

How the published weights were trained is not known: times are those of FLUX.1 here.

Shapes: B batch, H W image height and width in px, L = 512 text tokens, D = 3 x the language model's width, h w = H/16, W/16.
    images (B, 3, H, W) -> moments (B, 256, h, w) -> latents (B, 128, h, w): normalized by the autoencoder's batch norm
    text_tokens (B, L) -> text (B, L, D)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.value_types import ImageSize
from families.language_models import BYTE_VOCABULARY, LanguageTokenizer, build_language_model, language_model_in_folder
from families.lora import JOINT_ATTENTION
from families.spec import Column, Family, Pipeline, select_preset
from weights import hub_names, ldm_names

SYSTEM = (  # SYSTEM_MESSAGE of diffusers' pipelines/flux2/system_messages.py
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object relationships, "
    "object\nattribution and actions without speculation."
)
# Language model -> its chat template, and the caption in the conversation with which transformers fills a template in.
TEMPLATES = {
    "Mistral": f"<s>[SYSTEM_PROMPT]{SYSTEM}[/SYSTEM_PROMPT][INST]{{}}[/INST]",
    "Qwen3": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
}
CAPTIONS_IN_CHAT = {"Mistral": "{{ messages[1].content[0].text }}", "Qwen3": "{{ messages[0].content }}"}
PADS = {"Mistral": 11, "Qwen3": 151643}
LAYERS, NUM_LAYERS = {"Mistral": (10, 20, 30), "Qwen3": (9, 18, 27)}, {"Mistral": 40, "Qwen3": 36}
GUIDANCE_IN_TRAINING = 1.0

VAE = dict(block_out_channels=(128, 256, 512, 512), norm_num_groups=32)
TINY_VAE = dict(block_out_channels=(8, 16, 16, 16), norm_num_groups=8, latent_channels=32)
HEADS: dict[str, Any] = dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128)
MISTRAL = HEADS | dict(vocab_size=131072, hidden_size=5120, intermediate_size=32768, rms_norm_eps=1e-5)
MISTRAL |= dict(rope_parameters={"rope_type": "default", "rope_theta": 1e9}, max_position_embeddings=131072)
QWEN = HEADS | dict(vocab_size=151936, rms_norm_eps=1e-6, max_position_embeddings=40960)
QWEN |= dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
QWEN_4B = QWEN | dict(hidden_size=2560, intermediate_size=9728)
QWEN_8B = QWEN | dict(hidden_size=4096, intermediate_size=12288)
TINY_TEXT: dict[str, Any] = dict(
    vocab_size=BYTE_VOCABULARY, hidden_size=16, intermediate_size=32, num_attention_heads=2, head_dim=8
)
TINY_TEXT |= dict(num_key_value_heads=1, layers=(1, 2, 3))
TINY_TRANSFORMER = dict(
    num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2, axes_dims_rope=(4,) * 4
)
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    variant: {
        "full": dict(vae=VAE, text=text, transformer=transformer),
        "tiny": dict(vae=TINY_VAE, text=TINY_TEXT, transformer=TINY_TRANSFORMER),
    }
    for variant, text, transformer in (
        ("dev", MISTRAL, {}),
        ("klein_4b", QWEN_4B, dict(num_layers=5, num_single_layers=20, num_attention_heads=24)),
        ("klein_9b", QWEN_8B, dict(num_layers=8, num_single_layers=24, num_attention_heads=32)),
    )
}
ON_HUB = {"dev": hub_names.FLUX2_DEV, "klein_4b": hub_names.FLUX2_KLEIN_4B, "klein_9b": hub_names.FLUX2_KLEIN_9B}


def build(preset: str, variant: str) -> Flux2:
    """Return the family in a preset's size. Raises ValueError: an unknown preset or variant."""
    if variant == "stock":  # the default of the key
        variant = "dev"
    family = Flux2(select_preset("flux2", variant, preset, SIZES), variant)
    family.hub_name = ON_HUB[variant] if preset == "full" else None
    return family


class Flux2(Family):
    """Implements `families.spec.Family`."""

    name = "flux2"
    predictions = ("flow",)
    objective: Mapping[str, Any] = dict(prediction="flow", timesteps="logit_normal", shift=3.0, caption_dropout=0.1)
    pixels_per_latent, latent_channels, latent_scale = 16, 128, 1.0
    scheduler_settings: Mapping[str, Any] = dict(use_dynamic_shifting=True, shift=3.0)
    num_tokens = 512
    clip_tokenizer_folder = None
    lora_targets = (*JOINT_ATTENTION, "to_qkv_mlp_proj")

    def __init__(self, sizes: Mapping[str, Any], variant: str):
        self.sizes, self.variant, self.has_guidance_input = sizes, variant, variant == "dev"
        self.model = "Mistral" if variant == "dev" else "Qwen3"
        self.layers: Sequence[int] = sizes["text"].get("layers", LAYERS[self.model])
        self.text_width = len(self.layers) * sizes["text"]["hidden_size"]
        self.vocabulary_size = sizes["text"]["vocab_size"]
        self.pad = 0 if self.vocabulary_size == BYTE_VOCABULARY else PADS[self.model]
        self.tokenizer = LanguageTokenizer(self.num_tokens, self.pad, None, TEMPLATES[self.model])
        klein = Pipeline("Flux2KleinPipeline", {"is_distilled": False}, ())
        self.pipeline = Pipeline("Flux2Pipeline", {}, ()) if variant == "dev" else klein

    def text_columns(self) -> dict[str, Column]:
        return {"text_tokens": Column((self.num_tokens,), torch.int64, below=self.vocabulary_size)}

    def build_denoiser(self) -> nn.Module:
        from diffusers.models import Flux2Transformer2DModel

        options = dict(joint_attention_dim=self.text_width, guidance_embeds=self.has_guidance_input)
        return Flux2Transformer2DModel(**options, **self.sizes["transformer"])

    def build_encoders(self) -> dict[str, nn.Module]:
        from diffusers.models import AutoencoderKLFlux2

        sizes = {name: value for name, value in self.sizes["text"].items() if name != "layers"}
        depth = self.layers[-1] + 1  # one layer more: transformers normalizes the states of the last
        text = build_language_model(f"{self.model}Model", f"{self.model}Config", num_hidden_layers=depth, **sizes)
        return {"vae": AutoencoderKLFlux2(**self.sizes["vae"]), "text": text}

    def network_names(self) -> dict[str, Callable[[nn.Module], ldm_names.NetworkNames]]:
        unread = "|".join(str(layer) for layer in range(self.layers[-1] + 1, NUM_LAYERS[self.model]))
        unused = rf"(.*\.)?lm_head\.weight|(model\.)?(vision_tower|multi_modal_projector)\..*|.*layers\.({unread})\..*"
        return {
            "vae": ldm_names.network_in_folder("vae", "AutoencoderKLFlux2"),
            "text": language_model_in_folder(unused),
            "denoiser": ldm_names.network_in_folder("transformer", "Flux2Transformer2DModel", "num_attention_heads"),
        }

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        return {"text_tokens": self.tokenizer([caption.replace("[IMG]", "") for caption in captions])}

    def read_tokenizers(self, folder: Path) -> None:
        """Read the tokenizer of published weights; with random weights each byte is a token."""
        path, template = folder / "tokenizer", TEMPLATES[self.model]
        self.tokenizer = LanguageTokenizer(self.num_tokens, self.pad, None, template, path, padding_side=None)

    def save_tokenizers(self, folder: Path) -> dict[str, str]:
        chat = TEMPLATES[self.model].replace("\n", "{{ '\\n' }}").replace("{}", CAPTIONS_IN_CHAT[self.model])
        kind = "PixtralProcessor" if self.model == "Mistral" else "Qwen2TokenizerFast"
        return {"tokenizer": self.tokenizer.save(folder / "tokenizer", kind, chat_template=chat)}

    def encode_images(self, encoders: Mapping[str, nn.Module], images: Tensor) -> Tensor:
        mean, logvar = (F.pixel_unshuffle(part, 2) for part in super().encode_images(encoders, images).chunk(2, dim=1))
        center, std = self._batch_norm(encoders)
        return torch.cat([(mean - center) / std, logvar - 2.0 * std.log()], dim=1)

    def decode_latents(self, encoders: Mapping[str, nn.Module], latents: Tensor) -> Tensor:
        mean, std = self._batch_norm(encoders)
        return super().decode_latents(encoders, F.pixel_shuffle(latents * std + mean, 2))

    def _batch_norm(self, encoders: Mapping[str, nn.Module]) -> tuple[Tensor, Tensor]:
        norm: Any = encoders["vae"].bn
        return norm.running_mean[:, None, None], (norm.running_var[:, None, None] + norm.eps).sqrt()

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tokens = batch["text_tokens"].long()
        output = encoders["text"](input_ids=tokens, attention_mask=tokens != self.pad, output_hidden_states=True)
        return {"text": torch.cat([output.hidden_states[layer] for layer in self.layers], dim=-1)}

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        num, _, height, width = noisy.shape
        guidance = condition.get("guidance")
        if guidance is None and self.has_guidance_input:
            guidance = torch.full((num,), GUIDANCE_IN_TRAINING, device=noisy.device)
        rows, columns, text = (torch.arange(n, device=noisy.device) for n in (height, width, self.num_tokens))
        packed = denoiser(
            noisy.flatten(2).transpose(1, 2),
            encoder_hidden_states=condition["text"],
            timestep=times,
            img_ids=torch.cartesian_prod(rows[:1], rows, columns, rows[:1]),
            txt_ids=torch.cartesian_prod(rows[:1], rows[:1], rows[:1], text),
            guidance=guidance,
            return_dict=False,
        )[0]
        return packed.transpose(1, 2).unflatten(2, (height, width))

    # --- sampling, here and in diffusers' pipeline ---

    def sampling_shift(self, latent: tuple[int, ...], steps: int) -> float:
        """Return e to the power of what compute_empirical_mu of its pipelines returns."""
        tokens = latent[-2] * latent[-1]
        at_200_steps = 0.00016927 * tokens + 0.45666666
        if tokens > 4300:
            return math.exp(at_200_steps)
        at_10_steps = 8.73809524e-05 * tokens + 1.89833333
        return math.exp(at_200_steps + (at_200_steps - at_10_steps) / 190.0 * (steps - 200.0))

    def pipeline_call(self, size: ImageSize, guidance: float) -> dict[str, Any]:
        call = {"width": size[0], "height": size[1], "guidance_scale": guidance, "max_sequence_length": self.num_tokens}
        return call | {"text_encoder_out_layers": tuple(self.layers)}
