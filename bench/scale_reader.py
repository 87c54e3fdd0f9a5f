"""A process of bench.scale: opens a made-up stage as a run does, and measures what that takes.

Its command line is one JSON: the part, folders, numbers. What it measured goes to the file OUT-RANK.json.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from composer.devices import DeviceCPU

from bench.data import our_loader
from common import dist
from data import DataConfig

BATCH = 64  # samples of a rank
SIZE = (8, 8)  # px: a latent of one position, so that a sample takes little room
SEED = 17

Measured = dict[str, float]


def open_loader(job: Mapping[str, Any], **keys: Any) -> Any:
    """Open the dataset through a cache folder."""
    config = DataConfig(stage="moments", remote=job["stage"], local=job["cache"], **keys)
    return our_loader(config, BATCH, SIZE)


def start(job: Mapping[str, Any]) -> Measured:
    """Create the loader and take the first batch: of an epoch, or of its second half."""
    begun = time.perf_counter()
    loader = open_loader(job, workers=job["workers"])
    made = time.perf_counter()
    if job["part"] == "resume":
        loader.resume(0, len(loader) // 2, BATCH * dist.get_world_size())
    batch = next(iter(loader))
    ended = time.perf_counter()
    assert batch["moments"].shape == (BATCH, 8, 1, 1), batch["moments"].shape
    cpu = [each.cpu_times() for each in (psutil.Process(), *psutil.Process().children(recursive=True))]
    dist.barrier()
    loader.close()
    return {
        "stream_sec": made - begun,
        "first_batch_sec": ended - made,
        "all_sec": ended - begun,
        "cpu_sec": sum(each.user + each.system for each in cpu) - job["import_cpu_sec"],
    }


def fetch(job: Mapping[str, Any]) -> Measured:
    """Fetch shards one by one with a cache that takes a few of them; those that fill it do not count."""
    cached = job["cached_shards"]
    limit = job["index_bytes"] + cached * job["shard_bytes"]  # which the cache counts too
    loader, seconds = open_loader(job, workers=0, cache_limit=f"{limit}b"), []
    for shard_id in np.linspace(0, job["num_shards"] - 1, cached + job["fetches"]).astype(int):
        begun = time.perf_counter()
        loader.dataset.cache.prepare_shard(int(shard_id))
        seconds.append(time.perf_counter() - begun)
    files = [path for path in Path(job["cache"]).rglob("*.mds") if path.is_file()]
    assert len(files) <= cached, f"{len(files)} shards are kept"
    loader.close()
    return {"sec": statistics.median(seconds[cached:]), "longest_sec": max(seconds[cached:])}


def read(job: Mapping[str, Any]) -> Measured:
    """Read a sample of each of many shards from the dataset itself; what the first eighth of them took does not count."""
    dataset = our_loader(DataConfig(stage="moments", local=job["stage"], workers=0), BATCH, SIZE).dataset
    shards = np.random.default_rng(SEED).permutation(job["num_shards"])[: job["shards_read"]]
    ids, first = [int(shard) * job["samples_a_shard"] for shard in shards], max(BATCH, len(shards) // 8)
    _read(dataset, ids[:first])
    before, begun = psutil.Process().memory_info().rss, time.perf_counter()
    _read(dataset, ids[first:])
    num, num_bytes = len(ids) - first, psutil.Process().memory_info().rss - before
    return {"kept_bytes_a_shard": num_bytes / num, "ms_a_shard": 1e3 * (time.perf_counter() - begun) / num}


def _read(dataset: Any, ids: list[int]) -> None:
    for begin in range(0, len(ids), BATCH):
        batch = ids[begin : begin + BATCH]
        assert len(dataset.read_batch(batch)["moments"]) == len(batch)


PARTS = {"start": start, "resume": start, "ranks": start, "fetch": fetch, "read": read}


def main() -> None:
    """Measure the part that is asked for."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.initialize_dist(DeviceCPU())
    job["import_cpu_sec"] = time.process_time()
    measured = PARTS[job["part"]](job)
    measured["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    Path(f"{job['out']}-{dist.get_global_rank()}.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
