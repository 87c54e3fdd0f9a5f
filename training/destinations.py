"""Composer's loggers for W&B and TensorBoard, sent the figures of record/metric_names.py under their names there.

What each of them has besides: the configuration under flat keys, and at the end the result line.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import composer.loggers
from composer import Logger, State
from composer.loggers import LoggerDestination
from composer.utils import dist
from PIL import Image

from cli.private_api import require_private_api
from record.metric_names import as_sent

RESULT = "result/"
require_private_api(composer.loggers.TensorboardLogger, "_flush", why="loggers.tensorboard: one file a start")


class Destination(LoggerDestination):
    """A logger with the same names as the others. The first rank alone logs.

    `log_images` takes a picture, uint8 (H, W, 3), or the path of a GIF, which is a film.
    """

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log what the table of metrics has of these."""
        if sent := as_sent(metrics):
            super().log_metrics(sent, step)

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        *rest: Any,
        **more: Any,
    ) -> None:
        """Log a picture, or a film."""
        if is_first_rank() and isinstance(images, Path):
            self.log_film(images, name, step)
        elif is_first_rank():
            super().log_images(images, name, channels_last, step, *rest, **more)

    def log_film(self, path: Path, name: str, step: int | None) -> None:
        """Log a GIF. The first rank alone calls it."""

    def log_result(self, result: Mapping[str, Any]) -> None:
        """Keep the result line with the run, once it is known."""


def is_first_rank() -> bool:
    """True on the rank that logs."""
    return dist.get_global_rank() == 0


def figures_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a result line, by logged name."""
    return {f"{RESULT}{key}": value for key, value in result.items() if isinstance(value, int | float)}


def texts_of(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a result line, as whether its target was reached."""
    return {f"{RESULT}{key}": value for key, value in result.items() if isinstance(value, str)}


def flat_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Yield the values of nested sections under flat keys, `optimizer.lr`; lists and null as JSON has them."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat_keys(value, f"{prefix}{key}.")
        else:
            yield (
                f"{prefix}{key}",
                value if isinstance(value, bool | int | float | str) else json.dumps(value, default=str),
            )


class WandBLogger(Destination, composer.loggers.WandBLogger):
    """Composer's logger with today's W&B client, whose runs have `url` instead of `get_url()` since 0.19."""

    def init(self, state: State, logger: Logger) -> None:
        """Begin the run at W&B; once, before the training."""
        import wandb

        if not hasattr(wandb.Run, "get_url"):
            wandb.Run.get_url = lambda run: run.url  # type: ignore[attr-defined]
        super().init(state, logger)

    def log_film(self, path: Path, name: str, step: int | None) -> None:
        """Log a GIF."""
        import wandb

        wandb.log({name: wandb.Video(str(path))}, step=step)

    def log_result(self, result: Mapping[str, Any]) -> None:
        """Write it into the run's summary."""
        import wandb

        if wandb.run is not None:  # the first rank alone has one
            wandb.run.summary.update({**figures_of(result), **texts_of(result)})

    def alert(self, title: str, text: str) -> None:
        """Have W&B tell those who asked for it, by mail or Slack."""
        import wandb

        if wandb.run is not None:  # the first rank alone has one
            wandb.run.alert(title, text, level="WARN")


class TensorboardLogger(Destination, composer.loggers.TensorboardLogger):
    """Composer's logger with one file a start: none of other ranks, and none for each flush. It writes hyperparameters."""

    def init(self, state: State, logger: Logger) -> None:
        """Open the file."""
        if is_first_rank():
            super().init(state, logger)

    def _flush(self, logger: Logger) -> None:
        if self.writer is not None:  # Composer's closes it, to upload it, and so begins another file
            self.writer.flush()

    def close(self, state: State, logger: Logger) -> None:
        """Close the file."""
        if self.writer is not None:
            self.writer.close()
        self.writer = None

    def log_film(self, path: Path, name: str, step: int | None) -> None:
        """Log a GIF."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        assert self.writer is not None and self.writer.file_writer is not None
        # torch's add_video does the same with a GIF that it makes itself, for which it wants moviepy.
        with Image.open(path) as film:
            width, height = film.size
        shown = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=path.read_bytes())
        self.writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=shown)]), step)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Keep them for the end: Composer's own rounds 1e-5 to 0.0000."""
        self.hyperparameters.update(flat_keys(hyperparameters))

    def log_result(self, result: Mapping[str, Any]) -> None:
        """Write it with the hyperparameters, for the page HPARAMS."""
        if self.writer is None or self.writer.file_writer is None:
            return
        from torch.utils.tensorboard.summary import hparams

        figures = figures_of(result)
        with warnings.catch_warnings():  # torch's add_hparams does the same in a file of its own
            warnings.simplefilter("ignore")
            for summary in hparams({**self.hyperparameters, **texts_of(result)}, figures):
                self.writer.file_writer.add_summary(summary)
            for name, value in figures.items():
                self.writer.add_scalar(name, value)
