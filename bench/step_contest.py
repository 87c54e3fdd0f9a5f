"""The contestants of bench.step: the same step of training, by our run, a plain loop of diffusers, and the predecessor.

Shapes: B images of a step, H W their height and width in px, h w those of latents, L text tokens.

A turn is some steps of one contestant. It is timed from the end of its first step to the end of its last one, the device
idle at both: what a trainer does when it is started does not count, all that it does between two steps does.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from composer import Callback, Logger, State, Trainer
from composer.core import DataSpec
from composer.devices import Device
from torch import Tensor

from bench import predecessor
from callbacks.gradient_norm import GradientNorm
from callbacks.losses import Losses
from callbacks.run_record import RunRecord
from callbacks.throughput import Throughput
from config import flat
from data import SyntheticBatches
from ema import EMA
from model import AUTOCAST_DTYPES, BatchRandomness, LatentDiffusion, normalize_images, step_seed
from record.config_file import ConfigFiles
from training.checkpoints import Checkpointer
from training.device import composer_precision
from training.optimizer import build_optimizer, build_schedule
from training.run_config import RunConfig
from zoo.sampling import PREDICTIONS, SCHEDULE

NUM_BATCHES = 10**6  # of the runs that these steps would be part of; a constant rate does not depend on it

Reading = tuple[float, float]
"""Seconds by the clock and of the processor, of this process."""


class Contestant(Protocol):
    """One way to train."""

    def steps(self, num: int) -> list[float]:
        """Take some steps; return the loss of each."""
        ...

    def turn(self, num: int) -> Reading:
        """Take `num` steps after a first one; return the mean time of one."""
        ...


def clocks(device: torch.device) -> Reading:
    """Wait for the device, and read both clocks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def mean_of(first: Reading, last: Reading, num: int) -> Reading:
    """Return the times between two readings, of one of `num` steps."""
    return (last[0] - first[0]) / num, (last[1] - first[1]) / num


# --- by Composer's Trainer: ours, and the predecessor ---


class Ends(Callback):
    """Reads the clocks at the end of the first batch of a turn and of its last one, and keeps all losses. It comes last."""

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


class ByTrainer:
    """A contestant that Composer's Trainer trains; each turn goes on where the one before has ended."""

    def __init__(self, make: Callable[[Ends], Trainer], device: torch.device):
        self.ends = Ends(device)
        self.trainer = make(self.ends)

    def steps(self, num: int) -> list[float]:
        self.trainer.fit(duration=f"{num}ba")
        return self.ends.losses

    def turn(self, num: int) -> Reading:
        self.steps(1 + num)
        first, last = self.ends.readings
        return mean_of(first, last, num)


def ours(config: RunConfig, model: LatentDiffusion, device: Device, data: SyntheticBatches, folder: Path) -> ByTrainer:
    """Return our step: Trainer, optimizer, EMA and the callbacks of each run; no checkpoint or evaluation falls due."""
    model.place(device._device, config.precision)
    average = EMA(config.ema) if config.ema.enabled else None
    losses, gradient_norm = Losses(folder, None, None), GradientNorm(config.optimizer.clip_norm)
    throughput = Throughput(config.measure, flops_per_image=None, peak=None)
    keys = flat(config)
    given = dict(throughput=throughput, gradient_norm=gradient_norm, losses=losses, samples=None)
    record = RunRecord(folder / "run", ConfigFiles.of(keys, keys), {}, **given)
    record.start(0)
    checkpointer = Checkpointer(
        folder / "checkpoints",
        config.save,
        model=model,
        average=average,
        identity={},
        before_saving=losses.settle,
        resume_from=None,
    )
    optimizer = build_optimizer(config.optimizer, model, config.global_batch_size)
    batch = config.global_batch_size
    schedule = build_schedule(config.schedule, optimizer, global_batch_size=batch, num_batches=NUM_BATCHES)

    def make(ends: Ends) -> Trainer:
        return Trainer(
            model=model,
            train_dataloader=DataSpec(data),
            optimizers=optimizer,
            schedulers=schedule,
            step_schedulers_every_batch=True,
            spin_dataloaders=False,
            algorithms=[] if average is None else [average],
            callbacks=[BatchRandomness(model, config.seed), gradient_norm, throughput, record, checkpointer, ends],
            progress_bar=False,
            device=device,
            precision=composer_precision(device, config.precision),
            device_train_microbatch_size=batch,
            seed=config.seed,
        )

    return ByTrainer(make, device._device)


def predecessors(config: RunConfig, model: LatentDiffusion, device: Device, data: SyntheticBatches) -> ByTrainer:
    """Return the step of bench.predecessor, but for its data: its average is always on, and it does not clip."""
    predecessor.place(model, device._device, config.precision)
    batch = config.global_batch_size

    def make(ends: Ends) -> Trainer:
        callbacks = [BatchRandomness(model, config.seed), ends]
        return predecessor.build_trainer(config, model, DataSpec(data), callbacks, device=device, microbatch=batch)

    return ByTrainer(make, device._device)


# --- a plain loop ---


class PlainLoop:
    """The step of diffusers' text-to-image example, as its documentation and its arguments' defaults describe it.

    https://huggingface.co/docs/diffusers/training/text2image. Frozen networks in the compute precision, autocast around the
    UNet alone, AdamW as torch has it, gradients clipped, a schedule of diffusers', the loss read in every step, EMAModel.
    Without accelerate, which does no more than this in one process. Pixels are floats in [-1, 1] beforehand, as its
    transforms make them.
    """

    def __init__(self, config: RunConfig, model: LatentDiffusion, device: torch.device, data: SyntheticBatches):
        from diffusers import DDPMScheduler
        from diffusers.optimization import get_scheduler
        from diffusers.training_utils import EMAModel

        model.place(device, config.precision)
        self.device, self.autocast_dtype = device, AUTOCAST_DTYPES.get(config.precision or "fp32")
        self.unet, self.vae, self.text_encoder = model.denoiser.train(), *map(model.frozen.get, ("vae", "text"))
        batch = data.batch
        self.moments = batch.get("moments")
        self.pixels = normalize_images(batch["images"], "symmetric") if "images" in batch else None
        self.input_ids = batch["tokens"]
        self.noising = DDPMScheduler(**SCHEDULE, prediction_type=PREDICTIONS[model.objective.prediction])
        given = config.optimizer
        self.clip_norm = given.clip_norm
        self.optimizer = torch.optim.AdamW(
            self.unet.parameters(),
            lr=given.learning_rate(config.global_batch_size),
            betas=given.betas,
            weight_decay=given.weight_decay,
            eps=given.eps,
        )
        self.schedule = get_scheduler("constant", self.optimizer, num_training_steps=NUM_BATCHES)
        self.average = EMAModel(self.unet.parameters(), decay=0.9999) if config.ema.enabled else None
        self.generator = torch.Generator(device)

    def loss(self) -> Tensor:
        """Return the loss of a step, with noise and times of its own."""
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


# --- all of them ---


@contextlib.contextmanager
def contestants(config: RunConfig, model: LatentDiffusion, device: Device) -> Iterator[dict[str, Contestant]]:
    """Build each contestant around a copy of the model, which has not been placed; with EMA the predecessor takes part."""
    columns = config.data.columns(model.family, config.size)
    data = SyntheticBatches(columns, config.global_batch_size, device._device, config.seed)
    found: dict[str, Contestant] = {}
    with tempfile.TemporaryDirectory(prefix="step-") as folder:
        try:
            found["ours"] = ours(config, copy.deepcopy(model), device, data, Path(folder))
            found["plain"] = PlainLoop(config, copy.deepcopy(model), device._device, data)
            if config.ema.enabled:
                found["predecessor"] = predecessors(config, copy.deepcopy(model), device, data)
            yield found
        finally:
            for one in found.values():
                if isinstance(one, ByTrainer):
                    one.trainer.close()


def largest_difference(found: dict[str, Contestant], config: RunConfig, num: int) -> float:
    """Take steps with the same random numbers; return how far a loss of the others is from ours at most, as a part of it.

    Of the predecessor, which does not clip gradients, the first loss alone is compared.
    """
    plain = found["plain"]
    assert isinstance(plain, PlainLoop)
    theirs = []
    for batch in range(num):
        plain.generator.manual_seed(step_seed(config.seed, batch, 0))
        theirs += plain.steps(1)
    pairs = list(zip(found["ours"].steps(num), theirs, strict=True))
    if "predecessor" in found:
        pairs.append((pairs[0][0], found["predecessor"].steps(num)[0]))
    return max(abs(other - own) / abs(own) for own, other in pairs)
