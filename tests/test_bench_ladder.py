"""bench/ladder.py: its file, its table, and the CPU form of the command for a GPU machine."""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm_processes
from conftest import ROOT
from omegaconf import OmegaConf

from bench import ladder
from common.errors import ConfigError
from run_folder import processes
from run_folder.history import WINDOWS

pytestmark = pytest.mark.timeout(900, func_only=True)

A = "{name: a, yaml: y, keys: []}"


def write_ladder(folder: Path, rungs: str = A, budget: int = 9, more: str = "") -> str:
    (folder / "x.yaml").write_text(f"{{keys: [seed=1], rungs: [{rungs}], limit_sec: 9, budget_sec: {budget}{more}}}")
    return str(folder / "x.yaml")


def start_warm(monkeypatch) -> None:
    """Let rungs start warm, as all programs of tests."""
    start = SimpleNamespace(**vars(subprocess))
    start.Popen = lambda command, **ways: warm_processes.Process(["composer", *command[3:]], **ways)
    monkeypatch.setattr(processes, "subprocess", start)


def test_a_file_that_is_no_ladder_is_refused(tmp_path):
    message = r"^.*x.yaml: is not a ladder .*of a rung: name, yaml, keys, program, ranks, over"
    for rungs, more in (
        ("{name: a}", ""),
        (A, ", limits: 2"),
        ("{name: a, yaml: y, keys: [], program: other}", ""),
        ("{name: a, yaml: y, keys: [], over: b}, {name: b, yaml: y, keys: []}", ""),
        ("{name: ../../x, yaml: y, keys: []}", ""),
        (f"{A}, {A}", ""),
        ("{name: a, yaml: y, keys: [], ranks: 0}", ""),
    ):
        with pytest.raises(ConfigError, match=message):
            ladder.read_ladder(write_ladder(tmp_path, rungs, more=more))
    of_rung = ladder.read_ladder(write_ladder(tmp_path, "{name: a, yaml: y, keys: [seed=2]}")).rungs[0].keys
    assert of_rung == ["seed=1", "seed=2"]  # the ladder's come first


def test_a_ladder_that_could_not_end_well_is_refused_before_a_rung_is_started(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ladder, "run_rung", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(ladder.torch.cuda, "is_available", lambda: False)
    (tmp_path / "file").write_text("")
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/summary.json").write_text('{"commit": "abc"}')
    own, finished = write_ladder(tmp_path), f"{tmp_path}/runs/a is a finished run of commit abc"
    for words, text in (
        ([own, f"results={tmp_path}/file"], f"results: {tmp_path}/file cannot be written: {tmp_path}/file: Not a dir"),
        ([own, f"runs={tmp_path}/runs"], f"runs: {finished}. Remove it, or give another folder."),
        ([own, "out=x"], "command line: unknown key 'out'"),
        (["yamls/ladders/sd2_512.yaml"], "its rungs need a GPU, and torch finds none here."),
    ):
        assert ladder.main([words[0], f"results={tmp_path}", *words[1:]]) == 2
        assert text in capsys.readouterr().err


def test_a_ladder_of_which_nothing_ran_has_failed_and_no_rung_is_started_after_the_budget(
    tmp_path, monkeypatch, capsys
):
    record = {"rung": "a", "status": "refused", "process_seconds": 0.1, "device": "x", "commit": None}
    monkeypatch.setattr(ladder, "run_rung", lambda *_: record)
    assert ladder.main([write_ladder(tmp_path), f"results={tmp_path}"]) == 1
    monkeypatch.setattr(ladder, "run_rung", lambda *_: pytest.fail("started"))
    capsys.readouterr()
    assert ladder.main([write_ladder(tmp_path, budget=-1), f"results={tmp_path}/b"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == "a: not started, -1 s are spent; call again to resume"


def test_a_rung_that_did_not_run_is_a_row_that_says_why(monkeypatch):
    for code, output, status in (
        (None, "", "timeout"),
        (2, "memory: ...", "refused"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried", "out_of_memory"),
        (1, "Traceback", "failed"),
        (0, "no summary was left", "failed"),
    ):
        monkeypatch.setattr(processes, "run", lambda command, limit, end=(code, output): end)
        record = ladder.run_rung(ladder.Rung("a", "x.yaml", []), 5)
        assert record["status"] == status and record["output_end"] == output and record["device"]
        assert status in ladder.table([record]).splitlines()[1]


def rung_record(name: str, speed: float | None, commit: str | None = "1") -> dict:
    spread = {} if speed is None else {"images_per_sec_min": 1.5 * speed, "images_per_sec_max": 2.5 * speed}
    plain = {"rung": name, "status": "ok", "num_devices": 2, "device": "x", "commit": commit}
    return {**plain, ladder.SPEED: speed, **spread}


def test_each_rung_is_compared_with_the_one_before_that_ran_and_with_the_first():
    """C ran out of memory; d is of another commit; e is an aside, which names its base."""
    rungs = [*(ladder.Rung(name, "y", []) for name in "abcd"), ladder.Rung("e", "y", [], over="b")]
    steps, speeds = ladder.Ladder(1, 1, rungs), {"a": 10.0, "b": 20.0, "c": None, "d": 30.0, "e": 5.0}
    records = {name: rung_record(name, speed) for name, speed in reversed(speeds.items())}
    rows = ladder.with_ratios(steps, records)
    assert [(row["rung"], row["over_before"], row["over_first"]) for row in rows] == [
        *(("a", None, 1.0), ("b", 2.0, 2.0), ("c", None, None), ("d", 1.5, 3.0), ("e", 0.25, 0.5))
    ]
    records["d"]["commit"] = "2"
    assert ladder.with_ratios(steps, records)[3]["over_first"] is None
    assert [row["rung"] for row in ladder.with_ratios(steps, {"e": records["e"]})] == ["e"]
    assert ladder.table(rows).splitlines()[0].split() == ["rung", *ladder.COLUMNS]
    reached = {"rung": "f", "status": "ok", "device": "x", "target": "reached", "images_to_target": 4096, "fid": 1.5}
    head, _, *_, row = ladder.table([*rows, reached]).splitlines()
    assert head.split()[-6:] == list(ladder.TARGET_KEYS)
    assert row.split()[-6:] == "reached 4096 - - 1.5 -".split()  # noqa: SIM905


@pytest.mark.long
def test_the_cpu_ladder_measures_its_rungs_and_resumes(tmp_path, monkeypatch, capsys):
    """`bench.ladder` with two rungs of the GPU ladder's CPU form and fewer batches: one is refused, none is run twice."""
    steps = OmegaConf.to_container(OmegaConf.load(ROOT / "yamls/ladders/sd2_tiny_cpu.yaml"))
    kept = {rung["name"]: rung for rung in steps["rungs"] if rung["name"] in ("online", "too_large")}
    kept["online"]["keys"] += ["max_duration=9ba", "measure.window_batches=2", "measure.warmup_batches=3"]
    kept["too_large"]["keys"] += ["global_batch_size=1000000", "device_train_microbatch_size=1000000"]
    for rung in kept.values():
        rung["keys"] += ["model.family=shapes", "image_size=32"]
    path = tmp_path / "cpu.yaml"
    OmegaConf.save({**steps, "rungs": [*kept.values()]}, path)
    start_warm(monkeypatch)
    command = [str(path), f"results={tmp_path}"]
    assert ladder.main(command) == 0, capsys.readouterr()
    records = {p.stem: json.loads(p.read_text()) for p in (tmp_path / "cpu").glob("*.json")}
    assert {name: record["status"] for name, record in records.items()} == {"online": "ok", "too_large": "refused"}
    online = records["online"]
    assert len(online[WINDOWS]) == online["windows"] > 0 and online["device"].startswith("CPU")
    assert statistics.median(online[WINDOWS]) == pytest.approx(online["images_per_sec"])
    assert "memory: 1000000 images a pass need about" in records["too_large"]["output_end"]
    if len(online["commit"] or "") == 40:
        again = []  # only what has no record that is ok
        monkeypatch.setattr(ladder, "run_rung", lambda rung, *more: again.append(rung.name) or records[rung.name])
        assert ladder.main(command) == 0 and again == ["too_large"]
        assert "online: has a record of this commit" in capsys.readouterr().out
