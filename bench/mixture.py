"""What mixing stages and training in buckets cost: contestants take turns on the same pictures (bench/contest.py).

    python -m bench.mixture                     # -> reports/results/mixture.json
    python -m bench.mixture rounds=3 results=/tmp/mixture.json

    one, two          an epoch of moments of SD2 at 512 px, one loader process, samples/s: a stage; its two halves as streams
    square, buckets   forward and backward of the tiny SD2 from pictures of four aspects, images/s: cut to squares; in SDXL's
                      buckets of about as many pixels (prepare.buckets)

The record also has what of the pictures' area is cut off either way, and the samples that fill no batch of an epoch.
Exit code: 0, 2 when the command cannot be read.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from streaming import MDSWriter, StreamingDataset

from bench.command import head, read_keys, write_record
from bench.contest import Figures, take_turns
from bench.micro_data import (
    MOMENTS_BATCH,
    PICTURE_SIZES,
    SEED,
    SIZE,
    build_family,
    picture,
    samples_per_sec,
    words,
    write_moments,
)
from cli.command import command
from cli.limits import ImageSize, limited
from config import as_written
from data import DataConfig, build_data
from model import LatentDiffusion, build_model
from stages.buckets import bucket_of, bucket_sizes, cropped_frac
from stages.dataset import read_stage, write_facts
from stages.fetch import HASH
from stages.loader import Loader
from stages.mixture import StreamConfig
from zoo.model_config import ModelConfig
from zoo.objectives import ObjectiveConfig

SCHEMA = 1
COMMAND_SEC = 600.0
CPU = torch.device("cpu")


@dataclass(frozen=True)
class MixtureConfig:
    """The keys of this command."""

    rounds: int = limited(5, 1)
    """Turns of each contestant."""
    num_samples: int = limited(8192, 4 * MOMENTS_BATCH)
    """Samples of the stage of moments."""
    num_images: int = limited(512, 64)
    """Pictures that are trained on."""
    side_px: int = limited(128, 32, 1024)
    """Side of the squares that they are cut to."""
    batch_size: int = limited(8, 1, 1024)
    """Pictures of a batch."""
    results: str = "reports/results/mixture.json"
    """File of the record; an earlier one is replaced."""


def loader_of(config: DataConfig, size: ImageSize, batch_size: int) -> Loader:
    """Return a loader on the CPU, of the family of bench/micro_data.py."""
    return build_data(config, build_family(), size=size, device_batch_size=batch_size, device=CPU, seed=SEED).dataloader


def mixture(folder: Path, config: MixtureConfig) -> dict[str, Callable[[], float]]:
    """Return the turns of reading one stage, and its two halves as streams."""
    write_moments(folder / "one", config.num_samples)
    whole = read_stage(str(folder / "one" / "stage"))
    for half in range(2):  # the same rows in the same order, in two stages
        rows = StreamingDataset(local=whole.location, batch_size=1)
        columns = dict(zip(whole.columns, whole.encodings, strict=True))
        out = folder / f"half{half}"
        with MDSWriter(out=str(out), columns=columns, hashes=[HASH], size_limit="64mb") as writer:
            for number in range(half * config.num_samples // 2, (half + 1) * config.num_samples // 2):
                writer.write(rows[number])
        write_facts(out, "moments", {})
    streams = [StreamConfig(str(folder / f"half{half}")) for half in range(2)]
    given = {"one": DataConfig(stage="moments", local=whole.location, workers=1)}
    given["two"] = DataConfig(stage="moments", streams=streams, workers=1)
    loaders = {name: loader_of(section, SIZE, MOMENTS_BATCH) for name, section in given.items()}
    return {name: functools.partial(samples_per_sec, loader, "moments") for name, loader in loaders.items()}


def write_pictures(folder: Path, num: int) -> None:
    """Write pictures of four aspects as a stage."""
    columns = {"jpg": "bytes", "caption": "str", "key": "str", "width": "int", "height": "int"}
    with MDSWriter(out=str(folder), columns=columns, hashes=[HASH], size_limit="16mb") as writer:
        for number in range(num):
            size = PICTURE_SIZES[number % len(PICTURE_SIZES)]
            writer.write({"jpg": picture(number, size), "width": size[0], "height": size[1], **words(number)})
    write_facts(folder, "images", {})


def images_per_sec(model: LatentDiffusion, loader: Iterable[Any]) -> float:
    """Train on an epoch without an optimizer; the first batch begins the clock."""
    generator, begun, images = torch.Generator().manual_seed(SEED), 0.0, 0
    for number, batch in enumerate(loader):
        batch = model.draw(batch, generator)
        model.loss(model.forward(batch), batch).backward()
        model.zero_grad(set_to_none=True)
        if not number:
            begun, images = time.perf_counter(), -len(batch["images"])
        images += len(batch["images"])
    return images / (time.perf_counter() - begun)


def squares_and_buckets(folder: Path, config: MixtureConfig) -> tuple[dict[str, Callable[[], float]], dict[str, Any]]:
    """Return the turns of training, and what is lost either way."""
    write_pictures(folder / "images", config.num_images)
    out, side = folder / "buckets", config.side_px
    command = [sys.executable, "-m", "prepare.buckets", str(folder / "images"), str(out), f"image_size={side}"]
    subprocess.run(command, check=True, timeout=COMMAND_SEC, stdout=sys.stderr)
    model = build_model(
        ModelConfig(preset="tiny", weights="random"),
        ObjectiveConfig(),
        size=(side, side),
        normalize="symmetric",
        seed=SEED,
    ).place(CPU, "fp32")
    places = {"square": folder / "images", "buckets": out}
    sections = {name: DataConfig(local=str(at), workers=1) for name, at in places.items()}
    loaders = {name: loader_of(section, (side, side), config.batch_size) for name, section in sections.items()}
    sizes = bucket_sizes(side, step_px=8)
    chosen = {size: sizes[bucket_of(size, sizes)] for size in PICTURE_SIZES}
    facts = {
        "bucket_sizes": [list(bucket.size) for bucket in read_stage(str(out)).buckets],
        "cropped_frac_square": sum(cropped_frac(size, (1, 1)) for size in PICTURE_SIZES) / len(PICTURE_SIZES),
        "cropped_frac_buckets": sum(cropped_frac(size, chosen[size]) for size in PICTURE_SIZES) / len(PICTURE_SIZES),
        **{
            f"left_over_{name}": config.num_images - len(loader) * config.batch_size for name, loader in loaders.items()
        },
    }
    return {name: functools.partial(images_per_sec, model, loader) for name, loader in loaders.items()}, facts


def measure(config: MixtureConfig, folder: Path) -> dict[str, Any]:
    """Let the contestants take turns and return the record."""
    figures, (training, facts) = Figures(), squares_and_buckets(folder, config)
    for name, values in take_turns(mixture(folder, config), config.rounds).items():
        figures.add(f"{name}_samples_per_sec", values)
    figures.ratio("two_over_one", "two_samples_per_sec", "one_samples_per_sec")
    for name, values in take_turns(training, config.rounds).items():
        figures.add(f"{name}_images_per_sec", values)
    figures.ratio("buckets_over_square", "buckets_images_per_sec", "square_images_per_sec")
    return {**head(SCHEMA), "config": as_written(config), **facts, **figures.flat, "by_round": figures.by_round}


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(MixtureConfig, argv)
    if config is None:
        return 0
    with tempfile.TemporaryDirectory(prefix="mixture-") as folder:
        record = measure(config, Path(folder))
    write_record(config.results, record)
    for key in ("two_over_one", "buckets_over_square"):
        print(f"{key}={record[key]} ({record[f'{key}_min']} to {record[f'{key}_max']})")
    print(f"cut off: {record['cropped_frac_square']:.1%} in squares, {record['cropped_frac_buckets']:.1%} in buckets")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
