"""The frozen networks of a run: built, given published or random weights, and identified by a fingerprint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from cli.errors import ConfigError
from weights import hub, ldm
from weights.hub_names import parse, place
from weights.tensors import fingerprint, on_meta
from zoo.spec import Family

RANDOM = "random"
SHIPPED = "shipped"
RANDOM_SEED = 20221124  # any fixed number: random encoders are the same in every command and for every `seed`


class FrozenEncoders:
    """Holds encoders in eval mode and without gradients, outside any module tree.

    Args:
        wide, exact: see `Family.wide_encoders` and `Family.exact_encoders`.

    Attributes:
        fingerprints: encoder -> digest of its weights, taken before `to` casts them; none on the meta device.
        notes: remarks about the weights for the user.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        notes: list[str],
        wide: Collection[str] = (),
        exact: Collection[str] = (),
    ):
        self.modules = {name: module.eval().requires_grad_(False) for name, module in modules.items()}
        self.notes, self.wide, self.exact = notes, wide, exact
        on_meta = any(p.is_meta for module in modules.values() for p in module.parameters())
        self.fingerprints = {} if on_meta else {name: fingerprint(module) for name, module in modules.items()}

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move and cast all of them, exact and wide ones to the type of their own."""
        for name, module in self.modules.items():
            # not diffusers' own `to`, which warns of every cast
            nn.Module.to(module, device=device, dtype=self.type_of(name, dtype))

    def type_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the type of one of them in a run of `dtype`."""
        is_own = name in self.exact or (dtype == torch.float16 and name in self.wide)
        return torch.float32 if is_own else dtype

    def are_mixed(self, dtype: torch.dtype) -> bool:
        """Say whether some of them are of another type in a run of `dtype`."""
        return any(self.type_of(name, dtype) != dtype for name in self.modules)

    @property
    def device(self) -> torch.device:
        return next(next(iter(self.modules.values())).parameters()).device

    @property
    def num_bytes(self) -> int:
        """What their weights take, as they are cast."""
        parameters = (p for module in self.modules.values() for p in module.parameters())
        return sum(p.numel() * p.element_size() for p in parameters)


def own_weights(family: Family, *, is_real: bool = False) -> str:
    """Return the default of `model.weights`: the weights that the family ships, or for real data those that the hub has.

    Where there are none of these: random ones.
    """
    if family.shipped is not None:
        return SHIPPED
    return family.on_hub if is_real and family.on_hub else RANDOM


def on_hub(family: Family, weights: str | None, denoiser: str | None) -> dict[str, tuple[str, hub.Need]]:
    """Return those of `model.weights` and `model.denoiser` that are names of the hub: key -> name and what it needs."""
    wanted = {"model.weights": (weights, need_of_encoders), "model.denoiser": (denoiser, need_of_denoiser)}
    return {key: (text, need(family)) for key, (text, need) in wanted.items() if text and parse(text)}


def need_of_encoders(family: Family) -> hub.Need:
    """Return the files of a model that `build_encoders` and `weights_problems` read."""
    networks = [network for _, network in _placed(family, on_meta(family.build_encoders)).values()]
    folders = tuple((network.folder, network.stems) for network in networks)
    return hub.Need(folders, family.tokenizers, instead="model.weights=random, for random ones")


def need_of_denoiser(family: Family) -> hub.Need:
    """Return the files of a model that training can begin with."""
    network = family.published()["denoiser"](on_meta(family.build_denoiser))
    more, instead = ("scheduler/scheduler_config.json",), "leave model.denoiser out, to begin at random weights"
    return hub.Need(((network.folder, network.stems),), more=more, instead=instead)


def build_encoders(family: Family, weights: str | None, vae_precision: str | None = None) -> FrozenEncoders:
    """Build a family's encoders on the CPU, in float32.

    Args:
        vae_precision: the type to which `to` casts the autoencoder, see ModelConfig.
        weights: a diffusers folder, an LDM checkpoint, or a name of the hub that was fetched; "shipped": ours; "random";
            None: `own_weights`.

    Raises:
        ConfigError: the weights do not fit (see `weights_problems`) or are damaged.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RANDOM_SEED)
        modules = family.build_encoders()
    weights, notes = weights or own_weights(family), []
    if weights != RANDOM:
        notes = _load(family, weights, modules)
    exact = set(family.exact_encoders)
    if vae_precision is not None:
        exact = exact | {"vae"} if vae_precision == "fp32" else exact - {"vae"}
    return FrozenEncoders(modules, notes, family.wide_encoders, exact)


def _load(family: Family, weights: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Copy weights into a family's encoders, and read their tokenizers; return notes for the user. Raises ConfigError."""
    try:
        if weights == SHIPPED:
            ldm.load(_shipped_folder(family), _placed(family, modules))  # stored as they were trained: no notes
            return []
        notes = ldm.load(weights, _placed(family, modules))
        family.read_tokenizers(place(weights))
        return notes
    except ValueError as error:
        raise ConfigError([f"model.weights: {line}" for line in str(error).splitlines()]) from error


def weights_problems(family: Family, weights: str) -> list[str]:
    """Return the problems of weights and of their tokenizer. Reads names and shapes alone, and downloads nothing."""
    if weights == SHIPPED:
        try:
            weights = _shipped_folder(family)
        except ValueError as error:
            return [str(error)]
    try:
        path = hub.checked(weights, need_of_encoders(family))
    except ValueError as error:
        return [str(error)]
    if path is None:  # it is looked into when it has been downloaded
        return []
    found = ldm.problems(str(path), _placed(family, on_meta(family.build_encoders)))
    if not found and family.shipped is None:  # a family that ships its weights has its tokenizer in code
        if (name := family.clip_tokenizer) is not None:
            tokenizer = ldm.tokenizer_problem(str(path), lambda captions: family.tokenize(captions)["tokens"], name)
            found = [tokenizer] if tokenizer else []
        try:
            family.read_tokenizers(path)
        except ValueError as error:
            found.append(str(error))
    return found


def _shipped_folder(family: Family) -> str:
    if family.shipped is None:
        ways = "Give a diffusers folder or an LDM checkpoint, or model.weights=random for random ones"
        raise ValueError(f"shipped, but the project has no weights of {family.name}. {ways}.")
    return str(family.shipped)


def _placed(family: Family, modules: Mapping[str, nn.Module]) -> dict[str, tuple[nn.Module, Any]]:
    places = family.published()
    return {name: (module, places[name](module)) for name, module in modules.items()}
