"""Checks of a run's configuration that are possible before anything is built."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist

from cli import ranks as all_ranks
from cli.command_line import Problem
from cli.errors import ConfigError
from cli.limits import ImageSize, kind_of_path, read_duration
from config import flat
from data import SYNTHETIC_EPOCH_BATCHES, DataConfig, Encodings
from evaluation.prompts import read_prompts
from evaluation.scoring import EVERY_IMAGES, rounded_up, sampler_problems
from model import LatentDiffusion
from preflight import limits
from record import mlperf_events
from record.checkpoint_files import FULL, listed
from stages.dataset import array_encoding, read_stage
from stages.images import resize_name
from stages.mixture import epoch_samples
from stages.moments import FLIPPED
from stages.order import memory_gib
from training import adamw, adapter, health, remote, sharding, warm_start
from training import microbatch as microbatch_search
from training.cost import Cost, has_average_on_device, measure_cost
from training.mlflow_logger import sqlite_file
from training.optimizer import total_batches
from training.published import as_begun
from training.run_config import RunConfig, needs_encoders, resolve, wants_own_rate
from zoo import load_family, mlperf
from zoo.mlperf_rules import Benchmark
from zoo.mlperf_sd import SD
from zoo.model_config import model_problems
from zoo.spec import Family, as_size

Pairs = Iterable[tuple[str, str]]
"""(key, message)."""

# The memory estimate depends on these keys; it is left out if one of them is invalid.
OF_NETWORK = ("image_size", "model.family", "model.preset", "model.variant", "objective.prediction", "lora.rank")
OF_STEP = ("precision", "global_batch_size", "device_train_microbatch_size", "compile", "gradient_checkpointing")
MEMORY_KEYS = (*OF_NETWORK, *OF_STEP, "lora.targets", "ema.enabled", "optimizer.states")


def wanted_of_stage(config: RunConfig) -> tuple[dict[str, Any], Encodings]:
    """Return the values that a stage of moments has to be made for, and its columns' encodings for images of a size."""
    made_for: dict[str, Any] = {"model.family": config.model.family, "data.normalize": config.data.normalize}
    with contextlib.suppress(ValueError):  # named by model_problems
        made_for["image_size"] = list(config.size)
        family = load_family(config.model.family, config.model.preset, config.model.variant)
        made_for["resize"] = resize_name(family.columns(family.pictures, config.size)[family.pictures].dtype)

        def encodings(size: ImageSize) -> dict[str, str]:
            columns = family.columns("moments", size, stored_text=config.data.text == "stored")
            found = {name: array_encoding(column.stored, column.shape) for name, column in columns.items()}
            return found | ({FLIPPED: found["moments"]} if config.data.flip else {})

        return made_for, encodings
    return made_for, lambda size: {}


def quick_problems(config: RunConfig, of_data: Pairs) -> list[Problem]:
    """Return all problems but those of memory and disk, in the order of the keys.

    Args:
        of_data: (key, message) of the section `data`, with the stage's if it was read.
    """
    config = as_begun(config)
    is_begun = config.run_name and listed(Path(config.run_folder, config.run_name, "checkpoints"), FULL)
    reads = not config.data.synthetic and (config.model.weights is not None or needs_encoders(config))
    found = [
        *_run_problems(config),
        *_named(of_data, "data.streams"),
        *(problem for pairs in _of_sections(config) for problem in _named(pairs)),
        *_named(adamw.problems(config.optimizer, config.precision), "precision"),
        *speed_problems(config),
        *_named(remote.problems(config), "save.every_images"),
        *_named([*sharding.problems(config), *health.problems(config)], "sharding"),
        *_named(_image_problems(config), "model.family", "data.synthetic"),
        *model_problems(config.model, config.size, encoders_wanted=reads),
        *_named(_objective_problems(config)),
        *_learning_rate_problems(config),
        *_named(_evaluation_problems(config), "global_batch_size", "max_duration"),
        *log_problems(config),
        *adapter.problems(config),
    ]
    if config.lora.is_given or not is_begun:
        found += warm_start.problems(config.model, config.objective.prediction)
    return found


def _named(pairs: Pairs, *also: str) -> list[Problem]:
    """Return (key, message) as problems, which are of these keys too."""
    return [Problem(f"{key}: {text}", (key, *also)) for key, text in pairs]


def _of_sections(config: RunConfig) -> Iterator[Pairs]:
    """Yield what the sections say of themselves."""
    yield config.optimizer.problems()
    yield config.schedule.problems()
    yield config.ema.problems()
    yield config.eval.problems(now=config.eval.when == "in_training")
    yield config.target.problems(config.eval)
    if config.target.val_loss is not None and not config.validation.is_given:
        yield [("target.val_loss", "given, but nothing is validated. Give validation.remote, or leave it out.")]
    yield config.samples.problems(config.eval)
    yield config.loggers.problems()
    yield config.mlperf.problems(mlperf.logged_as(config.model.family, config.model.variant))
    yield config.profile.problems(num_batches(config), config.measure.warmup_batches)


def _run_problems(config: RunConfig) -> list[Problem]:
    found, logs = [], config.loggers
    if text := limits.run_folder_problem(config.run_folder, config.run_name):
        found.append(Problem(text, ("run_name", "run_folder")))
    sources = [*config.data.named_sources(), ("validation", config.validation)]
    folders = {f"{key}.local": source.local for key, source in sources if source.remote}
    if logs.tensorboard is not None and logs.tensorboard.log_dir is not None:
        folders["loggers.tensorboard.log_dir"] = str(Path(logs.tensorboard.log_dir, config.run_name or ""))
    if logs.mlflow is not None:
        address = logs.mlflow.address(Path(config.run_folder, config.run_name or ""))
        folders["loggers.mlflow"] = str(file.parent) if (file := sqlite_file(address)) is not None else None
    texts = {key: limits.unwritable(folder) for key, folder in folders.items() if folder}
    found += _named((key, text) for key, text in texts.items() if text)
    if torch.cuda.is_available() and dist.get_local_world_size() > torch.cuda.device_count():
        given = f"{dist.get_local_world_size()} ranks on this machine, which has {torch.cuda.device_count()} GPUs"
        found.append(Problem(f"composer -n: {given}. Start at most that many.", MEMORY_KEYS))
    return found + _batch_problems(config)


def _image_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Check what goes with images or with videos alone, and what with real data."""
    if config.num_frames is not None and len(config.size) == 2:
        yield "num_frames", f"{config.num_frames}, but {config.model.family} makes images. Leave it out."
    if (family := _family(config)) is None:
        return
    if config.data.stage not in ("moments", family.pictures):
        given = f"{config.data.stage}, but {family.name} is trained on {family.pictures}"
        yield "data.stage", f"{given}. Say data.stage={family.pictures}, or moments."
    if family.pictures == "videos":
        with contextlib.suppress(ValueError):  # of the size, named by model_problems
            yield from _video_problems(config, family)


def _video_problems(config: RunConfig, family: Family) -> Iterator[tuple[str, str]]:
    if config.channels_last:
        yield "channels_last", "true, but a video's tensors have five dimensions. Leave it out."
    if config.eval.when != "off":
        text = "but FID and CLIP score are of images. Say eval.when=off, and give validation.remote."
        yield "eval.when", f"{config.eval.when}, {text}"
    if config.samples.is_given and family.beside(config.size):
        text = "given, but image to video draws what follows a picture, and prompts are captions alone. Leave it out."
        yield "samples.every_images", text
    has_mask = "mask" in family.columns("moments", config.size, stored_text=True)
    if has_mask and config.attention in ("flash", "cudnn") and torch.cuda.is_available():
        text = f"{config.attention}: its kernels take no mask, with which {family.name} leaves out a caption's padding."
        yield "attention", f"{text} Use attention=efficient, or auto."


def _family(config: RunConfig) -> Family | None:
    """Return the run's family; None: there is none, which model_problems reports."""
    with contextlib.suppress(ValueError):
        return load_family(config.model.family, config.model.preset, config.model.variant)
    return None


@dataclass(frozen=True)
class OrderNeed:
    """What the order of an epoch takes on this machine (stages/order.py)."""

    samples: int
    shared_gib: float
    """Of /dev/shm, while an epoch begins."""
    gib: float
    """Of its memory, at most."""


def order_need(config: DataConfig) -> OrderNeed | None:
    """Read the stages, and return what the order of an epoch takes on this machine; None: there is none."""
    sources = config.sources
    with contextlib.suppress(ValueError):  # named by the section
        if stages := config.read():
            samples = epoch_samples(sources, [stage.num_samples for stage in stages])
            return OrderNeed(samples, *memory_gib(samples))
    return None


def batch_gib(config: RunConfig) -> float:
    """Return the size of one rank's batch from the loader, GiB. Raises ValueError: there is no such network, or stage."""
    family = load_family(config.model.family, config.model.preset, config.model.variant)
    columns = config.data.columns(family, config.size).values()
    sample_bytes = sum(math.prod(column.shape) * column.dtype.itemsize for column in columns)
    return config.global_batch_size // dist.get_world_size() * sample_bytes / 2**30


def num_batches(config: RunConfig, *, reads_stages: bool = False) -> int | None:
    """Return the batches of a run; None: its duration is in epochs, and its stages cannot be read."""
    batch, epoch = config.global_batch_size, SYNTHETIC_EPOCH_BATCHES
    if read_duration(config.max_duration, ("ba", "sp")) is None and not config.data.synthetic:
        epoch = 0
        with contextlib.suppress(ValueError):  # named by the section `data`
            samples = [stage.num_samples for stage in config.data.read()] if reads_stages else []
            epoch = epoch_samples(config.data.sources, samples) // batch if samples else 0
    return total_batches(config.max_duration, global_batch_size=batch, epoch_batches=epoch) or None


def speed_problems(config: RunConfig) -> list[Problem]:
    """Return the problems of the keys of speed on this machine, in training and evaluation."""
    return _named(config.problems_of_speed(config.precision), "precision")


def _batch_problems(config: RunConfig) -> list[Problem]:
    """Check the arithmetic of the batch: ranks x microbatch divides it, and the stage fills at least one."""
    keys = ("global_batch_size", "device_train_microbatch_size")
    microbatch, ranks = config.device_train_microbatch_size, dist.get_world_size()
    microbatch = 1 if microbatch == microbatch_search.AUTO else microbatch
    if text := limits.batch_problem(config.global_batch_size, ranks, microbatch or 1):
        return [Problem(f"global_batch_size: {text}", keys)]
    if config.cuda_graphs and config.device_train_microbatch_size not in (None, config.global_batch_size // ranks):
        given = f"true, but device_train_microbatch_size={config.device_train_microbatch_size}"
        why = "a graph's gradients cannot be added to those of another pass (pytorch issue 169545)"
        text = f"cuda_graphs: {given}: {why}. Leave out one of the two: the microbatch is then the device batch."
        return [Problem(text, ("cuda_graphs", *keys))]
    nodes = all_ranks.num_nodes()
    canonical = config.data.num_canonical_nodes or nodes
    if canonical >= 1 and canonical % nodes and nodes % canonical:
        text = (
            f"{canonical} and {nodes} nodes: one has to divide the other. Possible: {nodes}, {2 * nodes}, {4 * nodes}."
        )
        return [Problem(f"data.num_canonical_nodes: {text}", ("data.num_canonical_nodes",))]
    return []


def _objective_problems(config: RunConfig) -> Pairs:
    prediction, family = config.objective.prediction, _family(config)
    if family is None:
        return []
    if prediction is not None and prediction not in family.predictions:
        possible = f"{family.name} cannot be trained on '{prediction}'. Possible: {', '.join(family.predictions)}."
        return [("objective.prediction", possible)]
    found = config.objective.problems(family.objective)
    if config.eval.when != "off" or config.samples.is_given:
        found += sampler_problems(config.eval, config.objective.resolved(family.objective))
    return found


def _learning_rate_problems(config: RunConfig) -> list[Problem]:
    """Without a learning rate, the benchmark's is used; it exists only for some batch sizes."""
    if wants_own_rate(config):
        try:
            SD.lr_per_image(config.global_batch_size)
        except ValueError as error:
            return _named(
                [("optimizer.lr_per_image", str(error))], "optimizer.lr", "global_batch_size", "model.variant"
            )
    return []


def _evaluation_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Check that the run has the evaluation's snapshots and weights, and is long enough for each interval."""
    given, batch = config.eval, max(1, config.global_batch_size)
    possible = {
        "eval": (given.when != "off", given.every_images, "evaluated"),
        "validation": (config.validation.is_given, config.validation.every_images, "validated after the start"),
        "samples": (config.samples.is_given, config.samples.every_images, "drawn after the start"),
    }
    every = {
        name: (rounded_up(num or EVERY_IMAGES, batch), what) for name, (is_on, num, what) in possible.items() if is_on
    }
    if every and given.weights == "ema" and not config.ema.enabled:
        text = "ema, but the run keeps no EMA weights. Say ema.enabled=true (--use_ema), or eval.weights=training."
        yield "eval.weights", text
    if "eval" in every:
        yield from _scoring_problems(config, every["eval"][0])
    family = _family(config) if given.image_size is not None and every.keys() & {"eval", "samples"} else None
    if family is not None and (text := family.size_problem(as_size(given.image_size))):
        yield "eval.image_size", text
    if (duration := read_duration(config.max_duration, ("ba", "sp"))) is None:
        return  # an epoch's length depends on the stage
    total = duration[0] * (batch if duration[1] == "ba" else 1)
    for name, (images, what) in every.items():
        if total < images:
            text = (
                f"{images:,}, but max_duration={config.max_duration} is {total:,}: nothing would be {what}. Lower it."
            )
            yield f"{name}.every_images", text


def _scoring_problems(config: RunConfig, every: int) -> Iterator[tuple[str, str]]:
    """Check what a run is scored with, every so many images."""
    if isinstance(config.eval.guidance, list | tuple):
        text = (
            f"{list(config.eval.guidance)}: a run is scored at one. Give one number; composer eval.py RUN takes a list."
        )
        yield "eval.guidance", text
    snapshots = config.save.snapshot_every_images
    if config.eval.when == "after" and snapshots is not None and snapshots != every:
        text = f"{snapshots}, but eval.when=after scores snapshots every {every} images. Leave it out."
        yield "save.snapshot_every_images", text


# --- a run that writes an MLPerf log ---

FIX_VALUE = "Use the reference's value, or mlperf.division=open."
FIX_DATA = "Give the stage of all of them; a subset, if it is meant, is mlperf.division=open."


def log_problems(config: RunConfig) -> list[Problem]:
    """A log needs a target and what it is measured by. In the closed division it also needs the benchmark's constants."""
    if not config.mlperf.enabled:
        return []
    folder, benchmark = Path(config.run_folder, config.run_name or ""), _benchmark(config)
    missing = _missing_loss(config) if "val_loss" in benchmark.target else _missing_scores(config)
    problems = [Problem(f"mlperf.enabled: true, but {text}", ("mlperf.enabled", key)) for key, text in missing]
    try:
        if config.run_name and not mlperf_events.is_begun(folder) and listed(folder / "checkpoints", FULL):
            text = f"true, but {folder} was trained before its log was begun, or it was cut"
            text = f"mlperf.enabled: {text}. Leave it out, or take another run_name."
            problems.append(Problem(text, ("mlperf.enabled", "run_name")))
    except ConfigError as error:
        problems += [Problem(text, ("mlperf.enabled", "run_name")) for text in error.problems]
    if config.mlperf.division == "closed":
        with contextlib.suppress(ValueError):  # values that cannot be resolved, or read, are reported elsewhere
            texts = benchmark.not_closed(flat(resolve(config)))
            problems += [_not_closed(text.partition(":")[0], text, FIX_VALUE) for text in texts]
            given = config.eval.prompts if benchmark is SD else None
            if kind_of_path(given or "") == "file" and (num := len(read_prompts(given).prompts)) != SD.eval_samples:
                text = f"eval.prompts: {num:,} prompts; the reference: {SD.eval_samples:,}"
                problems.append(_not_closed("eval.prompts", text, FIX_VALUE))
    return problems


def _benchmark(config: RunConfig) -> Benchmark:
    return mlperf.logged_as(config.model.family, config.model.variant)


def _not_closed(key: str, text: str, fix: str) -> Problem:
    return Problem(f"mlperf.division: closed, but {text}. {fix}", ("mlperf.division", key))


def _missing_scores(config: RunConfig) -> list[tuple[str, str]]:
    """(key, message) where FID and CLIP score could not be in the log."""
    given = config.eval
    missing = [f"eval.{key}" for key in ("prompts", "statistics", "inception", "clip") if getattr(given, key) is None]
    if given.when == "off":
        return [("eval.when", "nothing is evaluated. Say eval.when=after, or in_training.")]
    if missing:
        return [("eval.prompts", f"{', '.join(missing)}: not given. FID and CLIP score belong in the log.")]
    if kind_of_path(given.prompts or "") != "file":
        return [("eval.prompts", f"no file {given.prompts}, whose prompts the log counts. Check the path.")]
    if not config.target.is_of_scores:
        return [("target.fid", "no target, so no run could succeed. The benchmark's: 90 and 0.15.")]
    return []


def _missing_loss(config: RunConfig) -> list[tuple[str, str]]:
    """(key, message) where the validation loss could not be in the log."""
    if not config.validation.is_given:
        return [("validation.remote", "nothing is validated. Give the held-out stage: validation.remote=FOLDER.")]
    if config.target.val_loss is None:
        return [("target.val_loss", "no target.val_loss, so no run could succeed. The benchmark's: 0.586.")]
    return []


def closed_data_problems(config: RunConfig) -> list[Problem]:
    """The closed division requires all of the benchmark's samples; read the stages' numbers."""
    if not (config.mlperf.enabled and config.mlperf.division == "closed") or config.data.synthetic:
        return []
    benchmark, held_out, has = _benchmark(config), config.validation, []
    with contextlib.suppress(ValueError):  # named by the section
        if stages := config.data.read():
            num, where = sum(stage.num_samples for stage in stages), ", ".join(stage.location for stage in stages)
            has.append(("data.remote", "train_samples", num, where, benchmark.train_samples))
    with contextlib.suppress(ValueError):
        if held_out.remote and "val_loss" in benchmark.target:
            stage = read_stage(held_out.remote)
            num = min(stage.num_samples, held_out.num_samples)
            has.append(("validation.num_samples", "eval_samples", num, stage.location, benchmark.eval_samples))
    return [
        _not_closed(key, f"{name}: {num:,} at {where}; the benchmark: {wanted:,}", FIX_DATA)
        for key, name, num, where, wanted in has
        if num != wanted
    ]


# --- the plan: what a step of the run takes ---


def savings(config: RunConfig) -> list[str]:
    """Return the keys, besides the microbatch, that lower a resolved run's memory without changing its network."""
    is_gpu = torch.cuda.is_available()
    ways = {
        "gradient_checkpointing=1": config.gradient_checkpointing < 1.0,
        "precision=bf16": config.precision in ("fp32", "tf32"),
        "sharding=full": dist.get_world_size() > 1 and config.sharding == "off" and not sharding.refusals(config),
        "ema.device=cpu": is_gpu and config.sharding == "off" and has_average_on_device(config),
        "model.frozen_device=cpu": is_gpu and config.model.frozen_device == "device" and needs_encoders(config),
    }
    return [way for way, is_open in ways.items() if is_open]


def smaller_states(config: RunConfig) -> list[str]:
    """Return the keys that lower the memory of weights and moments; only before a run begins, since they change it."""
    smaller = {"fp32": "bf16", "bf16": None if sharding.is_sharded(config) else "8bit"}.get(config.optimizer.states)
    ways = [f"optimizer.states={smaller}"] if smaller else []
    can_be_small = config.precision in ("fp32", "tf32", "bf16") and not config.lora.is_given
    return ways + (["precision=bf16_params"] if can_be_small else [])


def ranks_on_device() -> int:
    """Return how many of this machine's ranks share one device's memory."""
    return 1 if torch.cuda.is_available() else dist.get_local_world_size()


def planned_microbatch(config: RunConfig, cost: Cost) -> int:
    """Return the microbatch of a resolved run; with `auto`, the largest that fits by the estimate."""
    if config.device_train_microbatch_size != microbatch_search.AUTO:
        assert isinstance(config.device_train_microbatch_size, int)
        return config.device_train_microbatch_size
    device_batch = config.global_batch_size // dist.get_world_size()
    return microbatch_search.estimated(cost, device_batch, ranks_on_device(), ema=has_average_on_device(config))


traced_cost = functools.cache(measure_cost)
"""It takes seconds, and a start asks for it several times."""


def cost_of(config: RunConfig) -> Cost:
    """Return the cost of a training step of the run's model."""
    assert config.precision is not None
    cost = traced_cost(
        config.model,
        config.objective,
        stage=config.data.stage,
        stored_text=config.data.text == "stored",
        has_encoders=needs_encoders(config),
        size=config.size,
        precision=config.precision,
        is_compiled=config.compile != "off",
        gradient_checkpointing=config.gradient_checkpointing,
        lora=(config.lora.rank, tuple(config.lora.targets or ())) if config.lora.rank else None,
    )
    how = config.sharding if sharding.is_sharded(config) else "off"
    return replace(cost, states=config.optimizer.states, sharding=how)


def microbatch_of(config: RunConfig, model: LatentDiffusion, cost: Cost) -> int:
    """Return the images per pass; with `auto`, find them. Raises ConfigError: not even one fits."""
    if config.device_train_microbatch_size != microbatch_search.AUTO:
        return planned_microbatch(config, cost)
    columns = config.data.columns(model.family, config.size)
    device_batch = config.global_batch_size // dist.get_world_size()
    try:
        ema = has_average_on_device(config)
        ways = savings(config)
        return microbatch_search.find(model, columns, cost, device_batch, ranks_on_device(), ema=ema, savings=ways)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
