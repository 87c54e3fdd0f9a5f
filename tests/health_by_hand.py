"""Further runs on two ranks that fall ill, too many for CI: `make test-health`; tests/test_health.py has one of each kind."""

from __future__ import annotations

import signal
import socket

import pytest
from conftest import run
from machines import machines, said_by, until_trained, words_of
from test_health import END, PROGRAM, SICK

pytestmark = [pytest.mark.timeout(600, func_only=True)]


def test_a_stopped_rank_0_ends_the_others_though_the_store_is_its_own(tmp_path):
    words = words_of(tmp_path, "a", "health.stall_sec=6")
    with machines([PROGRAM, *words], [PROGRAM, *words]) as ranks:
        until_trained(tmp_path / "a", 3, *ranks)
        ranks[0].send_signal(signal.SIGSTOP)
        [said] = said_by(ranks[1])
    assert ranks[1].returncode == 1 and "Traceback" not in said, said
    assert "health.stall_sec: rank 0 (" in said and ") does not answer for " in said
    assert said.endswith(f"Rank 0 is stopped, dead or cut off. {END}")


def test_a_rank_that_hangs_is_named_with_its_place_and_leaves_its_stack(tmp_path):
    words = words_of(tmp_path, "a", "health.stall_sec=6")
    with machines([SICK, "hang", "1", "5", *words], [SICK, "hang", "1", "5", *words]) as ranks:
        for rank, said in zip(ranks, said_by(*ranks), strict=True):
            assert rank.returncode == 1 and "Traceback" not in said, said
            assert ") is behind, at batch 4, train (before forward) for " in said and said.endswith(END)
    assert "sick_ranks.py" in (tmp_path / "a" / "stacks" / "rank00001.txt").read_text()
    assert "sick_ranks.py" in (tmp_path / "a" / "stacks" / "rank00000.txt").read_text()  # its program's own frame


def test_a_run_of_one_rank_that_hangs_ends_too(tmp_path):
    done = run("python", SICK, "hang", "0", "5", *words_of(tmp_path, "a", "health.stall_sec=6"))
    assert done.returncode == 1 and "no progress for " in done.stderr and done.stderr.endswith(END), done.stderr


def test_waiting_for_data_evaluation_and_checkpoints_are_no_stall(miniature, tmp_path):
    """An evaluation of many steps between two batches, and a first step, each longer than the limit."""
    words = miniature.words(tmp_path, "a", "global_batch_size=32", "max_duration=4ba", "eval.every_images=64")
    words += ["save.every_images=64", "eval.num_prompts=32", "eval.steps=200", "health.stall_sec=2", "target.fid=1"]
    done = run("composer", "-n", "2", PROGRAM, *words)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("here", [0, 1])
def test_a_machine_that_never_comes_is_waited_for_so_long(tmp_path, here):
    words = words_of(tmp_path, "a", "health.meet_sec=5")
    commands = [["-c", "pass"], ["-c", "pass"]]
    commands[here] = [PROGRAM, *words]
    with machines(*commands) as ranks:
        [said] = said_by(ranks[here])
    assert ranks[here].returncode == 1 and "Traceback" not in said
    if here == 0:
        assert "ranks: after 5 s 1 of 2 ranks are there; missing: 1 (machine 1)." in said, said
    else:
        assert "MASTER_ADDR: nothing answers at 127.0.0.1:" in said and "rank 0 has not come." in said, said


def test_composers_launcher_says_that_its_port_is_in_use_and_returns_2(tmp_path):
    with socket.socket() as one:
        one.bind(("", 0))
        one.listen()
        port = str(one.getsockname()[1])
        done = run("composer", "-n", "2", "--master_port", port, PROGRAM, *words_of(tmp_path, "a"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"MASTER_PORT: {port} cannot be opened on " in done.stderr


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("code", "code: bench/__init__.py, "),
        ("data", "data.remote: an index.json of sha256 "),
    ],
)
def test_machines_with_other_code_or_other_data_are_refused(miniature, tmp_path, kind, text):
    words = miniature.small(tmp_path, "a")
    with machines([SICK, kind, "1", "0", *words], [SICK, kind, "1", "0", *words]) as ranks:
        for rank, said in zip(ranks, said_by(*ranks), strict=True):
            assert rank.returncode == 2 and "Traceback" not in said, said
            assert text in said and " on rank 0 (" in said and " on rank 1 (" in said, said
    assert not (tmp_path / "a").exists()
