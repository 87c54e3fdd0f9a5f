"""What a run is built of, from its configuration: networks, data, optimizer, callbacks, Trainer.

A builder reads the sections of the configuration; what it builds takes its own section or plain values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composer import Algorithm, Callback, Logger, Trainer
from composer.core import DataSpec
from composer.devices import Device
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from callbacks.gradient_norm import GradientNorm
from callbacks.losses import AsyncLosses, Losses, StreamLosses
from callbacks.mlperf_log import MLPerfLog, describe_computation
from callbacks.periodic import EveryNImages, Line, Measurement
from callbacks.profile import Profile, ProfileConfig
from callbacks.quality_target import QualityTarget
from callbacks.run_record import RunRecord
from callbacks.sample_grid import grid_path, write_grid
from callbacks.throughput import MeasureConfig, Throughput, peak_tflops
from checkpointing import downloads
from checkpointing.callback import Checkpointer
from checkpointing.content import Progress, restore
from checkpointing.files import FULL, list_checkpoints
from checkpointing.resume import RunState
from checkpointing.uploads import Uploads
from common import dist
from common.errors import ConfigError
from common.log import log
from common.plugins import build_all, name_plugin
from common.value_types import ImageSize
from config import flatten, replace_keys
from data import SyntheticBatches, build_data, open_datasets
from ema import EMA
from evaluation.metrics import Parts
from evaluation.prompts import parse_captions, read_prompts
from evaluation.samples import draw_samples, tile_samples
from evaluation.scorer import CPU_BATCH_SIZE, EvalConfig, Scorer, TargetConfig
from evaluation.validation import MAX_CHUNK, Validator, check_apart, check_samples
from families import mlperf
from families.mlperf import evaluation_frequency
from families.spec import Family, parse_size
from mds.dataset import Dataset
from mds.loader import Loader
from mds.mixture import StreamConfig, bucket_sizes_of, name_datasets, resolve_streams
from mds.reader import BatchDataset
from model import AUTOCAST_DTYPES, LatentDiffusion
from ranks import collectives
from run_folder.environment import device_name, start_cpu_query
from run_folder.files import EVAL_PARTS, ConfigFiles, keep_keys, saved_batch_size
from run_folder.mlperf_log import as_evaluation
from training import sharding, speed, verify_ranks
from training.config import Config, RunConfig, build_for_training, name_without_time, needs_encoders, resolve
from training.health import Health
from training.initial_weights import load_initial_weights
from training.loggers import WandbMode, build_loggers
from training.memory import Cost, has_average_on_device, measure_cost
from training.optimizer import build_optimizer, build_schedule, total_batches
from training.start import (
    StartSettings,
    check_encoders,
    check_evaluations,
    check_validations,
    identity_of,
    log_hub_names,
    saved_keys,
)
from training.trainer import DIST_TIMEOUT_SEC, NonBlockingTrainer, composer_precision, torch_device
from weights.hub_names import parse_hub_name

# --- networks, data, optimizer, Trainer ---


@dataclass(frozen=True)
class Networks:
    """A run's networks on their device, with the datasets that they were compared with."""

    model: LatentDiffusion
    microbatch: int
    scorer: Scorer | None
    eval_batch_size: int | None
    """Batch size of evaluations, if known."""
    datasets: list[Dataset]
    """Empty for synthetic data."""
    sizes: list[ImageSize] | None
    """(width, height) of the batches' images, where there are several (buckets)."""
    held_out: Dataset | None
    """None: no validation."""
    identity: dict[str, Any]
    """What has to be the same in a checkpoint of this run."""


def build_networks(
    config: RunConfig, run: RunState, device: Device, find_microbatch: Callable[[LatentDiffusion], int]
) -> Networks:
    """Build model and evaluation. `find_microbatch`: called between them, before the scorer's networks take memory.

    Raises:
        ConfigError: the dataset, the checkpoint or earlier evaluations do not match this run, or not one image fits.
    """
    assert config.precision is not None
    datasets = collectives.once_per_machine(config.data.read)
    validation = config.validation
    held_out = collectives.once_per_machine(lambda: validation.held_out.dataset) if validation.is_given else None
    verify_ranks.check_index_digests(verify_ranks.index_digests(config.data.named_sources(), datasets, held_out))
    is_shared = sharding.is_sharded(config.sharding)
    model = build_for_training(config, datasets, has_denoiser=not is_shared or dist.get_global_rank() == 0)
    sizes = bucket_sizes_of(resolve_streams(config.data.sources, datasets, config.size))
    check_encoders(datasets, held_out, model.encoders.fingerprints)
    start, notes = load_initial_weights(
        model,
        config.model.denoiser,
        config.lora,
        run.checkpoint,
        precision=config.precision,
        seed=config.seed,
        on_rank_zero_only=is_shared,
    )
    if benchmark := mlperf.find_benchmark(config.model.family, config.model.variant):
        deviations = benchmark.deviations(flatten(config), config.mlperf.ruleset)
        notes += [f"model.variant: mlperf, but {text.rstrip('.')}." for text in deviations]
    for note in [*(f"model.weights: {note}" for note in model.encoders.notes), *notes]:
        log.info(note)
    identity = run.verify(identity_of(flatten(config), datasets, model.encoders.fingerprints, denoiser_start=start))
    sharding.move_to_device(model, config, config.precision, torch_device(device), num_sizes=len(sizes or [1]))
    microbatch = find_microbatch(model)
    eval_batch_size = config.eval.batch_size or saved_batch_size(run.folder)
    scorer = build_scorer(config, eval_batch_size, run.folder)
    if scorer is not None:
        settings = {**scorer.settings(config.eval.guidances()[0]), "eval_weights": config.eval.weights}
        check_evaluations(run.folder, run.progress.batch, settings)
    if held_out is not None and config.target.val_loss is not None:
        check_validations(run.folder, run.progress.batch, config.validation.identity_of(held_out))
    return Networks(model, microbatch, scorer, eval_batch_size, datasets, sizes, held_out, identity)


def build_batches(
    config: RunConfig, networks: Networks, progress: Progress, all_ready: Callable[[bool], bool]
) -> DataSpec:
    """Build the run's data, starting at its progress. `all_ready`: see mds.loader."""
    data = build_data(
        config.data,
        networks.model.family,
        size=config.size,
        device_batch_size=config.global_batch_size // dist.get_world_size(),
        device=networks.model.device,
        seed=config.seed,
        datasets=networks.datasets,
        all_ready=all_ready,
    )
    assert isinstance(data.dataloader, Loader | SyntheticBatches)
    if progress.batch:
        data.dataloader.resume(progress.epoch, progress.batch_in_epoch, config.global_batch_size)
    return data


@dataclass(frozen=True)
class Learning:
    """What changes the weights."""

    optimizer: Optimizer
    schedule: LRScheduler
    average: EMA | None
    num_batches: int
    """Of the whole run."""


def build_learning(
    config: RunConfig, model: LatentDiffusion, average: EMA | None, run: RunState, *, epoch_batches: int
) -> Learning:
    """Build optimizer, schedule and average, and bring them and the weights to where the run stands."""
    batch = config.global_batch_size
    optimizer = build_optimizer(config.optimizer, model, batch, seed=config.seed)
    num_batches = total_batches(config.max_duration, global_batch_size=batch, epoch_batches=epoch_batches)
    benchmark = mlperf.find_benchmark(config.model.family, config.model.variant)
    schedule = build_schedule(config.schedule, optimizer, benchmark, global_batch_size=batch, num_batches=num_batches)
    if run.checkpoint is not None:
        restore(run.checkpoint, model=model, optimizer=optimizer, schedule=schedule, average=average)
    return Learning(optimizer, schedule, average, num_batches)


def build_trainer(
    config: RunConfig,
    device: Device,
    model: LatentDiffusion,
    data: DataSpec,
    learning: Learning,
    record: RunRecord,
    callbacks: Sequence[Callback | None],
    logged: WandbMode,
) -> Trainer:
    """Build Composer's Trainer, or the one that does not wait for losses."""
    assert config.precision is not None and config.run_name is not None
    start_cpu_query().join()
    pending = record.losses.async_losses
    trainer_class = Trainer if pending is None else functools.partial(NonBlockingTrainer, losses=pending)
    return trainer_class(
        model=model,
        train_dataloader=data,
        max_duration=config.max_duration,
        optimizers=learning.optimizer,
        schedulers=learning.schedule,
        step_schedulers_every_batch=True,
        spin_dataloaders=False,  # the loader already knows where to begin
        algorithms=[*filter(None, [learning.average]), *build_all("algorithms", config.algorithms, Algorithm)],
        callbacks=[*filter(None, callbacks), *build_all("callbacks", config.callbacks, Callback)],
        loggers=build_loggers(config.loggers, config.run_name, record.run_id, record.folder, logged),
        progress_bar=config.loggers.shows_progress_bar,
        device=device,
        precision=composer_precision(device, config.precision),
        device_train_microbatch_size=config.device_train_microbatch_size,
        seed=config.seed,
        run_name=config.run_name,
        dist_timeout=DIST_TIMEOUT_SEC,
    )


# --- callbacks: clocks, record, checkpoints, profile ---


def build_throughput(
    config: MeasureConfig, cost: Cost, sizes: Sequence[ImageSize] | None, health: Health
) -> Throughput:
    """Build the clocks. `sizes`: of the batches' images; None: there is one."""
    peak = peak_tflops(device_name(), cost.precision)
    flops = None if sizes else cost.flops_per_image
    return Throughput(config, flops_per_image=flops, peak=peak, rank_timing=health.rank_timing.take)


def build_losses(sources: Sequence[StreamConfig], folder: Path, model: LatentDiffusion, *, is_async: bool) -> Losses:
    """Build the reader of losses; with several streams the model also reports the loss of each sample."""
    streams = None
    if len(sources) > 1:
        streams = StreamLosses(name_datasets([source.location or "" for source in sources]), model.device)
        model.on_losses = streams.add
    return Losses(folder / "checkpoints", AsyncLosses() if is_async else None, streams)


def build_checkpointer(
    config: RunConfig,
    folder: Path,
    model: LatentDiffusion,
    average: EMA | None,
    identity: Mapping[str, Any],
    before_saving: Callable[[], None],
    resume_from: tuple[Path, Mapping[str, Any]] | None,
    uploads: Uploads | None,
) -> Checkpointer:
    """Build the callback that writes checkpoints; the arguments are those of Checkpointer."""
    return Checkpointer(
        folder / "checkpoints",
        config.save,
        model=model,
        average=average,
        identity=identity,
        before_saving=before_saving,
        resume_from=resume_from,
        uploads=uploads,
        how_to_resume=how_to_resume(config),
    )


def build_record(
    config: RunConfig,
    fitted: RunConfig,
    facts: Mapping[str, Any],
    throughput: Throughput,
    gradient_norm: GradientNorm,
    losses: Losses,
    loader: Loader | None,
) -> RunRecord:
    """Build the run's record.

    Args:
        fitted: the configuration with the batch sizes that fit this machine.
        facts: further keys of its summary.
    """
    return RunRecord(
        folder_of(config),
        ConfigFiles.of(flatten(config), flatten(fitted)),
        facts,
        throughput=throughput,
        gradient_norm=gradient_norm,
        losses=losses,
        samples=loader,
        speed_settings={key: facts[key] for key in ("device_train_microbatch_size", *speed.values_of(config))},
        per_device_hour=config.cost.per_device_hour,
        logs_windows=not config.loggers.shows_progress_bar,
    )


def build_profile(
    config: ProfileConfig, warmup_batches: int, record: RunRecord, throughput: Throughput
) -> Profile | None:
    """Build the callback that profiles steps, if any are wanted."""
    if not config.batches:
        return None
    return Profile(
        config,
        record.folder,
        about=record.about(),
        warmup_batches=warmup_batches,
        mark_unmeasured=throughput.mark_unmeasured,
    )


def facts_of(config: RunConfig, networks: Networks, cost: Cost) -> dict[str, Any]:
    """Return facts about a run for summary.json, next to its measured values."""
    microbatch = config.device_train_microbatch_size
    assert microbatch != "auto"  # it has been found
    kinds = cost.memory_by_kind(microbatch or 1, ema=has_average_on_device(config.ema))
    return {
        "run_name": config.run_name,
        "family": config.model.family,
        "preset": config.model.preset,
        "variant": config.model.variant,
        "stage": config.data.stage,
        "synthetic": config.data.synthetic,
        "image_size": list(config.size),
        **({"bucket_sizes": [list(size) for size in networks.sizes]} if networks.sizes else {}),
        "precision": config.precision,
        "global_batch_size": config.global_batch_size,
        "device_train_microbatch_size": microbatch,
        "seed": config.seed,
        "max_duration": config.max_duration,
        "ema": config.ema.enabled,
        **speed.values_of(config),
        **{f"{name}_fingerprint": digest for name, digest in networks.model.encoders.fingerprints.items()},
        **{f"{key}_name": text for key, text in dataclasses.asdict(config.model).items() if parse_hub_name(text)},
        "denoiser_start_fingerprint": networks.identity["denoiser_start"],
        "trained_parameters": cost.trained_parameters,
        "optimizer_states": config.optimizer.states,
        "estimated_mem_gib": sum(kinds.values()),
        **{f"estimated_{kind.replace(' ', '_')}_gib": gib for kind, gib in kinds.items()},
    }


# --- evaluation, target, MLPerf log ---


def build_scorer(config: RunConfig, batch_size: int | None, folder: Path) -> Scorer | None:
    """Build the scorer of evaluations in training, or None. Raises ConfigError: a file is unusable.

    Without a batch size it is found at the first evaluation, when everything that training needs is in memory.
    """
    if config.eval.when != "in_training":
        return None
    try:
        return Scorer(
            dataclasses.replace(config.eval, batch_size=batch_size),
            size=config.size,
            seed=config.seed,
            settings={"precision": config.precision, **config.objective.score_settings()},
            show_progress=config.loggers.progress_bar,
            on_batch_size=lambda batch_size: keep_keys(folder, {"eval.batch_size": batch_size}),
            parts=Parts(folder / EVAL_PARTS, is_alone=True),
        )
    except ValueError as error:
        raise ConfigError([str(error)]) from error


@dataclass(frozen=True)
class EvalContext:
    """What evaluation, validation and sample grids share."""

    throughput: Throughput
    record: RunRecord
    checkpointer: Checkpointer
    average: EMA | None
    """The weights that are measured; None: the training weights."""

    def at_points(
        self, measure: Callable[[], Measurement], keep: Callable[[Line, Measurement, Logger], None], **more: Any
    ) -> EveryNImages:
        """Build the callback of such work; the arguments are those of EveryNImages."""
        stop = self.checkpointer.stop_between_batches
        more |= {"average": self.average, "clock": self.throughput.evaluating, "stop": stop}
        return EveryNImages(self.settled(measure), keep, **more)

    def settled(self, measure: Callable[[], Measurement]) -> Callable[[], Measurement]:
        """Return `measure` that first reads all losses, and then waits until this batch's checkpoint is written.

        So nothing is recorded of a state that a kill would lose.
        """

        def settled() -> Measurement:
            self.record.losses.settle()
            result = measure()
            self.checkpointer.settle()
            return result

        return settled


def build_evaluation(
    config: EvalConfig, scorer: Scorer | None, model: LatentDiffusion, context: EvalContext, *, draws_grids: bool
) -> EveryNImages | None:
    """Connect scorer, clock, record, signals and the sample grid; None if the run is not evaluated in training."""
    if scorer is None:
        return None
    assert config.every_images is not None
    record = context.record
    scorer.signal = lambda: context.checkpointer.signal
    images = context.throughput.images
    record.facts["points_not_evaluated"] = count_unevaluated(config.every_images, images, record.evaluations)

    def keep(where: Line, score: Line, logger: Logger) -> None:
        evaluations_sec = score["eval_sec"] + sum(line["eval_sec"] for line in record.evaluations)
        weights = "training" if context.average is None else "ema"  # as configured: the EMA may begin later
        where |= {"seconds_with_eval": where["seconds"] + evaluations_sec, "eval_weights": weights}
        record.add_evaluation(where | score, logger)
        scorer.remove_parts()
        if dist.get_global_rank() == 0 and draws_grids:
            write_grid(record.folder, where["images"], where["batch"], scorer.samples, logger, tile_samples)

    return context.at_points(
        lambda: scorer.score(model, config.guidances()[0]),
        keep,
        every_images=config.every_images,
        is_done=lambda batch: any(line["batch"] == batch for line in record.evaluations),
    )


def count_unevaluated(every_images: int, images: int, evaluations: Sequence[Mapping[str, Any]]) -> int:
    """Count the evaluation points before this start that were not evaluated, and warn: one may have met the target."""
    due = range(every_images, images, every_images)  # a point at this batch is evaluated first
    missing = sorted(set(due) - {line["images"] for line in evaluations})
    if missing:
        counts = (
            f"{len(missing)} of {len(due)} points before {images:,} images were not evaluated (first: {missing[0]:,})"
        )
        advice = "A target that is met from here on may have been met before. composer eval.py scores the snapshots there are"
        log.info(f"eval: {counts}. {advice}.")
    return len(missing)


def build_target(config: TargetConfig, evaluation: EveryNImages | None, record: RunRecord) -> QualityTarget:
    """Build the callback that ends a run at its target: by its validations where that is a loss, else by its scores."""

    def lines() -> Sequence[Mapping[str, Any]]:
        if config.val_loss is not None:
            return record.validations
        return [] if evaluation is None else record.evaluations

    return QualityTarget(config.is_met, lines, config.metrics)


def build_mlperf_log(
    config: RunConfig, datasets: Sequence[Dataset], held_out: Dataset | None, record: RunRecord
) -> MLPerfLog | None:
    """Build the callback that writes the MLPerf log, with its header; None if no log is wanted."""
    if not config.mlperf.enabled:
        return None
    optimizer, batch, ranks = config.optimizer, config.global_batch_size, dist.get_world_size()
    microbatch = config.device_train_microbatch_size
    assert microbatch != "auto"  # it has been found
    benchmark = mlperf.find_logged_benchmark(config.model.family, config.model.variant)
    is_of_loss, ruleset = "val_loss" in benchmark.target, config.mlperf.ruleset or benchmark.newest_ruleset
    if is_of_loss:
        assert held_out is not None and config.validation.every_images is not None
        every = config.validation.every_images
        eval_samples = min(config.validation.num_samples, held_out.num_samples)
    else:
        assert config.eval.prompts is not None and config.eval.every_images is not None
        every = config.eval.every_images
        eval_samples = len(read_prompts(config.eval.prompts, config.eval.num_prompts).prompts)
    computation = describe_computation(config.precision or "fp32", config.sharding, microbatch)
    header = {
        "seed": config.seed,
        "train_samples": sum(dataset.num_samples for dataset in datasets),  # synthetic ones are drawn, not sampled
        "eval_samples": eval_samples,
        "gradient_accumulation_steps": math.ceil(batch / ranks / (microbatch or batch)),
        "global_batch_size": batch,  # before evaluation_frequency, which the checker of 6.1.0 compares with it
        **({"evaluation_frequency": evaluation_frequency(every, batch, ruleset)} if is_of_loss else {}),
        "number_of_nodes": ranks // dist.get_local_world_size(),
        "accelerators_per_node": dist.get_local_world_size() if torch.cuda.is_available() else 0,
        "opt_name": optimizer.name,
        **dict(zip(("opt_adamw_beta_1", "opt_adamw_beta_2"), optimizer.betas, strict=True)),
        "opt_adamw_epsilon": optimizer.eps,
        "opt_adamw_weight_decay": optimizer.weight_decay,
        "opt_base_learning_rate": optimizer.learning_rate(batch),
        "opt_learning_rate_warmup_steps": config.schedule.num_warmup_batches(batch),
        **({"opt_gradient_clip_norm": optimizer.clip_norm, **computation} if is_of_loss else {}),
    }
    return MLPerfLog(
        record.folder,
        config.mlperf,
        header,
        benchmark=benchmark.name,
        every_images=every,
        in_training=is_of_loss or config.eval.when == "in_training",
        evaluations=lambda: list(map(as_evaluation, record.validations)) if is_of_loss else record.evaluations,
    )


# --- validation and sample grids ---


def open_held_out(
    config: RunConfig, family: Family, held_out: Dataset | None, datasets: Sequence[Dataset]
) -> BatchDataset | None:
    """Open the held-out dataset, if there is one, and check that none of it is trained on. All ranks call it.

    Raises:
        ConfigError, ValueError: some of it is trained on.
        StreamFailure: it cannot be fetched.
    """
    if held_out is None:
        return None
    trained = resolve_streams(config.data.sources, datasets, config.size)
    for stream in trained:
        check_apart(held_out, stream.dataset)
    source = config.validation.source(config.data, held_out.kind)
    streams = resolve_streams(source.sources, [held_out], config.size)
    dataset = open_datasets(source, family, streams, device_batch_size=1, seed=0)  # validation forms its own batches
    num = min(config.validation.num_samples, held_out.num_samples)
    if config.mlperf.enabled:
        log.info(
            "validation: overlap with the training data is not checked: it may not be read before MLPerf's clock starts."
        )
    else:
        collectives.on_rank_zero(lambda: check_samples(dataset, num, trained))
    return dataset


def build_validation(
    config: RunConfig,
    model: LatentDiffusion,
    dataset: BatchDataset | None,
    held_out: Dataset | None,
    context: EvalContext,
) -> EveryNImages | None:
    """Build the callback that validates; None if nothing is held out."""
    if dataset is None or held_out is None:
        return None
    section, record = config.validation, context.record
    assert isinstance(config.device_train_microbatch_size, int)
    validator = Validator(
        model,
        dataset,
        num_samples=min(section.num_samples, held_out.num_samples),
        chunk=min(config.device_train_microbatch_size, MAX_CHUNK),
        times=section.times,
        signal=lambda: context.checkpointer.signal,
    )

    def keep(where: dict[str, Any], losses: dict[str, Any], logger: Logger) -> None:
        others_sec = sum(line["val_sec"] for line in record.validations)
        others_sec += sum(line["eval_sec"] for line in record.evaluations)
        clock = {"seconds_with_eval": where["seconds"] + others_sec + losses["val_sec"]}
        record.add_validation({**where, **clock, **losses, **section.identity_of(held_out)}, logger)

    def is_done(batch: int) -> bool:
        return any(line["batch"] == batch for line in record.validations)

    assert section.every_images is not None
    return context.at_points(
        validator.measure,
        keep,
        every_images=section.every_images,
        from_start=not config.mlperf.enabled,  # MLPerf's clock runs before any data are touched
        is_done=is_done,
        release=dataset.close,
    )


def build_samples(config: RunConfig, model: LatentDiffusion, context: EvalContext) -> EveryNImages | None:
    """Build the callback that draws grids, or None. All ranks call it. Raises ValueError: the prompts cannot be read."""
    section, evaluation, folder = config.samples, config.eval, context.record.folder
    if section.every_images is None:
        return None
    assert isinstance(config.device_train_microbatch_size, int)
    draw = functools.partial(
        draw_samples,
        model,
        parse_captions(section.prompts or evaluation.prompts)[: evaluation.samples],
        sampling=dict(sampler=evaluation.sampler, steps=evaluation.steps, guidance=evaluation.guidances()[0]),
        size=config.size if evaluation.image_size is None else (*parse_size(evaluation.image_size), *config.size[2:]),
        seed=config.seed,
        batch_size=evaluation.batch_size or min(CPU_BATCH_SIZE, config.device_train_microbatch_size),
        signal=lambda: context.checkpointer.signal,
    )
    begun_at, fps = context.record.begun_at, config.data.fps or model.family.frames_per_sec
    is_drawn = collectives.on_rank_zero(lambda: grid_path(folder, context.throughput.images).is_file())

    def keep(where: dict[str, Any], samples: list[tuple[str, Tensor]], logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            write_grid(folder, where["images"], where["batch"], samples, logger, tile_samples, fps)

    def is_done(batch: int) -> bool:
        return is_drawn and batch == begun_at  # later ones may be of batches that the last start has lost

    return context.at_points(draw, keep, every_images=section.every_images, from_start=True, is_done=is_done)


# --- advice for a run that is stopped ---


def how_to_resume(config: RunConfig) -> str:
    """Return what resumes a run: the same command, with the name that the run was given where it had none."""
    made_up = re.fullmatch(rf"{re.escape(name_without_time(config))}-\d{{8}}-\d{{6}}-\d+", config.run_name or "")
    return "The same command" + (f" with run_name={made_up[0]}" if made_up else "")


def advice_after_signal(config: RunConfig | None) -> str:
    """Return what is saved of a run that a signal has ended outside of its training, and what to do.

    Args:
        config: resolved; None: the signal came before there was one.
    """
    if config is not None:
        if saved := list_checkpoints(folder_of(config) / "checkpoints", FULL):
            return f"The last checkpoint is {saved[0]}. {how_to_resume(config)} resumes it."
        if not config.save.is_on:
            return "Nothing was saved: save.every_images and save.every_min are 0. The same command starts it again."
    return "Nothing was saved yet. The same command starts it again."


# --- the cost of a step ---

traced_cost = functools.cache(measure_cost)  # it takes seconds, and a start asks for it several times


def measure_step_cost(config: RunConfig) -> Cost:
    """Return the cost of a training step of a resolved run's model. Raises ValueError: a user's own family fails in it."""
    assert config.precision is not None
    with name_plugin("model.family", config.model.family):
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
            float32_attention=speed.attends_in_float32(config, AUTOCAST_DTYPES.get(config.precision)),
            lora=(config.lora.rank, tuple(config.lora.targets or ())) if config.lora.rank else None,
        )
    how = config.sharding if sharding.is_sharded(config.sharding) else "off"
    return dataclasses.replace(cost, states=config.optimizer.states, optimizer=config.optimizer.name, sharding=how)


# --- settings of a start ---


def folder_of(config: RunConfig) -> Path:
    """Return the folder of a run's record."""
    return Path(config.run_folder, config.run_name or "")


def apply_saved_settings(config: Config) -> Config:
    """Return the configuration with what its run was begun with, if the run lies on this machine's disk."""
    return replace_keys(config, saved_keys(flatten(config)))


def build_start_settings(config: RunConfig) -> StartSettings:
    """Return what of a resolved configuration decides where its run stands."""
    return StartSettings(
        keys=flatten(config),
        model=config.model,
        save=config.save,
        eval=config.eval,
        target=config.target,
        validation=config.validation,
        is_sharded=sharding.is_sharded(config.sharding),
        has_adapter=config.lora.is_given,
        needs_encoders=functools.partial(needs_encoders, config),
    )


def log_downloads(config: RunConfig) -> None:
    """Log what a run that is not resolved will take from the hub. Its problems are reported elsewhere."""
    with contextlib.suppress(ValueError):
        log_hub_names(build_start_settings(resolve(apply_saved_settings(config))))


def store_problems(config: RunConfig) -> list[tuple[str, str]]:
    """(key, message) for what is wrong with save.remote of a run that is not resolved."""
    if (remote := config.save.remote) is None:
        return []
    is_saving = True
    with contextlib.suppress(ValueError):  # one of the run's other problems
        is_saving = resolve(config).save.is_on
    return downloads.problems(remote, is_saving=is_saving)
