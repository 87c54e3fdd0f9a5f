"""training/copy_stream.py: which batches it copies. That the copies are correct is tested on a GPU (tests/gpu)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import benchmark
from data import DataConfig
from training.run_config import RunConfig
from zoo import load_family


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_the_batches_of_a_stage_are_copied_by_it_where_it_is_asked_for(stage, monkeypatch, is_asked_for):
    cpu = torch.device("cpu")
    monkeypatch.setattr(benchmark, "CopyStream", lambda device: lambda batch: ("copied to", device))
    data = DataConfig(remote=str(stage), workers=0)
    config = RunConfig(global_batch_size=8, image_size=64, async_loss=True, copy_stream=is_asked_for, data=data)
    networks = SimpleNamespace(model=SimpleNamespace(family=load_family("sd2", "tiny", "stock"), device=cpu), stages=[])
    spec = benchmark.build_batches(config, networks, SimpleNamespace(batch=0), bool)
    try:
        batch = {"images": torch.zeros(1)}
        assert spec.batch_transforms(batch) == (("copied to", cpu) if is_asked_for else batch)
    finally:
        spec.dataloader.close()
