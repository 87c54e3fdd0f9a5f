"""The miniature's networks: small versions of Stable Diffusion 2's classes, and the two that score its images.

    network   class                         what it is for                                  weights, in WEIGHTS
    vae       diffusers' AutoencoderKL      images <-> latents, 32 px -> 8 x 8 x 4          vae/
    video     diffusers' AutoencoderKLWan   videos <-> latents, 9 frames -> 3 x 8 x 8 x 4    video_vae/
    text      transformers' CLIPTextModel   conditions the denoiser; the pair's text tower  text_encoder/
    clip      transformers' CLIPModel       CLIP score                                      clip/ (all but the text tower)
    reader    `Reader`, below               features for FID; reads attributes              reader/

A token is a whole word: there are only 27, and a byte-pair table of 49,408 would be larger than all networks together.
As in OpenCLIP, a caption has a start token before it, an end token (the largest) after it, and is padded with 0.

Shapes: B batch, H W height and width in px (32), L = 16 text tokens, D = 64 text width, E = 64 features of the pair,
F = 64 features of the reader.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.shapes.scenes import ATTRIBUTES, WORDS
from weights.encoder_networks import build_clip_text

if TYPE_CHECKING:
    from diffusers.models import AutoencoderKL, AutoencoderKLWan
    from transformers import CLIPModel, CLIPTextConfig

WEIGHTS = Path(__file__).parent.parent / "shapes_weights"
"""The shipped weights: a diffusers folder with two further folders of the same kind, clip/ and reader/."""

SIDE_PX = 32
PIXELS_PER_LATENT = 4
NUM_TOKENS = 16  # the longest caption has 14 words
PAD, UNKNOWN = 0, 1
WORD_TOKENS = {word: number for number, word in enumerate(WORDS, start=2)}
START = 2 + len(WORDS)
END = START + 1
VOCABULARY = END + 1
SPECIAL_TOKENS = {"pad_token": PAD, "unk_token": UNKNOWN, "bos_token": START, "eos_token": END}
"""transformers' name -> token."""
TEXT_WIDTH = 64
NUM_FEATURES = 64


def tokenize(captions: Sequence[str]) -> Tensor:  # -> int64 (B, 16)
    """Turn captions into tokens. Unknown words become UNKNOWN; long captions are cut."""
    tokens = torch.full((len(captions), NUM_TOKENS), PAD)
    for row, caption in zip(tokens, captions, strict=True):
        words = re.findall("[a-z]+", caption.lower())[: NUM_TOKENS - 2]
        numbers = [START, *(WORD_TOKENS.get(word, UNKNOWN) for word in words), END]
        row[: len(numbers)] = torch.tensor(numbers)
    return tokens


# --- built with random weights, from torch's global generator ---


def build_vae(scaling_factor: float = 1.0) -> AutoencoderKL:
    """Build the VAE: images (B, 3, 32, 32) in [-1, 1] <-> (B, 4, 8, 8); 0.95 M parameters."""
    from diffusers.models import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=SIDE_PX,
        scaling_factor=scaling_factor,
    )


def build_video_vae() -> AutoencoderKLWan:
    """Build the video VAE: videos (B, 3, 1 + 4 n, 32, 32) in [-1, 1] <-> (B, 4, 1 + n, 8, 8); 0.63 M parameters."""
    from diffusers.models import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=16, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[True, True]
    )


def text_encoder_config() -> CLIPTextConfig:
    """Return the configuration of the text encoder: 3 blocks, 4 heads; 0.15 M parameters."""
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=NUM_TOKENS,
        hidden_size=TEXT_WIDTH,
        intermediate_size=4 * TEXT_WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        hidden_act="gelu",
        projection_dim=64,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
    )


def build_text_encoder() -> nn.Module:
    """Build the text encoder: tokens (B, 16) -> states (B, 16, 64)."""
    return build_clip_text(text_encoder_config())


def build_clip() -> CLIPModel:
    """Build the pair: the text encoder, and a vision transformer on 16 patches of 8 px; 0.9 M parameters."""
    from transformers import CLIPConfig, CLIPModel, CLIPVisionConfig

    vision = CLIPVisionConfig(
        image_size=SIDE_PX,
        patch_size=8,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        hidden_act="gelu",
        projection_dim=64,
    )
    return CLIPModel(
        CLIPConfig(text_config=text_encoder_config().to_dict(), vision_config=vision.to_dict(), projection_dim=64)
    )


class Reader(nn.Module):
    """Classifies an image's attributes; its last hidden layer gives FID's features.

    It is also trained on blurred and noisy images, and predicts how much of both it sees. So its features respond to
    image quality, not only to content.
    """

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 64, 96, 128)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=1 if before == 3 else 2, padding=1)
            for before, after in zip((3, *widths), widths, strict=False)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for width in widths)
        self.pool = nn.Linear(widths[-1] * 4 * 4, NUM_FEATURES)
        self.heads = nn.ModuleDict({name: nn.Linear(NUM_FEATURES, len(values)) for name, values in ATTRIBUTES.items()})
        self.damage = nn.Linear(NUM_FEATURES, 2)

    def layers(self, images: Tensor) -> list[Tensor]:  # (B, 3, 32, 32) in [-1, 1] -> 4 x (B, C, h, w), 32 px to 4
        """Return the output of every convolution layer."""
        outputs = []
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            images = F.gelu(norm(convolution(images)))
            outputs.append(images)
        return outputs

    def features(self, images: Tensor) -> Tensor:  # (B, 3, 32, 32) in [-1, 1] -> (B, 64)
        return self.pool(self.layers(images)[-1].flatten(1))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the logits of every attribute, (B, values), and `damage`, (B, 2): blur and noise, each in [0, 1]."""
        features = self.features(images)
        return {name: head(features) for name, head in self.heads.items()} | {"damage": self.damage(features)}
