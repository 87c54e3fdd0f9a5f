"""Network, noise schedule and learning rate against numbers of the MLPerf reference's own code: tests/golden/README.md."""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch
from conftest import ROOT
from torch import nn

from families import load_family
from families.objectives import ObjectiveConfig, scaled_linear_alphas_cumprod
from families.sd2 import ARCHITECTURES, OBJECTIVES, SD2
from training.optimizer import ScheduleConfig, lr_multiplier

GOLDEN = np.load(ROOT / "tests/golden/mlperf_small.npz", allow_pickle=False)


def golden(name: str) -> torch.Tensor:
    return torch.from_numpy(GOLDEN[name])


def small_family() -> SD2:
    """The variant of the benchmark in the size that the golden numbers were computed in."""
    sizes = dict(block_out_channels=(32, 64, 128, 128), cross_attention_dim=48, attention_head_dim=(2, 4, 8, 8))
    return SD2(ARCHITECTURES["mlperf"]["full"].replace(unet=sizes), "mlperf", OBJECTIVES["mlperf"])


def small_unet(family: SD2) -> nn.Module:
    """Its denoiser with weights drawn by name, the zero-initialised ones too, so that every layer shows in the output."""
    unet = family.build_denoiser().eval()
    state = {}
    for name, tensor in unet.state_dict().items():
        draw = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        if tensor.ndim == 1:
            state[name] = 0.1 * draw + (1.0 if name.endswith(".weight") else 0.0)
        else:
            state[name] = draw / math.sqrt(math.prod(tensor.shape[1:]))
    unet.load_state_dict(state)
    return unet


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@torch.no_grad()
def test_the_forward_pass_is_the_references():
    family = small_family()
    unet = small_unet(family)
    assert sum(p.numel() for p in unet.parameters()) == 8_565_348
    out = family.denoise(unet, golden("x"), golden("t"), {"text": golden("context")})
    assert relative_error(out, golden("unet_out")) < 1e-5


def test_the_noise_schedule_is_the_references():
    ours = scaled_linear_alphas_cumprod()
    assert ours.dtype == torch.float64
    assert torch.allclose(ours, golden("alphas_cumprod"), rtol=1e-12, atol=0)
    objective = load_family("sd2", "tiny", "mlperf").build_objective(ObjectiveConfig())
    assert objective.prediction == "v" and torch.equal(objective.weight(torch.arange(1000)), torch.ones(1000))
    assert relative_error(objective.alpha_bar.double(), golden("alphas_cumprod")) < 1e-7


def test_the_learning_rate_multipliers_are_the_references():
    ours = [
        lr_multiplier(int(step), schedule=ScheduleConfig(name="constant"), warmup_batches=1000, total_batches=10**9)
        for step in GOLDEN["lr_steps"]
    ]
    assert np.abs(np.array(ours) - GOLDEN["lr_multiplier"]).max() < 1e-12
