"""What only a GPU shows: autocast by Composer, the peak that MFU divides by, the memory estimate against the truth."""

from __future__ import annotations

import json
import os

import pytest
import torch
from conftest import TINY_RUN

import benchmark

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        bool(os.environ.get("SKIP_GPU_TESTS")) or not torch.cuda.is_available(),
        reason="no GPU, or SKIP_GPU_TESTS is set",
    ),
]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("stage_name", ["images", "moments"])
def test_every_precision_trains(tmp_path, precision, stage_name):
    words = [
        *TINY_RUN,
        "data.synthetic=true",
        f"data.stage={stage_name}",
        f"precision={precision}",
        "max_duration=20ba",
    ]
    assert benchmark.main([*words, f"run_folder={tmp_path}", "run_name=a", "optimizer.lr=1e-3"]) == 0
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert summary["device"] == torch.cuda.get_device_name() and summary["peak_mem_gib"] > 0


def test_the_memory_estimate_of_sd2_is_near_the_truth(tmp_path):
    words = ["yamls/sd2_512_synthetic_moments.yaml", "global_batch_size=8", "device_train_microbatch_size=8"]
    assert benchmark.main([*words, "max_duration=4ba", f"run_folder={tmp_path}", "run_name=a"]) == 0
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["peak_mem_gib"] == pytest.approx(summary["estimated_mem_gib"], rel=0.2)
