"""The stage `moments`: its columns and number types, and the arrays of .npy files that MLPerf publishes.

Shapes: C latent channels, h w height and width of the latent, L text tokens, D text width. SD2 at 512 px: (8, 64, 64), (77,).

    moments   float16 (2C, h, w)   mean | logvar of the VAE's posterior, unscaled: a latent is drawn when it is read
    moments_flipped                the same of the mirrored picture; only with flip=true
    tokens    uint16 (L,)          and every further text column of the family; int64 where its vocabulary is larger
    first_frame, ...               of videos: what the network is told of the pictures, see zoo/spec.py
    text      float16 (L, D)       text states; only with store_text=true
    caption, key, metadata         as in the stage `images`; metadata only if that has it
    timestep                       only with timestep=true, or of MLPerf's FLUX.1: stages/moments.py
    captions                       all of a picture, as in that stage if it has them; tokens and text are of the first
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cli.limits import ImageSize
from prepare.places import Place
from stages.dataset import EMPTY_DIGEST, FACTS_FILE, array_encoding
from stages.empty_text import EMPTY_FILE, as_bytes, digest_of
from stages.images import SampleError
from stages.moments import FLIPPED, NUM_TIMESTEPS, TIMESTEP
from zoo.spec import Family


def mds_columns(
    family: Family,
    size: ImageSize,
    *,
    text: Mapping[str, Tensor],
    metadata: bool,
    captions: bool = False,
    flip: bool = False,
    timestep: bool = False,
) -> dict[str, str]:
    """Return name -> MDS encoding.

    Args:
        size: (width, height) of the images, px.
        text: states of one caption, (1, L, D) each; empty if they are not stored.
        metadata, captions: whether there is a column of that name.
        flip: whether there are moments of the mirrored picture.
        timestep: whether there is the column TIMESTEP.
    """
    columns = {"caption": "str", "key": "str", **({"metadata": "json"} if metadata else {})}
    columns |= {"captions": "json"} if captions else {}
    columns |= {TIMESTEP: "int"} if timestep else {}
    for name, column in family.columns("moments", size).items():
        columns[name] = array_encoding(column.stored, column.shape)
    columns |= {FLIPPED: columns["moments"]} if flip else {}
    return columns | {name: array_encoding("float16", tuple(states.shape[1:])) for name, states in text.items()}


def tokens_of(family: Family, captions: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the family's text columns, (B, L) each, in the type that is stored."""
    stored = {name: column.stored for name, column in family.text_columns().items()}
    return {name: tokens.numpy().astype(stored[name]) for name, tokens in family.tokenize(captions).items()}


def to_float16(values: Tensor) -> np.ndarray:
    """Round to float16 and copy to the host; values beyond 65,504 become infinite, and `check_finite` finds them."""
    return values.to(torch.float16).cpu().numpy()


def check_finite(name: str, values: np.ndarray) -> None:
    """Raise SampleError if a sample's values are not finite."""
    if not np.isfinite(values).all():
        raise SampleError(f"{name} are not finite in float16")


def check_timestep(value: Any) -> int:
    """Return what a sample says is its time. Raises SampleError: it is no whole number from 0 to 7."""
    if type(value) is not int or value not in range(NUM_TIMESTEPS):
        raise SampleError(f"{TIMESTEP} is not a whole number from 0 to {NUM_TIMESTEPS - 1}")
    return value


def npy_values(
    content: bytes, shape: Sequence[int] | None = None, what: str = "moments", kind: str = "float32"
) -> np.ndarray:
    """Return the numbers in an .npy file.

    Args:
        shape: that they have to have; None: any.
        what: they are, for messages.
        kind: numpy's name of their type; little-endian.

    Raises:
        SampleError: another shape or type, truncated or pickled.
    """
    try:
        values = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except (ValueError, MemoryError) as error:
        raise SampleError(f"{what} are no whole .npy array") from error
    if values.dtype != np.dtype(kind).newbyteorder("<"):
        raise SampleError(f"{what} are not {kind}")
    if shape is not None and values.shape != tuple(shape):
        raise SampleError(f"{what} of another shape than {tuple(shape)}")
    return values


def read_npy(content: bytes, shape: Sequence[int]) -> np.ndarray:
    """Return the moments in an .npy file of the MLPerf reference, float16, without the leading 1.

    (1, 2C, h, w) float32, mean | logvar, unscaled: mlcommons/training, stable_diffusion, webdataset_images2latents.py.

    Args:
        shape: expected shape of a sample, (2C, h, w).

    Raises:
        SampleError: another shape or type, truncated, pickled, or not finite in float16.
    """
    values = npy_values(content, (1, *shape))[0]
    with np.errstate(over="ignore"):
        moments = np.ascontiguousarray(values.astype(np.float16))
    check_finite("moments", moments)
    return moments


def put_empty_text(place: Place, states: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Put the empty text's states into a stage; return what dataset.json says of them. Raises OSError.

    Args:
        states: float16 (L, D) or (P,) by column; {}: there are none, and nothing is written.
    """
    if not states:
        return {}
    content = as_bytes(states)
    if FACTS_FILE not in place.names():
        place.put_bytes(EMPTY_FILE, content)
    return {EMPTY_DIGEST: digest_of(content)}
