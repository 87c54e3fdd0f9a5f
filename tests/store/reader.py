"""A rank that reads the dataset and notes what arrived.

    python -m tests.store.reader RANK TASK      TASK as JSON, see reader_faults.Reading

It has the variables that `composer` would give it, and waits at its end for its threads and workers, as every program does:
one that has failed and cannot end is a hang too. What it sees goes to RANK.jsonl in the reading's folder: a file, because a
pipe that nobody empties would stop the rank.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from common import dist
from data import DataConfig, build_data
from families import load_family
from tests.store import dataset

DEVICE_BATCH = 4
SEED = 17
DIST_TIMEOUT_SEC = 300.0


def build_loader(task: dict[str, Any]) -> Any:
    """Return the loader that benchmark.py makes. Raises ValueError: what it would refuse before it starts."""
    keys = ("remote", "local", "workers", "shuffle", "patience_sec")
    config = DataConfig(stage="moments", **{key: task[key] for key in keys})
    size = dataset.IMAGE_SIZE
    if problems := config.problems(2 * DEVICE_BATCH, {"model.family": "sd2", "image_size": list(size)}):
        raise ValueError("; ".join(f"{key}: {text}" for key, text in problems))
    given = dict(size=size, device_batch_size=DEVICE_BATCH, device=torch.device("cpu"), seed=SEED)
    return build_data(config, load_family("sd2", "tiny", "stock"), **given).dataloader


def read(task: dict[str, Any], rank: int) -> None:
    """Read an epoch as one rank, and note each batch, and an error."""
    with open(Path(task["folder"], f"{rank}.jsonl"), "w", buffering=1) as file:
        try:
            dist.initialize_dist("cpu", timeout=DIST_TIMEOUT_SEC)
            loader = build_loader(task)
            for batch in loader:
                numbers, wrong = dataset.unlike_truth(batch["moments"].numpy(), batch["tokens"].numpy())
                file.write(json.dumps({"numbers": numbers, "wrong": wrong}) + "\n")
                time.sleep(task["pace_sec"])
            loader.close()
        except BaseException as error:
            file.write(json.dumps({"error": str(error)}) + "\n")
            raise


if __name__ == "__main__":
    read(json.loads(sys.argv[2]), int(sys.argv[1]))
