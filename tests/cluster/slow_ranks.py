"""benchmark.py, slowed down; for tests on a cluster.

sbatch launch/slurm.sbatch tests/cluster/slow_ranks.py SECONDS BATCHES words of benchmark.py ...

A batch takes SECONDS more, and after BATCHES of them the first start of a job waits for its end; 0: it does not. Each start
appends to $RANK_LOGS/times.jsonl when a rank has trained each batch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from composer import Callback, Logger, State

import benchmark
from common import dist
from common.command import start

RESTARTS = int(os.environ.get("SLURM_RESTART_COUNT") or 0)


class Slowed(Callback):
    """Writes each batch's end into the job's file, and is slow."""

    def __init__(self, seconds: float, num_batches: int):
        self.seconds, self.num_batches, self.is_first = seconds, num_batches, True

    def batch_end(self, state: State, logger: Logger) -> None:
        line = {"at": "batch", "rank": dist.get_global_rank(), "start": RESTARTS, "batch": int(state.timestamp.batch)}
        with open(Path(os.environ["RANK_LOGS"], "times.jsonl"), "a") as file:
            file.write(json.dumps(line) + "\n")
        time.sleep(self.seconds)
        stays = self.num_batches and not RESTARTS and state.timestamp.batch.value >= self.num_batches
        while stays and not any(each.signal for each in state.callbacks if isinstance(each, benchmark.Checkpointer)):
            time.sleep(0.1)


if __name__ == "__main__":
    _, seconds, num_batches, *sys.argv[1:] = sys.argv
    build, slowed = benchmark.build_trainer, Slowed(float(seconds), int(num_batches))
    benchmark.build_trainer = lambda *given: build(*given[:-2], [*given[-2], slowed], given[-1])
    start(benchmark.main)
