"""diffusers' own pipeline over the networks of one of our models: what generating is set against."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model import LatentDiffusion

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from transformers import CLIPTokenizer


@functools.cache
def clip_tokenizer(max_length: int, pad_token: str = "!") -> CLIPTokenizer:
    """Return transformers' own, over the vocabulary that open_clip brings: none has to be fetched.

    Args:
        pad_token: SD2 pads with number 0, which is "!"; SD 1.5 with the end of the text.
    """
    from open_clip.tokenizer import SimpleTokenizer
    from transformers import CLIPTokenizer

    known = SimpleTokenizer()
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as folder:
        vocabulary, merges = Path(folder, "vocab.json"), Path(folder, "merges.txt")
        vocabulary.write_text(json.dumps(known.encoder))
        merges.write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in known.bpe_ranks), ""]))
        return CLIPTokenizer(
            str(vocabulary),
            str(merges),
            bos_token="<start_of_text>",
            eos_token="<end_of_text>",
            unk_token="<end_of_text>",
            pad_token=pad_token,
            model_max_length=max_length,
        )


def pipeline_of(model: LatentDiffusion, scheduler: Any) -> StableDiffusionPipeline:
    """Assemble diffusers' pipeline from the network objects of an SD model."""
    from diffusers import StableDiffusionPipeline

    pads_with_end = model.family.architecture.pads_with_end
    pipeline = StableDiffusionPipeline(
        vae=model.encoders.modules["vae"],
        text_encoder=model.encoders.modules["text"],
        tokenizer=clip_tokenizer(model.empty_text["tokens"].shape[1], "<end_of_text>" if pads_with_end else "!"),
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
