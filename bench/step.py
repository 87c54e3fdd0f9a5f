"""How long a step of training takes: ours, and a plain loop of diffusers, alternating in one process.

    python -m bench.step                                        # tiny networks: under two minutes on two CPU cores
    python -m bench.step preset=full batch_size=32              # SD2 at 512 px, on a GPU
    python -m bench.step stage=moments precision=bf16 results=/tmp/step.json

Two contests, without EMA and with it, each around the same initial weights, optimizer (AdamW) and batch:

    ours     Composer's Trainer, LatentDiffusion, fused AdamW, gradient norm and clipping, ema.py, and a run's clocks,
             record of losses and checkpointer, for which nothing is due
    plain    diffusers' text-to-image example without accelerate, see PlainLoop

The batch is on the device before the step; loading is measured by bench.data. Captions are encoded in the step, and images
too (stage=images). No captions are dropped.

Before the turns each takes some steps with the same random numbers. In fp32 their losses have to be equal up to 1e-6 of
their size, else nothing is recorded; in bf16 the plain loop draws its noise in that type.

A turn is some steps, timed from the end of one before them, the device idle at both ends: ms a step by the clock and of the
processor (all threads of the process; on a GPU the host's). `speedup` is the other's time over ours.
Exit code: 0, 1 if the losses differ, 2 if the command cannot be read.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.nn.functional as F
from composer import Callback, Logger, State, Trainer
from composer.core import DataSpec
from composer.devices import Device
from torch import Tensor

from bench.command import Figures, free, measure_and_record, rounded, take_turns, threads
from bench.latency import precision_problem
from callbacks.gradient_norm import GradientNorm
from callbacks.losses import Losses
from callbacks.run_record import RunRecord
from callbacks.throughput import MeasureConfig, Throughput
from checkpointing.callback import Checkpointer, SaveConfig
from common.command import command
from common.command_line import Problem
from common.errors import Failed
from common.value_types import limited
from config import flatten
from data import DataConfig, SyntheticBatches
from ema import EMA, EMAConfig
from families import load_family
from families.encoders import ModelConfig
from families.objectives import ObjectiveConfig
from families.sampling import PREDICTIONS, SCHEDULE
from families.spec import MAX_SIDE_PX, Column, parse_size
from model import AUTOCAST_DTYPES, BatchRandomness, LatentDiffusion, normalize_images, step_seed
from run_folder.files import ConfigFiles
from training.config import RunConfig, build, resolve
from training.optimizer import OptimizerConfig, ScheduleConfig, build_optimizer, build_schedule
from training.trainer import build_device, composer_precision, torch_device

# Of 866 M parameters in float32: weights, gradients, AdamW's two, the average; and the encoders' 424 M; twice.
FULL_GIB = 36
SAME_STEPS = 2  # of each, before the turns: the second loss is of weights that the first step has changed
MOST_DIFFERENCE = 1e-6  # of two losses in fp32, as a part of one
NUM_BATCHES = 10**6  # of the runs that these steps would be part of; a constant rate does not depend on it

Reading = tuple[float, float]
"""Seconds by the clock and of the processor, of this process."""


@dataclass(frozen=True)
class StepConfig:
    """The keys of this command."""

    preset: Literal["full", "tiny"] | None = None
    """Size of the networks. null: full on a GPU, tiny on a CPU."""
    image_size: int | None = limited(None, 1, MAX_SIDE_PX)
    """Side of the images in pixels. null: 512 for full, 64 for tiny."""
    stage: Literal["images", "moments"] = "images"
    """What a batch has: images, encoded in the step, or the VAE's moments."""
    batch_size: int = limited(8, 1, 4096)
    """Images of a step."""
    precision: Literal["fp32", "tf32", "bf16"] | None = None
    """Precision of the step. null: bf16 on a GPU, fp32 on a CPU."""
    clip_norm: float = limited(1.0, 0.0, above=True)
    """Norm that ours and the plain loop clip gradients to; 1 is the example's default."""
    steps: int = limited(5, 1, 1000)
    """Steps of a turn."""
    rounds: int = limited(7, 1)
    """Turns of each contestant."""
    threads: int = limited(1, 1, 1024)
    """Threads of torch on a CPU."""
    results: str = "reports/results/step.json"
    """File of the record; an earlier one is replaced."""


def check(config: StepConfig) -> list[Problem]:
    """Return every problem of the keys."""
    problems = []
    if text := load_family("sd2", "tiny", "stock").size_problem(parse_size(_size_px(config))):
        problems.append(Problem(f"image_size: {text}", ("image_size",)))
    if config.precision is not None and (text := precision_problem(config.precision)):
        problems.append(Problem(f"precision: {config.precision} {text}", ("precision",)))
    if _preset(config) == "full" and (free_gib := _free_gib()) < FULL_GIB:
        text = f"full needs {FULL_GIB} GiB for two contestants; {free_gib:.1f} are free. Set preset=tiny."
        problems.append(Problem(f"preset: {text}", ("preset",)))
    return problems


def _free_gib() -> float:
    num_bytes = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else psutil.virtual_memory().available
    return num_bytes / 2**30


def _preset(config: StepConfig) -> Literal["full", "tiny"]:
    return config.preset or ("full" if torch.cuda.is_available() else "tiny")


def _size_px(config: StepConfig) -> int:
    return config.image_size or {"full": 512, "tiny": 64}[_preset(config)]


@dataclass(frozen=True)
class Recipe:
    """What both contestants have in common."""

    batch_size: int
    precision: str
    seed: int
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    ema: EMAConfig
    measure: MeasureConfig
    save: SaveConfig
    keys: dict[str, Any]
    """All keys of the run that the step would be part of."""
    columns: dict[str, Column]
    """Of a batch."""


def recipe_of(config: StepConfig, *, ema: bool) -> tuple[Recipe, LatentDiffusion]:
    """Return what a run makes of these keys: the recipe of its step, and its model on the CPU."""
    run = resolve(
        RunConfig(
            run_name="step",
            global_batch_size=config.batch_size,
            image_size=_size_px(config),
            precision=config.precision,
            model=ModelConfig(preset=_preset(config), weights="random"),
            objective=ObjectiveConfig(caption_dropout=0.0),
            data=DataConfig(stage=config.stage, synthetic=True),
            optimizer=OptimizerConfig(clip_norm=config.clip_norm),
            ema=EMAConfig(enabled=ema),
        )
    )
    assert run.precision is not None
    model = build(run)
    recipe = Recipe(
        batch_size=run.global_batch_size,
        precision=run.precision,
        seed=run.seed,
        optimizer=run.optimizer,
        schedule=run.schedule,
        ema=run.ema,
        measure=run.measure,
        save=run.save,
        keys=flatten(run),
        columns=run.data.columns(model.family, run.size),
    )
    return recipe, model


def clocks(device: torch.device) -> Reading:
    """Wait for the device, and read both clocks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def mean_of(first: Reading, last: Reading, num: int) -> Reading:
    """Return the times between two readings, of one of `num` steps."""
    return (last[0] - first[0]) / num, (last[1] - first[1]) / num


# --- ours ---


class Ends(Callback):
    """The last callback: reads the clocks at the end of a turn's first batch and of its last one, and keeps all losses."""

    def __init__(self, device: torch.device):
        self.device = device
        self.readings: list[Reading] = []
        self.losses: list[float] = []

    def fit_start(self, state: State, logger: Logger) -> None:
        self.readings, self.losses = [], []

    def batch_end(self, state: State, logger: Logger) -> None:
        self.losses.append(state.total_loss_dict["loss/train/total"])
        if len(self.losses) == 1 or state.timestamp >= state.max_duration:
            self.readings.append(clocks(self.device))


class Ours:
    """Our step: Trainer, optimizer, EMA and the callbacks of each run. Each turn continues where the one before has ended."""

    def __init__(self, recipe: Recipe, model: LatentDiffusion, device: Device, data: SyntheticBatches, folder: Path):
        model.to_device(torch_device(device), recipe.precision)
        batch, average = recipe.batch_size, EMA(recipe.ema) if recipe.ema.enabled else None
        losses, gradient_norm = Losses(folder, None, None), GradientNorm(recipe.optimizer.clip_norm)
        throughput = Throughput(recipe.measure, flops_per_image=None, peak=None)
        record = RunRecord(
            folder / "run",
            ConfigFiles.of(recipe.keys, recipe.keys),
            {},
            throughput=throughput,
            gradient_norm=gradient_norm,
            losses=losses,
            samples=None,
        )
        record.start(0)
        checkpointer = Checkpointer(
            folder / "checkpoints",
            recipe.save,
            model=model,
            average=average,
            identity={},
            before_saving=losses.settle,
            resume_from=None,
        )
        optimizer = build_optimizer(recipe.optimizer, model, batch)
        self.ends = Ends(torch_device(device))
        self.trainer = Trainer(
            model=model,
            train_dataloader=DataSpec(data),
            optimizers=optimizer,
            schedulers=build_schedule(recipe.schedule, optimizer, global_batch_size=batch, num_batches=NUM_BATCHES),
            step_schedulers_every_batch=True,
            spin_dataloaders=False,
            algorithms=[] if average is None else [average],
            callbacks=[BatchRandomness(model, recipe.seed), gradient_norm, throughput, record, checkpointer, self.ends],
            progress_bar=False,
            device=device,
            precision=composer_precision(device, recipe.precision),
            device_train_microbatch_size=batch,
            seed=recipe.seed,
        )

    def steps(self, num: int) -> list[float]:
        """Take some steps; return the loss of each."""
        self.trainer.fit(duration=f"{num}ba")
        return self.ends.losses

    def turn(self, num: int) -> Reading:
        """Take `num` steps after a first one; return the mean time of one."""
        self.steps(1 + num)
        first, last = self.ends.readings
        return mean_of(first, last, num)


# --- a plain loop ---


class PlainLoop:
    """The step of diffusers' text-to-image example, as its documentation and its arguments' defaults describe it.

    https://huggingface.co/docs/diffusers/training/text2image. Frozen networks in the compute precision, autocast around the
    UNet alone, AdamW as torch has it, gradients clipped, a schedule of diffusers', the loss read in every step, EMAModel.
    Without accelerate, which does no more than this in one process. Pixels are floats in [-1, 1] beforehand, as its
    transforms make them.
    """

    def __init__(self, recipe: Recipe, model: LatentDiffusion, device: torch.device, data: SyntheticBatches):
        from diffusers import DDPMScheduler
        from diffusers.optimization import get_scheduler
        from diffusers.training_utils import EMAModel

        model.to_device(device, recipe.precision)
        self.device, self.autocast_dtype = device, AUTOCAST_DTYPES.get(recipe.precision)
        self.unet, self.vae, self.text_encoder = model.denoiser.train(), *map(model.frozen.get, ("vae", "text"))
        batch = data.batch
        self.moments = batch.get("moments")
        self.pixels = normalize_images(batch["images"], "symmetric") if "images" in batch else None
        self.input_ids = batch["tokens"]
        self.noising: Any = DDPMScheduler(**SCHEDULE, prediction_type=PREDICTIONS[model.objective.prediction])
        settings = recipe.optimizer
        self.clip_norm = settings.clip_norm
        self.optimizer = torch.optim.AdamW(
            self.unet.parameters(),
            lr=settings.learning_rate(recipe.batch_size),
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            eps=settings.eps,
        )
        self.schedule = get_scheduler("constant", self.optimizer, num_training_steps=NUM_BATCHES)
        self.average = EMAModel(self.unet.parameters(), decay=0.9999) if recipe.ema.enabled else None
        self.generator = torch.Generator(device)

    def loss(self) -> Tensor:
        """Return the loss of a step, with new noise and times."""
        latents = self._posterior().sample(self.generator) * self.vae.config.scaling_factor
        noise = torch.randn(latents.shape, generator=self.generator, device=self.device, dtype=latents.dtype)
        num_steps = self.noising.config.num_train_timesteps
        times = torch.randint(0, num_steps, (len(latents),), generator=self.generator, device=self.device)
        noisy = self.noising.add_noise(latents, noise, times)
        states = self.text_encoder(self.input_ids)[0]
        is_v = self.noising.config.prediction_type == PREDICTIONS["v"]
        target = self.noising.get_velocity(latents, noise, times) if is_v else noise
        with self._autocast():
            prediction = self.unet(noisy, times, states, return_dict=False)[0]
        return F.mse_loss(prediction.float(), target.float())

    def _posterior(self) -> Any:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        if self.pixels is None:
            return DiagonalGaussianDistribution(self.moments.to(self.vae.dtype))
        return self.vae.encode(self.pixels.to(self.vae.dtype)).latent_dist

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    def step(self) -> float:
        """Train on the batch once; return the loss."""
        loss = self.loss()
        value = loss.item()
        loss.backward()
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.unet.parameters(), self.clip_norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.step(self.unet.parameters())
        return value

    def steps(self, num: int) -> list[float]:
        return [self.step() for _ in range(num)]

    def turn(self, num: int) -> Reading:
        self.step()
        first = clocks(self.device)
        self.steps(num)
        return mean_of(first, clocks(self.device), num)


# --- the contest ---


@contextlib.contextmanager
def contestants(recipe: Recipe, model: LatentDiffusion, device: Device) -> Iterator[tuple[Ours, PlainLoop]]:
    """Build each contestant around a copy of the model, which has not been placed."""
    data = SyntheticBatches(recipe.columns, recipe.batch_size, torch_device(device), recipe.seed)
    with tempfile.TemporaryDirectory(prefix="step-") as folder:
        ours = Ours(recipe, copy.deepcopy(model), device, data, Path(folder))
        try:
            yield ours, PlainLoop(recipe, copy.deepcopy(model), torch_device(device), data)
        finally:
            ours.trainer.close()


def largest_difference(ours: Ours, plain: PlainLoop, seed: int, num: int) -> float:
    """Take steps with the same random numbers; return the largest difference of two losses, as a part of one."""
    theirs = []
    for batch in range(num):
        plain.generator.manual_seed(step_seed(seed, batch, 0))
        theirs += plain.steps(1)
    return max(abs(other - own) / abs(own) for own, other in zip(ours.steps(num), theirs, strict=True))


def add_contest(config: StepConfig, figures: Figures, *, ema: bool) -> str:
    """Let the contestants alternate; return the steps' precision. Raises Failed: their losses differ."""
    name, (recipe, model) = "ema" if ema else "bare", recipe_of(config, ema=ema)
    device = build_device(recipe.precision)
    torch.set_num_threads(config.threads)
    with contestants(recipe, model, device) as (ours, plain):
        difference = largest_difference(ours, plain, recipe.seed, SAME_STEPS)
        if recipe.precision == "fp32":
            if not difference <= MOST_DIFFERENCE:
                text = f"losses differ by {difference:.2g} of their size, {MOST_DIFFERENCE:g} is allowed"
                raise Failed(f"step: no record was written: with the same random numbers {text}.")
            figures.flat[f"{name}_loss_difference"] = rounded(difference)
        cpu_sec: dict[str, list[float]] = {"ours": [], "plain": []}

        def turn(who: str) -> float:
            seconds, cpu = (ours if who == "ours" else plain).turn(config.steps)
            cpu_sec[who].append(cpu)
            return seconds

        seconds = take_turns({who: functools.partial(turn, who) for who in cpu_sec}, config.rounds, warm_up=False)
    for who in cpu_sec:
        figures.add(f"{name}_{who}_ms", [1e3 * value for value in seconds[who]])
        figures.add(f"{name}_{who}_cpu_ms", [1e3 * value for value in cpu_sec[who]])
        figures.add(f"{name}_{who}_images_per_sec", [config.batch_size / value for value in seconds[who]])
    for kind in ("", "cpu_"):
        figures.ratio(f"{name}_{kind}speedup_vs_plain", f"{name}_plain_{kind}ms", f"{name}_ours_{kind}ms")
    return recipe.precision


def measure(config: StepConfig) -> dict[str, Any]:
    """Measure both contests."""
    figures = Figures()
    with threads(config.threads):
        for ema in (False, True):
            precision = add_contest(config, figures, ema=ema)
            free()
    what = {"precision": precision, "preset": _preset(config), "image_size": _size_px(config)}
    return {**what, **figures.as_record()}


@command(keys=StepConfig, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    return measure_and_record("step", StepConfig, argv, measure, check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
