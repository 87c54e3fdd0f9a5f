"""Stable Diffusion 2 against published numbers, open_clip and diffusers. Contract of all families: test_families.py."""

from __future__ import annotations

import pytest
import torch

from families import load_family
from families.sd2 import ARCHITECTURES, LATENT_SCALE
from families.spec import parse_size
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


@pytest.mark.parametrize("variant", ARCHITECTURES)
def test_tiny_sd2_has_the_block_types_of_the_full_one(variant):
    def types(preset: str) -> set[type]:
        family = load_family("sd2", preset, variant)
        modules = [build_on_meta(family.build_denoiser), *build_on_meta(family.build_encoders).values()]
        return {type(part) for module in modules for part in module.modules()}

    assert types("tiny") == types("full")


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
