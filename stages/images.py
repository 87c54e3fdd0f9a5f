"""One image-caption pair: the file decoded, scaled and cut as the MLPerf reference does it, and what cannot be used.

    decoded   RGB, any size          JPEGs by torchvision, the rest by PIL (stages/image_files.py), EXIF rotation applied
    resized   (3, H, W)              scaled so that it just covers W x H, bicubic with antialias; a part cut out

In uint8 (0 to 255) by default. In float32 (the variant mlperf) a value is its level / 255 and nothing is rounded: where
bicubic overshoots it lies below 0 or above 1, as in the reference, which resizes the float image and stores moments of it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import ExifTags, Image
from PIL.JpegImagePlugin import get_sampling
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as vision

from cli.limits import MAX_CAPTION, ImageSize
from stages.image_files import MAX_PIXELS, SampleError, conversion_of, open_image, to_rgb

MOST = 2**16 - 1  # that a stage has for a side, px
MAX_COVER = 4  # times the crop's side: of a longer picture only what the crop shows is scaled
STRIP_ROWS = 512  # of a source that are float32 at once
SAMPLINGS = (0, 1, 2)  # by PIL's numbers: 4:4:4, 4:2:2, 4:2:0
BYTE_ORDER_MARK = "\ufeff"  # as Windows' editors begin a file of UTF-8
END_OF_JPEG = b"\xff\xd9"
MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # ends coded data: no byte 255, no restart, no filler
FLIPPED = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}  # EXIF's orientation -> axes of (3, h, w)
TRANSPOSED = (5, 6, 7, 8)  # before that
CUBIC = -0.5  # Keys' a; torch and PIL take it where they antialias


class Pixels(bytes):
    """A picture as streaming's encoding `pil` has it: uint32 width, height, length of the mode; the mode; its pixels."""


def decode_image(data: bytes) -> Tensor:  # -> uint8 (3, h, w), RGB
    """Decode an image file, or `Pixels`, upright; see `to_rgb` for its colors and its transparency.

    In memory a pixel's three levels lie together, as decoders write them: to part them would take a third of the decoding.

    Raises:
        SampleError: empty, not an image, truncated, or with more than MAX_PIXELS.
    """
    with _refused():
        image = _opened(data)
        pixels = _decode_jpeg(image, data)
        if pixels is None:
            pixels = torch.from_numpy(np.array(to_rgb(image))).permute(2, 0, 1)
        return upright(pixels, image.getexif().get(ExifTags.Base.Orientation, 1))


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Say why a picture cannot be used, whatever it was that found it out. Raises SampleError."""
    try:
        yield
    except SampleError:
        raise
    except Exception as error:  # the decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise SampleError("truncated or damaged image") from error


def _opened(data: bytes) -> Image.Image:
    """Read the header, which checks the size. Raises what PIL raises, or SampleError."""
    return _from_pixels(data) if isinstance(data, Pixels) else open_image(data)


def _decode_jpeg(image: Image.Image, data: bytes) -> Tensor | None:
    """Decode by torchvision, in 0.7 of PIL's time; None: PIL has to say.

    PIL's libjpeg and torchvision's agree on every pixel of grey, 4:4:4, 4:2:2 and 4:2:0, baseline or progressive; of 4:4:0
    they do not, and they smooth a progressive file that lacks scans each in its way. A file that lacks its end, or has
    another marker before it, is PIL's: torchvision 0.25 refuses most such files too, but keeps their memory for ever.
    """
    if not _is_plain(image, data):
        return None
    try:  # a copy of some kB: torch warns of memory that it must not write to
        pixels = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    except RuntimeError:
        return None
    return pixels if size_of(pixels) == image.size else None


def _has_end(image: Image.Image, data: bytes) -> bool:
    """Return whether an opened JPEG's coded data are followed by its end. Where several scans are not progressive: False."""
    if "progressive" in image.info:  # torchvision makes room for its picture after all scans, so it keeps nothing
        return data.endswith(END_OF_JPEG)
    marker = MARKER.search(data, image.fp.tell())  # PIL has read up to the coded data
    return marker is not None and marker[0] == END_OF_JPEG


def _is_plain(image: Image.Image, data: bytes) -> bool:
    """True for what torchvision decodes as PIL does, and needs no conversion to sRGB."""
    is_alike = image.format == "JPEG" and (image.mode == "L" or get_sampling(image) in SAMPLINGS)
    return is_alike and _has_end(image, data) and conversion_of(image) is None


def upright(pixels: Tensor, orientation: Any) -> Tensor:  # (3, h, w) -> (3, h, w) or (3, w, h)
    """Turn a picture as EXIF 2.3, tag 0x0112, says it has to be shown; other values say nothing, as in PIL."""
    pixels = pixels.transpose(1, 2) if orientation in TRANSPOSED else pixels
    pixels = pixels.flip(FLIPPED[orientation]) if orientation in FLIPPED else pixels
    return pixels.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def size_of(pixels: Tensor) -> ImageSize:
    """Return (width, height) of a picture (3, h, w), px."""
    return pixels.shape[2], pixels.shape[1]


def _from_pixels(data: bytes) -> Image.Image:
    """Raises SampleError, what PIL raises, ValueError: there are fewer pixels than it says, which PIL would make room for."""
    width, height, mode_bytes = np.frombuffer(data[:12], "<u4").tolist()
    if width * height > 8 * len(data):  # a pixel has a bit and more
        raise ValueError("fewer pixels than width x height")
    if width * height > MAX_PIXELS:
        raise SampleError("too many pixels")
    return Image.frombytes(data[12 : 12 + mode_bytes].decode(), (width, height), data[12 + mode_bytes :])


def check_caption(caption: Any) -> str:
    """Return the caption, stripped, without a byte-order mark.

    Raises:
        SampleError: missing, empty, or longer than MAX_CAPTION.
    """
    if not isinstance(caption, str):
        raise SampleError("missing caption")
    if not caption.removeprefix(BYTE_ORDER_MARK).strip():
        raise SampleError("empty caption")
    if len(caption) > MAX_CAPTION:
        raise SampleError(f"caption of more than {MAX_CAPTION:,} characters")
    return caption.removeprefix(BYTE_ORDER_MARK).strip()


def captions_of(sample: Mapping[str, Any]) -> list[str]:
    """Return a sample's usable captions, at least one: `captions` are all that it has, where it has several.

    Raises:
        SampleError: there is none; says why of the first one.
    """
    given = sample.get("captions") or sample["caption"]  # the latter: of a data set of others, a list too
    return usable_captions(given if isinstance(given, list) else [given])


def usable_captions(captions: Any) -> list[str]:
    """Return those of a picture's captions that can be used, stripped.

    Raises:
        SampleError: none can, for the reason of the first; or it is no list.
    """
    if not isinstance(captions, list):
        raise SampleError("captions are no list")
    found, problems = [], []
    for caption in captions:
        try:
            found.append(check_caption(caption))
        except SampleError as error:
            problems.append(error)
    if not found:
        raise problems[0] if problems else SampleError("missing caption")
    return found


def covering_size(source: ImageSize, size: ImageSize) -> ImageSize:
    """Return what a picture is scaled to: it just covers `size`, one side equal, the other cut to whole pixels.

    For a square this is torchvision's Resize(512): 640 x 480 becomes int(512 * 640 / 480) = 682 x 512.
    """
    (own_width, own_height), (width, height) = source, size
    if width * own_height >= height * own_width:
        return width, int(width * own_height / own_width)
    return int(height * own_width / own_height), height


def crop_room(source: ImageSize, size: ImageSize) -> ImageSize:
    """Return the largest (left, top) of a crop of `size` from the scaled picture, px."""
    width, height = covering_size(source, size)
    return width - size[0], height - size[1]


def is_long(covering: ImageSize, size: ImageSize) -> bool:
    """True where so little of the scaled picture is kept that only this part is scaled."""
    return any(whole > MAX_COVER * want for whole, want in zip(covering, size, strict=True))


def shown_part(
    source: ImageSize, size: ImageSize, at: tuple[int, int] | None = None, *, flipped: bool = False
) -> tuple[int, int, int, int]:
    """Return the picture's own height and width, and top and left of its crop in the scaled picture, px, at most MOST.

    Args:
        at: see `resize_and_crop`.
        flipped: it is mirrored: the place is that in the mirrored picture.
    """
    room = crop_room(source, size)
    left, top = at or (round(side / 2) for side in room)
    height, width, top, left = (
        min(px, MOST) for px in (source[1], source[0], top, room[0] - left if flipped else left)
    )
    return height, width, top, left


def resize_name(dtype: torch.dtype) -> str:
    """Return what `resize_and_crop` does to an image, as a stage of moments says it: 'bicubic, uint8'."""
    return f"bicubic, {str(dtype).removeprefix('torch.')}"


def resize_and_crop(
    pixels: Tensor, size: ImageSize, dtype: torch.dtype = torch.uint8, at: tuple[int, int] | None = None
) -> Tensor:
    """# uint8 (3, h, w) -> (3, H, W): scaled so that it just covers `size`, then cut to it, by default around its centre.

    In float32 this is ToTensor, Resize(512, bicubic) and CenterCrop(512) of torchvision, as mlcommons/training has them
    (retired_benchmarks/stable_diffusion, webdataset_images2latents.py). Antialias is pinned: torchvision's own default has
    changed between releases.

    Args:
        size: (width, height), px.
        dtype: uint8, or float32 for values / 255 that are not rounded.
        at: (left, top) of the crop in the scaled picture, px, at most `crop_room`; None: its centre.
    """
    covering = covering_size(size_of(pixels), size)
    # As torchvision: 0.5 to the even one.
    left, top = at or (round((whole - want) / 2) for whole, want in zip(covering, size, strict=True))
    if dtype == torch.uint8 and not is_long(covering, size):
        pixels = vision.resize(pixels, list(covering[::-1]), interpolation=InterpolationMode.BICUBIC, antialias=True)
        return pixels[:, top : top + size[1], left : left + size[0]]
    if covering[0] > MAX_COVER * size[0]:  # wide: as if it lay on its side
        resized = _resize_float(pixels.transpose(1, 2), covering[::-1], size[::-1], (top, left))
        resized = resized.transpose(1, 2).contiguous()
    else:
        resized = _resize_float(pixels, covering, size, (left, top))
    return resized.mul(255.0).round().clamp(0.0, 255.0).to(torch.uint8) if dtype == torch.uint8 else resized


def _resize_float(pixels: Tensor, covering: ImageSize, size: ImageSize, at: tuple[int, int]) -> Tensor:
    """# uint8 (3, h, w) -> float32 (3, H, W): a part of the picture scaled to `covering`, not wide, of any height.

    Bit for bit torch's own kernel, which goes through the sides in this order; but no more than a strip of the source is
    float32 at once, and of a picture that is long only the rows are read that the crop needs: 1 x 8000 px scaled to
    512 x 4,096,000 would be 23 GiB.
    """
    (width, height), (whole_width, whole_height), (left, top) = size, covering, at
    weights = None
    if whole_height > MAX_COVER * height:
        first, weights = _bicubic_weights(pixels.shape[1], whole_height, top, height)
        pixels = pixels[:, first : first + weights.shape[1]]
    strips = []
    for strip in pixels.split(STRIP_ROWS, dim=1):
        scaled = _scale(strip.to(torch.float32).div(255.0), (strip.shape[1], whole_width))
        strips.append(scaled[..., left : left + width])
    rows = torch.cat(strips, dim=1)  # (3, h, W)
    if weights is not None:
        return weights @ rows
    return _scale(rows, (whole_height, width))[:, top : top + height].contiguous()


def _scale(values: Tensor, to: tuple[int, int]) -> Tensor:  # (3, h, w) -> (3, *to)
    return F.interpolate(values[None], size=to, mode="bicubic", antialias=True)[0]


def _bicubic_weights(num: int, whole: int, start: int, length: int) -> tuple[int, Tensor]:
    """Return (first row of the source, weights (length, rows)) of some rows of `num` scaled to `whole`.

    Keys' kernel (1981), widened where the picture shrinks; torch's UpSampleKernel.cpp, with its roundings to float32:
    far from the edge they move a row by some ten thousandths of a pixel.
    """
    scale = float(np.float32(num) / np.float32(whole))
    widened = max(scale, 1.0)
    centers = (scale * (torch.arange(start, start + length, dtype=torch.float64) + 0.5)).float().double()[:, None]
    firsts, ends = ((centers + side * 2.0 * widened + 0.5).long().clamp(0, num) for side in (-1, 1))
    rows = torch.arange(int(firsts.min()), int(ends.max()))
    x = ((rows - centers + 0.5) / widened).abs()
    near = ((CUBIC + 2.0) * x - (CUBIC + 3.0)) * x * x + 1.0
    far = CUBIC * (((x - 5.0) * x + 8.0) * x - 4.0)
    weights = torch.where(x < 1.0, near, torch.where(x < 2.0, far, 0.0)) * ((rows >= firsts) & (rows < ends))
    return int(rows[0]), (weights / weights.sum(dim=1, keepdim=True)).float()
