"""Runs on two ranks of which one is stopped, slow, wrong or given other words: what the run says, and how it ends."""

from __future__ import annotations

import json
import signal

import pytest
from test_checkpoints import newest, same_training
from two_machines import lines_of, machines, said_by, until_trained, words_of

from checkpointing.files import FULL, list_checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400, func_only=True)]

PROGRAM, SICK = "benchmark.py", "tests/faulty_ranks.py"
END = "The run ends on all ranks; the same command resumes it from its last checkpoint.\n"


def test_a_rank_that_is_stopped_ends_the_run_and_is_named(tmp_path):
    words = words_of(tmp_path, "a", "health.stall_sec=6")
    with machines([PROGRAM, *words], [PROGRAM, *words]) as ranks:
        until_trained(tmp_path / "a", 3, *ranks)
        ranks[1].send_signal(signal.SIGSTOP)
        [output] = said_by(ranks[0])
    assert ranks[0].returncode == 1 and "Traceback" not in output, output
    assert "health.stall_sec: nothing heard of rank 1 (" in output
    assert output.endswith(f"It is stopped, dead or cut off. {END}")
    assert "training/health.py" in (tmp_path / "a" / "stacks" / "rank00000.txt").read_text()


@pytest.mark.long
def test_weights_that_differ_stop_the_run_before_they_are_saved(tmp_path):
    words = words_of(tmp_path, "a", "health.digest_every_batches=3", "save.every_images=16", "save.keep=9")
    with machines([SICK, "flip", "1", "5", *words], [SICK, "flip", "1", "5", *words]) as ranks:
        for rank, output in zip(ranks, said_by(*ranks), strict=True):
            assert rank.returncode == 1 and "Traceback" not in output, output
            assert "health.digest_every_batches: after batch 6 the weights of rank 1 (" in output
            assert ", first in denoiser.conv_out.bias; equal after batch 4. The run stops before anything of" in output
    saved = [path.name[:19] for path in list_checkpoints(tmp_path / "a" / "checkpoints", FULL)]
    assert saved == ["full-ba000000000004", "full-ba000000000002"]
    assert [line["batch"] for line in lines_of(tmp_path / "a")] == [1, 2, 3, 4, 5], "no line of batch 6"


@pytest.mark.long
def test_all_that_looks_after_a_run_leaves_its_weights_as_they_are_and_names_the_slow_rank(tmp_path):
    """Bit for bit those of a run without any of it."""
    plain = words_of(tmp_path, "plain", "max_duration=8ba", "health.stall_sec=null", "save.every_images=64")
    own = ["health.digest_every_batches=2", "save.every_images=64"]
    looked_after = words_of(tmp_path, "slow", "max_duration=8ba", *own)
    for words in ([PROGRAM, *plain], [SICK, "slow", "1", "1", *looked_after]):
        with machines(words, words) as ranks:
            for rank, output in zip(ranks, said_by(*ranks), strict=True):
                assert rank.returncode == 0, output
    assert same_training(newest(tmp_path, "plain"), newest(tmp_path, "slow"))
    lines = lines_of(tmp_path / "slow")
    assert [(line["slowest_rank"], line["slowest_rank_in"]) for line in lines] == [(1, "forward")] * 8
    # By half a second in each step, which is in no other rank's own time, though all waited for it.
    assert all(line["slowest_rank_sec"] - line["median_rank_sec"] > 0.2 for line in lines)
    summary = json.loads((tmp_path / "slow" / "summary.json").read_text())
    assert (summary["slowest_rank"], summary["slowest_rank_windows"]) == (1, 6)
    assert summary["slowest_rank_over_median"] > 1


@pytest.mark.long
def test_machines_that_were_given_other_words_are_refused_alike(tmp_path):
    words = words_of(tmp_path, "a")
    with machines([PROGRAM, *words, "optimizer.lr=1e-4"], [PROGRAM, *words, "optimizer.lr=3e-4"]) as ranks:
        for rank, output in zip(ranks, said_by(*ranks), strict=True):
            assert rank.returncode == 2 and "Traceback" not in output, output
            assert "optimizer.lr: 0.0001 on rank 0 (" in output and "), 0.0003 on rank 1 (" in output
            assert "All ranks need one configuration: give every machine the same command and YAML.\n" in output
    assert not (tmp_path / "a").exists()
