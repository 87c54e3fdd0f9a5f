"""The stage `moments`: its columns and number types, and the MLPerf reference's published arrays.

Shapes: C latent channels, h w height and width of the latent, L text tokens, D text width. SD2 at 512 px: (8, 64, 64), (77,).

    moments   float16 (2C, h, w)   mean | logvar of the VAE's posterior, unscaled: a latent is drawn when it is read
    moments_flipped                the same of the mirrored picture; only with flip=true
    tokens    uint16 (L,)          and every further text column of the family
    text      float16 (L, D)       text states; only with store_text=true
    caption, key, metadata         as in the stage `images`; metadata only if that has it
    captions                       all of a picture, as in that stage if it has them; tokens and text are of the first
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cli.limits import ImageSize
from stages.dataset import array_encoding
from stages.images import SampleError
from stages.moments import FLIPPED
from zoo.spec import Family


def mds_columns(
    family: Family,
    size: ImageSize,
    *,
    text: Mapping[str, Tensor],
    metadata: bool,
    captions: bool = False,
    flip: bool = False,
) -> dict[str, str]:
    """Return name -> MDS encoding.

    Args:
        size: (width, height) of the images, px.
        text: states of one caption, (1, L, D) each; empty if they are not stored.
        metadata, captions: whether there is a column of that name.
        flip: whether there are moments of the mirrored picture.
    """
    columns = {"caption": "str", "key": "str", **({"metadata": "json"} if metadata else {})}
    columns |= {"captions": "json"} if captions else {}
    for name, column in family.columns("moments", size).items():
        columns[name] = array_encoding(column.stored, column.shape)
    columns |= {FLIPPED: columns["moments"]} if flip else {}
    return columns | {name: array_encoding("float16", tuple(states.shape[1:])) for name, states in text.items()}


def tokens_of(family: Family, captions: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the family's text columns, uint16 (B, L) each."""
    return {name: tokens.numpy().astype(np.uint16) for name, tokens in family.tokenize(captions).items()}


def to_float16(values: Tensor) -> np.ndarray:
    """Round to float16 and copy to the host; values beyond 65,504 become infinite, and `check_finite` finds them."""
    return values.to(torch.float16).cpu().numpy()


def check_finite(name: str, values: np.ndarray) -> None:
    """Raise SampleError if a sample's values are not finite."""
    if not np.isfinite(values).all():
        raise SampleError(f"{name} are not finite in float16")


def npy_shape(content: bytes) -> tuple[int, ...]:
    """Return the shape that an .npy file claims. Raises SampleError: not a plain array of float32."""
    return _npy_header(content)[0]


def read_npy(content: bytes, shape: Sequence[int]) -> np.ndarray:
    """Return the moments in an .npy file of the MLPerf reference, float16, without the leading 1.

    (1, 2C, h, w) float32, mean | logvar, unscaled: mlcommons/training, stable_diffusion, webdataset_images2latents.py.

    Args:
        shape: expected shape of a sample, (2C, h, w).

    Raises:
        SampleError: another shape or type, truncated, pickled, or not finite in float16.
    """
    found, is_fortran, offset = _npy_header(content)
    wanted = (1, *shape)
    if found != wanted:
        raise SampleError(f"moments of another shape than {wanted}")
    if len(content) - offset != 4 * np.prod(wanted):
        raise SampleError("truncated or damaged moments")
    values = np.frombuffer(content, "<f4", offset=offset).reshape(wanted, order="F" if is_fortran else "C")[0]
    with np.errstate(over="ignore"):
        moments = np.ascontiguousarray(values.astype(np.float16))
    check_finite("moments", moments)
    return moments


def _npy_header(content: bytes) -> tuple[tuple[int, ...], bool, int]:
    """Read shape, order and data offset from the header alone, so that a false size allocates no memory."""
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, is_fortran, dtype = readers[version](file)
    except (ValueError, KeyError) as error:
        raise SampleError("not an .npy array") from error
    if dtype.hasobject:
        raise SampleError("moments are pickled objects, which are never loaded")
    if dtype != np.dtype("<f4"):
        raise SampleError("moments are not float32")
    return shape, is_fortran, file.tell()
