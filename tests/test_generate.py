"""LatentDiffusion.generate on the tiny SD2: a diffusers pipeline's images, whatever the batch; nothing left behind."""

from __future__ import annotations

import pytest
import torch
from test_sampling import CLASSES, PUBLISHED
from torch import Tensor, nn

import model as model_module
from bench.latency import pipeline_of
from families.encoders import ModelConfig
from families.objectives import ObjectiveConfig
from families.sampling import prompt_generator, prompt_noise
from model import LatentDiffusion, build_model

SIZE = (64, 64)
CAPTIONS = [f"a photograph of {number} oranges on a blue table" for number in range(5)]
FEW = dict(sampler="ddim", steps=2, guidance=8.0)


def tiny(precision: str = "fp32", prediction: str = "epsilon", seed: int = 1) -> LatentDiffusion:
    model = build_model(
        ModelConfig(preset="tiny"), ObjectiveConfig(prediction=prediction), size=SIZE, normalize="symmetric", seed=seed
    )
    return model.to_device(torch.device("cpu"), precision)


def images_of(model: LatentDiffusion, prompts: list[int], **how) -> Tensor:
    text = model.family.tokenize([CAPTIONS[number] for number in prompts])
    return model.generate(text, prompt_noise(0, prompts, model.latent_shape), **{**FEW, **how})


class Calls:
    """Counts the rows that a network is called with, and keeps its last input."""

    def __init__(self, network: nn.Module):
        self.rows: list[int] = []
        network.register_forward_hook(self._hook, with_kwargs=True)

    def _hook(self, module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        self.args, self.kwargs, self.output = args, kwargs, output
        self.rows.append(len(args[0] if args else kwargs["input_ids"]))


def greatest(difference: Tensor) -> float:
    return float(difference.abs().max())


# --- the oracle ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "prediction", "guidance"),
    [("ddim", "v", 8.0), ("plms", "epsilon", 3.0), ("dpm++", "v", 1.0), ("euler", "epsilon", 8.0)],
)
def test_images_are_those_of_a_diffusers_pipeline(sampler, prediction, guidance):
    """Over the same networks, with the scheduler that its documentation would build."""
    model, num, steps = tiny(prediction=prediction), 2, 6
    name = {"epsilon": "epsilon", "v": "v_prediction"}[prediction]
    pipeline = pipeline_of(model, CLASSES[sampler].from_config({**PUBLISHED, "prediction_type": name}))
    generators = [prompt_generator(0, number) for number in range(num)]
    ways = dict(width=SIZE[0], height=SIZE[1], num_inference_steps=steps, guidance_scale=guidance, output_type="pt")
    theirs, progress = pipeline(CAPTIONS[:num], generator=generators, **ways).images, []
    own = dict(sampler=sampler, steps=steps, guidance=guidance, progress=lambda *done: progress.append(done))
    ours = images_of(model, list(range(num)), **own)
    assert progress[0][0] == 1 and progress[-1][0] == progress[-1][1] == len(progress)
    assert ours.std() > 0.1 and greatest(ours[0] - ours[1]) > 0.1
    assert greatest(ours - theirs) < 5e-5  # of [0, 1]; with MKL_CBWR=COMPATIBLE they are 1.1e-5 apart


# --- what an image depends on ---


def test_an_image_is_the_same_bits_in_any_place_and_next_to_any_others():
    """In batches of one size; in another size sums have another order, and it differs by rounding alone."""
    model = tiny()
    whole = images_of(model, [0, 1, 2, 3])
    assert whole.shape == (4, 3, 64, 64) and whole.min() >= 0.0 and whole.max() <= 1.0 and not whole.requires_grad
    for prompts in ([3, 2, 1, 0], [4, 0, 1, 4], [2, 2, 2, 2]):
        found = images_of(model, prompts)
        for place, prompt in enumerate(prompts):
            assert prompt == 4 or torch.equal(found[place], whole[prompt]), (prompts, place)
    assert greatest(images_of(model, [2, 0, 1]) - whole[[2, 0, 1]]) < 5e-5


def test_guidance_1_is_the_conditional_model_alone_in_half_the_rows():
    model = tiny()
    denoiser = Calls(model.denoiser)
    alone = images_of(model, [0, 1], guidance=1.0)
    assert denoiser.rows == [2, 2] and model._empty_condition is None
    assert greatest(alone - images_of(model, [0, 1], guidance=1.0 + 1e-6)) < 1e-4
    assert denoiser.rows == [2, 2, 4, 4]


def test_text_is_encoded_once_a_batch_and_the_empty_caption_once():
    model = tiny()
    encoder = Calls(model.encoders.modules["text"])
    for prompts in ([0, 1], [2, 3], [4]):
        images_of(model, prompts)
    assert encoder.rows == [2, 1, 2, 1]


def test_decoding_in_slices_gives_the_same_images(monkeypatch):
    """To rounding, as a batch of another size does; a slice is a number of latents' places, so a larger image has fewer."""
    model = tiny()
    decoder = Calls(model.encoders.modules["vae"].decoder)
    whole = images_of(model, [0, 1, 2, 3, 4])
    assert decoder.rows == [5]
    monkeypatch.setattr(model_module, "DECODE_POSITIONS", 2 * 8 * 8)
    assert greatest(images_of(model, [0, 1, 2, 3, 4]) - whole) < 1e-5
    assert decoder.rows == [5, 2, 2, 1]


def test_in_bf16_the_network_computes_in_bf16_and_the_latents_stay_float32():
    model, reference = tiny("bf16"), tiny()
    denoiser, decoder = Calls(model.denoiser), Calls(model.encoders.modules["vae"].decoder)
    images = images_of(model, [0, 1], guidance=2.0)
    assert denoiser.output[0].dtype == torch.bfloat16 and denoiser.args[0].dtype == torch.float32
    assert decoder.output.dtype == torch.bfloat16 and images.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert greatest(images - images_of(reference, [0, 1], guidance=2.0)) < 0.05


# --- what is left behind ---


def test_the_denoiser_is_in_eval_mode_while_generating_and_then_as_before():
    model = tiny()
    model.train()
    model.denoiser.mid_block.eval()  # a part that is in eval mode anyway
    before, modes = [module.training for module in model.modules()], []
    model.denoiser.register_forward_hook(lambda module, *_: modes.append({m.training for m in module.modules()}))
    images_of(model, [0])
    assert modes == [{False}, {False}]
    assert [module.training for module in model.modules()] == before
    model.denoiser.conv_out.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        images_of(model, [0])
    assert [module.training for module in model.modules()] == before


def test_a_training_step_is_the_same_bits_after_generating():
    def step(model: LatentDiffusion) -> list[Tensor]:
        columns = {"moments": torch.ones(2, 8, 8, 8), **model.family.tokenize(CAPTIONS[:2])}
        batch = model.draw(columns, torch.Generator().manual_seed(5))
        model.loss(model(batch), batch).backward()
        return [p.grad for p in model.parameters()]

    model = tiny().train()
    before = torch.random.get_rng_state()
    images_of(model, [0, 1])
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(map(torch.equal, step(model), step(tiny().train())))
