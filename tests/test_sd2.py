"""Stable Diffusion 2 and XL against published numbers, open_clip and diffusers. All families: test_families.py."""

from __future__ import annotations

import pytest
import torch
from test_families import tiny

from families import load_family
from families.sd2 import ARCHITECTURES, LATENT_SCALE
from families.spec import parse_size
from mds.images import crop_geometry
from weights.encoder_networks import CLIP_END
from weights.tensors import build_on_meta


@pytest.mark.parametrize("variant", ARCHITECTURES)
def test_full_sd2_is_the_published_network(variant):
    """Heads, groups, activations: published weights would load without an error if one of these differed."""
    from diffusers.models.attention_processor import Attention

    family = load_family("sd2", "full", variant)
    unet, encoders = build_on_meta(family.build_denoiser), build_on_meta(family.build_encoders)
    text = encoders["text"].config
    assert encoders["vae"].config.scaling_factor == LATENT_SCALE
    heads = {320: 8, 640: 8, 1280: 8} if variant == "sd15" else {320: 5, 640: 10, 1280: 20}
    of_text = (768, 12, 12, "quick_gelu", 1e-5) if variant == "sd15" else (1024, 23, 16, "gelu", 1e-5)
    sizes = (text.hidden_size, text.num_hidden_layers, text.num_attention_heads, text.hidden_act, text.layer_norm_eps)
    assert sizes == of_text
    attentions = [m for m in unet.modules() if isinstance(m, Attention)]
    assert len(attentions) == 32 and all(m.heads == heads[m.to_q.in_features] for m in attentions)
    norms = [m for m in encoders["vae"].modules() if isinstance(m, torch.nn.GroupNorm)]
    assert len(norms) == 52 and {(m.num_groups, m.eps) for m in norms} == {(32, 1e-6)}
    if variant != "mlperf":
        groups = [(m.num_groups, m.eps) for m in unet.modules() if isinstance(m, torch.nn.GroupNorm)]
        assert set(groups) == {(32, 1e-5), (32, 1e-6)} and groups.count((32, 1e-6)) == 16


@pytest.mark.parametrize(("preset", "groups"), [("full", 16), ("tiny", 4)])
def test_the_norms_of_mlperf_are_the_references(preset, groups):
    """16 groups, eps 1e-5 in residual blocks and the output norm; 32 groups, eps 1e-6 before each transformer."""
    unet = build_on_meta(load_family("sd2", preset, "mlperf").build_denoiser)
    norms = {name: (m.num_groups, m.eps) for name, m in unet.named_modules() if isinstance(m, torch.nn.GroupNorm)}
    of_transformers = {name for name in norms if ".attentions." in name}
    assert len(of_transformers) == 16 and len(norms) == 16 + 2 * 22 + 1
    for name, norm in norms.items():
        assert norm == ((2 * groups, 1e-6) if name in of_transformers else (groups, 1e-5)), name


def test_mlperf_starts_from_zero_where_the_reference_does_and_from_torchs_default_elsewhere():
    """torch: weights and biases uniform in +-1/sqrt(fan-in), norms 1 and 0."""
    torch.manual_seed(0)
    family = load_family("sd2", "tiny", "mlperf")
    unet = family.build_denoiser()
    kinds = torch.nn.Conv2d | torch.nn.Linear | torch.nn.GroupNorm
    layers = {name: m for name, m in unet.named_modules() if isinstance(m, kinds)}
    zero = {name for name, m in layers.items() if not m.weight.any()}
    expected = {n for n in layers if n.endswith("conv2") or (n.endswith("proj_out") and ".attentions." in n)}
    assert zero == expected | {"conv_out"} and len(zero) == 22 + 16 + 1
    for name, layer in layers.items():
        if name in zero:
            assert layer.bias is None or not layer.bias.any()
        elif isinstance(layer, torch.nn.GroupNorm):
            assert torch.all(layer.weight == 1) and not layer.bias.any()
        else:
            bound = layer.weight[0].numel() ** -0.5
            assert layer.weight.abs().max() <= bound
            # The standard deviation of that uniform distribution, within five standard errors.
            assert abs(layer.weight.std() * 3**0.5 / bound - 1) < 5 * (0.2 / layer.weight.numel()) ** 0.5
    noise = torch.randn(1, 4, 8, 8)
    assert not family.denoise(unet, noise, torch.tensor([3]), {"text": torch.randn(1, 77, 16)}).any()


def test_sd15_sees_captions_filled_up_with_the_end_mark():
    """Its tokenizer pads with 49407 where open_clip's pads with 0; batches and stored tokens are alike for all variants."""
    family = load_family("sd2", "tiny", "sd15")
    text = family.build_encoders()["text"].eval()
    assert all(name.startswith("text_model.") for name in text.state_dict())  # whichever transformers there is
    captions = ["a cat", "", "word " * 200, "a"]
    tokens = family.tokenize(captions)["tokens"]
    assert torch.equal(tokens, load_family("sd2", "tiny", "stock").tokenize(captions)["tokens"])
    tokens[3, 1] = 0  # a token like others, where it stands before the end mark
    padded = tokens.clone()
    padded[0, 4:], padded[1, 2:], padded[3, 3:] = CLIP_END, CLIP_END, CLIP_END
    with torch.no_grad():
        states = family.encode_text({"text": text}, {"tokens": tokens})["text"]
        torch.testing.assert_close(states, text(input_ids=padded).last_hidden_state)  # another graph
        assert not torch.allclose(states, text(input_ids=tokens).last_hidden_state, atol=1e-3)


def test_sd2_posterior_draw_equals_diffusers():
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    family = load_family("sd2", "tiny", "stock")
    moments = torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(0)) * 20  # beyond the clamp, both ways
    noise = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(1))
    posterior = DiagonalGaussianDistribution(moments)
    expected = (posterior.mean + posterior.std * noise) * LATENT_SCALE
    torch.testing.assert_close(family.sample_latents(moments, noise), expected)  # the same law, written otherwise


def test_sd2_tokens_are_those_of_open_clip_and_fit_into_uint16():
    import open_clip

    captions = ["a photograph of an astronaut riding a horse", "", "word " * 200]
    tokens = load_family("sd2", "tiny", "stock").tokenize(captions)["tokens"]
    assert torch.equal(tokens, open_clip.get_tokenizer("ViT-H-14")(captions)) and tokens.max() == 49407 < 2**16


def test_a_size_is_a_number_or_width_and_height_that_fit_the_family():
    family = load_family("sd2", "tiny", "stock")
    assert family.size_problem((64, 4)) == "64 x 4 px does not fit sd2. Both sides have to be multiples of 8."
    assert family.size_problem((60, 64)) is not None and family.size_problem((72, 8)) is None
    assert parse_size(512) == (512, 512) and parse_size([640, 512]) == (640, 512)
    text = "is not a size. Possible: pixels, e.g. 512, or .width, height., to 16384.$"
    for wrong in ("512", 0, 800_000, [512], [512, 0], 1.5, True, None):
        with pytest.raises(ValueError, match=text):
            parse_size(wrong)


# --- SDXL ---

CAPTIONS = ["a photograph of an astronaut riding a horse", "word " * 200]


def test_a_step_is_the_formula_of_diffusers_training_script():
    """examples/text_to_image/train_text_to_image_sdxl.py: add_noise, the UNet with time ids and pooled text, mean square."""
    from diffusers import DDPMScheduler

    model, size_ids = tiny("sdxl", "stock", caption_dropout=0.0), torch.tensor([[700, 500, 3, 16], [64, 96, 0, 0]])
    generator = torch.Generator().manual_seed(1)
    moments = torch.randn(2, 8, 8, 12, generator=generator)
    batch = {"moments": moments, "sizes": size_ids, **model.family.tokenize(CAPTIONS)}
    batch = model.draw(batch, torch.Generator().manual_seed(2))
    outputs = model(batch)

    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
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
    model = tiny("sdxl", "stock", caption_dropout=0.5)
    batch = {"moments": torch.zeros(8, 8, 8, 12), "sizes": torch.zeros(8, 4, dtype=torch.int64)}
    batch = model.draw(batch | model.family.tokenize(["a cat"] * 8), torch.Generator().manual_seed(0))
    _, condition = model.encode(batch)
    dropped = batch["caption_dropped"]
    assert 0 < int(dropped.sum()) < 8
    states = {name: condition[name] for name in ("text", "pooled")}
    for each in states.values():
        assert torch.equal(~each.flatten(1).any(dim=1), dropped)
    rest = {name: value for name, value in batch.items() if "tokens" not in name}
    _, from_stored = model.encode({**rest, **{name: each.half() for name, each in states.items()}})
    assert torch.allclose(from_stored["text"], condition["text"], atol=2e-3)


def test_the_sizes_are_those_of_the_picture_and_of_what_is_shown_of_it():
    for source, at, flipped, expected in (
        ((1000, 500), None, False, (500, 1000, 0, 256)),  # scaled to 1024 x 512, of which the middle is shown
        ((1000, 500), (100, 0), False, (500, 1000, 0, 100)),
        ((1000, 500), (100, 0), True, (500, 1000, 0, 412)),  # 512 px of room, 100 px from the other end
        ((512, 2048), None, False, (2048, 512, 768, 0)),
        ((70_000, 70_000), None, False, (65_535, 65_535, 0, 0)),  # as much as a dataset has
    ):
        assert crop_geometry(source, (512, 512), at, flipped=flipped) == expected
