"""callbacks/profile.py: which steps are recorded, and what is left of them."""

from __future__ import annotations

import gzip
import json

import pytest
from conftest import TINY_RUN

import benchmark
from callbacks.profile import ProfileConfig

pytestmark = pytest.mark.timeout(120, func_only=True)

# --- a run ---


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of eight batches of which the fourth and fifth are recorded."""
    folder = tmp_path_factory.mktemp("runs")
    words = [*TINY_RUN, "model.family=shapes", "image_size=32", "--use_synth_data", "max_duration=8ba"]
    words += ["measure.window_batches=1", f"run_folder={folder}"]
    assert benchmark.main([*words, "run_name=a", "profile.batches=2", "profile.start_batch=3"]) == 0
    return folder / "a"


def test_a_run_leaves_a_trace_and_a_table_of_the_requested_steps(run):
    with gzip.open(run / "profile" / "trace.json.gz", "rt") as file:
        trace = json.load(file)
    assert sum(each["name"].startswith("ProfilerStep#") for each in trace["traceEvents"]) == 2
    about, table = (run / "profile" / "table.txt").read_text().split("\n\n", 1)
    assert "start: 1\n" in about and "batches: [4, 5]" in about and "device: CPU" in about
    assert "aten::convolution_backward" in table and "Self CPU time total" in table


def test_windows_of_recorded_batches_are_not_measured(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [number for number, line in enumerate(lines, 1) if line["profiled"]] == [3, 4, 5] and len(lines) == 8
    summary = json.loads((run / "summary.json").read_text())
    assert summary["batches"] == 8 and summary["windows"] == 3  # two of warming up, the profiler's own, two recorded
    speeds = sorted(line["images_per_sec"] for line in lines if not (line["warmup"] or line["profiled"]))
    assert summary["images_per_sec"] == pytest.approx(speeds[1], rel=1e-4)


# --- its keys ---


def test_the_last_batches_can_be_recorded_and_nothing_is_unless_requested():
    assert ProfileConfig().batches == 0 and ProfileConfig().problems(1, 10) == []
    assert ProfileConfig(batches=3).problems(5, 2) == ProfileConfig(batches=3).problems(None, 2) == []
    assert ProfileConfig(batches=3).problems(4, 2) != []
