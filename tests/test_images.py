"""mds/images.py: files of every kind, and pixels against the MLPerf reference's own chain of torchvision's transforms."""

from __future__ import annotations

import io
import resource

import numpy as np
import pytest
import torch
from conftest import picture
from PIL import Image
from test_image_formats import encoded
from torchvision import transforms
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import pil_to_tensor

from mds.images import (
    SampleError,
    clean_caption,
    clean_captions,
    covering_size,
    decode_image,
    max_crop_offset,
    resize_and_crop,
)

# --- decoded ---


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "image of zero bytes"),
        (b"P6 4 4 255\n" + bytes(48), "not an image"),  # PIL would read it
        (picture(0, kind="PNG")[:150], "truncated or damaged image"),
    ],
    ids=["empty", "ppm", "png"],
)
def test_an_image_that_cannot_be_used_is_refused_with_the_reason(content, reason):
    with pytest.raises(SampleError, match=f"^{reason}$"):
        decode_image(content)


@pytest.mark.parametrize("kind", ["<u2", ">u2"])
def test_sixteen_bits_a_pixel_are_scaled_and_not_cut_to_white(kind):
    ramp = np.linspace(0, 65535, 256).astype(kind).reshape(16, 16)
    decoded = decode_image(encoded(Image.fromarray(ramp), "PNG"))[0].reshape(-1)
    assert (decoded.int() - torch.arange(256)).abs().max() <= 1


# --- scaled and cut ---

# Width and height of files: no side a multiple of the other, of 8 or of 512; upwards, downwards, both, not at all.
FILES = [
    *((640, 480, "RGB"), (480, 640, "L"), (800, 600, "P"), (1200, 900, "CMYK"), (333, 500, "1"), (500, 333, "RGBA")),
    *((511, 513, "RGB"), (512, 512, "RGB"), (513, 512, "LA"), (1, 1, "RGB"), (1, 3, "L"), (17, 5, "RGB")),
    *((96, 256, "P"), (1999, 1001, "RGB"), (2048, 512, "RGB"), (511, 2044, "RGB")),
]


def file_of(width: int, height: int, mode: str) -> bytes:
    """A file of noise: every pixel is an edge."""
    levels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), np.uint8)
    return encoded(Image.fromarray(levels).convert(mode), "JPEG" if mode in ("CMYK", "RGB") else "PNG")


def reference(image: Image.Image, side_px: int = 512) -> torch.Tensor:
    """What mlcommons/training does with an image: retired_benchmarks/stable_diffusion, webdataset_images2latents.py."""
    resize = transforms.Resize(side_px, InterpolationMode.BICUBIC, antialias=True)
    return transforms.Compose([transforms.ToTensor(), resize, transforms.CenterCrop(side_px)])(image.convert("RGB"))


@pytest.mark.parametrize("width, height, mode", FILES)
def test_float_images_are_the_references_to_a_thousandth_of_a_level(width, height, mode):
    content = file_of(width, height, mode)
    ours = resize_and_crop(decode_image(content), (512, 512), torch.float32)
    expected = reference(Image.open(io.BytesIO(content)))
    assert ours.shape == (3, 512, 512) and ours.dtype == torch.float32 and ours.is_contiguous()
    assert (ours - expected).abs().max() * 255 < 0.001


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("source", [(90, 131), (131, 90), (64, 64), (300, 71), (900, 9), (2, 400)])
def test_a_crop_is_cut_from_what_torchvision_scales_and_a_centred_one_is_the_default(source, dtype):
    size, (width, height) = (64, 48), source
    image = Image.fromarray(np.random.default_rng(2).integers(0, 256, (height, width, 3), np.uint8))
    covering, room = covering_size(source, size), max_crop_offset(source, size)
    pixels = pil_to_tensor(image)
    whole = transforms.functional.resize(pixels / 255, list(covering[::-1]), InterpolationMode.BICUBIC, antialias=True)
    is_rounded_twice = dtype == torch.uint8 and covering[0] <= 4 * 64 and covering[1] <= 4 * 48  # as PIL
    for left, top in ((0, 0), room, (room[0] // 3, room[1] // 5)):
        ours = resize_and_crop(pixels, size, dtype, (left, top))
        assert ours.shape == (3, 48, 64) and ours.dtype == dtype
        expected = whole[:, top : top + 48, left : left + 64] * 255
        if is_rounded_twice:
            theirs = image.resize(covering, Image.Resampling.BICUBIC).crop((left, top, left + 64, top + 48))
            assert (ours.int() - pil_to_tensor(theirs).int()).abs().max() <= 1
        elif dtype == torch.uint8:
            assert (ours - expected.clamp(0, 255)).abs().max() < 0.51
        else:
            assert (ours * 255 - expected).abs().max() < 0.001
    centre = tuple(round(side / 2) for side in room)
    assert torch.equal(resize_and_crop(pixels, size, dtype, centre), resize_and_crop(pixels, size, dtype))


def test_captions_that_can_be_used_are_left_and_others_say_why():
    assert clean_caption(" a cat\n") == "a cat" and clean_caption("a" * 10_000) == "a" * 10_000
    assert clean_captions([None, "b ", " ", "c", "d" * 10_001]) == ["b", "c"]
    for clean, captions, reason in (
        (clean_caption, 3, "missing caption"),
        (clean_caption, " \n", "empty caption"),
        (clean_caption, "a" * 10_001, "caption of more than 10,000 characters"),
        (clean_captions, [" ", None], "empty caption"),
        (clean_captions, "ab", "captions are no list"),
    ):
        with pytest.raises(SampleError, match=f"^{reason}$"):
            clean(captions)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("source", [(1, 8000), (8000, 1), (3, 1001), (6000, 1400)])
def test_an_elongated_picture_is_the_references_and_costs_no_more_than_its_crop(source, dtype):
    levels = np.random.default_rng(1).integers(0, 256, (source[1], source[0], 3), np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ours = resize_and_crop(torch.from_numpy(levels).permute(2, 0, 1), (256, 256), dtype).float()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10 < 200  # MiB; the whole would take GiB
    if 1 in source:  # the whole is 6 GiB: its middle, of which the crop shows one pixel, has the same phase
        levels = levels[:, 3980:4020] if source[0] == 8000 else levels[3980:4020]
    expected = reference(Image.fromarray(levels), 256) * 255
    if dtype == torch.uint8:
        assert (ours - expected.clamp(0, 255)).abs().max() < 0.6
    else:  # a row's place is a float32 number: so far from the edge it is known to 0.0002 px
        assert (ours * 255 - expected).abs().max() < (0.1 if 1 in source else 0.01)
