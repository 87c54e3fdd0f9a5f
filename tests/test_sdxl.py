"""SDXL's step, dropped captions, sizes and folder; diffusers' own pipeline is in test_export_families.py."""

from __future__ import annotations

import pytest
import torch

from families.encoders import ModelConfig, weights_problems
from families.objectives import ObjectiveConfig
from mds.images import crop_geometry
from model import LatentDiffusion, build_model
from weights.encoder_networks import ClipTextModel

SIZE = (96, 64)
CAPTIONS = ["a photograph of an astronaut riding a horse", "word " * 200]


def tiny(weights: str = "random", **objective: object) -> LatentDiffusion:
    config = ModelConfig("sdxl", "tiny", weights=weights)
    model = build_model(config, ObjectiveConfig(**objective), size=SIZE, normalize="symmetric", seed=0)
    return model.to_device(torch.device("cpu"), "fp32")


def test_a_step_is_the_formula_of_diffusers_training_script():
    """examples/text_to_image/train_text_to_image_sdxl.py: add_noise, the UNet with time ids and pooled text, mean square."""
    from diffusers import DDPMScheduler

    model, size_ids = tiny(caption_dropout=0.0), torch.tensor([[700, 500, 3, 16], [64, 96, 0, 0]])
    generator = torch.Generator().manual_seed(1)
    moments = torch.randn(2, 8, 8, 12, generator=generator)
    batch = {"moments": moments, "sizes": size_ids, **model.family.tokenize(CAPTIONS)}
    batch = model.draw(batch, torch.Generator().manual_seed(2))
    outputs = model(batch)

    scheduler = DDPMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", num_train_timesteps=1000
    )
    mean, logvar = moments.chunk(2, dim=1)
    latents = (mean + torch.exp(0.5 * logvar.clamp(-30, 20)) * batch["posterior_noise"]) * 0.13025
    noisy = scheduler.add_noise(latents, batch["noise"], batch["times"])
    time_ids = torch.cat([size_ids, torch.tensor([[64, 96]] * 2)], dim=1)
    states = model.family.encode_text(model.frozen, batch)
    added = {"text_embeds": states["pooled"], "time_ids": time_ids}
    theirs = model.denoiser(noisy, batch["times"], states["text"], added_cond_kwargs=added).sample
    assert torch.allclose(outputs["prediction"], theirs, atol=1e-5)
    expected = torch.nn.functional.mse_loss(theirs, batch["noise"])
    assert float(model.loss(outputs, batch).detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_dropped_captions_have_states_of_zeros_and_the_others_their_own():
    model = tiny(caption_dropout=0.5)
    batch = {"moments": torch.zeros(8, 8, 8, 12), "sizes": torch.zeros(8, 4, dtype=torch.int64)}
    batch |= model.family.tokenize(["a cat"] * 8)
    batch = model.draw(batch, torch.Generator().manual_seed(0))
    _, condition = model.encode(batch)
    dropped = batch["caption_dropped"]
    assert 0 < int(dropped.sum()) < 8
    for states in (condition["text"], condition["pooled"]):
        is_zero = ~states.flatten(1).any(dim=1)
        assert torch.equal(is_zero, dropped)
    stored = {"text": condition["text"].half(), "pooled": condition["pooled"].half(), "moments": batch["moments"]}
    rest = {name: batch[name] for name in ("sizes", "noise", "posterior_noise", "times", "caption_dropped")}
    _, from_stored = model.encode({**stored, **rest})
    assert torch.allclose(from_stored["text"], condition["text"], atol=2e-3)


@pytest.mark.parametrize(
    ("source", "at", "flipped", "expected"),
    [
        ((1000, 500), None, False, (500, 1000, 0, 256)),  # scaled to 1024 x 512, of which the middle is shown
        ((1000, 500), (100, 0), False, (500, 1000, 0, 100)),
        ((1000, 500), (100, 0), True, (500, 1000, 0, 412)),  # 512 px of room, 100 px from the other end
        ((512, 2048), None, False, (2048, 512, 768, 0)),
        ((70_000, 70_000), None, False, (65_535, 65_535, 0, 0)),  # as much as a stage has
    ],
)
def test_the_sizes_are_those_of_the_picture_and_of_what_is_shown_of_it(source, at, flipped, expected):
    assert crop_geometry(source, (512, 512), at, flipped=flipped) == expected


def test_a_diffusers_folder_is_read_with_both_its_text_encoders(tmp_path):
    """As diffusers and transformers themselves write it."""
    model = tiny()
    for label, module in model.frozen.items():
        bare = module.text_model if isinstance(module, ClipTextModel) else module
        bare.save_pretrained(tmp_path / model.family.network_names()[label](module).folder)
    model.family.save_tokenizers(tmp_path)
    assert tiny(str(tmp_path)).encoders.fingerprints == model.encoders.fingerprints
    (tmp_path / "text_encoder_2" / "model.safetensors").unlink()
    [problem, *_] = weights_problems(model.family, str(tmp_path))
    assert problem.startswith(f"text_2: {tmp_path}/text_encoder_2 has none of ")
