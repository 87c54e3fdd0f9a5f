"""The MLPerf log: MLPerf's own checkers, called as programs, accept it; and what a run, a restart and eval.py write."""

# ruff: noqa: F811  (fixtures of another file)

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY_RUN, run
from filelock import FileLock
from miniature import NUM_IMAGES, NUM_PROMPTS
from mlperf_fixture import BEGAN, Drive, closed, config_of, curves, header, passes, problems_of, write_run
from test_evaluation import words_of  # noqa: F401

import benchmark
import eval as eval_command
from callbacks.mlperf_log import conclude
from checkpointing.files import WEIGHTS, file_stem, list_checkpoints, read_checkpoint, write_checkpoint
from common.errors import ConfigError
from config import flatten
from evaluation import scores
from evaluation.scorer import TargetConfig
from families.mlperf import SD, SD_RULESETS
from preflight.config_checks import closed_data_problems
from reports.mlperf import check
from run_folder.mlperf_log import MADE_WITH, read_events

pytestmark = pytest.mark.timeout(200, func_only=True)


NUM_FIRST = next(
    n for n, point in enumerate(curves(512)[0], 1) if passes(point)
)  # evaluations to the first that passes


def compliance(tmp_path: Path, log: Path, ruleset: str = "5.0.0") -> None:
    """Call MLPerf's checker as its users do, and see that it accepts the log."""
    words = ["--usage=training", f"--ruleset={ruleset}", "--werror", log, f"--log_output={tmp_path / 'checker.log'}"]
    done = run(sys.executable, "-m", "mlperf_logging.compliance_checker", *map(str, words), timeout=120)
    text = done.stdout + done.stderr
    division = only(read_events(log), "submission_division")["value"]
    assert done.returncode == 0 and f"training_{ruleset}/{division}_stable_diffusion.yaml" in text, text


def keys(log: Path) -> list[str]:
    return [event["key"] for event in read_events(log)]


def only(events: list[dict], key: str) -> dict:
    [found] = [event for event in events if event["key"] == key]
    return found


def runs_backwards(log: Path) -> list[tuple[str, str]]:
    """Keys of neighbours of which the second one is earlier; a run_stop may be dated back to its snapshot."""
    pairs = [(a, b) for a, b in itertools.pairwise(read_events(log)) if b["time_ms"] < a["time_ms"]]
    return [(a["key"], b["key"]) for a, b in pairs if b["key"] != "run_stop"]


HEAD = ["cache_clear", "submission_benchmark", "submission_division", "submission_org", "submission_platform"]
HEAD += ["submission_status", "init_start", *header(512, 1), "init_stop", "run_start"]
BLOCK = ["block_start", "loss", "lr_abs", "tracked_stats", "block_stop"]
EVALUATION = ["eval_start", "eval_accuracy", "eval_accuracy", "eval_stop"]


# --- events ---


def test_a_log_has_the_events_in_order_with_their_numbers_of_images_values_and_times(tmp_path):
    """An evaluation began before it was known."""
    points, num = curves(512)[0], NUM_FIRST
    write_run(tmp_path, points, seed=3)
    events = read_events(tmp_path / "mlperf.log")
    assert [event["key"] for event in events] == [*HEAD, *(num * (BLOCK + EVALUATION)), "run_stop"]
    assert all(isinstance(event["metadata"]["samples_count"], int) for event in events[len(HEAD) - 1 :])
    accuracies = [event for event in events if event["key"] == "eval_accuracy"]
    assert [(e["metadata"]["metric"], e["value"], e["metadata"]["samples_count"]) for e in accuracies] == [
        (metric.upper(), point[metric], point["images"]) for point in points[:num] for metric in ("fid", "clip")
    ]
    assert only(events, "opt_base_learning_rate")["value"] == 6.4e-5  # scaled by the batch, not an image's
    assert [event["value"] for event in events if event["key"] == "lr_abs"] == [1e-4 / 2**batch for batch in range(num)]
    stop, images = only(events, "run_stop")["metadata"], points[num - 1]["images"]
    assert (stop["file"], stop["status"], stop["samples_count"]) == ("run_folder/mlperf_log.py", "success", images)
    kinds = {event["key"]: event["event_type"] for event in events}
    assert (kinds["run_start"], kinds["run_stop"], kinds["seed"]) == ("INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME")
    times = [
        only(events, key)["time_ms"] / 1000 - BEGAN for key in ("init_start", "init_stop", "run_start", "run_stop")
    ]
    assert times == pytest.approx([0.0, 60.0, 60.0, 60.0 + images / 1000 + 100 * num])  # 1,000 images/s, 100 s a score
    first = [event for event in events if event["key"] in ("block_stop", "eval_start", "eval_stop")][:3]
    assert [event["time_ms"] / 1000 - BEGAN for event in first] == pytest.approx([572.0, 572.0, 672.0])
    assert next(e for e in events if e["key"] == "tracked_stats")["value"] == {"throughput": pytest.approx(1000.0)}


def test_rank_0_alone_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("common.dist.get_global_rank", lambda: 1)
    write_run(tmp_path, curves(512)[0], seed=3)
    assert not (tmp_path / "mlperf.log").exists()


class Running:
    """A clock that advances by a millisecond at each call."""

    def __init__(self, drive: Drive):
        self.drive = drive

    def __call__(self) -> float:
        self.drive.time += 0.001
        return self.drive.time


def test_times_never_run_backwards_through_a_whole_run_a_restart_and_evaluations_that_earlier_starts_began(tmp_path):
    points = curves(512)[0]
    drive, again = Drive(tmp_path), Drive(tmp_path)
    drive.log.log.now, again.log.log.now = Running(drive), Running(again)
    drive.start().reach(*points[:2]).train(points[2]["images"])
    again.time = drive.time + 1.0
    # The third evaluation took 100 s, of which the log has not heard: before the restart.
    again.start(points[2]["images"], points[:3]).reach(*points[3:]).end()
    events = read_events(tmp_path / "mlperf.log")
    found = [event["key"] for event in events]
    assert found.count("eval_stop") == len(points) and "restart" in found and found[-1] == "run_stop"
    assert runs_backwards(tmp_path / "mlperf.log") == []
    owed = [event for event in events if event["key"] == "eval_start"][2]
    assert owed["time_ms"] == only(events, "restart")["time_ms"]  # its eval_sec says how long it took


# --- restarts ---


def cut(log: Path) -> None:
    """Add the unfinished line of a writer that was killed."""
    with open(log, "a") as file:
        file.write(':::MLLOG {"namespace": "", "time_ms": 17000')


def test_a_resumed_run_continues_in_the_same_log_with_a_restart(tmp_path, capsys):
    first, *others = curves(512)[0]
    drive = Drive(tmp_path).start().reach(first)
    drive.log.batch_start(drive.state, None)
    cut(tmp_path / "mlperf.log")
    Drive(tmp_path).start(512_000, [first]).reach(*others).end()
    found = keys(tmp_path / "mlperf.log")
    assert found[: len(HEAD) + 12] == [*HEAD, *BLOCK, *EVALUATION, "block_start", "restart", "block_start"]
    once = ("init_start", "init_stop", "run_start", "run_stop", "restart")
    assert [found.count(key) for key in once] == [1] * len(once)
    assert only(read_events(tmp_path / "mlperf.log"), "restart")["metadata"]["samples_count"] == 512_000
    said = "mlperf: restarted at 512,000 images: not a closed-division result; for one, use another"
    assert said in capsys.readouterr().err


def test_a_log_that_ends_before_run_start_is_begun_anew(tmp_path):
    drive = Drive(tmp_path)
    drive.log.log.event("cache_clear", False)
    cut(tmp_path / "mlperf.log")
    drive.start()
    assert keys(tmp_path / "mlperf.log") == HEAD


def test_a_line_that_is_no_event_is_named_and_nothing_after_it_is_lost(tmp_path):
    write_run(tmp_path, curves(512)[0], seed=1)
    log = tmp_path / "mlperf.log"
    text = log.read_text().replace(':::MLLOG {"namespace": "", "time_ms"', ':::MLLOG {"namespace: "", "time_ms"', 1)
    log.write_text(text)
    with pytest.raises(ConfigError, match=r"mlperf.log: line 1 of its log is no event of MLPerf's: .* Fix it or take"):
        Drive(tmp_path).start(512_000)
    assert log.read_text() == text


def test_an_evaluation_after_the_resumed_checkpoint_is_written_again(tmp_path):
    first, second = curves(512)[0][:2]
    Drive(tmp_path).start().reach(first, second)
    Drive(tmp_path).start(512_000, [first]).reach({**second, "fid": 123.0})  # the checkpoint at 1,024,000 was damaged
    fids = [e["value"] for e in read_events(tmp_path / "mlperf.log") if e["metadata"].get("metric") == "FID"]
    assert fids == [first["fid"], second["fid"], 123.0]


def test_a_run_that_is_trained_past_its_end_loses_its_run_stop_and_one_that_was_killed_after_it_keeps_it(tmp_path):
    points, log = curves(512)[0], tmp_path / "mlperf.log"
    Drive(tmp_path).whole(points[:2])
    assert only(read_events(log), "run_stop")["metadata"]["status"] == "aborted"
    before = log.read_bytes()
    Drive(tmp_path).log.stop(points[1], 1_024_000)
    assert log.read_bytes() == before
    Drive(tmp_path).start(1_024_000, points[:2])
    assert "run_stop" not in keys(log)


# --- MLPerf's checkers, as programs ---


@pytest.mark.parametrize("ruleset", SD_RULESETS)
def test_the_checker_accepts_the_closed_constants(tmp_path, ruleset):
    write_run(tmp_path, curves(512)[0], seed=3, config=closed(ruleset))
    assert check(tmp_path / "mlperf.log", ruleset) is None
    if ruleset == SD_RULESETS[-1]:
        compliance(tmp_path, tmp_path / "mlperf.log", ruleset)


REFUSED = {
    "fid": ({}, {"fid": 95.0}, "Failed checks for aggregated_eval_accuracy"),
    "clip": ({}, {"clip": 0.149}, "Failed checks for aggregated_eval_accuracy"),
    "a constant": ({"opt_adamw_epsilon": 1e-6}, {}, "CHECK for 'opt_adamw_epsilon' failed"),
    "one metric": ({}, {"clip": None}, "an evaluation without 'CLIP'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_checker_refuses_in_the_closed_division(tmp_path, what):
    """FID above the target at every point; CLIP below it; another epsilon; no CLIP at all."""
    of_header, of_points, message = REFUSED[what]
    points = [{**point, **of_points} for point in curves(512)[0][:6]]
    drive = Drive(tmp_path, constants=header(512, 1, **of_header)).start().reach(*points)
    drive.log.stop(points[-1], points[-1]["images"])  # `success`, whatever the figures are
    assert message in (check(tmp_path / "mlperf.log", "5.0.0") or "")


# --- evaluated afterwards ---


def waiting(folder: Path, num: int = 8, target: str = "pending") -> list[dict]:
    """A run whose training is over, with its log open and a snapshot a point. Returns the rows of eval.py."""
    points, drive = curves(512)[0][:num], Drive(folder, in_training=False).start()
    for point in points:
        drive.train(point["images"])
    drive.end()
    (folder / "summary.json").write_text(json.dumps({"target": target}))
    rows = []
    for point in points:
        content = {"schema": 1, "unix_time": BEGAN + point["images"] / 1000}
        path = write_checkpoint(folder / "checkpoints", file_stem(WEIGHTS, point["images"]), content)
        rows.append({**point, "snapshot": path.name})
    return rows


FIRST = NUM_FIRST - 1  # the row that passes
OPEN = [*HEAD, *(8 * BLOCK)]


def test_afterwards_the_log_closes_at_the_time_of_the_snapshot_that_passed_first(tmp_path):
    rows, log = waiting(tmp_path), tmp_path / "mlperf.log"
    assert keys(log) == OPEN
    conclude(tmp_path, rows[FIRST - 1 : FIRST + 1], rows[FIRST])
    events, images = read_events(log), [row["images"] for row in rows]
    assert [event["key"] for event in events] == [*OPEN, *(2 * EVALUATION), "run_stop"]
    stop = events[-1]
    assert (stop["metadata"]["status"], stop["metadata"]["samples_count"]) == ("success", images[FIRST])
    assert stop["time_ms"] / 1000 == BEGAN + images[FIRST] / 1000
    evaluated = {e["metadata"]["samples_count"] for e in events if e["key"] == "eval_accuracy"}
    assert evaluated == {images[FIRST - 1], images[FIRST]} and check(log, "5.0.0") is None
    before = log.read_bytes()
    conclude(tmp_path, rows, rows[FIRST])  # a log that training has closed stays as it is
    assert log.read_bytes() == before


def test_a_log_that_was_closed_afterwards_gets_the_points_before_in_order_and_keeps_its_end(tmp_path, capsys):
    rows, log = waiting(tmp_path), tmp_path / "mlperf.log"
    assert FIRST >= 3
    conclude(tmp_path, rows[FIRST - 1 : FIRST + 1], rows[FIRST], afterwards=True)
    (tmp_path / "summary.json").write_text(json.dumps({"target": "reached"}))
    before = log.read_text().splitlines()
    capsys.readouterr()
    conclude(tmp_path, rows, rows[FIRST], afterwards=True)
    assert log.read_text().splitlines()[: len(before) - 1] == before[:-1]
    events, images = read_events(log), [row["images"] for row in rows]
    evaluated = [event["metadata"]["samples_count"] for event in events if event["key"] == "eval_stop"]
    assert evaluated == [*images[FIRST - 1 : FIRST + 1], *images[: FIRST - 1]]
    stop = only(events, "run_stop")
    assert stop["time_ms"] == 1000 * (BEGAN + images[FIRST] / 1000) and stop == events[-1]
    assert stop["metadata"]["status"] == "success" and runs_backwards(log) == []
    said = f"the log has {FIRST - 1} more evaluations; it still ends with success at {images[FIRST]:,} images.\n"
    assert capsys.readouterr().err == f"mlperf: {said}"
    assert check(log, "5.0.0") is None
    whole = log.read_bytes()
    conclude(tmp_path, rows, rows[FIRST], afterwards=True)  # nothing is new
    assert log.read_bytes() == whole


def test_a_log_that_was_closed_afterwards_ends_at_an_earlier_snapshot_that_met_the_target(tmp_path):
    rows = waiting(tmp_path)
    conclude(tmp_path, rows[4:6], rows[5], afterwards=True)
    conclude(tmp_path, rows[:6], rows[2], afterwards=True)
    events, images = read_events(tmp_path / "mlperf.log"), rows[2]["images"]
    stop = only(events, "run_stop")
    assert (stop["metadata"]["samples_count"], stop["time_ms"]) == (images, 1000 * (BEGAN + images / 1000))
    assert sum(event["key"] == "eval_stop" for event in events) == 5
    conclude(tmp_path, rows[:2], None, afterwards=True)  # a part of the rows is no other end
    assert only(read_events(tmp_path / "mlperf.log"), "run_stop") == stop


def test_the_log_of_a_run_that_another_process_uses_stays_as_it_is_and_else_it_ends_at_its_last_snapshot(
    tmp_path, monkeypatch
):
    """A run that never passed is aborted."""
    monkeypatch.setattr("callbacks.mlperf_log.LOCK_TIMEOUT_SEC", 0.1)
    rows = waiting(tmp_path, 3)
    with (
        FileLock(tmp_path / ".lock"),
        pytest.raises(ConfigError, match="mlperf.log: another process uses the run, and may"),
    ):
        conclude(tmp_path, rows, None)
    assert keys(tmp_path / "mlperf.log") == [*HEAD, *(3 * BLOCK)]
    conclude(tmp_path, rows, None)
    stop = read_events(tmp_path / "mlperf.log")[-1]
    assert (stop["key"], stop["metadata"]["status"]) == ("run_stop", "aborted")
    assert stop["time_ms"] == 1000 * (BEGAN + 1536.0)


def test_a_trial_closes_no_log(tmp_path, capsys):
    """Scored with another guidance than the run's own."""
    rows = [{**row, "partial": False, "seconds": 1.0} for row in waiting(tmp_path)]
    (tmp_path / "config.yaml").write_text("eval:\n  guidance: 3.0\n")
    target = TargetConfig(90.0, 0.15)
    of_command = flatten(eval_command.EvalCommand(mlperf=closed(), target=target))
    scores.record_target_outcome(tmp_path, rows, target, of_command, has_own_table=True, has_mlperf_log=True)
    assert ": eval.guidance. Its summary.json stays" in capsys.readouterr().err
    assert keys(tmp_path / "mlperf.log") == OPEN
    assert json.loads((tmp_path / "summary.json").read_text())["target"] == "pending"  # and may still be decided


def test_a_run_that_still_trains_or_was_decided_in_training_keeps_its_log(tmp_path):
    rows = waiting(tmp_path, target="reached")
    conclude(tmp_path, rows, rows[-1])
    (tmp_path / "summary.json").unlink()
    conclude(tmp_path, rows, rows[-1])
    assert keys(tmp_path / "mlperf.log") == OPEN


# --- the section ---


def refused(*words: str) -> list[str]:
    """Every problem of a tiny run with a log."""
    return problems_of(*TINY_RUN, "data.synthetic=true", "mlperf.enabled=true", *words)


@pytest.fixture
def scored(tmp_path) -> list[str]:
    """Keys of a run that is evaluated, with one prompt."""
    (tmp_path / "p.tsv").write_text("image_id\tid\tcaption\n1\t1\ta\n")
    files = [f"eval.prompts={tmp_path}/p.tsv", f"eval.statistics={tmp_path}/s.npz"]
    return [*files, "eval.inception=random", "eval.clip=random", "eval.when=after", "eval.every_images=16"]


def test_a_run_whose_log_could_not_be_accepted_is_refused_before_it_starts(scored, tmp_path):
    def check_refused(text: str, *words: str) -> None:
        [line] = refused(*words)
        assert text in line

    check_refused("mlperf.enabled: true, but nothing is evaluated. Set eval.when=after, or in_training.")
    lacks = "eval.statistics, eval.inception, eval.clip: not given. FID and CLIP score belong in the log."
    check_refused(lacks, scored[0], *scored[-2:])
    check_refused("no target, so no run could succeed. The benchmark's: 90 and 0.15.", *scored)
    (tmp_path / "p.tsv").rename(tmp_path / "q.tsv")
    check_refused(f"no file {tmp_path}/p.tsv, whose prompts the log counts.", *scored)
    (tmp_path / "q.tsv").rename(tmp_path / "p.tsv")
    (tmp_path / "old/checkpoints").mkdir(parents=True)
    write_checkpoint(tmp_path / "old/checkpoints", file_stem("full-ba", 3), {})
    words = [*scored, "target.fid=90", f"run_folder={tmp_path}", "run_name=old"]
    check_refused("/old was trained before its log was begun, or it was cut. Leave it out, or", *words)
    (tmp_path / "old/mlperf.log").write_text(":::MLLOG {}\n")
    check_refused("/old/mlperf.log: line 1 of its log is no event of MLPerf's", *words)


def test_the_closed_division_names_every_constant_that_differs(scored):
    lines = refused(*scored, "target.fid=90", "mlperf.division=closed", "optimizer.eps=1e-6")
    for text in ("optimizer.eps: 1e-06; the reference: 1e-08", "eval.prompts: 1 prompts; the reference: 30,000"):
        assert f"mlperf.division: closed, but {text}. Use the reference's value, or mlperf.division=open." in lines


def test_the_closed_division_refuses_other_data_before_anything_is_built(scored, stage, tmp_path, capsys):
    words = [*TINY_RUN, f"data.remote={stage}", "data.stage=images", f"run_folder={tmp_path}", "mlperf.enabled=true"]
    words += [*scored, "target.fid=90"]
    assert benchmark.main([*words, "mlperf.division=closed"]) == 2
    line = f"mlperf.division: closed, but train_samples: 48 at {stage}; the benchmark: 6,513,144. Give the whole "
    assert line in capsys.readouterr().err and not [path for path in tmp_path.iterdir() if path.is_dir()]
    config = config_of(*words, "mlperf.division=open")
    assert closed_data_problems(config.mlperf, SD, config.data, config.validation) == []


SHORTCUTS = {
    "model.denoiser": ("runs/other", "runs/other; the reference: null"),  # begun with weights that are trained already
    "model.weights": ("random", "random; the reference: its published weights"),
    "eval.every_images": (256, "256; the rules: 512000"),  # the first pass would be found earlier
}


def test_no_recipe_of_the_benchmark_deviates_from_the_closed_division_and_each_shortcut_is_refused():
    for path in (ROOT / "yamls").glob("mlperf_[0-9]*.yaml"):
        values = flatten(benchmark.resolve(config_of(path)))
        assert SD.closed_deviations(values) == [], path
    for key, (value, text) in SHORTCUTS.items():
        assert SD.closed_deviations({**values, key: value}) == [f"{key}: {text}"]


# --- whole runs ---


@pytest.mark.slow
def test_the_checker_accepts_the_log_of_the_miniature_in_the_open_division(words_of, tmp_path):
    """Evaluated in training with a target that it misses. 4.0.0 and 4.1.0 ask who submits."""
    ours = ("mlperf.org=Easel", "mlperf.platform=miniature")
    words = words_of(tmp_path, "mini", "eval.when=in_training", "target.fid=1e-9", "mlperf.enabled=true", *ours)
    assert benchmark.main(words) == 0
    logged = tmp_path / "mini"
    compliance(tmp_path, logged / "mlperf.log")
    assert {check(logged / "mlperf.log", ruleset) for ruleset in SD_RULESETS} == {None}
    events = read_events(logged / "mlperf.log")
    values = {event["key"]: event["value"] for event in events}
    expected = {"train_samples": NUM_IMAGES, "eval_samples": NUM_PROMPTS, "global_batch_size": 8, "seed": 17}
    expected |= {"opt_base_learning_rate": 1.5e-3, "gradient_accumulation_steps": 1}
    assert values.items() >= expected.items()
    found = [event["key"] for event in events]
    assert found[found.index("run_start") + 1 :] == [*(2 * (BLOCK + EVALUATION)), "run_stop"]
    record = [json.loads(line) for line in (logged / "metrics.jsonl").read_text().splitlines()]
    fids = [line["fid"] for line in record if line.get("evaluation")]
    assert [e["value"] for e in events if e["metadata"].get("metric") == "FID"] == fids
    assert runs_backwards(logged / "mlperf.log") == []
    made_with = [{key: e["metadata"][key] for key in MADE_WITH[1:]} for e in events if e["key"] == "eval_stop"]
    judges = {"inception": "shapes-reader", "clip_model": "shapes-CLIP", "eval_precision": "fp32"}
    assert made_with == 2 * [{"num_images": NUM_PROMPTS, **judges}]


@pytest.mark.long
def test_a_run_that_is_scored_afterwards_is_closed_by_eval(words_of, tmp_path, capsys):
    words = words_of(tmp_path, "later", "eval.when=after", "target.fid=1e9", "mlperf.enabled=true")
    assert benchmark.main(words) == 0
    log, folder = tmp_path / "later" / "mlperf.log", tmp_path / "later"
    assert not {"run_stop", "eval_start"} & set(keys(log))
    assert eval_command.main([str(folder), "from_images=48"]) == 0  # the second passes, and so does the one before it
    events = read_events(log)
    snapshot = list_checkpoints(folder / "checkpoints", WEIGHTS)[-1]
    stop = only(events, "run_stop")
    assert stop["metadata"]["samples_count"] == 24 and stop["metadata"]["status"] == "success"
    assert stop["time_ms"] == round(1000 * read_checkpoint(snapshot)["unix_time"])
    assert runs_backwards(log) == []
