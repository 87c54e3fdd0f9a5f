"""Runs that are killed, and lose their disk or their store: they resume from a real S3 server, bit for bit.

Swift's server where it is installed, else moto's behind a relay (tests/store/server.py).
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import psutil
import pytest
from conftest import run, started, tree
from test_checkpoint_uploads import main, numbers, stored
from test_checkpoints import same_training

from callbacks.run_record import RunRecord
from checkpointing.files import FULL, WEIGHTS, list_checkpoints, read_outline
from checkpointing.sharded import fill_outline
from run_folder.files import read_lines
from tests.store.server import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500, func_only=True)]

LIMIT_SEC = 240.0
EVERY = ["save.every_images=24", "save.snapshot_every_images=32", "ema.decay=null", "ema.half_life=40sp"]
REMOTE = "s3://easel/runs"


@pytest.fixture
def s3(tmp_path, monkeypatch):
    store = Store(tmp_path / "store")
    try:
        store.start()
        for name, value in store.environment().items():
            monkeypatch.setenv(name, value)
        yield store
    finally:
        store.close()


@pytest.fixture
def words_of(miniature):
    return lambda folder, name, *more: miniature.small(folder, name, *EVERY, *more)


def wait_for(what, process) -> None:
    deadline = time.monotonic() + LIMIT_SEC
    while not what():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


def train_lose_and_go_on(words_of, folder: Path, ranks: str, *more: str) -> None:
    """Kill a run and remove its folder; the same command has to resume from the store, as the run that nobody killed."""
    command = ["composer", "-n", ranks, "benchmark.py"]
    more = ("max_duration=36ba", "measure.window_batches=1", *more)
    done = run(*command, *words_of(folder, "whole", *more, "save.remote=null"))
    assert done.returncode == 0, done.stderr
    words = words_of(folder, "a", *more, f"save.remote={REMOTE}")
    with started(*command, *words) as process:
        wait_for(lambda: len(numbers(REMOTE, "a", FULL)) >= 2, process)
        for victim in [psutil.Process(process.pid), *psutil.Process(process.pid).children()]:
            victim.kill()
    at = numbers(REMOTE, "a", FULL)[0]
    assert 6 <= at < 36
    shutil.rmtree(folder / "a")
    done = run(*command, *words)
    assert done.returncode == 0, done.stderr
    assert f"resumes from batch {at}, {8 * at} images" in done.stderr
    last, unbroken = (list_checkpoints(folder / name / "checkpoints", FULL)[0] for name in ("a", "whole"))
    assert same_training(content_of(last), content_of(unbroken))
    assert [line["batch"] for line in read_lines(folder / "a" / "metrics.jsonl")] == list(range(1, 37))
    assert numbers(REMOTE, "a", FULL) == [36, 33] and numbers(REMOTE, "a", WEIGHTS) == [*range(288, 0, -32)]
    there = {name: size for name, size in stored(REMOTE, "a").items() if last.name in name}
    here = {path: path.stat().st_size for path in ([last] if last.is_file() else last.iterdir())}
    assert there == {path.relative_to(folder / "a").as_posix(): size for path, size in here.items()}


def content_of(path: Path) -> dict:
    content = read_outline(path)
    return fill_outline(path, content, ("model", "ema", "optimizer")) if path.is_dir() else content


@pytest.mark.long
def test_killed_and_its_folder_gone_the_same_command_goes_on_from_the_store_bit_for_bit(words_of, s3, tmp_path):
    train_lose_and_go_on(words_of, tmp_path, "1")


@pytest.fixture
def at_batch(monkeypatch):
    """Call these in the middle of a batch: number -> function."""
    before, what = RunRecord.after_train_batch, {}

    def after_train_batch(self, state, logger):
        before(self, state, logger)
        what.get(state.timestamp.batch.value, lambda: None)()

    monkeypatch.setattr(RunRecord, "after_train_batch", after_train_batch)
    return what.update


def all_is_there(folder: Path) -> bool:
    here = {name: len(content) for name, content in tree(folder).items() if name != ".lock"}
    return stored(REMOTE, "a") == here


@pytest.mark.long
def test_a_store_that_is_away_for_a_while_is_said_once_and_training_goes_on(words_of, s3, tmp_path, capsys, at_batch):
    at_batch({4: s3.stop, 12: lambda: time.sleep(4.0), 18: s3.start})
    assert main(*words_of(tmp_path, "a", "max_duration=24ba", f"save.remote={REMOTE}")) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("save.remote: ")]
    [away, back] = said
    assert away.startswith(f"save.remote: {REMOTE}/a cannot be written: ")
    assert away.endswith(" Training continues, and the upload is tried again.")
    assert back.startswith(f"save.remote: {REMOTE}/a is back after ")
    assert all_is_there(tmp_path / "a") and numbers(REMOTE, "a", FULL) == [24, 21]


@pytest.mark.long
def test_a_store_that_stays_away_ends_the_run_and_the_same_command_uploads(words_of, s3, tmp_path, capsys, at_batch):
    at_batch({4: s3.stop})
    words = words_of(tmp_path, "a", f"save.remote={REMOTE}", "save.patience_sec=3", "max_duration=10ba")
    assert main(*words) == 1
    told = capsys.readouterr()
    assert told.out == "" and "Traceback" not in told.err
    last = told.err.splitlines()[-1]
    assert last.startswith(f"save.remote: {REMOTE}/a lacks weights-im0000000000")
    assert f" of this run after 3 s; {REMOTE}/a cannot be written: " in last
    assert last.endswith(f" {tmp_path}/a is whole: the same command uploads the rest.")
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["batches"] == 10
    s3.start()
    assert main(*words) == 0
    assert "images_per_sec=" in capsys.readouterr().out
    assert all_is_there(tmp_path / "a") and numbers(REMOTE, "a", FULL) == [10, 9]
