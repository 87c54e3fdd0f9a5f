"""Mochi, HunyuanVideo and Wan against published code and numbers. Contract of all: test_families.py.

What diffusers' pipelines draw is in test_export_families.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_families
import torch

from families import load_family, pipeline_files
from families.encoders import ModelConfig, model_problems
from families.objectives import ObjectiveConfig
from model import LatentDiffusion, build_model
from training import initial_weights
from weights.encoder_networks import CLIP_MEAN, CLIP_STD, LLAMA_PAD
from weights.tensors import fingerprint

SIZE = (48, 32, 13)
CAPTIONS = ["a red circle moves left", "", "café &amp; more"]
CPU = torch.device("cpu")


def tiny(name: str, variant: str = "stock") -> LatentDiffusion:
    return test_families.tiny(name, variant, SIZE)


def with_more_layers(own: Any, depth: int) -> Any:
    """Return transformers' model of so many layers, whose first ones are `own`'s."""
    theirs = type(own)(type(own.config).from_dict({**own.config.to_dict(), "num_hidden_layers": depth})).eval()
    missing, unexpected = theirs.load_state_dict(own.state_dict(), strict=False)
    of_layers = {int(name.split("layers.")[1].split(".")[0]) for name in missing if "layers." in name}
    assert not unexpected and of_layers == set(range(own.config.num_hidden_layers, depth))
    return theirs


def t5_of(model: LatentDiffusion) -> Any:
    """Return transformers' own T5 or UMT5 with a model's weights."""
    from transformers import T5EncoderModel, UMT5EncoderModel

    is_wan = model.family.name == "wan"
    own = model.frozen["umt5" if is_wan else "t5"]
    theirs = (UMT5EncoderModel if is_wan else T5EncoderModel)(own.config).eval()
    theirs.load_state_dict({**own.state_dict(), "encoder.embed_tokens.weight": own.shared.weight})
    return theirs


def with_diffusers_attention(model: LatentDiffusion) -> LatentDiffusion:
    """Give Mochi's blocks diffusers' own attention, which takes the hidden tokens out."""
    from diffusers.models.attention_processor import MochiAttnProcessor2_0

    for block in model.denoiser.transformer_blocks:
        block.attn1.processor = MochiAttnProcessor2_0()
    return model


def test_the_shift_of_wan_is_that_of_its_authors_program():
    """generate.py: 5, but 3 for image to video of 832 x 480 px, either way round."""
    rows = ("i2v", (832, 480), 3.0), ("i2v", (480, 832), 3.0), ("i2v", (1280, 720), 5.0), ("t2v", (832, 480), 5.0)
    for variant, size, shift in rows:
        family = load_family("wan", "tiny", variant)
        assert family.sampling_shift(family.latent_shape((*size, 81)), 50) == shift
        scheduler = family.pipeline_scheduler("euler", "flow", zero_terminal_snr=False, size=(*size, 81))
        assert scheduler.config.shift == shift


# --- training ---


@pytest.mark.parametrize("source", ["videos", "moments", "stored text"])
def test_a_step_of_mochi_is_the_authors_and_sees_no_token_of_a_dropped_caption(source):
    """genmo: x_t = (1 - t) data + t noise; the network is given 1000 (1 - t), and predicts data less noise.

    Its demos/fine_tuner/train.py zeroes states and mask of a dropped caption, its end token's too.
    """
    model, generator = tiny("mochi"), torch.Generator().manual_seed(3)
    videos = torch.randint(0, 256, (2, 3, 13, 32, 48), generator=generator, dtype=torch.uint8)
    tokens, moments = model.family.tokenize(CAPTIONS[::2]), model.encode_images(videos)["moments"]
    states = model.family.encode_text(model.frozen, tokens)
    seen = {"videos": videos} if source == "videos" else {"moments": moments}
    batch = model.draw({**seen, **(states if source == "stored text" else tokens)}, generator)
    batch["caption_dropped"] = torch.tensor([True, False])
    loss = model.loss(model(batch), batch)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()

    mean, logvar = moments.chunk(2, dim=1)
    of_vae = model.frozen["vae"].config
    means, stds = (torch.tensor(v)[:, None, None, None] for v in (of_vae.latents_mean, of_vae.latents_std))
    data = (mean + torch.exp(0.5 * logvar) * batch["posterior_noise"] - means) / stds
    t, is_kept = batch["times"][:, None, None, None, None], ~batch["caption_dropped"]
    theirs = with_diffusers_attention(model).denoiser
    predicted = theirs(
        (1 - t) * data + t * batch["noise"],
        encoder_hidden_states=states["text"] * is_kept[:, None, None],
        timestep=1000 * (1 - batch["times"]),
        encoder_attention_mask=states["mask"].bool() & is_kept[:, None],
    ).sample
    expected = torch.nn.functional.mse_loss(predicted, data - batch["noise"])
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0.0)
    of_theirs = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(gradients, of_theirs, rtol=1e-4, atol=1e-6)


def test_a_step_after_a_first_frame_is_that_of_wan_22_and_learns_from_the_other_frames():
    """The first latent frame has no noise, its tokens have time 0, and the loss is of the others: see the pipeline."""
    model, generator = test_families.without_zeros(tiny("wan", "i2v_5b")), torch.Generator().manual_seed(3)
    videos = torch.randint(0, 256, (2, 3, 13, 32, 64), generator=generator, dtype=torch.uint8)
    batch = model.draw({"videos": videos, **model.family.tokenize(CAPTIONS[::2])}, generator)
    batch |= {"caption_dropped": torch.zeros(2, dtype=torch.bool), "times": torch.tensor([0.0, 0.7])}
    loss = model.loss(model(batch), batch)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()

    data, condition = model.encode(batch)
    t = batch["times"][:, None, None, None, None]
    noisy = torch.cat([condition["first_frame"], ((1 - t) * data + t * batch["noise"])[:, :, 1:]], dim=2)
    is_noisy = torch.ones(data.shape[2:])
    is_noisy[0] = 0
    times = 1000 * batch["times"][:, None] * is_noisy[:, ::2, ::2].flatten()
    velocity = model.denoiser(noisy, encoder_hidden_states=condition["text"], timestep=times).sample[:, :, 1:]
    expected = ((velocity - (batch["noise"] - data)[:, :, 1:]) ** 2).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0.0)
    assert model.errors(model(batch)).isfinite().all()  # as validation has it, at time 0 too
    torch.testing.assert_close(gradients, {name: p.grad for name, p in model.named_parameters()}, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "variant"), [("mochi", "stock"), ("hunyuan_video", "stock"), ("wan", "i2v")])
def test_latents_of_a_video_go_back_to_what_the_autoencoder_decodes(name, variant):
    """Scale, means and deviations, there and back; that those of decoding are right is in the pipelines' tests."""
    model = tiny(name, variant)
    vae, family = model.frozen["vae"], model.family
    videos = torch.rand(1, 3, SIZE[2], SIZE[1], SIZE[0], generator=torch.Generator().manual_seed(0)) * 2 - 1
    moments = model.encode_images(((videos + 1) * 127.5).round().to(torch.uint8))["moments"]
    assert moments.shape[1:] == family.columns("moments", SIZE)["moments"].shape
    with torch.no_grad():
        posterior = vae.encode(videos).latent_dist
        latents = family.sample_latents(posterior.parameters, torch.zeros_like(posterior.mean))
        assert (latents - posterior.mean).abs().max() > 0.01
        decoded = family.decode_latents(model.frozen, latents)
        torch.testing.assert_close(decoded, vae.decode(posterior.mean).sample, rtol=1e-4, atol=1e-5)


# --- captions and first frames ---


def test_states_of_llama_are_those_of_the_pipeline_two_layers_before_the_last():
    from diffusers import HunyuanVideoPipeline
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    from families.hunyuan_video import TEMPLATE, TEMPLATE_TOKENS

    assert {"template": TEMPLATE, "crop_start": TEMPLATE_TOKENS} == DEFAULT_PROMPT_TEMPLATE
    model = tiny("hunyuan_video")
    tokens = model.family.tokenize(CAPTIONS)

    def tokenizer(prompts, **options):
        assert prompts[0] == TEMPLATE.replace("{}", CAPTIONS[0]) and options["max_length"] == 351
        ids = tokens["llama_tokens"]
        is_text = ids != LLAMA_PAD
        return SimpleNamespace(input_ids=torch.where(is_text, ids, 7), attention_mask=is_text.long())

    parts: dict[str, Any] = dict.fromkeys(("transformer", "vae", "scheduler", "text_encoder_2", "tokenizer_2"))
    theirs = with_more_layers(model.frozen["llama"]._model[0], 4)
    pipeline = HunyuanVideoPipeline(text_encoder=theirs, tokenizer=None, **parts)
    pipeline.tokenizer = tokenizer
    with torch.no_grad():
        ours = model.family.encode_text(model.frozen, tokens)
        expected, mask = pipeline._get_llama_prompt_embeds(CAPTIONS, DEFAULT_PROMPT_TEMPLATE, device=CPU)
    assert torch.equal(ours["mask"].bool(), mask.bool()) and mask.sum(dim=1).tolist() == [24, 1, 17]
    torch.testing.assert_close(ours["text"][mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)


def test_states_of_a_first_frame_are_those_of_clip_before_its_last_layer():
    from PIL import Image
    from transformers import CLIPImageProcessor

    model = tiny("wan", "i2v")
    own = model.frozen["clip"]
    side = own.config.image_size
    theirs = with_more_layers(own.vision_model, own.config.num_hidden_layers + 1)
    waves = torch.linspace(0, 6, 48)[None, :] + torch.linspace(0, 4, 32)[:, None] + torch.arange(3.0)[:, None, None]
    pixels = (waves.sin() * 100 + 128).to(torch.uint8)[None]  # smooth: beyond white and black each pass is cut off
    picture = Image.fromarray(pixels[0].permute(1, 2, 0).numpy())
    options = dict(size={"shortest_edge": side}, crop_size=side, image_mean=CLIP_MEAN, image_std=CLIP_STD)
    given = CLIPImageProcessor(**options)(picture, return_tensors="pt")["pixel_values"]
    prepared = own.preprocess(pixels.float() / 127.5 - 1)
    assert prepared.shape == given.shape == (1, 3, 28, 28)
    # It rounds the resized image to bytes, twice: along each side.
    assert float((prepared - given).abs().max()) < 1.5 / 255 / min(CLIP_STD)
    with torch.no_grad():
        expected = theirs(pixel_values=given, output_hidden_states=True).hidden_states[-2]
        torch.testing.assert_close(own.vision_model(pixel_values=given).last_hidden_state, expected)  # another graph
        assert own(pixels.float() / 127.5 - 1).shape == expected.shape == (1, 5, 8)


def test_a_video_without_its_first_frame_is_refused():
    model = tiny("wan", "i2v")
    noise, text = torch.zeros(1, *model.latent_shape), "^wan starts a video from its first frame: first_frame, "
    with pytest.raises(ValueError, match=text):
        model.generate(model.family.tokenize([""]), noise, sampler="euler", steps=2, guidance=1.0)


# --- published folders ---


def published(name: str, folder: Path) -> tuple[LatentDiffusion, Path]:
    """Write a tiny model's networks as their makers publish them, by the libraries' own classes; return the model too."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPTextModel

    model, folder = tiny(name, "i2v" if name == "wan" else "stock"), folder / name
    frozen: Any = model.frozen
    model.denoiser.save_pretrained(folder / "transformer")
    frozen["vae"].save_pretrained(folder / "vae")
    if name != "hunyuan_video":
        model.family.save_tokenizers(folder)
        t5_of(model).save_pretrained(folder / "text_encoder")
    if name == "wan":
        clip = frozen["clip"].vision_model
        whole = with_more_layers(clip, clip.config.num_hidden_layers + 1)
        whole.save_pretrained(folder / "image_encoder")
    if name == "hunyuan_video":
        with_more_layers(frozen["llama"]._model[0], 4).save_pretrained(folder / "text_encoder")
        text = CLIPTextModel(frozen["text"].config)
        text.load_state_dict({n.removeprefix("text_model."): t for n, t in frozen["text"].state_dict().items()})
        text.save_pretrained(folder / "text_encoder_2")
        pipeline_files.save_clip_tokenizer(folder / "tokenizer_2", pipeline_files.CLIP_END_TEXT)
        words = Tokenizer(models.WordLevel({"<unk>": 0, "red": 5, "circle": 6, "user": 7}, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        (folder / "tokenizer").mkdir()
        words.save(str(folder / "tokenizer" / "tokenizer.json"))
    return model, folder


@pytest.mark.parametrize("name", ["mochi", "hunyuan_video", "wan"])
def test_encoders_and_denoiser_are_read_from_a_folder_as_it_is_published(name, tmp_path):
    """Layers that nobody reads are left out; another variant's denoiser, or a folder without a part, is refused by name."""
    model, folder = published(name, tmp_path)
    config = ModelConfig(name, "tiny", "i2v" if name == "wan" else "stock", weights=str(folder), denoiser=str(folder))
    assert model_problems(config, SIZE, needs_encoders=True) == [] == initial_weights.problems(config, "flow")
    read = build_model(config, ObjectiveConfig(), size=SIZE, normalize="symmetric", seed=5)
    initial_weights.load(read, str(folder), "ema")
    assert read.encoders.fingerprints == model.encoders.fingerprints
    assert fingerprint(read.denoiser) == fingerprint(model.denoiser)
    if name == "hunyuan_video":
        tokens = read.family.tokenize(["red circle"])["llama_tokens"][0]
        assert tokens[:4].tolist() != [LLAMA_PAD] * 4 and tokens[tokens != LLAMA_PAD].tolist()[-9:-7] != [5, 6]
    if name == "wan":
        other = ModelConfig(name, "tiny", "t2v", weights="random", denoiser=str(folder))
        assert initial_weights.problems(other, "flow") != []
    shutil.rmtree(folder / "tokenizer")
    [problem] = model_problems(config, SIZE, needs_encoders=True)
    assert problem.text.startswith("model.weights: tokenizer: ") and "Copy the whole diffusers folder" in problem.text


# --- sizes ---


def test_frames_that_the_autoencoder_cannot_take_are_named_with_the_nearest_that_it_can():
    for name, num, each, nearest in (("mochi", 9, 6, "7, 13"), ("wan", 128, 4, "125, 129")):
        family = load_family(name, "tiny", "stock")
        text = f"{num} frames do not fit {name}: its first latent stands for one frame, each further one for {each}"
        assert family.frames_problem(num) == f"{text}. Nearest: {nearest}."
        assert family.frames_problem(1) is None and family.frames_problem(1 + 3 * each) is None
    given = load_family("wan", "tiny", "i2v_5b")
    assert given.frames_problem(1).startswith("1 frame does not fit i2v_5b") and given.frames_problem(5) is None
