"""Measure the seconds from captions to images, by batch, precision and kind of compilation, next to diffusers' own pipeline.

    python -m bench.latency                                     # SD2 and SD 1.5: full size on a GPU, tiny on a CPU
    python -m bench.latency batches=[1] precisions=fp32 ways=eager,whole results=/tmp/latency.json
    make gpu-latency                                            # the full form, for a GPU

    eager         LatentDiffusion.generate, as an evaluation uses it: 16-bit precisions are autocast over float32 weights
    whole         the same with denoiser and encoders compiled, the denoiser as one graph
    cuda_graphs   the same, replayed from CUDA graphs
    blocks        compiled block by block
    pipeline      diffusers' own of the family, eager, its weights cast to the precision, as its documentation shows

A turn goes from before the tokenizer to after the VAE, the device idle at both ends. All alternate with the same random
weights, noise, sampler and steps; the first call of each, which compiles, is recorded apart.

The first of `samplers` is measured in all precisions and batches, the others in the first precision that this machine has
and in the first batch. What is not possible here is skipped with its reason; what runs out of memory is recorded as that.
The record is written after each contest. Called again, the command keeps what the same commit measured on the same device,
and continues. `python -m reports.tables RECORD.json` shows it; no GPU is needed for that.
Exit code: 0, 1 if a contestant failed, 2 if the command cannot be read.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bench.command import Figures, free, head, read_keys, rounded, take_turns, write_record
from common.command import command
from common.command_line import Problem
from common.log import log
from common.value_types import limited, truncate
from families import load_family, pipeline_files
from families.encoders import ModelConfig
from families.objectives import ObjectiveConfig
from families.sampling import FLOW, FLOW_SCHEDULERS, MAX_STEPS, MIN_STEPS, SAMPLERS, prompt_noise
from families.sd2 import ARCHITECTURES
from families.spec import MAX_SIDE_PX, parse_size
from model import AUTOCAST_DTYPES, LatentDiffusion, build_model
from reports.tables import PIPELINE, text_of_latency
from run_folder.processes import OUT_OF_MEMORY
from training import speed
from training.speed import SpeedKeys
from training.trainer import build_device, torch_device
from weights.encoder_networks import T5Text

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from transformers import PreTrainedTokenizerBase

    from families.spec import Family


@dataclass(frozen=True)
class LatencyConfig:
    """The keys of this command."""

    variants: str = "stock,sd15"
    """Variants of SD2, as model.variant, with commas between: stock, sd15 (SD 1.5), mlperf; or shapes (the miniature), sdxl,
    flux (its variant dev)."""
    preset: Literal["full", "tiny"] | None = None
    """Size of the networks. null: full on a GPU, tiny on a CPU."""
    image_size: int | None = limited(None, 1, MAX_SIDE_PX)
    """Side of the images in pixels. null: 512 for full, 64 for tiny."""
    samplers: str = "plms,ddim,dpm++,euler"
    """The first is measured in all precisions and batches, the others in the first of each."""
    steps: int = limited(50, MIN_STEPS, MAX_STEPS)
    """Steps of the sampler."""
    guidance: float = limited(7.5, 0.0)
    """Scale of classifier-free guidance."""
    batches: tuple[int, ...] = (1, 2, 4)
    """Images of a call."""
    precisions: str = "fp16,bf16,fp32"
    """Of fp16, bf16, tf32 and fp32; a CPU has bf16 and fp32."""
    ways: str = "eager,whole,cuda_graphs,blocks"
    """How ours computes: eager, whole, cuda_graphs, blocks. The pipeline always takes part."""
    channels_last: bool = False
    """NHWC tensors in ours, as the key of a run."""
    rounds: int = limited(10, 1)
    """Turns of each contestant."""
    threads: int = limited(1, 1, 1024)
    """Threads of torch on a CPU."""
    results: str = "reports/results/latency_cpu.json"
    """File of the record. One of the same commit and device is added to, another one replaced."""


def listed(text: str) -> list[str]:
    """Return the names of a key, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def check(config: LatencyConfig) -> list[Problem]:
    """Return every problem of the keys that does not depend on the machine."""
    known = {"variants": (*ARCHITECTURES, *FAMILIES), "samplers": SAMPLERS, "precisions": PRECISIONS, "ways": WAYS}
    problems = []
    for key, possible in known.items():
        if unknown := [name for name in listed(getattr(config, key)) if name not in possible]:
            text = f"unknown {', '.join(map(repr, unknown))}. Known: {', '.join(possible)}."
            problems.append(Problem(f"{key}: {text}", (key,)))
    if not config.batches or any(type(batch) is not int or not 1 <= batch <= 1024 for batch in config.batches):
        text = f"{list(config.batches)}. Possible: numbers from 1 to 1,024, e.g. [1,2,4]."
        problems.append(Problem(f"batches: {text}", ("batches",)))
    wanted = [variant for variant in listed(config.variants) if variant in FAMILIES]
    for family in (load_family(*family_of(variant, "tiny")) for variant in ("stock", *wanted)):
        if text := family.size_problem(parse_size(_size_px(config))):
            problems.append(Problem(f"image_size: {text}", ("image_size",)))
    return problems


def _preset(config: LatencyConfig) -> str:
    return config.preset or ("full" if torch.cuda.is_available() else "tiny")


def _size_px(config: LatencyConfig) -> int:
    return config.image_size or {"full": 512, "tiny": 64}[_preset(config)]


def cases_of(config: LatencyConfig) -> Iterator[LatencyCase]:
    """Yield the cases in the order in which they are measured; a flow is sampled by euler alone."""
    precisions = listed(config.precisions)
    possible = [precision for precision in precisions if not precision_problem(precision)]
    for variant in listed(config.variants):
        is_flow = load_family(*family_of(variant, _preset(config))).objective["prediction"] == FLOW
        samplers = list(FLOW_SCHEDULERS) if is_flow else listed(config.samplers)
        for precision in precisions:
            for sampler in samplers:
                is_first = sampler == samplers[0]
                if not is_first and precision != next(iter(possible), None):
                    continue
                for batch in dict.fromkeys(config.batches if is_first else config.batches[:1]):
                    yield LatencyCase(
                        variant=variant,
                        preset=_preset(config),
                        image_size=_size_px(config),
                        sampler=sampler,
                        steps=config.steps,
                        guidance=config.guidance,
                        precision=precision,
                        batch_size=batch,
                        channels_last=config.channels_last,
                        rounds=config.rounds,
                        threads=config.threads,
                    )


# --- a contest ---


class Contest:
    """The contestants of one case; one that fails is dropped, and the others continue.

    Attributes:
        status: contestant -> ok, skipped, out_of_memory or failed.
        reasons: contestant -> why it is not ok.
    """

    def __init__(self, case: LatencyCase, ways: Sequence[str]):
        self.case = case
        self.status = dict.fromkeys((PIPELINE, *ways), "ok")
        self.reasons: dict[str, str] = {}
        self.makers: dict[str, Maker] = {}
        self.images: dict[str, np.ndarray] = {}
        for name in self.status:
            text = precision_problem(case.precision) or (way_problem(name, case.precision) if name in WAYS else None)
            if text:
                self.status[name], self.reasons[name] = "skipped", text

    def names(self) -> list[str]:
        """Return the contestants that are still taking part."""
        return [name for name, status in self.status.items() if status == "ok"]

    def measure(self) -> dict[str, Any]:
        """Measure, and return the record of this case."""
        begin = {**dataclasses.asdict(self.case), "load_average_before": round(os.getloadavg()[0], 2)}
        if self.names():
            self._build()
        first = {name: rounded(self._turn(name)) for name in self.names()}
        turns = {name: functools.partial(self._turn, name) for name in self.names()}
        values = take_turns(turns, self.case.rounds, warm_up=False) if turns else {}
        figures = self._figures(first, values)
        return {**begin, "status": self.status, "reasons": self.reasons, **figures.as_record()}

    def _build(self) -> None:
        """Build each contestant: its own modules, the same tensors wherever types and memory format are the same."""
        torch._dynamo.reset()
        differs = self.case.channels_last or self.case.precision in AUTOCAST_DTYPES
        try:
            model = model_of(self.case)
        except Exception as error:
            for name in self.names():
                self._drop(name, error)
            return
        for name in self.names():
            try:
                if name == PIPELINE:
                    self.makers[name] = theirs(copy.deepcopy(model) if differs else twin_of(model), self.case)
                else:
                    self.makers[name] = ours(twin_of(model), self.case, name)
            except Exception as error:
                self._drop(name, error)

    def _turn(self, name: str) -> float:
        """Call once, the device idle at both ends; return the seconds, NaN from a contestant that was dropped."""
        if name not in self.makers:
            return float("nan")
        synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        try:
            synchronize()
            begun = time.perf_counter()
            images = self.makers[name]()
            synchronize()
            seconds = time.perf_counter() - begun
            self.images[name] = images.float().cpu().numpy()
        except Exception as error:
            self._drop(name, error)
            return float("nan")
        return seconds

    def _drop(self, name: str, error: Exception) -> None:
        """Record why a contestant is out, and free its memory."""
        is_memory = isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY)
        self.status[name] = "out_of_memory" if is_memory else "failed"
        self.reasons[name] = truncate(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", 300)
        self.makers.pop(name, None)
        error.__traceback__ = None  # its frames hold tensors
        free()

    def _figures(self, first: Mapping[str, float], values: Mapping[str, list[float]]) -> Figures:
        figures, names = Figures(), self.names()
        for name in names:
            figures.add(f"{name}_sec", values[name])
            figures.flat[f"{name}_sec_p95"] = rounded(float(np.percentile(values[name], 95)))
            figures.flat[f"{name}_first_sec"] = first[name]
        for way in (name for name in names if name != PIPELINE):
            for other in (PIPELINE, "eager"):
                if other in names and other != way:
                    figures.ratio(f"{way}_speedup_vs_{other}", f"{other}_sec", f"{way}_sec")
            figures.flat[f"{way}_image_std"] = _finite(self.images[way].std())  # the images are not one color
            if PIPELINE in names:
                difference = np.abs(self.images[way] - self.images[PIPELINE]).max()
                figures.flat[f"{way}_max_abs_difference"] = _finite(difference)
        return figures


def _finite(value: np.floating) -> float | None:
    return rounded(float(value)) if np.isfinite(value) else None


# --- the record ---


def begun_record(config: LatencyConfig) -> dict[str, Any]:
    """Return the record to continue: the existing one if it is of this commit and device, else a new one."""
    torch.set_num_threads(config.threads)
    new = {**head(), "contests": []}
    try:
        old = json.loads(Path(config.results).read_text())
        same = all(old[key] == new[key] for key in ("schema", "device", "commit")) and isinstance(old["contests"], list)
    except FileNotFoundError:
        return new
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    is_commit = new["commit"] is not None and not new["commit"].endswith("+changes")
    if same and is_commit:
        return old
    log.info(f"{config.results}: is of another commit or device, or of uncommitted code. It is replaced.")
    return new


def done(record: dict[str, Any], case: LatencyCase, ways: Sequence[str]) -> bool:
    """True where the record has this contest with these contestants, and none of them failed."""
    contests = [each for each in record["contests"] if _is_of(each, case, ways)]
    return bool(contests) and "failed" not in contests[0]["status"].values()


def _is_of(contest: Mapping[str, Any], case: LatencyCase, ways: Sequence[str]) -> bool:
    same = all(contest[key] == value for key, value in dataclasses.asdict(case).items())
    return same and list(contest["status"]) == [PIPELINE, *ways]


# --- a case, and what this machine can compute ---

SEED = 0
FAMILIES = {"shapes": "stock", "sdxl": "stock", "flux": "dev"}
"""Families among the `variants` -> their variant; the others are variants of SD2."""
PRECISIONS = ("fp16", "bf16", "tf32", "fp32")
# `blocks` after `whole`: the last one sets dynamo's limit of graphs, and blocks need the higher one.
WAYS = {
    "eager": SpeedKeys(),
    "whole": SpeedKeys(compile="whole"),
    "cuda_graphs": SpeedKeys(compile="whole", cuda_graphs=True),
    "blocks": SpeedKeys(compile="blocks"),
}
Maker = Callable[[], Tensor]
"""Makes all images of a call, (B, 3, H, W) in [0, 1] on the device."""


@dataclass(frozen=True)
class LatencyCase:
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


def captions_of(case: LatencyCase) -> list[str]:
    """Return a caption for each image of a call."""
    return [f"a photograph of {number} oranges on a blue table" for number in range(case.batch_size)]


def family_of(variant: str, preset: str) -> tuple[str, str, str]:
    """Return what a word of `variants` stands for, with the preset: arguments of families.load_family."""
    return (variant, preset, FAMILIES[variant]) if variant in FAMILIES else ("sd2", preset, variant)


def model_of(case: LatencyCase) -> LatentDiffusion:
    """Build the model of a case with random weights, on its device."""
    # As in diffusers' pipeline, the autoencoder computes in the type of the rest.
    config = ModelConfig(*family_of(case.variant, case.preset), vae_precision="run")
    size = parse_size(case.image_size)
    model = build_model(config, ObjectiveConfig(), size=size, normalize="symmetric", seed=SEED)
    device = torch_device(build_device(case.precision))
    torch.set_num_threads(case.threads)
    return model.to_device(device, case.precision)


def twin_of(model: LatentDiffusion) -> LatentDiffusion:
    """Return a copy of a model with its own modules, which can be compiled by themselves, around the same tensors."""
    networks = (model.denoiser, *model.frozen.values())
    tensors = [tensor for network in networks for tensor in (*network.parameters(), *network.buffers())]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def ours(model: LatentDiffusion, case: LatencyCase, way: str) -> Maker:
    """Return what generates with our code; the model is changed as its way says."""
    speed.apply(model, dataclasses.replace(WAYS[way], channels_last=case.channels_last))

    def make() -> Tensor:
        return model.generate(
            model.family.tokenize(captions_of(case)),
            prompt_noise(SEED, range(case.batch_size), model.latent_shape),
            sampler=case.sampler,
            steps=case.steps,
            guidance=case.guidance,
        )

    return make


def theirs(model: LatentDiffusion, case: LatencyCase) -> Maker:
    """Return what generates with diffusers' pipeline; all networks of the model are cast to the precision."""
    dtype = AUTOCAST_DTYPES.get(case.precision, torch.float32)
    for network in (model.denoiser, *model.frozen.values()):
        nn.Module.to(network, dtype)  # diffusers' own warns of every cast
    family, objective = model.family, model.objective
    size = parse_size(case.image_size)
    made_for: dict[str, Any] = dict(zero_terminal_snr=objective.zero_terminal_snr, size=size)
    pipeline = pipeline_of(model, family.pipeline_scheduler(case.sampler, objective.prediction, **made_for))
    call = {"width": case.image_size, "height": case.image_size}
    call |= family.pipeline_call(size, case.guidance)

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
    parts = {
        family.network_names()[label](module).folder: _of_transformers(module) for label, module in modules.items()
    }
    spec = pipeline_files.get_pipeline(family)
    arguments = {**parts, **tokenizers_of(family), **dict.fromkeys(spec.absent_parts), **spec.settings}
    pipeline = getattr(diffusers, spec.name)(**arguments, scheduler=scheduler)
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


# --- the command ---


@command(keys=LatencyConfig, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(LatencyConfig, argv, check)
    if config is None:
        return 0
    record, ways = begun_record(config), listed(config.ways)
    for case in cases_of(config):
        name = f"{case.variant}, {case.sampler}, {case.precision}, batch {case.batch_size}"
        if done(record, case, ways):
            log.info(f"{name}: has a record of this commit")
            continue
        begun = time.monotonic()
        others = [each for each in record["contests"] if not _is_of(each, case, ways)]
        record["contests"] = [*others, Contest(case, ways).measure()]
        free()
        write_record(config.results, record)
        log.info(f"{name}: {time.monotonic() - begun:.0f} s")
    print(text_of_latency(record))
    return 1 if any("failed" in contest["status"].values() for contest in record["contests"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
