"""bench/order.py: its measure of shuffling against closed forms, its contestants against one another; no speed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench import order
from bench.order import OrderBenchConfig, contestants_of, main, quality
from cli.command_line import Problem


@pytest.mark.parametrize(
    ("shuffled", "at_once", "spread"),
    [
        (np.arange(10_000), 1, 999),
        (np.arange(10_000).reshape(10, 1000).T.reshape(-1), 10, 9990),  # one sample of each shard in turn
        (np.arange(10_000).reshape(5, 2, 1000).transpose(0, 2, 1).reshape(-1), 2, 1998),  # shards in pairs
    ],
)
def test_the_measure_of_an_order_is_its_closed_form(shuffled, at_once, spread):
    found = quality(shuffled)
    assert (found["shards_at_once"], found["shard_spread"]) == (at_once, spread)


def test_a_batch_has_as_many_shards_as_there_are_in_it():
    assert quality(np.random.default_rng(0).permutation(100_000))["shards_a_batch"] == pytest.approx(100, abs=0.01)
    assert quality(np.arange(10_000))["shards_a_batch"] == pytest.approx(3.05, abs=0.1)  # 2,048 of shards of 1,000


def test_ours_is_streamings_and_so_is_a_part(tmp_path):
    made = contestants_of(OrderBenchConfig(samples=100_000, algorithms="py1e,naive", blocks="262144"))
    orders = {name: make(tmp_path / name) for name, make in made.items()}
    assert np.array_equal(orders["ours_262144"], orders["streaming_py1e"])
    assert sorted(orders["streaming_naive"]) == list(range(100_000))
    assert len(set(orders["part"].tolist())) == 50_000
    assert np.array_equal(orders["part"], orders["streaming_part"])
    sizes = {name: (tmp_path / name).stat().st_size for name in made}
    assert sizes["ours_262144"] == 400_000 and sizes["streaming_py1e"] >= 800_000


@pytest.mark.timeout(60, func_only=True)
def test_the_command_writes_its_record(tmp_path, capsys):
    words = ["samples=100000", "algorithms=py1e", "blocks=262144", "rounds=2", f"results={tmp_path}/order.json"]
    assert main(words) == 0
    record = json.loads((tmp_path / "order.json").read_text())
    assert record["ours_262144_shards_at_once"] == record["streaming_py1e_shards_at_once"] == 100
    assert record["streaming_over_ours_cpu_sec"] > 0 and len(record["by_round"]["part_gib"]) == 2
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[1:]] == [*("ours_262144", "part", "streaming_py1e", "streaming_part")]


def test_what_cannot_be_measured_is_said_with_what_can(monkeypatch):
    monkeypatch.setattr(order, "host_bytes", lambda: (2**30, 2**29))
    assert order.check(OrderBenchConfig(algorithms="py1e,best", blocks="1,200000")) == [
        Problem(
            "algorithms: streaming has no best. Possible: py1br, py1e, py1s, py2s, naive, with commas between.",
            ("algorithms",),
        ),
        Problem("blocks: 1 is not a number of samples. Possible: 2000 to 10**9, with commas between.", ("blocks",)),
        Problem("samples: 10,000,000 take 0.6 GiB, 0.5 are free. Give at most 8,388,608.", ("samples",)),
    ]
