"""DC-AE: Sana's autoencoder, with 32 channels for 32 x 32 px and no posterior. Chen et al. 2024 (arXiv:2410.10733).

The families sana and prx use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from weights import ldm_names

SCALE = 0.41407  # of mit-han-lab/dc-ae-f32c32-sana-1.1-diffusers
FULL: dict[str, Any] = dict(
    encoder_block_types=("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    decoder_block_types=("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    encoder_block_out_channels=(128, 256, 512, 512, 1024, 1024),
    decoder_block_out_channels=(128, 256, 512, 512, 1024, 1024),
    encoder_layers_per_block=(2, 2, 2, 3, 3, 3),
    decoder_layers_per_block=(3, 3, 3, 3, 3, 3),
    encoder_qkv_multiscales=((), (), (), (5,), (5,), (5,)),
    decoder_qkv_multiscales=((), (), (), (5,), (5,), (5,)),
)
TINY: dict[str, Any] = FULL | dict(
    encoder_block_out_channels=(4, 4, 4, 8, 16, 32),
    decoder_block_out_channels=(4, 4, 4, 8, 16, 32),
    encoder_layers_per_block=(1,) * 6,
    decoder_layers_per_block=(1,) * 6,
    attention_head_dim=4,
)


def build(sizes: Mapping[str, Any]) -> nn.Module:
    """Build it with random weights, from torch's global generator."""
    from diffusers.models import AutoencoderDC

    return AutoencoderDC(
        latent_channels=32,
        downsample_block_type="Conv",
        upsample_block_type="interpolate",
        scaling_factor=SCALE,
        **{"attention_head_dim": 32, **sizes},
    )


names = ldm_names.network_in_folder("vae", "AutoencoderDC", "scaling_factor")
