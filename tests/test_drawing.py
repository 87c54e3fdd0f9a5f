"""weights/drawing.py: the same numbers with any number of threads, and as torch distributes them."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import nn

from weights.drawing import LARGE, DrawnInThreads

SIDE = math.isqrt(LARGE)


class Network(nn.Module):
    """Large and small tensors, some used at once after they are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small, self.words = nn.Linear(SIDE, SIDE), nn.Linear(7, 9), nn.Embedding(SIDE, SIDE)
        self.scaled = nn.Parameter(torch.randn(3) / 10)
        self.cut = nn.Parameter(nn.init.trunc_normal_(torch.empty(SIDE, SIDE), std=0.02))
        nn.init.xavier_normal_(self.words.weight)  # drawn again
        self.halved = nn.Parameter(self.words.weight.detach() / 2)


def drawn(monkeypatch, cores: int, seed: int = 3) -> tuple[Network, torch.Tensor]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    torch.manual_seed(seed)
    with DrawnInThreads():
        network = Network()
    return network, torch.rand(5)


def test_any_number_of_threads_draws_the_same_and_another_seed_other_numbers(monkeypatch):
    (one, after), (many, after_many), (other, _) = (
        drawn(monkeypatch, 1),
        drawn(monkeypatch, 5),
        drawn(monkeypatch, 5, seed=4),
    )
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, many.state_dict()[name]) and not torch.equal(tensor, other.state_dict()[name]), name
    assert torch.equal(after, after_many)
    assert torch.equal(one.halved * 2, one.words.weight)
    assert one.large.weight.requires_grad and one.large.weight.is_leaf


def test_large_tensors_are_distributed_as_torch_has_it_and_small_ones_are_its_own(monkeypatch):
    network, _ = drawn(monkeypatch, 3)
    bound = 1 / math.sqrt(SIDE)
    weight, words = network.large.weight.detach(), network.words.weight.detach()
    assert weight.abs().max() <= bound and weight.std() == pytest.approx(bound / math.sqrt(3), rel=0.01)
    assert words.std() == pytest.approx(math.sqrt(2 / (2 * SIDE)), rel=0.01) and network.cut.abs().max() <= 2.0
    assert abs(torch.corrcoef(torch.stack([weight.flatten(), words.flatten()]))[0, 1]) < 0.01
    torch.manual_seed(3)
    with DrawnInThreads():
        small = nn.Linear(7, 9)
    torch.manual_seed(3)
    assert torch.equal(small.weight, nn.Linear(7, 9).weight)


def test_other_kinds_of_tensors_are_left_alone_and_an_error_does_not_wait_for_what_is_queued():
    with DrawnInThreads():
        assert (torch.eye(3).to_sparse() * 2).sum() == 6.0
        nn.Linear(SIDE, SIDE, device="meta")
    with pytest.raises(KeyError, match="own"), DrawnInThreads():
        torch.empty(SIDE, SIDE).normal_(0.0, -1.0)
        raise KeyError("own")


def test_a_thread_that_fails_says_so():
    with pytest.raises(RuntimeError, match="std"), DrawnInThreads():
        torch.empty(SIDE, SIDE).normal_(0.0, -1.0)
