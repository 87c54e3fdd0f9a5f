"""Who generates images in a contest of bench.latency: ours, in several ways to compute, and diffusers' own pipeline.

Shapes: B images of a call, H W their height and width in px.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from model import AUTOCAST_DTYPES, LatentDiffusion, build_model
from training import speed
from training.device import build_device
from training.speed import SpeedKeys
from weights.t5_text import T5Text
from zoo import pipeline_folder
from zoo.model_config import ModelConfig
from zoo.objectives import ObjectiveConfig
from zoo.sampling import prompt_noise
from zoo.spec import as_size

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from transformers import PreTrainedTokenizerBase

    from zoo.spec import Family

SEED = 0
FAMILIES = {"shapes": "stock", "sdxl": "stock", "flux": "dev"}
"""Families among the `variants` of bench.latency -> their variant; the others are variants of SD2."""
PRECISIONS = ("fp16", "bf16", "tf32", "fp32")
# `blocks` after `whole`: the last one sets dynamo's limit of graphs, and blocks need the higher one.
WAYS = {
    "eager": SpeedKeys(),
    "whole": SpeedKeys(compile="whole"),
    "cuda_graphs": SpeedKeys(compile="whole", cuda_graphs=True),
    "blocks": SpeedKeys(compile="blocks"),
}
Maker = Callable[[], Tensor]
"""Makes all images of a case from their captions: (B, 3, H, W) in [0, 1] on the device."""


@dataclass(frozen=True)
class Case:
    """What all contestants of one contest have in common; a record names it."""

    variant: str
    preset: str
    image_size: int
    sampler: str
    steps: int
    guidance: float
    precision: str
    batch_size: int
    channels_last: bool
    rounds: int
    threads: int


def precision_problem(precision: str) -> str | None:
    """Return why a precision is not possible on this machine, or None."""
    return None if torch.cuda.is_available() or precision in ("bf16", "fp32") else "needs a GPU."


def way_problem(way: str, precision: str) -> str | None:
    """Return why a way to compute is not possible on this machine, or None."""
    problems = WAYS[way].problems_of_speed(precision)
    return problems[0][1] if problems else None


# --- contestants ---


def captions_of(case: Case) -> list[str]:
    """Return a caption for each image of a call."""
    return [f"a photograph of {number} oranges on a blue table" for number in range(case.batch_size)]


def family_of(variant: str, preset: str) -> tuple[str, str, str]:
    """Return what a word of `variants` stands for, with the preset: arguments of zoo.load_family."""
    return (variant, preset, FAMILIES[variant]) if variant in FAMILIES else ("sd2", preset, variant)


def model_of(case: Case) -> LatentDiffusion:
    """Build the model of a case with random weights, on its device."""
    # As in diffusers' pipeline, the autoencoder computes in the type of the rest.
    config = ModelConfig(*family_of(case.variant, case.preset), vae_precision="run")
    size = as_size(case.image_size)
    model = build_model(config, ObjectiveConfig(), size=size, normalize="symmetric", seed=SEED)
    device = build_device(case.precision)._device
    torch.set_num_threads(case.threads)
    return model.place(device, case.precision)


def twin_of(model: LatentDiffusion) -> LatentDiffusion:
    """Return a copy of a model with its own modules, which can be compiled by themselves, around the same tensors."""
    networks = (model.denoiser, *model.frozen.values())
    tensors = [tensor for network in networks for tensor in (*network.parameters(), *network.buffers())]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def ours(model: LatentDiffusion, case: Case, way: str) -> Maker:
    """Return what generates with our code; the model is changed as its way says."""
    speed.apply(model, dataclasses.replace(WAYS[way], channels_last=case.channels_last), case.precision)

    def make() -> Tensor:
        return model.generate(
            model.family.tokenize(captions_of(case)),
            prompt_noise(SEED, range(case.batch_size), model.latent_shape),
            sampler=case.sampler,
            steps=case.steps,
            guidance=case.guidance,
        )

    return make


def theirs(model: LatentDiffusion, case: Case) -> Maker:
    """Return what generates with diffusers' pipeline; all networks of the model are cast to the precision."""
    dtype = AUTOCAST_DTYPES.get(case.precision, torch.float32)
    for network in (model.denoiser, *model.frozen.values()):
        nn.Module.to(network, dtype)  # diffusers' own warns of every cast
    family, objective = model.family, model.objective
    made_for = dict(zero_terminal_snr=objective.zero_terminal_snr)
    pipeline = pipeline_of(model, family.pipeline_scheduler(case.sampler, objective.prediction, **made_for))
    call = {"width": case.image_size, "height": case.image_size}
    call |= family.pipeline_call(as_size(case.image_size), case.guidance)

    def make() -> Tensor:
        noise = prompt_noise(SEED, range(case.batch_size), model.latent_shape)
        return pipeline(
            captions_of(case),
            num_inference_steps=case.steps,
            latents=family.pipeline_latents(noise.to(model.device, dtype)),
            **call,
            output_type="pt",
        ).images

    return make


# --- diffusers' pipeline over the networks of one of our models ---


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
