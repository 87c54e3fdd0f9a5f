"""Runs and moments of older versions go on: what tests/golden holds was written with torch 2.7.0 and transformers 4.57.6.

run_of_before.tar.xz is a tiny network of the family shapes after two batches, by the code of commit f7a93be. Its float
tensors were replaced by a short pattern to keep the file small. The expected values are that commit's after two more batches,
as float64 sums of absolute values. moments_of_before.tar.xz is a stage of eight images and its moments, by commit 0104eb6.
"""

from __future__ import annotations

import json
import tarfile

import numpy as np
import pytest
import torch
from conftest import ROOT, unpack_older_run
from streaming import StreamingDataset

import benchmark
from prepare import latents
from record.checkpoint_files import find_newest, read

KEYS = [
    "model.family=shapes", "model.preset=tiny", "model.weights=random", "image_size=32", "data.synthetic=true",
    "data.stage=moments", "global_batch_size=4", "device_train_microbatch_size=2", "ema.enabled=true",
    "ema.decay=0.9", "optimizer.lr=1e-3", "save.every_images=8", "save.snapshot_every_images=null",
    "measure.warmup_batches=1", "measure.window_batches=1", "loggers.progress_bar=false", "late_loss=true",
    "run_name=of_before", "max_duration=4ba",
]  # fmt: skip
WEIGHTS_SUM, EMA_SUM, LOSS = 16349.36123628578, 17810.76417768578, 1.75395


def absolute_sum(content) -> float:
    if isinstance(content, torch.Tensor):
        return content.double().abs().sum().item() if content.is_floating_point() else 0.0
    return sum(map(absolute_sum, content.values())) if isinstance(content, dict) else 0.0


@pytest.mark.timeout(60, func_only=True)
def test_a_run_that_an_older_version_began_ends_as_it_would_have_there(tmp_path, monkeypatch, capsys):
    unpack_older_run(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert benchmark.main(KEYS) == 0
    out, err = capsys.readouterr()
    assert "runs/of_before resumes from batch 2, 8 images" in err
    assert f"loss={LOSS}" in out
    content = read(find_newest(tmp_path / "runs/of_before/checkpoints"))
    assert content["progress"]["batch"] == 4
    assert absolute_sum(content["model"]) == pytest.approx(WEIGHTS_SUM, rel=1e-7)
    assert absolute_sum(content["ema"]) == pytest.approx(EMA_SUM, rel=1e-7)
    lines = [json.loads(line) for line in (tmp_path / "runs/of_before/metrics.jsonl").read_text().splitlines()]
    assert [line["batch"] for line in lines] == [1, 2, 3, 4]


@pytest.mark.timeout(60, func_only=True)
def test_moments_that_an_older_version_wrote_are_trained_from_and_come_out_again(tmp_path, monkeypatch, capsys):
    with tarfile.open(ROOT / "tests/golden/moments_of_before.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    assert latents.main(["images", "again", "model.family=shapes", "image_size=32"]) == 0
    before, again = (list(StreamingDataset(local=str(tmp_path / name), batch_size=1)) for name in ("moments", "again"))
    assert len(before) == len(again) == 8
    for old, new in zip(before, again, strict=True):
        assert (old["key"], old["caption"], old["tokens"].tolist()) == (
            new["key"],
            new["caption"],
            new["tokens"].tolist(),
        )
    old, new = (np.stack([sample["moments"] for sample in stage]).astype(np.float32) for stage in (before, again))
    np.testing.assert_allclose(
        new, old, rtol=2**-9, atol=2**-11
    )  # the next float16 or so: another release of the kernels
    assert (new != old).mean() < 0.01
    about = [json.loads((tmp_path / name / "dataset.json").read_text()) for name in ("moments", "again")]
    assert about[0]["encoders"] == about[1]["encoders"]
    words = ["model.family=shapes", "image_size=32", "data.stage=moments", "data.remote=moments", "data.local=cache"]
    words += ["global_batch_size=4", "max_duration=2ba", "data.workers=0", "loggers.progress_bar=false"]
    assert benchmark.main(words) == 0
    assert " batches=2 " in capsys.readouterr().out
