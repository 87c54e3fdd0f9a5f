"""Measure images/s of generating, against a plain diffusers pipeline of the same network objects and scheduler.

    python -m bench.generate                                        # a table, and reports/results/generate_speed.json
    python -m bench.generate num_prompts=8 rounds=1 results=/tmp/generate.json

    ours            LatentDiffusion.generate in batches
    one at a time   StableDiffusionPipeline called with one caption at a time, as its documentation shows
    batched         the same pipeline called with as many captions as we take

Contestants take turns, round by round, in one process (bench/contest.py). All draw each prompt's noise from its own
generator, so their images are the same; the greatest difference between them is in the record.
Exit code: 0 measured, 2 when the command cannot be read.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.command import head, read_keys, write_record
from bench.contest import Figures, take_turns
from cli.command import command
from cli.limits import limited
from cli.table import as_table
from config import as_written
from model import LatentDiffusion, ModelConfig, build_model
from zoo.objectives import ObjectiveConfig
from zoo.sampling import MAX_STEPS, MIN_STEPS, SamplerName, build_scheduler, prompt_generator, prompt_noise
from zoo.spec import MAX_SIDE_PX, as_size

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from transformers import CLIPTokenizer

SCHEMA = 1
SEED = 0
OTHERS = {"one_at_a_time": "pipeline, one at a time", "batched": "pipeline, batched"}


@dataclass(frozen=True)
class GenerateConfig:
    """The keys of this command."""

    preset: str = "tiny"
    """Size of the network: tiny or full."""
    variant: str = "stock"
    """Variant of Stable Diffusion, as model.variant."""
    image_size: int = limited(64, 1, MAX_SIDE_PX)
    """Side of the images in pixels."""
    num_prompts: int = limited(16, 1)
    """Images that are generated in a turn."""
    batch_size: int = limited(16, 1, 2**16)
    """Images a pass."""
    sampler: SamplerName = "ddim"
    """How an image is drawn from noise."""
    steps: int = limited(20, MIN_STEPS, MAX_STEPS)
    """Steps of the sampler."""
    guidance: float = limited(8.0, 0.0)
    """Scale of classifier-free guidance."""
    rounds: int = limited(5, 1)
    """Turns of each contestant."""
    threads: int = limited(1, 1, 1024)
    """Threads of torch on a CPU."""
    results: str = "reports/results/generate_speed.json"
    """File of the record; an earlier one is replaced."""


def clip_tokenizer(max_length: int) -> CLIPTokenizer:
    """Return transformers' own, over the vocabulary that open_clip brings: none has to be fetched."""
    from open_clip.tokenizer import SimpleTokenizer
    from transformers import CLIPTokenizer

    known = SimpleTokenizer()
    with tempfile.TemporaryDirectory(prefix="generate-") as folder:
        vocabulary, merges = Path(folder, "vocab.json"), Path(folder, "merges.txt")
        vocabulary.write_text(json.dumps(known.encoder))
        merges.write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in known.bpe_ranks), ""]))
        return CLIPTokenizer(
            str(vocabulary),
            str(merges),
            bos_token="<start_of_text>",
            eos_token="<end_of_text>",
            unk_token="<end_of_text>",
            pad_token="!",  # as SD2's: its number is 0
            model_max_length=max_length,
        )


def pipeline_of(model: LatentDiffusion, scheduler: Any) -> StableDiffusionPipeline:
    """Assemble diffusers' pipeline from the network objects of an SD2 model."""
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline(
        vae=model.encoders.modules["vae"],
        text_encoder=model.encoders.modules["text"],
        tokenizer=clip_tokenizer(model.empty_text["tokens"].shape[1]),
        unet=model.denoiser.eval(),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def contestants(config: GenerateConfig) -> dict[str, Callable[[], Tensor]]:
    """Return name -> what makes all the images, (N, 3, H, W) float32 in [0, 1], from captions."""
    size = as_size(config.image_size)
    model = build_model(
        ModelConfig(preset=config.preset, variant=config.variant),
        ObjectiveConfig(),
        size=size,
        normalize="symmetric",
        seed=SEED,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.place(device, "fp32")
    made_for = dict(zero_terminal_snr=model.objective.zero_terminal_snr)
    pipeline = pipeline_of(model, build_scheduler(config.sampler, model.objective.prediction, **made_for))
    captions = [f"a photograph of {number} oranges on a blue table" for number in range(config.num_prompts)]

    def ours() -> Tensor:
        images = []
        for start in range(0, config.num_prompts, config.batch_size):
            ids = range(start, min(start + config.batch_size, config.num_prompts))
            images += model.generate(
                model.family.tokenize([captions[number] for number in ids]),
                prompt_noise(SEED, ids, model.latent_shape),
                sampler=config.sampler,
                steps=config.steps,
                guidance=config.guidance,
            )
        return torch.stack(images).cpu()

    def diffusers(batch_size: int) -> Tensor:
        images = []
        for start in range(0, config.num_prompts, batch_size):
            ids = range(start, min(start + batch_size, config.num_prompts))
            images += pipeline(
                [captions[number] for number in ids],
                width=size[0],
                height=size[1],
                num_inference_steps=config.steps,
                guidance_scale=config.guidance,
                generator=[prompt_generator(SEED, number) for number in ids],
                output_type="pt",
            ).images
        return torch.stack(images).cpu()

    return {"ours": ours, "one_at_a_time": lambda: diffusers(1), "batched": lambda: diffusers(config.batch_size)}


def measure(config: GenerateConfig) -> dict[str, Any]:
    """Measure and return the record: flat, with KEY a median, KEY_min and KEY_max the spread, and `by_round`."""
    torch.set_num_threads(config.threads)
    begin = {
        **head(SCHEMA),
        "config": as_written(config),
    }
    images: dict[str, Tensor] = {}

    def turn(name: str, make: Callable[[], Tensor]) -> float:
        begun = time.perf_counter()
        images[name] = make()
        return config.num_prompts / (time.perf_counter() - begun)

    makers = contestants(config)
    values = take_turns({name: lambda n=name, m=make: turn(n, m) for name, make in makers.items()}, config.rounds)
    figures = Figures()
    for name, series in values.items():
        figures.add(f"{name}_images_per_sec", series)
    for name in OTHERS:
        figures.ratio(f"speedup_vs_{name}", "ours_images_per_sec", f"{name}_images_per_sec")
        figures.flat[f"max_abs_difference_to_{name}"] = float((images["ours"] - images[name]).abs().max())
    figures.flat["image_std"] = float(images["ours"].std())  # of all values: the images are not one colour
    return {**begin, **figures.flat, "by_round": figures.by_round}


def table(record: Mapping[str, Any]) -> str:
    """Format a record for the terminal."""
    rows = []
    for name, words in OTHERS.items():
        ratio = f"speedup_vs_{name}"
        speeds = (f"{record[f'{key}_images_per_sec']:.3g}" for key in ("ours", name))
        spread = f"{record[f'{ratio}_min']:.2f} to {record[f'{ratio}_max']:.2f}"
        rows.append((words, *speeds, f"{record[ratio]:.2f}", spread, f"{record[f'max_abs_difference_to_{name}']:.2g}"))
    return as_table(("images/s", "ours", "other", "ratio", "spread", "greatest difference"), rows, "lrrrlr")


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(GenerateConfig, argv)
    if config is None:
        return 0
    record = measure(config)
    write_record(config.results, record)
    print(table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
