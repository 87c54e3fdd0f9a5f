"""Aspect-ratio buckets: SDXL's sizes, an order of batches of one size each, sets of datasets, and runs from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_tar
from diffusers.pipelines.pixart_alpha.pipeline_pixart_alpha import ASPECT_RATIO_1024_BIN
from PIL import Image
from test_checkpoints import newest, same_training
from test_image_formats import encoded

import benchmark
from checkpointing.files import FULL, list_checkpoints
from data import DataConfig, build_data
from families import load_family
from mds.dataset import read_dataset
from mds.images import SDXL_SIZES, bucket_sizes, nearest_bucket
from mds.order import batch_by_bucket
from prepare import buckets, latents, shards
from run_folder.files import read_lines

FAMILY = load_family("sd2", "tiny", "stock")
CPU = torch.device("cpu")
ASPECTS = {"wide": (96, 48), "flat": (80, 60), "square": (64, 64), "tall": (48, 96)}


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """120 images of four aspects, whose first level says which one it is."""
    folder, kinds = tmp_path_factory.mktemp("buckets"), list(ASPECTS)
    samples = {
        f"{n:05d}": {"png": plain(ASPECTS[kinds[n % 4]], n), "txt": f"{kinds[n % 4]} {n}".encode()} for n in range(120)
    }
    assert shards.main([str(write_tar(folder / "in.tar", samples)), str(folder / "images"), "shard_size=4kb"]) == 0
    return folder / "images"


def plain(size, shade: int) -> bytes:
    return encoded(Image.new("RGB", size, (shade, 255 - shade, 128)), "PNG")


@pytest.fixture(scope="module")
def sorted_(images) -> Path:
    out = images.parent / "sorted"
    assert buckets.main([str(images), str(out), "image_size=64", "max_aspect=2", "shard_size=2kb"]) == 0
    return out


def test_the_sizes_are_those_of_the_paper_and_hold_as_many_pixels():
    assert len(set(SDXL_SIZES)) == 40 and (1024, 1024) in SDXL_SIZES
    assert bucket_sizes(1024, step_px=64) == list(SDXL_SIZES)
    assert all(0.9 * 1024**2 <= width * height <= 1024**2 for width, height in SDXL_SIZES)
    of_pixart = {(int(width), int(height)) for height, width in ASPECT_RATIO_1024_BIN.values()}
    assert len(of_pixart) == 33 and of_pixart < set(SDXL_SIZES)  # PixArt is trained in most sizes of the paper's table
    assert set(SDXL_SIZES) - {(h, w) for w, h in SDXL_SIZES} == {(1344, 704)}  # the table has no 704 x 1344
    assert (576, 448) in bucket_sizes(512, step_px=8)
    assert max(max(size) / min(size) for size in bucket_sizes(512, step_px=8, max_aspect=2.0)) == 2.0
    for size, bucket in {(640, 480): (1152, 896), (3000, 3001): (1024, 1024), (10, 1000): (512, 2048)}.items():
        assert SDXL_SIZES[nearest_bucket(size, list(SDXL_SIZES))] == bucket


def test_batches_of_one_bucket_leave_when_their_last_sample_comes():
    order = np.array([7, 1, 2, 9, 4, 5, 0, 3, 8, 6])
    of = np.array([0, 1, 0, 0, 1, 1, 1, 0, 0, 0])  # the bucket of each of them
    assert batch_by_bucket(order, of, [3, 2], 2).tolist() == [[7, 2], [1, 4], [5, 0], [9, 3], [8, 6]]
    assert batch_by_bucket(order, of, [1, 1], 3).tolist() == [[7, 2, 9], [1, 4, 5]]


def test_a_set_has_every_image_once_in_the_bucket_of_its_aspect(images, sorted_):
    made = read_dataset(str(sorted_))
    assert made.num_samples == read_dataset(str(images)).num_samples == 120 and made.kind == "images"
    sizes = [(48, 96), (64, 64), (72, 56), (96, 48)]
    assert {bucket.size: bucket.num_samples for bucket in made.buckets} == dict.fromkeys(sizes, 30)


def batches_of(stage: Path, workers: int = 0, **section):
    config = DataConfig(local=str(stage), workers=workers, **section)
    return build_data(config, FAMILY, size=(64, 64), device_batch_size=8, device=CPU, seed=3).dataloader


def sums(loader) -> list[list[int]]:
    return [[int(image[0, 0, 0]) for image in batch["images"]] for batch in loader]


def test_a_batch_has_one_size_an_epoch_every_whole_batch_and_the_seed_the_order(sorted_):
    loader = batches_of(sorted_)
    shapes = [tuple(batch["images"].shape[2:]) for batch in loader]
    assert len(loader) == len(shapes) == 12 and {shapes.count(shape) for shape in shapes} == {3}
    first = sums(loader)
    seen = sum(first, [])
    assert len(seen) == len(set(seen)) == 96
    assert all(len({shade % 4 for shade in batch}) == 1 for batch in first)
    alike, resumed = batches_of(sorted_, workers=2), batches_of(sorted_, workers=2)
    epochs = [sums(alike) for _ in range(2)]
    assert epochs[1] == first and epochs[0] != first
    resumed.resume(epoch=0, batch_in_epoch=7, global_batch_size=8)
    assert sums(resumed) == epochs[0][7:] and sums(resumed) == epochs[1]
    loader.close(), alike.close(), resumed.close()


def test_buckets_that_fill_no_batch_are_refused(sorted_):
    config = DataConfig(local=str(sorted_))
    assert config.problems(30, {"image_size": [64, 64]}) == []
    [(where, text)] = config.problems(31, {"image_size": [64, 64]})
    assert where == "global_batch_size" and text.startswith(
        "31, but 4 buckets have fewer samples than that, 100.0% of "
    )


def test_a_set_that_lost_a_bucket_is_refused(sorted_, tmp_path):
    made = shutil.copytree(sorted_, tmp_path / "set")
    shutil.rmtree(made / "72x56")
    with pytest.raises(ValueError, match=f"^no folder {made}/72x56. Check the path"):
        read_dataset(str(made))
    metadata = json.loads((made / "dataset.json").read_text())
    (made / "dataset.json").write_text(json.dumps({**metadata, "buckets": ["../x"]}))
    with pytest.raises(ValueError, match=r'/dataset.json: buckets is \["../x"\]. Possible: '):
        read_dataset(str(made))


@pytest.mark.slow
@pytest.mark.timeout(300, func_only=True)
def test_a_run_mixes_a_set_of_buckets_with_a_dataset_validates_draws_and_resumes_bit_for_bit(sorted_, tmp_path):
    """The training data: images of four aspects in buckets, and squares; the held-out data: other squares."""
    model = ["model.preset=tiny", "model.weights=random", "image_size=64"]
    for name, begin in (("squares", 1000), ("held_out", 2000)):
        numbers = range(begin, begin + 32)
        squares = {f"{n}": {"png": plain((64, 64), n % 256), "txt": f"square {n}".encode()} for n in numbers}
        assert shards.main([str(write_tar(tmp_path / f"{name}.tar", squares)), str(tmp_path / f"{name}-images")]) == 0
        assert latents.main([str(tmp_path / f"{name}-images"), str(tmp_path / name), *model]) == 0
    assert latents.main([str(sorted_), str(tmp_path / "moments"), *model]) == 0
    assert read_dataset(str(tmp_path / "moments")).num_samples == 120
    (tmp_path / "prompts.txt").write_text("square 1\ntall 2\n")
    streams = [f"{{remote: {tmp_path}/moments, proportion: 0.75}}", f"{{remote: {tmp_path}/squares, proportion: 0.25}}"]
    words = [*model, "data.stage=moments", f"data.streams=[{', '.join(streams)}]", "data.workers=0"]
    words += [f"validation.remote={tmp_path}/held_out", "validation.every_images=48", "samples.every_images=64"]
    words += [f"samples.prompts={tmp_path}/prompts.txt", "eval.steps=2", "eval.samples=2", f"run_folder={tmp_path}"]
    words += ["global_batch_size=8", "loggers.progress_bar=false", "measure.window_batches=2", "save.every_images=24"]
    assert benchmark.main([*words, "run_name=whole", "max_duration=13ba"]) == 0
    assert benchmark.main([*words, "run_name=part", "max_duration=8ba"]) == 0
    list_checkpoints(tmp_path / "part" / "checkpoints", FULL)[0].unlink()  # as if it had been killed: it resumes at 6
    assert benchmark.main([*words, "run_name=part", "max_duration=13ba"]) == 0
    lines, again = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "part"))
    for key in ("loss", "streams", "val_loss", "val_loss_bins"):
        assert [line[key] for line in lines if key in line] == [line[key] for line in again if key in line] != []
    assert all(set(line["streams"]) == {"moments", "squares"} for line in lines if "streams" in line)
    whole, part = (newest(tmp_path, name) for name in ("whole", "part"))
    assert same_training(whole, part)
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["bucket_sizes"] == [[48, 96], [64, 64], [72, 56], [96, 48]] and summary["mfu"] is None
    assert len(list((tmp_path / "whole" / "samples").glob("*.png"))) > 1
