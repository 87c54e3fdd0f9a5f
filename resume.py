"""Where a named run stands, and whether this start may go on with it.

A start takes the run's folder for itself, finds the newest whole checkpoint, and compares what the run is: first the keys of
config.yaml, before anything is built; then, with the encoders and the stage at hand, what the checkpoint itself says.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from composer.utils import dist
from filelock import FileLock, Timeout

from callbacks.quality_target import TARGET_KEYS, outcome, said
from callbacks.run_record import RESULT_KEYS, read_lines, rounded
from checkpoint_files import find_newest, read
from checkpoints import Progress, check_whole, disagreements
from config import ConfigError, flat, read_yaml
from scoring import TargetConfig
from stage import Stage

Result = TypeVar("Result")

# What may differ between the starts of one run: where things lie and how fast they go, not what is computed.
MAY_CHANGE = (
    "run_name",
    "run_folder",
    "max_duration",  # unless the learning rate follows it
    "device_train_microbatch_size",
    "model.weights",  # the encoders' fingerprints have to agree
    "data.remote",  # the stage's digest has to agree
    "data.local",
    "data.workers",
    "data.cache_limit",
    "data.max_bad_samples",
    "data.patience_sec",
    "ema.device",
    "eval.",  # what a score depends on stands beside it
    "target.",
    "save.",
    "measure.",
    "loggers.",
    "mlperf.",  # the log says how it was begun
)


def _lasting(config: Any) -> dict[str, Any]:
    """Key -> value of all that has to stay as it was when the run was begun."""
    kept = {key: value for key, value in flat(config).items() if not key.startswith(MAY_CHANGE)}
    return kept if config.schedule.name == "constant" else {**kept, "max_duration": config.max_duration}


def identity_of(config: Any, stage: Stage | None, fingerprints: Mapping[str, str]) -> dict[str, Any]:
    """Key -> plain value for what makes a run this run and no other; checkpoints carry it."""
    encoders = {f"encoders.{name}": digest for name, digest in fingerprints.items()}
    return {**_lasting(config), **encoders, "stage": None if stage is None else stage.index_sha256}


def finished(folder: Path, max_duration: str | None, target: TargetConfig) -> dict[str, Any] | None:
    """Return the result of a run that is finished, or None, and say so.

    Args:
        max_duration: what it was finished for; None: whatever it was.
        target: of this start: a run that has met another one goes on.
    """
    path = folder / "summary.json"
    summary = json.loads(path.read_text()) if path.is_file() else {}
    evaluations = [line for line in read_lines(folder / "metrics.jsonl") if line.get("evaluation")]
    met = next((line for line in evaluations if target.is_met(line)), None)
    if summary and met is not None:
        summary |= outcome(evaluations, met)
        text = f"has reached its target ({said(met)})"
    elif summary.get("target") == "reached" and evaluations:
        return None  # it was stopped in training, by an easier target
    elif not summary or max_duration not in (None, summary.get("max_duration")):
        return None
    else:
        text = f"is finished (max_duration={summary.get('max_duration')}); a longer one would go on"
    if dist.get_global_rank() == 0:
        print(f"run_name: {folder} {text}.", file=sys.stderr, flush=True)
    return {key: rounded(summary[key]) for key in (*RESULT_KEYS, *TARGET_KEYS) if key in summary}


def _as_yaml(value: Any) -> Any:
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else value


def check_begun(config: Any, folder: Path) -> dict[str, Any] | None:
    """Compare with the configuration that a run was begun with, before anything is built.

    Returns:
        the result of a run that is finished, which says so; None where there is something to train.

    Raises:
        ConfigError: lists what differs.
    """
    if not (folder / "config.yaml").is_file():
        return None
    begun = {at.key: at.value for at in read_yaml(str(folder / "config.yaml"))[0]}
    differing = {key: value for key, value in _lasting(config).items() if key in begun and begun[key] != value}
    if differing:
        raise ConfigError(
            [
                f"{key}: {_as_yaml(value)}, but {folder} was begun with {_as_yaml(begun[key])}. A run goes on as it began: "
                f"use that value, or another run_name."
                for key, value in differing.items()
            ]
        )
    return finished(folder, config.max_duration, config.target)


def check_encoders(stage: Stage | None, fingerprints: Mapping[str, str]) -> None:
    """Compare the run's encoders with those that moments were made with. Raises ConfigError: they are others."""
    if stage is None:
        return
    made = stage.facts.get("encoders") or {}
    differing = [name for name, digest in fingerprints.items() if made.get(name) not in (None, digest)]
    if differing:
        raise ConfigError(
            [
                f"model.weights: its {name} has the fingerprint {fingerprints[name]}, the moments at {stage.location} were "
                f"made with {made[name]}. Use those weights, or make the moments again: python -m prepare.latents --help"
                for name in differing
            ]
        )


@dataclass
class Begun:
    """A run that this process has taken for itself, and how far it is.

    checkpoint: path and content of the one to go on from, or None; lock: held by rank 0 to the end of the process.
    """

    folder: Path
    progress: Progress
    checkpoint: tuple[Path, dict[str, Any]] | None
    lock: FileLock | None

    def say(self, num_starts: int) -> None:
        """Tell the person who started it from where the run goes on, if it was begun before."""
        if self.lock is not None and num_starts > 1:
            at = f"batch {self.progress.batch}, {self.progress.images:,} images"
            where = f"{at} ({self.checkpoint[0]})" if self.checkpoint else "its beginning: it has no checkpoint"
            print(f"run_name: {self.folder} goes on from {where}.", file=sys.stderr, flush=True)

    def release(self) -> None:
        """Let others have the folder."""
        if self.lock is not None:
            self.lock.release()


def begin(folder: Path) -> Begun:
    """Take a run's folder and find where it stands; all ranks call it.

    Raises:
        ConfigError: another process has it, its checkpoints are all damaged, or the newest cannot be read.
    """
    lock = FileLock(folder / ".lock")

    def find() -> Path | None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            given = f"another process is training in {folder}"
            raise ConfigError([f"run_name: {given}. Wait for it, or take another run_name."]) from error
        return find_newest(folder / "checkpoints")

    newest = _on_rank_zero(find)
    checkpoint = None if newest is None else (newest, read(newest))
    if checkpoint is not None:
        check_whole(checkpoint[1], checkpoint[0])
    progress = Progress(**checkpoint[1]["progress"]) if checkpoint else Progress(0, 0, 0, 0, 0, 0.0)
    return Begun(folder, progress, checkpoint, lock if dist.get_global_rank() == 0 else None)


def _on_rank_zero(work: Callable[[], Result]) -> Result:
    """Let rank 0 do what only one may, and give all ranks its result; what goes wrong is a ConfigError on all of them."""
    outcome: list[Any] = [None, None]
    if dist.get_global_rank() == 0:
        try:
            outcome[0] = work()
        except ConfigError as error:
            outcome[1] = error.problems
        except OSError as error:
            outcome[1] = [f"run_folder: {error}. Give a folder that this user may write in."]
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise ConfigError(outcome[1])
    return outcome[0]


def check_checkpoint(begun: Begun, identity: Mapping[str, Any]) -> None:
    """Compare a run with the checkpoint that it would go on from. Raises ConfigError: lists what differs."""
    if begun.checkpoint is not None:
        path, content = begun.checkpoint
        if problems := disagreements(content, identity, path):
            raise ConfigError(problems)
