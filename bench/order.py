"""What the order of an epoch costs, and how well it shuffles: ours beside streaming's own algorithms (bench/contest.py).

    python -m bench.order                                            # -> reports/results/order.json
    python -m bench.order samples=30000000 algorithms=py1e,naive results=/tmp/order.json

    ours_BLOCK        streaming's py1e as a run makes it (stages/shuffling.py), with blocks of so many samples
    part              the same in an epoch that has half of the samples (choose of a stream)
    streaming_NAME    streaming's own algorithm of that name, as StreamingDataset makes and shares it, blocks of 2**18
    streaming_part    streaming's py1e in an epoch of half of the samples; where py1e is among the algorithms

Each turn is a process of its own, one node of one worker, shards of 1,000 samples. Its seconds are processor time (`cpu_sec`)
and wall time (`sec`). `gib` is its greatest memory above what it began with, and what it leaves in /dev/shm. The shuffling:

    shards_at_once    the most shards at any time that were begun and are not finished: what a cache has to hold
    shard_spread      from a shard's first sample to its last, in samples; the mean of all shards
    shards_a_batch    different shards in 2,048 samples that follow one another; the mean of 100 places

Exit code: 0, 2 when the command cannot be read.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from streaming import StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.shuffle import algos
from streaming.base.world import World

from bench.command import head, read_keys, write_record
from bench.contest import Figures, rounded, take_turns
from cli.command import command
from cli.command_line import Problem
from cli.limits import limited
from cli.memory import host_bytes
from config import as_written
from data import MOST_PICKS
from stages.shared_memory import SEGMENTS
from stages.shuffling import Array, Epoch, order_of, share

SCHEMA = 1
SEED, BATCH = 17, 2048
SHARD_SAMPLES = 1000
BLOCK = 1 << 18  # of data.ORDER
PART = 2  # the stage has so many times the samples of an epoch, where that has a part of it
STREAMING_BYTES, OURS_BYTES = 64, 40  # a sample; of ours most are to judge it
TURN_SEC = 3600.0
QUALITY = ("shards_at_once", "shard_spread", "shards_a_batch")


@dataclass(frozen=True)
class OrderBenchConfig:
    """The keys of this command."""

    samples: int = limited(10_000_000, 100_000, 10**9)
    """Samples of an epoch, in shards of 1,000."""
    algorithms: str = "py1e,py1br,py1s,py2s,naive"
    """Streaming's own algorithms, with commas between. They take most of the memory."""
    blocks: str = "65536,262144,1048576"
    """Samples of a block of ours, with commas between."""
    rounds: int = limited(5, 1)
    """Turns of each contestant."""
    results: str = "reports/results/order.json"
    """File of the record; an earlier one is replaced."""


def check(config: OrderBenchConfig) -> list[Problem]:
    """Return what is wrong with the keys, and with this machine for them."""
    found = []
    if unknown := [name for name in listed(config.algorithms) if name not in algos]:
        possible = f"Possible: {', '.join(algos)}, with commas between."
        found.append(Problem(f"algorithms: streaming has no {unknown[0]}. {possible}", ("algorithms",)))
    if wrong := [text for text in listed(config.blocks) if not (text.isdecimal() and 2000 <= int(text) <= 10**9)]:
        text = f"blocks: {wrong[0]} is not a number of samples. Possible: 2000 to 10**9, with commas between."
        found.append(Problem(text, ("blocks",)))
    per_sample, free = STREAMING_BYTES if config.algorithms else OURS_BYTES, host_bytes()[1]
    if (need := config.samples * per_sample) > free:
        given = f"{config.samples:,} take {need / 2**30:.1f} GiB, {free / 2**30:.1f} are free"
        found.append(Problem(f"samples: {given}. Give at most {free // per_sample:,}.", ("samples",)))
    return found


def listed(text: str) -> list[str]:
    """Return what stands between commas."""
    return [name for name in text.split(",") if name]


# --- the contestants ---


def sizes_of(samples: int) -> Array:
    """# samples -> (shards,) samples of each."""
    return np.full(samples // SHARD_SAMPLES, SHARD_SAMPLES)


def ours(samples: int, block: int, shared: Path) -> Array:
    """Make an order as a run does, and share it."""
    order = order_of(Epoch(sizes_of(samples), 1, 0, 1, SEED, 0, block))
    share(order, shared)
    return order


def part(samples: int, shared: Path) -> Array:
    """The same for an epoch that has a part of a stage."""
    sizes = sizes_of(samples)
    epoch = Epoch(sizes, 1, 0, 1, SEED, 0, BLOCK, [(len(sizes), samples // PART)], granularity_of(samples))
    order = order_of(epoch)
    share(order, shared)
    return order


def granularity_of(samples: int) -> int:
    """Return how many samples are picked at a time, as data.open_stages has it."""
    return 1 + samples // MOST_PICKS


def streamings(samples: int, choose: int, algorithm: str, shared: Path) -> Array:
    """Make an order as StreamingDataset does, and share it as that does."""
    stage = stage_of(samples, choose, algorithm)
    ids = generate_work("random", stage, World(1, 1, 1, 0), 0, 0)
    shared.write_bytes(ids.tobytes())
    return ids.reshape(-1)[:choose]


def stage_of(samples: int, choose: int, algorithm: str) -> Any:
    """Return what streaming's functions read of a StreamingDataset; its shards need not be there."""
    sizes = sizes_of(samples)
    stage = SimpleNamespace(
        num_streams=1,
        streams=[SimpleNamespace(choose=choose)],
        shard_offset_per_stream=np.zeros(1, np.int64),
        shards_per_stream=np.array([len(sizes)]),
        samples_per_shard=sizes,
        sample_offset_per_shard=np.cumsum(sizes) - sizes,
        sampling_method="balanced",
        sampling_granularity=granularity_of(samples),
        epoch_seed_change=True,
        epoch_size=choose,
        shuffle=True,
        shuffle_algo=algorithm,
        shuffle_block_size=BLOCK,
        shuffle_seed=SEED,
        num_canonical_nodes=1,
        initial_physical_nodes=None,
        partition_algo="relaxed",
        batch_size=64,
    )
    stage.resample_streams = partial(StreamingDataset.resample_streams, stage)
    return stage


def contestants_of(config: OrderBenchConfig) -> dict[str, Callable[[Path], Array]]:
    """Return name -> what makes and shares an order."""
    made: dict[str, Callable[[Path], Array]] = {
        f"ours_{block}": partial(ours, config.samples, int(block)) for block in listed(config.blocks)
    }
    made["part"] = partial(part, config.samples)
    names = listed(config.algorithms)
    made |= {f"streaming_{name}": partial(streamings, config.samples, config.samples, name) for name in names}
    if "py1e" in names:
        made["streaming_part"] = partial(streamings, config.samples, config.samples // PART, "py1e")
    return made


# --- a turn ---


def quality(order: Array) -> dict[str, float]:
    """Return how well an order shuffles, see the head of this file."""
    shards = order // SHARD_SAMPLES
    where = np.argsort(shards, kind="stable")  # places in the order, shard by shard
    begins = np.flatnonzero(np.diff(shards[where], prepend=-1))
    ends = np.append(begins[1:], len(order)) - 1
    first, last = np.sort(where[begins]), where[ends]
    at_once = np.arange(1, len(first) + 1) - np.searchsorted(np.sort(last), first)
    places = np.linspace(0, len(order) - BATCH, 100).astype(int)
    a_batch = [len(np.unique(shards[place : place + BATCH])) for place in places]
    values = (int(at_once.max()), float(np.mean(last - where[begins])), float(np.mean(a_batch)))
    return dict(zip(QUALITY, values, strict=True))


def turn(make: Callable[[Path], Array], is_judged: bool) -> dict[str, float]:
    """Let a process of its own make an order; return its seconds and memory, or, judged, how well it shuffles."""
    given, end = multiprocessing.get_context("fork").Pipe(duplex=False)
    with tempfile.TemporaryDirectory(dir=SEGMENTS, prefix="bench-") as folder:
        process = multiprocessing.get_context("fork").Process(target=_turn, args=(make, Path(folder), is_judged, end))
        process.start()
        end.close()
        if not given.poll(TURN_SEC):
            process.kill()
            raise TimeoutError(f"no order after {TURN_SEC:.0f} s")
        found = given.recv()
        process.join()
    return found


def _turn(make: Callable[[Path], Array], folder: Path, is_judged: bool, end: Any) -> None:
    before, begun, cpu = _peak_bytes(), time.perf_counter(), time.process_time()
    order = make(folder / "order")
    found = {"sec": time.perf_counter() - begun, "cpu_sec": time.process_time() - cpu}
    found["gib"] = (_peak_bytes() - before + (folder / "order").stat().st_size) / 2**30
    end.send(quality(order) if is_judged else found)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(config: OrderBenchConfig) -> dict[str, Any]:
    """Let the contestants take turns and return the record."""
    begins, contestants, figures = head(SCHEMA), contestants_of(config), Figures()
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}

    def one(name: str) -> float:
        seen[name].append(turn(contestants[name], False))
        return seen[name][-1]["cpu_sec"]

    turns = take_turns({name: partial(one, name) for name in contestants}, config.rounds, warm_up=False)
    for name in turns:
        for key in ("cpu_sec", "sec", "gib"):
            figures.add(f"{name}_{key}", [values[key] for values in seen[name]])
        figures.flat |= {f"{name}_{key}": rounded(value) for key, value in turn(contestants[name], True).items()}
    for key in ("cpu_sec", "gib"):
        if {f"ours_{BLOCK}", "streaming_py1e"} <= contestants.keys():
            figures.ratio(f"streaming_over_ours_{key}", f"streaming_py1e_{key}", f"ours_{BLOCK}_{key}")
        if "streaming_part" in contestants:
            figures.ratio(f"streaming_over_ours_part_{key}", f"streaming_part_{key}", f"part_{key}")
    return {**begins, "config": as_written(config), **figures.flat, "by_round": figures.by_round}


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(OrderBenchConfig, argv, check)
    if config is None:
        return 0
    record = measure(config)
    write_record(config.results, record)
    keys = ("cpu_sec", "gib", *QUALITY)
    print(f"{'':20}", *(f"{key:>15}" for key in keys))
    for name in contestants_of(config):
        print(f"{name:20}", *(f"{record[f'{name}_{key}']:>15,.6g}" for key in keys))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
