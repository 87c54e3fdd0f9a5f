"""An experiment: the denoiser's wide linear layers multiply in 8-bit floating point, with torchao (`precision=fp8`).

Inputs and weights are cast to float8 e4m3, gradients of outputs to e5m2. Each tensor has one scale, computed at every use
("dynamic, tensorwise"). Sums are accumulated in higher precision. The optimizer's weights stay float32, and no name in a
checkpoint changes. Everything else, including the frozen encoders, uses the bfloat16 autocast of `precision=bf16`.

In a layer with fewer than MIN_FEATURES inputs or outputs, the casts take longer than the multiplication saves (torchao's
README gives 0.80 of bfloat16's speed for 1024 x 2048 x 1024, and 1.39 for 4096 x 8192 x 16384). Such layers are not
changed, nor are the layers with one row per image (time embedding).
"""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

from cli.errors import ConfigError

MIN_FEATURES = 1280  # in SD2: the linear layers at 16 x 16 and 8 x 8 places, a third of all linear FLOPs
MULTIPLE = 16  # the GPU's instructions need both sizes of a float8 matrix to be multiples of this
RELEASES = {"2.10": "0.16.0", "2.11": "0.17.0", "2.15": "0.18.0"}
"""torch -> the torchao with which tests/test_fp8.py has passed."""
CAPABILITY = (8, 9)  # compute capability of the first GPUs with float8


def torchao_problem(instead: str) -> str | None:
    """Say that torchao is missing, or None. `instead`: the key that does without it."""
    if importlib.util.find_spec("torchao") is not None:
        return None
    release = RELEASES.get(torch.__version__.rpartition(".")[0])
    which = f"torchao=={release}" if release else f"torchao in the release for torch {torch.__version__}"
    return f"needs torchao, which is not installed. pip install --no-deps {which}, or use {instead}."


def problem(compiled: bool) -> str | None:
    """Say why float8 is not possible here, or None.

    Args:
        compiled: the denoiser is compiled.
    """
    if not torch.cuda.is_available():
        return "needs a GPU. Possible on a CPU: fp32, bf16, bf16_params."
    if text := torchao_problem("precision=bf16"):
        return text
    if torch.version.hip is not None or torch.cuda.get_device_capability() < CAPABILITY:
        name = torch.cuda.get_device_name()
        return f"needs an NVIDIA GPU with float8 (Ada, Hopper or newer), and this is a {name}. Use precision=bf16."
    if not compiled:
        return "without compile its casts take longer than they save. Say compile=whole, or use precision=bf16."
    return None


def use(denoiser: nn.Module, *, min_features: int = MIN_FEATURES, emulate: bool = False) -> int:
    """Replace the wide linear layers of a denoiser's transformers by torchao's; their parameters stay the same objects.

    Args:
        min_features: least inputs and least outputs of a layer.
        emulate: compute the casts in float8 and the products in float32, on any device; for tests.

    Returns:
        The number of replaced layers.

    Raises:
        ConfigError: there is no such layer.
    """
    from diffusers.models import Transformer2DModel
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_wide(module: nn.Linear, name: str) -> bool:
        sizes = (module.in_features, module.out_features)
        return min(sizes) >= min_features and not any(size % MULTIPLE for size in sizes)

    # A weight's gradient is a product over tokens; their number is padded to a multiple of 16.
    config = Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    for module in denoiser.modules():
        if isinstance(module, Transformer2DModel):
            convert_to_float8_training(module, config=config, module_filter_fn=is_wide)
    num = sum(type(module).__name__ == "Float8Linear" for module in denoiser.modules())
    if not num:
        wanted = f"{min_features} inputs and outputs, both multiples of {MULTIPLE}"
        text = f"fp8, but no linear layer of this network's transformers has {wanted}. Use precision=bf16."
        raise ConfigError([f"precision: {text}"])
    return num
