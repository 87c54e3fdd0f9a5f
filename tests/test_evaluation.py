"""Evaluation in training and afterwards, end to end on the miniature, with its trained networks and 32 prompts.

These tests check that both give the same scores, that training is not affected, and when it stops. Whether the scores are
good is tested in tests/test_miniature.py.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from composer.loggers import InMemoryLogger
from conftest import run
from miniature import NUM_PROMPTS, READER
from miniature import WEIGHTS as SHIPPED
from PIL import Image
from test_checkpoints import newest, same_training

import benchmark
import eval as eval_command
from checkpointing.files import WEIGHTS, list_checkpoints
from evaluation.clip_score import CLIPScore, load_clip
from evaluation.fid import FeatureSums, frechet_distance, load_inception, read_statistics, write_statistics
from evaluation.image_folder import list_images, read_image
from evaluation.scorer import Scorer
from evaluation.table import read_rows
from run_folder.files import keep_keys, read_config
from training import builders

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


@pytest.mark.long
def test_points_are_whole_batches_and_evaluation_is_no_training_time(miniature, watched):
    first, second = evaluations(watched)
    assert [(e["batch"], e["images"], e["weights"]) for e in (first, second)] == [(3, 24, "ema"), (6, 48, "ema")]
    assert first["fid"] != second["fid"] and first["clip"] != second["clip"] and first["num_images"] == NUM_PROMPTS
    assert (first["inception"], first["clip_model"]) == ("shapes-reader", "shapes-CLIP")
    both = first["eval_sec"] + second["eval_sec"]
    assert second["seconds_with_eval"] == pytest.approx(second["seconds"] + both, rel=1e-9)
    lines = [json.loads(line) for line in (watched / "metrics.jsonl").read_text().splitlines()]
    windows = [line for line in lines if not line.get("evaluation")]
    assert sum(line["eval_sec"] for line in windows) == pytest.approx(first["eval_sec"], rel=0.1)
    # Whatever the load: only half an evaluation, which is far more than the gaps between two clocks, is allowed.
    train, *rest = (sum(line[f"{clock}_sec"] for line in windows) for clock in ("train", "data_wait", "other"))
    assert train - EVALUATION_SEC / 2 < second["seconds"] < train + sum(rest) + EVALUATION_SEC / 2
    assert 0 < first["seconds"] < second["seconds"] and first["eval_sec"] > EVALUATION_SEC
    grids = sorted((watched / "samples").glob("*.png"))
    assert [path.name for path in grids] == ["im000000000024.png", "im000000000048.png"]
    assert Image.open(grids[0]).size == (2 * 32 + 2, 2 * 32 + 2)
    assert (watched / "samples/captions.txt").read_text().splitlines() == captions_of(miniature.prompts)[:4]
    assert read_config(watched)["eval.batch_size"] == 16 and "batch_size: null" in (watched / "config.yaml").read_text()


@pytest.mark.long
def test_evaluation_changes_nothing_in_training(words_of, watched, tmp_path):
    assert benchmark.main(words_of(tmp_path, "alone")) == 0
    assert same_training(newest(tmp_path, "alone"), newest(watched.parent, "watched"))


def test_afterwards_gives_the_same_figures_to_the_last_digit(words_of, watched, tmp_path):
    assert benchmark.main(words_of(tmp_path, "later", "eval.when=after")) == 0
    assert evaluations(tmp_path / "later") == []
    assert eval_command.main([str(tmp_path / "later")]) == 0
    path, expected = tmp_path / "later/eval.csv", evaluations(watched)
    assert [figures(row) for row in read_rows(path)] == [figures(line) for line in expected]
    assert (tmp_path / "later/eval.png").is_file()
    before = path.stat().st_mtime_ns  # given again it scores nothing
    assert eval_command.main([str(tmp_path / "later")]) == 0 and path.stat().st_mtime_ns == before
    assert eval_command.main([str(watched), f"out={tmp_path}/again"]) == 0  # and of a run evaluated in training, too
    again = read_rows(tmp_path / "again/eval.csv")
    assert [(figures(row), row["seconds"]) for row in again] == [(figures(line), line["seconds"]) for line in expected]


@pytest.mark.long
def test_two_ranks_are_evaluated_in_training_and_stop_at_their_target_together(words_of, tmp_path):
    done = run(
        "composer", "-n", "2", "benchmark.py", *words_of(tmp_path, "two", "eval.when=in_training", "target.clip=-1")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = evaluations(tmp_path / "two")
    assert (line["images"], line["num_images"], line["partial"]) == (24, NUM_PROMPTS, False)
    expected = {"target": "reached", "images_to_target": 24, "num_devices": 2, "batches": 3, "stopped_early": True}
    assert (expected | {"fid": line["fid"]}).items() <= summary_of(tmp_path / "two").items()
    assert done.stderr.count("target: reached with FID ") == 1


def test_a_run_stops_at_its_target_and_a_restart_reports_it(words_of, watched, tmp_path, capsys):
    first, folder = evaluations(watched)[0], tmp_path / "aimed"
    words = words_of(tmp_path, "aimed", "eval.when=in_training", f"target.fid={first['fid'] + 1e-9}", "target.clip=-1")

    def start(*more: str) -> tuple[dict[str, str], str]:
        assert benchmark.main([*words, *more]) == 0
        printed = capsys.readouterr()
        return result_of(printed.out), printed.err

    result, printed = start()
    assert {"target": "reached", "images_to_target": "24", "batches": "3"}.items() <= result.items()
    assert 0 < float(result["seconds_to_target"]) < float(result["seconds_to_target_with_eval"])
    assert "target: reached with FID " in printed and "after 24 images" in printed
    summary = summary_of(folder)
    assert summary["target"] == "reached" and summary["fid"] == first["fid"]  # whole, so that it can be compared again

    record = (folder / "metrics.jsonl").read_bytes()
    again, printed = start()
    assert again == result and "has reached its target" in printed and "resumes from" not in printed
    assert (folder / "metrics.jsonl").read_bytes() == record

    (folder / "summary.json").unlink()  # killed before it was written
    again, _ = start()
    same = ("target", "images_to_target", "fid", "clip")
    assert [again[key] for key in same] == [result[key] for key in same] and len(evaluations(folder)) == 1

    result, _ = start("target.fid=1e-9")  # another target: it continues to its end
    assert {"target": "missed", "images_to_target": "none", "batches": "6"}.items() <= result.items()
    assert same_training(newest(tmp_path, "aimed"), newest(watched.parent, "watched"))


@pytest.mark.long
def test_the_first_snapshot_that_passes_decides_and_a_partial_score_never_does(watched, tmp_path, capsys):
    folder = shutil.copytree(watched, tmp_path / "run")
    fids = {line["fid"]: line["images"] for line in evaluations(watched)}
    middle = sum(fids) / 2

    def result(*words: str) -> dict[str, str]:
        capsys.readouterr()
        assert eval_command.main([str(folder), *words]) == 0
        return result_of(capsys.readouterr().out)

    expected = {"target": "reached", "images_to_target": str(fids[min(fids)])}
    assert expected.items() <= result(f"target.fid={middle}").items()
    # A run that had no target keeps its summary; one that waits for this target gets it.
    assert "target" not in summary_of(folder)
    (folder / "summary.json").write_text(json.dumps({**summary_of(watched), "target": "pending"}))
    keep_keys(folder, {"target.fid": middle})
    result()
    assert summary_of(folder)["target"] == "reached"
    assert result("target.fid=1e9", "eval.num_prompts=4", f"out={tmp_path}/partial")["target"] == "missed"


@pytest.mark.long
def test_a_folder_of_images_is_scored_like_the_metrics_alone(miniature, tmp_path):
    """Images of other scenes than the prompts', under the prompts' numbers."""
    numbers = [int(line.split("\t")[0]) for line in miniature.prompts.read_text().splitlines()[1:]]
    (tmp_path / "images").mkdir()
    for number, path in zip(numbers, list_images(miniature.reference), strict=False):
        shutil.copy(path, tmp_path / "images" / f"COCO_{number:012d}.png")
    clip = f"{SHIPPED}/clip/model.safetensors"
    scored = [f"eval.prompts={miniature.prompts}", f"eval.statistics={miniature.statistics}", f"eval.{READER}"]
    assert eval_command.main([str(tmp_path / "images"), *scored, f"eval.clip={clip}", f"out={tmp_path}"]) == 0
    [row] = read_rows(tmp_path / "eval.csv")
    images = torch.stack([read_image(path) for path in list_images(tmp_path / "images")]).float() / 255
    reader, pair, sums, cosines = load_inception(READER.split("=")[1]), load_clip(clip), FeatureSums(64), CLIPScore()
    sums.update(reader(images))
    cosines.update(pair.encode_images(images), pair.encode_texts(captions_of(miniature.prompts)))
    distance = frechet_distance(sums.compute(), read_statistics(miniature.statistics))
    assert row["fid"] == pytest.approx(distance, rel=1e-9) and row["num_images"] == NUM_PROMPTS
    assert row["clip"] == pytest.approx(float(cosines.compute()), rel=1e-6)


@pytest.mark.long
def test_a_snapshot_that_is_truncated_or_trained_with_other_encoders_is_refused(watched, tmp_path, capsys):
    shutil.copytree(watched, tmp_path / "run")
    path = list_checkpoints(tmp_path / "run" / "checkpoints", WEIGHTS)[-1]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert eval_command.main([str(tmp_path / "run")]) == 2
    assert f"{path} is damaged: its bytes do not have the digest in its name." in capsys.readouterr().err
    path.write_bytes(whole)
    assert eval_command.main([str(tmp_path / "run"), "model.weights=random", "eval.num_prompts=4"]) == 2
    assert "was trained with" in capsys.readouterr().err


@pytest.mark.long
def test_a_finished_run_says_whether_another_target_is_met_and_is_not_trained_again(
    words_of, watched, tmp_path, capsys
):
    folder = shutil.copytree(watched, tmp_path / "watched")
    words = words_of(tmp_path, "watched", "eval.when=in_training")
    for more, outcome in (
        (["target.fid=1e-9"], "missed"),
        (["target.clip=-1"], "reached"),
        (["eval.when=off"], "reached"),  # it keeps its result
        (["target.clip=0.9"], "missed"),
    ):
        assert benchmark.main([*words, *more]) == 0
        printed = capsys.readouterr()
        assert "resumes from" not in printed.err and "not evaluated" not in printed.err
        assert summary_of(folder)["target"] == outcome and not summary_of(folder).get("stopped_early")
        assert more[-1] == "eval.when=off" or result_of(printed.out)["target"] == outcome
    assert read_config(folder)["target.clip"] == 0.9
    assert (folder / "metrics.jsonl").read_bytes() == (watched / "metrics.jsonl").read_bytes()


@pytest.mark.long
def test_scores_of_another_resize_precision_or_prediction_are_not_taken_for_the_same(
    miniature, watched, tmp_path, capsys
):
    write_statistics(tmp_path / "other.npz", read_statistics(miniature.statistics), {"resize": "bicubic256"})
    words = [str(watched), "snapshots=last", f"out={tmp_path}/scores"]
    for more, text in (
        (f"eval.statistics={tmp_path}/other.npz", "was made with the resize bicubic256, this evaluation has none."),
        ("objective.prediction=epsilon", "objective.prediction: epsilon, but "),
    ):
        assert eval_command.main([*words, more]) == 2
        assert text in capsys.readouterr().err
    for more in ([], ["precision=bf16"], ["eval.precision=fp16"], ["eval.precision=fp16"]):
        assert eval_command.main([*words, *more]) == 0
    first, second, last = read_rows(tmp_path / "scores" / "eval.csv")
    assert (first["precision"], second["precision"]) == ("fp32", "bf16")
    assert (first["eval_precision"], last["eval_precision"]) == ("fp32", "fp16") and first["fid"] != last["fid"]
    assert last["clip"] == float(np.float16(last["clip"])) == pytest.approx(first["clip"], abs=2e-3)


@pytest.mark.long
def test_an_evaluation_that_a_kill_at_the_end_prevented_is_made_and_logged(words_of, watched, tmp_path, monkeypatch):
    folder, logged = shutil.copytree(watched, tmp_path / "watched"), InMemoryLogger()
    (folder / "summary.json").unlink()
    lines = (watched / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = [line for line in lines if '"evaluation": true' in line][-1]
    (folder / "metrics.jsonl").write_text("".join(line for line in lines if line != last))
    monkeypatch.setattr(builders, "build_loggers", lambda *_: [logged])
    assert benchmark.main(words_of(tmp_path, "watched", "eval.when=in_training")) == 0
    made, expected = evaluations(folder), evaluations(watched)
    assert [figures(line) for line in made] == [figures(line) for line in expected]
    assert made[-1]["seconds"] == pytest.approx(expected[-1]["seconds"], abs=EVALUATION_SEC / 2)
    assert [value for _, value in logged.data["eval/fid"]] == [made[-1]["fid"]] and (folder / "summary.json").is_file()


def summary_of(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


@pytest.mark.long
def test_a_trial_decides_nothing_and_the_runs_own_settings_do(words_of, tmp_path, capsys):
    words, folder = words_of(tmp_path, "after", "eval.when=after", "target.clip=0.9"), tmp_path / "after"
    assert benchmark.main(words) == 0 and summary_of(folder)["target"] == "pending"
    for trial in (["target.clip=-1"], ["target.clip=-1", "eval.steps=2"]):
        assert eval_command.main([str(folder), *trial]) == 0
        printed = capsys.readouterr()
        assert "target=reached" in printed.out and "target: a trial: not as the run in " in printed.err
        assert trial[-1][:4] in printed.err and summary_of(folder)["target"] == "pending"
    assert eval_command.main([str(folder)]) == 0
    assert summary_of(folder)["target"] == "missed"
    assert benchmark.main([*words, "target.clip=-1"]) == 0  # an easier one: to be decided again
    assert summary_of(folder)["target"] == "pending"
    assert eval_command.main([str(folder)]) == 0
    assert (summary_of(folder)["target"], summary_of(folder)["images_to_target"]) == ("reached", 24)
