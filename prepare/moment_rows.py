"""The dataset `moments`: its columns and number types, and the arrays of .npy files that MLPerf publishes.

Shapes: C latent channels, h w height and width of the latent, L text tokens, D text width. SD2 at 512 px: (8, 64, 64), (77,).

    moments   float16 (2C, h, w)   mean | logvar of the VAE's posterior, unscaled: a latent is drawn when it is read
    moments_flipped                the same of the mirrored image; only with flip=true
    tokens    uint16 (L,)          and every further text column of the family; int64 where its vocabulary is larger
    first_frame, ...               of videos: the network's other inputs about the images, see families/spec.py
    text      float16 (L, D)       text states; only with store_text=true
    caption, key, metadata         as in the dataset `images`; metadata only if that has it
    timestep                       only with timestep=true, or of MLPerf's FLUX.1: mds/moments.py
    captions                       all of an image, as in that dataset if it has them; tokens and text are of the first
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.value_types import ImageSize
from families import load_family
from families.spec import Family
from mds.dataset import EMPTY_DIGEST, METADATA_FILE, array_encoding
from mds.images import SampleError
from mds.moments import (
    EMPTY_FILE,
    FLIPPED_COLUMN,
    NUM_TIMESTEPS,
    TIMESTEP_COLUMN,
    digest_empty_text,
    serialize_empty_text,
)
from prepare.addresses import Address
from prepare.samples import Sample, SampleFields, check_key


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
        flip: whether there are moments of the mirrored image.
        timestep: whether there is the column TIMESTEP_COLUMN.
    """
    columns = {"caption": "str", "key": "str", **({"metadata": "json"} if metadata else {})}
    columns |= {"captions": "json"} if captions else {}
    columns |= {TIMESTEP_COLUMN: "int"} if timestep else {}
    for name, column in family.columns("moments", size).items():
        columns[name] = array_encoding(column.stored_dtype, column.shape)
    columns |= {FLIPPED_COLUMN: columns["moments"]} if flip else {}
    return columns | {name: array_encoding("float16", tuple(states.shape[1:])) for name, states in text.items()}


def tokenize_captions(family: Family, captions: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the family's text columns, (B, L) each, in the type that is stored."""
    stored = {name: column.stored_dtype for name, column in family.text_columns().items()}
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
        raise SampleError(f"{TIMESTEP_COLUMN} is not a whole number from 0 to {NUM_TIMESTEPS - 1}")
    return value


def parse_npy(
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


def parse_npy_moments(content: bytes, shape: Sequence[int]) -> np.ndarray:
    """Return the moments in an .npy file of the MLPerf reference, float16, without the leading 1.

    (1, 2C, h, w) float32, mean | logvar, unscaled: mlcommons/training, stable_diffusion, webdataset_images2latents.py.

    Args:
        shape: expected shape of a sample, (2C, h, w).

    Raises:
        SampleError: another shape or type, truncated, pickled, or not finite in float16.
    """
    values = parse_npy(content, (1, *shape))[0]
    with np.errstate(over="ignore"):
        moments = np.ascontiguousarray(values.astype(np.float16))
    check_finite("moments", moments)
    return moments


def put_empty_text(address: Address, states: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Put the empty text's states into a dataset; return what dataset.json says of them. Raises OSError.

    Args:
        states: float16 (L, D) or (P,) by column; {}: there are none, and nothing is written.
    """
    if not states:
        return {}
    content = serialize_empty_text(states)
    if METADATA_FILE not in address.list_files():
        address.put_bytes(EMPTY_FILE, content)
    return {EMPTY_DIGEST: digest_empty_text(content)}


# --- MLPerf's preprocessed samples of FLUX.1 become rows of the dataset `moments` with text states ---
#
# The reference publishes CC12M and COCO as tables of samples that its frozen encoders have seen, and the empty text's
# states beside them (mlcommons/training, text_to_image; pytorch/torchtitan at 0e138118, experiments/flux:
# preprocess_flux_dataset.py writes them, flux_dataset.py reads them). Arrays are bytes of .npy files of uint16, which
# are the bits of bfloat16:
#
#     mean, logvar        (16, 32, 32) each: of the VAE's posterior, unscaled, of an image of 256 px in [-1, 1]
#     t5_encodings        (256, 4096)
#     clip_encodings      (768,)
#     __key__             text
#     timestep            whole number n: the sample is validated at the time n / 8; of the validation set alone
#
#     t5_empty.npy (1, 256, 4096), clip_empty.npy (1, 768): float16
#
# A bfloat16 has 8 significant bits, a float16 11: what is stored is the same number, but for those below 2**-14 in
# size, which are rounded to multiples of 2**-24, and those above 65,504, which are refused.

FLUX_ARRAYS = ("mean", "logvar", "t5_encodings", "clip_encodings")
FLUX_KEY = "__key__"
FLUX_STATES = {"text": "t5_encodings", "pooled": "clip_encodings"}
"""A column of text states -> the array that it is made of."""
EMPTY_FILES = {"text": "t5_empty.npy", "pooled": "clip_empty.npy"}
FLUX_PRESETS = ("full", "tiny")


@dataclass(frozen=True)
class FluxFields(SampleFields):
    """What is read of such a table, in place of an image and captions."""

    image: str = "mean"
    captions: tuple[str, ...] = ()
    key: str | None = FLUX_KEY
    has_timestep: bool = False

    def __str__(self) -> str:
        return f"moments and text states from {', '.join(FLUX_ARRAYS)}, key from {FLUX_KEY}"

    @property
    def names(self) -> tuple[str, ...]:
        return (*FLUX_ARRAYS, FLUX_KEY, *([TIMESTEP_COLUMN] if self.has_timestep else []))


def find_flux_fields(samples: Sequence[Sample], where: str) -> FluxFields | None:
    """Return what is read of such samples; None: they are of another kind.

    Args:
        samples: the first ones of the source `where`.

    Raises:
        ValueError: some columns of such samples are there, others are not.
    """
    names = {name for sample in samples for name in sample.files}
    missing = [name for name in (*FLUX_ARRAYS, FLUX_KEY) if name not in names]
    if not set(FLUX_STATES.values()) & names:
        return None
    if missing:
        wanted = ", ".join((*FLUX_ARRAYS, FLUX_KEY))
        raise ValueError(f"{where} has no column {', '.join(missing)}. MLPerf's preprocessed samples have {wanted}.")
    return FluxFields(has_timestep=TIMESTEP_COLUMN in names)


def find_flux_preset(samples: Sequence[Sample], where: str) -> tuple[str, ImageSize]:
    """Return the preset and the images' size, px, by the arrays of the first sample that can be read.

    Raises:
        ValueError: there is none, or its arrays are of no preset.
    """
    problem = "has no sample"
    for sample in samples:
        try:
            shapes = {name: parse_npy(_content(sample, name), None, name, "uint16").shape for name in FLUX_ARRAYS}
        except SampleError as error:
            problem = f"has no sample that can be read: {error}"
            continue
        for preset in FLUX_PRESETS:
            family = load_family("flux", preset, "mlperf")
            scale, mean = family.pixels_per_latent, shapes["mean"]
            size = (mean[-1] * scale, mean[-2] * scale) if len(mean) > 1 else (0, 0)
            if family.size_problem(size) is None and shapes == flux_shapes(family, size):
                return preset, size
        problem = f"has arrays of other shapes than FLUX.1's: {', '.join(f'{n} {s}' for n, s in shapes.items())}"
    raise ValueError(f"{where} {problem}. Possible: as MLPerf's reference preprocesses its samples.")


def flux_shapes(family: Family, size: ImageSize) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a sample's arrays."""
    latent, columns = family.latent_shape(size), family.columns("moments", size, stored_text=True)
    return {"mean": latent, "logvar": latent, **{name: columns[state].shape for state, name in FLUX_STATES.items()}}


def flux_mds_columns(fields: FluxFields, family: Family, size: ImageSize) -> dict[str, str]:
    """Return name -> MDS encoding."""
    columns = family.columns("moments", size, stored_text=True)
    arrays = {name: array_encoding(column.stored_dtype, column.shape) for name, column in columns.items()}
    return {"key": "str", **arrays, **({TIMESTEP_COLUMN: "int"} if fields.has_timestep else {})}


def flux_facts(preset: str, size: ImageSize, empty: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return what dataset.json says of such a dataset. `empty`: states of the empty text; {}: it has none."""
    return {
        "family": "flux",
        "preset": preset,
        "variant": "mlperf",
        "image_size": list(size),
        "normalize": "symmetric",
        "encoders": {"vae": None, "text": None, "t5": None},  # the samples do not say; schnell's, by the reference
        "precision": "bf16",
        "store_text": True,
        **({EMPTY_DIGEST: digest_empty_text(serialize_empty_text(empty))} if empty else {}),
    }


def flux_row(sample: Sample, shapes: Mapping[str, tuple[int, ...]], has_timestep: bool) -> dict[str, Any]:
    """Check one sample and return its row of the dataset `moments`. Raises SampleError: it is unusable."""
    check_key(sample.key)
    arrays = {name: bfloat16_to_float16(_content(sample, name), shape, name) for name, shape in shapes.items()}
    row: dict[str, Any] = {"key": sample.key, "moments": np.concatenate([arrays["mean"], arrays["logvar"]])}
    if has_timestep:
        row[TIMESTEP_COLUMN] = check_timestep(sample.part(TIMESTEP_COLUMN))
    return row | {state: arrays[name] for state, name in FLUX_STATES.items()}


def bfloat16_to_float16(content: bytes, shape: Sequence[int], what: str) -> np.ndarray:
    """Return an .npy file's bits of bfloat16 as float16 numbers. Raises SampleError: some are not finite there."""
    bits = parse_npy(content, shape, what, "uint16")
    values = (bits.astype(np.uint32) << 16).view(np.float32)  # a bfloat16 is the upper half of a float32
    if not np.isfinite(values).all():
        raise SampleError(f"{what} are not finite")
    with np.errstate(over="ignore", under="ignore"):
        rounded = values.astype(np.float16)
    if not np.isfinite(rounded).all():
        raise SampleError(f"{what} have numbers beyond 65,504, the largest one of float16")
    return rounded


def _content(sample: Sample, name: str) -> bytes:
    content = sample.part(name)
    if content is None:
        raise SampleError(f"missing {name}")
    if not isinstance(content, bytes):
        raise SampleError(f"{name} are not the bytes of an .npy file")
    return content


def read_empty_text(folder: str, family: Family) -> dict[str, np.ndarray]:
    """Return the empty text's states, float16: name -> (L, D) or (P,).

    Raises:
        ValueError: a file is not there, or has another type or shape.
    """
    columns, states_by_name = family.columns("moments", (256, 256), stored_text=True), {}
    for state, name in EMPTY_FILES.items():
        path = Path(folder, name)
        try:
            content = path.read_bytes()
            [values] = parse_npy(content, (1, *columns[state].shape), "its numbers", "float16")
            check_finite("its numbers", values)
        except OSError as error:
            problem = f"{path} cannot be read: {error.strerror}"
            raise ValueError(f"empty: {problem}. Give the folder with {', '.join(EMPTY_FILES.values())}.") from error
        except SampleError as error:
            raise ValueError(f"empty: {path}: {error}. Give the file that MLPerf's reference publishes.") from error
        states_by_name[state] = np.ascontiguousarray(values)
    return states_by_name
