"""diffusers' own pipeline over the networks of one of our models: what generating is set against."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model import LatentDiffusion

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from transformers import PreTrainedTokenizerBase

    from zoo.spec import Family


def tokenizer_of(family: Family) -> PreTrainedTokenizerBase:
    """Return transformers' own, over the family's vocabulary: none has to be fetched."""
    import transformers

    with tempfile.TemporaryDirectory(prefix="tokenizer-") as folder:
        return getattr(transformers, family.save_tokenizer(Path(folder))).from_pretrained(folder)


def pipeline_of(model: LatentDiffusion, scheduler: Any) -> StableDiffusionPipeline:
    """Assemble diffusers' pipeline from the network objects of a model of SD's kind."""
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline(
        vae=model.encoders.modules["vae"],
        text_encoder=model.encoders.modules["text"],
        tokenizer=tokenizer_of(model.family),
        unet=model.denoiser.eval(),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def twin_of(model: LatentDiffusion) -> LatentDiffusion:
    """Return a copy of a model with modules of its own, which can be compiled by themselves, around the same tensors."""
    networks = (model.denoiser, *model.frozen.values())
    tensors = [tensor for network in networks for tensor in (*network.parameters(), *network.buffers())]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
