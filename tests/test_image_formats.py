"""mds/images.py: which kinds of files are read, by every reader; the limit of pixels; embedded profiles."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from evaluation.image_folder import read_image
from mds.images import FORMATS, MAX_PIXELS, decode_image, detect_format, open_image
from prepare.coco import resize_image
from prepare.laion.images import readable_by_opencv


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(size: tuple[int, int] = (9, 6), mode: str = "RGB") -> Image.Image:
    levels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(levels).convert(mode)


def rotation(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


# --- kinds of files ---


@pytest.mark.parametrize("kind", FORMATS)
def test_every_kind_of_file_is_decoded_and_known_by_its_first_bytes(kind):
    image = noise(mode="P" if kind == "GIF" else "RGB")
    expected = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    content = encoded(image, kind, **OPTIONS[kind])
    # JPEG and AVIF round to 8 bits of YCbCr, and back.
    assert (decode_image(content).int() - expected.int()).abs().max() <= (0 if kind in LOSSLESS else 4)
    assert detect_format(content).upper() == kind and open_image(content).format == kind
    if kind in ("GIF", "TIFF", "WEBP", "AVIF", "PNG"):  # of several frames the first is read
        frames = decode_image(encoded(RED, kind, save_all=True, append_images=[BLUE]))
        assert (frames[:, 4, 4].int() - torch.tensor([255, 0, 0])).abs().max() <= 8
    if kind in ("TIFF", "WEBP", "AVIF"):
        for orientation in range(1, 9):
            turned = decode_image(encoded(noise(), kind, exif=rotation(orientation), **OPTIONS[kind])).int()
            upright = decode_image(encoded(noise(), "PNG", exif=rotation(orientation))).int()
            assert turned.shape == upright.shape and (turned - upright).abs().max() <= (4 if kind == "AVIF" else 0)


def test_transparency_is_mixed_with_white_after_the_conversion():
    image = Image.new("P", (8, 8), 0)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((0, 0), 1)
    pixels = decode_image(encoded(image, "GIF", transparency=0))
    assert pixels[:, 0, 0].tolist() == [0, 0, 255] and pixels[:, 4, 4].tolist() == [255, 255, 255]
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 128))
    assert np.abs(middle(encoded(image, "PNG", icc_profile=rgb_profile("grb"))) - [127, 255, 127]).max() <= 2


# --- the limit of pixels ---


def png_of(side: int, bits: int, data: bytes) -> bytes:
    """A PNG of RGBA, which PIL writes of 8 bits alone."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, bits, 6, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def big_png(side: int = 14_000) -> bytes:
    """A PNG whose header claims RGBA of 16 bits, 1.5 GiB: no reader gets as far as its data, which are missing."""
    return png_of(side, 16, b"")


def rgba_png(bits: int, levels: tuple[int, ...], side: int = 16) -> bytes:
    """A PNG of one color, of 8 or 16 bits a level."""
    row = b"\0" + b"".join(level.to_bytes(bits // 8, "big") for level in levels) * side
    return png_of(side, bits, row * side)


@pytest.mark.parametrize("side", [14_000, 9_460])  # PIL itself refuses the first, and only warns of the second
def test_an_image_of_too_many_pixels_is_refused_by_its_header(side, tmp_path):
    assert side**2 > MAX_PIXELS
    path, content = tmp_path / "a.png", big_png(side)
    path.write_bytes(content)
    for read in (
        lambda: decode_image(content),
        lambda: resize_image(content, 64, "PNG"),
        lambda: readable_by_opencv(content, keeps_bytes=True),
        lambda: read_image(path),
    ):
        with pytest.raises(ValueError, match="too many pixels"):
            read()


# --- what img2dataset is given ---


def test_a_jpeg_is_kept_and_other_kinds_become_what_our_readers_see():
    plain, turned = encoded(noise((40, 20)), "JPEG"), encoded(noise((40, 20)), "JPEG", exif=rotation(6))
    assert readable_by_opencv(plain, keeps_bytes=False) == plain == readable_by_opencv(plain, keeps_bytes=True)
    assert readable_by_opencv(turned, keeps_bytes=True) == turned
    levels = np.full((20, 40, 4), 255, np.uint8)
    levels[..., 1:3], levels[..., 3] = 0, 128
    others = [encoded(Image.fromarray(levels), kind, lossless=True) for kind in ("PNG", "WEBP")]
    for content in (turned, swapped_jpeg(), *others, encoded(noise(mode="P"), "GIF"), encoded(noise(), "AVIF")):
        converted = readable_by_opencv(content, keeps_bytes=False)
        assert detect_format(converted) == "BMP" and torch.equal(decode_image(converted), decode_image(content))


# --- profiles ---

COLORANTS = {"r": (0.4361, 0.2225, 0.0139), "g": (0.3851, 0.7169, 0.0971), "b": (0.1431, 0.0606, 0.7141)}
"""sRGB's primaries, X Y Z, adapted to D50 (ICC's "How to interpret the sRGB color space", 2015)."""


def fixed(*values: float) -> bytes:
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def profile_of(space: bytes, tags: dict[bytes, bytes]) -> bytes:
    """A profile by ICC.1:2001-04: a header, a table of tags, and their data."""
    data, table, at = b"", struct.pack(">I", len(tags)), 128 + 4 + 12 * len(tags)
    for name, content in tags.items():
        content += bytes(-len(content) % 4)
        table += name + struct.pack(">II", at + len(data), len(content))
        data += content
    head = struct.pack(">I4xI4s4s4s12x4s28x", at + len(data), 0x02400000, b"mntr", space, b"XYZ ", b"acsp")
    return (head + fixed(0.9642, 1.0, 0.8249)).ljust(128, b"\0") + table + data


def curve(gamma: float) -> bytes:
    return b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256))


def rgb_profile(order: str = "rgb", gamma: float = 2.2) -> bytes:
    """order: of sRGB's primaries; `grb` shows red as green."""
    tags = {b"%cXYZ" % name: b"XYZ " + bytes(4) + fixed(*COLORANTS[of]) for name, of in zip(b"rgb", order, strict=True)}
    return profile_of(b"RGB ", tags | {b"%cTRC" % name: curve(gamma) for name in b"rgb"})


def gray_profile(gamma: float = 1.0) -> bytes:
    return profile_of(b"GRAY", {b"kTRC": curve(gamma)})


SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def swapped_jpeg(size: tuple[int, int] = (40, 20)) -> bytes:
    """A JPEG that is red, with a profile by which it is green."""
    return encoded(Image.new("RGB", size, (200, 0, 0)), "JPEG", icc_profile=rgb_profile("grb"), quality=95)


def middle(content: bytes) -> np.ndarray:
    """The levels of the pixel in the middle."""
    pixels = decode_image(content)
    return pixels[:, pixels.shape[1] // 2, pixels.shape[2] // 2].numpy().astype(int)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF"])
def test_a_color_of_another_profile_becomes_that_of_srgb(kind):
    """By the closed form: of the primaries of sRGB, with red and green exchanged, and of its transfer function."""
    image = Image.new("RGB", (16, 16), (200, 40, 90))
    for order, gamma, levels in (("grb", 2.2, [40, 200, 90]), ("rgb", 1.0, [200, 40, 90])):
        linear = (np.array(levels) / 255) ** gamma
        expected = 255 * (1.055 * linear ** (1 / 2.4) - 0.055)  # IEC 61966-2-1
        measured = middle(encoded(image, kind, icc_profile=rgb_profile(order, gamma)))
        assert np.abs(measured - expected).max() <= (5 if kind in ("JPEG", "WEBP", "AVIF") else 1)


@pytest.mark.parametrize("mode", ["L", "LA", "I;16"])
def test_a_gray_profile_holds_for_gray_images(mode):
    levels = np.full((8, 8), 128 * 257, np.uint16) if mode == "I;16" else np.full((8, 8), 128, np.uint8)
    content = encoded(Image.fromarray(levels).convert(mode), "PNG", icc_profile=gray_profile())
    assert np.abs(middle(content) - 188).max() <= 1  # 255 * (1.055 * 0.502 ** (1 / 2.4) - 0.055)


@pytest.mark.parametrize("profile", [SRGB, b"no profile", SRGB[:200], gray_profile(), bytes(2**22 + 1)], ids=range(5))
def test_srgb_and_a_profile_without_use_change_nothing(profile):
    """A profile that is damaged, of other colors than the image, or huge: the sample is kept, as if it had none."""
    plain = encoded(noise((40, 30)), "JPEG", progressive=True)
    tagged = encoded(noise((40, 30)), "JPEG", icc_profile=profile, progressive=True)
    assert torch.equal(decode_image(tagged), decode_image(plain))


def test_an_evaluation_ignores_profiles_as_pytorch_fid_does(tmp_path):
    (tmp_path / "a.jpg").write_bytes(swapped_jpeg())
    red = read_image(tmp_path / "a.jpg")[:, 10, 20].int()
    assert (red - torch.tensor([200, 0, 0])).abs().max() <= 3


LOSSLESS = {"PNG": {}, "WEBP": {"lossless": True}, "BMP": {}, "TIFF": {"compression": "tiff_lzw"}, "GIF": {}}


OPTIONS = {**LOSSLESS, "JPEG": {"quality": 100, "subsampling": 0}, "AVIF": {"quality": 100, "subsampling": "4:4:4"}}


RED, BLUE = (Image.new("RGB", (8, 8), color) for color in ("red", "blue"))
