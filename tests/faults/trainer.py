"""benchmark.py that halts at a moment until it is told to go on, so that a fault can hit it there; for tests/faults.

    composer -n 2 tests/faults/trainer.py words of benchmark.py ...

FAULTS_FOLDER    each rank writes its process id there (rank-0); who halts writes its own (halted), and waits for a file `go`
FAULTS_AT        MOMENT RANK, e.g. `mid-epoch 1`: where that rank halts, when it first comes there; none does without it
FAULTS_POISON    BATCH RANK: this batch's loss is not a number on that rank

Without these it is benchmark.py. Nothing else is changed: signals, kills and full disks come from outside.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
from torch._subclasses.fake_tensor import FakeTensor

import benchmark
from callbacks.quality_target import QualityTarget
from checkpointing.files import FULL, DigestingFile, file_stem
from common import dist
from common.command import start
from evaluation import generate
from mds.moments import MomentsDataset
from model import LatentDiffusion

FOLDER = Path(os.environ["FAULTS_FOLDER"])
MID_EPOCH, SAVED = 3, 4  # batches: the one that halts, and the one whose checkpoint does


def halt() -> None:
    """Say that the moment has come, and wait. Signals are heard meanwhile, as between any two lines of Python."""
    written = FOLDER / f".{os.getpid()}"
    written.write_text(str(os.getpid()))
    written.rename(FOLDER / "halted")
    while not (FOLDER / "go").exists():
        time.sleep(0.02)


def halting(
    owner: Any, name: str, *, call: int = 1, after: bool = False, when: Callable[..., bool] | None = None
) -> None:
    """Let a function halt before, or after, one of its calls.

    Args:
        owner: module or class of the function.
        call: which one, from 1.
        when: counts only calls for whose arguments this is true.
    """
    plain, seen = getattr(owner, name), []

    @functools.wraps(plain)
    def halted(*given: Any, **named: Any) -> Any:
        result = plain(*given, **named) if after else None
        if when is None or when(*given, **named):
            seen.append(1)
            if len(seen) == call:
                halt()
        return result if after else plain(*given, **named)

    setattr(owner, name, halted)


def is_half_written(file: DigestingFile, data: Any) -> bool:
    """True in the middle of the checkpoint after batch SAVED."""
    return file_stem(FULL, SAVED) in str(file.file.name) and file.num_bytes > 100_000


def is_training(model: LatentDiffusion, *_: Any) -> bool:
    """False while a start traces a step with fake tensors, to find its cost."""
    return not isinstance(next(model.denoiser.parameters()), FakeTensor)


def is_reached(target: QualityTarget, *_: Any) -> bool:
    return target.reached is not None


MOMENTS: dict[str, Callable[[], None]] = {
    "start": lambda: halting(benchmark, "find_standing", after=True),
    "first-step": lambda: halting(LatentDiffusion, "forward", when=is_training),
    "mid-epoch": lambda: halting(LatentDiffusion, "forward", call=MID_EPOCH, when=is_training),
    "evaluation": lambda: halting(generate, "generate_batch", call=2),
    "checkpoint": lambda: halting(DigestingFile, "write", when=is_half_written),
    "target": lambda: halting(QualityTarget, "batch_checkpoint", after=True, when=is_reached),
    "after": lambda: halting(benchmark, "end"),
    "data": lambda: halting(MomentsDataset, "read_batch", call=MID_EPOCH),  # in the loader's worker
}
"""Where a rank halts."""


def poison(batch: int) -> None:
    """Let the loss of a batch be no number."""
    plain, seen = LatentDiffusion.loss, []

    def poisoned(self: LatentDiffusion, outputs: Any, given: Any) -> Any:
        seen.append(is_training(self))
        is_due = seen[-1] and sum(seen) == batch
        return plain(self, outputs, given) * (float("nan") if is_due else 1.0)

    LatentDiffusion.loss = poisoned  # type: ignore[method-assign]


def is_mine(said: str) -> str | None:
    """Return what a variable says if it is about this rank."""
    what, _, rank = os.environ.get(said, "").partition(" ")
    return what if what and int(rank) == dist.get_global_rank() else None


if __name__ == "__main__":
    (FOLDER / f"rank-{dist.get_global_rank()}").write_text(str(os.getpid()))
    if moment := is_mine("FAULTS_AT"):
        MOMENTS[moment]()
    if batch := is_mine("FAULTS_POISON"):
        poison(int(batch))
    start(functools.partial(benchmark.main, began=psutil.Process().create_time()))
