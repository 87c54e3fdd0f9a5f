"""How a run was evaluated and validated before this start: its figures compare where it was done alike."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cli.errors import ConfigError
from cli.files import read_regular
from config import flat
from record.config_file import read_config
from record.files import evaluations_of, validations_of
from training.run_config import RunConfig

# Settings on an evaluation's line that its metrics depend on, and the keys they come from.
SETTINGS = {
    "prompts_sha256": "eval.prompts",
    "num_prompts": "eval.num_prompts",
    "guidance": "eval.guidance",
    "steps": "eval.steps",
    "sampler": "eval.sampler",
    "eval_weights": "eval.weights",
    "eval_image_size": "eval.image_size",
    "statistics_sha256": "eval.statistics",
    "inception_fingerprint": "eval.inception",
    "resize": "eval.resize",
    "eval_precision": "eval.precision",
    "clip_fingerprint": "eval.clip",
}


def check_evaluations(folder: Path, batch: int, settings: Mapping[str, Any]) -> None:
    """Compare a run's evaluation settings with those of its earlier evaluations, so that all its scores are comparable.

    Args:
        batch: where the run resumes; later lines are cut.
        settings: of evaluation.scoring.Scorer, and eval_weights.

    Raises:
        ConfigError: lists what differs.
    """
    lines = [line for line in evaluations_of(folder) if line["batch"] <= batch]
    differing = [
        f"{key}: {setting} {settings.get(setting)}, but {folder} was evaluated with {line.get(setting)} at "
        f"{line['images']:,} images. A run's evaluations have to be alike: use that, or another run_name; its snapshots can "
        f"be scored anew by composer eval.py {folder} {key}=... out=FOLDER."
        for line in lines[-1:]
        for setting, key in SETTINGS.items()
        if line.get(setting) != settings.get(setting)
    ]
    if differing:
        raise ConfigError(differing)


def is_evaluated_alike(folder: Path, config: RunConfig) -> bool:
    """True if the keys that a score depends on equal the run's, and their small files are unchanged."""
    evaluated = {key: value for key, value in flat(config).items() if key in SETTINGS.values()}
    begun = {**flat(type(config)()), **read_config(folder)}  # a missing key has its default
    return evaluated.items() <= begun.items() and has_files_of(evaluations_of(folder)[-1:], config)


def has_files_of(scores: Sequence[Mapping[str, Any]], config: RunConfig) -> bool:
    """True if there is no score, or the scores used these prompts and statistics: a path's content may have changed."""
    now = {}
    for setting in ("prompts_sha256", "statistics_sha256"):
        path = getattr(config.eval, SETTINGS[setting].removeprefix("eval."))
        if path is not None and Path(path).expanduser().is_file():
            now[setting] = hashlib.sha256(read_regular(Path(path).expanduser())).hexdigest()
    return not scores or any(all(score.get(key, digest) == digest for key, digest in now.items()) for score in scores)


def check_validations(folder: Path, batch: int, settings: Mapping[str, Any]) -> None:
    """Compare with a run's earlier validations, where its target is their loss.

    Args:
        batch: where the run resumes; later lines are cut.
        settings: name on a line -> value, of this start's validations.

    Raises:
        ConfigError: lists what differs.
    """
    names = {"times": "validation.times", "num_samples": "validation.num_samples", "stage_sha256": "validation.remote"}
    lines = [{"times": "thousandths", **line} for line in validations_of(folder) if line["batch"] <= batch]
    differing = [
        f"{key}: {name} {settings[name]}, but {folder} was validated with {line.get(name)} at {line['images']:,} images. "
        "Losses of one target have to be alike: use that, or another run_name."
        for name, key in names.items()
        for line in [line for line in lines if line.get(name) != settings[name]][-1:]
    ]
    if differing:
        raise ConfigError(differing)


def measured(folder: Path, config: RunConfig) -> list[dict[str, Any]]:
    """Return the lines of a run's record that this start's target is decided by.

    Raises:
        ConfigError: they are losses, and not what this start would measure.
    """
    if config.target.val_loss is not None:
        lines = validations_of(folder)
        settings = config.validation.identity_of(config.validation.held_out.contents)
        check_validations(folder, max((line["batch"] for line in lines), default=0), settings)
        return lines
    is_alike = config.eval.when == "in_training" or is_evaluated_alike(folder, config)
    return evaluations_of(folder) if is_alike else []
