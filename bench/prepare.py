"""Measure prepare.shards and prepare.latents as commands: samples a second, where the time goes, Ray, bytes a sample.

    python -m bench.prepare                                  # about ten minutes -> prepare_speed.json
    python -m bench.prepare num_images=64 num_encoded=16 image_size=64 preset=tiny rounds=1 results=/tmp/prepare.json

local     python -m prepare.shards: tars of rendered JPEGs -> images, by processes
ray       the same with engine=ray, on a Ray cluster of this machine with as many cores; where Ray is installed
latents   composer -n 2 -m prepare.latents: images -> moments, by SD2's encoders with random weights

Samples a second, and the part of the workers' time that each kind of work took, are those of the commands' last lines: the
start of the command is not in them, that of Ray's workers is. Ray against processes is also a ratio of whole commands, start
and all, for all pictures and for an eighth of them. Bytes are those of a sample of 512 px: as a shard has its moments, and
in a tar as MLPerf's reference has them. Keys: num_images num_encoded image_size preset workers rounds work results.
Exit code: 0 when the record was written, 2 when the command cannot be read.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from bench.command import keep, read_keys
from bench.contest import Figures, rounded, take_turns
from bench.micro_data import NUM_TARS, write_images, write_moments
from cli.command import command
from cli.errors import Failed
from cli.limits import limited
from record import processes

SCHEMA = 1
NUM_MOMENTS = 64
LIMIT_SEC = 3600.0
PACE = re.compile(r"; ([0-9.,]+) (?:samples|images)/s over [0-9.,]+ s \((.*?)\);")
STORE_BYTES = 2**27  # of Ray's objects in memory: parts are files
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True)
class PrepareBenchConfig:
    """The keys of this command."""

    num_images: int = limited(8000, 2 * NUM_TARS, 10**6)
    """Pictures in the tars."""
    num_encoded: int = limited(16, NUM_TARS, 10**6)
    """Pictures that are encoded."""
    image_size: int = limited(256, 8, 1024)
    """Their side, pixels."""
    preset: Literal["full", "tiny"] = "full"
    """Of SD2's encoders."""
    workers: int = limited(2, 1, 64)
    """Processes, ranks, and cores of the cluster."""
    rounds: int = limited(5, 1)
    """Turns of each contestant."""
    work: str | None = None
    """Folder for temporary files: 200 kB for each picture. null: the system's."""
    results: str = "reports/results/prepare_speed.json"
    """File of the record; an earlier one is replaced."""


@dataclass
class Turns:
    """What the turns of one command came to, a value each."""

    rates: list[float] = field(default_factory=list)
    """Samples a second."""
    seconds: list[float] = field(default_factory=list)
    """Of the whole command."""
    fractions: dict[str, list[float]] = field(default_factory=dict)
    """Kind of work -> its part of the workers' time."""

    def take(self, words: Sequence[str]) -> float:
        """Run the command once. Raises Failed: it failed, or said nothing of its speed."""
        begun = time.perf_counter()
        code, said = processes.run(words, LIMIT_SEC)
        self.seconds.append(time.perf_counter() - begun)
        found = PACE.search(said)
        if code != 0 or found is None:
            raise Failed(f"{' '.join(words[1:5])} ...: ended with {code}: {said[-300:]}")
        self.rates.append(float(found[1].replace(",", "")))
        for text in found[2].split(", "):
            kind, _, percent = text.rpartition(" ")
            self.fractions.setdefault(kind.replace(" ", "_"), []).append(float(percent.rstrip("%")) / 100)
        return self.rates[-1]

    def kept(self, key: str, rounds: int, figures: Figures) -> dict[str, float]:
        """Add rates and seconds of the last rounds to the figures; return the median part of each kind of work."""
        figures.add(f"{key}_per_sec", self.rates[-rounds:])
        figures.add(f"{key}_command_sec", self.seconds[-rounds:])
        return {
            f"{key}_{kind}_frac": rounded(statistics.median(values[-rounds:]))
            for kind, values in self.fractions.items()
        }


@contextmanager
def cluster_here(workers: int) -> Iterator[str]:
    """Start a Ray cluster with so many cores on this machine, and yield its address."""
    with mock.patch.dict("os.environ", {**QUIET, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}):
        import ray

        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        context = ray.init(num_cpus=workers, object_store_memory=STORE_BYTES, **quiet)
        try:
            yield context.address_info["gcs_address"]
        finally:
            ray.shutdown()


def measure_shards(config: PrepareBenchConfig, folder: Path) -> dict[str, Any]:
    """Return the figures of prepare.shards."""
    write_images(folder, config.num_images)
    shutil.rmtree(folder / "stage")
    tars, outs = sorted((folder / "tars").iterdir()), itertools.count()
    with ExitStack() as held:
        keys = {"local": [f"workers={config.workers}"]}
        if importlib.util.find_spec("ray"):
            keys["ray"] = [*keys["local"], "engine=ray", f"ray={held.enter_context(cluster_here(config.workers))}"]
        given = {"": tars, "_eighth": tars[:1]}
        turns = {f"{name}{size}": Turns() for name in keys for size in given}

        def turn(name: str, size: str) -> float:
            out = folder / f"out-{next(outs)}"
            words = [sys.executable, "-m", "prepare.shards", *map(str, given[size]), str(out), *keys[name]]
            rate = turns[f"{name}{size}"].take(words)
            shutil.rmtree(out)
            return rate

        take_turns(
            {f"{name}{size}": functools.partial(turn, name, size) for name in keys for size in given}, config.rounds
        )
    figures, fractions = Figures(), {}
    for name, of in turns.items():
        fractions |= of.kept(name, config.rounds, figures)
    if "ray" in keys:
        figures.ratio("ray_over_local", "ray_per_sec", "local_per_sec")
        for size in given:
            figures.ratio(f"ray_over_local{size}_command", f"local{size}_command_sec", f"ray{size}_command_sec")
    return {**figures.flat, **fractions, "shards_by_round": figures.by_round}


def measure_latents(config: PrepareBenchConfig, folder: Path) -> dict[str, Any]:
    """Return the figures of prepare.latents."""
    write_images(folder, config.num_encoded)
    images, figures, turns, outs = folder / "images", Figures(), Turns(), itertools.count()
    Turns().take([sys.executable, "-m", "prepare.shards", str(folder / "tars"), str(images)])
    keys = [f"model.preset={config.preset}", "model.weights=random", f"image_size={config.image_size}"]

    def turn() -> float:
        out = folder / f"out-{next(outs)}"
        words = processes.of_composer(config.workers, "-m", "prepare.latents", str(images), str(out), *keys)
        rate = turns.take(words)
        shutil.rmtree(out)
        return rate

    take_turns({"latents": turn}, config.rounds)
    fractions = turns.kept("latents", config.rounds, figures)
    return {**figures.flat, **fractions, "latents_by_round": figures.by_round}


def measure_bytes(folder: Path) -> dict[str, Any]:
    """Return bytes a sample of the moments of 512-pixel images: ours, and in a tar as the MLPerf reference has them."""
    write_moments(folder, NUM_MOMENTS)
    ours = sum(path.stat().st_size for path in (folder / "stage").rglob("*.mds")) / NUM_MOMENTS
    theirs = sum(path.stat().st_size for path in (folder / "tars").iterdir()) / NUM_MOMENTS
    return {"bytes_ours": rounded(ours), "bytes_reference": rounded(theirs), "bytes_ratio": rounded(ours / theirs)}


def measure(config: PrepareBenchConfig, work: Path) -> dict[str, Any]:
    """Return all figures."""
    shards = measure_shards(config, work / "shards")
    shutil.rmtree(work / "shards")
    return {**shards, **measure_latents(config, work / "latents"), **measure_bytes(work / "bytes")}


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(PrepareBenchConfig, argv)
    if config is None:
        return 0
    with tempfile.TemporaryDirectory(dir=config.work, prefix="prepare-") as work:
        keep(config.results, SCHEMA, "prepare_speed", config, lambda: measure(config, Path(work)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
