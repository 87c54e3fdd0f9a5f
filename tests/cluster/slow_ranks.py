"""benchmark.py, slowed down and with the times of its parts written down; for tests on a cluster.

sbatch launch/slurm.sbatch tests/cluster/slow_ranks.py SECONDS BATCHES words of benchmark.py ...

A batch takes SECONDS more, and after BATCHES of them the first start of a job waits for its end; 0: it does not. Each start
appends to $RANK_LOGS/times.jsonl when a rank's process began, had its libraries, had checked its configuration, had met the
others, had set up, and had trained each batch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import psutil
from composer import Callback, Logger, State
from composer.utils import dist

import benchmark
from common.command import start

RESTARTS = int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def mark(at: str, unix_time: float | None = None, **more: int) -> None:
    """Append a time to the job's file."""
    line = {"at": at, "unix_time": unix_time or time.time(), "rank": dist.get_global_rank(), "start": RESTARTS, **more}
    with open(Path(os.environ["RANK_LOGS"], "times.jsonl"), "a") as file:
        file.write(json.dumps(line) + "\n")


class Slowed(Callback):
    """Marks each batch's end, and is slow."""

    def __init__(self, seconds: float, num_batches: int):
        self.seconds, self.num_batches, self.is_first = seconds, num_batches, True

    def batch_end(self, state: State, logger: Logger) -> None:
        mark("batch", batch=int(state.timestamp.batch))
        time.sleep(self.seconds)
        stays = self.num_batches and not RESTARTS and state.timestamp.batch.value >= self.num_batches
        while stays and not any(each.signal for each in state.callbacks if isinstance(each, benchmark.Checkpointer)):
            time.sleep(0.1)


if __name__ == "__main__":
    _, seconds, num_batches, *sys.argv[1:] = sys.argv
    mark("process", psutil.Process().create_time())
    mark("imported")
    find_standing, build, fit = benchmark.find_standing, benchmark.build_trainer, benchmark.fit

    def marked_standing(*given: Any) -> Any:
        """Connect to the others, and find where the run stands."""
        mark("checked")
        standing = find_standing(*given)
        mark("met")
        return standing

    def marked_fit(*given: object) -> None:
        """Train."""
        mark("set_up")
        fit(*given)

    benchmark.find_standing, benchmark.fit = marked_standing, marked_fit
    slowed = Slowed(float(seconds), int(num_batches))
    benchmark.build_trainer = lambda *given: build(*given[:-2], [*given[-2], slowed], given[-1])
    start(benchmark.main)
