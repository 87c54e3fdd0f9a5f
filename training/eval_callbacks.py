"""What a run does between batches, with training's clock stopped: its evaluation, and what validation and samples share.

Also the MLPerf log, and a run's results at the end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composer import Logger
from composer.utils import dist

from callbacks.evaluation import AtPoints, Found, Line
from callbacks.mlperf_log import MLPerfLog
from callbacks.quality_target import SCORES, TARGET_KEYS, QualityTarget
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
from model import AUTOCAST_DTYPES, LatentDiffusion
from record.config_file import keep_keys
from record.mlperf_events import as_evaluation
from record.summary import VAL_LOSS, finite
from stages.dataset import Stage
from training.checkpoints import Checkpointer
from training.run_config import RunConfig
from training.samples import shown
from zoo import mlperf
from zoo.mlperf_flux import evaluation_frequency


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
            found=lambda batch_size: keep_keys(folder, {"eval.batch_size": batch_size}),
            parts=Parts(folder / unfinished.NAME, is_alone=True),
        )
    except ValueError as error:
        raise ConfigError([str(error)]) from error


@dataclass(frozen=True)
class Pause:
    """What all work between batches has in common."""

    throughput: Throughput
    record: RunRecord
    checkpointer: Checkpointer
    average: EMA | None
    """The weights that are measured; None: the training weights."""

    def at_points(
        self, measure: Callable[[], Found], keep: Callable[[Line, Found, Logger], None], **more: Any
    ) -> AtPoints:
        """Build the callback of such work; the arguments are those of AtPoints."""
        stop = self.checkpointer.stop_between_batches
        more |= {"average": self.average, "clock": self.throughput.evaluating, "stop": stop}
        return AtPoints(self.settled(measure), keep, **more)

    def settled(self, measure: Callable[[], Found]) -> Callable[[], Found]:
        """Return `measure` with all losses read before it.

        It ends when this batch's checkpoint is written: nothing is on record of a state that a kill would lose.
        """

        def settled() -> Found:
            self.record.losses.settle()
            found = measure()
            self.checkpointer.settle()
            return found

        return settled


def build_evaluation(config: RunConfig, scorer: Scorer | None, model: LatentDiffusion, pause: Pause) -> AtPoints | None:
    """Connect scorer, clock, record, signals and the sample grid; None if the run is not evaluated in training."""
    if scorer is None:
        return None
    record = pause.record
    scorer.signal = lambda: pause.checkpointer.signal
    record.facts["points_not_evaluated"] = count_unevaluated(config, pause.throughput.images, record.evaluations)

    def keep(where: Line, score: Line, logger: Logger) -> None:
        evaluations_sec = score["eval_sec"] + sum(line["eval_sec"] for line in record.evaluations)
        where |= {"seconds_with_eval": where["seconds"] + evaluations_sec}
        where |= {
            "eval_weights": "training" if pause.average is None else "ema"
        }  # as configured: the EMA may begin later
        record.add_evaluation(where | score, logger)
        scorer.written()
        if dist.get_global_rank() == 0 and not config.samples.is_given:  # else the grids have their own points
            write_grid(record.folder, where["images"], scorer.samples, logger, shown)

    return pause.at_points(
        lambda: scorer.score(model, config.eval.guidances()[0]),
        keep,
        every_images=config.eval.every_images,
        is_done=lambda batch: any(line["batch"] == batch for line in record.evaluations),
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


def build_target(config: RunConfig, evaluation: AtPoints | None, record: RunRecord) -> QualityTarget:
    """Build the callback that ends a run at its target: by its validations where that is a loss, else by its scores."""

    def lines() -> Sequence[Mapping[str, Any]]:
        if config.target.val_loss is not None:
            return record.validations
        return [] if evaluation is None else record.evaluations

    return QualityTarget(config.target.is_met, lines, config.target.metrics)


def build_mlperf_log(
    config: RunConfig, stages: Sequence[Stage], held_out: Stage | None, record: RunRecord
) -> MLPerfLog | None:
    """Build the callback that writes the MLPerf log, with its header; None if no log is wanted."""
    if not config.mlperf.enabled:
        return None
    given, batch, ranks = config.optimizer, config.global_batch_size, dist.get_world_size()
    assert config.device_train_microbatch_size != "auto"  # it has been found
    benchmark = mlperf.logged_as(config.model.family, config.model.variant)
    is_of_loss, ruleset = "val_loss" in benchmark.target, config.mlperf.ruleset or benchmark.newest
    if is_of_loss:
        assert held_out is not None and config.validation.every_images is not None
        every = config.validation.every_images
        eval_samples = min(config.validation.num_samples, held_out.num_samples)
    else:
        assert config.eval.prompts is not None and config.eval.every_images is not None
        every = config.eval.every_images
        eval_samples = len(read_prompts(config.eval.prompts, config.eval.num_prompts).prompts)
    header = {
        "seed": config.seed,
        "train_samples": sum(stage.num_samples for stage in stages),  # synthetic ones are drawn, not sampled
        "eval_samples": eval_samples,
        "gradient_accumulation_steps": math.ceil(batch / ranks / (config.device_train_microbatch_size or batch)),
        "global_batch_size": batch,  # before evaluation_frequency, which the checker of 6.1.0 compares with it
        **({"evaluation_frequency": evaluation_frequency(every, batch, ruleset)} if is_of_loss else {}),
        "number_of_nodes": ranks // dist.get_local_world_size(),
        "accelerators_per_node": dist.get_local_world_size() if torch.cuda.is_available() else 0,
        "opt_name": given.name,
        **dict(zip(("opt_adamw_beta_1", "opt_adamw_beta_2"), given.betas, strict=True)),
        "opt_adamw_epsilon": given.eps,
        "opt_adamw_weight_decay": given.weight_decay,
        "opt_base_learning_rate": given.learning_rate(batch),
        "opt_learning_rate_warmup_steps": config.schedule.num_warmup_batches(batch),
        **({"opt_gradient_clip_norm": given.clip_norm, **describe_computation(config)} if is_of_loss else {}),
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


def describe_computation(config: RunConfig) -> dict[str, Any]:
    """Return what rulesets from 6.1.0 on ask of every log: the lowest precision by kind of work, and how work is divided."""
    precision = config.precision or "fp32"
    compute = "bfloat16" if AUTOCAST_DTYPES.get(precision) is torch.bfloat16 else precision
    # DDP adds up gradients in the type of the weights. Sharded weights are gathered in the type of the computation.
    is_sent_small = precision in AUTOCAST_DTYPES and (precision == "bf16_params" or config.sharding != "off")
    return {
        "lowest_numerical_precision_in_linear": compute,
        "lowest_numerical_precision_in_attn": compute,
        "lowest_numerical_precision_in_comm": compute if is_sent_small else "fp32",
        **dict.fromkeys([f"{kind}_parallelism" for kind in ("tensor", "pipeline", "context", "expert")], 1),
        "micro_batch_size": config.device_train_microbatch_size,
        "config_filename": "config.yaml",  # in the run's folder, and in a submission
    }


def draw_evaluations(config: RunConfig, record: RunRecord) -> None:
    """Plot FID and CLIP score over the images seen into the run's folder, if there are at least two points."""
    if len(record.evaluations) > 1 and dist.get_global_rank() == 0:
        rows = [{"model": config.run_name, **line} for line in record.evaluations]
        plots.draw_over_images(rows, record.folder / "eval.png", dataclasses.asdict(config.target))


def outcome_of(config: RunConfig, target: QualityTarget, record: RunRecord) -> dict[str, Any]:
    """Return the result line's keys about validation and evaluation; pending if eval.py has yet to score."""
    of_validation = {VAL_LOSS: finite(record.validations[-1][VAL_LOSS])} if record.validations else {}
    if config.target.val_loss is not None:
        last = record.evaluations[-1] if config.eval.when == "in_training" and record.evaluations else {}
        scores = {key: last[key] for key in SCORES if key in last}
        return of_validation | {key: finite(value) for key, value in target.result().items()} | scores
    if config.eval.when == "off":
        return of_validation
    outcome = target.result()
    if not config.target.is_given:
        scores = {key: outcome[key] for key in SCORES} if config.eval.when == "in_training" else {}
        return of_validation | scores
    pending = {**dict.fromkeys(TARGET_KEYS), "target": "pending"}
    return of_validation | (outcome if config.eval.when == "in_training" else pending)
