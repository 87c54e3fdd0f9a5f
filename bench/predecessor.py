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
from composer.utils import dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from callbacks.throughput import Throughput, peak_tflops
from cli.command import command
from cli.command_line import Problem, parse_command_line
from cli.files import write_json
from config import load
from model import BatchRandomness
from preflight.checks import check
from preflight.run import cost_of, planned_microbatch
from record.environment import device_name, environment
from record.summary import result_line, rounded
from training import published
from training.device import build_device, composer_precision
from training.microbatch import AUTO
from training.run_config import ALIASES, RunConfig, build, resolve
from training.speed import SpeedKeys
from zoo.spec import Column

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


def train(config: RunConfig) -> dict[str, Any]:
    """Run one resolved configuration and return the figures of its summary."""
    assert config.precision is not None and config.run_name is not None
    device = build_device(config.precision)
    dist.initialize_dist(device)
    config = published.fetched(config)
    cost, given = cost_of(config), config.optimizer
    model = build(config)
    model.place(device._device, config.precision)
    model.encoders.to(device._device, torch.float32)
    device_batch, microbatch = config.global_batch_size // dist.get_world_size(), planned_microbatch(config, cost)
    # Composer gives durations in epochs too; 1,000 batches are an epoch here, as in benchmark.py.
    items = DrawnItems(config.data.columns(model.family, config.size), 1000 * device_batch)
    loader = DataLoader(items, device_batch, num_workers=config.data.workers, pin_memory=device.name == "gpu")
    Path(config.run_folder, config.run_name).mkdir(parents=True, exist_ok=True)
    peak = peak_tflops(device_name(), config.precision)
    throughput = Throughput(config.measure, flops_per_image=cost.flops_per_image, peak=peak)
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        max_duration=config.max_duration,
        optimizers=torch.optim.AdamW(
            model.parameters(),
            lr=given.learning_rate(config.global_batch_size),
            betas=given.betas,
            eps=given.eps,
            weight_decay=given.weight_decay,
        ),
        algorithms=[EMA(half_life=EMA_HALF_LIFE)],
        callbacks=[BatchRandomness(model, config.seed), throughput],
        progress_bar=False,
        device=device,
        precision=composer_precision(device, config.precision),
        device_train_microbatch_size=microbatch,
        seed=config.seed,
        spin_dataloaders=False,  # its items are random numbers: there is no position in an epoch to return to
    )
    trainer.fit()
    trainer.close()
    loss = trainer.state.total_loss_dict["loss/train/total"]
    if not math.isfinite(loss):
        raise ValueError(f"loss: {loss} at the end: the speed of such numbers means nothing. Lower optimizer.lr.")
    what = {
        "program": "bench.predecessor",
        "stage": config.data.stage,
        "precision": config.precision,
        "image_size": list(config.size),
        "preset": config.model.preset,
        "global_batch_size": config.global_batch_size,
        "device_train_microbatch_size": microbatch,
        "ema": True,
    }
    figures = {**throughput.result(), "loss": loss}
    return {**{key: rounded(value) for key, value in figures.items()}, **what, **environment()}


def problems_of(config: RunConfig) -> list[Problem]:
    """Return what cannot be: what cannot be in benchmark.py, and data that is not synthetic."""
    if not config.data.synthetic:
        return [Problem("data.synthetic: false. This program measures synthetic data alone: data.synthetic=true.")]
    given = {key.name: (getattr(config, key.name), key.default) for key in dataclasses.fields(SpeedKeys)}
    given |= {"profile.batches": (config.profile.batches, 0), "eval.when": (config.eval.when, "off")}
    found = [
        Problem(f"{key}: {value}. The predecessor has nothing of the kind: leave it out.", (key,))
        for key, (value, default) in given.items()
        if value != default
    ]
    if config.device_train_microbatch_size == AUTO:
        text = "device_train_microbatch_size: auto. This program tries none: give a number."
        found.append(Problem(text, ("device_train_microbatch_size",)))
    return found or check(config)


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Read the configuration, run it, write its summary, print its line."""
    config = resolve(load(RunConfig, parse_command_line(argv, ALIASES), check=problems_of))
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_local_rank())
    summary = train(config)
    if dist.get_global_rank() == 0:
        write_json(Path(config.run_folder, config.run_name or "", "summary.json"), summary)
        shown = ("images_per_sec", "images_per_sec_per_device", "mfu", "data_wait_frac", "peak_mem_gib")
        shown += ("batches", "loss")
        print(result_line({key: summary[key] for key in shown}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
