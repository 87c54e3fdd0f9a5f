"""Measure FID's arithmetic, features given: ours against torchmetrics' FrechetInceptionDistance.

    python -m bench.fid                                                # one table, and reports/results/fid_speed.json
    python -m bench.fid num_images=3000 rounds=1 results=/tmp/fid.json

    update     the features of all images go in, a batch at a time: sums in float64
    compute    covariance and distance to a reference

Both get the same features in the same batches, and keep the reference between evaluations (torchmetrics by
reset_real_features=False), so that one turn is what one evaluation costs. Contestants take turns (bench/contest.py). Memory
is what a turn adds to the process at its highest, MiB, for a tenth of the images and for all of them: where the second is
larger than the first, it grows with the number of images. Linux only. Keys: num_images num_features batch_size rounds
threads (of torch) results.
Exit code: 0 when the record was written, 2 when the command cannot be read.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from bench.command import ends, head, read_keys, threads, write_record
from bench.contest import Figures, rounded, take_turns
from cli.command import command
from cli.limits import limited
from cli.table import as_table
from config import as_written
from evaluation.fid import FeatureSums, Statistics, frechet_distance

SCHEMA = 1
CONTESTANTS = ("ours", "torchmetrics")
PARTS = ("update", "compute", "total")


@dataclass(frozen=True)
class FidConfig:
    """The keys of this command."""

    num_images: int = limited(30_000, 20)  # a tenth has a covariance, too
    """Images whose features are added up."""
    num_features: int = limited(2048, 1, 2**16)
    """Features of an image; Inception has 2048."""
    batch_size: int = limited(50, 1)
    """Images in an update; 50 is pytorch-fid's."""
    rounds: int = limited(3, 1)
    """Turns of each contestant."""
    threads: int = limited(1, 1, 1024)
    """Threads of torch; bench/micro_ema.py says why one."""
    results: str = "reports/results/fid_speed.json"
    """File of the record; an earlier one is replaced."""


def synthetic_features(num_images: int, num_features: int, seed: int) -> Tensor:
    """Return features like Inception's, (N, D) float32: not negative, correlated, of full rank."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(256, num_features, generator=torch.Generator().manual_seed(0)) / 16
    features = torch.randn(num_images, 256, generator=generator) @ mixing
    return features.add_(torch.randn(num_images, num_features, generator=generator), alpha=0.1).add_(0.3).relu_()


class Ours:
    """FeatureSums and frechet_distance."""

    def __init__(self, reference: Tensor):
        sums = FeatureSums(reference.shape[1])
        sums.update(reference)
        self.reference: Statistics = sums.compute()

    def begin(self) -> None:
        self.sums = FeatureSums(len(self.reference.mean))

    def update(self, features: Tensor) -> None:
        self.sums.update(features)

    def compute(self) -> float:
        return frechet_distance(self.sums.compute(), self.reference)


class Torchmetrics:
    """FrechetInceptionDistance with features in place of images."""

    def __init__(self, reference: Tensor):
        from torchmetrics.image.fid import FrechetInceptionDistance

        network = nn.Identity()
        network.num_features = reference.shape[1]
        self.metric = FrechetInceptionDistance(network, reset_real_features=False)
        self.metric.update(reference.double(), real=True)

    def begin(self) -> None:
        self.metric.reset()

    def update(self, features: Tensor) -> None:
        self.metric.update(features, real=False)

    def compute(self) -> float:
        return float(self.metric.compute())


def turn(contestant: Ours | Torchmetrics, features: Tensor, batch_size: int) -> dict[str, float]:
    """Evaluate once; return the seconds of the parts, and the distance under `fid`."""
    contestant.begin()
    started = time.perf_counter()
    for batch in features.split(batch_size):
        contestant.update(batch)
    updated = time.perf_counter()
    fid = contestant.compute()
    ended = time.perf_counter()
    return {"update": updated - started, "compute": ended - updated, "total": ended - started, "fid": fid}


def added_mib(work: Callable[[], object]) -> float:
    """Return the most memory that some work adds to this process while it runs, MiB, by the kernel's own high-water mark."""
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the mark
    before = psutil.Process().memory_info().rss
    work()
    marks = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    peak = next(int(words[1]) * 1024 for words in marks if words[0] == "VmHWM:")
    return (peak - before) / 2**20


def measure(config: FidConfig) -> dict[str, Any]:
    """Return the record: what was measured, flat, with every value under `by_round`."""
    features = synthetic_features(config.num_images, config.num_features, seed=1)
    reference = synthetic_features(config.num_images, config.num_features, seed=2)
    contestants = {"ours": Ours(reference), "torchmetrics": Torchmetrics(reference)}
    del reference
    seconds: dict[str, list[float]] = {f"{part}_{name}_sec": [] for part in PARTS for name in CONTESTANTS}
    distances: dict[str, float] = {}

    def take(name: str) -> float:
        found = turn(contestants[name], features, config.batch_size)
        for part in PARTS:
            seconds[f"{part}_{name}_sec"].append(found[part])
        distances[name] = found["fid"]
        return found["total"]

    for one in contestants.values():
        turn(one, features[: config.num_images // 10], config.batch_size)  # what libraries set up once is no growth
    memory = {
        f"memory_{name}_{words}_mib": rounded(added_mib(lambda n=num, c=one: turn(c, features[:n], config.batch_size)))
        for name, one in contestants.items()
        for words, num in (("tenth", config.num_images // 10), ("all", config.num_images))
    }
    figures = Figures()
    take_turns({name: lambda name=name: take(name) for name in contestants}, config.rounds, warm_up=False)
    for key, values in seconds.items():
        figures.add(key, values)
    for part in PARTS:
        figures.ratio(f"{part}_speedup", f"{part}_torchmetrics_sec", f"{part}_ours_sec")
    apart = abs(distances["ours"] - distances["torchmetrics"]) / abs(distances["torchmetrics"])
    found = {f"fid_{name}": value for name, value in distances.items()}
    return {**figures.flat, **memory, **found, "fid_relative_difference": apart, "by_round": figures.by_round}


def table(record: dict[str, Any]) -> str:
    """Format a record for the terminal."""
    rows = []
    for part in PARTS:
        keys = (f"{part}_ours_sec", f"{part}_torchmetrics_sec", f"{part}_speedup")
        spread = f"{record[f'{part}_speedup_min']:.3g} to {record[f'{part}_speedup_max']:.3g}"
        rows.append((f"{part}, s", *(f"{record[key]:.3g}" for key in keys), spread))
    for words, images in (("tenth", record["config"]["num_images"] // 10), ("all", record["config"]["num_images"])):
        figures = (f"{record[f'memory_{name}_{words}_mib']:.3g}" for name in CONTESTANTS)
        rows.append((f"memory, MiB, {images:,}", *figures, None, None))
    rows.append(("FID", *(f"{record[f'fid_{name}']:.6g}" for name in CONTESTANTS), None, None))
    return as_table(("", *CONTESTANTS, "ratio", "spread"), rows, "lrrrl")


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(FidConfig, argv)
    if config is None:
        return 0
    begin = {
        **head(SCHEMA),
        "measured": "fid_speed",
        "config": as_written(config),
    }
    began = time.monotonic()
    with threads(config.threads):
        measured = measure(config)
    record = {**begin, **measured, **ends(began)}
    write_record(config.results, record)
    print(table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
