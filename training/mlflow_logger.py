"""Figures, pictures, configuration and result of a run to MLflow: its server, or a database such as a file of SQLite.

Composer 0.32.1's own logger does not do for a run that is resumed (tried with mlflow 3.17): it finds the earlier part by the
run's name among those of all folders, one key with another value loses the whole configuration of that start, since MLflow's
params are never changed, and a figure that stays the same is skipped.

What is logged is sent by a thread, so that no step waits for a server. Where the server is away the figures wait, and are
sent when it is back; what never arrives is in the run's folder anyway.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer import Logger, State

from cli.errors import ConfigError
from cli.log import log
from cli.masking import MASK, masked
from record.metric_names import as_sent
from training.destinations import Destination, figures_of, flat_keys, is_first_rank, texts_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

FLUSH_SEC = 5.0
MOST_WAITING = 1_000_000  # figures: some 100 MB
AT_ONCE = 1000  # of MLflow's log_batch
LONGEST_TEXT = 5000  # of a tag; a param may have 6000
RUN_ID = "easel_run_id"
WAIT = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}  # its own: 120 s, seven times
ADDRESS = "MLFLOW_TRACKING_URI"


@dataclass(frozen=True)
class MlflowConfig:
    """MLflow; used if this section is given. It is installed apart: requirements/loggers.lock."""

    tracking_uri: str | None = None
    """Server or database. null: the variable MLFLOW_TRACKING_URI, else mlflow/mlflow.db in the run's folder."""
    experiment: str = "easel"
    """Experiment that the run belongs to; it is made where there is none."""

    def problem(self) -> str | None:
        """Say what is wrong with the address, or None."""
        if self.tracking_uri is None or MASK not in self.tracking_uri:
            return None
        given = f"tracking_uri: {self.tracking_uri} has a password in it, which no key keeps"
        return f"{given}. Set the variable {ADDRESS} to the whole address, and leave the key out."

    def address(self, folder: Path) -> str:
        """Return where a run is logged, with its password. `folder`: of the run."""
        own = f"sqlite:///{folder.resolve()}/mlflow/mlflow.db"
        return self.tracking_uri or os.environ.get(ADDRESS) or own

    def check(self, folder: Path) -> None:
        """Ask whether a run can be logged, and make nothing. Raises ConfigError: not there, or not to be reached."""
        address = self.address(folder)
        if (file := sqlite_file(address)) is not None and not file.exists():
            return  # it is made with the run
        try:
            found = _client(address).get_experiment_by_name(self.experiment)
        except Exception as error:
            ways = f"Start it, mend the address, or leave it out (and {ADDRESS}) to write into the run's folder"
            raise ConfigError([f"loggers.mlflow: {masked(address)} cannot be used: {_why(error)}. {ways}."]) from error
        if found is not None and found.lifecycle_stage != "active":
            raise ConfigError([f"loggers.mlflow.experiment: {self.experiment} was deleted there. Give another name."])


def _why(error: Exception) -> str:
    """Return the first line of what MLflow, SQLAlchemy, requests or a database's driver says, without passwords."""
    return masked(str(error)).splitlines()[0][:300] if str(error) else type(error).__name__


def sqlite_file(address: str) -> Path | None:
    """Return the file of an SQLite address, else None."""
    return Path(address.removeprefix("sqlite:///")) if address.startswith("sqlite:///") else None


def _client(address: str) -> MlflowClient:
    for name, value in WAIT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)  # each table that it makes, at INFO
    return MlflowClient(address)


class MlflowLogger(Destination):
    """A run at MLflow. A resumed run goes on under the same id there, which is found by the run's own one.

    Args:
        config: where, and in which experiment.
        folder: of the run.
        run_id: of the run's record; it stands there as the tag easel_run_id.
        group: of runs; there as the tag `group`.
    """

    def __init__(self, config: MlflowConfig, folder: Path, *, run_name: str, run_id: str, group: str | None):
        self.config, self.folder = config, folder
        self.tags = {RUN_ID: run_id, **({"group": group} if group else {})}
        self.run_name = run_name
        self._address = config.address(folder)
        self._id: str | None = None  # at MLflow; None on other ranks
        self._params: dict[str, str] = {}
        self._waiting: deque[tuple[str, float, int, int]] = deque(maxlen=MOST_WAITING)
        self._sent_at = time.monotonic()
        self._step = 0
        self._is_away = self._is_whole = False

    def init(self, state: State, logger: Logger) -> None:
        """Begin the run there, or find it; once, before the training."""
        if not is_first_rank():
            return
        if (file := sqlite_file(self._address)) is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
        self._client = client = _client(self._address)
        experiment = client.get_experiment_by_name(self.config.experiment)
        # MLflow's own place for files would be ./mlruns.
        files = None if file is None else f"{file.parent.resolve()}/artifacts"
        number = experiment.experiment_id if experiment else client.create_experiment(self.config.experiment, files)
        earlier = client.search_runs([number], f"tags.{RUN_ID} = '{self.tags[RUN_ID]}'", max_results=1)
        run = earlier[0] if earlier else client.create_run(number, run_name=self.run_name, tags=self.tags)
        if earlier:
            client.update_run(run.info.run_id, status="RUNNING")
        self._params = dict(run.data.params)
        self._id = run.info.run_id
        self._pool = ThreadPoolExecutor(1, "mlflow")
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        self._monitor = SystemMetricsMonitor(self._id, resume_logging=bool(earlier), tracking_uri=self._address)
        self._monitor.start()

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log figures, a few seconds later."""
        if self._id is None:
            return
        now = int(1000 * time.time())
        self._step = step or 0
        self._waiting.extend((name, float(value), now, self._step) for name, value in as_sent(metrics).items())
        if time.monotonic() - self._sent_at > FLUSH_SEC:
            self._sent_at = time.monotonic()
            self._pool.submit(self._try, "figures", self._flush)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Log the configuration. MLflow never changes a param: another value of a later start is the tag `later.KEY`."""
        if self._id is None:
            return
        from mlflow.entities import Param, RunTag

        given = {key: str(value)[:LONGEST_TEXT] for key, value in flat_keys(hyperparameters)}
        new = {key: value for key, value in given.items() if key not in self._params}
        tags = [RunTag(f"later.{key}", value) for key, value in given.items() if value != self._params.get(key, value)]
        params = [Param(key, value) for key, value in new.items()]
        self._params |= new
        for start in range(0, max(len(params), len(tags)), 100):  # MLflow's most at once
            some = {"params": params[start : start + 100], "tags": tags[start : start + 100]}
            send = functools.partial(self._client.log_batch, self._id, **some)
            self._pool.submit(self._try, "the configuration", send)

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        *_: Any,
        **__: Any,
    ) -> None:
        """Log one picture, uint8 (H, W, 3), or a film's file."""
        if self._id is None:
            return
        send = functools.partial(self._client.log_image, self._id, images, key=name, step=step or 0)
        if isinstance(images, Path):
            send = functools.partial(self._client.log_artifact, self._id, str(images), f"films/{name}")
        self._pool.submit(self._try, name, send)

    def log_result(self, result: Mapping[str, Any]) -> None:
        """Log its figures as metrics, its texts as tags."""
        if self._id is None:
            return
        now = int(1000 * time.time())
        self._waiting.extend((name, float(value), now, self._step) for name, value in figures_of(result).items())
        for key, text in texts_of(result).items():
            self._pool.submit(self._try, key, functools.partial(self._client.set_tag, self._id, key, text))
        self._is_whole = True

    def post_close(self) -> None:
        """Send what is left. A run that did not come to its end is KILLED there, until it goes on."""
        if self._id is None:
            return
        self._pool.shutdown()
        self._try("the machine's figures", self._monitor.finish)
        self._try("figures", self._flush)
        status = "FINISHED" if self._is_whole else "KILLED"
        self._try("its end", lambda: self._client.set_terminated(self._id, status))
        self._id = None

    def _flush(self) -> None:
        from mlflow.entities import Metric

        while some := list(self._waiting)[:AT_ONCE]:
            self._client.log_batch(self._id, metrics=[Metric(*each) for each in some])
            for _ in some:
                self._waiting.popleft()

    def _try(self, what: str, work: Callable[[], Any]) -> None:
        """Do something, and say so once where MLflow is away: no run ends because of it."""
        try:
            work()
            self._is_away = False
        except Exception as error:
            if not self._is_away:
                where = f"loggers.mlflow: {what} not sent to {masked(self._address)}"
                log.warning(f"{where}: {_why(error)}. The run's folder has them.")
            self._is_away = True
