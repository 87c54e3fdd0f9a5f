"""Published weights in every form: eval.py makes images with them and scores them; a training begins with them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tree
from PIL import Image
from test_eval_images import told_by
from test_published_weights import as_ldm, write
from torch import nn

import eval as eval_command
from families import load_family
from families.encoders import ModelConfig, build_encoders
from training import initial_weights
from weights import ldm_names
from weights.ldm_names import list_file_layouts

pytestmark = pytest.mark.timeout(120, func_only=True)
FAMILY = load_family("shapes", "tiny", "stock")
SHAPES = ["model.family=shapes", "model.preset=tiny"]
MODEL = ModelConfig(family="shapes", preset="tiny")
SCHEDULE = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "num_train_timesteps": 1000}


def unet(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return FAMILY.build_denoiser()


def named(module: nn.Module, way: str) -> dict[str, torch.Tensor]:
    return as_ldm({"denoiser": (module, list_file_layouts(ldm_names.unet(module))[way])})


def scheduler(folder: Path, **stated: object) -> None:
    (folder / "scheduler").mkdir(parents=True, exist_ok=True)
    text = json.dumps({**SCHEDULE, "prediction_type": "v_prediction", **stated})
    (folder / "scheduler" / "scheduler_config.json").write_text(text)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """One UNet in every form, in one of the files also another one, and encoders: the shipped ones."""
    root, one, other = tmp_path_factory.mktemp("theirs"), unet(1), unet(2)
    encoders = build_encoders(FAMILY, None).modules
    for folder in (root / "whole", root / "alone"):
        one.save_pretrained(folder / "unet")
        scheduler(folder)
    encoders["vae"].save_pretrained(root / "whole" / "vae")
    encoders["text"].text_model.save_pretrained(root / "whole" / "text_encoder")
    parts = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "text_encoder": "CLIPTextModel"}
    index = {"_class_name": "StableDiffusionPipeline", "scheduler": ["diffusers", "DDIMScheduler"]}
    index |= {part: ["diffusers", name] for part, name in parts.items()} | {"safety_checker": [None, None]}
    (root / "whole" / "model_index.json").write_text(json.dumps(index))
    of_encoders = {name: (module, FAMILY.network_names()[name](module)) for name, module in encoders.items()}
    write({**named(one, "training"), **as_ldm(of_encoders)}, root / "whole.safetensors")
    write(named(one, "training"), root / "alone.ckpt")
    for way in ("bare", "own"):
        write(named(one, way), root / f"{way}.safetensors")
    ema = {**named(one, "ema"), "model_ema.decay": torch.ones(()), "model_ema.num_updates": torch.ones(())}
    write({**ema, **named(other, "training")}, root / "both.ckpt")
    write(ema, root / "ema.ckpt")
    return root


ALONE = ("alone", "alone/unet", "alone.ckpt", "bare.safetensors", "own.safetensors", "both.ckpt", "ema.ckpt")


def draw(place: object, out: Path, *more: str) -> tuple[np.ndarray, Mapping]:
    words = [f"images={out}", "prompts=[a red circle]", "eval.steps=2", "eval.guidance=2", *SHAPES, *more]
    assert eval_command.main([str(place), *words]) == 0
    [path] = out.glob("0*.png")
    metadata = told_by(path)
    assert metadata is not None
    return np.asarray(Image.open(path)), metadata


@pytest.mark.slow
def test_one_network_draws_one_image_in_whatever_form_it_is_published(theirs, tmp_path, capsys):
    whole, metadata = draw(theirs / "whole", tmp_path / "whole")
    assert whole.shape == (32, 32, 3)  # the UNet's sample_size, by the family's own pixels per latent
    assert (metadata["model"], metadata["weights"], metadata["prediction"]) == ("whole", "published", "v")
    assert "does not say what its network predicts" not in capsys.readouterr().err
    at = ["image_size=32"]  # a file does not say it
    assert np.array_equal(draw(theirs / "whole.safetensors", tmp_path / "file", *at)[0], whole)
    text = f"eval: {theirs}/whole.safetensors does not say what its network predicts: taken to be v. Set objective.prediction"
    assert text in capsys.readouterr().err
    for name in ALONE:
        image, metadata = draw(theirs / name, tmp_path / name.replace("/", "-"), "model.weights=shipped", *at)
        assert np.array_equal(image, whole), name
        assert metadata["weights"] == ("ema" if name in ("both.ckpt", "ema.ckpt") else "published"), name
    image, metadata = draw(theirs / "both.ckpt", tmp_path / "tr", "model.weights=shipped", "eval.weights=training", *at)
    assert metadata["weights"] == "training" and not np.array_equal(image, whole)


@pytest.mark.long
def test_a_name_on_the_hub_is_accepted_and_only_the_needed_files_are_downloaded(theirs, hub, tmp_path, capsys):
    whole, _ = draw(theirs / "whole", tmp_path / "whole")
    hub.add("they/whole", theirs / "whole")
    commit = hub.add("they/unet", {**tree(theirs / "alone/unet"), "README.md": b"-", "x/config.json": b"-"})
    stated = {"scheduler/scheduler_config.json": b'{"prediction_type": "v_prediction"}'}
    hub.add("they/file", {"both.ckpt": (theirs / "both.ckpt").read_bytes(), "more.ckpt": b"-", **stated})
    for name in ("they/whole", f"they/unet@{commit}", "hf://they/file/both.ckpt"):
        hub.asked.clear()
        more, model = ["model.weights=shipped", "image_size=32"] * (name != "they/whole"), name.removeprefix("hf://")
        image, metadata = draw(name, tmp_path / model.replace("/", "-"), *more)
        assert np.array_equal(image, whole) and metadata["model"] == model
        if "unet" in name:
            assert sorted(hub.sent) == ["config.json", "diffusion_pytorch_model.safetensors"]
    assert "both.ckpt does not say what its network predicts" not in capsys.readouterr().err  # its repository does
    assert eval_command.main(["they/none", f"images={tmp_path}/x", "prompts=[a]"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("they/none is neither a path here nor a ")


@pytest.mark.long
def test_training_starts_from_a_unet_in_whatever_form(theirs, hub, tmp_path):
    """A file that has both gives its training weights, as a run does; half precision is widened, and reported."""
    hub.add("they/unet", theirs / "alone/unet")
    half = write({name: tensor.half() for name, tensor in named(unet(1), "training").items()}, tmp_path / "half.ckpt")
    for path in (*(str(theirs / name) for name in ALONE), str(theirs / "whole"), half, "they/unet"):
        expected = unet(2 if path.endswith("both.ckpt") else 1).state_dict()
        for name, tensor in benchmark_model(path).denoiser.state_dict().items():
            assert torch.equal(tensor, expected[name].half().float() if path == half else expected[name]), (path, name)


def benchmark_model(place: str):
    from families.encoders import fetch_model_weights
    from families.objectives import ObjectiveConfig
    from model import build_model

    config = fetch_model_weights(ModelConfig(family="shapes", preset="tiny", weights="shipped", denoiser=place))
    assert initial_weights.problems(config, None) == []
    model = build_model(config, ObjectiveConfig(), size=(32, 32), normalize="symmetric", seed=3)
    notes = initial_weights.load(model, str(config.denoiser))
    assert notes[0].startswith("begins with ") and ("float16" in notes[-1]) == ("half" in place)
    assert ("training weights" in notes[0]) == place.endswith("both.ckpt")
    return model


# --- what cannot be ---


def refusal(capsys, path: object, out: Path, *more: str) -> str:
    capsys.readouterr()
    assert eval_command.main([str(path), f"images={out}", "prompts=[a]", "eval.steps=2", *SHAPES, *more]) == 2
    return capsys.readouterr().err


@pytest.mark.long
def test_third_party_weights_that_lack_or_contradict_something_are_refused(theirs, tmp_path, capsys):
    alone, words = theirs / "alone", ["model.weights=shipped", "image_size=32"]

    def refused(path: Path, text: str, *more: str) -> None:
        assert refusal(capsys, path, tmp_path / "x", *more).startswith(text)

    refused(alone, f"model.weights: not given, and {alone} has no autoencoder and no text encoder. ")
    text = f"eval.weights: ema, but {theirs}/alone.ckpt has no model_ema.*. Set eval.weights=training.\n"
    refused(theirs / "alone.ckpt", text, "eval.weights=ema", *words)
    unet(1).save_pretrained(tmp_path / "unet")
    scheduler(tmp_path, prediction_type="sample")
    refused(tmp_path, f"model.denoiser: {tmp_path}: its scheduler has prediction_type sample. Possible: ", *words)
    scheduler(tmp_path, beta_schedule="linear", beta_end=0.02)
    schedule = "beta_schedule linear, not scaled_linear, beta_end 0.02, not 0.012. No sampler here has it."
    refused(tmp_path, f"eval.sampler: {tmp_path} was trained with another schedule: {schedule}", *words)
    text = f"model.denoiser: {alone}: its scheduler says that it was trained on v, this run has objective.prediction="
    refused(alone, text, "objective.prediction=epsilon", *words)
    [problem] = initial_weights.problems(dataclasses.replace(MODEL, denoiser=str(alone)), "epsilon")
    assert problem.text == f"{text}epsilon. Use that value."
