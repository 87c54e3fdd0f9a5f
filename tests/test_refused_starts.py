"""Refused starts: their messages, exit code 2, and that they leave no files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import wandb
from conftest import ROOT, TINY_RUN

import benchmark
from common import errors
from common.errors import ConfigError
from mds.fetch import StreamFailure
from preflight import checks
from prepare import encoder
from training import loggers
from training.loggers import LoggersConfig, WandbConfig, wandb_mode
from training.trainer import build_device

pytestmark = pytest.mark.timeout(90, func_only=True)

SYNTHETIC = [*TINY_RUN, "--use_synth_data"]


def everything(folder: Path) -> dict[str, bytes | None]:
    """Files and folders below: path -> content, None for a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def refused(capsys, *words: str, code: int = 2) -> str:
    assert benchmark.main(list(words)) == code
    output = capsys.readouterr().err
    assert "Traceback" not in output
    return output


# --- no folder is left ---


@pytest.mark.parametrize(
    ("function", "error", "code"),
    [
        ("build_networks", ValueError("model.weights: they do not fit. Take others."), 2),
        ("build_batches", StreamFailure("data: s3://b/index.json is away."), 1),
        ("build_trainer", SystemExit(143), 143),
    ],
)
def test_whatever_ends_a_start_no_run_folder_stays(miniature, tmp_path, capsys, monkeypatch, function, error, code):
    """Found after the run's folder was taken. A cache that was begun by then stays: the next start continues it."""

    def fails(*arguments: object, **more: object) -> None:
        raise error

    monkeypatch.setattr(benchmark, function, fails)
    words = miniature.small(tmp_path / "runs", "a", f"data.local={tmp_path}/caches/a")
    refused(capsys, *words, code=code)
    assert {path.partition("/")[0] for path in everything(tmp_path)} <= {"caches"}


# --- loggers ---


@pytest.fixture
def wandb_at(tmp_path, monkeypatch):
    """Say where W&B's server is, and with which key."""

    def at(address: str, key: str | None) -> LoggersConfig:
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))  # none of this user's
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
        if key is not None:
            monkeypatch.setenv("WANDB_API_KEY", key)
        return LoggersConfig(wandb=WandbConfig(project="p"))

    return at


def test_a_container_without_its_gpus_is_named_in_one_line(monkeypatch, tmp_path, capsys):
    """A run for GPUs and one for a CPU, the doctor, and whatever else asks for the device."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "all")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    problem = "devices: there is no GPU here, but NVIDIA_VISIBLE_DEVICES=all asks for some. Was the container started "
    for words in (["yamls/sd2_512_synthetic.yaml"], SYNTHETIC):
        output = refused(capsys, *words, f"run_folder={tmp_path}/runs")
        assert output.startswith(problem) and output.count("\n") == 1
    assert everything(tmp_path) == {}
    assert f"devices: {next(checks.check_devices(1)).text}\n" == output
    for build in (build_device, encoder.configure_device):
        with pytest.raises(ConfigError, match=r"^devices: there is no GPU here"):
            build("fp32")


def test_without_a_login_at_wandb_the_run_logs_offline_and_reports_it(wandb_at, capsys, monkeypatch):
    """An empty key is no login. No server is asked."""
    monkeypatch.setattr(loggers, "_refusal", lambda *args: pytest.fail("asked"))
    for key in (None, ""):
        config = wandb_at("https://api.wandb.ai", key)
        assert (config.problems(), wandb_mode(config, Path("runs/a"))) == ([], "offline")
        assert "this machine has no login there (WANDB_API_KEY is not set): logged offline." in capsys.readouterr().err


def test_an_invalid_address_or_key_of_wandb_is_refused_unseen(wandb_at, tmp_path, capsys):
    not_valid = (
        "loggers.wandb: W&B's settings are not valid (not shown, there may be a key in them). Set WANDB_BASE_URL "
    )
    for address in ("nonsense", "http://h:99999", "https://x/?token=SECRET", "https://user:SECRET@host", "k" * 40):
        wandb_at(address, "k" * 40)
        [(name, text)] = LoggersConfig(wandb=WandbConfig(project="p")).problems()
        assert f"{name}: {text}".startswith(not_valid) and "CRET" not in text, address
    output = refused(capsys, *SYNTHETIC, "--wandb_project", "p", f"run_folder={tmp_path}/runs")
    assert output.startswith(not_valid) and output.count("\n") == 1 and everything(tmp_path) == {}


@pytest.mark.parametrize(("status", "mode"), [(200, "online"), (401, None), (None, "offline")])
def test_the_answer_of_wandbs_server_decides(wandb_at, capsys, monkeypatch, status, mode):
    """None: it says nothing, and is not waited for longer than SERVER_SEC."""
    monkeypatch.setattr(loggers, "SERVER_SEC", 0.3 if status is None else 10.0)

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == "/graphql" and "Authorization" in self.headers
            if status is None:
                time.sleep(1.5)
                return
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        config = wandb_at(address, "k" * 40)
        problem = pytest.raises(ConfigError, match=f"loggers.wandb: {address} rejected this machine's login. ")
        with problem if mode is None else contextlib.nullcontext():
            assert wandb_mode(config, Path("runs/a")) == mode
        server.shutdown()
    output = capsys.readouterr().err
    assert (" logged offline. Send it with wandb sync runs/a/wandb/offline-run-*\n" in output) == (mode == "offline")


# --- shared memory ---


# --- expected errors ---


class Killed(torch.utils.data.Dataset):
    """Its worker is ended from outside."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return number


GLOO = "[x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("error", "is_expected", "text"),
    [
        (ValueError("loss: nan. Lower it."), True, "loss: nan. Lower it."),
        (RuntimeError(GLOO), True, f"{GLOO} Another rank did not reach this collective: "),
        (wandb.errors.UsageError("no"), True, "UsageError: "),
        (lambda: json.loads("x"), False, "JSONDecodeError: Expecting value: "),
    ],
)
def test_an_expected_error_prints_its_message_alone_and_a_defect_its_trace(error, is_expected, text, capsys):
    with pytest.raises(Exception) as caught:
        raise error() if callable(error) else error
    errors.report_error(caught.value, debug=False)
    output = capsys.readouterr().err
    assert output.startswith(text if is_expected else "Traceback (most recent call last):\n")
    assert output.splitlines()[-1].startswith(text)
    errors.report_error(caught.value, debug=True)
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):\n")
