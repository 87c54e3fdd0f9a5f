"""sweep.py: which runs a file asks for, whose row is whose, what is run again, and whole sweeps with faults in them."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, TINY_RUN, run, started

import sweep as command
from common.command_line import parse_command_line
from common.errors import ConfigError, Refused
from run_folder import processes
from sweeps import plan, running, table
from sweeps.running import OK, STALE, SweepState

pytestmark = [pytest.mark.timeout(300, func_only=True), pytest.mark.usefixtures("quick_estimate")]

HEAD = f"keys: {json.dumps([*TINY_RUN, 'data.synthetic=true', 'model.weights=random', 'optimizer.lr=1e-4'])}\n"


@pytest.fixture(autouse=True)
def one_commit(monkeypatch) -> None:
    """The code's commit, whatever the checkout of the tests is."""
    for module in (command, plan, running):
        monkeypatch.setattr(module, "commit", lambda: "a" * 40)
    # The command is a process of its own; other tests of this one may have begun a group of ranks.
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)


def written(folder: Path, text: str, name: str = "small") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(HEAD + text)
    return path


def read(folder: Path, text: str, *words: str) -> plan.Sweep:
    return plan.read_sweep([str(written(folder, text)), f"runs={folder}/runs", *words])


def problems(folder: Path, text: str, *words: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        plan.resolve_all(read(folder, text, *words))
    return error.value.problems


# --- the file ---


def test_each_list_of_a_matrix_is_an_axis_and_points_are_combined_with_it(tmp_path):
    matrix = "matrix: {seed: [1, 2], optimizer: {lr: [0.1, 0.2]}}\n"
    assert list(read(tmp_path, matrix).points.values()) == [
        {"seed": seed, "optimizer.lr": lr} for seed in (1, 2) for lr in (0.1, 0.2)
    ]
    points = "points: [{image_size: 64}, {image_size: [64, 32], compile: 'off'}]\n"
    both = read(tmp_path, f"matrix: {{seed: [1, 2]}}\n{points}")
    names = ("image_size-64", "image_size-64x32_compile-off")
    assert list(both.points) == [f"seed-{seed}_{name}" for seed in (1, 2) for name in names]
    assert both.axes == {"seed": [1, 2], "image_size": [64, [64, 32]], "compile": ["off"]}


def test_the_command_line_gives_an_axis_other_values_and_each_run_other_keys(tmp_path):
    sweep = read(tmp_path, "matrix: {seed: [1, 2]}\n", "seed=[3,4,5]", "optimizer.lr=1e-3", "limit_sec=7", "ranks=2")
    assert [values["seed"] for values in sweep.points.values()] == [3, 4, 5]
    assert sweep.typed == ("optimizer.lr=1e-3",) and (sweep.command.limit_sec, sweep.command.ranks) == (7, 2)
    assert list(read(tmp_path, "matrix: {seed: [1, 2]}\n", "seed=9").points) == ["seed-9"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("matrix: {seed: []}\n", "matrix: seed has no value. Give a list of values, or take it out."),
        ("matrix: {seed: [1]}\npoints: [{seed: 2}]\n", "seed is in matrix and in points"),
        ("matrix: {run_name: [a, b]}\n", "run_name is given, but each run of a sweep has its own"),
        ("matrix: {seed: [1, 2, 3], image_size: [8, 16]}\nmax_runs: 5\n", "6 runs. Possible: max_runs=5 at most"),
        ("limit_sec: 5\n", "neither matrix nor points"),
        ("points: {seed: 1}\n", "points is {'seed': 1}. Possible: a list of mappings"),
        ("matrix: {seed: [1]}\nlimit_sec: 0\n", "limit_sec is 0. Possible: 1 and up."),
        ("matrix: {seed: [1], seed: [2]}\n", "cannot be read as YAML: line 2, column 21"),
        ("matrix: {seed: [1]}\nmax_run: 3\n", "unknown key 'max_run'. Did you mean 'max_runs'?"),
    ],
)
def test_a_file_that_is_no_sweep_is_refused_with_the_reason(tmp_path, text, message):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert [line for line in error.value.problems if f"small.yaml: {message}" in line], error.value.problems


def test_an_impossible_command_line_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    path = str(written(tmp_path, "points: [{seed: 1}, {seed: 2}]\n"))
    for words, message in (
        (["seed=1"], "command line: no sweep given. Known: yamls/sweeps/flux_compile_microbatch"),
        (["nowhere.yaml"], "nowhere.yaml: no such file. Known: yamls/sweeps/"),
        ([path, "only=status:bad"], "only: 'status:bad' is not known. Possible: status:error, status:ok,"),
        ([path, "seed=3"], f"command line: seed varies in points of {path}. Change the file."),
        ([path, "--print_config"], "command line: --print_config is for benchmark.py. Say dry_run=true"),
    ):
        assert command.main(words) == 2
        assert capsys.readouterr().err.startswith(message)


# --- points ---


def test_all_problems_of_all_points_are_reported_at_once_and_each_once(tmp_path):
    text = "matrix: {sede: [1, 2], optimizer.lr: [0.1, fast], precision: [fp32, tf32]}\n"
    unknown, lr = problems(tmp_path, text)
    assert unknown == f"{tmp_path}/small.yaml: unknown key 'sede'. Did you mean 'seed'?"
    assert lr.startswith(
        f"sede-1_lr-fast_precision-fp32 and 3 more runs: {tmp_path}/small.yaml: optimizer.lr is 'fast'"
    )
    [same] = problems(tmp_path, "points: [{seed: 1}, {seed: 1, global_batch_size: 8}, {seed: 2}]\n")
    assert same.endswith("small.yaml: seed-1 and seed-1_global_batch_size-8 are the same run. Leave one of them.")


@pytest.mark.parametrize("text", ["null", "0123", "1e-4", "[1]", "a #b", "${seed}", "'x'", " a", ""])
def test_a_text_in_quotes_stays_a_text_on_the_runs_command_line(tmp_path, text):
    sweep = read(tmp_path, f"matrix: {{loggers.wandb.project: [{json.dumps(text)}]}}\n")
    [values] = sweep.points.values()
    [at] = parse_command_line([f"key={plan.as_word(values['loggers.wandb.project'])}"], {}).assignments
    assert at.value == text


def test_ranks_have_to_fit_the_machine_and_the_batch(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)  # Composer sets it in a process that has trained
    [text] = problems(tmp_path, "matrix: {seed: [1]}\nranks: 3\n")
    assert text.startswith("global_batch_size: 8 is not a multiple of 3 ranks x 1 microbatch = 3.")
    assert "WORLD_SIZE" not in os.environ
    monkeypatch.setattr(plan.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(plan.torch.cuda, "device_count", lambda: 8)
    [text] = problems(tmp_path, "matrix: {seed: [1]}\nranks: 2\njobs: 5\n")
    assert "ranks is 2 and jobs 5, and this machine has 8 GPUs. Give fewer, or run it on a machine with 10." in text


def test_runs_side_by_side_have_gpus_of_their_own(tmp_path, monkeypatch):
    sweep = read(tmp_path, "matrix: {seed: [1, 2]}\nranks: 2\n")
    assert running.slots_of(sweep) == [{}]  # on a CPU one after the other
    assert running.slots_of(replace(sweep, command=replace(sweep.command, jobs=2))) == [{}, {}]
    monkeypatch.setattr(running.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(running.torch.cuda, "device_count", lambda: 5)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    own = [{"CUDA_VISIBLE_DEVICES": gpus} for gpus in ("0,1", "2,3")]
    assert running.slots_of(sweep) == own
    assert running.slots_of(replace(sweep, command=replace(sweep.command, jobs=1))) == own[:1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in running.slots_of(sweep)] == ["3,5", "6,7"]


def test_an_identity_is_of_the_computation_its_data_and_its_code(tmp_path, stage, monkeypatch):
    def of(text: str, *words: str) -> str:
        return plan.resolve_all(read(tmp_path, f"matrix: {{seed: [1]}}\n{text}", *words))[0].identity

    def of_data(folder: Path) -> str:
        return of("", "data.synthetic=false", f"data.remote={folder}", "data.workers=0")

    first = of("")
    assert of("") == first == of("", "loggers.group=other", f"runs={tmp_path}/elsewhere")
    changed = {of("", "optimizer.lr=2e-4"), of("ranks: 2\n"), of("", "seed=2"), of_data(stage)}
    other = shutil.copytree(stage, tmp_path / "stage")
    changed.add(of_data(other))
    facts = json.loads((other / "dataset.json").read_text())
    (other / "dataset.json").write_text(json.dumps({**facts, "made_by": "another program"}))
    changed.add(of_data(other))
    monkeypatch.setattr(plan, "commit", lambda: "b" * 40)
    changed.add(of(""))
    assert len({first, *changed}) == 8
    monkeypatch.setattr(plan, "commit", lambda: f"{'b' * 40}+changes")
    assert of("") != of("")  # two changed trees have the same name


# --- the sweep's own bookkeeping: programs of a few lines in place of runs ---

PROGRAM = """
import json, os, pathlib, sys, time
folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
if what == "hang":
    os.fork()
    time.sleep(600)
if what == "oom":
    sys.exit("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory")
if what == "refused":
    print("seed: no"), sys.exit(2)
if what == "crash":
    print("=1+1"), sys.exit(1)
if what == "killed":
    os.kill(os.getpid(), 15)
folder.mkdir(parents=True, exist_ok=True)
(folder / "count").write_text((folder / "count").read_text() + "x" if (folder / "count").exists() else "x")
same = {"images_per_sec": 10, "peak_mem_gib": 1, "window_batches": 1, "train_sec": 1, "start": 1}
same |= dict.fromkeys(["data_wait_sec", "eval_sec", "other_sec"], 0) | dict.fromkeys(["warmup", "unfinished"], False)
lines = [json.dumps({**same, "batch": n, "images": 8 * n, "loss": 1 / n}) for n in range(1, 9)]
(folder / "metrics.jsonl").write_text("\\n".join(lines) + "\\n")
(folder / "config.yaml").write_text("seed: 1\\n")
summary = {"images_per_sec": 20.0, "images_per_sec_min": 18.0, "images_per_sec_max": 24.0, "num_devices": 2, "windows": 8}
summary |= {"images_per_sec_per_device": 10.0, "global_batch_size": 8, "loss": 0.125, "seconds": 3.0, "mfu": None}
(folder / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Runs that are programs: `what(seed)` says what each does. Returns the call of a sweep; keys that vary are its own."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def call(path: Path, does: dict, *words: str) -> int:
        def commands_of(runner: running.Runner, point: plan.Point) -> list[list[str]]:
            what = does.get(point.values["seed"], "ok")
            return [[sys.executable, str(program), str(runner.sweep.folder / point.name), what]]

        monkeypatch.setattr(running.Runner, "commands_of", commands_of)
        return command.main([str(path), f"runs={tmp_path}/runs", *words])

    return call


def rows(folder: Path, name: str = "small") -> dict[str, dict]:
    text = (folder / f"runs/sweeps/{name}/summary.csv").read_text()
    return {row["run"]: row for row in csv.DictReader(io.StringIO(text))}


def counts(folder: Path) -> dict[str, int]:
    """How often each run was run."""
    return {path.parent.name: len(path.read_text()) for path in (folder / "runs/sweeps/small").glob("*/count")}


def test_however_a_run_ends_it_is_a_row_and_the_others_continue(tmp_path, stand_in, capsys):
    path = written(tmp_path, "matrix: {seed: [1, 2, 3, 4, 5, 6]}\nlimit_sec: 20\n")
    does = {1: "crash", 2: "hang", 3: "oom", 4: "refused", 5: "killed"}
    assert stand_in(path, does, "limit_sec=6") == 1
    found = rows(tmp_path)
    statuses = ["failed", "timeout", "out_of_memory", "refused", "killed", "ok"]
    assert [row["status"] for row in found.values()] == statuses
    messages = {name: row["message"] for name, row in found.items()}
    assert messages["seed-1"] == "'=1+1"  # no formula
    assert messages["seed-2"] == "it was ended after 6 s (limit_sec)" and messages["seed-4"] == "seed: no"
    assert "can't allocate memory" in messages["seed-3"] and messages["seed-5"] == "ended from outside by SIGTERM"
    ok = found["seed-6"]
    assert list(ok)[:3] == ["seed", "run", "status"] and list(ok)[-3:] == ["message", "identity", "commit"]
    assert (ok["images_per_sec_per_device"], ok["images_per_sec_per_device_min"], ok["windows"]) == ("10.0", "9.0", "8")
    assert (ok["step_ms"], ok["loss"], ok["mfu"]) == ("400.0", "0.125", "")
    assert float(ok["loss_tail"]) == pytest.approx((1 / 7 + 1 / 8) / 2, rel=1e-5)
    printed = capsys.readouterr().out
    assert "5 of 6 done; seed-5: killed after" in printed
    assert "6 runs: 1 failed, 1 timeout, 1 out_of_memory, 1 refused, 1 killed, 1 ok." in printed
    record = json.loads((tmp_path / "runs/sweeps/small/record.json").read_text())
    assert (record["axes"], record["of_points"], record["sweep"]) == (["seed"], [], "small")
    assert record["runs"][0]["status"] == "failed" and record["runs"][0]["curve"]["images"] == []
    last = record["runs"][5]
    assert (last["values"], last["curve"]["images"]) == ({"seed": 6}, [8 * n for n in range(1, 9)])
    assert last["curve"]["loss"] == pytest.approx([1 / n for n in range(1, 9)], rel=1e-5)
    for name in ("page.html", "loss.png"):
        assert (tmp_path / "runs/sweeps/small" / name).stat().st_size > 5000
    program = str(tmp_path / "program.py")
    assert not [p for p in psutil.process_iter(["cmdline"]) if program in (p.info["cmdline"] or [])]


def test_a_call_runs_what_has_no_row_and_repeats_only_what_it_is_asked_to(tmp_path, stand_in):
    path = written(tmp_path, "matrix: {seed: [1, 2, 3]}\n")
    assert stand_in(path, {2: "crash", 3: "killed"}) == 1
    assert stand_in(path, {2: "ok", 3: "ok"}) == 1  # what failed would fail again; what was killed is run
    assert [row["status"] for row in rows(tmp_path).values()] == ["ok", "failed", "ok"]
    assert stand_in(path, {}, "only=status:error") == 0
    assert counts(tmp_path) == {"seed-1": 1, "seed-2": 1, "seed-3": 1}
    lines = num_lines(tmp_path / "runs/sweeps/small/sweep.jsonl")
    assert stand_in(path, {}, "only=status:ok") == 0  # a finished run would only say that it is: they begin anew
    assert num_lines(tmp_path / "runs/sweeps/small/sweep.jsonl") == lines + 6
    assert counts(tmp_path) == {"seed-1": 1, "seed-2": 1, "seed-3": 1}
    assert len(list((tmp_path / "runs/sweeps/small" / STALE).glob("*/count"))) == 3


def test_a_row_of_another_identity_is_stale_and_its_run_is_moved_and_made_again(tmp_path, stand_in, capsys):
    path = written(tmp_path, "matrix: {seed: [1, 2]}\n")
    assert stand_in(path, {}) == 0
    before = rows(tmp_path)
    assert stand_in(path, {}, "optimizer.lr=1e-3", "dry_run=true") == 0
    text = "stale: what lies there is of another configuration, data, code or device"
    assert capsys.readouterr().out.count(text) == 2
    assert stand_in(path, {}, "optimizer.lr=1e-3") == 0
    after = rows(tmp_path)
    assert all(after[name]["identity"] != before[name]["identity"] for name in before)
    assert counts(tmp_path) == {"seed-1": 1, "seed-2": 1}
    moved = sorted(path.name for path in (tmp_path / "runs/sweeps/small" / STALE).iterdir() if path.is_dir())
    assert moved == [f"{name}-{row['identity'][:8]}-1" for name, row in before.items()]
    shutil.rmtree(tmp_path / "runs/sweeps/small/seed-1")  # a run whose folder was removed is run again
    assert stand_in(path, {}, "optimizer.lr=1e-3") == 0
    assert counts(tmp_path) == {"seed-1": 1, "seed-2": 1}


def test_no_stale_run_is_in_the_report_of_the_seeds(tmp_path, stand_in, monkeypatch):
    path, given = written(tmp_path, "matrix: {seed: [1, 2]}\n"), []
    monkeypatch.setattr(command, "is_of_mlperf", lambda *given: True)
    monkeypatch.setattr(command.mlperf, "combine", lambda places, out: given.append([Path(p).name for p in places]))
    assert stand_in(path, {}) == 0
    assert stand_in(path, {}, "optimizer.lr=1e-3", "seed=1") == 0
    assert stand_in(path, {}, "optimizer.lr=1e-3", "only=status:failed") == 0
    assert [row["status"] for row in rows(tmp_path).values()] == ["ok", "stale"]
    assert given == [["seed-1", "seed-2"], ["seed-1"], ["seed-1"]]


def test_a_dry_run_writes_nothing_and_shows_the_commands(tmp_path, stand_in, capsys):
    path = written(tmp_path, "matrix: {image_size: [[64, 64]], seed: [1, 2]}\nranks: 2\n")
    assert stand_in(path, {}, "dry_run=true") == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("composer -n 2 ")]
    assert [("image_size=[64, 64]" in words, "seed=2" in words) for words in commands] == [(True, False), (True, True)]
    assert all("loggers.group=small" in words for words in commands) and not (tmp_path / "runs").exists()


def test_a_run_that_does_not_fit_by_the_plan_is_not_started(tmp_path, stand_in):
    path = written(tmp_path, "matrix: {seed: [1], global_batch_size: [8, 80000000]}\n")
    assert stand_in(path, {}) == 0
    small, large = rows(tmp_path).values()
    assert (small["status"], large["status"]) == ("ok", "over_plan")
    assert large["message"].startswith("80000000 images a pass need about ")


def test_a_run_during_which_the_code_changed_is_run_again(tmp_path, stand_in, capsys, monkeypatch):
    """Of code that was edited for a while and restored the commit alone says nothing."""
    path, keep = written(tmp_path, "matrix: {seed: [1, 2, 3]}\n"), command.write_table

    def edited(sweep, all_points, state):
        found = keep(sweep, all_points, state)
        changed = [row["status"] for row in found].count(OK) == 1  # from the end of the first to that of the second
        for module in (command, running):
            monkeypatch.setattr(module, "commit", lambda: "a" * 40 + "+changes" * changed)
        return found

    monkeypatch.setattr(command, "write_table", edited)
    assert stand_in(path, {}) == 0
    assert [row["status"] for row in rows(tmp_path).values()] == ["ok", "ok", "ok"]
    assert stand_in(path, {}, "dry_run=true") == 0
    assert capsys.readouterr().out.count("seed-2  stale") == 1
    assert stand_in(path, {}) == 0
    lines = (tmp_path / "runs/sweeps/small/sweep.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"] for line in lines][6:] == ["seed-2"] * 2


def test_the_runs_continue_when_table_and_page_cannot_be_written(tmp_path, stand_in, capsys):
    path = written(tmp_path, "matrix: {seed: [1, 2]}\n")
    for name in ("summary.csv", "page.html"):
        (tmp_path / "runs/sweeps/small" / name / "held").mkdir(parents=True)
    assert stand_in(path, {}) == 0
    printed = capsys.readouterr().err
    assert "summary.csv: cannot be written: " in printed
    assert "not all of record, plot and page could be written: out: " in printed
    assert counts(tmp_path) == {"seed-1": 1, "seed-2": 1}


def test_a_second_call_during_the_first_is_refused(tmp_path, stand_in, capsys):
    path = written(tmp_path, "matrix: {seed: [1]}\n")
    folder = tmp_path / "runs/sweeps/small"
    with running.lock_folder(folder):
        assert stand_in(path, {}) == 2
    assert f"runs: another sweep.py is at {folder}." in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="cannot be written"), running.lock_folder(tmp_path / "file/x"):
        pass


def test_half_a_line_of_a_killed_sweep_is_ignored(tmp_path, stand_in):
    path = written(tmp_path, "matrix: {seed: [1, 2]}\n")
    assert stand_in(path, {}) == 0
    with open(tmp_path / "runs/sweeps/small/sweep.jsonl", "a") as lines:
        lines.write('{"run": "seed-1", "ident')
    before = rows(tmp_path)
    assert stand_in(path, {}) == 0
    assert rows(tmp_path) == before and counts(tmp_path) == {"seed-1": 1, "seed-2": 1}
    assert stand_in(path, {}, "only=status:ok") == 0
    assert num_lines(tmp_path / "runs/sweeps/small/sweep.jsonl") == 8


def test_uncommitted_code_reuses_no_row(tmp_path, stand_in, capsys, monkeypatch):
    path = written(tmp_path, "matrix: {seed: [1]}\n")
    for module in (command, plan, running):
        monkeypatch.setattr(module, "commit", lambda: f"{'a' * 40}+changes")
    assert stand_in(path, {}) == stand_in(path, {}) == 0
    assert f"the tree is {'a' * 40}+changes, so nothing says" in capsys.readouterr().err
    assert len(list((tmp_path / "runs/sweeps/small/stale").glob("seed-1-*-1"))) == 1


def test_a_run_that_is_to_be_scored_afterwards_is(tmp_path):
    sweep = read(tmp_path, "matrix: {eval.when: ['off', after]}\n", "eval.every_images=8", "eval.prompts=x")
    runner = running.Runner(sweep, SweepState(sweep.folder), lambda *ended: None)
    config = plan.resolve_all(read(tmp_path, "matrix: {seed: [1]}\n"))[0].config
    for when, num in (("off", 1), ("after", 2)):
        point = plan.Point("a", {}, ("x.yaml",), replace(config, eval=replace(config.eval, when=when)), "1", None)
        commands = runner.commands_of(point)
        assert len(commands) == num and commands[0][-2:] == [str(ROOT / "benchmark.py"), "x.yaml"]
    assert commands[1][-2:] == [str(ROOT / "eval.py"), str(sweep.folder / "a")]


@pytest.mark.parametrize(
    "words",
    [
        lambda folder: [running.SCORE, f"{folder}/now"],  # scores afterwards
        lambda folder: [f"run_folder={folder}", "run_name=before"],  # of a point that the file no longer has
    ],
)
def test_processes_that_outlive_a_killed_sweep_are_ended(tmp_path, words):
    state = SweepState(tmp_path)
    state.add(plan.Point("before", {}, (), None, "1", None), "started")
    left = subprocess.Popen(["bash", "-c", "sleep 60 & wait", *words(tmp_path)])
    try:
        running.end_left_overs(tmp_path, [*SweepState(tmp_path).names, "now"])
        assert left.poll() is not None
    finally:
        left.kill()


# --- the table ---


@pytest.mark.parametrize("text", ["=1", "+1", "-x", "@a", "\t=1"])
def test_no_text_of_a_cell_is_a_formula_and_numbers_stay(text):
    row = {"a": text, "run": "x", "status": "ok", "message": "two\nlines", "identity": "1", "loss": -1.5}
    [cells] = csv.DictReader(io.StringIO(table.as_csv([row], ["a"])))
    assert cells["a"].startswith("'") and cells["a"].endswith(text.strip())
    assert cells["message"] == "two lines" and cells["loss"] == "-1.5"


@pytest.mark.parametrize(
    ("code", "name"), [(-9, "SIGKILL"), (137, "SIGKILL"), (247, "SIGKILL"), (143, "SIGTERM"), (245, "SIGSEGV")]
)
def test_a_signal_is_known_by_each_kind_of_exit_code(code, name):
    assert processes.signal_of(code).name == name
    assert processes.status_of(code, "") == ("failed" if name == "SIGSEGV" else "killed")


# --- whole sweeps ---

WRAPPED = """
import sys
import sweep
from sweeps import plan, running
for module in (sweep, plan, running):
    module.commit = lambda: "a" * 40  # whatever the checkout of the tests is
of_run = running.Runner.commands_of
def commands_of(runner, point):
    own = point.values.get("global_batch_size", 8) >= 1024  # less address space than its batch takes
    start = ["bash", "-c", 'ulimit -v 8500000; exec "$@"', "x"] if own else []
    return [[*start, *command] for command in of_run(runner, point)]
running.Runner.commands_of = commands_of
sweep.start(sweep.main)
"""


def processes_of(folder: Path, name: str = "") -> list[psutil.Process]:
    """Those that run a point of a sweep in this folder; of all points, or of one."""
    own = {f"run_name={name}"} if name else set()
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = {*(process.info["cmdline"] or [])}
        is_alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if f"run_folder={folder}" in words and own <= words and is_alive:
            found.append(process)
    return found


def wait_until(happens, process: subprocess.Popen | None = None) -> None:
    deadline = time.monotonic() + 400
    while not happens():
        assert process is None or process.poll() is None, "the sweep has ended"
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.is_file() else 0


@pytest.mark.long
@pytest.mark.timeout(900, func_only=True)
def test_a_sweep_with_a_crash_a_hang_and_an_out_of_memory_killed_twice_ends_with_every_row_right(tmp_path):
    """Real runs. The first is killed with the sweep, and resumes from its checkpoint; another stands still."""
    program = tmp_path / "wrapped.py"
    program.write_text(WRAPPED)
    path = written(
        tmp_path,
        "points: [{seed: 1}, {optimizer.lr: 1.0e+30}, {seed: 2}, {global_batch_size: 1024}]\njobs: 2\nlimit_sec: 500\n",
    )
    keys = ["data.stage=moments", "max_duration=60ba", "save.every_images=16", "save.keep=1"]
    call = ["python", str(program), str(path), f"runs={tmp_path}/runs", *keys]
    folder = tmp_path / "runs/sweeps/small"
    first, hung = folder / "seed-1", "seed-2"

    def stop(name: str) -> bool:
        """Let a run stand still as if it hung: all of its processes."""
        found = processes_of(folder, name)
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.suspend()
        return bool(found)

    try:
        with started(*call) as sweep:
            wait_until(lambda: num_lines(first / "metrics.jsonl") >= 3, sweep)
            os.kill(sweep.pid, signal.SIGKILL)
            assert stop("seed-1")
        assert processes_of(folder, "seed-1")  # a kill of the sweep alone leaves its runs
        with started(*call, output=subprocess.PIPE) as sweep:
            wait_until(lambda: stop(hung), sweep)
            ends = ('"ok"', '"failed"', '"out_of_memory"')
            wait_until(lambda: all(end in (folder / "sweep.jsonl").read_text() for end in ends), sweep)
            os.kill(sweep.pid, signal.SIGKILL)
            assert "processes outlived a killed sweep" in sweep.communicate(timeout=60)[1]
        assert processes_of(folder, hung)
        with started(*call, "limit_sec=5", output=subprocess.PIPE) as sweep:  # the one that hangs is left
            printed, said = sweep.communicate(timeout=400)
    finally:
        for process in processes_of(folder):
            process.kill()
    found = rows(tmp_path)
    assert [row["status"] for row in found.values()] == [
        "ok",
        "failed",
        "timeout",
        "out_of_memory",
    ], said
    assert sweep.returncode == 1 and printed.splitlines()[-1].startswith("4 runs: 1 ok, 1 failed, 1 timeout, ")
    ok, failed, timeout, memory = found.values()
    assert float(ok["images_per_sec_per_device"]) > 0 and int(ok["windows"]) > 3 and float(ok["loss"]) > 0
    assert num_lines(first / "starts.jsonl") >= 2 and json.loads((first / "summary.json").read_text())["batches"] == 60
    assert failed["message"].startswith("loss: ") and "lower optimizer.lr" in failed["message"]
    assert timeout["message"] == "it was ended after 5 s (limit_sec)"
    assert "DefaultCPUAllocator: can't allocate memory" in memory["message"] or "out of memory" in memory["message"]
    assert processes_of(folder) == [] and (folder / "page.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM"])
def test_a_signal_leaves_no_process_behind_and_the_same_command_goes_on(tmp_path, sent):
    program, path = tmp_path / "wrapped.py", written(tmp_path, "matrix: {seed: [1, 2]}\n")
    own = "import sys; from sweeps import running; from pathlib import Path; "
    own += "running.Runner.commands_of = lambda runner, point: "
    own += "[['bash', '-c', 'sleep 600 & wait', f'run_folder={runner.sweep.folder}', f'run_name={point.name}']]\n"
    program.write_text(own + WRAPPED.split("of_run")[0] + "sweep.start(sweep.main)\n")
    folder = tmp_path / "runs/sweeps/small"
    with started("python", str(program), str(path), f"runs={tmp_path}/runs", output=subprocess.PIPE) as sweep:
        wait_until(lambda: processes_of(folder), sweep)
        group = os.getpgid(processes_of(folder)[0].pid)
        os.kill(sweep.pid, getattr(signal, sent))
        _, said = sweep.communicate(timeout=90)
    assert sweep.returncode == 128 + getattr(signal, sent) and not processes.is_alive(group)
    assert "2 runs: 2 pending. The same command resumes the sweep." in said


@pytest.mark.slow
def test_seeds_of_a_benchmark_go_through_its_report(tmp_path, miniature):
    """Two of the ten, and two evaluations of each: yamls/sweeps/shapes_ten_seeds.yaml, with less of everything."""
    left_out = ("run_", "mlperf.", "target.", "eval.when")
    base = [word for word in miniature.small(tmp_path, "x") if not word.startswith(left_out)]
    keys = ["eval.every_images=16", "target.fid=0.001", "save.every_images=0", "mlperf.org=Us", "mlperf.platform=here"]
    keys += [f"data.local={tmp_path}/local"]  # of both runs side by side
    text = f"yaml: {base[0]}\nkeys: {json.dumps([*base[1:], *keys])}\nmatrix: {{seed: [1, 2]}}\njobs: 2\n"
    path = tmp_path / "seeds.yaml"
    path.write_text(text)
    done = run("python", str(ROOT / "sweep.py"), str(path), f"runs={tmp_path}/runs")
    assert done.returncode == 0, done.stderr
    assert "no result: 2 runs of 10; 2 runs failed (seed-1, seed-2), the rules allow 1" in done.stdout, done.stdout
    logs = sorted((tmp_path / "runs/sweeps/seeds/mlperf").glob("Us/results/here/stable_diffusion/result_*.txt"))
    assert [f'"key": "seed", "value": {seed}' in log.read_text() for seed, log in enumerate(logs, 1)] == [True, True]
