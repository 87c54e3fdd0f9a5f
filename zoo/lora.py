"""LoRA: which layers of a denoiser get an adapter, and what its keys may be.

A layer W (outputs x inputs) becomes W + (alpha / rank) B A. A (rank x inputs) is random and B (outputs x rank) zero at first;
they alone are trained (Hu et al. 2021, arXiv:2106.09685, section 4.1). training/adapter.py puts them in.

A target is the end of a layer's name, as peft matches it: `to_k` is that of every attention, `attn2.to_k` that of
cross-attention alone. The defaults are the attention projections that diffusers' own scripts train:

    UNets             examples/text_to_image/train_text_to_image_lora.py and ..._lora_sdxl.py
    FLUX.1            examples/dreambooth/train_dreambooth_lora_flux.py, without its feed-forward layers
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from cli.limits import limited, shown

ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
JOINT_ATTENTION = (*ATTENTION, "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")
"""Of a transformer whose blocks attend to text and image together: the text has projections of its own."""


@dataclass(frozen=True)
class LoraConfig:
    """LoRA: an adapter is trained in place of the denoiser, whose own weights stay as they are."""

    rank: int | None = limited(None, 1, 4096, usual="4 to 64")
    """Rank of the adapter. null: none, the denoiser itself is trained."""
    alpha: float | None = limited(None, 0.0, above=True)
    """The adapter's product is multiplied by alpha / rank. null: the rank, i.e. by 1."""
    targets: list[str] | None = None
    """Layers with an adapter, by the end of their names: [to_k, to_v]. null: the family's attention projections."""

    @property
    def is_given(self) -> bool:
        """An adapter is trained."""
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
            denoiser: the network, on any device; None: not known.
            targets: the family's own.
        """
        if self.rank is None:
            given = [
                (f"lora.{name}", value) for name in ("alpha", "targets") if (value := getattr(self, name)) is not None
            ]
            text = "but lora.rank is not given, and no adapter is trained. Give lora.rank, or leave it out."
            return [(key, f"{value}, {text}") for key, value in given]
        if self.targets == []:
            return [("lora.targets", "an empty list: no layer gets an adapter. Name some, or leave it out.")]
        if "" in (self.targets or ()):
            return [("lora.targets", "an empty name: it is the end of every layer's. Name layers, or leave it out.")]
        return [] if denoiser is None else _misfits(self.rank, self.targets or targets, denoiser)


def layers_of(denoiser: nn.Module, targets: Sequence[str]) -> dict[str, nn.Module]:
    """Name -> layer, for the linear layers and convolutions that a target names."""
    return {n: layer for n, layer in _adaptable(denoiser).items() if any(_is_named(n, target) for target in targets)}


def _adaptable(denoiser: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in denoiser.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)}


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _misfits(rank: int, targets: Sequence[str], denoiser: nn.Module) -> list[tuple[str, str]]:
    """Say which targets name no layer, and which layers are narrower than the rank."""
    adaptable, found = _adaptable(denoiser), []
    ends = sorted({end for name in adaptable for end in _ends(name)})
    for target in targets:
        others = [n for n, _ in denoiser.named_modules() if _is_named(n, target) and n not in adaptable]
        if not any(_is_named(name, target) for name in adaptable):
            nearest = difflib.get_close_matches(target, ends, 3, 0.0)
            text = f"no linear layer or convolution of the denoiser ends in {shown(target)}"
            found.append(
                ("lora.targets", f"{text}. Nearest: {', '.join(nearest)}. Name such a layer, or leave it out.")
            )
        elif others:
            given = f"{shown(target)} names {others[0]} too, which is no linear layer or convolution"
            found.append(("lora.targets", f"{given}. Give more of the layer's name."))
    narrow = {name: _width(layer) for name, layer in layers_of(denoiser, targets).items() if _width(layer) < rank}
    if narrow:
        name, width = min(narrow.items(), key=lambda item: item[1])
        text = f"{rank}, but {name} has {width} inputs or outputs, and {len(narrow)} of the layers have fewer than the rank"
        found.append(("lora.rank", f"{text}: an adapter would be larger than they are. Possible: 1 to {width}."))
    return found


def _width(layer: nn.Module) -> int:
    """Return the smaller of a layer's inputs and outputs: no product has a higher rank."""
    out, inputs = layer.weight.shape[0], layer.weight[0].numel()  # type: ignore[index]  # a tensor
    return min(int(out), int(inputs))


def _ends(name: str) -> list[str]:
    """Return the ends of a layer's name that say what it is: `to_out.0` and `attn1.to_out.0`, not `0`."""
    parts = name.split(".")
    starts = [n for n, part in enumerate(parts) if not part.isdigit()]
    return [".".join(parts[n:]) for n in starts[-2:]]
