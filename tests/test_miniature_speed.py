"""Proof on the miniature's own data: steps with all keys of speed have the loss curve of the plain path.

float32 within 1e-4 of each mean of ten losses; bf16 within the spread of two seeds. 200 steps were run once (docs/speed.md).
"""

from __future__ import annotations

import json

import pytest
import torch._dynamo
from conftest import ROOT

import benchmark

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900, func_only=True)]
STEPS = 60
KEYS = {
    "eager": "channels_last=true attention=math gradient_checkpointing=0.5 device_train_microbatch_size=16",
    "compiled": "compile=whole channels_last=true attention=flash gradient_checkpointing=0.5 async_loss=true",
}
"""Each key's own equality over some steps stands in tests/test_speed.py and tests/test_trainer.py."""


@pytest.fixture(scope="module")
def curve(miniature, tmp_path_factory):
    """Run the tiny preset by the miniature's own recipe and return the loss of each window of ten steps."""
    runs, known = tmp_path_factory.mktemp("runs"), {}

    def of(name: str, keys: str = "") -> list[float]:
        if name not in known:
            torch._dynamo.reset()
            words = ["model.preset=tiny", f"max_duration={STEPS}ba", "eval.when=off", "mlperf.enabled=false"]
            words += ["target.fid=null", "target.clip=null", "save.every_images=0", "save.snapshot_every_images=0"]
            assert benchmark.main(miniature.words(runs, name, *words, *keys.split())) == 0
            lines = (runs / name / "metrics.jsonl").read_text().splitlines()
            known[name] = [json.loads(line)["loss"] for line in lines]
            assert len(known[name]) == STEPS // 10
        return known[name]

    return of


@pytest.mark.parametrize("name", ["eager", pytest.param("compiled", marks=pytest.mark.long)])
def test_the_curve_in_float32_is_the_plain_ones(curve, name, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert curve(name, KEYS[name]) == pytest.approx(curve("plain"), rel=1e-4)


def test_bf16_differs_from_float32_by_less_than_a_seed_from_another(curve, monkeypatch):
    monkeypatch.chdir(ROOT)
    plain, other, bf16 = curve("plain"), curve("seed", "seed=18"), curve("bf16", "precision=bf16")

    def furthest(one: list[float]) -> float:
        return max(abs(a - b) for a, b in zip(one, plain, strict=True))

    assert 0.0 < furthest(bf16) < furthest(other)
