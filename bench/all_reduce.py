"""benchmark.py with the time of each step's all-reduce, for bench.ranks: rank 0 writes it to the file named first.

    composer -n 2 -m bench.all_reduce FILE words of benchmark.py ...

DDP averages gradients in buckets, in the backward pass. A hook of its own (torch's register_comm_hook) does what DDP does
without one: it divides a bucket by the number of ranks and adds it up over them. Around it the hook takes the time:

    in_flight_ms    of a step in which a bucket was on its way, beside the backward pass or after it
    exposed_ms      from when the last bucket was ready to when all had come: nothing else is done then
"""

from __future__ import annotations

import atexit
import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed
from composer.utils import dist
from torch.nn.parallel import DistributedDataParallel

Bucket = tuple[float, float]
"""When it was ready, and when its sum was there."""


def of_step(buckets: list[Bucket]) -> dict[str, float]:
    """Return the milliseconds of one step's buckets, in the order in which they were ready."""
    in_flight, until = 0.0, 0.0
    for ready, done in sorted(buckets):
        in_flight += max(0.0, done - max(ready, until))
        until = max(until, done)
    return {"in_flight_ms": 1e3 * in_flight, "exposed_ms": 1e3 * (until - max(ready for ready, _ in buckets))}


def timed(steps: list[list[Bucket]]) -> None:
    """Give every DDP that is built from now on the hook; each step's buckets go into `steps`."""
    build = DistributedDataParallel.__init__

    def hook(state: object, bucket: Any) -> Any:
        if bucket.index() == 0:
            steps.append([])
        step, ready = steps[-1], time.perf_counter()
        tensor = bucket.buffer().div_(dist.get_world_size())

        def done(future: Any) -> Any:
            step.append((ready, time.perf_counter()))
            return future.value()[0]

        return torch.distributed.all_reduce(tensor, async_op=True).get_future().then(done)

    hook.__annotations__ = {}  # DDP compares them, and does not know them as texts

    def with_hook(self: Any, *args: Any, **more: Any) -> None:
        build(self, *args, **more)
        self.register_comm_hook(None, hook)

    DistributedDataParallel.__init__ = with_hook  # type: ignore[method-assign]


if __name__ == "__main__":
    out = Path(sys.argv.pop(1))
    found: list[list[Bucket]] = []
    timed(found)
    if dist.get_global_rank() == 0:
        atexit.register(lambda: out.write_text(json.dumps([of_step(step) for step in found if step])))
    runpy.run_module("benchmark", run_name="__main__", alter_sys=True)
