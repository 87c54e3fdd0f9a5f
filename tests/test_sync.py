"""A training step never waits for the device in our code, and in Composer's exactly as often as listed here.

On a GPU tests/gpu/test_on_gpu.py asks the driver instead.
"""

from __future__ import annotations

import sys

import pytest
import torch
from conftest import TINY_RUN
from host_waits import FETCH, SCALAR, UPLOAD, HostWaits, watched

import benchmark

pytestmark = [pytest.mark.timeout(60, func_only=True), pytest.mark.usefixtures("quick_estimate")]

# Python 3.12 runs a comprehension in the frame of its function.
COMPREHENSION = "<dictcomp>" if sys.version_info < (3, 12) else "_train_loop"
LONG_WINDOWS = ["max_duration=5ba", "measure.window_batches=20", "measure.warmup_batches=0"]
LONG_WINDOWS += ["model.family=shapes", "image_size=32"]

# composer/trainer/trainer.py of 0.32.1, in every batch: seven reads and four uploads, and one upload a microbatch.
OF_COMPOSER = {
    # whether a rank has no batch any more
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


def steps(monkeypatch, tmp_path, *words: str) -> HostWaits:
    """Count one step of a tiny run, away from window edges, checkpoints and evaluations."""
    waits = HostWaits()
    monkeypatch.setattr(benchmark, "Trainer", watched(benchmark.Trainer, waits, range(3, 4)))
    command = [*TINY_RUN, *LONG_WINDOWS, *words, f"run_folder={tmp_path}", "run_name=a"]
    assert benchmark.main(command) == 0
    return waits


@pytest.mark.parametrize(
    ("words", "microbatches"),
    [
        (["--use_synth_data", "--use_ema", "optimizer.clip_norm=1", "device_train_microbatch_size=4"], 2),
        (["--use_synth_data", "data.stage=moments", "precision=bf16", "objective.weighting=min_snr"], 1),
    ],
    ids=["images", "moments"],
)
def test_a_step_waits_nowhere_of_ours_and_for_composer_as_often_as_is_known(monkeypatch, tmp_path, words, microbatches):
    waits = steps(monkeypatch, tmp_path, *words)
    assert waits.of("ours") == {} and waits.of("nobody's") == {}
    assert waits.of("composer") == {**OF_COMPOSER, f"_train_microbatch of trainer.py: {UPLOAD}": microbatches}


def test_with_async_loss_a_step_waits_nowhere(monkeypatch, tmp_path):
    """What is left of Composer's are uploads, which the host does not wait for."""
    words = ["--use_synth_data", "data.stage=moments", "device_train_microbatch_size=4", "async_loss=true"]
    waits = HostWaits()
    monkeypatch.setattr(benchmark, "NonBlockingTrainer", watched(benchmark.NonBlockingTrainer, waits, range(3, 4)))
    assert benchmark.main([*TINY_RUN, *LONG_WINDOWS, *words, f"run_folder={tmp_path}", "run_name=a"]) == 0
    # The loss of the batch before, from memory of the host that the device has written to by then.
    own = {f"put of losses.py: {UPLOAD}": 1, f"take of losses.py: {FETCH}": 1}
    assert waits.of("ours") == own
    assert {what for what in waits.of("composer") if UPLOAD not in what} == set()


# --- that it sees what there is to see ---


@pytest.mark.parametrize(
    ("work", "what"),
    [
        (lambda x: x[0].item(), SCALAR),
        (lambda x: float(x[0]), SCALAR),
        (lambda x: bool(x[0] > 0), SCALAR),
        (lambda x: 1 if (x > 0).any() else 2, SCALAR),
        (lambda x: x.cpu(), FETCH),
        (lambda x: x.to("cpu"), FETCH),
        (lambda x: x.tolist(), FETCH),
        (lambda x: x.numpy(), FETCH),
        (lambda x: x[x > 0], "shape or truth of values"),
        (lambda x: x.nonzero(), "shape or truth of values"),
        (lambda x: torch.equal(x, x), "shape or truth of values"),
        (lambda x: x + torch.tensor([1.0]), UPLOAD),
        (lambda x: x + torch.arange(3), UPLOAD),
    ],
)
def test_every_way_to_wait_is_seen(work, what):
    x = torch.ones(3)
    with HostWaits() as waits:
        work(x)
    assert [kind for _, _, kind in waits.found] == [what]


def test_computing_is_no_waiting():
    x, weight = torch.ones(4, 3), torch.ones(3, 3, requires_grad=True)
    with HostWaits() as waits:
        loss = torch.where(x > 0, x @ weight, 0.0).mean()
        loss.backward()
        torch.optim.AdamW([weight], fused=True).step()
    assert waits.found == {}


def test_a_copy_that_is_read_is_one_wait():
    waits = HostWaits()
    waits.found.update({("ours", "f of a.py", FETCH): 2, ("ours", "f of a.py", SCALAR): 2})
    waits.found["composer", "g of b.py", SCALAR] += 3
    assert waits.of("ours") == {f"f of a.py: {FETCH}": 2} and waits.of("composer") == {f"g of b.py: {SCALAR}": 3}


def test_a_wait_in_a_callback_of_ours_is_ours(monkeypatch, tmp_path):
    """The check has to fail when somebody reads the gradient norm in every step."""
    plain = benchmark.GradientNorm.after_train_batch

    def reads(self, state, logger):
        plain(self, state, logger)
        self.mean()  # float(): at window edges alone is it allowed

    monkeypatch.setattr(benchmark.GradientNorm, "after_train_batch", reads)
    waits = steps(monkeypatch, tmp_path, "--use_synth_data", "data.stage=moments")
    assert waits.of("ours") == {f"mean of gradient_norm.py: {SCALAR}": 1}
