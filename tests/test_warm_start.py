"""model.denoiser: training begins with published weights or an earlier run's, and every invalid value is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import TINY_RUN
from test_encoders import published  # noqa: F401
from test_published_weights import tiny_networks

import benchmark
from checkpointing.files import FULL, WEIGHTS, list_checkpoints, read_checkpoint
from families.encoders import ModelConfig
from families.objectives import ObjectiveConfig
from model import build_model
from training import initial_weights

pytestmark = pytest.mark.timeout(120, func_only=True)


def tiny_model():
    return build_model(ModelConfig(preset="tiny"), ObjectiveConfig(), size=(64, 64), normalize="symmetric", seed=0)


def texts(denoiser: str | Path, prediction: str | None = None, **model) -> list[str]:
    config = ModelConfig(**{"preset": "tiny", "denoiser": str(denoiser), **model})
    return [problem.text for problem in initial_weights.problems(config, prediction)]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory) -> Path:
    """A finished run with EMA weights, a full checkpoint and a snapshot."""
    runs = tmp_path_factory.mktemp("runs")
    words = [*TINY_RUN, "--use_synth_data", "--use_ema", "save.every_images=16", "save.snapshot_every_images=16"]
    assert benchmark.main([*words, f"run_folder={runs}", "run_name=first"]) == 0
    return runs / "first"


@pytest.mark.slow
def test_training_begins_with_a_published_unet(published):  # noqa: F811
    model = tiny_model()
    assert texts(published["ckpt"]) == []
    assert initial_weights.load(model, published["ckpt"]) == [f"begins with {published['ckpt']}"]
    for name, tensor in tiny_networks(seed=5)["denoiser"][0].state_dict().items():
        assert torch.equal(model.denoiser.state_dict()[name], tensor), name


@pytest.mark.long
def test_training_begins_at_another_size_with_an_earlier_runs_training_weights(earlier, tmp_path, monkeypatch):
    """MosaicML's second stage: the first batch's weights are the first run's last; optimizer and counters start over."""
    newest = list_checkpoints(earlier / "checkpoints", FULL)[0]
    weights = read_checkpoint(newest)["model"]
    average = read_checkpoint(newest)["ema"]["weights"]["denoiser.conv_in.weight"]
    assert not torch.equal(average, weights["denoiser.conv_in.weight"])
    monkeypatch.setenv("HOME", str(earlier.parent))
    for place in ("~/first", earlier / "checkpoints", newest, list_checkpoints(earlier / "checkpoints", WEIGHTS)[0]):
        model = tiny_model()
        [note] = initial_weights.load(model, str(place))
        assert texts(place) == [] and note.endswith(".pt (batch 4, 32 images)") and str(place).strip("~") in note
        assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())

    words = [*TINY_RUN, "--use_synth_data", "image_size=128", "optimizer.lr=1e-30", "optimizer.weight_decay=0"]
    words += [f"model.denoiser={earlier}", f"run_folder={tmp_path}", "run_name=second", "save.every_images=16"]
    assert benchmark.main(words) == 0
    content = read_checkpoint(list_checkpoints(tmp_path / "second/checkpoints", FULL)[0])
    assert content["progress"]["batch"] == 4
    assert all(torch.equal(tensor, weights[name]) for name, tensor in content["model"].items())


@pytest.mark.long
def test_a_resumed_run_does_not_read_its_initial_weights(earlier, tmp_path, capsys):
    """They may be gone. The run's own checkpoint counts, and names them."""
    start = tmp_path / list_checkpoints(earlier / "checkpoints", FULL)[0].name
    start.write_bytes(list_checkpoints(earlier / "checkpoints", FULL)[0].read_bytes())
    words = [*TINY_RUN, "--use_synth_data", f"model.denoiser={start}", f"run_folder={tmp_path}", "run_name=a"]
    words.append("save.every_images=16")
    assert benchmark.main(words) == 0
    assert f"model.denoiser: begins with {start} (batch 4, 32 images)" in capsys.readouterr().err
    first = json.loads((tmp_path / "a/summary.json").read_text())["denoiser_start_fingerprint"]
    start.unlink()
    assert benchmark.main([*words, "max_duration=6ba"]) == 0
    output = capsys.readouterr().err
    assert "resumes from batch 4" in output and "begins with" not in output
    assert json.loads((tmp_path / "a/summary.json").read_text())["denoiser_start_fingerprint"] == first != None  # noqa: E711


# --- refused ---
