"""sweep.py: which runs a file asks for, whose row is whose, what is run again, and whole sweeps with faults in them."""

from __future__ import annotations

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
from conftest import ROOT, TINY_RUN, started

import sweep as command
from common.command_line import parse_command_line
from common.errors import ConfigError
from run_folder import processes
from sweeps import plan, running, table
from sweeps.running import STALE, SweepState

pytestmark = pytest.mark.timeout(300, func_only=True)

HEAD = f"keys: {json.dumps([*TINY_RUN, 'data.synthetic=true', 'model.weights=random', 'optimizer.lr=1e-4'])}\n"
TWO_SEEDS = "matrix: {seed: [1, 2]}\n"


def set_commit(monkeypatch, name: str) -> None:
    for module in (command, plan, running):
        monkeypatch.setattr(module, "commit", lambda: name)


@pytest.fixture(autouse=True)
def one_commit(monkeypatch) -> None:
    """The code's commit, whatever the checkout of the tests is."""
    set_commit(monkeypatch, "a" * 40)
    # The command is a process of its own; other tests of this one may have begun a group of ranks.
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)


def written(folder: Path, text: str) -> Path:
    path = folder / "small.yaml"
    path.write_text(HEAD + text)
    return path


def read(folder: Path, text: str, *words: str) -> plan.Sweep:
    return plan.read_sweep([str(written(folder, text)), f"runs={folder}/runs", *words])


def problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        plan.resolve_all(read(folder, text))
    return error.value.problems


# --- the file ---


def test_each_list_of_a_matrix_is_an_axis_and_points_are_combined_with_it(tmp_path):
    matrix = "matrix: {seed: [1, 2], optimizer: {lr: [0.1, 0.2]}}\n"
    assert list(read(tmp_path, matrix).points.values()) == [
        {"seed": seed, "optimizer.lr": lr} for seed in (1, 2) for lr in (0.1, 0.2)
    ]
    both = read(tmp_path, f"{TWO_SEEDS}points: [{{image_size: 64}}, {{image_size: [64, 32], compile: 'off'}}]\n")
    names = ("image_size-64", "image_size-64x32_compile-off")
    assert list(both.points) == [f"seed-{seed}_{name}" for seed in (1, 2) for name in names]
    assert both.axes == {"seed": [1, 2], "image_size": [64, [64, 32]], "compile": ["off"]}


def test_the_command_line_gives_an_axis_other_values_and_each_run_other_keys(tmp_path):
    sweep = read(tmp_path, TWO_SEEDS, "seed=[3,4,5]", "optimizer.lr=1e-3", "limit_sec=7", "ranks=2")
    assert [values["seed"] for values in sweep.points.values()] == [3, 4, 5]
    assert sweep.typed == ("optimizer.lr=1e-3",) and (sweep.command.limit_sec, sweep.command.ranks) == (7, 2)
    assert list(read(tmp_path, TWO_SEEDS, "seed=9").points) == ["seed-9"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("matrix: {seed: []}\n", "matrix: seed has no value. Give a list of values, or take it out."),
        ("matrix: {seed: [1]}\npoints: [{seed: 2}]\n", "seed is in matrix and in points"),
        ("matrix: {seed: [1, 2, 3], image_size: [8, 16]}\nmax_runs: 5\n", "6 runs. Possible: max_runs=5 at most"),
        ("limit_sec: 5\n", "neither matrix nor points"),
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
        ([path, "only=status:bad"], "only: 'status:bad' is not known. Possible: status:error, status:ok,"),
        ([path, "seed=3"], f"command line: seed varies in points of {path}. Change the file."),
    ):
        assert command.main(words) == 2
        assert capsys.readouterr().err.startswith(message)


# --- points ---


def test_all_problems_of_all_points_are_reported_at_once_and_each_once(tmp_path):
    text = "matrix: {sede: [1, 2], optimizer.lr: [0.1, fast], precision: [fp32, tf32]}\n"
    file = f"{tmp_path}/small.yaml"
    unknown, lr = problems(tmp_path, text)
    assert unknown == f"{file}: unknown key 'sede'. Did you mean 'seed'?"
    assert lr.startswith(f"sede-1_lr-fast_precision-fp32 and 3 more runs: {file}: optimizer.lr is 'fast'")
    [same] = problems(tmp_path, "points: [{seed: 1}, {seed: 1, global_batch_size: 8}, {seed: 2}]\n")
    assert same.endswith("small.yaml: seed-1 and seed-1_global_batch_size-8 are the same run. Leave one of them.")


def test_a_text_in_quotes_stays_a_text_on_the_runs_command_line(tmp_path):
    for text in ("null", "0123", "1e-4", "[1]", "a #b", "${seed}", "'x'", " a", ""):
        sweep = read(tmp_path, f"matrix: {{loggers.wandb.project: [{json.dumps(text)}]}}\n")
        [values] = sweep.points.values()
        [at] = parse_command_line([f"key={plan.as_word(values['loggers.wandb.project'])}"], {}).assignments
        assert at.value == text


def set_gpus(monkeypatch, num: int) -> None:
    monkeypatch.setattr(plan.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(plan.torch.cuda, "device_count", lambda: num)


def test_ranks_have_to_fit_the_machine_and_the_batch(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)  # Composer sets it in a process that has trained
    [text] = problems(tmp_path, "matrix: {seed: [1]}\nranks: 3\n")
    assert text.startswith("global_batch_size: 8 is not a multiple of 3 ranks x 1 microbatch = 3.")
    assert "WORLD_SIZE" not in os.environ
    set_gpus(monkeypatch, 8)
    [text] = problems(tmp_path, "matrix: {seed: [1]}\nranks: 2\njobs: 5\n")
    assert "ranks is 2 and jobs 5, and this machine has 8 GPUs. Give fewer, or run it on a machine with 10." in text


def test_runs_side_by_side_have_gpus_of_their_own(tmp_path, monkeypatch):
    sweep = read(tmp_path, f"{TWO_SEEDS}ranks: 2\n")

    def with_jobs(num: int) -> plan.Sweep:
        return replace(sweep, command=replace(sweep.command, jobs=num))

    assert running.slots_of(sweep) == [{}]  # on a CPU one after the other
    assert running.slots_of(with_jobs(2)) == [{}, {}]
    set_gpus(monkeypatch, 5)
    for visible, expected in ((None, ["0,1", "2,3"]), ("3,5,6,7", ["3,5", "6,7"])):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        slots = [{"CUDA_VISIBLE_DEVICES": gpus} for gpus in expected]
        assert running.slots_of(sweep) == slots and running.slots_of(with_jobs(1)) == slots[:1]


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
    set_commit(monkeypatch, "b" * 40)
    changed.add(of(""))
    assert len({first, *changed}) == 8
    set_commit(monkeypatch, f"{'b' * 40}+changes")
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
lines.append(json.dumps({"evaluation": True, "start": 1, "batch": 8, "images": 64, "fid": 9.0, "clip": 0.5}))
(folder / "metrics.jsonl").write_text("\\n".join(lines) + "\\n")
(folder / "config.yaml").write_text("seed: 1\\n")
summary = {"images_per_sec": 20.0, "images_per_sec_min": 18.0, "images_per_sec_max": 24.0, "num_devices": 2, "windows": 8}
summary |= {"images_per_sec_per_device": 10.0, "global_batch_size": 8, "loss": 0.125, "seconds": 3.0, "mfu": None}
(folder / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A sweep of programs: `call(text, {seed: what it does}, *words)` returns the exit code.

    whole: with the checks of each run, and plot and page.
    """
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def call(text: str, does: dict, *words: str, whole: bool = False) -> int:
        def commands_of(runner: running.Runner, point: plan.Point) -> list[list[str]]:
            what = does.get(point.values["seed"], "ok")
            return [[sys.executable, str(program), str(runner.sweep.folder / point.name), what]]

        monkeypatch.setattr(running.Runner, "commands_of", commands_of)
        with pytest.MonkeyPatch.context() as patch:
            if not whole:
                patch.setattr(plan, "check", lambda config: [])
                patch.setattr(command.study, "has_curves", lambda record: False)
                patch.setattr(command.page, "write", lambda folders, path: path)
            return command.main([str(written(tmp_path, text)), f"runs={tmp_path}/runs", *words])

    return call


@pytest.fixture
def folder(tmp_path) -> Path:
    """The sweep's folder."""
    return tmp_path / "runs/sweeps/small"


def rows(folder: Path) -> dict[str, dict]:
    return {row["run"]: row for row in csv.DictReader(io.StringIO((folder / "summary.csv").read_text()))}


def statuses(folder: Path) -> list[str]:
    return [row["status"] for row in rows(folder).values()]


def counts(folder: Path) -> dict[str, int]:
    """How often each run was run."""
    return {path.parent.name: len(path.read_text()) for path in folder.glob("*/count")}


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.is_file() else 0


@pytest.mark.slow
def test_however_a_run_ends_it_is_a_row_and_the_others_continue(tmp_path, folder, stand_in, capsys):
    does = {1: "crash", 2: "hang", 3: "oom", 4: "refused", 5: "killed"}
    assert stand_in("matrix: {seed: [1, 2, 3, 4, 5, 6]}\nlimit_sec: 20\n", does, "limit_sec=3", whole=True) == 1
    assert statuses(folder) == ["failed", "timeout", "out_of_memory", "refused", "killed", "ok"]
    found = rows(folder)
    messages = {name: row["message"] for name, row in found.items()}
    assert messages["seed-1"] == "'=1+1"  # no formula
    assert messages["seed-2"] == "it was ended after 3 s (limit_sec)" and messages["seed-4"] == "seed: no"
    assert "can't allocate memory" in messages["seed-3"] and messages["seed-5"] == "ended from outside by SIGTERM"
    ok = found["seed-6"]
    expected = {"images_per_sec_per_device": "10.0", "images_per_sec_per_device_min": "9.0", "windows": "8"}
    expected |= {"step_ms": "400.0", "loss": "0.125", "mfu": ""}
    assert {name: ok[name] for name in expected} == expected
    assert float(ok["loss_tail"]) == pytest.approx((1 / 7 + 1 / 8) / 2, rel=1e-5)
    printed = capsys.readouterr().out
    assert "6 runs: 1 failed, 1 timeout, 1 out_of_memory, 1 refused, 1 killed, 1 ok." in printed
    record = json.loads((folder / "record.json").read_text())
    assert (record["axes"], record["of_points"], record["sweep"]) == (["seed"], [], "small")
    assert record["runs"][0]["status"] == "failed" and record["runs"][0]["curve"]["images"] == []
    last = record["runs"][5]
    assert (last["values"], last["curve"]["images"]) == ({"seed": 6}, [8 * n for n in range(1, 9)])
    assert last["curve"]["loss"] == pytest.approx([1 / n for n in range(1, 9)], rel=1e-5)
    assert last["evaluations"] == {"images": [64], "fid": [9.0], "clip": [0.5]}
    assert all((folder / name).stat().st_size > 5000 for name in ("page.html", "loss.png"))
    program = str(tmp_path / "program.py")
    assert not [p for p in psutil.process_iter(["cmdline"]) if program in (p.info["cmdline"] or [])]


@pytest.mark.slow
def test_a_call_runs_what_has_no_row_and_repeats_only_what_it_is_asked_to(folder, stand_in):
    text, lines, once = "matrix: {seed: [1, 2, 3]}\n", folder / "sweep.jsonl", {f"seed-{seed}": 1 for seed in (1, 2, 3)}
    assert stand_in(text, {2: "crash", 3: "killed"}) == 1
    assert stand_in(text, {}) == 1  # what failed would fail again; what was killed is run
    assert statuses(folder) == ["ok", "failed", "ok"]
    assert stand_in(text, {}, "only=status:error") == 0
    assert counts(folder) == once
    with open(lines, "a") as file:
        file.write('{"run": "seed-1", "ident')  # a sweep that was killed while it wrote
    before, num = rows(folder), num_lines(lines) - 1
    assert stand_in(text, {}) == 0
    assert rows(folder) == before and counts(folder) == once
    assert stand_in(text, {}, "only=status:ok") == 0  # a finished run would only say that it is: they start over
    assert num_lines(lines) == num + 6 and counts(folder) == once
    assert len(list((folder / STALE).glob("*/count"))) == 3


def test_a_row_of_another_identity_is_stale_and_its_run_is_moved_and_made_again(folder, stand_in, capsys):
    assert stand_in(TWO_SEEDS, {}) == 0
    before = rows(folder)
    assert stand_in(TWO_SEEDS, {}, "optimizer.lr=1e-3", "dry_run=true") == 0
    text = "stale: what lies there is of another configuration, data, code or device"
    assert capsys.readouterr().out.count(text) == 2
    assert stand_in(TWO_SEEDS, {}, "optimizer.lr=1e-3") == 0
    after = rows(folder)
    assert all(after[name]["identity"] != before[name]["identity"] for name in before)
    assert counts(folder) == {"seed-1": 1, "seed-2": 1}
    moved = sorted(path.name for path in (folder / STALE).iterdir() if path.is_dir())
    assert moved == [f"{name}-{row['identity'][:8]}-1" for name, row in before.items()]
    shutil.rmtree(folder / "seed-1")  # a run whose folder was removed is run again
    assert stand_in(TWO_SEEDS, {}, "optimizer.lr=1e-3") == 0
    assert counts(folder) == {"seed-1": 1, "seed-2": 1}


def test_no_stale_run_is_in_the_report_of_the_seeds(folder, stand_in, monkeypatch):
    given = []
    monkeypatch.setattr(command, "is_of_mlperf", lambda *given: True)
    monkeypatch.setattr(command.mlperf, "combine", lambda places, out: given.append([Path(p).name for p in places]))
    assert stand_in(TWO_SEEDS, {}) == 0
    assert stand_in(TWO_SEEDS, {}, "optimizer.lr=1e-3", "seed=1") == 0
    assert stand_in(TWO_SEEDS, {}, "optimizer.lr=1e-3", "only=status:failed") == 0
    assert statuses(folder) == ["ok", "stale"]
    assert given == [["seed-1", "seed-2"], ["seed-1"], ["seed-1"]]


def test_a_dry_run_writes_nothing_and_shows_the_commands(tmp_path, stand_in, capsys):
    assert stand_in("matrix: {image_size: [[64, 64]], seed: [1, 2]}\nranks: 2\n", {}, "dry_run=true") == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("composer -n 2 ")]
    assert [("image_size=[64, 64]" in words, "seed=2" in words) for words in commands] == [(True, False), (True, True)]
    assert all("loggers.group=small" in words for words in commands) and not (tmp_path / "runs").exists()


def test_a_run_that_does_not_fit_by_the_plan_is_not_started(folder, stand_in):
    assert stand_in("matrix: {seed: [1], global_batch_size: [8, 80000000]}\n", {}, whole=True) == 0
    assert statuses(folder) == ["ok", "over_plan"]
    assert [*rows(folder).values()][1]["message"].startswith("80000000 images a pass need about ")


def test_a_second_call_during_the_first_is_refused(folder, stand_in, capsys):
    with running.lock_folder(folder):
        assert stand_in(TWO_SEEDS, {}) == 2
    assert f"runs: another sweep.py uses {folder}." in capsys.readouterr().err


def test_uncommitted_code_reuses_no_row(folder, stand_in, capsys, monkeypatch):
    set_commit(monkeypatch, f"{'a' * 40}+changes")
    assert stand_in("matrix: {seed: [1]}\n", {}) == stand_in("matrix: {seed: [1]}\n", {}) == 0
    assert f"the tree is {'a' * 40}+changes, so earlier runs may be" in capsys.readouterr().err
    assert len(list((folder / STALE).glob("seed-1-*-1"))) == 1


def test_a_run_that_is_to_be_scored_afterwards_is(tmp_path):
    sweep = read(tmp_path, "matrix: {eval.when: ['off', after]}\n", "eval.every_images=8", "eval.prompts=x")
    runner = running.Runner(sweep, SweepState(sweep.folder), lambda *ended: None)
    config = plan.resolve_all(read(tmp_path, "matrix: {seed: [1]}\n"))[0].config
    for when, num in (("off", 1), ("after", 2)):
        point = plan.Point("a", {}, ("x.yaml",), replace(config, eval=replace(config.eval, when=when)), "1", None)
        commands = runner.commands_of(point)
        assert len(commands) == num and commands[0][-2:] == [str(ROOT / "benchmark.py"), "x.yaml"]
    assert commands[1][-2:] == [str(ROOT / "eval.py"), str(sweep.folder / "a")]


def test_processes_that_outlive_a_killed_sweep_are_ended(tmp_path):
    """One that scores afterwards, and one of a point that the file no longer has."""
    SweepState(tmp_path).add(plan.Point("before", {}, (), None, "1", None), "started")
    for words in ([running.SCORE, f"{tmp_path}/now"], [f"run_folder={tmp_path}", "run_name=before"]):
        left = subprocess.Popen(["bash", "-c", "sleep 60 & wait", *words])
        try:
            running.end_left_overs(tmp_path, [*SweepState(tmp_path).names, "now"])
            assert left.poll() is not None
        finally:
            left.kill()


def test_no_text_of_a_cell_is_a_formula_and_numbers_stay():
    for text in ("=1", "+1", "-x", "@a", "\t=1"):
        row = {"a": text, "run": "x", "status": "ok", "message": "two\nlines", "identity": "1", "loss": -1.5}
        [cells] = csv.DictReader(io.StringIO(table.as_csv([row], ["a"])))
        assert cells["a"].startswith("'") and cells["a"].endswith(text.strip())
        assert cells["message"] == "two lines" and cells["loss"] == "-1.5"


# --- whole sweeps ---

WRAPPED = """
import sys
import sweep
from sweeps import plan, running
for module in (sweep, plan, running):
    module.commit = lambda: "a" * 40  # whatever the checkout of the tests is
running.Runner.commands_of = lambda runner, point: [["bash", "-c", "sleep 600 & wait", str(runner.sweep.folder)]]
sweep.start(sweep.main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_signal_leaves_no_process_behind_and_the_same_command_goes_on(tmp_path, folder, sent):
    def left() -> list[psutil.Process]:
        return [p for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or [])]

    (tmp_path / "wrapped.py").write_text(WRAPPED)
    call = [f"{tmp_path}/wrapped.py", str(written(tmp_path, TWO_SEEDS)), f"runs={tmp_path}/runs"]
    with started("python", *call, output=subprocess.PIPE) as sweep:
        until = time.monotonic() + 200
        while not left():
            assert sweep.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        group = os.getpgid(left()[0].pid)
        os.kill(sweep.pid, sent)
        _, said = sweep.communicate(timeout=90)
    assert sweep.returncode == 128 + sent and not processes.is_alive(group)
    assert "2 runs: 2 pending. The same command resumes the sweep." in said
