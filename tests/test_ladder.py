"""bench/ladder.py: its file, its table, and the CPU form of the command for a GPU machine."""

from __future__ import annotations

import json
import re
import shutil
import signal
import statistics
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm
from conftest import ROOT, run, started
from omegaconf import OmegaConf

from bench import ladder
from cli.errors import ConfigError
from record import processes
from record.summary import WINDOWS

pytestmark = pytest.mark.timeout(900, func_only=True)


def test_a_ladder_that_is_not_there_names_those_that_are():
    with pytest.raises(ConfigError, match="^nowhere.yaml: no such file. Known: .*yamls/ladders/sd2_512.yaml"):
        ladder.read_ladder("nowhere.yaml")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("rungs: [{name: a}]\nlimit_sec: 1\nbudget_sec: 1\n", "`Rung` has missing mandatory value: yaml"),
        ("limit_sec: 1\nbudget_sec: 1\n", "missing mandatory value: rungs"),
        ("rungs: [{name: a, yaml: y, keys: []}]\n", "missing mandatory value: limit_sec"),
        ("{rungs: [{name: a, yaml: y, keys: []}], limit_sec: 1, budget_sec: 1, limits: 2}", "'limits' not in 'Ladder'"),
        ("[]", "Cannot merge incompatible container types"),
    ],
)
def test_a_file_that_is_no_ladder_says_what_is_possible(tmp_path, content, reason):
    path = tmp_path / "x.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        ladder.read_ladder(str(path))
    text = str(error.value)
    assert text.startswith(f"{path}: is no ladder (") and reason in text
    assert text.endswith("needs_gpu; of a rung: name, yaml, keys, program, ranks, over, limit_sec.")


@pytest.mark.parametrize(
    "rung",
    [
        "{name: a, yaml: y, keys: [], program: other}",
        "{name: a, yaml: y, keys: [], over: nowhere}",
        "{name: a, yaml: y, keys: [], kyes: []}",
        "{name: a, yaml: y, keys: seed=1}",
        "{name: ../../x, yaml: y, keys: []}",
        "{name: [}",
        "- x",
        "",
        "{name: a, yaml: y, keys: [{seed: 1}]}",
        "{name: a, yaml: y, keys: []}, {name: a, yaml: y, keys: [seed=1]}",
        "{name: a, yaml: y, keys: [], over: a}",
        "{name: a, yaml: y, keys: [], ranks: 0}",
        "{name: a, yaml: y, keys: [], ranks: two}",
        "{name: a, yaml: y, keys: [], over: b}, {name: b, yaml: y, keys: []}",
    ],
)
def test_odd_rungs_are_refused(tmp_path, rung):
    path = tmp_path / "x.yaml"
    path.write_text(f"rungs: [{rung}]\nlimit_sec: 1\nbudget_sec: 1\n")
    with pytest.raises(ConfigError, match="^.*x.yaml: is no ladder "):
        ladder.read_ladder(str(path))


def test_the_keys_of_a_ladder_come_before_those_of_each_rung(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("{keys: [seed=1], rungs: [{name: a, yaml: y, keys: [seed=2]}], limit_sec: 1, budget_sec: 1}")
    assert ladder.read_ladder(str(path)).rungs[0].keys == ["seed=1", "seed=2"]


def test_what_would_be_known_after_minutes_is_said_before_a_rung_is_started(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ladder, "run_rung", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(ladder.torch.cuda, "is_available", lambda: False)
    (tmp_path / "file").write_text("")
    assert ladder.main(["yamls/ladders/sd2_512.yaml", f"results={tmp_path}/file"]) == 2
    of_results, of_device = capsys.readouterr().err.splitlines()
    assert of_results.startswith(f"results: {tmp_path}/file cannot be written: {tmp_path}/file: Not a directory.")
    assert of_device == (
        "yamls/ladders/sd2_512.yaml: its rungs need a GPU, and torch finds none here. Run it on a GPU; "
        "on a CPU: python -m bench.ladder yamls/ladders/sd2_tiny_cpu.yaml results=FOLDER"
    )


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


def test_the_command_says_what_it_does_not_know(capsys):
    assert ladder.main(["yamls/ladders/sd2_tiny_cpu.yaml", "out=x"]) == 2
    assert "command line: unknown key 'out'" in capsys.readouterr().err


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


def test_the_runs_of_a_ladder_are_one_group_where_they_are_logged(monkeypatch):
    commands: list[list[str]] = []
    monkeypatch.setattr(processes, "run", lambda command, limit: (commands.append(command) or 2, ""))
    own = ["loggers.group=own"]
    for rung in (
        ladder.Rung("a", "x", []),
        ladder.Rung("b", "x", own),
        ladder.Rung("c", "x", [], program="evaluation"),
    ):
        ladder.run_rung(rung, 5, group="seeds")
    groups = [[word for word in command if word.startswith("loggers.group=")] for command in commands]
    assert groups == [["loggers.group=seeds"], own, []]


def test_a_rung_with_a_target_shows_what_became_of_it():
    plain = {"rung": "a", "status": "ok", "device": "x"}
    with_target = {**plain, "rung": "b", "target": "reached", "images_to_target": 4096, "fid": 1.5, "clip": 0.5}
    assert "target" not in ladder.table([plain])
    head, _, row = ladder.table([plain, with_target]).splitlines()
    assert head.split()[-6:] == list(ladder.TARGET_KEYS)
    assert row.split()[-6:] == ["reached", "4096", "-", "-", "1.5", "0.5"]


RUNGS = [ladder.Rung(name, "y", []) for name in "abcd"]
LADDER = ladder.Ladder(1, 1, [*RUNGS, ladder.Rung("e", "y", [], over="b")])


def rung_record(name: str, speed: float | None, commit: str = "1") -> dict:
    spread = {} if speed is None else {"images_per_sec_min": 1.5 * speed, "images_per_sec_max": 2.5 * speed}
    return {
        "rung": name,
        "status": "ok",
        ladder.SPEED: speed,
        **spread,
        "num_devices": 2,
        "device": "x",
        "commit": commit,
    }


def test_each_rung_is_set_against_the_one_before_that_ran_and_against_the_first():
    """C ran out of memory; d is of another commit; e is an aside, which names what it is set against."""
    speeds = {"a": 10.0, "b": 20.0, "c": None, "d": 30.0, "e": 5.0}
    records = {name: rung_record(name, speed) for name, speed in reversed(speeds.items())}
    rows = ladder.with_ratios(LADDER, records)
    assert [(r["rung"], r["over_before"], r["over_first"]) for r in rows] == [
        ("a", None, 1.0),
        ("b", 2.0, 2.0),
        ("c", None, None),
        ("d", 1.5, 3.0),
        ("e", 0.25, 0.5),
    ]
    records["d"]["commit"] = "2"
    assert ladder.with_ratios(LADDER, records)[3]["over_first"] is None
    assert [row["rung"] for row in ladder.with_ratios(LADDER, {"e": records["e"]})] == ["e"]
    head = ladder.table(rows).splitlines()[0].split()
    assert head == ["rung", *ladder.COLUMNS]


@pytest.mark.parametrize(("commit", "other_call"), [(None, None), ("abc+changes", None), ("abc", 2.0)])
def test_records_of_code_that_nothing_names_are_set_against_those_of_their_own_call_alone(commit, other_call):
    own, other = ({**rung_record("a", 10.0, commit), "call": call} for call in ("1", "2"))
    assert ladder._ratio({**own, ladder.SPEED: 20.0}, own) == 2.0
    assert ladder._ratio({**own, ladder.SPEED: 20.0}, other) == other_call


def test_a_rung_with_a_limit_of_its_own_is_started_where_its_call_has_time_for_it():
    steps = ladder.Ladder(320, 260, [ladder.Rung("a", "y", []), ladder.Rung("b", "y", [], limit_sec=560)])
    assert [steps.room_sec(rung) for rung in steps.rungs] == [260, 20]
    for name in ("sd2_512", "sd2_512_evaluation", "families"):
        of_gpu = ladder.read_ladder(str(ROOT / f"yamls/ladders/{name}.yaml"))
        assert all(0 < of_gpu.room_sec(rung) <= 580 - (rung.limit_sec or of_gpu.limit_sec) for rung in of_gpu.rungs)


@pytest.mark.parametrize("limit", ["0", "700"])
def test_a_limit_that_no_call_has_time_for_is_refused(tmp_path, capsys, limit):
    path = tmp_path / "x.yaml"
    path.write_text(f"rungs: [{{name: a, yaml: y, keys: [], limit_sec: {limit}}}]\nlimit_sec: 320\nbudget_sec: 260\n")
    assert ladder.main([str(path), f"results={tmp_path}"]) == 2
    assert "limit_sec 1 to 580" in capsys.readouterr().err


def test_a_ladder_of_which_nothing_ran_has_failed(tmp_path, monkeypatch):
    path = tmp_path / "x.yaml"
    path.write_text("rungs: [{name: a, yaml: y, keys: []}]\nlimit_sec: 5\nbudget_sec: 5\n")
    record = {"rung": "a", "status": "refused", "process_seconds": 0.1, "device": "x", "commit": None}
    monkeypatch.setattr(ladder, "run_rung", lambda *_: record)
    assert ladder.main([str(path), f"results={tmp_path}"]) == 1


def test_a_process_that_outlives_its_limit_is_ended_with_its_children():
    code, output = processes.run(["bash", "-c", "echo started; sleep 60 & wait"], 2)
    assert code is None and output == "started\n"


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM"])
def test_an_interrupted_ladder_leaves_no_run_behind(tmp_path, sent):
    """A run that lives on would hold the GPU, and the next call would measure beside it."""
    pid_file = tmp_path / "pid"
    program = tmp_path / "interrupted.py"
    program.write_text(
        "import sys; from bench import ladder; from record import processes; "
        "ladder.run_rung = lambda rung, limit, runs, group: "
        f"processes.run(['bash', '-c', 'sleep 60 & echo $! > {pid_file}; wait'], 50); "
        "sys.exit(ladder.main(sys.argv[1:]))"
    )
    path = tmp_path / "x.yaml"
    path.write_text("rungs: [{name: a, yaml: y, keys: []}]\nlimit_sec: 50\nbudget_sec: 50\n")
    with started("python", str(program), str(path), f"results={tmp_path}") as process:
        deadline = time.monotonic() + 120
        while not (pid_file.is_file() and pid_file.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.1)
        child = int(pid_file.read_text())
        process.send_signal(getattr(signal, sent))
        assert process.wait(timeout=30) != 0
    time.sleep(0.5)
    state = Path(f"/proc/{child}/stat")
    assert not state.is_file() or state.read_text().split()[2] == "Z"


def test_no_rung_is_started_after_the_budget(tmp_path, monkeypatch, capsys):
    path = tmp_path / "x.yaml"
    path.write_text(
        "rungs: [{name: a, yaml: y, keys: []}, {name: b, yaml: y, keys: []}]\nlimit_sec: 9\nbudget_sec: -1\n"
    )
    monkeypatch.setattr(ladder, "run_rung", lambda *_: pytest.fail("started"))
    assert ladder.main([str(path), f"results={tmp_path}"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == "a: not started, -1 s are spent; call again to resume"


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
    start.Popen = lambda command, **ways: warm.Process(["composer", *command[3:]], **ways)
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


def test_gpu_ladder_installs_nothing_and_takes_the_interpreter_at_hand():
    done = run("make", "-n", "--no-print-directory", "gpu-ladder", "PYTHON=some-python", MAKEFLAGS="")
    assert done.stdout == "some-python -m bench.ladder yamls/ladders/sd2_512.yaml\n"
    assert (ROOT / "yamls/ladders/sd2_512.yaml").is_file()


def test_a_kept_run_of_another_commit_is_not_taken_for_one_of_this(tmp_path, capsys, monkeypatch):
    path = tmp_path / "two.yaml"
    path.write_text(
        "{limit_sec: 9, budget_sec: 9, rungs: [{name: a, yaml: x, keys: []}, {name: b, yaml: x, keys: []}]}"
    )
    (tmp_path / "runs/b").mkdir(parents=True)
    (tmp_path / "runs/b/summary.json").write_text('{"commit": "abc"}')
    monkeypatch.setattr(ladder, "run_rung", lambda *_: pytest.fail("started"))
    assert ladder.main([str(path), f"results={tmp_path}", f"runs={tmp_path}/runs"]) == 2
    said = f"runs: {tmp_path}/runs/b is a finished run of commit abc. Remove it, or give another folder."
    assert capsys.readouterr().err.splitlines()[-1] == said


# --- the committed records ---


def recorded(name: str) -> dict[str, dict]:
    """Rung -> its record with ratios, as they lie under reports/results."""
    folder = ROOT / "reports/results" / name
    records = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    rows = ladder.with_ratios(ladder.read_ladder(str(ROOT / f"yamls/ladders/{name}.yaml")), records)
    return {row["rung"]: row for row in rows}


def shown(row: dict) -> str:
    """A rung as the table of docs/speed.md has it."""
    if row["status"] != "ok":
        return f"| `{row['rung']}` | {row['status']} | - | - | - | - |"
    speed = "{images_per_sec:.1f} ({images_per_sec_min:.1f} to {images_per_sec_max:.1f})".format(**row)
    ratios = ("-" if row[key] is None else f"{row[key]:.3g}" for key in ("over_before", "over_first"))
    cells = (f"`{row['rung']}`", speed, *ratios, f"{row['peak_mem_gib']:.2f}", f"{row['first_step_seconds']:.2f}")
    return f"| {' | '.join(cells)} |"


GAINS = {
    "| `compile=whole` |": ("sd2_tiny_cpu_compile", "whole"),
    "| `compile=blocks` |": ("sd2_tiny_cpu_compile", "blocks"),
    "| `channels_last` |": ("sd2_tiny_cpu_compile", "whole_channels_last"),
    "| `attention` |": ("sd2_tiny_cpu_compile", "attention_math"),
    "| `gradient_checkpointing` |": ("sd2_tiny_cpu", "aside_checkpointing"),
    "| `device_train_microbatch_size=auto` |": ("sd2_tiny_cpu", "mb8"),
    "| `async_loss` |": ("sd2_tiny_cpu", "late_loss"),
}
"""How a row of the table of keys in docs/speed.md begins -> the record of its gain over the rung before, or that it names."""


@pytest.mark.parametrize("begin", GAINS)
def test_what_a_key_has_gained_is_that_of_its_record(begin):
    name, rung = GAINS[begin]
    speed = (ROOT / "docs/speed.md").read_text()
    row = next(line for line in speed.splitlines() if line.startswith(begin))  # the ladder's own table comes later
    assert re.search(rf"\b{recorded(name)[rung]['over_before']:.3g}\b", row.split("|")[3])


def test_the_table_of_the_cpu_ladder_is_that_of_the_committed_records_of_one_run():
    rows = recorded("sd2_tiny_cpu")
    names = [rung.name for rung in ladder.read_ladder(str(ROOT / "yamls/ladders/sd2_tiny_cpu.yaml")).rungs]
    assert list(rows) == names
    assert len({(row["commit"], row["device"], row["call"]) for row in rows.values()}) == 1
    assert "\n".join(map(shown, rows.values())) in (ROOT / "docs/speed.md").read_text()
