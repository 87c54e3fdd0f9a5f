"""What a run takes from the Hugging Face Hub: brought to every machine once, and pinned, so that a resume takes the same.

    config = as_begun(config)       # a name without a commit -> with the commit that the run was begun with
    config = fetched(config)        # every name with its commit, and the files in the cache of each machine

The checks before a run (`problems` of its parts) ask the hub for facts alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from cli import ranks
from cli.errors import ConfigError
from cli.log import log
from config import flat
from record.checkpoint_files import FULL, listed
from record.config_file import CONFIG, read_config
from training import warm_start
from training.run_config import RunConfig, needs_encoders, resolve
from weights import hub
from weights.hub_names import is_same
from zoo import load_family
from zoo.encoders import on_hub, weights_problems

Config = TypeVar("Config", bound=RunConfig)

OF_EVALUATION = ("eval.inception", "eval.clip")
CANONICAL = "data.num_canonical_nodes"
KEYS = ("model.weights", "model.denoiser", *OF_EVALUATION)


def as_begun(config: Config) -> Config:
    """Return the configuration of a run that exists with the commits, the weights and the number of nodes that it has."""
    folder = Path(config.run_folder, config.run_name or "")
    if not config.run_name or not (folder / CONFIG).is_file():
        return config
    try:
        begun = read_config(folder)
    except ConfigError:
        return config  # named where the run is opened
    given = flat(config)
    kept = {key: begun[key] for key in KEYS if is_same(given[key], begun.get(key))}
    if config.model.weights is None and begun.get("model.weights") is not None:
        kept["model.weights"] = begun["model.weights"]
    if CANONICAL in begun and config.data.num_canonical_nodes is None:
        kept[CANONICAL] = begun[CANONICAL]
    return _with(config, kept)


def say(config: RunConfig) -> None:
    """Tell the user what a run that is not resolved will take from the hub, and what of it has to be downloaded."""
    try:
        config = resolve(as_begun(config))
        for key, (text, need) in _names(config, _keys_of_run(config)).items():
            for line in hub.look(text, need).lines():
                log.info(f"{key}: {line}.")
    except ValueError:
        return  # one of its problems


def fetched(config: Config, keys: Collection[str] | None = None) -> Config:
    """Bring what a resolved run takes from the hub to each machine, by one rank of it. All ranks call it.

    Args:
        keys: those that are needed; None: a training's.

    Returns:
        the configuration, its names with the commits that rank 0 has found.

    Raises:
        ConfigError: on all ranks, what cannot be had or does not fit.
    """
    pins = ranks.on_rank_zero(lambda: hub.pin_all(_names(config, _keys_of_run(config) if keys is None else keys)))
    if not pins:
        return config
    names = _names(config, pins)

    def fetch() -> None:
        hub.fetch_all(names, pins)
        if problems := _misfits(_with(config, pins), names):
            raise ConfigError(problems)

    ranks.on_one_rank_of_each_machine(fetch)
    return _with(config, pins)


def _keys_of_run(config: RunConfig) -> tuple[str, ...]:
    """Return what a training needs: one that is resumed has its denoiser in its checkpoint."""
    folder = Path(config.run_folder, config.run_name or "")
    is_begun = config.run_name is not None and bool(listed(folder / "checkpoints", FULL))
    is_begun = is_begun and not config.lora.is_given  # whose base is in no checkpoint
    of_evaluation = OF_EVALUATION if config.eval.when == "in_training" else ()
    of_encoders = ("model.weights",) if needs_encoders(config) else ()
    return (*of_encoders, *(() if is_begun else ("model.denoiser",)), *of_evaluation)


def _names(config: RunConfig, keys: Collection[str]) -> dict[str, tuple[str, hub.Need]]:
    """Return those of the keys that are names on the hub: key -> name and what it needs."""
    model = config.model
    family = load_family(model.family, model.preset, model.variant)
    names = on_hub(family, model.weights, model.denoiser) | config.eval.on_hub()
    return {key: name for key, name in names.items() if key in keys}


def _misfits(config: RunConfig, keys: Collection[str]) -> list[str]:
    """Return why weights that the checks before the run could not see do not fit."""
    model = config.model
    family, found = load_family(model.family, model.preset, model.variant), []
    if "model.weights" in keys:
        found += [f"model.weights: {text}" for text in weights_problems(family, model.weights or "")]
    if "model.denoiser" in keys:
        found += [problem.text for problem in warm_start.problems(model, config.objective.prediction)]
    return found


def _with(config: Config, values: dict[str, Any]) -> Config:
    for key, value in values.items():
        section, name = key.split(".")
        changed = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: changed})
    return config
