"""Weights & Biases: a run and its resume without a login, as in a cloud's job whose secret is missing or an empty one."""

from __future__ import annotations

import json
import sys

import pytest
from conftest import TINY_RUN, run
from wandb_file import offline


@pytest.mark.long
def test_a_resumed_run_keeps_its_id_and_its_offline_files_have_each_batch_once(tmp_path):
    """With one id, `wandb sync` makes one run of both files."""
    folder, nobody = tmp_path / "logged", {"NETRC": f"{tmp_path}/none", "WANDB_CONFIG_DIR": f"{tmp_path}/none"}
    words = [*TINY_RUN, "--use_synth_data", f"run_folder={tmp_path}", "run_name=logged", "save.every_images=8"]
    for end in ("4ba", "8ba"):
        own = ["loggers.wandb.project=easel", f"max_duration={end}"]
        done = run(sys.executable, "benchmark.py", *words, *own, WANDB_API_KEY="", **nobody)
        assert done.returncode == 0 and "this machine has no login there" in done.stderr, done.stdout + done.stderr
    starts, recorded = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("starts.jsonl", "metrics.jsonl")
    )
    ids = [path.stem for path in (folder / "wandb").glob("offline-run-*/run-*.wandb")]
    assert ids == [f"run-{start['run_id']}" for start in starts] and len(ids) == 2 and len({*ids}) == 1
    sent = offline(folder).history
    assert [row["progress/batch"] for row in sent if "train/batch_loss" in row] == list(range(8))
    windows = [row["train/loss"] for row in sent if "train/loss" in row]
    assert recorded and windows == pytest.approx([line["loss"] for line in recorded], rel=1e-6)
