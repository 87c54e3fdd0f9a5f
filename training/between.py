"""A run's validation and sample grids, built: what else is done between batches beside evaluation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from composer import Logger, Trainer
from composer.utils import dist
from torch import Tensor

from callbacks.evaluation import AtPoints
from callbacks.sample_grid import path_of, write_grid
from cli import ranks
from cli.log import log
from data import open_stages
from evaluation.scoring import CPU_BATCH_SIZE
from model import LatentDiffusion
from stages.dataset import Stage
from stages.mixture import opened
from stages.stream import BatchStream
from training.checkpoints import Checkpointer
from training.eval_callbacks import Pause
from training.run_config import RunConfig
from training.samples import draw_samples, read_captions, shown
from training.validation import MAX_CHUNK, Validator, check_apart, check_samples
from zoo.spec import Family, as_size


def open_held_out(
    config: RunConfig, family: Family, held_out: Stage | None, stages: Sequence[Stage]
) -> BatchStream | None:
    """Open the held-out stage, if there is one, and see that it is one. All ranks call it.

    Raises:
        ConfigError, ValueError: some of it is trained on.
        StreamFailure: it cannot be fetched.
    """
    if held_out is None:
        return None
    trained = opened(config.data.sources, stages, config.size)
    for one in trained:
        check_apart(held_out, one.stage)
    source = config.validation.source(config.data, held_out.kind)
    given = opened(source.sources, [held_out], config.size)
    dataset = open_stages(source, family, given, device_batch_size=1, seed=0)  # no batch of its own
    num = min(config.validation.num_samples, held_out.num_samples)
    if config.mlperf.enabled:
        log.info(
            "validation: that none of its samples is trained on is not checked: MLPerf's clock is not running yet."
        )
    else:
        ranks.on_rank_zero(lambda: check_samples(dataset, num, trained))
    return dataset


def build_validation(
    config: RunConfig, model: LatentDiffusion, dataset: BatchStream | None, held_out: Stage | None, pause: Pause
) -> AtPoints | None:
    """Build the callback that validates; None if nothing is held out."""
    if dataset is None or held_out is None:
        return None
    given, record = config.validation, pause.record
    assert isinstance(config.device_train_microbatch_size, int)
    validator = Validator(
        model,
        dataset,
        num_samples=min(given.num_samples, held_out.num_samples),
        chunk=min(config.device_train_microbatch_size, MAX_CHUNK),
        times=given.times,
        signal=lambda: pause.checkpointer.signal,
    )

    def keep(where: dict[str, Any], found: dict[str, Any], logger: Logger) -> None:
        others_sec = sum(line["val_sec"] for line in record.validations)
        others_sec += sum(line["eval_sec"] for line in record.evaluations)
        clock = {"seconds_with_eval": where["seconds"] + others_sec + found["val_sec"]}
        record.add_validation({**where, **clock, **found, **given.identity_of(held_out)}, logger)

    def is_done(batch: int) -> bool:
        return any(line["batch"] == batch for line in record.validations)

    assert given.every_images is not None
    return pause.at_points(
        validator.measure,
        keep,
        every_images=given.every_images,
        from_start=not config.mlperf.enabled,  # MLPerf's clock runs before any data are touched
        is_done=is_done,
        let_go=dataset.let_go,
    )


def build_samples(config: RunConfig, model: LatentDiffusion, pause: Pause) -> AtPoints | None:
    """Build the callback that draws grids, or None. All ranks call it. Raises ValueError: the prompts cannot be read."""
    given, how, folder = config.samples, config.eval, pause.record.folder
    if given.every_images is None:
        return None
    assert isinstance(config.device_train_microbatch_size, int)
    draw = functools.partial(
        draw_samples,
        model,
        read_captions(given.prompts or how.prompts or "")[: how.samples],
        ways=dict(sampler=how.sampler, steps=how.steps, guidance=how.guidances()[0]),
        size=config.size if how.image_size is None else (*as_size(how.image_size), *config.size[2:]),
        seed=config.seed,
        batch_size=how.batch_size or min(CPU_BATCH_SIZE, config.device_train_microbatch_size),
        signal=lambda: pause.checkpointer.signal,
    )
    begun_at, fps = pause.record.begun_at, config.data.fps or model.family.frames_per_sec
    is_drawn = ranks.on_rank_zero(lambda: path_of(folder, pause.throughput.images).is_file())

    def keep(where: dict[str, Any], samples: list[tuple[str, Tensor]], logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            write_grid(folder, where["images"], samples, logger, shown, fps)

    def is_done(batch: int) -> bool:
        return is_drawn and batch == begun_at  # later ones may be of batches that the last start has lost

    return pause.at_points(draw, keep, every_images=given.every_images, from_start=True, is_done=is_done)


def catch_up(trainer: Trainer, checkpointer: Checkpointer, *points: AtPoints[Any] | None) -> None:
    """Do what was due at the end of a run that was stopped between its last checkpoint and its summary."""
    checkpointer.fit_start(trainer.state, trainer.logger)  # a signal is heard here too
    for missed in filter(None, points):
        missed.catch_up(trainer.state, trainer.logger)
