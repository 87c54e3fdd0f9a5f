"""training/memory.py: the largest microbatch that divides the batch, found once; and the out-of-memory message."""

from __future__ import annotations

import pytest
import torch
from conftest import TINY_RUN
from test_speed import model_of

import benchmark
from model import LatentDiffusion
from run_folder.files import read_config, read_lines, read_summary
from training import memory
from training.memory import Cost

pytestmark = pytest.mark.timeout(120, func_only=True)

# 1 GiB each of weights, gradients; 2 of moments; 0.5 an image.
COST = Cost(2**28, 0, 1e12, activation_gib_per_image=0.5, activation_gib_once=0.0, frozen_gib=0.0)


@pytest.mark.parametrize(
    ("available", "ranks", "ema", "largest"),
    [(100.0, 1, False, 48), (21.0, 1, True, 24), (21.0, 2, False, 8), (1.0, 1, False, 1)],
)
def test_the_estimate_is_the_largest_divisor_that_fits(monkeypatch, available, ranks, ema, largest):
    monkeypatch.setattr(memory, "available_gib", lambda: (available, "a test"))
    assert memory.estimated(COST, 48, ranks, ema=ema) == largest


def run(folder, name: str, *words: str) -> int:
    own = [f"run_folder={folder}", f"run_name={name}", "data.synthetic=true", "data.stage=moments"]
    own += ["model.family=shapes", "image_size=32"]
    return benchmark.main([*TINY_RUN, *own, *words])


@pytest.mark.slow
def test_auto_is_a_number_in_the_record_and_changes_no_loss(tmp_path, capsys):
    assert run(tmp_path, "auto", "device_train_microbatch_size=auto", "--print_config") == 0
    assert "\n# global batch: 8 images = 1 rank x 1 pass x 8 images\n" in capsys.readouterr().out
    assert run(tmp_path, "auto", "device_train_microbatch_size=auto") == 0
    assert "device_train_microbatch_size: auto is 8 of a device batch of 8 (by estimate); " in capsys.readouterr().err
    assert read_summary(tmp_path / "auto")["device_train_microbatch_size"] == 8
    assert read_config(tmp_path / "auto")["device_train_microbatch_size"] == 8
    assert run(tmp_path, "fixed", "device_train_microbatch_size=2") == 0
    auto, fixed = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("auto", "fixed"))
    assert [line["loss"] for line in auto] == pytest.approx([line["loss"] for line in fixed], rel=1e-4)


@pytest.mark.slow
def test_out_of_memory_names_microbatch_and_what_to_try_and_the_run_resumes(tmp_path, capsys, monkeypatch):
    """A GPU's failed allocation is raised in the third batch, as torch raises it."""
    words = ["save.every_images=16", "measure.warmup_batches=0", "device_train_microbatch_size=8"]
    forward, calls = LatentDiffusion.forward, []

    def fail_in_the_third_batch(model, batch):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return forward(model, batch)

    with monkeypatch.context() as patched:
        patched.setattr(LatentDiffusion, "forward", fail_in_the_third_batch)
        capsys.readouterr()
        assert run(tmp_path, "a", *words) == 1
    [checkpoint] = (tmp_path / "a" / "checkpoints").glob("full-*.pt")
    text = (
        "device_train_microbatch_size: out of memory with 8 images a pass of a device batch of 8. Try device_train_mic"
    )
    problem = capsys.readouterr().err.splitlines()[-1]
    assert problem.startswith(text) and problem.endswith(f"the same command with it resumes from {checkpoint}.")
    assert run(tmp_path, "a", *words[:2], "device_train_microbatch_size=4") == 0
    assert [line["batch"] for line in read_lines(tmp_path / "a" / "metrics.jsonl")] == [2, 4]


def test_errors_of_memory_are_explained_and_others_stay_as_they_are():
    options = dict(savings=["a=1"], last_checkpoint=lambda: None)
    with pytest.raises(RuntimeError, match="^shapes differ$"), memory.explained(8, 8, **options):
        raise RuntimeError("shapes differ")
    cpu = "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    text = "with 1 images a pass of a device batch of 8. Try a=1, then .* starts over: there is no checkpoint yet"
    with pytest.raises(memory.OutOfMemory, match=text), memory.explained(1, 8, **options):
        raise RuntimeError(cpu)


def test_all_ranks_take_what_fits_the_one_that_has_least(monkeypatch):
    monkeypatch.setattr(memory, "available_gib", lambda: (100.0, "a test"))
    monkeypatch.setattr(memory.dist, "all_reduce", lambda tensor, reduce_operation: tensor.clamp_(max=4))
    assert memory.find(model_of({}), {}, COST, 48, 1, ema=False) == 4


def test_what_is_tried_on_a_gpu_is_a_step_that_leaves_nothing_behind():
    """The passes themselves, here on a CPU."""
    model = model_of({})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert memory._fits(model, model.family.columns("moments", (32, 32)), 4, 0.1)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
