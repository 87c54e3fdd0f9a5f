"""bench/gpu.py: what is measured first, what a card's memory makes of a rung, and when a call ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_bench_ladder import start_warm, write_ladder

from bench import gpu, ladder
from bench.ladder import Rung

pytestmark = pytest.mark.timeout(300, func_only=True)
ONE = "{name: one, yaml: yamls/sd2_512_synthetic_moments.yaml, keys: [%s]}"
KEYS = "model.family=shapes, image_size=32, global_batch_size=8, device_train_microbatch_size=4, max_duration=6ba"
KEYS += ", measure.window_batches=2, measure.warmup_batches=2, compile=off, channels_last=false, async_loss=false"
KEYS += ", cudnn_benchmark=false"
END = {"process_seconds": 1, "commit": "abc"}
NO_ROOM = "memory: 128 images a pass need about 130 GiB; here is 79. Try: device_train_microbatch_size=83 or less."


def test_the_most_telling_steps_come_first_and_every_rung_is_there():
    ladders = [ladder.read_ladder(path) for path in gpu.LADDERS]
    steps = gpu.steps_of(ladders, Path("r"))
    names = [step.name for step in steps if step.name != "tests"]
    first = [name for name in gpu.FIRST if name != "tests"]
    assert names[: len(first)] == first and sorted(names) == sorted(
        rung.name for each in ladders for rung in each.rungs
    )
    seconds = {step.name: step.seconds for step in steps}
    assert seconds["moments"] < seconds["flux_512_mb10"] < seconds["cudnn_benchmark"] < seconds["max_autotune"]
    assert steps[0].path == Path("r/sd2_512/cudnn_benchmark.json")


@pytest.mark.parametrize(
    ("given", "record", "fewer"),
    [
        (128, {"status": "refused", "output_end": NO_ROOM}, 64),
        (100, {"status": "refused", "output_end": NO_ROOM}, 50),
        (128, {"status": "out_of_memory", "output_end": ""}, 64),
        (1, {"status": "out_of_memory", "output_end": ""}, None),
        (128, {"status": "refused", "output_end": "attention: xformers is not installed."}, None),
        (128, {"status": "failed", "output_end": ""}, None),
        (128, {"status": "ok"}, None),
    ],
)
def test_a_batch_without_room_is_divided_into_more_passes(monkeypatch, given, record, fewer):
    tried = []

    def run_rung(rung: Rung, limit_sec: int) -> dict:
        tried.append(rung.keys)
        return record if len(tried) == 1 else {"status": "ok"}

    monkeypatch.setattr(gpu, "run_rung", run_rung)
    found = gpu.fitted(Rung("a", "y", ["seed=1", f"device_train_microbatch_size={given}"]), 100.0)
    wanted = [] if fewer is None else [["seed=1", f"device_train_microbatch_size={fewer}"]]
    assert tried[1:] == wanted and found == ({"status": "ok"} if wanted else record)


def test_a_call_starts_what_fits_into_its_budget_and_a_failed_step_blocks_no_other(tmp_path, monkeypatch, capsys):
    rungs = ", ".join(
        f"{{name: {name}, yaml: y, keys: [{key}]}}" for name, key in (("a", "x=1"), ("b", "compile=whole"))
    )
    path, results = write_ladder(tmp_path, rungs), tmp_path / "r"
    status = {"a": "timeout", "b": "ok"}
    monkeypatch.setattr(gpu, "commit", lambda: "abc")
    monkeypatch.setattr(gpu, "run_rung", lambda rung, sec: {"rung": rung.name, "status": status[rung.name]} | END)
    words = [path, f"results={results}", "budget_sec=100"]
    assert gpu.main(words) == 0
    assert "x/b: not started, it needs about 290 s of 100" in capsys.readouterr().out
    assert gpu.main(words) == 0  # b, which has no record yet, comes first
    printed = capsys.readouterr().out
    assert "x/b: ok after 1 s\nx/a: " in printed and printed.splitlines()[-1].split()[:2] == ["b", "ok"]
    for damaged in ("", "[]", "{}", '{"rung": "a"}'):
        (results / "x/a.json").write_text(damaged)
        assert gpu.main(words) == 0
    status["a"] = "failed"
    assert gpu.main(words) == 1
    (tmp_path / "other").mkdir()
    assert gpu.main([path, write_ladder(tmp_path / "other", rungs)]) == 2
    assert "two have one name" in capsys.readouterr().err
    assert gpu.main(["yamls/ladders/sd2_512.yaml"]) == 2 or gpu.torch.cuda.is_available()


@pytest.mark.slow
def test_a_rung_is_run_on_a_cpu_and_its_table_printed(tmp_path, monkeypatch, capsys):
    start_warm(monkeypatch)
    assert gpu.main([write_ladder(tmp_path, ONE % KEYS), f"results={tmp_path}/r", "budget_sec=200"]) == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "r/x/one.json").read_text())
    assert record["status"] == "ok" and record["images_per_sec"] > 0
    assert [row.split()[:2] for row in printed.splitlines()][-1] == ["one", "ok"]
