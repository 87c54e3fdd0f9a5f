"""Where a named run stands, and whether this start may go on with it.

A start takes the run's folder for itself, finds the newest whole checkpoint, and compares what the run is: first the keys of
config.yaml, before anything is built; then, with the encoders and the stage at hand, what the checkpoint itself says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from composer.utils import dist
from filelock import FileLock, Timeout

import alarm
from callbacks.mlperf_log import lost_events
from callbacks.quality_target import TARGET_KEYS, outcome, said
from callbacks.run_record import (
    RESULT_KEYS,
    found_batch_size,
    keep_keys,
    read_config,
    rounded,
    write_outcome,
)
from checkpoint_files import check_whole, find_newest, read
from checkpoints import Progress, disagreements
from config import ConfigError, flat
from run_files import check_are_files, evaluations_of, lost_history, read_summary
from speed import SpeedKeys
from stage import Stage

# What may differ between the starts of one run: where things lie and how fast they go, not what is computed.
MAY_CHANGE = (
    "run_name",
    "run_folder",
    "max_duration",  # unless the learning rate follows it
    "device_train_microbatch_size",
    *(key.name for key in fields(SpeedKeys)),  # rounding alone
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
    "profile.",
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


def finished(folder: Path, max_duration: str | None, config: Any) -> dict[str, Any] | None:
    """Return the result of a run that is finished, or None, and say so; its record is told of another target or evaluation.

    Args:
        max_duration: what it was finished for; None: whatever it was.
        config: of this start: a run that has met another target goes on.
    """
    summary = read_summary(folder, "batches")
    if not summary:
        return None
    lines = evaluations_of(folder) if config.eval.when == "in_training" or _is_evaluated_alike(folder, config) else []
    met = next((line for line in lines if config.eval.when != "off" and config.target.is_met(line)), None)
    stopped_early = summary.get("stopped_early", summary.get("target") == "reached" and bool(lines))
    if met is not None:
        found, text = outcome(lines, met), f"has reached its target ({said(met)})"
    elif stopped_early or max_duration not in (None, summary.get("max_duration")):
        return None  # by an easier target; or a longer training is asked for
    else:
        found, more = _unmet(folder, summary, lines, config)
        text = f"is finished (max_duration={summary.get('max_duration')}); a longer one would go on{more}"
    if dist.get_global_rank() == 0:
        print(f"run_name: {folder} {text}.", file=sys.stderr, flush=True)
        if found:
            write_outcome(folder, found)
        there = [f"{key}." for key in read_config(folder)]  # what it has lost, the checkpoint has said
        lost = [
            key for key in flat(config) if not any(f"{key}.".startswith(t) or t.startswith(f"{key}.") for t in there)
        ]
        keep_keys(folder, {key: value for key, value in flat(config).items() if key in lost})
        if config.eval.when != "off":  # so that eval.py scores as this start says
            batch_size = config.eval.batch_size or found_batch_size(folder)
            keep_keys(folder, {**flat(config), "eval.batch_size": batch_size}, ("eval.", "target."))
    summary |= found
    return {key: rounded(summary[key]) for key in (*RESULT_KEYS, *TARGET_KEYS) if key in summary}


def _unmet(folder: Path, summary: Mapping[str, Any], lines: list[Any], config: Any) -> tuple[dict[str, Any], str]:
    """Return what a finished run came to that has not met its target in training, and what is to be said of it.

    Points without an evaluation are eval.py's: a score of the last one alone would say `missed` of a run that may have met
    the target before, and all of them belong to the clock and the weights of a training that is over.
    """
    if config.eval.when == "off":
        return {}, ""
    every, images = config.eval.every_images, summary["batches"] * config.global_batch_size
    due = range(every, images + 1, every)
    missing = set(due) - {line["images"] for line in lines}
    if not missing:
        return outcome(lines, None) if config.target.is_given else {}, ""
    begun = read_config(folder)
    same = all(begun.get(key) == value for key, value in flat(config).items() if key.startswith("target."))
    if same and summary.get("target") in ("reached", "missed"):
        return {}, ""  # eval.py has decided it
    found = {**dict.fromkeys(TARGET_KEYS), "target": "pending"} if config.target.is_given else {}
    more = f"; {len(missing)} of its {len(due)} points were not evaluated in training"
    return found, f"{more}: composer eval.py {folder} scores the snapshots that it has"


# What an evaluation's line says that its figures depend on, and the key that it comes from.
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
    "clip_fingerprint": "eval.clip",
}


def check_evaluations(folder: Path, batch: int, settings: Mapping[str, Any]) -> None:
    """Compare how a run is to be evaluated with how it was: its figures are to compare with each other, and the target.

    Args:
        batch: where the run goes on; later lines are cut.
        settings: of scoring.Scorer, and eval_weights.

    Raises:
        ConfigError: lists what differs.
    """
    known = {"eval_weights": settings["eval_weights"]}  # lines of before did not say it
    lines = [{**known, **line} for line in evaluations_of(folder) if line["batch"] <= batch]
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


def _is_evaluated_alike(folder: Path, config: Any) -> bool:
    """True where the keys that a score depends on are those of the run's config.yaml."""
    evaluated = {key: value for key, value in flat(config).items() if key in SETTINGS.values()}
    return evaluated.items() <= read_config(folder).items()


def _as_yaml(value: Any) -> Any:
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else value


def check_begun(config: Any, folder: Path) -> dict[str, Any] | None:
    """Compare with the configuration that a run was begun with, before anything is built.

    Returns:
        the result of a run that is finished, which says so; None where there is something to train.

    Raises:
        ConfigError: lists what differs.
    """
    check_are_files(folder)
    if not (folder / "config.yaml").is_file():
        return None
    begun = read_config(folder)
    differing = {key: value for key, value in _lasting(config).items() if key in begun and begun[key] != value}
    if differing:
        raise ConfigError(
            [
                f"{key}: {_as_yaml(value)}, but {folder} was begun with {_as_yaml(begun[key])}. A run goes on as it began: "
                f"use that value, or another run_name."
                for key, value in differing.items()
            ]
        )
    lines = evaluations_of(folder)  # what cannot be read is refused before anything is built
    if _lasting(config).keys() - begun.keys():
        return None  # what it does not say (it was cut, or is of an older version) the checkpoint does
    if config.eval.when == "in_training" and lines and not _is_evaluated_alike(folder, config):
        return None  # whether its figures would be others is known when the scorer is built
    return finished(folder, config.max_duration, config)


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
    lost: dict[str, str] = field(default_factory=dict)
    """File of the record -> what it lacks of what it had at the checkpoint."""

    def say(self, num_starts: int) -> None:
        """Tell the person who started it from where the run goes on, if it was begun before."""
        if self.lock is not None and (num_starts > 1 or self.checkpoint):
            at = f"batch {self.progress.batch}, {self.progress.images:,} images"
            where = f"{at} ({self.checkpoint[0]})" if self.checkpoint else "its beginning: it has no checkpoint"
            print(f"run_name: {self.folder} goes on from {where}.", file=sys.stderr, flush=True)
        for name, text in self.lost.items() if self.lock is not None else ():
            told = "it was cut, or is a copy of before. summary.json will say so (history_lost)"
            print(f"run_name: {self.folder / name} {text}: {told}.", file=sys.stderr, flush=True)

    def release(self) -> None:
        """Let others have the folder."""
        if self.lock is not None:
            self.lock.release()


def begin(folder: Path, *, with_log: bool = False) -> Begun:
    """Take a run's folder and find where it stands; all ranks call it.

    Args:
        with_log: the run goes on with its MLPerf log.

    Raises:
        ConfigError: another process has it, its checkpoints are all damaged, or the newest or the record cannot be read.
    """
    lock = FileLock(folder / ".lock")

    def find() -> Path | None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
            return find_newest(folder / "checkpoints")
        except Timeout as error:
            given = f"another process is training in {folder}"
            raise ConfigError([f"run_name: {given}. Wait for it, or take another run_name."]) from error
        except OSError as error:
            raise ConfigError([f"run_folder: {error}. Give a folder that this user may write in."]) from error

    newest = alarm.on_rank_zero(find)
    checkpoint = None if newest is None else (newest, read(newest))
    if checkpoint is not None:
        check_whole(checkpoint[1], checkpoint[0])
    content = checkpoint[1] if checkpoint else None
    lost = alarm.on_rank_zero(
        lambda: lost_history(folder, content) | (lost_events(folder, content) if with_log else {})
    )
    progress = Progress(**content["progress"]) if content else Progress(0, 0, 0, 0, 0, 0.0)
    return Begun(folder, progress, checkpoint, lock if dist.get_global_rank() == 0 else None, lost)


def check_checkpoint(begun: Begun, identity: Mapping[str, Any], config: Any, resolve: Callable[[Any], Any]) -> None:
    """Compare a run with the checkpoint that it would go on from.

    Args:
        config: of the run.
        resolve: fills in what null stands for, so that keys which the checkpoint does not name have their defaults.

    Raises:
        ConfigError: lists what differs.
    """
    if begun.checkpoint is not None:
        path, content = begun.checkpoint
        if problems := disagreements(content, identity, path, _defaults(config, content["identity"], resolve)):
            raise ConfigError(problems)


def _defaults(config: Any, named: Collection[str], resolve: Callable[[Any], Any]) -> dict[str, Any]:
    """Return every key with its value, where lasting keys that are not among the named ones have their defaults, resolved."""
    # Where the schedule ends with the run max_duration is named: elsewhere it has no say.
    kept = {*named, "max_duration", *(flat(config).keys() - _lasting(config).keys())}
    return flat(resolve(_defaulted(config, kept)))


def _defaulted(section: Any, kept: Collection[str], prefix: str = "") -> Any:
    """Return a section with the defaults of its class for all keys but those that are kept."""
    plain, values = type(section)(), {}
    for key in fields(section):
        own = getattr(section, key.name)
        if is_dataclass(own):
            values[key.name] = _defaulted(own, kept, f"{prefix}{key.name}.")
        else:
            values[key.name] = own if f"{prefix}{key.name}" in kept else getattr(plain, key.name)
    return replace(section, **values)
