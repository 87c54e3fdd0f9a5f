"""The stage `moments` in batches: each column one array, filled row by row from the bytes of its shards.

Where a picture has several captions, the tokens of the drawn one are made here, in one call for the batch.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.adopted import texts_of
from stages.dataset import Stage
from stages.images import SampleError, usable_captions
from stages.shard_file import ShardError, ShardFile
from stages.stream import Bad, BatchStream

FLIPPED = "moments_flipped"
"""The column with the moments of the mirrored picture; a VAE gives others than its moments mirrored."""


class MomentsStream(BatchStream):
    """Batches of moments: {"moments": float16 (B, 2C, h, w), each text column: int64 (B, L), ..., "bad": [...]}.

    A sample with a value that is not finite is a broken one: in the loss it would look like too high a learning rate.

    Args:
        columns: of each stream, name -> (shape of one sample, numpy type as stored, numpy type of the batch).
        flip: each picture is mirrored with probability 1/2; the stage has the column FLIPPED.
        captions: of each stream, the column of its captions; None: the stage's own.
        tokenize: makes text columns of captions, where a picture has several; None: the first one's are read as stored.
        arguments: keyword arguments of StreamingDataset.
    """

    def __init__(
        self,
        *,
        columns: Sequence[Mapping[str, tuple[tuple[int, ...], str, str]]],
        captions: Sequence[str | None] | None = None,
        flip: bool = False,
        tokenize: Callable[[Sequence[str]], dict[str, Tensor]] | None = None,
        **arguments: Any,
    ):
        super().__init__(**arguments)
        self.columns = [dict(of_stream) for of_stream in columns]
        self.flip, self.tokenize = flip, tokenize
        self.captions = captions if any(captions or ()) else None
        self._files: dict[int, ShardFile] = {}

    def read_batch(self, sample_ids: np.ndarray) -> dict[str, Any]:
        """Fill one array a column, shard by shard, each row at its place in the batch."""
        sample_ids = np.asarray(sample_ids).tolist()
        columns = self.columns[self.stream_of(sample_ids[0])]  # a batch has one shape
        batch = {n: np.empty((len(sample_ids), *shape), stored) for n, (shape, stored, _) in columns.items()}
        places: dict[int, list[tuple[int, int]]] = {}
        captions: dict[int, str | None] = {}
        bad: list[Bad] = []
        for place, sample_id in enumerate(sample_ids):
            shard_id, row = self.spanner[sample_id]
            places.setdefault(shard_id, []).append((place, row))
        for shard_id, wanted in places.items():
            rows = self._rows(shard_id, [row for _, row in wanted])
            for (place, _), found in zip(wanted, rows, strict=True):
                try:
                    captions[place] = self._put(found, batch, place, sample_ids[place])
                except SampleError:
                    use = functools.partial(self._put_sample, batch, place)
                    captions[place], passed_over = self.first_good(sample_ids[place], use)
                    bad += passed_over
        self._put_tokens({place: caption for place, caption in captions.items() if caption is not None}, batch)
        tensors = {n: torch.from_numpy(batch[n].astype(last, copy=False)) for n, (*_, last) in columns.items()}
        return {**tensors, "bad": bad}

    def _put_sample(self, batch: Mapping[str, np.ndarray], place: int, sample_id: int) -> str | None:
        shard_id, row = self.spanner[sample_id]
        return self._put(self._rows(shard_id, [row])[0], batch, place, sample_id)

    def _put(
        self, found: Mapping[str, memoryview], batch: Mapping[str, np.ndarray], place: int, sample_id: int
    ) -> str | None:
        """Copy a row to its place; return the drawn caption, where there are several.

        Raises:
            SampleError: it has a value that is not finite, or no usable caption.
        """
        is_flipped = self.flip and self.draw(sample_id).is_flipped
        for name, array in batch.items():
            values = np.frombuffer(found[FLIPPED if is_flipped and name == "moments" else name], array.dtype)
            if array.dtype.kind == "f" and not _is_finite(values):
                raise SampleError(f"{name} are not finite")
            array[place] = values.reshape(array.shape[1:])
        column = None if self.captions is None else self.captions[self.stream_of(sample_id)]
        if column is not None:
            shard = self.shards[self.spanner[sample_id][0]]
            encoding = shard.column_encodings[shard.column_names.index(column)]
            return self.draw(sample_id).one_of(usable_captions(texts_of(encoding, bytes(found[column]))))
        captions = json.loads(bytes(found["captions"])) if self.tokenize and "captions" in found else None
        return self.draw(sample_id).one_of(usable_captions(captions)) if captions else None

    def _put_tokens(self, captions: Mapping[int, str], batch: Mapping[str, np.ndarray]) -> None:
        """Replace the stored tokens by those of the drawn captions, by place."""
        if captions:
            assert self.tokenize is not None
            for name, tokens in self.tokenize(list(captions.values())).items():
                batch[name][list(captions)] = tokens.numpy()

    def _rows(self, shard_id: int, rows: Sequence[int], retry: int = 7) -> list[dict[str, memoryview]]:
        """Read rows of a shard, fetching it where it is missing or was put out of the cache."""
        for _ in range(1 + retry):
            try:
                self.open_shard(shard_id)
                if shard_id not in self._files:
                    self._files[shard_id] = ShardFile(self.shards[shard_id])
                self._shard_access_times[shard_id] = time.time_ns()
                return self._files[shard_id].read(rows)
            except FileNotFoundError:
                self.prepare_shard(shard_id)
        raise ShardError(f"data: {self.shards[shard_id].raw_data.basename} cannot be kept: a larger data.cache_limit?")


def reading_problems(stage: Stage, *, flip: bool, crop: str, text: str) -> list[tuple[str, str]]:
    """Return (key, message) for what a run wants to read of a stage of moments but was not stored; see data.DataConfig."""
    found, where, make = [], f"the stage at {stage.location}", "python -m prepare.latents IN OUT"
    if flip and FLIPPED not in stage.columns:
        given = f"true, but {where} has no moments of mirrored pictures"
        found.append(("data.flip", f"{given}. Make it with {make} flip=true, read a stage of images, or leave it out."))
    if crop == "random":
        given = f"random, but the pictures of {where} were cut before they were encoded"
        found.append(("data.crop", f"{given}. Read a stage of images, or leave it out."))
    if text == "stored" and ("text" not in stage.columns or "captions" in stage.columns):
        has = "text states of the first of several captions alone" if "text" in stage.columns else "no text states"
        given = f"stored, but {where} has {has}"
        found.append(("data.text", f"{given}. Make it with {make} store_text=true, or use data.text=encoded."))
    return found


def _is_finite(values: np.ndarray) -> bool:
    if values.dtype != np.float16:
        return bool(np.isfinite(values).all())
    # numpy widens each float16 by itself, which takes longer than reading it: the exponent of inf and nan is all ones.
    return bool((values.view(np.uint16) & 0x7FFF).max(initial=0) < 0x7C00)
