"""What a dataset of very many samples costs: time and memory of a start, of a resume, of fetching and of reading.

    python -m bench.scale                                       # 25 and 100 million samples: some minutes
    python -m bench.scale samples=[2000000] parts=start,fetch results=/tmp/scale.json

The dataset is made up: its index lists as many shards as are needed, which are links to a few real ones of tiny samples, so
that each has the digest that the index gives. A run reads it from there through a cache folder. Not in the figures: what a
store adds, and large shards.

    start    one process without loader processes: creating the stream, and the first batch
    resume   the same, from the middle of an epoch
    ranks    the same as `start` with several ranks and loader processes, the slowest rank's time
    fetch    seconds of fetching a shard into a cache that is full
    read     what a reader keeps of each shard that it has read, bytes of its memory

Each part runs in a separate process, or several. RSS is the most that one of them held, without its loader processes.
Exit code: 0, 1 if a process failed, 2 if the command cannot be read.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command import Figures, measure_and_record
from bench.data import write_moments
from bench.scale_reader import BATCH, PARTS, SIZE
from common.command import command
from common.command_line import Problem
from common.errors import Failed
from common.value_types import limited
from mds.dataset import write_metadata
from run_folder import processes

LINKS = 30_000  # to a file: ext4 allows 65,000
LIMIT_SEC = 1800.0  # of a part's process


@dataclass(frozen=True)
class ScaleConfig:
    """The keys of this command."""

    samples: tuple[int, ...] = (25_000_000, 100_000_000)
    """Samples of the dataset, one size after the other. The table continues the line through two sizes."""
    samples_a_shard: int = limited(1000, 1, 100_000)
    """Samples of a shard."""
    parts: str = ",".join(PARTS)
    """What is measured, with commas between: start, resume, ranks, fetch, read."""
    ranks: int = limited(2, 1, 64)
    """Ranks of the part `ranks`."""
    workers: int = limited(2, 0, 64)
    """Loader processes of each of these ranks."""
    cached_shards: int = limited(50, 4, 1_000_000)
    """Shards that the cache of the part `fetch` takes."""
    fetches: int = limited(30, 1, 1_000_000)
    """Shards that are fetched when it is full."""
    shards_read: int = limited(4000, 128, 10_000_000)
    """Shards of which the part `read` reads a sample each."""
    rounds: int = limited(1, 1)
    """Times that each part is measured."""
    results: str = "reports/results/scale.json"
    """File of the record; an earlier one is replaced."""
    work: str | None = None
    """Folder for temporary files. null: the system's."""


def check(config: ScaleConfig) -> list[Problem]:
    """Return every problem of the keys."""
    texts, least = [], 2 * BATCH * config.ranks * max(1, config.workers)
    if min(config.samples, default=0) < least or any(num % config.samples_a_shard for num in config.samples):
        possible = f"whole shards of samples_a_shard={config.samples_a_shard}, {least:,} samples at least"
        texts.append(f"samples: {list(config.samples)}. Possible: {possible}.")
    if unknown := [name for name in _parts(config) if name not in PARTS]:
        texts.append(f"parts: unknown {', '.join(map(repr, unknown))}. Known: {', '.join(PARTS)}.")
    return [Problem(text, (text.partition(":")[0],)) for text in texts]


def _parts(config: ScaleConfig) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in config.parts.split(",")))


def make_stage(folder: Path, num_shards: int, samples_a_shard: int, size: tuple[int, int] = SIZE) -> dict[str, int]:
    """Write a dataset of moments whose shards are links to a few real ones; return its sizes for its readers."""
    write_moments(folder / "real", samples_a_shard, size=size)
    index = json.loads((folder / "real/stage/index.json").read_text())
    [shard] = index["shards"]
    real = folder / "real/stage" / shard["raw_data"]["basename"]
    stage, names = folder / "stage", [f"{n // 1000:05d}/shard.{n % 1000:05d}.mds" for n in range(num_shards)]
    for number in range(math.ceil(num_shards / 1000)):
        (stage / f"{number:05d}").mkdir(parents=True)
    for number, name in enumerate(names):
        if number % LINKS == 0:
            source = shutil.copy(real, folder / f"{number}.mds")
        os.link(source, stage / name)
    shards = [{**shard, "raw_data": {**shard["raw_data"], "basename": name}} for name in names]
    (stage / "index.json").write_text(json.dumps({**index, "shards": shards}))
    write_metadata(stage, "moments", {})
    sizes = {"index_bytes": (stage / "index.json").stat().st_size, "shard_bytes": shard["raw_data"]["bytes"]}
    return {"num_shards": num_shards, "samples_a_shard": samples_a_shard, **sizes}


def read_by(job: Mapping[str, Any], ranks: int, folder: Path) -> dict[str, float]:
    """Let ranks read the dataset; return the greatest of each figure. Raises Failed."""
    words = json.dumps({**job, "cache": str(folder / "cache"), "out": str(folder / "out")})
    code, output = processes.run(processes.composer_command(ranks, "-m", "bench.scale_reader", words), LIMIT_SEC)
    if code != 0:
        how = f"was not over after {LIMIT_SEC:.0f} s" if code is None else f"ended with {code}"
        raise Failed(f"scale: no record was written. {job['part']} {how}. It printed: {output[-2000:].strip()}")
    of_ranks = [json.loads((folder / f"out-{rank}.json").read_text()) for rank in range(ranks)]
    return {key: max(of_rank[key] for of_rank in of_ranks) for key in of_ranks[0]}


def measure_size(config: ScaleConfig, num_samples: int, work: Path) -> dict[str, Any]:
    """Measure a dataset of one size; return its figures."""
    begun, figures = time.monotonic(), Figures()
    sizes = make_stage(work, num_samples // config.samples_a_shard, config.samples_a_shard)
    made_sec = round(time.monotonic() - begun, 1)
    numbers = {key: getattr(config, key) for key in ("cached_shards", "fetches", "shards_read")}
    for part in _parts(config):
        ranks, workers = (config.ranks, config.workers) if part == "ranks" else (1, 0)
        job = {**sizes, **numbers, "stage": str(work / "stage"), "part": part, "workers": workers}
        rounds = []
        for _ in range(config.rounds):
            with tempfile.TemporaryDirectory(dir=work) as folder:
                rounds.append(read_by(job, ranks, Path(folder)))
        for key in rounds[0]:
            figures.add(f"{part}_{key}", [each[key] for each in rounds])
    return {"samples": num_samples, **sizes, "made_sec": made_sec, **figures.as_record()}


def measure(config: ScaleConfig) -> dict[str, Any]:
    """Measure all sizes."""
    sizes = []
    for num_samples in sorted(set(config.samples)):
        with tempfile.TemporaryDirectory(dir=config.work, prefix="scale-") as work:
            sizes.append(measure_size(config, num_samples, Path(work)))
    return {"sizes": sizes}


@command(keys=ScaleConfig, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    return measure_and_record("scale", ScaleConfig, argv, measure, check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
