"""Aspect-ratio buckets: SDXL's sizes, an order of batches of one size each, sets of stages, and runs from them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_tar
from PIL import Image
from streaming.base.world import World
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import benchmark
from data import DataConfig, build_data
from prepare import buckets, latents, look, shards
from record.checkpoint_files import FULL, listed
from record.files import read_lines
from stages.buckets import SDXL, bucket_of, bucket_sizes, cropped_frac, in_buckets
from stages.dataset import read_stage
from stages.order import work_in_buckets
from zoo import load_family

FAMILY = load_family("sd2", "tiny", "stock")
CPU = torch.device("cpu")
ASPECTS = {"wide": (96, 48), "flat": (80, 60), "square": (64, 64), "tall": (48, 96)}


def picture(size, shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (shade, 255 - shade, 128)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """120 pictures of four aspects, whose first level says which one it is."""
    folder = tmp_path_factory.mktemp("buckets")
    files = {}
    for number in range(120):
        kind = list(ASPECTS)[number % 4]
        files[f"{number:05d}"] = {"png": picture(ASPECTS[kind], number), "txt": f"{kind} {number}".encode()}
    assert shards.main([str(write_tar(folder / "in.tar", files)), str(folder / "images"), "shard_size=4kb"]) == 0
    return folder / "images"


@pytest.fixture(scope="module")
def sorted_(images) -> Path:
    out = images.parent / "sorted"
    assert buckets.main([str(images), str(out), "image_size=64", "max_aspect=2", "shard_size=2kb"]) == 0
    return out


def test_the_sizes_are_those_of_the_paper_and_hold_as_many_pixels():
    from diffusers.pipelines.pixart_alpha.pipeline_pixart_alpha import ASPECT_RATIO_1024_BIN

    assert len(set(SDXL)) == 40 and (1024, 1024) in SDXL and bucket_sizes(1024, step_px=64) == list(SDXL)
    assert all(0.9 * 1024**2 <= width * height <= 1024**2 and width % 64 == height % 64 == 0 for width, height in SDXL)
    of_pixart = {(int(width), int(height)) for height, width in ASPECT_RATIO_1024_BIN.values()}
    assert len(of_pixart) == 33 and of_pixart < set(SDXL)  # PixArt is trained in most sizes of the paper's table
    assert set(SDXL) - {(h, w) for w, h in SDXL} == {(1344, 704)}  # the table has no height of 1344 and width of 704
    assert (576, 448) in bucket_sizes(512, step_px=8)
    assert max(max(size) / min(size) for size in bucket_sizes(512, step_px=8, max_aspect=2.0)) == 2.0


def test_a_picture_goes_to_the_nearest_aspect_and_loses_what_the_covering_scale_leaves_over():
    sizes = bucket_sizes(1024, step_px=64)
    for size, bucket in {(640, 480): (1152, 896), (3000, 3001): (1024, 1024), (10, 1000): (512, 2048)}.items():
        assert sizes[bucket_of(size, sizes)] == bucket
    assert cropped_frac((200, 100), (64, 64)) == 0.5 and cropped_frac((100, 200), (48, 96)) == 0.0


def test_batches_of_one_bucket_leave_when_their_last_sample_comes():
    order = np.array([7, 1, 2, 9, 4, 5, 0, 3, 8, 6])
    of = np.array([0, 1, 0, 0, 1, 1, 1, 0, 0, 0])  # the bucket of each of them
    assert in_buckets(order, of, [3, 2], 2).tolist() == [[7, 2], [1, 4], [5, 0], [9, 3], [8, 6]]
    assert in_buckets(order, of, [1, 1], 3).tolist() == [[7, 2, 9], [1, 4, 5]]


def test_a_set_has_every_picture_once_in_the_bucket_of_its_aspect(images, sorted_, capsys):
    whole, found = read_stage(str(images)), read_stage(str(sorted_))
    assert found.num_samples == whole.num_samples == 120 and found.kind == "images"
    assert {bucket.size: bucket.num_samples for bucket in found.buckets} == {
        (48, 96): 30,
        (64, 64): 30,
        (72, 56): 30,
        (96, 48): 30,
    }
    before = {path: path.read_bytes() for path in sorted_.rglob("*") if path.is_file()}
    again = [str(images), str(sorted_), "image_size=64", "max_aspect=2", "shard_size=2kb"]
    assert buckets.main(again) == 0 and "nothing is left to make" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in sorted_.rglob("*") if path.is_file()} == before


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


def test_the_order_is_the_same_on_any_number_of_nodes_ranks_and_workers(sorted_):
    loader, found = batches_of(sorted_), []
    for nodes, ranks, workers, batch in ((1, 1, 1, 8), (1, 2, 3, 4), (2, 2, 1, 2), (4, 1, 2, 2)):
        loader.dataset.batch_size = batch
        dealt = work_in_buckets(loader.dataset, World(nodes, ranks, workers, 0), 0, 0)
        batches = dealt.transpose(3, 2, 0, 1, 4).reshape(-1, 8)  # as streaming's workers take turns
        found.append([sorted(ids) for ids in batches.tolist() if -1 not in ids])
    assert len(found[0]) == 12 and all(order == found[0] for order in found)
    loader.close()


def test_buckets_that_fill_no_batch_are_refused(sorted_):
    config = DataConfig(local=str(sorted_))
    assert config.problems(30, {"image_size": [64, 64]}) == []
    assert config.problems(31, {"image_size": [64, 64]}) == [
        (
            "global_batch_size",
            "31, but 4 buckets have fewer samples than that, 100.0% of all: 48x96 (30), 64x64 (30), 72x56 (30), 96x48 (30). "
            "Take a smaller one, or fewer buckets: python -m prepare.buckets ... max_aspect=2.",
        )
    ]
    assert config.problems(8, {"image_size": [128, 128]})[0][0] == "image_size"


def test_look_takes_one_bucket_of_a_set(sorted_, capsys):
    assert look.main([str(sorted_)]) == 2
    assert capsys.readouterr().err.startswith(f"REMOTE: {sorted_} is a set of buckets. Possible: ")


def test_a_set_that_lost_a_bucket_is_refused(sorted_, tmp_path):
    import shutil

    shutil.copytree(sorted_, tmp_path / "set")
    shutil.rmtree(tmp_path / "set" / "72x56")
    with pytest.raises(ValueError, match=f"^no folder {tmp_path}/set/72x56. Check the path"):
        read_stage(str(tmp_path / "set"))
    facts = json.loads((tmp_path / "set" / "dataset.json").read_text())
    (tmp_path / "set" / "dataset.json").write_text(json.dumps({**facts, "buckets": ["../x"]}))
    with pytest.raises(ValueError) as error:
        read_stage(str(tmp_path / "set"))
    assert str(error.value) == (
        f'{tmp_path}/set/dataset.json: buckets is ["../x"]. Possible: a list of sizes, e.g. 576x448. Make the buckets again: '
        "python -m prepare.buckets --help"
    )


@pytest.mark.slow
@pytest.mark.timeout(300, func_only=True)
def test_a_run_mixes_a_set_of_buckets_with_a_stage_validates_draws_and_goes_on_bit_for_bit(sorted_, tmp_path):
    """What is trained on: pictures of four aspects in buckets, and squares; what is held out: other squares."""
    model = ["model.preset=tiny", "model.weights=random", "image_size=64"]
    for name, begin in (("squares", 1000), ("held_out", 2000)):
        squares = {
            f"{n}": {"png": picture((64, 64), n % 256), "txt": f"square {n}".encode()} for n in range(begin, begin + 32)
        }
        assert shards.main([str(write_tar(tmp_path / f"{name}.tar", squares)), str(tmp_path / f"{name}-images")]) == 0
        assert latents.main([str(tmp_path / f"{name}-images"), str(tmp_path / name), *model]) == 0
    assert latents.main([str(sorted_), str(tmp_path / "moments"), *model]) == 0
    assert read_stage(str(tmp_path / "moments")).num_samples == 120
    (tmp_path / "prompts.txt").write_text("square 1\ntall 2\n")
    streams = [f"{{remote: {tmp_path}/moments, proportion: 0.75}}", f"{{remote: {tmp_path}/squares, proportion: 0.25}}"]
    words = [
        *model,
        "data.stage=moments",
        f"data.streams=[{', '.join(streams)}]",
        "data.workers=0",
        "global_batch_size=8",
    ]
    words += [f"validation.remote={tmp_path}/held_out", "validation.every_images=48", "samples.every_images=64"]
    words += [f"samples.prompts={tmp_path}/prompts.txt", "eval.steps=2", "eval.samples=2", "loggers.tensorboard={}"]
    words += [
        f"run_folder={tmp_path}",
        "loggers.progress_bar=false",
        "measure.window_batches=2",
        "save.every_images=24",
    ]
    assert benchmark.main([*words, "run_name=whole", "max_duration=13ba"]) == 0
    assert benchmark.main([*words, "run_name=part", "max_duration=8ba"]) == 0
    listed(tmp_path / "part" / "checkpoints", FULL)[0].unlink()  # as if it had been killed: it goes on from batch 6
    assert benchmark.main([*words, "run_name=part", "max_duration=13ba"]) == 0
    lines, again = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "part"))
    for key in ("loss", "streams", "val_loss", "val_loss_bins"):
        assert [line[key] for line in lines if key in line] == [line[key] for line in again if key in line] != []
    newest = [
        torch.load(listed(tmp_path / name / "checkpoints", FULL)[0], weights_only=False) for name in ("whole", "part")
    ]
    for name, value in newest[0]["model"].items():
        assert torch.equal(value, newest[1]["model"][name]), name
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["bucket_sizes"] == [[48, 96], [64, 64], [72, 56], [96, 48]] and summary["mfu"] is None
    [folder] = {path.parent for path in (tmp_path / "whole" / "tensorboard").rglob("events*")}
    events = EventAccumulator(str(folder)).Reload().Tags()
    assert {"val/loss", "streams/moments/loss", "streams/squares/samples"} <= set(events["scalars"])
    assert events["images"] == ["samples/grid"] and len(list((tmp_path / "whole" / "samples").glob("*.png"))) > 1
