"""The UNet of MLPerf's Stable Diffusion: diffusers' own, with other norms. Exports ship this file; it needs diffusers alone.

    from diffusers import DiffusionPipeline
    pipeline = DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)      # runs FOLDER/unet/mixed_norms.py

The benchmark's residual blocks have 16 groups in their norms, its transformers 32 (mlcommons/training,
retired_benchmarks/stable_diffusion: ldm/modules/diffusionmodules/util.py and ldm/modules/attention.py). diffusers has one
number for both, `norm_num_groups`, and no tensor's shape shows a difference.
"""

from __future__ import annotations

import functools
from typing import Any

from diffusers import UNet2DConditionModel
from diffusers.models import Transformer2DModel
from torch import nn


class UNet2DConditionMixedNorms(UNet2DConditionModel):
    """UNet2DConditionModel whose transformers' input norms have twice the groups of its residual blocks' norms."""

    @functools.wraps(UNet2DConditionModel.__init__)  # type: ignore[misc]  # diffusers reads the names of a class's settings there
    def __init__(self: Any, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, Transformer2DModel):
                module.norm = nn.GroupNorm(2 * self.config.norm_num_groups, module.norm.num_channels, eps=1e-6)
