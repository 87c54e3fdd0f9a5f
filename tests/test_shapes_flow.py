"""The miniature as a rectified flow: against diffusers' own pipeline and formulas."""

from __future__ import annotations

from typing import Any

import pytest
import test_families
import torch
from test_families import without_zeros

from families.packing import pack, unpack
from families.pipeline_files import collect_networks
from families.shapes.networks import END
from model import LatentDiffusion

CAPTIONS = ["a large red square at the top left on a white background", "a red cat", ""]


@pytest.fixture
def tiny() -> LatentDiffusion:
    return without_zeros(test_families.tiny("shapes", "flow", (48, 32), weights="shipped", caption_dropout=0.0))


def test_images_are_those_of_diffusers_pipeline(tiny):
    """Positions of tokens, times and guidance: the same noise gives the same latents in FLUX's pipeline."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    noise = torch.randn(3, *tiny.family.latent_shape((48, 32)), generator=torch.Generator().manual_seed(0))
    tokens = tiny.family.tokenize(CAPTIONS)
    images = tiny.generate(tokens, noise, sampler="euler", steps=5, guidance=2.0)
    none: dict[str, Any] = dict(text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    pipeline = FluxPipeline(scheduler=scheduler, vae=tiny.frozen["vae"], transformer=tiny.denoiser, **none)
    pipeline.set_progress_bar_config(disable=True)
    options: dict[str, Any] = dict(num_inference_steps=5, width=48, height=32, output_type="latent", true_cfg_scale=2.0)
    with torch.no_grad():
        states = tiny.family.encode_text(tiny.frozen, tokens)
        empty = tiny.family.encode_text(tiny.frozen, {"tokens": tokens["tokens"][2:]})
        options |= dict(prompt_embeds=states["text"], pooled_prompt_embeds=states["pooled"])
        options |= dict(negative_prompt_embeds=empty["text"].expand(3, -1, -1))
        options |= dict(negative_pooled_prompt_embeds=empty["pooled"].expand(3, -1))
        latents = pipeline(latents=pack(noise), **options).images
        theirs = tiny.family.decode_latents(tiny.frozen, unpack(latents, 8, 12)) / 2 + 0.5
    assert images.shape == (3, 3, 32, 48) and float((images - theirs.clamp(0, 1)).abs().max()) < 2e-5


def test_the_whole_caption_is_the_state_at_its_end_mark(tiny):
    tokens = tiny.family.tokenize([*CAPTIONS, "red " * 40])["tokens"]
    with torch.no_grad():
        states = tiny.family.encode_text(tiny.frozen, {"tokens": tokens})
    ends = (tokens == END).int().argmax(dim=1)
    assert ends.tolist() == [13, 4, 1, 15]
    assert torch.equal(states["pooled"], states["text"][torch.arange(4), ends])


def test_an_export_that_would_be_another_pipelines_is_refused(tiny):
    with pytest.raises(ValueError, match="^model.variant: flow of shapes is not exported: "):
        collect_networks(tiny.family, tiny.denoiser, tiny.frozen)
