"""Checks of a run's keys that are possible before anything is built: each beside its message, with the sections it reads."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from composer import Algorithm, Callback
from composer.loggers import LoggerDestination
from torch.optim import Optimizer

from callbacks.mlperf_log import MLPerfConfig
from checkpointing.files import FULL, list_checkpoints
from common import dist
from common.command_line import Problem
from common.errors import ConfigError
from common.files import write_problem
from common.plugins import is_plugin, parse_plugin, plugins_of
from common.value_types import ImageSize, Pixels, kind_of_path, read_duration
from config import flatten
from data import SYNTHETIC_EPOCH_BATCHES, DataConfig, Encodings
from evaluation.prompts import read_prompts
from evaluation.samples import SamplesConfig
from evaluation.scorer import EVERY_IMAGES, EvalConfig, TargetConfig, rounded_up, sampler_problems
from evaluation.validation import ValidationConfig
from families import load_family, mlperf
from families.encoders import ModelConfig, model_problems
from families.lora import LoraConfig
from families.mlperf import SD, Benchmark
from families.objectives import ObjectiveConfig
from families.spec import Family, parse_size
from mds.dataset import array_encoding, read_dataset
from mds.images import resize_name
from mds.mixture import count_epoch_samples
from mds.moments import FLIPPED_COLUMN
from ranks import collectives
from run_folder import mlperf_log
from training import health, initial_weights, low_memory_adamw, muon, sharding
from training.builders import apply_saved_settings, store_problems
from training.config import RunConfig, needs_encoders, resolve, takes_reference_rate
from training.loggers import LoggersConfig
from training.optimizer import total_batches
from training.speed import SpeedKeys
from weights.tensors import build_on_meta

Pairs = Iterable[tuple[str, str]]
"""(key, message)."""

# The memory estimate depends on these keys; it is left out if one of them is invalid.
OF_NETWORK = (
    "image_size",
    "model.family",
    "model.preset",
    "model.variant",
    "objective.name",
    "objective.prediction",
    "lora.rank",
)
OF_STEP = ("precision", "global_batch_size", "device_train_microbatch_size", "compile", "gradient_checkpointing")
LORA_KEYS = ("lora.rank", "lora.alpha", "lora.targets", "model.family", "model.preset", "model.variant")
MEMORY_KEYS = (*OF_NETWORK, *OF_STEP, "lora.targets", "ema.enabled", "optimizer.states")


# --- all of them ---


def quick_problems(config: RunConfig, data_problems: Pairs) -> list[Problem]:
    """Return all problems but those of memory and disk, in the order of the keys.

    Args:
        data_problems: (key, message) of the section `data`, compared with its datasets if they were read.
    """
    config = apply_saved_settings(config)
    family, batch, microbatch = _family(config.model), config.global_batch_size, config.device_train_microbatch_size
    is_begun = config.run_name and list_checkpoints(Path(config.run_folder, config.run_name, "checkpoints"), FULL)
    reads = not config.data.synthetic and (config.model.weights is not None or needs_encoders(config))
    problems = [
        *folder_problems(config.run_folder, config.run_name, config.data, config.validation, config.loggers),
        *_rank_problems(),
        *_batch_problems(batch, microbatch, config.data.num_canonical_nodes, has_graphs=config.cuda_graphs),
        *_named(data_problems, "data.streams"),
        *(problem for pairs in _section_problems(config) for problem in _named(pairs)),
        *_named(low_memory_adamw.problems(config.optimizer, config.precision), "precision"),
        *_named(muon.problems(config.optimizer, config.precision, has_adapter=config.lora.is_given), "optimizer.name"),
        *speed_problems(config, config.precision),
        *_named(store_problems(config), "save.every_images"),
        *_named(
            [*sharding.problems(flatten(config), config.model), *health.problems(config.health, config.sharding)],
            "sharding",
        ),
        *_named(_kind_problems(config, family), "model.family", "data.synthetic"),
        *model_problems(config.model, config.size, needs_encoders=reads),
        *_named(_objective_problems(family, config.objective, config.eval, config.samples)),
        *(_learning_rate_problems(batch) if takes_reference_rate(config.model, config.optimizer) else []),
        *_named(_evaluation_problems(config, family), "global_batch_size", "max_duration"),
        *_plugin_problems(config),
        *log_problems(config),
        *_lora_problems(config.lora, config.model, config.precision, is_synthetic=config.data.synthetic),
    ]
    if config.lora.is_given or not is_begun:
        problems += initial_weights.problems(config.model, config.objective.prediction)
    return problems


def _section_problems(config: RunConfig) -> Iterator[Pairs]:
    """Yield the problems that each section finds by itself."""
    yield config.optimizer.problems()
    yield config.schedule.problems()
    yield config.ema.problems()
    yield config.eval.problems(now=config.eval.when == "in_training")
    yield config.target.problems(config.eval)
    if config.target.val_loss is not None and not config.validation.is_given:
        yield [("target.val_loss", "given, but nothing is validated. Give validation.remote, or leave it out.")]
    yield config.samples.problems(config.eval)
    yield config.loggers.problems()
    yield config.mlperf.problems(mlperf.find_logged_benchmark(config.model.family, config.model.variant))
    batches = num_batches(config.max_duration, config.global_batch_size, config.data)
    yield config.profile.problems(batches, config.measure.warmup_batches)


def _kind_problems(config: RunConfig, family: Family | None) -> Iterator[tuple[str, str]]:
    """Yield the problems of keys that are for images or for videos alone."""
    if config.num_frames is not None and len(config.size) == 2:
        yield "num_frames", f"{config.num_frames}, but {config.model.family} makes images. Leave it out."
    if family is None:
        return
    if text := _stage_problem(family, config.data.stage):
        yield "data.stage", text
    if family.media == "videos":
        draws_samples = config.samples.is_given
        with contextlib.suppress(ValueError):  # of the size, named by model_problems
            yield from _video_problems(family, config.size, config, config.eval.when, draws_samples=draws_samples)


def _plugin_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what is wrong with named classes; that of model.family is looked at with the family."""
    lists: list[tuple[str, list[Any], type]] = [
        ("algorithms", config.algorithms, Algorithm),
        ("callbacks", config.callbacks, Callback),
        ("loggers.classes", config.loggers.classes, LoggerDestination),
    ]
    wanted = [(key, f"{key}[{n}]", value, base, []) for key, values, base in lists for n, value in enumerate(values)]
    if is_plugin(config.optimizer.name):
        wanted.append(("optimizer.name", "optimizer.name", config.optimizer.name, Optimizer, [[]]))
    for key, name, value, base, given in wanted:
        try:
            parse_plugin(name, value).check(base, *given, **({"lr": 1.0} if given else {}))
        except ValueError as error:
            yield Problem(str(error), (key,))
    if config.algorithms:
        with contextlib.suppress(ValueError):  # of a value that cannot be resolved, or of a class above
            yield from _algorithm_problems(config.algorithms, config.model, flatten(resolve(config)))


def _algorithm_problems(algorithms: list[Any], model: ModelConfig, keys: dict[str, Any]) -> Iterator[Problem]:
    """Yield why a resolved run, with these keys, cannot use its algorithms. Raises ValueError: see common/plugins.py."""
    plugins = plugins_of("algorithms", algorithms)
    asked = [plugin for plugin in plugins if hasattr(plugin.load(object), "problem")]
    family = load_family(model.family, model.preset, model.variant)
    for plugin in asked:
        try:
            plugin.check(object)
        except ValueError:
            continue  # its arguments do not fit, which another check says
        try:
            algorithm: Any = plugin.build(object)
        except ValueError as error:
            yield Problem(str(error), ("algorithms",))
        else:
            if text := algorithm.problem(family, keys):
                yield Problem(f"{plugin.key}: {text}", ("algorithms",))


def _lora_problems(
    config: LoraConfig, model: ModelConfig, precision: str | None, *, is_synthetic: bool
) -> list[Problem]:
    """Return why a run's adapter cannot be trained. `is_synthetic`: only speed is measured, so that any base does."""
    denoiser, targets = None, tuple[str, ...]()
    with contextlib.suppress(ValueError):  # named by model_problems
        family = load_family(model.family, model.preset, model.variant)
        targets = family.lora_targets
        denoiser = build_on_meta(family.build_denoiser) if config.is_given else None
    pairs = config.problems(denoiser, targets)
    if config.is_given and precision == "bf16_params":
        text = "an adapter is small, and its base is bf16 already. Use precision=bf16, or leave lora.rank out."
        pairs.append(("precision", f"bf16_params, but lora.rank={config.rank}: {text}"))
    if config.is_given and model.denoiser is None and not is_synthetic:
        text = (
            "random weights are no base. Give the weights that are fine-tuned, or data.synthetic=true to measure speed."
        )
        pairs.append(("model.denoiser", f"not given, but lora.rank={config.rank}: {text}"))
    return [Problem(f"{key}: {text}", (key, *LORA_KEYS)) for key, text in pairs]


def _evaluation_problems(config: RunConfig, family: Family | None) -> Iterator[tuple[str, str]]:
    """Yield what keeps a run from being evaluated: no weights or snapshots for it, or a run that is too short."""
    intervals = _intervals(config.eval, config.validation, config.samples, config.global_batch_size)
    if intervals and config.eval.weights == "ema" and not config.ema.enabled:
        text = "ema, but the run keeps no EMA weights. Set ema.enabled=true (--use_ema), or eval.weights=training."
        yield "eval.weights", text
    if "eval" in intervals:
        yield from _scoring_problems(config.eval, config.save.snapshot_every_images, intervals["eval"][0])
    is_drawn = not intervals.keys().isdisjoint({"eval", "samples"})
    if is_drawn and (text := _image_size_problem(family, config.eval.image_size)):
        yield "eval.image_size", text
    yield from _duration_problems(config.max_duration, config.global_batch_size, intervals)


def _named(pairs: Pairs, *also: str) -> list[Problem]:
    """Return (key, message) as problems, which are of these keys too."""
    return [Problem(f"{key}: {text}", (key, *also)) for key, text in pairs]


def _family(model: ModelConfig) -> Family | None:
    """Return the run's family; None: there is none, which model_problems reports."""
    with contextlib.suppress(ValueError):
        return load_family(model.family, model.preset, model.variant)
    return None


# --- what a dataset of moments was made for ---


def expected_metadata(model: ModelConfig, data: DataConfig, size: ImageSize) -> tuple[dict[str, Any], Encodings]:
    """Return the values that a dataset of moments has to be made for, and its columns' encodings for images of a size."""
    made_for: dict[str, Any] = {"model.family": model.family, "data.normalize": data.normalize}
    with contextlib.suppress(ValueError):  # named by model_problems
        made_for["image_size"] = list(size)
        family = load_family(model.family, model.preset, model.variant)
        made_for["resize"] = resize_name(family.columns(family.media, size)[family.media].dtype)

        def encodings(size: ImageSize) -> dict[str, str]:
            columns = family.columns("moments", size, stored_text=data.text == "stored")
            stored = {name: array_encoding(column.stored_dtype, column.shape) for name, column in columns.items()}
            return stored | ({FLIPPED_COLUMN: stored["moments"]} if data.flip else {})

        return made_for, encodings
    return made_for, lambda size: {}


# --- folders, ranks and the batch ---

MAX_NAME_BYTES = 200  # file systems allow 255; loggers append to the name


def folder_problems(
    run_folder: str, run_name: str | None, data: DataConfig, validation: ValidationConfig, loggers: LoggersConfig
) -> list[Problem]:
    """Return the problems of the folders that a run writes into."""
    text = run_folder_problem(run_folder, run_name)
    problems = [Problem(text, ("run_name", "run_folder"))] if text else []
    folders = {f"{key}.local": source.local for key, source in data.named_sources() if source.remote}
    if validation.remote:
        folders["validation.local"] = validation.local
    if loggers.tensorboard is not None and loggers.tensorboard.log_dir is not None:
        folders["loggers.tensorboard.log_dir"] = str(Path(loggers.tensorboard.log_dir, run_name or ""))
    texts = {key: write_problem(folder) for key, folder in folders.items() if folder}
    return problems + _named((key, text) for key, text in texts.items() if text)


def run_folder_problem(run_folder: str, run_name: str | None) -> str | None:
    """Return why a run of this name cannot write its record there, or None."""
    folder = Path(run_folder, run_name or "")
    if run_name is not None:
        fits = run_name == Path(run_name).name and 0 < len(run_name.encode()) <= MAX_NAME_BYTES
        if not fits or run_name.startswith(".") or not run_name.isprintable():
            text = f"run_name: {run_name[:80]!r} is not a folder name"
            return f"{text}. Use letters, digits, - and _, {MAX_NAME_BYTES} at most."
        if folder.exists() and not _is_begun(folder):
            text = f"{folder} exists and is not a run (it has no config.yaml)"
            return f"run_name: {text}. Take another run_name, or remove it."
    problem = write_problem(run_folder)
    return f"run_folder: {problem}" if problem else None


def _is_begun(folder: Path) -> bool:
    """True for a run's folder, even if the run was killed before writing anything, or its config.yaml is lost."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    is_killed = all(re.fullmatch(r"\.lock|\.seen-\w+|\.config\.yaml\.(\d+\.)?tmp", name) for name in names)
    return "config.yaml" in names or is_killed or bool(list_checkpoints(folder / "checkpoints", FULL))


def _rank_problems() -> list[Problem]:
    """Return whether this machine has fewer GPUs than ranks."""
    ranks, gpus = dist.get_local_world_size(), torch.cuda.device_count()
    if not torch.cuda.is_available() or ranks <= gpus:
        return []
    text = f"composer -n: {ranks} ranks on this machine, which has {gpus} GPUs. Start at most that many."
    return [Problem(text, MEMORY_KEYS)]


def num_batches(
    max_duration: str, global_batch_size: int, data: DataConfig, *, reads_datasets: bool = False
) -> int | None:
    """Return the batches of a run; None: its duration is in epochs, and its datasets cannot be read."""
    epoch = SYNTHETIC_EPOCH_BATCHES
    if read_duration(max_duration, ("ba", "sp")) is None and not data.synthetic:
        epoch = 0
        with contextlib.suppress(ValueError):  # named by the section `data`
            samples = [dataset.num_samples for dataset in data.read()] if reads_datasets else []
            epoch = count_epoch_samples(data.sources, samples) // global_batch_size if samples else 0
    return total_batches(max_duration, global_batch_size=global_batch_size, epoch_batches=epoch) or None


def _batch_problems(
    global_batch_size: int,
    device_train_microbatch_size: int | str | None,
    num_canonical_nodes: int | None,
    *,
    has_graphs: bool,
) -> list[Problem]:
    """Check the arithmetic of the batch: ranks x microbatch divides it, and the nodes share it evenly."""
    keys = ("global_batch_size", "device_train_microbatch_size")
    microbatch, ranks = device_train_microbatch_size, dist.get_world_size()
    least = microbatch if isinstance(microbatch, int) else 1
    if text := batch_problem(global_batch_size, ranks, least or 1):
        return [Problem(f"global_batch_size: {text}", keys)]
    if has_graphs and microbatch not in (None, global_batch_size // ranks):
        problem = f"true, but device_train_microbatch_size={microbatch}"
        why = "a graph's gradients cannot be added to those of another pass (pytorch issue 169545)"
        text = f"cuda_graphs: {problem}: {why}. Leave out one of the two: the microbatch is then the device batch."
        return [Problem(text, ("cuda_graphs", *keys))]
    nodes = collectives.num_nodes()
    canonical = num_canonical_nodes or nodes
    if canonical >= 1 and canonical % nodes and nodes % canonical:
        possible = f"Possible: {nodes}, {2 * nodes}, {4 * nodes}"
        text = f"{canonical} and {nodes} nodes: one has to divide the other. {possible}."
        return [Problem(f"data.num_canonical_nodes: {text}", ("data.num_canonical_nodes",))]
    return []


def batch_problem(global_batch_size: int, num_ranks: int, microbatch: int) -> str | None:
    """Return the message that a batch size does not divide into ranks and microbatches, with the nearest ones; or None."""
    step = num_ranks * microbatch
    if global_batch_size >= 1 and global_batch_size % step == 0:
        return None
    below = max(0, global_batch_size // step * step)
    nearest = ", ".join(str(size) for size in (below, below + step) if size > 0)
    product = f"{num_ranks} ranks x {microbatch} microbatch = {step}"
    return f"{global_batch_size} is not a multiple of {product}. Nearest: {nearest}."


# --- speed, the kind of data, the objective ---


def speed_problems(keys: SpeedKeys, precision: str | None) -> list[Problem]:
    """Return the problems of the keys of speed on this machine, in training and evaluation."""
    return _named(keys.problems_of_speed(precision), "precision")


def _stage_problem(family: Family, stage: str) -> str | None:
    """Return that a family is not trained on datasets of this kind, or None."""
    if stage in ("moments", family.media):
        return None
    problem = f"{stage}, but {family.name} is trained on {family.media}"
    return f"{problem}. Set data.stage={family.media}, or moments."


def _video_problems(
    family: Family, size: ImageSize, keys: SpeedKeys, eval_when: str, *, draws_samples: bool
) -> Iterator[tuple[str, str]]:
    if keys.channels_last:
        yield "channels_last", "true, but a video's tensors have five dimensions. Leave it out."
    if eval_when != "off":
        text = "but FID and CLIP score are of images. Set eval.when=off, and give validation.remote."
        yield "eval.when", f"{eval_when}, {text}"
    if draws_samples and family.image_columns(size):
        text = "given, but image to video starts from a first frame, and prompts are captions alone. Leave it out."
        yield "samples.every_images", text
    has_mask = "mask" in family.columns("moments", size, stored_text=True)
    if has_mask and keys.attention in ("flash", "cudnn") and torch.cuda.is_available():
        text = f"{keys.attention}: its kernels take no mask, with which {family.name} leaves out a caption's padding."
        yield "attention", f"{text} Use attention=efficient, or auto."


def _objective_problems(
    family: Family | None, objective: ObjectiveConfig, evaluation: EvalConfig, samples: SamplesConfig
) -> Pairs:
    prediction = objective.prediction
    if family is None:
        return []
    if prediction is not None and prediction not in family.predictions:
        possible = f"{family.name} cannot be trained on '{prediction}'. Possible: {', '.join(family.predictions)}."
        return [("objective.prediction", possible)]
    problems = objective.problems(family.objective)
    if objective.name is not None and not problems:
        try:
            family.build_objective(objective)
        except ValueError as error:
            return [("objective.name", str(error).removeprefix("objective.name: "))]
    if evaluation.when != "off" or samples.is_given:
        problems += sampler_problems(evaluation, objective.resolved(family.objective))
    return problems


def _learning_rate_problems(global_batch_size: int) -> list[Problem]:
    """Without a learning rate, the benchmark's is used; it exists only for some batch sizes."""
    try:
        SD.lr_per_image(global_batch_size)
    except ValueError as error:
        keys = ("optimizer.lr", "global_batch_size", "model.variant")
        return _named([("optimizer.lr_per_image", str(error))], *keys)
    return []


# --- evaluation ---

Intervals = dict[str, tuple[int, str]]
"""Section -> images between two of its evaluations, and what would be done."""


def _intervals(
    evaluation: EvalConfig, validation: ValidationConfig, samples: SamplesConfig, global_batch_size: int
) -> Intervals:
    sections = {
        "eval": (evaluation.when != "off", evaluation.every_images, "evaluated"),
        "validation": (validation.is_given, validation.every_images, "validated after the start"),
        "samples": (samples.is_given, samples.every_images, "drawn after the start"),
    }
    batch = max(1, global_batch_size)
    return {
        name: (rounded_up(every or EVERY_IMAGES, batch), done)
        for name, (is_on, every, done) in sections.items()
        if is_on
    }


def _image_size_problem(family: Family | None, image_size: Pixels | None) -> str | None:
    return None if family is None or image_size is None else family.size_problem(parse_size(image_size))


def _duration_problems(max_duration: str, global_batch_size: int, intervals: Intervals) -> Iterator[tuple[str, str]]:
    """Yield the intervals that are longer than the run."""
    if (duration := read_duration(max_duration, ("ba", "sp"))) is None:
        return  # an epoch's length depends on the dataset
    total = duration[0] * (max(1, global_batch_size) if duration[1] == "ba" else 1)
    for name, (images, done) in intervals.items():
        if total < images:
            text = f"{images:,}, but max_duration={max_duration} is {total:,}: nothing would be {done}. Lower it."
            yield f"{name}.every_images", text


def _scoring_problems(
    evaluation: EvalConfig, snapshot_every_images: int | None, every: int
) -> Iterator[tuple[str, str]]:
    """Check what a run is scored with, every so many images."""
    if isinstance(evaluation.guidance, list | tuple):
        possible = "a run is scored at one. Give one number; composer eval.py RUN takes a list."
        yield "eval.guidance", f"{list(evaluation.guidance)}: {possible}"
    if evaluation.when == "after" and snapshot_every_images not in (None, every):
        text = f"{snapshot_every_images}, but eval.when=after scores snapshots every {every} images. Set it to null."
        yield "save.snapshot_every_images", text


# --- a run that writes an MLPerf log ---

FIX_VALUE = "Use the reference's value, or mlperf.division=open."
OWN_CLASS = "Leave it out, or set mlperf.division=open."
FIX_DATA = "Give the whole dataset, or mlperf.division=open for a subset."


def log_problems(config: RunConfig) -> list[Problem]:
    """A log needs a target and what it is measured by. In the closed division it also needs the benchmark's constants."""
    if not config.mlperf.enabled:
        return []
    benchmark = mlperf.find_logged_benchmark(config.model.family, config.model.variant)
    if "val_loss" in benchmark.target:
        missing = _missing_loss(config.validation, config.target)
    else:
        missing = _missing_scores(config.eval, config.target)
    problems = [Problem(f"mlperf.enabled: true, but {text}", ("mlperf.enabled", key)) for key, text in missing]
    problems += _log_begin_problems(Path(config.run_folder, config.run_name or ""), config.run_name)
    if config.mlperf.division == "closed":
        own = {"objective.name": config.objective.name, "algorithms": config.algorithms, "callbacks": config.callbacks}
        problems += [
            _not_closed(key, f"{key} has a class of your own", OWN_CLASS) for key, value in own.items() if value
        ]
        with contextlib.suppress(ValueError):  # values that cannot be resolved, or read, are reported elsewhere
            problems += _constants_problems(benchmark, flatten(resolve(config)), config.eval.prompts)
    return problems


def _log_begin_problems(folder: Path, run_name: str | None) -> list[Problem]:
    """A log begins with its run, and is whole."""
    keys = ("mlperf.enabled", "run_name")
    try:
        if run_name and not mlperf_log.is_begun(folder) and list_checkpoints(folder / "checkpoints", FULL):
            text = f"true, but {folder} was trained before its log was begun, or it was cut"
            return [Problem(f"mlperf.enabled: {text}. Leave it out, or take another run_name.", keys)]
    except ConfigError as error:
        return [Problem(text, keys) for text in error.problems]
    return []


def _constants_problems(benchmark: Benchmark, values: dict[str, Any], prompts: str | None) -> Iterator[Problem]:
    """Yield the values of a resolved run that the closed division forbids. Raises ValueError: prompts cannot be read."""
    for text in benchmark.closed_deviations(values):
        yield _not_closed(text.partition(":")[0], text, FIX_VALUE)
    num = SD.eval_samples
    if benchmark is SD and prompts and kind_of_path(prompts) == "file":
        num = len(read_prompts(prompts).prompts)
    if num != SD.eval_samples:
        text = f"eval.prompts: {num:,} prompts; the reference: {SD.eval_samples:,}"
        yield _not_closed("eval.prompts", text, FIX_VALUE)


def _not_closed(key: str, text: str, fix: str) -> Problem:
    return Problem(f"mlperf.division: closed, but {text}. {fix}", ("mlperf.division", key))


def _missing_scores(evaluation: EvalConfig, target: TargetConfig) -> list[tuple[str, str]]:
    """(key, message) where FID and CLIP score could not be in the log."""
    keys = ("prompts", "statistics", "inception", "clip")
    missing = [f"eval.{key}" for key in keys if getattr(evaluation, key) is None]
    if evaluation.when == "off":
        return [("eval.when", "nothing is evaluated. Set eval.when=after, or in_training.")]
    if missing:
        return [("eval.prompts", f"{', '.join(missing)}: not given. FID and CLIP score belong in the log.")]
    if kind_of_path(evaluation.prompts or "") != "file":
        return [("eval.prompts", f"no file {evaluation.prompts}, whose prompts the log counts. Check the path.")]
    if not target.is_of_scores:
        return [("target.fid", "no target, so no run could succeed. The benchmark's: 90 and 0.15.")]
    return []


def _missing_loss(validation: ValidationConfig, target: TargetConfig) -> list[tuple[str, str]]:
    """(key, message) where the validation loss could not be in the log."""
    if not validation.is_given:
        return [("validation.remote", "nothing is validated. Give the held-out dataset: validation.remote=FOLDER.")]
    if target.val_loss is None:
        return [("target.val_loss", "no target.val_loss, so no run could succeed. The benchmark's: 0.586.")]
    return []


def closed_data_problems(
    log: MLPerfConfig, benchmark: Benchmark, data: DataConfig, held_out: ValidationConfig
) -> list[Problem]:
    """The closed division requires all of the benchmark's samples; read how many the datasets have."""
    if not (log.enabled and log.division == "closed") or data.synthetic:
        return []
    counts = []
    with contextlib.suppress(ValueError):  # named by the section
        if datasets := data.read():
            num, where = sum(dataset.num_samples for dataset in datasets), ", ".join(d.location for d in datasets)
            counts.append(("data.remote", "train_samples", num, where, benchmark.train_samples))
    with contextlib.suppress(ValueError):
        if held_out.remote and "val_loss" in benchmark.target:
            dataset = read_dataset(held_out.remote)
            num = min(dataset.num_samples, held_out.num_samples)
            counts.append(("validation.num_samples", "eval_samples", num, dataset.location, benchmark.eval_samples))
    return [
        _not_closed(key, f"{name}: {num:,} at {where}; the benchmark: {wanted:,}", FIX_DATA)
        for key, name, num, where, wanted in counts
        if num != wanted
    ]
