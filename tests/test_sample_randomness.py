"""What is drawn when a sample is read: mds/images.py, and each draw seen in the batches of both datasets."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import picture
from PIL import ImageOps
from streaming import MDSWriter, StreamingDataset
from test_checkpoints import newest, same_training
from test_data import CPU, FAMILY
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as vision

import benchmark
from data import DataConfig, build_data
from families import load_family
from mds.dataset import write_metadata
from mds.fetch import HASH
from mds.images import covering_size, crop_geometry, decode_image, draw_sample
from mds.moments import FLIPPED_COLUMN
from prepare import latents
from prepare.moment_rows import mds_columns, tokenize_captions
from prepare.shards import COLUMNS

SEED, SIZE, NUM = 7, (64, 64), 24
ZEROS = {"moments": np.zeros((8, 8, 8), np.float16), "tokens": np.zeros(77, np.uint16)}
SIZES = [(80, 96), (200, 64), (64, 64), (150, 151)]  # of the images, px


def test_draws_are_those_of_their_numbers_for_ever():
    """A run resumes with them."""
    draw = draw_sample(17, 3, 1234567)
    assert (draw.flip, draw.caption) == (0.5681902511529978, 0.8920810913393582)
    assert (draw.left, draw.top) == (0.1475971294592746, 0.5581881941826556)
    assert draw_sample(17, 4, 1234567) != draw != draw_sample(18, 3, 1234567) and draw != draw_sample(17, 3, 1234568)


def test_draws_are_uniform_and_independent_of_each_other_and_of_the_epoch_before():
    """Each count within four standard deviations of the binomial distribution, over 4,096 samples."""
    one, two = ([draw_sample(1, epoch, sample) for sample in range(4096)] for epoch in (0, 1))
    numbers = np.array([[d.flip, d.caption, d.left, d.top, d_next.flip] for d, d_next in zip(one, two, strict=True)])
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    halves = numbers < 0.5
    assert (np.abs(halves.sum(axis=0) - 2048) < 4 * 32).all()
    for one_column, other in itertools.combinations(halves.T, 2):
        assert abs(int((one_column == other).sum()) - 2048) < 4 * 32
    for chosen in (Counter(d.choose_caption("abc") for d in one), Counter(d.crop_offset((0, 2)) for d in one)):
        assert len(chosen) == 3 and all(abs(count - 4096 / 3) < 4 * 30.2 for count in chosen.values())
    assert draw_sample(1, 0, 0).crop_offset((0, 0)) == (0, 0)


# --- images ---


def write(out: Path, columns: dict[str, str], rows, kind: str = "moments") -> Path:
    """Write a dataset of several shards whose rows have keys, and captions where they give none."""
    with MDSWriter(out=str(out), columns=columns, hashes=[HASH], size_limit=1 << 14) as writer:
        for number, row in enumerate(rows):
            writer.write({"caption": "x", "key": str(number), **row})
    write_metadata(out, kind, {})
    return out


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """24 images in several shards: some with one caption, some with three, of which one is unusable."""

    def row(number: int) -> dict:
        content = b"" if number == 5 else picture(number, SIZES[number % 4], kind="PNG")
        captions = [f"one of {number}", "", f"two of {number} "] if number % 3 else ([] if number % 2 else None)
        captions = {"caption": f"one of {number}", "captions": captions}
        return {"jpg": content, **captions, "metadata": {}, "width": 1, "height": 1}

    columns = {**COLUMNS, "captions": "json"}
    return write(tmp_path_factory.mktemp("draws") / "images", columns, map(row, range(NUM)), "images")


def batches_of(place, *epochs: int, workers: int = 0, begin: tuple[int, int] = (0, 0), **config):
    """Return the images and tokens of some epochs, in the order of the dataset, each epoch one of four batches of six."""
    section = DataConfig(local=str(place), workers=workers, shuffle=False, **config)
    loader = build_data(section, FAMILY, size=SIZE, device_batch_size=6, device=CPU, seed=SEED).dataloader
    if begin != (0, 0):
        loader.resume(*begin, 6)
    read = [list(loader) for _ in range(1 + max(epochs) - begin[0])]
    loader.close()
    return [{n: torch.cat([b[n] for b in read[e - begin[0]]]) for n in read[-1][0]} for e in epochs]


def expected_of(rows, sample: int, epoch: int, *, flip: bool, crop: bool) -> tuple[torch.Tensor, str]:
    """Torchvision's resize and crop and PIL's mirror of the image that replaces a broken one, and its caption."""
    sample = 6 if sample == 5 else sample
    row, draw = rows[sample], draw_sample(SEED, epoch, sample)
    image = decode_image(row["jpg"])
    width, height = covering_size((image.shape[2], image.shape[1]), SIZE)
    image = vision.resize(image, [height, width], InterpolationMode.BICUBIC, antialias=True)
    left, top = draw.crop_offset((width - 64, height - 64)) if crop else (None, None)
    image = vision.crop(image, top, left, 64, 64) if crop else vision.center_crop(image, [64, 64])
    if flip and draw.is_flipped:
        image = vision.pil_to_tensor(ImageOps.mirror(vision.to_pil_image(image)))
    captions = [text.strip() for text in row["captions"] or [row["caption"]] if text]
    return image, draw.choose_caption(captions)


@pytest.mark.parametrize("flip, crop", [(False, "random"), (True, "center"), (True, "random")])
def test_images_are_torchvisions_and_pils_at_the_drawn_place(pictures, flip, crop):
    epochs, rows = (0, 2), StreamingDataset(local=str(pictures), batch_size=1)
    for epoch, batch in zip(epochs, batches_of(pictures, *epochs, flip=flip, crop=crop), strict=True):
        expected = [expected_of(rows, n, epoch, flip=flip, crop=crop == "random") for n in range(NUM)]
        assert torch.equal(batch["images"], torch.stack([image for image, _ in expected]))
        assert torch.equal(batch["tokens"], FAMILY.tokenize([caption for _, caption in expected])["tokens"])


def test_draws_do_not_depend_on_workers_or_on_where_an_epoch_is_gone_on_with(pictures):
    ways = dict(flip=True, crop="random")
    first, second = batches_of(pictures, 0, 1, **ways)
    [of_workers] = batches_of(pictures, 1, workers=2, **ways)
    [rest] = batches_of(pictures, 1, begin=(1, 2), workers=1, **ways)
    for name in ("images", "tokens"):
        assert torch.equal(of_workers[name], second[name]) and torch.equal(rest[name], second[name][12:])
        assert not torch.equal(first[name], second[name])


# --- moments ---


@pytest.fixture(scope="module")
def moments(tmp_path_factory):
    """Moments whose first number is their sample's, the mirrored one's 100 more; some with three captions."""

    def row(number: int) -> dict:
        captions = [f"{word} of {number}" for word in ("one", "two", "three")] if number % 3 else []
        plain, mirrored = (np.full((8, 8, 8), number + more, np.float16) for more in (0, 100))
        if number == 5:
            mirrored[0, 0, 0] = np.nan
        tokens = tokenize_captions(FAMILY, [f"one of {number}"])["tokens"][0]
        text = {"tokens": tokens, "captions": captions, "caption": f"one of {number}"}
        return {"moments": plain, FLIPPED_COLUMN: mirrored, **text}

    columns = mds_columns(FAMILY, SIZE, text={}, metadata=False, captions=True, flip=True)
    return write(tmp_path_factory.mktemp("draws") / "moments", columns, map(row, range(NUM)))


@pytest.mark.parametrize("workers", [0, 2])
def test_moments_are_drawn_of_the_picture_or_its_mirrored_one_with_the_tokens_of_a_caption(moments, workers):
    for epoch, batch in enumerate(batches_of(moments, 0, 1, 2, workers=workers, stage="moments", flip=True)):
        assert set(batch) == {"moments", "tokens"} and batch["tokens"].dtype == torch.int64
        for place in range(NUM):
            number = 6 if place == 5 and draw_sample(SEED, epoch, 5).is_flipped else place
            draw = draw_sample(SEED, epoch, number)
            assert (batch["moments"][place] == number + (100 if draw.is_flipped else 0)).all()
            word = draw.choose_caption(["one", "two", "three"]) if number % 3 else "one"
            assert torch.equal(batch["tokens"][place], FAMILY.tokenize([f"{word} of {number}"])["tokens"][0])
    assert len({draw_sample(SEED, epoch, 5).is_flipped for epoch in range(3)}) == 2  # both ways were met
    [batch] = batches_of(moments, 1, stage="moments")  # without flip
    assert batch["moments"][:, 0, 0, 0].tolist() == list(range(NUM))


def test_sdxl_is_told_where_the_crop_begins_in_the_mirrored_picture(tmp_path):
    """With an odd number of columns left out, which differs from where it begins in the image itself."""
    family, sources = load_family("sdxl", "tiny", "stock"), [(101, 64), (64, 99), (64, 64), (93, 41)]
    columns = mds_columns(family, SIZE, text={}, metadata=False, flip=True)
    row = {name: np.zeros((8, 8, 8), np.float16) for name in ("moments", FLIPPED_COLUMN)}
    row |= {name: tokens[0] for name, tokens in tokenize_captions(family, ["x"]).items()}
    # As prepare.latents writes the sizes.
    sizes = [np.array(crop_geometry(source, SIZE), np.uint16) for source in sources]
    out = write(tmp_path / "out", columns, ({**row, "sizes": sizes[number % 4]} for number in range(NUM)))
    section = DataConfig(stage="moments", local=str(out), workers=0, shuffle=False, flip=True)
    loader = build_data(section, family, size=SIZE, device_batch_size=6, device=CPU, seed=SEED).dataloader
    told = torch.cat([batch["sizes"] for batch in loader]).tolist()
    loader.close()
    moved = 0
    for number, (height, width, top, left) in enumerate(told):
        source = sources[number % 4]
        scaled = covering_size(source, SIZE)
        begin, expected_top = (round((length - 64) / 2) for length in scaled)  # as torchvision crops the scaled image
        mirrored = range(scaled[0])[::-1].index(begin + 63)
        expected_left = mirrored if draw_sample(SEED, 0, number).is_flipped else begin
        assert (width, height, left, top) == (*source, expected_left, expected_top)
        moved += left != begin
    assert moved


def test_stored_text_states_replace_tokens_in_float16(tmp_path):
    states = torch.randn(NUM, 77, 16, generator=torch.Generator().manual_seed(0)).half()
    columns = mds_columns(FAMILY, SIZE, text={"text": states[:1]}, metadata=False)
    texts = [np.full((77, 16), np.inf, np.float16) if number == 5 else states[number].numpy() for number in range(NUM)]
    out = write(tmp_path / "out", columns, ({**ZEROS, "text": text} for text in texts))
    [batch] = batches_of(out, 0, stage="moments", text="stored", workers=1)
    assert set(batch) == {"moments", "text"} and batch["text"].dtype == torch.float16
    assert torch.equal(batch["text"], states[[6 if number == 5 else number for number in range(NUM)]])


# --- what a dataset does not have ---


def test_a_key_for_which_a_dataset_has_no_column_is_refused_with_the_command_that_makes_one(pictures, tmp_path):
    plain = str(write(tmp_path / "plain", mds_columns(FAMILY, SIZE, text={}, metadata=False), [ZEROS]))
    section = DataConfig(stage="moments", local=plain, flip=True, crop="random", text="stored")
    flip, crop, text = section.problems(1, {})
    assert flip == (
        "data.flip",
        f"true, but the dataset at {plain} has no moments of mirrored images. Make it with python -m prepare.latents IN OUT "
        "flip=true, read a dataset of images, or leave it out.",
    )
    assert crop[0] == "data.crop" and crop[1].startswith("random, but the images of the dataset at ")
    assert text[0] == "data.text" and "no text states. Make it with python -m prepare.latents IN OUT store_t" in text[1]
    [(key, text)] = DataConfig(local=str(pictures), text="stored", flip=True, crop="random").problems(1, {})
    assert key == "data.text" and text.startswith("stored, but a dataset of images has no text states. ")
    columns = mds_columns(FAMILY, SIZE, text={"text": torch.zeros(1, 77, 16)}, metadata=False, captions=True)
    row = {**ZEROS, "captions": ["x", "y"], "text": np.zeros((77, 16), np.float16)}
    out = str(write(tmp_path / "a", columns, [row]))
    [(key, text)] = DataConfig(stage="moments", local=out, text="stored").problems(1, {})
    assert key == "data.text" and "has text states of the first of several captions alone. " in text


# --- whole runs ---


@pytest.mark.long
@pytest.mark.timeout(200, func_only=True)
def test_runs_from_mirrored_moments_and_stored_text_resume_bit_for_bit(miniature, tmp_path, capsys):
    made, keys = tmp_path / "moments", ["model.family=shapes", "image_size=32", "store_text=true", "flip=true"]
    assert latents.main([str(miniature.images), str(made), *keys, "shard_size=32kb"]) == 0
    given = [f"data.remote={made}", "global_batch_size=32", "measure.window_batches=1", "save.every_images=32"]

    def losses(name: str, *more: str, duration: str = "9ba") -> list[float]:  # an epoch is 6 batches
        words = miniature.small(tmp_path, name, *given, "data.flip=true", *more, f"max_duration={duration}")
        assert benchmark.main(words) == 0, capsys.readouterr().err
        return [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    encoded, stored = losses("encoded"), losses("stored", "data.text=stored")
    assert stored == pytest.approx(encoded, rel=2e-3) and stored != encoded
    losses("part", "data.text=stored", "data.workers=1", duration="7ba")
    assert losses("part", "data.text=stored") == stored
    assert same_training(newest(tmp_path, "part"), newest(tmp_path, "stored"))
    capsys.readouterr()
    assert benchmark.main(miniature.small(tmp_path, "part", *given, "max_duration=10ba")) == 2
    again = "A run resumes as it began: use that value, or another run_name."
    assert capsys.readouterr().err == "".join(
        f"{key}, but {tmp_path / 'part'} was begun with {begun}. {again}\n"
        for key, begun in (("data.flip: false", "true"), ("data.text: encoded", "stored"))
    )
