"""img2dataset's Resizer, bounded: it decodes by OpenCV whatever a host sends, and asks for the size of no header.

A PNG of 1.5 MB can claim 14,000 x 14,000 px of RGBA in 16 bits, of which OpenCV and the mixing with white make 12 GB. So the
header of each file is read first, by the one rule of all our readers. OpenCV then decodes JPEGs alone. What it decodes in
another way than our readers (other kinds of files, embedded profiles, EXIF rotation) it gets as pixels.
"""

from __future__ import annotations

import io
from typing import Any

from PIL import ExifTags, Image

from stages.image_files import SampleError, conversion_of, open_image
from stages.images import decode_image


def bounded(resizer: Any) -> Any:
    """Return a subclass of img2dataset's Resizer. Its objects take an open file; they return a JPEG, or why there is none."""

    class BoundedResizer(resizer):
        def __call__(self, img_stream: io.BytesIO, blurring_bbox_list: Any = None) -> tuple[Any, ...]:
            keeps_bytes = self.skip_reencode and self.resize_mode.name == "no"
            try:
                content = readable_by_opencv(img_stream.getvalue(), keeps_bytes)
            except SampleError as error:
                return None, None, None, None, None, str(error)
            return super().__call__(io.BytesIO(content), blurring_bbox_list)

    return BoundedResizer


def readable_by_opencv(content: bytes, keeps_bytes: bool) -> bytes:
    """Return a JPEG itself where OpenCV decodes it as our readers do, else a BMP of what they see.

    Args:
        keeps_bytes: a JPEG is stored as it is, with its profile and its rotation.

    Raises:
        SampleError: it cannot be used.
    """
    try:
        with open_image(content) as image:
            is_jpeg = image.format in ("JPEG", "MPO")
            is_upright = keeps_bytes or image.getexif().get(ExifTags.Base.Orientation, 1) == 1
            is_kept = is_jpeg and is_upright and (keeps_bytes or conversion_of(image) is None)
    except SampleError:
        raise
    except Exception as error:  # the decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise SampleError("truncated or damaged image") from error
    if is_kept:
        return content
    file = io.BytesIO()
    Image.fromarray(decode_image(content).permute(1, 2, 0).numpy()).save(file, "BMP")
    return file.getvalue()
