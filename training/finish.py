"""The end of a run: what was due, its result, its plots and its page."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer import Trainer

from callbacks.periodic import EveryNImages
from callbacks.quality_target import QualityTarget
from callbacks.run_record import RunRecord
from checkpointing.callback import Checkpointer
from checkpointing.files import WEIGHTS, list_checkpoints
from common import dist
from common.interrupts import CODE
from common.log import log
from evaluation import plots
from evaluation.scorer import TargetConfig
from families.spec import Family
from run_folder.history import TARGET_KEYS, TARGET_METRICS, VAL_LOSS, finite


def catch_up(trainer: Trainer, checkpointer: Checkpointer, *points: EveryNImages[Any] | None) -> None:
    """Do what was due at the end of a run that was stopped between its last checkpoint and its summary."""
    checkpointer.fit_start(trainer.state, trainer.logger)  # a signal is handled here too
    for missed in filter(None, points):
        missed.catch_up(trainer.state, trainer.logger)


def draw_evaluations(record: RunRecord, run_name: str, config: TargetConfig) -> None:
    """Plot FID and CLIP score over the images seen into the run's folder, if there are at least two points."""
    if len(record.evaluations) > 1 and dist.get_global_rank() == 0:
        rows = [{"model": run_name, **line} for line in record.evaluations]
        plots.plot_over_images(rows, record.folder / "eval.png", dataclasses.asdict(config))


def outcome_of(config: TargetConfig, target: QualityTarget, record: RunRecord, *, when: str) -> dict[str, Any]:
    """Return the result line's keys about validation and evaluation; pending if eval.py has yet to score."""
    of_validation = {VAL_LOSS: finite(record.validations[-1][VAL_LOSS])} if record.validations else {}
    if config.val_loss is not None:
        last = record.evaluations[-1] if when == "in_training" and record.evaluations else {}
        scores = {key: last[key] for key in TARGET_METRICS if key in last}
        return of_validation | {key: finite(value) for key, value in target.result().items()} | scores
    if when == "off":
        return of_validation
    outcome = target.result()
    if not config.is_given:
        scores = {key: outcome[key] for key in TARGET_METRICS} if when == "in_training" else {}
        return of_validation | scores
    pending = {**dict.fromkeys(TARGET_KEYS), "target": "pending"}
    return of_validation | (outcome if when == "in_training" else pending)


@contextlib.contextmanager
def page_if_it_fails(folder: Path) -> Iterator[None]:
    """Write the page of a run that fails here, or is interrupted, without logging it: the last line says how the run ended.

    After SIGTERM and SIGUSR1 it is not written: the time until the kill is the checkpoint's.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if not isinstance(error, SystemExit) or error.code == CODE:
            write_page(folder, is_silent=True)
        raise


def write_page(folder: Path, *, is_silent: bool = False) -> None:
    """Write a run's page on rank 0, and print its path. No run fails for its page."""
    if dist.get_global_rank() != 0:
        return
    try:
        from reports import page  # its libraries are no part of training

        path = page.write([folder])
    except Exception as error:  # also a defect of the page: the run's result is more
        log.warning(f"page: cannot be written: {error} To retry: python -m reports.page {folder}")
        return
    if not is_silent:
        log.info(f"page: {path}")


def log_next_command(folder: Path, family: Family, eval_when: str) -> None:
    """Log on rank 0 what is usually done next with a finished run that has snapshots: scoring, or else export."""
    if dist.get_global_rank() != 0 or not list_checkpoints(folder / "checkpoints", WEIGHTS):
        return
    if eval_when == "after":
        log.info(f"next: composer eval.py {folder}")
    elif family.pipeline is not None:  # export.py writes these
        log.info(f"next: python export.py {folder} OUT")
