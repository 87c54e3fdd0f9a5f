"""benchmark.py with a fault on one rank, for tests on several ranks.

composer -n 2 tests/faulty_ranks.py KIND RANK BATCH words of benchmark.py ...

    slow    each of its forward passes takes half a second more, from this batch on
    flip    one bit of its weights flips after this batch
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import benchmark
from common import dist
from common.command import start
from model import LatentDiffusion
from training.health import RankTiming

SLOW_SEC = 0.5


def inject_fault(kind: str, at_batch: int) -> None:
    """Make this process fail in this way."""
    forward, batches = LatentDiffusion.forward, []

    def faulty(self, batch):
        batches.append(1)
        if kind == "slow" and len(batches) >= at_batch:
            time.sleep(SLOW_SEC)
        return forward(self, batch)

    LatentDiffusion.forward = faulty
    if kind == "flip":
        ended = RankTiming.batch_end

        def flipped(self, state, logger):
            ended(self, state, logger)
            if state.timestamp.batch.value == at_batch:
                name, weight = list(state.model.named_parameters())[-1]
                weight.data.view(torch.int32).view(-1)[0] ^= 1
                print(f"flipped {name}", file=sys.stderr, flush=True)

        RankTiming.batch_end = flipped


if __name__ == "__main__":
    _, kind, rank, batch, *sys.argv[1:] = sys.argv
    if dist.get_global_rank() == int(rank):
        inject_fault(kind, int(batch))
    start(benchmark.main)
