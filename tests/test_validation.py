"""Validation loss and sample grids: by formulas, and in whole runs of the miniature without any metric network."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import run
from PIL import Image
from streaming import MDSWriter, StreamingDataset
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_checkpoints import newest, same_training

import benchmark
from common.command_line import parse_command_line
from config import load
from data import open_datasets
from evaluation.validation import Validator, thousandths_of
from families.sampling import prompt_generator
from mds.dataset import read_dataset, write_metadata
from mds.fetch import HASH
from mds.mixture import resolve_streams
from prepare import latents, shapes, shards
from training.config import RunConfig, build, resolve

NUM_HELD_OUT = 40
OFF = ["validation.remote=null", "validation.every_images=null", "samples.every_images=null", "samples.prompts=null"]


def made(folder: Path, *words: str) -> Path:
    """Images and moments of pictures of the miniature's kind."""
    assert shapes.main([str(folder / "tars"), *words]) == 0
    assert shards.main([str(folder / "tars"), str(folder / "images"), "shard_size=32kb"]) == 0
    own = ["model.family=shapes", "image_size=32", "shard_size=16kb"]
    assert latents.main([str(folder / "images"), str(folder / "moments"), *own]) == 0
    return folder


@pytest.fixture(scope="module")
def held_out(tmp_path_factory) -> Path:
    """40 pictures that are not in the miniature's training set, though their keys are."""
    return made(tmp_path_factory.mktemp("held_out"), f"num_images={NUM_HELD_OUT}", "part=reference")


@pytest.fixture(scope="module")
def words_of(miniature, held_out, tmp_path_factory):
    """Four batches of 8, validated before them and after each two, with grids at the start and after the third."""
    captions = tmp_path_factory.mktemp("captions") / "captions.txt"
    captions.write_text("a red circle\na blue square\n\na green triangle above a red circle\n")
    own = [f"validation.remote={held_out / 'moments'}", "validation.every_images=16", "ema.decay=0.5"]
    own += ["samples.every_images=20", f"samples.prompts={captions}", "loggers.tensorboard={}", "save.every_images=8"]

    def words(folder: Path, name: str, *more: str) -> list[str]:
        found = miniature.small(folder, name, *own, *more)
        return [word for word in found if not word.startswith(("eval.prompts", "eval.stat", "eval.inc", "eval.clip"))]

    return words


@pytest.fixture(scope="module")
def whole(words_of, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert benchmark.main(words_of(folder, "whole")) == 0
    return folder


def lines_of(folder: Path, kind: str = "validation") -> list[dict]:
    return [line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if line.get(kind)]


def losses_of(folder: Path) -> list[tuple]:
    return [(line["batch"], line["val_loss"], *line["val_loss_bins"]) for line in lines_of(folder)]


GRIDS = ["im000000000000.png", "im000000000024.png"]


def grids_of(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "samples").glob("*.png"))


# --- what is measured ---


def test_of_ten_samples_each_bin_has_one_and_of_a_thousand_each_time():
    assert thousandths_of([0, 1, 9, 10, 11, 123, 1123]).tolist() == [0, 100, 900, 10, 110, 321, 321]
    assert sorted(thousandths_of(range(1000)).tolist()) == list(range(1000))
    for begin in (0, 7, 995):
        assert sorted(thousandths_of(range(begin, begin + 10)) // 100) == list(range(10))


@pytest.fixture(scope="module")
def validator_of(miniature, held_out):
    config = resolve(load(RunConfig, parse_command_line(miniature.small(held_out, "x"), {}), check=lambda c: []))
    model = build(config).to_device(torch.device("cpu"), "fp32")

    def validator(num: int, chunk: int, folder: Path = held_out) -> Validator:
        data = type(config.data)(stage="moments", remote=str(folder / "moments"), workers=0)
        given = resolve_streams(data.sources, data.read(), (32, 32))
        dataset = open_datasets(data, model.family, given, device_batch_size=chunk, seed=0)
        return Validator(model, dataset, num_samples=num, chunk=chunk)

    return validator


def test_a_bin_of_one_sample_is_its_error_by_the_formulas(validator_of, held_out):
    """With ten samples, sample n is alone in bin n, at step 100 n; the schedule and x_t are written out again here."""
    validator = validator_of(10, 4)
    found, model = validator.measure(), validator.model
    stage = StreamingDataset(local=str(held_out / "moments"), batch_size=1, shuffle=False)
    alpha_bar = np.cumprod(1.0 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
    for n, loss in enumerate(found["val_loss_bins"]):
        generator, step = prompt_generator(0, n), 100 * n
        posterior, noise = (torch.randn(1, *model.latent_shape, generator=generator) for _ in range(2))
        latents = model.family.sample_latents(torch.from_numpy(stage[n]["moments"].copy())[None].float(), posterior)
        signal, sigma = alpha_bar[step] ** 0.5, (1.0 - alpha_bar[step]) ** 0.5
        tokens = model.family.tokenize([stage[n]["caption"]])
        with torch.no_grad():
            condition = model.family.encode_text(model.encoders.modules, tokens)
            said = model.family.denoise(
                model.denoiser.eval(), signal * latents + sigma * noise, torch.tensor([step]), condition
            )
        target = {"epsilon": noise, "v": signal * noise - sigma * latents}[model.objective.prediction]
        assert loss == pytest.approx((said - target).square().mean().item(), rel=2e-5)
    assert found["val_loss"] == pytest.approx(np.mean(found["val_loss_bins"]), rel=1e-12)


def test_the_size_of_a_chunk_changes_last_bits_alone_and_nothing_global_is_drawn(validator_of):
    state = torch.random.get_rng_state()
    first, second, *_, again = found = [validator_of(35, chunk).measure() for chunk in (3, 8, 64, 8)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert second["val_loss"] == again["val_loss"]  # bit for bit
    for one in found:
        assert one["val_loss"] == pytest.approx(first["val_loss"], rel=1e-6)
        assert one["val_loss_bins"] == pytest.approx(first["val_loss_bins"], rel=1e-5) and one["bad_samples"] == 0


def test_an_unusable_sample_is_reported_once_and_counted(validator_of, held_out, tmp_path, capsys):
    shard, folder = read_dataset(str(held_out / "moments")).shards[0], tmp_path / "moments"
    columns = dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
    with MDSWriter(out=str(folder), columns=columns, hashes=[HASH], size_limit=shard["size_limit"]) as writer:
        for number, row in enumerate(StreamingDataset(local=str(held_out / "moments"), batch_size=1, shuffle=False)):
            writer.write({**row, "moments": np.full_like(row["moments"], np.nan)} if number == 0 else row)
    write_metadata(folder, "moments", {})
    validator, good = validator_of(20, 8, folder=tmp_path), validator_of(20, 8).measure()
    one, two = validator.measure(), validator.measure()
    assert one["val_loss"] == two["val_loss"] != good["val_loss"]
    assert (one["bad_samples"], good["bad_samples"]) == (1, 0)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("validation: sample 0 (000000000) cannot be used: moments are not finite. The next good one")


# --- in a run ---


@pytest.mark.long
@pytest.mark.timeout(100, func_only=True)
def test_a_run_shows_losses_and_grids_in_tensorboard_and_its_training_is_that_of_one_without(words_of, whole, tmp_path):
    folder, plain, lines = whole / "whole", tmp_path / "plain", lines_of(whole / "whole")
    assert [(line["batch"], line["images"], line["weights"]) for line in lines] == [
        (n, 8 * n, "ema") for n in (0, 2, 4)
    ]
    first, *_, last = lines
    assert last["val_loss"] < first["val_loss"] and first["seconds"] == 0.0 < last["val_sec"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["val_loss"] == last["val_loss"] and summary["batches"] == 4
    assert grids_of(folder) == GRIDS
    assert Image.open(folder / "samples" / GRIDS[0]).size == (66, 66)  # 2 x 2 places of 32 px, three of them taken
    said = (folder / "samples/captions.txt").read_text().splitlines()
    assert said == ["a red circle", "a blue square", "a green triangle above a red circle"]

    [of_events] = {path.parent for path in (folder / "tensorboard").rglob("events*")}
    events = EventAccumulator(str(of_events)).Reload()
    for tag, values in (
        ("", [line["val_loss"] for line in lines]),
        ("_t900", [line["val_loss_bins"][9] for line in lines]),
    ):
        logged = [(event.step, event.value) for event in events.Scalars(f"val/loss{tag}")]
        assert logged == [(step, pytest.approx(value)) for step, value in zip((0, 2, 4), values, strict=True)]
    first, second = events.Images("samples/grid")
    assert (first.step, second.step) == (0, 3) and min(first.width, first.height) > 2 * 128  # enlarged, with captions

    assert benchmark.main(words_of(tmp_path, "plain", *OFF)) == 0
    assert same_training(newest(tmp_path, "plain"), newest(whole, "whole"))
    windows = [[line["loss"] for line in lines_of(each, "loss")] for each in (plain, folder)]
    assert windows[0] == windows[1] and "val_loss" not in json.loads((plain / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(60, func_only=True)
def test_a_resumed_run_repeats_no_point_and_has_the_same_losses(words_of, whole, tmp_path):
    """It resumes from its third batch: the point of the second is kept, that of the fourth is measured again."""
    folder = shutil.copytree(whole / "whole", tmp_path / "again")
    for path in (*(folder / "checkpoints").glob("full-ba000000000004*"), folder / "summary.json"):
        path.unlink()
    grid = folder / "samples" / GRIDS[1]
    drawn = grid.stat().st_mtime_ns
    assert benchmark.main(words_of(tmp_path, "again")) == 0
    assert losses_of(folder) == losses_of(whole / "whole") and grid.stat().st_mtime_ns == drawn
    assert [line["start"] for line in lines_of(folder)] == [1, 1, 2]


@pytest.mark.long
@pytest.mark.timeout(60, func_only=True)
def test_a_signal_in_a_validation_ends_the_run_and_the_next_start_repeats_it(
    words_of, whole, tmp_path, monkeypatch, capsys
):
    measured, calls, words = Validator._errors_of, [], words_of(tmp_path, "stopped", "save.every_images=320")
    folder = tmp_path / "stopped"

    def signalled(self, places):
        calls.append(places)
        if len(calls) == 8:  # five chunks a validation: in the second one, after two batches
            os.kill(os.getpid(), signal.SIGTERM)
        return measured(self, places)

    with monkeypatch.context() as patch:
        patch.setattr(Validator, "_errors_of", signalled)
        assert benchmark.main(words) == 128 + signal.SIGTERM
    said = capsys.readouterr().err
    assert f"validation: 0 images, validation loss {lines_of(folder)[0]['val_loss']:.6g}\n" in said
    assert "validation: stopped by a signal; the next start measures it again." in said
    assert f"SIGTERM: stopped after batch 2; saved {folder / 'checkpoints'}/full-ba000000000002-" in said
    assert [line["batch"] for line in lines_of(folder)] == [0]
    assert benchmark.main(words) == 0
    assert losses_of(folder) == losses_of(whole / "whole") and grids_of(folder) == GRIDS
    assert same_training(newest(tmp_path, "stopped"), newest(whole, "whole"))


@pytest.mark.long
@pytest.mark.timeout(120, func_only=True)
def test_two_ranks_measure_the_same_loss_of_the_same_weights_and_draw_each_prompt_once(words_of, whole, tmp_path):
    words = words_of(tmp_path, "two", "device_train_microbatch_size=4", "samples.every_images=8")
    done = run("composer", "-n", "2", "benchmark.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *_, last = lines_of(tmp_path / "two")
    same = lines_of(whole / "whole")[0]  # before training: the weights are the same
    assert first["val_loss"] == pytest.approx(same["val_loss"], rel=1e-6)
    assert first["val_loss_bins"] == pytest.approx(same["val_loss_bins"], rel=1e-5)
    assert last["val_loss"] < first["val_loss"] and last["num_samples"] == NUM_HELD_OUT
    assert f" val_loss={last['val_loss']:.6g}\n" in done.stdout
    one, two = (
        np.asarray(Image.open(folder / "samples" / GRIDS[0]), int) for folder in (whole / "whole", tmp_path / "two")
    )
    assert one.shape == two.shape and abs(one - two).max() <= 1  # a grey level
    assert len((tmp_path / "two/samples/captions.txt").read_text().splitlines()) == 3


# --- what is refused ---


def refused(capsys, *words: str) -> list[str]:
    capsys.readouterr()
    assert benchmark.main(list(words)) == 2
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if not line.startswith("shared memory: ")]  # of what else runs on the machine


@pytest.mark.long
@pytest.mark.timeout(60, func_only=True)
def test_a_stage_that_overlaps_training_is_refused(words_of, miniature, tmp_path, capsys):
    training, part, both = miniature.moments, tmp_path / "part", tmp_path / "both"

    def refused_for(remote: Path, text: str) -> None:
        [line] = refused(capsys, *words_of(tmp_path, "x", f"validation.remote={remote}"))
        assert line.startswith(f"validation.remote: {text}") and line.endswith(" says nothing about others.")

    refused_for(
        training, f"{training} is the dataset that is trained on: its index.json is the same. Give a dataset of other"
    )
    # The same shards under another index, as a part of the dataset that was copied.
    shutil.copytree(training, part)
    index, facts = (json.loads((part / f"{name}.json").read_text()) for name in ("index", "dataset"))
    (part / "index.json").write_text(json.dumps({**index, "shards": index["shards"][:4]}))
    kept = ("family", "preset", "variant", "image_size", "normalize", "resize", "encoders")
    write_metadata(part, "moments", {key: facts[key] for key in kept})
    names = ", ".join(shard["raw_data"]["basename"] for shard in index["shards"][:3])
    refused_for(part, f"{part}: 4 of its 4 shards are trained on too ({training}): {names}, ....")
    # Some of the samples, in shards of their own; here as images.
    assert shapes.main([str(tmp_path / "tars"), "num_images=24"]) == 0
    assert shapes.main([str(tmp_path / "others"), "num_images=30", "part=reference"]) == 0
    assert shards.main([str(tmp_path / "others"), str(tmp_path / "tars"), str(both)]) == 0
    refused_for(both, f"24 of 54 samples are trained on too ({training}): 000000000, 000000001, 000000002, ....")
    assert not (tmp_path / "x").exists()
    words = [f"validation.remote={both}", "validation.num_samples=30"]
    assert benchmark.main(words_of(tmp_path, "second", *words)) == 0  # of its others alone


def test_keys_that_do_not_go_together_are_refused_all_at_once(words_of, miniature, tmp_path, capsys):
    plain = words_of(tmp_path, "x", *OFF)
    (tmp_path / "empty.txt").write_text("\n \n")
    wrong = "validation.remote=/no/stage validation.every_images=40 samples.every_images=8 eval.guidance=[1,2] "
    wrong += f"samples.prompts={tmp_path}/empty.txt eval.samples=0 eval.weights=ema ema.enabled=false ema.decay=null"
    of_wrong = [
        *("validation.remote: no folder /no/stage.", "samples.every_images: given, but eval.samples=0: "),
        *(
            "eval.guidance",
            f"samples.prompts: {tmp_path}/empty.txt has no caption.",
            "eval.weights",
            "validation.every_",
        ),
    ]
    not_given = ["validation.remote: not given, but validation.every_images", "samples.every_images: not given, but "]
    stage = f"validation.every_images=8 validation.remote={miniature.moments}"
    for words, texts in (
        ("validation.every_images=8 samples.prompts=a.txt", not_given),
        (wrong, of_wrong),
        (f"{stage} data.synthetic=true", ["validation.remote: given, but data.synthetic=true: "]),
    ):
        lines = refused(capsys, *plain, *words.split())
        assert len(lines) == len(texts) and all(map(str.startswith, lines, texts)), lines
