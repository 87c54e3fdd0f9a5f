"""model.py on the tiny SD2: frozen parts stay frozen, randomness is the batch's own, the loss is the formula."""

from __future__ import annotations

import pytest
import torch
from composer import State
from composer.devices import DeviceCPU

from families.encoders import ModelConfig
from families.objectives import ObjectiveConfig
from model import BatchRandomness, build_model, normalize_images, step_seed

SIZE = (64, 64)


def tiny(precision: str = "fp32", seed: int = 1, variant: str = "stock", **objective):
    config = ModelConfig(preset="tiny", variant=variant)
    model = build_model(config, ObjectiveConfig(**objective), size=SIZE, normalize="symmetric", seed=seed)
    return model.to_device(torch.device("cpu"), precision)


def images_batch(num: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (num, 3, 64, 64), generator=generator, dtype=torch.uint8)
    tokens = torch.randint(0, 49408, (num, 77), generator=generator)
    return {"images": images, "tokens": tokens}


def drawn(model, batch, seed: int = 5):
    return model.draw(batch, torch.Generator().manual_seed(seed))


def test_offset_noise_is_one_number_more_per_image_and_channel():
    """Every other number of the step is the same; what it adds has this size (N. Guttenberg 2023, crosslabs.org)."""
    plain, offset = (drawn(tiny(offset_noise=size), images_batch(64)) for size in (0.0, 0.5))
    added = offset["noise"] - plain["noise"]
    assert all(torch.equal(plain[name], offset[name]) for name in plain if name != "noise")
    assert torch.allclose(added, added[:, :, :1, :1].expand_as(added), atol=1e-6)
    assert added[:, :, 0, 0].std().item() == pytest.approx(0.5, rel=0.15)


def test_frozen_encoders_are_in_no_state_dict_stay_in_eval_mode_and_run_once_for_a_batch():
    model, calls = tiny(), []
    model.train()
    names = {*model.state_dict(), *(name for name, _ in model.named_parameters())}
    assert {name.split(".")[0] for name in names} == {"denoiser"}
    for name, encoder in model.encoders.modules.items():
        assert not encoder.training and not any(p.requires_grad for p in encoder.parameters())
        target = encoder.encoder if name == "vae" else encoder
        target.register_forward_hook(lambda *_, name=name: calls.append(name))
    model(drawn(model, images_batch(4)))
    assert sorted(calls) == ["text", "vae"]


def test_building_and_a_step_take_nothing_from_the_global_generator_and_encoders_nothing_from_the_seed():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    model = tiny(caption_dropout=0.5)
    batch = drawn(model, images_batch())
    model.loss(model(batch), batch).backward()
    assert torch.equal(before, torch.random.get_rng_state())
    other, again = tiny(seed=2), tiny(seed=1)
    assert model.encoders.fingerprints == other.encoders.fingerprints
    assert not torch.equal(model.state_dict()["denoiser.conv_in.weight"], other.state_dict()["denoiser.conv_in.weight"])
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())


def test_microbatch_size_changes_no_number():
    """The gradient of the whole batch is the mean of those of its parts, to float32's rounding."""

    def gradients(size: int) -> list[torch.Tensor]:
        model = tiny(caption_dropout=0.5)
        batch = drawn(model, images_batch(4))
        for start in range(0, 4, size):
            part = {name: value[start : start + size] for name, value in batch.items()}
            (model.loss(model(part), part) * size / 4).backward()
        return [p.grad for p in model.parameters()]

    torch.testing.assert_close(gradients(1), gradients(4), rtol=1e-3, atol=1e-5)


def test_loss_is_the_weighted_mean_squared_error():
    target = torch.tensor([1.0, 2.0]).reshape(2, 1, 1, 1).expand(2, 4, 8, 8)
    outputs = {"prediction": torch.full((2, 4, 8, 8), 3.0), "target": target, "weight": torch.tensor([1.0, 0.5])}
    assert tiny().loss(outputs, {}).item() == pytest.approx((1.0 * 4.0 + 0.5 * 1.0) / 2)


def test_moments_give_the_same_latents_as_images_in_the_range_that_was_asked_for():
    """Scaled exactly once on either way: encoding first and reading the moments back changes nothing."""
    model = tiny()
    batch = drawn(model, images_batch())
    images = normalize_images(batch["images"], "symmetric")
    moments = model.family.encode_images(model.encoders.modules, images)
    online, condition = model.encode(batch)
    stored, _ = model.encode({**{k: v for k, v in batch.items() if k != "images"}, "moments": moments})
    torch.testing.assert_close(online, stored)  # of float32's default: encoding twice may be two kernels
    assert condition["text"].shape == (4, 77, 16)
    pixels, of_mlperf = torch.tensor([0, 255], dtype=torch.uint8), torch.tensor([-0.25, 1.0])  # / 255, with overshoot
    for values, way, expected in (
        (pixels, "symmetric", [-1.0, 1.0]),
        (pixels, "unit", [0.0, 1.0]),
        (of_mlperf, "symmetric", [-1.5, 1.0]),
        (of_mlperf, "unit", [-0.25, 1.0]),
    ):
        assert normalize_images(values.expand(1, 3, 1, 2), way)[0, 0, 0].tolist() == expected


def test_the_posterior_is_drawn_at_every_reading_or_its_mean_is_taken_by_key():
    model = tiny()
    moments = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    batch = {"moments": moments, "tokens": images_batch(2)["tokens"]}
    first, second = (model.encode(drawn(model, batch, seed))[0] for seed in (1, 2))
    noise = drawn(model, batch, 1)["posterior_noise"]
    mean, std = moments[:, :4], torch.exp(0.5 * moments[:, 4:])
    torch.testing.assert_close(first, (mean + std * noise) * 0.18215)
    assert not torch.equal(first, second)
    model.posterior = "mean"
    torch.testing.assert_close(model.encode(drawn(model, batch, 1))[0], mean * 0.18215)


def test_dropped_captions_become_the_empty_caption_and_the_others_stay():
    model = tiny(caption_dropout=0.5)
    batch = drawn(model, images_batch(64))
    dropped = batch["caption_dropped"]
    assert 0 < dropped.sum() < 64
    _, condition = model.encode(batch)
    empty = model.family.encode_text(model.encoders.modules, model.empty_text)["text"]
    kept = model.family.encode_text(model.encoders.modules, batch)["text"]
    torch.testing.assert_close(condition["text"][dropped], empty.expand(int(dropped.sum()), -1, -1))
    torch.testing.assert_close(condition["text"][~dropped], kept[~dropped])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stored_text_states_are_the_encoded_ones_rounded_to_float16_with_their_dropout(precision):
    model = tiny(precision, caption_dropout=0.5)
    batch, calls = drawn(model, images_batch(16)), []
    dropped, tokens = batch["caption_dropped"], batch.pop("tokens")
    latents, encoded = model.encode({**batch, "tokens": tokens})
    states = model.family.encode_text(model.encoders.modules, {"tokens": tokens})["text"]
    empty = model.family.encode_text(model.encoders.modules, model.empty_text)["text"]
    model.encoders.modules["text"].register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        same, stored = model.encode({**batch, "text": states.half()})
        assert torch.equal(same, latents) and stored.keys() == {"text"}
        wanted = torch.where(dropped[:, None, None], empty.expand_as(states), states).half().to(states.dtype)
        assert torch.equal(stored["text"], wanted) and stored["text"].dtype == encoded["text"].dtype
    rtol, atol = (2**-11, 1e-6) if precision == "fp32" else (2**-8, 2e-3)  # of float16; of another size, in bf16
    torch.testing.assert_close(stored["text"], encoded["text"], rtol=rtol, atol=atol)
    assert len(calls) == 1  # of the empty caption


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.2, 1.0])
def test_captions_are_dropped_at_their_rate(rate):
    """Within four standard deviations of the binomial distribution."""
    model, num = tiny(caption_dropout=rate), 20_000
    model.latent_shape = (1, 1, 1)  # noise is drawn too
    dropped = drawn(model, {"tokens": torch.zeros(num, 77)})["caption_dropped"]
    assert abs(float(dropped.double().mean()) - rate) <= 4.0 * (rate * (1.0 - rate) / num) ** 0.5


def test_bf16_on_a_cpu_computes_in_bf16_and_keeps_float32_weights():
    model, seen = tiny("bf16"), []
    model.denoiser.conv_out.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    batch = drawn(model, images_batch())
    loss = model.loss(model(batch), batch)
    assert seen == [torch.bfloat16] and loss.dtype == torch.float32
    assert {p.dtype for m in model.frozen.values() for p in m.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    reference = tiny()
    assert loss.item() == pytest.approx(reference.loss(reference(batch), batch).item(), rel=0.02)


def test_batch_randomness_depends_on_the_batch_index_alone(monkeypatch):
    model = tiny()
    state = State(model=model, rank_zero_seed=0, run_name="test", device=DeviceCPU())
    callback = BatchRandomness(model, seed=7)

    def draws(index: int) -> torch.Tensor:
        monkeypatch.setattr(state, "timestamp", state.timestamp.copy(batch=index))
        state.batch = images_batch()
        callback.batch_start(state, None)
        return state.batch["noise"]

    first, second = draws(0), draws(1)
    torch.manual_seed(99)  # whatever happened in between
    assert torch.equal(draws(0), first) and not torch.equal(first, second)
    with pytest.raises(AssertionError, match="BatchRandomness is not among the callbacks"):
        model(images_batch())
    seeds = {step_seed(seed, batch, rank) for seed in range(5) for batch in range(50) for rank in range(5)}
    assert len(seeds) == 5 * 50 * 5 and all(0 <= seed < 2**63 for seed in seeds)
