"""An image and its captions: the file decoded, colors, captions, scaled and cut as the MLPerf reference does it, buckets.

    decoded   RGB, any size          JPEGs by torchvision, the rest by PIL, EXIF rotation applied
    resized   (3, H, W)              scaled so that it just covers W x H, bicubic with antialias; a part cut out

In uint8 (0 to 255) by default. In float32 (the variant mlperf) a value is its level / 255 and nothing is rounded: where
bicubic overshoots it lies below 0 or above 1, as in the reference, which resizes the float image and stores moments of it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from PIL import ExifTags, Image, ImageCms, UnidentifiedImageError
from PIL.JpegImagePlugin import get_sampling
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as vision

from common.value_types import MAX_CAPTION, ImageSize

# --- one image file ---
#
# Each image that comes from outside is opened by `open_image`, which reads the header and compares width x height with
# MAX_PIXELS before a pixel is decoded: a file of 1 MB can claim gigabytes.

FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "BMP", "TIFF", "GIF")
"""By PIL's names. Of a file with several frames or pages the first is read."""
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "avif", "bmp", "tif", "tiff", "gif")
MAX_PIXELS = 2**30 // 12
"""Width x height, at most: PIL's own value, 2^30 bytes of RGB in 32 bits a level. 8K video has 33,177,600."""
SIGNATURES = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG": "PNG",
    b"RIFF": "WebP",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
}
TILE_TAGS = (322, 323)  # TIFF's tags TileWidth and TileLength
SAMPLINGS = (0, 1, 2)  # by PIL's numbers: 4:4:4, 4:2:2, 4:2:0
END_OF_JPEG = b"\xff\xd9"
MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # ends coded data: no byte 255, no restart, no filler
FLIP_AXES = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}  # EXIF's orientation -> axes of (3, h, w)
TRANSPOSED_ORIENTATIONS = (5, 6, 7, 8)  # before that
# PIL warns from MAX_PIXELS on, once, and refuses twice as many: `open_image` refuses both. A filter for each call would not
# do: threads share one list of filters.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class SampleError(ValueError):
    """A sample that cannot be used; the message is the reason, in a few words."""


class RawImage(bytes):
    """An image as streaming's encoding `pil` has it: uint32 width, height, length of the mode; the mode; its pixels."""


def open_image(source: bytes | BinaryIO) -> Image.Image:
    """Open an image file and read its header; no pixel is decoded.

    Raises:
        SampleError: it is empty, is not an image of FORMATS, or has more than MAX_PIXELS.
        Exception: whatever PIL raises for a damaged header.
    """
    if source == b"":
        raise SampleError("image of zero bytes")
    try:
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise SampleError("not an image") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise SampleError("too many pixels") from error
    sizes = [image.size]
    if image.format == "TIFF":  # a tile is decoded whole, and may be larger than its image
        sizes.append(tuple(int(image.tag_v2.get(tag, 0)) for tag in TILE_TAGS))  # type: ignore[attr-defined]  # TIFF's alone
    if any(width * height > MAX_PIXELS for width, height in sizes):
        image.close()
        raise SampleError("too many pixels")
    return image


def detect_format(content: bytes) -> str:
    """Return JPEG, PNG, WebP, AVIF, BMP, TIFF, GIF, or "other", by a file's first bytes."""
    if content[4:8] == b"ftyp":
        return "AVIF"
    return next((name for signature, name in SIGNATURES.items() if content.startswith(signature)), "other")


def decode_image(data: bytes) -> Tensor:  # -> uint8 (3, h, w), RGB
    """Decode an image file, or a RawImage, upright; see `to_rgb` for its colors and its transparency.

    In memory a pixel's three levels lie together, as decoders write them: to part them would take a third of the decoding.

    Raises:
        SampleError: empty, not an image, truncated, or with more than MAX_PIXELS.
    """
    with _raise_sample_errors():
        image = _open(data)
        pixels = _decode_jpeg(image, data)
        if pixels is None:
            pixels = torch.from_numpy(np.array(to_rgb(image))).permute(2, 0, 1)
        return rotate_upright(pixels, image.getexif().get(ExifTags.Base.Orientation, 1))


@contextlib.contextmanager
def _raise_sample_errors() -> Iterator[None]:
    """Say why an image cannot be used, whatever it was that found it out. Raises SampleError."""
    try:
        yield
    except SampleError:
        raise
    except Exception as error:  # the decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise SampleError("truncated or damaged image") from error


def _open(data: bytes) -> Image.Image:
    """Read the header, which checks the size. Raises what PIL raises, or SampleError."""
    return _from_pixels(data) if isinstance(data, RawImage) else open_image(data)


def _from_pixels(data: bytes) -> Image.Image:
    """Raises SampleError, what PIL raises, ValueError: there are fewer pixels than it says, which PIL would make room for."""
    width, height, mode_bytes = np.frombuffer(data[:12], "<u4").tolist()
    if width * height > 8 * len(data):  # a pixel has a bit and more
        raise ValueError("fewer pixels than width x height")
    if width * height > MAX_PIXELS:
        raise SampleError("too many pixels")
    return Image.frombytes(data[12 : 12 + mode_bytes].decode(), (width, height), data[12 + mode_bytes :])


def _decode_jpeg(image: Image.Image, data: bytes) -> Tensor | None:
    """Decode by torchvision, in 0.7 of PIL's time; None: PIL decides.

    PIL's libjpeg and torchvision's agree on every pixel of gray, 4:4:4, 4:2:2 and 4:2:0, baseline or progressive; of 4:4:0
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


def _is_plain(image: Image.Image, data: bytes) -> bool:
    """True for what torchvision decodes as PIL does, and needs no conversion to sRGB."""
    is_alike = image.format == "JPEG" and (image.mode == "L" or get_sampling(image) in SAMPLINGS)
    return is_alike and _has_end(image, data) and color_conversion(image) is None


def _has_end(image: Image.Image, data: bytes) -> bool:
    """Return whether an opened JPEG's coded data are followed by its end. Where several scans are not progressive: False."""
    if "progressive" in image.info:  # torchvision makes room for its image after all scans, so it keeps nothing
        return data.endswith(END_OF_JPEG)
    marker = MARKER.search(data, image.fp.tell())  # PIL has read up to the coded data
    return marker is not None and marker[0] == END_OF_JPEG


def rotate_upright(pixels: Tensor, orientation: Any) -> Tensor:  # (3, h, w) -> (3, h, w) or (3, w, h)
    """Turn an image as EXIF 2.3, tag 0x0112, says it has to be shown; other values say nothing, as in PIL."""
    pixels = pixels.transpose(1, 2) if orientation in TRANSPOSED_ORIENTATIONS else pixels
    pixels = pixels.flip(FLIP_AXES[orientation]) if orientation in FLIP_AXES else pixels
    return pixels.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def size_of(pixels: Tensor) -> ImageSize:
    """Return (width, height) of an image (3, h, w), px."""
    return pixels.shape[2], pixels.shape[1]


def to_rgb(image: Image.Image) -> Image.Image:
    """Decode an image to 8-bit RGB: converted to sRGB where a profile is embedded, transparency over white.

    Raises:
        SampleError: its pixels have more than 16 bits.
        Exception: whatever PIL raises for a damaged one.
    """
    image.load()
    conversion = color_conversion(image)
    if image.mode[0] in "IF":
        image = _from_wide_levels(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        if conversion is not None:
            converted = conversion(image)
            converted.putalpha(image.getchannel("A"))
            image = converted
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    elif conversion is not None:
        return conversion(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_wide_levels(image: Image.Image) -> Image.Image:
    """Scale 16 bits a pixel to 8: PIL itself would cut everything above 255 to white. Raises SampleError: there are more."""
    levels = np.asarray(image)
    if image.mode == "F" or levels.min() < 0 or levels.max() > 2**16 - 1:
        raise SampleError("pixels of more than 16 bits")
    return Image.fromarray((levels / 257.0).round().astype(np.uint8))


# --- colors ---

MAX_PROFILE_BYTES = 2**22  # those of printing presses have 0.5 to 3 MB
PROFILE_MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}  # of a profile -> PIL's mode
MAX_SRGB_DIFFERENCE = 2  # of 255: a profile that moves no color further is one of the many versions of sRGB


@dataclass(frozen=True)
class Conversion:
    """From the colors of a profile to sRGB."""

    mode: str
    """PIL's, of the profile: L, RGB or CMYK."""
    transform: ImageCms.ImageCmsTransform

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return the image as RGB, without its transparency."""
        image = image if image.mode == self.mode else image.convert(self.mode)
        converted = ImageCms.applyTransform(image, self.transform)
        assert converted is not None  # only where it works in place
        return converted


def color_conversion(image: Image.Image) -> Conversion | None:
    """Return how an image's colors become sRGB. None: they count as sRGB.

    That is so without a profile, with a version of sRGB, and with a profile that is damaged or of another kind than the
    image, which is then decoded as if it had none.
    """
    profile = image.info.get("icc_profile")
    if not isinstance(profile, bytes) or not 0 < len(profile) <= MAX_PROFILE_BYTES:
        return None
    is_gray = image.mode in ("1", "L", "LA") or image.mode[0] in "IF"
    return _build_conversion(profile, "L" if is_gray else "CMYK" if image.mode == "CMYK" else "RGB")


@functools.lru_cache(maxsize=32)  # a dataset has few, and each takes milliseconds
def _build_conversion(profile: bytes, image_mode: str) -> Conversion | None:
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        mode = PROFILE_MODES.get(source.profile.xcolor_space.strip())
        if mode is None or (mode != image_mode and (image_mode, mode) != ("L", "RGB")):
            return None
        transform = ImageCms.buildTransform(
            source,
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
            ImageCms.Flags.BLACKPOINTCOMPENSATION,  # the darkest ink becomes black
        )
    except Exception:  # PyCMSError, OSError, ValueError and more: the sample is worth more than its profile
        return None
    conversion = Conversion(mode, transform)
    return None if mode != "CMYK" and _is_srgb(conversion) else conversion


def _is_srgb(conversion: Conversion) -> bool:
    """True if none of 9^3 colors, or 9 grays, moves by more than MAX_SRGB_DIFFERENCE."""
    levels = np.linspace(0, 255, 9).round().astype(np.uint8)
    colors = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(1, -1, 3)
    if conversion.mode == "L":
        colors = np.repeat(levels[None, :, None], 3, axis=2)
    converted = np.asarray(conversion(Image.fromarray(colors)))
    return bool(np.abs(converted.astype(int) - colors).max() <= MAX_SRGB_DIFFERENCE)


# --- captions ---

BYTE_ORDER_MARK = "\ufeff"  # as Windows' editors begin a file of UTF-8


def clean_caption(caption: Any) -> str:
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


def read_captions(sample: Mapping[str, Any]) -> list[str]:
    """Return a sample's usable captions, at least one: `captions` are all that it has, where it has several.

    Raises:
        SampleError: there is none; says why of the first one.
    """
    captions = sample.get("captions") or sample["caption"]  # the latter: of a third-party dataset, also a list
    return clean_captions(captions if isinstance(captions, list) else [captions])


def clean_captions(captions: Any) -> list[str]:
    """Return those of an image's captions that can be used, stripped.

    Raises:
        SampleError: none can, for the reason of the first; or it is no list.
    """
    if not isinstance(captions, list):
        raise SampleError("captions are no list")
    cleaned, problems = [], []
    for caption in captions:
        try:
            cleaned.append(clean_caption(caption))
        except SampleError as error:
            problems.append(error)
    if not cleaned:
        raise problems[0] if problems else SampleError("missing caption")
    return cleaned


# --- scaled and cut to size ---

MAX_SIDE_PX = 2**16 - 1  # that a dataset has for a side, px
MAX_COVER = 4  # times the crop's side: of a longer image only what the crop shows is scaled
STRIP_ROWS = 512  # of a source that are float32 at once
CUBIC = -0.5  # Keys' a; torch and PIL take it where they antialias


def covering_size(source: ImageSize, size: ImageSize) -> ImageSize:
    """Return what an image is scaled to: it just covers `size`, one side equal, the other cut to whole pixels.

    For a square this is torchvision's Resize(512): 640 x 480 becomes int(512 * 640 / 480) = 682 x 512.
    """
    (own_width, own_height), (width, height) = source, size
    if width * own_height >= height * own_width:
        return width, int(width * own_height / own_width)
    return int(height * own_width / own_height), height


def max_crop_offset(source: ImageSize, size: ImageSize) -> ImageSize:
    """Return the largest (left, top) of a crop of `size` from the scaled image, px."""
    width, height = covering_size(source, size)
    return width - size[0], height - size[1]


def is_elongated(covering: ImageSize, size: ImageSize) -> bool:
    """True where so little of the scaled image is kept that only this part is scaled."""
    return any(whole > MAX_COVER * want for whole, want in zip(covering, size, strict=True))


def crop_geometry(
    source: ImageSize, size: ImageSize, at: tuple[int, int] | None = None, *, flipped: bool = False
) -> tuple[int, int, int, int]:
    """Return the image's own height and width, and top and left of its crop in the scaled image, px, at most MAX_SIDE_PX.

    Args:
        at: see `resize_and_crop`.
        flipped: it is mirrored: the place is that in the mirrored image.
    """
    room = max_crop_offset(source, size)
    left, top = at or (round(side / 2) for side in room)
    height, width, top, left = (
        min(px, MAX_SIDE_PX) for px in (source[1], source[0], top, room[0] - left if flipped else left)
    )
    return height, width, top, left


def resize_name(dtype: torch.dtype) -> str:
    """Return what `resize_and_crop` does to an image, as a dataset of moments says it: 'bicubic, uint8'."""
    return f"bicubic, {str(dtype).removeprefix('torch.')}"


def resize_and_crop(
    pixels: Tensor, size: ImageSize, dtype: torch.dtype = torch.uint8, at: tuple[int, int] | None = None
) -> Tensor:
    """# uint8 (3, h, w) -> (3, H, W): scaled so that it just covers `size`, then cut to it, by default around its center.

    In float32 this is ToTensor, Resize(512, bicubic) and CenterCrop(512) of torchvision, as mlcommons/training has them
    (retired_benchmarks/stable_diffusion, webdataset_images2latents.py). Antialias is pinned: torchvision's own default has
    changed between releases.

    Args:
        size: (width, height), px.
        dtype: uint8, or float32 for values / 255 that are not rounded.
        at: (left, top) of the crop in the scaled image, px, at most `max_crop_offset`; None: its center.
    """
    covering = covering_size(size_of(pixels), size)
    # As torchvision: 0.5 to the even one.
    left, top = at or (round((whole - want) / 2) for whole, want in zip(covering, size, strict=True))
    if dtype == torch.uint8 and not is_elongated(covering, size):
        pixels = vision.resize(pixels, list(covering[::-1]), interpolation=InterpolationMode.BICUBIC, antialias=True)
        return pixels[:, top : top + size[1], left : left + size[0]]
    if covering[0] > MAX_COVER * size[0]:  # wide: as if it lay on its side
        resized = _resize_float(pixels.transpose(1, 2), covering[::-1], size[::-1], (top, left))
        resized = resized.transpose(1, 2).contiguous()
    else:
        resized = _resize_float(pixels, covering, size, (left, top))
    return resized.mul(255.0).round().clamp(0.0, 255.0).to(torch.uint8) if dtype == torch.uint8 else resized


def _resize_float(pixels: Tensor, covering: ImageSize, size: ImageSize, at: tuple[int, int]) -> Tensor:
    """# uint8 (3, h, w) -> float32 (3, H, W): a part of the image scaled to `covering`, not wide, of any height.

    Bit for bit torch's own kernel, which goes through the sides in this order; but no more than a strip of the source is
    float32 at once, and of an image that is long only the rows are read that the crop needs: 1 x 8000 px scaled to
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

    Keys' kernel (1981), widened where the image shrinks; torch's UpSampleKernel.cpp, with its roundings to float32:
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


# --- what is drawn when a sample is read ---
#
# The numbers are a hash of (seed, epoch, sample number) alone. So a run reads the same on any number of ranks and
# loader workers, and after a resume within an epoch; a sample that replaces a broken one has its own.


@dataclass(frozen=True)
class SampleDraw:
    """Independent numbers, uniform in [0, 1), of one reading of a sample."""

    flip: float
    caption: float
    left: float
    top: float

    @property
    def is_flipped(self) -> bool:
        return self.flip < 0.5

    def choose_caption(self, captions: Sequence[str]) -> str:
        """Return a caption; each is equally likely."""
        return captions[int(self.caption * len(captions))]

    def crop_offset(self, room: ImageSize) -> tuple[int, int]:
        """Return (left, top) of a crop in whole pixels, each from 0 to `room`; all places are equally likely."""
        return int(self.left * (room[0] + 1)), int(self.top * (room[1] + 1))


def draw_sample(seed: int, epoch: int, sample_id: int) -> SampleDraw:
    """Return the numbers of a sample's reading in an epoch; `sample_id`: its number among all of the run."""
    digest = hashlib.blake2b(f"{seed} {epoch} {sample_id}".encode(), digest_size=32).digest()
    words = (int.from_bytes(digest[at : at + 8], "big") for at in range(0, 32, 8))
    return SampleDraw(*((word >> 11) / 2**53 for word in words))  # 53 bits: all of a float's, and never 1


def draw_clip_position(seed: int, epoch: int, sample_id: int) -> float:
    """Return where in its video a sample's clip lies, from 0, at its beginning, to 1; from a separate hash."""
    digest = hashlib.blake2b(f"{seed} {epoch} {sample_id}".encode(), digest_size=8, person=b"clip").digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


# --- aspect-ratio buckets ---
#
# A set of buckets is a folder with a dataset for each size, e.g. OUT/576x448 (prepare/buckets.py). The sizes are those of
# SDXL (Podell et al. 2023, arXiv:2307.01952, appendix I), about 1024 x 1024 pixels each, scaled to the run's size.

SDXL_PX = 1024
# Landscape sizes, (width, height); the paper's columns are height and width. Each has its portrait counterpart there, but for
# 1344 x 704.
LANDSCAPE = [(2048, 512), (1984, 512), (1920, 512), (1856, 512), (1792, 576), (1728, 576), (1664, 576), (1600, 640)]
LANDSCAPE += [(1536, 640), (1472, 704), (1408, 704), (1344, 704), (1344, 768), (1280, 768), (1216, 832), (1152, 832)]
LANDSCAPE += [(1152, 896), (1088, 896), (1088, 960), (1024, 960)]
PORTRAIT = [(height, width) for width, height in LANDSCAPE if (width, height) != (1344, 704)]
SDXL_SIZES = (*PORTRAIT, (SDXL_PX, SDXL_PX), *reversed(LANDSCAPE))


def bucket_sizes(side_px: int, *, step_px: int, max_aspect: float = math.inf) -> list[ImageSize]:
    """Return SDXL's sizes, (width, height), for a square of another side; each once.

    Args:
        step_px: sides are rounded to multiples of it.
        max_aspect: sizes whose longer side is more than that times the shorter one are left out.
    """
    scaled = [tuple(max(1, round(px * side_px / SDXL_PX / step_px)) * step_px for px in size) for size in SDXL_SIZES]
    return list(dict.fromkeys((w, h) for w, h in scaled if max(w, h) <= max_aspect * min(w, h)))


def nearest_bucket(size: ImageSize, buckets: Sequence[ImageSize]) -> int:
    """Return the number of the bucket whose aspect is nearest to an image's, by their ratio; the first of equals."""
    aspect = math.log(size[0] / size[1])
    return min(range(len(buckets)), key=lambda number: abs(math.log(buckets[number][0] / buckets[number][1]) - aspect))
