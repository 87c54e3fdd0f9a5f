"""FLUX.1's step, initial weights, tokens and flow; diffusers' own pipeline is in test_export_families.py."""

from __future__ import annotations

import math

import pytest
import torch
from test_families import tiny, without_zeros

from families import load_family
from families.flux import draw_mlperf_weights
from families.objectives import ObjectiveConfig, RectifiedFlow, shift_times
from families.packing import pack, token_positions, unpack
from families.sampling import build_scheduler, sample, sampling_problems
from weights.encoder_networks import T5Tokenizer

CAPTIONS = ["a red circle", "word " * 300]


def test_a_step_is_the_references():
    """Mlcommons' torchtitan, flux/train.py: t uniform, (1 - t) latents + t noise, the target noise - latents, mean square."""
    model = without_zeros(tiny("flux", "mlperf", caption_dropout=0.0))
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
    problems = ObjectiveConfig(weighting="min_snr", zero_terminal_snr=True).problems(flow)
    assert [key for key, _ in problems] == ["objective.weighting", "objective.zero_terminal_snr"]
    problems = ObjectiveConfig(timesteps="logit_normal", shift=2.0).problems(steps)
    assert [key for key, _ in problems] == ["objective.timesteps", "objective.shift"]
    [problem] = sampling_problems("ddim", 50, 1.0, prediction="flow")
    assert problem == ("sampler", "ddim does not sample a flow. Possible: euler.")
    with pytest.raises(ValueError, match="^sampler: unknown sampler 'ddim'. Known: euler.$"):
        build_scheduler("ddim", "flow")
