"""Which model: its family, its frozen encoders and its initial weights, checked and fetched."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from cli.command_line import Problem
from cli.errors import ConfigError
from cli.limits import ImageSize
from weights import hub
from zoo import load_family
from zoo.encoders import RANDOM, SHIPPED, on_hub, own_weights, weights_problems


@dataclass(frozen=True)
class ModelConfig:
    """The model, its frozen encoders, and its initial weights."""

    family: str = "sd2"
    """The family of models: sd2 (Stable Diffusion 2), sdxl, flux (FLUX.1); of videos mochi, hunyuan_video, wan; or shapes
    (the miniature)."""
    preset: str = "full"
    """full, or tiny: the same types of blocks with under 2 M parameters, for a CPU, where keys of speed for GPUs are
    left out."""
    variant: str = "stock"
    """stock; of sd2 also mlperf, and sd15 (Stable Diffusion 1.5); of flux dev, schnell, mlperf; of wan i2v, t2v, t2v_1.3b; of
    shapes also flow."""
    weights: str | None = None
    """The frozen encoders: hub name, diffusers folder, LDM checkpoint, `random`, or `shipped`. null: the family's own; for
    real data the hub's; else random."""
    denoiser: str | None = None
    """Initial weights of the denoiser: a run's folder or checkpoint, or published weights (as `weights`). null: random."""
    vae_precision: Literal["fp32", "run"] | None = None
    """Type of the autoencoder: fp32, or the run's. null: fp32 for sdxl and wan, as their authors' code has it; else the
    run's."""
    frozen_device: Literal["device", "cpu"] = "device"
    """Where the frozen encoders are: on the run's device; or on the CPU, slower, without memory of the GPU."""


def own_frames(config: ModelConfig) -> int | None:
    """Return the frames of a family's videos where a run gives no number; None: it makes images, or is unknown."""
    try:
        return load_family(config.family, config.preset, config.variant).num_frames
    except ValueError:  # named by model_problems
        return None


def model_problems(config: ModelConfig, size: ImageSize, *, encoders_wanted: bool) -> list[Problem]:
    """Return the problems of a family, the image size and the encoders' weights.

    Args:
        encoders_wanted: the run uses real images or their moments: it gets the hub's encoders by default, and random ones
            have to be requested explicitly.
    """
    found, family = [], None
    try:
        family = load_family(config.family, config.preset, config.variant)
    except ValueError as error:
        found.append(Problem(str(error), ("model.family", "model.preset", "model.variant")))
    else:
        if text := family.size_problem(size):
            found.append(Problem(f"image_size: {text}", ("image_size",)))
        if len(size) > 2 and (text := family.frames_problem(size[2])):
            found.append(Problem(f"num_frames: {text}", ("num_frames",)))
    if family is None:
        return found
    weights = config.weights or own_weights(family, is_real=encoders_wanted)
    if config.weights is None and encoders_wanted and weights == RANDOM:
        ways = (
            "Give a name on the hub, a diffusers folder or an LDM checkpoint, or model.weights=random for random ones"
        )
        text = f"not given. Real data need encoders, and the preset {config.preset} has none on the hub. {ways}."
        found.append(Problem(f"model.weights: {text}", ("model.weights", "data.synthetic")))
    elif weights != RANDOM and (config.weights or weights != SHIPPED):
        given = "" if config.weights else "not given. The default for real data: "
        keys = ("model.weights", "model.family", "model.preset", "model.variant", "data.synthetic")
        found += [Problem(f"model.weights: {given}{text}", keys) for text in weights_problems(family, weights)]
    return found


def fetched(config: ModelConfig) -> ModelConfig:
    """Bring what the model takes from the hub to this machine, for a command with real data; each process by itself.

    Returns:
        the configuration with the default of real data, and with names that have their commit.

    Raises:
        ConfigError: something cannot be had, or does not fit.
    """
    family = load_family(config.family, config.preset, config.variant)
    config = dataclasses.replace(config, weights=config.weights or own_weights(family, is_real=True))
    names = on_hub(family, config.weights, config.denoiser)
    try:
        pinned = hub.fetch_all(names)
    except ValueError as error:
        raise ConfigError(str(error).splitlines()) from error
    values: dict[str, Any] = {key.removeprefix("model."): name for key, name in pinned.items()}
    config = dataclasses.replace(config, **values)
    if "model.weights" in pinned and (texts := weights_problems(family, pinned["model.weights"])):
        raise ConfigError([f"model.weights: {text}" for text in texts])
    return config
