"""Runs that are killed and started again end with the same weights as an uninterrupted run, bit for bit.

SIGKILL goes to the launcher and the ranks, not to the loader workers, which have to notice it themselves.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from conftest import run, started
from test_checkpoints import newest, same_training

from checkpointing.files import FULL, list_checkpoints

pytestmark = pytest.mark.slow

# Batches of 32, six an epoch; each is in the record, and each is followed by a checkpoint.
EVERY_BATCH = ["global_batch_size=32", "measure.window_batches=1", "save.every_images=32", "save.keep=99"]


@pytest.fixture(scope="module")
def words_of(miniature):
    """Words of a run of the miniature from moments, with loader workers and a cache of its own."""
    own = [*EVERY_BATCH, "data.workers=2", "save.snapshot_every_images=0"]
    return lambda folder, name, *more: miniature.small(folder, name, *own, f"data.local={folder}/cache_{name}", *more)


def composer(ranks: int, words: list[str]) -> subprocess.CompletedProcess[str]:
    done = run("composer", "-n", str(ranks), "benchmark.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def batches_written(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def kill_after(process: subprocess.Popen, folder: Path, batch: int, *, is_launcher: bool) -> None:
    """Kill a run with SIGKILL when its record has that many batches; the loader's workers have to end by themselves."""
    while batches_written(folder) < batch:
        assert process.poll() is None, f"the run ended by itself with {process.returncode}"
        time.sleep(0.01)
    own = psutil.Process(process.pid)
    ranks = own.children() if is_launcher else [own]
    workers = [worker for rank in ranks for worker in rank.children()]
    for victim in {own, *ranks}:
        victim.kill()
    process.wait(timeout=30)
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []


@pytest.mark.long
@pytest.mark.timeout(500, func_only=True)
def test_killed_in_the_first_epoch_the_second_and_at_an_epochs_end_it_goes_on_bit_for_bit(
    miniature, words_of, tmp_path
):
    """From pictures, half mirrored, encoded in the step. 14 batches of 192 samples: two epochs of 6 and part of the third."""
    more = ["data.stage=images", f"data.remote={miniature.images}", "data.flip=true", "max_duration=14ba"]
    composer(1, words_of(tmp_path, "whole", *more))
    unbroken = newest(tmp_path, "whole")
    with started("composer", "-n", "1", "benchmark.py", *words_of(tmp_path, "a", *more)) as process:
        kill_after(process, tmp_path / "a", 12, is_launcher=True)
    killed_at = int(list_checkpoints(tmp_path / "a" / "checkpoints", FULL)[0].name[7:19])
    assert killed_at >= 10  # that of batch 11 may be on its way, while batch 12 is trained
    for batch in (random.Random(3).choice([1, 2, 3, 4, 5]), 6, random.Random(4).choice([7, 8, 9, 10])):
        name = f"from{batch}"
        shutil.copytree(tmp_path / "a", tmp_path / name)
        for path in list_checkpoints(tmp_path / name / "checkpoints", FULL):
            if int(path.name[7:19]) > batch:
                path.unlink()
        done = composer(1, words_of(tmp_path, name, *more))
        assert f"resumes from batch {batch}, {32 * batch} images" in done.stderr
        assert same_training(newest(tmp_path, name), unbroken), batch
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["batch"] for line in lines] == list(range(1, 15))


@pytest.mark.timeout(500, func_only=True)
def test_two_ranks_that_are_killed_go_on_bit_for_bit_and_one_rank_alone_after_them(words_of, tmp_path):
    """On one, other random numbers from there on, since they go by rank; the same samples in every batch."""
    words = words_of(tmp_path, "part", "max_duration=6ba")
    composer(2, words_of(tmp_path, "whole", "max_duration=6ba"))
    with started("composer", "-n", "2", "benchmark.py", *words) as process:
        kill_after(process, tmp_path / "part", 3, is_launcher=True)
    composer(2, words)
    assert same_training(newest(tmp_path, "part"), newest(tmp_path, "whole"))
    done = composer(1, [*words, "max_duration=8ba"])
    assert "resumes from batch 6, 192 images" in done.stderr and newest(tmp_path, "part")["progress"]["batch"] == 8
