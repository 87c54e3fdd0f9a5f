"""training/microbatch.py: the largest microbatch that divides the batch, found once; and the out-of-memory message."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY_RUN

import benchmark
from record.config_file import read_config
from training import cost, microbatch
from training.cost import Cost

pytestmark = [pytest.mark.timeout(120, func_only=True), pytest.mark.usefixtures("quick_estimate")]

# 1 GiB each of weights, gradients; 2 of moments; 0.5 an image.
COST = Cost(2**28, 0, 1e12, activation_gib_per_image=0.5, activation_gib_once=0.0, frozen_gib=0.0)


@pytest.mark.parametrize(
    ("available", "ranks", "ema", "largest"),
    [
        (100.0, 1, False, 48),
        (21.0, 1, False, 24),
        (21.0, 1, True, 24),
        (17.0, 1, True, 16),
        (21.0, 2, False, 8),
        (1.0, 1, False, 1),
    ],
)
def test_the_estimate_is_the_largest_divisor_that_fits(monkeypatch, available, ranks, ema, largest):
    monkeypatch.setattr(cost, "available_gib", lambda: (available, "a test"))
    found = microbatch.estimated(COST, 48, ranks, ema=ema)
    assert found == largest
    room = cost.USABLE_FRACTION * available / ranks
    fitting = [size for size in range(1, 49) if 48 % size == 0 and COST.memory_gib(size, ema=ema) <= room]
    assert found == max(fitting, default=1)


def run(folder, name: str, *words: str) -> int:
    own = [f"run_folder={folder}", f"run_name={name}", "data.synthetic=true", "data.stage=moments"]
    own += ["model.family=shapes", "image_size=32"]
    return benchmark.main([*TINY_RUN, *own, *words])


def losses(folder, name: str) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def test_auto_is_a_number_in_the_record_and_changes_no_loss(tmp_path, capsys):
    assert run(tmp_path, "auto", "device_train_microbatch_size=auto") == 0
    said = capsys.readouterr().err
    assert (
        "device_train_microbatch_size: auto is 8 of a device batch of 8 (by estimate); it stays so for this start."
        in said
    )
    summary = json.loads((tmp_path / "auto" / "summary.json").read_text())
    assert summary["device_train_microbatch_size"] == 8
    assert "device_train_microbatch_size: auto\n" in (tmp_path / "auto" / "config.yaml").read_text()
    assert read_config(tmp_path / "auto")["device_train_microbatch_size"] == 8
    assert run(tmp_path, "fixed", "device_train_microbatch_size=2") == 0
    assert losses(tmp_path, "auto") == pytest.approx(losses(tmp_path, "fixed"), rel=1e-4)


def test_auto_is_printed_as_auto_and_planned_by_estimate(tmp_path, capsys):
    assert run(tmp_path, "a", "device_train_microbatch_size=auto", "--print_config") == 0
    printed = capsys.readouterr().out
    assert "device_train_microbatch_size: auto\n" in printed
    assert "global batch: 8 images = 1 rank x 1 pass x 8 images" in printed


def test_another_word_than_auto_is_refused(tmp_path, capsys):
    assert run(tmp_path, "a", "device_train_microbatch_size=most") == 2
    assert capsys.readouterr().err == (
        "command line: device_train_microbatch_size is 'most'. Possible: an integer or one of auto or null.\n"
    )


def test_out_of_memory_names_microbatch_and_what_to_try_and_the_run_goes_on(tmp_path, capsys, monkeypatch):
    """A GPU's failed allocation cannot be had here: it is raised in the third batch, as torch raises it."""
    words = ["save.every_images=16", "measure.warmup_batches=0", "device_train_microbatch_size=8"]
    assert run(tmp_path, "unbroken", *words) == 0
    plain = benchmark.LatentDiffusion.forward

    def full_in_the_third_batch(model, batch):
        full_in_the_third_batch.calls += 1
        if full_in_the_third_batch.calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return plain(model, batch)

    full_in_the_third_batch.calls = 0
    with monkeypatch.context() as patched:
        patched.setattr(benchmark.LatentDiffusion, "forward", full_in_the_third_batch)
        capsys.readouterr()
        assert run(tmp_path, "a", *words) == 1
    [checkpoint] = (tmp_path / "a" / "checkpoints").glob("full-*.pt")
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"device_train_microbatch_size: out of memory with 8 images a pass of a device batch of 8. Try "
        f"device_train_microbatch_size=4, then gradient_checkpointing=1, then precision=bf16; the same command with it "
        f"resumes from {checkpoint}."
    )
    assert run(tmp_path, "a", *words[:2], "device_train_microbatch_size=4") == 0
    assert losses(tmp_path, "a") == pytest.approx(losses(tmp_path, "unbroken"), rel=1e-4)


def test_another_runtime_error_stays_what_it_is():
    ways = dict(savings=[], last_checkpoint=lambda: None)
    with pytest.raises(RuntimeError, match="^shapes differ$"), microbatch.explained(8, 8, **ways):
        raise RuntimeError("shapes differ")
    cpu = "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    with pytest.raises(microbatch.OutOfMemory) as error, microbatch.explained(1, 8, **{**ways, "savings": ["a=1"]}):
        raise RuntimeError(cpu)
    assert str(error.value) == (
        "device_train_microbatch_size: out of memory with 1 images a pass of a device batch of 8. Try a=1, then a smaller "
        "image_size, model.preset=tiny, a larger GPU, or several with sharding=full; the same "
        "command with it begins anew: there is no checkpoint yet."
    )


def test_the_peak_on_a_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 130 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=139.8 * 2**30))
    ways = dict(savings=[], last_checkpoint=lambda: None)
    text = r"with 8 images a pass of a device batch of 8, at a peak of 130.0 GiB of 139.8 on rank 0. Try "
    with pytest.raises(microbatch.OutOfMemory, match=text), microbatch.explained(8, 8, **ways):
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    "said", ["CUDA error: out of memory\nCUDA kernel errors might be", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"]
)
def test_what_a_library_says_of_memory_is_out_of_memory_too(said, monkeypatch):
    def full(*_):
        raise RuntimeError(said)

    monkeypatch.setattr(microbatch, "_two_passes", full)
    assert not microbatch._fits(torch.nn.Linear(1, 1), {}, 1, 0.0)


def test_all_ranks_take_what_fits_the_one_that_has_least(monkeypatch):
    from test_speed import model_of

    least_of_all = lambda tensor, reduce_operation: tensor.clamp_(max=4)  # noqa: E731
    monkeypatch.setattr(cost, "available_gib", lambda: (100.0, "a test"))
    monkeypatch.setattr(microbatch.dist, "all_reduce", least_of_all)
    assert microbatch.find(model_of({}), {}, COST, 48, 1, ema=False) == 4


@pytest.mark.parametrize("size", [1, 4])
def test_what_is_tried_on_a_gpu_is_a_step_that_leaves_nothing_behind(size):
    """The passes themselves, here on a CPU."""
    from test_speed import model_of

    model = model_of({})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert microbatch._fits(model, model.family.columns("moments", (32, 32)), size, 0.1)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
