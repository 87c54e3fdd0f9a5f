"""Optional loggers besides the run record: Weights & Biases, TensorBoard, MLflow. docs/metrics.md has what they are sent."""

from __future__ import annotations

import importlib.util
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from composer.loggers import LoggerDestination

from cli.errors import ConfigError
from cli.log import log
from training.destinations import TensorboardLogger, WandBLogger
from training.mlflow_logger import MlflowConfig, MlflowLogger

SERVER_SEC = 5.0  # time for W&B's server to answer; its own client waits 90
WandbMode = Literal["online", "offline"]


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases; used if a project or a name is given."""

    project: str | None = None
    """Project. null: W&B's own, called uncategorized."""
    name: str | None = None
    """Name of the run at W&B. null: run_name."""
    entity: str | None = None
    """Account or team. null: your default."""
    group: str | None = None
    """Group of runs at W&B. null: loggers.group."""
    tags: list[str] | None = None
    """Tags."""
    mode: WandbMode = "online"
    """offline: write to wandb/ in the run's folder; needs no account. Also used without a login, or if no server answers."""


@dataclass(frozen=True)
class TensorboardConfig:
    """TensorBoard; used if this section is given."""

    log_dir: str | None = None
    """Folder of the logs. null: tensorboard/ in the run's folder."""


@dataclass(frozen=True)
class LoggersConfig:
    """Loggers besides the run record. None is on by default."""

    progress_bar: bool = True
    """Show Composer's progress bar."""
    debug: bool = False
    """Show the traceback of errors that are otherwise shown as a message only."""
    group: str | None = None
    """Group of runs at W&B and MLflow, as those of several seeds. bench.ladder and sweep.py give their own name."""
    wandb: WandbConfig | None = None
    tensorboard: TensorboardConfig | None = None
    mlflow: MlflowConfig | None = None

    def problems(self) -> list[tuple[str, str]]:
        """(key, message) for every invalid section."""
        found = []
        if self.wandb is not None and self.wandb.project is self.wandb.name is None:
            found.append(("loggers.wandb.project", "not given. Name a project or a run, or leave out loggers.wandb."))
        for section, wanted in (("wandb", self.wandb), ("tensorboard", self.tensorboard)):
            if wanted is not None and importlib.util.find_spec(section) is None:
                found.append((f"loggers.{section}", f"the package {section} is not installed. Leave the section out."))
        if self.mlflow is not None and importlib.util.find_spec("mlflow") is None:
            todo = "Run: pip install --no-deps -r requirements/loggers.lock. Or leave the section out"
            found.append(("loggers.mlflow", f"the package mlflow is not installed. {todo}."))
        if self.mlflow is not None and (text := self.mlflow.problem()):
            found.append(("loggers.mlflow", text))
        if found or self.wandb is None:
            return found
        try:
            _wandb_login()  # wandb checks its settings even when offline
        except ConfigError as error:
            found.append(("loggers.wandb", str(error).removeprefix("loggers.wandb: ")))
        return found


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
        urlsplit(server).port  # noqa: B018  # raises ValueError where it is none
        # wandb would write the credentials of an address into its log.
        is_valid = not re.search(r"[@\s?#]", server) and not re.search("[^!-~]", key or "")
    except (wandb.errors.UsageError, ValueError):
        is_valid = False
    if not is_valid:
        given = "W&B's settings are not valid (not shown, there may be a key in them)"
        ways = "Set WANDB_BASE_URL to https://HOST and WANDB_API_KEY to a key, or neither, and run `wandb login`"
        raise ConfigError([f"loggers.wandb: {given}. {ways}."])
    netrc = None if key else requests.utils.get_netrc_auth(server)
    return server, key or (netrc[1] if netrc else None)


def reach(config: LoggersConfig, folder: Path) -> WandbMode:
    """Look whether what loggers write to can be had; return this start's W&B mode.

    Called on one rank only. Raises ConfigError: W&B's server rejects the login, or MLflow cannot be reached.
    """
    if config.mlflow is not None:
        config.mlflow.check(folder)
    return wandb_mode(config, folder)


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
        ways: dict[str, Any] = {"timeout": SERVER_SEC, "auth": ("api", key)}
        ways["allow_redirects"] = False  # requests would send the password of ~/.netrc for the host that one names
        try:
            answers.append(requests.post(f"{server}/graphql", json=query, **ways).status_code)
        except requests.RequestException as error:
            answers.append(f"cannot be reached ({type(error).__name__})")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SERVER_SEC)
    answer = answers[0] if answers else f"does not answer within {SERVER_SEC:g} s"
    if answer in (401, 403):
        ways = "Run `wandb login --relogin`, correct WANDB_API_KEY, or say loggers.wandb.mode=offline"
        raise ConfigError([f"loggers.wandb: {server} does not take this machine's login. {ways}."])
    if isinstance(answer, int):
        return f"answers with {answer}" if answer >= 500 else None
    return answer


def build_loggers(
    config: LoggersConfig, run_name: str, run_id: str, folder: Path, mode: WandbMode
) -> list[LoggerDestination]:
    """Build the configured loggers. A resumed run goes on at W&B and MLflow by its `run_id`. `mode`: see `reach`."""
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
    if config.mlflow is not None:
        loggers.append(MlflowLogger(config.mlflow, folder, run_name=run_name, run_id=run_id, group=config.group))
    return loggers
