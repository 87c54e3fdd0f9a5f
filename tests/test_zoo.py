"""The contract of zoo/spec.py over every family, and what is particular to SD2."""

from __future__ import annotations

import pytest
import torch

from zoo import FAMILIES, load_family
from zoo.objectives import ObjectiveConfig
from zoo.sd2 import LATENT_SCALE
from zoo.spec import as_size

SIZES = [(64, 64), (96, 64)]


def num_parameters(*modules: torch.nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", SIZES)
def test_every_family_goes_from_its_columns_to_a_prediction(name, size):
    """The whole path on tiny(): the shapes and types are those that the columns promise."""
    family = load_family(name, "tiny", "stock")
    torch.manual_seed(0)
    encoders, denoiser = family.build_encoders(), family.build_denoiser()
    images, moments = family.columns("images", size)["images"], family.columns("moments", size)["moments"]
    assert (images.shape, images.dtype) == ((3, size[1], size[0]), torch.uint8)
    assert moments.dtype == torch.float16

    encoded = family.encode_images(encoders, torch.zeros(2, *images.shape))
    assert encoded.shape == (2, *moments.shape)
    noise = torch.randn(2, *family.latent_shape(size))
    latents = family.sample_latents(encoded, noise)
    assert latents.shape == noise.shape
    tokens = family.tokenize(["a cat", ""])
    for column, values in tokens.items():
        promised = family.columns("moments", size)[column]
        assert values.shape == (2, *promised.shape) and values.dtype == promised.dtype
        assert values.min() >= 0 and values.max() < promised.below
    times = family.build_objective(ObjectiveConfig()).draw_times(2, torch.Generator().manual_seed(0))
    prediction = family.denoise(denoiser, latents, times, family.encode_text(encoders, tokens))
    assert prediction.shape == latents.shape


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tiny_family_has_under_two_million_parameters_with_its_encoders(name):
    family = load_family(name, "tiny", "stock")
    assert num_parameters(family.build_denoiser(), *family.build_encoders().values()) < 2_000_000


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_family_does_not_know_is_refused_with_what_it_knows(name):
    family = load_family(name, "tiny", "stock")
    with pytest.raises(ValueError, match=f"^data.stage: {name} has no stage 'films'. Known: images, moments.$"):
        family.columns("films", (64, 64))
    with pytest.raises(ValueError, match=f"^model.variant: {name} has no variant 'x'. Known: stock.$"):
        load_family(name, "tiny", "x")
    with pytest.raises(ValueError, match="^model.preset: unknown preset 'huge'. Known: full, tiny.$"):
        load_family(name, "huge", "stock")
    with pytest.raises(
        ValueError, match=f"^objective.prediction: {name} cannot be trained on 'flow'. Possible: epsilon, v.$"
    ):
        family.build_objective(ObjectiveConfig(prediction="flow"))


def test_an_unknown_family_lists_the_known_ones():
    with pytest.raises(ValueError, match="^model.family: unknown family 'sd3'. Known: sd2.$"):
        load_family("sd3", "tiny", "stock")


def test_sd2_has_the_published_number_of_parameters():
    """865,910,724: the SD2 UNet's figure, e.g. in NVIDIA's MLPerf submission."""
    with torch.device("meta"):
        family = load_family("sd2", "full", "stock")
        denoiser, encoders = family.build_denoiser(), family.build_encoders()
    assert num_parameters(denoiser) == 865_910_724
    assert encoders["vae"].config.scaling_factor == LATENT_SCALE
    assert (encoders["text"].config.hidden_size, encoders["text"].config.num_hidden_layers) == (1024, 23)


def test_tiny_sd2_has_the_block_types_of_the_full_one():
    def types(preset: str) -> set[type]:
        with torch.device("meta"):
            family = load_family("sd2", preset, "stock")
            modules = [family.build_denoiser(), *family.build_encoders().values()]
        return {type(part) for module in modules for part in module.modules()}

    assert types("tiny") == types("full")


def test_sd2_posterior_draw_equals_diffusers():
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    family = load_family("sd2", "tiny", "stock")
    moments = torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(0)) * 20  # beyond the clamp, both ways
    noise = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(1))
    posterior = DiagonalGaussianDistribution(moments)
    expected = (posterior.mean + posterior.std * noise) * LATENT_SCALE
    assert torch.equal(family.sample_latents(moments, noise), expected)


def test_sd2_tokens_are_those_of_open_clip_and_fit_into_uint16():
    import open_clip

    captions = ["a photograph of an astronaut riding a horse", "", "word " * 200]
    tokens = load_family("sd2", "tiny", "stock").tokenize(captions)["tokens"]
    assert torch.equal(tokens, open_clip.get_tokenizer("ViT-H-14")(captions))
    assert tokens[0, 0] == 49406 and tokens.max() == 49407 < 2**16
    assert tokens[1].tolist() == [49406, 49407] + [0] * 75
    assert tokens[2, -1] == 49407  # cut to 77, with the end mark kept


@pytest.mark.parametrize(("size", "said"), [((60, 64), "60 x 64 px"), ((64, 4), "64 x 4 px")])
def test_sd2_says_which_sizes_it_takes(size, said):
    text = load_family("sd2", "tiny", "stock").size_problem(size)
    assert text == f"{said} does not fit sd2. Both sides have to be multiples of 8."
    assert load_family("sd2", "tiny", "stock").size_problem((72, 8)) is None


def test_a_size_is_a_number_or_width_and_height():
    assert as_size(512) == (512, 512) and as_size([640, 512]) == (640, 512)
    for wrong in ("512", 0, 800_000, [512], [1, 2, 3], [512, 0], 1.5, True, None):
        with pytest.raises(
            ValueError, match="is not a size. Possible: pixels, e.g. 512, or .width, height., to 16384.$"
        ):
            as_size(wrong)
