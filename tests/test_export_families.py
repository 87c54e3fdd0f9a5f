"""Models of images and videos written and read back: diffusers' own pipelines and converters of single files; refusals."""

from __future__ import annotations

import json
import shutil
import types
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import test_families
import torch
from exported_runs import save_pipeline
from PIL import Image
from safetensors.torch import save_file
from test_families import without_zeros
from torch import nn

from families import load_family, pipeline_files
from families.encoders import ModelConfig, weights_problems
from families.objectives import ObjectiveConfig
from families.pipeline_files import save_t5_tokenizer
from families.sampling import prompt_generator, prompt_noise
from model import LatentDiffusion, build_model
from training import initial_weights
from weights import ldm_names
from weights.encoder_networks import T5Tokenizer
from weights.tensors import fingerprint

SIZE = (96, 64)
CAPTIONS = ["a red circle, </s> in <pad> Å naïve café! 🐱", "word " * 300]
MODELS = {
    "sdxl": ("sdxl", "stock", "ddim", 5.0),
    "flux_dev": ("flux", "dev", "euler", 3.5),
    "flux_schnell": ("flux", "schnell", "euler", 2.0),  # with a second, unconditional call
    "flux_mlperf": ("flux", "mlperf", "euler", 1.0),
    "sd3_medium": ("sd3", "medium", "euler", 3.5),
    "flux2_dev": ("flux2", "dev", "euler", 3.0),
    "flux2_klein": ("flux2", "klein_4b", "euler", 3.0),
    "prx": ("prx", "flux", "euler", 4.0),
    "prx_dc_ae": ("prx", "dc_ae", "euler", 4.0),
    "qwen_image": ("qwen_image", "stock", "euler", 4.0),
    "sana": ("sana", "1600m", "euler", 4.0),
    "mochi": ("mochi", "stock", "euler", 4.5),
    "hunyuan_video": ("hunyuan_video", "stock", "euler", 6.0),
    "wan_t2v": ("wan", "t2v", "euler", 5.0),
    "wan_ti2v_5b": ("wan", "ti2v_5b", "euler", 5.0),
    "wan_i2v": ("wan", "i2v", "euler", 5.0),
    "wan_i2v_5b": ("wan", "i2v_5b", "euler", 5.0),
}
FIRST_FRAME = (200, 40, 90)  # of one color: transformers rounds a resized image to bytes


def size_of(name: str) -> tuple[int, ...]:
    """Return the size of a model's images, or of its videos with two latent frames."""
    family = load_family(MODELS[name][0], "tiny", MODELS[name][1])
    return SIZE if family.media == "images" else (64, 32, 1 + family.frames_per_latent)


def tiny(name: str) -> LatentDiffusion:
    return without_zeros(test_families.tiny(*MODELS[name][:2], size_of(name)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder of each model, only read."""
    root = tmp_path_factory.mktemp("folders")
    return {name: save_pipeline(tiny(name), root / name, of[2], size_of(name)) for name, of in MODELS.items()}


def networks_of(model: LatentDiffusion) -> dict[str, tuple[nn.Module, ldm_names.NetworkNames]]:
    return dict(pipeline_files.collect_networks(model.family, model.denoiser, model.frozen))


# --- a folder ---


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_plain_diffusers_draws_the_models_images_from_the_folder(name, folders):
    from diffusers import DiffusionPipeline

    (*_, sampler, guidance), model = MODELS[name], tiny(name)
    captions = [CAPTIONS[0], ""] if name == "mochi" else CAPTIONS  # whose empty caption has no token
    tokens, noise = model.family.tokenize(captions), prompt_noise(0, [0, 1], model.latent_shape)
    size, condition, more = size_of(name), None, {}
    if model.image_columns:
        more["image"] = Image.new("RGB", size[:2], FIRST_FRAME)
        frames = torch.from_numpy(np.array(more["image"])).permute(2, 0, 1)[None, :, None].repeat(2, 1, size[2], 1, 1)
        condition = {column: model.encode_images(frames)[column] for column in model.image_columns}
    ours = model.generate(tokens, noise, sampler=sampler, steps=4, guidance=guidance, image_condition=condition)
    pipeline = DiffusionPipeline.from_pretrained(folders[name])
    assert type(pipeline).__name__ == model.family.pipeline.name
    pipeline.set_progress_bar_config(disable=True)
    call = {**model.family.pipeline_call(size, guidance), "num_inference_steps": 4, "output_type": "pt", **more}
    theirs = [  # one by one: diffusers' PRX pipeline cannot take two captions with guidance
        pipeline(prompt=caption, generator=prompt_generator(0, number), return_dict=False, **call)[0][0]
        for number, caption in enumerate(captions)
    ]
    theirs = torch.stack(theirs)
    if model.family.media == "videos":
        theirs = theirs.transpose(1, 2)  # it has the frames first
    assert ours.std() > 0.05 and float((ours[0] - ours[1]).abs().max()) > 0.02
    assert ours.shape == theirs.shape and float((ours - theirs).abs().max()) < 2e-5


def test_the_settings_are_those_of_the_published_folders(folders):
    """model_index.json and scheduler_config.json of stabilityai's SDXL base, black-forest-labs' FLUX.1 dev and schnell."""

    def stated(name: str, file: str) -> dict:
        return json.loads((folders[name] / file).read_text())

    dynamic = {"use_dynamic_shifting": True, "shift": 3.0, "base_shift": 0.5, "max_shift": 1.15}
    dynamic |= {"base_image_seq_len": 256, "max_image_seq_len": 4096, "num_train_timesteps": 1000}
    static = {"use_dynamic_shifting": False, "shift": 1.0, "_class_name": "FlowMatchEulerDiscreteScheduler"}
    encoders = {"text_encoder": ["transformers", "CLIPTextModel"], "force_zeros_for_empty_prompt": True}
    encoders |= {"text_encoder_2": ["transformers", "CLIPTextModelWithProjection"]}
    for name, file, expected in (
        ("sdxl", "model_index.json", encoders),
        ("sdxl", "tokenizer/tokenizer_config.json", {"pad_token": "<|endoftext|>"}),
        ("sdxl", "tokenizer_2/tokenizer_config.json", {"pad_token": "!"}),
        ("flux_dev", "model_index.json", {"text_encoder_2": ["transformers", "T5EncoderModel"]}),
        ("flux_dev", "scheduler/scheduler_config.json", dynamic),
        ("flux_schnell", "scheduler/scheduler_config.json", static),
    ):
        assert expected.items() <= stated(name, file).items(), (name, file)


def test_the_second_tokenizer_of_flux_gives_the_familys_tokens_from_bytes_and_from_words(tmp_path):
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, "red": 5, "circle": 6}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "plain.json"))
    special = [AddedToken(name, special=True) for name in ("<pad>", "</s>", "<unk>")]
    words.add_special_tokens(special)  # as T5's has them
    words.save(str(tmp_path / "added.json"))
    captions = ["", "a red circle </s> red", *CAPTIONS]
    for file in (None, tmp_path / "plain.json", tmp_path / "added.json"):
        ours = T5Tokenizer(16, file)
        folder = tmp_path / f"of_{file and file.stem}"
        assert save_t5_tokenizer(folder, ours.published, 16) == "PreTrainedTokenizerFast"
        theirs = PreTrainedTokenizerFast.from_pretrained(folder)
        tokens = theirs(captions, padding="max_length", max_length=16, truncation=True, return_tensors="pt").input_ids
        for tokenizer in (ours, T5Tokenizer(16, folder / "tokenizer.json")):
            assert torch.equal(tokenizer(captions), tokens), file


# --- and back ---


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_is_read_back_as_encoders_and_as_initial_weights(name, folders):
    first, prediction = tiny(name), "epsilon" if name == "sdxl" else "flow"
    family, variant, *_ = MODELS[name]
    config = ModelConfig(family, "tiny", variant, weights=str(folders[name]), denoiser=str(folders[name]))
    assert weights_problems(first.family, str(folders[name])) == [] == initial_weights.problems(config, prediction)
    assert pipeline_files.read_stated_objective(folders[name])["prediction"] == prediction
    again = build_model(config, ObjectiveConfig(), size=size_of(name), normalize="symmetric", seed=1)
    assert fingerprint(again.denoiser) != fingerprint(first.denoiser)
    assert initial_weights.load(again, str(folders[name])) == [f"begins with {folders[name]}"]
    assert fingerprint(again.denoiser) == fingerprint(first.denoiser)
    assert again.encoders.fingerprints == first.encoders.fingerprints
    for column, tokens in first.family.tokenize(CAPTIONS).items():
        assert torch.equal(again.family.tokenize(CAPTIONS)[column], tokens)


def misfits(name: str, place: Path) -> list[str]:
    config = ModelConfig(MODELS[name][0], "tiny", MODELS[name][1], denoiser=str(place))
    return [problem.text for problem in initial_weights.problems(config, None)]


def test_a_folder_of_another_model_is_refused_with_its_kind(folders, tmp_path):
    [of_config, of_names] = misfits("flux_dev", folders["flux_schnell"])
    assert "/transformer/config.json has guidance_embeds False, this model's has True" in of_config
    assert "4 missing (time_text_embed.guidance_embedder.linear_1.weight" in of_names
    assert misfits("flux_schnell", folders["flux_mlperf"]) == []  # the same network
    text, of_scheduler = misfits("flux_dev", folders["sdxl"])
    assert text.startswith(f"model.denoiser: {folders['sdxl']}: has no transformer/. ")
    assert "trained on epsilon, this run has objective.prediction=flow" in of_scheduler
    family = load_family("flux", "tiny", "dev")
    texts = weights_problems(family, str(folders["sdxl"]))
    assert any("vae/config.json has scaling_factor 0.13025, this model's has 0.3611: " in text for text in texts)
    folder = Path(shutil.copytree(folders["flux_dev"], tmp_path / "broken"))
    (folder / "tokenizer_2/tokenizer.json").unlink()
    [text] = weights_problems(family, str(folder))
    assert text.startswith(f"tokenizer_2: {folder}/tokenizer_2/tokenizer.json is missing, ")


# --- single files ---


def assert_equal(given: Mapping[str, torch.Tensor], expected: nn.Module) -> None:
    state = expected.state_dict()
    assert given.keys() - {"text_model.embeddings.position_ids"} == state.keys()
    assert all(torch.equal(given[name], tensor) for name, tensor in state.items())


def test_sdxls_single_file_is_read_back_by_ours_and_by_diffusers_converters(tmp_path):
    from diffusers.loaders import single_file_utils as theirs

    model = tiny("sdxl")
    tensors = pipeline_files.collect_single_file_tensors(networks_of(model), "fp32")
    file = tmp_path / "sd_xl.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    assert tensors["conditioner.embedders.1.model.text_projection"].shape == (16, 12)
    assert_equal(theirs.convert_ldm_unet_checkpoint(dict(tensors), dict(model.denoiser.config)), model.denoiser)
    vae = model.frozen["vae"]
    assert_equal(theirs.convert_ldm_vae_checkpoint(dict(tensors), dict(vae.config)), vae)
    first = theirs.convert_ldm_clip_checkpoint(dict(tensors))
    assert_equal(first, model.frozen["text"])
    second = model.frozen["text_2"]
    assert_equal(theirs.convert_open_clip_checkpoint(second, dict(tensors), "conditioner.embedders.1.model."), second)

    config = ModelConfig("sdxl", "tiny", weights=str(file))
    other = build_model(config, ObjectiveConfig(), size=SIZE, normalize="symmetric", seed=1)
    assert other.encoders.fingerprints == model.encoders.fingerprints
    assert misfits("sdxl", file) == []
    initial_weights.load(other, str(file))
    assert fingerprint(other.denoiser) == fingerprint(model.denoiser)


@pytest.mark.parametrize("name", ["sd3_medium", "wan_t2v"])
def test_a_model_whose_tensors_have_no_names_in_a_single_file_is_refused(name):
    text = r"^out: a .safetensors file, but denoiser, .* have no names in a single file\. Give the name of a folder\.$"
    with pytest.raises(ValueError, match=text):
        pipeline_files.collect_single_file_tensors(networks_of(tiny(name)), "fp32")


def flux_converter(width: int) -> types.FunctionType:
    """Return diffusers' converter with FLUX's width, which is a constant in its code, replaced."""
    from diffusers.loaders import single_file_utils

    function = single_file_utils.convert_flux_transformer_checkpoint_to_diffusers
    constants = tuple(width if constant == 3072 else constant for constant in function.__code__.co_consts)
    assert constants.count(width) == 1
    return types.FunctionType(function.__code__.replace(co_consts=constants), function.__globals__)


@pytest.mark.parametrize("name", ["flux_dev", "flux_schnell"])
def test_fluxs_single_file_has_its_transformer_alone_as_diffusers_converter_reads_it(name, tmp_path):
    model = tiny(name)
    tensors = pipeline_files.collect_single_file_tensors(networks_of(model), "fp32")
    assert tensors["single_blocks.1.linear1.weight"].shape == (7 * 32, 32)
    assert ("guidance_in.in_layer.weight" in tensors) == (name == "flux_dev")
    assert_equal(flux_converter(32)(dict(tensors)), model.denoiser)

    file = tmp_path / "flux1.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)
    assert misfits(name, file) == []
    config = ModelConfig("flux", "tiny", MODELS[name][1], weights="random")
    again = build_model(config, ObjectiveConfig(), size=SIZE, normalize="symmetric", seed=1)
    initial_weights.load(again, str(file))
    assert fingerprint(again.denoiser) == fingerprint(model.denoiser)
    [text] = weights_problems(model.family, str(file))
    assert text.startswith(f"{file}: is one file, but t5 of this model are read from folders alone.")
