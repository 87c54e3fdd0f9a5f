"""The MLPerf log of a run: the events that MLPerf's own checkers read, written by rank 0 alone.

RUN_FOLDER/RUN_NAME/mlperf.log, a line an event in mlperf-logging's form. In this order, samples_count (images seen) in the
metadata of all that follows run_start:

    cache_clear submission_*                                             whose log it is
    init_start seed train_samples eval_samples ... opt_* init_stop       the run as it is configured, before its clock runs
    run_start
    block_start loss lr_abs tracked_stats block_stop                     training, a block to each point of evaluation
    eval_start eval_accuracy (FID) eval_accuracy (CLIP) eval_stop        an evaluation
    run_stop                                                             status: success where the target is met, or aborted
    restart                                                              our own: a start that is not the run's first

Where the run is evaluated in training, run_stop is when it ends. Where it is evaluated afterwards, untimed as the rules
allow, training leaves the log open, and `conclude` closes it at the time of the snapshot that met the target first.

A log is only added to. What is taken from it is the end of a line that a killed writer left, and the run_stop of a run that
is started again to go on, or of which more points are scored. A run that was restarted is no result of the closed division:
its log says `restart`, and where. Times never run backwards from line to line, but at a run_stop that is dated back to its
snapshot, as the rules have it.

Sources: mlcommons/logging at 7bbf7926 (compliance_checker/training_{4.0.0,4.1.0,5.0.0}: common.yaml and
{closed,open}_stable_diffusion.yaml); the order is that of the submissions to v5.0.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from composer import Callback, Logger, State
from composer.utils import dist
from filelock import FileLock, Timeout

from cli.errors import ConfigError
from record.checkpoint_files import read as read_checkpoint
from record.files import read_summary
from record.mlperf_events import NAME, EventLog, close, evaluated, is_begun, num_lasting, read_events, reopen, say

Line = Mapping[str, Any]

INIT_LIMIT_MIN = {"closed": 30, "open": 240}  # from init_start to init_stop (compliance_checker, common.yaml)
LOCK_TIMEOUT_SEC = 60.0
STATUS = "research"  # of submission_status, which 4.0.0 asks for: what it is until somebody submits it


@dataclass(frozen=True)
class MLPerfConfig:
    """The MLPerf log."""

    enabled: bool = False
    """Write mlperf.log."""
    division: Literal["closed", "open"] = "open"
    """closed: a run is refused unless every constant is the benchmark's."""
    ruleset: Literal["4.0.0", "4.1.0", "5.0.0"] = "5.0.0"
    """MLPerf's ruleset."""
    org: str | None = None
    """Who submits. 4.0.0 and 4.1.0 ask for it. null: not said."""
    platform: str | None = None
    """Name of the system, for example 8xH200. 4.0.0 and 4.1.0 ask for it. null: not said."""

    def problems(self) -> list[tuple[str, str]]:
        """(key, message) for every invalid value."""
        if not self.enabled:
            return []
        found = []
        if importlib.util.find_spec("mlperf_logging") is None:
            text = "true, but the package mlperf-logging is not installed. Install it (requirements.txt), or say false."
            found.append(("mlperf.enabled", text))
        for key, value in (("org", self.org), ("platform", self.platform)):
            if value is None and self.ruleset != "5.0.0":
                text = f"not given; ruleset {self.ruleset} asks for it. Give it, or use mlperf.ruleset=5.0.0."
                found.append((f"mlperf.{key}", text))
            elif value is not None and not re.fullmatch(r"\w[\w.+ -]*", value):
                text = f"'{value}' cannot be the name of a folder, which it is in a submission. Use letters, digits, . _ - +"
                found.append((f"mlperf.{key}", text))
        return found


# --- while the run trains ---


class MLPerfLog(Callback):
    """Writes the log of a run while it trains. It has to stand behind the callback that evaluates.

    Args:
        folder: of the run.
        config: the section `mlperf`.
        header: key -> value of the events between init_start and init_stop, seed first.
        every_images: between two points of evaluation.
        in_training: the run is evaluated while it trains, so that its end is known when training ends.
        evaluations: those of this run so far, in order.
        began: seconds since 1970; None: when this process did.
        now: the clock.
    """

    saved_as = "MLPerfLog"  # in checkpoints

    def __init__(
        self,
        folder: Path,
        config: MLPerfConfig,
        header: Mapping[str, Any],
        *,
        every_images: int,
        in_training: bool,
        evaluations: Callable[[], Sequence[Line]],
        began: float | None = None,
        now: Callable[[], float] = time.time,
    ):
        self.path, self.config, self.header = folder / NAME, config, dict(header)
        self.every_images, self.in_training, self.evaluations = every_images, in_training, evaluations
        self.began = psutil.Process().create_time() if began is None else began
        self.log = EventLog(self.path, now)
        self.is_writer = dist.get_global_rank() == 0
        self._is_open = False
        self._block: tuple[float, int] | None = None  # when it began, at how many images
        self._lr = 0.0
        self._written: set[int] = set()  # images of the evaluations that the log has

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: how many events there were."""
        return {"events": num_lasting(self.path)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing over: `lost_events` has compared it."""

    def fit_start(self, state: State, logger: Logger) -> None:
        if self.is_writer:
            self._open(state.timestamp.sample.value)
            self._write_evaluations()  # one that was owed, or that the log had not when it was killed

    def batch_start(self, state: State, logger: Logger) -> None:
        if self.is_writer and self._block is None:
            images = state.timestamp.sample.value
            self._block = self.log.now(), images
            self.log.event("block_start", "training_step", at=self._block[0], samples_count=images)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self._lr = state.optimizers[0].param_groups[0]["lr"]  # of this batch: at its end the next one's is set already

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.sample.value % self.every_images == 0:
            self._close_block(state)  # before the snapshot and the evaluation of this point

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if self.is_writer:
            self._write_evaluations()

    def fit_end(self, state: State, logger: Logger) -> None:
        self._close_block(state)

    def stop(self, reached: Line | None, images: int) -> None:
        """Close the log of a run that is evaluated in training, now; leave that of another one open.

        Args:
            reached: the evaluation that met the target.
            images: seen by now.
        """
        if not (self.is_writer and self.in_training):
            return
        if not self._is_open:  # the process before this one trained and evaluated all, and was killed then
            if any(event["key"] == "run_stop" for event in read_events(self.path)):
                return
            self._open(images)
            self._write_evaluations()
        close(self.log, reached, images)

    @contextlib.contextmanager
    def aborted_by_divergence(self, state: State) -> Iterator[None]:
        """Close the log of a run whose loss does not stay finite: it has failed, and counts as that among its ten."""
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
            self.path.unlink(missing_ok=True)  # killed within its first lines
            self._begin()
            if not images:
                return  # else its log was taken away, and it must not look as if it began here
        events = reopen(self.path)
        # What lies behind the checkpoint that the run goes on from comes again.
        self._written = {count for count in evaluated(events) if count <= images}
        self.log.event("restart", 1 + sum(event["key"] == "restart" for event in events), samples_count=images)
        say(f"restarted at {images:,} images: no result of the closed division; for one, take another run_name")

    def _begin(self) -> None:
        """Write everything up to run_start; init_start is when the process began."""
        given = {"org": self.config.org, "platform": self.config.platform, "status": STATUS}
        submission = {"benchmark": "stable_diffusion", "division": self.config.division, **given}
        self.log.event("cache_clear", False, at=self.began)  # Easel clears none: who owns the machine does
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
        say(f"initialised in {took_sec:.1f} s; the {self.config.division} division allows {limit} min{over}")

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
                self.log.evaluation(line, began=self.log.now() - line["eval_sec"])
                self._written.add(line["images"])


# --- afterwards ---


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep others from a run: another eval.py that comes to its end at the same time, or a start that trains it on."""
    try:
        with FileLock(folder / ".lock", timeout=LOCK_TIMEOUT_SEC):
            yield
    except Timeout as error:
        given = f"{folder / NAME}: another process has the run, and may be training it on; the log is left as it is"
        raise ConfigError(
            [f"{given}. Start the same command again when that has ended: no score is made twice."]
        ) from error


def conclude(folder: Path, evaluations: Sequence[Line], reached: Line | None, *, afterwards: bool = False) -> None:
    """Bring evaluations that were made afterwards into the log of a run, and close it at the time of a snapshot.

    A log that was closed so takes those that it has not yet, in the order of their images, behind those that it has: its end
    stays, unless an earlier snapshot has met the target. Nothing is done where the run has no log, its training has not come
    to its end, or that has closed the log.

    Args:
        folder: of the run.
        evaluations: rows of eval.py in the order of their images, `snapshot` among them; those behind the first that met the
            target stay out.
        reached: the first that met the target: its snapshot says when. None: the last one's does, and the run is aborted.
        afterwards: the run is evaluated afterwards alone: what has closed its log is this.

    Raises:
        ConfigError: the log cannot be read, or another process has the run.
    """
    path = folder / NAME
    if not path.is_file() or not evaluations:
        return
    with _alone(folder):
        events = read_events(path)
        stop = next((event for event in events if event["key"] == "run_stop"), None)
        is_over = read_summary(folder).get("target") == "pending"
        if not events or not (is_over if stop is None else afterwards):
            return
        end = reached or evaluations[-1]
        stays = stop is not None and not _ends_elsewhere(stop["metadata"], reached, end["images"])
        images = stop["metadata"]["samples_count"] if stays else end["images"]
        there = evaluated(events)
        new = [line for line in evaluations if line["images"] <= images and line["images"] not in there]
        if stays and not new:
            return
        ended = None if stays else _written_at(folder / "checkpoints" / end["snapshot"])
        reopen(path)
        log = EventLog(path)
        for line in new:
            log.evaluation(line, began=log.now())  # untimed: eval_sec of eval_stop says how long it took
        if stays:
            status, at = stop["metadata"]["status"], stop["time_ms"] / 1000
            log.event("run_stop", at=at, dated_back=True, status=status, samples_count=images)
            say(f"the log has {len(new)} evaluations more; it ends as before: {status} at {images:,} images")
        else:
            close(log, reached, end["images"], ended)


def _written_at(snapshot: Path) -> float:
    """Return when a snapshot was written, seconds since 1970. Raises ConfigError: it does not say."""
    if not isinstance(written := read_checkpoint(snapshot).get("unix_time"), int | float):
        raise ConfigError([f"{snapshot}: does not say when it was written. It was not written by this program."])
    return written


def _ends_elsewhere(stop: Mapping[str, Any], reached: Line | None, images: int) -> bool:
    """True where a closed log is to end elsewhere: the target was met, or met earlier, or a later snapshot missed it too."""
    if stop["status"] == "success":
        return reached is not None and reached["images"] < stop["samples_count"]
    return reached is not None or images > stop["samples_count"]
