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


def start_ranks(program: str, *words: str, machines: int, **variables: str) -> list[subprocess.Popen[str]]:
    """Start two ranks on so many machines."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": str(2 // machines), "MASTER_ADDR": "127.0.0.1", **variables}
    shared |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen(
            [sys.executable, "-c", program, *words],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank if machines == 1 else 0)},
            **streams,
        )
        for rank in range(2)
    ]


@pytest.mark.slow
@pytest.mark.timeout(240, func_only=True)
@pytest.mark.parametrize("failing", [0, 1])
def test_the_others_leave_within_seconds_and_name_the_rank_that_failed(failing):
    """Also where the one that failed is rank 0, with which the store goes; two machines, so that nobody ends the other."""
    ranks = start_ranks(PROGRAM, str(failing), machines=2)
    output = [rank.communicate(timeout=180)[1] for rank in ranks]  # in the collective it would be half an hour
    assert ranks[failing].returncode == ranks[1 - failing].returncode == 2
    assert f"rank {failing} has stopped: data: s3://b/x.mds is away" in output[1 - failing]


ONCE = """
import os, numpy as np, tempfile, torch.distributed as dist
from ranks import collectives
dist.init_process_group("gloo")
made = []
def work():
    made.append(1)
    return {"many": np.arange(100_000), "none": np.array([], np.int64), "text": "x", "of": os.environ["RANK"]}
def refuse():
    raise ValueError("data: no such stage")
found = collectives.once_per_machine(work)
assert (found["many"] == np.arange(100_000)).all() and len(found["none"]) == 0
dist.barrier()
try:
    collectives.once_per_machine(refuse)
except ValueError as error:
    print(len(made), found["text"], found["of"], len(os.listdir(tempfile.gettempdir())), error, flush=True)
dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.timeout(240, func_only=True)
def test_one_rank_of_a_machine_works_and_both_have_its_arrays_or_its_refusal(tmp_path):
    ranks = start_ranks(ONCE, machines=1, TMPDIR=str(tmp_path))
    output = [rank.communicate(timeout=180)[0].splitlines()[-1] for rank in ranks]  # gloo prints lines, too
    assert output == ["1 x 0 0 data: no such stage", "0 x 0 0 data: no such stage"] and list(tmp_path.iterdir()) == []


@pytest.mark.timeout(25, func_only=True)
def test_before_the_ranks_have_met_a_signal_ends_a_rank_at_once(monkeypatch):
    """The launcher sends it when the first rank has left: that one is not waited for again, half a minute."""
    from ranks import collectives

    monkeypatch.setenv("LOCAL_RANK", "1")
    assert collectives.exit_code_for(SystemExit(143)) == 143
