"""The dataset `moments` in batches: each column one array, filled row by row from the bytes of its shards.

Where an image has several captions, the tokens of the drawn one are made here, in one call for the batch.
"""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from common.value_types import ImageSize
from mds.adopted import decode_captions
from mds.dataset import EMPTY_DIGEST, METADATA_FILE, Dataset, fetch_side_file, read_json, split_address
from mds.images import SampleError, clean_captions, crop_geometry
from mds.loader import BatchMemory
from mds.mixture import StreamConfig
from mds.reader import BadSample, BatchDataset
from mds.shard_file import ShardFile

FLIPPED_COLUMN = "moments_flipped"
"""The column with the moments of the mirrored image, which are not the mirrored moments."""
TIMESTEP_COLUMN, NUM_TIMESTEPS = "timestep", 8
"""The column with the time at which a validation by eighths sees the sample, from 0 to 7: MLPerf's FLUX.1 has it."""


class MomentsDataset(BatchDataset):
    """Batches of moments: {"moments": float16 (B, 2C, h, w), each text column: int64 (B, L), ..., "bad": [...]}.

    A sample with a value that is not finite is a broken one: in the loss it would look like too high a learning rate.

    Args:
        columns: of each stream, name -> (shape of one sample, numpy type as stored, numpy type of the batch).
        flip: each image is mirrored with probability 1/2; the dataset has the column FLIPPED_COLUMN.
        captions: of each stream, the column of its captions; None: the dataset's own.
        image_sizes: (width, height) of each stream's images, px; for a column `sizes` alone.
        tokenize: makes text columns of captions, where an image has several; None: the first one's are read as stored.
        arguments: keyword arguments of BatchDataset.
    """

    def __init__(
        self,
        *,
        columns: Sequence[Mapping[str, tuple[tuple[int, ...], str, str]]],
        captions: Sequence[str | None] | None = None,
        image_sizes: Sequence[ImageSize] = (),
        flip: bool = False,
        tokenize: Callable[[Sequence[str]], dict[str, Tensor]] | None = None,
        **arguments: Any,
    ):
        super().__init__(**arguments)
        self.columns = [dict(of_stream) for of_stream in columns]
        self.flip, self.tokenize, self.image_sizes = flip, tokenize, list(image_sizes)
        self.captions = captions if any(captions or ()) else None
        self.memory = BatchMemory()

    def read_batch(self, sample_ids: np.ndarray) -> dict[str, Any]:
        """Fill one array a column, shard by shard, each row at its place in the batch."""
        columns = self.columns[self.stream_of(int(sample_ids[0]))]  # a batch has one shape
        shapes = {name: (len(sample_ids), *shape) for name, (shape, *_) in columns.items()}
        columns_of_batch, receipt = self.memory.allocate_columns(
            {name: (shapes[name], getattr(torch, last)) for name, (*_, last) in columns.items()}
        )
        batch = {
            name: columns_of_batch[name].numpy() if stored == last else np.empty(shapes[name], stored)
            for name, (_, stored, last) in columns.items()
        }
        captions, broken = self._fill(batch, sample_ids)
        bad: list[BadSample] = []
        for row in sorted(broken):
            use = functools.partial(self._fill_one, {n: array[row : row + 1] for n, array in batch.items()})
            caption, bad_samples = self.read_first_good(int(sample_ids[row]), use)
            captions |= {} if caption is None else {row: caption}
            bad += bad_samples
        self._put_tokens(captions, batch)
        for name, (_, stored, last) in columns.items():
            if stored != last:
                columns_of_batch[name].numpy()[...] = batch[name]
        return {**columns_of_batch, "bad": bad, **receipt}

    def _fill_one(self, batch: Mapping[str, np.ndarray], sample_id: int) -> str | None:
        """Fill a batch of one sample; return its drawn caption. Raises SampleError: it cannot be used."""
        captions, broken = self._fill(batch, np.array([sample_id]))
        if broken:
            raise SampleError(broken[0])
        return captions.get(0)

    def _fill(self, batch: Mapping[str, np.ndarray], sample_ids: np.ndarray) -> tuple[dict[int, str], dict[int, str]]:
        """Read each sample to its place; return place -> drawn caption, of several, and place -> what is wrong."""
        shard_ids, rows = self.cache.locate(sample_ids)
        is_flipped = np.zeros(len(sample_ids), np.int64)
        if self.flip:
            is_flipped[:] = [self.draw(int(sample_id)).is_flipped for sample_id in sample_ids]
        buffers = {
            name: list(map(memoryview, array.reshape(len(array), -1).view(np.uint8))) for name, array in batch.items()
        }
        captions: dict[int, str] = {}
        broken: dict[int, str] = {}
        groups = 2 * shard_ids + is_flipped  # what is read together: rows of a shard, of the same columns
        order = np.argsort(groups, kind="stable")
        groups, ends = groups[order], np.flatnonzero(np.diff(groups[order])) + 1
        all_batch_rows, all_rows = order.tolist(), rows[order].tolist()
        # A batch may have nearly as many groups as samples: from here on in Python's own numbers, the cheapest one by one.
        for begin, end in itertools.pairwise([0, *ends.tolist(), len(order)]):
            shard_id, flips_group = divmod(groups.item(begin), 2)
            moments, batch_rows = FLIPPED_COLUMN if flips_group else "moments", all_batch_rows[begin:end]
            buffers_by_column = {
                moments if n == "moments" else n: [of[row] for row in batch_rows] for n, of in buffers.items()
            }
            read = functools.partial(self._read, shard_id, all_rows[begin:end], buffers_by_column)
            for row, row_captions in zip(batch_rows, self.read_here(shard_id, read), strict=True):
                try:
                    if row_captions is not None:
                        captions[row] = self.draw(int(sample_ids[row])).choose_caption(clean_captions(row_captions))
                except SampleError as error:
                    broken[row] = str(error)
        self.cache.touch(shard_ids)
        if self.flip and "sizes" in batch:
            size = self.image_sizes[self.stream_of(int(sample_ids[0]))]
            _mirror_sizes(batch["sizes"], np.flatnonzero(is_flipped).tolist(), size)
        for name, array in reversed(batch.items()):
            broken |= dict.fromkeys(_find_non_finite(array), f"{name} are not finite")
        return {row: caption for row, caption in captions.items() if row not in broken}, broken

    def _read(self, shard_id: int, rows: Sequence[int], into: Mapping[str, Sequence[memoryview]]) -> list[Any]:
        """Read rows of a shard that is here; return the captions of each, None where stored tokens are of its only one."""
        shard, stream = self.shards[shard_id], int(self.cache.stream_per_shard[shard_id])
        named = None if self.captions is None else self.captions[stream]
        column = named or ("captions" if self.tokenize and "captions" in shard.column_names else None)
        with ShardFile(shard) as file:
            rows_read = file.read_into(rows, into, [column] if column else [])
        if column is None:
            return [None] * len(rows)
        encoding = shard.column_encodings[shard.column_names.index(column)]
        contents = [columns[column] for columns in rows_read]
        return [decode_captions(encoding, text) if named else json.loads(text) or None for text in contents]

    def _put_tokens(self, captions: Mapping[int, str], batch: Mapping[str, np.ndarray]) -> None:
        """Replace the stored tokens by those of the drawn captions, by place."""
        if captions:
            assert self.tokenize is not None
            for name, tokens in self.tokenize(list(captions.values())).items():
                batch[name][list(captions)] = tokens.numpy()


def moments_problems(
    dataset: Dataset, *, flip: bool, crop: str, text: str, fps: float | None = None
) -> list[tuple[str, str]]:
    """Return (key, message) for what a run wants to read of a dataset of moments but was not stored; see data.DataConfig."""
    problems, where, make = [], f"the dataset at {dataset.location}", "python -m prepare.latents IN OUT"
    if flip and FLIPPED_COLUMN not in dataset.columns:
        problem = f"true, but {where} has no moments of mirrored images"
        problems.append(
            ("data.flip", f"{problem}. Make it with {make} flip=true, read a dataset of images, or leave it out.")
        )
    if crop == "random":
        problem = f"random, but the images of {where} were cropped before they were encoded"
        problems.append(("data.crop", f"{problem}. Read a dataset of images, or leave it out."))
    if fps is not None and dataset.metadata.get("fps") != fps:
        made = dataset.metadata.get("fps")
        problem = (
            f"{fps:g}, but the clips of {where} were made {f'at {made:g}' if made else 'at the rates of their videos'}"
        )
        problems.append(("data.fps", f"{problem}. Make it with {make} fps={fps:g}, or leave it out."))
    if text == "encoded" and "text" in dataset.columns and "tokens" not in dataset.columns:
        problem = f"encoded, but {where} has text states and no tokens"
        problems.append(("data.text", f"{problem}. Use data.text=stored."))
    if text == "stored" and ("text" not in dataset.columns or "captions" in dataset.columns):
        has = "text states of the first of several captions alone" if "text" in dataset.columns else "no text states"
        problem = f"stored, but {where} has {has}"
        problems.append(("data.text", f"{problem}. Make it with {make} store_text=true, or use data.text=encoded."))
    return problems


def _mirror_sizes(sizes: np.ndarray, rows: Sequence[int], size: ImageSize) -> None:
    """Replace the sizes of mirrored images, as `crop_geometry` gives them; stored are those of the images themselves.

    Args:
        sizes: (B, 4), height, width, top, left.
        rows: in the batch, of the mirrored images.
        size: (width, height) of the images in the batch, px.
    """
    for row in rows:
        height, width = sizes[row, :2].tolist()
        sizes[row] = crop_geometry((width, height), size, flipped=True)


def _find_non_finite(values: np.ndarray) -> list[int]:  # (B, ...) -> places in the batch
    # numpy widens each float16 by itself, which takes longer than reading it: the exponent of inf and nan is all ones,
    # and with the sign bit set they are the greatest numbers without one.
    if values.dtype == np.float16 and values.view(np.int16).max() < 0x7C00 and values.view(np.uint16).max() < 0xFC00:
        return []
    is_float = values.dtype.kind == "f"
    return np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1)).tolist() if is_float else []


# --- the empty text's states ---
#
#     empty_text.safetensors    a float16 tensor for each column of text states, of the shape of one sample
#
# dataset.json has the file's digest (`empty_text_xxh64`). From a dataset without it, a run encodes the empty text by
# itself.

EMPTY_FILE = "empty_text.safetensors"


def serialize_empty_text(states: Mapping[str, np.ndarray]) -> bytes:
    """Return the file's content, the same bytes for the same states."""
    from safetensors.numpy import save

    return save(dict(states))


def digest_empty_text(content: bytes) -> str:
    """Return a file's digest, as dataset.json has it."""
    return xxhash.xxh64(content).hexdigest()


def has_empty_text(source: StreamConfig) -> bool:
    """Say whether a dataset has the empty text's states; reads dataset.json alone. Raises ValueError: it cannot be read."""
    if "dataset" in vars(source):  # it was read
        return EMPTY_DIGEST in source.dataset.metadata
    metadata_address = source.metadata or f"{(source.location or '').rstrip('/')}/{METADATA_FILE}"
    return EMPTY_DIGEST in read_json(*split_address(metadata_address))[1]


def read_empty_text(dataset: Dataset) -> dict[str, Tensor]:
    """Return the empty text's states, float16 (1, ...) each. Raises ValueError: they are not there, or damaged."""
    from safetensors.torch import load

    with tempfile.TemporaryDirectory() as folder:
        content = fetch_side_file(dataset, EMPTY_FILE, dataset.metadata[EMPTY_DIGEST], folder).read_bytes()
    return {name: states[None] for name, states in load(content).items()}
