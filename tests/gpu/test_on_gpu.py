"""Tests that need a GPU: Composer's autocast, the peak FLOP/s for MFU, the memory estimate against the real memory."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch
from conftest import TINY_RUN
from gpu_marks import NEEDS_GPU
from host_waits import GpuWaits, watched

import benchmark
from checkpointing.files import FULL, list_checkpoints, read_checkpoint
from evaluation.generate import QUEUE_SEC, Pace
from evaluation.metrics import Meter
from evaluation.scorer import EvalConfig, Scorer
from families.encoders import ModelConfig
from families.objectives import ObjectiveConfig
from model import build_model
from training import builders
from training.low_memory_adamw import SmallAdamW

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("stage_name", ["images", "moments"])
def test_every_precision_trains(tmp_path, precision, stage_name):
    words = [*TINY_RUN, "--use_synth_data", f"data.stage={stage_name}", f"precision={precision}", "max_duration=20ba"]
    assert benchmark.main([*words, f"run_folder={tmp_path}", "run_name=a", "optimizer.lr=1e-3"]) == 0
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert summary["device"] == torch.cuda.get_device_name() and summary["peak_mem_gib"] > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_an_adapter_trains_on_a_base_in_the_runs_precision(tmp_path, family, precision):
    words = [*TINY_RUN, "data.synthetic=true", f"model.family={family}", "lora.rank=4", f"precision={precision}"]
    words += ["max_duration=40ba", "optimizer.lr=1e-2", f"run_folder={tmp_path}", "run_name=a"]
    assert benchmark.main(words) == 0
    losses = [json.loads(line)["loss"] for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert all(0.0 < loss < 10.0 for loss in losses)
    assert family == "sdxl" or sum(losses[-5:]) < 0.95 * sum(losses[:5])  # each step draws new times and noise


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_encoders_on_the_cpu_give_the_losses_of_those_on_the_gpu(tmp_path, family):
    losses = []
    for at in ("device", "cpu"):
        words = [*TINY_RUN, "--use_synth_data", f"model.family={family}", f"model.frozen_device={at}", "precision=fp32"]
        assert benchmark.main([*words, f"run_folder={tmp_path}", f"run_name={at}"]) == 0
        lines = (tmp_path / at / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_the_memory_estimate_of_sd2_is_near_the_truth(tmp_path):
    words = ["yamls/sd2_512_synthetic_moments.yaml", "global_batch_size=8", "device_train_microbatch_size=8"]
    assert benchmark.main([*words, "compile=off", "max_duration=4ba", f"run_folder={tmp_path}", "run_name=a"]) == 0
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["peak_mem_gib"] == pytest.approx(summary["estimated_mem_gib"], rel=0.2)


@pytest.mark.parametrize("ema", [["ema.decay=0.9"], ["ema.decay=0.9", "ema.device=cpu", "ema.every=2"]])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_on_a_gpu_is_saved_and_goes_on(tmp_path, precision, ema):
    """To rounding: a GPU's sums need not come in the same order twice."""
    words = [*TINY_RUN, "--use_synth_data", "--use_ema", *ema, f"precision={precision}", "save.every_images=32"]
    for name, durations in {"whole": ["8ba"], "part": ["4ba", "8ba"]}.items():
        for duration in durations:
            assert (
                benchmark.main([*words, f"max_duration={duration}", f"run_folder={tmp_path}", f"run_name={name}"]) == 0
            )
    one, two = (
        read_checkpoint(list_checkpoints(tmp_path / name / "checkpoints", FULL)[0]) for name in ("whole", "part")
    )
    for section in (lambda content: content["model"], lambda content: content["ema"]["weights"]):
        for name, tensor in section(one).items():
            torch.testing.assert_close(tensor, section(two)[name], rtol=1e-3, atol=1e-3)
    assert one["ema"]["steps"] == two["ema"]["steps"] and one["scaler"] == two["scaler"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_the_kernel_of_low_memory_adamw_equals_the_operators_bit_for_bit(states, dtype):
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = [(7,), (4099,), (1000, 256), (3 * 2**21 + 512,)]  # small, not whole blocks, several pieces
    starts = [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]
    both = [[torch.nn.Parameter(start.clone()) for start in starts] for _ in range(2)]
    options = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, states=states, seed=3)
    kernel, operators = (SmallAdamW([{"params": each, "weight_decay": 0.1}], **options) for each in both)
    operators.has_kernel = False
    for _ in range(3):
        for one, other in zip(*both, strict=True):
            one.grad = torch.randn(one.shape, generator=generator, device="cuda").to(dtype)
            other.grad = one.grad.clone()
        kernel.step()
        operators.step()
    for one, other in zip(*both, strict=True):
        assert torch.equal(one, other), one.shape
        for name, value in kernel.state[one].items():
            assert torch.equal(value, operators.state[other][name]), (one.shape, name)


def test_the_batch_size_of_evaluation_is_tried_with_the_gradients_and_the_networks_that_measure(tmp_path, monkeypatch):
    (tmp_path / "prompts.tsv").write_text("image_id\tid\tcaption\n1\t1\ta cat\n2\t2\ta dog\n")
    tiny, options = ModelConfig(preset="tiny", weights="random"), dict(size=(64, 64), seed=1)
    model = build_model(tiny, ObjectiveConfig(), normalize="symmetric", **options)
    model.to_device(torch.device("cuda"), "bf16")
    found, tried = [], []
    config = EvalConfig(prompts=str(tmp_path / "prompts.tsv"), clip="random", sampler="ddim")
    scorer = Scorer(config, on_batch_size=found.append, **options)
    generate = model.generate

    def scarce(text, noise, **ways):
        tried.append((len(noise), next(scorer.meter.pair.network.parameters()).device.type))
        if len(noise) > 8:
            raise torch.cuda.OutOfMemoryError("too many")
        return generate(text, noise, **ways)

    monkeypatch.setattr(model, "generate", scarce)
    scorer.find_batch_size(model)
    assert tried == [(64, "cuda"), (32, "cuda"), (16, "cuda"), (8, "cuda")]
    assert found == [8] == [scorer.batch_size]
    assert np.isfinite(scorer.score(model, 8.0)["clip"])


@pytest.mark.parametrize(("trainer", "key"), [("Trainer", "--use_ema"), ("NonBlockingTrainer", "async_loss=true")])
def test_no_step_waits_for_the_gpu_on_our_account_and_with_async_loss_none_at_all(tmp_path, monkeypatch, trainer, key):
    waits = GpuWaits()
    monkeypatch.setattr(builders, trainer, watched(getattr(builders, trainer), waits, range(3, 6)))
    words = [*TINY_RUN, "--use_synth_data", key, "optimizer.clip_norm=1", "max_duration=8ba"]
    words += ["measure.window_batches=20", "measure.warmup_batches=0", f"run_folder={tmp_path}", "run_name=a"]
    assert benchmark.main(words) == 0
    if trainer == "Trainer":
        assert waits.of("composer"), "its seven reads a step are not seen: the driver's warnings are not caught"
        assert waits.of("ours") == {}
    else:
        assert waits.found == {}


def test_figures_are_those_of_a_cpu():
    images, found = torch.rand(3, 16, 3, 96, 96, generator=torch.Generator().manual_seed(1)), []
    for name in ("cpu", "cuda"):
        meter = Meter(inception=None, statistics=None, resize="bilinear299", clip="random")
        with meter.on(torch.device(name)):
            for batch in images:
                meter.add(batch.to(name), range(16), ["a cat"] * 16)
            found.append(meter.figures())
    assert found[0]["num_images"] == found[1]["num_images"] == 48
    assert found[1]["clip"] == pytest.approx(found[0]["clip"], abs=1e-4)


def test_a_stop_waits_for_a_few_seconds_of_queued_steps_at_most():
    busy = torch.randn(8192, 8192, device="cuda")

    def multiply(number: int) -> None:
        for _ in range(number):
            torch.mm(busy, busy.T)
        torch.cuda.synchronize()

    multiply(2)
    began = time.monotonic()
    multiply(10)
    products_a_step = max(1, round(0.08 / (time.monotonic() - began) * 10))
    pace, began = Pace(), time.monotonic()
    for _ in range(100):  # 8 s in all, on whichever GPU
        for _ in range(products_a_step):
            torch.mm(busy, busy.T)
        pace.step()
    queued, since = time.monotonic() - began, time.monotonic()
    torch.cuda.synchronize()
    left = time.monotonic() - since
    assert left < QUEUE_SEC + 1.0 and (queued > 1.0 or left < 1.0)


def test_in_fp16_a_gpu_rounds_as_a_cpu_does():
    images = torch.rand(16, 3, 96, 96, generator=torch.Generator().manual_seed(1))
    found = []
    for name in ("cpu", "cuda"):
        meter = Meter(inception=None, statistics=None, resize="bilinear299", clip="random", precision="fp16")
        with meter.on(torch.device(name)):
            meter.add(images.to(name), range(16), ["a cat"] * 16)
            found.append(meter.figures()["clip"])
    assert found[1] == float(np.float16(found[1])) == pytest.approx(found[0], abs=2e-3)


def test_a_profile_of_a_gpu_has_the_times_of_kernels(tmp_path):
    words = [*TINY_RUN, "--use_synth_data", "max_duration=8ba", "profile.batches=3", f"run_folder={tmp_path}"]
    assert benchmark.main([*words, "run_name=a"]) == 0
    assert "Self CUDA time total" in (tmp_path / "a" / "profile" / "table.txt").read_text()
