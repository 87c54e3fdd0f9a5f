"""The MLPerf log: MLPerf's own checkers, called as programs, accept it; and what a run, a restart and eval.py write."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ROOT, TINY_RUN, run
from filelock import FileLock
from miniature import NUM_IMAGES, NUM_PROMPTS
from mlperf_fixture import BEGAN, Drive, closed, curves, header, passes, write_run
from test_evaluation import words_of  # noqa: F401

import benchmark
import eval as eval_command
from callbacks.mlperf_log import MLPerfConfig, conclude
from cli.command_line import parse_command_line
from cli.errors import ConfigError
from config import flat, load
from evaluation.scoring import TargetConfig
from preflight.run import closed_data_problems, quick_problems
from record.checkpoint_files import WEIGHTS, listed, read, stem, write
from record.mlperf_events import MADE_WITH, TOKEN, EventLog, read_events
from reports.mlperf_runs import read_run
from training import scores
from zoo.mlperf_sd import RULESETS, SD

pytestmark = pytest.mark.timeout(200, func_only=True)


def program(tmp_path: Path, module: str, *words: object) -> tuple[bool, str]:
    """Call a checker as its users do. Returns whether it is content, and what it said."""
    log = f"--log_output={tmp_path / 'checker.log'}"
    done = run(sys.executable, "-m", f"mlperf_logging.{module}", *map(str, words), log, timeout=120)
    return done.returncode == 0, done.stdout + done.stderr


def compliance(tmp_path: Path, log: Path, ruleset: str = "5.0.0") -> tuple[bool, str]:
    return program(tmp_path, "compliance_checker", "--usage=training", f"--ruleset={ruleset}", "--werror", log)


def keys(log: Path) -> list[str]:
    return [event["key"] for event in read_events(log)]


def only(events: list[dict], key: str) -> dict:
    [found] = [event for event in events if event["key"] == key]
    return found


def runs_backwards(log: Path) -> list[tuple[str, str]]:
    """Keys of neighbours of which the second one is earlier; a run_stop may be dated back to its snapshot."""
    events = read_events(log)
    return [
        (a["key"], b["key"])
        for a, b in itertools.pairwise(events)
        if b["time_ms"] < a["time_ms"] and b["key"] != "run_stop"
    ]


HEAD = ["cache_clear", "submission_benchmark", "submission_division", "submission_org", "submission_platform"]
HEAD += ["submission_status", "init_start", *header(512, 1), "init_stop", "run_start"]
BLOCK = ["block_start", "loss", "lr_abs", "tracked_stats", "block_stop"]
EVALUATION = ["eval_start", "eval_accuracy", "eval_accuracy", "eval_stop"]


# --- events ---


def test_events_are_in_order_and_all_after_run_start_say_how_many_images(tmp_path):
    points = curves(512)[0]
    write_run(tmp_path, points, seed=3)
    events = read_events(tmp_path / "mlperf.log")
    num = next(n for n, point in enumerate(points) if passes(point)) + 1
    assert [event["key"] for event in events] == [*HEAD, *(num * (BLOCK + EVALUATION)), "run_stop"]
    begin = len(HEAD) - 1
    assert all(isinstance(event["metadata"]["samples_count"], int) for event in events[begin:])
    accuracies = [event for event in events if event["key"] == "eval_accuracy"]
    assert [(e["metadata"]["metric"], e["value"], e["metadata"]["samples_count"]) for e in accuracies] == [
        (metric.upper(), point[metric], point["images"]) for point in points[:num] for metric in ("fid", "clip")
    ]
    assert only(events, "opt_base_learning_rate")["value"] == 6.4e-5  # scaled by the batch, not an image's
    assert [event["value"] for event in events if event["key"] == "lr_abs"] == [1e-4 / 2**batch for batch in range(num)]
    assert only(events, "seed")["metadata"]["file"] == "callbacks/mlperf_log.py"
    stop = only(events, "run_stop")
    assert stop["metadata"] | {"lineno": 0} == {
        "file": "record/mlperf_events.py",
        "lineno": 0,
        "status": "success",
        "samples_count": points[num - 1]["images"],
    }
    kinds = {event["key"]: event["event_type"] for event in events}
    assert (kinds["run_start"], kinds["run_stop"], kinds["seed"]) == ("INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME")


def test_times_are_those_of_the_events_and_an_evaluation_began_before_it_was_known(tmp_path):
    write_run(tmp_path, curves(512)[0], seed=3)
    events = read_events(tmp_path / "mlperf.log")
    second = {
        key: (only(events, key)["time_ms"] / 1000 - BEGAN)
        for key in ("init_start", "init_stop", "run_start", "run_stop")
    }
    images = only(events, "run_stop")["metadata"]["samples_count"]
    num = images // 512_000
    expected = (0.0, 60.0, 60.0, 60.0 + 512.0 * num + 100.0 * num)  # 1,000 images/s; now, evaluations included
    assert tuple(second.values()) == pytest.approx(expected)
    first = [event for event in events if event["key"] in ("block_stop", "eval_start", "eval_stop")][:3]
    assert [event["time_ms"] / 1000 - BEGAN for event in first] == pytest.approx([572.0, 572.0, 672.0])
    assert next(e for e in events if e["key"] == "tracked_stats")["value"] == {"throughput": pytest.approx(1000.0)}


@pytest.mark.parametrize(
    ("took_sec", "text"), [(60.0, "30 min.\n"), (1801.0, "30 min: TOO LONG, the checker will refuse")]
)
def test_initialisation_is_shown_with_its_limit(tmp_path, capsys, took_sec, text):
    drive = Drive(tmp_path, closed(), header(512, 1))
    drive.time = BEGAN + took_sec
    drive.start()
    assert f"mlperf: initialised in {took_sec:.1f} s; the closed division allows {text}" in capsys.readouterr().err


def test_rank_0_alone_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: 1)
    write_run(tmp_path, curves(512)[0], seed=3)
    assert not (tmp_path / "mlperf.log").exists()


def test_a_disk_that_is_full_stops_the_run(tmp_path):
    (tmp_path / "mlperf.log").symlink_to("/dev/full")
    drive = Drive(tmp_path, closed(), header(512, 1))
    with pytest.raises(
        OSError, match=r"mlperf.log cannot be written: No space left on device. The run stops; make room"
    ):
        drive.log.log.event("seed", 1)


class Running:
    """A clock that goes on by a millisecond at each look, as a real one does between two events."""

    def __init__(self, drive: Drive):
        self.drive = drive

    def __call__(self) -> float:
        self.drive.time += 0.001
        return self.drive.time


def test_times_never_run_backwards_through_a_whole_run_a_restart_and_evaluations_that_earlier_starts_began(tmp_path):
    points = curves(512)[0]
    drive = Drive(tmp_path, closed(), header(512, 1))
    drive.log.log.now = Running(drive)
    drive.start()
    for point in points[:2]:
        drive.train(point["images"])
        drive.evaluate(point)
    drive.train(points[2]["images"])
    again = Drive(tmp_path, closed(), header(512, 1))
    again.time = drive.time + 1.0
    again.log.log.now = Running(again)
    again.evaluations += points[:3]  # the third took 100 s, of which the log has not heard: before the restart
    again.start(points[2]["images"])
    for point in points[3:]:
        again.train(point["images"])
        again.evaluate(point)
    again.end()
    found = keys(tmp_path / "mlperf.log")
    assert found.count("eval_stop") == len(points) and "restart" in found and found[-1] == "run_stop"
    assert runs_backwards(tmp_path / "mlperf.log") == []
    events = read_events(tmp_path / "mlperf.log")
    restart, owed = only(events, "restart"), [e for e in events if e["key"] == "eval_start"][2]
    assert owed["time_ms"] == restart["time_ms"]  # its eval_sec says how long it took


# --- restarts ---


def killed(folder: Path) -> None:
    """A run of a whole block and an evaluation, and then of a part of a block; its last line is unfinished."""
    drive = Drive(folder, closed(), header(512, 1))
    drive.start()
    drive.train(512_000)
    drive.evaluate(curves(512)[0][0])
    drive.log.batch_start(drive.state, None)
    with open(folder / "mlperf.log", "a") as file:
        file.write(':::MLLOG {"namespace": "", "time_ms": 17000')


def test_a_resumed_run_goes_on_in_the_same_log_and_says_so(tmp_path, capsys):
    points = curves(512)[0]
    killed(tmp_path)
    again = Drive(tmp_path, closed(), header(512, 1))
    again.evaluations.append(points[0])  # the record has it
    again.start(512_000)
    for point in points[1:]:
        again.train(point["images"])
        again.evaluate(point)
        if passes(point):
            break
    again.end()
    found = keys(tmp_path / "mlperf.log")
    assert found[: len(HEAD)] == HEAD
    assert found[len(HEAD) :][:12] == [*BLOCK, *EVALUATION, "block_start", "restart", "block_start"]
    assert {
        key: found.count(key) for key in ("init_start", "init_stop", "run_start", "run_stop", "restart")
    } == dict.fromkeys(("init_start", "init_stop", "run_start", "run_stop", "restart"), 1)
    restart = only(read_events(tmp_path / "mlperf.log"), "restart")
    assert restart["metadata"]["samples_count"] == 512_000
    assert (
        "mlperf: restarted at 512,000 images: no result of the closed division; for one, take another"
        in capsys.readouterr().err
    )
    assert compliance(tmp_path, tmp_path / "mlperf.log")[0]  # the checker does not know of restarts: the report does


def test_a_log_that_ends_before_run_start_is_begun_anew(tmp_path):
    drive = Drive(tmp_path, closed(), header(512, 1))
    drive.log.log.event("cache_clear", False)
    with open(tmp_path / "mlperf.log", "a") as file:
        file.write(":::MLLOG {")
    drive.start()
    assert keys(tmp_path / "mlperf.log") == HEAD


def test_a_run_whose_log_was_taken_away_says_that_it_did_not_begin_here(tmp_path):
    drive = Drive(tmp_path, closed(), header(512, 1))
    drive.start(512_000)
    drive.train(1_024_000)
    events = read_events(tmp_path / "mlperf.log")
    assert [event["key"] for event in events] == [*HEAD, "restart", *BLOCK]
    assert only(events, "restart")["metadata"]["samples_count"] == 512_000


def test_a_line_that_is_no_event_is_named_and_nothing_behind_it_is_lost(tmp_path):
    write_run(tmp_path, curves(512)[0], seed=1)
    log = tmp_path / "mlperf.log"
    text = log.read_text().replace(':::MLLOG {"namespace": "", "time_ms"', ':::MLLOG {"namespace: "", "time_ms"', 1)
    log.write_text(text)
    again = Drive(tmp_path, closed(), header(512, 1))
    with pytest.raises(ConfigError, match=r"mlperf.log: line 1 of its log is no event of MLPerf's: .* Fix it or take"):
        again.start(512_000)
    assert log.read_text() == text


def test_a_folder_in_the_place_of_the_log_is_named(tmp_path):
    (tmp_path / "mlperf.log").mkdir()
    with pytest.raises(ConfigError, match=r"mlperf.log: a folder, where the log of the run belongs. Take it away, or"):
        Drive(tmp_path, closed(), header(512, 1)).start()


def test_an_evaluation_that_only_the_record_has_comes_at_the_next_start(tmp_path):
    drive = Drive(tmp_path, closed(), header(512, 1))
    drive.start()
    drive.train(512_000)
    again = Drive(tmp_path, closed(), header(512, 1))
    again.evaluations.append(curves(512)[0][0])
    again.start(512_000)
    assert keys(tmp_path / "mlperf.log")[len(HEAD) :] == [*BLOCK, "restart", *EVALUATION]


def test_what_a_resume_goes_back_behind_is_written_again(tmp_path):
    points = curves(512)[0]
    drive = Drive(tmp_path, closed(), header(512, 1))
    drive.start()
    for point in points[:2]:
        drive.train(point["images"])
        drive.evaluate(point)
    again = Drive(tmp_path, closed(), header(512, 1))
    again.evaluations.append(points[0])
    again.start(512_000)  # the checkpoint at 1,024,000 images was damaged
    again.train(1_024_000)
    again.evaluate({**points[1], "fid": 123.0})
    events = [event for event in read_events(tmp_path / "mlperf.log") if event["key"] == "eval_accuracy"]
    assert [event["value"] for event in events if event["metadata"]["metric"] == "FID"] == [
        points[0]["fid"],
        points[1]["fid"],
        123.0,
    ]


def test_a_run_that_goes_on_behind_its_end_loses_its_run_stop(tmp_path):
    points = curves(512)[0]
    drive = Drive(tmp_path, closed(), header(512, 1))
    drive.whole(points[:2])
    assert only(read_events(tmp_path / "mlperf.log"), "run_stop")["metadata"]["status"] == "aborted"
    again = Drive(tmp_path, closed(), header(512, 1))
    again.evaluations += points[:2]
    again.start(1_024_000)
    assert "run_stop" not in keys(tmp_path / "mlperf.log")


def test_a_run_that_was_killed_behind_its_run_stop_is_left_as_it_is(tmp_path):
    write_run(tmp_path, curves(512)[0], seed=1)
    before = (tmp_path / "mlperf.log").read_bytes()
    again = Drive(tmp_path, closed(), header(512, 1))
    again.evaluations += curves(512)[0]
    again.log.stop(again.evaluations[-1], 5_120_000)
    assert (tmp_path / "mlperf.log").read_bytes() == before


# --- MLPerf's checkers, as programs ---


@pytest.mark.parametrize("ruleset", RULESETS)
def test_the_checker_accepts_the_closed_constants(tmp_path, ruleset):
    write_run(tmp_path, curves(512)[0], seed=3, config=closed(ruleset))
    accepted, said = compliance(tmp_path, tmp_path / "mlperf.log", ruleset)
    assert accepted and f"training_{ruleset}/closed_stable_diffusion.yaml" in said, said


REFUSED = {
    "fid": ({}, {"fid": 95.0}, "Failed checks for aggregated_eval_accuracy"),
    "clip": ({}, {"clip": 0.149}, "Failed checks for aggregated_eval_accuracy"),
    "a constant": ({"opt_adamw_epsilon": 1e-6}, {}, "CHECK for 'opt_adamw_epsilon' failed"),
    "one metric": ({}, {"clip": None}, "KeyError: 'CLIP'"),  # the checker's own way to refuse
}


@pytest.mark.parametrize(
    ("what", "ruleset"), [("fid", "4.0.0"), ("fid", "4.1.0"), *((what, "5.0.0") for what in REFUSED)]
)
def test_the_checker_refuses_in_the_closed_division(tmp_path, what, ruleset):
    """FID above the target at every point; CLIP below it; another epsilon; no CLIP at all."""
    of_header, of_points, message = REFUSED[what]
    points = [{**point, **of_points} for point in curves(512)[0][:6]]
    drive = Drive(tmp_path, closed(ruleset), header(512, 1, **of_header))
    drive.start()
    for point in points:
        drive.train(point["images"])
        drive.evaluate(point)
    drive.log.stop(points[-1], points[-1]["images"])  # it says `success`, whatever the figures are
    accepted, said = compliance(tmp_path, tmp_path / "mlperf.log", ruleset)
    assert not accepted and message in said, said


def test_the_checker_refuses_an_initialisation_that_took_too_long(tmp_path):
    drive = Drive(tmp_path, closed(), header(512, 1))
    drive.time = BEGAN + 1801.0
    drive.whole(curves(512)[0])
    accepted, said = compliance(tmp_path, tmp_path / "mlperf.log")
    assert not accepted and "CHECK for 'init_stop' failed" in said


@pytest.fixture(scope="module")
def ten(tmp_path_factory) -> Path:
    """Ten logs of the reference's runs at 512: fixtures, not results."""
    folder, parts = tmp_path_factory.mktemp("ten"), tmp_path_factory.mktemp("parts")
    for n, points in enumerate(curves(512)[:10]):
        log = write_run(parts / str(n), points, seed=n, config=closed("4.0.0")) / "mlperf.log"
        (folder / f"result_{n}.txt").write_bytes(log.read_bytes())
    return folder


def test_every_fixture_says_that_it_is_none(ten):
    for log in ten.iterdir():
        assert "not a result" in only(read_events(log), "fixture")["value"]


@pytest.mark.parametrize(
    ("ruleset", "says"),
    [
        # At 512 and this learning rate 4.0.0 has a reference point of its own; 4.1.0's pruned points give it by interpolation
        # between 256 and 1024, 5.0.0's between 256 and 2048.
        ("4.0.0", "RCP found, RCP test PASSED"),
        ("4.1.0", "RCP Interpolation, RCP test PASSED"),
        ("5.0.0", "RCP Interpolation, RCP test PASSED"),
    ],
)
def test_the_checker_of_reference_points_passes_ten_logs_of_the_reference(ten, tmp_path, ruleset, says):
    accepted, said = program(tmp_path, "rcp_checker", ten, f"--rcp_version={ruleset}")
    assert accepted and says in said, said


def test_the_checker_of_reference_points_refuses_ten_that_are_too_fast(tmp_path):
    """The same curves at half the images."""
    for n, points in enumerate(curves(512)[:10]):
        fast = [{**point, "images": point["images"] // 2} for point in points]
        log = write_run(tmp_path / str(n), fast, seed=n) / "mlperf.log"
        (tmp_path / f"result_{n}.txt").write_bytes(log.read_bytes())
    accepted, said = program(tmp_path, "rcp_checker", tmp_path, "--rcp_version=5.0.0")
    assert not accepted and "RCP test FAILED" in said


# --- evaluated afterwards ---


def waiting(folder: Path, points: list[dict], target: str = "pending") -> list[dict]:
    """A run whose training is over, with its log open and a snapshot a point. Returns the rows of eval.py."""
    drive = Drive(folder, closed(), header(512, 1))
    drive.log.in_training = False
    drive.start()
    for point in points:
        drive.train(point["images"])
    drive.end()
    (folder / "summary.json").write_text(json.dumps({"target": target}))
    rows = []
    for point in points:
        path = write(
            folder / "checkpoints",
            stem(WEIGHTS, point["images"]),
            {"schema": 1, "unix_time": BEGAN + point["images"] / 1000},
        )
        rows.append({**point, "snapshot": path.name})
    return rows


def test_afterwards_the_log_closes_at_the_time_of_the_snapshot_that_passed_first(tmp_path):
    points = curves(512)[0][:8]
    rows = waiting(tmp_path, points)
    assert keys(tmp_path / "mlperf.log") == [*HEAD, *(8 * BLOCK)]  # open
    first = next(n for n, row in enumerate(rows) if passes(row))
    conclude(tmp_path, rows[first - 1 : first + 1], rows[first])
    events = read_events(tmp_path / "mlperf.log")
    assert [event["key"] for event in events] == [*HEAD, *(8 * BLOCK), *(2 * EVALUATION), "run_stop"]
    stop = events[-1]
    assert (stop["metadata"]["status"], stop["metadata"]["samples_count"]) == ("success", rows[first]["images"])
    assert stop["time_ms"] / 1000 == BEGAN + rows[first]["images"] / 1000
    assert {e["metadata"]["samples_count"] for e in events if e["key"] == "eval_accuracy"} == {
        rows[first - 1]["images"],
        rows[first]["images"],
    }
    assert compliance(tmp_path, tmp_path / "mlperf.log")[0]
    before = (tmp_path / "mlperf.log").read_bytes()
    conclude(tmp_path, rows, rows[first])  # a log that training has closed stays as it is
    assert (tmp_path / "mlperf.log").read_bytes() == before


def test_a_log_that_was_closed_afterwards_gets_the_points_before_in_order_and_keeps_its_end(tmp_path, capsys):
    points = curves(512)[0][:8]
    rows = waiting(tmp_path, points)
    first = next(n for n, row in enumerate(rows) if passes(row))
    assert first >= 3
    log = tmp_path / "mlperf.log"
    conclude(tmp_path, rows[first - 1 : first + 1], rows[first], afterwards=True)
    (tmp_path / "summary.json").write_text(json.dumps({"target": "reached"}))
    closed_so = log.read_text().splitlines()
    capsys.readouterr()
    conclude(tmp_path, rows, rows[first], afterwards=True)
    assert log.read_text().splitlines()[: len(closed_so) - 1] == closed_so[:-1]  # what stood there stands there
    events = read_events(log)
    images = [row["images"] for row in rows]
    evaluated = [event["metadata"]["samples_count"] for event in events if event["key"] == "eval_stop"]
    assert evaluated == [*images[first - 1 : first + 1], *images[: first - 1]]
    stop = {key: only(events, "run_stop")[key] for key in ("time_ms", "value")}
    assert stop == {"time_ms": 1000 * (BEGAN + images[first] / 1000), "value": None} and events[-1]["key"] == "run_stop"
    assert events[-1]["metadata"]["status"] == "success" and runs_backwards(log) == []
    said = (
        f"mlperf: the log has {first - 1} evaluations more; it ends as before: success at {images[first]:,} images.\n"
    )
    assert capsys.readouterr().err == said
    assert compliance(tmp_path, log)[0]
    whole = log.read_bytes()
    conclude(tmp_path, rows, rows[first], afterwards=True)  # nothing is new
    assert log.read_bytes() == whole


def test_a_log_that_was_closed_afterwards_ends_where_an_earlier_snapshot_met_the_target_after_all(tmp_path):
    rows = waiting(tmp_path, curves(512)[0][:8])
    conclude(tmp_path, rows[4:6], rows[5], afterwards=True)
    conclude(tmp_path, rows[:6], rows[2], afterwards=True)
    events = read_events(tmp_path / "mlperf.log")
    stop = only(events, "run_stop")
    assert (stop["metadata"]["samples_count"], stop["time_ms"]) == (
        rows[2]["images"],
        1000 * (BEGAN + rows[2]["images"] / 1000),
    )
    assert sum(event["key"] == "eval_stop" for event in events) == 5
    conclude(tmp_path, rows[:2], None, afterwards=True)  # a part of the rows is no other end
    assert only(read_events(tmp_path / "mlperf.log"), "run_stop") == stop


def test_two_commands_that_come_to_their_end_at_once_close_a_log_once(tmp_path):
    points = curves(512)[0][:8]
    rows = waiting(tmp_path, points)
    first = next(row for row in rows if passes(row))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: conclude(tmp_path, rows, first), range(4)))
    found = keys(tmp_path / "mlperf.log")
    assert (found.count("run_stop"), found.count("eval_stop")) == (1, rows.index(first) + 1)


def test_a_run_that_another_process_has_keeps_its_log_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("callbacks.mlperf_log.LOCK_TIMEOUT_SEC", 0.1)
    rows = waiting(tmp_path, curves(512)[0][:3])
    before = (tmp_path / "mlperf.log").read_bytes()
    with (
        FileLock(tmp_path / ".lock"),
        pytest.raises(ConfigError, match="mlperf.log: another process has the run, and may"),
    ):
        conclude(tmp_path, rows, None)
    assert (tmp_path / "mlperf.log").read_bytes() == before


def test_afterwards_what_lies_behind_the_first_pass_stays_out(tmp_path):
    rows = waiting(tmp_path, curves(512)[0][:8])
    first = next(n for n, row in enumerate(rows) if passes(row))
    conclude(tmp_path, rows, rows[first])
    assert keys(tmp_path / "mlperf.log").count("eval_stop") == first + 1


def test_afterwards_a_run_that_never_passed_is_aborted_at_its_last_snapshot(tmp_path):
    rows = waiting(tmp_path, curves(512)[0][:3])
    conclude(tmp_path, rows, None)
    stop = read_events(tmp_path / "mlperf.log")[-1]
    assert (stop["key"], stop["metadata"]["status"], stop["time_ms"]) == (
        "run_stop",
        "aborted",
        1000 * (BEGAN + 1536.0),
    )


def test_a_trial_closes_no_log(tmp_path, capsys):
    """Scored with another guidance than the run's own."""
    rows = [{**row, "partial": False, "seconds": 1.0} for row in waiting(tmp_path, curves(512)[0][:8])]
    (tmp_path / "config.yaml").write_text("eval:\n  guidance: 3.0\n")
    config = eval_command.EvalCommand(mlperf=closed(), target=TargetConfig(90.0, 0.15))
    scores.conclude(config, tmp_path, rows)
    assert ": eval.guidance. Its summary.json stays" in capsys.readouterr().err
    assert keys(tmp_path / "mlperf.log") == [*HEAD, *(8 * BLOCK)]
    assert json.loads((tmp_path / "summary.json").read_text())["target"] == "pending"  # and may still be decided


def test_a_run_that_still_trains_or_was_decided_in_training_is_left_alone(tmp_path):
    rows = waiting(tmp_path, curves(512)[0][:8], target="reached")
    conclude(tmp_path, rows, rows[-1])
    (tmp_path / "summary.json").unlink()
    conclude(tmp_path, rows, rows[-1])
    assert keys(tmp_path / "mlperf.log") == [*HEAD, *(8 * BLOCK)]


# --- the section ---


def test_the_older_rulesets_ask_who_and_on_what():
    assert MLPerfConfig(enabled=True).problems(SD) == [] == MLPerfConfig(ruleset="4.0.0").problems(SD)
    assert MLPerfConfig(enabled=True, ruleset="4.1.0", org="A", platform="..").problems(SD) == [
        (
            "mlperf.platform",
            "'..' cannot be the name of a folder, which it is in a submission. Use letters, digits, . _ - +",
        )
    ]
    assert [key for key, _ in MLPerfConfig(enabled=True, ruleset="4.0.0").problems(SD)] == [
        "mlperf.org",
        "mlperf.platform",
    ]


def refused(*words: str) -> list[str]:
    """Every problem of a tiny run with a log, but for memory, which takes seconds to estimate."""
    words = [*TINY_RUN, "data.synthetic=true", "mlperf.enabled=true", *words]
    with pytest.raises(ConfigError) as refusal:
        load(benchmark.RunConfig, parse_command_line(words, {}), check=lambda run: quick_problems(run, []))
    return refusal.value.problems


SCORED = ["eval.prompts={}/p.tsv", "eval.statistics={}/s.npz", "eval.inception=random", "eval.clip=random"]


def test_a_run_whose_log_could_not_be_accepted_is_refused_before_it_starts(tmp_path):
    scored = [word.format(tmp_path) for word in SCORED] + ["eval.when=after", "eval.every_images=16"]
    assert refused() == [
        "mlperf.enabled: true, but nothing is evaluated. Say eval.when=after, or in_training.",
    ]
    [line] = refused("eval.when=after", "eval.every_images=16", scored[0])
    assert line == (
        "mlperf.enabled: true, but eval.statistics, eval.inception, eval.clip: not given. FID and CLIP score belong in "
        "the log."
    )
    [line] = refused(*scored)
    assert line.startswith(f"mlperf.enabled: true, but no file {tmp_path}/p.tsv, whose prompts the log counts.")
    (tmp_path / "p.tsv").write_text("image_id\tid\tcaption\n1\t1\ta\n")
    [line] = refused(*scored)
    assert line == "mlperf.enabled: true, but no target, so no run could succeed. The benchmark's: 90 and 0.15."
    (tmp_path / "old" / "checkpoints").mkdir(parents=True)
    write(tmp_path / "old" / "checkpoints", stem("full-ba", 3), {})
    [line] = refused(*scored, "target.fid=90", f"run_folder={tmp_path}", "run_name=old")
    assert line == (
        f"mlperf.enabled: true, but {tmp_path}/old was trained before its log was begun, or it was cut. Leave it out, or "
        "take another run_name."
    )
    (tmp_path / "old/mlperf.log").touch()  # a log that was taken away, to look as if the run began here
    assert refused(*scored, "target.fid=90", f"run_folder={tmp_path}", "run_name=old") == [line]
    (tmp_path / "old/mlperf.log").write_text(":::MLLOG {}\n")
    assert refused(*scored, "target.fid=90", f"run_folder={tmp_path}", "run_name=old") == [
        f"{tmp_path}/old/mlperf.log: line 1 of its log is no event of MLPerf's: Easel has not written it so. "
        "Fix it or take it out, or run without a log (mlperf.enabled=false)."
    ]


def test_the_closed_division_names_every_constant_that_is_another(tmp_path):
    (tmp_path / "p.tsv").write_text("image_id\tid\tcaption\n1\t1\ta\n")
    words = [word.format(tmp_path) for word in SCORED] + ["eval.when=after", "eval.every_images=16", "target.fid=90"]
    lines = refused(*words, "mlperf.division=closed", "optimizer.eps=1e-6")
    fix = "Use the reference's value, or mlperf.division=open."
    assert f"mlperf.division: closed, but model.variant: stock; the reference: mlperf. {fix}" in lines
    assert f"mlperf.division: closed, but optimizer.eps: 1e-06; the reference: 1e-08. {fix}" in lines
    assert f"mlperf.division: closed, but data.synthetic: true; the reference: false. {fix}" in lines
    assert f"mlperf.division: closed, but target.clip: null; the reference: 0.15. {fix}" in lines
    assert f"mlperf.division: closed, but eval.prompts: 1 prompts; the reference: 30,000. {fix}" in lines


def test_the_closed_division_refuses_other_data_by_name_before_anything_is_built(stage, tmp_path, capsys):
    words = [*TINY_RUN, f"data.remote={stage}", "data.stage=images", f"run_folder={tmp_path}", "mlperf.enabled=true"]
    words += [*(word.format(tmp_path) for word in SCORED), "eval.when=after", "eval.every_images=16", "target.fid=90"]
    (tmp_path / "p.tsv").write_text("image_id\tid\tcaption\n1\t1\ta\n")
    assert benchmark.main([*words, "mlperf.division=closed"]) == 2
    line = (
        f"mlperf.division: closed, but train_samples: 48 at {stage}; the benchmark: 6,513,144. Give the stage of all of "
        "them; a subset, if it is meant, is mlperf.division=open."
    )
    assert line in capsys.readouterr().err.splitlines()
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    of_run = {"closed": 1, "open": 0}
    for division, num in of_run.items():
        given = parse_command_line([*words, f"mlperf.division={division}"], {})
        config = load(benchmark.RunConfig, given, check=lambda run: [])
        assert len(closed_data_problems(config)) == num


SHORTCUTS = {
    "model.denoiser": ("runs/other", "runs/other; the reference: null"),  # begun with weights that are trained already
    "model.weights": ("random", "random; the reference: its published weights"),
    "eval.inception": ("random", "random; the reference: its published weights"),
    "eval.clip": ("random", "random; the reference: its published weights"),
    "eval.every_images": (256, "256; the rules: 512000"),  # the first pass would be found earlier
    "eval.image_size": (64, "64; the rules: 512"),
}


@pytest.mark.parametrize("key", SHORTCUTS)
def test_the_closed_division_refuses_a_shortcut(key):
    config = load(benchmark.RunConfig, parse_command_line(["yamls/mlperf_256.yaml"], {}), check=lambda run: [])
    value, text = SHORTCUTS[key]
    assert SD.not_closed({**flat(benchmark.resolve(config)), key: value}) == [f"{key}: {text}"]


@pytest.mark.parametrize("path", sorted((ROOT / "yamls").glob("mlperf_[0-9]*.yaml")), ids=lambda path: path.name)
def test_each_recipe_of_the_benchmark_may_be_logged_in_the_closed_division(path):
    config = load(benchmark.RunConfig, parse_command_line([str(path)], {}), check=lambda run: [])
    assert SD.not_closed(flat(benchmark.resolve(config))) == []


# --- whole runs ---

OURS = ("mlperf.org=Easel", "mlperf.platform=miniature")  # which 4.0.0 and 4.1.0 ask for


@pytest.fixture(scope="module")
def logged(words_of, tmp_path_factory) -> Path:  # noqa: F811
    """The miniature, evaluated in training with a target that it misses, stopped at its first point, and gone on."""
    folder = tmp_path_factory.mktemp("logged")
    words = words_of(folder, "mini", "eval.when=in_training", "target.fid=1e-9", "mlperf.enabled=true", *OURS)
    assert benchmark.main(words) == 0
    return folder / "mini"


@pytest.mark.slow
@pytest.mark.parametrize("ruleset", RULESETS)
def test_the_checker_accepts_the_log_of_the_miniature_in_the_open_division(logged, tmp_path, ruleset):
    accepted, said = compliance(tmp_path, logged / "mlperf.log", ruleset)
    assert accepted and f"training_{ruleset}/open_stable_diffusion.yaml" in said, said
    events = read_events(logged / "mlperf.log")
    values = {event["key"]: event["value"] for event in events}
    assert (values["train_samples"], values["eval_samples"], values["global_batch_size"]) == (
        NUM_IMAGES,
        NUM_PROMPTS,
        8,
    )
    assert (values["seed"], values["opt_base_learning_rate"], values["gradient_accumulation_steps"]) == (17, 1.5e-3, 1)
    found = [event["key"] for event in events]
    assert found[found.index("run_start") + 1 :] == [*(2 * (BLOCK + EVALUATION)), "run_stop"]
    record = [json.loads(line) for line in (logged / "metrics.jsonl").read_text().splitlines()]
    fids = [line["fid"] for line in record if line.get("evaluation")]
    assert [e["value"] for e in events if e["metadata"].get("metric") == "FID"] == fids
    assert runs_backwards(logged / "mlperf.log") == []
    made_with = [{key: e["metadata"][key] for key in MADE_WITH[1:]} for e in events if e["key"] == "eval_stop"]
    judges = {"inception": "shapes-reader", "clip_model": "shapes-CLIP", "eval_precision": "fp32"}
    assert made_with == 2 * [{"num_images": NUM_PROMPTS, **judges}]
    reasons = [f"{NUM_PROMPTS} images a score", "scored by shapes-CLIP and shapes-reader"]
    assert read_run(logged).foreign_scores == reasons


@pytest.mark.slow
def test_killed_between_its_last_evaluation_and_its_end_it_closes_its_log(words_of, logged, tmp_path):  # noqa: F811
    shutil.copytree(logged, tmp_path / "mini")
    (tmp_path / "mini/summary.json").unlink()
    log, words = tmp_path / "mini/mlperf.log", ["eval.when=in_training", "target.fid=1e-9", "mlperf.enabled=true"]
    whole = log.read_text().splitlines(keepends=True)
    for lines, more in ((whole, []), (whole[:-1], ["restart", "run_stop"])):
        log.write_text("".join(lines))
        (tmp_path / "mini/summary.json").unlink(missing_ok=True)
        assert benchmark.main(words_of(tmp_path, "mini", *words)) == 0
        assert keys(log) == [json.loads(line[len(TOKEN) :])["key"] for line in lines] + more
        assert runs_backwards(log) == []


@pytest.mark.slow
def test_a_run_that_is_scored_afterwards_is_closed_by_eval(words_of, tmp_path, capsys):  # noqa: F811
    words = words_of(tmp_path, "later", "eval.when=after", "target.fid=1e9", "mlperf.enabled=true")
    assert benchmark.main(words) == 0
    log, folder = tmp_path / "later" / "mlperf.log", tmp_path / "later"
    assert not {"run_stop", "eval_start"} & set(keys(log))
    assert eval_command.main([str(folder), "from_images=48"]) == 0  # the second passes, and so does the one before it
    events = read_events(log)
    snapshot = listed(folder / "checkpoints", WEIGHTS)[-1]
    stop = only(events, "run_stop")
    assert stop["metadata"]["samples_count"] == 24 and stop["metadata"]["status"] == "success"
    assert stop["time_ms"] == round(1000 * read(snapshot)["unix_time"])
    assert json.loads((folder / "summary.json").read_text())["target"] == "reached"
    assert only(events[-5:-1], "eval_stop")["metadata"]["num_images"] == NUM_PROMPTS
    assert runs_backwards(log) == []


@pytest.mark.slow
def test_a_run_on_two_ranks_has_one_log(words_of, tmp_path):  # noqa: F811
    words = words_of(tmp_path, "two", "eval.when=after", "target.fid=1e-9", "mlperf.enabled=true")
    done = run("composer", "-n", "2", "benchmark.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = keys(tmp_path / "two" / "mlperf.log")
    assert found.count("run_start") == found.count("seed") == 1
    assert found[found.index("run_start") + 1 :] == 2 * BLOCK


def test_the_mlperf_log_counts_on_where_the_clock_is_set_back(tmp_path, monkeypatch):
    log = EventLog(tmp_path / "mlperf.log")
    log.event("init_start")
    wall, began = time.time(), time.monotonic()
    monkeypatch.setattr(time, "time", lambda: wall - 3600.0)
    monkeypatch.setattr(time, "monotonic", lambda: began + 5.0)
    log.event("init_stop")
    first, last = (event["time_ms"] for event in read_events(tmp_path / "mlperf.log"))
    assert 4900 <= last - first <= 60_000
