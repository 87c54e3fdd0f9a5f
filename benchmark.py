"""The main job: configuration -> model, data, optimizer, callbacks -> Trainer -> one result line.

    composer benchmark.py yamls/shapes.yaml                          # a tiny network on a CPU (make demo prepares its data)
    composer benchmark.py yamls/sd2_512_synthetic.yaml               # throughput of SD2 on every GPU of this machine
    composer -n 8 benchmark.py data.remote=s3://bucket/laion data.local=/tmp/laion model.weights=random max_duration=1ep

docs/configuration.md has every key. Values come from its defaults, then the YAML, then `key=value`. `--print_config` shows
the resolved run and its plan, wherever it would have to run, and stops. The flags of diffusion-benchmark are aliases of keys:
--batch_size --image_size --remote --local --use_synth_data --model_name --use_ema --wandb_name --wandb_project
--device_train_microbatch_size.
With no YAML: SD2 at 512 pixels, global batch 2048, 30 batches.

A run with a name resumes from its newest checkpoint when the same command is given again; a finished one says so. Where it
writes checkpoints, Ctrl-C, SIGTERM and SIGUSR1 end it after the current batch, with one more checkpoint if there is time.

Exit code: 0, or 2 when the configuration cannot run (every problem on a line of stderr), 1 when the data cannot be had any
more, the memory was not enough or the run failed otherwise, 128 + signal after a signal.
"""

from __future__ import annotations

import gc

from cli import interrupts

if __name__ == "__main__":
    interrupts.told("benchmark.py: interrupted before it began. The same command starts it again.")
gc.disable()  # while libraries are loaded: a quarter of that time went into looking at what they have brought

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from composer import Callback, Trainer
from composer.core import DataSpec
from composer.devices import Device
from composer.utils import dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from callbacks.gradient_norm import GradientNorm
from callbacks.mlperf_log import MLPerfLog
from callbacks.run_record import RunRecord
from cli import errors, masking, ranks
from cli.command import command, start
from cli.command_line import parse_command_line
from cli.errors import ConfigError
from cli.limits import ImageSize
from cli.log import log
from config import as_written, load
from data import SyntheticBatches, build_data
from ema import EMA
from evaluation.scoring import Scorer
from model import BatchRandomness, LatentDiffusion
from preflight import plan
from preflight.checks import check
from preflight.run import cost_of, microbatch_of, savings
from record.config_file import found_batch_size
from record.environment import asked_for_cpu
from record.summary import result_line
from stages.dataset import Stage
from stages.loader import Loader
from stages.mixture import buckets_of, opened
from training import agreement, microbatch, published, remote, sharding, speed
from training.between import build_samples, build_validation, catch_up, open_held_out
from training.checkpoint_content import Progress, restore
from training.checkpoints import Checkpointer, Stopped
from training.cost import Cost
from training.destinations import Destination
from training.device import build_device, composer_precision
from training.endings import page_if_it_fails, what_is_left, write_page
from training.eval_callbacks import (
    Pause,
    build_evaluation,
    build_mlperf_log,
    build_scorer,
    build_target,
    draw_evaluations,
    outcome_of,
)
from training.health import build_health
from training.loggers import WandbMode, build_loggers, reach
from training.optimizer import build_optimizer, build_schedule, total_batches
from training.resume import RunState, check_encoders, check_evaluations, check_validations, kept, open_run
from training.run_callbacks import (
    build_checkpointer,
    build_losses,
    build_profile,
    build_record,
    build_throughput,
    facts_of,
)
from training.run_config import ALIASES, RunConfig, as_tried, build_for_training, resolve
from training.trainer import NonBlockingTrainer
from training.warm_start import load_start
from zoo.mlperf import benchmark_of

gc.freeze()  # what is loaded stays
gc.enable()

DIST_TIMEOUT_SEC = 1800.0

# --- the run ---


def train(config: RunConfig, began: float, uploads: remote.Uploads | None = None) -> dict[str, Any]:
    """Run one resolved configuration, begun at this time, to its end and return the figures of its result line."""
    # Set up: the device, the other ranks, a name that all of them have.
    assert config.precision is not None and config.run_name is not None
    device = build_device(config.precision)
    config, watch = agreement.meet(config, device, DIST_TIMEOUT_SEC)
    config, result = remote.bring_back(config, uploads)
    if result is not None:
        return result

    # Resume: the run's folder is this start's; it resumes from the newest whole checkpoint, or starts from the beginning.
    run = open_run(config)
    with run.or_nothing():
        logged = ranks.on_rank_zero(lambda: reach(config.loggers, run.folder))

        # Networks: all that is frozen or trained, on the device; what else there is of this run agrees with it.
        networks = build_networks(config, run, device)
        given, config, model = config, networks.config, networks.model
        average = EMA(config.ema) if config.ema.enabled else None
        health = build_health(config, watch, model, average)

        # Data: from where the run stands on. No rank begins a batch before all have theirs, or have heard a signal.
        losses = build_losses(config, run.folder, model)
        ready, identity = health.before_saving(losses.settle), kept(networks.identity)
        checkpointer = build_checkpointer(config, run.folder, model, average, identity, ready, run.checkpoint, uploads)
        data = build_batches(config, networks, run.progress, health.noting(checkpointer.all_ready))
        held_out = open_held_out(config, model.family, networks.held_out, networks.stages)

        # Optimizer: with schedule and EMA, brought to where the run stands.
        learning = build_learning(config, model, average, run, epoch_batches=len(data.dataloader))  # type: ignore[arg-type]
        is_over = run.progress.batch >= learning.num_batches
        if result := run.finished(config, is_over=is_over):
            return result
        dist.barrier()  # what one rank refuses is not on record

        # Callbacks: clocks, the record, checkpoints, evaluation, and Composer's Trainer, which calls them.
        throughput = build_throughput(config, networks.cost, networks.sizes, health)
        loader = data.dataloader if isinstance(data.dataloader, Loader) else None
        facts = facts_of(config, networks.cost, model.encoders.fingerprints, networks.identity, networks.sizes)
        gradient_norm = GradientNorm(config.optimizer.clip_norm)
        record = build_record(
            config, facts, given=given, throughput=throughput, gradient_norm=gradient_norm, losses=losses, loader=loader
        )
        record.start(run.progress.batch, images=run.progress.images, began=began, lost=run.lost)
        run.say(record.num_starts)
        measured = None if config.eval.weights == "training" else average
        pause = Pause(throughput, record, checkpointer, measured)
        validation = build_validation(config, model, held_out, networks.held_out, pause)
        samples = build_samples(config, model, pause)
        evaluation = build_evaluation(config, networks.scorer, model, pause)
        target = build_target(config, evaluation, record)
        mlperf_log = build_mlperf_log(config, networks.stages, networks.held_out, record)
        # Composer calls them in this order at each event. Weights that differ are in no record; random numbers are drawn
        # before anybody reads the batch. A batch is recorded before it is in a checkpoint, and saved before it is validated,
        # sampled and evaluated, so that what was killed is repeated. The target needs the newest evaluation.
        profile, randomness = build_profile(config, record, throughput), BatchRandomness(model, config.seed)
        callbacks = [*health.callbacks(record.folder, lambda: throughput.running), profile, randomness, gradient_norm]
        callbacks += [throughput, record, checkpointer, validation, samples, evaluation, target, mlperf_log]
        trainer = build_trainer(config, device, model, data, learning, record, callbacks, logged)
    run.checkpoint = None  # Composer's part is restored too: its file is mapped no longer, and may be pruned
    remote.start(uploads)
    trainer.logger.log_hyperparameters({**as_written(config), "commit": record.environment["commit"]})

    # Fit: to the end, or to the target.
    with page_if_it_fails(record.folder), record.clocked():
        if not (is_over or target.reached):
            fit(trainer, config, checkpointer, mlperf_log)
        elif not target.reached:  # it was stopped between its last checkpoint and its summary
            catch_up(trainer, checkpointer, validation, samples, evaluation)
    if mlperf_log is not None:
        mlperf_log.stop(target.reached, trainer.state.timestamp.sample.value)

    # Summary: the figures of all starts, and what evaluation came to. Loggers have it too, before they are closed.
    is_early = trainer.state.timestamp.batch.value < learning.num_batches
    num_graphs = None if config.compile == "off" else speed.num_graphs()
    record.facts |= {"compiled_graphs": num_graphs, "stopped_early": is_early}
    result = record.finish(outcome_of(config, target, record))
    draw_evaluations(config, record)
    write_page(record.folder)
    end(trainer, loader, result)
    run.release()
    return result


@dataclass(frozen=True)
class Networks:
    """A run's networks on their device, and what was found out in building them."""

    config: RunConfig
    """With the microbatch, and the batch size of evaluations where it is known."""
    model: LatentDiffusion
    scorer: Scorer | None
    cost: Cost
    stages: list[Stage]
    """None for synthetic data."""
    sizes: list[ImageSize] | None
    """(width, height) of the batches' images, where there are several (buckets)."""
    held_out: Stage | None
    """None: no validation."""
    identity: dict[str, Any]
    """What has to be the same in a checkpoint of this run."""


def build_networks(config: RunConfig, run: RunState, device: Device) -> Networks:
    """Build model and evaluation.

    Raises:
        ConfigError: the stage, the checkpoint or the evaluations there are of another run, or not one image fits.
    """
    assert config.precision is not None
    cost = cost_of(config)
    stages = ranks.once_a_machine(config.data.read)
    validation = config.validation
    held_out = ranks.once_a_machine(lambda: validation.held_out.contents) if validation.is_given else None
    agreement.check_stages(config, stages, held_out)
    is_shared = sharding.is_sharded(config)
    model = build_for_training(config, stages, has_denoiser=not is_shared or dist.get_global_rank() == 0)
    sizes = buckets_of(opened(config.data.sources, stages, config.size))
    check_encoders(stages, held_out, model.encoders.fingerprints)
    identity = run.verify(config, stages, model.encoders.fingerprints, denoiser_start=load_start(config, model, run))
    place(model, config, device._device, num_sizes=len(sizes or [1]))  # type: ignore[arg-type]  # set in each kind
    batch_size = config.eval.batch_size or found_batch_size(run.folder)
    config = dataclasses.replace(
        config,
        device_train_microbatch_size=microbatch_of(config, model, cost),
        eval=dataclasses.replace(config.eval, batch_size=batch_size),
    )
    scorer = build_scorer(config, run.folder)
    if scorer is not None:
        settings = {**scorer.settings(config.eval.guidances()[0]), "eval_weights": config.eval.weights}
        check_evaluations(run.folder, run.progress.batch, settings)
    if held_out is not None and config.target.val_loss is not None:
        check_validations(run.folder, run.progress.batch, config.validation.identity_of(held_out))
    return Networks(config, model, scorer, cost, stages, sizes, held_out, identity)


def place(model: LatentDiffusion, config: RunConfig, device: torch.device, num_sizes: int) -> None:
    """Bring a model to the device, as the keys of speed say; of shared weights this rank's part."""
    assert config.precision is not None
    is_shared = sharding.is_sharded(config)
    (model.place_around if is_shared else model.place)(device, config.precision)
    speed.apply(model, config, config.precision, num_sizes=num_sizes)
    if is_shared:
        sharding.shard(model, config.sharding, device, config.precision)


def build_batches(config: RunConfig, networks: Networks, at: Progress, all_ready: Callable[[bool], bool]) -> DataSpec:
    """Build the run's data, from where it stands on. `all_ready`: see stages.loader."""
    data = build_data(
        config.data,
        networks.model.family,
        size=config.size,
        device_batch_size=config.global_batch_size // dist.get_world_size(),
        device=networks.model.device,
        seed=config.seed,
        stages=networks.stages,
        all_ready=all_ready,
    )
    assert isinstance(data.dataloader, Loader | SyntheticBatches)
    if at.batch:
        data.dataloader.resume(at.epoch, at.batch_in_epoch, config.global_batch_size)
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
    of = benchmark_of(config.model.family, config.model.variant)
    schedule = build_schedule(config.schedule, optimizer, of, global_batch_size=batch, num_batches=num_batches)
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
    asked_for_cpu().join()
    late = record.losses.on_their_way
    make = Trainer if late is None else functools.partial(NonBlockingTrainer, losses=late)
    return make(
        model=model,
        train_dataloader=data,
        max_duration=config.max_duration,
        optimizers=learning.optimizer,
        schedulers=learning.schedule,
        step_schedulers_every_batch=True,
        spin_dataloaders=False,  # the loader has been told where to begin
        algorithms=[] if learning.average is None else [learning.average],
        callbacks=[callback for callback in callbacks if callback is not None],
        loggers=build_loggers(config.loggers, config.run_name, record.run_id, record.folder, logged),
        progress_bar=config.loggers.progress_bar,
        device=device,
        precision=composer_precision(device, config.precision),
        device_train_microbatch_size=config.device_train_microbatch_size,
        seed=config.seed,
        run_name=config.run_name,
        dist_timeout=DIST_TIMEOUT_SEC,
    )


def fit(trainer: Trainer, config: RunConfig, checkpointer: Checkpointer, mlperf_log: MLPerfLog | None) -> None:
    """Train. Raises microbatch.OutOfMemory, which says what to try.

    Where the loss does not stay finite the MLPerf log is closed as that of a failed run.
    """
    assert isinstance(config.device_train_microbatch_size, int)  # it has been found
    if_out_of_memory = microbatch.explained(
        config.device_train_microbatch_size,
        config.global_batch_size // dist.get_world_size(),
        savings=savings(config),
        last_checkpoint=checkpointer.newest,
    )
    if_aborted = mlperf_log.aborted_by_divergence(trainer.state) if mlperf_log else contextlib.nullcontext()
    with if_out_of_memory, if_aborted:
        trainer.fit()


def end(trainer: Trainer, loader: Loader | None, result: dict[str, Any]) -> None:
    """Give the loggers the result, and close what is no longer the run: loggers that finish, workers that end."""
    for destination in trainer.logger.destinations:
        if isinstance(destination, Destination):
            destination.log_result(result)
    trainer.close()
    if loader is not None:
        loader.close()


def show(config: RunConfig) -> int:
    """Print a run and its plan, also of one that is refused; rank 0 does. Returns the exit code of one that is not."""
    if dist.get_global_rank() == 0:
        print(plan.shown(config), end="", flush=True)
        published.say(config)
    return 0


@command(__doc__, needs_words=False)
def main(argv: Sequence[str], began: float | None = None) -> int:
    """Read the configuration, run it, print the result line last; rank 0 speaks for all.

    Args:
        began: seconds since 1970, when this start began; None: now.
    """
    began = began or time.time()
    if dist.get_local_rank() < torch.cuda.device_count():  # before a rank opens a context on the first GPU
        torch.cuda.set_device(dist.get_local_rank())
    command_line, debug, resolved = parse_command_line(argv, ALIASES), False, None
    sys.argv[1:] = map(masking.masked, sys.argv[1:])  # W&B keeps them
    try:
        typed = {at.key for at in command_line.assignments}
        config = load(RunConfig, command_line, check=lambda config: check(as_tried(config, typed)[0]))
        config, left_out = as_tried(config, typed)
        debug = config.loggers.debug
        if command_line.print_config:
            return show(config)
        if left_out is not None:
            log.info(left_out)
        config = resolved = resolve(remote.as_begun(config))
        asked_for_cpu()
        with remote.uploading(config) as uploads:
            result = train(config, began, uploads)
    except ConfigError as error:
        if command_line.print_config and error.config is not None:
            show(error.config)
        ranks.abort_all_ranks(str(error), code=2)
        errors.tell(error, debug=debug)
        return 2
    except Exception as error:
        ranks.abort_all_ranks(errors.text_of(error))
        errors.tell(error, debug=debug)
        return 1
    except Stopped as stop:  # all ranks at once
        ranks.be_quiet()
        return int(stop.code)
    except SystemExit as stop:  # a signal before or after the training, or where nothing is saved
        return ranks.stopped(stop, what_is_left(resolved))
    ranks.be_quiet()
    if dist.get_global_rank() == 0:
        if result["images_per_sec"] is None:
            given = f"measure.warmup_batches: of {result['batches']} batches none was measured here after the warm-up"
            log.info(f"{given}. Lower it, or raise max_duration.")
        print(result_line(result), flush=True)
    return 0


if __name__ == "__main__":
    start(functools.partial(main, began=psutil.Process().create_time()))
