"""Record a few steps with torch.profiler, to see where time is spent.

    composer benchmark.py ... profile.batches=3

RUN_FOLDER/RUN_NAME/profile/trace.json.gz    for chrome://tracing or ui.perfetto.dev
                            table.txt        the operators and kernels that take most time themselves

We use torch.profiler, not composer.profiler: the latter restarts its cycles in every epoch, instruments every event of the
run for a trace, and has no table. Rank 0 records.

The profiler slows the batches that it records. The batch before them is its warm-up. Windows of callbacks/throughput.py that
contain any of these batches, or the writing of the trace, are not measured windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Logger, State

from common import dist
from common.files import write_atomic
from common.log import log
from common.value_types import limited

FOLDER = "profile"
NUM_ROWS = 50


@dataclass(frozen=True)
class ProfileConfig:
    """Steps recorded with torch.profiler, outside of the measured windows."""

    batches: int = limited(0, 0)
    """Steps to record, into profile/; 0: none."""
    start_batch: int | None = limited(None, 1)
    """Batches before the first recorded one. null: measure.warmup_batches."""

    def first(self, warmup_batches: int) -> int:
        """Return the number of batches of a start before the first recorded one."""
        return max(1, warmup_batches) if self.start_batch is None else self.start_batch

    def problems(self, num_batches: int | None, warmup_batches: int) -> list[tuple[str, str]]:
        """(key, message) for every invalid value.

        Args:
            num_batches: of the run; None: not known yet.
            warmup_batches: measure.warmup_batches.
        """
        if self.start_batch is not None and not self.batches:
            return [("profile.start_batch", f"{self.start_batch}, but profile.batches=0. Set profile.batches=3.")]
        first = self.first(warmup_batches)
        if self.batches and num_batches is not None and first + self.batches > num_batches:
            problem = f"{self.batches} after {first}, but the run has {num_batches} batches"
            return [("profile.batches", f"{problem}. Lower it or profile.start_batch, or raise max_duration.")]
        return []


class Profile(Callback):
    """Records steps. It has to come before Throughput, whose windows it marks.

    Args:
        config: which steps.
        folder: of the run; a recording replaces that of an earlier start.
        about: what heads the table: which start, machine and code were recorded.
        warmup_batches: measure.warmup_batches.
        mark_unmeasured: marks the current window as not measured.
    """

    def __init__(
        self,
        config: ProfileConfig,
        folder: Path,
        *,
        about: Mapping[str, Any],
        warmup_batches: int,
        mark_unmeasured: Callable[[], None],
    ):
        self.about = dict(about)
        self.first, self.num = config.first(warmup_batches), config.batches
        self.folder = folder / FOLDER
        self.mark_unmeasured = mark_unmeasured
        self.num_batches = 0  # of this start
        self._profiler: torch.profiler.profile | None = None

    @property
    def _is_recording(self) -> bool:
        """True during the batches that the profiler slows, including its warm-up, on every rank."""
        return self.first - 1 <= self.num_batches < self.first + self.num

    def fit_start(self, state: State, logger: Logger) -> None:
        self.about["batches"] = [state.timestamp.batch.value + self.first + n for n in (1, self.num)]

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if not self._is_recording:
            return
        self.mark_unmeasured()
        if self.num_batches == self.first - 1 and dist.get_global_rank() == 0:
            self._profiler = self._begin()

    def _begin(self) -> torch.profiler.profile:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=self.num, repeat=1)
        # acc_events has no effect on a schedule with one cycle; without it torch 2.11 warns about a next cycle.
        profiler = torch.profiler.profile(
            activities=activities, schedule=schedule, on_trace_ready=self._keep, acc_events=True
        )
        profiler.start()
        return profiler

    def batch_end(self, state: State, logger: Logger) -> None:
        was_recording = self._is_recording
        self.num_batches += 1
        if self._profiler is None or not was_recording:
            return
        if state.device.name == "gpu" and self.num_batches in (self.first, self.first + self.num):
            torch.cuda.synchronize()  # so that kernels count for the right batch
        self._profiler.step()
        if self.num_batches == self.first + self.num:
            self._profiler.stop()
            self._profiler = None

    def _keep(self, profiler: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.folder / "trace.json.gz"))
        own_time = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=own_time, row_limit=NUM_ROWS)
        about = "".join(f"{key}: {value}\n" for key, value in self.about.items())
        write_atomic(self.folder / "table.txt", f"{about}\n{table}")

    def fit_end(self, state: State, logger: Logger) -> None:
        if self._profiler is not None:
            self._profiler.on_trace_ready = None  # half a recording is useless
            self._profiler.stop()
            self._profiler = None
        if self.num_batches < self.first + self.num:
            problem = f"{self.num_batches} batches were trained here, {self.first + self.num} would have been needed"
            earlier = f" {self.folder} is of an earlier start, as its table says." if self.folder.is_dir() else ""
            text = f"nothing was recorded: {problem}. Lower profile.start_batch.{earlier}"
            log.info(f"profile: {text}")
