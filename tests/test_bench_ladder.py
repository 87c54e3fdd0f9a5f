"""bench/ladder.py: its file, its table, and the CPU form of the command for a GPU machine."""

from __future__ import annotations

import json
import re
import shutil
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


@pytest.mark.parametrize(
    ("rungs", "more"),
    [
        ("{name: a}", ""),
        ("{name: a, yaml: y, keys: []}", "limits: 2"),
        ("{name: a, yaml: y, keys: [], program: other}", ""),
        ("{name: a, yaml: y, keys: [], over: nowhere}", ""),
        ("{name: a, yaml: y, keys: seed=1}", ""),
        ("{name: ../../x, yaml: y, keys: []}", ""),
        ("{name: a, yaml: y, keys: []}, {name: a, yaml: y, keys: [seed=1]}", ""),
        ("{name: a, yaml: y, keys: [], ranks: 0}", ""),
        ("{name: a, yaml: y, keys: [], over: b}, {name: b, yaml: y, keys: []}", ""),
        ("", ""),
    ],
)
def test_a_file_that_is_no_ladder_is_refused(tmp_path, rungs, more):
    path = tmp_path / "x.yaml"
    path.write_text(f"rungs: [{rungs}]\nlimit_sec: 1\nbudget_sec: 1\n{more}")
    with pytest.raises(
        ConfigError, match=r"^.*x.yaml: is no ladder .*of a rung: name, yaml, keys, program, ranks, over"
    ):
        ladder.read_ladder(str(path))


def write_ladder(folder: Path, rungs: str = "{name: a, yaml: y, keys: []}", budget: int = 9) -> str:
    (folder / "x.yaml").write_text(f"{{keys: [seed=1], rungs: [{rungs}], limit_sec: 9, budget_sec: {budget}}}")
    return str(folder / "x.yaml")


def test_the_keys_of_a_ladder_come_before_those_of_each_rung(tmp_path):
    path = write_ladder(tmp_path, "{name: a, yaml: y, keys: [seed=2]}")
    assert ladder.read_ladder(path).rungs[0].keys == ["seed=1", "seed=2"]


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("results=TMP/file", "results: TMP/file cannot be written: TMP/file: Not a directory."),
        ("runs=TMP/runs", "runs: TMP/runs/a is a finished run of commit abc. Remove it, or give another folder."),
        ("out=x", "command line: unknown key 'out'"),
    ],
)
def test_a_ladder_that_could_not_end_well_is_refused_before_a_rung_is_started(
    tmp_path, capsys, monkeypatch, word, text
):
    monkeypatch.setattr(ladder, "run_rung", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(ladder.torch.cuda, "is_available", lambda: False)
    (tmp_path / "file").write_text("")
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/summary.json").write_text('{"commit": "abc"}')
    words = [write_ladder(tmp_path), f"results={tmp_path}", word.replace("TMP", str(tmp_path))]
    assert ladder.main(words) == 2
    assert text.replace("TMP", str(tmp_path)) in capsys.readouterr().err
    assert ladder.main(["yamls/ladders/sd2_512.yaml", f"results={tmp_path}"]) == 2
    assert "its rungs need a GPU, and torch finds none here." in capsys.readouterr().err
    rung = "{name: a, yaml: y, keys: [], limit_sec: 700}"
    assert ladder.main([write_ladder(tmp_path, rung), f"results={tmp_path}"]) == 2
    assert "limit_sec 1 to 18" in capsys.readouterr().err


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


def test_a_record_counts_as_done_only_where_the_commit_is_known(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"status": "ok", "commit": "abc"}')
    assert ladder._done(path, "abc") and not ladder._done(path, "abd") and not ladder._done(path, None)
    path.write_text('{"status": "ok", "commit": "abc+changes"}')
    assert not ladder._done(path, "abc+changes")  # two changed trees have the same name
    path.write_text('{"status": "ok", "commit": null}')
    assert not ladder._done(path, None)
    for broken in ("{", "[]"):
        path.write_text(broken)
        assert not ladder._done(path, "abc")


@pytest.mark.parametrize(
    ("code", "output", "status"),
    [
        (None, "", "timeout"),
        (2, "memory: ...", "refused"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried", "out_of_memory"),
        (1, "Traceback", "failed"),
        (0, "no summary was left", "failed"),
    ],
)
def test_a_rung_that_did_not_run_is_a_row_that_says_why(monkeypatch, code, output, status):
    monkeypatch.setattr(processes, "run", lambda command, limit: (code, output))
    record = ladder.run_rung(ladder.Rung("a", "x.yaml", []), 5)
    assert record["status"] == status and record["output_end"] == output and record["device"]
    assert status in ladder.table([record]).splitlines()[1]


def test_the_record_of_a_rung_has_the_speed_of_each_window_that_counts(monkeypatch, tmp_path):
    """So that reports.compare knows more of it than its extremes."""

    def finished(command, limit):
        shutil.copytree(ROOT / "reports/results/shapes_run", tmp_path / "a")
        return 0, ""

    monkeypatch.setattr(processes, "run", finished)
    record = ladder.run_rung(ladder.Rung("a", "x.yaml", []), 5, tmp_path)
    assert len(record[WINDOWS]) == record["windows"] == 159
    assert statistics.median(record[WINDOWS]) == record["images_per_sec"]


def test_the_runs_of_a_ladder_are_one_group_of_the_loggers(monkeypatch):
    commands: list[list[str]] = []
    monkeypatch.setattr(processes, "run", lambda command, limit: (commands.append(command) or 2, ""))
    for keys, program in (([], "benchmark"), (["loggers.group=own"], "benchmark"), ([], "evaluation")):
        ladder.run_rung(ladder.Rung("a", "x", keys, program=program), 5, group="seeds")
    groups = [[word for word in command if word.startswith("loggers.group=")] for command in commands]
    assert groups == [["loggers.group=seeds"], ["loggers.group=own"], []]


RUNGS = [ladder.Rung(name, "y", []) for name in "abcd"]
LADDER = ladder.Ladder(1, 1, [*RUNGS, ladder.Rung("e", "y", [], over="b")])


def rung_record(name: str, speed: float | None, commit: str | None = "1") -> dict:
    spread = {} if speed is None else {"images_per_sec_min": 1.5 * speed, "images_per_sec_max": 2.5 * speed}
    plain = {"rung": name, "status": "ok", "num_devices": 2, "device": "x", "commit": commit}
    return {**plain, ladder.SPEED: speed, **spread}


def test_each_rung_is_compared_with_the_one_before_that_ran_and_with_the_first():
    """C ran out of memory; d is of another commit; e is an aside, which names its base."""
    speeds = {"a": 10.0, "b": 20.0, "c": None, "d": 30.0, "e": 5.0}
    records = {name: rung_record(name, speed) for name, speed in reversed(speeds.items())}
    rows = ladder.with_ratios(LADDER, records)
    assert [row["rung"] for row in rows] == [*"abcde"]
    assert [row["over_before"] for row in rows] == [None, 2.0, None, 1.5, 0.25]
    assert [row["over_first"] for row in rows] == [1.0, 2.0, None, 3.0, 0.5]
    records["d"]["commit"] = "2"
    assert ladder.with_ratios(LADDER, records)[3]["over_first"] is None
    assert [row["rung"] for row in ladder.with_ratios(LADDER, {"e": records["e"]})] == ["e"]
    assert ladder.table(rows).splitlines()[0].split() == ["rung", *ladder.COLUMNS]
    reached = {"rung": "f", "status": "ok", "device": "x", "target": "reached", "images_to_target": 4096, "fid": 1.5}
    head, _, *_, row = ladder.table([*rows, reached]).splitlines()
    assert head.split()[-6:] == list(ladder.TARGET_KEYS) and row.split()[-6:] == [
        "reached",
        "4096",
        "-",
        "-",
        "1.5",
        "-",
    ]


@pytest.mark.parametrize(("commit", "other_call"), [(None, None), ("abc+changes", None), ("abc", 2.0)])
def test_records_of_uncommitted_code_are_compared_within_one_call_alone(commit, other_call):
    own, other = ({**rung_record("a", 10.0, commit), "call": call} for call in ("1", "2"))
    assert ladder._ratio({**own, ladder.SPEED: 20.0}, own) == 2.0
    assert ladder._ratio({**own, ladder.SPEED: 20.0}, other) == other_call


def test_a_rung_with_a_limit_of_its_own_is_started_where_its_call_has_time_for_it():
    steps = ladder.Ladder(320, 260, [ladder.Rung("a", "y", []), ladder.Rung("b", "y", [], limit_sec=560)])
    assert [steps.room_sec(rung) for rung in steps.rungs] == [260, 20]
    for name in ("sd2_512", "sd2_512_evaluation", "families"):
        of_gpu = ladder.read_ladder(str(ROOT / f"yamls/ladders/{name}.yaml"))
        assert all(0 < of_gpu.room_sec(rung) <= 580 - (rung.limit_sec or of_gpu.limit_sec) for rung in of_gpu.rungs)


@pytest.mark.slow
def test_the_cpu_ladder_measures_its_rungs_and_resumes(tmp_path, monkeypatch, capsys):
    """The code of `make gpu-ladder` with three rungs of its CPU form and fewer batches: one is refused, none is run twice.

    The rungs start warm, as all programs of tests.
    """
    steps = OmegaConf.to_container(OmegaConf.load(ROOT / "yamls/ladders/sd2_tiny_cpu.yaml"))
    kept = {rung["name"]: rung for rung in steps["rungs"] if rung["name"] in ("online", "aside_profile", "too_large")}
    small = ["max_duration=9ba", "measure.window_batches=2", "measure.warmup_batches=3"]
    large = [f"{key}=1000000" for key in ("global_batch_size", "device_train_microbatch_size")]
    for name, rung in kept.items():
        rung["keys"] += ["model.family=shapes", "image_size=32", *(large if name == "too_large" else small)]
    kept["aside_profile"]["over"] = "online"
    path = tmp_path / "cpu.yaml"
    OmegaConf.save({**steps, "rungs": [*kept.values()]}, path)
    start = SimpleNamespace(**vars(subprocess))
    start.Popen = lambda command, **ways: warm_processes.Process(["composer", *command[3:]], **ways)
    monkeypatch.setattr(processes, "subprocess", start)
    command = [str(path), f"results={tmp_path}"]
    assert ladder.main(command) == 0, capsys.readouterr()
    records = {p.stem: json.loads(p.read_text()) for p in (tmp_path / "cpu").glob("*.json")}
    *measured, last = kept
    assert {n: r["status"] for n, r in records.items()} == {**dict.fromkeys(measured, "ok"), last: "refused"}
    # The window that the profiler slowed is none.
    assert records["online"]["windows"] > records["aside_profile"]["windows"] > 0
    for name in measured:
        assert len(records[name][WINDOWS]) == records[name]["windows"]
        assert records[name]["first_step_seconds"] > 0 and records[name]["images_per_sec"] > 0
        assert (
            records[name]["device"].startswith("CPU") and records[name]["torch_version"] and "commit" in records[name]
        )
    assert "memory: 1000000 images a pass need about" in records["too_large"]["output_end"]
    if len(records["online"]["commit"] or "") == 40:
        again = []  # only what has no record that is ok
        monkeypatch.setattr(ladder, "run_rung", lambda rung, *more: again.append(rung.name) or records[rung.name])
        assert ladder.main(command) == 0 and again == [last]
        assert "online: has a record of this commit" in capsys.readouterr().out


# --- the committed records ---


def recorded(name: str) -> dict[str, dict]:
    """Rung -> its record with ratios, as they lie under reports/results."""
    folder = ROOT / "reports/results" / name
    records = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    rows = ladder.with_ratios(ladder.read_ladder(str(ROOT / f"yamls/ladders/{name}.yaml")), records)
    return {row["rung"]: row for row in rows}


@pytest.mark.parametrize(
    ("key", "folder", "rung"),
    [
        ("compile=whole", "sd2_tiny_cpu_compile", "whole"),
        ("compile=blocks", "sd2_tiny_cpu_compile", "blocks"),
        ("channels_last", "sd2_tiny_cpu_compile", "whole_channels_last"),
        ("attention", "sd2_tiny_cpu_compile", "attention_math"),
        ("gradient_checkpointing", "sd2_tiny_cpu", "aside_checkpointing"),
        ("device_train_microbatch_size=auto", "sd2_tiny_cpu", "mb8"),
        ("async_loss", "sd2_tiny_cpu", "late_loss"),
    ],
)
def test_the_gain_of_a_key_in_the_docs_is_that_of_its_record(key, folder, rung):
    text = (ROOT / "docs/speed.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith(f"| `{key}` |"))
    assert re.search(rf"\b{recorded(folder)[rung]['over_before']:.3g}\b", row.split("|")[3])


def test_the_records_of_the_cpu_ladder_are_all_of_one_run():
    rows = recorded("sd2_tiny_cpu")
    names = [rung.name for rung in ladder.read_ladder(str(ROOT / "yamls/ladders/sd2_tiny_cpu.yaml")).rungs]
    assert list(rows) == names
    assert len({(row["commit"], row["device"], row["call"]) for row in rows.values()}) == 1


def test_the_table_of_the_gpu_ladder_is_that_of_the_committed_records():
    page, first = (ROOT / "docs/speed.md").read_text(), None
    for name in ("predecessor", "moments", "cudnn_benchmark"):
        row = json.loads((ROOT / f"reports/results/sd2_512/{name}.json").read_text())
        first = first or row["images_per_sec"]
        speed = "{images_per_sec:.1f} ({images_per_sec_min:.1f} to {images_per_sec_max:.1f})".format(**row)
        memory = f"{row['peak_mem_gib']:.1f}"
        memory += f" ({row['estimated_mem_gib']:.1f})" if "estimated_mem_gib" in row else ""
        [line] = [line for line in page.splitlines() if line.startswith(f"| `{name}`: ")]
        ratio, step = f"{row['images_per_sec'] / first:.3g}", f"{row['first_step_seconds']:.3g}"
        assert line.endswith(f"| {speed} | {ratio} | {memory} | {row['mfu']:.3f} | {step} |")
