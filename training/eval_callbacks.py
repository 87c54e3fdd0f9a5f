"""A run's evaluation: its scorer, the callbacks for evaluation and the MLPerf log, and its results at the end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from composer import Logger
from composer.utils import dist

from callbacks.evaluation import Evaluation
from callbacks.mlperf_log import MLPerfLog
from callbacks.quality_target import TARGET_KEYS, QualityTarget
from callbacks.run_record import RunRecord
from callbacks.sample_grid import write_grid
from callbacks.throughput import Throughput
from cli.errors import ConfigError
from cli.log import log
from ema import EMA
from evaluation import plots, unfinished
from evaluation.prompts import read_prompts
from evaluation.scoring import Scorer
from evaluation.unfinished import Parts
from model import LatentDiffusion
from record.config_file import keep_batch_size
from stages.dataset import Stage
from training.checkpoints import Checkpointer
from training.run_config import RunConfig
from training.speed import GraphCounter


def build_scorer(config: RunConfig, folder: Path) -> Scorer | None:
    """Build the scorer of evaluations in training, or None. Raises ConfigError: a file is unusable.

    The batch size is found at the first evaluation, when everything that training needs is in memory.
    """
    if config.eval.when != "in_training":
        return None
    try:
        return Scorer(
            config.eval,
            size=config.size,
            seed=config.seed,
            settings={"precision": config.precision, **config.objective.of_scores()},
            show_progress=config.loggers.progress_bar,
            found=lambda batch_size: keep_batch_size(folder, batch_size),
            parts=Parts(folder / unfinished.NAME, is_alone=True),
        )
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def build_evaluation(
    config: RunConfig,
    scorer: Scorer | None,
    model: LatentDiffusion,
    throughput: Throughput,
    record: RunRecord,
    graphs: GraphCounter,
    checkpointer: Checkpointer,
    average: EMA | None,
) -> Evaluation | None:
    """Connect scorer, clock, record, signals and the sample grid; None if the run is not evaluated in training."""
    if scorer is None:
        return None
    scorer.signal = lambda: checkpointer.signal
    record.facts["points_not_evaluated"] = count_unevaluated(config, throughput.images, record.evaluations)

    def keep(line: dict[str, Any], logger: Logger) -> None:
        record.add_evaluation(line, logger)
        scorer.written()
        if dist.get_global_rank() == 0:
            write_grid(record.folder, line["images"], scorer.samples, logger)

    def score() -> dict[str, Any]:
        record.losses.settle()
        with graphs.step("evaluation"):
            return scorer.score(model, config.eval.guidances()[0])

    assert config.eval.every_images is not None
    return Evaluation(
        score,
        every_images=config.eval.every_images,
        average=average if config.eval.weights == "ema" else None,
        clock=throughput.evaluating,
        earlier=lambda: record.evaluations,
        keep=keep,
        stop=checkpointer.stop_between_batches,
    )


def count_unevaluated(config: RunConfig, images: int, evaluations: Sequence[Mapping[str, Any]]) -> int:
    """Count the evaluation points before this start that were not evaluated, and warn: one may have met the target."""
    assert config.eval.every_images is not None
    due = range(config.eval.every_images, images, config.eval.every_images)  # a point at this batch is evaluated first
    missing = sorted(set(due) - {line["images"] for line in evaluations})
    if missing:
        given = (
            f"{len(missing)} of {len(due)} points before {images:,} images were not evaluated (first: {missing[0]:,})"
        )
        found = "A target that is met from here on may have been met before. composer eval.py scores the snapshots there are"
        log.info(f"eval: {given}. {found}.")
    return len(missing)


def build_mlperf_log(config: RunConfig, stages: Sequence[Stage], record: RunRecord) -> MLPerfLog | None:
    """Build the callback that writes the MLPerf log, with its header; None if no log is wanted."""
    if not config.mlperf.enabled:
        return None
    given, batch, ranks = config.optimizer, config.global_batch_size, dist.get_world_size()
    assert config.eval.prompts is not None and config.eval.every_images is not None
    header = {
        "seed": config.seed,
        "train_samples": sum(stage.num_samples for stage in stages),  # synthetic ones are drawn, not sampled
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
    """Plot FID and CLIP score over the images seen into the run's folder, if there are at least two points."""
    if len(record.evaluations) > 1 and dist.get_global_rank() == 0:
        rows = [{"model": config.run_name, **line} for line in record.evaluations]
        plots.draw_over_images(rows, record.folder / "eval.png", dataclasses.asdict(config.target))


def outcome_of(config: RunConfig, target: QualityTarget) -> dict[str, Any]:
    """Return the result line's keys about evaluation: none without one; pending if eval.py has yet to score."""
    if config.eval.when == "off":
        return {}
    outcome = target.result()
    if not config.target.is_given:
        return {key: outcome[key] for key in ("fid", "clip")} if config.eval.when == "in_training" else {}
    return outcome if config.eval.when == "in_training" else {**dict.fromkeys(TARGET_KEYS), "target": "pending"}
