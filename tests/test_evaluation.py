"""Evaluation in training and afterwards, end to end on the miniature, with its trained networks and 32 prompts.

These tests check that both give the same scores, that training is not affected, and when it stops. Whether the scores are
good is tested in tests/test_miniature.py.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from composer.loggers import InMemoryLogger
from conftest import run, started
from miniature import NUM_PROMPTS, READER
from miniature import WEIGHTS as SHIPPED
from PIL import Image
from test_checkpoints import newest, same_training
from test_ldm import copy_tokenizer, save_folder, tiny_networks, vocabulary, whole_ldm_file, write  # noqa: F401

import benchmark
import eval as eval_command
from evaluation.clip_score import CLIPScore, load_clip
from evaluation.fid import FeatureSums, frechet_distance, read_statistics, write_statistics
from evaluation.image_folder import list_images, read_image
from evaluation.inception import load_inception
from evaluation.score_table import read_rows
from evaluation.scoring import Scorer
from record.checkpoint_files import WEIGHTS, listed
from record.config_file import keep_keys, read_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200, func_only=True)]


@pytest.fixture(scope="module")
def words_of(miniature):
    def words(folder: Path, name: str, *more: str) -> list[str]:
        """Six batches of 8; points after the third and the sixth."""
        own = ["max_duration=6ba", "ema.decay=0.5", "save.every_images=16", "save.snapshot_every_images=null"]
        return miniature.small(folder, name, *own, "eval.every_images=20", "eval.guidance=3", *more)

    return words


def captions_of(prompts: Path) -> list[str]:
    return [line.split("\t")[2] for line in prompts.read_text().splitlines()[1:]]


def evaluations(folder: Path) -> list[dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("evaluation")]


def result_of(output: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in output.splitlines()[-1].split())


EVALUATION_SEC = 5.0  # at least


@pytest.fixture(scope="module")
def watched(words_of, tmp_path_factory) -> Path:
    """A run that is evaluated in training, where an evaluation takes far longer than the batches do."""
    folder, begin = tmp_path_factory.mktemp("watched"), Scorer._begin

    def slowly(*args):
        time.sleep(EVALUATION_SEC)
        return begin(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scorer, "_begin", slowly)
        assert benchmark.main(words_of(folder, "watched", "eval.when=in_training")) == 0
    return folder / "watched"


def figures(row: dict) -> tuple:
    return tuple(row[key] for key in ("images", "batch", "weights", "fid", "clip", "num_images", "partial"))


def test_points_are_whole_batches_and_evaluation_is_no_training_time(miniature, watched):
    first, second = evaluations(watched)
    assert [(line["batch"], line["images"], line["weights"]) for line in (first, second)] == [
        (3, 24, "ema"),
        (6, 48, "ema"),
    ]
    assert first["fid"] != second["fid"] and first["clip"] != second["clip"] and first["num_images"] == NUM_PROMPTS
    assert (first["inception"], first["clip_model"]) == ("shapes-reader", "shapes-CLIP")
    assert 0 < first["seconds"] < second["seconds"]
    both = first["eval_sec"] + second["eval_sec"]
    assert second["seconds_with_eval"] == pytest.approx(second["seconds"] + both, rel=1e-9)
    windows = [json.loads(line) for line in (watched / "metrics.jsonl").read_text().splitlines()]
    windows = [line for line in windows if not line.get("evaluation")]
    assert sum(line["eval_sec"] for line in windows) == pytest.approx(first["eval_sec"], rel=0.1)
    # Whatever the load: only half an evaluation, which is far more than the gaps between two clocks, is allowed.
    train, rest = (sum(line[f"{clock}_sec"] for line in windows) for clock in ("train", "data_wait"))
    rest += sum(line["other_sec"] for line in windows)
    assert (
        train - EVALUATION_SEC / 2 < second["seconds"] < train + rest + EVALUATION_SEC / 2
        and first["eval_sec"] > EVALUATION_SEC
    )
    assert [path.name for path in sorted((watched / "samples").glob("*.png"))] == [
        "im000000000024.png",
        "im000000000048.png",
    ]
    assert Image.open(watched / "samples/im000000000024.png").size == (2 * 32 + 2, 2 * 32 + 2)
    assert (watched / "samples/captions.txt").read_text().splitlines() == captions_of(miniature.prompts)[:4]
    assert read_config(watched)["eval.batch_size"] == 16 and "batch_size: null" in (watched / "config.yaml").read_text()


def test_evaluation_changes_nothing_in_training(words_of, watched, tmp_path):
    assert benchmark.main(words_of(tmp_path, "alone")) == 0
    assert same_training(newest(tmp_path, "alone"), newest(watched.parent, "watched"))


def test_afterwards_gives_the_same_figures_to_the_last_digit(words_of, watched, tmp_path, capsys):
    assert benchmark.main(words_of(tmp_path, "later", "eval.when=after")) == 0
    assert evaluations(tmp_path / "later") == []
    assert eval_command.main([str(tmp_path / "later")]) == 0
    rows = read_rows(tmp_path / "later" / "eval.csv")
    assert [figures(row) for row in rows] == [figures(line) for line in evaluations(watched)]
    assert (tmp_path / "later" / "eval.png").is_file()

    before = (tmp_path / "later" / "eval.csv").stat().st_mtime_ns  # given again it scores nothing
    assert eval_command.main([str(tmp_path / "later")]) == 0
    assert (tmp_path / "later" / "eval.csv").stat().st_mtime_ns == before
    assert eval_command.main([str(watched), f"out={tmp_path}/again"]) == 0  # and of the run that was watched, too
    again = read_rows(tmp_path / "again" / "eval.csv")
    assert [figures(row) for row in again] == [figures(line) for line in evaluations(watched)]
    assert [row["seconds"] for row in again] == [line["seconds"] for line in evaluations(watched)]


def test_two_ranks_score_each_prompt_once_and_the_same(watched, tmp_path):
    """In the batches that the run has found: in others an image differs by some 1e-6, and 8 bits of it by a grey level."""
    done = run("composer", "-n", "2", "eval.py", str(watched), "snapshots=last", f"out={tmp_path}/two")
    assert done.returncode == 0, done.stdout + done.stderr
    [row], line = read_rows(tmp_path / "two" / "eval.csv"), evaluations(watched)[-1]
    assert row["num_images"] == NUM_PROMPTS
    assert row["fid"] == pytest.approx(line["fid"], rel=1e-6)
    assert row["clip"] == pytest.approx(line["clip"], abs=1e-6)


@pytest.mark.timeout(200, func_only=True)
def test_two_ranks_are_evaluated_in_training_and_stop_at_their_target_together(words_of, tmp_path):
    words = words_of(tmp_path, "two", "eval.when=in_training", "target.clip=-1")
    done = run("composer", "-n", "2", "benchmark.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = evaluations(tmp_path / "two")
    assert (line["images"], line["num_images"], line["partial"]) == (24, NUM_PROMPTS, False)
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert (summary["target"], summary["images_to_target"], summary["num_devices"]) == ("reached", 24, 2)
    assert (summary["batches"], summary["fid"]) == (3, line["fid"]) and summary["stopped_early"]
    assert done.stderr.count("target: reached with FID ") == 1


def test_a_run_stops_at_its_target_and_started_again_says_so(words_of, watched, tmp_path, capsys):
    first = evaluations(watched)[0]
    words = words_of(tmp_path, "aimed", "eval.when=in_training", f"target.fid={first['fid'] + 1e-9}", "target.clip=-1")
    assert benchmark.main(words) == 0
    captured = capsys.readouterr()
    result = result_of(captured.out)
    assert (result["target"], result["images_to_target"], result["batches"]) == ("reached", "24", "3")
    assert float(result["fid"]) == pytest.approx(first["fid"], rel=1e-5)
    assert 0 < float(result["seconds_to_target"]) < float(result["seconds_to_target_with_eval"])
    assert "target: reached with FID " in captured.err and "after 24 images" in captured.err
    summary = json.loads((tmp_path / "aimed" / "summary.json").read_text())
    assert summary["target"] == "reached" and summary["fid"] == first["fid"]  # whole, so that it can be compared again

    record = (tmp_path / "aimed" / "metrics.jsonl").read_bytes()
    assert benchmark.main(words) == 0  # a restart does nothing but say so
    captured = capsys.readouterr()
    assert result_of(captured.out) == result
    assert "has reached its target" in captured.err
    assert (tmp_path / "aimed" / "metrics.jsonl").read_bytes() == record

    (tmp_path / "aimed" / "summary.json").unlink()  # killed before it was written
    assert benchmark.main(words) == 0
    again = result_of(capsys.readouterr().out)
    assert [again[key] for key in ("target", "images_to_target", "fid", "clip")] == [
        result[key] for key in ("target", "images_to_target", "fid", "clip")
    ]
    assert len(evaluations(tmp_path / "aimed")) == 1

    assert benchmark.main([*words, "target.fid=1e-9"]) == 0  # another target: it goes on, to its end
    result = result_of(capsys.readouterr().out)
    assert (result["target"], result["images_to_target"], result["batches"]) == ("missed", "none", "6")
    assert same_training(newest(tmp_path, "aimed"), newest(watched.parent, "watched"))


def test_the_first_snapshot_that_passes_and_the_one_before_it(watched, tmp_path, capsys):
    shutil.copytree(watched, tmp_path / "run")
    first, second = evaluations(watched)
    middle = (first["fid"] + second["fid"]) / 2
    between = f"target.fid={middle}"
    passes = min(first, second, key=lambda line: line["fid"])
    capsys.readouterr()
    assert eval_command.main([str(tmp_path / "run"), between]) == 0
    result = result_of(capsys.readouterr().out)
    assert (result["target"], result["images_to_target"]) == ("reached", str(passes["images"]))
    # A run that had no target keeps the summary that it has; one that waits, for this target, is told.
    assert "target" not in json.loads((tmp_path / "run" / "summary.json").read_text())
    summary = json.loads((watched / "summary.json").read_text())
    (tmp_path / "run" / "summary.json").write_text(json.dumps({**summary, "target": "pending"}))
    keep_keys(tmp_path / "run", {"target.fid": middle})
    assert eval_command.main([str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["target"] == "reached"
    capsys.readouterr()
    partial = [str(tmp_path / "run"), "target.fid=1e9", "eval.num_prompts=4", f"out={tmp_path}/partial"]
    assert eval_command.main(partial) == 0  # a partial score never meets a target
    assert result_of(capsys.readouterr().out)["target"] == "missed"


def test_killed_in_mid_evaluation_it_ends_with_the_same_figures(words_of, watched, tmp_path):
    """When its first scores are known and not yet written."""
    words = words_of(tmp_path, "killed", "eval.when=in_training", "save.every_images=8")
    wait = "import sys, time, pathlib, benchmark as b; score = b.Scorer.score; mark = pathlib.Path(sys.argv.pop(1))\n"
    wait += "b.Scorer.score = lambda *given: (score(*given), mark.touch(), time.sleep(600))\nb.main(sys.argv[1:])"
    with started(sys.executable, "-c", wait, str(tmp_path / "scored"), *words) as process:
        while not (tmp_path / "scored").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    assert evaluations(tmp_path / "killed") == []
    assert benchmark.main(words) == 0
    assert [figures(line) for line in evaluations(tmp_path / "killed")] == [
        figures(line) for line in evaluations(watched)
    ]
    starts = (tmp_path / "killed" / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["batch"] for line in starts] == [0, 3]
    assert same_training(newest(tmp_path, "killed"), newest(watched.parent, "watched"))


def test_guidance_is_swept_and_drawn(watched, tmp_path):
    words = [str(watched), "eval.guidance=[1,3]", "eval.sampler=plms", f"out={tmp_path}/sweep"]
    assert eval_command.main(words) == 0
    rows = read_rows(tmp_path / "sweep" / "eval.csv")
    assert [(row["guidance"], row["sampler"]) for row in rows] == [(1.0, "plms"), (3.0, "plms")]
    assert rows[0]["fid"] != rows[1]["fid"] and (tmp_path / "sweep" / "guidance.png").is_file()


def test_a_run_is_scored_at_another_size_by_networks_that_take_it(watched, tmp_path, capsys):
    words = [str(watched), "snapshots=last", "eval.image_size=16", f"out={tmp_path}/small"]
    assert eval_command.main(words) == 2
    assert "the miniature's scoring networks take 32 x 32 px" in capsys.readouterr().err
    assert eval_command.main([*words, "eval.statistics=null", "eval.inception=null", "eval.clip=random"]) == 0
    [row] = read_rows(tmp_path / "small" / "eval.csv")
    assert row["eval_image_size"] == [16, 16] and np.isfinite(row["clip"]) and row["fid"] is None


def test_a_folder_of_images_is_scored_like_the_metrics_alone(miniature, tmp_path):
    """Pictures of other scenes than the prompts', under the prompts' numbers."""
    numbers = [int(line.split("\t")[0]) for line in miniature.prompts.read_text().splitlines()[1:]]
    (tmp_path / "images").mkdir()
    for number, path in zip(numbers, list_images(miniature.reference), strict=False):
        shutil.copy(path, tmp_path / "images" / f"COCO_{number:012d}.png")
    scored = [f"eval.prompts={miniature.prompts}", f"eval.statistics={miniature.statistics}", f"eval.{READER}"]
    scored += [f"eval.clip={SHIPPED}/clip/model.safetensors", f"out={tmp_path}"]
    assert eval_command.main([str(tmp_path / "images"), *scored]) == 0
    [row] = read_rows(tmp_path / "eval.csv")
    pictures = torch.stack([read_image(path) for path in list_images(tmp_path / "images")]).float() / 255
    reader, pair = load_inception(READER.split("=")[1]), load_clip(f"{SHIPPED}/clip/model.safetensors")
    sums, cosines = FeatureSums(64), CLIPScore()
    sums.update(reader(pictures))
    cosines.update(pair.encode_images(pictures), pair.encode_texts(captions_of(miniature.prompts)))
    statistics = read_statistics(miniature.statistics)
    assert row["fid"] == pytest.approx(frechet_distance(sums.compute(), statistics), rel=1e-9)
    assert row["clip"] == pytest.approx(float(cosines.compute()), rel=1e-6)
    assert row["num_images"] == NUM_PROMPTS


def test_a_diffusers_folder_is_scored_as_it_is_published(miniature, vocabulary, tmp_path, capsys):  # noqa: F811
    folder = save_folder(tmp_path / "published")
    copy_tokenizer(vocabulary, Path(folder))
    Path(folder, "model_index.json").write_text("{}")
    Path(folder, "scheduler").mkdir()
    Path(folder, "scheduler", "scheduler_config.json").write_text('{"prediction_type": "v_prediction"}')
    scored = [
        f"eval.prompts={miniature.prompts}",
        "eval.clip=random",
        "eval.steps=3",
        "model.preset=tiny",
        "image_size=64",
    ]
    assert eval_command.main([folder, *scored, f"out={tmp_path}/scores"]) == 0, capsys.readouterr().err
    [row] = read_rows(tmp_path / "scores" / "eval.csv")
    assert (row["model"], row["weights"], row["num_images"], row["fid"]) == (
        "published",
        "published",
        NUM_PROMPTS,
        None,
    )
    assert np.isfinite(row["clip"])


def test_a_snapshot_that_is_truncated_or_trained_with_other_encoders_is_refused(watched, tmp_path, capsys):
    shutil.copytree(watched, tmp_path / "run")
    path = listed(tmp_path / "run" / "checkpoints", WEIGHTS)[-1]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert eval_command.main([str(tmp_path / "run")]) == 2
    assert f"{path} is damaged: its bytes do not have the digest in its name." in capsys.readouterr().err
    path.write_bytes(whole)
    assert eval_command.main([str(tmp_path / "run"), "model.weights=random", "eval.num_prompts=4"]) == 2
    assert "was trained with" in capsys.readouterr().err


def test_a_finished_run_says_and_keeps_whether_another_target_is_met_and_is_not_trained_again(
    words_of, watched, tmp_path, capsys
):
    shutil.copytree(watched, tmp_path / "watched")
    words = words_of(tmp_path, "watched", "eval.when=in_training")
    for target, outcome in (("1e-9", "missed"), ("1e9", "reached"), ("1e-9", "missed")):
        assert benchmark.main([*words, f"target.fid={target}"]) == 0
        assert result_of(capsys.readouterr().out)["target"] == outcome
        assert json.loads((tmp_path / "watched" / "summary.json").read_text())["target"] == outcome
        assert read_config(tmp_path / "watched")["target.fid"] == float(target)
    assert (tmp_path / "watched" / "metrics.jsonl").read_bytes() == (watched / "metrics.jsonl").read_bytes()


def test_a_finished_run_that_is_to_be_evaluated_now_waits_for_the_command_that_does_it(words_of, tmp_path, capsys):
    words = words_of(tmp_path, "late", "save.snapshot_every_images=24")
    assert benchmark.main(words) == 0
    now = [*words, "eval.when=in_training", "target.fid=1e9"]
    for _ in range(2):
        assert benchmark.main(now) == 0
        captured = capsys.readouterr()
        assert result_of(captured.out)["target"] == "pending"
        said = "2 of its 2 points were not evaluated in training: composer eval.py "
        assert f"{said}{tmp_path / 'late'} scores the snapshots that it has." in captured.err
    assert eval_command.main([str(tmp_path / "late")]) == 0
    assert json.loads((tmp_path / "late" / "summary.json").read_text())["target"] == "reached"
    capsys.readouterr()
    assert benchmark.main(now) == 0
    captured = capsys.readouterr()
    assert result_of(captured.out)["target"] == "reached" and "not evaluated" not in captured.err


def test_a_run_is_not_evaluated_in_two_ways(words_of, miniature, watched, tmp_path, capsys):
    """Nor taken for one that met its target in another way. Where files lie may change."""
    shutil.copytree(watched, tmp_path / "watched")
    words = words_of(tmp_path, "watched", "eval.when=in_training", "target.fid=1e9")
    record = (tmp_path / "watched" / "metrics.jsonl").read_bytes()
    assert benchmark.main([*words, "eval.guidance=4", "eval.weights=training", "max_duration=9ba"]) == 2
    at = f"but {tmp_path / 'watched'} was evaluated with"
    first, second = capsys.readouterr().err.splitlines()[-2:]
    assert first.startswith(f"eval.guidance: guidance 4.0, {at} 3.0 at 48 images. A run's evaluations have to be alike")
    assert second.startswith(f"eval.weights: eval_weights training, {at} ema at 48 images.")
    shutil.copy(miniature.prompts, tmp_path / "moved.tsv")
    assert benchmark.main([*words, f"eval.prompts={tmp_path}/moved.tsv"]) == 0
    assert result_of(capsys.readouterr().out)["target"] == "reached"
    assert (tmp_path / "watched" / "metrics.jsonl").read_bytes() == record


def test_a_finished_run_notices_other_prompts_and_statistics_at_the_same_path(
    words_of, miniature, watched, tmp_path, capsys
):
    prompts, statistics = tmp_path / "prompts.tsv", tmp_path / "statistics.npz"
    shutil.copy(miniature.prompts, prompts)
    shutil.copy(miniature.statistics, statistics)
    shutil.copytree(watched, tmp_path / "watched")
    files = [f"eval.prompts={prompts}", f"eval.statistics={statistics}"]
    words = words_of(tmp_path, "watched", "eval.when=in_training", *files)
    after = words_of(tmp_path, "after", "eval.when=after", "target.clip=-1", *files)
    assert benchmark.main(words) == benchmark.main(after) == eval_command.main([str(tmp_path / "after")]) == 0
    assert benchmark.main(words) == benchmark.main(after) == 0  # finished, and nothing has changed
    assert result_of(capsys.readouterr().out)["target"] == "reached"
    whole, record = prompts.read_bytes(), (tmp_path / "watched" / "metrics.jsonl").read_bytes()
    prompts.write_bytes(whole.replace(b"\ta ", b"\tthe ", 1))
    assert benchmark.main(words) == 2
    at = f"but {tmp_path / 'watched'} was evaluated with"
    assert f"eval.prompts: prompts_sha256 {sha256(prompts)}, {at} " in capsys.readouterr().err
    assert benchmark.main(after) == 0
    said = capsys.readouterr()
    assert (
        result_of(said.out)["target"] == "pending" and "its scores are of other prompts or statistics than" in said.err
    )
    prompts.write_bytes(whole)
    made = read_statistics(statistics)
    write_statistics(statistics, made._replace(mean=made.mean + 1.0), {"resize": "none"})
    assert benchmark.main(words) == 2
    assert f"eval.statistics: statistics_sha256 {sha256(statistics)}, {at} " in capsys.readouterr().err
    assert (tmp_path / "watched" / "metrics.jsonl").read_bytes() == record


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_statistics_of_another_resize_and_rows_of_another_precision_are_not_taken_for_the_same(
    miniature, watched, tmp_path, capsys
):
    made = read_statistics(miniature.statistics)
    write_statistics(tmp_path / "other.npz", made, {"resize": "bicubic256"})
    words = [str(watched), "snapshots=last", f"out={tmp_path}/scores"]
    assert eval_command.main([*words, f"eval.statistics={tmp_path}/other.npz"]) == 2
    assert "was made with the resize bicubic256, this evaluation has none." in capsys.readouterr().err
    assert eval_command.main(words) == eval_command.main([*words, "precision=bf16"]) == 0
    assert [row["precision"] for row in read_rows(tmp_path / "scores" / "eval.csv")] == ["fp32", "bf16"]
    for _ in range(2):
        assert eval_command.main([*words, "eval.precision=fp16"]) == 0
    first, _, last = read_rows(tmp_path / "scores" / "eval.csv")
    assert (first["eval_precision"], last["eval_precision"]) == ("fp32", "fp16") and first["fid"] != last["fid"]
    assert last["clip"] == float(np.float16(last["clip"])) == pytest.approx(first["clip"], abs=2e-3)
    assert eval_command.main([*words, "objective.prediction=epsilon"]) == 2
    assert "objective.prediction: epsilon, but " in capsys.readouterr().err


def without_last_evaluation(watched: Path, folder: Path) -> Path:
    """As it is after a kill in the last evaluation, with all training done."""
    shutil.copytree(watched, folder / "watched")
    (folder / "watched" / "summary.json").unlink()
    lines = (watched / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = next(line for line in reversed(lines) if '"evaluation": true' in line)
    (folder / "watched" / "metrics.jsonl").write_text("".join(line for line in lines if line != last))
    return folder / "watched"


def test_an_evaluation_that_is_owed_at_the_end_is_made_and_logged(words_of, watched, tmp_path, monkeypatch):
    run, logged = without_last_evaluation(watched, tmp_path), InMemoryLogger()
    monkeypatch.setattr(benchmark, "build_loggers", lambda *_: [logged])
    assert benchmark.main(words_of(tmp_path, "watched", "eval.when=in_training")) == 0
    assert [figures(line) for line in evaluations(run)] == [figures(line) for line in evaluations(watched)]
    made, first_made = evaluations(run)[-1], evaluations(watched)[-1]
    assert made["seconds"] == pytest.approx(first_made["seconds"], abs=EVALUATION_SEC / 2)
    assert [value for _, value in logged.data["eval/fid"]] == [made["fid"]]
    assert (run / "summary.json").is_file()


def test_the_batch_size_is_found_at_the_first_evaluation_and_kept_through_a_start_without_one(words_of, tmp_path):
    def batch_size() -> int | None:
        return read_config(tmp_path / "one")["eval.batch_size"]

    for duration, when, expected in (("2ba", "off", None), ("4ba", "in_training", 16), ("5ba", "off", 16)):
        words = words_of(tmp_path, "one", f"eval.when={when}", "save.every_images=8")
        assert benchmark.main([*words, f"max_duration={duration}"]) == 0
        assert batch_size() == expected
    [line] = evaluations(tmp_path / "one")
    assert (line["batch"], line["eval_batch_size"]) == (3, 16)


def summary_of(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def test_a_trial_decides_nothing_and_the_runs_own_settings_do(words_of, tmp_path, capsys):
    words = words_of(tmp_path, "after", "eval.when=after", "target.clip=0.9")
    assert benchmark.main(words) == 0 and summary_of(tmp_path / "after")["target"] == "pending"
    for trial in (["target.clip=-1"], ["target.clip=-1", "eval.steps=2"], ["target.clip=-1", "seed=3"]):
        assert eval_command.main([str(tmp_path / "after"), *trial]) == 0
        said = capsys.readouterr()
        assert (
            "target=reached" in said.out
            and "target: a trial: not as the run in " in said.err
            and trial[-1][:4] in said.err
        )
        assert summary_of(tmp_path / "after")["target"] == "pending"
    assert eval_command.main([str(tmp_path / "after")]) == 0
    assert summary_of(tmp_path / "after")["target"] == "missed"
    assert benchmark.main([*words, "target.clip=-1"]) == 0  # an easier one: to be decided again
    assert summary_of(tmp_path / "after")["target"] == "pending"
    assert eval_command.main([str(tmp_path / "after")]) == 0
    assert (summary_of(tmp_path / "after")["target"], summary_of(tmp_path / "after")["images_to_target"]) == (
        "reached",
        24,
    )


def test_points_that_were_not_evaluated_before_are_said(words_of, tmp_path, capsys):
    assert benchmark.main(words_of(tmp_path, "late", "max_duration=4ba", "save.every_images=8")) == 0
    capsys.readouterr()
    words = words_of(tmp_path, "late", "eval.when=in_training", "target.clip=-1", "max_duration=7ba")
    assert benchmark.main([*words, "save.every_images=8"]) == 0
    said = capsys.readouterr()
    assert "eval: 1 of 1 points before 32 images were not evaluated (first: 24). A target that is" in said.err
    assert "images_to_target=48" in said.out
    assert summary_of(tmp_path / "late")["points_not_evaluated"] == 1 and summary_of(tmp_path / "late")["stopped_early"]


def test_a_finished_run_keeps_its_result_without_evaluation_and_with_a_harder_target(
    words_of, watched, tmp_path, capsys
):
    shutil.copytree(watched, tmp_path / "watched")
    words = [word for word in words_of(tmp_path, "watched", "eval.when=in_training") if word]
    assert benchmark.main([*words, "target.clip=-1"]) == 0
    reached = summary_of(tmp_path / "watched")
    assert reached["target"] == "reached" and not reached["stopped_early"]
    capsys.readouterr()
    for more in (
        ["eval.when=off"],
        ["eval.when=in_training", "target.clip=0.9"],
        ["eval.when=after", "target.clip=0.9"],
    ):
        assert benchmark.main([*words, *more]) == 0
        said = capsys.readouterr().err
        assert "is finished" in said and "resumes from" not in said and "not evaluated" not in said
        expected = "reached" if more == ["eval.when=off"] else "missed"
        assert summary_of(tmp_path / "watched")["target"] == expected


def test_the_same_prompts_elsewhere_are_the_same_and_a_reached_target_is_said(words_of, miniature, tmp_path, capsys):
    words = words_of(tmp_path, "copied", "eval.when=in_training", "target.clip=-1")
    assert benchmark.main(words) == 0
    shutil.copy(miniature.prompts, tmp_path / "copy.tsv")
    capsys.readouterr()
    assert benchmark.main([*words, f"eval.prompts={tmp_path / 'copy.tsv'}"]) == 0
    said = capsys.readouterr()
    assert "has reached its target" in said.err and "resumes from" not in said.err and "target=reached" in said.out


def test_an_end_in_the_last_evaluation_loses_no_loss(words_of, tmp_path, monkeypatch, capsys):
    """Its batches are in no window yet, and no batch comes after them."""
    words = words_of(tmp_path, "ended", "eval.when=in_training", "measure.window_batches=100")
    score = benchmark.Scorer.score

    def ended(self, *given):
        for thread in threading.enumerate():  # the checkpoint before it is written meanwhile
            if thread.name == "checkpoints":
                thread.join()
        if (tmp_path / "ended" / "checkpoints").is_dir() and any("000006" in p.name for p in listed_of(tmp_path)):
            raise KeyboardInterrupt
        return score(self, *given)

    monkeypatch.setattr(benchmark.Scorer, "score", ended)
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(words)
    monkeypatch.undo()
    assert benchmark.main(words) == 0
    assert float(result_of(capsys.readouterr().out)["loss"]) > 0


def listed_of(folder: Path) -> list[Path]:
    return list((folder / "ended" / "checkpoints").iterdir())
