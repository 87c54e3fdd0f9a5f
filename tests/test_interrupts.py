"""Ctrl-C, as a terminal sends it: to a launcher, its ranks and their workers at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import run, started

from checkpointing.files import FULL, list_checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400, func_only=True)]


def interrupted(process: subprocess.Popen[str]) -> str:
    """Send SIGINT to all processes of a command, as Ctrl-C does, and return all that it printed."""
    os.killpg(process.pid, signal.SIGINT)
    printed, message = process.communicate(timeout=120)
    return printed + message


def until(process: subprocess.Popen[str], is_there) -> None:
    while not is_there():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def lines_in(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def words(miniature, tmp_path):
    """Words of a run that saves by time alone."""
    own = ["save.every_images=null", "save.snapshot_every_images=0", "measure.window_batches=1", "data.workers=1"]
    return lambda name, *more: miniature.small(tmp_path, name, *own, *more)


def test_ctrl_c_saves_the_last_batch_on_all_ranks(words, tmp_path):
    """Both end after the same batch. That such a run resumes to the bit: tests/test_stop_signals.py."""
    command = ["composer", "-n", "2", "benchmark.py", *words("a", "max_duration=5000ba")]
    with started(*command, output=subprocess.PIPE) as process:
        until(process, lambda: lines_in(tmp_path / "a" / "metrics.jsonl") > 2)
        message = interrupted(process)
    assert process.returncode == 130, message
    [path] = list_checkpoints(tmp_path / "a" / "checkpoints", FULL)
    batch = int(path.name[7:19])
    line = f"SIGINT: stopped after batch {batch}; saved {path}. The same command resumes it.\n"
    assert line in message and message.count("Traceback") == 1, message  # the launcher's
    assert message.index("SystemExit: 130") < message.index(line)
    assert (tmp_path / "a" / "page.html").is_file()


@pytest.mark.long
def test_a_second_ctrl_c_ends_every_process_at_once(words, tmp_path):
    """Rank 0 would wait for rank 1, which is stopped: the main thread of rank 0 is in C++ code, in a collective."""
    command = ["composer", "-n", "2", "benchmark.py", *words("a", "max_duration=5000ba")]
    with started(*command, output=subprocess.PIPE) as process:
        until(process, lambda: lines_in(tmp_path / "a" / "metrics.jsonl") > 2)
        launcher = psutil.Process(process.pid)
        first, second = sorted(launcher.children(), key=lambda child: (child.create_time(), child.pid))
        second.suspend()
        time.sleep(1.0)
        try:
            for _ in range(2):
                os.killpg(process.pid, signal.SIGINT)
                time.sleep(0.5)
            first.wait(timeout=60)
            process.wait(timeout=60)
        finally:
            second.kill()
    assert process.returncode == 130 and not list_checkpoints(tmp_path / "a" / "checkpoints", FULL)


PARTS = """
import sys, time
from pathlib import Path
from common.command import start
from prepare.engines import LocalEngine

def make(number):
    Path(sys.argv[1], str(number)).touch()
    time.sleep(300)

start(lambda argv: list(LocalEngine(lambda: make, 2).run([1, 2, 3])) and 0)
"""


@pytest.mark.long
def test_workers_of_a_command_end_with_it_and_print_nothing(tmp_path):
    with started(sys.executable, "-c", PARTS, str(tmp_path), output=subprocess.PIPE) as process:
        until(process, lambda: len(list(tmp_path.iterdir())) == 2)
        message = interrupted(process)
    assert (process.returncode, message) == (130, "Interrupted. The same command starts it again.\n")


@pytest.mark.long
def test_all_ranks_save_by_the_clock_of_rank_0(words, tmp_path):
    done = run("composer", "-n", "2", "benchmark.py", *words("a", "save.every_min=0.000001", "save.keep=9"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [int(path.name[7:19]) for path in list_checkpoints(tmp_path / "a" / "checkpoints", FULL)] == [4, 3, 2, 1]
