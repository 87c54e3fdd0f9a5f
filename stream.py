"""A stage on disk or in a store: the facts that a reader checks, and a StreamingDataset that is safe to fork.

A stage is an MDS dataset (`index.json` and shards, with hashes) with a `dataset.json` beside the index that says what
made it. A folder without both is not a stage: `index.json` is written last, so a half-written one has none.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import torch
from streaming import StreamingDataset
from streaming.base.dataset import _ShardState
from streaming.base.format.mds.reader import MDSReader
from streaming.base.storage.download import DOWNLOADER_MAPPINGS, CloudDownloader

FACTS_FILE = "dataset.json"
FACTS_SCHEMA = 1
AGAIN = "Make the stage again: python -m prepare.shards --help"
DAMAGED = "If it lies in data.local, remove that folder; otherwise make the stage again."
HASH = "xxh64"  # of every shard, checked when it is downloaded


def is_remote(location: str) -> bool:
    """True for an address in a store (s3://bucket/prefix), False for a folder."""
    return bool(urlparse(location).scheme)


@dataclass(frozen=True)
class Stage:
    """What `index.json` and `dataset.json` say about a dataset."""

    location: str
    kind: str
    """images or moments."""
    index_sha256: str
    num_samples: int
    columns: tuple[str, ...]
    largest_shard_bytes: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The rest of dataset.json: family, image_size, normalize, encoders, as far as the stage has them."""


def read_stage(location: str) -> Stage:
    """Read the facts of the stage at a folder or store address.

    Raises:
        ValueError: nothing is there, it is no stage, or a file cannot be read; says which and what to do.
    """
    scheme = urlparse(location).scheme
    if scheme and scheme not in DOWNLOADER_MAPPINGS:
        known = ", ".join(f"{name}://" for name in sorted(name for name in DOWNLOADER_MAPPINGS if name))
        raise ValueError(f"'{location}' is in no known store. Known: a folder, {known}.")
    if not scheme and not Path(location).is_dir():
        raise ValueError(f"no folder {location}. Check the path, or make the stage: python -m prepare.shards --help")
    index_bytes, index = _read_json(location, "index.json")
    _, facts = _read_json(location, FACTS_FILE)
    if facts.get("schema") != FACTS_SCHEMA:
        raise ValueError(
            f"{location}/{FACTS_FILE} has schema {facts.get('schema')}; this version reads {FACTS_SCHEMA}. {AGAIN}"
        )
    digest = hashlib.sha256(index_bytes).hexdigest()
    if facts.get("index_sha256") != digest:
        raise ValueError(
            f"{location}/index.json (sha256 {digest[:12]}) is not the one that {FACTS_FILE} was written for "
            f"({str(facts.get('index_sha256'))[:12]}). {AGAIN}"
        )
    try:
        if not index["shards"]:
            raise ValueError(f"{location}/index.json lists no shard. {AGAIN}")
        stage = Stage(
            location=location,
            kind=facts["stage"],
            index_sha256=digest,
            num_samples=sum(shard["samples"] for shard in index["shards"]),
            columns=tuple(index["shards"][0]["column_names"]),
            largest_shard_bytes=max(shard["raw_data"]["bytes"] for shard in index["shards"]),
            facts=facts,
        )
        files = [shard["zip_data"] or shard["raw_data"] for shard in index["shards"]]
        sizes = {file["basename"]: file["bytes"] for file in files}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{location} has an index.json or {FACTS_FILE} of another kind ({error!r}). {AGAIN}"
        ) from error
    if outside := [name for name in sizes if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise ValueError(f"{location}/index.json names a shard outside of its stage: {outside[0]}. {AGAIN}")
    if not scheme:
        _check_shards(location, sizes)
    return stage


def _check_shards(folder: str, sizes: dict[str, int]) -> None:
    """Look for shards that are not there or were cut; without this a run finds them hours later."""
    for name, size in sizes.items():
        path = Path(folder, name)
        again = (
            AGAIN if path.parent == Path(folder) else f"Remove {path.parent}, and give the command that made it again."
        )
        if not path.is_file():
            raise ValueError(f"{path} is missing, index.json lists it. {again}")
        if path.stat().st_size != size:
            raise ValueError(f"{path} has {path.stat().st_size:,} bytes, index.json says {size:,}. {again}")


def cached_index_digest(local: str) -> str | None:
    """Return the sha256 of the index that a cache folder holds, or None: it is empty."""
    path = Path(local, "index.json")
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _read_json(location: str, name: str) -> tuple[bytes, dict[str, Any]]:
    """Return a file of a stage, as it is and read."""
    if is_remote(location):
        with tempfile.TemporaryDirectory() as folder:
            try:
                CloudDownloader.direct_download(f"{location.rstrip('/')}/{name}", f"{folder}/{name}")
            except Exception as error:  # each store's client has exceptions of its own
                raise ValueError(f"cannot read {name} under {location}: {type(error).__name__}: {error}") from error
            text = Path(folder, name).read_bytes()
    else:
        path = Path(location, name)
        if not path.is_file():
            raise ValueError(f"no {name} under {location}. Make the stage: python -m prepare.shards --help")
        try:
            text = path.read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}.") from error
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{location}/{name} is not JSON: {error}. {AGAIN}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{location}/{name} holds a {type(content).__name__}, not an object. {AGAIN}")
    return text, content


def write_facts(folder: Path, stage: str, facts: dict[str, Any]) -> None:
    """Write `dataset.json` beside an index that is already there; its digest covers every shard through its hash."""
    index = (folder / "index.json").read_bytes()
    content = {
        "schema": FACTS_SCHEMA,
        "stage": stage,
        "samples": sum(shard["samples"] for shard in json.loads(index)["shards"]),
        "index_sha256": hashlib.sha256(index).hexdigest(),
        **facts,
    }
    (folder / FACTS_FILE).write_text(json.dumps(content, indent=2) + "\n")


class BatchStream(StreamingDataset):
    """A StreamingDataset that yields whole batches and is safe to fork.

    Batches: the items of an iteration are what `read_batch` makes of `batch_size` sample numbers; a rest at the end of an
    epoch that is no whole batch is left out. To be loaded with DataLoader(batch_size=None).

    Fork: the constructor fetches `index.json` with a client that streaming keeps. Forked workers would share its socket,
    and their answers would mix: wrong data from a healthy store (seen with streaming 0.13.0).

    Speed: plain streaming takes a file lock for every sample to ask whether its shard is there, and opens, seeks and reads
    each by itself; that, not the bytes, is what its time goes to.
    """

    def __init__(self, **arguments: Any):
        try:
            super().__init__(**arguments)
        except ValueError as error:
            if "Reused local directory" not in str(error):
                raise
            raise ValueError(
                f"data.local: {arguments.get('local')} is in use by another run on this machine, or by shared memory that a "
                f"run has left (then a line above says so). Give each run a folder of its own, or wait for the other one."
            ) from error
        for stream in self.streams:
            stream._downloader.clean_up()

    def read_batch(self, sample_ids: Sequence[int]) -> dict[str, Any]:
        """Return the batch of these samples."""
        raise NotImplementedError

    def __getitem__(self, at: Any) -> Any:
        return self.read_batch(at) if isinstance(at, list) else super().__getitem__(at)

    def _each_sample_id(self, it: Any) -> Iterator[list[int]]:
        sample_ids = super()._each_sample_id(it)
        while len(batch := list(itertools.islice(sample_ids, self.batch_size))) == self.batch_size:
            yield [int(sample_id) for sample_id in batch]

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        if not blocking and self._shard_states[shard_id] == _ShardState.LOCAL:
            self._shard_access_times[shard_id] = time.time_ns()
            return
        super().prepare_shard(shard_id, blocking)

    def resume(self, epoch: int, samples: int) -> None:
        """Begin the next iteration at a sample of an epoch, over all ranks; the epochs after it follow from there."""
        self.load_state_dict(
            {
                "epoch": epoch,
                "sample_in_epoch": samples,
                "num_canonical_nodes": self.num_canonical_nodes,
                "shuffle_seed": self.shuffle_seed,
                # The order is that of a first start: benchmark.py lets no number of nodes through that would change it.
                "initial_physical_nodes": None,
            }
        )


class ShardFile:
    """Reads the rows of one MDS shard by column, without going through streaming's sample by sample.

    The format, as streaming's writer has it: uint32 number of rows, uint32 where each begins and the last ends; a row is
    the uint32 sizes of its columns of varying size, then all columns in order.
    """

    def __init__(self, reader: MDSReader):
        self.path = Path(reader.dirname, reader.split, reader.raw_data.basename)
        self.names, self.sizes = reader.column_names, reader.column_sizes
        self.header = struct.Struct(f"<{sum(size is None for size in self.sizes)}I")
        with open(self.path, "rb") as file:
            num_rows = int.from_bytes(file.read(4), "little")
            self.edges = np.fromfile(file, np.uint32, reader.samples + 1)
        if num_rows != reader.samples or len(self.edges) != num_rows + 1:
            raise ShardError(f"{self.path} is damaged: it has another number of rows than index.json says. {DAMAGED}")

    def read(self, rows: Sequence[int]) -> list[dict[str, memoryview]]:
        """Return column -> bytes for each row."""
        found = []
        with open(self.path, "rb", buffering=0) as file:
            for row in rows:
                begin, end = int(self.edges[row]), int(self.edges[row + 1])
                data = memoryview(os.pread(file.fileno(), max(0, end - begin), begin))
                if len(data) != end - begin or len(data) < self.header.size:
                    raise ShardError(f"{self.path} is damaged: it ends within row {row}. {DAMAGED}")
                varying, at, columns = iter(self.header.unpack_from(data)), self.header.size, {}
                for name, size in zip(self.names, self.sizes, strict=True):
                    width = next(varying) if size is None else size
                    columns[name] = data[at : at + width]
                    at += width
                if at != len(data):
                    raise ShardError(f"{self.path} is damaged: row {row} is not as long as its columns. {DAMAGED}")
                found.append(columns)
        return found


class ShardError(RuntimeError):
    """A shard whose bytes are not those of its rows, which may lie in a cache or in the stage itself."""


class MomentsStream(BatchStream):
    """The stage `moments` in batches: {"moments": float16 (B, 2C, h, w), each text column: int64 (B, L), further columns}.

    Args:
        columns: name -> (shape of one sample, numpy type as stored, numpy type of the batch).
        arguments: keyword arguments of StreamingDataset.
    """

    def __init__(self, *, columns: Mapping[str, tuple[tuple[int, ...], str, str]], **arguments: Any):
        super().__init__(**arguments)
        self.columns = dict(columns)
        self._files: dict[int, ShardFile] = {}

    def read_batch(self, sample_ids: Sequence[int]) -> dict[str, Any]:
        """Fill one array a column, shard by shard, each row at its place in the batch."""
        batch = {n: np.empty((len(sample_ids), *shape), stored) for n, (shape, stored, _) in self.columns.items()}
        places: dict[int, list[tuple[int, int]]] = {}
        for place, sample_id in enumerate(sample_ids):
            shard_id, row = self.spanner[sample_id]
            places.setdefault(shard_id, []).append((place, row))
        for shard_id, wanted in places.items():
            rows = self._rows(shard_id, [row for _, row in wanted])
            for (place, _), found in zip(wanted, rows, strict=True):
                for name, array in batch.items():
                    array[place] = np.frombuffer(found[name], array.dtype).reshape(array.shape[1:])
        return {n: torch.from_numpy(batch[n].astype(last, copy=False)) for n, (*_, last) in self.columns.items()}

    def _rows(self, shard_id: int, rows: Sequence[int], retry: int = 7) -> list[dict[str, memoryview]]:
        """Read rows of a shard, fetching it where it is missing or was put out of the cache."""
        for _ in range(1 + retry):
            try:
                if shard_id not in self._files:
                    self._files[shard_id] = ShardFile(self.shards[shard_id])
                self._shard_access_times[shard_id] = time.time_ns()
                return self._files[shard_id].read(rows)
            except FileNotFoundError:
                self.prepare_shard(shard_id)
        raise ShardError(f"data: {self.shards[shard_id].raw_data.basename} cannot be kept: a larger data.cache_limit?")
