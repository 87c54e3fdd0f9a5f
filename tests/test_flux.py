"""FLUX.1 against the published models' figures, diffusers' own pipeline, and MLPerf's reference."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from families import load_family, pipeline_files
from families.encoders import ModelConfig, weights_problems
from families.flux import draw_mlperf_weights
from families.objectives import ObjectiveConfig, RectifiedFlow, shift_times
from families.packing import pack, token_positions, unpack
from families.sampling import build_scheduler, sample, sampling_problems
from model import LatentDiffusion, build_model
from weights.encoder_networks import ClipTextModel, T5Tokenizer
from weights.tensors import build_on_meta

SIZE = (96, 64)
CAPTIONS = ["a red circle", "word " * 300]


def num_parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def tiny(variant: str, **objective: object) -> LatentDiffusion:
    config = ModelConfig("flux", "tiny", variant, weights="random")
    model = build_model(config, ObjectiveConfig(**objective), size=SIZE, normalize="symmetric", seed=0)
    for (
        parameter
    ) in model.denoiser.parameters():  # the benchmark's last layer starts at zero, which would hide all else
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    return model.to_device(torch.device("cpu"), "fp32")


@pytest.mark.parametrize(
    ("variant", "num"), [("dev", 11_901_408_320), ("schnell", 11_891_178_560), ("mlperf", 11_891_178_560)]
)
def test_full_flux_has_the_published_number_of_parameters(variant, num):
    family = load_family("flux", "full", variant)
    parts = {"transformer": build_on_meta(family.build_denoiser), **build_on_meta(family.build_encoders)}
    expected = {"transformer": num, "vae": 83_819_683, "text": 123_060_480, "t5": 4_762_310_656}
    assert {name: num_parameters(part) for name, part in parts.items()} == expected


def test_packing_and_places_are_diffusers_own():
    from diffusers import FluxPipeline

    latents = torch.randn(2, 16, 8, 12)
    packed = pack(latents)
    assert torch.equal(packed, FluxPipeline._pack_latents(latents, 2, 16, 8, 12))
    assert torch.equal(unpack(packed, 8, 12), latents)
    theirs = FluxPipeline._prepare_latent_image_ids(2, 4, 6, torch.device("cpu"), torch.float32)
    assert torch.equal(token_positions(4, 6, torch.device("cpu")), theirs)


@pytest.mark.parametrize("variant", ["dev", "schnell", "mlperf"])
def test_images_are_those_of_diffusers_pipeline(variant):
    """Text states, shift by size, times, guidance, unpacking, VAE: the same noise gives the same image."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    model, guidance = tiny(variant), 3.5 if variant == "dev" else 1.0
    noise = torch.randn(2, *model.family.latent_shape(SIZE), generator=torch.Generator().manual_seed(0))
    tokens = model.family.tokenize(CAPTIONS)
    made = model.generate(tokens, noise, sampler="euler", steps=5, guidance=guidance)
    # scheduler_config.json of the published models
    of_dev = dict(use_dynamic_shifting=True, shift=3.0, base_shift=0.5, max_shift=1.15)
    scheduler = FlowMatchEulerDiscreteScheduler(**(of_dev if variant == "dev" else dict(shift=1.0)))
    parts: dict[str, Any] = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    pipeline = FluxPipeline(scheduler, model.frozen["vae"], transformer=model.denoiser, **parts)
    pipeline.set_progress_bar_config(disable=True)
    options = dict(num_inference_steps=5, guidance_scale=guidance, width=SIZE[0], height=SIZE[1], output_type="pt")
    with torch.no_grad():
        states = model.family.encode_text(model.frozen, tokens)
        prompts = dict(prompt_embeds=states["text"], pooled_prompt_embeds=states["pooled"])
        theirs = pipeline(latents=pack(noise), **prompts, **options).images
    assert made.shape == theirs.shape and float((made - theirs).abs().max()) < 2e-5


def test_text_states_are_those_of_transformers_own_classes():
    from transformers import T5EncoderModel

    model = tiny("schnell")
    tokens = model.family.tokenize(CAPTIONS)
    theirs = T5EncoderModel(model.frozen["t5"].config).eval()
    theirs.load_state_dict(
        {**model.frozen["t5"].state_dict(), "encoder.embed_tokens.weight": model.frozen["t5"].shared.weight}
    )
    with torch.no_grad():
        ours = model.family.encode_text(model.frozen, tokens)
        expected = theirs(input_ids=tokens["t5_tokens"]).last_hidden_state
    torch.testing.assert_close(ours["text"], expected)  # another graph
    assert [name for name in model.frozen["t5"].state_dict() if "token" in name or "shared" in name] == [
        "shared.weight"
    ]


def test_a_step_is_the_references():
    """Mlcommons' torchtitan, flux/train.py: t uniform, (1 - t) latents + t noise, the target noise - latents, mean square."""
    model = tiny("mlperf", caption_dropout=0.0)
    moments = torch.randn(2, 32, 8, 12, generator=torch.Generator().manual_seed(1))
    batch = model.draw({"moments": moments, **model.family.tokenize(CAPTIONS)}, torch.Generator().manual_seed(2))
    outputs = model(batch)

    mean, logvar = moments.chunk(2, dim=1)
    latents = 0.3611 * (mean + torch.exp(0.5 * logvar) * batch["posterior_noise"] - 0.1159)
    t = batch["times"][:, None, None, None]
    noisy, states = (1 - t) * latents + t * batch["noise"], model.family.encode_text(model.frozen, batch)
    packed = model.denoiser(
        pack(noisy),
        encoder_hidden_states=states["text"],
        pooled_projections=states["pooled"],
        timestep=batch["times"],
        img_ids=token_positions(4, 6, torch.device("cpu")),
        txt_ids=torch.zeros(256, 3),
    ).sample
    theirs = unpack(packed, 8, 12)
    assert torch.allclose(outputs["prediction"], theirs, atol=1e-5)
    expected = torch.nn.functional.mse_loss(theirs, batch["noise"] - latents)
    assert float(model.loss(outputs, batch).detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_the_benchmarks_weights_are_drawn_as_the_reference_draws_them():
    """Standard deviations of Glorot's rule for the reference's matrices; a query alone would have another one."""
    torch.manual_seed(0)
    transformer = load_family("flux", "tiny", "schnell").build_denoiser()
    draw_mlperf_weights(transformer)
    width = 32
    expected = {
        "x_embedder": (64, width),
        "context_embedder": (16, width),
        "transformer_blocks.0.attn.to_q": (width, 3 * width),
        "transformer_blocks.1.attn.add_v_proj": (width, 3 * width),
        "transformer_blocks.0.attn.to_out.0": (width, width),
        "transformer_blocks.0.ff.net.0.proj": (width, 4 * width),
        "transformer_blocks.0.ff_context.net.2": (4 * width, width),
        "single_transformer_blocks.0.attn.to_k": (width, 7 * width),
        "single_transformer_blocks.1.proj_mlp": (width, 7 * width),
        "single_transformer_blocks.0.proj_out": (5 * width, width),
    }
    transformer.requires_grad_(False)
    layers = {name: layer for name, layer in transformer.named_modules() if isinstance(layer, torch.nn.Linear)}
    for name, (inputs, outputs) in expected.items():
        limit = math.sqrt(6 / (inputs + outputs))
        weight = layers[name].weight
        assert weight.abs().max() <= limit
        assert abs(float(weight.std()) * math.sqrt(3) / limit - 1) < 5 * (0.2 / weight.numel()) ** 0.5, name
    for name, layer in layers.items():
        assert not layer.bias.any()
        if name.startswith("time_text_embed"):
            assert abs(float(layer.weight.std()) / 0.02 - 1) < 5 * (0.5 / layer.weight.numel()) ** 0.5
        assert bool(layer.weight.any()) == ("norm" not in name and name != "proj_out"), name


def test_tokens_are_text_end_and_padding_and_a_long_text_keeps_its_end():
    tokens = T5Tokenizer(8)(["ab", "", "x" * 100])
    assert tokens.tolist() == [[100, 101, 1, 0, 0, 0, 0, 0], [1] + [0] * 7, [123] * 7 + [1]]


def test_a_models_own_tokenizer_is_read_and_gives_the_tokens_of_transformers(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, "red": 5, "circle": 6}, unk_token="<unk>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    words.save(str(tmp_path / "tokenizer.json"))
    fast = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), pad_token="<pad>", eos_token="</s>")
    captions = ["red circle", "a red circle red circle red circle"]
    theirs = fast([f"{caption} </s>" for caption in captions[:1]], padding="max_length", max_length=5)["input_ids"]
    ours = T5Tokenizer(5, tmp_path / "tokenizer.json")(captions)
    assert ours[:1].tolist() == theirs and ours[1].tolist() == [2, 5, 6, 5, 1]


# --- the flow ---


def draw(objective: RectifiedFlow, num: int = 200_000) -> torch.Tensor:
    return objective.draw_times(num, torch.Generator().manual_seed(0))


def test_times_are_uniform_or_logit_normal_and_a_shift_moves_them_by_its_law():
    uniform = draw(RectifiedFlow(ObjectiveConfig(timesteps="uniform", shift=1.0)))
    assert abs(float(uniform.mean()) - 0.5) < 0.003 and abs(float(uniform.var()) - 1 / 12) < 0.001
    logits = torch.logit(draw(RectifiedFlow(ObjectiveConfig(timesteps="logit_normal", shift=1.0))).double())
    assert abs(float(logits.mean())) < 0.012 and abs(float(logits.std()) - 1) < 0.008
    moved = draw(RectifiedFlow(ObjectiveConfig(timesteps="logit_normal", shift=3.0))).double()
    # t / (1 - t) is multiplied by the shift: equation 23 of arXiv:2403.03206, solved for the odds
    assert torch.allclose(torch.logit(moved), logits + math.log(3.0), atol=1e-3)
    assert torch.equal(shift_times(torch.tensor([0.0, 1.0]), 3.0), torch.tensor([0.0, 1.0]))


def test_more_steps_come_nearer_to_the_exact_flow():
    """Normal data of deviation s: x_t has the deviation sqrt((1 - t)^2 s^2 + t^2), and keeps its place in it."""
    s, noise = 0.5, torch.randn(64, 1, generator=torch.Generator().manual_seed(0)).double()

    def predict(x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        t = times[:, None].double()
        return ((t - (1 - t) * s * s) / ((1 - t) ** 2 * s * s + t**2) * x.double()).float()

    errors = []
    for steps in (10, 100):
        found = sample(predict, noise.float(), sampler="euler", prediction="flow", steps=steps)
        errors.append(float((found - s * noise).abs().max()))
    assert errors[0] < 0.3 and errors[1] < errors[0] / 6


def test_keys_of_noise_schedules_are_refused_for_a_flow_and_those_of_a_flow_elsewhere():
    flow, steps = load_family("flux", "tiny", "dev").objective, load_family("sd2", "tiny", "stock").objective
    assert ObjectiveConfig().problems(flow) == ObjectiveConfig().problems(steps) == []
    weighting, terminal = ObjectiveConfig(weighting="min_snr", zero_terminal_snr=True).problems(flow)
    assert weighting[0] == "objective.weighting" and terminal[0] == "objective.zero_terminal_snr"
    assert terminal[1] == "true, but a flow has no noise schedule that it could mean. Leave it out."
    assert ObjectiveConfig(timesteps="logit_normal", shift=2.0).problems(steps) == [
        ("objective.timesteps", "logit_normal, but only a flow has it (objective.prediction=flow). Leave it out."),
        ("objective.shift", "2.0, but only a flow has it (objective.prediction=flow). Leave it out."),
    ]
    assert sampling_problems("ddim", 50, 1.0, prediction="flow") == [
        ("sampler", "ddim does not sample a flow. Possible: euler.")
    ]
    with pytest.raises(ValueError, match="^sampler: unknown sampler 'ddim'. Known: euler.$"):
        build_scheduler("ddim", "flow")


def test_a_diffusers_folder_is_read_with_the_words_of_its_t5(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import T5EncoderModel

    model = tiny("schnell")
    model.frozen["vae"].save_pretrained(tmp_path / "vae")
    clip = model.frozen["text"]
    (clip.text_model if isinstance(clip, ClipTextModel) else clip).save_pretrained(tmp_path / "text_encoder")
    t5 = T5EncoderModel(model.frozen["t5"].config)
    table = model.frozen["t5"].shared.weight
    t5.load_state_dict({**model.frozen["t5"].state_dict(), "encoder.embed_tokens.weight": table})
    t5.save_pretrained(tmp_path / "text_encoder_2")
    pipeline_files.save_clip_tokenizer(tmp_path / "tokenizer", pipeline_files.CLIP_END_TEXT)

    found = weights_problems(load_family("flux", "tiny", "schnell"), str(tmp_path))
    assert len(found) == 1 and found[0].startswith(f"tokenizer_2: {tmp_path}/tokenizer_2/tokenizer.json is missing, ")
    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, "red": 5}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "tokenizer_2").mkdir()
    words.save(str(tmp_path / "tokenizer_2" / "tokenizer.json"))
    config = ModelConfig("flux", "tiny", "schnell", weights=str(tmp_path))
    read = build_model(config, ObjectiveConfig(), size=SIZE, normalize="symmetric", seed=0)
    assert read.encoders.fingerprints == model.encoders.fingerprints
    assert read.family.tokenize(["a red"])["t5_tokens"][0, :3].tolist() == [2, 5, 1]
    other = dict(model.frozen["t5"].config.to_dict(), num_heads=4)
    (tmp_path / "text_encoder_2" / "config.json").write_text(json.dumps(other))
    assert "has num_heads 4, this model's has 2" in weights_problems(model.family, str(tmp_path))[0]
