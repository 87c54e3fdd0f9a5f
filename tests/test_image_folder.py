"""evaluation/image_folder.py: which files are listed, how they are decoded, how batches end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import picture
from PIL import Image

from evaluation.image_folder import image_batches, list_images, read_image
from evaluation.prompts import Prompt, PromptSet
from training.snapshots import match_prompts

KINDS = ".jpg, .jpeg, .png, .webp, .avif, .bmp, .tif, .tiff, .gif"


def test_images_are_listed_by_name_and_nothing_else(tmp_path):
    for name in ("b.png", "a.JPG", "c.webp", "d.jpeg", "10.jpg", "9.jpg"):
        (tmp_path / name).touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "within.png").mkdir()
    assert [path.name for path in list_images(str(tmp_path))] == [
        "10.jpg",
        "9.jpg",
        "a.JPG",
        "b.png",
        "c.webp",
        "d.jpeg",
    ]


def test_a_folder_that_is_none_or_has_no_image_is_refused(tmp_path):
    with pytest.raises(ValueError) as caught:
        list_images(tmp_path / "no")
    assert str(caught.value) == (f"{tmp_path / 'no'}: there is no such folder. Give a folder with images ({KINDS}).")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError) as caught:
        list_images(tmp_path)
    assert str(caught.value) == (f"{tmp_path}: no image among its 1 entries. Give a folder with images ({KINDS}).")


@pytest.mark.parametrize(
    ("kind", "mode"), [("JPEG", "RGB"), ("JPEG", "L"), ("PNG", "RGBA"), ("PNG", "P"), ("WEBP", "RGB")]
)
def test_pixels_are_pils(tmp_path, kind, mode):
    path = tmp_path / "a.png"  # content decides, not the suffix
    path.write_bytes(picture(3, (20, 30), kind, mode))
    image = read_image(path)
    assert image.dtype == torch.uint8 and image.shape == (3, 30, 20)
    assert np.array_equal(image.permute(1, 2, 0).numpy(), np.asarray(Image.open(path).convert("RGB")))
    square = np.asarray(Image.open(path).convert("RGB").resize((16, 16), Image.Resampling.BICUBIC))
    assert np.array_equal(read_image(path, size_px=16).permute(1, 2, 0).numpy(), square)


def test_batches_keep_the_order_and_end_where_the_size_changes(tmp_path):
    sizes = [(8, 8)] * 5 + [(8, 10)] + [(8, 8)] * 2
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.png").write_bytes(picture(number, size, "PNG"))
    paths = list_images(tmp_path)
    found = list(image_batches(paths, batch_size=2))
    assert [tuple(images.shape) for _, images in found] == [
        (2, 3, 8, 8),
        (2, 3, 8, 8),
        (1, 3, 8, 8),
        (1, 3, 10, 8),
        (2, 3, 8, 8),
    ]
    assert [path for names, _ in found for path in names] == paths
    flat = [image for _, images in found for image in images]
    assert all(torch.equal(image, read_image(path)) for image, path in zip(flat, paths, strict=True))
    whole = list(image_batches(paths, batch_size=100, size_px=8, workers=1))
    assert [tuple(images.shape) for _, images in whole] == [(8, 3, 8, 8)]


@pytest.mark.parametrize("content", [b"", b"<html>", picture(1)[:300]], ids=["empty", "text", "cut"])
def test_an_image_that_cannot_be_read_is_named(tmp_path, content):
    for number in range(6):
        (tmp_path / f"{number}.jpg").write_bytes(picture(number, (8, 8)))
    (tmp_path / "4.jpg").write_bytes(content)
    batches = image_batches(list_images(tmp_path), batch_size=2)
    with pytest.raises(ValueError) as caught:
        list(batches)
    assert str(caught.value).startswith(f"{tmp_path / '4.jpg'}: cannot be read as an image (")
    assert str(caught.value).endswith(
        "). Possible: whole files of at most 89,478,485 pixels, of JPEG, PNG, WEBP, AVIF, BMP, TIFF, GIF. Fetch it again, or "
        "take it out of the folder."
    )


PROMPTS = PromptSet([Prompt(1, 10, "a"), Prompt(2, 20, "b"), Prompt(3, 20, "c")], 3, "digest")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["x1.png", "x3.png"],
            "eval.prompts: no image for id 2. Give the images that are missing, or a file of prompts ",
        ),
        (
            ["10.png", "20.png"],
            "eval.prompts: several prompts of image_id 20. Name the images after their prompt's id, or ",
        ),
        (["1.png", "2.png", "7.png"], "eval.prompts: no id for 7.png. Give the prompts that the images are of;"),
        (["1.png", "a1.png", "2.png"], "1.png, a1.png: several images have one id. Give one image a prompt."),
        (["a.png"], "eval.prompts: no id for a.png. Give the prompts that the images are of; an image's name ends in "),
    ],
)
def test_images_that_are_not_those_of_the_prompts_are_refused(names, message):
    with pytest.raises(ValueError) as caught:
        match_prompts([Path(name) for name in names], PROMPTS)
    assert str(caught.value).startswith(message)


def test_images_are_matched_by_id_or_by_image_id():
    assert [prompt.number for prompt in match_prompts([Path("a_003.png"), Path("1.png"), Path("2.png")], PROMPTS)] == [
        3,
        1,
        2,
    ]
    alone = PromptSet(PROMPTS.prompts[:2], 2, "digest")
    assert [prompt.number for prompt in match_prompts([Path("20.png"), Path("10.png")], alone)] == [2, 1]
