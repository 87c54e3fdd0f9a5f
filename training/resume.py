"""A named run's progress, and whether this start may resume it.

A start locks the run's folder and finds the newest whole checkpoint. It first compares the run's keys (config.yaml and
later.yaml), before anything is built. Then, with encoders and stage loaded, it compares the checkpoint's own identity.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from composer.utils import dist
from filelock import FileLock, Timeout

from callbacks.quality_target import TARGET_KEYS, outcome, said
from cli import errors, masking, ranks
from cli.errors import ConfigError, Failed
from cli.files import read_regular
from cli.log import log
from config import flat
from evaluation.score_table import read_rows
from record.checkpoint_files import find_newest, outline
from record.config_file import found_batch_size, keep_keys, read_config
from record.files import evaluations_of, lost_history, read_summary, validations_of
from record.mlperf_events import lost_events
from record.summary import COST_KEYS, RESULT_KEYS, VAL_LOSS, rounded, spent, write_outcome
from stages.dataset import Stage
from training.checkpoint_content import Progress, disagreements
from training.run_config import RunConfig
from training.sharding import is_sharded
from training.shared_folder import check_is_shared
from training.speed import SpeedKeys

# Keys that may differ between the starts of one run: they change places and speed, not what is computed.
MAY_CHANGE = (
    "run_name",
    "run_folder",
    "max_duration",  # unless the learning rate depends on it
    "device_train_microbatch_size",
    *(key.name for key in fields(SpeedKeys)),  # these change rounding only
    "model.weights",  # the encoders' fingerprints have to agree
    "model.frozen_device",
    "data.remote",  # the stage's digest has to agree
    "data.local",
    "data.facts",
    "data.workers",
    "data.cache_limit",
    "data.max_bad_samples",
    "data.patience_sec",
    "ema.device",
    "eval.",  # every score is recorded with all that it depends on
    "target.",
    "validation.",  # so is every loss
    "samples.",
    "save.",
    "measure.",
    "profile.",
    "cost.",
    "health.",
    "loggers.",
    "mlperf.",  # the log says how the run began
)

ENCODERS = "encoders."
"""Prefix of the encoders' fingerprints in an identity."""


def _comparable(key: str, value: Any) -> Any:
    """Return a key's value without what may differ between the starts of one run: the places of streams."""
    if key != "data.streams" or not isinstance(value, list):
        return value
    places = ("remote", "local", "facts")
    return [{n: part for n, part in stream.items() if n not in places and part is not None} for stream in value]


def _lasting(config: RunConfig) -> dict[str, Any]:
    """Key -> value of everything that may not change after the run began."""
    kept = {key: _comparable(key, value) for key, value in flat(config).items() if not key.startswith(MAY_CHANGE)}
    return kept if config.schedule.name == "constant" else {**kept, "max_duration": config.max_duration}


def _with_encoders_of(identity: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity with another's encoders where it has none: a start builds them only where it needs them."""
    if any(key.startswith(ENCODERS) for key in identity):
        return dict(identity)
    return {**identity, **{key: digest for key, digest in other.items() if key.startswith(ENCODERS)}}


def identity_of(config: RunConfig, stages: Sequence[Stage], fingerprints: Mapping[str, str]) -> dict[str, Any]:
    """Key -> plain value of everything that identifies a run; checkpoints store it."""
    encoders = {f"{ENCODERS}{name}": digest for name, digest in fingerprints.items()}
    digests = [stage.index_sha256 for stage in stages]
    identity = {
        **_lasting(config),
        **encoders,
        "stage": digests if len(digests) > 1 else next(iter(digests), None),
    }
    columns = [stage.adopted and stage.adopted.as_facts() for stage in stages]
    return {**identity, "stage.columns": columns if len(columns) > 1 else columns[0]} if any(columns) else identity


def kept(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity as a checkpoint stores it: the initial weights' place as it was given, with its `${...}`.

    Numbers and names of choices are stored resolved, since they identify the run.
    """
    return {**identity, **masking.written({"model.denoiser": identity["model.denoiser"]})}


# --- how it was evaluated and validated before ---

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
OF_VALIDATION = {
    "times": "validation.times",
    "num_samples": "validation.num_samples",
    "stage_sha256": "validation.remote",
}


def check_evaluations(folder: Path, batch: int, settings: Mapping[str, Any]) -> None:
    """Compare a run's evaluation settings with those of its earlier evaluations, so that all its scores are comparable.

    Args:
        batch: where the run resumes; later lines are cut.
        settings: of evaluation.scoring.Scorer, and eval_weights.

    Raises:
        ConfigError: lists what differs.
    """
    todo = "A run's evaluations have to be alike: use that, or another run_name; its snapshots can be scored anew by "
    todo += f"composer eval.py {folder} KEY=... out=FOLDER."
    lines = [line for line in evaluations_of(folder) if line["batch"] <= batch]
    _check_alike(f"{folder} was evaluated", lines[-1:], SETTINGS, settings, todo)


def check_validations(folder: Path, batch: int, settings: Mapping[str, Any]) -> None:
    """The same of a run's validations, where its target is their loss. `settings`: those of this start's validations."""
    todo = "Losses of one target have to be alike: use that, or another run_name."
    lines = [line for line in validations_of(folder) if line["batch"] <= batch]
    _check_alike(f"{folder} was validated", lines, OF_VALIDATION, settings, todo)


def _check_alike(
    was: str, lines: Sequence[Mapping[str, Any]], keys: Mapping[str, str], settings: Mapping[str, Any], todo: str
) -> None:
    differing = []
    for name, key in keys.items():
        value = settings.get(name)
        for line in [line for line in lines if line.get(name) != value][-1:]:
            given = f"{key}: {name} {value}, but {was} with {line.get(name)} at {line['images']:,} images"
            differing.append(f"{given}. {todo}")
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


# --- whether it is finished ---


def finished(folder: Path, max_duration: str | None, config: RunConfig) -> dict[str, Any] | None:
    """Return the result of a finished run and log that it is finished; None if it is not.

    Another target, evaluation setting or price is written to its record.

    Args:
        max_duration: the duration that it has to have finished; None: any.
        config: of this start; a run that only met another target is not finished.
    """
    summary = read_summary(folder, "batches")
    if not summary:
        return None
    lines, is_of_loss = measured(folder, config), config.target.val_loss is not None
    is_decided = is_of_loss or config.eval.when != "off"
    met = next((line for line in lines if is_decided and config.target.is_met(line)), None)
    if met is not None:
        found, text = outcome(lines, met, config.target.metrics), f"has reached its target ({said(met)})"
    elif summary.get("stopped_early") or max_duration not in (None, summary.get("max_duration")):
        return None  # it met an easier target, or a longer training is wanted
    else:
        found, more = _unmet(folder, summary, lines, config)
        text = f"is finished (max_duration={summary.get('max_duration')}); a longer one would resume it{more}"
    log.info(f"run_name: {folder} {text}.")
    if config.cost.per_device_hour is not None:
        found |= spent(folder, config.cost.per_device_hour, summary.get("history_lost", []))
    if dist.get_global_rank() == 0:
        if found:
            write_outcome(folder, found)
        if "cost" in found:
            keep_keys(folder, flat(config), ("cost.",))
        if is_decided:  # so that eval.py scores with this start's settings
            batch_size = config.eval.batch_size or found_batch_size(folder)
            keep_keys(folder, {**flat(config), "eval.batch_size": batch_size}, ("eval.", "target."))
    summary |= found
    price = COST_KEYS if "cost" in summary else ()
    return {key: rounded(summary[key]) for key in (*RESULT_KEYS, VAL_LOSS, *TARGET_KEYS, *price) if key in summary}


def _unmet(folder: Path, summary: Mapping[str, Any], lines: list[Any], config: RunConfig) -> tuple[dict[str, Any], str]:
    """Return the outcome of a finished run that did not meet its target in training, and a text about it.

    Points that were not evaluated are left to eval.py. Scoring only the last one now could report `missed` for a run that
    met the target earlier. Scoring them all would need the clock and the weights of a training that is over.
    """
    if config.target.val_loss is not None:
        return outcome(lines, None, config.target.metrics) if lines else {}, ""
    if config.eval.when == "off":
        return {}, ""
    every, images = config.eval.every_images, summary["batches"] * config.global_batch_size
    assert every is not None
    due = range(every, images + 1, every)
    missing = set(due) - {line["images"] for line in lines}
    if not missing:
        return outcome(lines, None) if config.target.is_given else {}, ""
    begun = read_config(folder)
    same = all(begun.get(key) == value for key, value in flat(config).items() if key.startswith("target."))
    try:
        has_files = has_files_of(read_rows(folder / "eval.jsonl"), config)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    if same and has_files and summary.get("target") in ("reached", "missed"):
        return {}, ""  # eval.py has decided it
    found = {**dict.fromkeys(TARGET_KEYS), "target": "pending"} if config.target.is_given else {}
    more = f"; {len(missing)} of its {len(due)} points were not evaluated in training"
    more += "" if has_files else ", and its scores are of other prompts or statistics than these"
    return found, f"{more}: composer eval.py {folder} scores the snapshots that it has"


def check_begun(config: RunConfig, folder: Path) -> dict[str, Any] | None:
    """Compare with the configuration that a run began with, before anything is built.

    Returns:
        The result of a finished run (and logs that); None if there is something to train.

    Raises:
        ConfigError: lists what differs.
    """
    if not (folder / "config.yaml").is_file():
        return None
    begun = read_config(folder)
    begun = {key: _comparable(key, value) for key, value in begun.items()}
    differing = {key: value for key, value in _lasting(config).items() if key in begun and begun[key] != value}
    if differing:
        texts = {key: [json.dumps(each).strip('"') for each in (value, begun[key])] for key, value in differing.items()}
        again = "A run resumes as it began: use that value, or another run_name."
        raise ConfigError(
            [f"{key}: {now}, but {folder} was begun with {was}. {again}" for key, (now, was) in texts.items()]
        )
    lines = evaluations_of(folder)  # unreadable lines are refused before anything is built
    if _lasting(config).keys() - begun.keys():
        return None  # if it lacks keys (cut off), the checkpoint has them
    if config.eval.when == "in_training" and lines and not is_evaluated_alike(folder, config):
        return None  # the scorer will tell whether its settings differ
    return finished(folder, config.max_duration, config)


def check_encoders(stages: Sequence[Stage], held_out: Stage | None, fingerprints: Mapping[str, str]) -> None:
    """Compare the run's encoders with those that made the moments; without any, those of the stages with one another.

    Raises:
        ConfigError: they differ.
    """
    of_stages = [("data.streams", stage) for stage in stages]
    of_stages += [] if held_out is None else [("validation.remote", held_out)]
    first: dict[str, tuple[str, str]] = {}  # name -> fingerprint, and the first stage that says it
    differing = []
    for key, stage in of_stages if not fingerprints else ():
        for name, digest in (stage.facts.get("encoders") or {}).items():
            if digest is None:  # made without this one
                continue
            known, where = first.setdefault(name, (digest, stage.location))
            if digest != known:
                given = f"the {name} of {stage.location} has the fingerprint {digest}, that of {where} {known}"
                differing.append(f"{key}: {given}. Give stages that were made with the same encoders.")
    differing += [
        f"model.weights: its {name} has the fingerprint {digest}, the moments at {stage.location} were made with "
        f"{made[name]}. Use those weights, or make the moments again: python -m prepare.latents --help"
        for _, stage in of_stages
        for made in [stage.facts.get("encoders") or {}]
        for name, digest in fingerprints.items()
        if made.get(name) not in (None, digest)
    ]
    if differing:
        raise ConfigError(differing)


@dataclass
class RunState:
    """A run that this process has locked, and its progress.

    checkpoint: path and content of the one to resume from, or None; lock: held by rank 0 until the process ends.
    """

    folder: Path
    progress: Progress
    checkpoint: tuple[Path, dict[str, Any]] | None
    lock: FileLock | None
    made: list[Path]
    """Folders that did not exist before this start, the outermost first."""
    lost: dict[str, str] = field(default_factory=dict)
    """File of the record -> what it has lost since the checkpoint."""

    def say(self, num_starts: int) -> None:
        """Log where the run resumes from, if it was started before."""
        if self.lock is not None and (num_starts > 1 or self.checkpoint):
            at = f"batch {self.progress.batch}, {self.progress.images:,} images"
            where = f"{at} ({self.checkpoint[0]})" if self.checkpoint else "its beginning: it has no checkpoint"
            log.info(f"run_name: {self.folder} resumes from {where}.")
        for name, text in self.lost.items() if self.lock is not None else ():
            told = "it was cut, or is a copy of before. summary.json will say so (history_lost)"
            log.info(f"run_name: {self.folder / name} {text}: {told}.")

    def verify(
        self, config: RunConfig, stages: Sequence[Stage], encoders: Mapping[str, str], *, denoiser_start: str | None
    ) -> dict[str, Any]:
        """Compare this start with the checkpoint that it resumes from.

        Args:
            stages: none for synthetic data.
            encoders: name -> fingerprint; none where this start builds none: what the checkpoint knows of them stays.
            denoiser_start: fingerprint of the initial weights, None for random ones.

        Returns:
            The run's identity, see `identity_of`.

        Raises:
            ConfigError: lists what differs.
        """
        identity = {**identity_of(config, stages, encoders), "denoiser_start": denoiser_start}
        if self.checkpoint is not None:
            path, content = self.checkpoint
            saved = _with_encoders_of(content["identity"], identity)
            identity, content = _with_encoders_of(identity, saved), {**content, "identity": saved}
            if problems := disagreements(content, identity, path):
                raise ConfigError(problems)
        return identity

    def finished(self, config: RunConfig, *, is_over: bool) -> dict[str, Any] | None:
        """Return the result of a finished run and log that, or None. `is_over`: no batch is left to train."""
        return finished(self.folder, None if is_over else config.max_duration, config)

    def release(self) -> None:
        """Release the folder's lock."""
        if self.lock is not None:
            self.lock.release()

    @contextlib.contextmanager
    def or_nothing(self) -> Iterator[None]:
        """Remove this start's folders if an error ends it in the context, on whichever rank.

        Raises:
            ConfigError: instead of a ValueError: an impossible start. Failed stays.
        """
        try:
            yield
        except BaseException as error:
            self.release()
            _remove(self.made, self.folder)
            is_ours = isinstance(error, ConfigError | Failed)
            if isinstance(error, ValueError) and not is_ours and errors.is_foreseen(error):
                raise ConfigError([str(error)]) from error
            raise


def _missing(folder: Path) -> list[Path]:
    """Return those of a folder and its parents that do not exist, the outermost first."""
    return [path for path in reversed((folder.absolute(), *folder.absolute().parents)) if not path.exists()]


def _remove(made: Sequence[Path], own: Path) -> None:
    """Remove what a start has created: its own folder with its content, parents only if they are empty."""
    for path in reversed(made):
        with contextlib.suppress(OSError):  # another rank was first, or another process uses it too
            if path.is_file():
                path.unlink()
            elif path == own.absolute():
                shutil.rmtree(path)
            else:
                path.rmdir()


def open_run(config: RunConfig) -> RunState:
    """Lock a run's folder and find its progress. All ranks call it.

    Raises:
        Failed: another process uses it.
        ConfigError: all its checkpoints are damaged; or the newest one or the record is unreadable.
    """
    folder = Path(config.run_folder, config.run_name or "")
    lock = FileLock(folder / ".lock")

    def find() -> tuple[Path | None, list[Path]]:
        made = _missing(folder / ".lock")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
            return find_newest(folder / "checkpoints"), made
        except Timeout as error:
            given = f"another process is training in {folder}"
            raise Failed(f"run_name: {given}. Wait for it, or take another run_name.") from error
        except BaseException as error:
            lock.release()
            _remove(made, folder)
            if isinstance(error, OSError):
                raise ConfigError([f"run_folder: {error}. Give a folder that this user may write in."]) from error
            raise

    newest, made = ranks.on_rank_zero(find)
    state = RunState(folder, Progress(0, 0, 0, 0, 0, 0.0), None, lock if dist.get_global_rank() == 0 else None, made)
    with state.or_nothing():
        if config.save.is_on and (config.save.remote is None or is_sharded(config)):
            check_is_shared(folder)  # else training/remote.py has given each machine what it reads
        content = None if newest is None else outline(newest)
        if newest is not None and content is not None:
            state.checkpoint, state.progress = (newest, content), Progress(**content["progress"])
        state.lost = ranks.on_rank_zero(
            lambda: lost_history(folder, content) | (lost_events(folder, content) if config.mlperf.enabled else {})
        )
    return state
