"""algorithms/contrastive_flow.py: the paper's loss and its gradient. algorithms/noise_first.py: a run and its resume."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from composer import Event
from conftest import TINY_RUN
from test_checkpoints import newest, same_training

import benchmark
from algorithms.contrastive_flow import ContrastiveFlow
from families.objectives import ObjectiveConfig, RectifiedFlow, mean_squared_errors

WORD = "algorithms=['algorithms.contrastive_flow:ContrastiveFlow(weight=0.3)']"
NOISE_FIRST = "algorithms=['algorithms.noise_first:NoiseFirst(until_images=16)']"
pytestmark = pytest.mark.timeout(120, func_only=True)


def apply(algorithm: ContrastiveFlow, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of a flow with weights of 1, changed by the algorithm."""
    algorithm._objective = RectifiedFlow(ObjectiveConfig(prediction="flow", timesteps="uniform", shift=1.0))
    outputs = {"prediction": prediction, "target": target, "weight": torch.ones(len(target))}
    state = SimpleNamespace(outputs=outputs, loss=mean_squared_errors(prediction, target).mean())
    algorithm.apply(Event.AFTER_LOSS, state, None)
    return state.loss


def test_loss_and_gradient_are_the_papers_with_the_sample_before_as_negative():
    """Its derivative by v_i: 2 ((v_i - u_i) - lambda (v_i - u_j)) / (B N), N numbers a sample; here in float64 by hand."""
    prediction, target = torch.randn(2, 5, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    prediction.requires_grad_()
    loss = apply(ContrastiveFlow(), prediction, target)
    loss.backward()
    v, u, expected = prediction.detach().double(), target.double(), 0.0
    for i, j in ((0, 4), (1, 0), (2, 1), (3, 2), (4, 3)):
        expected += (((v[i] - u[i]) ** 2).mean() - 0.05 * ((v[i] - u[j]) ** 2).mean()) / 5
        gradient = 2 * ((v[i] - u[i]) - 0.05 * (v[i] - u[j])) / v.numel()
        torch.testing.assert_close(prediction.grad[i].double(), gradient, rtol=1e-5, atol=1e-8)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def run(folder: Path, name: str, *more: str) -> int:
    keys = ["model.family=shapes", "model.variant=flow", "image_size=32", "data.synthetic=true"]
    return benchmark.main([*TINY_RUN, *keys, f"run_folder={folder}", f"run_name={name}", *more])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.variant=stock", WORD], "algorithms[0]: contrastive flow needs a rectified flow"),
        (["model.variant=stock", NOISE_FIRST], "algorithms[0]: noise_first needs a rectified flow"),
        ([WORD, "device_train_microbatch_size=1"], "algorithms[0]: contrastive flow needs a second sample"),
        ([WORD.replace("0.3", "1.0")], "weight is 1.0. Possible: more than 0 and less than 1"),
    ],
)
def test_what_it_cannot_be_used_with_is_refused(tmp_path, capsys, words, message):
    assert run(tmp_path, "a", *words) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "a").exists()


@pytest.mark.slow
def test_noise_first_draws_the_times_of_its_shift_at_first_and_resumes_after_them_bit_for_bit(tmp_path):
    keys, losses = ["save.every_images=16", "measure.window_batches=1"], []
    for name, word in (("whole", NOISE_FIRST), ("shifted", "objective.shift=3.0")):
        assert run(tmp_path, name, *keys, word) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0][:2] == losses[1][:2] and losses[0][2] != losses[1][2]
    for more in (["max_duration=2ba"], []):
        assert run(tmp_path, "resumed", *keys, NOISE_FIRST, *more) == 0
    assert same_training(newest(tmp_path, "resumed"), newest(tmp_path, "whole"))
