"""ranks/collectives.py: a rank that waits in a collective learns why another one has exited, and exits too."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from conftest import ROOT

# Each rank: listen; the failing one aborts all, the other waits for it in a collective.
PROGRAM = """
import os, sys, torch.distributed as dist
from ranks import collectives
dist.init_process_group("gloo")
collectives.watch_for_abort()
if dist.get_rank() == int(sys.argv[1]):
    collectives.abort_all_ranks("data: s3://b/x.mds is away", code=2)
    sys.exit(2)
dist.barrier()
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.slow
@pytest.mark.timeout(240, func_only=True)
@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.long)])
def test_the_others_leave_within_seconds_and_name_the_rank_that_failed(failing):
    """Also where the one that failed is rank 0, with which the store goes; two machines, so that nobody ends the other."""
    shared = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    command, streams = [sys.executable, "-c", PROGRAM, str(failing)], {"stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, env={**shared, "RANK": str(rank)}, **streams) for rank in range(2)]
    output = [rank.communicate(timeout=180)[1] for rank in ranks]  # in the collective it would be half an hour
    assert ranks[failing].returncode == ranks[1 - failing].returncode == 2
    assert f"rank {failing} has stopped: data: s3://b/x.mds is away" in output[1 - failing]


@pytest.mark.timeout(25, func_only=True)
def test_before_the_ranks_have_met_a_signal_ends_a_rank_at_once(monkeypatch):
    """The launcher sends it when the first rank has left: that one is not waited for again, half a minute."""
    from ranks import collectives

    monkeypatch.setenv("LOCAL_RANK", "1")
    assert collectives.exit_code_for(SystemExit(143)) == 143
