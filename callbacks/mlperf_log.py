"""The MLPerf log of a run: the events that MLPerf's own checkers read, written by rank 0 alone.

RUN_FOLDER/RUN_NAME/mlperf.log has one line per event, in mlperf-logging's format. The order is below. All events after
run_start have samples_count (images seen) in their metadata.

    cache_clear submission_*                                             who submits
    init_start seed train_samples eval_samples ... opt_* init_stop       the run's configuration, before its clock runs
    run_start
    block_start loss lr_abs tracked_stats block_stop                     training, one block up to each evaluation point
    eval_start eval_accuracy (FID) eval_accuracy (CLIP) eval_stop        an evaluation; of flux1 one accuracy, the loss
    run_stop                                                             status: success if the target is met, else aborted
    restart                                                              our own event: a later start of the run

If the run is evaluated during training, run_stop is its end. If it is evaluated afterwards (untimed, as the rules allow),
training leaves the log open. `conclude` closes it with the time of the first snapshot that met the target.

Lines are only appended. Two things are removed: an unfinished line that a killed writer left; and run_stop, if the run is
resumed or more of its points are scored. A restarted run is no result of the closed division; its log says `restart`, and
where. Times never decrease from line to line, except for a run_stop that has its snapshot's time, as the rules require.

Sources: mlcommons/logging at 7bbf7926 (compliance_checker/training_RULESET: common.yaml, and {closed,open}_BENCHMARK.yaml of
stable_diffusion and flux1); the order is that of the submissions to v5.0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from composer import Callback, Logger, State
from filelock import FileLock, Timeout

from checkpointing.files import read_outline
from common import dist
from common.errors import ConfigError
from families.mlperf import Benchmark
from model import AUTOCAST_DTYPES
from run_folder.files import read_summary
from run_folder.mlperf_log import (
    LOG_FILE,
    EventLog,
    close,
    evaluated_points,
    is_begun,
    log_status,
    num_lasting,
    read_events,
    reopen,
)

Line = Mapping[str, Any]

INIT_LIMIT_MIN = {"closed": 30, "open": 240}  # from init_start to init_stop (compliance_checker, common.yaml)
LOCK_TIMEOUT_SEC = 60.0
STATUS = "research"  # submission_status, required by 4.0.0, of a run that nobody has submitted yet
RULESET_WITHOUT_SUBMITTER = "5.0.0"  # the one ruleset that asks for no submitter


@dataclass(frozen=True)
class MLPerfConfig:
    """The MLPerf log."""

    enabled: bool = False
    """Write mlperf.log."""
    division: Literal["closed", "open"] = "open"
    """closed: refuse any constant that differs from the benchmark's."""
    ruleset: Literal["4.0.0", "4.1.0", "5.0.0", "5.1.0", "6.0.0", "6.1.0"] | None = None
    """To 5.0.0: Stable Diffusion; from 5.1.0: FLUX.1. null: the benchmark's newest."""
    org: str | None = None
    """Submitter; required, except by 5.0.0. null: not stated."""
    platform: str | None = None
    """System, such as 8xH200; required, except by 5.0.0. null: not stated."""

    def resolved(self, benchmark: Benchmark) -> MLPerfConfig:
        """Replace null by the newest ruleset."""
        return dataclasses.replace(self, ruleset=self.ruleset or benchmark.newest_ruleset)  # type: ignore[arg-type]

    def problems(self, benchmark: Benchmark) -> list[tuple[str, str]]:
        """(key, message) for every invalid value. `benchmark`: whose log is written."""
        problems, ruleset = [], self.ruleset or benchmark.newest_ruleset
        if ruleset not in benchmark.rulesets:
            known = ", ".join(benchmark.rulesets)
            text = f"{ruleset} has no {benchmark.name}, the benchmark of model.family={benchmark.family}. Possible: {known}."
            problems.append(("mlperf.ruleset", text))
        if not self.enabled:
            return problems
        if importlib.util.find_spec("mlperf_logging") is None:
            text = "true, but the package mlperf-logging is not installed. Install it (requirements.txt), or say false."
            problems.append(("mlperf.enabled", text))
        for key, value in (("org", self.org), ("platform", self.platform)):
            if value is None and ruleset != RULESET_WITHOUT_SUBMITTER:
                alternative = (
                    f", or use mlperf.ruleset={RULESET_WITHOUT_SUBMITTER}"
                    if RULESET_WITHOUT_SUBMITTER in benchmark.rulesets
                    else ""
                )
                text = f"not given; ruleset {ruleset} asks for it. Give it{alternative}."
                problems.append((f"mlperf.{key}", text))
            elif value is not None and not re.fullmatch(r"\w[\w.+ -]*", value):
                text = f"'{value}' cannot be the name of a folder, which it is in a submission. Use letters, digits, . _ - +"
                problems.append((f"mlperf.{key}", text))
        return problems


# --- while the run trains ---


class MLPerfLog(Callback):
    """Writes the log of a run during training. It has to come after the callback of evaluation.

    Args:
        folder: of the run.
        config: the section `mlperf`.
        header: key -> value of the events between init_start and init_stop, seed first.
        benchmark: as submissions name it.
        every_images: images between two evaluation points.
        in_training: the run is evaluated during training, so its result is known when training ends.
        evaluations: those of this run so far, in order.
        began: start of the run, in seconds since 1970; None: the start of this process.
        now: the clock; None: one that only goes forward.
    """

    saved_as = "MLPerfLog"  # in checkpoints

    def __init__(
        self,
        folder: Path,
        config: MLPerfConfig,
        header: Mapping[str, Any],
        *,
        benchmark: str = "stable_diffusion",
        every_images: int,
        in_training: bool,
        evaluations: Callable[[], Sequence[Line]],
        began: float | None = None,
        now: Callable[[], float] | None = None,
    ):
        self.path, self.config, self.header, self.benchmark = folder / LOG_FILE, config, dict(header), benchmark
        self.every_images, self.in_training, self.evaluations = every_images, in_training, evaluations
        self.began = psutil.Process().create_time() if began is None else began
        self.log = EventLog(self.path, now)
        self.is_writer = dist.get_global_rank() == 0
        self._is_open = False
        self._block: tuple[float, int] | None = None  # its start time, and the images then
        self._lr = 0.0
        self._written: set[int] = set()  # images of the evaluations in the log

    def state_dict(self) -> dict[str, Any]:
        """Return a checkpoint's state: the number of events so far."""
        return {"events": num_lasting(self.path)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load nothing: `lost_events` has already compared it."""

    def fit_start(self, state: State, logger: Logger) -> None:
        if self.is_writer:
            self._open(state.timestamp.sample.value)
            self._write_evaluations()  # made at the start, or missing in a killed run's log

    def batch_start(self, state: State, logger: Logger) -> None:
        if self.is_writer and self._block is None:
            images = state.timestamp.sample.value
            self._block = self.log.now(), images
            self.log.event("block_start", "training_step", at=self._block[0], samples_count=images)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self._lr = state.optimizers[0].param_groups[0]["lr"]  # this batch's; at its end the next one's is already set

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.sample.value % self.every_images == 0:
            self._close_block(state)  # before the snapshot and the evaluation of this point

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if self.is_writer:
            self._write_evaluations()

    def fit_end(self, state: State, logger: Logger) -> None:
        self._close_block(state)

    def stop(self, reached: Line | None, images: int) -> None:
        """Close the log now if the run is evaluated during training; else leave it open.

        Args:
            reached: the evaluation that met the target, if any.
            images: seen so far.
        """
        if not (self.is_writer and self.in_training):
            return
        if not self._is_open:  # an earlier process finished training and evaluation, then was killed
            if any(event["key"] == "run_stop" for event in read_events(self.path)):
                return
            self._open(images)
            self._write_evaluations()
        close(self.log, reached, images)

    @contextlib.contextmanager
    def aborted_by_divergence(self, state: State) -> Iterator[None]:
        """Close the log if the loss becomes non-finite: the run has failed, and counts as failed in a submission of ten."""
        try:
            yield
        except ValueError:
            loss = (state.total_loss_dict or {}).get("loss/train/total", 0.0)
            if self.is_writer and self._is_open and not math.isfinite(loss):
                close(self.log, None, state.timestamp.sample.value)
            raise

    def _open(self, images: int) -> None:
        self._is_open = True
        if not is_begun(self.path.parent):
            self.path.unlink(missing_ok=True)  # killed while writing its first lines
            self._begin()
            if not images:
                return  # else its log was removed; the run must not look as if it began here
        events = reopen(self.path)
        # Evaluations after the checkpoint that the run resumes from will be made again.
        self._written = {count for count in evaluated_points(events) if count <= images}
        self.log.event("restart", 1 + sum(event["key"] == "restart" for event in events), samples_count=images)
        log_status(f"restarted at {images:,} images: not a closed-division result; for one, use another run_name")

    def _begin(self) -> None:
        """Write everything up to run_start; init_start has the process's start time."""
        submitter = {"org": self.config.org, "platform": self.config.platform, "status": STATUS}
        submission = {"benchmark": self.benchmark, "division": self.config.division, **submitter}
        self.log.event("cache_clear", False, at=self.began)  # Easel clears no cache: the machine's owner does
        for key, value in submission.items():
            if value is not None:
                self.log.event(f"submission_{key}", value, at=self.began)
        self.log.event("init_start", at=self.began)
        for key, value in self.header.items():
            self.log.event(key, value)
        took_sec, limit = self.log.now() - self.began, INIT_LIMIT_MIN[self.config.division]
        self.log.event("init_stop")
        self.log.event("run_start", samples_count=0)
        over = "" if took_sec < 60 * limit else ": TOO LONG, the checker will refuse this log"
        log_status(f"initialized in {took_sec:.1f} s; the {self.config.division} division allows {limit} min{over}")

    def _close_block(self, state: State) -> None:
        if not self.is_writer or self._block is None:
            return
        (began, before), now, images = self._block, self.log.now(), state.timestamp.sample.value
        self._block = None
        where = {"samples_count": images}
        self.log.event("loss", state.total_loss_dict["loss/train/total"], at=now, **where)
        self.log.event("lr_abs", self._lr, at=now, **where)
        self.log.event("tracked_stats", {"throughput": (images - before) / max(now - began, 1e-3)}, at=now, **where)
        self.log.event("block_stop", "training_step", at=now, **where)

    def _write_evaluations(self) -> None:
        for line in self.evaluations():
            if line["images"] not in self._written:
                self.log.evaluation(
                    line, began=self.log.now() - line["eval_sec"], is_open=self.config.division == "open"
                )
                self._written.add(line["images"])


# --- afterwards ---


@contextlib.contextmanager
def _lock_run(folder: Path) -> Iterator[None]:
    """Lock a run against other processes: another eval.py that finishes now, or a start that resumes training."""
    try:
        with FileLock(folder / ".lock", timeout=LOCK_TIMEOUT_SEC):
            yield
    except Timeout as error:
        problem = f"{folder / LOG_FILE}: another process uses the run, and may be training it; the log is unchanged"
        raise ConfigError(
            [f"{problem}. Run the same command again when it has ended: no score is computed twice."]
        ) from error


def conclude(folder: Path, evaluations: Sequence[Line], reached: Line | None, *, afterwards: bool = False) -> None:
    """Add evaluations made after training to a run's log, and close it with the time of a snapshot.

    If the log was closed like this before, evaluations that it lacks are appended in the order of their images. Its end
    stays the same unless an earlier snapshot met the target. Nothing is done if the run has no log, its training has not
    ended, or training has closed the log.

    Args:
        folder: of the run.
        evaluations: rows of eval.py in the order of their images, with `snapshot`; those after the first that met the
            target are left out.
        reached: the first that met the target; its snapshot gives the time. None: the last one's snapshot does, and the
            run is aborted.
        afterwards: the run is evaluated only after training, so an earlier call of this has closed its log.

    Raises:
        ConfigError: the log is unreadable, or another process is using the run.
    """
    path = folder / LOG_FILE
    if not path.is_file() or not evaluations:
        return
    with _lock_run(folder):
        events = read_events(path)
        stop = next((event for event in events if event["key"] == "run_stop"), None)
        is_over = read_summary(folder).get("target") == "pending"
        if not events or not (is_over if stop is None else afterwards):
            return
        end = reached or evaluations[-1]
        stays = stop is not None and not _needs_another_end(stop["metadata"], reached, end["images"])
        images = stop["metadata"]["samples_count"] if stays else end["images"]
        logged = evaluated_points(events)
        new = [line for line in evaluations if line["images"] <= images and line["images"] not in logged]
        if stays and not new:
            return
        ended = None if stays else _read_write_time(folder / "checkpoints" / end["snapshot"])
        reopen(path)
        log = EventLog(path)
        for line in new:
            log.evaluation(line, began=log.now())  # untimed: eval_sec of eval_stop says how long it took
        if stays:
            status, at = stop["metadata"]["status"], stop["time_ms"] / 1000
            log.event("run_stop", at=at, dated_back=True, status=status, samples_count=images)
            log_status(f"the log has {len(new)} more evaluations; it still ends with {status} at {images:,} images")
        else:
            close(log, reached, end["images"], ended)


def _read_write_time(snapshot: Path) -> float:
    """Return when a snapshot was written, in seconds since 1970. Raises ConfigError: the snapshot does not say."""
    if not isinstance(written := read_outline(snapshot).get("unix_time"), int | float):
        raise ConfigError([f"{snapshot}: does not say when it was written. It was not written by this program."])
    return written


def _needs_another_end(stop: Mapping[str, Any], reached: Line | None, images: int) -> bool:
    """True if a closed log needs another end: the target was met, or met earlier, or a later snapshot missed it too."""
    if stop["status"] == "success":
        return reached is not None and reached["images"] < stop["samples_count"]
    return reached is not None or images > stop["samples_count"]


def describe_computation(precision: str, sharding: str, microbatch: int | None) -> dict[str, Any]:
    """Return what rulesets from 6.1.0 on ask of every log: the lowest precision by kind of work, and how work is divided."""
    compute = "bfloat16" if AUTOCAST_DTYPES.get(precision) is torch.bfloat16 else precision
    # DDP adds up gradients in the type of the weights. Sharded weights are gathered in the type of the computation.
    is_sent_small = precision in AUTOCAST_DTYPES and (precision == "bf16_params" or sharding != "off")
    return {
        "lowest_numerical_precision_in_linear": compute,
        "lowest_numerical_precision_in_attn": compute,
        "lowest_numerical_precision_in_comm": compute if is_sent_small else "fp32",
        **dict.fromkeys([f"{kind}_parallelism" for kind in ("tensor", "pipeline", "context", "expert")], 1),
        "micro_batch_size": microbatch,
        "config_filename": "config.yaml",  # in the run's folder, and in a submission
    }
