"""The contract of every family and variant, in its tiny preset: from its columns to a run that resumes.

A family that is added here has to pass all of it; its own numbers (against diffusers, papers) are in a separate file.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, TINY_RUN, with_frames
from test_checkpoints import newest, same_training

import benchmark
import eval as eval_command
from checkpointing.files import FULL, list_checkpoints, read_checkpoint
from families import FAMILIES, load_family
from families.encoders import ModelConfig
from families.objectives import ObjectiveConfig
from model import LatentDiffusion, build_model
from prepare import latents
from training import speed
from training.speed import SpeedKeys
from weights.tensors import build_on_meta

VARIANTS = {
    "sd2": ("stock", "mlperf", "sd15"),
    "sdxl": ("stock",),
    "sd3": ("medium", "large"),
    "flux": ("dev", "schnell", "mlperf"),
    "flux2": ("dev", "klein_4b", "klein_9b"),
    "prx": ("flux", "dc_ae"),
    "qwen_image": ("stock",),
    "sana": ("1600m", "600m"),
    "mochi": ("stock",),
    "hunyuan_video": ("stock",),
    "wan": ("i2v", "t2v", "t2v_1.3b", "ti2v_5b", "i2v_5b"),
    "shapes": ("stock", "flow", "moving"),
}
MEMBERS = [(name, variant) for name, variants in VARIANTS.items() for variant in variants]


SIZE = (96, 64)
TRAINED = [("sd2", "stock"), ("sdxl", "stock"), ("flux", "dev"), ("shapes", "flow")]
"""Those that run whole: each network and each way of conditioning once."""
TRAINED_ON_VIDEO = [("mochi", "stock"), ("hunyuan_video", "stock"), ("wan", "i2v")]
CAPTIONS = ["a red circle", "a dog on a beach", "", "word " * 600]
RECIPES = sorted((ROOT / "yamls").glob("*_synthetic*.yaml"))
DECAY = 0.75
RUN = [
    *TINY_RUN, "max_duration=6ba", "data.workers=0", "model.weights=random", "optimizer.lr=1e-3", "measure.window_batches=1",
    "ema.enabled=true", f"ema.decay={DECAY}", "save.every_images=8", "save.keep=99", "save.snapshot_every_images=0",
    "schedule.warmup_batches=0",
]  # fmt: skip
SAME_BLOCKS = {("sd2", "sd15"), ("flux", "schnell"), ("flux", "mlperf"), ("wan", "t2v_1.3b")}  # as another variant has
every_member = pytest.mark.parametrize(("name", "variant"), MEMBERS)
every_network = pytest.mark.parametrize(("name", "variant"), [each for each in MEMBERS if each not in SAME_BLOCKS])


def tiny(name: str, variant: str, size: tuple[int, ...] = SIZE, weights="random", **objective) -> LatentDiffusion:
    """Return a tiny model on the CPU; of a family of videos one of three latent frames where no number is given."""
    config = ModelConfig(name, "tiny", variant, weights=weights)
    size = size if len(size) > 2 else with_frames(name, size, variant)
    model = build_model(config, ObjectiveConfig(**objective), size=size, normalize="symmetric", seed=0)
    return model.to_device(torch.device("cpu"), "fp32")


def without_zeros(model: LatentDiffusion) -> LatentDiffusion:
    """Draw the denoiser's layers that start at zero, which would hide all else."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.denoiser.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05, generator=generator)
    return model


# --- what it says of itself ---


@pytest.mark.parametrize("name", FAMILIES)
def test_an_unknown_value_of_a_family_is_refused_with_the_known_ones(name):
    assert VARIANTS.keys() == FAMILIES.keys()
    with pytest.raises(
        ValueError, match=f"^model.variant: {name} has no variant 'x'. Known: {', '.join(VARIANTS[name])}.$"
    ):
        load_family(name, "tiny", "x")
    family = load_family(name, "tiny", VARIANTS[name][0])
    with pytest.raises(ValueError, match=f"^data.stage: {name} has no dataset 'x'. Known: {family.media}, moments.$"):
        family.columns("x", with_frames(name, (64, 64)))


PARAMETERS = {
    ("sd2", "stock"): (865_910_724, {"vae": 83_653_863, "text": 340_387_840}),
    ("sd2", "mlperf"): (865_910_724, {"vae": 83_653_863, "text": 340_387_840}),
    ("sd2", "sd15"): (859_520_964, {"vae": 83_653_863, "text": 123_060_480}),
    ("sdxl", "stock"): (2_567_463_684, {"vae": 83_653_863, "text": 123_060_480, "text_2": 694_659_840}),
    ("flux", "dev"): (11_901_408_320, {"vae": 83_819_683, "text": 123_060_480, "t5": 4_762_310_656}),
    ("flux", "schnell"): (11_891_178_560, {"vae": 83_819_683, "text": 123_060_480, "t5": 4_762_310_656}),
    ("flux", "mlperf"): (11_891_178_560, {"vae": 83_819_683, "text": 123_060_480, "t5": 4_762_310_656}),
    ("sd3", "medium"): (2_243_171_520, {"vae": 83_819_683, "text": 0.124, "text_2": 694_659_840, "t5": 4_762_310_656}),
    ("sd3", "large"): (8_056_627_520, {"vae": 83_819_683, "text": 0.124, "text_2": 694_659_840, "t5": 4_762_310_656}),
    ("flux2", "dev"): (32.223, {"vae": 0.084, "text": 17.900}),
    ("flux2", "klein_4b"): (3.876, {"vae": 0.084, "text": 3.215}),
    ("flux2", "klein_9b"): (9.079, {"vae": 0.084, "text": 6.025}),
    ("prx", "flux"): (1.171, {"vae": 83_819_683, "gemma": 2_614_341_888}),
    ("prx", "dc_ae"): (1.171, {"vae": 0.312, "gemma": 2_614_341_888}),
    ("qwen_image", "stock"): (20.430, {"vae": 0.127, "qwen": 7.071}),
    ("sana", "1600m"): (1.604, {"vae": 0.312, "gemma": 2_614_341_888}),
    ("sana", "600m"): (0.592, {"vae": 0.312, "gemma": 2_614_341_888}),
    ("mochi", "stock"): (10.028, {"vae": 0.460, "t5": 4.762}),
    ("hunyuan_video", "stock"): (12.821, {"vae": 0.246, "text": 0.123, "llama": 7.069}),
    ("wan", "i2v"): (16.395, {"vae": 0.127, "umt5": 5.681, "clip": 0.611}),
    ("wan", "t2v"): (14.288, {"vae": 0.127, "umt5": 5.681}),
    ("wan", "ti2v_5b"): (5.000, {"vae": 0.705, "umt5": 5.681}),
    ("wan", "i2v_5b"): (5.000, {"vae": 0.705, "umt5": 5.681}),
    ("wan", "t2v_1.3b"): (1.419, {"vae": 0.127, "umt5": 5.681}),
}
"""Of the denoiser and the encoders, exactly or in billions: those of the published files, or what the authors name.

Wan's image to video has 2.1 billion more for the states of its first frame, in each block.
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), PARAMETERS)
def test_full_networks_have_the_published_numbers_of_parameters(name, variant):
    family, (denoiser, encoders) = load_family(name, "full", variant), PARAMETERS[name, variant]
    parts = {"denoiser": build_on_meta(family.build_denoiser), **build_on_meta(family.build_encoders)}
    counts = {part: sum(p.numel() for p in module.parameters()) for part, module in parts.items()}
    expected = {"denoiser": denoiser, **encoders}
    in_units = {p: n if isinstance(expected.get(p), int) else round(n / 1e9, 3) for p, n in counts.items()}
    assert in_units == expected


# --- a step ---


@every_member
def test_a_family_leads_from_its_columns_to_a_prediction(name, variant):
    """Shapes and types are those of the columns."""
    family, size = load_family(name, "tiny", variant), with_frames(name, SIZE, variant)
    torch.manual_seed(0)
    encoders, denoiser = family.build_encoders(), family.build_denoiser()
    assert set(family.overflow_encoders) <= encoders.keys()
    images, moments = family.columns(family.media, size)[family.media], family.columns("moments", size)["moments"]
    # Images of the benchmark are not rounded.
    image_dtype = torch.float32 if (name, variant) == ("sd2", "mlperf") else torch.uint8
    assert (images.shape, images.dtype) == ((3, *size[2:], size[1], size[0]), image_dtype)
    assert moments.dtype == torch.float16

    encoded = family.encode_images(encoders, torch.zeros(2, *images.shape))
    noise = torch.randn(2, *family.latent_shape(size))
    latents = family.sample_latents(encoded, noise)
    assert encoded.shape == (2, *moments.shape) and latents.shape == noise.shape
    tokens = family.tokenize(["a cat", ""])
    for column, values in tokens.items():
        promised = family.columns("moments", size)[column]
        assert values.shape == (2, *promised.shape) and values.dtype == promised.dtype
        assert values.min() >= 0 and values.max() < promised.below
    condition = family.encode_text(encoders, tokens)
    stored = family.columns("moments", size, stored_text=True)
    passthrough = family.passthrough_values(size)
    image_columns = family.encode_image_columns(encoders, torch.zeros(2, *images.shape))
    assert image_columns.keys() == family.image_columns(size).keys()
    assert stored.keys() == {"moments", *condition, *image_columns, *passthrough} and stored["moments"] == moments
    condition |= image_columns
    for column, states in condition.items():
        assert states.shape == (2, *stored[column].shape) and stored[column].dtype == torch.float16
    times = family.build_objective(ObjectiveConfig()).draw_times(2, torch.Generator().manual_seed(0))
    for column, values in passthrough.items():
        assert stored[column] == family.columns(family.media, size)[column]
        assert values.shape == (1, *stored[column].shape) and values.dtype == stored[column].dtype
        condition[column] = values.expand(2, *values.shape[1:])
    assert family.denoise(denoiser, latents, times, condition).shape == latents.shape


@pytest.mark.slow
@every_member
def test_the_loss_falls_on_one_batch_and_gradients_reach_exactly_the_trained_parameters(name, variant):
    """Within six steps: layers that start at zero pass no gradient on in the first ones."""
    model, generator = tiny(name, variant), torch.Generator().manual_seed(0)
    family, size = model.family, with_frames(name, SIZE, variant)
    columns, passthrough = family.columns("moments", size), family.passthrough_values(size)
    drawn = ("moments", *family.image_columns(size))
    batch = {n: torch.randn(4, *columns[n].shape, generator=generator) for n in drawn}
    batch |= family.tokenize(CAPTIONS) | {n: value.expand(4, *value.shape[1:]) for n, value in passthrough.items()}
    assert batch.keys() == columns.keys()
    batch, losses, reached = model.draw(batch, generator), [], set()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(6):
        loss = model.loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        reached |= {n for n, p in model.named_parameters() if p.grad.any()}
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    missed = {n.removeprefix("denoiser.transformer_blocks.1.") for n, _ in model.named_parameters() if n not in reached}
    # The last block of Mochi, SD3 and Qwen-Image, as published, has no text output: the queries for its text are not used.
    unused = {"mochi": {"attn1.add_q_proj.weight", "attn1.norm_added_q.weight"}}
    names = "attn.add_q_proj.weight attn.add_q_proj.bias attn.norm_added_q.weight attn.to_add_out.weight attn.to_add_out.bias"
    names += " txt_mlp.net.0.proj.weight txt_mlp.net.0.proj.bias txt_mlp.net.2.weight txt_mlp.net.2.bias"
    unused["qwen_image"] = {*names.split()}
    unused["sd3"] = {"attn.add_q_proj.weight", "attn.add_q_proj.bias", "attn.norm_added_q.weight"}
    assert missed == unused.get(name, set())
    assert all(p.grad is None for encoder in model.frozen.values() for p in encoder.parameters())
    assert {n.partition(".")[0] for n in model.state_dict()} == {"denoiser"}


@pytest.mark.slow
@every_network
def test_the_speed_keys_apply_to_its_blocks_and_change_only_rounding(name, variant):
    plain, fast = tiny(name, variant), tiny(name, variant)
    is_flat = plain.family.media == "images"
    speed.apply(fast, SpeedKeys(attention="math", gradient_checkpointing=1.0, channels_last=is_flat))
    assert {type(own.processor).__name__ for own in speed.attentions(fast.denoiser)} == {"ChosenAttention"}
    assert any(type(module).__name__.startswith("Checkpointed") for module in fast.denoiser.modules())
    assert speed.denoiser_parts(fast.denoiser, "blocks")
    generator = torch.Generator().manual_seed(0)
    columns = plain.family.columns("moments", with_frames(name, SIZE, variant), stored_text=True)
    batch = {n: torch.randn(2, *c.shape, generator=generator).to(c.dtype) for n, c in columns.items()}
    batch = plain.draw(batch, generator)
    for model in (plain, fast):
        model.loss(model(batch), batch).backward()
    gradients, expected = ([p.grad for p in model.parameters()] for model in (fast, plain))
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-4)


def resume_from_second_batch(words: list[str], runs: Path) -> None:
    """Resume a copy of the run `whole` from the checkpoint after its second batch; it has to end as that one did."""
    shutil.copytree(runs / "whole", runs / "killed")
    (runs / "killed" / "summary.json").unlink()
    for path in list_checkpoints(runs / "killed" / "checkpoints", FULL)[:-2]:
        path.unlink()
    assert benchmark.main([*words, "run_name=killed"]) == 0
    assert same_training(newest(runs, "killed"), newest(runs, "whole"))
    assert [line["loss"] for line in lines(runs / "killed")] == [line["loss"] for line in lines(runs / "whole")]


# --- its recipe ---


@pytest.mark.slow
def test_every_family_has_a_recipe_that_the_preset_alone_makes_one_for_a_cpu(monkeypatch, tmp_path, capsys):
    """The header's command with model.preset=tiny; keys of the YAML that need a GPU are left out, typed ones are refused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen = set()
    for path in RECIPES:
        words = [str(path), "model.preset=tiny", f"run_folder={tmp_path}"]
        assert benchmark.main([*words, "--print_config"]) == 0
        config = yaml.safe_load(capsys.readouterr().out)
        assert (config["attention"], config["compile"], config["cudnn_benchmark"]) == ("auto", "off", False)
        seen.add(config["model"]["family"])
    assert seen == FAMILIES.keys() - {"shapes"}  # the miniature's own is for a CPU
    assert benchmark.main([*words, "attention=cudnn"]) == 2
    assert capsys.readouterr().err == "attention: cudnn needs a GPU. Possible on a CPU: auto, flash, math.\n"


# --- a run ---


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(200, func_only=True)
@pytest.mark.parametrize(("name", "variant"), TRAINED)
def test_a_run_from_images_has_finite_losses_and_ema_weights_and_resumes_bit_for_bit(name, variant, stage, tmp_path):
    words = [*RUN, f"model.family={name}", f"model.variant={variant}", f"run_folder={tmp_path}", f"data.remote={stage}"]
    words.append("data.stage=images")
    assert benchmark.main([*words, "run_name=whole"]) == 0
    assert all(0.0 < line["loss"] < 10.0 and line["gradient_norm"] > 0.0 for line in lines(tmp_path / "whole"))
    contents = [read_checkpoint(path) for path in reversed(list_checkpoints(tmp_path / "whole" / "checkpoints", FULL))]
    assert [content["progress"]["batch"] for content in contents] == [1, 2, 3, 4, 5, 6]
    for before, after in itertools.pairwise(contents):
        for key, average in after["ema"]["weights"].items():
            expected = DECAY * before["ema"]["weights"][key].double() + (1 - DECAY) * after["model"][key].double()
            torch.testing.assert_close(average.double(), expected, rtol=1e-5, atol=1e-7)
    resume_from_second_batch(words, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(200, func_only=True)
@pytest.mark.parametrize(("name", "variant"), TRAINED_ON_VIDEO)
def test_a_run_on_videos_resumes_bit_for_bit(name, variant, tmp_path, capsys):
    """Synthetic videos, encoded in each step."""
    words = [*RUN, f"model.family={name}", f"model.variant={variant}", "data.synthetic=true", "data.stage=videos"]
    words += [f"num_frames={with_frames(name, (64, 64))[2]}", "global_batch_size=2", "save.every_images=2"]
    words += ["max_duration=4ba", f"run_folder={tmp_path}"]
    assert benchmark.main([*words, "run_name=whole"]) == 0
    assert all(0.0 < line["loss"] < 10.0 and line["gradient_norm"] > 0.0 for line in lines(tmp_path / "whole"))
    resume_from_second_batch(words, tmp_path)
    assert eval_command.main([str(tmp_path / "whole")]) == 2
    assert f"model.family: {name} makes videos, and FID" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(200, func_only=True)
@pytest.mark.parametrize(("name", "variant"), TRAINED)
def test_moments_and_stored_text_are_made_of_images_and_trained_on(name, variant, stage, tmp_path):
    """The first losses from images, from moments and from stored states differ only by float16's rounding."""
    words = [*RUN, f"model.family={name}", f"model.variant={variant}", f"run_folder={tmp_path}"]
    model = [word for word in words if word.startswith(("model.", "image_size="))]
    plain = ["objective.caption_dropout=0", "data.posterior=mean", "max_duration=1ba", "ema.enabled=false"]
    plain += ["save.every_images=0", "ema.decay=null", "data.shuffle=false"]
    first, moments = [], tmp_path / "moments"
    assert latents.main([str(stage), str(moments), *model, "store_text=true"]) == 0
    for at, kind, text in (
        (stage, "images", "encoded"),
        (moments, "moments", "encoded"),
        (moments, "moments", "stored"),
    ):
        own = [f"data.stage={kind}", f"data.remote={at}", f"data.text={text}", f"run_name={kind}-{text}"]
        assert benchmark.main([*words, *plain, *own]) == 0
        first.append(lines(tmp_path / f"{kind}-{text}")[0]["loss"])
    assert first == pytest.approx([first[0]] * 3, rel=2e-3)
