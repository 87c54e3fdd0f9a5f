"""What a stage of very many samples costs: time and memory of a start, of a resume, of fetching and of reading.

    python -m bench.scale                                       # 25 and 100 million samples: some minutes
    python -m bench.scale samples=[2000000] parts=start,fetch results=/tmp/scale.json
    python -m bench.scale other=/src/easel-old                  # beside another checkout, whose reader takes turns with this

The stage is made up: its index lists as many shards as are needed, which are links to a few real ones of tiny samples, so
that each has the digest that the index gives. A run reads it from there through a cache folder. Not in the figures: what a
store adds, and large shards; a folder's shards are looked at one by one by read_stage, which a store's are not.

    start    one process without loader processes: read_stage, the making of the stream, the first batch, and the order's part
             of it
    resume   the same, from the middle of an epoch
    ranks    the same as `start` with several ranks and loader processes, the slowest rank's time
    fetch    a shard is fetched into a cache that is full: seconds, and those under the lock of all of the machine's processes
    read     what a reader keeps of each shard that it has read, bytes of its memory

Each part is a process of its own, or several. RSS is the most that one of them held, its loader processes apart. Memory is
the most that they held together at any tenth of a second (PSS: what they share counts once). Both are with what they import.
`/dev/shm` is what it held more than before, looked at as often.
Exit code: 0, 1 when a process failed, 2 when the command cannot be read.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from streaming import MDSWriter

from bench.command import head, read_keys, write_record
from bench.contest import Figures, take_turns
from bench.micro_data import build_family, words
from bench.scale_reader import BATCH, PARTS, SEED, SIZE
from cli.command import command
from cli.command_line import Problem
from cli.errors import Failed
from cli.limits import limited
from config import as_written
from reports.tables import text_of
from stages.dataset import array_encoding, write_facts
from stages.fetch import HASH

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent
READER = ROOT / "bench" / "scale_reader.py"
SHM = "/dev/shm"
LINKS = 30_000  # to a file: ext4 takes 65,000
LIMIT_SEC = 1800.0  # of a part's process
LOOK_SEC = 0.1
# For the refusal of what cannot fit: int64 numbers of samples in /dev/shm, and what making their order takes for a while.
SHM_BYTES, MEMORY_BYTES = 8, 60


@dataclass(frozen=True)
class ScaleConfig:
    """The keys of this command."""

    samples: tuple[int, ...] = (25_000_000, 100_000_000)
    """Samples of the stage, one size after the other. Two sizes give the line that the table goes on with."""
    samples_a_shard: int = limited(1000, 1, 1_000_000)
    """Samples of a shard."""
    parts: str = ",".join(PARTS)
    """What is measured: start, resume, ranks, fetch, read, with commas between."""
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
    other: str | None = None
    """Another checkout of this project, whose reader is measured in turns with this one's. null: none."""
    results: str = "reports/results/scale.json"
    """File of the record; an earlier one is replaced."""
    work: str | None = None
    """Folder for temporary files. null: the system's."""


def check(config: ScaleConfig) -> list[Problem]:
    """Return every problem of the keys, and of this machine's room for them."""
    found, least = [], 2 * BATCH * config.ranks * max(1, config.workers)
    if not config.samples or any(type(num) is not int or num < least for num in config.samples):
        text = f"{list(config.samples)}. Possible: numbers from {least:,} on, e.g. [25000000,100000000]."
        return [Problem(f"samples: {text}", ("samples",))]
    if any(num % config.samples_a_shard for num in config.samples):
        text = f"{list(config.samples)} are no whole shards of samples_a_shard={config.samples_a_shard}."
        found.append(Problem(f"samples: {text} Give multiples of it.", ("samples", "samples_a_shard")))
    if unknown := [name for name in _parts(config) if name not in PARTS]:
        text = f"unknown {', '.join(map(repr, unknown))}. Known: {', '.join(PARTS)}."
        found.append(Problem(f"parts: {text}", ("parts",)))
    if config.other is not None and not Path(config.other, "bench/command.py").is_file():
        found.append(Problem(f"other: {config.other} is no checkout of this project. Give its folder.", ("other",)))
    most = max(config.samples)
    rooms = {SHM: (SHM_BYTES, shutil.disk_usage(SHM).free), "memory": (MEMORY_BYTES, psutil.virtual_memory().available)}
    for name, (of_sample, free) in rooms.items():
        if most * of_sample > free:
            text = f"{most:,} need about {most * of_sample / 2**30:.1f} GiB of {name}, {free / 2**30:.1f} are free."
            found.append(Problem(f"samples: {text} Give fewer.", ("samples",)))
    return found


def _parts(config: ScaleConfig) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in config.parts.split(",")))


# --- the stage ---


def make_stage(folder: Path, num_shards: int, samples_a_shard: int) -> dict[str, int]:
    """Write a stage of moments whose shards are links to a few real ones; return sizes of it for its readers."""
    columns = build_family().columns("moments", SIZE)
    encodings = {name: array_encoding(column.stored, column.shape) for name, column in columns.items()}
    random = np.random.default_rng(SEED)
    with MDSWriter(
        out=str(folder / "real"), columns={**encodings, "caption": "str", "key": "str"}, hashes=[HASH], size_limit=None
    ) as writer:
        for number in range(samples_a_shard):
            moments = random.standard_normal(columns["moments"].shape, np.float32).astype(np.float16)
            tokens = random.integers(0, columns["tokens"].below, columns["tokens"].shape, columns["tokens"].stored)
            writer.write({"moments": moments, "tokens": tokens, **words(number)})
    index = json.loads((folder / "real" / "index.json").read_text())
    [shard] = index["shards"]
    real = folder / "real" / shard["raw_data"]["basename"]
    stage, names = folder / "stage", [f"{n // 1000:05d}/shard.{n % 1000:05d}.mds" for n in range(num_shards)]
    for number in range(math.ceil(num_shards / 1000)):
        (stage / f"{number:05d}").mkdir(parents=True)
    for number, name in enumerate(names):
        if number % LINKS == 0:
            source = shutil.copy(real, folder / f"{number}.mds")
        os.link(source, stage / name)
    shards = [{**shard, "raw_data": {**shard["raw_data"], "basename": name}} for name in names]
    (stage / "index.json").write_text(json.dumps({**index, "shards": shards}))
    write_facts(stage, "moments", {})
    sizes = {"index_bytes": (stage / "index.json").stat().st_size, "shard_bytes": shard["raw_data"]["bytes"]}
    return {"num_shards": num_shards, "samples_a_shard": samples_a_shard, **sizes}


# --- the processes that read it ---


class Watch:
    """The most memory that some processes and their children hold together, and the most in /dev/shm, bytes."""

    def __init__(self) -> None:
        self.shm_before = shutil.disk_usage(SHM).used
        self.memory = self.shm = 0

    def look(self, processes: Sequence[subprocess.Popen[Any]]) -> None:
        total = 0
        for process in processes:
            with contextlib.suppress(psutil.Error):
                first = psutil.Process(process.pid)
                for each in (first, *first.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        total += each.memory_full_info().pss
        self.memory = max(self.memory, total)
        self.shm = max(self.shm, shutil.disk_usage(SHM).used - self.shm_before)


def read_by(tree: Path, given: Mapping[str, Any], ranks: int, folder: Path) -> dict[str, float]:
    """Let ranks read the stage with the code of a checkout; return the greatest of each figure. Raises Failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes: list[subprocess.Popen[Any]] = []
    watch, until = Watch(), time.monotonic() + LIMIT_SEC
    try:
        processes += [_begin(tree, given, rank, ranks, port, folder) for rank in range(ranks)]
        while None in (codes := [each.poll() for each in processes]) and not any(codes) and time.monotonic() < until:
            watch.look(processes)
            time.sleep(LOOK_SEC)
    finally:
        for process in processes:
            _end(process)
    if codes != [0] * ranks:
        number = next((number for number, code in enumerate(codes) if code), 0)  # the others wait for it
        how = f"ended with {codes[number]}" if any(codes) else f"was not over after {LIMIT_SEC:.0f} s"
        said = (folder / f"said-{number}").read_text(errors="replace")[-2000:].strip()
        raise Failed(f"scale: no record was written. {given['part']} {how}. It printed: {said}")
    found = [json.loads((folder / f"out-{rank}.json").read_text()) for rank in range(ranks)]
    greatest = {key: max(of_rank[key] for of_rank in found) for key in found[0]}
    return {**greatest, "memory_mib": watch.memory / 2**20, "shm_mib": watch.shm / 2**20}


def _begin(
    tree: Path, given: Mapping[str, Any], rank: int, ranks: int, port: int, folder: Path
) -> subprocess.Popen[Any]:
    """Start a rank's process, in a group of its own."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "NODE_RANK": 0}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": tree, "CUDA_VISIBLE_DEVICES": ""}
    variables = {name: str(value) for name, value in {**numbers, **place, "OMP_NUM_THREADS": 1}.items()}
    own = json.dumps({**given, "cache": str(folder / "cache"), "out": str(folder / "out")})
    # -P: the folder of this file has modules of the same names as the root's.
    command = [sys.executable, "-P", str(READER), own]
    with open(folder / f"said-{rank}", "w") as said:
        both: dict[str, Any] = dict(stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        return subprocess.Popen(command, cwd=tree, env={**os.environ, **variables}, **both)


def _end(process: subprocess.Popen[Any]) -> None:
    """Leave nothing of a process behind."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)


# --- the record ---


def measure(config: ScaleConfig, num_samples: int, work: Path) -> dict[str, Any]:
    """Measure a stage of one size; return its figures."""
    begun = time.monotonic()
    sizes = make_stage(work, num_samples // config.samples_a_shard, config.samples_a_shard)
    made_sec, numbers = time.monotonic() - begun, itertools.count()
    of_fetch = {"cached_shards": config.cached_shards, "fetches": config.fetches}
    given = {**sizes, **of_fetch, "shards_read": config.shards_read, "stage": str(work / "stage")}
    found: dict[str, list[dict[str, float]]] = {}

    def turn(name: str, tree: Path, part: str) -> float:
        is_several = part == "ranks"
        folder = work / f"turn-{next(numbers)}"
        folder.mkdir()
        asked = {**given, "part": part, "workers": config.workers if is_several else 0}
        found.setdefault(name, []).append(read_by(tree, asked, config.ranks if is_several else 1, folder))
        shutil.rmtree(folder)
        return 0.0

    trees = {"": ROOT} | ({} if config.other is None else {"other_": Path(config.other).resolve()})
    turns: dict[str, Callable[[], float]] = {
        f"{prefix}{part}": functools.partial(turn, f"{prefix}{part}", tree, part)
        for part in _parts(config)
        for prefix, tree in trees.items()
    }
    take_turns(turns, config.rounds, warm_up=False)
    figures = Figures()
    for name, rounds in found.items():
        for key in rounds[0]:
            figures.add(f"{name}_{key}", [each[key] for each in rounds])
    return {
        "samples": num_samples,
        **sizes,
        "made_sec": round(made_sec, 1),
        **figures.flat,
        "by_round": figures.by_round,
    }


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(ScaleConfig, argv, check)
    if config is None:
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an interrupt: processes and folders go first
    begin, sizes = {**head(SCHEMA), "measured": "scale"}, []
    for num_samples in sorted(set(config.samples)):
        with tempfile.TemporaryDirectory(dir=config.work, prefix="scale-") as work:
            sizes.append(measure(config, num_samples, Path(work)))
    after = {"load_average_after": round(os.getloadavg()[0], 2)}
    record = {**begin, "config": as_written(config), **after, "sizes": sizes}
    write_record(config.results, record)
    print(text_of(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
