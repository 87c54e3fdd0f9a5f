"""What looks after a run on many ranks: who is slow, who is lost, whose weights differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from composer import Callback
from composer.utils import dist

from callbacks.heartbeat import Heartbeat
from callbacks.own_clocks import OwnClocks
from callbacks.replicas import Replicas
from cli.limits import limited
from cli.watching import Watch
from training import sharding

if TYPE_CHECKING:
    from torch import Tensor

    from ema import EMA
    from model import LatentDiffusion
    from training.run_config import RunConfig


@dataclass(frozen=True)
class HealthConfig:
    """Ranks that do not come, hang, are lost, or compute something else."""

    meet_sec: float = limited(600.0, 1.0, 1e6)
    """Seconds that ranks wait for one another at the start."""
    stall_sec: float | None = limited(900.0, 1.0, 1e6)
    """Seconds without progress in training after which the run ends on all ranks; a silent rank has 120 at most. null: no
    limit."""
    digest_every_batches: int | None = limited(None, 1)
    """Batches between two comparisons of all ranks' weights; a difference stops the run. null: never."""


@dataclass(frozen=True)
class Health:
    """A run's watch, begun, and what is measured and compared beside it. replicas: None where no weights are compared."""

    watch: Watch
    own_clocks: OwnClocks
    replicas: Replicas | None

    def noting(self, all_ready: Callable[[bool], bool]) -> Callable[[bool], bool]:
        """Return what stages.loader.Loader is given instead: it also notes that this rank is well, and has its batch."""

        def noted(is_here: bool) -> bool:
            self.watch.progress.tick()
            if is_here:
                self.own_clocks.has_arrived()
            return all_ready(is_here)

        return noted

    def before_saving(self, settle: Callable[[], None]) -> Callable[[], None]:
        """Return what training.checkpoints.Checkpointer calls before it saves: also the comparison of all weights."""

        def compared() -> None:
            settle()
            if self.replicas is not None:
                self.replicas.before_saving()

        return compared

    def callbacks(self, folder: Path, clock: Callable[[], str]) -> list[Callback]:
        """Return the callbacks, which come first of all. `folder`: of the run; `clock`: returns which one runs."""
        found: list[Callback] = [Heartbeat(self.watch, folder, clock), self.own_clocks]
        return [*found, *([] if self.replicas is None else [self.replicas])]


def problems(config: RunConfig) -> list[tuple[str, str]]:
    """(key, message) for weights that have no copy to be compared with."""
    every = config.health.digest_every_batches
    if every is None or not sharding.is_sharded(config):
        return []
    num = dist.get_world_size() // sharding.ranks_of_a_copy(config.sharding)
    if num > 1:
        return []
    given = f"{every}, but sharding={config.sharding}: each rank has other parts of one copy of the weights"
    return [("health.digest_every_batches", f"{given}. Leave it out, or say sharding=hybrid on several machines.")]


def build_health(config: RunConfig, watch: Watch, model: LatentDiffusion, average: EMA | None) -> Health:
    """Build what looks after a run."""
    is_shared = sharding.is_sharded(config)

    def beside() -> dict[str, Tensor]:
        found = {} if average is None else {f"ema.{name}": weight for name, weight in average.weights.items()}
        for name, module in model.encoders.modules.items():
            found |= {f"{name}.{key}": tensor for key, tensor in module.state_dict().items()}
        return found

    every, replicas = config.health.digest_every_batches, None
    if every is not None and dist.get_world_size() > 1:
        num = sharding.ranks_of_a_copy(config.sharding) if is_shared else 1
        replicas = Replicas(model, every, ranks_of_a_copy=num, beside=beside)
    return Health(watch, OwnClocks(has_own_forward=not is_shared), replicas)
