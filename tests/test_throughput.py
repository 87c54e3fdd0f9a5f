"""callbacks/throughput.py with an artificial clock: which clock each second counts for, and the results."""

from __future__ import annotations

import pytest
import torch
from composer import State
from composer.devices import DeviceCPU

from callbacks import throughput as module
from callbacks.throughput import MeasureConfig, Throughput, find_most_often_slowest, find_slowest_rank, peak_tflops
from training import health
from training.health import RankTiming


class Clock:
    """perf_counter under control."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def state() -> State:
    return State(model=torch.nn.Linear(1, 1), rank_zero_seed=0, run_name="x", device=DeviceCPU())


class Run:
    """Plays Composer's events: each batch waits, trains, and may be followed by an evaluation and a checkpoint."""

    def __init__(self, monkeypatch, **config):
        self.clock = Clock()
        monkeypatch.setattr(module.time, "perf_counter", self.clock)
        self.callback = Throughput(MeasureConfig(**config), flops_per_image=2e12, peak=100.0)
        self.state = state()
        self.callback.fit_start(self.state, None)

    def event(self, name: str, seconds: float = 0.0) -> None:
        getattr(self.callback, name)(self.state, None)
        self.clock.now += seconds

    def batch(self, *, train: float, wait: float = 0.0, evaluate: float = 0.0, other: float = 0.0) -> None:
        self.event("before_dataloader", wait)
        self.event("after_dataloader", train)
        self.state.timestamp = self.state.timestamp.to_next_batch(samples=8)
        self.event("batch_end", other)
        if evaluate:
            with self.callback.evaluating():
                self.clock.now += evaluate

    def resume(self, batch: int) -> None:
        """Begin where an earlier start has ended."""
        self.state.timestamp = self.state.timestamp.copy(batch=batch, sample=8 * batch)
        self.callback.fit_start(self.state, None)

    def finish(self, *seconds: float) -> dict:
        """The result after batches of so many seconds."""
        for train in seconds:
            self.batch(train=train)
        self.event("epoch_end")
        self.event("fit_end")
        return self.callback.result()


def test_each_second_goes_to_one_clock_and_only_train_feeds_images_per_sec(monkeypatch):
    run = Run(monkeypatch, window_batches=2, warmup_batches=0)
    run.event("epoch_start", 7.0)  # the start of the loader's workers: waiting for data
    run.batch(train=1.0, wait=0.5, evaluate=30.0, other=2.0)
    run.batch(train=3.0, wait=0.5)
    [window] = run.callback.windows
    expected = {"train_sec": 4.0, "data_wait_sec": 8.0, "eval_sec": 30.0, "other_sec": 2.0, "data_wait_frac": 8 / 12}
    assert window.items() >= {**expected, "images_per_sec": 16 / 4.0, "images_per_sec_wall": 16 / 44.0}.items()


def test_the_wall_figure_is_all_images_over_all_time_from_warm_up_to_the_last_checkpoint(monkeypatch):
    """One long evaluation among many windows: the median over windows would not show it."""
    run, taken = Run(monkeypatch, window_batches=2, warmup_batches=2), []
    run.callback.rank_timing = lambda: taken.append(1) or (1.0, 0.5)  # is read once a window
    run.clock.now += 4.0  # an evaluation that was owed, at FIT_START
    for number in range(20):
        run.batch(train=1.0, wait=0.5, evaluate=600.0 if number == 10 else 0.0)
    run.event("epoch_end")
    run.event("fit_end", 7.0)  # the last checkpoint
    with run.callback.evaluating():
        run.clock.now += 5.0
    result = run.callback.result()
    assert result["wall_seconds"] == 4.0 + 20 * 1.5 + 600.0 + 7.0 + 5.0 and len(taken) == 10
    assert result["images_per_sec_wall"] == 160 / 646.0 and result["images_per_sec"] == 8.0


@pytest.mark.parametrize("earlier_sec", [100.0, None])
def test_the_wall_figure_includes_earlier_starts_and_the_cost_of_a_restart(monkeypatch, earlier_sec):
    run = Run(monkeypatch, window_batches=2, warmup_batches=0)
    run.callback.resume_clocks(24, earlier_sec=earlier_sec, setup_sec=30.0)
    run.clock.now += 9.0  # the rest of building
    run.resume(batch=3)
    result = run.finish(1.0, 1.0, 1.0, 1.0)
    figures = result["wall_seconds"], result["images_per_sec_wall"]
    assert figures == ((None, None) if earlier_sec is None else (143.0, 56 / 143.0))


def test_after_a_resume_windows_end_where_they_would_have_ended(monkeypatch):
    edges = [3, 4, 7, 10, 13, 16, 19]
    for first in range(20):
        run = Run(monkeypatch, window_batches=3, warmup_batches=4)
        run.resume(batch=first)
        for _ in range(20 - first):
            run.batch(train=1.0)
        windows, begins = run.callback.windows, [first, *edges]
        assert [window["batch"] for window in windows] == [edge for edge in edges if edge > first]
        # A window with one of the start's first batches is not measured.
        assert [w["warmup"] for w in windows] == [max(b for b in begins if b < w["batch"]) < first + 4 for w in windows]


def test_warmup_batches_are_counted_and_belong_to_no_measured_window(monkeypatch):
    run = Run(monkeypatch, window_batches=2, warmup_batches=3)
    result = run.finish(50.0, 50.0, 50.0, 2.0, 2.0, 2.0, 2.0)
    windows = [(window["window_batches"], window["warmup"]) for window in run.callback.windows]
    assert windows == [(2, True), (1, True), (2, False), (2, False)]
    assert result["images_per_sec"] == 8 / 2.0 and result["seconds"] == 8.0
    assert (result["batches"], result["warmup_batches"], result["windows"]) == (7, 3, 2)
    result = Run(monkeypatch, window_batches=2, warmup_batches=10).finish(1.0, 1.0, 1.0, 1.0)
    assert result["images_per_sec"] is result["mfu"] is result["data_wait_frac"] is None
    assert (result["batches"], result["warmup_batches"], result["windows"]) == (4, 4, 0)


def test_the_result_is_the_median_with_its_spread(monkeypatch):
    run = Run(monkeypatch, window_batches=1, warmup_batches=0)
    for seconds in (1.0, 2.0, 8.0):
        run.batch(train=seconds, wait=1.0)
    expected = {"images_per_sec_min": 1.0, "images_per_sec": 4.0, "images_per_sec_max": 8.0, "data_wait_frac": 3 / 14}
    assert run.finish().items() >= {**expected, "mfu": 4.0 * 2e12 / 100e12, "peak_tflops": 100.0}.items()


def test_a_last_partial_window_counts_only_where_there_is_no_whole_one(monkeypatch):
    run = Run(monkeypatch, window_batches=2, warmup_batches=0)
    assert run.finish(1.0, 1.0, 100.0)["images_per_sec"] == 8.0
    assert [(w["window_batches"], w["unfinished"]) for w in run.callback.windows] == [(2, False), (1, True)]
    assert Run(monkeypatch, window_batches=10, warmup_batches=1).finish(50.0, 2.0, 2.0)["images_per_sec"] == 4.0


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        *(("NVIDIA H200", "bf16", 989.4), ("NVIDIA H100 80GB HBM3", "tf32", 494.7)),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),  # a seventh of the card: names match whole
        *(("CPU x", "fp32", None), ("AMD Instinct MI355X", "tf32", None)),
    ],
)
def test_peaks_are_those_of_the_data_sheets_and_unknown_devices_have_none(device, precision, peak):
    assert peak_tflops(device, precision) == peak
    assert Throughput(MeasureConfig(peak_tflops=5.0), flops_per_image=1.0, peak=peak).peak == 5.0


def test_the_rank_that_took_longest_over_its_own_work_is_named_and_over_a_run_the_one_that_did_most_often():
    hosts = ["a", "b", "b"]
    found = find_slowest_rank([(4.0, 0.5), (9.0, 0.1), (4.2, 0.4)], hosts)
    assert (found["slowest_rank"], found["slowest_host"], found["slowest_rank_in"]) == (1, "b", "forward")
    assert (found["slowest_rank_sec"], found["median_rank_sec"]) == (9.1, pytest.approx(4.6))
    waits = find_slowest_rank([(4.0, 0.1), (4.1, 0.1), (4.0, 3.0)], hosts)
    assert (waits["slowest_rank"], waits["slowest_rank_in"]) == (2, "data")
    assert find_slowest_rank([(4.0, 0.1)], ["a"]) == find_most_often_slowest([]) == {}
    windows = [find_slowest_rank([(4.0, 0.0), (own, 0.0), (4.0, 0.0)], hosts) for own in (8.0, 6.0, 1.0, 10.0)]
    most = {"slowest_rank": 1, "slowest_host": "b", "slowest_rank_windows": 3, "slowest_rank_over_median": 2.0}
    assert find_most_often_slowest([*windows, {"batch": 1}]) == most


@pytest.mark.parametrize(("has_own_forward", "expected"), [(True, (6.0, 0.5)), (False, (0.0, 0.5))])
def test_own_time_is_from_the_first_forward_to_the_last_backward_and_until_the_batch_is_here(
    monkeypatch, has_own_forward, expected
):
    clock, own = Clock(), RankTiming(has_own_forward=has_own_forward)
    monkeypatch.setattr(health.time, "perf_counter", clock)
    microbatch = [("before_forward", 1.0), ("before_backward", 1.0)]
    events = [("before_dataloader", 0.25), ("has_arrived", 40.0), ("has_arrived", 0.0)]  # 40 s: the others' batches
    events += [("after_dataloader", 1.0), *microbatch, *microbatch, ("", 7.0), ("after_train_batch", 0.0)]
    for name, seconds in 2 * events:  # 7 s: gradients of all
        if name:
            getattr(own, name)(*(() if name == "has_arrived" else (state(), None)))
        clock.now += seconds
    assert own.take() == expected and own.take() == (0.0, 0.0)
