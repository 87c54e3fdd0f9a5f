"""Where a run stands, and whether this start may continue it. `train` calls `find_standing` once, before it builds anything.

ranks    all have the same code, versions, configuration and kind of device (training/verify_ranks.py)
store    what save.remote has of the run, and this machine does not, is downloaded (checkpointing/downloads.py)
keys     everything that may not change equals the configuration that the run was begun with
result   a finished run is not trained again; its result is returned
hub      names of weights get their commit, and their files are in the cache of each machine
folder   this process locks it, and finds the newest whole checkpoint (checkpointing/resume.py)
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callbacks.quality_target import format_metrics, target_outcome
from checkpointing import downloads
from checkpointing.callback import SaveConfig
from checkpointing.files import FULL, list_checkpoints
from checkpointing.resume import ENCODERS, RunState, compare_with_config, is_begun, open_run, without_paths
from checkpointing.shared_folder import fetch_to_all
from checkpointing.uploads import Uploads, start_uploads
from common import dist
from common.errors import ConfigError
from common.files import read_regular
from common.log import log
from common.plugins import plugin_digests
from config import flatten, replace_keys
from evaluation.scorer import EvalConfig, TargetConfig
from evaluation.table import read_rows
from evaluation.validation import ValidationConfig
from families import load_family
from families.encoders import ModelConfig, list_hub_weights, weights_problems
from mds.dataset import Dataset
from ranks import collectives
from ranks.watchdog import Watchdog
from run_folder.files import (
    evaluations_of,
    keep_keys,
    read_config,
    read_summary,
    saved_batch_size,
    validations_of,
)
from run_folder.history import COST_KEYS, RESULT_KEYS, TARGET_KEYS, VAL_LOSS, cost_so_far, rounded, write_outcome
from training import initial_weights, verify_ranks
from training.speed import SpeedKeys
from weights import hub
from weights.hub_names import is_same_model

if TYPE_CHECKING:
    from composer.devices import Device

# Keys that may differ between the starts of one run: they change paths and speed, not what is computed.
MAY_CHANGE = (
    "run_name",
    "run_folder",
    "max_duration",  # unless the learning rate depends on it
    "device_train_microbatch_size",
    *(key.name for key in fields(SpeedKeys)),  # these change rounding only
    "model.weights",  # the encoders' fingerprints have to agree
    "model.frozen_device",
    "data.remote",  # the dataset's digest has to agree
    "data.local",
    "data.metadata",
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

CANONICAL_NODES = "data.num_canonical_nodes"
OF_EVALUATION = ("eval.inception", "eval.clip", "eval.cmmd")
HUB_KEYS = ("model.weights", "model.denoiser", *OF_EVALUATION)
"""Keys whose values may be names on the Hugging Face Hub."""


@dataclass(frozen=True)
class StartSettings:
    """What of a resolved configuration decides where its run stands."""

    keys: Mapping[str, Any]
    """Every key -> plain value."""
    model: ModelConfig
    save: SaveConfig
    eval: EvalConfig
    target: TargetConfig
    validation: ValidationConfig
    is_sharded: bool
    has_adapter: bool
    """The run trains an adapter. Its base is in no checkpoint."""
    needs_encoders: Callable[[], bool]
    """Whether training runs the frozen encoders. It may read the datasets' metadata."""

    @property
    def folder(self) -> Path:
        return Path(self.keys["run_folder"], self.keys["run_name"] or "")

    def with_keys(self, values: Mapping[str, Any]) -> StartSettings:
        """Return the settings with other values of some keys."""
        of_sections = {key: value for key, value in values.items() if key.startswith(("model.", "eval."))}
        return replace_keys(dataclasses.replace(self, keys={**self.keys, **values}), of_sections)

    def with_saved_keys(self) -> StartSettings:
        """Return the settings that a start has if the run lies on its disk when the configuration is resolved."""
        is_default = self.keys[CANONICAL_NODES] == collectives.num_nodes()
        return self.with_keys(saved_keys({**self.keys, CANONICAL_NODES: None} if is_default else self.keys))


@dataclass(frozen=True)
class Standing:
    """Where a run stands."""

    settings: StartSettings
    """With the values that the ranks, the run's files and the hub have decided."""
    watch: Watchdog
    """What watches the other ranks."""
    changes: Mapping[str, Any]
    """Key -> value: those values that this start's configuration has to take over."""
    run: RunState | None
    """The run, locked. None: it is finished."""
    result: dict[str, Any] = field(default_factory=dict)
    """Of a finished run."""

    def find_result(self, *, is_over: bool) -> dict[str, Any] | None:
        """Return the result of a finished run and log that, or None. `is_over`: no batch is left to train."""
        return find_result(self.settings, None if is_over else self.settings.keys["max_duration"])


def find_standing(settings: StartSettings, device: Device, timeout_sec: float, uploads: Uploads | None) -> Standing:
    """Find where a run stands, and lock it unless it is finished. All ranks call it.

    Args:
        timeout_sec: of every collective of the run.
        uploads: of rank 0, if save.remote is given; for a finished run it uploads what the store does not have.

    Raises:
        ConfigError: on all ranks: they differ; the run was begun with another configuration; its store cannot be read or
            written, or has another run of this name; weights are not available or do not fit; its files are damaged.
        Failed: on all ranks: a rank or the store is away, or another process uses the run's folder.
    """
    requested_keys = settings.keys
    run_name, watch = verify_ranks.verify_ranks_match(requested_keys, device, timeout_sec)
    settings, result = _restore(settings.with_keys({"run_name": run_name}), uploads)
    if result is None:
        settings = settings.with_keys(fetch_for_training(settings))
    changes = {key: value for key, value in settings.keys.items() if requested_keys[key] != value}
    if result is not None:
        return Standing(settings, watch, changes, None, result)
    save = settings.save
    must_be_shared = save.is_on and (save.remote is None or settings.is_sharded)  # else each machine has what it reads
    run = open_run(settings.folder, must_be_shared=must_be_shared, has_mlperf_log=settings.keys["mlperf.enabled"])
    return Standing(settings, watch, changes, run)


def has_separate_folders(remote: str | None) -> bool:
    """True if no machine reads its run folder before the ranks are connected: with a store, each may have its own."""
    return remote is not None and collectives.num_nodes() > 1


def _restore(settings: StartSettings, uploads: Uploads | None) -> tuple[StartSettings, dict[str, Any] | None]:
    """Download the run from its store, and return the settings with its saved keys, and a finished run's result."""
    remote, folder = settings.save.remote, settings.folder
    if remote is None:
        return settings, collectives.on_rank_zero(lambda: check_begun(settings))
    is_restored, result = collectives.on_rank_zero(
        lambda: downloads.restore_from_store(
            remote,
            folder,
            with_snapshots=settings.eval.when == "after",
            find_result=lambda: check_begun(settings.with_saved_keys()),
        )
    )
    if result is None and not settings.is_sharded:
        fetch_to_all(folder, lambda: downloads.upload_now(uploads), lambda: downloads.fetch_newest(remote, folder))
    if is_restored or has_separate_folders(remote):
        settings = settings.with_saved_keys()
    if result is not None and not is_restored:
        start_uploads(uploads)
    return settings, result


# --- names on the hub ---


def saved_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run that exists has decided: its commits of names on the hub, its weights and its number of nodes.

    Args:
        keys: of this start, resolved or not.
    """
    folder = Path(keys["run_folder"], keys["run_name"] or "")
    if not keys["run_name"] or not is_begun(folder):
        return {}
    try:
        begun = read_config(folder)
    except ConfigError:
        return {}  # reported when the run is opened
    saved = {key: begun[key] for key in HUB_KEYS if is_same_model(keys[key], begun.get(key))}
    if keys["model.weights"] is None and begun.get("model.weights") is not None:
        saved["model.weights"] = begun["model.weights"]
    if CANONICAL_NODES in begun and keys[CANONICAL_NODES] is None:
        saved[CANONICAL_NODES] = begun[CANONICAL_NODES]
    return saved


def log_hub_names(settings: StartSettings) -> None:
    """Log what a run will take from the hub, and what of it has to be downloaded. Raises ValueError: a name is wrong."""
    for key, (name, need) in _hub_names(settings.model, settings.eval, keys_of_training(settings)).items():
        for line in hub.resolve_name(name, need).lines():
            log.info(f"{key}: {line}.")


def fetch_for_training(settings: StartSettings) -> dict[str, str]:
    """Download what a training takes from the hub, see `fetch_from_hub`."""
    keys = collectives.on_rank_zero(lambda: keys_of_training(settings))
    return fetch_from_hub(settings.model, settings.eval, settings.keys["objective.prediction"], keys)


def fetch_from_hub(
    model: ModelConfig, evaluation: EvalConfig, prediction: str | None, keys: Collection[str]
) -> dict[str, str]:
    """Download names on the hub to each machine, by one rank of it. All ranks call it.

    Args:
        prediction: the run's prediction target; None: the family's.
        keys: those that are needed.

    Returns:
        key -> name with the commit that rank 0 has found, so that a resume takes the same.

    Raises:
        ConfigError: on all ranks, what is not available or does not fit.
    """
    pins = collectives.on_rank_zero(lambda: hub.pin_all(_hub_names(model, evaluation, keys)))
    if not pins:
        return {}
    names = _hub_names(model, evaluation, pins)
    of_model = {key.removeprefix("model."): name for key, name in pins.items() if key.startswith("model.")}
    pinned = replace_keys(model, of_model)

    def fetch() -> None:
        hub.fetch_all(names, pins)
        if problems := _misfits(pinned, prediction, names):
            raise ConfigError(problems)

    collectives.on_one_rank_of_each_machine(fetch)
    return pins


def keys_of_training(settings: StartSettings) -> tuple[str, ...]:
    """Return the keys of the weights that a training needs: one that is resumed has its denoiser in its checkpoint."""
    is_saved = bool(settings.keys["run_name"]) and bool(list_checkpoints(settings.folder / "checkpoints", FULL))
    of_denoiser = () if is_saved and not settings.has_adapter else ("model.denoiser",)
    of_evaluation = OF_EVALUATION if settings.eval.when == "in_training" else ()
    of_encoders = ("model.weights",) if settings.needs_encoders() else ()
    return (*of_encoders, *of_denoiser, *of_evaluation)


def _hub_names(
    model: ModelConfig, evaluation: EvalConfig, keys: Collection[str]
) -> dict[str, tuple[str, hub.RequiredFiles]]:
    """Return those of the keys that are names on the hub: key -> name and the files that it needs."""
    family = load_family(model.family, model.preset, model.variant)
    names = list_hub_weights(family, model.weights, model.denoiser) | evaluation.on_hub()
    return {key: name for key, name in names.items() if key in keys}


def _misfits(model: ModelConfig, prediction: str | None, keys: Collection[str]) -> list[str]:
    """Return why weights do not fit that the checks before the run could not see."""
    family, problems = load_family(model.family, model.preset, model.variant), []
    if "model.weights" in keys:
        problems += [f"model.weights: {text}" for text in weights_problems(family, model.weights or "")]
    if "model.denoiser" in keys:
        problems += [problem.text for problem in initial_weights.problems(model, prediction)]
    return problems


# --- what identifies the run ---


def fixed_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return key -> value of everything that may not change after the run began."""
    fixed = {key: without_paths(key, value) for key, value in keys.items() if not key.startswith(MAY_CHANGE)}
    return fixed if keys["schedule.name"] == "constant" else {**fixed, "max_duration": keys["max_duration"]}


def identity_of(
    keys: Mapping[str, Any],
    datasets: Sequence[Dataset],
    fingerprints: Mapping[str, str],
    *,
    denoiser_start: str | None,
) -> dict[str, Any]:
    """Return key -> plain value of everything that identifies a run; checkpoints store it.

    Args:
        keys: of the resolved configuration.
        datasets: none for synthetic data.
        fingerprints: encoder -> its fingerprint; none if this start builds none.
        denoiser_start: fingerprint of the initial weights, None for random ones.
    """
    encoders = {f"{ENCODERS}{name}": digest for name, digest in fingerprints.items()}
    digests = [dataset.index_sha256 for dataset in datasets]
    identity = {
        **fixed_keys(keys),
        **plugin_digests(keys),
        **encoders,
        "stage": digests if len(digests) > 1 else next(iter(digests), None),
        "denoiser_start": denoiser_start,
    }
    columns = [dataset.adopted and dataset.adopted.as_metadata() for dataset in datasets]
    return {**identity, "stage.columns": columns if len(columns) > 1 else columns[0]} if any(columns) else identity


def check_encoders(datasets: Sequence[Dataset], held_out: Dataset | None, fingerprints: Mapping[str, str]) -> None:
    """Compare the run's encoders with those that made the moments; without any, those of the datasets with one another.

    Raises:
        ConfigError: they differ.
    """
    of_datasets = [("data.streams", dataset) for dataset in datasets]
    of_datasets += [] if held_out is None else [("validation.remote", held_out)]
    first: dict[str, tuple[str, str]] = {}  # name -> fingerprint, and the first dataset that has it
    differing = []
    for key, dataset in of_datasets if not fingerprints else ():
        for name, digest in (dataset.metadata.get("encoders") or {}).items():
            if digest is None:  # made without this one
                continue
            known, where = first.setdefault(name, (digest, dataset.location))
            if digest != known:
                problem = f"the {name} of {dataset.location} has the fingerprint {digest}, that of {where} {known}"
                differing.append(f"{key}: {problem}. Give datasets that were made with the same encoders.")
    differing += [
        f"model.weights: its {name} has the fingerprint {digest}, the moments at {dataset.location} were made with "
        f"{made[name]}. Use those weights, or make the moments again: python -m prepare.latents --help"
        for _, dataset in of_datasets
        for made in [dataset.metadata.get("encoders") or {}]
        for name, digest in fingerprints.items()
        if made.get(name) not in (None, digest)
    ]
    if differing:
        raise ConfigError(differing)


def check_begun(settings: StartSettings) -> dict[str, Any] | None:
    """Compare with the configuration that a run was begun with, before anything is built.

    Returns:
        The result of a finished run (and logs that); None if there is something to train.

    Raises:
        ConfigError: lists what differs.
    """
    folder = settings.folder
    if not is_begun(folder):
        return None
    is_whole = compare_with_config(folder, fixed_keys(settings.keys))
    lines = evaluations_of(folder)  # unreadable lines are refused before anything is built
    if not is_whole:
        return None
    if settings.eval.when == "in_training" and lines and not is_evaluated_alike(settings):
        return None  # the scorer will tell whether its settings differ
    return find_result(settings, settings.keys["max_duration"])


# --- how the run was evaluated and validated before ---

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
    "cmmd_fingerprint": "eval.cmmd",
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
        settings: of evaluation.scorer.Scorer, and eval_weights.

    Raises:
        ConfigError: lists what differs.
    """
    todo = "A run's evaluations must have the same settings: use the earlier ones, or another run_name; its snapshots can be "
    todo += f"scored again by composer eval.py {folder} KEY=... out=FOLDER."
    lines = [line for line in evaluations_of(folder) if line["batch"] <= batch]
    _check_alike(f"{folder} was evaluated", lines[-1:], SETTINGS, settings, todo)


def check_validations(folder: Path, batch: int, settings: Mapping[str, Any]) -> None:
    """The same of a run's validations, if its target is their loss. `settings`: those of this start's validations."""
    todo = "Losses of one target must have the same settings: use the earlier ones, or another run_name."
    lines = [line for line in validations_of(folder) if line["batch"] <= batch]
    _check_alike(f"{folder} was validated", lines, OF_VALIDATION, settings, todo)


def _check_alike(
    was: str, lines: Sequence[Mapping[str, Any]], keys: Mapping[str, str], settings: Mapping[str, Any], todo: str
) -> None:
    differing = []
    for name, key in keys.items():
        value = settings.get(name)
        for line in [line for line in lines if line.get(name) != value][-1:]:
            difference = f"{key}: {name} {value}, but {was} with {line.get(name)} at {line['images']:,} images"
            differing.append(f"{difference}. {todo}")
    if differing:
        raise ConfigError(differing)


def is_evaluated_alike(settings: StartSettings) -> bool:
    """True if the keys that a score depends on equal the run's, and their small files are unchanged."""
    evaluated = {key: settings.keys[key] for key in SETTINGS.values()}
    defaults = {f"eval.{key}": value for key, value in flatten(EvalConfig()).items()}
    begun = {**defaults, **read_config(settings.folder)}
    return evaluated.items() <= begun.items() and has_files_of(evaluations_of(settings.folder)[-1:], settings.eval)


def has_files_of(scores: Sequence[Mapping[str, Any]], evaluation: EvalConfig) -> bool:
    """True if there is no score, or the scores used these prompts and statistics: a path's content may have changed."""
    digests = {}
    for setting in ("prompts_sha256", "statistics_sha256"):
        path = getattr(evaluation, SETTINGS[setting].removeprefix("eval."))
        if path is not None and Path(path).expanduser().is_file():
            digests[setting] = hashlib.sha256(read_regular(Path(path).expanduser())).hexdigest()
    is_same_of = (all(score.get(key, digest) == digest for key, digest in digests.items()) for score in scores)
    return not scores or any(is_same_of)


# --- whether the run is finished ---


def lines_of_target(settings: StartSettings) -> list[dict[str, Any]]:
    """Return the lines of a run's record that this start's target is decided by.

    Raises:
        ConfigError: they are losses, and not what this start would measure.
    """
    folder, validation = settings.folder, settings.validation
    if settings.target.val_loss is not None:
        lines = validations_of(folder)
        identity = validation.identity_of(validation.held_out.dataset)
        check_validations(folder, max((line["batch"] for line in lines), default=0), identity)
        return lines
    is_alike = settings.eval.when == "in_training" or is_evaluated_alike(settings)
    return evaluations_of(folder) if is_alike else []


def find_result(settings: StartSettings, max_duration: str | None) -> dict[str, Any] | None:
    """Return the result of a finished run and log that it is finished; None if it is not.

    Another target, evaluation setting or price is written to its record.

    Args:
        settings: of this start; a run that only met another target is not finished.
        max_duration: the duration that it has to have finished; None: any.
    """
    folder, target, keys = settings.folder, settings.target, settings.keys
    summary = read_summary(folder, "batches")
    if not summary:
        return None
    lines, is_of_loss = lines_of_target(settings), target.val_loss is not None
    is_decided = is_of_loss or settings.eval.when != "off"
    met = next((line for line in lines if is_decided and target.is_met(line)), None)
    if met is not None:
        outcome, text = target_outcome(lines, met, target.metrics), f"has reached its target ({format_metrics(met)})"
    elif summary.get("stopped_early") or max_duration not in (None, summary.get("max_duration")):
        return None  # it met an easier target, or a longer training is wanted
    else:
        outcome, more = _unmet(settings, summary, lines)
        text = f"is finished (max_duration={summary.get('max_duration')}); a longer one would resume it{more}"
    log.info(f"run_name: {folder} {text}.")
    if (per_device_hour := keys["cost.per_device_hour"]) is not None:
        outcome |= cost_so_far(folder, per_device_hour, summary.get("history_lost", []))
    if dist.get_global_rank() == 0:
        if outcome:
            write_outcome(folder, outcome)
        if "cost" in outcome:
            keep_keys(folder, keys, ("cost.",))
        if is_decided:  # so that eval.py scores with this start's settings
            batch_size = keys["eval.batch_size"] or saved_batch_size(folder)
            keep_keys(folder, {**keys, "eval.batch_size": batch_size}, ("eval.", "target."))
    summary |= outcome
    price = COST_KEYS if "cost" in summary else ()
    return {key: rounded(summary[key]) for key in (*RESULT_KEYS, VAL_LOSS, *TARGET_KEYS, *price) if key in summary}


def _unmet(settings: StartSettings, summary: Mapping[str, Any], lines: list[Any]) -> tuple[dict[str, Any], str]:
    """Return the outcome of a finished run that did not meet its target in training, and a text about it.

    Points that were not evaluated are left to eval.py. Scoring only the last one now could report `missed` for a run that
    met the target earlier. Scoring them all would need the clock and the weights of a training that is over.
    """
    folder, target, evaluation = settings.folder, settings.target, settings.eval
    if target.val_loss is not None:
        return target_outcome(lines, None, target.metrics) if lines else {}, ""
    if evaluation.when == "off":
        return {}, ""
    every, images = evaluation.every_images, summary["batches"] * settings.keys["global_batch_size"]
    assert every is not None
    due = range(every, images + 1, every)
    missing = set(due) - {line["images"] for line in lines}
    if not missing:
        return target_outcome(lines, None) if target.is_given else {}, ""
    begun = read_config(folder)
    is_same_target = all(begun.get(k) == value for k, value in settings.keys.items() if k.startswith("target."))
    try:
        has_files = has_files_of(read_rows(folder / "eval.jsonl"), evaluation)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    if is_same_target and has_files and summary.get("target") in ("reached", "missed"):
        return {}, ""  # eval.py has decided it
    result = {**dict.fromkeys(TARGET_KEYS), "target": "pending"} if target.is_given else {}
    more = f"; {len(missing)} of its {len(due)} points were not evaluated in training"
    more += "" if has_files else ", and its scores are of other prompts or statistics than these"
    return result, f"{more}: composer eval.py {folder} scores the snapshots that it has"
