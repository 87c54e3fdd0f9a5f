"""evaluation/image_folder.py: which files are listed, how they are decoded, how batches end."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import picture
from PIL import Image

from evaluation.image_folder import image_batches, list_images, read_image
from evaluation.prompts import Prompt, PromptSet
from evaluation.sources import match_prompts

KINDS = ".jpg, .jpeg, .png, .webp, .avif, .bmp, .tif, .tiff, .gif"


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
    batches = list(image_batches(paths, batch_size=2))
    assert [(len(images), images.shape[2]) for _, images in batches] == [(2, 8), (2, 8), (1, 8), (1, 10), (2, 8)]
    assert [path for names, _ in batches for path in names] == paths
    flat = [image for _, images in batches for image in images]
    assert all(torch.equal(image, read_image(path)) for image, path in zip(flat, paths, strict=True))
    [(_, images)] = image_batches(paths, batch_size=100, size_px=8, workers=1)
    assert images.shape == (8, 3, 8, 8)


@pytest.mark.parametrize("content", [b"", b"<html>", picture(1)[:300]], ids=["empty", "text", "cut"])
def test_an_image_that_cannot_be_read_is_named(tmp_path, content):
    for number in range(6):
        (tmp_path / f"{number}.jpg").write_bytes(content if number == 4 else picture(number, (8, 8)))
    with pytest.raises(ValueError) as caught:
        list(image_batches(list_images(tmp_path), batch_size=2))
    assert str(caught.value).startswith(f"{tmp_path / '4.jpg'}: cannot be read as an image (")
    assert "Possible: whole files of at most 89,478,485 pixels, of JPEG, PNG, WEBP, AVIF, " in str(caught.value)


def test_images_are_matched_by_id_or_by_image_id_or_refused():
    prompts = PromptSet([Prompt(1, 10, "a"), Prompt(2, 20, "b"), Prompt(3, 20, "c")], 3, "digest")

    def matched(names: str, prompts: PromptSet = prompts) -> list[int]:
        return [prompt.number for prompt in match_prompts([Path(name) for name in names.split()], prompts)]

    assert matched("a_003.png 1.png 2.png") == [3, 1, 2]
    assert matched("20.png 10.png", PromptSet(prompts.prompts[:2], 2, "digest")) == [2, 1]
    for names, message in {
        "x1.png x3.png": "eval.prompts: no image for id 2. Give the images that are missing, or a file of ",
        "10.png 20.png": "eval.prompts: several prompts of image_id 20. Name the images after their prompt's id, ",
        "1.png a1.png 2.png": "1.png, a1.png: several images have one id. Give one image a prompt.",
    }.items():
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            matched(names)
