"""Where the frozen encoders are and in what type: model.frozen_device, and what float16 cannot hold."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import with_frames
from test_families import CAPTIONS, MEMBERS
from torch._subclasses.fake_tensor import FakeTensorMode

from families.encoders import ModelConfig
from families.objectives import ObjectiveConfig
from model import AUTOCAST_DTYPES, LatentDiffusion, build_model
from prepare.encoder import Encoder

SIZE = (96, 64)
ON_CPU = ModelConfig("flux", "tiny", "schnell", weights="random", frozen_device="cpu")
ON_DEVICE = dataclasses.replace(ON_CPU, frozen_device="device")


def build(config: ModelConfig) -> LatentDiffusion:
    size = with_frames(config.family, SIZE, config.variant)
    return build_model(config, ObjectiveConfig(), size=size, normalize="symmetric", seed=0)


def step(model: LatentDiffusion) -> torch.Tensor:
    """The prediction of one step, its columns and random numbers on the model's device, as Composer brings them there."""
    device, columns = model.device, model.family.columns("images", SIZE)
    batch = {name: torch.zeros(2, *column.shape, dtype=column.dtype, device=device) for name, column in columns.items()}
    batch |= {name: torch.zeros(2, *model.latent_shape, device=device) for name in ("posterior_noise", "noise")}
    batch["times"] = model.objective.times_at(torch.zeros(2, dtype=torch.int64, device=device))
    batch["caption_dropped"] = torch.zeros(2, dtype=torch.bool, device=device)
    return model(batch)["prediction"]


# --- types ---


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), MEMBERS)
def test_no_encoder_whose_values_float16_cannot_hold_is_in_it(name, variant):
    """T5's states are clipped (diffusers' page of FLUX, "fp16 inference"); three families' VAE is float32 in any run."""
    wide = {"flux": {"t5"}, "sd3": {"t5"}, "mochi": {"t5"}, "wan": {"umt5"}}.get(name, set())
    exact = {"sdxl", "sd3", "wan"} & {name}
    for vae in (None, "fp32", "run"):
        model = build(ModelConfig(name, "tiny", variant, weights="random", vae_precision=vae))
        is_exact = {"vae"} if vae == "fp32" or (vae is None and exact) else set()
        for precision, usual in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
            model.to_device(torch.device("cpu"), precision)
            types = {label: {p.dtype for p in module.parameters()} for label, module in model.frozen.items()}
            own = is_exact | (wide if precision == "fp16" else set())
            assert types == {label: {torch.float32 if label in own else usual} for label in types}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_moments_and_images_of_sdxl_are_those_of_float32_in_a_run_of_two_bytes(precision):
    """In training and evaluation under Composer's autocast, which would compute in the run's type, and in prepare.latents."""
    config = ModelConfig("sdxl", "tiny", weights="random")
    exact, ours = (build(config).to_device(torch.device("cpu"), kind) for kind in ("fp32", precision))
    images = torch.randint(0, 256, (2, 3, 64, 96), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    expected = exact.encode_images(images)["moments"]
    with torch.autocast("cpu", AUTOCAST_DTYPES[precision]), torch.no_grad():
        moments = ours.encode_images(images)["moments"].float()
        rounded = exact.frozen["vae"].encode(images / 127.5 - 1).latent_dist.parameters.float()
    torch.testing.assert_close(moments, expected)
    assert not torch.allclose(rounded, expected, rtol=1e-3, atol=1e-4)
    options = dict(size=SIZE, normalize="symmetric", batch_size=2, store_text=False)
    stored = torch.from_numpy(Encoder(config, precision=precision, **options).encode_images(images)["moments"])
    torch.testing.assert_close(stored.float(), expected, rtol=2**-10, atol=1e-6)  # in float16
    latents = exact.family.sample_latents(expected, torch.zeros(2, *exact.latent_shape))
    torch.testing.assert_close(ours.decode_latents(latents), exact.decode_latents(latents))


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "under Composer's autocast"])
def test_states_beyond_float16_are_those_of_float32_in_a_run_of_fp16(autocast):
    """T5 with one layer made a million times larger, as training makes them large: float16 has other states."""
    exact, ours, half = (build(ON_DEVICE) for _ in range(3))
    for model in (exact, ours, half):
        model.frozen["t5"].encoder.block[0].layer[1].DenseReluDense.wo.weight.mul_(1e6)
    exact.to_device(torch.device("cpu"), "fp32")
    ours.to_device(torch.device("cpu"), "fp16")
    half.frozen["t5"].half()
    tokens = ours.family.tokenize(CAPTIONS[:2])
    expected = exact._encode_text(tokens)["text"]
    with torch.autocast("cpu", torch.float16, enabled=autocast), torch.no_grad():
        torch.testing.assert_close(ours._encode_text(tokens)["text"], expected)
        assert not torch.allclose(half.frozen["t5"](tokens["t5_tokens"]).float(), expected, atol=0.1)


# --- places ---


@pytest.mark.slow
@pytest.mark.parametrize("config", [ON_CPU, ON_DEVICE])
def test_a_step_on_a_gpu_gets_what_encoders_on_the_cpu_make(config):
    """Traced with tensors that have a device and no content: torch refuses operations on two devices there too."""
    placed, model = build(config).to_device(torch.device("meta"), "fp32"), build(config)  # "meta" stands for a GPU
    places = [{p.device.type for p in part.parameters()} for part in (placed.denoiser, *placed.frozen.values())]
    assert places == [{"meta"}] + [{"cpu" if config.frozen_device == "cpu" else "meta"}] * len(model.frozen)
    parts, cuda = [model.denoiser, *model.frozen.values()], torch.device("cuda")
    for part in parts:
        torch.nn.Module.to(part, device="meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        for part, (place,) in zip(parts, places, strict=True):
            part.to_empty(device=cuda if place == "meta" else "cpu")
        model.set_compute_device(cuda, "fp32")
        assert step(model).device.type == "cuda"


# --- what they cost ---
