"""python -m reports.mlperf: what it says of runs, by fixtures from the reference's curves (not results), and what it writes.

A fixture's log says that it is one, and the report leaves it out for that. These tests take that line away, to have something
to collect.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import run
from mlperf_fixture import Drive, closed, curves, header, passes, record, write_run

from reports import mlperf
from reports.mlperf import olympic_mean

pytestmark = pytest.mark.timeout(120, func_only=True)

NEVER = [{**point, "fid": 150.0} for point in curves(512)[0][:4]]  # a run that did not converge


def taken(folder: Path) -> Path:
    """Take the line away that says that a log is a fixture."""
    log = folder / "mlperf.log"
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if '"fixture"' not in line))
    return folder


def make(folder: Path, points=None, *, seed: int, **changes) -> Path:
    return taken(write_run(folder, curves(512)[seed] if points is None else points, seed=seed, **changes))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Ten runs that are a result; not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    return [make(folder / f"r{n}", seed=n) for n in range(10)]


@pytest.fixture
def first(runs, tmp_path) -> Path:
    """A copy of the first, to be changed."""
    return shutil.copytree(runs[0], tmp_path / "first")


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
def submitted(runs, tmp_path_factory) -> tuple[Path, str]:
    """Ten runs as a submission, reported by the program; and what it said."""
    folder = tmp_path_factory.mktemp("submitted")
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


def test_the_package_checker_finds_no_errors_in_a_submission(submitted, tmp_path):
    """Compliance, seeds, reference points and the system's description."""
    fixture, words = submitted[0] / "Fixture", ["training", "5.0.0", f"--log_output={tmp_path / 'log'}"]
    for checker, path, text in (
        ("package_checker", fixture, "PACKAGE CHECKER FOUND NO ERRORS"),
        ("system_desc_checker", fixture / "systems/no_machine.json", "System description checker passed"),
    ):
        done = run(sys.executable, "-m", f"mlperf_logging.{checker}", str(path), *words)
        assert text in done.stderr, done.stderr


MACHINE = {"device": "NVIDIA H200", "device_memory_gib": 139.8, "cpu": "Some CPU", "cpu_sockets": 2, "cpu_cores": 96}
MACHINE |= {"cpu_threads": 192, "memory_gib": 2015.4, "os": "Ubuntu 22.04.4 LTS, kernel 6.5.0", "commit": "abc"}
MACHINE |= {"torch_version": "2.7.0", "cuda_version": "12.6"}


def test_the_record_of_a_machine_is_its_description(tmp_path):
    """Cores and threads are a processor's, as in NVIDIA's submissions."""
    folder = make(tmp_path / "r", seed=0, number_of_nodes=2, accelerators_per_node=8)
    (folder / "environment.json").write_text(json.dumps(MACHINE))
    system = mlperf.system_of(mlperf.read_run(folder))
    expected = {"submitter": "Fixture", "division": "closed", "status": mlperf.STATUS, "system_name": "no_machine"}
    expected |= {"number_of_nodes": "2", "host_processors_per_node": "2", "host_processor_model_name": "Some CPU"}
    expected |= {"host_processor_core_count": "48", "host_processor_vcpu_count": "96"}
    expected |= {"host_memory_capacity": "2015 GiB", "accelerator_memory_capacity": "140 GiB"}
    expected |= {"accelerators_per_node": "8", "accelerator_model_name": "NVIDIA H200"}
    expected |= {"framework": "PyTorch 2.7.0", "other_software_stack": "CUDA 12.6"}
    expected |= {"operating_system": "Ubuntu 22.04.4 LTS, kernel 6.5.0", "sw_notes": "Easel, commit abc"}
    assert {field: value for field, value in system.items() if value} == expected


def test_one_run_of_ten_may_fail_and_is_the_worst(runs, tmp_path, capsys):
    """Also one that diverged before its first evaluation."""
    drive = Drive(tmp_path / "nan", constants=header(512, 10)).start()
    drive.state.total_loss_dict["loss/train/total"] = float("nan")
    with pytest.raises(ValueError, match="not finite"), drive.log.aborted_by_divergence(drive.state):
        raise ValueError("the loss is not finite")
    record(tmp_path / "nan", [], seed=10, global_batch_size=512, config=closed())
    text = said(capsys, [*runs[:9], taken(tmp_path / "nan")], tmp_path / "out")
    firsts = sorted(next(point["images"] for point in points if passes(point)) for points in curves(512)[:9])
    assert f"olympic_mean_images={sum(firsts[1:]) / 8:.0f}\n" in text
    assert re.search(r"^nan +10 +aborted +0 ", text, re.MULTILINE)
    assert "runs=10 failed=1" in text and "\nresult: " in text


def test_two_failed_runs_or_too_few_runs_are_no_result(runs, tmp_path, capsys):
    failed = [make(tmp_path / f"r{n}", NEVER, seed=n) for n in (8, 9)]
    text = said(capsys, [*runs[:8], *failed], tmp_path / "out")
    assert "no result: 2 runs failed (r8, r9), the rules allow 1.\n" in text and "\nresult: " not in text
    text = said(capsys, runs[:4], tmp_path / "few")
    assert "olympic_mean_images=2560000\n" in text and "no result: 4 runs of 10.\n" in text


def test_runs_that_the_reference_points_do_not_allow_are_no_result_of_the_closed_division(tmp_path, capsys):
    def report(name: str, pace: int = 1, **changes) -> str:
        curve = [[{**point, "images": point["images"] // pace} for point in points] for points in curves(512)]
        made = [make(tmp_path / f"{name}{n}", curve[n], seed=n, **changes) for n in range(10)]
        return said(capsys, made, tmp_path / "out")

    text = report("fast", pace=2)
    assert "reference points of 5.0.0: RCP Interpolation: FAILED" in text
    assert "no result: it converges in fewer images than the reference points allow.\n" in text
    text = report("large", global_batch_size=4096)
    assert "no result: MLPerf has no reference point for it: Missing RCP, please submit RCP with BS = 4096.\n" in text
    text = report("open", config=closed(division="open"))
    assert "reference points: the open division has none\n" in text and "open division, ruleset 5.0.0." in text


@pytest.mark.parametrize(
    ("values", "num_failed", "mean"),
    [((3.0, 1.0, 2.0), 0, 2.0), ((1.0, 2.0, 6.0), 1, 4.0), ((1.0, 2.0), 0, None), ((1.0, 4.0), 1, 4.0), ((), 2, None)],
)
def test_the_olympic_mean_is_without_the_best_and_the_worst(values, num_failed, mean):
    assert olympic_mean(values, num_failed) == mean


# --- bad input ---


def test_runs_of_different_configurations_machines_logs_or_one_seed_are_refused(runs, first, tmp_path, capsys):
    out, fix = tmp_path / "out", "A result needs one configuration and ten seeds: leave one of them out."
    assert refused(capsys, [*runs[:2], first], out) == [f"seed: 0 in {first} and in {runs[0]}. {fix}"]
    other = make(tmp_path / "z", seed=2, gradient_accumulation_steps=2)
    assert refused(capsys, [runs[0], other], out) == [
        f"gradient_accumulation_steps: 1 in {runs[0]}, 2 in {other}. {fix}"
    ]
    record(first, [], seed=0, global_batch_size=1024, config=closed("4.0.0"), optimizer={"eps": 1e-6})
    machine = json.loads((first / "environment.json").read_text())
    (first / "environment.json").write_text(json.dumps({**machine, "num_devices": 4}))
    assert [line.partition(":")[0] for line in refused(capsys, [runs[1], first], out)] == [
        *("global_batch_size", "mlperf.ruleset", "optimizer.eps", "num_devices")
    ]


def test_a_folder_that_is_no_run_or_cannot_be_written_and_unknown_words_are_refused(runs, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "file").touch()
    one, two = refused(capsys, [tmp_path / "other"], tmp_path / "out")
    assert one == f"{tmp_path}/other: not a run, it has no config.yaml. Left out."
    assert two.startswith(f"{tmp_path}/other: no run (config.yaml). No run is left.")
    assert mlperf.main([str(runs[0]), f"out={tmp_path / 'file'}"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"out: {tmp_path / 'file'}/Fixture") and "cannot be written: Not a directory." in line


def edited(name: str, before: str, after: str):
    """Replace a text of a run's file."""

    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert before in text
        (folder / name).write_text(text.replace(before, after))

    return edit


def value(key: str, before: object, after: object):
    """Replace a value of the log."""
    return edited("mlperf.log", *(f'"{key}", "value": {json.dumps(of)}' for of in (before, after)))


def with_lines(change):
    """Replace the lines of the log."""

    def edit(folder: Path) -> None:
        log = folder / "mlperf.log"
        log.write_text("".join(change(log.read_text().splitlines(keepends=True))))

    return edit


def scores_at(lines: list[str], images: int) -> list[str]:
    return [line for line in lines if f'"samples_count": {images}' in line and '"eval_' in line]


def without_scores(lines: list[str], images: int) -> list[str]:
    return [line for line in lines if line not in scores_at(lines, images)]


def restarted(folder: Path) -> None:
    shutil.rmtree(folder)
    points = curves(512)[0][1:5]
    Drive(folder, constants=header(512, 0)).start().train(512_000)
    Drive(folder, constants=header(512, 0)).start(512_000).reach(*points).end()
    record(taken(folder), points, seed=0, global_batch_size=512, config=closed())


def passed_at_once(folder: Path) -> None:
    shutil.rmtree(folder)
    make(folder, [{**point, "fid": 50.0, "clip": 0.2} for point in curves(512)[0]], seed=0)


def without_log(folder: Path) -> None:
    (folder / "mlperf.log").unlink()


def never_evaluated(folder: Path) -> None:
    with_lines(lambda lines: [line for line in lines if '"eval_' not in line and "run_stop" not in line])(folder)
    (folder / "metrics.jsonl").write_text("")


def passed_twice(lines: list[str]) -> list[str]:
    """A second point passes, and run_stop stands behind it."""
    more = [*scores_at(lines, 2_560_000), lines[-1]]
    return [*lines[:-1], *(line.replace("2560000", "3072000") for line in more)]


CUT = with_lines(lambda lines: [*lines[:-1], lines[-1][:40]])
CANNOT_COUNT = {
    "its log ends in the middle of a line: it is being written, or its run was killed": CUT,
    "its log ends before run_start: the run is just starting, or was killed": with_lines(lambda lines: []),
    "its log says success, but none of its evaluations meets target.fid=10.0 and target.clip=0.15": (
        edited("config.yaml", "fid: 90.0", "fid: 10.0")
    ),
    "its log has no scores at 2,048,000 images": with_lines(lambda lines: without_scores(lines, 2_048_000)),
    "it passed at its first evaluation, the checkers ask for two: evaluate more often (eval.every_images)": (
        passed_at_once
    ),
    "5 images a score: no result of the closed division": value("eval_samples", 30000, 5),
    "trained on 6,000,000 samples: no result of the closed": value("train_samples", 6513144, 6000000),
    "mlperf.org: '..' cannot be a folder's name": value("submission_org", "Fixture", ".."),
    "MLPerf's checker (5.0.0) refuses its log: CHECK for 'init_stop' failed in line 19 (failed test: ": (
        edited("mlperf.log", '"time_ms": 1700000000000', '"time_ms": 1690000000000')
    ),
    "its log has no evaluation: composer eval.py RUN makes them (eval.when=after)": never_evaluated,
    "its log is open: the run is still going or was killed, or": with_lines(lambda lines: lines[:-1]),
    "its run_stop is at 3,072,000 images, but it passed first at 2,560,000": with_lines(passed_twice),
    "was restarted at 512,000 images: no result of the closed division": restarted,
    "has no mlperf.log (mlperf.enabled=true)": without_log,
}


@pytest.mark.parametrize("why", CANNOT_COUNT)
def test_a_run_that_cannot_count_says_why(first, why):
    CANNOT_COUNT[why](first)
    assert mlperf.read_run(first).problem().startswith(why)


def test_a_run_that_cannot_count_is_left_out_and_the_others_are_reported(runs, tmp_path, capsys):
    bad, none = (shutil.copytree(runs[0], tmp_path / name) for name in ("bad", "none"))
    CUT(bad)
    without_log(none)
    fixture = write_run(tmp_path / "f", curves(512)[2], seed=2)
    text = said(capsys, [bad, none, fixture, runs[1]], tmp_path / "out")
    assert "run=bad left out: its log ends in the middle of a line" in text
    assert "run=none left out: has no mlperf.log (mlperf.enabled=true).\n" in text
    assert "run=f left out: a fixture: written from the published curves of MLPerf's reference: not a result.\n" in text
    assert re.search(r"^r1 +1 +success ", text, re.MULTILINE) and "no result: 1 runs of 10.\n" in text
    assert len(list((tmp_path / "out").rglob("result_*.txt"))) == 1
    said(capsys, [fixture], tmp_path / "other")
    assert not list((tmp_path / "other").rglob("result_*.txt"))


def test_an_easier_target_after_the_end_makes_no_pass_of_a_run_that_failed(tmp_path):
    folder = make(tmp_path / "late", NEVER, seed=0)
    assert mlperf.read_run(folder).problem() is None  # one that failed, as it is
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("fid: 90.0", "fid: 200.0").replace("clip: 0.15", "clip: 0.0"))
    assert mlperf.read_run(folder).problem() == (
        "its log says aborted, but it passed at 512,000 images: its target was changed after its end, or its log was"
    )


def test_one_run_of_ten_needs_scores_at_every_point(runs, tmp_path, capsys):
    """The others need those of the first pass and of the point before it."""
    late = [shutil.copytree(of, tmp_path / "late" / of.name) for of in runs]
    for folder in late:
        with_lines(lambda lines: without_scores(lines, 512_000))(folder)
    text = said(capsys, late, tmp_path / "out")
    assert "no result: no run has scores at every point up to its first pass; the rules ask for that of one run" in text
    assert "\nresult: " in said(capsys, [*late[:3], runs[3], *late[4:]], tmp_path / "out")


def test_an_open_run_that_was_restarted_counts(first, tmp_path, capsys):
    restarted(first)
    for name in ("mlperf.log", "config.yaml"):
        edited(name, "closed", "open")(first)
    assert re.search(r"^first +0 +success ", said(capsys, [first], tmp_path / "out"), re.MULTILINE)


# --- who scored it ---


def test_the_log_itself_names_the_networks_that_scored_it(tmp_path):
    """eval.py leaves no line in the record."""
    points = [{**point, "inception": "shapes-reader", "clip_model": "ViT-H-14"} for point in curves(512)[0]]
    folder = make(tmp_path / "mini", points, seed=0)
    (folder / "metrics.jsonl").unlink()
    run = mlperf.read_run(folder)
    assert run.foreign_scores == ["scored by shapes-reader"]
    assert run.problem().startswith("scored by shapes-reader: no result of the closed division, which asks for 30,000")
