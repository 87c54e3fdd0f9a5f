"""The moving miniature: its scenes and videos, how motion is read, its family against diffusers, and its recipe."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import test_families
import torch
from conftest import ROOT
from omegaconf import OmegaConf
from test_families import without_zeros

import benchmark
import eval as eval_command
from bench import motion as motion_command
from bench.motion import motion_in
from families import load_family
from families.encoders import build_encoders
from families.sampling import flow_times
from families.shapes import family as shapes_family
from families.shapes import networks
from families.shapes.scenes import (
    COLOURS,
    DIRECTIONS,
    NUM_FRAMES,
    WORDS,
    MovingScene,
    draw_moving_scene,
    list_moving_scenes,
)
from mds.videos import inspect_video
from model import LatentDiffusion
from prepare import latents, shapes, shards
from prepare.shapes import VideoSet, draw_jitter, render_moving
from run_folder import sample_videos

YAML = ROOT / "yamls/shapes_moving.yaml"
SIZE = (48, 32, 9)
SCENES = [draw_moving_scene(number, 5) for number in range(80)]


def video_of(scene: MovingScene, number: int = 0) -> torch.Tensor:
    return render_moving(scene, 32, draw_jitter(number, 5)[0])


# --- scenes and videos ---


def test_every_scene_has_its_own_caption_that_the_text_encoder_reads_whole():
    """All words but two that say nothing are known."""
    scenes = list_moving_scenes()
    captions = {scene.caption for scene in scenes}
    assert len(scenes) == len(captions) == 2 * 8 * 4 * 7 * 4 * 3 == 5376
    assert Counter(scene.direction for scene in scenes) == dict.fromkeys(DIRECTIONS, 1344)
    assert all(scene.caption in captions and scene.part == "training" for scene in SCENES)
    assert {word for caption in captions for word in caption.split()} - set(WORDS) == {"moving", "to"}
    assert max(len(caption.split()) for caption in captions) + 2 <= networks.NUM_TOKENS  # with start and end


def test_motion_is_read_as_it_was_drawn_and_an_object_stays_inside():
    for number, scene in enumerate(SCENES):
        video = video_of(scene, number)
        edge = torch.cat([video[:, :, 0], video[:, :, -1], video[..., 0], video[..., -1]], dim=-1)
        assert (edge == torch.tensor(COLOURS[scene.background])[:, None, None]).all(), scene.caption
        assert motion_in(video) == (scene.direction, scene.place), scene.caption


def test_the_command_writes_videos_with_their_captions(tmp_path):
    assert shapes.main([str(tmp_path / "tars"), "world=moving", "num_images=3", "seed=3"]) == 0
    with tarfile.open(tmp_path / "tars/00000.tar") as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}
    scene = draw_moving_scene(2, 3)
    assert files["000000002.txt"].decode() == scene.caption
    assert json.loads(files["000000002.json"])["direction"] == scene.direction
    info = inspect_video(files["000000002.mp4"])
    assert (info.width, info.height, info.num_frames, info.fps) == (32, 32, NUM_FRAMES, 8.0)


# --- how motion is read off ---


# --- the family, and its shipped VAE ---


@pytest.fixture
def tiny() -> LatentDiffusion:
    return without_zeros(test_families.tiny("shapes", "moving", SIZE, weights="shipped", caption_dropout=0.0))


def test_videos_are_those_of_diffusers_pipeline(tiny, monkeypatch):
    """Times to 1000, guidance, means and deviations of the latents: Wan's pipeline with the same parts.

    The positions of latents as extra channels are only ours; they are added on the way.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    class LinearTimes(FlowMatchEulerDiscreteScheduler):
        def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
            super().set_timesteps(sigmas=list(flow_times(num_inference_steps)), device=device)

    noise = torch.randn(2, *tiny.family.latent_shape(SIZE), generator=torch.Generator().manual_seed(0))
    tokens = tiny.family.tokenize([scene.caption for scene in SCENES[:2]])
    made = tiny.generate(tokens, noise, sampler="euler", steps=4, guidance=2.0)
    states, empty = (tiny.family.encode_text(tiny.frozen, t)["text"] for t in (tokens, tiny.family.tokenize(["", ""])))
    vae: Any = tiny.frozen["vae"]
    means, stds = list(shapes_family.MOVING_LATENT_MEANS), list(shapes_family.MOVING_LATENT_STDS)
    vae.register_to_config(latents_mean=means, latents_std=stds, scale_factor_spatial=4)
    pipeline = WanPipeline(None, None, vae=vae, scheduler=LinearTimes(shift=3.0), transformer=tiny.denoiser)
    own = tiny.denoiser.forward
    axes = [torch.tensor([-1.0, 0.0, 1.0]), torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 12)]
    positions = torch.stack(torch.meshgrid(*axes, indexing="ij"))

    def forward(hidden_states: torch.Tensor, **more: Any) -> Any:
        return own(torch.cat([hidden_states, positions.expand(len(hidden_states), -1, -1, -1, -1)], dim=1), **more)

    monkeypatch.setattr(tiny.denoiser, "forward", forward)
    pipeline.set_progress_bar_config(disable=True)
    options: dict[str, Any] = dict(zip(("width", "height", "num_frames"), SIZE, strict=True))
    options |= dict(num_inference_steps=4, guidance_scale=2.0, output_type="pt", latents=noise)
    theirs = pipeline(prompt_embeds=states, negative_prompt_embeds=empty, **options).frames.transpose(1, 2)
    assert made.shape == theirs.shape == (2, 3, 9, 32, 48) and float((made - theirs).abs().max()) < 2e-5


@pytest.mark.slow
def test_the_shipped_video_vae_keeps_motion_and_its_constants_are_those_of_its_file():
    folder = networks.WEIGHTS / "video_vae"
    told, config = (json.loads((folder / name).read_text()) for name in ("quality.json", "config.json"))
    assert list(shapes_family.MOVING_LATENT_MEANS) == config["latents_mean"] == told["latent_mean_of_channels"]
    assert list(shapes_family.MOVING_LATENT_STDS) == config["latents_std"] == told["latent_std_of_channels"]
    vae = build_encoders(load_family("shapes", "full", "moving"), "shipped").modules["vae"]
    scenes = [draw_moving_scene(number, 5, "reference") for number in range(32)]
    videos = torch.stack([video_of(scene, number) for number, scene in enumerate(scenes)]) / 127.5 - 1
    with torch.no_grad():
        latents = vae.encode(videos).latent_dist.sample(torch.Generator().manual_seed(0))
        rebuilt = ((vae.decode(latents).sample.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    seen = [motion_in(video).direction for video in rebuilt]
    assert seen == [scene.direction for scene in scenes]
    scaled = load_family("shapes", "full", "moving").normalize_latents(latents).transpose(0, 1).flatten(1)
    assert scaled.mean(dim=1).abs().max() < 0.25 and (scaled.std(dim=1) - 1).abs().max() < 0.15


# --- the recipe ---


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Videos, their latents, held-out ones, and prompts."""
    folder = tmp_path_factory.mktemp("moving")
    of_family = ["model.family=shapes", "model.variant=moving", "image_size=32", "num_frames=9", "batch_size=16"]
    for name, words in {"videos": ["num_images=96"], "held-out": ["num_images=32", "part=reference"]}.items():
        assert shapes.main([str(folder / f"{name}-tars"), "world=moving", *words]) == 0
        assert shards.main([str(folder / f"{name}-tars"), str(folder / name)]) == 0
        assert latents.main([str(folder / name), str(folder / f"{name}-moments"), *of_family]) == 0
    assert shapes.main([str(folder / "prompts.tsv"), "world=moving", "part=prompts", "num_images=6"]) == 0
    return folder


@pytest.mark.long
@pytest.mark.timeout(240, func_only=True)
def test_the_recipe_shortened_runs_validates_draws_and_is_read_off_afterwards(made, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    words = [f"data.remote={made}/videos-moments", "data.local=null", "data.workers=0", "max_duration=48ba"]
    words += [f"validation.remote={made}/held-out-moments", "validation.local=null", "validation.every_images=384"]
    words += [f"samples.prompts={made}/prompts.tsv", "samples.every_images=768", "eval.samples=4", "eval.steps=3"]
    words += [f"run_folder={tmp_path}", "run_name=short", "loggers.progress_bar=false", "schedule.warmup_batches=2"]
    words += ["validation.num_samples=32", "save.snapshot_every_images=768"]
    assert benchmark.main([str(YAML), *words]) == 0
    run = tmp_path / "short"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["val_loss"] for line in lines if line.get("validation")]
    assert len(losses) == 3 and all(later < earlier for earlier, later in pairwise(losses)), losses

    for at in (f"im{images:012d}" for images in (0, 768)):
        names = {path.relative_to(run / "samples").as_posix() for path in (run / "samples").rglob(f"{at}*")}
        assert names >= {f"{at}.png", f"{at}.gif", at} and len(list((run / "samples" / at).glob("*.mp4"))) == 4
    assert sample_videos.read_mp4(run / "samples/im000000000768/03.mp4").shape == (3, 9, 32, 32)

    drawn, record = tmp_path / "drawn", tmp_path / "motion.json"
    drawing = [str(run), f"images={drawn}", f"prompts={made}/prompts.tsv"]
    assert eval_command.main(drawing) == 0 and eval_command.main(drawing) == 0
    assert "drawn=0 " in capfd.readouterr().out  # the second time
    assert motion_command.main([f"videos={drawn}", f"results={record}"]) == 0
    [case] = json.loads(record.read_text())["cases"]
    assert (case["num_videos"], case["num_captions"], case["images_seen"]) == (6, 6, 768)
    assert case["direction"] == sum(n for seen, n in case["seen"].items() if seen.split()[0] == seen.split()[2]) / 6


def test_the_motion_command_reads_drawn_videos_right(tmp_path):
    """Videos of the captions themselves, and of other captions."""
    wanted = VideoSet(40, 32, 5, "prompts", "one", "own")
    for number in range(40):
        scene, other = wanted.scene(number), wanted.scene((number + 1) % 40)
        for name, caption in (("own", scene.caption), ("others", other.caption)):
            comment = json.dumps({"prompt": caption, "model": name, "images_seen": 7, "weights": "ema"})
            sample_videos.write_mp4(tmp_path / name / f"{number:02d}.mp4", video_of(scene, number), 8.0, comment)
    assert motion_command.main([f"videos={tmp_path}/own,{tmp_path}/others", f"results={tmp_path}/m.json"]) == 0
    own, others = json.loads((tmp_path / "m.json").read_text())["cases"]
    assert own["direction"] == own["place"] == 1.0 and own["model"] == "own"
    assert others["direction"] < 0.5


# --- what the page says, against the records: `make controls-video` makes them ---

RECORDS, PAGE = ROOT / "reports/results/shapes_moving", ROOT / "docs/miniature.md"
SAID = {name: f"seed {name[4:]}" for name in ("seed17", "seed18", "seed19")}
SAID["shuffled"] = "captions shuffled in training"


def test_things_move_as_unseen_captions_say_with_shuffled_ones_they_do_not_and_the_page_has_the_records():
    runs = {path.stem: json.loads(path.read_text()) for path in RECORDS.glob("*.json") if path.stem in SAID}
    motion = {case["model"]: case for case in json.loads((RECORDS / "motion.json").read_text())["cases"]}
    assert runs.keys() == motion.keys() == SAID.keys() and len({record["commit"] for record in runs.values()}) == 1
    page, recipe, last = PAGE.read_text(), OmegaConf.load(YAML), {}
    for name, text in SAID.items():
        case, validations = motion[name], runs[name]["validations"]
        first, last[name] = (validations[place]["val_loss"] for place in (0, -1))
        assert runs[name]["status"] == "ok" and (case["num_videos"], case["num_captions"]) == (256, 256)
        assert last[name] < 0.25 * first, name
        assert case["direction"] < 0.35 if name == "shuffled" else case["direction"] >= 0.8, name
        row = f"| {text} | {first:.3f} | {last[name]:.3f} | {case['direction']:.3f} | {case['place']:.3f} |"
        assert row in page
        assert validations[-1]["images"] == int(recipe.max_duration.removesuffix("ba")) * recipe.global_batch_size
    assert last.pop("shuffled") > 1.1 * max(last.values())
