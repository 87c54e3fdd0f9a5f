"""Others' weights in every form: as a place that eval.py draws from and scores beside a run, and to begin a training with."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from miniature import WEIGHTS
from PIL import Image
from test_ldm import as_ldm, write
from test_pictures import told_by
from torch import nn

import benchmark
import eval as eval_command
from evaluation.score_table import read_rows
from training import places, warm_start
from weights import ldm_names
from weights.hub import _listing
from weights.ldm_names import forms
from zoo import load_family
from zoo.encoders import build_encoders
from zoo.model_config import ModelConfig

pytestmark = pytest.mark.timeout(120, func_only=True)
FAMILY = load_family("shapes", "tiny", "stock")
SHAPES = ["model.family=shapes", "model.preset=tiny"]
MODEL = ModelConfig(family="shapes", preset="tiny")
SCHEDULE = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "num_train_timesteps": 1000}


def unet(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return FAMILY.build_denoiser()


def named(module: nn.Module, way: str) -> dict[str, torch.Tensor]:
    return as_ldm({"denoiser": (module, forms(ldm_names.unet(module))[way])})


def scheduler(folder: Path, **stated: object) -> None:
    (folder / "scheduler").mkdir(parents=True, exist_ok=True)
    text = json.dumps({**SCHEDULE, "prediction_type": "v_prediction", **stated})
    (folder / "scheduler" / "scheduler_config.json").write_text(text)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """One UNet in every form, in the files also another one, and encoders: the shipped ones."""
    root, one, other = tmp_path_factory.mktemp("theirs"), unet(1), unet(2)
    encoders = build_encoders(FAMILY, None).modules
    for folder in (root / "whole", root / "alone"):
        one.save_pretrained(folder / "unet")
        scheduler(folder)
    encoders["vae"].save_pretrained(root / "whole" / "vae")
    encoders["text"].text_model.save_pretrained(root / "whole" / "text_encoder")
    classes = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "text_encoder": "CLIPTextModel"}
    parts = {part: ["diffusers", name] for part, name in classes.items()} | {"safety_checker": [None, None]}
    index = {"_class_name": "StableDiffusionPipeline", "scheduler": ["diffusers", "DDIMScheduler"], **parts}
    (root / "whole" / "model_index.json").write_text(json.dumps(index))
    of_encoders = {name: (module, FAMILY.published()[name](module)) for name, module in encoders.items()}
    write({**named(one, "training"), **as_ldm(of_encoders)}, root / "whole.safetensors")
    write(named(one, "training"), root / "alone.ckpt")
    for way in ("bare", "own"):
        write(named(one, way), root / f"{way}.safetensors")
    counts = {"model_ema.decay": torch.ones(()), "model_ema.num_updates": torch.ones(())}
    write({**named(one, "ema"), **named(other, "training"), **counts}, root / "both.ckpt")
    write({**named(one, "ema"), **counts}, root / "ema.ckpt")
    return root


ALONE = ("alone", "alone/unet", "alone.ckpt", "bare.safetensors", "own.safetensors", "both.ckpt", "ema.ckpt")


def draw(place: object, out: Path, *more: str) -> tuple[np.ndarray, Mapping]:
    words = [f"images={out}", "prompts=[a red circle]", "eval.steps=2", "eval.guidance=2", *SHAPES, *more]
    assert eval_command.main([str(place), *words]) == 0
    [path] = out.glob("0*.png")
    told = told_by(path)
    assert told is not None
    return np.asarray(Image.open(path)), told


@pytest.mark.slow
def test_one_network_draws_one_image_in_whatever_form_it_is_published(theirs, tmp_path, capsys):
    whole, told = draw(theirs / "whole", tmp_path / "whole")
    assert whole.shape == (32, 32, 3)  # the UNet's sample_size, by the family's own pixels per latent
    assert (told["model"], told["weights"], told["prediction"]) == ("whole", "published", "v")
    assert "does not say what its network predicts" not in capsys.readouterr().err
    at = ["image_size=32"]  # a file does not say it
    assert np.array_equal(draw(theirs / "whole.safetensors", tmp_path / "file", *at)[0], whole)
    said = f"eval: {theirs}/whole.safetensors does not say what its network predicts: taken to be v. Say objective.prediction"
    assert said in capsys.readouterr().err
    for name in ALONE:
        image, told = draw(theirs / name, tmp_path / name.replace("/", "-"), "model.weights=shipped", *at)
        assert np.array_equal(image, whole), name
        assert told["weights"] == ("ema" if name in ("both.ckpt", "ema.ckpt") else "published"), name
    image, told = draw(theirs / "both.ckpt", tmp_path / "tr", "model.weights=shipped", "eval.weights=training", *at)
    assert told["weights"] == "training" and not np.array_equal(image, whole)


@pytest.mark.slow
def test_a_name_on_the_hub_is_a_place_and_brings_what_is_needed_alone(theirs, hub, tmp_path, capsys):
    whole, _ = draw(theirs / "whole", tmp_path / "whole")
    at = ["model.weights=shipped", "image_size=32"]
    hub.add("they/whole", theirs / "whole")
    image, told = draw("they/whole", tmp_path / "named")
    assert np.array_equal(image, whole) and told["model"] == "they/whole"
    hub.asked.clear()
    _listing.cache_clear()
    commit = hub.add("they/unet", {**files(theirs / "alone/unet"), "README.md": b"-", "x/config.json": b"-"})
    image, told = draw(f"they/unet@{commit}", tmp_path / "unet", *at)
    assert np.array_equal(image, whole) and told["model"] == f"they/unet@{commit}"
    assert sorted(hub.sent) == ["config.json", "diffusion_pytorch_model.safetensors"]
    stated = {"scheduler/scheduler_config.json": b'{"prediction_type": "v_prediction"}'}
    hub.add("they/file", {"both.ckpt": (theirs / "both.ckpt").read_bytes(), "more.ckpt": b"-", **stated})
    image, told = draw("hf://they/file/both.ckpt", tmp_path / "file", *at)
    assert np.array_equal(image, whole) and (told["model"], told["weights"]) == ("they/file/both.ckpt", "ema")
    assert "both.ckpt does not say what its network predicts" not in capsys.readouterr().err  # its repository does

    assert eval_command.main(["they/none", f"images={tmp_path}/x", "prompts=[a]"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("they/none is neither a path here nor a ")


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_training_begins_with_a_unet_in_whatever_form(theirs, hub, tmp_path):
    """A file that has both gives its training weights, as a run does; half precision is widened, and said."""
    hub.add("they/unet", theirs / "alone/unet")
    half = write({name: tensor.half() for name, tensor in named(unet(1), "training").items()}, tmp_path / "half.ckpt")
    for place in (*(str(theirs / name) for name in ALONE), str(theirs / "whole"), half, "they/unet"):
        begun = benchmark_model(place)
        expected = unet(2 if place.endswith("both.ckpt") else 1).state_dict()
        for name, tensor in begun.denoiser.state_dict().items():
            assert torch.equal(tensor, expected[name].half().float() if place == half else expected[name]), (
                place,
                name,
            )


def benchmark_model(place: str):
    from model import build_model
    from zoo.model_config import fetched
    from zoo.objectives import ObjectiveConfig

    config = fetched(ModelConfig(family="shapes", preset="tiny", weights="shipped", denoiser=place))
    assert warm_start.problems(config, None) == []
    model = build_model(config, ObjectiveConfig(), size=(32, 32), normalize="symmetric", seed=3)
    notes = warm_start.load(model, str(config.denoiser))
    assert notes[0].startswith("begins with ") and ("float16" in notes[-1]) == ("half" in place)
    assert ("training weights" in notes[0]) == place.endswith("both.ckpt")
    return model


@pytest.mark.slow
def test_ours_and_theirs_are_in_one_table_and_on_one_curve(theirs, miniature, tmp_path, capsys):
    own = ["ema.decay=0.5", "save.snapshot_every_images=16", "eval.guidance=2"]
    assert benchmark.main(miniature.small(tmp_path, "ours", *own)) == 0
    words = [str(tmp_path / "ours"), str(theirs / "alone"), str(theirs / "both.ckpt"), "model.weights=shipped", *SHAPES]
    scored = [f"eval.prompts={miniature.prompts}", f"eval.clip={WEIGHTS}/clip/model.safetensors", "eval.num_prompts=4"]
    words += [
        *scored,
        "eval.statistics=null",
        "eval.inception=null",
        "eval.steps=2",
        "eval.sampler=ddim",
        "image_size=32",
    ]
    capsys.readouterr()
    assert eval_command.main([*words, "snapshots=all", "eval.guidance=2", f"out={tmp_path}/curve"]) == 0
    rows = read_rows(tmp_path / "curve/eval.csv")
    assert [(row["model"], row.get("images"), row["weights"]) for row in rows] == [
        ("ours", 16, "ema"),
        ("ours", 32, "ema"),
        ("alone", None, "published"),
        ("both.ckpt", None, "ema"),
    ]
    assert rows[2]["clip"] == rows[3]["clip"] and all(math.isfinite(row["clip"]) for row in rows)
    assert (tmp_path / "curve/eval.png").is_file()
    snapshot = next((tmp_path / "ours/checkpoints").glob("weights-im000000000016-*"))
    assert eval_command.main([str(snapshot), *words[3:], "eval.guidance=2", f"out={tmp_path}/one"]) == 0
    [row] = read_rows(tmp_path / "one/eval.csv")
    assert (row["images"], row["clip"]) == (16, rows[0]["clip"])


# --- what cannot be ---


def refused(capsys, place: object, out: Path, *more: str) -> list[str]:
    capsys.readouterr()
    assert eval_command.main([str(place), f"images={out}", "prompts=[a]", "eval.steps=2", *SHAPES, *more]) == 2
    return capsys.readouterr().err.splitlines()


def test_a_model_of_another_class_is_named_with_it(tmp_path, capsys):
    (tmp_path / "dit").mkdir()
    (tmp_path / "dit/config.json").write_text('{"_class_name": "DiTTransformer2DModel"}')
    (tmp_path / "dit/diffusion_pytorch_model.safetensors").write_bytes(
        (WEIGHTS / "vae/diffusion_pytorch_model.safetensors").read_bytes()
    )
    said = refused(capsys, tmp_path / "dit", tmp_path / "x", "model.weights=shipped")
    assert said[0] == (
        f"model.denoiser: {tmp_path}/dit/config.json has _class_name DiTTransformer2DModel, this model's has "
        "UNet2DConditionModel: it is of another model. Give this model's."
    )


def test_the_config_beside_a_unets_file_is_compared(theirs, tmp_path):
    folder = tmp_path / "unet"
    shutil.copytree(theirs / "alone/unet", folder)
    file, config = folder / "diffusion_pytorch_model.safetensors", folder / "config.json"
    place = dataclasses.replace(MODEL, denoiser=str(file))
    assert warm_start.problems(place, "v") == []
    stated = json.loads(config.read_text())
    config.write_text(json.dumps({**stated, "norm_num_groups": 1}))
    [problem] = warm_start.problems(place, "v")
    assert problem.text == (
        f"model.denoiser: {config} has norm_num_groups 1, this model's has {stated['norm_num_groups']}: it is of another "
        "model. Give this model's."
    )
    for other in ("[", "[1]", '{"norm_num_groups": 1}'):  # a config.json of something else
        config.write_text(other)
        assert warm_start.problems(place, "v") == []


def test_an_export_says_which_network_it_has(tmp_path, capsys):
    (tmp_path / "unet").mkdir()
    (tmp_path / "model_index.json").write_text('{"unet": ["mixed_norms", "UNet2DConditionMixedNorms"]}')
    (tmp_path / "export.json").write_text('{"family": "sd2", "variant": "mlperf", "preset": 7, "seed": 1}')
    place = places.find(str(tmp_path), ModelConfig(), encoders=True)
    assert places.of_export(place) == {"model.family": "sd2", "model.variant": "mlperf"}
    (tmp_path / "export.json").write_text('{"family": "sd3"}')
    said = "model.family: unknown family 'sd3'. Known: flux, hunyuan_video, mochi, sd2, sdxl, shapes, wan."
    assert eval_command.main([str(tmp_path), f"images={tmp_path}/x", "prompts=[a]"]) == 2
    assert said in capsys.readouterr().err.splitlines()


def test_a_folder_with_nothing_to_score_is_told_by_what_it_has(tmp_path, capsys):
    (tmp_path / "a\x1b[31m.txt").touch()
    possible = "a run (runs/NAME) or its snapshot, others' weights (diffusers folder, LDM file, name on the hub)"
    assert refused(capsys, tmp_path, tmp_path / "x") == [
        f"{tmp_path} has neither config.yaml, model_index.json, unet/, transformer/ nor images: a\\x1b[31m.txt. "
        f"Possible: {possible}, a folder of images."
    ]


@pytest.mark.slow
def test_what_others_weights_lack_or_say_otherwise_is_refused(theirs, tmp_path, capsys):
    given = (
        f"model.weights: not given, and {theirs}/alone has no autoencoder and no text encoder. Give those that it was"
    )
    assert refused(capsys, theirs / "alone", tmp_path / "x") == [
        f"{given} trained with: folder, file or name on the hub."
    ]
    with_encoders = ["model.weights=shipped", "image_size=32"]
    said = f"eval.weights: ema, but {theirs}/alone.ckpt has no model_ema.*. Say eval.weights=training."
    assert refused(capsys, theirs / "alone.ckpt", tmp_path / "x", "eval.weights=ema", *with_encoders) == [said]
    for number, (stated, said) in enumerate(
        (
            (
                {"prediction_type": "sample"},
                "model.denoiser: {}: its scheduler has prediction_type sample. Possible: epsilon, v_prediction.",
            ),
            (
                {"beta_schedule": "linear", "beta_end": 0.02},
                "eval.sampler: {} was trained with another schedule: beta_schedule linear, not scaled_linear, beta_end 0.02, "
                "not 0.012. No sampler here has it.",
            ),
        )
    ):
        folder = tmp_path / str(number)
        unet(1).save_pretrained(folder / "unet")
        scheduler(folder, **stated)
        assert refused(capsys, folder, tmp_path / "x", *with_encoders) == [said.format(folder)]
    said = f"model.denoiser: {theirs}/alone: its scheduler says that it was trained on v, this run has objective.prediction="
    assert refused(capsys, theirs / "alone", tmp_path / "x", "objective.prediction=epsilon", *with_encoders) == [
        f"{said}epsilon. Use that value."
    ]
    [problem] = warm_start.problems(ModelConfig(family="shapes", preset="tiny", denoiser=f"{theirs}/alone"), "epsilon")
    assert problem.text == f"{said}epsilon. Use that value."
