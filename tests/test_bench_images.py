"""bench/images.py: contestants read the same pictures, and its record; no speed."""

from __future__ import annotations

import json

import pytest
import torch

from bench import images as bench_images
from bench.micro_data import write_images


def test_what_was_read_before_is_what_is_read_now_to_the_bit_and_the_others_have_as_much(tmp_path):
    write_images(tmp_path, 32)
    found = {name: list(loader) for name, loader in bench_images.loaders(tmp_path).items()}
    for ours, before in zip(found["ours"], found["before"], strict=True):
        assert torch.equal(ours["images"], before["images"]) and torch.equal(ours["tokens"], before["tokens"])
    for batch in found["predecessor"] + found["webdataset"]:
        assert batch["images"].shape == (16, 3, 512, 512) and batch["images"].dtype == torch.float32
        assert batch["images"].min() >= 0 and batch["images"].max() <= 1 and batch["tokens"].shape == (16, 77)


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_the_record_has_every_contestant_and_part(tmp_path, capsys):
    results = tmp_path / "images.json"
    assert bench_images.main(["num_images=32", "rounds=2", f"results={results}", f"work={tmp_path}"]) == 0
    record, printed = json.loads(results.read_text()), capsys.readouterr().out
    for name in ("ours", *bench_images.OTHERS):
        assert record[f"{name}_images_per_sec"] > 0 and record[f"{name}_cpu_us_an_image"] > 0 and name in printed
    parts = sum(record[f"{part}_cpu_us"] for part in bench_images.PARTS)
    assert record["rest_cpu_us"] == pytest.approx(record["ours_cpu_us_an_image"] - parts, abs=0.1)
    assert len(record["by_round"]["ours_images_per_sec"]) == 2 and list(tmp_path.iterdir()) == [results]
