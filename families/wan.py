"""Wan 2.1 and 2.2: transformers of up to 14 B parameters on video latents, trained as a rectified flow; UMT5
encodes the text.

Wan Team 2025 (arXiv:2503.20314): the Wan-AI/Wan2.1-...-Diffusers models and Wan2.2-TI2V-5B-Diffusers, their configurations,
and diffusers' pipelines.

    variant     network                           latents              besides the caption
    i2v         14 B, for 480 lines               16 channels, 8 px    the first frame: its latents, a mask, CLIP's states
    t2v         14 B                              16 channels, 8 px    nothing
    t2v_1.3b    1.3 B                             16 channels, 8 px    nothing
    ti2v_5b     5 B, of Wan 2.2                   48 channels, 16 px   nothing: text to video
    i2v_5b      the same                          the same             the first frame's latent

Image to video, `i2v`: the network's 36 input channels are the noisy latent's 16; 4 of the mask, 1 where a frame is given; and
the 16 of a video that has the first frame and then grey.
`i2v_5b`: the first latent frame is the given one, without noise, and its tokens have time 0. It is left out of the loss. In
sampling, its velocity points to the given frame.

Sampling is Euler's method, with the times that WanPipeline takes with diffusers' FlowMatchEulerDiscreteScheduler. Published
folders have UniPC instead, which is of order 2 and rounds its times down to thousandths.

Shapes: B batch, F frames, H W height and width in px, L = 512 text tokens, D = 4096 width of UMT5's states, N = 257 states
of CLIP, E = 1280 their width.
    videos (B, 3, F, H, W) -> moments (B, 32, f, H/8, W/8) -> latents (B, 16, f, H/8, W/8), f = 1 + (F - 1) / 4
    umt5_tokens (B, L) -> text (B, L, D), zeros after the caption
    videos -> first_frame (B, 16, f, H/8, W/8), image_states (B, N, E); of i2v_5b first_frame (B, 48, 1, H/16, W/16)
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.value_types import ImageSize
from families import pipeline_files, wan_autoencoder
from families.lora import ATTENTION
from families.spec import Column, Pipeline, select_preset
from families.video_family import AMD_OBJECTIVE, VideoFamily
from weights import hub_names, ldm_names
from weights.encoder_networks import (
    NUM_UNREAD_CLIP_VISION,
    T5_PAD,
    TOKENIZER_FILE,
    UMT5_VOCABULARY,
    ClipVision,
    T5Text,
    T5Tokenizer,
    t5_config,
)

MASK_CHANNELS = 4  # one for each frame that a latent encodes
MAX_LATENTS_480P = (832 // 8) * (480 // 8)

# transformer/config.json; all else is the class's default
LARGE_TRANSFORMER: dict[str, Any] = dict(num_attention_heads=40, ffn_dim=13824, num_layers=40, text_dim=4096)
SMALL_TRANSFORMER: dict[str, Any] = dict(num_attention_heads=12, ffn_dim=8960, num_layers=30, text_dim=4096)
MIDDLE_TRANSFORMER: dict[str, Any] = dict(num_attention_heads=24, ffn_dim=14336, num_layers=30, text_dim=4096)
TINY_TRANSFORMER: dict[str, Any] = dict(
    num_attention_heads=2, attention_head_dim=12, ffn_dim=48, num_layers=2, text_dim=8, freq_dim=32
)
FULL_ENCODERS: dict[str, Any] = dict(
    vae={},
    umt5=dict(d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64),
    clip=dict(
        hidden_size=1280,
        intermediate_size=5120,
        num_hidden_layers=32 - NUM_UNREAD_CLIP_VISION,
        num_attention_heads=16,
        image_size=224,
        patch_size=14,
    ),
)
TINY_ENCODERS: dict[str, Any] = dict(
    vae=dict(base_dim=8, num_res_blocks=1),
    umt5=dict(d_model=8, d_kv=8, d_ff=32, num_layers=2, num_heads=2),
    clip=dict(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    ),
)
# vae/config.json of Wan 2.2
VAE_16X: dict[str, Any] = dict(z_dim=48, is_residual=True, in_channels=12, out_channels=12, patch_size=2)
VAE_16X |= dict(
    scale_factor_spatial=16, latents_mean=list(wan_autoencoder.MEANS_16X), latents_std=list(wan_autoencoder.STDS_16X)
)
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    variant: {
        "full": FULL_ENCODERS | {"transformer": transformer},
        "tiny": TINY_ENCODERS | {"transformer": TINY_TRANSFORMER},
    }
    for variant, transformer in {
        "i2v": LARGE_TRANSFORMER,
        "t2v": LARGE_TRANSFORMER,
        "t2v_1.3b": SMALL_TRANSFORMER,
    }.items()
}
OF_5B = ("ti2v_5b", "i2v_5b")
SIZES["ti2v_5b"] = SIZES["i2v_5b"] = {
    "full": FULL_ENCODERS
    | {"transformer": MIDDLE_TRANSFORMER, "vae": VAE_16X | dict(base_dim=160, decoder_base_dim=256)},
    "tiny": TINY_ENCODERS
    | {
        "transformer": TINY_TRANSFORMER | dict(num_attention_heads=4),
        "vae": VAE_16X | dict(base_dim=8, decoder_base_dim=8, num_res_blocks=1),
    },
}
"""Variant -> preset -> what it sets of the libraries' classes. tiny: 2.8 M parameters with its encoders, 2.1 M of them in
UMT5's token table."""
ON_HUB = {"i2v": hub_names.WAN_I2V, "t2v": hub_names.WAN_T2V, "t2v_1.3b": hub_names.WAN_T2V_SMALL}
ON_HUB |= dict.fromkeys(OF_5B, hub_names.WAN_TI2V)


def build(preset: str, variant: str) -> Wan:
    """Return the family in a preset's size. Raises ValueError: an unknown preset or variant."""
    if variant == "stock":  # the default of the key
        variant = "i2v"
    family = Wan(select_preset("wan", variant, preset, SIZES), variant)
    family.hub_name = ON_HUB[variant] if preset == "full" else None
    return family


class Wan(VideoFamily):
    """Implements `families.spec.Family`."""

    name = "wan"
    objective = AMD_OBJECTIVE
    num_frames, frames_per_latent, frames_per_sec = 129, 4, 16.0
    latent_channels = 16
    num_tokens = 512
    tokenizer_folders = ("tokenizer",)
    clip_tokenizer_folder = None
    lora_targets = ATTENTION
    token_arguments: Mapping[str, int] | None = {"rotary_emb": 1}
    overflow_encoders = ("umt5",)
    sampling_spacing = "inclusive"
    fp32_encoders = ("vae",)  # as in the authors' wan/modules/vae.py and the example of diffusers' WanPipeline

    def __init__(self, sizes: Mapping[str, dict[str, Any]], variant: str):
        self.sizes, self.variant = sizes, variant
        self.has_first_frame, self.has_clip = variant in ("i2v", "i2v_5b"), variant == "i2v"
        name = "WanImageToVideoPipeline" if self.has_first_frame else "WanPipeline"
        absent = ("transformer_2", *(("image_encoder", "image_processor") if variant == "i2v_5b" else ()))
        # expand_timesteps: a time for each token, all equal without a first frame
        self.pipeline = Pipeline(name, {"expand_timesteps": variant in OF_5B}, absent)
        if variant == "i2v_5b":
            self.num_given_frames = 1
            self.token_arguments = {"rotary_emb": 1, "temb": 1}
        self.text_width = sizes["umt5"]["d_model"]
        self.umt5_tokenizer = T5Tokenizer(self.num_tokens)
        self.latent_means, self.latent_stds = wan_autoencoder.MEANS, wan_autoencoder.STDS
        if variant in OF_5B:
            self.latent_means, self.latent_stds = wan_autoencoder.MEANS_16X, wan_autoencoder.STDS_16X
            self.latent_channels, self.pixels_per_latent, self.side_multiple = 48, 16, 32
            self.num_frames, self.frames_per_sec = 121, 24.0

    def text_columns(self) -> dict[str, Column]:
        return {"umt5_tokens": Column((self.num_tokens,), torch.int64, below=UMT5_VOCABULARY)}

    def image_columns(self, size: ImageSize) -> dict[str, Column]:
        if not self.has_clip:
            channels, _, *sides = self.latent_shape(size)
            return {"first_frame": Column((channels, 1, *sides), torch.float16)} if self.has_first_frame else {}
        clip = self.sizes["clip"]
        num_states = 1 + (clip["image_size"] // clip["patch_size"]) ** 2
        return {
            "first_frame": Column(self.latent_shape(size), torch.float16),
            "image_states": Column((num_states, clip["hidden_size"]), torch.float16),
        }

    def sampling_shift(self, latent: tuple[int, ...], steps: int) -> float:
        """Return 5; for image to video of 480 lines, 832 x 480 px or less, 3: _validate_args in generate.py of Wan 2.1."""
        return 3.0 if self.has_clip and latent[-2] * latent[-1] <= MAX_LATENTS_480P else 5.0

    def frames_problem(self, num_frames: int) -> str | None:
        if num_frames == 1 and self.num_given_frames:
            return (
                f"1 frame does not fit {self.variant}: it is the given one, so there is nothing to train. Nearest: 5."
            )
        return super().frames_problem(num_frames)

    def build_denoiser(self) -> nn.Module:
        from diffusers.models import WanTransformer3DModel

        sizes, image_sizes = self.sizes["transformer"], dict(in_channels=self.latent_channels)
        if self.has_clip:
            width = sizes["num_attention_heads"] * sizes.get("attention_head_dim", 128)
            channels = 2 * self.latent_channels + MASK_CHANNELS
            image_sizes = dict(
                in_channels=channels, image_dim=self.sizes["clip"]["hidden_size"], added_kv_proj_dim=width
            )
        return WanTransformer3DModel(out_channels=self.latent_channels, **sizes, **image_sizes)

    def build_encoders(self) -> dict[str, nn.Module]:
        from diffusers.models import AutoencoderKLWan

        umt5 = t5_config(multilingual=True, **self.sizes["umt5"])
        encoders: dict[str, nn.Module] = {"vae": AutoencoderKLWan(**self.sizes["vae"]), "umt5": T5Text(umt5)}
        if self.has_clip:
            from transformers import CLIPVisionConfig

            encoders["clip"] = ClipVision(CLIPVisionConfig(hidden_act="gelu", **self.sizes["clip"]))
        return encoders

    def network_names(self) -> dict[str, Callable[[nn.Module], ldm_names.NetworkNames]]:
        names: dict[str, Callable[[nn.Module], ldm_names.NetworkNames]] = {
            "vae": ldm_names.network_in_folder("vae", "AutoencoderKLWan"),
            "umt5": ldm_names.t5_text_in_folder("text_encoder"),
            "denoiser": ldm_names.network_in_folder("transformer", "WanTransformer3DModel", "num_attention_heads"),
        }
        return names | ({"clip": ldm_names.clip_vision} if self.has_clip else {})

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        return {"umt5_tokens": self.umt5_tokenizer([clean_caption(caption) for caption in captions])}

    def read_tokenizers(self, folder: Path) -> None:
        """Read the tokenizer of published weights; with random weights each byte is a token."""
        self.umt5_tokenizer = T5Tokenizer(self.num_tokens, folder / "tokenizer" / TOKENIZER_FILE)

    def save_tokenizers(self, folder: Path) -> dict[str, str]:
        published = self.umt5_tokenizer.published
        classes = {"tokenizer": pipeline_files.save_t5_tokenizer(folder / "tokenizer", published, self.num_tokens)}
        if not self.has_clip:
            return classes
        processor = folder / "image_processor"
        side = self.sizes["clip"]["image_size"]
        return classes | {processor.name: pipeline_files.save_clip_image_processor(processor, side)}

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tokens = batch["umt5_tokens"].long()
        mask = tokens != T5_PAD
        return {"text": encoders["umt5"](tokens, mask) * mask[:, :, None]}

    def encode_image_columns(self, encoders: Mapping[str, nn.Module], images: Tensor) -> dict[str, Tensor]:
        if not self.has_first_frame:
            return {}
        first = images[:, :, :1]
        if self.has_clip:
            first = torch.cat([first, torch.zeros_like(images[:, :, 1:])], dim=2)
        means, _ = self.encode_images(encoders, first).float().chunk(2, dim=1)
        columns = {"first_frame": self.normalize_latents(means)}
        return columns | ({"image_states": encoders["clip"](images[:, :, 0])} if self.has_clip else {})

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        if self.num_given_frames:
            return self._denoise_after_first_frame(denoiser, noisy, times, condition)
        states = None
        if self.has_first_frame:
            mask = torch.zeros(len(noisy), MASK_CHANNELS, *noisy.shape[2:], dtype=noisy.dtype, device=noisy.device)
            mask[:, :, 0] = 1.0
            noisy = torch.cat([noisy, mask, condition["first_frame"].to(noisy.dtype)], dim=1)
            states = condition["image_states"]
        return denoiser(
            noisy,
            timestep=1000.0 * times,
            encoder_hidden_states=condition["text"],
            encoder_hidden_states_image=states,
            return_dict=False,
        )[0]

    def _denoise_after_first_frame(
        self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]
    ) -> Tensor:
        first, rest = condition["first_frame"].to(noisy.dtype), noisy[:, :, 1:]
        height, width = (side // 2 for side in noisy.shape[3:])  # a token is 2 x 2 latent positions of a frame
        of_frames = torch.cat([torch.zeros_like(times)[:, None], times[:, None].expand(-1, rest.shape[2])], dim=1)
        velocity = denoiser(
            torch.cat([first, rest], dim=2),
            timestep=1000.0 * of_frames.repeat_interleave(height * width, dim=1),
            encoder_hidden_states=condition["text"],
            return_dict=False,
        )[0]
        # Infinite at time 0, which sampling never reaches. The loss leaves this frame out.
        to_first = (noisy[:, :, :1] - first) / times.reshape(-1, 1, 1, 1, 1)
        return torch.cat([to_first.to(velocity.dtype), velocity[:, :, 1:]], dim=2)

    def pipeline_scheduler(self, sampler: str, prediction: str, *, zero_terminal_snr: bool, size: ImageSize) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler

        return FlowMatchEulerDiscreteScheduler(shift=self.sampling_shift(self.latent_shape(size), 0))


def clean_caption(caption: str) -> str:
    """Repair a caption as its pipelines do: broken encodings, HTML entities, runs of spaces."""
    import ftfy

    text = html.unescape(html.unescape(ftfy.fix_text(caption)))
    return re.sub(r"\s+", " ", text.strip()).strip()
