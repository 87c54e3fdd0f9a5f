"""The predecessor's second command, on a data set that plain streaming has written into an object store."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from conftest import TINY_RUN, run, started
from streaming import MDSWriter
from test_adopt import row

from prepare import adopt
from tests.store.server import Store

pytestmark = [pytest.mark.long, pytest.mark.timeout(300, func_only=True)]

NUM, BATCHES = 96, 14
LIMIT_SEC = 120.0


@pytest.fixture
def s3(tmp_path, monkeypatch):
    """The variables that lead to a real S3 server: Swift where it is installed, else moto's."""
    store = Store(tmp_path / "store")
    try:
        store.start()
        assert store.client  # makes the bucket
        for name, value in store.environment().items():
            monkeypatch.setenv(name, value)
        yield store
    finally:
        store.close()


def lines_of(folder) -> list[dict]:
    try:
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except (FileNotFoundError, ValueError):
        return []


def test_two_ranks_train_on_what_others_have_written_are_killed_and_go_on(tmp_path, monkeypatch, s3):
    """zstd, no hashes, other names of columns; no --local. The last loss is that of a run that nobody killed."""
    columns, remote = {"image": "jpeg", "text": "str", "width": "int32"}, "s3://easel/laion/mds"
    with MDSWriter(out=remote, columns=columns, compression="zstd", size_limit=1 << 14) as writer:
        for number in range(NUM):
            content = row(number)
            writer.write({"image": content["image"], "text": content["caption"], "width": 80})
    assert adopt.main([remote]) == 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ["--use_ema", "--device_train_microbatch_size", "4", "--remote", remote, *TINY_RUN, "model.weights=random"]
    words += [f"max_duration={BATCHES}ba", "save.every_images=16", "data.workers=1", f"run_folder={tmp_path}/runs"]
    killed = ("composer", "-n", "2", "benchmark.py", *words, "run_name=killed")
    with started(*killed) as process:
        deadline = time.monotonic() + LIMIT_SEC
        while not (found := lines_of(tmp_path / "runs/killed")) or found[-1]["batch"] < 4:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    [cache] = (tmp_path / "cache/easel/datasets").iterdir()
    shard = sorted(cache.glob("shard.*.mds"))[0]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])  # without hashes its size is compared
    done = run(*killed)
    assert done.returncode == 0, done.stderr
    assert "resumes from batch" in done.stderr and shard.read_bytes() == content
    whole = run("composer", "-n", "2", "benchmark.py", *words, "run_name=whole")
    assert whole.returncode == 0, whole.stderr
    last = [lines_of(tmp_path / "runs" / name)[-1] for name in ("killed", "whole")]
    assert last[0]["batch"] == BATCHES and last[0]["loss"] == last[1]["loss"]
    assert sorted(path.suffix for path in cache.iterdir()) == sorted(
        [".json", "", "", *[".mds"] * len(list(cache.glob("shard.*.mds")))]
    )
