"""LoRA: which layers of a denoiser get an adapter, what its keys may be, and peft's layers in the denoiser.

A layer W (outputs x inputs) becomes W + (alpha / rank) B A. A (rank x inputs) is random and B (outputs x rank) zero at first;
they alone are trained (Hu et al. 2021, arXiv:2106.09685, section 4.1).

A target is the end of a layer's name, as peft matches it: `to_k` is that of every attention, `attn2.to_k` that of
cross-attention alone. The defaults are the attention projections that diffusers' own scripts train:

    UNets             examples/text_to_image/train_text_to_image_lora.py and ..._lora_sdxl.py
    FLUX.1            examples/dreambooth/train_dreambooth_lora_flux.py, without its feed-forward layers

The base is frozen; the adapter alone is trained, averaged and saved.

    add(model, config.lora, base=fingerprint, seed=17, base_dtype=torch.bfloat16)  # before it is on its device
    merge(model)                                                              # a plain denoiser again, W + (alpha / rank) B A
    tensors(model)                                                            # what diffusers' load_lora_weights takes

A layer to_k becomes to_k.base_layer, to_k.lora_A.default and to_k.lora_B.default. The model's state dict has the trained
tensors alone, so that checkpoints, snapshots and the EMA have them alone too. Each checkpoint's identity has the base's
fingerprint: an adapter means nothing with another base.

The adapter is float32. The base's linear layers and convolutions are cast to the run's autocast type (bf16, fp16), to which
autocast would cast them in each step: the outputs stay the same bit for bit, in half of the memory. Norms stay float32.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from common.errors import ConfigError
from common.value_types import limited, truncate

if TYPE_CHECKING:
    from model import LatentDiffusion

ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
COMFYUI_PREFIXES = {"sd2": "lora_unet_", "sdxl": "lora_unet_", "sd3": "lora_transformer_", "flux": "lora_transformer_"}
COMFYUI_PREFIXES |= {"qwen_image": "lycoris_"}
"""Family -> what a layer's name begins with in a file for ComfyUI: model_lora_keys_unet of its comfy/lora.py."""
JOINT_ATTENTION = (*ATTENTION, "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")
"""Of a transformer whose blocks attend to text and image together: the text has separate projections."""


@dataclass(frozen=True)
class LoraConfig:
    """LoRA: an adapter is trained in place of the denoiser, whose own weights stay as they are."""

    rank: int | None = limited(None, 1, 4096, usual="4 to 64")
    """Rank of the adapter. null: no adapter."""
    alpha: float | None = limited(None, 0.0, above=True)
    """The adapter is scaled by alpha / rank. null: the rank."""
    targets: list[str] | None = None
    """Layers with an adapter, by name endings: [to_k, to_v]. null: attention projections."""

    @property
    def is_given(self) -> bool:
        """Whether an adapter is trained."""
        return self.rank is not None

    @property
    def scale(self) -> float:
        """What the adapter's product is multiplied by: alpha / rank."""
        assert self.rank is not None
        return (self.rank if self.alpha is None else self.alpha) / self.rank

    def resolved(self, targets: Sequence[str]) -> LoraConfig:
        """Fill in the rank for alpha, and these targets of the family, where null was given."""
        if self.rank is None:
            return self
        alpha = float(self.rank) if self.alpha is None else self.alpha
        return dataclasses.replace(self, alpha=alpha, targets=list(self.targets or targets))

    def problems(self, denoiser: nn.Module | None, targets: Sequence[str]) -> list[tuple[str, str]]:
        """(key, message) for what does not go together.

        Args:
            denoiser: the network, on any device; None: unknown.
            targets: the family's default.
        """
        if self.rank is None:
            values = [
                (f"lora.{name}", value) for name in ("alpha", "targets") if (value := getattr(self, name)) is not None
            ]
            text = "but lora.rank is not given, and no adapter is trained. Give lora.rank, or leave it out."
            return [(key, f"{value}, {text}") for key, value in values]
        if self.targets == []:
            return [("lora.targets", "an empty list: no layer gets an adapter. Name some, or leave it out.")]
        if "" in (self.targets or ()):
            return [("lora.targets", "an empty name: it is the end of every layer's. Name layers, or leave it out.")]
        return [] if denoiser is None else _target_problems(self.rank, self.targets or targets, denoiser)


def find_adapted_layers(denoiser: nn.Module, targets: Sequence[str]) -> dict[str, nn.Module]:
    """Name -> layer, for the linear layers and convolutions that a target names."""
    return {
        n: layer
        for n, layer in _find_adaptable_layers(denoiser).items()
        if any(_is_match(n, target) for target in targets)
    }


def _find_adaptable_layers(denoiser: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in denoiser.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)}


def _is_match(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _target_problems(rank: int, targets: Sequence[str], denoiser: nn.Module) -> list[tuple[str, str]]:
    """Report targets that name no layer, and layers that are narrower than the rank."""
    adaptable, problems = _find_adaptable_layers(denoiser), []
    ends = sorted({end for name in adaptable for end in _list_name_ends(name)})
    for target in targets:
        others = [n for n, _ in denoiser.named_modules() if _is_match(n, target) and n not in adaptable]
        if not any(_is_match(name, target) for name in adaptable):
            nearest = difflib.get_close_matches(target, ends, 3, 0.0)
            text = f"no linear layer or convolution of the denoiser ends in {truncate(target)}"
            problems.append(
                ("lora.targets", f"{text}. Nearest: {', '.join(nearest)}. Name such a layer, or leave it out.")
            )
        elif others:
            text = f"{truncate(target)} names {others[0]} too, which is no linear layer or convolution"
            problems.append(("lora.targets", f"{text}. Give more of the layer's name."))
    narrow = {
        name: _max_rank(layer)
        for name, layer in find_adapted_layers(denoiser, targets).items()
        if _max_rank(layer) < rank
    }
    if narrow:
        name, width = min(narrow.items(), key=lambda item: item[1])
        text = f"{rank}, but {name} has {width} inputs or outputs, and {len(narrow)} of the layers have fewer than the rank"
        problems.append(("lora.rank", f"{text}: an adapter would be larger than they are. Possible: 1 to {width}."))
    return problems


def _max_rank(layer: nn.Module) -> int:
    """Return the smaller of a layer's inputs and outputs: no product has a higher rank."""
    outputs, inputs = layer.weight.shape[0], layer.weight[0].numel()  # type: ignore[index]  # a tensor
    return min(int(outputs), int(inputs))


def _list_name_ends(name: str) -> list[str]:
    """Return the ends of a layer's name that identify it: `to_out.0` and `attn1.to_out.0`, not `0`."""
    parts = name.split(".")
    starts = [n for n, part in enumerate(parts) if not part.isdigit()]
    return [".".join(parts[n:]) for n in starts[-2:]]


def format_other_base(fingerprint: str | None, path: str, trained_on: str | None) -> str:
    """Return the message that an adapter was trained on another base."""
    text = f"its fingerprint is {fingerprint}, but the adapter in {path} was trained on {trained_on}"
    return f"model.denoiser: {text}. Give that base, or another run."


# --- the adapter in a model ---

NAME = "default"  # peft's for the first adapter; it stands in the tensors' names


@dataclass(frozen=True)
class Adapter:
    """The adapter of a model.

    scale: alpha / rank; base: fingerprint of the denoiser that it was added to, None if unknown.
    """

    scale: float
    base: str | None
    hook: RemovableHandle


def add(
    model: LatentDiffusion, config: LoraConfig, *, base: str | None, seed: int, base_dtype: torch.dtype | None
) -> None:
    """Freeze a model's denoiser and put an adapter into it, which changes nothing until it is trained.

    Args:
        config: resolved.
        base: fingerprint of the denoiser.
        seed: of the adapter's first weights.
        base_dtype: of the base's linear layers and convolutions; None: they stay float32.
    """
    import peft

    model.denoiser.requires_grad_(False)
    options: dict[str, Any] = dict(r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets or ()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # gaussian: A from N(0, 1 / rank^2), B zero, as diffusers' scripts begin.
        adapter = peft.LoraConfig(**options, init_lora_weights="gaussian", lora_dropout=0.0, bias="none")
        peft.inject_adapter_in_model(adapter, model.denoiser, NAME)
    if base_dtype is not None:
        cast_base(model.denoiser, base_dtype)
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
    folder = model.family.network_names()["denoiser"](model.denoiser).folder
    adapter_tensors = {}
    for name, parameter in model.denoiser.named_parameters():
        if parameter.requires_grad:
            scale = model.adapter.scale if ".lora_B." in name else 1.0
            adapter_tensors[f"{folder}.{name.replace(f'.{NAME}.', '.')}"] = parameter.detach().float() * scale
    return adapter_tensors


def comfyui_tensors(model: LatentDiffusion) -> dict[str, Tensor]:
    """Return the adapter under the names that ComfyUI loads, float32; A1111 too, but for FLUX.1.

    A layer is a prefix and its name in diffusers with _ in place of dots (`model_lora_keys_unet` in ComfyUI's comfy/lora.py).

    Raises:
        ConfigError: ComfyUI does not find this family's layers by these names.
    """
    assert model.adapter is not None
    if (prefix := COMFYUI_PREFIXES.get(model.family.name)) is None:
        problem = f"lora: comfyui, but ComfyUI does not find the layers of {model.family.name} by their names here"
        raise ConfigError([f"{problem}. Possible for {', '.join(COMFYUI_PREFIXES)}. Set lora=separate."])
    adapter_tensors = {}
    for name, parameter in model.denoiser.named_parameters():
        if parameter.requires_grad:
            layer, is_up = prefix + name.partition(".lora_")[0].replace(".", "_"), ".lora_B." in name
            adapter_tensors[f"{layer}.lora_{'up' if is_up else 'down'}.weight"] = parameter.detach().float()
            if not is_up:  # ComfyUI scales by alpha / rank
                adapter_tensors[f"{layer}.alpha"] = torch.tensor(model.adapter.scale * len(parameter))
    return adapter_tensors
