"""python -m reports.mlperf: what it says of runs, by fixtures from the reference's curves (not results), and what it writes.

A fixture's log says that it is one, and the report leaves it out for that. These tests take that line away, to have something
to collect.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run
from mlperf_fixture import Drive, closed, curves, header, passes, record, write_run
from omegaconf import OmegaConf
from test_layout import imports_of

from families.mlperf import SD_RULESETS
from reports import mlperf
from reports.mlperf import olympic_mean
from run_folder.environment import environment

pytestmark = pytest.mark.timeout(120, func_only=True)

NEVER = [{**point, "fid": 150.0} for point in curves(512)[0][:4]]  # a run that did not converge


def taken(folder: Path) -> Path:
    """Take the line away that says that a log is a fixture."""
    log = folder / "mlperf.log"
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if '"fixture"' not in line))
    return folder


def make(folder: Path, points=None, *, seed: int, **changes) -> Path:
    return taken(write_run(folder, curves(512)[seed] if points is None else points, seed=seed, **changes))


def ten(folder: Path, num_failed: int = 0, **changes) -> list[Path]:
    failed = range(10 - num_failed, 10)
    return [make(folder / f"r{n}", NEVER if n in failed else None, seed=n, **changes) for n in range(10)]


def said(capsys, runs: list[Path], out: Path) -> str:
    assert mlperf.main([*map(str, runs), f"out={out}"]) == 0
    return capsys.readouterr().out


def refused(capsys, runs: list[Path], out: Path) -> list[str]:
    capsys.readouterr()  # what the making of the runs has said
    assert mlperf.main([*map(str, runs), f"out={out}"]) == 2
    assert not out.exists()
    return capsys.readouterr().err.splitlines()


# --- a result ---


@pytest.fixture(scope="module")
def submitted(tmp_path_factory) -> tuple[Path, str]:
    """Ten runs as a submission, reported by the program; and what it said."""
    folder = tmp_path_factory.mktemp("submitted")
    runs = ten(folder / "runs")
    done = run(sys.executable, "-m", "reports.mlperf", *map(str, runs), f"out={folder / 'out'}")
    assert done.returncode == 0, done.stderr
    return folder / "out", done.stdout


def test_ten_runs_are_a_result_with_the_olympic_mean_and_the_reference_points(submitted):
    _, text = submitted
    firsts = sorted(next(point["images"] for point in points if passes(point)) for points in curves(512)[:10])
    images = sum(firsts[1:-1]) / 8
    minutes = sum((count / 1000 + 100 * (count // 512_000)) / 60 for count in firsts[1:-1]) / 8  # Drive's clock
    assert f"runs=10 failed=0 olympic_mean_minutes={minutes:.4f} olympic_mean_images={images:.0f}\n" in text
    assert "reference points of 5.0.0: RCP Interpolation: passed; score x 1.0000\n" in text
    assert f"result: {minutes:.4f} minutes, closed division, ruleset 5.0.0.\n" in text
    table = text[text.index("run  ") :].splitlines()
    assert table[0].split() == ["run", "seed", "status", "images", "minutes", "init_sec"]
    assert [line.split()[1:3] for line in table[1:11]] == [[str(seed), "success"] for seed in range(10)]


@pytest.mark.parametrize("ruleset", SD_RULESETS)
def test_the_package_checker_finds_no_errors_in_a_submission(submitted, tmp_path, ruleset):
    """Compliance, seeds, reference points and the system's description."""
    out, _ = submitted
    words = ["training", ruleset, f"--log_output={tmp_path / 'log'}"]
    done = run(sys.executable, "-m", "mlperf_logging.package_checker", str(out / "Fixture"), *words)
    assert "PACKAGE CHECKER FOUND NO ERRORS" in done.stderr, done.stderr
    system = str(out / "Fixture/systems/no_machine.json")
    done = run(sys.executable, "-m", "mlperf_logging.system_desc_checker", system, *words)
    assert "System description checker passed" in done.stderr


def test_unknown_fields_of_a_system_are_named(submitted):
    out, text = submitted
    system = json.loads((out / "Fixture/systems/no_machine.json").read_text())
    known = {"submitter": "Fixture", "framework": "PyTorch 2.7.0", "accelerator_model_name": "no machine"}
    assert known.items() <= system.items()
    missing = [field for field, value in system.items() if not value]
    assert f"missing in no_machine.json: {', '.join(missing)}.\n" in text and "cooling" in missing
    assert "missing next to it: the source code (implementations/easel); cleared caches before each run" in text


MACHINE = {"device": "NVIDIA H200", "device_memory_gib": 139.8, "cpu": "Some CPU", "cpu_sockets": 2, "cpu_cores": 96}
MACHINE |= {"cpu_threads": 192, "memory_gib": 2015.4, "os": "Ubuntu 22.04.4 LTS, kernel 6.5.0", "commit": "abc"}
MACHINE |= {"torch_version": "2.7.0", "cuda_version": "12.6"}


def test_the_record_of_a_machine_is_its_description(tmp_path):
    """Cores and threads are a processor's, as in NVIDIA's submissions."""
    folder = make(tmp_path / "r", seed=0, number_of_nodes=2, accelerators_per_node=8)
    (folder / "environment.json").write_text(json.dumps(MACHINE))
    system = mlperf.system_of(mlperf.read_run(folder))
    assert {field: value for field, value in system.items() if value} == {
        "submitter": "Fixture",
        "division": "closed",
        "status": "Research, Development, or Internal (RDI)",
        "system_name": "no_machine",
        "number_of_nodes": "2",
        "host_processors_per_node": "2",
        "host_processor_model_name": "Some CPU",
        "host_processor_core_count": "48",
        "host_processor_vcpu_count": "96",
        "host_memory_capacity": "2015 GiB",
        "accelerators_per_node": "8",
        "accelerator_model_name": "NVIDIA H200",
        "accelerator_memory_capacity": "140 GiB",
        "framework": "PyTorch 2.7.0",
        "other_software_stack": "CUDA 12.6",
        "operating_system": "Ubuntu 22.04.4 LTS, kernel 6.5.0",
        "sw_notes": "Easel, commit abc",
    }
    folder = make(tmp_path / "here", seed=0, number_of_nodes=1, accelerators_per_node=0)
    (folder / "environment.json").write_text(json.dumps(environment()))
    system = mlperf.system_of(mlperf.read_run(folder))
    assert all(system[field] for field in ("host_processor_model_name", "host_memory_capacity", "operating_system"))
    assert (system["accelerator_model_name"], system["accelerators_per_node"]) == ("none", "0")  # none is not unknown


def test_a_field_that_was_filled_in_by_hand_stays(tmp_path, capsys):
    run, path = make(tmp_path / "r", seed=0), tmp_path / "out/Fixture/systems/no_machine.json"
    said(capsys, [run], tmp_path / "out")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cooling": "air", "framework": "another"}))
    text = said(capsys, [run], tmp_path / "out")
    system = json.loads(path.read_text())
    assert (system["cooling"], system["framework"]) == ("air", "PyTorch 2.7.0") and " cooling" not in text


def test_a_second_report_leaves_nothing_of_the_first(tmp_path, capsys):
    runs = ten(tmp_path / "runs")
    said(capsys, runs, tmp_path / "out")
    said(capsys, runs[:3], tmp_path / "out")
    folder = tmp_path / "out/Fixture/results/no_machine/stable_diffusion"
    assert sorted(path.name for path in folder.iterdir()) == ["result_0.txt", "result_1.txt", "result_2.txt"]


def test_one_run_of_ten_may_fail_and_is_the_worst(tmp_path, capsys):
    text = said(capsys, ten(tmp_path / "runs", num_failed=1), tmp_path / "out")
    firsts = sorted(next(point["images"] for point in points if passes(point)) for points in curves(512)[:9])
    assert f"olympic_mean_images={sum(firsts[1:]) / 8:.0f}\n" in text
    assert "runs=10 failed=1" in text and "\nresult: " in text
    assert re.search(r"^r9 +9 +aborted +2048000 ", text, re.MULTILINE)


def test_a_run_that_diverged_before_its_first_evaluation_has_failed(tmp_path, capsys):
    runs = ten(tmp_path / "runs")[:9]
    drive = Drive(tmp_path / "runs" / "nan", closed(), header(512, 10))
    drive.start()
    drive.state.total_loss_dict["loss/train/total"] = float("nan")
    with pytest.raises(ValueError, match="not finite"), drive.log.aborted_by_divergence(drive.state):
        raise ValueError("the loss is not finite")
    record(tmp_path / "runs" / "nan", [], seed=10, global_batch_size=512, config=closed())
    text = said(capsys, [*runs, taken(tmp_path / "runs" / "nan")], tmp_path / "out")
    assert re.search(r"^nan +10 +aborted +0 ", text, re.MULTILINE)
    assert "runs=10 failed=1" in text and "\nresult: " in text


def test_two_failed_runs_or_too_few_runs_are_no_result(tmp_path, capsys):
    runs = ten(tmp_path / "runs", num_failed=2)
    text = said(capsys, runs, tmp_path / "out")
    assert "no result: 2 runs failed (r8, r9), the rules allow 1.\n" in text and "\nresult: " not in text
    text = said(capsys, runs[:4], tmp_path / "few")
    assert "olympic_mean_images=2560000\n" in text and "no result: 4 runs of 10.\n" in text


def test_runs_that_the_reference_points_do_not_allow_are_no_result_of_the_closed_division(tmp_path, capsys):
    fast = [[{**point, "images": point["images"] // 2} for point in points] for points in curves(512)[:10]]
    text = said(capsys, [make(tmp_path / f"r{n}", p, seed=n) for n, p in enumerate(fast)], tmp_path / "out")
    assert "reference points of 5.0.0: RCP Interpolation: FAILED" in text
    assert "no result: it converges in fewer images than the reference points allow.\n" in text
    runs = [make(tmp_path / f"large{n}", seed=n, global_batch_size=4096) for n in range(10)]
    text = said(capsys, runs, tmp_path / "out")
    assert "no result: MLPerf has no reference point for it: Missing RCP, please submit RCP with BS = 4096.\n" in text
    text = said(capsys, ten(tmp_path / "open", config=closed(division="open")), tmp_path / "out")
    assert "reference points: the open division has none\n" in text and "open division, ruleset 5.0.0." in text


@pytest.mark.parametrize(
    ("values", "num_failed", "mean"),
    [((3.0, 1.0, 2.0), 0, 2.0), ((1.0, 2.0, 6.0), 1, 4.0), ((1.0, 2.0), 0, None), ((1.0, 4.0), 1, 4.0), ((), 2, None)],
)
def test_the_olympic_mean_is_without_the_best_and_the_worst(values, num_failed, mean):
    assert olympic_mean(values, num_failed) == mean


# --- bad input ---


def test_runs_of_different_configurations_machines_logs_or_one_seed_are_refused(tmp_path, capsys):
    runs = ten(tmp_path / "runs")[:2]
    fix = "A result needs one configuration and ten seeds: leave one of them out."
    again = make(tmp_path / "runs" / "again", curves(512)[5], seed=1)
    assert refused(capsys, [*runs, again], tmp_path / "out") == [f"seed: 1 in {again} and in {runs[1]}. {fix}"]
    other = make(tmp_path / "runs" / "z", seed=2, gradient_accumulation_steps=2)
    [line] = refused(capsys, [runs[0], other], tmp_path / "out")
    assert line == f"gradient_accumulation_steps: 1 in {runs[0]}, 2 in {other}. {fix}"
    record(runs[1], [], seed=1, global_batch_size=1024, config=closed("4.0.0"), optimizer={"eps": 1e-6})
    machine = json.loads((runs[1] / "environment.json").read_text())
    (runs[1] / "environment.json").write_text(json.dumps({**machine, "num_devices": 4}))
    assert [line.partition(":")[0] for line in refused(capsys, runs, tmp_path / "out")] == [
        *("global_batch_size", "mlperf.ruleset", "optimizer.eps", "num_devices")
    ]


def test_a_folder_that_is_no_run_and_unknown_words_are_refused(tmp_path, capsys):
    (tmp_path / "other").mkdir()
    first, second = refused(capsys, [tmp_path / "other"], tmp_path / "out")
    assert first == f"{tmp_path}/other: not a run, it has no config.yaml. Left out."
    assert second.startswith(f"{tmp_path}/other: no run (config.yaml). No run is left.")
    for words, text in (
        (["nowhere", "outt=x"], "command line: unknown key 'outt'."),
        (["nowhere"], "nowhere is not a folder."),
    ):
        assert mlperf.main(words) == 2 and capsys.readouterr().err.startswith(text)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", b"a: ["),
        ("config.yaml", b"\xff"),
        ("config.yaml", b"[]"),
        ("summary.json", b"{"),
        ("summary.json", b"[]"),
        ("environment.json", b""),
        ("environment.json", b"[]"),
        ("metrics.jsonl", b'{"evaluation": tr\n'),
        ("metrics.jsonl", b"x\n"),
    ],
)
def test_a_run_with_an_unreadable_file_is_left_out_by_the_files_name(tmp_path, capsys, name, content):
    good, bad = make(tmp_path / "good", seed=1), make(tmp_path / "bad", seed=2)
    (bad / name).write_bytes(content)
    capsys.readouterr()
    assert mlperf.main([str(good), str(bad), f"out={tmp_path / 'out'}"]) == 0
    assert str(bad / name) in capsys.readouterr().err.splitlines()[-1]
    [line, *_] = refused(capsys, [bad], tmp_path / "none")
    assert line.startswith(str(bad / name))


CHANGED = {
    "few images": ("mlperf.log", '"eval_samples", "value": 30000', '"eval_samples", "value": 5'),
    "few samples": ("mlperf.log", '"train_samples", "value": 6513144', '"train_samples", "value": 6000000'),
    "the name of its parents": (
        "mlperf.log",
        '"submission_org", "value": "Fixture"',
        '"submission_org", "value": ".."',
    ),
    "a late init_stop": ("mlperf.log", '"time_ms": 1700000000000', '"time_ms": 1690000000000'),
    "a harder target": ("config.yaml", "fid: 90.0", "fid: 10.0"),
    "another year": ("config.yaml", "ruleset: 5.0.0", "ruleset: 3.1.0"),
}


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert mlperf.main([str(make(tmp_path / "r", seed=0)), f"out={tmp_path / 'file'}"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"out: {tmp_path / 'file'}/Fixture") and "cannot be written: Not a directory." in line


def broken(folder: Path, kind: str) -> Path:
    """A run that cannot count, each for another reason."""
    points = curves(512)[0]
    if kind == "restarted":
        drive = Drive(folder, closed(), header(512, 0))
        drive.start()
        drive.train(512_000)
        again = Drive(folder, closed(), header(512, 0))
        again.start(512_000)
        for point in points[1:5]:
            again.train(point["images"])
            again.evaluate(point)
        again.end()
        record(folder, points[1:5], seed=0, global_batch_size=512, config=closed())
        return taken(folder)
    if kind == "passed at once":
        points = [{**point, "fid": 50.0, "clip": 0.2} for point in points]
    make(folder, points, seed=0, **({"opt_adamw_epsilon": 1e-6} if kind == "a constant" else {}))
    log = folder / "mlperf.log"
    if kind in CHANGED:
        name, before, after = CHANGED[kind]
        text = (folder / name).read_text()
        assert before in text
        (folder / name).write_text(text.replace(before, after))
        return folder
    lines = log.read_text().splitlines(keepends=True)
    if kind == "cut":
        lines[-1] = lines[-1][:40]
    elif kind == "no evaluation":
        lines = [line for line in lines if '"eval_' not in line and "run_stop" not in line]
        (folder / "metrics.jsonl").write_text("")
    elif kind == "open":
        lines.pop()
    elif kind == "nothing in it":
        lines = []
    elif kind == "a point left out":
        lines = [line for line in lines if not ('"samples_count": 2048000' in line and '"eval_' in line)]
    elif kind == "two passes":  # a second point passes, and run_stop stands behind it
        last = json.dumps(points[5]["images"])
        more = [line for line in lines if '"samples_count": 2560000' in line and '"eval_' in line]
        lines[-1:] = [line.replace("2560000", last) for line in [*more, lines[-1]]]
    elif kind == "no log":
        log.unlink()
        return folder
    log.write_text("".join(lines))
    return folder


WHY = {
    "cut": "its log ends in the middle of a line: it is being written, or its run was killed: then start that again, with",
    "nothing in it": "its log ends before run_start: the run is just starting, or was killed. Start it again",
    "a harder target": "its log says success, but none of its evaluations meets target.fid=10.0 and target.clip=0.15",
    "a point left out": "its log has no scores at 2,048,000 images: the rules ask for the first pass and the point before",
    "passed at once": "it passed at its first evaluation, the checkers ask for two: evaluate more often (eval.every_images)",
    "few images": "5 images a score: no result of the closed division, which asks for 30,000 images, by the benchmark's",
    "few samples": "trained on 6,000,000 samples: no result of the closed division, which asks for 6,513,144",
    "the name of its parents": "mlperf.org: '..' cannot be a folder's name, and a submission has a folder of that name",
    "another year": "mlperf.ruleset: '3.1.0' is not known here. Possible: 4.0.0, 4.1.0, 5.0.0",
    "a late init_stop": "MLPerf's checker (5.0.0) refuses its log: CHECK for 'init_stop' failed in line 19 (failed test: ",
    "no evaluation": "its log has no evaluation: composer eval.py RUN makes them (eval.when=after)",
    "open": "its log is open: the run is still going or was killed, or composer eval.py RUN is not finished",
    "two passes": "its run_stop is at 3,072,000 images, but it passed first at 2,560,000",
    "restarted": "was restarted at 512,000 images: no result of the closed division",
    "a constant": "MLPerf's checker (5.0.0) refuses its log: CHECK for 'opt_adamw_epsilon' failed in line",
    "no log": "has no mlperf.log (mlperf.enabled=true)",
}


@pytest.mark.parametrize("kind", WHY)
def test_a_run_that_cannot_count_says_why(tmp_path, kind):
    assert mlperf.read_run(broken(tmp_path / "bad", kind)).problem().startswith(WHY[kind])


def test_a_run_that_cannot_count_is_left_out_and_the_others_are_reported(tmp_path, capsys):
    runs = [broken(tmp_path / "bad", "cut"), broken(tmp_path / "none", "no log"), make(tmp_path / "good", seed=1)]
    text = said(capsys, runs, tmp_path / "out")
    assert f"run=bad left out: {WHY['cut']}" in text and f"run=none left out: {WHY['no log']}.\n" in text
    assert re.search(r"^good +1 +success ", text, re.MULTILINE) and "no result: 1 runs of 10.\n" in text
    assert len(list((tmp_path / "out").rglob("result_*.txt"))) == 1
    fixture = write_run(tmp_path / "f", curves(512)[0], seed=0)
    text = said(capsys, [fixture], tmp_path / "other")
    assert "run=f left out: a fixture: written from the published curves of MLPerf's reference: not a result.\n" in text
    assert not list((tmp_path / "other").rglob("result_*.txt"))


def test_an_easier_target_after_the_end_makes_no_pass_of_a_run_that_failed(tmp_path):
    folder = make(tmp_path / "late", NEVER, seed=0)
    assert mlperf.read_run(folder).problem() is None  # one that failed, as it is
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("fid: 90.0", "fid: 200.0").replace("clip: 0.15", "clip: 0.0"))
    assert mlperf.read_run(folder).problem() == (
        "its log says aborted, but it passed at 512,000 images: its target was changed after its end, or its log was"
    )


def test_one_run_of_ten_needs_scores_at_every_point(tmp_path, capsys):
    """The others need those of the first pass and of the point before it."""
    runs = ten(tmp_path / "runs")
    for folder in runs:
        lines = (folder / "mlperf.log").read_text().splitlines(keepends=True)
        late = [line for line in lines if not ('"samples_count": 512000' in line and '"eval_' in line)]
        (folder / "mlperf.log").write_text("".join(late))
    text = said(capsys, runs, tmp_path / "out")
    assert "no result: no run has scores at every point up to its first pass; the rules ask for that of one run" in text
    shutil.rmtree(runs[3])
    make(runs[3], seed=3)
    assert "\nresult: " in said(capsys, runs, tmp_path / "out")


def test_the_division_is_the_logs_own(tmp_path, capsys):
    """A resume may have changed it in config.yaml."""
    folder = make(tmp_path / "r", seed=0)
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text().replace("closed", "open"))
    text = said(capsys, [folder], tmp_path / "out")
    assert json.loads((tmp_path / "out/Fixture/systems/no_machine.json").read_text())["division"] == "closed"
    assert "the open division" not in text


def test_the_keys_of_a_later_start_count_and_are_in_the_submission(tmp_path, capsys):
    folder = make(tmp_path / "r", seed=0)
    (folder / "overrides.yaml").write_text("target:\n  clip: 0.12\ndevice_train_microbatch_size: 8\n")
    run = mlperf.read_run(folder)
    assert (run.config["target.clip"], run.config["device_train_microbatch_size"]) == (0.12, 8)
    said(capsys, [folder], tmp_path / "out")
    [written] = (tmp_path / "out").rglob("implementations/easel/config.yaml")
    assert OmegaConf.load(written).target.clip == 0.12
    assert OmegaConf.load(written).global_batch_size == 512


def test_an_open_run_that_was_restarted_counts(tmp_path, capsys):
    folder = broken(tmp_path / "bad", "restarted")
    for path in (folder / "mlperf.log", folder / "config.yaml"):
        path.write_text(path.read_text().replace("closed", "open"))
    assert re.search(r"^bad +0 +success ", said(capsys, [folder], tmp_path / "out"), re.MULTILINE)


# --- who scored it ---


def test_the_log_itself_names_the_networks_that_scored_it(tmp_path):
    """eval.py leaves no line in the record."""
    points = [{**point, "inception": "shapes-reader", "clip_model": "ViT-H-14"} for point in curves(512)[0]]
    folder = make(tmp_path / "mini", points, seed=0)
    (folder / "metrics.jsonl").unlink()
    run = mlperf.read_run(folder)
    assert run.foreign_scores == ["scored by shapes-reader"]
    assert run.problem().startswith("scored by shapes-reader: no result of the closed division, which asks for 30,000")


def test_reports_read_runs_through_the_record_and_import_no_room_that_makes_them():
    for path in (ROOT / "reports").glob("*.py"):
        modules = {name.split(".")[0] for name in imports_of(path)}
        own = {name for name in modules if (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file()}
        assert own <= {"reports", "run_folder", "config", "common"}, path


READS_ITSELF = {"mlperf.py:_read_system", "samples.py:main", "page_content.py:_embedded", "model_card.py:text"}
READS_ITSELF |= {"compare.py:_read_one", "formatting.py:script_of"}
READS_ITSELF |= {"formatting.py:show_record", "formatting.py:rewrite"}
"""Of no run's folder: a report's own files, the reference's curves, images, a measurement's record, a page of docs."""


def test_reports_open_no_file_of_a_run_themselves():
    found, reads = set(), r"open(_regular)?|read_(regular|json)|json\.loads?|.*\.(open|read_text|read_bytes)"
    for path in (ROOT / "reports").glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                called = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
                if any(re.fullmatch(reads, name) for name in called):
                    found.add(f"{path.name}:{function.name}")
    assert found == READS_ITSELF
