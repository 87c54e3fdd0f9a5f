"""Weights & Biases with its client of today: a run and its resume, and what was logged offline and sent to it later."""

from __future__ import annotations

import json
import sys

import pytest
from conftest import TINY_RUN, run
from wandb_server import Run, WandbServer

pytestmark = pytest.mark.slow


def begin_and_resume(folder, *words: str, **variables: str) -> str:
    """Train four batches, and in a second start four more; return the run's id, which both have recorded."""
    words = (*TINY_RUN, "--use_synth_data", f"run_folder={folder}", "run_name=logged", "save.every_images=8", *words)
    for end in ("4ba", "8ba"):
        done = run(
            sys.executable, "benchmark.py", *words, "loggers.wandb.project=easel", f"max_duration={end}", **variables
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("this machine has no login there" in done.stderr) == (variables["WANDB_API_KEY"] == "")
    starts = [json.loads(line) for line in (folder / "logged" / "starts.jsonl").read_text().splitlines()]
    [run_id] = {start["run_id"] for start in starts}
    assert len(starts) == 2
    return run_id


def check_rows(sent: Run, folder) -> None:
    """Each batch of both starts is there once and in order, and each window with the loss that metrics.jsonl has."""
    batches = [row["progress/batch"] for row in sent.history if "train/batch_loss" in row]
    assert batches == list(range(8))
    steps = [row["_step"] for row in sent.history]
    assert steps == sorted(steps)
    recorded = [json.loads(line) for line in (folder / "logged" / "metrics.jsonl").read_text().splitlines()]
    windows = [row["train/loss"] for row in sent.history if "train/loss" in row]
    assert recorded and windows == pytest.approx([line["loss"] for line in recorded], rel=1e-6)


def test_a_resumed_run_keeps_its_id_at_the_server(tmp_path):
    with WandbServer() as server:
        at = {"WANDB_BASE_URL": server.address, "WANDB_API_KEY": 8 * "12345"}
        run_id = begin_and_resume(tmp_path, "--wandb_name", "my-run", "loggers.wandb.tags=[a,b]", **at)
    [(name, sent)] = server.runs.items()
    assert (name, sent.asked) == (run_id, 2)
    assert {"project": "easel", "displayName": "my-run", "tags": ["a", "b"]}.items() <= sent.about.items()
    check_rows(sent, tmp_path)
    about = json.loads(sent.files["wandb-metadata.json"])
    assert "max_duration=8ba" in about["args"] and "git" not in about


def test_without_a_login_it_is_logged_offline_and_sent_later_whole(tmp_path):
    """As in a cloud's job whose secret is missing, or is an empty one."""
    nobody = {"WANDB_API_KEY": "", "NETRC": f"{tmp_path}/none", "WANDB_CONFIG_DIR": f"{tmp_path}/none"}
    run_id = begin_and_resume(tmp_path, **nobody)
    with WandbServer() as server:
        at = {"WANDB_BASE_URL": server.address, "WANDB_API_KEY": 8 * "12345"}
        done = run("wandb", "sync", *map(str, sorted((tmp_path / "logged" / "wandb").glob("offline-run-*"))), **at)
    assert done.returncode == 0, done.stdout + done.stderr
    [(name, sent)] = server.runs.items()
    assert (name, sent.about["displayName"]) == (run_id, "logged")
    check_rows(sent, tmp_path)
