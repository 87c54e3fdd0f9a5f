"""A denoiser's blocks: what is recomputed, compiled and sharded one by one."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

OF_TRANSFORMERS = ("transformer_blocks", "single_transformer_blocks", "blocks")
"""What diffusers' transformers of images and videos call the lists of their blocks."""


def blocks_of(denoiser: nn.Module, of_unet: type[nn.Module] | None = None) -> list[nn.Module]:
    """Return a denoiser's residual blocks, its UNet's transformers, and the blocks of a transformer.

    Args:
        of_unet: which transformers of a UNet; None: diffusers' Transformer2DModel, which holds several blocks.
    """
    from diffusers.models import Transformer2DModel
    from diffusers.models.resnet import ResnetBlock2D

    own = Transformer2DModel if of_unet is None else of_unet
    found = [module for module in denoiser.modules() if isinstance(module, (ResnetBlock2D, own))]
    lists = [getattr(denoiser, name, ()) for name in OF_TRANSFORMERS]
    return found or [block for blocks in lists for block in blocks]


def denoiser_parts(denoiser: nn.Module, how: str) -> list[nn.Module]:
    """Return the parts of a denoiser that are compiled one by one: all of it, or its residual blocks and transformers."""
    return [denoiser] if how == "whole" else blocks_of(denoiser)


def checkpoint_blocks(denoiser: nn.Module, fraction: float) -> int:
    """Recompute a fraction of the denoiser's blocks in the backward pass; return their number.

    Blocks are residual blocks and transformer blocks. The chosen ones are spread evenly: the first and the last are the
    largest. We replace their classes and do not use diffusers' own switch: that one wraps the call from outside the
    compiled block (compile=blocks), where dynamo does not see it.
    """
    if fraction <= 0.0:
        return 0
    from diffusers.models.attention import BasicTransformerBlock

    blocks: list[Any] = blocks_of(denoiser, BasicTransformerBlock)
    chosen = [block for n, block in enumerate(blocks) if int((n + 1) * fraction) > int(n * fraction)]
    for block in chosen:
        block.__class__ = _checkpointed(block.__class__)
    return len(chosen)


@functools.cache
def _checkpointed(block: Any) -> type[nn.Module]:  # block: a class of modules
    class CheckpointedBlock(block):
        def forward(self, *args: Any, **more: Any) -> Any:
            if not torch.is_grad_enabled():
                return super().forward(*args, **more)
            return checkpoint(super().forward, *args, use_reentrant=False, **more)

    CheckpointedBlock.__name__ = f"CheckpointedBlock{block.__name__}"
    return CheckpointedBlock
