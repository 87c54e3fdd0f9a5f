"""bench/ranks.py, bench/all_reduce.py: a step's buckets, a hook that changes nothing, both tables; no speed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed
from test_ranks import free_port
from torch.nn.parallel import DistributedDataParallel

from bench.all_reduce import of_step, timed
from bench.ranks import RanksConfig, lost, words_of
from cli.command_line import parse_command_line
from config import load
from preflight.run import quick_problems
from training.run_config import RunConfig


def test_buckets_that_overlap_count_once_and_the_last_ones_wait_is_exposed():
    found = of_step([(0.0, 1.0), (0.5, 2.0), (3.0, 3.25)])
    assert found == {"in_flight_ms": 2250.0, "exposed_ms": 250.0}
    assert of_step([(0.0, 5.0), (1.0, 2.0)]) == {"in_flight_ms": 5000.0, "exposed_ms": 4000.0}


def test_the_timed_all_reduce_leaves_gradients_as_ddp_has_them(monkeypatch):
    monkeypatch.setattr(
        DistributedDataParallel, "__init__", DistributedDataParallel.__init__
    )  # brought back afterwards
    at = {"init_method": f"tcp://127.0.0.1:{free_port()}", "rank": 0, "world_size": 1}
    is_own = not torch.distributed.is_initialized()  # another test's run may have one, of one rank too
    if is_own:
        torch.distributed.init_process_group("gloo", **at)
    try:
        inputs, gradients, steps = torch.randn(8, 16), [], []
        for has_hook in (False, True):
            if has_hook:
                timed(steps)
            torch.manual_seed(3)
            model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)))
            model(inputs).square().mean().backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        torch.testing.assert_close(*gradients)  # a mean by another operation
        assert len(steps) == 1 and steps[0] and of_step(steps[0])["in_flight_ms"] > 0
    finally:
        if is_own:
            torch.distributed.destroy_process_group()


def test_its_runs_are_possible():
    words = words_of("/tmp/x", "run", "global_batch_size=32", "health.stall_sec=10")
    config = load(RunConfig, parse_command_line(words, {}), check=lambda config: quick_problems(config, []))
    assert config.model.family == "shapes" and config.data.synthetic and config.health.stall_sec == 10.0


def test_both_records_have_a_table(monkeypatch):
    from bench import ranks

    monkeypatch.setattr(ranks, "missed", lambda name, rank, limit: 10.0 * rank + (limit or 120.0))
    config = RanksConfig(measure="lost", rounds=2, default_rounds=1)
    found = lost(config)
    assert found["kill_0_sec"] == found["kill_0_sec_max"] == 10.0 and found["stop_1_default_sec"] == 130.0

    turns = iter(range(1, 100))

    def speed(config, number, all_reduce, num, batch):
        if all_reduce is not None:
            all_reduce.append({"in_flight_ms": 10.0, "exposed_ms": 2.0, "step_ms": 40.0})
        next(turns)
        return 100.0 * num * 0.9 ** (num - 1) * batch / (16 * num)

    monkeypatch.setattr(ranks, "speed", speed)
    config = RanksConfig(measure="efficiency", rounds=2)
    found = ranks.efficiency(config)
    assert found["efficiency"] == pytest.approx(0.9) and found["speedup_shared"] == pytest.approx(0.9)
    assert found["all_reduce_exposed_frac"] == 0.05 and found["all_reduce_in_flight_frac"] == 0.25
