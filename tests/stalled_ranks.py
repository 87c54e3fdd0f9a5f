"""benchmark.py with data that stops arriving on some ranks, as from a store that hangs; for tests on several ranks.

composer -n 2 tests/stalled_ranks.py RANKS BATCHES words of benchmark.py ...    RANKS: 0, 1 or 0,1; one loader worker each
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import benchmark
from common import dist
from common.command import start
from mds.moments import MomentsDataset


def stall_after(num_batches: int) -> None:
    """Let a process read so many batches of moments and wait for the next one forever."""
    read_batch, read = MomentsDataset.read_batch, []

    def slow(self, sample_ids):
        read.append(sample_ids)
        while len(read) > num_batches:
            time.sleep(0.1)
        return read_batch(self, sample_ids)

    MomentsDataset.read_batch = slow


if __name__ == "__main__":
    _, ranks, num_batches, *sys.argv[1:] = sys.argv
    if str(dist.get_global_rank()) in ranks.split(","):
        stall_after(int(num_batches))
    start(benchmark.main)
