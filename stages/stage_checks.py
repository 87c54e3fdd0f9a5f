"""Checks of stages against the section that names them: can each be read, and can they be read together.

Problems are (key, message).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streaming.base.util import bytes_to_int

from cli.errors import Failed
from cli.limits import ImageSize
from stages.dataset import Stage, is_remote
from stages.fetch import INDEX
from stages.mixture import StreamConfig, buckets_of, epoch_samples, opened, unfilled

FILE_ENTRY = re.compile(r'\{[^{}]*"hashes": ?\{[^{}]*\}[^{}]*\}')  # of index.json: name, bytes and hashes of a file
MOST_UNFILLED = 0.01  # of a run's samples may lie in buckets that fill no batch

Problems = list[tuple[str, str]]


def read_source(key: str, source: StreamConfig) -> tuple[Stage | None, Problems]:
    """Return a stage's facts, or why they cannot be read. `key`: beginning of its keys. Raises Failed: its store is away."""
    where, location = f"{key}.remote" if source.remote else f"{key}.local", source.location or ""
    if is_remote(location) and (source.local is None or is_remote(source.local)):
        given = f"{source.local} is not a folder on this machine"
        text = f"{given}. It keeps the shards of {location}. Give a folder, or leave it out."
        return None, [(f"{key}.local", text)]
    try:
        stage = source.contents
    except Failed as error:  # no problem of the configuration: the same command may do well later
        raise Failed(f"{where}: {error}") from error
    except ValueError as error:
        return None, [(where, str(error))]
    if stage.is_compressed and source.folders[0] is None:
        given = f"{stage.location} is compressed, and nothing is written there"
        return stage, [
            (f"{key}.local", f"{given}. Give it as {key}.remote, and as {key}.local a folder for its shards.")
        ]
    return stage, []


def caption_problems(key: str, column: str, stage: Stage, text: str) -> Problems:
    """Check a column of captions that is named. `text`: stored or encoded, as the run reads it."""
    has = dict(zip(stage.columns, stage.encodings, strict=True))
    texts = ", ".join(name for name, encoding in has.items() if encoding in ("str", "json"))
    if has.get(column) not in ("str", "json"):
        given = (
            f"{column}, but {stage.location} has no column of that name"
            if column not in has
            else f"{column} is {has[column]}"
        )
        return [(key, f"{given}. Possible: a column of str or json; it has {texts}.")]
    if text == "stored":
        return [(key, f"{column}, but data.text=stored: those are states of the stage's own captions. Leave it out.")]
    return []


def folder_problems(key: str, source: StreamConfig, stage: Stage) -> Problems:
    """Check the folder that keeps a stage's shards, if there is one."""
    if source.remote is None or source.local is None:
        return []
    if not is_remote(source.remote):
        local, remote = Path(os.path.realpath(source.local)), Path(os.path.realpath(source.remote))
        if local == remote:
            given = f"{source.local} is {key.removesuffix('local')}remote too"
            return [(key, f"{given}. Leave it out: a folder is read in place.")]
        apart = "Give a folder beside it: a stage's own files and the shards of a run are not to mix."
        if remote in local.parents:
            return [(key, f"{source.local} lies inside of the stage at {source.remote}. {apart}")]
        if local in remote.parents:
            return [(key, f"{source.local} has the stage at {source.remote} inside of it. {apart}")]
    if _holds_another_stage(source.local, stage):
        given = f"{source.local} holds shards of another stage than {stage.location}"
        return [(key, f"{given}. Give another folder, or remove this one.")]
    return []


def _holds_another_stage(local: str, stage: Stage) -> bool:
    """True where a cache folder was filled from another stage; an index that is only damaged has most shards of its own."""
    try:
        text = Path(local, INDEX).read_bytes()
        if hashlib.sha256(text).hexdigest() == stage.index_sha256:
            return False
        cached = {_as_key(json.loads(entry)) for entry in FILE_ENTRY.findall(text.decode())}
    except (OSError, ValueError):  # none, or broken: it is fetched again
        return False
    files = (file for shard in stage.shards for file in (shard["raw_data"], shard["zip_data"]) if file)
    return 2 * len(cached.intersection(map(_as_key, files))) < len(cached)


def _as_key(file: Mapping[str, Any]) -> str:
    return json.dumps(file, sort_keys=True)


def together(
    named: Sequence[tuple[str, StreamConfig]], stages: Sequence[Stage], size: ImageSize, global_batch_size: int
) -> Problems:
    """Check that the stages can be mixed, and fill batches.

    Args:
        named: each stage's beginning of its keys, and its section.
        size: (width, height) of the run's images, px.
    """
    sources, samples = [source for _, source in named], [stage.num_samples for stage in stages]
    found = _twice(sources, stages)
    for (key, source), num in zip(named, samples, strict=True):
        if not source.chosen(num, sum(samples)):
            found.append((key, f"none of its {num} samples would be in an epoch. Give it more."))
    if (total := epoch_samples(sources, samples)) < global_batch_size:
        where = f"the stage at {stages[0].location}" if len(stages) == 1 else "an epoch of all streams"
        given = f"{global_batch_size} is more than the {total} samples of {where}"
        return [*found, ("global_batch_size", f"{given}. Take a smaller one, or more data.")]
    streams = opened(sources, stages, size)
    rare = unfilled(streams, global_batch_size) if buckets_of(streams) else {}
    if (lost := sum(rare.values())) > MOST_UNFILLED * total:
        few = ", ".join(f"{width}x{height} ({num})" for (width, height), num in list(rare.items())[:5])
        given = f"{len(rare)} buckets have fewer samples than that, {lost / total:.1%} of all: {few}"
        ways = "Take a smaller one, or fewer buckets: python -m prepare.buckets ... max_aspect=2"
        found.append(("global_batch_size", f"{global_batch_size}, but {given}. {ways}."))
    return found


def limit_problems(cache_limit: str | None, sources: Sequence[StreamConfig], stages: Sequence[Stage]) -> Problems:
    """Compare the cache's limit with the shards that it is for."""
    if cache_limit is None:
        return []
    largest = max((s.largest_shard_bytes for c, s in zip(sources, stages, strict=True) if c.folders[0]), default=0)
    if not largest:
        in_place = f"{cache_limit} has no effect on a folder that is read in place. Give data.remote and data.local."
        return [("data.cache_limit", in_place)]
    if bytes_to_int(cache_limit) < 4 * largest:
        given = f"{cache_limit} holds fewer than 4 of the largest shard ({largest:,} bytes)"
        return [("data.cache_limit", f"{given}. Give at least {4 * largest // 2**20 + 1}mb, or null.")]
    return []


def _twice(sources: Sequence[StreamConfig], stages: Sequence[Stage]) -> Problems:
    """Say where one stage, or one folder of shards, is given to two streams."""
    found = []
    digests = [stage.index_sha256 for stage in stages]
    folders = [os.path.realpath(source.folders[1] or "") for source in sources]
    for number, (source, digest, folder) in enumerate(zip(sources, digests, folders, strict=True)):
        if (first := digests.index(digest)) < number:
            text = f"{source.location} is the stage of data.streams[{first}]. Give it once, with repeat=2 for twice."
            found.append((f"data.streams[{number}].remote", text))
        elif (first := folders.index(folder)) < number:
            text = f"{source.local} is that of data.streams[{first}]. Give each stream a folder of its own."
            found.append((f"data.streams[{number}].local", text))
    return found
