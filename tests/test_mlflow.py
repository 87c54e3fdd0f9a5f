"""loggers.mlflow with mlflow-skinny and SQLite, which `make test-loggers` has beside the environment."""

from __future__ import annotations

import importlib.util
import json
import socket
import sqlite3
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import run

from common.errors import ConfigError
from run_folder.metric_names import METRICS, SAMPLES, VIDEOS, row_of
from training import loggers
from training.loggers import LoggersConfig, MlflowConfig, MlflowLogger

HAS = importlib.util.find_spec("mlflow") is not None
with_mlflow = pytest.mark.skipif(not HAS, reason="mlflow: make test-loggers has it")


@pytest.fixture(autouse=True)
def own_variables(monkeypatch):
    """Not those of whoever runs the tests."""
    for name in (loggers.ADDRESS, *loggers.WAIT):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**loggers.WAIT, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}.items():
        monkeypatch.setenv(name, value)


def only_run(address: str, experiment: str = "easel"):
    from mlflow import MlflowClient

    client = MlflowClient(address)
    [found] = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, found


def history(client, found, name: str) -> list[tuple[int, float]]:
    return [(each.step, each.value) for each in client.get_metric_history(found.info.run_id, name)]


def test_without_mlflow_a_run_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    todo = "Run: pip install --no-deps -r requirements/loggers.lock. Or leave the section out."
    said = [("loggers.mlflow", f"the package mlflow is not installed. {todo}")]
    assert LoggersConfig(mlflow=MlflowConfig()).problems() == said


def test_the_key_goes_before_the_variable_and_that_before_the_runs_folder(tmp_path, monkeypatch):
    assert MlflowConfig().address(tmp_path) == f"sqlite:///{tmp_path}/mlflow/mlflow.db"
    monkeypatch.setenv(loggers.ADDRESS, "http://host")
    assert MlflowConfig().address(tmp_path) == "http://host"
    assert MlflowConfig(tracking_uri="sqlite:///x.db").address(tmp_path) == "sqlite:///x.db"
    assert not list(tmp_path.iterdir())
    text = "contains a password, which the configuration does not store. Set the variable MLFLOW_TRACKING_URI"
    address = "postgresql://me:***@host/db"
    assert MlflowConfig(tracking_uri=address).problem().startswith(f"tracking_uri: {address} {text}")


@with_mlflow
@pytest.mark.slow
@pytest.mark.timeout(240, func_only=True)
def test_a_resumed_run_keeps_its_id_on_another_number_of_ranks(miniature, tmp_path):
    """Two ranks, of which the first logs alone; then one rank, with a later end. The file is read back."""
    own = ["loggers.mlflow={}", "loggers.tensorboard={}", "loggers.group=seeds", "save.every_images=16"]
    own += ["samples.every_images=32", f"samples.prompts={miniature.prompts}", "optimizer.lr=1.25e-5"]
    done = run("composer", "-n", "2", "benchmark.py", *miniature.small(tmp_path, "one", *own))
    assert done.returncode == 0, done.stdout + done.stderr
    address = f"sqlite:///{tmp_path}/one/mlflow/mlflow.db"
    client, first = only_run(address)
    assert (first.info.status, first.info.run_name, first.data.tags["group"]) == ("FINISHED", "one", "seeds")
    assert len(list((tmp_path / "one" / "tensorboard").rglob("events*"))) <= 3  # none of the second rank's

    done = run(sys.executable, "benchmark.py", *miniature.small(tmp_path, "one", *own, "max_duration=6ba"))
    assert done.returncode == 0, done.stdout + done.stderr
    client, both = only_run(address)
    assert both.info.run_id == first.info.run_id and both.info.status == "FINISHED"
    assert both.data.params["max_duration"] == "4ba" and both.data.tags["later.max_duration"] == "6ba"
    lines = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    assert history(client, both, "train/loss") == [(line["batch"], pytest.approx(line["loss"])) for line in lines]
    assert [step for step, _ in history(client, both, "train/batch_loss")] == list(range(6))
    assert [value for _, value in history(client, both, "progress/start")] == [1, 1, 2]
    names = {name for name in both.data.metrics if not name.startswith("system/")}
    rows = {row.metric for row in METRICS}
    absent = {row for row in rows if row.startswith(("eval/", "val/", "streams/"))} | {SAMPLES, VIDEOS}
    assert {row_of(name) for name in names} == rows - absent
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert both.data.metrics["result/loss"] == summary["loss"] and both.data.metrics["result/batches"] == 6


def as_rank_zero(config: MlflowConfig, folder, run_id: str = "abcd0123") -> MlflowLogger:
    logger = MlflowLogger(config, folder, run_name="one", run_id=run_id, group=None)
    logger.init(SimpleNamespace(), None)
    return logger


@with_mlflow
@pytest.mark.timeout(120, func_only=True)
def test_an_unreachable_store_loses_no_metric_and_is_logged_once(tmp_path, capsys, monkeypatch):
    """Its table has another name for some time; then what waited is sent."""
    monkeypatch.setattr(loggers, "FLUSH_SEC", -1.0)
    logger, file = as_rank_zero(MlflowConfig(), tmp_path), tmp_path / "mlflow" / "mlflow.db"

    def rename(table: str, name: str) -> None:
        sqlite3.connect(file, isolation_level=None).execute(f"ALTER TABLE {table} RENAME TO {name}")

    rename("metrics", "gone")
    for step in range(3):
        logger.log_metrics({"loss/train/total": step / 2, "time/token": 1}, step)
    logger._pool.submit(int).result()
    said = capsys.readouterr().err
    assert said.count("loggers.mlflow: figures not sent to sqlite:///") == 1 and "The run's folder has them." in said
    rename("gone", "metrics")
    logger.log_metrics({"loss/train/total": float("nan")}, 3)
    logger.log_hyperparameters({"optimizer": {"lr": 1e-5, "betas": [0.9, 0.99]}, "long": "x" * 9000})
    logger.log_hyperparameters({"optimizer": {"lr": 2e-5}})
    logger.log_images(np.zeros((8, 8, 3), np.uint8), name=SAMPLES, channels_last=True, step=3, use_table=False)
    logger.post_close()
    client, found = only_run(logger._address)
    assert found.info.status == "KILLED"
    losses = history(client, found, "train/batch_loss")
    assert losses[:3] == [(0, 0.0), (1, 0.5), (2, 1.0)] and len(losses) == 4 and "time/token" not in found.data.metrics
    params = {"optimizer.lr": "1e-05", "optimizer.betas": "[0.9, 0.99]", "long": "x" * 5000}
    assert found.data.params == params and found.data.tags["later.optimizer.lr"] == "2e-05"
    assert len(client.list_artifacts(found.info.run_id, "images")) == 2  # whole, and smaller for its page

    again = as_rank_zero(MlflowConfig(), tmp_path)
    assert only_run(again._address)[1].info.status == "RUNNING"
    again.log_result({"images_per_sec": 2.5, "target": "missed", "mfu": None})
    again.post_close()
    _, found = only_run(again._address)
    assert (found.info.status, found.data.tags["result/target"]) == ("FINISHED", "missed")
    assert {name for name in found.data.metrics if name.startswith("result/")} == {"result/images_per_sec"}


@with_mlflow
@pytest.mark.timeout(60, func_only=True)
def test_an_unusable_server_is_refused_without_its_password(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    secret = "hunter2hunter2"
    for address in (f"http://127.0.0.1:{port}", f"postgresql+nothing://me:{secret}@h/db", f"nothing://me:{secret}@h"):
        monkeypatch.setenv(loggers.ADDRESS, address)
        with pytest.raises(ConfigError) as error:
            MlflowConfig().check(tmp_path)
        said = f"loggers.mlflow: {address.replace(secret, '***')} cannot be used: "
        assert str(error.value).startswith(said) and secret not in str(error.value)
    assert not list(tmp_path.iterdir())
