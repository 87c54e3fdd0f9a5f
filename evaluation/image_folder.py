"""A folder of images: which files are listed, and how they are decoded and batched.

EXIF rotation and color profiles are ignored and transparency is dropped, as in pytorch-fid, so that both give a folder the
same statistics. So `mds.images.decode_image` is not for these: it applies all three.

Shapes: B batch, H W height and width in px.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from common.files import read_regular
from mds.images import FORMATS, IMAGE_SUFFIXES, MAX_PIXELS, open_image

SUFFIXES = tuple(f".{suffix}" for suffix in IMAGE_SUFFIXES)


def list_images(folder: str | Path) -> list[Path]:
    """Return a folder's images, sorted by name; subfolders are ignored.

    Raises:
        ValueError: the folder does not exist or has no image.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder. Give a folder with images ({', '.join(SUFFIXES)}).")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file())
    if not paths:
        num = sum(1 for _ in folder.iterdir())
        raise ValueError(
            f"{folder}: no image among its {num:,} entries. Give a folder with images ({', '.join(SUFFIXES)})."
        )
    return paths


def read_image(path: Path, size_px: int | None = None) -> Tensor:  # -> uint8 (3, H, W), RGB
    """Decode an image.

    Args:
        size_px: resize it to a square of this side, by PIL's bicubic and without keeping the aspect ratio, as MLPerf's
            script for COCO does; None: no resize.

    Raises:
        ValueError: the image is unreadable.
    """
    try:
        with open_image(read_regular(path)) as image:
            rgb = image.convert("RGB")
    except Exception as error:  # the decoders raise OSError, SyntaxError, ValueError, struct.error and more
        reason = str(error).replace(f": {str(path)!r}", "")
        raise ValueError(
            f"{path}: cannot be read as an image ({type(error).__name__}: {reason}). Possible: whole files of at most "
            f"{MAX_PIXELS:,} pixels, of {', '.join(FORMATS)}. Fetch it again, or take it out of the folder."
        ) from error
    if size_px is not None:
        rgb = rgb.resize((size_px, size_px), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous()


def image_batches(
    paths: Sequence[Path], batch_size: int, size_px: int | None = None, workers: int = 4
) -> Iterator[tuple[list[Path], Tensor]]:
    """Yield (paths, uint8 (B, 3, H, W)) in order; a batch ends early if the next image has another size.

    Args:
        size_px: see `read_image`.
        workers: threads that decode ahead, at most two batches.

    Raises:
        ValueError: an image is unreadable.
    """
    batch: list[tuple[Path, Tensor]] = []
    with ThreadPoolExecutor(workers) as pool:
        waiting = iter(paths)
        ahead: deque[tuple[Path, Future[Tensor]]] = deque()
        try:
            while True:
                ahead.extend(
                    (path, pool.submit(read_image, path, size_px))
                    for path in islice(waiting, 2 * batch_size - len(ahead))
                )
                if not ahead:
                    break
                path, image = ahead.popleft()
                if batch and (len(batch) == batch_size or batch[0][1].shape != image.result().shape):
                    yield _stack(batch)
                    batch = []
                batch.append((path, image.result()))
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, cancel decoding ahead
    if batch:
        yield _stack(batch)


def _stack(batch: list[tuple[Path, Tensor]]) -> tuple[list[Path], Tensor]:
    paths, images = zip(*batch, strict=True)
    return list(paths), torch.stack(images)
