"""Open the shards of a dataset, from a folder or a store, and work on their samples in threads without changing the order."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from streaming.base.format.mds.encodings import is_mds_encoding_safe

from common.errors import Failed
from mds.adopted import AdoptedColumns
from mds.fetch import DamagedFile, check_file, decompress_file, known_digest
from mds.index import file_in_store
from mds.shard_table import Shard, build_table
from prepare.addresses import Address

REMAKE_HINT = "Rebuild that dataset, or copy it again"


def map_in_order(
    pool: ThreadPoolExecutor, work: Callable[[Any], Any], items: Iterable[Any], ahead: int
) -> Iterator[Any]:
    """Yield work(item) in the order of the items, with at most `ahead` results waiting."""
    items, waiting = iter(items), deque()
    for item in itertools.islice(items, ahead):
        waiting.append(pool.submit(work, item))
    while waiting:
        result = waiting.popleft().result()
        waiting.extend(pool.submit(work, item) for item in itertools.islice(items, 1))
        yield result


def open_shard(
    address: Address, shard: Mapping[str, Any], folder: Path, adopted: AdoptedColumns | None = None
) -> Shard:
    """Return one shard of IN, with its digest checked; fetched to `folder` if IN is a store, or compressed.

    Args:
        adopted: the columns that are read of a third-party dataset; its samples are then as those of ours.
            shard["first"] is the number of its first sample.

    Raises:
        Failed: the shard is missing, damaged (names both digests), or not safe to read.
    """
    stored = file_in_store(shard)
    shard_location = f"IN: {address.location}/{stored['basename']}"
    for is_last in (False, True):  # once more: a transfer can fail although the store's file is intact
        try:
            file = address.fetch(stored["basename"], folder)
            check_file(file, stored["bytes"] if adopted else None, known_digest(stored["hashes"]))
            if stored is not shard["raw_data"]:
                file = _decompress_shard(file, shard, folder)
            break
        except OSError as error:
            raise Failed(f"{shard_location} cannot be read: {error}. {REMAKE_HINT}.") from error
        except DamagedFile as error:
            if is_last:
                raise Failed(f"{shard_location} is damaged: {error}. {REMAKE_HINT}.") from error
    entry = {**shard, "raw_data": {**shard["raw_data"], "basename": file.name}}
    first = entry.pop("first", 0)
    if not all(map(is_mds_encoding_safe, shard["column_encodings"])):
        unsafe = f"IN: {address.location}/{shard['raw_data']['basename']} has a pickled column, which could run code"
        raise Failed(f"{unsafe}. Rebuild that dataset without it.")
    return Shard(build_table([entry]), 0, str(file.parent), adopted, first)


def _decompress_shard(file: Path, shard: Mapping[str, Any], folder: Path) -> Path:
    """Decompress a shard into `folder`, and remove the compressed file from there. Raises DamagedFile, OSError."""
    raw = shard["raw_data"]
    to = folder / Path(raw["basename"]).name
    decompress_file(file, to, shard["compression"])
    check_file(to, raw["bytes"], known_digest(raw["hashes"]))
    if file.parent == folder:
        file.unlink()
    return to
