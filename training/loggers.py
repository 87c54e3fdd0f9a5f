"""Optional loggers besides the run record: Weights & Biases and TensorBoard. docs/metrics.md has what they are sent."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import composer.loggers
from composer import Logger, State
from composer.loggers import LoggerDestination, ProgressBarLogger
from PIL import Image

from common import dist
from common.errors import ConfigError
from common.log import log
from common.plugins import build_all
from run_folder.metric_names import as_sent

SERVER_SEC = 5.0  # time for W&B's server to answer; its own client waits 90
WandbMode = Literal["online", "offline"]


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases; used if a project or a name is given."""

    project: str | None = None
    """Project. null: uncategorized."""
    name: str | None = None
    """Name of the run. null: run_name."""
    entity: str | None = None
    """Account or team. null: your default."""
    group: str | None = None
    """Group of runs. null: loggers.group."""
    tags: list[str] | None = None
    """Tags."""
    mode: WandbMode = "online"
    """offline: write to wandb/ in the run's folder. Also used without a login or server."""


@dataclass(frozen=True)
class TensorboardConfig:
    """TensorBoard; used if this section is given."""

    log_dir: str | None = None
    """Folder. null: tensorboard/ in the run's folder."""


@dataclass(frozen=True)
class LoggersConfig:
    """Loggers besides the run record. None is on by default."""

    progress_bar: bool = True
    """Show Composer's progress bar, in a terminal. Without it a line is logged per window."""
    debug: bool = False
    """Show tracebacks."""
    group: str | None = None
    """Group of runs at W&B."""
    classes: list[Any] = field(default_factory=list)
    """Composer LoggerDestinations of your own: path/to/file.py:Class(name=value), or {class: ..., args: {...}}."""
    wandb: WandbConfig | None = None
    tensorboard: TensorboardConfig | None = None

    @property
    def shows_progress_bar(self) -> bool:
        """True if the progress bar is wanted and stderr is a terminal, which has a size: in some containers it has none."""
        if not (self.progress_bar and sys.stderr.isatty()):
            return False
        try:
            return os.get_terminal_size(sys.stderr.fileno()).lines > 0
        except OSError:
            return True

    def problems(self) -> list[tuple[str, str]]:
        """(key, message) for every invalid section."""
        messages = []
        if self.wandb is not None and self.wandb.project is self.wandb.name is None:
            messages.append(
                ("loggers.wandb.project", "not given. Name a project or a run, or leave out loggers.wandb.")
            )
        for section, wanted in (("wandb", self.wandb), ("tensorboard", self.tensorboard)):
            if wanted is not None and importlib.util.find_spec(section) is None:
                messages.append(
                    (f"loggers.{section}", f"the package {section} is not installed. Leave the section out.")
                )
        if messages or self.wandb is None:
            return messages
        try:
            _wandb_login()  # wandb checks its settings even when offline
        except ConfigError as error:
            messages.append(("loggers.wandb", str(error).removeprefix("loggers.wandb: ")))
        return messages


def _wandb_login() -> tuple[str, str | None]:
    """Return W&B's server and this user's key there, by its variables, its settings files and netrc.

    Raises ConfigError: they are not valid. They are not shown: a key may stand in the wrong variable.
    """
    import requests
    import wandb

    try:
        folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
        settings = wandb.Settings(settings_system=str(folder / "settings"))
        settings.update_from_system_settings()
        settings.update_from_env_vars(dict(os.environ))
        server, key = settings.base_url.rstrip("/"), settings.api_key
        urlsplit(server).port  # noqa: B018  # raises ValueError if it is not a port
        # wandb would write the credentials of an address into its log.
        is_valid = not re.search(r"[@\s?#]", server) and not re.search("[^!-~]", key or "")
    except (wandb.errors.UsageError, ValueError):
        is_valid = False
    if not is_valid:
        problem = "W&B's settings are not valid (not shown, there may be a key in them)"
        advice = "Set WANDB_BASE_URL to https://HOST and WANDB_API_KEY to a key, or neither, and run `wandb login`"
        raise ConfigError([f"loggers.wandb: {problem}. {advice}."])
    netrc = None if key else requests.utils.get_netrc_auth(server)
    return server, key or (netrc[1] if netrc else None)


def wandb_mode(config: LoggersConfig, folder: Path) -> WandbMode:
    """Return this start's W&B mode: offline, with a message, without a login or if the server does not answer within seconds.

    Called on one rank only. Raises ConfigError: the server rejects the login.
    """
    if config.wandb is None or config.wandb.mode == "offline":
        return "offline"
    server, key = _wandb_login()
    if not key and os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return "online"  # W&B's client exchanges the token for a key
    refusal = (
        _refusal(server, key) if key else "is not asked: this machine has no login there (WANDB_API_KEY is not set)"
    )
    if refusal is None:
        return "online"
    log.info(f"loggers.wandb: {server} {refusal}: logged offline. Send it with wandb sync {folder}/wandb/offline-run-*")
    return "offline"


def _refusal(server: str, key: str) -> str | None:
    """Return why W&B's server cannot be used, or None. In a thread: DNS may be slow.

    Raises ConfigError: it rejects the key.
    """
    import requests

    answers: list[int | str] = []

    def ask() -> None:
        query: dict[str, Any] = {"query": "query Viewer { viewer { id } }"}
        options: dict[str, Any] = {"timeout": SERVER_SEC, "auth": ("api", key)}
        options["allow_redirects"] = False  # requests would send the password of ~/.netrc for the host that one names
        try:
            answers.append(requests.post(f"{server}/graphql", json=query, **options).status_code)
        except requests.RequestException as error:
            answers.append(f"cannot be reached ({type(error).__name__})")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SERVER_SEC)
    answer = answers[0] if answers else f"does not answer within {SERVER_SEC:g} s"
    if answer in (401, 403):
        advice = "Run `wandb login --relogin`, correct WANDB_API_KEY, or set loggers.wandb.mode=offline"
        raise ConfigError([f"loggers.wandb: {server} rejected this machine's login. {advice}."])
    if isinstance(answer, int):
        return f"answers with {answer}" if answer >= 500 else None
    return answer


def build_loggers(
    config: LoggersConfig, run_name: str, run_id: str, folder: Path, mode: WandbMode
) -> list[LoggerDestination]:
    """Build the configured loggers. A resumed run continues at W&B by its `run_id`. `mode`: see `wandb_mode`."""
    loggers: list[LoggerDestination] = []
    if config.wandb is not None:
        section = config.wandb
        loggers.append(
            WandBLogger(
                project=section.project,
                name=section.name or run_name,
                entity=section.entity,
                group=section.group or config.group,
                tags=section.tags,
                init_kwargs={
                    "mode": mode,
                    "dir": str(folder),
                    "id": run_id,
                    "resume": "allow",
                    # It would send the git remote's address, perhaps with credentials, and uncommitted changes.
                    "settings": {"disable_git": True},
                },
            )
        )
    if config.tensorboard is not None:
        loggers.append(TensorboardLogger(log_dir=config.tensorboard.log_dir or str(folder / "tensorboard")))
    return [*loggers, *build_all("loggers.classes", config.classes, LoggerDestination)]


def log_config(logger: Logger, config: Mapping[str, Any]) -> None:
    """Give the loggers the configuration. Composer's progress bar would print it: 160 lines, which config.yaml has."""
    for destination in logger.destinations:
        if isinstance(destination, ProgressBarLogger):
            destination.hparams_already_logged_to_console = True
    logger.log_hyperparameters(dict(config))


# --- W&B and TensorBoard: they also get the configuration under flat keys, and the result line ---

RESULT = "result/"
WRITE_SEC = 10  # between two writes of TensorBoard's file


class Destination(LoggerDestination):
    """A logger with the same names as the others. The first rank alone logs.

    `log_images` takes an image, uint8 (H, W, 3). Composer's other arguments are not used.
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
        """Log an image."""
        if is_first_rank():
            self.log_image(images, name, step)

    def log_image(self, image: Any, name: str, step: int | None) -> None:
        """Log an image. The first rank alone calls it."""

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

    def log_image(self, image: Any, name: str, step: int | None) -> None:
        """Log an image."""
        composer.loggers.WandBLogger.log_images(self, image, name, channels_last=True, step=step)

    def log_video(self, path: Path, name: str, step: int | None) -> None:
        """Log a GIF."""
        import wandb

        wandb.log({name: wandb.Video(str(path))}, step=step)

    def log_result(self, result: Mapping[str, Any]) -> None:
        """Write it into the run's summary."""
        import wandb

        if wandb.run is not None:  # the first rank alone has one
            wandb.run.summary.update({**figures_of(result), **texts_of(result)})

    def alert(self, title: str, text: str) -> None:
        """Have W&B notify those who asked for it, by mail or Slack."""
        import wandb

        if wandb.run is not None:  # the first rank alone has one
            wandb.run.alert(title, text, level="WARN")


class TensorboardLogger(Destination):
    """Writes one event file a start. Composer's writes one for each rank and each flush.

    Args:
        log_dir: the file is in its folder of the run's name.
    """

    def __init__(self, log_dir: str):
        self.log_dir = log_dir
        self.writer: Any = None  # of the first rank, from `init` on
        self.hyperparameters: dict[str, Any] = {}

    def init(self, state: State, logger: Logger) -> None:
        """Open the file."""
        from torch.utils.tensorboard import SummaryWriter

        if is_first_rank():
            self.writer = SummaryWriter(Path(self.log_dir, state.run_name), flush_secs=WRITE_SEC)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log what the table of metrics has of these."""
        for name, value in as_sent(metrics).items() if self.writer is not None else ():
            self.writer.add_scalar(name, value, step)

    def log_image(self, image: Any, name: str, step: int | None) -> None:
        """Log an image."""
        self.writer.add_image(name, image, step, dataformats="HWC")

    def close(self, state: State, logger: Logger) -> None:
        """Close the file."""
        if self.writer is not None:
            self.writer.close()
        self.writer = None

    def log_video(self, path: Path, name: str, step: int | None) -> None:
        """Log a GIF."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        # torch's add_video does the same with a GIF that it makes itself, for which it wants moviepy.
        with Image.open(path) as gif:
            width, height = gif.size
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=path.read_bytes())
        self.writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Keep them for the end."""
        self.hyperparameters.update(flat_keys(hyperparameters))

    def log_result(self, result: Mapping[str, Any]) -> None:
        """Write it with the hyperparameters, for the page HPARAMS."""
        if self.writer is None:
            return
        from torch.utils.tensorboard.summary import hparams

        figures = figures_of(result)
        with warnings.catch_warnings():  # torch's add_hparams does the same in a separate file
            warnings.simplefilter("ignore")
            for summary in hparams({**self.hyperparameters, **texts_of(result)}, figures):
                self.writer.file_writer.add_summary(summary)
            for name, value in figures.items():
                self.writer.add_scalar(name, value)
