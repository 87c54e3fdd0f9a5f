"""One contest of bench.latency: a model in several ways to compute, and diffusers' pipeline over the same networks.

Shapes: B images of a call, H W their height and width in px.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.contest import Figures, rounded, take_turns
from bench.ladder import OUT_OF_MEMORY
from bench.pipeline import pipeline_of, twin_of
from cli.limits import shown
from model import AUTOCAST_DTYPES, LatentDiffusion, ModelConfig, build_device, build_model
from reports.latency import PIPELINE
from training import speed
from training.speed import SpeedKeys
from zoo.objectives import ObjectiveConfig
from zoo.sampling import build_scheduler, prompt_noise
from zoo.spec import as_size

SEED = 0
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


def model_of(case: Case) -> LatentDiffusion:
    """Build the model of a case with random weights, on its device."""
    model = build_model(
        ModelConfig(preset=case.preset, variant=case.variant),
        ObjectiveConfig(),
        size=as_size(case.image_size),
        normalize="symmetric",
        seed=SEED,
    )
    device = build_device(case.precision)._device
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
    """Return what generates with diffusers' pipeline; the model's denoiser is cast to the precision."""
    dtype = AUTOCAST_DTYPES.get(case.precision, torch.float32)
    nn.Module.to(model.denoiser, dtype)  # diffusers' own warns of every cast
    zero_terminal_snr = model.objective.zero_terminal_snr
    scheduler = build_scheduler(case.sampler, model.objective.prediction, zero_terminal_snr=zero_terminal_snr)
    pipeline = pipeline_of(model, scheduler)

    def make() -> Tensor:
        return pipeline(
            captions_of(case),
            width=case.image_size,
            height=case.image_size,
            num_inference_steps=case.steps,
            guidance_scale=case.guidance,
            latents=prompt_noise(SEED, range(case.batch_size), model.latent_shape).to(model.device, dtype),
            output_type="pt",
        ).images

    return make


def _idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


# --- a contest ---


class Lost(Exception):
    """A contestant that cannot go on; its own exception is the cause."""


class Contest:
    """The contestants of one case, and what becomes of them.

    Attributes:
        status: contestant -> ok, skipped, out_of_memory or failed.
        reasons: contestant -> why it is not ok.
    """

    def __init__(self, case: Case, ways: Sequence[str]):
        self.case = case
        self.status: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.models: dict[str, LatentDiffusion] = {}
        self.makers: dict[str, Maker] = {}
        self.images: dict[str, Tensor] = {}
        self.first_sec: dict[str, float] = {}
        self.shares: dict[str, dict[str, float]] = {}
        for name in (PIPELINE, *ways):
            if text := precision_problem(case.precision) or (
                way_problem(name, case.precision) if name in WAYS else None
            ):
                self.status[name], self.reasons[name] = "skipped", text
            else:
                self.status[name] = "ok"

    def names(self) -> list[str]:
        """Those that are still in it."""
        return [name for name, status in self.status.items() if status == "ok"]

    def measure(self) -> dict[str, Any]:
        """Measure, and return what the record says of this case."""
        load = round(os.getloadavg()[0], 2)
        self._build()
        for name in self.names():
            with self._at_its_own_risk(name):
                self.first_sec[name] = rounded(self._turn(name))
        values: dict[str, list[float]] = {}
        while self.names():
            try:
                values = take_turns(
                    {name: functools.partial(self._turn, name) for name in self.names()},
                    self.case.rounds,
                    warm_up=False,
                )
                break
            except Lost as lost:
                self._lose(str(lost), lost.__cause__)
        for name in self.names():
            if name != PIPELINE:
                with self._at_its_own_risk(name):
                    self.shares[name] = Clocked(self.models[name]).shares(self.makers[name])
        figures = self._figures(values)
        return {
            **dataclasses.asdict(self.case),
            "load_average_before": load,
            "status": self.status,
            "reasons": self.reasons,
            **figures.flat,
            "by_round": figures.by_round,
        }

    def _build(self) -> None:
        """Build each contestant: modules of its own, the same tensors wherever types and memory format are the same."""
        if not self.names():
            return
        torch._dynamo.reset()
        try:
            model = model_of(self.case)
        except Exception as error:
            for name in self.names():
                self._lose(name, error)
            return
        for name in self.names():
            with self._at_its_own_risk(name):
                if name == PIPELINE:
                    differs = self.case.channels_last or self.case.precision in AUTOCAST_DTYPES
                    self.models[name] = copy.deepcopy(model) if differs else twin_of(model)
                    self.makers[name] = theirs(self.models[name], self.case)
                else:
                    self.models[name] = twin_of(model)
                    self.makers[name] = ours(self.models[name], self.case, name)

    def _turn(self, name: str) -> float:
        device = self.models[name].device
        try:
            _idle(device)
            begun = time.perf_counter()
            images = self.makers[name]()
            _idle(device)
            seconds = time.perf_counter() - begun
        except Exception as error:
            raise Lost(name) from error
        self.images[name] = images.float().cpu()
        return seconds

    @contextlib.contextmanager
    def _at_its_own_risk(self, name: str) -> Iterator[None]:
        """Do something for one contestant: where it fails, the others go on without it."""
        try:
            yield
        except Lost as lost:
            self._lose(name, lost.__cause__)
        except Exception as error:
            self._lose(name, error)

    def _lose(self, name: str, error: BaseException | None) -> None:
        """Note why a contestant is out, and free what it holds."""
        is_memory = isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY)
        self.status[name] = "out_of_memory" if is_memory else "failed"
        self.reasons[name] = shown(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", 300)
        for kept in (self.models, self.makers, self.images):
            kept.pop(name, None)
        if error is not None:
            error.__traceback__ = None  # its frames hold tensors
        free()

    def _figures(self, values: dict[str, list[float]]) -> Figures:
        figures = Figures()
        names = self.names()
        for name in names:
            figures.add(f"{name}_sec", values[name])
            figures.flat[f"{name}_sec_p95"] = rounded(float(np.percentile(values[name], 95)))
            figures.flat[f"{name}_first_sec"] = self.first_sec[name]
        for way in (name for name in names if name != PIPELINE):
            for other in (PIPELINE, "eager"):
                if other in names and other != way:
                    figures.ratio(f"{way}_speedup_vs_{other}", f"{other}_sec", f"{way}_sec")
            figures.flat |= {f"{way}_{part}_frac": share for part, share in self.shares[way].items()}
            figures.flat[f"{way}_image_std"] = _finite(self.images[way].std())  # the images are not one colour
            if PIPELINE in names:
                difference = (self.images[way] - self.images[PIPELINE]).abs().max()
                figures.flat[f"{way}_max_abs_difference"] = _finite(difference)
        return figures


def _finite(value: Tensor) -> float | None:
    return rounded(float(value)) if bool(value.isfinite()) else None


def free() -> None:
    """Give back the memory of what is not in use any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
