"""Writes the run record, the files of a run.

RUN_FOLDER/RUN_NAME/config.yaml        the resolved configuration as the run was begun, written once
                    overrides.yaml     what later starts were given otherwise, and what the run has found
                   environment.json    versions, commit, device, machine
                   starts.jsonl        one line per start: time, first batch, hardware; the run's id (first start); how
                                       long it took, if its process was not killed; the error that it ended with
                   metrics.jsonl       one line per window: batch, images, loss (mean since the last edge), clocks, speed,
                                       samples and loss of each of several streams;
                                       one per evaluation (evaluation: true): metrics, and what they depend on;
                                       one per validation (validation: true): loss on the held-out dataset, by bins
                   metrics.cut.jsonl   lines that a resume removed: later batches, and unfinished windows
                   bad_samples.jsonl   number, key and reason of each unusable sample, if there are any
                   summary.json        flat: the result line's keys under the same names, device, versions, commit
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from composer import Callback, Logger, State

from common import dist, masking
from common.errors import error_text
from common.files import write_atomic, write_json
from common.log import log, readable_time, three_digits
from common.value_types import limited
from run_folder.environment import environment
from run_folder.files import (
    BAD_SAMPLES,
    CUT,
    METRICS,
    STARTS,
    ConfigFiles,
    append_lines,
    is_window,
    read_lines,
    remove_left_overs,
    run_id_of,
    to_json_lines,
)
from run_folder.history import COST_KEYS, RESULT_KEYS, cost_so_far, finite, read_history, rounded
from run_folder.metric_names import (
    EVALUATION,
    IMAGES,
    VALIDATION,
    WINDOW,
    bins_named,
    format_scores,
    named,
    streams_named,
)

if TYPE_CHECKING:
    from callbacks.gradient_norm import GradientNorm
    from callbacks.losses import Losses
    from callbacks.throughput import Throughput

SCHEMA = 1
MAX_ERROR_LENGTH = 1000  # characters of an error's text that are kept


@dataclass(frozen=True)
class CostConfig:
    """What a run costs."""

    per_device_hour: float | None = limited(None, 0.0, above=True)
    """Price of one device for an hour, in any currency. null: no cost."""


class SampleCounter(Protocol):
    """The interface of the loader for the record."""

    bad_samples: dict[int, tuple[str, str]]
    """sample id -> (key, reason), of this rank so far."""

    def check(self, bad_samples: Mapping[int, tuple[str, str]]) -> None:
        """Raise ValueError if these unusable samples of all ranks are too many."""


class RunRecord(Callback):
    """Writes the record on rank 0: a line per window, a line per evaluation, and the summary.

    Args:
        folder: of this run; created by `start`.
        keys: writes the configuration's files.
        facts: further keys of summary.json (device, image_size, stage, preset, ...).
        throughput: the callback that closes windows; it has to come before this one.
        gradient_norm: the window's gradient norms, read and reset here; it has to come before this one.
        losses: of every batch; stops the run if one is not finite.
        samples: the loader, which counts this rank's unusable samples and knows the limit; None: synthetic data.
        speed_settings: other settings that affect speed (the keys of speed, the microbatch size); a resumed run may change
            them.
        per_device_hour: price of a device for an hour, which holds for all starts; None: there is no cost.
        logs_windows: log a line per window and evaluation, where no progress bar shows the run.

    `evaluations`, `validations`: those of this run so far, in order, the same on all ranks.
    """

    saved_as = "RunRecord"  # in checkpoints

    def __init__(
        self,
        folder: Path,
        keys: ConfigFiles,
        facts: Mapping[str, Any],
        *,
        throughput: Throughput,
        gradient_norm: GradientNorm,
        losses: Losses,
        samples: SampleCounter | None,
        speed_settings: Mapping[str, Any] | None = None,
        per_device_hour: float | None = None,
        logs_windows: bool = False,
    ):
        self.folder = folder
        self.keys = keys
        self.facts = dict(facts)
        self.throughput = throughput
        self.gradient_norm = gradient_norm
        self.losses = losses
        self.samples = samples
        self.speed_settings = dict(speed_settings or {})
        self.per_device_hour = per_device_hour
        self.logs_windows = logs_windows
        self.run_id = ""
        self.num_starts = 0
        self.all_bad_samples: dict[int, tuple[str, str]] = {}
        self.evaluations: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []
        self.loss: float | None = None
        self._batch = 0
        self._last_edge = 0
        self._num_lines = 0
        self._starts: list[dict[str, Any]] = []
        self.begun_at = 0
        self._lr: float | None = None
        self._is_writer = dist.get_global_rank() == 0

    def start(self, batch: int, *, images: int = 0, began: float | None = None, lost: Collection[str] = ()) -> None:
        """Begin or resume the record at this batch. Rank 0 cuts later lines off metrics.jsonl and keeps them elsewhere.

        Args:
            images: at this batch.
            began: when this start began, in seconds since 1970; None: now.
            lost: files with missing parts (run_folder.files.lost_history), named in all summaries from now on.

        Raises:
            ConfigError: an existing file is unreadable; nothing is written then.
            OSError: a file cannot be written.
        """
        self.environment = environment()
        self.begun_at = batch
        if self._is_writer:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_left_overs(self.folder)
            names = (STARTS, BAD_SAMPLES, METRICS)
            earlier, bad, metrics = (read_lines(self.folder / name) for name in names)  # before writing anything
            self.num_starts = max((line.get("start", 1) for line in [*earlier, *metrics]), default=0) + 1
            self.run_id = run_id_of(self.folder) or uuid.uuid4().hex[:8]
            start = {"start": self.num_starts, "run_id": self.run_id, "unix_time": time.time(), "batch": batch}
            where = {key: self.environment[key] for key in ("device", "num_devices", "commit")}
            this_start = {**start, **where, "how": self.speed_settings, **({"lost": list(lost)} if lost else {})}
            self.keys.write(self.folder)  # first: a folder without it is not a run
            self._starts = [*earlier, this_start]
            write_atomic(self.folder / STARTS, to_json_lines(self._starts))
            write_json(self.folder / "environment.json", {"schema": SCHEMA, **self.environment})
            (self.folder / "summary.json").unlink(missing_ok=True)  # it would mark the run as finished
            if earlier or batch:
                earlier_sec = None if {STARTS, METRICS} & set(self.lost) else read_history(self.folder).seconds
                setup_sec = 0.0 if began is None else max(0.0, time.time() - began)
                self.throughput.resume_clocks(images, earlier_sec=earlier_sec, setup_sec=setup_sec)
            lines = self._cut_back(lambda line: line["batch"] <= batch)
            self._num_lines = len(lines)
            self.evaluations = [line for line in lines if line.get("evaluation")]
            self.validations = [line for line in lines if line.get("validation")]
            windows = [line for line in lines if is_window(line)]
            same = {e["start"] for e in earlier if self._has_speed_of(e)}
            self.throughput.windows = [line for line in windows if line.get("start") in same]
            self.loss = windows[-1]["loss"] if windows else None
            self._last_edge = max((line["batch"] for line in windows if not line.get("unfinished")), default=0)
            if bad:
                # Without an unfinished line of a killed writer.
                write_atomic(self.folder / BAD_SAMPLES, to_json_lines(bad))
            for line in bad:
                self.all_bad_samples[line["sample"]] = (line["key"], line["reason"])
        shared = [(self.all_bad_samples, self._last_edge, self.evaluations, self.validations)]
        dist.broadcast_object_list(shared)
        # All ranks need the same data to decide on the limit of unusable samples, on the target, and what is done.
        self.all_bad_samples, self._last_edge, self.evaluations, self.validations = shared[0]

    @property
    def lost(self) -> list[str]:
        """The files in which any start of this run found a part missing."""
        return sorted({str(name) for start in self._starts for name in start.get("lost", [])})

    def about(self) -> dict[str, Any]:
        """Describe this process: start, machine, code and keys of speed."""
        return {
            "start": self.num_starts,
            **{key: self.environment[key] for key in ("device", "commit")},
            **self.speed_settings,
        }

    def _has_speed_of(self, start: Mapping[str, Any]) -> bool:
        """True if an earlier start used the same machine and keys of speed, so that their speeds can be combined."""
        is_same = all(start[key] == self.environment[key] for key in ("device", "num_devices"))
        return is_same and start["how"] == self.speed_settings

    def _cut_back(self, is_kept: Callable[[Mapping[str, Any]], bool]) -> list[dict[str, Any]]:
        """Keep and return some lines of metrics.jsonl; move the others to metrics.cut.jsonl."""
        path, lines = self.folder / METRICS, read_lines(self.folder / METRICS)
        remaining, cut = [line for line in lines if is_kept(line)], [line for line in lines if not is_kept(line)]
        if cut:
            append_lines(self.folder / CUT, cut)
        if path.exists():
            write_atomic(path, to_json_lines(remaining))  # drops an unfinished line of a killed writer too
        return remaining

    def state_dict(self) -> dict[str, Any]:
        """Return the losses since the last edge, up to this batch, and the numbers of lines and starts."""
        streams = self.losses.stream_losses
        return {
            "losses": list(self.losses.window_losses),
            **({} if streams is None else {"streams": streams.sums.tolist()}),
            "batch": self._batch,
            "lines": self._num_lines,
            "starts": self.num_starts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the losses, so that the next line's mean includes every batch since the last edge."""
        num = max(0, state["batch"] - self._last_edge)  # a line may have been written after the checkpoint
        self.losses.restart(state["losses"][len(state["losses"]) - min(num, len(state["losses"])) :])
        if self.losses.stream_losses is not None and self.losses.window_losses:
            self.losses.stream_losses.sums = torch.tensor(state["streams"], dtype=torch.float64)
        if not self.losses.window_losses:
            self.gradient_norm.restart()

    def fit_start(self, state: State, logger: Logger) -> None:
        if self._is_writer:  # finish a window that an earlier, shorter training closed
            self._num_lines = len(self._cut_back(lambda line: not line.get("unfinished")))
            self.throughput.windows = [line for line in self.throughput.windows if not line.get("unfinished")]

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self._lr = state.optimizers[0].param_groups[0]["lr"]  # this batch's; at its end the next one's is already set

    def batch_end(self, state: State, logger: Logger) -> None:
        self._batch = state.timestamp.batch.value
        self.losses.batch_end(state, logger)
        if self.throughput.closed_window is not None:
            self._write_window(state, logger, self.throughput.closed_window)

    def fit_end(self, state: State, logger: Logger) -> None:
        if self.throughput.closed_window is not None:
            self._write_window(state, logger, self.throughput.closed_window)

    def _write_window(self, state: State, logger: Logger, window: Mapping[str, Any]) -> None:
        self.losses.settle()
        self._gather_bad_samples()
        self.loss, streams = self.losses.mean(), self.losses.stream_losses
        of_streams = {} if streams is None else {"streams": streams.line()}
        if not window["unfinished"]:
            self.losses.restart()
            self._num_lines += 1
        line = {
            "schema": SCHEMA,
            "start": self.num_starts,
            "start_sec": self.throughput.start_sec,
            **window,
            "loss": self.loss,
            **of_streams,
            "lr": self._lr,
            "gradient_norm": self.gradient_norm.mean(),
            "bad_samples": len(self.all_bad_samples),
        }
        if not window["unfinished"]:
            self.gradient_norm.restart()
        if self._is_writer:
            append_lines(self.folder / METRICS, [{key: finite(value) for key, value in line.items()}])
        logger.log_metrics(named(WINDOW, line) | streams_named(line))
        if self.logs_windows:
            log.info(f"train: {self._describe(line, state)}")

    def _describe(self, line: Mapping[str, Any], state: State) -> str:
        """Describe a window in one line. The time left is that of the whole duration; a target may end the run earlier."""
        elapsed, images = state.get_elapsed_duration(), line["images"]
        elapsed_frac = elapsed.value if elapsed is not None else 0.0
        num_steps = f" of {round(line['batch'] / elapsed_frac):,}" if elapsed_frac else ""
        parts = [f"step {line['batch']:,}{num_steps}", f"{images:,} images"]
        parts += [] if self.loss is None else [f"loss {self.loss:.4g}"]
        speed, wall_speed = line["images_per_sec"], line["images_per_sec_wall"]
        if first_step_sec := self._long_first_step_sec(line):  # it compiled: the other steps tell the speed
            others, train_sec = 1.0 - 1.0 / line["window_batches"], line["train_sec"]
            wall_sec = train_sec * speed / wall_speed
            speed *= others * train_sec / (train_sec - first_step_sec)
            wall_speed *= others * wall_sec / (wall_sec - first_step_sec)
            parts.append(f"{readable_time(first_step_sec)} for the first step")
        parts.append(f"{three_digits(speed)} images/s")
        mfu = self.throughput.mfu(speed)
        parts += [] if mfu is None else [f"MFU {mfu:.1%}"]
        parts.append(f"{line['peak_mem_gib']:.1f} GiB")
        if 0.0 < elapsed_frac < 1.0:
            left_sec = images * (1.0 / elapsed_frac - 1.0) / wall_speed
            parts += [f"{readable_time(left_sec)} left"] if left_sec >= 1.0 else []
        return ", ".join(parts)

    def _long_first_step_sec(self, line: Mapping[str, Any]) -> float | None:
        """Return what this process's first step took, if it is most of this window's time."""
        first_step_sec, train_sec = self.throughput.first_step_seconds, line["train_sec"]
        is_first = self.throughput.num_batches == line["window_batches"] > 1
        return first_step_sec if is_first and first_step_sec and train_sec / 2 < first_step_sec < train_sec else None

    def add_evaluation(self, line: Mapping[str, Any], logger: Logger) -> None:
        """Record an evaluation; all ranks call it with the same line."""
        self.evaluations.append(self._added("evaluation", line))
        logger.log_metrics({IMAGES: line["images"], **named(EVALUATION, line)})

    def add_validation(self, line: Mapping[str, Any], logger: Logger) -> None:
        """Record a validation; all ranks call it with the same line."""
        self.validations.append(self._added("validation", line))
        losses = named(VALIDATION, line) | bins_named(line["val_loss_bins"])
        logger.log_metrics({IMAGES: line["images"], **losses})

    def _added(self, kind: str, line: Mapping[str, Any]) -> dict[str, Any]:
        """Add a line that is no window's to the record, and return it whole."""
        whole = {"schema": SCHEMA, "start": self.num_starts, "start_sec": self.throughput.start_sec, kind: True, **line}
        self._num_lines += 1
        if self._is_writer:
            append_lines(self.folder / METRICS, [{key: finite(value) for key, value in whole.items()}])
        if self.logs_windows:
            text = ", ".join([f"{line['images']:,} images", *format_scores(line)])
            log.info(f"{kind}: {text}")
        return whole

    def _gather_bad_samples(self) -> None:
        """Gather all ranks' unusable samples once per window, so that all ranks decide the same."""
        if self.samples is None:
            return
        known = len(self.all_bad_samples)
        for of_rank in dist.all_gather_object(dict(self.samples.bad_samples)):
            self.all_bad_samples.update(of_rank)
        if self._is_writer and len(self.all_bad_samples) > known:
            new = list(self.all_bad_samples.items())[known:]
            lines = ({"sample": sample, "key": key, "reason": reason} for sample, (key, reason) in new)
            append_lines(self.folder / BAD_SAMPLES, lines)
            key, reason = new[0][1]
            log.info(f"data: {len(new)} samples could not be used, e.g. {masking.to_printable(key)}: {reason}")
        self.samples.check(self.all_bad_samples)

    @contextlib.contextmanager
    def clock_to_end(self) -> Iterator[None]:
        """Stop the clocks at the end of the context, even after an error, and record both."""
        try:
            yield
        except Exception as error:
            if self._is_writer:
                self._starts[-1]["failed"] = masking.mask_secrets(error_text(error))[:MAX_ERROR_LENGTH]
            raise
        finally:
            self.throughput.stop()
            if self._is_writer:
                self._starts[-1]["seconds"] = self.throughput.start_sec
                with contextlib.suppress(OSError):  # a full disk is reported by the next write, or has ended the run
                    write_atomic(self.folder / STARTS, to_json_lines(self._starts))

    def finish(self, outcome: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Write summary.json and return the result line's values, rounded as in both.

        Args:
            outcome: further keys of a run with a target or with evaluations.
        """
        if self.losses.window_losses:  # batches that no window of this start has closed
            self.loss = self.losses.mean()
        figures = {**self.throughput.result(), "loss": self.loss}
        figures["batches"] = max(figures["batches"], self.begun_at)
        result = {key: rounded(figures[key]) for key in RESULT_KEYS}
        if self._is_writer:
            figures |= cost_so_far(self.folder, self.per_device_hour, self.lost)
        rest = {key: rounded(value) for key, value in figures.items() if key not in result}
        summary = {
            "schema": SCHEMA,
            **result,
            **rest,
            **(outcome or {}),  # not rounded: it is compared with a target again
            "bad_samples": len(self.all_bad_samples),
            "starts": self.num_starts,
            "history_lost": self.lost,
            **{key: rounded(value) for key, value in self.facts.items()},
            **self.environment,
        }
        if self._is_writer:
            write_json(self.folder / "summary.json", summary)
        price = {key: rest[key] for key in COST_KEYS} if "cost" in rest else {}
        return result | {key: rounded(value) for key, value in (outcome or {}).items()} | price
