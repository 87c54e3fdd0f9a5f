"""One image file: which kinds are read, how large one may be, and its colors as 8-bit sRGB over white.

Each image that comes from outside is opened by `open_image`, which reads the header and compares width x height with
MAX_PIXELS before a pixel is decoded: a file of 1 MB can claim gigabytes.
"""

from __future__ import annotations

import functools
import io
import warnings
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

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
TILE = (322, 323)  # TIFF's tags TileWidth and TileLength
MAX_PROFILE_BYTES = 2**22  # those of printing presses have 0.5 to 3 MB
SPACES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}  # of a profile -> PIL's mode
SAME_LEVELS = 2  # of 255: a profile that moves no color further is one of the many versions of sRGB

# PIL warns from MAX_PIXELS on, once, and refuses twice as many: `open_image` refuses both. A filter for each call would not
# do: threads share one list of filters.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class SampleError(ValueError):
    """A sample that cannot be used; the message is the reason, in a few words."""


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
        sizes.append(tuple(int(image.tag_v2.get(tag, 0)) for tag in TILE))  # type: ignore[attr-defined]  # TIFF's alone
    if any(width * height > MAX_PIXELS for width, height in sizes):
        image.close()
        raise SampleError("too many pixels")
    return image


def format_of(content: bytes) -> str:
    """Return JPEG, PNG, WebP, AVIF, BMP, TIFF, GIF, or "other", by a file's first bytes."""
    if content[4:8] == b"ftyp":
        return "AVIF"
    return next((name for signature, name in SIGNATURES.items() if content.startswith(signature)), "other")


def to_rgb(image: Image.Image) -> Image.Image:
    """Decode an image to 8-bit RGB: converted to sRGB where a profile is embedded, transparency over white.

    Raises:
        SampleError: its pixels have more than 16 bits.
        Exception: whatever PIL raises for a damaged one.
    """
    image.load()
    conversion = conversion_of(image)
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


# ---------------------------------------------------------------------------------------------------------------------
# Colors
# ---------------------------------------------------------------------------------------------------------------------


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


def conversion_of(image: Image.Image) -> Conversion | None:
    """Return how an image's colors become sRGB. None: they count as sRGB.

    That is so without a profile, with a version of sRGB, and with a profile that is damaged or of another kind than the
    image, which is then decoded as if it had none.
    """
    profile = image.info.get("icc_profile")
    if not isinstance(profile, bytes) or not 0 < len(profile) <= MAX_PROFILE_BYTES:
        return None
    is_gray = image.mode in ("1", "L", "LA") or image.mode[0] in "IF"
    return _conversion_from(profile, "L" if is_gray else "CMYK" if image.mode == "CMYK" else "RGB")


@functools.lru_cache(maxsize=32)  # a data set has few, and each takes milliseconds
def _conversion_from(profile: bytes, image_mode: str) -> Conversion | None:
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        mode = SPACES.get(source.profile.xcolor_space.strip())
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
    """True if none of 9^3 colors, or 9 grays, moves by more than SAME_LEVELS."""
    levels = np.linspace(0, 255, 9).round().astype(np.uint8)
    colors = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(1, -1, 3)
    if conversion.mode == "L":
        colors = np.repeat(levels[None, :, None], 3, axis=2)
    converted = np.asarray(conversion(Image.fromarray(colors)))
    return bool(np.abs(converted.astype(int) - colors).max() <= SAME_LEVELS)
