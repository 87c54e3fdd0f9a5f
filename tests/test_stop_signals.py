"""Runs on two ranks that are stopped by a signal: what they save, their messages, and the launcher's exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from conftest import run, started
from test_checkpoints import differences, newest, same_training

from checkpointing.files import FULL, list_checkpoints, read_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400, func_only=True)]

STALLED_AFTER = 3


@pytest.fixture(scope="module")
def words_of(miniature):
    # Eight batches of 32, six an epoch, each in the record; no checkpoint but that of a stop and that of the end.
    own = ["global_batch_size=32", "measure.window_batches=1", "save.every_images=320000", "data.workers=1"]
    own += ["save.snapshot_every_images=0", "max_duration=8ba"]
    return lambda folder, name, *more: miniature.small(folder, name, *own, *more)


@pytest.fixture(scope="module")
def whole(words_of, tmp_path_factory) -> Path:
    """The unbroken run on two ranks, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    words = words_of(folder, "whole", "save.every_images=32", "save.keep=99")
    done = run("composer", "-n", "2", "benchmark.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def batches_written(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def stalled_ranks(stalled: str, words: list[str]) -> list[str]:
    return ["composer", "-n", "2", "tests/stalled_ranks.py", stalled, str(STALLED_AFTER), *words]


def stopped(folder: Path, number: int, to: str, *command: str) -> tuple[int, str]:
    """Run a command, and when its data has stalled signal a rank, or every process of the job; return how it ended.

    Returns:
        the launcher's exit code and all that was printed.
    """
    with started(*command, output=subprocess.PIPE) as process:
        while batches_written(folder) < STALLED_AFTER:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        time.sleep(2.0)
        launcher = psutil.Process(process.pid)
        begun = sorted(launcher.children(), key=lambda child: (child.create_time(), child.pid))
        ranks = {str(rank): child for rank, child in enumerate(begun)}
        for child in launcher.children(recursive=True) if to == "all" else [ranks[to]]:
            child.send_signal(number)
        printed, message = process.communicate(timeout=90)
        return process.returncode, printed + message


@pytest.mark.long
@pytest.mark.parametrize(
    ("stalled", "number", "to", "more"),
    [
        ("1", signal.SIGTERM, "0", []),
        ("0", signal.SIGUSR1, "0", ["async_loss=true"]),
        ("0,1", signal.SIGTERM, "all", []),
    ],
    ids=["to the rank that has its data", "to the rank that waits", "to every process, all wait"],
)
def test_a_signal_while_ranks_wait_for_data_saves_the_last_batch_and_stops_all(
    words_of, whole, tmp_path, stalled, number, to, more
):
    """Bit for bit the unbroken run's third batch; the resumed run ends as that one does."""
    words = words_of(tmp_path, "a", *more)
    code, message = stopped(tmp_path / "a", number, to, *stalled_ranks(stalled, words))
    assert code == 128 + number, message
    [path] = list_checkpoints(tmp_path / "a" / "checkpoints", FULL)
    name = signal.Signals(number).name
    assert f"{name}: stopped after batch {STALLED_AFTER}; saved {path}. The same command resumes it.\n" in message
    assert "Traceback" not in message, message
    [there] = [p for p in list_checkpoints(whole / "whole" / "checkpoints", FULL) if p.name[:19] == path.name[:19]]
    saved, unbroken = read_checkpoint(path), read_checkpoint(there)
    assert same_training(saved, unbroken)
    assert differences(saved["progress"] | {"seconds": 0}, unbroken["progress"] | {"seconds": 0}) == []
    if to == "all":
        done = run("composer", "-n", "2", "benchmark.py", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"resumes from batch {STALLED_AFTER}, " in done.stderr
        assert same_training(newest(tmp_path, "a"), newest(whole, "whole"))
        lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
        assert [line["batch"] for line in lines] == list(range(1, 9))


@pytest.mark.parametrize(
    ("number", "every_images", "code", "text"),
    [
        pytest.param(signal.SIGTERM, 0, 143, "rank 1 has stopped: SIGTERM: stopped\n", marks=pytest.mark.long),
        (signal.SIGKILL, 320000, 1, " Another rank died without an error: the kernel kills a process when memory "),
    ],
    ids=["SIGTERM where nothing is saved", "SIGKILL"],
)
def test_one_ranks_end_is_that_of_all_with_one_message(words_of, tmp_path, number, every_images, code, text):
    words = words_of(tmp_path, "a", f"save.every_images={every_images}")
    result, message = stopped(tmp_path / "a", number, "1", *stalled_ranks("1", words))
    assert result == code and text in message and "Traceback" not in message, message
