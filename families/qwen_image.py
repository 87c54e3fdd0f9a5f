"""Qwen-Image: a 20 B parameter transformer on 16-channel latents, trained as a rectified flow; Qwen2.5-VL reads the caption.

Wu et al. 2025 (arXiv:2508.02324): the configuration of Qwen/Qwen-Image, and diffusers' QwenImagePipeline. The caption stands
in a template, whose first tokens' states are dropped. Of Qwen2.5-VL the language model alone is built: for text its three
rotary positions are equal, so that it is Qwen2's.

Shapes: B batch, H W image height and width in px, L = 512 text tokens after the N = 34 of the template, D = 3584 width of
Qwen's states, S = H W / 256 image tokens.
    images (B, 3, H, W) -> moments (B, 32, H/8, W/8) -> latents (B, 16, H/8, W/8), e.g. (B, 16, 166, 166) at 1328 px
    latents (B, 16, h, w) -> packed (B, S, 64): each 2 x 2 block is one token
    qwen_tokens (B, N + L) -> text (B, L, D), zeros after the caption; mask (B, L)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.value_types import ImageSize
from families import packing, wan_autoencoder
from families.language_models import BYTE_VOCABULARY, LanguageTokenizer, build_language_model, language_model_in_folder
from families.lora import ATTENTION
from families.spec import Column, Family, Pipeline, select_preset
from weights import hub_names, ldm_names

# prompt_template_encode and prompt_template_encode_start_idx of its pipeline
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
NUM_DROPPED = 34
# scheduler_config.json: the logarithm of the shift grows with the number of image tokens
SCHEDULER: dict[str, Any] = dict(
    use_dynamic_shifting=True,
    base_image_seq_len=256,
    base_shift=0.5,
    max_image_seq_len=8192,
    max_shift=0.9,
    shift_terminal=0.02,
)
QWEN: dict[str, Any] = dict(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    max_position_embeddings=128000,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)
TINY_QWEN = QWEN | dict(
    vocab_size=BYTE_VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "full": dict(transformer={}, vae={}, qwen=QWEN, pad=151643),
    "tiny": dict(
        transformer=dict(num_layers=2, num_attention_heads=2, attention_head_dim=16, axes_dims_rope=(4, 6, 6)),
        vae=dict(base_dim=8, num_res_blocks=1),
        qwen=TINY_QWEN,
        pad=0,
    ),
}


def build(preset: str, variant: str) -> QwenImage:
    """Return the family in a preset's size. Raises ValueError: an unknown preset or variant."""
    family = QwenImage(select_preset("qwen_image", variant, preset, {"stock": PRESETS}))
    family.hub_name = hub_names.QWEN_IMAGE if preset == "full" else None
    return family


class QwenImage(Family):
    """Implements `families.spec.Family`."""

    name, variant = "qwen_image", "stock"
    predictions = ("flow",)
    objective: Mapping[str, Any] = dict(prediction="flow", timesteps="logit_normal", shift=1.0, caption_dropout=0.1)
    pixels_per_latent, side_multiple = 8, 16
    latent_channels, latent_scale = 16, 1.0
    latent_means, latent_stds = wan_autoencoder.MEANS, wan_autoencoder.STDS
    num_tokens = 512
    pipeline = Pipeline("QwenImagePipeline", {}, ())
    clip_tokenizer_folder = None
    lora_targets = ATTENTION
    scheduler_settings = SCHEDULER

    def __init__(self, sizes: Mapping[str, Any]):
        self.sizes = sizes
        self.text_width, self.vocabulary_size = sizes["qwen"]["hidden_size"], sizes["qwen"]["vocab_size"]
        self.tokenizer = self._build_tokenizer()

    def _build_tokenizer(self, folder: Path | None = None) -> LanguageTokenizer:
        return LanguageTokenizer(NUM_DROPPED + self.num_tokens, self.sizes["pad"], None, TEMPLATE, folder)

    def text_columns(self) -> dict[str, Column]:
        return {"qwen_tokens": Column((NUM_DROPPED + self.num_tokens,), torch.int64, below=self.vocabulary_size)}

    def stored_columns(self) -> dict[str, Column]:
        return super().stored_columns() | {"mask": Column((self.num_tokens,), torch.float16)}

    def build_denoiser(self) -> nn.Module:
        from diffusers.models import QwenImageTransformer2DModel

        transformer = QwenImageTransformer2DModel(joint_attention_dim=self.text_width, **self.sizes["transformer"])
        transformer.transformer_blocks[-1].register_forward_hook(_reach_text_layers)
        return transformer

    def build_encoders(self) -> dict[str, nn.Module]:
        from diffusers.models import AutoencoderKLQwenImage

        qwen = build_language_model("Qwen2Model", "Qwen2Config", **self.sizes["qwen"])
        return {"vae": AutoencoderKLQwenImage(**self.sizes["vae"]), "qwen": qwen}

    def network_names(self) -> dict[str, Callable[[nn.Module], ldm_names.NetworkNames]]:
        transformer = ldm_names.network_in_folder("transformer", "QwenImageTransformer2DModel", "num_attention_heads")
        return {
            "vae": ldm_names.network_in_folder("vae", "AutoencoderKLQwenImage"),
            "qwen": language_model_in_folder(unused=r"(model\.)?visual\..*|lm_head\.weight"),
            "denoiser": transformer,
        }

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        return {"qwen_tokens": self.tokenizer(captions)}

    def read_tokenizers(self, folder: Path) -> None:
        """Qwen's table of words is published with its weights; random ones read bytes."""
        self.tokenizer = self._build_tokenizer(folder / "tokenizer")

    def save_tokenizers(self, folder: Path) -> dict[str, str]:
        return {"tokenizer": self.tokenizer.save(folder / "tokenizer", "Qwen2Tokenizer")}

    def encode_images(self, encoders: Mapping[str, nn.Module], images: Tensor) -> Tensor:
        return super().encode_images(encoders, images[:, :, None])[:, :, 0]  # its autoencoder is one of videos

    def decode_latents(self, encoders: Mapping[str, nn.Module], latents: Tensor) -> Tensor:
        return super().decode_latents(encoders, latents[:, :, None])[:, :, 0]

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tokens = batch["qwen_tokens"].long()
        states = encoders["qwen"](input_ids=tokens, attention_mask=tokens != self.sizes["pad"]).last_hidden_state
        mask = self.text_mask(batch)["mask"].to(states.dtype)
        return {"text": states[:, NUM_DROPPED:] * mask[:, :, None], "mask": mask}

    def text_mask(self, text: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"mask": (text["qwen_tokens"] != self.sizes["pad"])[:, NUM_DROPPED:]}

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        height, width = noisy.shape[-2:]
        packed = denoiser(
            packing.pack(noisy),
            encoder_hidden_states=condition["text"],
            encoder_hidden_states_mask=condition["mask"].bool(),
            timestep=times,
            img_shapes=[[(1, height // 2, width // 2)]] * len(noisy),
            return_dict=False,
        )[0]
        return packing.unpack(packed, height, width)

    # --- sampling, here and in diffusers' pipeline ---

    def guide(self, unconditional: Tensor, conditional: Tensor, guidance: float) -> Tensor:
        """Each token of the guided prediction is as long as that of the conditional one."""
        guided = packing.pack(super().guide(unconditional, conditional, guidance))
        lengths = packing.pack(conditional).norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        return packing.unpack(guided * lengths, *conditional.shape[-2:])

    def pipeline_call(self, size: ImageSize, guidance: float) -> dict[str, Any]:
        call = {"width": size[0], "height": size[1], "true_cfg_scale": guidance, "max_sequence_length": self.num_tokens}
        return call if guidance == 1.0 else call | {"negative_prompt": ""}

    def pipeline_latents(self, noise: Tensor) -> Tensor:
        return packing.pack(noise)


def _reach_text_layers(block: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Give the last block's text layers, whose output nothing reads, gradients of zero: DDP waits for every gradient."""
    text, image = output
    return text, image + 0.0 * text.sum() if torch.is_grad_enabled() else image
