"""python -m reports.mlperf: what it says of runs, by fixtures from the reference's curves (not results), and what it writes.

A fixture's log says that it is one, and the report leaves it out for that. These tests take that line away, to have something
to collect.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run
from mlperf_fixture import Drive, closed, curves, header, passes, record, write_run
from PIL import Image
from test_layout import imports_of

from reports import mlperf, mlperf_runs
from reports.mlperf_band import read_bands, standing
from reports.mlperf_runs import olympic_mean
from zoo.mlperf import RULESETS

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
    assert text.count(" status=success ") == 10


@pytest.mark.parametrize("ruleset", RULESETS)
def test_the_package_checker_finds_no_errors_in_what_is_written(submitted, tmp_path, ruleset):
    """Compliance, seeds, reference points and the system's description, ten files in their place."""
    out, _ = submitted
    words = ["training", ruleset, f"--log_output={tmp_path / 'log'}"]
    done = run(sys.executable, "-m", "mlperf_logging.package_checker", str(out / "Fixture"), *words)
    assert "PACKAGE CHECKER FOUND NO ERRORS" in done.stderr, done.stderr
    system = str(out / "Fixture/systems/no_machine.json")
    done = run(sys.executable, "-m", "mlperf_logging.system_desc_checker", system, *words)
    assert "System description checker passed" in done.stderr


def test_the_package_checker_refuses_a_seed_that_comes_twice(submitted, tmp_path):
    shutil.copytree(submitted[0], tmp_path / "out")
    path = tmp_path / "out/Fixture/results/no_machine/stable_diffusion/result_9.txt"
    path.write_text(path.read_text().replace('"key": "seed", "value": 9,', '"key": "seed", "value": 0,'))
    words = [str(tmp_path / "out/Fixture"), "training", "5.0.0", f"--log_output={tmp_path / 'log'}"]
    done = run(sys.executable, "-m", "mlperf_logging.package_checker", *words)
    assert "Seed checker failed" in done.stderr and "PACKAGE CHECKER FOUND ERRORS" in done.stderr


def test_what_is_not_known_of_a_system_is_named(submitted):
    out, text = submitted
    system = json.loads((out / "Fixture/systems/no_machine.json").read_text())
    assert (system["submitter"], system["framework"], system["accelerator_model_name"]) == (
        "Fixture",
        "PyTorch 2.7.0",
        "no machine",
    )
    missing = [field for field, value in system.items() if not value]
    assert f"missing in no_machine.json: {', '.join(missing)}.\n" in text and "cooling" in missing
    assert (
        "missing beside it: the source code (implementations/easel); that caches were cleared before each run" in text
    )


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
    assert "runs=10 failed=1" in text and "run=r9 seed=9 status=aborted images=2048000" in text and "\nresult: " in text


def test_a_run_that_diverged_before_its_first_evaluation_is_one_that_failed(tmp_path, capsys):
    runs = ten(tmp_path / "runs")[:9]
    drive = Drive(tmp_path / "runs" / "nan", closed(), header(512, 10))
    drive.start()
    drive.state.total_loss_dict["loss/train/total"] = float("nan")
    with pytest.raises(ValueError, match="not finite"), drive.log.aborted_by_divergence(drive.state):
        raise ValueError("the loss is not finite")
    record(tmp_path / "runs" / "nan", [], seed=10, global_batch_size=512, config=closed())
    text = said(capsys, [*runs, taken(tmp_path / "runs" / "nan")], tmp_path / "out")
    assert "run=nan seed=10 status=aborted images=0 " in text and "runs=10 failed=1" in text and "\nresult: " in text


def test_two_runs_of_ten_may_not(tmp_path, capsys):
    text = said(capsys, ten(tmp_path / "runs", num_failed=2), tmp_path / "out")
    assert "no result: 2 runs failed (r8, r9), the rules allow 1.\n" in text and "\nresult: " not in text


def test_too_few_runs_have_a_mean_and_are_no_result(tmp_path, capsys):
    text = said(capsys, ten(tmp_path / "runs")[:4], tmp_path / "out")
    assert "olympic_mean_images=2560000\n" in text and "no result: 4 runs of 10.\n" in text


def test_runs_that_converge_faster_than_the_reference_points_allow_are_no_result(tmp_path, capsys):
    fast = [[{**point, "images": point["images"] // 2} for point in points] for points in curves(512)[:10]]
    runs = [make(tmp_path / f"r{n}", points, seed=n) for n, points in enumerate(fast)]
    text = said(capsys, runs, tmp_path / "out")
    assert "reference points of 5.0.0: RCP Interpolation: FAILED" in text
    assert "no result: it converges in fewer images than the reference points allow.\n" in text


def test_the_open_division_has_no_reference_points(tmp_path, capsys):
    text = said(capsys, ten(tmp_path / "runs", config=closed(division="open")), tmp_path / "out")
    assert "reference points: the open division has none\n" in text and "open division, ruleset 5.0.0." in text


@pytest.mark.parametrize(
    ("values", "num_failed", "mean"),
    [((3.0, 1.0, 2.0), 0, 2.0), ((1.0, 2.0, 6.0), 1, 4.0), ((1.0, 2.0), 0, None), ((1.0, 4.0), 1, 4.0), ((), 2, None)],
)
def test_the_olympic_mean_is_without_the_best_and_the_worst(values, num_failed, mean):
    assert olympic_mean(values, num_failed) == mean


# --- bad input ---


def test_runs_of_different_configurations_or_machines_are_refused(tmp_path, capsys):
    runs = ten(tmp_path / "runs")[:2]
    record(runs[1], [], seed=1, global_batch_size=1024, config=closed("4.0.0"), optimizer={"eps": 1e-6})
    machine = json.loads((runs[1] / "environment.json").read_text())
    (runs[1] / "environment.json").write_text(json.dumps({**machine, "num_devices": 4}))
    fix = "A result is of one configuration and ten seeds: leave one of them out."
    assert refused(capsys, runs, tmp_path / "out") == [
        f"global_batch_size: 512 in {runs[0]}, 1024 in {runs[1]}. {fix}",
        f"mlperf.ruleset: 5.0.0 in {runs[0]}, 4.0.0 in {runs[1]}. {fix}",
        f"optimizer.eps: None in {runs[0]}, 1e-06 in {runs[1]}. {fix}",
        f"num_devices: 8 in {runs[0]}, 4 in {runs[1]}. {fix}",
    ]


def test_the_same_seed_twice_is_refused(tmp_path, capsys):
    runs = ten(tmp_path / "runs")[:2]
    runs.append(make(tmp_path / "runs" / "again", curves(512)[5], seed=1))
    fix = "A result is of one configuration and ten seeds: leave one of them out."
    assert refused(capsys, runs, tmp_path / "out") == [f"seed: 1 in {runs[2]} and in {runs[1]}. {fix}"]


def test_a_folder_that_is_no_run_is_named_and_words_that_are_none_are_refused(tmp_path, capsys):
    (tmp_path / "other").mkdir()
    assert refused(capsys, [tmp_path / "other"], tmp_path / "out") == [
        f"{tmp_path}/other: no config.yaml: no run, left out.",
        f"{tmp_path}/other: no run (config.yaml). Give runs: runs/NAME ...",
    ]
    assert mlperf.main(["nowhere", "outt=x"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "outt: unknown key. Possible: out=FOLDER.",
        "nowhere is no folder. Give runs: runs/NAME ...",
    ]


def test_files_that_cannot_be_read_are_named(tmp_path, capsys):
    good, bad = make(tmp_path / "good", seed=1), make(tmp_path / "bad", seed=2)
    cases = {"config.yaml": "a: [", "summary.json": "{", "environment.json": ""}
    for name, text in cases.items():
        before = (bad / name).read_text()
        (bad / name).write_text(text)
        assert mlperf.main([str(good), str(bad), f"out={tmp_path / 'out'}"]) == 0
        assert f"{bad / name} cannot be read: " in capsys.readouterr().err, name
        (bad / name).write_text(before)
    (bad / "config.yaml").write_text("[]")
    assert mlperf.main([str(bad), f"out={tmp_path / 'out'}"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("Give runs: runs/NAME ...")


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
    if kind == "a constant":
        return make(folder, points, seed=0, opt_adamw_epsilon=1e-6)
    make(folder, points, seed=0)
    log = folder / "mlperf.log"
    lines = log.read_text().splitlines(keepends=True)
    if kind == "cut":
        lines[-1] = lines[-1][:40]
    elif kind == "no evaluation":
        lines = [line for line in lines if '"eval_' not in line and "run_stop" not in line]
        (folder / "metrics.jsonl").write_text("")
    elif kind == "bytes that are no text":
        log.write_bytes(log.read_bytes() + b"\xff\xfe\n")
        return folder
    elif kind == "open":
        lines.pop()
    elif kind == "two passes":  # a second point passes, and run_stop stands behind it
        last = json.dumps(points[5]["images"])
        more = [line for line in lines if '"samples_count": 2560000' in line and '"eval_' in line]
        lines[-1:] = [line.replace("2560000", last) for line in [*more, lines[-1]]]
    elif kind == "two ends":
        lines.append(lines[-1])
    elif kind == "no log":
        log.unlink()
        return folder
    log.write_text("".join(lines))
    return folder


WHY = {
    "cut": "its log ends in the middle of a line: the run was killed. Start it again, with the same command",
    "bytes that are no text": "its log ends in the middle of a line: the run was killed",
    "no evaluation": "its log has no evaluation: composer eval.py RUN makes them (eval.when=after)",
    "open": "its log is open: the run goes on, or composer eval.py RUN has not come to its end",
    "two passes": "its run_stop is at 3,072,000 images, but it passed first at 2,560,000",
    "two ends": "its log has more than one run in it",
    "restarted": "was restarted at 512,000 images: no result of the closed division",
    "a constant": "MLPerf's checker (5.0.0) refuses its log: CHECK for 'opt_adamw_epsilon' failed in line",
    "no log": "has no mlperf.log (mlperf.enabled=true)",
}


@pytest.mark.parametrize("kind", WHY)
def test_a_run_that_cannot_count_is_left_out_and_says_why(tmp_path, capsys, kind):
    runs = [broken(tmp_path / "bad", kind), make(tmp_path / "good", seed=1)]
    text = said(capsys, runs, tmp_path / "out")
    assert f"run=bad left out: {WHY[kind]}" in text
    assert "run=good seed=1 status=success" in text and "no result: 1 runs of 10.\n" in text
    assert len(list((tmp_path / "out").rglob("result_*.txt"))) == 1 and (tmp_path / "out/band.png").is_file()


def test_an_open_run_that_was_restarted_counts(tmp_path, capsys):
    folder = broken(tmp_path / "bad", "restarted")
    for path in (folder / "mlperf.log", folder / "config.yaml"):
        path.write_text(path.read_text().replace("closed", "open"))
    assert "run=bad seed=0 status=success" in said(capsys, [folder], tmp_path / "out")


def test_a_fixture_is_left_out(tmp_path, capsys):
    write_run(tmp_path / "f", curves(512)[0], seed=0)
    text = said(capsys, [tmp_path / "f"], tmp_path / "out")
    assert "f (batch 512, a fixture) at 2,560,000 images: " in text
    assert "run=f left out: a fixture: written from the published curves of MLPerf's reference: not a result.\n" in text
    assert not list((tmp_path / "out").rglob("result_*.txt"))


# --- the band ---


def test_the_band_is_the_forty_runs_of_the_reference():
    bands = read_bands()
    assert {batch: of["fid"].num_runs for batch, of in bands.items()} == {512: 14, 1024: 13, 2048: 13}
    at = bands[512]["fid"].at(2_560_000)
    assert at[1] == pytest.approx(83.7, abs=0.05) and at[0] < at[1] < at[2]  # the README's mean
    half = bands[512]["clip"].at(768_000)  # between two points, on a straight line
    ends = [bands[512]["clip"].at(images) for images in (512_000, 1_024_000)]
    assert half == pytest.approx([(a + b) / 2 for a, b in zip(*ends, strict=True)])
    assert bands[512]["fid"].at(511_999) is None


@pytest.mark.parametrize(
    ("batch", "line", "text"),
    [
        (512, {"fid": 300.0, "clip": 0.3}, "FID 300, worse than all 14 of the reference"),
        (512, {"fid": 10.0, "clip": 0.01}, "FID 10, better than all 14 of the reference"),
        (512, {"fid": 10.0, "clip": 0.01}, "CLIP 0.01, worse than all 14 of the reference"),
        (512, {"fid": 83.7, "clip": None}, "FID 83.7, among 14 of the reference ("),
        (8, {"fid": 83.7, "clip": 0.1}, "the reference has no runs at a global batch of 8, but at 512, 1024, 2048"),
        (512, {"images": 48, "fid": 1.0}, "FID 1, outside of the reference's 512,000 to 5,120,000 images"),
    ],
)
def test_where_a_run_stands(batch, line, text):
    assert text in standing({"images": 2_560_000, **line}, batch, read_bands())


def test_a_score_that_compares_with_no_other_says_so(tmp_path):
    folder = make(tmp_path / "mini", seed=0, eval_samples=5)
    (folder / "config.yaml").write_text(
        (folder / "config.yaml").read_text() + "eval:\n  inception: random\n  clip: a.bin\n"
    )
    assert mlperf_runs.read_run(folder).label == "mini (batch 512, 5 images a score, random inception)"


def test_a_score_by_other_networks_names_them(tmp_path):
    folder = make(tmp_path / "mini", seed=0)
    run = mlperf_runs.read_run(folder)
    networks = {"inception": "shapes-reader", "clip_model": "ViT-H-14", "num_images": 30_000}
    other = dataclasses.replace(run, recorded=[{"images": 512, **networks}])
    assert other.label == "mini (batch 512, scored by shapes-reader)"
    same = dataclasses.replace(run, recorded=[{"images": 512, **networks, "inception": "inception-2015-12-05"}])
    assert same.label == run.label == "mini (batch 512)"


@pytest.mark.parametrize("num", [1, 10])
def test_the_picture_is_drawn(tmp_path, capsys, num):
    runs = [make(tmp_path / f"r{n}", seed=n) for n in range(num)]
    said(capsys, runs, tmp_path / "out")
    image = Image.open(tmp_path / "out/band.png").convert("RGB")
    assert image.size[0] > 1000 and len(set(image.resize((200, 100)).getdata())) > 50


def test_reports_import_no_other_room():
    for path in (ROOT / "reports").glob("*.py"):
        modules = {name.split(".")[0] for name in imports_of(path)}
        own = {name for name in modules if (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file()}
        assert own <= {"reports"}, path
