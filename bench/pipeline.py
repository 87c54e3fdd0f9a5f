"""diffusers' own pipeline over the networks of one of our models: what generating is set against."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from model import LatentDiffusion
from weights.t5_text import T5Text
from zoo import pipeline_folder

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from transformers import PreTrainedTokenizerBase

    from zoo.spec import Family


def tokenizers_of(family: Family) -> dict[str, PreTrainedTokenizerBase]:
    """Return transformers' own by the names of their folders, over the family's vocabularies: none has to be fetched."""
    import transformers

    with tempfile.TemporaryDirectory(prefix="tokenizer-") as folder:
        kinds = family.save_tokenizers(Path(folder))
        return {name: getattr(transformers, kind).from_pretrained(Path(folder, name)) for name, kind in kinds.items()}


def pipeline_of(model: LatentDiffusion, scheduler: Any) -> DiffusionPipeline:
    """Assemble diffusers' pipeline from the network objects of a model."""
    import diffusers

    family, modules = model.family, {"denoiser": model.denoiser.eval(), **model.encoders.modules}
    parts = {family.published()[label](module).folder: _of_transformers(module) for label, module in modules.items()}
    own = pipeline_folder.pipeline_of(family)
    given = {**parts, **tokenizers_of(family), **dict.fromkeys(own.absent), **own.settings}
    pipeline = getattr(diffusers, own.name)(**given, scheduler=scheduler)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _of_transformers(module: nn.Module) -> nn.Module:
    """Return a module that takes a pipeline's arguments: T5Text as transformers' own class, around the same tensors."""
    if not isinstance(module, T5Text):
        return module
    from transformers import T5EncoderModel

    with torch.device("meta"):
        theirs = T5EncoderModel(module.config)
    table = {"encoder.embed_tokens.weight": module.shared.weight}
    theirs.load_state_dict({**module.state_dict(), **table}, assign=True)
    return theirs.eval()


def twin_of(model: LatentDiffusion) -> LatentDiffusion:
    """Return a copy of a model with modules of its own, which can be compiled by themselves, around the same tensors."""
    networks = (model.denoiser, *model.frozen.values())
    tensors = [tensor for network in networks for tensor in (*network.parameters(), *network.buffers())]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
