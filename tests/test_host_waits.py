"""A training step never waits for the device in our code, and in Composer's exactly as often as listed here.

On a GPU tests/gpu/test_on_gpu.py asks the driver instead.
"""

from __future__ import annotations

import sys

import pytest
from conftest import TINY_RUN
from host_waits import FETCH, SCALAR, UPLOAD, HostWaits, watched

import benchmark
from training import builders

pytestmark = pytest.mark.timeout(60, func_only=True)

# Python 3.12 runs a comprehension in the frame of its function.
COMPREHENSION = "<dictcomp>" if sys.version_info < (3, 12) else "_train_loop"
LONG_WINDOWS = ["max_duration=5ba", "measure.window_batches=20", "measure.warmup_batches=0"]
LONG_WINDOWS += ["model.family=shapes", "image_size=32"]

# composer/trainer/trainer.py of 0.32.1, in every batch: seven reads and four uploads, and one upload a microbatch.
OF_COMPOSER = {
    # whether a rank has no more batches
    f"_iter_dataloader of trainer.py: {SCALAR}": 1,
    # before the forward pass: the sum of samples over the ranks
    f"_train_microbatches of trainer.py: {UPLOAD}": 1,
    f"_train_microbatches of trainer.py: {SCALAR}": 1,
    # the loss: where it is added up, in the optimizer's closure, after the optimizer's step
    f"_train_batch of trainer.py: {UPLOAD}": 1,
    f"<lambda> of trainer.py: {SCALAR}": 1,
    f"{COMPREHENSION} of trainer.py: {FETCH}": 1,
    # samples, tokens and time of the batch over the ranks
    f"_accumulate_time_across_ranks of trainer.py: {UPLOAD}": 2,
    f"_accumulate_time_across_ranks of trainer.py: {FETCH}": 3,
}


def steps(monkeypatch, tmp_path, *words: str, trainer: str = "Trainer") -> HostWaits:
    """Count one step of a tiny run, away from window edges, checkpoints and evaluations."""
    waits = HostWaits()
    monkeypatch.setattr(builders, trainer, watched(getattr(builders, trainer), waits, range(3, 4)))
    command = [*TINY_RUN, *LONG_WINDOWS, *words, f"run_folder={tmp_path}", "run_name=a"]
    assert benchmark.main(command) == 0
    return waits


def test_a_step_waits_in_none_of_our_code_and_as_often_as_known_in_composers(monkeypatch, tmp_path):
    words = ["--use_synth_data", "--use_ema", "optimizer.clip_norm=1", "device_train_microbatch_size=4"]
    waits = steps(monkeypatch, tmp_path, *words)
    assert waits.of("ours") == {} and waits.of("nobody's") == {}
    assert waits.of("composer") == {**OF_COMPOSER, f"_train_microbatch of trainer.py: {UPLOAD}": 2}


def test_with_async_loss_a_step_never_waits(monkeypatch, tmp_path):
    """What is left of Composer's are uploads, which the host does not wait for."""
    words = ["--use_synth_data", "data.stage=moments", "device_train_microbatch_size=4", "async_loss=true"]
    words += ["precision=bf16", "objective.weighting=min_snr"]
    waits = steps(monkeypatch, tmp_path, *words, trainer="NonBlockingTrainer")
    # The loss of the batch before, from memory of the host that the device has written to by then.
    own = {f"put of losses.py: {UPLOAD}": 1, f"take of losses.py: {FETCH}": 1}
    assert waits.of("ours") == own
    assert {what for what in waits.of("composer") if UPLOAD not in what} == set()
