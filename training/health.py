"""What looks after a run on many ranks: who is slow, who is lost, whose weights differ.

RUN_FOLDER/RUN_NAME/stacks/rank0000N.txt    where each thread of a rank was, when a stall or a lost rank ended the run

What each rank takes for itself, before it waits for the others, names the slowest one:

    forward    from the first microbatch's forward pass to the last one's backward pass, in which gradients are averaged
    data       from the request for a batch to its arrival at this rank, before it waits for the others to have theirs

The clocks of callbacks/throughput.py are the same on all ranks up to a step's length: no rank gets on without the slowest.
On a GPU a forward pass is timed by events in the device's queue, which are read at a window's edge, when it is empty anyway.
Where weights are shared out (training/sharding.py) a forward pass waits for the others too: then only data is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from composer import Callback, Event, Logger, State

from callbacks.replicas import ReplicaCheck
from common import dist
from common.value_types import limited
from ranks import collectives
from ranks.watchdog import Watchdog, dump_stacks
from training.sharding import is_sharded, ranks_per_copy

if TYPE_CHECKING:
    from torch import Tensor

    from ema import EMA
    from model import LatentDiffusion

STACKS = "stacks"
CHECKPOINTS = {Event.BATCH_CHECKPOINT.value, Event.EPOCH_CHECKPOINT.value, Event.FIT_END.value}
PHASES = {"train": "train", "data_wait": "waiting for data", "eval": "evaluation", "other": "between batches"}
"""Clock of callbacks/throughput.py -> phase."""
Moment = float | torch.cuda.Event


@dataclass(frozen=True)
class HealthConfig:
    """Ranks that are missing, hang, are lost, or compute something else."""

    init_timeout_sec: float = limited(600.0, 1.0, 1e6)
    """How long ranks wait for one another at the start."""
    stall_sec: float | None = limited(900.0, 1.0, 1e6)
    """The run ends after so long without progress; a silent rank: 120 at most. null: no limit."""
    digest_every_batches: int | None = limited(None, 1)
    """Batches between comparisons of all ranks' weights. null: never."""


@dataclass(frozen=True)
class Health:
    """A run's watchdog, which has begun, its rank timing, and the comparison of weights, None if they are not compared."""

    watch: Watchdog
    rank_timing: RankTiming
    replicas: ReplicaCheck | None

    def watching(self, all_ready: Callable[[bool], bool]) -> Callable[[bool], bool]:
        """Return what mds.loader.Loader is given instead: it also notes that this rank is well, and has its batch."""

        def noted(is_here: bool) -> bool:
            self.watch.progress.mark_alive()
            if is_here:
                self.rank_timing.has_arrived()
            return all_ready(is_here)

        return noted

    def before_saving(self, settle: Callable[[], None]) -> Callable[[], None]:
        """Return what checkpointing.callback.Checkpointer calls before it saves: also the comparison of all weights."""

        def compared() -> None:
            settle()
            if self.replicas is not None:
                self.replicas.before_saving()

        return compared

    def callbacks(self, folder: Path, clock: Callable[[], str]) -> list[Callback]:
        """Return the callbacks, which come first of all. `folder`: of the run; `clock`: returns which one runs."""
        callbacks: list[Callback] = [Heartbeat(self.watch, folder, clock), self.rank_timing]
        return [*callbacks, *([] if self.replicas is None else [self.replicas])]


def problems(config: HealthConfig, sharding: str) -> list[tuple[str, str]]:
    """(key, message) for weights that have no copy to be compared with."""
    every = config.digest_every_batches
    if every is None or not is_sharded(sharding) or dist.get_world_size() > ranks_per_copy(sharding):
        return []
    problem = f"{every}, but sharding={sharding}: each rank has other parts of one copy of the weights"
    return [("health.digest_every_batches", f"{problem}. Leave it out, or set sharding=hybrid on several machines.")]


def build_health(
    config: HealthConfig, sharding: str, watch: Watchdog, model: LatentDiffusion, average: EMA | None
) -> Health:
    """Build what looks after a run."""

    def other_tensors() -> dict[str, Tensor]:
        tensors = {} if average is None else {f"ema.{name}": weight for name, weight in average.weights.items()}
        for name, module in model.encoders.modules.items():
            tensors |= {f"{name}.{key}": tensor for key, tensor in module.state_dict().items()}
        return tensors

    every, replicas = config.digest_every_batches, None
    if every is not None and dist.get_world_size() > 1:
        num = ranks_per_copy(sharding) if is_sharded(sharding) else 1
        replicas = ReplicaCheck(model, every, ranks_per_copy=num, extra_tensors=other_tensors)
    return Health(watch, RankTiming(has_own_forward=not is_sharded(sharding)), replicas)


# --- callbacks ---


class Heartbeat(Callback):
    """Marks every event for the watch. It comes first of all callbacks, so that what they do belongs to the event.

    Args:
        watch: begun already, since building may hang too.
        folder: of the run.
        clock: returns which of PHASES runs.
    """

    def __init__(self, watch: Watchdog, folder: Path, clock: Callable[[], str]):
        self.watch, self.folder, self.clock = watch, folder, clock
        self._event = ""

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self._event = event.value
        progress = self.watch.progress
        if event == Event.FIT_START:
            progress.phase = self._phase
            collectives.call_before_exit(self._keep_stacks)
        progress.is_warm = progress.is_warm or event == Event.BATCH_END
        progress.mark(event.value.replace("_", " "), state.timestamp.batch.value)
        super().run_event(event, state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        progress = self.watch.progress
        progress.is_warm, progress.is_over = False, True  # what is left may be long: checkpoint, sample images, loggers

    def close(self, state: State, logger: Logger) -> None:
        progress = self.watch.progress
        progress.phase, progress.event = (lambda: "end"), "closed"

    def _phase(self) -> str:
        clock = self.clock()
        return "checkpoint" if clock == "other" and self._event in CHECKPOINTS else PHASES[clock]

    def _keep_stacks(self, text: str) -> None:
        if "health.stall_sec: " in text:
            dump_stacks(self.folder / STACKS / f"rank{dist.get_global_rank():05d}.txt")


class RankTiming(Callback):
    """Sums up what this rank takes for itself in a window; `take` returns it and begins a new window.

    Args:
        has_own_forward: a forward pass needs no other rank.
    """

    def __init__(self, *, has_own_forward: bool):
        self.has_own_forward = has_own_forward
        self._data_sec = 0.0
        self._asked: float | None = None
        self._passes: list[tuple[Moment, Moment]] = []
        self._begun: Moment | None = None
        self._last: Moment | None = None

    def has_arrived(self) -> None:
        """Note that this rank has its batch; the loader calls it before it waits for the others."""
        if self._asked is not None:
            self._data_sec += time.perf_counter() - self._asked
            self._asked = None

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self._asked = time.perf_counter()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        self.has_arrived()  # of a loader that asks nobody, as for synthetic data
        self._begun = self._last = None

    def before_forward(self, state: State, logger: Logger) -> None:
        if self._begun is None and self.has_own_forward:
            self._begun = _now(state)

    def before_backward(self, state: State, logger: Logger) -> None:
        if self.has_own_forward:
            self._last = _now(state)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if self._begun is not None and self._last is not None:
            self._passes.append((self._begun, self._last))

    def take(self) -> tuple[float, float]:
        """Return seconds of forward passes and of waits for data since the last call. The device is idle."""
        forward = sum(_elapsed_sec(begun, last) for begun, last in self._passes)
        seconds = (forward, self._data_sec)
        self._passes, self._data_sec = [], 0.0
        return seconds


def _now(state: State) -> Moment:
    if state.device.name != "gpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_sec(begun: Moment, last: Moment) -> float:
    if isinstance(begun, float) or isinstance(last, float):
        assert isinstance(begun, float) and isinstance(last, float)
        return last - begun
    return begun.elapsed_time(last) / 1000.0
