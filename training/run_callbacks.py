"""The callbacks of every run except evaluation's: clocks, record, profile; and the order of all callbacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer import Callback

from callbacks.evaluation import AtPoints
from callbacks.gradient_norm import GradientNorm
from callbacks.losses import AsyncLosses, Losses
from callbacks.mlperf_log import MLPerfLog
from callbacks.profile import Profile
from callbacks.quality_target import QualityTarget
from callbacks.run_record import RunRecord
from callbacks.stalled_data import StalledData
from callbacks.steady_clock import SteadyClock
from callbacks.stream_losses import StreamLosses
from callbacks.throughput import Throughput, peak_tflops
from cli.limits import ImageSize
from config import flat
from ema import EMA
from model import BatchRandomness, LatentDiffusion
from record.config_file import ConfigFiles
from record.environment import device_name
from stages.loader import Loader
from stages.mixture import names_of
from training import speed
from training.checkpoints import Checkpointer
from training.cost import Cost, has_average_on_device
from training.endings import how_to_resume
from training.health import Health
from training.run_config import RunConfig
from training.uploads import Uploads
from weights.hub_names import parse


def build_throughput(config: RunConfig, cost: Cost, sizes: Sequence[ImageSize] | None, health: Health) -> Throughput:
    """Build the clocks. `sizes`: of the batches' images; None: there is one."""
    peak = peak_tflops(device_name(), config.precision or "fp32")
    flops = None if sizes else cost.flops_per_image
    return Throughput(config.measure, flops_per_image=flops, peak=peak, own_clocks=health.own_clocks.take)


def build_losses(config: RunConfig, folder: Path, model: LatentDiffusion) -> Losses:
    """Build what reads the losses; the model tells those of samples where they come from several streams."""
    sources, streams = config.data.sources, None
    if len(sources) > 1:
        streams = StreamLosses(names_of([source.location or "" for source in sources]), model.device)
        model.on_losses = streams.add
    return Losses(folder / "checkpoints", AsyncLosses() if config.async_loss else None, streams)


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
    """Build what writes a run's checkpoints; the arguments are its own."""
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
    facts: Mapping[str, Any],
    *,
    given: RunConfig,
    throughput: Throughput,
    gradient_norm: GradientNorm,
    losses: Losses,
    loader: Loader | None,
) -> RunRecord:
    """Build the run's record. `facts`: further keys of its summary; `given`: the configuration before values were found."""
    return RunRecord(
        Path(config.run_folder, config.run_name or ""),
        ConfigFiles.of(flat(given), flat(config)),
        facts,
        throughput=throughput,
        gradient_norm=gradient_norm,
        losses=losses,
        samples=loader,
        how={key: facts[key] for key in ("device_train_microbatch_size", *speed.values_of(config))},
        per_device_hour=config.cost.per_device_hour,
    )


def build_profile(config: RunConfig, record: RunRecord, throughput: Throughput) -> Profile | None:
    """Build the callback that profiles steps, if any are wanted."""
    if not config.profile.batches:
        return None
    return Profile(
        config.profile,
        record.folder,
        about=record.about(),
        warmup_batches=config.measure.warmup_batches,
        disturb=throughput.disturb,
    )


def facts_of(
    config: RunConfig,
    cost: Cost,
    fingerprints: Mapping[str, str],
    identity: Mapping[str, Any],
    sizes: Sequence[ImageSize] | None,
) -> dict[str, Any]:
    """Facts about a run in summary.json, beside its measured values."""
    microbatch = config.device_train_microbatch_size
    assert microbatch != "auto"  # it has been found
    kinds = cost.memory_by_kind(microbatch or 1, ema=has_average_on_device(config))
    return {
        "run_name": config.run_name,
        "family": config.model.family,
        "preset": config.model.preset,
        "variant": config.model.variant,
        "stage": config.data.stage,
        "synthetic": config.data.synthetic,
        "image_size": list(config.size),
        **({"bucket_sizes": [list(size) for size in sizes]} if sizes else {}),
        "precision": config.precision,
        "global_batch_size": config.global_batch_size,
        "device_train_microbatch_size": microbatch,
        "seed": config.seed,
        "max_duration": config.max_duration,
        "ema": config.ema.enabled,
        **speed.values_of(config),
        **{f"{name}_fingerprint": digest for name, digest in fingerprints.items()},
        **{f"{key}_name": text for key, text in dataclasses.asdict(config.model).items() if parse(text)},
        "denoiser_start_fingerprint": identity["denoiser_start"],
        "trained_parameters": cost.trained_parameters,
        "optimizer_states": config.optimizer.states,
        "estimated_mem_gib": sum(kinds.values()),
        **{f"estimated_{kind.replace(' ', '_')}_gib": gib for kind, gib in kinds.items()},
    }


def in_order(
    *,
    health: Health,
    profile: Profile | None,
    graphs: speed.GraphCounter,
    randomness: BatchRandomness,
    gradient_norm: GradientNorm,
    throughput: Throughput,
    record: RunRecord,
    checkpointer: Checkpointer,
    validation: AtPoints | None,
    samples: AtPoints | None,
    evaluation: AtPoints | None,
    target: QualityTarget,
    mlperf_log: MLPerfLog | None,
    stalled: StalledData,
) -> list[Callback]:
    """Return a run's callbacks in the order in which Composer calls them at each event.

    What looks after the run comes first: work belongs to the event that the heartbeat has, and weights that differ are in
    no record. Then the seconds of a batch are put right, before anybody reads them. The profile covers the others' work.
    Random numbers are drawn before any callback reads the batch. Gradient norm and clocks come before the record, which
    writes both. A batch is recorded before it is in a checkpoint, and saved before it is validated, sampled and evaluated,
    so that what was killed is repeated. Evaluation is the last of these: the target, which needs the newest, may end the
    run. The MLPerf log needs both.
    """
    found: list[Callback | None] = [*health.callbacks(record.folder, lambda: throughput.running), SteadyClock()]
    found += [profile, graphs, randomness, gradient_norm, throughput, record, checkpointer]
    found += [validation, samples, evaluation]
    has_lines = evaluation is not None or (validation is not None and "val_loss" in target.metrics)
    found += [target if has_lines else None, mlperf_log, stalled]
    return [callback for callback in found if callback is not None]
