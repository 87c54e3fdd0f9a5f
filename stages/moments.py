"""The stage `moments` in batches: each column one array, filled row by row from the bytes of its shards.

Where a picture has several captions, the tokens of the drawn one are made here, in one call for the batch.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cli.limits import ImageSize
from stages.adopted import texts_of
from stages.batch_memory import BatchMemory
from stages.dataset import Stage
from stages.images import SampleError, shown_part, usable_captions
from stages.machine import ShardState
from stages.shard_file import ShardError, ShardFile
from stages.stream import Bad, BatchStream

LOCAL = int(ShardState.LOCAL)
FLIPPED = "moments_flipped"
"""The column with the moments of the mirrored picture; a VAE gives others than its moments mirrored."""
TIMESTEP, NUM_TIMESTEPS = "timestep", 8
"""The column with the time at which a validation by eighths sees the sample, from 0 to 7: MLPerf's FLUX.1 has it."""


class MomentsStream(BatchStream):
    """Batches of moments: {"moments": float16 (B, 2C, h, w), each text column: int64 (B, L), ..., "bad": [...]}.

    A sample with a value that is not finite is a broken one: in the loss it would look like too high a learning rate.

    Args:
        columns: of each stream, name -> (shape of one sample, numpy type as stored, numpy type of the batch).
        flip: each picture is mirrored with probability 1/2; the stage has the column FLIPPED.
        captions: of each stream, the column of its captions; None: the stage's own.
        image_sizes: (width, height) of each stream's pictures, px; for a column `sizes` alone.
        tokenize: makes text columns of captions, where a picture has several; None: the first one's are read as stored.
        arguments: keyword arguments of StreamingDataset.
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
        given, receipt = self.memory.take_columns(
            {name: (shapes[name], getattr(torch, last)) for name, (*_, last) in columns.items()}
        )
        batch = {
            name: given[name].numpy() if stored == last else np.empty(shapes[name], stored)
            for name, (_, stored, last) in columns.items()
        }
        captions, broken = self._fill(batch, sample_ids)
        bad: list[Bad] = []
        for place in sorted(broken):
            use = functools.partial(self._fill_one, {n: array[place : place + 1] for n, array in batch.items()})
            caption, passed_over = self.first_good(int(sample_ids[place]), use)
            captions |= {} if caption is None else {place: caption}
            bad += passed_over
        self._put_tokens(captions, batch)
        for name, (_, stored, last) in columns.items():
            if stored != last:
                given[name].numpy()[...] = batch[name]
        return {**given, "bad": bad, **receipt}

    def _fill_one(self, batch: Mapping[str, np.ndarray], sample_id: int) -> str | None:
        """Fill a batch of one sample; return its drawn caption. Raises SampleError: it cannot be used."""
        captions, broken = self._fill(batch, np.array([sample_id]))
        if broken:
            raise SampleError(broken[0])
        return captions.get(0)

    def _fill(self, batch: Mapping[str, np.ndarray], sample_ids: np.ndarray) -> tuple[dict[int, str], dict[int, str]]:
        """Read each sample to its place; return place -> drawn caption, of several, and place -> what is wrong."""
        shard_ids, rows = self.places_of(sample_ids)
        is_flipped = np.zeros(len(sample_ids), np.int64)
        if self.flip:
            is_flipped[:] = [self.draw(int(sample_id)).is_flipped for sample_id in sample_ids]
        buffers = {name: list(array.reshape(len(array), -1).view(np.uint8)) for name, array in batch.items()}
        captions: dict[int, str] = {}
        broken: dict[int, str] = {}
        groups = 2 * shard_ids + is_flipped  # what is read together: rows of a shard, of the same columns
        order = np.argsort(groups, kind="stable")
        groups, ends = groups[order], np.flatnonzero(np.diff(groups[order])) + 1
        all_places, all_rows, states = order.tolist(), rows[order].tolist(), self._shard_states.numpy()
        # A batch may have nearly as many groups as samples: from here on in Python's own numbers, the cheapest one by one.
        for begin, end in itertools.pairwise([0, *ends.tolist(), len(order)]):
            shard_id, is_other = divmod(groups.item(begin), 2)
            moments, places = FLIPPED if is_other else "moments", all_places[begin:end]
            into = {moments if n == "moments" else n: [of[place] for place in places] for n, of in buffers.items()}
            if states.item(shard_id) != LOCAL:
                self.open_shard(shard_id)
            for place, given in zip(places, self._read(shard_id, all_rows[begin:end], into), strict=True):
                try:
                    if given is not None:
                        captions[place] = self.draw(int(sample_ids[place])).one_of(usable_captions(given))
                except SampleError as error:
                    broken[place] = str(error)
        self._shard_access_times.numpy()[shard_ids] = time.time_ns()
        if self.flip and "sizes" in batch:
            size = self.image_sizes[self.stream_of(int(sample_ids[0]))]
            _mirror(batch["sizes"], np.flatnonzero(is_flipped).tolist(), size)
        for name, array in reversed(batch.items()):
            broken |= dict.fromkeys(_not_finite(array), f"{name} are not finite")
        return {place: caption for place, caption in captions.items() if place not in broken}, broken

    def _read(self, shard_id: int, rows: Sequence[int], into: Mapping[str, Sequence[Any]], retry: int = 7) -> list[Any]:
        """Read rows of a shard that is here, fetching it where it was put out of the cache; return their `_captions`."""
        for _ in range(1 + retry):
            try:
                with ShardFile(self.shards[shard_id]) as shard:
                    captions = []
                    for at, columns in enumerate(shard.read(rows)):
                        for name, buffers in into.items():
                            memoryview(buffers[at])[:] = columns[name]
                        captions.append(self._captions(shard_id, columns))
                return captions
            except FileNotFoundError:
                self.prepare_shard(shard_id)
                self.open_shard(shard_id)
        raise ShardError(f"data: {self.shards[shard_id].raw_data.basename} cannot be kept: a larger data.cache_limit?")

    def _captions(self, shard_id: int, columns: Mapping[str, memoryview]) -> Any:
        """Return the captions of a row; None where its stored tokens are those of its only one."""
        column = None if self.captions is None else self.captions[int(self.stream_per_shard[shard_id])]
        if column is not None:
            reader = self.shards[shard_id]
            return texts_of(reader.column_encodings[reader.column_names.index(column)], bytes(columns[column]))
        return json.loads(bytes(columns["captions"])) or None if self.tokenize and "captions" in columns else None

    def _put_tokens(self, captions: Mapping[int, str], batch: Mapping[str, np.ndarray]) -> None:
        """Replace the stored tokens by those of the drawn captions, by place."""
        if captions:
            assert self.tokenize is not None
            for name, tokens in self.tokenize(list(captions.values())).items():
                batch[name][list(captions)] = tokens.numpy()


def reading_problems(
    stage: Stage, *, flip: bool, crop: str, text: str, fps: float | None = None
) -> list[tuple[str, str]]:
    """Return (key, message) for what a run wants to read of a stage of moments but was not stored; see data.DataConfig."""
    found, where, make = [], f"the stage at {stage.location}", "python -m prepare.latents IN OUT"
    if flip and FLIPPED not in stage.columns:
        given = f"true, but {where} has no moments of mirrored pictures"
        found.append(("data.flip", f"{given}. Make it with {make} flip=true, read a stage of images, or leave it out."))
    if crop == "random":
        given = f"random, but the pictures of {where} were cut before they were encoded"
        found.append(("data.crop", f"{given}. Read a stage of images, or leave it out."))
    if fps is not None and stage.facts.get("fps") != fps:
        made = stage.facts.get("fps")
        given = (
            f"{fps:g}, but the clips of {where} were made {f'at {made:g}' if made else 'at the rates of their films'}"
        )
        found.append(("data.fps", f"{given}. Make it with {make} fps={fps:g}, or leave it out."))
    if text == "encoded" and "text" in stage.columns and "tokens" not in stage.columns:
        given = f"encoded, but {where} has text states and no tokens"
        found.append(("data.text", f"{given}. Use data.text=stored."))
    if text == "stored" and ("text" not in stage.columns or "captions" in stage.columns):
        has = "text states of the first of several captions alone" if "text" in stage.columns else "no text states"
        given = f"stored, but {where} has {has}"
        found.append(("data.text", f"{given}. Make it with {make} store_text=true, or use data.text=encoded."))
    return found


def _mirror(sizes: np.ndarray, places: Sequence[int], size: ImageSize) -> None:
    """Replace the sizes of mirrored pictures, as `shown_part` gives them; stored are those of the pictures themselves.

    Args:
        sizes: (B, 4), height, width, top, left.
        places: in the batch, of the mirrored pictures.
        size: (width, height) of the pictures in the batch, px.
    """
    for place in places:
        height, width = sizes[place, :2].tolist()
        sizes[place] = shown_part((width, height), size, flipped=True)


def _not_finite(values: np.ndarray) -> list[int]:  # (B, ...) -> places in the batch
    # numpy widens each float16 by itself, which takes longer than reading it: the exponent of inf and nan is all ones,
    # and with the sign bit set they are the greatest numbers without one.
    if values.dtype == np.float16 and values.view(np.int16).max() < 0x7C00 and values.view(np.uint16).max() < 0xFC00:
        return []
    is_float = values.dtype.kind == "f"
    return np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1)).tolist() if is_float else []
