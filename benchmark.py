"""The main job: configuration -> model, data, optimizer, callbacks -> Trainer -> one result line.

    composer benchmark.py yamls/shapes.yaml                          # a tiny network on a CPU (its data: make miniature)
    composer benchmark.py yamls/sd2_512_synthetic.yaml               # throughput of SD2 on every GPU of this machine
    composer -n 8 benchmark.py data.remote=s3://bucket/laion data.local=/tmp/laion model.weights=random max_duration=1ep

Values come from the defaults, then the YAML, then `key=value`; docs/configuration.md has every key. `--print_config` shows
the resolved run and its plan, wherever it would have to run, and stops. The flags of diffusion-benchmark are aliases of keys:
--batch_size --image_size --remote --local --use_synth_data --model_name --use_ema --wandb_name --wandb_project
--device_train_microbatch_size.
With no YAML: SD2 at 512 pixels, global batch 2048, 30 batches.

A run with a name resumes from its newest checkpoint when the same command is given again; a finished one prints its result.
If it writes checkpoints, Ctrl-C, SIGTERM and SIGUSR1 end it after the current batch, with another checkpoint if time permits.

Exit code: 0, or 2 when the configuration cannot run (every problem on a line of stderr), 1 when the data became unavailable,
the memory was not enough or the run failed otherwise, 128 + signal after a signal.
"""

from __future__ import annotations

import gc

from common import interrupts
from config import load, refuse_early, replace_keys, to_written_dict

if __name__ == "__main__":
    interrupts.print_on_interrupt("benchmark.py: interrupted before it began. The same command starts it again.")
    refuse_early(__file__)
gc.disable()  # during the imports: garbage collection took a quarter of their time

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil
import torch
from composer import Trainer

from callbacks.gradient_norm import GradientNorm
from callbacks.mlperf_log import MLPerfLog
from checkpointing.callback import Checkpointer, StoppedBySignal
from checkpointing.resume import identity_for_checkpoint
from checkpointing.uploads import Uploads, start_uploads, uploading
from common import dist, errors, masking
from common.command import command, start
from common.command_line import parse_command_line
from common.errors import ConfigError
from common.log import log
from ema import EMA
from mds.loader import Loader
from model import BatchRandomness
from preflight import plan
from preflight.checks import check
from ranks import collectives
from run_folder.environment import start_cpu_query
from run_folder.history import result_line
from training import memory, speed
from training.builders import (
    EvalContext,
    advice_after_signal,
    apply_saved_settings,
    build_batches,
    build_checkpointer,
    build_evaluation,
    build_learning,
    build_losses,
    build_mlperf_log,
    build_networks,
    build_profile,
    build_record,
    build_samples,
    build_start_settings,
    build_target,
    build_throughput,
    build_trainer,
    build_validation,
    facts_of,
    folder_of,
    log_downloads,
    measure_step_cost,
    open_held_out,
)
from training.config import ALIASES, RunConfig, drop_keys_of_speed, resolve
from training.finish import catch_up, draw_evaluations, log_next_command, outcome_of, page_if_it_fails, write_page
from training.health import build_health
from training.loggers import Destination, log_config, wandb_mode
from training.start import find_standing, has_separate_folders
from training.trainer import DIST_TIMEOUT_SEC, build_device

gc.freeze()  # never scan the imported modules
gc.enable()

# --- the run ---


def train(requested: RunConfig, began: float, uploads: Uploads | None = None) -> dict[str, Any]:
    """Run one resolved configuration, begun at this time, to its end and return the figures of its result line."""
    # Set up: the device.
    assert requested.precision is not None and requested.run_name is not None
    device = build_device(requested.precision)

    # Resume: all ranks agree, and lock the run's folder; it resumes from the newest whole checkpoint, or from the beginning.
    standing = find_standing(build_start_settings(requested), device, DIST_TIMEOUT_SEC, uploads)
    if standing.run is None:
        return standing.result
    config, run = replace_keys(requested, standing.changes), standing.run
    with run.cleanup_on_error():
        logged = collectives.on_rank_zero(lambda: wandb_mode(config.loggers, run.folder))

        # Model: all networks, on the device, checked against the run's checkpoint and records. `fitted` has the batch sizes
        # that fit this machine.
        cost = measure_step_cost(config)
        networks = build_networks(config, run, device, lambda model: plan.find_microbatch(config, model, cost))
        model, eval_section = networks.model, dataclasses.replace(config.eval, batch_size=networks.eval_batch_size)
        fitted = dataclasses.replace(config, device_train_microbatch_size=networks.microbatch, eval=eval_section)
        average = EMA(config.ema) if config.ema.enabled else None
        health = build_health(config.health, config.sharding, standing.watch, model, average)

        # Data: from the run's progress on. No rank begins a batch before all have theirs, or have heard a signal.
        losses = build_losses(config.data.sources, run.folder, model, is_async=config.async_loss)
        ready, identity = health.before_saving(losses.settle), identity_for_checkpoint(networks.identity)
        checkpointer = build_checkpointer(config, run.folder, model, average, identity, ready, run.checkpoint, uploads)
        data = build_batches(config, networks, run.progress, health.watching(checkpointer.all_ready))
        held_out = open_held_out(config, model.family, networks.held_out, networks.datasets)

        # Optimizer, schedule and EMA: restored to the run's progress.
        learning = build_learning(config, model, average, run, epoch_batches=len(data.dataloader))  # type: ignore[arg-type]
        is_over = run.progress.batch >= learning.num_batches
        if result := standing.find_result(is_over=is_over):
            return result
        dist.barrier()  # nothing is recorded of a start that one rank refuses

        # Callbacks: clocks, the record, checkpoints, evaluation, and Composer's Trainer, which calls them.
        throughput = build_throughput(config.measure, cost, networks.sizes, health)
        loader = data.dataloader if isinstance(data.dataloader, Loader) else None
        facts = facts_of(fitted, networks, cost)
        gradient_norm = GradientNorm(config.optimizer.clip_norm)
        record = build_record(config, fitted, facts, throughput, gradient_norm, losses, loader)
        record.start(run.progress.batch, images=run.progress.images, began=began, lost=run.lost)
        run.log_status(record.num_starts, config.save.describe())
        context = EvalContext(throughput, record, checkpointer, None if config.eval.weights == "training" else average)
        validation = build_validation(fitted, model, held_out, networks.held_out, context)
        samples = build_samples(fitted, model, context)
        grids = not config.samples.is_given  # else they have their own points
        evaluation = build_evaluation(config.eval, networks.scorer, model, context, draws_grids=grids)
        target = build_target(config.target, evaluation, record)
        mlperf_log = build_mlperf_log(fitted, networks.datasets, networks.held_out, record)
        # Composer calls them in this order at each event. Replicas are compared before anything is recorded; random
        # numbers are drawn before the batch is used. A batch is recorded, then saved, then validated, sampled and evaluated:
        # a killed evaluation is repeated. The target needs the newest evaluation.
        profile = build_profile(config.profile, config.measure.warmup_batches, record, throughput)
        randomness = BatchRandomness(model, config.seed)
        callbacks = [
            *health.callbacks(record.folder, lambda: throughput.running_clock),
            profile,
            randomness,
            gradient_norm,
        ]
        callbacks += [throughput, record, checkpointer, validation, samples, evaluation, target, mlperf_log]
        trainer = build_trainer(fitted, device, model, data, learning, record, callbacks, logged)
    run.checkpoint = None  # Composer's state is restored too: the checkpoint is no longer mapped, and may be pruned
    start_uploads(uploads)
    log_config(trainer.logger, {**to_written_dict(fitted), "commit": record.environment["commit"]})

    # Fit: to the end, or to the target.
    with page_if_it_fails(record.folder), record.clock_to_end():
        if not (is_over or target.reached):
            fit(trainer, fitted, checkpointer, mlperf_log)
        elif not target.reached:  # it was stopped between its last checkpoint and its summary
            catch_up(trainer, checkpointer, validation, samples, evaluation)
    if mlperf_log is not None:
        mlperf_log.stop(target.reached, trainer.state.timestamp.sample.value)

    # Summary: the figures of all starts, and what evaluation came to. Loggers have it too, before they are closed.
    is_early = trainer.state.timestamp.batch.value < learning.num_batches
    num_graphs = None if config.compile == "off" else speed.num_graphs()
    record.facts |= {"compiled_graphs": num_graphs, "stopped_early": is_early}
    result = record.finish(outcome_of(config.target, target, record, when=config.eval.when))
    draw_evaluations(record, str(config.run_name), config.target)
    write_page(record.folder)
    log_next_command(record.folder, model.family, config.eval.when)
    end(trainer, loader, result)
    run.release()
    return result


def fit(trainer: Trainer, config: RunConfig, checkpointer: Checkpointer, mlperf_log: MLPerfLog | None) -> None:
    """Train. Raises memory.OutOfMemory, which says what to try.

    Where the loss does not stay finite the MLPerf log is closed as that of a failed run.
    """
    assert isinstance(config.device_train_microbatch_size, int)  # it has been found
    if_out_of_memory = memory.explained(
        config.device_train_microbatch_size,
        config.global_batch_size // dist.get_world_size(),
        savings=plan.savings(config),
        last_checkpoint=checkpointer.newest,
    )
    if_aborted = mlperf_log.aborted_by_divergence(trainer.state) if mlperf_log else contextlib.nullcontext()
    with if_out_of_memory, if_aborted:
        trainer.fit()


def end(trainer: Trainer, loader: Loader | None, result: dict[str, Any]) -> None:
    """Give the loggers the result, and close them and the loader's workers."""
    for destination in trainer.logger.destinations:
        if isinstance(destination, Destination):
            destination.log_result(result)
    trainer.close()
    if loader is not None:
        loader.close()


def show(config: RunConfig) -> int:
    """Print a configuration and its plan on rank 0, even if it is refused. Returns 0, the exit code of --print_config."""
    if dist.get_global_rank() == 0:
        print(plan.format_plan(config), end="", flush=True)
        log_downloads(config)
    return 0


@command(keys=RunConfig, needs_words=False)
def main(argv: Sequence[str], began: float | None = None) -> int:
    """Read the configuration, run it, print the result line last; rank 0 speaks for all.

    Args:
        began: seconds since 1970, when this start began; None: now.
    """
    began = began or time.time()
    if dist.get_local_rank() < torch.cuda.device_count():  # before a rank opens a context on the first GPU
        torch.cuda.set_device(dist.get_local_rank())
    command_line, debug, resolved = parse_command_line(argv, ALIASES), False, None
    sys.argv[1:] = map(masking.mask_secrets, sys.argv[1:])  # W&B keeps them
    try:
        typed = {at.key for at in command_line.assignments}
        config = load(RunConfig, command_line, check=lambda config: check(drop_keys_of_speed(config, typed)[0]))
        config, left_out = drop_keys_of_speed(config, typed)
        debug = config.loggers.debug
        if command_line.print_config:
            return show(config)
        if left_out is not None:
            log.info(left_out)
        if not has_separate_folders(config.save.remote):
            config = apply_saved_settings(config)
        config = resolved = resolve(config)
        start_cpu_query()
        save = config.save
        with uploading(save.remote, folder_of(config), keep=save.keep, patience_sec=save.patience_sec) as uploads:
            result = train(config, began, uploads)
    except ConfigError as error:
        if command_line.print_config and error.config is not None:
            show(error.config)
        collectives.abort_all_ranks(str(error), code=2)
        errors.report_error(error, debug=debug)
        return 2
    except Exception as error:
        collectives.abort_all_ranks(errors.error_text(error))
        errors.report_error(error, debug=debug)
        return 1
    except StoppedBySignal as stop:  # all ranks at once
        collectives.stop_watchdogs()
        return int(stop.code)
    except SystemExit as stop:  # a signal before or after the training, or where nothing is saved
        return collectives.exit_code_for(stop, advice_after_signal(resolved))
    collectives.stop_watchdogs()
    if dist.get_global_rank() == 0:
        if result["images_per_sec"] is None:
            problem = f"measure.warmup_batches: of {result['batches']} batches none was measured here after the warm-up"
            log.info(f"{problem}. Lower it, or raise max_duration.")
        print(result_line(result), flush=True)
    return 0


if __name__ == "__main__":
    start(functools.partial(main, began=psutil.Process().create_time()))
