"""Where a run is logged beside its own record: Weights & Biases, TensorBoard. Chosen by keys, none forced."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from composer.loggers import LoggerDestination, TensorboardLogger, WandBLogger


@dataclass(frozen=True)
class WandbConfig:
    """The `loggers.wandb` section: Weights & Biases, only where a project is named."""

    project: str | None = None
    name: str | None = None
    """null: the run's name."""
    entity: str | None = None
    group: str | None = None
    tags: list[str] | None = None
    mode: Literal["online", "offline"] = "online"
    """offline: no account needed; the run lies under wandb/ in the run's folder."""


@dataclass(frozen=True)
class TensorboardConfig:
    """The `loggers.tensorboard` section."""

    log_dir: str | None = None
    """null: tensorboard/ in the run's folder."""


@dataclass(frozen=True)
class LoggersConfig:
    """The `loggers` section; none is forced."""

    progress_bar: bool = True
    debug: bool = False
    """Show the trace of an error whose message would stand alone."""
    wandb: WandbConfig | None = None
    tensorboard: TensorboardConfig | None = None

    def problems(self) -> list[tuple[str, str]]:
        """(key, message) for every section that cannot be."""
        found = []
        if self.wandb is not None and self.wandb.project is None:
            found.append(("loggers.wandb.project", "not given. Name a project, or leave out loggers.wandb."))
        for section, wanted in (("wandb", self.wandb), ("tensorboard", self.tensorboard)):
            if wanted is not None and importlib.util.find_spec(section) is None:
                found.append((f"loggers.{section}", f"the package {section} is not installed. Leave the section out."))
        return found


def build_loggers(config: LoggersConfig, run_name: str, run_id: str, folder: Path) -> list[LoggerDestination]:
    """Build the loggers that were asked for; a run that is resumed goes on under its `run_id` at W&B."""
    loggers: list[LoggerDestination] = []
    if config.wandb is not None:
        section = config.wandb
        loggers.append(
            WandBLogger(
                project=section.project,
                name=section.name or run_name,
                entity=section.entity,
                group=section.group,
                tags=section.tags,
                init_kwargs={"mode": section.mode, "dir": str(folder), "id": run_id, "resume": "allow"},
            )
        )
    if config.tensorboard is not None:
        loggers.append(TensorboardLogger(log_dir=config.tensorboard.log_dir or str(folder / "tensorboard")))
    return loggers
