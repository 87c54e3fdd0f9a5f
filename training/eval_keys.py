"""The keys of `composer eval.py`: those of a run and its own, and which of them decide over a score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cli.limits import limited, prose
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
    """Folder for images of `prompts`. Nothing is scored then. null: scores."""
    prompts: str | None = prose(None, "[CAPTION, ...], a file")
    """Captions, in quotes where one has a comma; or a file as samples.prompts. A caption's place is its id."""
    images_per_prompt: int = limited(1, 1, 1000)
    """Images of each caption, with the seeds `seed`, `seed` + 1 and so on."""


UNREAD: tuple[str, ...] = ("run_name", "run_folder", "data.remote", "data.local", "data.facts", "data.streams")
UNREAD += ("model.denoiser", "validation.", "loggers.", "mlperf.")
"""Of a run's files: where a variable that stands there is not set, its scores are the same."""
DECIDING = {
    *("eval.statistics", "eval.inception", "eval.resize", "eval.precision", "eval.clip", "eval.prompts"),
    *("eval.num_prompts", "eval.guidance", "eval.steps", "eval.sampler", "eval.image_size", "eval.weights"),
    *("model.family", "model.preset", "model.variant", "objective.prediction", "image_size", "precision", "seed"),
    *("target.fid", "target.clip"),
}
"""What a target is met with: given in another way than in a run's files, its scores are a trial."""


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
