"""Runs of older versions resume: tests/golden/run_of_before.tar.xz was written by the code of commit f7a93be.

It is a tiny network of the family shapes after two batches. Its float tensors were replaced by a short pattern to keep the
file small. The expected values are that commit's after two more batches, as float64 sums of absolute values.
"""

from __future__ import annotations

import json
import tarfile

import pytest
import torch
from conftest import ROOT

import benchmark
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
    with tarfile.open(ROOT / "tests/golden/run_of_before.tar.xz") as tar:
        tar.extractall(tmp_path / "runs", filter="data")
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
