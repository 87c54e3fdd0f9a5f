"""LoRA: peft's layers in a denoiser. The base is frozen; the adapter alone is trained, averaged and saved.

    add(model, config.lora, base=fingerprint, seed=17, precision="bf16")      # before the model is placed
    merge(model)                                                              # a plain denoiser again, W + (alpha / rank) B A
    tensors(model)                                                            # what diffusers' load_lora_weights takes

A layer to_k becomes to_k.base_layer, to_k.lora_A.default and to_k.lora_B.default. The model's state dict has the trained
tensors alone, so that checkpoints, snapshots and the EMA have them alone too. Each checkpoint's identity has the base's
fingerprint: an adapter means nothing with another base.

The adapter is float32. The base's linear layers and convolutions are cast to the run's autocast type (bf16, fp16), to which
autocast would cast them in each step: the outputs stay the same bit for bit, in half of the memory. Norms stay float32.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cli.command_line import Problem
from model import AUTOCAST_DTYPES, LatentDiffusion
from weights.tensors import on_meta
from zoo import load_family
from zoo.lora import LoraConfig

if TYPE_CHECKING:
    from training.run_config import RunConfig

NAME = "default"  # peft's for the first adapter; it stands in the tensors' names
KEYS = ("lora.rank", "lora.alpha", "lora.targets", "model.family", "model.preset", "model.variant")


@dataclass(frozen=True)
class Adapter:
    """The adapter of a model.

    scale: alpha / rank; base: fingerprint of the denoiser that it was added to, None where nobody asked.
    """

    scale: float
    base: str | None
    hook: RemovableHandle


def problems(config: RunConfig) -> list[Problem]:
    """Return why a run's adapter cannot be trained."""
    lora, denoiser = config.lora, None
    targets: tuple[str, ...] = ()
    with contextlib.suppress(ValueError):  # named by model_problems
        family = load_family(config.model.family, config.model.preset, config.model.variant)
        targets = family.lora_targets
        denoiser = on_meta(family.build_denoiser) if lora.is_given else None
    found = lora.problems(denoiser, targets)
    if lora.is_given and config.precision == "bf16_params":
        text = "an adapter is small, and its base is bf16 already. Use precision=bf16, or leave lora.rank out."
        found.append(("precision", f"bf16_params, but lora.rank={lora.rank}: {text}"))
    if lora.is_given and config.model.denoiser is None and not config.data.synthetic:
        ways = "Give the weights that are fine-tuned, or data.synthetic=true to measure speed"
        found.append(("model.denoiser", f"not given, but lora.rank={lora.rank}: random weights are no base. {ways}."))
    return [Problem(f"{key}: {text}", (key, *KEYS)) for key, text in found]


def add(model: LatentDiffusion, config: LoraConfig, *, base: str | None, seed: int, precision: str) -> None:
    """Freeze a model's denoiser and put an adapter into it, which changes nothing until it is trained.

    Args:
        config: resolved.
        base: fingerprint of the denoiser.
        seed: of the adapter's first weights.
        precision: of the run.
    """
    import peft

    model.denoiser.requires_grad_(False)
    ways: dict[str, Any] = dict(r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets or ()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # gaussian: A from N(0, 1 / rank^2), B zero, as diffusers' scripts begin.
        made = peft.LoraConfig(**ways, init_lora_weights="gaussian", lora_dropout=0.0, bias="none")
        peft.inject_adapter_in_model(made, model.denoiser, NAME)
    if (dtype := AUTOCAST_DTYPES.get(precision)) is not None:
        cast_base(model.denoiser, dtype)
    model.adapter = Adapter(config.scale, base, model.register_state_dict_post_hook(_trained_alone))


def _trained_alone(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    """Take what is not trained out of a state dict."""
    trained = {f"{prefix}{name}" for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name in [name for name in state if name not in trained]:
        del state[name]


def cast_base(denoiser: nn.Module, dtype: torch.dtype) -> None:
    """Cast the frozen linear layers and convolutions: what autocast would cast in each step."""
    for layer in denoiser.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            for parameter in layer.parameters(recurse=False):
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(dtype)


def merge(model: LatentDiffusion) -> None:
    """Add the adapter to its base's weights and take its layers out: the denoiser is a plain one again.

    In the base's type: of a base that was cast, the sum is rounded.
    """
    assert model.adapter is not None
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = {name: layer for name, layer in model.denoiser.named_modules() if isinstance(layer, BaseTunerLayer)}
    for name, layer in layers.items():
        layer.merge()
        parent, _, own = name.rpartition(".")
        setattr(model.denoiser.get_submodule(parent), own, layer.get_base_layer())
    model.adapter.hook.remove()
    model.adapter = None


def tensors(model: LatentDiffusion) -> dict[str, Tensor]:
    """Return the adapter under the names of diffusers' load_lora_weights, float32.

    alpha / rank is multiplied into B: a reader that knows no alpha, and takes the rank for it, gets the same.
    """
    assert model.adapter is not None
    folder = model.family.published()["denoiser"](model.denoiser).folder
    found = {}
    for name, parameter in model.denoiser.named_parameters():
        if parameter.requires_grad:
            scale = model.adapter.scale if ".lora_B." in name else 1.0
            found[f"{folder}.{name.replace(f'.{NAME}.', '.')}"] = parameter.detach().float() * scale
    return found


def other_base(given: str | None, place: str, trained_on: str | None) -> str:
    """Return the message that an adapter was trained on another base."""
    what = f"its fingerprint is {given}, but the adapter in {place} was trained on {trained_on}"
    return f"model.denoiser: {what}. Give that base, or another run."
