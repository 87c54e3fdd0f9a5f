"""MLPerf's preprocessed samples of FLUX.1 become rows of the stage `moments` with text states: no encoder is run.

The reference publishes CC12M and COCO as tables of samples that its frozen encoders have seen, and the empty text's states
beside them (mlcommons/training, text_to_image; pytorch/torchtitan at 0e138118, experiments/flux: preprocess_flux_dataset.py
writes them, flux_dataset.py reads them). Arrays are bytes of .npy files of uint16, which are the bits of bfloat16:

    mean, logvar        (16, 32, 32) each: of the VAE's posterior, unscaled, of a picture of 256 px in [-1, 1]
    t5_encodings        (256, 4096)
    clip_encodings      (768,)
    __key__             text
    timestep            whole number n: the sample is validated at the time n / 8; of the validation set alone

    t5_empty.npy (1, 256, 4096), clip_empty.npy (1, 768): float16

A bfloat16 has 8 significant bits, a float16 11: what is stored is the same number, but for those below 2**-14 in size, which
are rounded to multiples of 2**-24, and those above 65,504, which are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cli.limits import ImageSize
from prepare.moments import check_finite, check_timestep, npy_values
from prepare.samples import Sample, Taken, check_key
from stages.dataset import array_encoding
from stages.empty_text import EMPTY_DIGEST, as_bytes, digest_of
from stages.images import SampleError
from stages.moments import TIMESTEP
from zoo import load_family
from zoo.spec import Family

ARRAYS = ("mean", "logvar", "t5_encodings", "clip_encodings")
KEY = "__key__"
STATES = {"text": "t5_encodings", "pooled": "clip_encodings"}
"""A column of text states -> the array that it is made of."""
EMPTY_FILES = {"text": "t5_empty.npy", "pooled": "clip_empty.npy"}
PRESETS = ("full", "tiny")


@dataclass(frozen=True)
class Encodings(Taken):
    """What is read of such a table, in place of an image and captions."""

    image: str = "mean"
    captions: tuple[str, ...] = ()
    key: str | None = KEY
    has_timestep: bool = False

    def __str__(self) -> str:
        return f"moments and text states from {', '.join(ARRAYS)}, key from {KEY}"

    @property
    def names(self) -> tuple[str, ...]:
        return (*ARRAYS, KEY, *([TIMESTEP] if self.has_timestep else []))


def find_encodings(samples: Sequence[Sample], where: str) -> Encodings | None:
    """Return what is read of such samples; None: they are of another kind.

    Args:
        samples: the first ones of the source `where`.

    Raises:
        ValueError: some columns of such samples are there, others are not.
    """
    names = {name for sample in samples for name in sample.files}
    missing = [name for name in (*ARRAYS, KEY) if name not in names]
    if not set(STATES.values()) & names:
        return None
    if missing:
        wanted = ", ".join((*ARRAYS, KEY))
        raise ValueError(f"{where} has no column {', '.join(missing)}. MLPerf's preprocessed samples have {wanted}.")
    return Encodings(has_timestep=TIMESTEP in names)


def find_family(samples: Sequence[Sample], where: str) -> tuple[str, ImageSize]:
    """Return the preset and the images' size, px, by the arrays of the first sample that can be read.

    Raises:
        ValueError: there is none, or its arrays are of no preset.
    """
    problem = "has no sample"
    for sample in samples:
        try:
            shapes = {name: npy_values(_content(sample, name), None, name, "uint16").shape for name in ARRAYS}
        except SampleError as error:
            problem = f"has no sample that can be read: {error}"
            continue
        for preset in PRESETS:
            family = load_family("flux", preset, "mlperf")
            scale, mean = family.pixels_per_latent, shapes["mean"]
            size = (mean[-1] * scale, mean[-2] * scale) if len(mean) > 1 else (0, 0)
            if family.size_problem(size) is None and shapes == shapes_of(family, size):
                return preset, size
        problem = f"has arrays of other shapes than FLUX.1's: {', '.join(f'{n} {s}' for n, s in shapes.items())}"
    raise ValueError(f"{where} {problem}. Possible: as MLPerf's reference preprocesses its samples.")


def shapes_of(family: Family, size: ImageSize) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a sample's arrays."""
    latent, columns = family.latent_shape(size), family.columns("moments", size, stored_text=True)
    return {"mean": latent, "logvar": latent, **{name: columns[state].shape for state, name in STATES.items()}}


def mds_columns_of(taken: Encodings, family: Family, size: ImageSize) -> dict[str, str]:
    """Return name -> MDS encoding."""
    columns = family.columns("moments", size, stored_text=True)
    arrays = {name: array_encoding(column.stored, column.shape) for name, column in columns.items()}
    return {"key": "str", **arrays, **({TIMESTEP: "int"} if taken.has_timestep else {})}


def facts_of(preset: str, size: ImageSize, empty: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return what dataset.json says of such a stage. `empty`: states of the empty text; {}: it has none."""
    return {
        "family": "flux",
        "preset": preset,
        "variant": "mlperf",
        "image_size": list(size),
        "normalize": "symmetric",
        "encoders": {"vae": None, "text": None, "t5": None},  # the samples do not say; schnell's, by the reference
        "precision": "bf16",
        "store_text": True,
        **({EMPTY_DIGEST: digest_of(as_bytes(empty))} if empty else {}),
    }


def encodings_row(sample: Sample, shapes: Mapping[str, tuple[int, ...]], has_timestep: bool) -> dict[str, Any]:
    """Check one sample and return its row of the stage `moments`. Raises SampleError: it is unusable."""
    check_key(sample.key)
    arrays = {name: as_float16(_content(sample, name), shape, name) for name, shape in shapes.items()}
    row: dict[str, Any] = {"key": sample.key, "moments": np.concatenate([arrays["mean"], arrays["logvar"]])}
    if has_timestep:
        row[TIMESTEP] = check_timestep(sample.part(TIMESTEP))
    return row | {state: arrays[name] for state, name in STATES.items()}


def as_float16(content: bytes, shape: Sequence[int], what: str) -> np.ndarray:
    """Return an .npy file's bits of bfloat16 as float16 numbers. Raises SampleError: see the head of this file."""
    bits = npy_values(content, shape, what, "uint16")
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


def read_empty(folder: str, family: Family) -> dict[str, np.ndarray]:
    """Return the empty text's states, float16: name -> (L, D) or (P,).

    Raises:
        ValueError: a file is not there, or has another type or shape.
    """
    columns, found = family.columns("moments", (256, 256), stored_text=True), {}
    for state, name in EMPTY_FILES.items():
        path = Path(folder, name)
        try:
            content = path.read_bytes()
            [values] = npy_values(content, (1, *columns[state].shape), "its numbers", "float16")
            check_finite("its numbers", values)
        except OSError as error:
            given = f"{path} cannot be read: {error.strerror}"
            raise ValueError(f"empty: {given}. Give the folder with {', '.join(EMPTY_FILES.values())}.") from error
        except SampleError as error:
            raise ValueError(f"empty: {path}: {error}. Give the file that MLPerf's reference publishes.") from error
        found[state] = np.ascontiguousarray(values)
    return found
