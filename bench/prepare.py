"""Measure prepare.shards and prepare.latents: samples a second, where the time goes, bytes a sample, Ray against processes.

    python -m bench.prepare                                  # some minutes -> reports/results/prepare_speed.json
    python -m bench.prepare num_images=64 num_encoded=8 image_size=64 preset=tiny rounds=1 results=/tmp/prepare.json

shards    tars of rendered JPEGs -> the stage images: by processes, and by a Ray cluster of this machine where Ray is there.
latents   images -> moments in one process with one thread, by SD2's VAE with random weights. Another thread decodes.
parts     of the time of one process: decode (of latents with the resize), encode, write (with digests and the disk).
bytes     a sample of the moments of 512-pixel images as a shard has it, against KEY.npy (float32) and KEY.txt in a tar.

Both engines have started before the first turn. Ray against processes is a ratio of each round, in turns. Ray is installed
by requirements/prepare.lock. Keys: num_images num_encoded image_size preset workers rounds work results.
Exit code: 0 when the record was written, 2 when the command cannot be read.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from streaming import MDSWriter

from bench.command import keep, read_keys, threads
from bench.contest import Figures, rounded, take_turns
from bench.micro_data import write_images, write_moments
from cli.command import command
from cli.limits import limited
from prepare import encoder, latents, shards
from prepare.cluster import QUIET
from prepare.engines import Engine, EngineKeys, Make
from prepare.find import find_sources
from prepare.hub_datasets import HubKeys
from prepare.places import Folder
from prepare.sources import Source
from zoo.model_config import ModelConfig

SCHEMA = 1
NUM_MOMENTS = 64


@dataclass(frozen=True)
class PrepareBenchConfig:
    """The keys of this command."""

    num_images: int = limited(4000, 16, 10**6)
    """Pictures in the tars."""
    num_encoded: int = limited(16, 2, 10**6)
    """Pictures that are encoded."""
    image_size: int = limited(256, 8, 1024)
    """Their side, pixels."""
    preset: Literal["full", "tiny"] = "full"
    """Of SD2's encoders."""
    workers: int = limited(2, 1, 64)
    """Processes, and cores of the cluster."""
    rounds: int = limited(5, 1)
    """Turns of each contestant."""
    work: str | None = None
    """Folder for temporary files: 100 kB for each picture. null: the system's."""
    results: str = "reports/results/prepare_speed.json"
    """File of the record; an earlier one is replaced."""


@contextmanager
def timed(*targets: tuple[Any, str, str]) -> Iterator[dict[str, float]]:
    """Yield what calls take in all, seconds by kind. Targets: (module or class, name, kind); none calls another one."""
    taken: dict[str, float] = {}

    def around(work: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            begun = time.perf_counter()
            try:
                return work(*given, **more)
            finally:
                taken[kind] = taken.get(kind, 0.0) + time.perf_counter() - begun

        return call

    with ExitStack() as held:
        for owner, name, kind in targets:
            held.enter_context(mock.patch.object(owner, name, around(getattr(owner, name), kind)))
        yield taken


WRITES = ((MDSWriter, "write", "write"), (MDSWriter, "finish", "write"), (Folder, "put", "write"))


def fractions(prefix: str, taken: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return the part of the time that each kind took."""
    return {f"{prefix}_{kind}_frac": rounded(value / seconds) for kind, value in sorted(taken.items())}


# --- tars -> images ---


def shards_of(work: shards.Work, sources: Sequence[Source], out: Path) -> Make:
    """Return what makes a part of a turn's own stage: of (turn, number)."""
    return lambda item: shards.make_one(Folder(str(out / item[0])), work, sources, item[1]).read


def measure_shards(config: PrepareBenchConfig, folder: Path) -> dict[str, Any]:
    """Return the figures of prepare.shards."""
    write_images(folder, config.num_images)
    (fetched := folder / "fetched").mkdir()
    sources = find_sources([str(folder / "tars")], HubKeys(), fetched)
    work = shards.plan_for(sources, shards.ShardsConfig(), fetched)
    start, figures, turns = functools.partial(shards_of, work, sources, folder / "out"), Figures(), itertools.count()

    def turn(engine: Engine) -> float:
        name, begun = f"{next(turns)}", time.perf_counter()
        num = sum(read for _, read in engine.run([(name, number) for number in range(len(sources))]))
        seconds = time.perf_counter() - begun
        shutil.rmtree(folder / "out")
        return num / seconds

    with ExitStack() as held:
        keys = {"local": EngineKeys()}
        if importlib.util.find_spec("ray"):
            keys["ray"] = held.enter_context(cluster_here(config.workers))
        opened = {name: held.enter_context(one.opened(start, config.workers)) for name, one in keys.items()}
        rates = take_turns({name: functools.partial(turn, engine) for name, engine in opened.items()}, config.rounds)
    for name, values in rates.items():
        figures.add(f"shards_{name}_per_sec", values)
    if "ray" in rates:
        figures.ratio("ray_over_local", "shards_ray_per_sec", "shards_local_per_sec")
    with timed((shards, "decode_image", "decode"), *WRITES) as taken:
        begun = time.perf_counter()
        for number in range(len(sources)):
            shards_of(work, sources, folder / "out")(("alone", number))
        seconds = time.perf_counter() - begun
    return {**figures.flat, **fractions("shards", taken, seconds), "shards_by_round": figures.by_round}


@contextmanager
def cluster_here(workers: int) -> Iterator[EngineKeys]:
    """Start a cluster with so many cores on this machine, and yield the keys that lead to it."""
    with mock.patch.dict("os.environ", {**QUIET, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}):
        import ray

        small = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        context = ray.init(num_cpus=workers, object_store_memory=2**27, **small)
    try:
        yield EngineKeys("ray", context.address_info["gcs_address"])
    finally:
        ray.shutdown()


# --- images -> moments ---


def measure_latents(config: PrepareBenchConfig, folder: Path) -> dict[str, Any]:
    """Return the figures of prepare.latents."""
    write_images(folder, config.num_encoded)
    model = ModelConfig(preset=config.preset, weights="random")
    given = latents.LatentsConfig(model=model, image_size=config.image_size, workers=1)
    source, stage, entries = latents.open_input(str(folder / "stage"))
    made, figures, taken_of = latents.build_encoder(given), Figures(), []
    plan = latents.plan_for(given, made, stage, entries)
    decode = ((encoder, "decode_image", "decode"), (encoder, "resize_and_crop", "decode"))

    def turn() -> float:
        out = Folder(tempfile.mkdtemp(dir=folder))
        with timed(*decode, (encoder.Encoder, "columns_of", "encode"), *WRITES) as taken:
            begun = time.perf_counter()
            latents.make_parts(out, plan, range(len(entries)), made, source, entries, 1, None)
            seconds = time.perf_counter() - begun
        taken_of.append(fractions("latents", taken, seconds))
        return config.num_encoded / seconds

    figures.add("latents_per_sec", take_turns({"latents": turn}, config.rounds)["latents"])
    middle = {name: rounded(statistics.median(one[name] for one in taken_of)) for name in taken_of[0]}
    return {**figures.flat, **middle, "latents_by_round": figures.by_round}


def measure_bytes(folder: Path) -> dict[str, Any]:
    """Return bytes a sample of the moments of 512-pixel images: ours, and in a tar as the MLPerf reference has them."""
    write_moments(folder, NUM_MOMENTS)
    ours = sum(path.stat().st_size for path in (folder / "stage").rglob("*.mds")) / NUM_MOMENTS
    theirs = sum(path.stat().st_size for path in (folder / "tars").iterdir()) / NUM_MOMENTS
    return {"bytes_ours": rounded(ours), "bytes_reference": rounded(theirs), "bytes_ratio": rounded(ours / theirs)}


def measure(config: PrepareBenchConfig, work: Path) -> dict[str, Any]:
    """Return all figures."""
    found = {**measure_shards(config, work / "shards"), **measure_bytes(work / "bytes")}
    with threads(1):
        return {**found, **measure_latents(config, work / "latents")}


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
