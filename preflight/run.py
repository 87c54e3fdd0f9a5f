"""Checks of a run's configuration that are possible before anything is built."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist

from cli import ranks as all_ranks
from cli.command_line import Problem
from cli.errors import ConfigError
from cli.limits import ImageSize, read_duration
from data import SYNTHETIC_EPOCH_BATCHES, DataConfig, Encodings
from evaluation.scoring import EVERY_IMAGES, rounded_up, sampler_problems
from model import LatentDiffusion
from preflight import limits, machine, video
from preflight.mlperf import closed_data_problems, log_problems
from record.checkpoint_files import FULL, listed
from stages.dataset import array_encoding
from stages.images import resize_name
from stages.mixture import epoch_samples
from stages.moments import FLIPPED
from stages.shuffling import memory_gib
from training import adamw, adapter, health, remote, sharding, warm_start
from training import microbatch as microbatch_search
from training.cost import Cost, has_average_on_device, host_memory_problem, measure_cost, memory_problem
from training.device import missing_gpus
from training.optimizer import total_batches
from training.published import as_begun
from training.run_config import RunConfig, needs_encoders, resolve, wants_own_rate
from zoo import load_family, mlperf
from zoo.mlperf_sd import SD
from zoo.model_config import model_problems
from zoo.spec import as_size

# The memory estimate depends on these keys; it is left out if one of them is invalid.
MEMORY_KEYS = {
    "image_size",
    "precision",
    "global_batch_size",
    "device_train_microbatch_size",
    "model.family",
    "model.preset",
    "model.variant",
    "objective.prediction",
    "ema.enabled",
    "compile",
    "gradient_checkpointing",
    "optimizer.states",
    "lora.rank",
    "lora.targets",
}


def check(config: RunConfig) -> list[Problem]:
    """Return every problem that can be found before anything is built; of the stages on a machine's first rank alone.

    Where a container has no GPUs, that alone: the others come of it.
    """
    if text := missing_gpus():
        return [Problem(text, ())]
    wanted, of_data, is_first = wanted_of_stage(config), [], dist.get_local_rank() == 0
    if is_first:
        of_data = config.data.problems(config.global_batch_size, *wanted)
        of_data += config.validation.problems(config.data, *wanted)
    found = quick_problems(config, of_data)
    found += [*_shared_memory_problems(config), *closed_data_problems(config)] if is_first else []
    if not any(key in MEMORY_KEYS for problem in found for key in problem.keys):
        is_readable = is_first and not any(key.startswith("data.") for problem in found for key in problem.keys)
        found += memory_problems(config, _planned_batches(config) if is_readable else _num_batches(config))
    return found


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


def quick_problems(config: RunConfig, of_data: list[tuple[str, str]]) -> list[Problem]:
    """Return all problems but those of memory and disk, in the order of the keys.

    Args:
        of_data: (key, message) of the section `data`, with the stage's if it was read.
    """
    config = as_begun(config)
    found = _run_problems(config)
    sections = (config.optimizer, config.schedule, config.ema)
    of_eval = config.eval.problems(now=config.eval.when == "in_training")
    of_target = config.target.problems(config.eval)
    if config.target.val_loss is not None and not config.validation.is_given:
        of_target.append(
            ("target.val_loss", "given, but nothing is validated. Give validation.remote, or leave it out.")
        )
    in_sections = [
        of_data,
        *(s.problems() for s in sections),
        of_eval,
        of_target,
        config.samples.problems(config.eval),
        config.loggers.problems(),
        config.mlperf.problems(mlperf.logged_as(config.model.family, config.model.variant)),
        config.profile.problems(_num_batches(config), config.measure.warmup_batches),
    ]
    also = {"data.remote": ("data.streams",)}  # where that cannot be read, nobody says that no stage is given
    found += [Problem(f"{key}: {text}", (key, *also.get(key, ()))) for of in in_sections for key, text in of]
    of_states = adamw.problems(config.optimizer, config.precision)
    found += [Problem(f"{key}: {text}", (key, "precision")) for key, text in of_states]
    found += speed_problems(config)
    found += [Problem(f"{key}: {text}", (key, "save.every_images")) for key, text in remote.problems(config)]
    of_copies = [*sharding.problems(config), *health.problems(config)]
    found += [Problem(f"{key}: {text}", (key, "sharding")) for key, text in of_copies]
    if config.copy_stream and config.data.synthetic:
        text = "true, but data.synthetic=true: that batch lies on the device, and nothing is copied. Leave it out."
        found.append(Problem(f"copy_stream: {text}", ("copy_stream", "data.synthetic")))
    are_read = config.model.weights is not None or needs_encoders(config)
    if config.num_frames is not None and len(config.size) == 2:
        text = f"{config.num_frames}, but {config.model.family} makes images. Leave it out."
        found.append(Problem(f"num_frames: {text}", ("num_frames", "model.family")))
    found += video.problems(config)
    found += model_problems(config.model, config.size, encoders_wanted=are_read and not config.data.synthetic)
    found += _objective_problems(config) + _learning_rate_problems(config) + _evaluation_problems(config)
    found += log_problems(config) + _log_folder_problems(config)
    found += adapter.problems(config)
    is_begun = config.run_name and listed(Path(config.run_folder, config.run_name, "checkpoints"), FULL)
    if config.lora.is_given or not is_begun:
        found += warm_start.problems(config.model, config.objective.prediction)
    return found


def _run_problems(config: RunConfig) -> list[Problem]:
    found = []
    if text := limits.run_folder_problem(config.run_folder, config.run_name):
        found.append(Problem(text, ("run_name", "run_folder")))
    for key, source in [*config.data.named_sources(), ("validation", config.validation)]:
        if source.remote and source.local and (text := limits.unwritable(source.local)):
            found.append(Problem(f"{key}.local: {text}", (f"{key}.local",)))
    if torch.cuda.is_available() and dist.get_local_world_size() > torch.cuda.device_count():
        given = f"{dist.get_local_world_size()} ranks on this machine, which has {torch.cuda.device_count()} GPUs"
        found.append(Problem(f"composer -n: {given}. Start at most that many.", tuple(MEMORY_KEYS)))
    return found + precision_problems(config) + _batch_problems(config)


def _log_folder_problems(config: RunConfig) -> list[Problem]:
    """Check the folders that loggers write into; they are created only after the run has begun."""
    places, given = {}, config.loggers
    folder = Path(config.run_folder, config.run_name) if config.run_name else None
    if given.tensorboard is not None and given.tensorboard.log_dir is not None:
        places["loggers.tensorboard.log_dir"] = Path(given.tensorboard.log_dir, config.run_name or "")
    elif given.tensorboard is not None and folder is not None:
        places["loggers.tensorboard"] = folder / "tensorboard"
    if given.wandb is not None and folder is not None:
        places["loggers.wandb"] = folder / "wandb"
    if given.mlflow is not None and folder is not None and (file := given.mlflow.file(folder)) is not None:
        places["loggers.mlflow"] = file.parent
    texts = {key: limits.unwritable(place) for key, place in places.items()}
    return [Problem(f"{key}: {text}", (key,)) for key, text in texts.items() if text]


def _shared_memory_problems(config: RunConfig) -> list[Problem]:
    """Compare the workers' batches and an epoch's order with the size of /dev/shm: a worker dies of a bus error there."""
    if config.data.synthetic:
        return []
    with contextlib.suppress(ValueError):  # named by model_problems
        num = dist.get_local_world_size() * machine.batches_on_their_way(config.data.workers)
        found = machine.shared_memory_room(batch_gib(config), num, order_need(config.data))
        texts = [finding.text for finding in found if finding.level == machine.ERROR]
        return [Problem(f"/dev/shm: {text}", ("data.workers",)) for text in texts]
    return []


def order_need(config: DataConfig) -> machine.OrderNeed | None:
    """Read the stages, and return what the order of an epoch takes on this machine; None: there is none."""
    sources = config.sources
    with contextlib.suppress(ValueError):  # named by the section
        stages = config.read()
        if stages:
            samples = epoch_samples(sources, [stage.num_samples for stage in stages])
            has_buckets = any(stage.buckets for stage in stages)
            nodes = all_ranks.num_nodes()
            parts = 1 if has_buckets else min(nodes, config.num_canonical_nodes or nodes)
            has_weights = any(source.weight for source in sources)
            need = memory_gib(samples, parts, has_weights=has_weights, has_buckets=has_buckets)
            return machine.OrderNeed(samples, *need)
    return None


def batch_gib(config: RunConfig) -> float:
    """Return the size of one rank's batch from the loader, GiB. Raises ValueError: there is no such network, or stage."""
    family = load_family(config.model.family, config.model.preset, config.model.variant)
    columns = config.data.columns(family, config.size).values()
    sample_bytes = sum(math.prod(column.shape) * column.dtype.itemsize for column in columns)
    return config.global_batch_size // dist.get_world_size() * sample_bytes / 2**30


def _num_batches(config: RunConfig) -> int | None:
    """Return the batches of a run, or None if its duration is in epochs: then they depend on the stage."""
    if read_duration(config.max_duration, ("ba", "sp")) is None and not config.data.synthetic:
        return None
    return total_batches(
        config.max_duration, global_batch_size=config.global_batch_size, epoch_batches=SYNTHETIC_EPOCH_BATCHES
    )


def _planned_batches(config: RunConfig) -> int | None:
    """As `_num_batches`, and read the stage if the duration is in epochs."""
    if (num := _num_batches(config)) is not None:
        return num
    with contextlib.suppress(ValueError):  # named by the section `data`
        samples = [stage.num_samples for stage in config.data.read()]
        epoch = epoch_samples(config.data.sources, samples) // config.global_batch_size
        return total_batches(config.max_duration, global_batch_size=config.global_batch_size, epoch_batches=epoch)
    return None


def precision_problems(config: RunConfig) -> list[Problem]:
    """Return the problem of a precision that this machine does not support, in training and evaluation."""
    if torch.cuda.is_available() or config.precision not in ("fp16", "tf32"):
        return []
    return [
        Problem(
            f"precision: {config.precision} needs a GPU. Possible on a CPU: fp32, bf16, bf16_params.", ("precision",)
        )
    ]


def speed_problems(config: RunConfig) -> list[Problem]:
    """Return the problems of the keys of speed on this machine, in training and evaluation."""
    return [Problem(f"{key}: {text}", (key, "precision")) for key, text in config.problems_of_speed(config.precision)]


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


def _objective_problems(config: RunConfig) -> list[Problem]:
    prediction, found = config.objective.prediction, []
    with contextlib.suppress(ValueError):  # named by model_problems
        family = load_family(config.model.family, config.model.preset, config.model.variant)
        if prediction is not None and prediction not in family.predictions:
            possible = f"{family.name} cannot be trained on '{prediction}'. Possible: {', '.join(family.predictions)}."
            return [Problem(f"objective.prediction: {possible}", ("objective.prediction",))]
        found += config.objective.problems(family.objective)
        if config.eval.when != "off" or config.samples.is_given:
            found += sampler_problems(config.eval, config.objective.resolved(family.objective))
    return [Problem(f"{key}: {text}", (key,)) for key, text in found]


def _learning_rate_problems(config: RunConfig) -> list[Problem]:
    """Without a learning rate, the benchmark's is used; it exists only for some batch sizes."""
    if wants_own_rate(config):
        try:
            SD.lr_per_image(config.global_batch_size)
        except ValueError as error:
            keys = ("optimizer.lr_per_image", "optimizer.lr", "global_batch_size", "model.variant")
            return [Problem(f"optimizer.lr_per_image: {error}", keys)]
    return []


def _evaluation_problems(config: RunConfig) -> list[Problem]:
    """Check that the run has the evaluation's snapshots and weights, and is long enough for each interval."""
    given, found = config.eval, []
    every = {
        "eval": (given.when != "off", given.every_images, "evaluated"),
        "validation": (config.validation.is_given, config.validation.every_images, "validated after the start"),
        "samples": (config.samples.is_given, config.samples.every_images, "drawn after the start"),
    }
    every = {name: (images or EVERY_IMAGES, what) for name, (is_on, images, what) in every.items() if is_on}
    if every and given.weights == "ema" and not config.ema.enabled:
        text = "ema, but the run keeps no EMA weights. Say ema.enabled=true (--use_ema), or eval.weights=training."
        found.append(("eval.weights", text))
    if "eval" in every:
        found += _scoring_problems(config)
    with contextlib.suppress(ValueError):  # named by model_problems
        family = load_family(config.model.family, config.model.preset, config.model.variant)
        is_drawn = given.image_size is not None and every.keys() & {"eval", "samples"}
        if is_drawn and (text := family.size_problem(as_size(given.image_size))):
            found.append(("eval.image_size", text))
    batch, duration = max(1, config.global_batch_size), read_duration(config.max_duration, ("ba", "sp"))
    for name, (images, what) in every.items() if duration is not None else ():  # an epoch's length depends on the stage
        images, total = rounded_up(images, batch), duration[0] * (batch if duration[1] == "ba" else 1)
        if total < images:
            text = (
                f"{images:,}, but max_duration={config.max_duration} is {total:,}: nothing would be {what}. Lower it."
            )
            found.append((f"{name}.every_images", text))
    return [Problem(f"{key}: {text}", (key, "global_batch_size", "max_duration")) for key, text in found]


def _scoring_problems(config: RunConfig) -> list[tuple[str, str]]:
    """(key, message) for what a run cannot be scored with."""
    given, found = config.eval, []
    if isinstance(given.guidance, list | tuple):
        text = f"{list(given.guidance)}: a run is scored at one. Give one number; composer eval.py RUN takes a list."
        found.append(("eval.guidance", text))
    every = rounded_up(given.every_images or EVERY_IMAGES, max(1, config.global_batch_size))
    snapshots = config.save.snapshot_every_images
    if given.when == "after" and snapshots is not None and snapshots != every:
        text = f"{snapshots}, but eval.when=after scores snapshots every {every} images. Leave it out."
        found.append(("save.snapshot_every_images", text))
    return found


def memory_problems(config: RunConfig, num_batches: int | None) -> list[Problem]:
    """Estimate the memory of a step and the size of checkpoints; the first time on a machine this takes some seconds.

    Args:
        num_batches: of the run; None: not known, snapshots are not counted.
    """
    config = resolve(config)
    cost, ways = (
        cost_of(config),
        dict(ema=has_average_on_device(config), savings=[*savings(config), *smaller_states(config)]),
    )
    text = memory_problem(cost, planned_microbatch(config, cost), ranks_on_device(), **ways)
    found = [Problem(f"memory: {text}", tuple(MEMORY_KEYS))] if text else []
    text = host_memory_problem(cost, dist.get_local_world_size())
    found += [Problem(f"model.frozen_device: {text}", ("model.frozen_device", *MEMORY_KEYS))] if text else []
    every, snapshot_every = config.save.every_images or 0, config.save.snapshot_every_images or 0
    is_on = config.save.is_on or snapshot_every > 0
    if is_on and min(every, snapshot_every, config.save.every_min or 0.0) >= 0:  # the section reports invalid values
        ema, num = config.ema.enabled, config.save.keep + 1 if config.save.is_on else 0
        num_snapshots = (num_batches or 0) * config.global_batch_size // snapshot_every if snapshot_every else 0
        sizes = (cost.checkpoint_gib(ema=ema), num, cost.snapshot_gib(ema=ema), num_snapshots)
        if text := limits.room_problem(Path(config.run_folder, config.run_name or ""), *sizes):
            keys = ("save.every_images", "save.every_min", "save.snapshot_every_images", "save.keep")
            found.append(Problem(f"save: {text}", (*keys, "run_folder", "max_duration", *MEMORY_KEYS)))
    return found


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
