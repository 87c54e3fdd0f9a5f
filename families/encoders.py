"""The frozen networks of a run: built, given published or random weights, and identified by a fingerprint."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from common.command_line import Problem
from common.errors import ConfigError
from common.value_types import ImageSize
from families import load_family
from families.spec import Family
from weights import hub, published
from weights.hub_names import parse_hub_name, resolve_weights_path
from weights.tensors import build_on_meta, fingerprint

RANDOM = "random"
SHIPPED = "shipped"
RANDOM_SEED = 20221124  # any fixed number: random encoders are the same in every command and for every `seed`


class FrozenEncoders:
    """Holds encoders in eval mode and without gradients, outside any module tree.

    Args:
        overflow, fp32: names of encoders, see `Family.overflow_encoders` and `Family.fp32_encoders`.

    Attributes:
        fingerprints: encoder -> digest of its weights, taken before `to` casts them; none on the meta device.
        notes: remarks about the weights for the user.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        notes: list[str],
        overflow: Collection[str] = (),
        fp32: Collection[str] = (),
    ):
        self.modules = {name: module.eval().requires_grad_(False) for name, module in modules.items()}
        self.notes, self.overflow, self.fp32 = notes, overflow, fp32
        is_meta = any(p.is_meta for module in modules.values() for p in module.parameters())
        self.fingerprints = {} if is_meta else {name: fingerprint(module) for name, module in modules.items()}

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move and cast all of them, each to its type in a run of `dtype`."""
        for name, module in self.modules.items():
            # not diffusers' own `to`, which warns of every cast
            nn.Module.to(module, device=device, dtype=self.choose_dtype(name, dtype))

    def choose_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the type of an encoder in a run of `dtype`."""
        needs_fp32 = name in self.fp32 or (dtype == torch.float16 and name in self.overflow)
        return torch.float32 if needs_fp32 else dtype

    def has_mixed_dtypes(self, dtype: torch.dtype) -> bool:
        """Return whether an encoder has another type than `dtype` in a run of `dtype`."""
        return any(self.choose_dtype(name, dtype) != dtype for name in self.modules)

    @property
    def device(self) -> torch.device:
        return next(next(iter(self.modules.values())).parameters()).device

    @property
    def num_bytes(self) -> int:
        """Size of their weights, as they are cast."""
        parameters = (p for module in self.modules.values() for p in module.parameters())
        return sum(p.numel() * p.element_size() for p in parameters)


def default_weights(family: Family, *, is_real: bool = False) -> str:
    """Return the default of `model.weights`: the family's shipped weights; for real data those on the hub; else random."""
    if family.shipped_weights is not None:
        return SHIPPED
    return family.hub_name if is_real and family.hub_name else RANDOM


def list_hub_weights(
    family: Family, weights: str | None, denoiser: str | None
) -> dict[str, tuple[str, hub.RequiredFiles]]:
    """Return those of `model.weights` and `model.denoiser` that are names on the hub: key -> name and required files."""
    values = {"model.weights": (weights, list_encoder_files), "model.denoiser": (denoiser, list_denoiser_files)}
    return {
        key: (text, list_files(family)) for key, (text, list_files) in values.items() if text and parse_hub_name(text)
    }


def list_encoder_files(family: Family) -> hub.RequiredFiles:
    """Return the files of a model that `build_encoders` and `weights_problems` read."""
    networks = [network for _, network in _with_names(family, build_on_meta(family.build_encoders)).values()]
    folders = tuple((network.folder, network.stems) for network in networks)
    return hub.RequiredFiles(folders, family.tokenizer_folders, instead="model.weights=random, for random ones")


def list_denoiser_files(family: Family) -> hub.RequiredFiles:
    """Return the files of a model whose denoiser training can start from."""
    network = family.network_names()["denoiser"](build_on_meta(family.build_denoiser))
    return hub.RequiredFiles(
        ((network.folder, network.stems),),
        optional_files=("scheduler/scheduler_config.json",),
        instead="leave model.denoiser out, to begin at random weights",
    )


def build_encoders(family: Family, weights: str | None, vae_precision: str | None = None) -> FrozenEncoders:
    """Build a family's encoders on the CPU, in float32.

    Args:
        vae_precision: the type to which `to` casts the autoencoder, see ModelConfig.
        weights: a diffusers folder, an LDM checkpoint, or a name of the hub that was fetched; "shipped": ours; "random";
            None: `default_weights`.

    Raises:
        ConfigError: the weights do not fit (see `weights_problems`) or are damaged.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RANDOM_SEED)
        modules = family.build_encoders()
    weights, notes = weights or default_weights(family), []
    if weights != RANDOM:
        notes = _load_weights(family, weights, modules)
    fp32 = set(family.fp32_encoders)
    if vae_precision is not None:
        fp32 = fp32 | {"vae"} if vae_precision == "fp32" else fp32 - {"vae"}
    return FrozenEncoders(modules, notes, family.overflow_encoders, fp32)


def _load_weights(family: Family, weights: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Copy weights into a family's encoders, and read their tokenizers; return notes for the user. Raises ConfigError."""
    try:
        if weights == SHIPPED:
            published.load_networks(_find_shipped_folder(family), _with_names(family, modules))
            return []  # stored as they were trained: no notes
        notes = published.load_networks(weights, _with_names(family, modules))
        family.read_tokenizers(resolve_weights_path(weights))
        return notes
    except ValueError as error:
        raise ConfigError([f"model.weights: {line}" for line in str(error).splitlines()]) from error


def weights_problems(family: Family, weights: str) -> list[str]:
    """Return the problems of weights and of their tokenizer. Reads only names and shapes, and downloads nothing."""
    if weights == SHIPPED:
        try:
            weights = _find_shipped_folder(family)
        except ValueError as error:
            return [str(error)]
    try:
        path = hub.path_if_downloaded(weights, list_encoder_files(family))
    except ValueError as error:
        return [str(error)]
    if path is None:  # it is checked after the download
        return []
    problems = published.find_problems(str(path), _with_names(family, build_on_meta(family.build_encoders)))
    if not problems and family.shipped_weights is None:  # a family that ships its weights has its tokenizer in code
        if (name := family.clip_tokenizer_folder) is not None:
            problem = published.tokenizer_problem(str(path), lambda captions: family.tokenize(captions)["tokens"], name)
            problems = [problem] if problem else []
        try:
            family.read_tokenizers(path)
        except ValueError as error:
            problems.append(str(error))
    return problems


def _find_shipped_folder(family: Family) -> str:
    if family.shipped_weights is None:
        advice = "Give a diffusers folder or an LDM checkpoint, or model.weights=random for random ones"
        raise ValueError(f"shipped, but the project has no weights of {family.name}. {advice}.")
    return str(family.shipped_weights)


def _with_names(family: Family, modules: Mapping[str, nn.Module]) -> dict[str, tuple[nn.Module, Any]]:
    """Name -> the module and its names in published weights."""
    build_names = family.network_names()
    return {name: (module, build_names[name](module)) for name, module in modules.items()}


# --- the section `model` ---


@dataclass(frozen=True)
class ModelConfig:
    """The model, its frozen encoders, and its initial weights."""

    family: str = "sd2"
    """sd2, sdxl, sd3, flux, flux2, prx, qwen_image, sana; of videos mochi, hunyuan_video, wan; shapes (the miniature); or
    your own: path/to/file.py:Class."""
    preset: str = "full"
    """full, or tiny: under 2 M parameters, for a CPU; ignores keys of GPU speed."""
    variant: str = "stock"
    """The family's version: mlperf, sd15, dev, schnell, t2v, flow, moving. stock: the first. An unknown one lists all."""
    weights: str | None = None
    """Frozen encoders: hub name, diffusers folder, LDM checkpoint, `random`, `shipped`. null: the family's; real data:
    the hub's; else random."""
    denoiser: str | None = None
    """Initial weights: a run's folder or checkpoint, or published weights. null: random."""
    vae_precision: Literal["fp32", "run"] | None = None
    """Type of the autoencoder. null: fp32 for sdxl, sd3 and wan, else the run's."""
    frozen_device: Literal["device", "cpu"] = "device"
    """Where the frozen encoders are; on the CPU they are slower and take no GPU memory."""


def default_num_frames(config: ModelConfig) -> int | None:
    """Return the default number of frames of a family's videos; None: it makes images, or is unknown."""
    try:
        return load_family(config.family, config.preset, config.variant).num_frames
    except ValueError:  # reported by model_problems
        return None


def model_problems(config: ModelConfig, size: ImageSize, *, needs_encoders: bool) -> list[Problem]:
    """Return the problems of a family, the image size and the encoders' weights.

    Args:
        needs_encoders: the run uses real images or their moments: it gets the hub's encoders by default, and random ones
            have to be requested explicitly.
    """
    problems, family = [], None
    try:
        family = load_family(config.family, config.preset, config.variant)
    except ValueError as error:
        problems.append(Problem(str(error), ("model.family", "model.preset", "model.variant")))
    else:
        if text := family.size_problem(size):
            problems.append(Problem(f"image_size: {text}", ("image_size",)))
        if len(size) > 2 and (text := family.frames_problem(size[2])):
            problems.append(Problem(f"num_frames: {text}", ("num_frames",)))
    if family is None:
        return problems
    weights = config.weights or default_weights(family, is_real=needs_encoders)
    if config.weights is None and needs_encoders and weights == RANDOM:
        advice = (
            "Give a name on the hub, a diffusers folder or an LDM checkpoint, or model.weights=random for random ones"
        )
        text = f"not given. Real data need encoders, and the preset {config.preset} has none on the hub. {advice}."
        problems.append(Problem(f"model.weights: {text}", ("model.weights", "data.synthetic")))
    elif weights != RANDOM and (config.weights or weights != SHIPPED):
        prefix = "" if config.weights else "not given. The default for real data: "
        keys = ("model.weights", "model.family", "model.preset", "model.variant", "data.synthetic")
        problems += [Problem(f"model.weights: {prefix}{text}", keys) for text in weights_problems(family, weights)]
    return problems


def fetch_model_weights(config: ModelConfig) -> ModelConfig:
    """Download the model's weights from the hub, for a command with real data; each process does it on its own.

    Returns:
        the configuration with the default for real data, and with the commit in each name.

    Raises:
        ConfigError: weights are unavailable, or do not fit.
    """
    family = load_family(config.family, config.preset, config.variant)
    config = dataclasses.replace(config, weights=config.weights or default_weights(family, is_real=True))
    names = list_hub_weights(family, config.weights, config.denoiser)
    try:
        pinned = hub.fetch_all(names)
    except ValueError as error:
        raise ConfigError(str(error).splitlines()) from error
    values: dict[str, Any] = {key.removeprefix("model."): name for key, name in pinned.items()}
    config = dataclasses.replace(config, **values)
    if "model.weights" in pinned and (texts := weights_problems(family, pinned["model.weights"])):
        raise ConfigError([f"model.weights: {text}" for text in texts])
    return config
