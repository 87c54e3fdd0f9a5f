"""Who takes part in a contest of bench.latency: ours in several ways to compute, and diffusers' pipeline.

Shapes: B images of a call, H W their height and width in px.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bench.contest import rounded
from bench.pipeline import pipeline_of
from callbacks.throughput import peak_mem_gib
from model import AUTOCAST_DTYPES, LatentDiffusion, build_model
from reports.latency import PIPELINE
from training import speed
from training.device import build_device
from training.speed import SpeedKeys
from zoo.model_config import ModelConfig
from zoo.objectives import ObjectiveConfig
from zoo.sampling import prompt_noise
from zoo.spec import as_size

SEED = 0
FAMILIES = {"shapes": "stock", "sdxl": "stock", "flux": "dev"}
"""Families that stand among the variants of Stable Diffusion by their own names -> their variant."""
TURN_SEC = 3600
"""A process that takes longer for a turn is lost."""
PRECISIONS = ("fp16", "bf16", "tf32", "fp32")
# `blocks` after `whole`: the last one sets dynamo's limit of graphs, and blocks need the higher one.
WAYS = {
    "eager": SpeedKeys(),
    "whole": SpeedKeys(compile="whole"),
    "cuda_graphs": SpeedKeys(compile="whole", cuda_graphs=True),
    "blocks": SpeedKeys(compile="blocks"),
    "tensorrt": SpeedKeys(),
}
# The graph keeps the types that autocast gave it. https://docs.pytorch.org/TensorRT/user_guide/compilation/compilation_settings.html
TENSORRT_OPTIONS = {"use_explicit_typing": True, "truncate_double": True}


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
    processes: bool = False


# --- is it possible ---


def precision_problem(precision: str) -> str | None:
    """Say why a precision is not possible on this machine, or None."""
    if torch.cuda.is_available() or precision in ("bf16", "fp32"):
        return None
    return "needs a GPU."


def way_problem(way: str, precision: str) -> str | None:
    """Say why a way to compute is not possible on this machine, or None."""
    if way == "tensorrt":
        if importlib.util.find_spec("torch_tensorrt") is None:
            return (
                "torch-tensorrt is not installed. It is an extra: pip install torch-tensorrt, of this torch's release."
            )
        return None if torch.cuda.is_available() else "needs a GPU."
    found = WAYS[way].problems_of_speed(precision)
    return found[0][1] if found else None


# --- contestants ---


Maker = Callable[[], Tensor]
"""Makes all images of a case from their captions: (B, 3, H, W) in [0, 1] on the device, B the case's batch size."""


def captions_of(case: Case) -> list[str]:
    """Return a caption for each image of a call."""
    return [f"a photograph of {number} oranges on a blue table" for number in range(case.batch_size)]


def family_of(variant: str, preset: str) -> tuple[str, str, str]:
    """Return what a word of `variants` stands for, with the preset: arguments of zoo.load_family."""
    return (variant, preset, FAMILIES[variant]) if variant in FAMILIES else ("sd2", preset, variant)


def model_of(case: Case, *, as_torch_comes: bool = False) -> LatentDiffusion:
    """Build the model of a case with random weights, on its device.

    Args:
        as_torch_comes: on a CPU, without what a command of ours sets for its process.
    """
    # As in diffusers' pipeline, which is on the other side: its autoencoder computes in the pipeline's own type.
    config = ModelConfig(*family_of(case.variant, case.preset), vae_precision="run")
    model = build_model(
        config,
        ObjectiveConfig(),
        size=as_size(case.image_size),
        normalize="symmetric",
        seed=SEED,
    )
    on_its_own = as_torch_comes and not torch.cuda.is_available()
    device = torch.device("cpu") if on_its_own else build_device(case.precision)._device
    torch.set_num_threads(case.threads)
    return model.place(device, case.precision)


def ours(model: LatentDiffusion, case: Case, way: str) -> Maker:
    """Return what generates with our code; the model is changed as its way says."""
    speed.apply(model, dataclasses.replace(WAYS[way], channels_last=case.channels_last), case.precision)
    if way == "tensorrt":
        import torch_tensorrt  # noqa: F401  registers the back-end

        model.denoiser.compile(backend="torch_tensorrt", dynamic=False, options=TENSORRT_OPTIONS)

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
    """Return what generates with diffusers' pipeline; all networks of the model are cast to the precision, wide ones too."""
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


def _idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Turn(NamedTuple):
    """What one turn of a contestant took and made."""

    seconds: float
    cpu_sec: float
    """Time of all its threads on the processor."""
    images: np.ndarray
    peak_mem_gib: float
    """Of its process so far."""


def turn(make: Maker, device: torch.device) -> Turn:
    """Call once, the device idle at both ends."""
    _idle(device)
    begun, cpu = time.perf_counter(), time.process_time()
    images = make()
    _idle(device)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    return Turn(seconds, cpu, images.float().cpu().numpy(), peak_mem_gib(device.type == "cuda"))


class Clocked:
    """A family with a clock around its three networks; takes its model's family's place, for one call of `generate`.

    On a GPU the clocks are CUDA events: the host waits for none of them before the end.
    """

    PARTS = {"encode_text": "text", "denoise": "denoiser", "decode_latents": "vae"}

    def __init__(self, model: LatentDiffusion):
        self.family, self.device = model.family, model.device
        self.spans: list[tuple[str, Any, Any]] = []
        model.family = self

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.family, name)
        return functools.partial(self._clocked, self.PARTS[name], found) if name in self.PARTS else found

    def _clocked(self, part: str, function: Callable[..., Any], *given: Any) -> Any:
        begin = self._now()
        made = function(*given)
        self.spans.append((part, begin, self._now()))
        return made

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def shares(self, make: Maker) -> dict[str, float]:
        """Call once, and return part -> its fraction of the whole call."""
        _idle(self.device)
        self._clocked("whole", make)
        _idle(self.device)
        seconds = dict.fromkeys(self.PARTS.values(), 0.0) | {"whole": 0.0}
        for part, begin, end in self.spans:
            seconds[part] += begin.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - begin
        whole = seconds.pop("whole")
        return {part: rounded(each / whole) for part, each in seconds.items()}


# --- a contestant in a process of its own ---


class Apart:
    """A contestant in a process of its own: calls the functions of this module there, and waits for what they return."""

    def __init__(self, case: Case, name: str):
        context = multiprocessing.get_context("spawn")
        self.connection, its = context.Pipe()
        self.process = context.Process(target=_serve, args=(its, case, name), daemon=True)
        self.process.start()
        its.close()

    def ask(self, what: str) -> Any:
        """Return a `turn`, or the `shares`. Raises RuntimeError: it failed there, ended, or takes too long."""
        try:
            self.connection.send(what)
            answer = self.connection.recv() if self.connection.poll(TURN_SEC) else f"no turn within {TURN_SEC} s"
        except (EOFError, OSError):
            self.process.join(10)
            answer = f"its process ended with code {self.process.exitcode}"
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        """End the process: by itself where it waits, else by a signal that no handler hears."""
        self.connection.close()
        self.process.join(10)
        self.process.kill()
        self.process.join(10)


def _serve(connection: Connection, case: Case, name: str) -> None:
    """Answer what `Apart` asks for, until its end is closed; an error as its text."""
    made: tuple[LatentDiffusion, Maker] | None = None
    with contextlib.suppress(EOFError):
        while True:
            what = connection.recv()
            try:
                if made is None:
                    model = model_of(case, as_torch_comes=name == PIPELINE)
                    made = model, theirs(model, case) if name == PIPELINE else ours(model, case, name)
                model, make = made
                answer: Any = turn(make, model.device) if what == "turn" else Clocked(model).shares(make)
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            connection.send(answer)
