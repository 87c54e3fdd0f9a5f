"""sweep.py: which runs a file asks for, whose row is whose, what is run again, and whole sweeps with faults in them."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
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
from cli.command_line import parse_command_line
from cli.errors import ConfigError, Refused
from data import DataConfig
from record import processes
from stages.mixture import StreamConfig
from sweeps import file, points, running, table
from sweeps.state import OK, STALE, State
from training.run_config import RunConfig
from training.validation import ValidationConfig

pytestmark = [pytest.mark.timeout(300, func_only=True), pytest.mark.usefixtures("quick_estimate")]

HEAD = f"keys: {json.dumps([*TINY_RUN, 'data.synthetic=true', 'model.weights=random', 'optimizer.lr=1e-4'])}\n"


@pytest.fixture(autouse=True)
def one_commit(monkeypatch) -> None:
    """The code's commit, whatever the checkout of the tests is."""
    for module in (command, points, running):
        monkeypatch.setattr(module, "commit", lambda: "a" * 40)
    # The command is a process of its own; other tests of this one may have begun a group of ranks.
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)


def written(folder: Path, text: str, name: str = "small") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(HEAD + text)
    return path


def read(folder: Path, text: str, *words: str) -> file.Sweep:
    return file.read_sweep([str(written(folder, text)), f"runs={folder}/runs", *words])


def problems(folder: Path, text: str, *words: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        points.resolve_all(read(folder, text, *words))
    return error.value.problems


# --- the file ---


def test_each_list_of_a_matrix_is_an_axis_and_points_are_combined_with_it(tmp_path):
    matrix = "matrix: {seed: [1, 2], optimizer: {lr: [0.1, 0.2]}}\n"
    assert list(read(tmp_path, matrix).points.values()) == [
        {"seed": seed, "optimizer.lr": lr} for seed in (1, 2) for lr in (0.1, 0.2)
    ]
    both = read(
        tmp_path, "matrix: {seed: [1, 2]}\npoints: [{image_size: 64}, {image_size: [64, 32], compile: 'off'}]\n"
    )
    assert list(both.points) == [
        "seed-1_image_size-64",
        "seed-1_image_size-64x32_compile-off",
        "seed-2_image_size-64",
        "seed-2_image_size-64x32_compile-off",
    ]
    assert both.axes == {"seed": [1, 2], "image_size": [64, [64, 32]], "compile": ["off"]}


def test_the_command_line_gives_an_axis_other_values_and_each_run_other_keys(tmp_path):
    sweep = read(tmp_path, "matrix: {seed: [1, 2]}\n", "seed=[3,4,5]", "optimizer.lr=1e-3", "limit_sec=7", "ranks=2")
    assert [values["seed"] for values in sweep.points.values()] == [3, 4, 5]
    assert sweep.typed == ("optimizer.lr=1e-3",) and (sweep.own.limit_sec, sweep.own.ranks) == (7, 2)
    assert list(read(tmp_path, "matrix: {seed: [1, 2]}\n", "seed=9").points) == ["seed-9"]


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("matrix: {seed: []}\n", [], "matrix: seed has no value. Give a list of values, or take it out."),
        ("matrix: {seed: [1]}\npoints: [{seed: 2}]\n", [], "seed is in matrix and in points. Leave it in one of them."),
        ("matrix: {run_name: [a, b]}\n", [], "run_name is given, but each run of a sweep has its own. Leave it out."),
        (
            "matrix: {seed: [1, 2, 3], image_size: [8, 16]}\nmax_runs: 5\n",
            [],
            "6 runs. Possible: max_runs=5 at most. Shorten an axis, or raise max_runs.",
        ),
        ("limit_sec: 5\n", [], "neither matrix nor points. Wanted: yaml, keys, matrix or points, and limit_sec,"),
        ("matrix: [1]\n", [], "matrix is [1]. Possible: a mapping of keys to lists of values."),
        ("points: {seed: 1}\n", [], "points is {'seed': 1}. Possible: a list of mappings of keys to values."),
        ("matrix: {seed: [1]}\nlimit_sec: 0\n", [], "limit_sec is 0. Possible: 1 and up."),
        ("matrix: {seed: [1], seed: [2]}\n", [], "cannot be read as YAML: line 2, column 21: while constructing"),
        ("matrix: {seed: [1]}\nmax_run: 3\n", [], "unknown key 'max_run'. Did you mean 'max_runs'?"),
        ("matrix: {seed: [1}\n", [], "cannot be read as YAML: line 2, column 18: while parsing"),
    ],
)
def test_a_file_that_is_no_sweep_says_what_is_wrong(tmp_path, text, words, message):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text, *words)
    assert [said for said in error.value.problems if f"small.yaml: {message}" in said], error.value.problems


def test_what_a_call_cannot_mean_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert command.main(["seed=1"]) == 2
    assert capsys.readouterr().err.startswith(
        "command line: no sweep given. Known: yamls/sweeps/flux_compile_microbatch"
    )
    assert command.main(["nowhere.yaml"]) == 2
    assert capsys.readouterr().err.startswith("nowhere.yaml: no such file. Known: yamls/sweeps/")
    path = str(written(tmp_path, "points: [{seed: 1}, {seed: 2}]\n"))
    assert command.main([path, "only=status:bad"]) == 2
    assert capsys.readouterr().err.startswith("only: 'status:bad' is not known. Possible: status:error, status:ok,")
    assert command.main([path, "seed=3"]) == 2
    assert capsys.readouterr().err == f"command line: seed varies in points of {path}. Change the file.\n"


# --- points ---


def test_all_problems_of_all_points_are_said_at_once_and_each_once(tmp_path):
    where, text = (
        tmp_path / "small.yaml",
        "matrix: {sede: [1, 2], optimizer.lr: [0.1, fast], precision: [fp32, tf32]}\n",
    )
    unknown, precision, lr = problems(tmp_path, text)
    assert unknown == f"{where}: unknown key 'sede'. Did you mean 'seed'?"
    assert precision.startswith("sede-1_lr-0.1_precision-tf32 and 3 more runs: precision: tf32 needs a GPU.")
    one, given = "sede-1_lr-fast_precision-fp32 and 3 more runs", f"{where}: optimizer.lr is 'fast'"
    assert lr == f"{one}: {given}. Possible: a number or null."


@pytest.mark.parametrize(
    "text", ["null", "true", "0123", "1e-4", "[1]", "a #b", "runs/a b", "${seed}", "'", "'x'", " a", ""]
)
def test_a_text_in_quotes_stays_a_text_on_the_runs_command_line(tmp_path, text):
    sweep = read(tmp_path, f"matrix: {{loggers.wandb.project: [{json.dumps(text)}]}}\n")
    [values] = sweep.points.values()
    word = f"key={file.as_word(values['loggers.wandb.project'])}"
    [at] = parse_command_line([word], {}).assignments
    assert at.value == text


def test_two_points_of_one_identity_are_refused_with_both_names(tmp_path):
    [said] = problems(tmp_path, "points: [{seed: 1}, {seed: 1, global_batch_size: 8}, {seed: 2}]\n")
    assert said == f"{tmp_path}/small.yaml: seed-1 and seed-1_global_batch_size-8 are the same run. Leave one of them."


def test_a_machine_with_one_gpu_refuses_points_for_eight_with_what_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr(points.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(points.torch.cuda, "device_count", lambda: 1)
    where = f"{tmp_path}/small.yaml"
    assert problems(tmp_path, "matrix: {seed: [1]}\nranks: 8\n") == [
        f"{where}: ranks is 8 and jobs 1, and this machine has 1 GPU. Give fewer, or run it on a machine with 8."
    ]
    monkeypatch.setattr(points.torch.cuda, "device_count", lambda: 8)
    assert problems(tmp_path, "matrix: {seed: [1]}\nranks: 2\njobs: 5\n") == [
        f"{where}: ranks is 2 and jobs 5, and this machine has 8 GPUs. Give fewer, or run it on a machine with 10."
    ]


def test_the_batch_is_checked_for_the_ranks_that_a_run_will_have(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)  # Composer sets it in a process that has trained
    [said] = problems(tmp_path, "matrix: {seed: [1]}\nranks: 3\n")
    assert said.startswith("global_batch_size: 8 is not a multiple of 3 ranks x 1 microbatch = 3.")
    assert "WORLD_SIZE" not in os.environ


def test_runs_side_by_side_have_gpus_of_their_own(tmp_path, monkeypatch):
    sweep = read(tmp_path, "matrix: {seed: [1, 2]}\nranks: 2\n")
    assert running.slots_of(sweep) == [{}]  # on a CPU one after the other
    assert running.slots_of(replace(sweep, own=replace(sweep.own, jobs=2))) == [{}, {}]
    monkeypatch.setattr(running.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(running.torch.cuda, "device_count", lambda: 5)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    own = [{"CUDA_VISIBLE_DEVICES": gpus} for gpus in ("0,1", "2,3")]
    assert running.slots_of(sweep) == own
    assert running.slots_of(replace(sweep, own=replace(sweep.own, jobs=1))) == own[:1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in running.slots_of(sweep)] == ["3,5", "6,7"]


def test_an_identity_is_of_what_is_computed_on_which_data_by_which_code(tmp_path, stage, monkeypatch):
    def of(text: str, *words: str) -> str:
        return points.resolve_all(read(tmp_path, f"matrix: {{seed: [1]}}\n{text}", *words))[0].identity

    first = of("")
    assert of("") == first == of("", "loggers.group=other", f"runs={tmp_path}/elsewhere")
    changed = {of("", "optimizer.lr=2e-4"), of("ranks: 2\n"), of("", "seed=2")}
    data = ["data.synthetic=false", f"data.remote={stage}", "data.workers=0"]
    changed.add(of("", *data))
    other = tmp_path / "stage"
    subprocess.run(["cp", "-r", str(stage), str(other)], check=True, timeout=30)
    at_other = ["data.synthetic=false", f"data.remote={other}", "data.workers=0"]
    before = of("", *at_other)
    facts = json.loads((other / "dataset.json").read_text())
    (other / "dataset.json").write_text(json.dumps({**facts, "made_by": "somebody else"}))
    changed |= {before, of("", *at_other)}
    monkeypatch.setattr(points, "commit", lambda: "b" * 40)
    changed.add(of(""))
    assert len({first, *changed}) == 8
    monkeypatch.setattr(points, "commit", lambda: f"{'b' * 40}+changes")
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
windows = [{"batch": n, "images": 8 * n, "loss": 1 / n, "images_per_sec": 10, "peak_mem_gib": 1, "window_batches": 1,
            "train_sec": 1, "data_wait_sec": 0, "eval_sec": 0, "other_sec": 0, "warmup": False, "unfinished": False,
            "start": 1} for n in range(1, 9)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in windows))
(folder / "config.yaml").write_text("seed: 1\\n")
summary = {"images_per_sec": 20.0, "images_per_sec_min": 18.0, "images_per_sec_max": 24.0, "images_per_sec_per_device": 10.0,
           "num_devices": 2, "windows": 8, "global_batch_size": 8, "loss": 0.125, "seconds": 3.0, "mfu": None}
(folder / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Runs that are programs: `what(seed)` says what each does. Returns the call of a sweep; keys that vary are its own."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def call(path: Path, does: dict, *words: str) -> int:
        def commands_of(runner: running.Runner, point: points.Point, slot: int) -> list[list[str]]:
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


def test_whatever_becomes_of_a_run_is_a_row_and_the_others_go_on(tmp_path, stand_in, capsys):
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
    said = capsys.readouterr().out
    assert "6 of 6 done; seed-6: ok after" in said and "5 of 6 done; seed-5: killed after" in said and "left" in said
    assert "6 runs: 1 failed, 1 timeout, 1 out_of_memory, 1 refused, 1 killed, 1 ok." in said
    for name in ("page.html", "loss.png"):
        assert (tmp_path / "runs/sweeps/small" / name).stat().st_size > 5000
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(tmp_path / "program.py") in (p.info["cmdline"] or [])
    ]


def test_a_call_runs_what_has_no_row_and_only_runs_again_what_it_is_told(tmp_path, stand_in):
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
    assert (
        capsys.readouterr().out.count("stale: what lies there is of another configuration, data, code or device") == 2
    )
    assert stand_in(path, {}, "optimizer.lr=1e-3") == 0
    after = rows(tmp_path)
    assert all(after[name]["identity"] != before[name]["identity"] for name in before)
    assert counts(tmp_path) == {"seed-1": 1, "seed-2": 1}
    moved = sorted(path.name for path in (tmp_path / "runs/sweeps/small" / STALE).iterdir() if path.is_dir())
    assert moved == [f"{name}-{row['identity'][:8]}-1" for name, row in before.items()]


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
    path = written(tmp_path, "matrix: {seed: [1, 2]}\nranks: 2\n")
    assert stand_in(path, {}, "dry_run=true") == 0
    lines = capsys.readouterr().out.splitlines()
    assert not (tmp_path / "runs").exists()
    shown = [line for line in lines if line.startswith("composer -n 2 benchmark.py loggers.group=small ")]
    assert [line.split("seed=")[1].split()[0] for line in shown] == ["1", "2"]


def test_the_commands_of_a_dry_run_are_words_of_a_shell(tmp_path, stand_in, capsys):
    path = written(tmp_path, "matrix: {image_size: [[64, 64]], seed: [1]}\n")
    assert stand_in(path, {}, "dry_run=true") == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("composer ")]
    assert "image_size=[64, 64]" in shlex.split(line)


def test_a_run_whose_folder_was_removed_is_run_again(tmp_path, stand_in):
    path = written(tmp_path, "matrix: {seed: [1, 2]}\n")
    assert stand_in(path, {}) == 0
    subprocess.run(["rm", "-r", str(tmp_path / "runs/sweeps/small/seed-1")], check=True, timeout=30)
    assert stand_in(path, {}) == 0
    assert counts(tmp_path) == {"seed-1": 1, "seed-2": 1}
    assert [row["status"] for row in rows(tmp_path).values()] == ["ok", "ok"]


def test_what_does_not_fit_by_the_plan_is_not_run_and_said_apart(tmp_path, stand_in):
    path = written(tmp_path, "matrix: {seed: [1], global_batch_size: [8, 80000000]}\n")
    assert stand_in(path, {}) == 0
    small, large = rows(tmp_path).values()
    assert (small["status"], large["status"]) == ("ok", "over_plan")
    assert large["message"].startswith("80000000 images a pass need about ")


def test_what_ran_while_the_code_was_another_one_is_run_again(tmp_path, stand_in, capsys, monkeypatch):
    """Of code that was edited for a while and restored the commit alone says nothing."""
    path, keep = written(tmp_path, "matrix: {seed: [1, 2, 3]}\n"), command.keep

    def edited(sweep, all_points, state):
        found = keep(sweep, all_points, state)
        changed = [row["status"] for row in found].count(OK) == 1  # from the end of the first to that of the second
        for module in (command, running):
            monkeypatch.setattr(module, "commit", lambda: "a" * 40 + "+changes" * changed)
        return found

    monkeypatch.setattr(command, "keep", edited)
    assert stand_in(path, {}) == 0
    assert [row["status"] for row in rows(tmp_path).values()] == ["ok", "ok", "ok"]
    assert stand_in(path, {}, "dry_run=true") == 0
    assert capsys.readouterr().out.count("seed-2  stale") == 1
    assert stand_in(path, {}) == 0
    lines = (tmp_path / "runs/sweeps/small/sweep.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"] for line in lines][6:] == ["seed-2"] * 2


def test_where_its_own_folder_is_taken_away_the_sweep_ends_with_a_line(tmp_path, stand_in, capsys, monkeypatch):
    def removed(sweep, all_points, state):
        shutil.rmtree(sweep.folder)
        return []

    monkeypatch.setattr(command, "keep", removed)
    assert stand_in(written(tmp_path, "matrix: {seed: [1, 2]}\n"), {}) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"{tmp_path}/runs/sweeps/small: the sweep cannot go on: ")
    assert said.endswith("Its runs are ended; the same command resumes them.")


def test_where_the_table_cannot_be_written_the_runs_go_on(tmp_path, stand_in, capsys):
    path = written(tmp_path, "matrix: {seed: [1, 2]}\n")
    (tmp_path / "runs/sweeps/small/summary.csv/held").mkdir(parents=True)
    assert stand_in(path, {}) == 0
    assert "summary.csv: cannot be written: " in capsys.readouterr().err
    assert counts(tmp_path) == {"seed-1": 1, "seed-2": 1}


def test_where_the_page_cannot_be_written_the_table_is_there_and_that_is_said(tmp_path, stand_in, capsys):
    path = written(tmp_path, "matrix: {seed: [1, 2]}\n")
    (tmp_path / "runs/sweeps/small/page.html/held").mkdir(parents=True)
    assert stand_in(path, {}) == 0
    assert "not all of record, picture and page could be written: out: " in capsys.readouterr().err
    assert [row["status"] for row in rows(tmp_path).values()] == ["ok", "ok"]


def test_a_second_call_beside_the_first_is_refused(tmp_path, stand_in, capsys):
    path = written(tmp_path, "matrix: {seed: [1]}\n")
    folder = tmp_path / "runs/sweeps/small"
    with running.alone(folder):
        assert stand_in(path, {}) == 2
    assert f"runs: another sweep.py is at {folder}." in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="cannot be written"), running.alone(tmp_path / "file/x"):
        pass


def test_half_a_line_that_a_killed_sweep_left_is_passed_over(tmp_path, stand_in):
    path = written(tmp_path, "matrix: {seed: [1, 2]}\n")
    assert stand_in(path, {}) == 0
    with open(tmp_path / "runs/sweeps/small/sweep.jsonl", "a") as lines:
        lines.write('{"run": "seed-1", "ident')
    before = rows(tmp_path)
    assert stand_in(path, {}) == 0
    assert rows(tmp_path) == before and counts(tmp_path) == {"seed-1": 1, "seed-2": 1}
    assert stand_in(path, {}, "only=status:ok") == 0
    assert num_lines(tmp_path / "runs/sweeps/small/sweep.jsonl") == 8


def test_changed_code_has_no_rows_of_before_and_that_is_said(tmp_path, stand_in, capsys, monkeypatch):
    path = written(tmp_path, "matrix: {seed: [1]}\n")
    for module in (command, points, running):
        monkeypatch.setattr(module, "commit", lambda: f"{'a' * 40}+changes")
    assert stand_in(path, {}) == stand_in(path, {}) == 0
    assert f"the tree is {'a' * 40}+changes, so nothing says" in capsys.readouterr().err
    assert len(list((tmp_path / "runs/sweeps/small/stale").glob("seed-1-*-1"))) == 1


def test_a_run_that_is_to_be_scored_afterwards_is(tmp_path):
    sweep = read(tmp_path, "matrix: {eval.when: ['off', after]}\n", "eval.every_images=8", "eval.prompts=x")
    runner = running.Runner(sweep, State(sweep.folder), lambda *ended: None)
    config = points.resolve_all(read(tmp_path, "matrix: {seed: [1]}\n"))[0].config
    for when, num in (("off", 1), ("after", 2)):
        point = points.Point("a", {}, ("x.yaml",), replace(config, eval=replace(config.eval, when=when)), "1", None)
        commands = runner.commands_of(point, 0)
        assert len(commands) == num and commands[0][-2:] == [str(ROOT / "benchmark.py"), "x.yaml"]
    assert commands[1][-2:] == [str(ROOT / "eval.py"), str(sweep.folder / "a")]


def test_runs_side_by_side_keep_their_shards_in_folders_of_their_own():
    """A folder of shards has one user: a second run is refused."""

    def of(slot: int, data: DataConfig, **held_out: str) -> list[str]:
        config = replace(RunConfig(), data=data, validation=ValidationConfig(**held_out))
        return running.own_folders(config, slot)

    kept = DataConfig(remote="/stage", local="/kept/")
    assert of(0, kept) == [] and of(1, kept) == ["data.local=/kept-2"]
    assert (
        of(1, DataConfig(remote="/stage")) == [] == of(1, replace(kept, synthetic=True))
    )  # read in place, or not at all
    [word] = of(1, DataConfig(remote="s3://bucket/stage"))
    assert re.fullmatch(r"data\.local=.*/stages/stage-\w{8}-2", word)
    both = of(1, kept, remote="/held-out", local="/other")
    assert both == ["data.local=/kept-2", "validation.local=/other-2"]
    streams = [StreamConfig(remote="/a", local="/b", repeat=2.0), StreamConfig(remote="/c")]
    [word] = of(2, DataConfig(streams=streams))
    assert json.loads(word.removeprefix("data.streams=")) == [
        {"remote": "/a", "local": "/b-3", "repeat": 2.0},
        {"remote": "/c"},
    ]


@pytest.mark.parametrize(
    "words",
    [
        lambda folder: [running.SCORE, f"{folder}/now"],  # scores afterwards
        lambda folder: [f"run_folder={folder}", "run_name=before"],  # of a point that the file has no more
    ],
)
def test_what_goes_on_of_a_killed_sweep_is_ended_whatever_it_does(tmp_path, words):
    state = State(tmp_path)
    state.add(points.Point("before", {}, (), None, "1", None), "started")
    left = subprocess.Popen(["bash", "-c", "sleep 60 & wait", *words(tmp_path)])
    try:
        running.end_left_overs(tmp_path, [*State(tmp_path).names, "now"])
        assert left.poll() is not None
    finally:
        left.kill()


# --- the table ---


@pytest.mark.parametrize("text", ["=1", "+1", "-x", "@a", "\t=1"])
def test_no_text_of_a_cell_is_a_formula_and_numbers_stay(text):
    row = {"a": text, "run": "x", "status": "ok", "message": "two\nlines", "identity": "1", "loss": -1.5}
    [cells] = csv.DictReader(io.StringIO(table.as_csv([row], ["a"])))
    assert cells["a"] == (f"'{text}" if text.strip() == text else text.strip()) or cells["a"] == f"'{text.strip()}"
    assert cells["a"][0] == "'" and cells["message"] == "two lines" and cells["loss"] == "-1.5"


def test_the_time_left_is_that_of_the_median(tmp_path):
    point = points.Point("a", {}, (), None, "1", None)
    line = table.progress(point, OK, 10.0, done=3, of=8, took=[10.0, 12.0, 900.0], jobs=2)
    assert line == "3 of 8 done; a: ok after 10 seconds; about 36 seconds left"  # three turns of two


@pytest.mark.parametrize(
    ("code", "name"), [(-9, "SIGKILL"), (137, "SIGKILL"), (247, "SIGKILL"), (143, "SIGTERM"), (245, "SIGSEGV")]
)
def test_a_signal_is_known_by_python_s_a_shell_s_and_the_launcher_s_codes(code, name):
    assert processes.signal_of(code).name == name
    assert processes.status_of(code, "") == ("failed" if name == "SIGSEGV" else "killed")


def test_the_record_has_what_the_table_has_and_the_curves(tmp_path, stand_in):
    assert stand_in(written(tmp_path, "matrix: {seed: [1, 2]}\n"), {2: "crash"}) == 1
    found = json.loads((tmp_path / "runs/sweeps/small/record.json").read_text())
    ok, failed = found["runs"]
    assert found["axes"] == ["seed"] and found["of_points"] == [] and found["sweep"] == "small"
    assert ok["values"] == {"seed": 1} and ok["loss"] == 0.125
    assert ok["curve"]["images"] == [8 * n for n in range(1, 9)]
    assert ok["curve"]["loss"] == pytest.approx([1 / n for n in range(1, 9)], rel=1e-5)
    assert failed["status"] == "failed" and failed["curve"]["images"] == []
    assert (tmp_path / "runs/sweeps/small/loss.png").is_file()


# --- whole sweeps ---

WRAPPED = """
import sys
import sweep
from sweeps import points, running
for module in (sweep, points, running):
    module.commit = lambda: "a" * 40  # whatever the checkout of the tests is
of_run = running.Runner.commands_of
def commands_of(runner, point, slot):
    own = point.values.get("global_batch_size", 8) >= 1024  # less address space than its batch takes
    start = ["bash", "-c", 'ulimit -v 8500000; exec "$@"', "x"] if own else []
    return [[*start, *command] for command in of_run(runner, point, slot)]
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


@pytest.mark.slow
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
            assert "processes of a sweep that was killed went on" in sweep.communicate(timeout=60)[1]
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
    own += "running.Runner.commands_of = lambda runner, point, slot: "
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
def test_the_command_as_people_type_it_shows_what_would_run():
    done = run(
        "python",
        "sweep.py",
        "yamls/sweeps/sd2_precision_microbatch.yaml",
        "dry_run=true",
        "model.preset=tiny",
        "image_size=64",
        "attention=auto",
        "cudnn_benchmark=false",
        "compile=off",
        "precision=[fp32,bf16]",
    )
    assert done.returncode == 0 and done.stdout.count("composer -n 1 benchmark.py yamls/sd2_512") == 8, done.stderr


@pytest.mark.slow
def test_seeds_of_a_benchmark_go_through_its_report(tmp_path, miniature):
    """Two of the ten, and two evaluations of each: yamls/sweeps/shapes_ten_seeds.yaml, with less of everything."""
    base = [
        word
        for word in miniature.small(tmp_path, "x")
        if not word.startswith(("run_", "mlperf.", "target.", "eval.when"))
    ]
    keys = ["eval.every_images=16", "target.fid=0.001", "save.every_images=0", "mlperf.org=Us", "mlperf.platform=here"]
    keys += [f"data.local={tmp_path}/local"]  # the runs side by side have their own
    text = f"yaml: {base[0]}\nkeys: {json.dumps([*base[1:], *keys])}\nmatrix: {{seed: [1, 2]}}\njobs: 2\n"
    path = tmp_path / "seeds.yaml"
    path.write_text(text)
    done = run("python", str(ROOT / "sweep.py"), str(path), f"runs={tmp_path}/runs")
    assert done.returncode == 0, done.stderr
    assert "no result: 2 runs of 10; 2 runs failed (seed-1, seed-2), the rules allow 1" in done.stdout, done.stdout
    logs = sorted((tmp_path / "runs/sweeps/seeds/mlperf").glob("Us/results/here/stable_diffusion/result_*.txt"))
    assert [f'"key": "seed", "value": {seed}' in log.read_text() for seed, log in enumerate(logs, 1)] == [True, True]
