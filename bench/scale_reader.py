"""A process of bench.scale: opens a made-up stage as a run does, and says what that took. It is started by bench.scale.

So that it can read with the code of an older checkout, it leans on build_data and on StreamingDataset alone. What it is given
comes as JSON on its command line: the part, folders, numbers. What it has measured goes to the file `out`, as JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import filelock
import numpy as np
import psutil
import torch
from composer.devices import DeviceCPU
from composer.utils import dist
from streaming import StreamingDataset
from streaming.base.constant import CACHE_FILELOCK

from cli.private_api import require_private_api
from data import DataConfig, build_data
from zoo import load_family

BATCH = 64  # samples of a rank
SIZE = (8, 8)  # px: a moment of one place, so that a sample takes little room
SEED = 17
STAY_SEC = 0.5  # bench.scale looks at the memory ten times a second

require_private_api(StreamingDataset, "_get_work", why="the order's making is told from the rest of a first batch")

Found = dict[str, float]


def open_loader(given: Mapping[str, Any], **keys: Any) -> Any:
    """Open the stage, through a cache folder."""
    config = DataConfig(stage="moments", remote=given["stage"], local=given["cache"], **keys)
    return _build(config, config.read())


def _build(config: DataConfig, stages: list[Any]) -> Any:
    family, cpu = load_family("sd2", "tiny", "stock"), torch.device("cpu")
    given = dict(size=SIZE, device_batch_size=BATCH, device=cpu, seed=SEED, stages=stages)
    return build_data(config, family, **given).dataloader


# --- from nothing to the first batch ---


@contextlib.contextmanager
def timed_order(kind: type[StreamingDataset]) -> Iterator[Any]:
    """Yield the longest time that a process of this rank has waited for an epoch's order, whoever makes it: `.value`, s."""
    longest: Any = multiprocessing.Value("d", 0.0)
    plain = kind._get_work

    def timed(dataset: StreamingDataset, *given: Any) -> Any:
        begun = time.perf_counter()
        work = plain(dataset, *given)
        with longest.get_lock():
            longest.value = max(longest.value, time.perf_counter() - begun)
        return work

    with mock.patch.object(kind, "_get_work", timed):
        yield longest


def start(given: Mapping[str, Any]) -> Found:
    """Read the stage's facts, make the stream, and take the first batch: of an epoch, or of its second half."""
    config = DataConfig(stage="moments", remote=given["stage"], local=given["cache"], workers=given["workers"])
    times = [time.perf_counter()]
    stages = config.read()
    times.append(time.perf_counter())
    loader = _build(config, stages)
    times.append(time.perf_counter())
    if given["part"] == "resume":
        loader.resume(0, len(loader) // 2, BATCH * dist.get_world_size())
    with timed_order(type(loader.dataset)) as order:
        batch = next(iter(loader))
    times.append(time.perf_counter())
    assert batch["moments"].shape == (BATCH, 8, 1, 1), batch["moments"].shape
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    cpu = [each.cpu_times() for each in processes]
    dist.barrier()
    time.sleep(STAY_SEC)
    loader.close()
    read_sec, stream_sec, first_sec = (b - a for a, b in itertools.pairwise(times))
    return {
        "read_stage_sec": read_sec,
        "stream_sec": stream_sec,
        "first_batch_sec": first_sec,
        "order_sec": order.value,
        "all_sec": times[-1] - times[0],
        "cpu_sec": sum(each.user + each.system for each in cpu) - given["import_cpu_sec"],
    }


# --- fetching under a limit ---


@contextlib.contextmanager
def timed_lock() -> Iterator[list[float]]:
    """Yield a list that grows by the seconds of each time that this process has held the lock of the machine's processes."""
    kind, held_sec, since = filelock.BaseFileLock, [], [0.0]
    acquire, release = kind.acquire, kind.release

    def is_it(lock: Any) -> bool:
        return Path(lock.lock_file).name.endswith(CACHE_FILELOCK)

    def timed_acquire(lock: Any, *given: Any, **more: Any) -> Any:
        proxy = acquire(lock, *given, **more)
        if is_it(lock) and lock.lock_counter == 1:
            since[0] = time.perf_counter()
        return proxy

    def timed_release(lock: Any, *given: Any, **more: Any) -> None:
        was_held = lock.is_locked
        release(lock, *given, **more)
        if is_it(lock) and was_held and not lock.is_locked:
            held_sec.append(time.perf_counter() - since[0])

    with mock.patch.multiple(kind, acquire=timed_acquire, release=timed_release):
        yield held_sec


def fetch(given: Mapping[str, Any]) -> Found:
    """Fetch shards from all over the stage, one by one, with a cache that takes a few; those that fill it do not count."""
    limit = given["index_bytes"] + given["cached_shards"] * given["shard_bytes"]  # streaming counts the index
    loader = open_loader(given, workers=0, cache_limit=f"{limit}b")
    seconds, locked_sec = [], []
    wanted = given["cached_shards"] + given["fetches"]
    for shard_id in np.linspace(0, given["num_shards"] - 1, wanted).astype(int):
        with timed_lock() as held_sec:
            begun = time.perf_counter()
            loader.dataset.prepare_shard(int(shard_id))
            seconds.append(time.perf_counter() - begun)
        locked_sec.append(sum(held_sec))
    files = [path for path in Path(given["cache"]).rglob("*.mds") if path.is_file()]
    assert len(files) <= given["cached_shards"] + 1, f"{len(files)} shards are kept"
    loader.close()
    counted = slice(given["cached_shards"], None)
    return {
        "sec": statistics.median(seconds[counted]),
        "longest_sec": max(seconds[counted]),
        "locked_sec": statistics.median(locked_sec[counted]),
    }


# --- what a reader keeps of the shards that it has read ---


def read(given: Mapping[str, Any]) -> Found:
    """Read a sample of each of many shards, where they lie; what the first eighth of them took is no shard's."""
    config = DataConfig(stage="moments", local=given["stage"], workers=0)
    dataset = _build(config, config.read()).dataset
    shards = np.random.default_rng(SEED).permutation(given["num_shards"])[: given["shards_read"]]
    ids = [int(shard) * given["samples_a_shard"] for shard in shards]
    first = max(BATCH, len(ids) // 8)
    _read(dataset, ids[:first])
    before, begun = psutil.Process().memory_info().rss, time.perf_counter()
    _read(dataset, ids[first:])
    num = len(ids) - first
    kept = psutil.Process().memory_info().rss - before
    return {"kept_bytes_a_shard": kept / num, "ms_a_shard": 1e3 * (time.perf_counter() - begun) / num}


def _read(dataset: Any, ids: list[int]) -> None:
    for batch in _batches(ids):
        assert len(dataset.read_batch(batch)["moments"]) == len(batch)


def _batches(ids: list[int]) -> Iterator[list[int]]:
    return (ids[begin : begin + BATCH] for begin in range(0, len(ids), BATCH))


PARTS = {"start": start, "resume": start, "ranks": start, "fetch": fetch, "read": read}


def main() -> None:
    """Measure the part that is asked for."""
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.initialize_dist(DeviceCPU())
    given["import_cpu_sec"] = time.process_time()
    found = PARTS[given["part"]](given)
    found["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    Path(f"{given['out']}-{dist.get_global_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
