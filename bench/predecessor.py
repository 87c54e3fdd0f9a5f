"""The job as mosaicml/diffusion-benchmark does it (2023), on this machine: the first rung of a ladder.

    composer -n 1 -m bench.predecessor yamls/sd2_512_synthetic.yaml max_duration=30ba

Networks, batch, precision, FLOPs and clocks are those of benchmark.py. The rest is as there: each synthetic image is drawn on
the CPU by a loader's worker, number by number; the frozen encoders keep float32 and leave it to autocast; AdamW is torch's
default; and the average of the weights is Composer's own. Nothing is kept but RUN_FOLDER/RUN_NAME/summary.json.

Exit code: 0, or 2 when the configuration cannot run: a key that the predecessor has nothing for is refused.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.algorithms import EMA
from composer.devices import Device
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from callbacks.throughput import Throughput, peak_tflops
from common import dist
from common.command import command
from common.command_line import Problem, parse_command_line
from common.files import write_json
from config import flatten, load, replace_keys
from families.spec import Column
from model import BatchRandomness, LatentDiffusion
from preflight.checks import check
from preflight.plan import planned_microbatch
from run_folder.environment import device_name, environment
from run_folder.history import result_line, rounded
from training.builders import build_start_settings, measure_step_cost
from training.config import ALIASES, RunConfig, build, resolve
from training.memory import AUTO
from training.optimizer import OptimizerConfig
from training.speed import SpeedKeys
from training.start import fetch_for_training
from training.trainer import build_device, composer_precision, torch_device

EMA_HALF_LIFE = "100ba"


class DrawnItems(Dataset):
    """Items drawn one by one when they are asked for; an image is normally distributed, as there."""

    def __init__(self, columns: Mapping[str, Column], num_items: int):
        self.columns, self.num_items = columns, num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {name: self._draw(name, column) for name, column in self.columns.items()}

    def _draw(self, name: str, column: Column) -> Tensor:
        if name == "images" or column.below is None:
            return torch.randn(column.shape)
        return torch.randint(0, column.below, column.shape, dtype=column.dtype)


def build_loader(columns: Mapping[str, Column], device_batch: int, device: Device, *, workers: int) -> DataLoader:
    """Build the loader, whose workers draw the items. Its epoch has 1,000 batches, as in benchmark.py."""
    items = DrawnItems(columns, 1000 * device_batch)
    return DataLoader(items, device_batch, num_workers=workers, pin_memory=device.name == "gpu")


def build_adamw(config: OptimizerConfig, model: LatentDiffusion, global_batch_size: int) -> torch.optim.AdamW:
    """Build torch's AdamW as it is by default, with a run's numbers."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate(global_batch_size),
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def train(trainer: Trainer, throughput: Throughput) -> dict[str, Any]:
    """Train to the end; return the figures. Raises ValueError: the loss is not finite."""
    trainer.fit()
    trainer.close()
    loss = trainer.state.total_loss_dict["loss/train/total"]
    if not math.isfinite(loss):
        raise ValueError(f"loss: {loss} at the end: the speed of such numbers means nothing. Lower optimizer.lr.")
    return {key: rounded(value) for key, value in {**throughput.result(), "loss": loss}.items()}


def problems_of(keys: Mapping[str, Any]) -> list[Problem]:
    """Return what cannot be measured here: data that is not synthetic, and keys that the predecessor has nothing for."""
    if not keys["data.synthetic"]:
        return [Problem("data.synthetic: false. This program measures synthetic data alone: data.synthetic=true.")]
    defaults = {key.name: key.default for key in dataclasses.fields(SpeedKeys)}
    defaults |= {"profile.batches": 0, "eval.when": "off"}
    problems = [
        Problem(f"{key}: {keys[key]}. The predecessor has nothing of the kind: leave it out.", (key,))
        for key, default in defaults.items()
        if keys[key] != default
    ]
    if keys["device_train_microbatch_size"] == AUTO:
        text = "device_train_microbatch_size: auto. This program tries none: give a number."
        problems.append(Problem(text, ("device_train_microbatch_size",)))
    return problems


@command(keys=RunConfig, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Read the configuration, run it, write its summary, print its line."""
    words = parse_command_line(argv, ALIASES)
    config = resolve(load(RunConfig, words, check=lambda config: problems_of(flatten(config)) or check(config)))
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_local_rank())
    assert config.precision is not None and config.run_name is not None
    device = build_device(config.precision)
    dist.initialize_dist(device)
    config = replace_keys(config, fetch_for_training(build_start_settings(config)))
    cost, model, batch = measure_step_cost(config), build(config), config.global_batch_size
    microbatch = planned_microbatch(config, cost)
    model.to_device(torch_device(device), config.precision)
    model.encoders.to(torch_device(device), torch.float32)
    columns = config.data.columns(model.family, config.size)
    Path(config.run_folder, config.run_name).mkdir(parents=True, exist_ok=True)
    peak = peak_tflops(device_name(), config.precision)
    throughput = Throughput(config.measure, flops_per_image=cost.flops_per_image, peak=peak)
    trainer = Trainer(
        model=model,
        train_dataloader=build_loader(columns, batch // dist.get_world_size(), device, workers=config.data.workers),
        max_duration=config.max_duration,
        optimizers=build_adamw(config.optimizer, model, batch),
        algorithms=[EMA(half_life=EMA_HALF_LIFE)],
        callbacks=[BatchRandomness(model, config.seed), throughput],
        progress_bar=False,
        device=device,
        precision=composer_precision(device, config.precision),
        device_train_microbatch_size=microbatch,
        seed=config.seed,
        spin_dataloaders=False,  # its items are random numbers: there is no position in an epoch to return to
    )
    settings = {
        "program": "bench.predecessor",
        "stage": config.data.stage,
        "precision": config.precision,
        "image_size": list(config.size),
        "preset": config.model.preset,
        "global_batch_size": batch,
        "device_train_microbatch_size": microbatch,
        "ema": True,
    }
    summary = {**train(trainer, throughput), **settings, **environment()}
    if dist.get_global_rank() == 0:
        write_json(Path(config.run_folder, config.run_name, "summary.json"), summary)
        keys = ("images_per_sec", "images_per_sec_per_device", "mfu", "data_wait_frac", "peak_mem_gib")
        keys += ("batches", "loss")
        print(result_line({key: summary[key] for key in keys}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
