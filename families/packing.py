"""One call of FLUX's transformer on latents: each 2 x 2 block of a latent is one token, with its position.

It is called as in diffusers' FluxPipeline (Black Forest Labs' FLUX.1). The families flux and shapes use it.

Shapes: B batch, C latent channels, h w latent height and width, S = h w / 4 image tokens, L text tokens, D text width,
P width of the whole caption's state.
    latents (B, C, h, w) -> packed (B, S, 4 C)
    text (B, L, D);  pooled (B, P)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def denoise(
    transformer: nn.Module,
    noisy: Tensor,
    times: Tensor,
    condition: Mapping[str, Tensor],
    guidance: Tensor | None = None,
) -> Tensor:
    """# (B, C, h, w), (B,) in [0, 1] -> (B, C, h, w): one call of diffusers' FluxTransformer2DModel.

    Args:
        condition: `text` and `pooled`.
        guidance: (B,), if the network has the guidance scale as an input.
    """
    height, width = noisy.shape[-2:]
    packed = transformer(
        pack(noisy),
        encoder_hidden_states=condition["text"],
        pooled_projections=condition["pooled"],
        timestep=times,  # in [0, 1]: it counts thousandths by itself
        img_ids=token_positions(height // 2, width // 2, noisy.device),
        txt_ids=torch.zeros(condition["text"].shape[1], 3, device=noisy.device),
        guidance=guidance,
        return_dict=False,
    )[0]
    return unpack(packed, height, width)


def pack(latents: Tensor) -> Tensor:
    """# (B, C, h, w) -> (B, h w / 4, 4 C): a 2 x 2 block becomes one token."""
    num, channels, height, width = latents.shape
    blocks = latents.reshape(num, channels, height // 2, 2, width // 2, 2)
    return blocks.permute(0, 2, 4, 1, 3, 5).reshape(num, height * width // 4, 4 * channels)


def unpack(packed: Tensor, height: int, width: int) -> Tensor:
    """# (B, h w / 4, 4 C) -> (B, C, h, w)."""
    num, channels = len(packed), packed.shape[-1] // 4
    blocks = packed.reshape(num, height // 2, width // 2, channels, 2, 2)
    return blocks.permute(0, 3, 1, 4, 2, 5).reshape(num, channels, height, width)


def token_positions(rows: int, columns: int, device: torch.device) -> Tensor:
    """# -> (rows x columns, 3): 0, row and column of each image token, for its rotary embedding."""
    ids = torch.zeros(rows, columns, 3, device=device)
    ids[..., 1] = torch.arange(rows, device=device)[:, None]
    ids[..., 2] = torch.arange(columns, device=device)
    return ids.reshape(-1, 3)
