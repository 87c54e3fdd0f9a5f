"""model.denoiser: training begins with published weights or an earlier run's, and every invalid value is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import TINY_RUN, cost_made_up
from test_encoders import published  # noqa: F401
from test_ldm import save_folder, tiny_networks

import benchmark
from model import build_model
from record.checkpoint_files import FULL, WEIGHTS, listed, read
from training import warm_start
from zoo.model_config import ModelConfig
from zoo.objectives import ObjectiveConfig

pytestmark = [pytest.mark.timeout(60, func_only=True), pytest.mark.usefixtures("quick_estimate")]
TINY = ModelConfig(preset="tiny")


def tiny_model(variant: str = "stock"):
    config = ModelConfig(preset="tiny", variant=variant)
    return build_model(config, ObjectiveConfig(), size=(64, 64), normalize="symmetric", seed=0)


def texts(
    denoiser: str | Path, variant: str = "stock", preset: str = "tiny", prediction: str | None = None
) -> list[str]:
    config = ModelConfig(preset=preset, variant=variant, denoiser=str(denoiser))
    return [problem.text for problem in warm_start.problems(config, prediction)]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory) -> Path:
    """A finished run with EMA weights, a full checkpoint and a snapshot."""
    runs = tmp_path_factory.mktemp("runs")
    words = [*TINY_RUN, "--use_synth_data", "--use_ema", "save.every_images=16", "save.snapshot_every_images=16"]
    with cost_made_up():
        assert benchmark.main([*words, f"run_folder={runs}", "run_name=first"]) == 0
    return runs / "first"


def test_a_published_unet_is_where_fine_tuning_begins(published):  # noqa: F811
    model = tiny_model()
    assert texts(published["ckpt"]) == []
    assert warm_start.load(model, published["ckpt"]) == [f"begins with {published['ckpt']}"]
    for name, tensor in tiny_networks(seed=5)["denoiser"][0].state_dict().items():
        assert torch.equal(model.denoiser.state_dict()[name], tensor), name


@pytest.mark.slow
def test_an_earlier_run_goes_on_at_another_size_with_its_training_weights(earlier, tmp_path):
    """MosaicML's second stage: the first batch's weights are the first run's last; optimizer and counters begin anew."""
    newest = listed(earlier / "checkpoints", FULL)[0]
    weights = read(newest)["model"]
    for place in (earlier, earlier / "checkpoints", newest, listed(earlier / "checkpoints", WEIGHTS)[0]):
        model = tiny_model()
        [note] = warm_start.load(model, str(place))
        assert texts(place) == [] and note.endswith(".pt (batch 4, 32 images)") and str(place) in note
        assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert not torch.equal(
        read(newest)["ema"]["weights"]["denoiser.conv_in.weight"], weights["denoiser.conv_in.weight"]
    )

    words = [*TINY_RUN, "--use_synth_data", "image_size=128", "optimizer.lr=1e-30", "optimizer.weight_decay=0"]
    words += [f"model.denoiser={earlier}", f"run_folder={tmp_path}", "run_name=second", "save.every_images=16"]
    assert benchmark.main(words) == 0
    content = read(listed(tmp_path / "second/checkpoints", FULL)[0])
    assert content["progress"]["batch"] == 4
    assert all(torch.equal(tensor, weights[name]) for name, tensor in content["model"].items())


def test_a_path_may_begin_at_home(earlier, monkeypatch):
    monkeypatch.setenv("HOME", str(earlier.parent))
    assert texts("~/first") == [] and warm_start.load(tiny_model(), "~/first")[0].startswith(f"begins with {earlier}/")


@pytest.mark.slow
def test_a_run_that_goes_on_needs_no_start(earlier, tmp_path, capsys):
    """What it began from may be gone; its own checkpoint is what counts, and says what it began from."""
    start = tmp_path / listed(earlier / "checkpoints", FULL)[0].name
    start.write_bytes(listed(earlier / "checkpoints", FULL)[0].read_bytes())
    words = [*TINY_RUN, "--use_synth_data", f"model.denoiser={start}", f"run_folder={tmp_path}", "run_name=a"]
    words.append("save.every_images=16")
    assert benchmark.main(words) == 0
    assert f"model.denoiser: begins with {start} (batch 4, 32 images)" in capsys.readouterr().err
    first = json.loads((tmp_path / "a/summary.json").read_text())["denoiser_start_fingerprint"]
    start.unlink()
    assert benchmark.main([*words, "max_duration=6ba"]) == 0
    said = capsys.readouterr().err
    assert "resumes from batch 4" in said and "begins with" not in said
    assert json.loads((tmp_path / "a/summary.json").read_text())["denoiser_start_fingerprint"] == first != None  # noqa: E711


# --- what cannot be ---


def test_another_network_or_target_is_named(earlier, published):  # noqa: F811
    newest = listed(earlier / "checkpoints", FULL)[0]
    [variant, prediction] = texts(earlier, variant="mlperf")
    assert variant == (
        f"model.denoiser: {newest} was trained with model.variant=stock, this run has mlperf. Use that value, or begin "
        "elsewhere."
    )
    assert prediction.startswith(
        f"model.denoiser: {newest} was trained with objective.prediction=epsilon, this run has v."
    )
    [preset] = texts(earlier, preset="full")
    assert preset.startswith(f"model.denoiser: {newest} does not fit: ") and " of another form (" in preset
    assert preset.endswith("Use the model.preset that it was made with.")
    [text] = texts(published["ckpt"], variant="mlperf")
    assert text == (
        f"model.denoiser: {published['ckpt']}: no LDM file says that its denoiser is sd2's in the variant mlperf. Begin with "
        "a run of this variant or its export, or use model.variant=stock."
    )


def test_the_target_that_a_folders_scheduler_names_is_compared(tmp_path):
    folder = Path(save_folder(tmp_path / "folder", tiny_networks()))
    (folder / "scheduler").mkdir()
    config = folder / "scheduler/scheduler_config.json"
    config.write_text(json.dumps({"prediction_type": "v_prediction"}))
    assert texts(folder) == [
        f"model.denoiser: {folder}: its scheduler says that it was trained on v, this run has "
        "objective.prediction=epsilon. Use that value."
    ]
    assert texts(folder, prediction="v") == []
    config.write_text("[")
    assert texts(folder) == []


def test_a_run_without_a_checkpoint_is_named(tmp_path):
    (tmp_path / "config.yaml").touch()
    said = f"model.denoiser: {tmp_path} is a run without a checkpoint. Give one that has been saved, or a file."
    assert texts(tmp_path) == [said]


def test_a_damaged_checkpoint_stops_the_run_before_it_begins(earlier, tmp_path, capsys):
    newest = listed(earlier / "checkpoints", FULL)[0]
    damaged = tmp_path / newest.name
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    words = [*TINY_RUN, "--use_synth_data", f"model.denoiser={damaged}", f"run_folder={tmp_path}", "run_name=a"]
    assert benchmark.main(words) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"model.denoiser: {damaged} is damaged: its bytes do not have the digest in its name. Bring back a copy, or give "
        "another checkpoint."
    ]
