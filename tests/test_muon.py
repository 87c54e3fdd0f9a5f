"""training/muon.py against a float64 iteration, torch's Muon and AdamW; on two ranks, and the same again after a resume."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from conftest import TINY_RUN
from test_checkpoints import newest, same_training
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

import benchmark
from families import load_family
from training import muon
from training.muon import hidden_weights, problems
from training.optimizer import OptimizerConfig, build_optimizer
from weights.tensors import build_on_meta

pytestmark = pytest.mark.timeout(120, func_only=True)
LR, DECAY = 0.01, 0.1
CONFIG = OptimizerConfig(name="muon", lr=LR, weight_decay=DECAY)


class Blocks(nn.Module):
    """A tall, a wide and two square matrices, and a kernel, between a first and a last layer. 65 rows: no even halves."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = [
            nn.Linear(24, 65),
            nn.Linear(64, 24),
            *(nn.Linear(32, 32, bias=False) for _ in range(2)),
            nn.Conv2d(8, 16, 3),
        ]
        self.first, self.last = nn.Linear(8, 24), nn.Linear(24, 8)
        self.blocks = nn.ModuleList([nn.Sequential(layer, nn.LayerNorm(8)) for layer in layers])


def gradients(model: nn.Module, step: int) -> list[torch.Tensor]:
    """As a network's are: of full rank, with singular values that differ by a factor of 100."""
    own = torch.Generator().manual_seed(step)
    whole = [torch.randn(p.shape, generator=own) for p in model.parameters()]
    for gradient in whole:
        gradient *= torch.logspace(-2, 0, len(gradient)).reshape(-1, *[1] * (gradient.ndim - 1))
    return whole


def train(model: nn.Module, steps: range, optimizer: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    optimizer = optimizer or build_optimizer(CONFIG, model, 8)
    for step in steps:
        for parameter, gradient in zip(model.parameters(), gradients(model, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return optimizer


def is_in(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    return any(tensor is each for each in tensors)


def iterated(x: torch.Tensor) -> torch.Tensor:
    """Jordan's iteration on a matrix (A, B), in its type."""
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


def test_a_step_is_that_of_a_newton_schulz_iteration_in_float64_and_as_large_as_one_of_adamw():
    """Jordan's iteration on Nesterov's momentum, Moonlight's factor: an RMS of 0.2 for singular values of 1."""
    model, momentum = Blocks(), 0.0
    before = [weight.detach().clone() for weight in hidden_weights(model)]
    train(model, range(1))
    for weight, start in zip(hidden_weights(model), before, strict=True):
        gradient = weight.grad.double().flatten(1)
        momentum = 0.05 * gradient
        x = iterated(0.05 * gradient + 0.95 * momentum)
        step = (start.double() * (1 - LR * DECAY) - weight.detach().double()).flatten(1) / LR
        expected = 0.2 * math.sqrt(max(x.shape)) * x
        assert (step - expected).norm() < 1e-4 * expected.norm()
        assert 0.1 < step.square().mean().sqrt() < 0.25


@pytest.mark.parametrize(("rows", "columns"), [(48, 48), (48, 70), (48, 73), (48, 400), (400, 48)])
def test_in_float16_as_on_a_gpu_it_is_nearer_to_float64_than_jordans_bfloat16(rows, columns):
    """Singular values over three decades, many matrices at once, whose size float16 could not hold."""
    torch.manual_seed(0)
    short = min(rows, columns)
    (u, _), (v, _) = (torch.linalg.qr(torch.randn(3, size, short).double()) for size in (rows, columns))
    matrices = (u * torch.logspace(-3, 0, short)) @ v.mT
    scaled = matrices.float() * torch.tensor([1e-6, 1.0, 1e6]).reshape(3, 1, 1)
    found = muon.orthogonalize(scaled, torch.float16)
    for matrix, of_matrix in zip(matrices, found.double(), strict=True):
        expected = iterated(matrix)
        theirs = iterated(matrix.bfloat16()).double()
        assert (of_matrix - expected).norm() < 0.03 * expected.norm() < 0.5 * (theirs - expected).norm()


def test_matrices_of_one_shape_are_stacked_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(muon, "MOST_STACKED", 50)
    weights = [torch.zeros(shape) for shape in ((4, 5), (5, 4), (4, 5, 1, 1), (4, 5), (10, 10))]
    stacks = [[id(weight) for weight in stack] for stack in muon.stacks_of(weights)]
    a, b, c, d, e = map(id, weights)
    assert stacks == [[a, c], [d], [b], [e]] and muon.largest_stack(weights) == 100


def test_the_flops_of_a_step_are_those_that_torch_counts():
    weights = hidden_weights(load_family("sd2", "tiny", "stock").build_denoiser())
    with FlopCounterMode(display=False) as counter:
        for weight in weights:
            muon.orthogonalize(weight.detach().flatten(1)[None], torch.float32)
    assert muon.step_flops(weights) == counter.get_total_flops() > 0


def test_on_matrices_it_is_torchs_muon_in_bfloat16_and_on_the_rest_torchs_adamw_bit_for_bit():
    ours, reference, start = Blocks(), Blocks(), Blocks()
    train(ours, range(3))
    matrices = [weight for weight in hidden_weights(reference) if weight.ndim == 2]
    others = [p for p in reference.parameters() if not is_in(p, hidden_weights(reference))]
    options = dict(lr=LR, weight_decay=DECAY)
    of_matrices = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options)
    adamw = torch.optim.AdamW(others, fused=True, **options)
    for step in range(3):
        train(reference, range(step, step + 1), of_matrices)
        adamw.step()
    for (name, theirs), begun in zip(reference.named_parameters(), start.parameters(), strict=True):
        difference = (ours.get_parameter(name) - theirs).norm()
        assert theirs.ndim == 4 or difference <= 0.03 * (theirs - begun).norm() * is_in(theirs, matrices), name
    assert len(matrices) == 4 and len(others) == 17


@pytest.mark.parametrize(
    ("family", "variant", "outside"),
    [
        ("shapes", "flow", "x_embedder context_embedder time_text_embed norm_out proj_out"),
        ("shapes", "stock", "conv_in conv_out time_embedding down_blocks.0.downsamplers up_blocks.0.upsamplers"),
        ("wan", "stock", "patch_embedding condition_embedder proj_out"),
    ],
)
def test_adamw_has_the_first_and_last_layers_embeddings_norms_and_tables(family, variant, outside):
    denoiser = build_on_meta(load_family(family, "tiny", variant).build_denoiser)
    hidden = set(map(id, hidden_weights(denoiser)))
    names = {name for name, p in denoiser.named_parameters() if p.ndim >= 2 and id(p) not in hidden}
    names = {name for name in names if not name.endswith("scale_shift_table")}  # of Wan
    expected = outside.split()
    assert {next((each for each in expected if name.startswith(each)), name) for name in names} == set(expected)


def of_a_rank(rank: int, folder: str) -> None:
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = fully_shard(Blocks())
    optimizer = build_optimizer(CONFIG, model, 8)
    for step in range(3):
        for parameter, whole in zip(model.parameters(), gradients(model, step), strict=True):
            parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        optimizer.step()
    momenta = [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
    assert len(momenta) == 5 and all(isinstance(momentum, DTensor) for momentum in momenta)
    saved = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save(saved, f"{folder}/saved.pt")
    torch.distributed.barrier()
    os._exit(0)  # a gloo thread that frees a tensor as the interpreter ends may abort: pytorch/pytorch#179291


@pytest.mark.slow
def test_two_ranks_with_half_of_each_matrix_make_the_step_of_one(tmp_path):
    torch.multiprocessing.spawn(of_a_rank, (str(tmp_path),), nprocs=2)
    saved, model = torch.load(tmp_path / "saved.pt"), Blocks()
    train(model, range(3))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-7)


def words_of(folder: Path, name: str, *more: str) -> list[str]:
    keys = ["optimizer.name=muon", "optimizer.decay=matrices", "data.synthetic=true", "save.every_images=16"]
    keys += ["model.family=shapes", "image_size=32"]
    return [*TINY_RUN, *keys, f"run_folder={folder}", f"run_name={name}", "ema.enabled=true", *more]


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit(tmp_path):
    assert benchmark.main(words_of(tmp_path, "whole")) == 0
    assert benchmark.main(words_of(tmp_path, "resumed", "max_duration=2ba")) == 0
    assert benchmark.main(words_of(tmp_path, "resumed")) == 0
    whole = newest(tmp_path, "whole")
    assert same_training(whole, newest(tmp_path, "resumed"))
    kinds = [sorted(state) for state in whole["optimizer"]["state"].values()]
    assert kinds.count(["momentum_buffer"]) > 50 and kinds.count(["exp_avg", "exp_avg_sq", "step"]) > 50


def test_what_muon_does_not_go_with_is_refused():
    config = OptimizerConfig(name="muon", betas=(0.9, 0.95), states="8bit", rounding="nearest")
    assert [key for key, _ in config.problems()] == ["optimizer.states", "optimizer.rounding"]
    assert problems(CONFIG, "bf16", has_adapter=False) == []
    assert problems(OptimizerConfig(), "bf16_params", has_adapter=True) == []
    assert [key for key, _ in problems(CONFIG, "bf16_params", has_adapter=True)] == ["precision", "lora.rank"]
    with pytest.raises(ValueError, match="optimizer.name: muon, but the network has no blocks with matrices"):
        build_optimizer(CONFIG, nn.Linear(3, 3), 8)
