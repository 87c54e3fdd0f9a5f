"""What `composer eval.py` reads: a run's snapshots into a model, and which image of a folder is of which prompt."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from cli.errors import ConfigError
from evaluation.prompts import Prompt, PromptSet
from model import LatentDiffusion
from record.checkpoint_files import FULL, WEIGHTS, fault, listed, read
from training.adapter import other_base
from weights.tensors import canonical_name, difference, tensor_specs

# --- a run ---


def snapshots_of(run: Path) -> list[Path]:
    """Return a run's snapshots, the oldest first; if it has none, its newest full checkpoint.

    Raises:
        ConfigError: the run has neither.
    """
    folder = run / "checkpoints"
    found = listed(folder, WEIGHTS)[::-1] or listed(folder, FULL)[:1]
    if not found:
        raise ConfigError([f"{run} has no snapshot. Train it with save.snapshot_every_images, or eval.when=after."])
    return found


def load_snapshot(
    model: LatentDiffusion, path: Path, weights: str | None, weights_key: str = "eval.weights"
) -> dict[str, Any]:
    """Copy a snapshot's weights into a model's denoiser.

    Args:
        weights: ema or training; None: the EMA weights if there are any.
        weights_key: the key that chooses them, for messages.

    Returns:
        The run's progress (batch, images, seconds of training), and which weights were loaded.

    Raises:
        ConfigError: the snapshot is damaged, of another model, or of a run with other encoders.
    """
    if wrong := fault(path):
        raise ConfigError([f"{path} is damaged: {wrong}. Bring back a copy, or remove it to score the others."])
    content = read(path)
    identity, progress = content["identity"], content["progress"]
    differing = [
        f"model.weights: its {name} has the fingerprint {digest}, {path} was trained with {identity[key]}. Use those weights."
        for name, digest in model.encoders.fingerprints.items()
        if identity.get(key := f"encoders.{name}", digest) != digest
    ]
    for key in ("prediction", "zero_terminal_snr"):
        here = getattr(model.objective, key)
        if (trained_on := identity.get(f"objective.{key}", here)) != here:
            text = f"{here}, but {path} was trained on {trained_on}. Use that value."
            differing.append(f"objective.{key}: {text}")
    if model.adapter is not None and (trained_on := identity.get("denoiser_start")) != model.adapter.base:
        differing.append(other_base(model.adapter.base, str(path), trained_on))
    average: Any = (content.get("ema") or {}).get("weights") or None
    if weights == "ema" and content.get("ema") is None:
        differing.append(f"{weights_key}: ema, but {path} has no EMA weights. Say {weights_key}=training.")
    use = "ema" if average is not None and weights != "training" else "training"
    tensors = average if use == "ema" else content["model"]
    own = {canonical_name(name): tensor for name, tensor in model.state_dict().items()}
    wanted = {name: own[name] for name in tensors if name in own} if use == "ema" else own
    if text := difference(_shapes(wanted), _shapes(tensors)):
        differing.append(f"{path} does not fit the model: {text}. Use the configuration that it was made with.")
    if differing:
        raise ConfigError(differing)
    with torch.no_grad():
        for name, tensor in own.items():
            # The EMA has no buffers: they are taken from the training weights.
            tensor.copy_(tensors[name] if name in tensors else content["model"][name])
    return {
        "snapshot": path.name,
        "batch": progress["batch"],
        "images": progress["images"],
        "seconds": progress["seconds"],
        "weights": use,
    }


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: form.split(" ", 1)[1] for name, form in tensor_specs(tensors).items()}  # EMA weights are float32


# --- a folder of images ---


def match_prompts(paths: Sequence[Path], prompt_set: PromptSet) -> list[Prompt]:
    """Return each image's prompt: the last number in its name is the prompt's id, or else, for all images, its image_id.

    Raises:
        ValueError: an image has no prompt, or several with its image_id; two images have the same; or a prompt has no image.
    """
    numbers = [int((re.findall(r"\d+", path.stem) or ["-1"])[-1]) for path in paths]
    by_id = {prompt.number: prompt for prompt in prompt_set.prompts}
    by_image = {prompt.image_id: prompt for prompt in prompt_set.prompts}
    are_ids = sum(n in by_id for n in numbers) >= sum(n in by_image for n in numbers)
    table, column = (by_id, "id") if are_ids else (by_image, "image_id")
    if strangers := [path.name for path, number in zip(paths, numbers, strict=True) if number not in table]:
        todo = "Give the prompts that the images are of; an image's name ends in its prompt's id, e.g. 770337.png"
        raise ValueError(f"eval.prompts: no {column} for {_some(strangers)}. {todo}.")
    images, prompts = Counter(numbers), Counter(prompt.image_id for prompt in prompt_set.prompts)
    if twice := [path.name for path, number in zip(paths, numbers, strict=True) if images[number] > 1]:
        raise ValueError(f"{_some(twice)}: several images have one {column}. Give one image a prompt.")
    if several := [str(number) for number in numbers if prompts[number] > 1 and not are_ids]:
        todo = "Name the images after their prompt's id, or give a file with one prompt an image"
        raise ValueError(f"eval.prompts: several prompts of image_id {_some(several)}. {todo}.")
    if missing := [str(number) for number in table if number not in images]:
        ways = "Give the images that are missing, or a file of prompts without theirs"
        raise ValueError(f"eval.prompts: no image for {column} {_some(missing)}. {ways}.")
    return [table[number] for number in numbers]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def digest_of(paths: Sequence[Path]) -> str:
    """Return 32 hex digits over the names and bytes of files."""
    digest = xxhash.xxh3_128()
    for path in paths:
        digest.update(path.name)
        digest.update(path.read_bytes())
    return digest.hexdigest()
