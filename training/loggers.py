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
from cli.limits import limited
from cli.log import log
from cli.private_api import require_private_api
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
    stalled_sec: int = limited(300, 1)
    """Seconds without a batch after which W&B sends an alert."""
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
        text = _server_problem() or (_login_problem() if self.wandb.mode == "online" else None)
        return [("loggers.wandb", text)] if text else []


def _wandb_settings() -> dict[str, str]:
    """Return what W&B's settings files say: this user's, and `wandb/settings` here, which goes before it."""
    import wandb

    why = "loggers.wandb: server and login are known before the run"
    require_private_api("wandb", "Settings.settings_system", "Settings.read_system_settings", why=why)
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    return wandb.Settings(settings_system=str(folder / "settings")).read_system_settings().all()


def _wandb_server() -> str:
    """Return the address of W&B's server as this user has given it, or W&B's own. It may be none, see `_server_problem`."""
    import wandb

    given = os.environ.get("WANDB_BASE_URL", _wandb_settings().get("base_url"))
    return (wandb.Settings().base_url if given is None else given).rstrip("/")


def _wandb_login() -> str | None:
    """Return this user's key at W&B's server, or the file of an identity token, or None if there is no login.

    Raises AuthenticationError: there is one that the client would not take.
    """
    from wandb.errors import AuthenticationError
    from wandb.sdk.lib import wbauth

    why = "loggers.wandb: server and login are known before the run"
    require_private_api("wandb.sdk.lib.wbauth", "read_netrc_auth", "check_api_key", why=why)
    key, token = (os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))
    if key and token:
        raise AuthenticationError("WANDB_API_KEY and WANDB_IDENTITY_TOKEN_FILE are both set.")
    if token and not Path(token).is_file():
        raise AuthenticationError(f"WANDB_IDENTITY_TOKEN_FILE: {token} is not a file.")
    if token:
        return token
    login = key or wbauth.read_netrc_auth(host=_wandb_server()) or _wandb_settings().get("api_key")
    if login and (text := wbauth.check_api_key(login)):
        raise AuthenticationError(text)
    if login and not login.isascii():
        raise AuthenticationError("API key is not ASCII.")
    return login


def _login_problem() -> str | None:
    """Say what is wrong with the login, or None. None at all is no problem: the run logs offline, see `wandb_mode`."""
    from wandb.errors import AuthenticationError

    try:
        _wandb_login()
        return None
    except AuthenticationError as error:
        text = f"the login for {_wandb_server()} is not one: {error}"
    return f"{text} Run `wandb login`, set WANDB_API_KEY alone, or say loggers.wandb.mode=offline."


def _server_problem() -> str | None:
    """Say what is wrong with the address of W&B's server, or None. wandb checks the address even when offline.

    The address is not shown: it may be an API key in the wrong variable.
    """
    import wandb
    from wandb.errors import UsageError

    server = _wandb_server()
    where = "WANDB_BASE_URL" if "WANDB_BASE_URL" in os.environ else "base_url in wandb's settings file"
    if "@" in server:
        why = "has credentials in it, and wandb would write them into its log"
        return f"{where} {why}. Put the key into WANDB_API_KEY, and write https://HOST."
    try:
        wandb.Settings(base_url=server)  # wandb's own check, which misses some errors
        is_address = urlsplit(server).port != 0 and not re.search(r"[\s?#]", server)
    except (UsageError, ValueError):
        is_address = False
    if is_address:
        return None
    given = f"{where} is not the address of a W&B server (not shown, it may hold a key)"
    out = "the environment" if where == "WANDB_BASE_URL" else "that file"
    return f"{given}. Write https://HOST, as https://api.wandb.ai is one, or take it out of {out}."


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
    server, login = _wandb_server(), _wandb_login()
    refusal = _refusal(server, login) if login else None
    if login and refusal is None:
        return "online"
    if refusal == "login":
        ways = "Run `wandb login --relogin`, mend WANDB_API_KEY, or say loggers.wandb.mode=offline"
        raise ConfigError([f"loggers.wandb: {server} does not take this machine's login. {ways}."])
    why = f"{server} {refusal}" if login else f"no login at {server} on this machine (WANDB_API_KEY is not set)"
    log.info(f"loggers.wandb: {why}: logged offline. To send it later: wandb sync {folder}/wandb/offline-run-*")
    return "offline"


def _refusal(server: str, login: str) -> str | None:
    """Check the login at W&B's server; return None, `login`, or why there is no answer. In a thread: DNS may be slow."""
    import requests

    outcome: list[str | None] = []

    def ask() -> None:
        try:
            query: dict[str, Any] = {"query": "query Viewer { viewer { id } }"}
            answer = requests.post(
                f"{server}/graphql",
                json=query,
                auth=("api", login),
                timeout=SERVER_SEC,
                allow_redirects=False,  # requests would send the password of ~/.netrc for the host that one names
            )
        except requests.RequestException as error:
            outcome.append(f"cannot be reached ({type(error).__name__})")
            return
        is_key = not os.environ.get("WANDB_IDENTITY_TOKEN_FILE")  # W&B's own client exchanges a token for a key
        if answer.status_code >= 500:
            outcome.append(f"answers with {answer.status_code}")
        else:
            outcome.append("login" if is_key and answer.status_code in (401, 403) else None)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SERVER_SEC)
    return outcome[0] if outcome else f"does not answer within {SERVER_SEC:g} s"


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
