"""callbacks/replicas.py: each flipped bit changes a digest, ranks that differ are named, copies in parts are compared so."""

from __future__ import annotations

import re

import pytest
import torch

from callbacks import replicas as module
from callbacks.replicas import ReplicaCheck, digest_tensors
from ranks import rendezvous

PARTS = {0: {"0.bias": 7}, 2: {"0.bias": 7}}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_one_flipped_bit_changes_the_digest_of_its_tensor_alone(dtype):
    tensors = [(torch.randn(3, 5, 2, 2) * 9).to(dtype) for _ in range(3)]
    before, size = digest_tensors(tensors), tensors[1].element_size()
    bits = tensors[1].view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).view(-1)
    for bit in [0] if dtype == torch.bool else range(8 * size):
        flip = 1 << bit if dtype in (torch.bool, torch.uint8) or bit < 8 * size - 1 else -(1 << bit)
        bits[7] ^= flip
        after = digest_tensors(tensors)
        assert after[1] != before[1] and (after[[0, 2]] == before[[0, 2]]).all()
        bits[7] ^= flip
    assert (digest_tensors(tensors) == before).all()


def test_a_digest_is_the_sum_of_the_bits_in_whatever_order_they_lie():
    tensor = torch.randn(4, 3, 8, 8)
    [own] = digest_tensors([tensor]).tolist()
    assert own == sum(tensor.contiguous().view(torch.int32).view(-1).tolist())
    in_rows = tensor.to(memory_format=torch.channels_last)
    assert digest_tensors([in_rows, in_rows[1:, :, ::2], torch.tensor(1.0), torch.empty(0)])[0] == own
    assert digest_tensors([in_rows[1:, :, ::2]]) == digest_tensors([tensor[1:, :, ::2].contiguous()])


class Ranks:
    """Plays the ranks' gathers: each has the weights of this one, changed by what is given."""

    def __init__(self, monkeypatch, num: int, changed: dict[int, dict[str, float]], ranks_per_copy: int = 1):
        monkeypatch.setattr(rendezvous, "_hosts", [f"n{rank // 2}" for rank in range(num)])
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        extra = {"ema.w": torch.ones(2), "vae.k": torch.ones(2)}
        self.replicas = ReplicaCheck(self.model, 10, ranks_per_copy=ranks_per_copy, extra_tensors=lambda: extra)
        names = [name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())] + ["ema.w", "vae.k"]
        self.replicas._group = object()
        self.replicas._batch = 30

        def gather(own):
            if isinstance(own, list):
                return [[v + changed.get(r, {}).get(n, 0) for n, v in zip(names, own, strict=True)] for r in range(num)]
            return [own if not changed.get(rank) else str(changed[rank]).encode() for rank in range(num)]

        monkeypatch.setattr(self.replicas, "_gather", gather)


def test_equal_weights_pass_and_so_do_parts_that_differ_by_design(monkeypatch):
    ranks = Ranks(monkeypatch, 4, {})
    assert ranks.replicas.last_equal_batch is None
    ranks.replicas.check()
    assert ranks.replicas.last_equal_batch == 30
    Ranks(monkeypatch, 4, PARTS, ranks_per_copy=2).replicas.check()


DIFFERENT = [
    (4, {2: {"1.weight": 1}}, 1, "rank 2 (n1) differ from those of the others, first in 1.weight;"),
    (2, {1: {"vae.k": 5}}, 1, "rank 1 (n0) differ from those of rank 0 (n0), first in vae.k;"),
    (5, {1: {"ema.w": 1}, 3: {"0.bias": 1}}, 1, "ranks 1 (n0), 3 (n1) differ from those of the others, first in 0.b"),
    # Two copies over two ranks each: the second part of the second copy differs.
    ((4, {**PARTS, 3: {"0.weight": 1}}, 2, "rank 3 (n1) differ from those of rank 1 (n0), first in 0.weight;")),
]


@pytest.mark.parametrize(("num", "changed", "copy", "output"), DIFFERENT)
def test_ranks_that_differ_are_named_with_the_first_tensor(monkeypatch, num, changed, copy, output):
    ranks, titles = Ranks(monkeypatch, num, changed, copy), []
    monkeypatch.setattr(module, "alert", lambda loggers, title, text: titles.append(title))
    ranks.replicas.last_equal_batch = 20
    with pytest.raises(ValueError, match=re.escape(f"after batch 30 the weights of {output}")):
        ranks.replicas.check()
    assert titles == ["the ranks' weights differ"]


def test_what_is_saved_is_compared_once(monkeypatch):
    ranks = Ranks(monkeypatch, 2, {})
    asked = []
    monkeypatch.setattr(ranks.replicas, "_gather", lambda own: asked.append(own) or [own, own])
    ranks.replicas.check()
    ranks.replicas.before_saving()
    assert len(asked) == 1
    ranks.replicas._batch = 31
    ranks.replicas.before_saving()
    assert len(asked) == 2 and ranks.replicas.last_equal_batch == 31
