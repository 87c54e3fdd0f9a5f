"""A folder of videos through prepare.shards and prepare.latents to runs on two ranks, killed and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import run, started, tree
from numbered_videos import film
from test_checkpoints import newest, same_training
from test_resume import composer, kill_after

pytestmark = pytest.mark.slow

WAN = ["model.family=wan", "model.variant=t2v", "model.preset=tiny", "model.weights=random"]
CLIP = ["image_size=[48,32]", "num_frames=5"]
EVERY_BATCH = ["global_batch_size=4", "measure.window_batches=1", "measure.warmup_batches=1", "save.every_images=4"]


@pytest.fixture(scope="module")
def stages(tmp_path_factory) -> Path:
    """Datasets of 24 videos and three unusable ones, as the commands make them."""
    folder = tmp_path_factory.mktemp("run")
    for part in ("trained", "held_out"):
        films = folder / f"{part}-films"
        films.mkdir()
        for number in range(27 if part == "trained" else 12):
            kind = {"codec": "libvpx-vp9", "kind": "webm"} if number % 5 == 1 else {"audio": "aac"}
            content = film(16 + number % 7, rate=(8, 10, 24)[number % 3], size=((64, 48), (48, 64))[number % 2], **kind)
            name = films / f"{number:03d}.{'webm' if 'codec' in kind else 'mp4'}"
            name.write_bytes(content[: len(content) // 2] if number >= 24 else content)
            name.with_suffix(".txt").write_text(f"{part} film {number}")
        done = run("python", "-m", "prepare.shards", str(films), str(folder / part), "shard_size=16kb")
        assert done.returncode == 0, done.stderr
    counts = json.loads((folder / "trained" / "dataset.json").read_text())["counts"]
    assert counts["written"] == 24 and counts["skipped"] == {"truncated or damaged video": 3}
    moments = [str(folder / "trained"), str(folder / "moments"), *WAN, *CLIP]
    done = run("composer", "-n", "2", "-m", "prepare.latents", *moments)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("stage", ["videos", "moments"])
@pytest.mark.timeout(400, func_only=True)
def test_two_ranks_that_train_on_videos_are_killed_and_resume_bit_for_bit(stages, tmp_path, stage):
    data = {"videos": f"data.remote={stages}/trained data.fps=8 data.flip=true data.crop=random"}
    data["moments"] = f"data.remote={stages}/moments"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle moves\na blue one\nnothing moves\n")
    more = f"{data[stage]} data.stage={stage} data.workers=1 validation.remote={stages}/held_out run_folder={tmp_path} "
    more += f"samples.prompts={prompts} samples.every_images=16 eval.samples=3 eval.steps=2 validation.num_samples=10 "
    more += "validation.every_images=16 max_duration=8ba save.keep=99 loggers.progress_bar=false"

    def words(name: str) -> list[str]:
        return [*WAN, *CLIP, *EVERY_BATCH, *more.split(), f"run_name={name}", f"data.local={tmp_path}/cache_{name}"]

    composer(2, words("whole"))
    with started("composer", "-n", "2", "benchmark.py", *words("part")) as process:
        kill_after(process, tmp_path / "part", 3, is_launcher=True)
    done = composer(2, words("part"))
    assert "resumes from batch" in done.stderr
    assert same_training(newest(tmp_path, "part"), newest(tmp_path, "whole"))
    lines = list(map(json.loads, (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()))
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 8 and all(0 < loss < 100 for loss in losses) and any("val_loss" in line for line in lines)
    # Captions; after 0, 16 and 32 videos a grid, a GIF, and a file of each video.
    whole, part = (tree(tmp_path / name / "samples") for name in ("whole", "part"))
    assert len(whole) == 1 + 3 * (2 + 3) and part == whole
