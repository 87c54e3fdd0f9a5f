"""callbacks/throughput.py on a clock of our own: what each second is counted as, and what the result makes of it."""

from __future__ import annotations

import pytest
from composer import State
from composer.devices import DeviceCPU

from callbacks import throughput as module
from callbacks.throughput import MeasureConfig, Throughput, peak_tflops


class Clock:
    """perf_counter under control."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Run:
    """Plays Composer's events: each batch waits, trains, and may be followed by an evaluation and a checkpoint."""

    def __init__(self, monkeypatch, **config):
        import torch

        self.clock = Clock()
        monkeypatch.setattr(module.time, "perf_counter", self.clock)
        self.callback = Throughput(MeasureConfig(**config), flops_per_image=2e12, peak=100.0)
        self.state = State(model=torch.nn.Linear(1, 1), rank_zero_seed=0, run_name="x", device=DeviceCPU())
        self.callback.fit_start(self.state, None)

    def event(self, name: str, seconds: float = 0.0) -> None:
        getattr(self.callback, name)(self.state, None)
        self.clock.now += seconds

    def batch(
        self, *, train: float, wait: float = 0.0, evaluate: float = 0.0, other: float = 0.0, images: int = 8
    ) -> None:
        self.event("before_dataloader", wait)
        self.event("after_dataloader", train)
        self.state.timestamp = self.state.timestamp.to_next_batch(samples=images)
        self.event("batch_end", other)
        if evaluate:
            with self.callback.evaluating():
                self.clock.now += evaluate

    def finish(self) -> dict:
        self.event("epoch_end")
        self.event("fit_end")
        return self.callback.result()


def test_each_second_goes_to_one_clock_and_only_train_feeds_images_per_sec(monkeypatch):
    run = Run(monkeypatch, window_batches=2, warmup_batches=0)
    run.event("epoch_start")
    run.batch(train=1.0, wait=0.5, evaluate=30.0, other=2.0)
    run.batch(train=3.0, wait=0.5)
    [window] = run.callback.windows
    assert (window["train_sec"], window["data_wait_sec"]) == (4.0, 1.0)
    assert (window["eval_sec"], window["other_sec"]) == (30.0, 2.0)
    assert window["images_per_sec"] == 16 / 4.0
    assert window["images_per_sec_wall"] == 16 / 37.0
    assert window["data_wait_frac"] == 1.0 / 5.0


def test_the_start_of_the_loaders_workers_is_waiting_for_data(monkeypatch):
    run = Run(monkeypatch, window_batches=1, warmup_batches=0)
    run.event("epoch_start", 7.0)
    run.batch(train=1.0)
    assert run.callback.windows[0]["data_wait_sec"] == 7.0


def test_warmup_batches_are_counted_and_belong_to_no_measured_window(monkeypatch):
    run = Run(monkeypatch, window_batches=2, warmup_batches=3)
    for seconds in (50.0, 50.0, 50.0, 2.0, 2.0, 2.0, 2.0):
        run.batch(train=seconds)
    result = run.finish()
    assert [window["window_batches"] for window in run.callback.windows] == [2, 1, 2, 2]
    assert [window["warmup"] for window in run.callback.windows] == [True, True, False, False]
    assert result["images_per_sec"] == 8 / 2.0 and result["seconds"] == 8.0
    assert (result["batches"], result["warmup_batches"], result["windows"]) == (7, 3, 2)


def test_the_result_is_the_median_with_its_spread(monkeypatch):
    run = Run(monkeypatch, window_batches=1, warmup_batches=0)
    for seconds in (1.0, 2.0, 8.0):
        run.batch(train=seconds, wait=1.0)
    result = run.finish()
    assert (result["images_per_sec_min"], result["images_per_sec"], result["images_per_sec_max"]) == (1.0, 4.0, 8.0)
    assert result["data_wait_frac"] == 3.0 / 14.0
    assert result["mfu"] == 4.0 * 2e12 / 100e12 and result["peak_tflops"] == 100.0


def test_a_last_partial_window_counts_only_where_there_is_no_whole_one(monkeypatch):
    run = Run(monkeypatch, window_batches=2, warmup_batches=0)
    for seconds in (1.0, 1.0, 100.0):
        run.batch(train=seconds)
    assert run.finish()["images_per_sec"] == 8.0
    assert [window["window_batches"] for window in run.callback.windows] == [2, 1]

    short = Run(monkeypatch, window_batches=10, warmup_batches=1)
    for seconds in (50.0, 2.0, 2.0):
        short.batch(train=seconds)
    assert short.finish()["images_per_sec"] == 4.0


def test_a_run_of_nothing_but_warmup_has_no_speed(monkeypatch):
    run = Run(monkeypatch, window_batches=2, warmup_batches=10)
    for _ in range(4):
        run.batch(train=1.0)
    result = run.finish()
    assert result["images_per_sec"] is None and result["mfu"] is None and result["data_wait_frac"] is None
    assert (result["batches"], result["warmup_batches"], result["windows"]) == (4, 4, 0)


def test_peaks_are_those_of_the_data_sheets_and_unknown_devices_have_none():
    assert peak_tflops("NVIDIA H200", "bf16") == 989.4
    assert peak_tflops("NVIDIA H100 PCIe", "bf16") == 756.4 and peak_tflops("NVIDIA H100 80GB HBM3", "tf32") == 494.7
    assert peak_tflops("NVIDIA A100-SXM4-40GB", "fp32") == 19.5
    assert peak_tflops("CPU x", "fp32") is None and peak_tflops("NVIDIA GeForce RTX 4090", "bf16") is None


def test_an_unknown_device_has_no_mfu_unless_its_peak_is_given():
    assert Throughput(MeasureConfig(), flops_per_image=1.0, peak=None).peak is None
    assert Throughput(MeasureConfig(peak_tflops=5.0), flops_per_image=1.0, peak=989.4).peak == 5.0


@pytest.mark.parametrize("name", ["train", "data_wait", "eval", "other"])
def test_every_clock_is_in_the_window(monkeypatch, name):
    run = Run(monkeypatch, window_batches=1, warmup_batches=0)
    run.batch(train=1.0)
    assert f"{name}_sec" in run.callback.windows[0]
