"""The main job: configuration -> model, data, optimizer, callbacks -> Trainer -> one result line.

    composer benchmark.py yamls/shapes.yaml                          # a tiny network on a CPU (make demo prepares its data)
    composer benchmark.py yamls/sd2_512_synthetic.yaml               # throughput of SD2 on every GPU of this machine
    composer -n 8 benchmark.py data.remote=s3://bucket/laion data.local=/tmp/laion model.weights=random max_duration=1ep

Values come from the defaults below, then the YAML, then `key=value`; `--print_config` shows the resolved run and what it will
take, wherever it would have to run, and stops. The flags of this benchmark's predecessor (`--batch_size`, `--use_synth_data`,
...) are aliases of keys. With no YAML: SD2 at 512 pixels, global batch 2048, 30 batches.

A run with a name goes on where its newest checkpoint was taken when the same command is given again; one that is finished
says so. Where it writes checkpoints, SIGTERM and SIGUSR1 end it at the next batch edge, after one more if there is time.

Exit code: 0, or 2 when the configuration cannot run (every problem on a line of stderr), 1 when the data cannot be had any
more, the memory was not enough or the run failed otherwise, 128 + signal after a signal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from composer import Logger, Trainer
from composer.utils import dist

import alarm
import curves
import microbatch
import plan
import preflight
import speed
import warm_start
from callbacks.evaluation import Evaluation
from callbacks.mlperf_log import MLPerfLog
from callbacks.profile import Profile
from callbacks.quality_target import TARGET_KEYS, QualityTarget
from callbacks.run_record import RunRecord, found_batch_size, keep_batch_size, result_line
from callbacks.sample_grid import write_grid
from callbacks.throughput import Throughput, peak_tflops
from checkpoints import Checkpointer, restore
from checks import check, cost_of, has_average_on_device, planned_microbatch, ranks_on_device
from config import ConfigError, flat, load, parse_command_line, to_yaml
from copy_stream import CopyStream
from data import Loader, build_data, check_bad_samples
from ema import EMA
from environment import device_name
from fetch import StreamFailure
from loggers import build_loggers
from model import BatchRandomness, LatentDiffusion, build_device, composer_precision
from optim import GradientNorm, build_optimizer, build_schedule, total_batches
from prompts import read_prompts
from quiet_trainer import LateLosses, QuietTrainer
from resume import Begun, begin, check_begun, check_checkpoint, check_encoders, check_evaluations, finished, identity_of
from run_config import ALIASES, NOT_YET, RunConfig, build, resolve
from scoring import Scorer
from stage import Stage, read_stage
from tensors import fingerprint
from zoo import mlperf

DIST_TIMEOUT_SEC = 1800.0

# --- the run ---


def train(config: RunConfig) -> dict[str, Any]:
    """Run one resolved configuration to its end and return the figures of its result line."""
    assert config.precision is not None and config.device_train_microbatch_size is not None

    # Device and ranks.
    device = build_device(config.precision)
    dist.initialize_dist(device, timeout=DIST_TIMEOUT_SEC)
    alarm.listen()
    device_batch = config.global_batch_size // dist.get_world_size()
    run_name = dist.all_gather_object(config.run_name)[0]  # each rank made one up where none was given
    config, folder = dataclasses.replace(config, run_name=run_name), Path(config.run_folder, run_name)

    # Where the run is: at its newest whole checkpoint, or at the beginning.
    begun = begin(folder)

    # Model.
    cost = cost_of(config)
    model = build(config)
    stage = None if config.data.synthetic else read_stage(config.data.location)
    check_encoders(stage, model.encoders.fingerprints)
    start = load_start(config, model, begun)
    identity = {**identity_of(config, stage, model.encoders.fingerprints), "denoiser_start": start}
    check_checkpoint(begun, identity)
    model.place(device._device, config.precision)
    speed.apply(model, config)
    graphs = speed.GraphCounter(config.compile != "off")
    config = dataclasses.replace(config, device_train_microbatch_size=microbatch_of(config, model, cost))
    batch_size = config.eval.batch_size or found_batch_size(folder)
    config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, batch_size=batch_size))
    scorer = build_scorer(config, folder)
    if scorer is not None:
        settings = {**scorer.settings(config.eval.guidances()[0]), "eval_weights": config.eval.weights}
        check_evaluations(folder, begun.progress.batch, settings)

    # Data.
    data = build_data(
        config.data,
        model.family,
        size=config.size,
        device_batch_size=device_batch,
        device=device._device,
        seed=config.seed,
        index_sha256=None if stage is None else stage.index_sha256,
    )
    if config.copy_stream and not config.data.synthetic:
        data.batch_transforms = CopyStream(device._device)
    at = begun.progress
    if at.batch:
        data.dataloader.resume(at.epoch, at.batch_in_epoch, config.global_batch_size)

    # Optimizer and schedule.
    optimizer = build_optimizer(config.optimizer, model, config.global_batch_size)
    num_batches = total_batches(
        config.max_duration, global_batch_size=config.global_batch_size, epoch_batches=len(data.dataloader)
    )
    schedule = build_schedule(
        config.schedule, optimizer, global_batch_size=config.global_batch_size, num_batches=num_batches
    )
    gradient_norm = GradientNorm(config.optimizer.clip_norm)
    average = EMA(config.ema) if config.ema.enabled else None
    if begun.checkpoint is not None:
        restore(begun.checkpoint, model=model, optimizer=optimizer, schedule=schedule, average=average)
    if result := finished(folder, None if at.batch >= num_batches else config.max_duration, config):
        return result

    # Measuring and the record. Throughput closes a window before RunRecord writes it.
    throughput = Throughput(
        config.measure, flops_per_image=cost.flops_per_image, peak=peak_tflops(device_name(), config.precision)
    )
    loader = data.dataloader if isinstance(data.dataloader, Loader) else None
    checkpointer = Checkpointer(
        folder / "checkpoints",
        config.save,
        model=model,
        identity=identity,
        resume_from=begun.checkpoint,
    )
    if loader is not None:
        loader.while_waiting = checkpointer.while_waiting
    record = RunRecord(
        folder,
        to_yaml(config),
        {**facts_of(config, cost, model.encoders.fingerprints), "denoiser_start_fingerprint": start},
        throughput=throughput,
        mean_gradient_norm=gradient_norm.mean,
        bad_samples=loader.bad_samples if loader else None,
        check_bad_samples=lambda bad: check_bad_samples(bad, config.data.max_bad_samples),
        last_checkpoint=lambda: checkpointer.last_full,
        late_losses=LateLosses() if config.late_loss else None,
    )
    checkpointer.before_saving = record.settle
    record.start(at.batch)
    begun.say(record.num_starts)
    if scorer is not None:
        record.facts["points_not_evaluated"] = count_unevaluated(config, at.images, record.evaluations)

    profile = Profile(config.profile, folder, warmup_batches=config.measure.warmup_batches, disturb=throughput.disturb)

    # Evaluation and target.
    evaluation = None if scorer is None else build_evaluation(config, scorer, model, throughput, record, graphs)
    target = QualityTarget(config.target.is_met, lambda: [] if evaluation is None else record.evaluations)
    mlperf_log = build_mlperf_log(config, stage, record)

    # Trainer.
    make_trainer = Trainer
    if record.late_losses is not None:
        make_trainer = functools.partial(QuietTrainer, losses=record.late_losses)
    trainer = make_trainer(
        model=model,
        train_dataloader=data,
        max_duration=config.max_duration,
        optimizers=optimizer,
        schedulers=schedule,
        step_schedulers_every_batch=True,
        spin_dataloaders=False,  # the loader has been told where to begin
        algorithms=[] if average is None else [average],
        callbacks=[
            *([profile] if config.profile.batches else []),
            *(graphs, BatchRandomness(model, config.seed), gradient_norm, throughput, record, checkpointer),
            *([] if evaluation is None else [evaluation, target]),
            *([] if mlperf_log is None else [mlperf_log]),
        ],
        loggers=build_loggers(config.loggers, run_name, record.run_id, folder),
        progress_bar=config.loggers.progress_bar,
        device=device,
        precision=composer_precision(device, config.precision),
        device_train_microbatch_size=config.device_train_microbatch_size,
        seed=config.seed,
        run_name=run_name,
        dist_timeout=DIST_TIMEOUT_SEC,
    )
    begun.checkpoint = None  # Composer's part is restored too: its file is mapped no longer, and may be pruned
    trainer.logger.log_hyperparameters(dataclasses.asdict(config))
    if at.batch < num_batches and not target.reached:
        if_out_of_memory = microbatch.explained(
            config.device_train_microbatch_size,
            device_batch,
            gradient_checkpointing=config.gradient_checkpointing,
            last_checkpoint=lambda: checkpointer.last_full,
        )
        if_aborted = mlperf_log.aborted_by_divergence(trainer.state) if mlperf_log else contextlib.nullcontext()
        with if_out_of_memory, if_aborted:
            trainer.fit()
    elif evaluation is not None and not target.reached:  # it was stopped between its last checkpoint and its summary
        evaluation.catch_up(trainer.state, trainer.logger)
    if mlperf_log is not None:  # before what is no longer the run: loggers that finish, workers that end
        mlperf_log.stop(target.reached, trainer.state.timestamp.sample.value)
    trainer.close()
    if loader is not None:
        loader.close()
    record.facts |= graphs.facts()
    record.facts["stopped_early"] = trainer.state.timestamp.batch.value < num_batches
    result = record.finish(outcome_of(config, target))
    draw_evaluations(config, record)
    begun.release()
    return result


def microbatch_of(config: RunConfig, model: LatentDiffusion, cost: preflight.Cost) -> int:
    """Return how many images a pass take, found where that is asked for. Raises ConfigError: not one fits."""
    if config.device_train_microbatch_size != microbatch.AUTO:
        return planned_microbatch(config, cost)
    columns = model.family.columns(config.data.stage, config.size)
    device_batch = config.global_batch_size // dist.get_world_size()
    try:
        ema = has_average_on_device(config)
        return microbatch.find(model, columns, cost, device_batch, ranks_on_device(), ema=ema)
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def build_scorer(config: RunConfig, folder: Path) -> Scorer | None:
    """Read what evaluations in training need. Raises ConfigError: it cannot be.

    Their batch size is found at the first of them, when all that training keeps is in the memory.
    """
    if config.eval.when != "in_training":
        return None
    try:
        return Scorer(
            config.eval,
            size=config.size,
            seed=config.seed,
            settings={"precision": config.precision, "prediction": config.objective.prediction},
            show_progress=config.loggers.progress_bar,
            found=lambda batch_size: keep_batch_size(folder, batch_size),
        )
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def build_evaluation(
    config: RunConfig,
    scorer: Scorer,
    model: LatentDiffusion,
    throughput: Throughput,
    record: RunRecord,
    graphs: speed.GraphCounter,
) -> Evaluation:
    """Connect scorer, clock, record and the grid of samples."""

    def keep(line: dict[str, Any], logger: Logger) -> None:
        record.add_evaluation(line, logger)
        if dist.get_global_rank() == 0:
            write_grid(record.folder, line["images"], scorer.samples, logger)

    def score() -> dict[str, Any]:
        record.settle()
        with graphs.step("evaluation"):
            return scorer.score(model, config.eval.guidances()[0])

    assert config.eval.every_images is not None
    return Evaluation(
        score,
        every_images=config.eval.every_images,
        with_average=config.eval.weights == "ema",
        clock=throughput.evaluating,
        earlier=lambda: record.evaluations,
        keep=keep,
    )


def count_unevaluated(config: RunConfig, images: int, evaluations: Sequence[Mapping[str, Any]]) -> int:
    """Return how many points before this start were not evaluated in training, and say so: the target may lie there."""
    assert config.eval.every_images is not None
    due = range(config.eval.every_images, images, config.eval.every_images)  # what is owed here and now comes first
    missing = sorted(set(due) - {line["images"] for line in evaluations})
    if missing and dist.get_global_rank() == 0:
        given = (
            f"{len(missing)} of {len(due)} points before {images:,} images were not evaluated (first: {missing[0]:,})"
        )
        found = "A target that is met from here on may have been met before. composer eval.py scores the snapshots there are"
        print(f"eval: {given}. {found}.", file=sys.stderr, flush=True)
    return len(missing)


def build_mlperf_log(config: RunConfig, stage: Stage | None, record: RunRecord) -> MLPerfLog | None:
    """Return what writes the MLPerf log, with what its header says of the run; None where none is wanted."""
    if not config.mlperf.enabled:
        return None
    given, batch, ranks = config.optimizer, config.global_batch_size, dist.get_world_size()
    assert config.eval.prompts is not None and config.eval.every_images is not None
    header = {
        "seed": config.seed,
        "train_samples": 0 if stage is None else stage.num_samples,  # synthetic: drawn, not sampled
        "eval_samples": len(read_prompts(config.eval.prompts, config.eval.num_prompts).prompts),
        "gradient_accumulation_steps": math.ceil(batch / ranks / (config.device_train_microbatch_size or batch)),
        "global_batch_size": batch,
        "number_of_nodes": ranks // dist.get_local_world_size(),
        "accelerators_per_node": dist.get_local_world_size() if torch.cuda.is_available() else 0,
        "opt_name": given.name,
        **dict(zip(("opt_adamw_beta_1", "opt_adamw_beta_2"), given.betas, strict=True)),
        "opt_adamw_epsilon": given.eps,
        "opt_adamw_weight_decay": given.weight_decay,
        "opt_base_learning_rate": given.learning_rate(batch),
        "opt_learning_rate_warmup_steps": config.schedule.num_warmup_batches(batch),
    }
    return MLPerfLog(
        record.folder,
        config.mlperf,
        header,
        every_images=config.eval.every_images,
        in_training=config.eval.when == "in_training",
        evaluations=lambda: record.evaluations,
    )


def draw_evaluations(config: RunConfig, record: RunRecord) -> None:
    """Leave a picture of FID and CLIP score over the images seen in the run's folder, where there are two points at least."""
    if len(record.evaluations) > 1 and dist.get_global_rank() == 0:
        rows = [{"model": config.run_name, **line} for line in record.evaluations]
        curves.draw_over_images(rows, record.folder / "eval.png", dataclasses.asdict(config.target))


def outcome_of(config: RunConfig, target: QualityTarget) -> dict[str, Any]:
    """What the result line says about evaluation: nothing without one; pending where eval.py has yet to score."""
    if config.eval.when == "off":
        return {}
    outcome = target.result()
    if not config.target.is_given:
        return {key: outcome[key] for key in ("fid", "clip")} if config.eval.when == "in_training" else {}
    return outcome if config.eval.when == "in_training" else {**dict.fromkeys(TARGET_KEYS), "target": "pending"}


def load_start(config: RunConfig, model: LatentDiffusion, begun: Begun) -> str | None:
    """Bring the denoiser to where training begins, and tell the user what is worth knowing about a run's weights.

    Returns:
        the fingerprint of the weights that it begins with, None for random ones.
    """
    notes, start = [f"model.weights: {note}" for note in model.encoders.notes], None
    if begun.checkpoint is not None:
        start = begun.checkpoint[1]["identity"].get("denoiser_start")
    elif config.model.denoiser is not None:
        notes += [f"model.denoiser: {note}" for note in warm_start.load(model, config.model.denoiser)]
        start = fingerprint(model.denoiser)
    if config.model.variant == "mlperf":
        notes += [f"model.variant: mlperf, but {text.rstrip('.')}." for text in mlperf.deviations(flat(config))]
    if notes and dist.get_global_rank() == 0:
        print(*notes, sep="\n", file=sys.stderr, flush=True)
    return start


def facts_of(config: RunConfig, cost: preflight.Cost, fingerprints: Mapping[str, str]) -> dict[str, Any]:
    """What summary.json says about a run beside its figures."""
    return {
        "run_name": config.run_name,
        "family": config.model.family,
        "preset": config.model.preset,
        "variant": config.model.variant,
        "stage": config.data.stage,
        "synthetic": config.data.synthetic,
        "image_size": list(config.size),
        "precision": config.precision,
        "global_batch_size": config.global_batch_size,
        "device_train_microbatch_size": config.device_train_microbatch_size,
        "seed": config.seed,
        "max_duration": config.max_duration,
        "ema": config.ema.enabled,
        **{key.name: getattr(config, key.name) for key in dataclasses.fields(speed.SpeedKeys)},
        **{f"{name}_fingerprint": digest for name, digest in fingerprints.items()},
        "trained_parameters": cost.trained_parameters,
        "estimated_mem_gib": cost.memory_gib(
            config.device_train_microbatch_size or 1, ema=has_average_on_device(config)
        ),
    }


def show(config: RunConfig) -> int:
    """Print a run and its plan, also of one that is refused; rank 0 does. Returns the exit code of one that is not."""
    if dist.get_global_rank() == 0:
        ema, room = has_average_on_device(config), preflight.room_of_a_rank(ranks_on_device())
        shown = plan.shown(config, resolve, cost_of, planned_microbatch, room=room, ema_on_device=ema)
        print(shown, end="", flush=True)
    return 0


def main(argv: Sequence[str]) -> int:
    """Read the configuration, run it, print the result line last; rank 0 speaks for all."""
    if dist.get_local_rank() < torch.cuda.device_count():
        # Before anything asks the driver, so that no rank opens a context on the first GPU.
        torch.cuda.set_device(dist.get_local_rank())
    command_line = parse_command_line(argv, ALIASES)
    is_speaker = dist.get_global_rank() == 0
    try:
        config = load(RunConfig, command_line, not_yet=NOT_YET, check=check)
        if command_line.print_config:
            return show(config)
        config = resolve(config)
        result = check_begun(config, Path(config.run_folder, config.run_name or "")) or train(config)
    except ConfigError as error:
        if command_line.print_config and error.config is not None:
            show(error.config)
        alarm.sound(str(error), code=2)
        print(error, file=sys.stderr, flush=True)
        return 2
    except Exception as error:
        is_explained = isinstance(error, StreamFailure | microbatch.OutOfMemory)
        alarm.sound(str(error) if is_explained else f"{type(error).__name__}: {error}")
        if not is_explained:
            raise
        print(error, file=sys.stderr, flush=True)
        return 1
    alarm.be_quiet()
    if is_speaker:
        if result["images_per_sec"] is None:
            given = f"measure.warmup_batches: of {result['batches']} batches none was measured here after the warm-up"
            print(f"{given}. Lower it, or raise max_duration.", file=sys.stderr)
        print(result_line(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
