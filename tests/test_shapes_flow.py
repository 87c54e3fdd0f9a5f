"""The miniature as a rectified flow: against diffusers' own pipeline and formulas, its training, and its target's records."""

from __future__ import annotations

import json
from typing import Any

import pytest
import test_families
import torch
from conftest import ROOT
from test_families import without_zeros
from test_validation import made

import benchmark
from eval import main as eval_main
from evaluation.table import read_rows
from families.packing import pack, unpack
from families.pipeline_files import collect_networks
from families.shapes.networks import END
from model import LatentDiffusion

YAML = ROOT / "yamls/shapes_flow.yaml"
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


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_the_recipe_shortened_runs_validates_and_draws_and_is_scored_afterwards(miniature, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    held_out = made(tmp_path / "held_out", "num_images=64", "part=reference") / "moments"
    words = [f"data.remote={miniature.moments}", "data.local=null", "data.workers=0", "max_duration=24ba"]
    words += [f"validation.remote={held_out}", "validation.local=null", "validation.every_images=384"]
    words += [f"samples.prompts={miniature.prompts}", "samples.every_images=768", "eval.samples=4", "eval.steps=3"]
    words += [f"run_folder={tmp_path}", "run_name=short", "loggers.progress_bar=false", "schedule.warmup_batches=2"]
    words += [f"eval.prompts={miniature.prompts}", f"eval.statistics={miniature.statistics}"]
    words += ["save.snapshot_every_images=768"]
    assert benchmark.main([str(YAML), *words]) == 0
    lines = [json.loads(line) for line in (tmp_path / "short/metrics.jsonl").read_text().splitlines()]
    losses = [line["val_loss"] for line in lines if line.get("validation")]
    assert len(losses) == 2 and losses == sorted(losses, reverse=True), losses
    assert len(list((tmp_path / "short/samples").glob("*.png"))) == 2
    assert eval_main([str(tmp_path / "short")]) == 0
    [row] = read_rows(tmp_path / "short/eval.csv")
    assert (row["images"], row["guidance"], row["sampler"]) == (768, 2.0, "euler")
    assert row["fid"] > 100 and -1 < row["clip"] < 0.5
