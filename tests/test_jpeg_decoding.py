"""mds/images.py: every kind of JPEG is PIL's to the bit, and what PIL refuses is refused, whatever decodes it.

The oracle is PIL alone: opened, loaded, turned by its `exif_transpose`, converted to RGB.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import random
import resource
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageOps
from test_image_formats import encoded

from mds.images import decode_image

SIZES = [(1, 1), (1, 9), (17, 5), (31, 33), (160, 97)]  # px; odd ones, where halved colors end within a pixel


OPTIONS = {
    "baseline": {},
    "progressive": {"progressive": True},
    "optimized": {"optimize": True, "quality": 100},
    "coarse": {"quality": 3},
    "progressive restarts": {"restart_marker_rows": 1, "progressive": True},
}


def jpeg(size: tuple[int, int], mode: str = "RGB", exif: Image.Exif | None = None, **options: object) -> bytes:
    """A JPEG of waves with a corner of noise."""
    width, height = size
    x, y = np.meshgrid(np.linspace(0, 9, width), np.linspace(0, 9, height))
    levels = (127.5 + 127.5 * np.stack([np.sin(x * 3 + y), np.cos(y * 2), np.sin(x * y)], axis=-1)).astype(np.uint8)
    noise = np.random.default_rng(width * height).integers(0, 256, levels.shape, np.uint8)
    levels[height // 2 :, width // 3 :] = noise[height // 2 :, width // 3 :]
    return encoded(Image.fromarray(levels).convert(mode), "JPEG", **{"exif": exif} if exif else {}, **options)


def pils(content: bytes) -> torch.Tensor:  # -> uint8 (3, h, w)
    """Raises what PIL raises."""
    image = Image.open(io.BytesIO(content), formats=("JPEG", "PNG"))
    image.load()
    return torch.from_numpy(np.array(ImageOps.exif_transpose(image).convert("RGB"))).permute(2, 0, 1)


@pytest.fixture
def by_pil(monkeypatch):
    """The images that PIL has decoded, by size."""
    decoded, load = [], ImageFile.ImageFile.load

    def noted(image: ImageFile.ImageFile):
        if image.tile:  # not yet decoded
            decoded.append(image.size)
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", noted)
    return decoded


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_images_are_pils_to_the_bit_and_only_cmyk_and_rare_samplings_are_decoded_by_it(options, by_pil):
    for mode, sampling in (("RGB", 0), ("RGB", 1), ("RGB", 2), ("L", 0), ("CMYK", 0)):
        files = [jpeg(size, mode, subsampling=sampling, **options) for size in SIZES]
        ours = [decode_image(file) for file in files]
        assert by_pil == (SIZES if mode == "CMYK" else [])
        for image, file in zip(ours, files, strict=True):
            assert image.dtype == torch.uint8 and torch.equal(image, pils(file))
        by_pil.clear()
    if not options:
        for luma, chroma in ((0x12, 0x11), (0x41, 0x11), (0x22, 0x12), (0x21, 0x12)):
            # Other samplings, 16 h + v, in the frame header: the same data are other blocks then, or too few.
            file = bytearray(jpeg((160, 97), subsampling=0))
            frame = file.index(b"\xff\xc0")
            file[frame + 11], file[frame + 14], file[frame + 17] = luma, chroma, chroma
            ours = decode_image(bytes(file))
            assert by_pil == [(160, 97)] and torch.equal(ours, pils(bytes(file)))
            by_pil.clear()


@pytest.mark.parametrize("kind", ["RGB", "L", "CMYK", "PNG"])
def test_an_image_is_turned_as_by_pil(kind):
    for orientation, size in itertools.product(range(10), [(6, 4), (31, 17), (1, 5)]):
        exif = Image.Exif()
        exif[0x0112] = orientation
        file = jpeg(size, "RGB" if kind == "PNG" else kind, exif)
        if kind == "PNG":
            file = encoded(Image.open(io.BytesIO(file)), "PNG", exif=exif)
        ours = decode_image(file)
        assert torch.equal(ours, pils(file)) and ours.permute(1, 2, 0).is_contiguous()
        assert tuple(ours.shape[:0:-1]) == (size[::-1] if 5 <= orientation <= 8 else size)


def decoded_or_none(decode, content: bytes) -> torch.Tensor | None:
    with contextlib.suppress(Exception):
        return decode(content)
    return None


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
def test_a_file_that_is_cut_anywhere_is_refused_where_pil_refuses_it(mode, progressive):
    file, counts = jpeg((90, 61), mode, progressive=progressive), Counter()
    for end in [*range(1, len(file), 97), *range(len(file) - 8, len(file))]:
        for has_end, cut in enumerate((file[:end], file[:end] + b"\xff\xd9")):  # as some programs repair it
            ours, expected = decoded_or_none(decode_image, cut), decoded_or_none(pils, cut)
            assert (ours is None) == (expected is None), end
            counts[has_end, ours is not None] += 1
    assert counts[0, False] > 20 and counts[1, True] > 10


@pytest.mark.parametrize("progressive", [False, True])
def test_a_damaged_file_is_refused_where_pil_refuses_it(progressive):
    """What both accept is nearly always the same image; where numbers overflow, libjpeg's releases differ."""
    file, draw, counts = jpeg((90, 61), progressive=progressive), random.Random(17), Counter()
    for _ in range(300):
        changed = bytearray(file)
        for _ in range(draw.choice((1, 1, 3))):
            changed[draw.randrange(len(file))] = draw.randrange(256)
        ours, expected = decoded_or_none(decode_image, bytes(changed)), decoded_or_none(pils, bytes(changed))
        assert (ours is None) == (expected is None)
        counts["refused" if ours is None else "equal" if torch.equal(ours, expected) else "other"] += 1
    assert counts["refused"] > 15 and counts["equal"] > 50 and counts["other"] <= 5


@pytest.mark.long
@pytest.mark.parametrize("damage", [None, b"\xff\xc4\x00\x05", b"\xff\xd8", b"\xff\xfe\xff\xff"], ids=str)
def test_broken_files_leave_no_memory(damage):
    """A file that is cut, or has another marker in its coded data, is not given to torchvision: 0.25 would keep its picture.

    Here that would be 250 or 460 MB.
    """
    file = jpeg((1200, 900))
    at = len(file) * 9 // 10
    broken = file[:at] if damage is None else file[:at] + damage + file[at + len(damage) :]
    is_refused = decoded_or_none(pils, broken) is None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(150):
        assert (decoded_or_none(decode_image, broken) is None) == is_refused
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10 < 60  # MiB
