"""How fast a run trains: four clocks, read at window edges.

    train        from the arrival of a batch to the end of its step     the only clock that feeds images_per_sec
    data_wait    the host waits for the next batch
    eval         evaluation
    other        checkpoints, logging and everything else between batches

Exactly one clock runs at a time; Composer's events switch it. The device is synchronized only at window edges, so that
measuring does not slow training. Windows end at the same batches in every start of the run. A measured window contains none
of a start's first `measure.warmup_batches` batches and no batch recorded by the profiler. A run's speed is the median over
its measured windows, reported with minimum and maximum. On several ranks, each clock of a window is the slowest rank's, so
images_per_sec errs low. These clocks cannot tell which rank that is: all wait for it in each step.
A window also names the rank that took longest over its own work (training/health.py).

images_per_sec_wall is the run's overall speed: all its images over all four clocks of all its starts, on rank 0. The clocks
run from the first start's first wait for data to the last checkpoint or evaluation. In later starts they run from the
process's beginning, so the cost of a restart (building, repeated batches) is included. Not included are the time between
starts, and a killed process's time after its last line in metrics.jsonl, which is unknown.
"""

from __future__ import annotations

import contextlib
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from composer import Callback, Logger, State

from common import dist
from common.value_types import limited
from ranks import rendezvous

CLOCKS = ("train", "data_wait", "eval", "other")
RANK_TIMINGS = ("forward", "data")
"""What a rank does for itself, before it waits for the others: see training/health.py."""

# Peak TFLOP/s of dense matrix products, by the name that torch.cuda.get_device_name() gives: NVIDIA's and AMD's data sheets,
# without sparsity. Not measured here. A name that is not in the table has no peak: an H100 NVL has five sixths of an H100's.
# summary.json names the peak that MFU used, and `measure.peak_tflops` overrides it.
_A100 = {"bf16": 311.9, "fp16": 311.9, "tf32": 156.0, "fp32": 19.5}
_H100 = {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9}
_NVL = {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0}
_MI300X = {"bf16": 1307.4, "fp16": 1307.4, "tf32": 653.7, "fp32": 163.4}
_B200 = {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1125.0, "fp32": 75.0}
_GB200 = {"bf16": 2500.0, "fp16": 2500.0, "tf32": 1250.0, "fp32": 80.0}
PEAK_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA L40S": {"bf16": 362.1, "fp16": 362.1, "tf32": 183.2, "fp32": 91.6},
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H100 PCIe": {"bf16": 756.4, "fp16": 756.4, "tf32": 378.2, "fp32": 51.2},
    "NVIDIA H100 NVL": _NVL,
    "NVIDIA GH200 480GB": _H100,
    "NVIDIA H200": _H100,
    "NVIDIA H200 NVL": _NVL,
    "NVIDIA B200": _B200,
    "NVIDIA B300 SXM6 AC": _B200,  # its additional operations are in FP4
    "NVIDIA GB200": _GB200,
    "NVIDIA GB300": _GB200,
    "AMD Instinct MI300X": _MI300X,
    "AMD Instinct MI325X": _MI300X,  # the same compute units, with more memory
    "AMD Instinct MI355X": {"bf16": 2516.6, "fp16": 2516.6, "fp32": 157.3},  # CDNA 4 has no TF32
}


@dataclass(frozen=True)
class MeasureConfig:
    """The clocks and their windows."""

    window_batches: int = limited(10, 1)
    """Batches per window; each gives a line of metrics.jsonl."""
    warmup_batches: int = limited(10, 0)
    """First batches of each start, not measured."""
    peak_tflops: float | None = limited(None, 0.0, above=True)
    """Peak TFLOP/s of one device, for MFU. null: from a table of GPUs."""
    expected_images_per_sec: float | None = limited(None, 0.0, above=True)
    """Speed of all ranks, from which --print_config estimates time. null: no estimate."""
    expected_record: str | None = None
    """Record, or the name of a GPU such as H200, from which --print_config estimates speed. null: none."""

    def is_edge(self, batch: int) -> bool:
        """True if a window ends after this many batches of the run; the same in every start."""
        after_warmup = batch - self.warmup_batches
        return after_warmup == 0 or (after_warmup if after_warmup > 0 else batch) % self.window_batches == 0


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Return a known device's peak in TFLOP/s, else None: no MFU is better than one based on a guess."""
    return PEAK_TFLOPS.get(device_name, {}).get("bf16" if precision == "bf16_params" else precision)


class Throughput(Callback):
    """Reads the clocks at window edges; `closed_window` has the last window's values until its batch has ended.

    Args:
        config: window, warm-up and peak.
        flops_per_image: FLOP per image of a training step, see training/memory.py; None: it is not the same for all.
        peak: TFLOP/s that MFU divides by, or None.
        rank_timing: returns what this rank took for itself since the last call: forward passes, waits for its data, seconds.
    """

    def __init__(
        self,
        config: MeasureConfig,
        *,
        flops_per_image: float | None,
        peak: float | None,
        rank_timing: Callable[[], tuple[float, float]] | None = None,
    ):
        self.config = config
        self.rank_timing = rank_timing
        self.flops_per_image = flops_per_image
        self.peak = config.peak_tflops or peak
        self.closed_window: dict[str, Any] | None = None
        self.windows: list[dict[str, Any]] = []
        self.num_batches = 0  # in this process; `windows` has those before a resume too
        self.first_step_seconds: float | None = None  # of this process, with compiling and autotuning
        self.images = 0  # of the run, by now
        self._clocks = dict.fromkeys(CLOCKS, 0.0)
        self._running, self._since = "other", time.perf_counter()
        self._total_sec = 0.0  # of this start, all clocks, on this rank
        self._earlier_sec: float | None = 0.0
        self._is_restart = self._is_stopped = False
        self._window_batches = 0
        self._is_unmeasured = False
        self._images_before = 0

    def resume_clocks(self, images: int, *, earlier_sec: float | None, setup_sec: float) -> None:
        """Resume a run that was started before.

        Args:
            images: of the run so far.
            earlier_sec: all clocks of earlier starts; None: they are lost, so there is no images_per_sec_wall.
            setup_sec: setup time of this start so far.
        """
        self.images, self._earlier_sec, self._is_restart = images, earlier_sec, True
        self._total_sec, self._since = setup_sec, time.perf_counter()

    @property
    def running_clock(self) -> str:
        """Which clock runs."""
        return self._running

    @property
    def start_sec(self) -> float:
        """All clocks of this start so far, on this rank."""
        if not self._is_stopped:
            self._switch(self._running)
        return self._total_sec

    def stop(self) -> None:
        """Stop the clocks: the rest is not part of the run."""
        self._switch(self._running)
        self._is_stopped = True

    # --- which clock runs ---

    def _switch(self, clock: str) -> None:
        now = time.perf_counter()
        self._clocks[self._running] += now - self._since
        self._total_sec += now - self._since
        self._running, self._since = clock, now

    def fit_start(self, state: State, logger: Logger) -> None:
        self.images = self._images_before = state.timestamp.sample.value
        if state.device.name == "gpu":
            torch.cuda.reset_peak_memory_stats()
        self._switch("other")
        self._clocks = dict.fromkeys(CLOCKS, 0.0)
        if not self._is_restart:  # building counts only in a restart, as part of its cost
            self._total_sec = 0.0

    def epoch_start(self, state: State, logger: Logger) -> None:
        self._switch("data_wait")  # the loader's workers start or restart

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self._switch("data_wait")

    def after_dataloader(self, state: State, logger: Logger) -> None:
        self._switch("train")
        self._step_began = self._since

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run the evaluation clock; first wait for the device to finish its training work."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        before = self._running
        self._switch("eval")
        try:
            yield
        finally:
            self._switch(before)

    def mark_unmeasured(self) -> None:
        """Mark the current window as not measured: something slows its batches."""
        self._is_unmeasured = True

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._switch("other")

    def batch_end(self, state: State, logger: Logger) -> None:
        self.num_batches += 1
        if self.num_batches == 1:
            if state.device.name == "gpu":
                torch.cuda.synchronize()
            self.first_step_seconds = time.perf_counter() - self._step_began
        self._window_batches += 1
        self.images = state.timestamp.sample.value
        self.closed_window = None
        if self.config.is_edge(state.timestamp.batch.value):
            self._close_window(state)
        self._switch("other")

    def fit_end(self, state: State, logger: Logger) -> None:
        self.closed_window = None
        if self._window_batches:  # the last, partial window
            self._close_window(state, unfinished=True)

    # --- what they say ---

    def _close_window(self, state: State, *, unfinished: bool = False) -> None:
        if state.device.name == "gpu":
            torch.cuda.synchronize()
        self._switch("other")
        # One gather per window: the slowest rank's clocks, the largest memory use, and each rank's own times.
        timings = (0.0, 0.0) if self.rank_timing is None else self.rank_timing()
        readings = [*self._clocks.values(), read_peak_mem_gib(state.device.name == "gpu"), *timings]
        of_rank = state.device.tensor_to_device(torch.tensor(readings, dtype=torch.float64))
        of_ranks = torch.stack([*dist.all_gather(of_rank)]).cpu()
        *seconds, peak_gib = of_ranks[:, : len(CLOCKS) + 1].amax(dim=0).tolist()
        clocks = dict(zip(CLOCKS, seconds, strict=True))
        images = state.timestamp.sample.value - self._images_before
        self.closed_window = {
            "batch": state.timestamp.batch.value,
            "images": state.timestamp.sample.value,
            "warmup": self.num_batches - self._window_batches < self.config.warmup_batches,
            "profiled": self._is_unmeasured,
            "unfinished": unfinished,
            "window_batches": self._window_batches,
            "images_per_sec": images / clocks["train"],
            "images_per_sec_wall": images / sum(seconds),
            "data_wait_frac": clocks["data_wait"] / (clocks["train"] + clocks["data_wait"]),
            **{f"{name}_sec": value for name, value in clocks.items()},
            "peak_mem_gib": peak_gib,
            **(
                {}
                if self.rank_timing is None
                else find_slowest_rank(of_ranks[:, -len(RANK_TIMINGS) :].tolist(), rendezvous.rank_hosts())
            ),
        }
        self.windows.append(self.closed_window)
        self._switch("other")
        self._clocks = dict.fromkeys(CLOCKS, 0.0)  # the reading itself is part of no window
        self._window_batches = 0
        self._is_unmeasured = False
        self._images_before = state.timestamp.sample.value

    def mfu(self, images_per_sec: float) -> float | None:
        """Return the model FLOPs utilization at a speed of all ranks; None: the peak or the cost of an image is unknown."""
        if self.peak is None or self.flops_per_image is None:
            return None
        return images_per_sec / dist.get_world_size() * (self.flops_per_image / 1e12) / self.peak

    def result(self) -> dict[str, Any]:
        """Return the run's values; speeds are None if no batch was measured."""
        measured = [window for window in self.windows if not (window["warmup"] or window.get("profiled"))]
        # A last, partial window counts only where there is no whole one.
        whole = [window for window in measured if window["window_batches"] == self.config.window_batches] or measured
        speeds = [window["images_per_sec"] for window in whole]
        per_sec = statistics.median(speeds) if speeds else None
        per_device = per_sec / dist.get_world_size() if per_sec else None
        train, wait = (sum(window[f"{clock}_sec"] for window in whole) for clock in ("train", "data_wait"))
        tflop = None if self.flops_per_image is None else self.flops_per_image / 1e12
        wall_sec = None if self._earlier_sec is None else self._earlier_sec + self.start_sec
        return {
            "images_per_sec": per_sec,
            "images_per_sec_min": min(speeds, default=None),
            "images_per_sec_max": max(speeds, default=None),
            "images_per_sec_per_device": per_device,
            "images_per_sec_wall": self.images / wall_sec if wall_sec and self.images else None,
            "mfu": self.mfu(per_sec) if per_sec else None,
            "peak_tflops": self.peak,
            "tflop_per_image": tflop,
            "data_wait_frac": wait / (train + wait) if whole else None,
            "peak_mem_gib": max((window["peak_mem_gib"] for window in self.windows), default=None),
            "batches": max((window["batch"] for window in self.windows), default=0),
            "warmup_batches": sum(window["window_batches"] for window in self.windows if window["warmup"]),
            "windows": len(whole),
            "seconds": train,
            "wall_seconds": wall_sec,
            "first_step_seconds": self.first_step_seconds,
            **find_most_often_slowest(whole),
        }


def find_slowest_rank(of_ranks: Sequence[Sequence[float]], hosts: Sequence[str]) -> dict[str, Any]:
    """Return the rank that took longest over its own work in a window, what it took, and what the median of all did.

    With one rank the result is empty.

    Args:
        of_ranks: per rank, RANK_TIMINGS in seconds.
        hosts: per rank, its machine.
    """
    if len(of_ranks) == 1:
        return {}
    sums = [sum(timings) for timings in of_ranks]
    rank = max(range(len(sums)), key=sums.__getitem__)
    medians = [statistics.median(column) for column in zip(*of_ranks, strict=True)]
    over = [timings - median for timings, median in zip(of_ranks[rank], medians, strict=True)]
    return {
        "slowest_rank": rank,
        "slowest_host": hosts[rank],
        "slowest_rank_sec": sums[rank],
        "median_rank_sec": statistics.median(sums),
        "slowest_rank_in": RANK_TIMINGS[over.index(max(over))],
    }


def find_most_often_slowest(windows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rank that was slowest in most of the windows, in how many, and its time there over the median rank's."""
    named = [window for window in windows if window.get("slowest_rank") is not None and window["median_rank_sec"]]
    if not named:
        return {}
    (rank, host), num = Counter((w["slowest_rank"], w["slowest_host"]) for w in named).most_common(1)[0]
    ratios = [w["slowest_rank_sec"] / w["median_rank_sec"] for w in named if w["slowest_rank"] == rank]
    return {
        "slowest_rank": rank,
        "slowest_host": host,
        "slowest_rank_windows": num,
        "slowest_rank_over_median": statistics.median(ratios),
    }


def read_peak_mem_gib(on_gpu: bool) -> float:
    """Return the peak memory: allocated by torch on a GPU, resident on a CPU (Linux gives KiB)."""
    if on_gpu:
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
