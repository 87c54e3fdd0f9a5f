"""The keys of `composer eval.py`: those of a run and its own, and which of them change what it is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from cli.command_line import CommandLine
from cli.limits import limited, prose
from config import schema_keys
from training import speed
from training.places import Kind
from training.run_config import RunConfig


@dataclass(frozen=True)
class EvalCommand(RunConfig):
    """A run's keys, and those of this command."""

    snapshots: Literal["all", "to_target", "last"] | None = None
    """all; last; to_target: up to the first that meets the target. null: last for images or several guidances, to_target
    with a target, else all."""
    from_images: int = limited(0, 0)
    """Images seen where to_target begins: a hint that saves scoring early snapshots."""
    out: str | None = None
    """Folder of eval.jsonl, eval.csv and the pictures. null: the run's own."""
    images: str | None = None
    """Folder for images of `prompts`, with a contact sheet. Nothing is scored then. null: scores."""
    prompts: str | None = prose(None, "[CAPTION, ...], a file")
    """Captions, in quotes where one has a comma; or a file as samples.prompts. A caption's place is its id."""
    images_per_prompt: int = limited(1, 1, 1000)
    """Images of each caption, with the seeds `seed`, `seed` + 1 and so on."""


# What changes a score, which are made, or how fast: any other key would be given in vain.
OF_METERS = ("eval.statistics", "eval.inception", "eval.resize", "eval.precision", "eval.clip", "eval.batch_size")
OF_IMAGES = ("out", "eval.prompts", "eval.num_prompts", "loggers.debug", *OF_METERS)
OF_MODELS = ("model.family", "model.preset", "model.variant", "objective.prediction", "image_size", "precision", "seed")
OF_GENERATING = ("eval.guidance", "eval.steps", "eval.sampler", "eval.image_size", "loggers.progress_bar")
OF_SPEED = tuple(key.name for key in dataclasses.fields(speed.SpeedKeys) if key.name not in speed.OF_TRAINING)
OF_RUNS = ("model.weights", "model.denoiser", "eval.weights", "target.fid", "target.clip", "snapshots", "from_images")
EFFECTIVE: Mapping[Kind, tuple[str, ...]] = {
    "images": OF_IMAGES,
    "diffusers": (*OF_IMAGES, *OF_MODELS, *OF_GENERATING, *OF_SPEED, "model.weights"),
    "file": (*OF_IMAGES, *OF_MODELS, *OF_GENERATING, *OF_SPEED, "model.weights", "eval.weights"),
    "run": (*OF_IMAGES, *OF_MODELS, *OF_GENERATING, *OF_SPEED, *OF_RUNS),
}
DRAWN = ("images", "num_frames", "prompts", "images_per_prompt", "eval.batch_size", "loggers.debug", "model.weights")
OF_DRAWING = (*DRAWN, *OF_MODELS, *OF_GENERATING, *OF_SPEED)
DRAWING: Mapping[Kind, tuple[str, ...]] = {
    "images": OF_DRAWING,
    "diffusers": OF_DRAWING,
    "file": (*OF_DRAWING, "eval.weights"),
    "run": (*OF_DRAWING, "model.denoiser", "eval.weights", "snapshots"),
}
"""The same where images are drawn."""

UNREAD: tuple[str, ...] = ("run_name", "run_folder", "data.remote", "data.local", "data.facts", "data.streams")
UNREAD += ("model.denoiser", "validation.", "loggers.", "mlperf.")
"""Of a run's files: where a variable that stands there is not set, its scores are the same."""
DECIDING = {*OF_IMAGES, *OF_MODELS, *OF_GENERATING, *OF_RUNS}
DECIDING -= {"out", "eval.batch_size", "loggers.progress_bar", "loggers.debug"}
DECIDING -= {"model.weights", "model.denoiser", "snapshots", "from_images"}
"""What a target is met with: given in another way than in a run's files, its scores are a trial."""

NAMES: Mapping[Kind, str] = {
    "run": "a run",
    "diffusers": "a diffusers folder",
    "file": "a file of weights",
    "images": "a folder of images",
}


def vain(command: CommandLine, kinds: Collection[Kind]) -> list[str]:
    """Return a problem for each key that changes nothing of what is scored or drawn."""
    draws = any(at.key == "images" for at in command.assignments)
    possible = {key for kind in kinds for key in (DRAWING if draws else EFFECTIVE)[kind]} | {"images"}
    what = f"{'image' if draws else 'score'} of {' or '.join(NAMES[kind] for kind in dict.fromkeys(kinds))}"
    return [
        f"{at.where}: {at.typed}{'' if at.typed == at.key else f' ({at.key})'} changes no {what}. Possible: "
        f"{', '.join(sorted(possible))}. Leave it out."
        for at in command.assignments
        if at.key in schema_keys(EvalCommand) and at.key not in possible
    ]


def which(config: EvalCommand) -> str:
    """Return which snapshots of a run are scored, or drawn from."""
    is_last = config.images is not None or len(config.eval.guidances()) > 1
    return config.snapshots or ("last" if is_last else "to_target" if config.target.is_of_scores else "all")


def snapshots_problems(config: EvalCommand) -> list[tuple[str, str]]:
    """(key, message) where snapshots cannot be chosen so."""
    kind, is_curve = which(config), len(config.eval.guidances()) > 1
    if config.images is not None:
        text = "to_target, but nothing is scored where images are drawn. Say last or all, or give a snapshot's file."
        return [("snapshots", text)] if kind == "to_target" else []
    if kind == "to_target" and (is_curve or not config.target.is_of_scores):
        return [("snapshots", "to_target needs a target.fid or target.clip, and one guidance. Give them, or all.")]
    if kind != "to_target" and config.from_images:
        text = f"{config.from_images:,}, but {kind} snapshots are scored. It is where snapshots=to_target begins"
        return [("from_images", f"{text}. Leave it out.")]
    return []
