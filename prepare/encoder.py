"""Turn a shard of images or videos into the rows of a part: threads decode, the rank's device encodes, the order is kept.

Shapes: B batch, H W image height and width, px, C latent channels, h w height and width of the latent, L text tokens,
D text width. Of videos F frames and f latent frames: (B, 3, F, H, W) -> (B, 2C, f, h, w).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import dist
from common.errors import Failed
from common.value_types import ImageSize
from families import load_family
from families.encoders import ModelConfig, build_encoders
from mds.images import SampleError, crop_geometry, decode_image, read_captions, resize_and_crop, size_of
from mds.moments import FLIPPED_COLUMN, TIMESTEP_COLUMN
from mds.shard_file import read_sample
from mds.shard_table import Shard
from mds.videos import read_clip
from model import AUTOCAST_DTYPES, normalize_images
from prepare.moment_rows import check_finite, check_timestep, to_float16, tokenize_captions
from prepare.parts import Part
from training.trainer import check_gpus


@dataclass(frozen=True)
class DecodedSample:
    """One sample of IN; `problem` says why it is unusable."""

    key: str
    captions: Sequence[str] = ()
    image: Tensor | None = None
    """(3, H, W), of the family's type, or (3, F, H, W)."""
    sizes: tuple[int, ...] = ()
    """See `mds.images.crop_geometry`."""
    metadata: Any = None
    problem: str | None = None


def decode_row(shard: Shard, size: ImageSize, dtype: torch.dtype, rate: float | None, row: int) -> DecodedSample:
    """Read, decode, resize and crop one sample, of a video the clip in its middle; in a thread.

    Args:
        rate: frames a second of clips, see `mds.videos.read_clip`.
    """
    try:
        sample = read_sample(shard, row)
    except OSError as error:
        raise Failed(f"IN: {shard.name} cannot be read: {error}. The same command resumes it.") from error
    key, metadata = str(sample["key"]), sample.get("metadata")
    sizes: tuple[int, ...] = ()
    try:
        captions = read_captions(sample)
        if len(size) > 2:
            image = read_clip(sample, size, rate=rate).permute(3, 0, 1, 2)
        else:
            pixels = decode_image(sample["jpg"])
            image, sizes = resize_and_crop(pixels, size, dtype), crop_geometry(size_of(pixels), size)
    except SampleError as error:
        return DecodedSample(key, problem=str(error))
    return DecodedSample(key, captions, image, sizes, metadata)


class Encoder:
    """Fills parts: the frozen encoders on this rank's device.

    Args:
        config: which encoders.
        size: (width, height) of the images, px; of videos (width, height, frames).
        normalize: "symmetric" or "unit", see `model.normalize_images`.
        precision: fp32, tf32 or bf16.
        batch_size: images per call of the VAE.
        store_text: whether rows contain the text states.
        tiling: the VAE encodes an image in overlapping tiles.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        size: ImageSize,
        normalize: str,
        precision: str,
        batch_size: int,
        store_text: bool,
        tiling: bool = False,
    ):
        self.size = size
        self.batch_size = batch_size
        self.store_text = store_text
        self.normalize = normalize
        self.device = configure_device(precision)
        if config.frozen_device == "cpu":
            self.device = torch.device("cpu")
        self.family = load_family(config.family, config.preset, config.variant)
        self.image_dtype = self.family.columns(self.family.media, size)[self.family.media].dtype
        self.encoders = build_encoders(self.family, config.weights, config.vae_precision)
        if tiling:
            self.encoders.modules["vae"].enable_tiling()
        self.empty_text = self.family.tokenize([""])
        self.encoders.to(self.device, AUTOCAST_DTYPES.get(precision, torch.float32))

    def encode_text_states(self, tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """# (B, L) tokens by column -> (B, L, D) by state; empty if they are not stored."""
        if not self.store_text:
            return {}
        on_device = {name: column.to(self.device) for name, column in tokens.items()}
        with torch.no_grad():
            return self.family.encode_text(self.encoders.modules, on_device)

    def encode_empty_text(self) -> dict[str, np.ndarray]:
        """Return what a run drops captions to, float16 (L, D) or (P,) by state; {}: it needs none, or they are not stored."""
        states = {} if self.family.has_zero_empty_condition else self.encode_text_states(self.empty_text)
        return {name: np.ascontiguousarray(to_float16(of_empty)[0]) for name, of_empty in states.items()}

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> dict[str, np.ndarray]:
        """# (B, 3, H, W), of the family's type -> "moments", float16 (B, 2C, h, w): mean | logvar, unscaled.

        Also the columns that `Family.encode_image_columns` makes.
        """
        modules, normalized = self.encoders.modules, normalize_images(images.to(self.device), self.normalize)
        columns = {"moments": self.family.encode_images(modules, normalized)}
        columns |= self.family.encode_image_columns(modules, normalized)
        return {name: to_float16(values) for name, values in columns.items()}

    def fill(
        self, part: Part, samples: Iterator[DecodedSample], columns: Collection[str], done: Callable[[int], Any]
    ) -> None:
        """Write one shard's samples to a part, `batch_size` of the usable ones at a time.

        Args:
            columns: of the part.
            done: called with the number of samples read.
        """
        usable = self._usable(part, samples, done)
        while batch := list(itertools.islice(usable, self.batch_size)):
            images = torch.stack([sample.image for sample in batch])
            values = self.encode_images(images)
            values |= (
                {FLIPPED_COLUMN: self.encode_images(images.flip(-1))["moments"]} if FLIPPED_COLUMN in columns else {}
            )
            of_vae = list(values)
            values |= (tokens := tokenize_captions(self.family, [sample.captions[0] for sample in batch]))
            states = self.encode_text_states(
                {k: torch.from_numpy(column.astype(np.int64)) for k, column in tokens.items()}
            )
            values |= {name: to_float16(column) for name, column in states.items()}
            for number, sample in enumerate(batch):
                row = {name: column[number] for name, column in values.items()}
                try:
                    for name in of_vae:
                        check_finite("moments" if name == FLIPPED_COLUMN else name, row[name])
                    for name in states:
                        check_finite(f"{name} states", row[name])
                    if TIMESTEP_COLUMN in columns:
                        row[TIMESTEP_COLUMN] = check_timestep(
                            sample.metadata.get(TIMESTEP_COLUMN) if isinstance(sample.metadata, dict) else None
                        )
                except SampleError as error:
                    part.skip(sample.key, str(error))
                    continue
                row |= {"caption": sample.captions[0], "captions": sample.captions}
                row |= {"key": sample.key, "metadata": sample.metadata, "sizes": np.array(sample.sizes, np.uint16)}
                part.write({name: row[name] for name in columns})

    @staticmethod
    def _usable(part: Part, samples: Iterator[DecodedSample], done: Callable[[int], Any]) -> Iterator[DecodedSample]:
        for sample in samples:
            part.read()
            done(1)
            if sample.problem is None:
                yield sample
            else:
                part.skip(sample.key, sample.problem)


def configure_device(precision: str) -> torch.device:
    """Return this rank's device, with TF32 off; the host computes with one thread.

    On a CPU, the number of threads changes the last bits of the VAE's convolutions; with one thread all ranks give the same
    bytes. On a GPU machine, each decoding thread would otherwise start as many threads as there are cores.

    Raises:
        ConfigError: a container wants GPUs and has none.
    """
    check_gpus()
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    return torch.device("cuda", dist.get_local_rank())
