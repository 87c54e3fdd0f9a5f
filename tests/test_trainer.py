"""training/trainer.py: the same weights bit for bit, each loss one batch late, nothing saved of a batch with a bad loss."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import TINY_RUN, run

import benchmark
from callbacks.losses import AsyncLosses
from record.checkpoint_files import FULL, listed, read

pytestmark = [pytest.mark.timeout(300, func_only=True), pytest.mark.usefixtures("quick_estimate")]

SYNTHETIC = ["data.synthetic=true", "data.stage=moments", "measure.warmup_batches=0"]
SYNTHETIC += ["model.family=shapes", "image_size=32"]
CHECKPOINTS = ["save.every_images=16", "save.keep=9", "--use_ema"]


def words(folder: Path, name: str, *more: str) -> list[str]:
    return [*TINY_RUN, *SYNTHETIC, f"run_folder={folder}", f"run_name={name}", *more]


def lines(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def newest(folder: Path, name: str) -> dict:
    return read(listed(folder / name / "checkpoints", FULL)[0])


@pytest.mark.slow
@pytest.mark.parametrize("more", [["device_train_microbatch_size=2"], ["precision=bf16", "optimizer.clip_norm=0.5"]])
def test_weights_losses_and_average_are_those_of_composers_trainer_to_the_bit(tmp_path, capsys, more):
    more = [*more, *CHECKPOINTS, "max_duration=5ba"]
    assert benchmark.main(words(tmp_path, "plain", *more)) == 0
    assert benchmark.main(words(tmp_path, "async", *more, "async_loss=true")) == 0
    assert [line["loss"] for line in lines(tmp_path, "async")] == [line["loss"] for line in lines(tmp_path, "plain")]
    plain, asynchronous = newest(tmp_path, "plain"), newest(tmp_path, "async")
    assert plain["progress"]["batch"] == asynchronous["progress"]["batch"] == 5
    assert {k: v for k, v in plain["progress"].items() if k != "seconds"} == {
        k: v for k, v in asynchronous["progress"].items() if k != "seconds"
    }
    for tensors in ("model", "ema"):
        ours, theirs = (c[tensors] if tensors == "model" else c["ema"]["weights"] for c in (asynchronous, plain))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys()
    assert asynchronous["callbacks"]["RunRecord"] == plain["callbacks"]["RunRecord"]


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_bits_with_either_trainer(tmp_path, capsys):
    assert benchmark.main(words(tmp_path, "unbroken", *CHECKPOINTS)) == 0
    assert benchmark.main(words(tmp_path, "a", *CHECKPOINTS, "async_loss=true", "max_duration=2ba")) == 0
    assert benchmark.main(words(tmp_path, "a", *CHECKPOINTS)) == 0
    assert [line["loss"] for line in lines(tmp_path, "a")] == [line["loss"] for line in lines(tmp_path, "unbroken")]


@pytest.mark.parametrize("every_images", [8, 16, 80])
def test_nothing_of_a_batch_whose_loss_is_not_finite_is_kept(tmp_path, every_images, monkeypatch, capsys):
    """Found one batch late, or at the checkpoint of the batch itself; the message names the batch all the same."""
    plain = benchmark.LatentDiffusion.loss

    def broken_in_the_fourth(model, outputs, batch):
        broken_in_the_fourth.calls += 1
        loss = plain(model, outputs, batch)
        return loss * float("nan") if broken_in_the_fourth.calls == 4 else loss

    more = ["async_loss=true", f"save.every_images={every_images}", "max_duration=9ba", "measure.window_batches=7"]
    assert benchmark.main([*words(tmp_path, "a", *more), "--print_config"]) == 0  # traces the loss, once a process
    broken_in_the_fourth.calls = 0
    monkeypatch.setattr(benchmark.LatentDiffusion, "loss", broken_in_the_fourth)
    assert benchmark.main(words(tmp_path, "a", *more)) == 1
    told = capsys.readouterr().err
    assert re.search(r"^loss: nan in batch 3 \(counted from 0\), first seen on rank 0\. ", told, re.MULTILINE)
    assert "Traceback" not in told
    kept = [read(path)["progress"]["batch"] for path in listed(tmp_path / "a" / "checkpoints", FULL)]
    assert max(kept, default=0) == {8: 3, 16: 2, 80: 0}[every_images]
    assert broken_in_the_fourth.calls == (5 if every_images == 80 else 4)


def test_losses_come_in_the_order_of_the_batches_and_the_newest_is_left():
    losses = AsyncLosses()
    for batch in range(3):
        losses.put(batch, torch.tensor([float(batch)]))
    assert [(loss.batch, loss.mean, loss.own) for loss in losses.take(leave=1)] == [(0, 0.0, 0.0), (1, 1.0, 1.0)]
    assert losses.take(leave=1) == [] and [loss.batch for loss in losses.take(leave=0)] == [2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_have_the_weights_of_composers_trainer_to_the_bit(tmp_path):
    more = [*CHECKPOINTS, "device_train_microbatch_size=2"]
    for name, key in (("plain", "async_loss=false"), ("async", "async_loss=true")):
        done = run("composer", "-n", "2", "benchmark.py", *words(tmp_path, name, *more, key), timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
    assert [line["loss"] for line in lines(tmp_path, "async")] == [line["loss"] for line in lines(tmp_path, "plain")]
    plain, asynchronous = newest(tmp_path, "plain")["model"], newest(tmp_path, "async")["model"]
    assert all(torch.equal(asynchronous[name], tensor) for name, tensor in plain.items())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_keep_their_curve_with_the_keys_of_speed(tmp_path):
    """The keys under DDP: one graph with checkpointed blocks in it, NHWC gradients in its buckets."""
    keys = ["compile=whole", "channels_last=true", "gradient_checkpointing=0.5", "async_loss=true"]
    small = ["measure.window_batches=1", "data.workers=0"]
    for name, more in (("plain", []), ("fast", keys)):
        command = ["composer", "-n", "2", "tests/compiled_ranks.py", *words(tmp_path, name, *small, *more)]
        done = run(*command, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
    plain, fast = ([line["loss"] for line in lines(tmp_path, name)] for name in ("plain", "fast"))
    assert len(plain) == 4 and fast == pytest.approx(plain, rel=1e-4)
    summary = json.loads((tmp_path / "fast" / "summary.json").read_text())
    assert summary["compiled_graphs"] > 0
