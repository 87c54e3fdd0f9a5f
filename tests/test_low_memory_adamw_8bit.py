"""training/low_memory_adamw.py with moments in 8 bits, also against torchao's own AdamW8bit. `make test-8bit` has torchao."""

from __future__ import annotations

import importlib.util
import io

import pytest
import torch
from test_low_memory_adamw import network, optimizer_of, train
from torch import nn

from training.low_memory_adamw import BLOCK, CODES, NAMES, SMALL, code_table, scale_of
from training.optimizer import OptimizerConfig, build_optimizer

pytestmark = pytest.mark.timeout(120, func_only=True)
NEEDS_TORCHAO = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao: make test-8bit has it")
SHAPES = ((64, 128), (16, 16, 4, 4), (50, 100), (1000,))
"""Two tensors in 8 bits; one whose numbers are not whole blocks, and a small one."""


def parameters() -> nn.ParameterList:
    torch.manual_seed(0)
    return nn.ParameterList([torch.randn(shape) for shape in SHAPES])


@NEEDS_TORCHAO
def test_it_is_torchaos_own(monkeypatch):
    """Torchao's step, not compiled; its codes may be one apart where a value lies between two of them."""
    from torchao.optim import AdamW8bit
    from torchao.optim.quant_utils import create_dynamic_map

    for signed in (True, False):
        assert code_table(signed)[:CODES].tolist() == torch.tensor(create_dynamic_map(signed)).tolist()

    monkeypatch.setattr(torch, "compile", lambda step, **options: step)
    ours, theirs = parameters(), parameters()
    optimizer = build_optimizer(OptimizerConfig(lr=0.01, weight_decay=0.1, states="8bit"), ours, 8)
    reference = AdamW8bit(theirs.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(10):
        torch.manual_seed(step)
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        optimizer.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        mine, own = optimizer.state[one], reference.state[other]
        for name in NAMES:
            is_small = mine[name].dtype == torch.float32
            assert is_small == (type(own[name]) is torch.Tensor)
            if is_small:
                torch.testing.assert_close(mine[name], own[name])
            else:
                codes, scale = mine[name].view(one.shape), mine[scale_of(name)]
                assert (codes.int() - own[name].codes.int()).abs().max() <= 1
                assert (codes == own[name].codes).float().mean() > 0.999
                torch.testing.assert_close(scale, own[name].scale, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("signed", [True, False])
def test_the_codes_are_those_of_the_paper(signed):
    """Dettmers et al. 2022: each decade from 1e-6 to 1 has twice the numbers of the one below; 0 and 1 are exact."""
    table = code_table(signed)
    values, borders = table[:CODES].double(), table[CODES:].double()
    assert (values.diff() > 0).all() and torch.allclose(borders, (values[1:] + values[:-1]) / 2, rtol=1e-6)
    assert values.max() == 1.0 and (values == 0.0).sum() == 1
    positive = values[(values > 0.0) & (values < 1.0)]
    assert torch.equal(positive, -values[values < 0.0].flip(0)) or not signed
    decades = [((positive > 10.0 ** (d - 7)) & (positive < 10.0 ** (d - 6))).sum().item() for d in range(7)]
    assert decades == [(1 if signed else 2) * 2**d for d in range(7)]


def test_a_moment_takes_a_byte_a_number_and_a_scale_a_block():
    model = network()
    optimizer = optimizer_of(model, "8bit")
    train(model, optimizer, range(1))
    for parameter, state in optimizer.state.items():
        num = parameter.numel()
        saved = sum(value.nbytes for name, value in state.items() if name != "step")
        is_small = num < SMALL or num % BLOCK
        assert saved == (2 * 4 * num if is_small else 2 * (num + 4 * num // BLOCK))
        planned = optimizer.empty_state(parameter, "meta")
        assert {k: (v.dtype, v.shape) for k, v in state.items()} == {k: (v.dtype, v.shape) for k, v in planned.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16_params"])
def test_a_saved_and_loaded_state_continues_bit_for_bit_in_any_memory_format(dtype):
    whole, stopped, resumed = network(dtype), network(dtype), network(dtype).to(memory_format=torch.contiguous_format)
    train(whole, optimizer_of(whole, "8bit"), range(4))
    optimizer = optimizer_of(stopped, "8bit")
    train(stopped, optimizer, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    resumed.load_state_dict(stopped.state_dict())
    again = optimizer_of(resumed, "8bit")
    again.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    resumed.to(memory_format=torch.channels_last)  # gradients in other formats differ in their last bits
    train(resumed, again, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
