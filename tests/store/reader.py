"""A rank that reads the stage and writes down what arrived.

    python -m tests.store.reader RANK TASK      TASK as JSON, see reader_outcomes.Reading

It has the variables that `composer` would give it, and waits at its end for its threads and workers, as every program does:
one that has failed and cannot end is a hang too. What it sees goes to RANK.jsonl in the reading's folder, a line an event: a
file, because a pipe that nobody empties would stop the rank.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist
from filelock import FileLock
from streaming import StreamingDataLoader, StreamingDataset

from data import DataConfig, build_data
from families import load_family
from tests.store import dataset, processes

DEVICE_BATCH = 4
SEED = 17
DIST_TIMEOUT_SEC = 300.0


def plain(task: dict[str, Any]) -> Any:
    """Return the loader that a user of streaming would write down."""
    # Elsewhere on this machine plain loaders may be about to take a number for their shared memory, and streaming's own
    # search collides: what is measured here is the store.
    one_at_a_time = FileLock(Path(tempfile.gettempdir(), "plain-streams.lock"))
    with one_at_a_time if dist.get_local_rank() == 0 else contextlib.nullcontext():
        dist.barrier()
        keys = {key: task[key] for key in ("remote", "local", "shuffle")}
        keys |= {"download_timeout": task["timeout_sec"]} if task["timeout_sec"] else {}
        dataset = StreamingDataset(batch_size=DEVICE_BATCH, shuffle_seed=SEED, num_canonical_nodes=1, **keys)
    return StreamingDataLoader(dataset, batch_size=DEVICE_BATCH, num_workers=task["workers"])


def ours(task: dict[str, Any]) -> Any:
    """Return the loader that benchmark.py makes. Raises ValueError: what it would refuse before it starts."""
    keys = ["remote", "local", "workers", "shuffle", *(["patience_sec"] if task["patience_sec"] else [])]
    config = DataConfig(stage="moments", **{key: task[key] for key in keys})
    family = load_family("sd2", "tiny", "stock")
    made_for = {"model.family": "sd2", "image_size": list(dataset.IMAGE_SIZE)}
    if problems := config.problems(DEVICE_BATCH * task["ranks"], made_for):
        raise ValueError("; ".join(f"{key}: {text}" for key, text in problems))
    cpu, size = torch.device("cpu"), dataset.IMAGE_SIZE
    return build_data(config, family, size=size, device_batch_size=DEVICE_BATCH, device=cpu, seed=SEED).dataloader


def shared_memory_of(loader: Any) -> tuple[int, int | None] | None:
    """Return the number of plain streaming's shared memory and its inode; None: Easel's has no name."""
    if not isinstance(loader.dataset, StreamingDataset):
        return None
    number = loader.dataset._shm_prefix_int
    return number, processes.inode_of_number(number)


def read(task: dict[str, Any], rank: int) -> None:
    """Read the epochs as one rank, and write down everything."""
    with open(Path(task["folder"], f"{rank}.jsonl"), "w", buffering=1) as file:

        def tell(event: str, **facts: Any) -> None:
            file.write(json.dumps({"event": event, "at": time.time(), **facts}) + "\n")

        tell("begun")
        try:
            dist.initialize_dist("cpu", timeout=DIST_TIMEOUT_SEC)
            loader = ours(task) if task["kind"] == "ours" else plain(task)
            tell("ready", batches=len(loader), shared_memory=shared_memory_of(loader))
            for batch in loader:
                numbers, wrong = dataset.unlike_truth(batch["moments"].numpy(), batch["tokens"].numpy())
                tell("batch", numbers=numbers, wrong=wrong)
                time.sleep(task["pace_sec"])
            if hasattr(loader, "close"):
                loader.close()
            tell("end")
        except BaseException as error:
            tell("error", type=type(error).__name__, text=str(error))
            raise


if __name__ == "__main__":
    read(json.loads(sys.argv[2]), int(sys.argv[1]))
