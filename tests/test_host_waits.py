"""A training step never waits for the device in our code.

On a GPU tests/gpu/test_on_gpu.py asks the driver instead.
"""

from __future__ import annotations

import pytest
from conftest import TINY_RUN
from host_waits import FETCH, UPLOAD, HostWaits, watched

import benchmark
from training import builders

pytestmark = pytest.mark.timeout(60, func_only=True)

LONG_WINDOWS = ["max_duration=5ba", "measure.window_batches=20", "measure.warmup_batches=0"]
LONG_WINDOWS += ["model.family=shapes", "image_size=32"]


def steps(monkeypatch, tmp_path, *words: str, trainer: str = "Trainer") -> HostWaits:
    """Count one step of a tiny run, away from window edges, checkpoints and evaluations."""
    waits = HostWaits()
    monkeypatch.setattr(builders, trainer, watched(getattr(builders, trainer), waits, range(3, 4)))
    command = [*TINY_RUN, *LONG_WINDOWS, *words, f"run_folder={tmp_path}", "run_name=a"]
    assert benchmark.main(command) == 0
    return waits


@pytest.mark.slow
def test_a_step_waits_in_none_of_our_code(monkeypatch, tmp_path):
    words = ["--use_synth_data", "--use_ema", "optimizer.clip_norm=1", "device_train_microbatch_size=4"]
    waits = steps(monkeypatch, tmp_path, *words)
    assert waits.of("ours") == {} and waits.of("nobody's") == {}
    assert waits.of("composer"), "its reads of a step are not seen"


@pytest.mark.slow
def test_with_async_loss_a_step_never_waits(monkeypatch, tmp_path):
    """What is left of Composer's are uploads, which the host does not wait for."""
    words = ["--use_synth_data", "data.stage=moments", "device_train_microbatch_size=4", "async_loss=true"]
    words += ["precision=bf16", "objective.weighting=min_snr"]
    waits = steps(monkeypatch, tmp_path, *words, trainer="NonBlockingTrainer")
    # The loss of the batch before, from memory of the host that the device has written to by then.
    own = {f"put of losses.py: {UPLOAD}": 1, f"take of losses.py: {FETCH}": 1}
    assert waits.of("ours") == own
    assert {what for what in waits.of("composer") if UPLOAD not in what} == set()
