"""What reading stored moments takes beside the bytes themselves: processor time of one process, files in the page cache.

    epoch     the stage `moments` through data.build_data, without loader processes: order, threads, batches
    read      `read_batch` of the same stream alone, batches of random samples
    by_row    the same batches as they were read before: each row by os.pread into bytes of its own, which are split into
              columns; each column is looked at for values that are not finite, and copied
    preadv    the same rows by os.preadv alone, each whole, into one buffer of a batch: nothing is looked at or handed on

They take turns in one process. A ratio over preadv is the fraction of its rate that is kept.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.contest import Figures, take_turns
from bench.micro_data import MOMENTS_BATCH, SEED, our_loader
from stages.shard_file import split_row

READERS = ("epoch", "read", "by_row", "preadv")


def measure_reading(folder: Path, rounds: int) -> Figures:
    """Measure all readers of the stage that `write_moments` has written into the folder."""
    loader = our_loader(folder, "moments", MOMENTS_BATCH, workers=0)
    stream: Any = loader.dataset
    for shard_id in range(len(stream.shards)):
        stream.open_shard(shard_id)
    num = len(stream) // MOMENTS_BATCH * MOMENTS_BATCH
    batches = np.random.default_rng(SEED).permutation(len(stream))[:num].reshape(-1, MOMENTS_BATCH)
    edges = edges_of(stream)
    with contextlib.ExitStack() as files:
        paths = [Path(shard.dirname, shard.raw_data.basename) for shard in stream.shards]
        descriptors = [files.enter_context(open(path, "rb", buffering=0)).fileno() for path in paths]
        readers: dict[str, Callable[[], Any]] = {
            "epoch": functools.partial(_drop, loader),
            "read": lambda: _drop(map(stream.read_batch, batches)),
            "by_row": lambda: _drop(map(functools.partial(by_row, stream, edges), batches)),
            "preadv": functools.partial(preadv, stream, descriptors, edges, batches),
        }
        turns = {name: functools.partial(_cpu_us, reader, num) for name, reader in readers.items()}
        values = take_turns(turns, rounds)
    figures = Figures()
    for name in READERS:
        figures.add(f"reading_{name}_cpu_us_a_sample", values[name])
    for name in READERS[:-1]:
        figures.ratio(f"{name}_over_preadv", "reading_preadv_cpu_us_a_sample", f"reading_{name}_cpu_us_a_sample")
    figures.ratio("read_speedup_vs_by_row", "reading_by_row_cpu_us_a_sample", "reading_read_cpu_us_a_sample")
    return figures


def edges_of(stream: Any) -> list[np.ndarray]:
    """Return where each row of each shard begins, and its last one ends."""
    paths = [Path(shard.dirname, shard.raw_data.basename) for shard in stream.shards]
    return [np.fromfile(path, np.uint32, 2 + len(shard))[1:] for path, shard in zip(paths, stream.shards, strict=True)]


def _cpu_us(read: Callable[[], Any], num_samples: int) -> float:
    began = time.process_time()
    read()
    return 1e6 * (time.process_time() - began) / num_samples


def _drop(batches: Iterable[Any]) -> None:
    """Take batches and keep none, so that each may have the memory of the one before."""
    for _ in batches:
        pass


def by_row(stream: Any, edges: Sequence[np.ndarray], batch: np.ndarray) -> dict[str, torch.Tensor]:
    """Return a batch, each of its rows read, split and looked at by itself."""
    columns = stream.columns[0]
    arrays = {name: np.empty((len(batch), *shape), stored) for name, (shape, stored, _) in columns.items()}
    places = [(*map(int, stream.spanner[int(sample_id)]), place) for place, sample_id in enumerate(batch)]
    for shard_id, rows in itertools.groupby(sorted(places), key=lambda of: of[0]):
        shard = stream.shards[shard_id]
        with open(Path(shard.dirname, shard.raw_data.basename), "rb", buffering=0) as file:
            for _, row, place in rows:
                begin, end = edges[shard_id][row : row + 2].tolist()
                data = memoryview(os.pread(file.fileno(), end - begin, begin))
                found = split_row(data, shard.column_names, shard.column_sizes)
                assert found is not None
                for name, array in arrays.items():
                    values = np.frombuffer(found[name], array.dtype)
                    if array.dtype == np.float16:
                        assert (values.view(np.uint16) & 0x7FFF).max() < 0x7C00
                    array[place] = values.reshape(array.shape[1:])
    return {name: torch.from_numpy(arrays[name].astype(last, copy=False)) for name, (*_, last) in columns.items()}


def preadv(stream: Any, descriptors: Sequence[int], edges: Sequence[np.ndarray], batches: np.ndarray) -> np.ndarray:
    """Read the rows of all batches into one buffer (B, bytes of the longest row), and return it as it is after the last."""
    buffer = np.empty((batches.shape[1], max(int(np.diff(of_shard).max()) for of_shard in edges)), np.uint8)
    for batch in batches:
        for into, shard_id, row in zip(buffer, *(of.tolist() for of in stream.places_of(batch)), strict=True):
            begin, end = edges[shard_id][row : row + 2].tolist()
            os.preadv(descriptors[shard_id], [into[: end - begin]], begin)
    return buffer
