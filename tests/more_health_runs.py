"""Further runs on two ranks with a fault, too many for CI: `make test-health`; tests/test_health.py has one of each kind."""

from __future__ import annotations

import signal

import pytest
from conftest import run
from test_health import END, PROGRAM, SICK
from two_machines import machines, said_by, until_trained, words_of

pytestmark = [pytest.mark.timeout(600, func_only=True)]


def test_a_stopped_rank_0_ends_the_others_though_the_store_is_its_own(tmp_path):
    words = words_of(tmp_path, "a", "health.stall_sec=6")
    with machines([PROGRAM, *words], [PROGRAM, *words]) as ranks:
        until_trained(tmp_path / "a", 3, *ranks)
        ranks[0].send_signal(signal.SIGSTOP)
        [output] = said_by(ranks[1])
    assert ranks[1].returncode == 1 and "Traceback" not in output, output
    assert "health.stall_sec: rank 0 (" in output and ") does not answer for " in output
    assert output.endswith(f"Rank 0 is stopped, dead or cut off. {END}")


def test_a_rank_that_hangs_is_named_with_its_place_and_leaves_its_stack(tmp_path):
    words = words_of(tmp_path, "a", "health.stall_sec=6")
    with machines([SICK, "hang", "1", "5", *words], [SICK, "hang", "1", "5", *words]) as ranks:
        for rank, output in zip(ranks, said_by(*ranks), strict=True):
            assert rank.returncode == 1 and "Traceback" not in output, output
            assert ") is behind, at batch 4, train (before forward) for " in output and output.endswith(END)
    assert "faulty_ranks.py" in (tmp_path / "a" / "stacks" / "rank00001.txt").read_text()
    assert "faulty_ranks.py" in (tmp_path / "a" / "stacks" / "rank00000.txt").read_text()  # its program's own frame


def test_waiting_for_data_evaluation_and_checkpoints_are_no_stall(miniature, tmp_path):
    """An evaluation of many steps between two batches, and a first step, each longer than the limit."""
    words = miniature.words(tmp_path, "a", "global_batch_size=32", "max_duration=4ba", "eval.every_images=64")
    words += ["save.every_images=64", "eval.num_prompts=32", "eval.steps=200", "health.stall_sec=2", "target.fid=1"]
    done = run("composer", "-n", "2", PROGRAM, *words)
    assert done.returncode == 0, done.stdout + done.stderr


def test_machines_with_other_data_are_refused(miniature, tmp_path):
    words = miniature.small(tmp_path, "a")
    with machines([SICK, "data", "1", "0", *words], [SICK, "data", "1", "0", *words]) as ranks:
        for rank, output in zip(ranks, said_by(*ranks), strict=True):
            assert rank.returncode == 2 and "Traceback" not in output, output
            assert "data.remote: an index.json of sha256 " in output and " on rank 1 (" in output, output
    assert not (tmp_path / "a").exists()
