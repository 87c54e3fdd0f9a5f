"""training/trainer.py: the same weights bit for bit, each loss one batch late, nothing saved of a batch with a bad loss."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import TINY_RUN, run
from test_checkpoints import newest, same_training

import benchmark
from checkpointing.files import FULL, list_checkpoints
from model import LatentDiffusion
from run_folder.files import read_lines

pytestmark = pytest.mark.timeout(300, func_only=True)

SYNTHETIC = ["data.synthetic=true", "data.stage=moments", "model.family=shapes", "image_size=32"]
CHECKPOINTS = ["save.every_images=16", "save.keep=9", "--use_ema"]


def words(folder: Path, name: str, *more: str) -> list[str]:
    return [*TINY_RUN, *SYNTHETIC, "measure.warmup_batches=0", f"run_folder={folder}", f"run_name={name}", *more]


def losses_of(folder: Path) -> list[float]:
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl")]


@pytest.mark.slow
def test_weights_losses_and_average_are_those_of_composers_trainer_to_the_bit(tmp_path):
    """Also where Composer's trainer continues a run of the other one. Two ranks: below."""
    more = ["precision=bf16", "optimizer.clip_norm=0.5", *CHECKPOINTS, "max_duration=5ba"]
    assert benchmark.main(words(tmp_path, "plain", *more)) == 0
    assert benchmark.main(words(tmp_path, "async", *more, "async_loss=true")) == 0
    assert benchmark.main(words(tmp_path, "both", *more, "async_loss=true", "max_duration=2ba")) == 0
    assert benchmark.main(words(tmp_path, "both", *more)) == 0
    plain = newest(tmp_path, "plain")
    for name in ("async", "both"):
        other = newest(tmp_path, name)
        assert losses_of(tmp_path / name) == losses_of(tmp_path / "plain") and same_training(other, plain)
        assert {**other["progress"], "seconds": 0} == {**plain["progress"], "seconds": 0}
    assert newest(tmp_path, "async")["callbacks"]["RunRecord"] == plain["callbacks"]["RunRecord"]


@pytest.mark.parametrize("every_images", [8, 80])
def test_nothing_of_a_batch_whose_loss_is_not_finite_is_kept(tmp_path, every_images, monkeypatch, capsys):
    """Found one batch late, or at the checkpoint of the batch itself; the message names the batch all the same."""
    plain, calls = LatentDiffusion.loss, []

    def broken_in_the_fourth(model, outputs, batch):
        calls.append(1)
        loss = plain(model, outputs, batch)
        return loss * float("nan") if len(calls) == 4 else loss

    more = ["async_loss=true", f"save.every_images={every_images}", "max_duration=9ba", "measure.window_batches=7"]
    monkeypatch.setattr(LatentDiffusion, "loss", broken_in_the_fourth)
    assert benchmark.main(words(tmp_path, "a", *more)) == 1
    output = capsys.readouterr().err
    assert re.search(r"^loss: nan in batch 3 \(counted from 0\), first seen on rank 0\. ", output, re.MULTILINE)
    assert "Traceback" not in output
    saved = [int(path.name[7:19]) for path in list_checkpoints(tmp_path / "a" / "checkpoints", FULL)]
    assert (max(saved, default=0), len(calls)) == ((3, 4) if every_images == 8 else (0, 5))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_ranks_have_the_weights_of_composers_trainer_to_the_bit(tmp_path):
    more = [*CHECKPOINTS, "device_train_microbatch_size=2"]
    for name, key in (("plain", "async_loss=false"), ("async", "async_loss=true")):
        done = run("composer", "-n", "2", "benchmark.py", *words(tmp_path, name, *more, key), timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
    assert losses_of(tmp_path / "async") == losses_of(tmp_path / "plain")
    assert same_training(newest(tmp_path, "async"), newest(tmp_path, "plain"))
