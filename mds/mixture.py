"""Several datasets in one order of samples, each with its part of an epoch.

    proportion   its part of an epoch's samples; an epoch has as many samples as all datasets together
    repeat       how often an epoch has each of its samples; 0.5: another half of them in each epoch
    choose       how many of its samples an epoch has

None of the three: each of its samples once. Which samples of a dataset an epoch has depends on the seed and the epoch alone
(streaming's own semantics: docs.mosaicml.com/projects/streaming, "Mixing data sources").
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common.errors import Failed
from common.files import cache_folder
from common.value_types import ImageSize, bytes_to_int, limited
from mds.dataset import Dataset, is_remote, read_dataset
from mds.fetch import INDEX, RetryingStream
from mds.index import is_compressed
from mds.order import count_chosen

WEIGHTS = ("proportion", "repeat", "choose")


def cache_folder_of(remote: str) -> str:
    """Return the folder that keeps an address's shards where none is given: one for each address, whatever its password."""
    parts = urlsplit(remote.rstrip("/"))
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    digest = hashlib.blake2b(address.encode(), digest_size=4).hexdigest()
    return str(cache_folder() / "datasets" / f"{address.rpartition('/')[2]}-{digest}")


def default_cache_folder(remote: str) -> str | None:
    """Return the folder that keeps a dataset's shards where none is given; None: it is read in place."""
    if is_remote(remote):
        return cache_folder_of(remote)
    return cache_folder_of(os.path.realpath(remote)) if is_compressed(remote) else None


@dataclass(frozen=True)
class StreamConfig:
    """One of the datasets that a run mixes."""

    remote: str | None = None
    """The dataset: a folder, or an address such as s3://bucket/prefix."""
    local: str | None = None
    """Cache of `remote`. null: in ~/.cache/easel; an uncompressed folder is read in place."""
    metadata: str | None = None
    """dataset.json of a third-party dataset, if it is elsewhere."""
    caption: str | None = None
    """Its caption column. null: the dataset's default."""
    proportion: float | None = limited(None, 0.0, 1.0, above=True)
    """Its fraction of an epoch's samples; all sum to 1."""
    repeat: float | None = limited(None, 0.0, 1e6, above=True)
    """How often an epoch has each sample. 0.5: half of them."""
    choose: int | None = limited(None, 1, 10**12)
    """How many of its samples an epoch has."""

    def __post_init__(self) -> None:
        """Name the folder that keeps the shards, so that the record of the run has it."""
        if self.local is None and self.remote is not None:
            object.__setattr__(self, "local", default_cache_folder(self.remote))

    @property
    def location(self) -> str | None:
        return self.remote or self.local

    @functools.cached_property
    def dataset(self) -> Dataset:
        """The dataset, read when it is first asked for, then kept. Raises ValueError: see `read_dataset`."""
        return read_dataset(self.location or "", self.metadata)

    @property
    def folders(self) -> tuple[str | None, str | None]:
        """(source of the shards, folder that they are read from); a local dataset without `local` is read in place."""
        return (None, self.remote) if self.remote and self.local is None else (self.remote, self.local)

    @property
    def weight(self) -> dict[str, float]:
        """proportion, repeat or choose, whichever is given."""
        return {name: value for name in WEIGHTS if (value := getattr(self, name)) is not None}

    def count_chosen(self, num_samples: int, total: int) -> int:
        """Return how many samples of its dataset an epoch has; by a proportion perhaps one more. `total`: of all datasets."""
        return int(self.proportion * total) if self.proportion is not None else count_chosen(self.weight, num_samples)


def count_epoch_samples(streams: Sequence[StreamConfig], samples: Sequence[int]) -> int:
    """Return the number of samples of an epoch. `samples`: of each dataset."""
    total = sum(samples)
    if streams[0].proportion is not None:
        return total
    return sum(stream.count_chosen(num, total) for stream, num in zip(streams, samples, strict=True))


@dataclass(frozen=True)
class ResolvedStream:
    """A dataset that is read as one stream."""

    source: int
    """The number of its dataset in the configuration."""
    config: StreamConfig
    dataset: Dataset
    size: ImageSize
    """(width, height) of its images in a batch, px."""


def resolve_streams(
    sources: Sequence[StreamConfig], datasets: Sequence[Dataset], size: ImageSize
) -> list[ResolvedStream]:
    """Return each dataset as a stream, and each bucket of a set as one with its part of the set's weight.

    Args:
        size: (width, height) of the images of a dataset that has no buckets, px.
    """
    streams = []
    for number, (source, dataset) in enumerate(zip(sources, datasets, strict=True)):
        if not dataset.buckets:
            streams.append(ResolvedStream(number, source, dataset, size))
            continue
        bucket_ends = (
            [round(source.choose * end / dataset.num_samples) for end in _bucket_ends(dataset)]
            if source.choose
            else None
        )
        for number_in_set, bucket in enumerate(dataset.buckets):
            name = bucket.location.rpartition("/")[2]
            config = StreamConfig(
                remote=source.remote and f"{source.remote.rstrip('/')}/{name}",
                local=source.local and f"{source.local.rstrip('/')}/{name}",
                proportion=source.proportion and source.proportion * bucket.num_samples / dataset.num_samples,
                repeat=source.repeat,
                caption=source.caption,
                choose=bucket_ends and bucket_ends[number_in_set + 1] - bucket_ends[number_in_set],
            )
            if config.choose != 0:
                streams.append(ResolvedStream(number, config, bucket, bucket.size))
    return streams


def _bucket_ends(dataset: Dataset) -> list[int]:
    return [sum(bucket.num_samples for bucket in dataset.buckets[:at]) for at in range(len(dataset.buckets) + 1)]


def bucket_sizes_of(streams: Sequence[ResolvedStream]) -> list[ImageSize] | None:
    """Return the sizes of a run's batches, (width, height) in pixels; None: there is one."""
    sizes = list(dict.fromkeys(stream.size for stream in streams))
    return sizes if len(sizes) > 1 else None


def find_unfilled_buckets(streams: Sequence[ResolvedStream], global_batch_size: int) -> dict[ImageSize, int]:
    """Return the buckets that fill no batch of an epoch, with their samples of an epoch."""
    total, chosen = sum(stream.dataset.num_samples for stream in streams), {}
    for stream in streams:
        num = stream.config.count_chosen(stream.dataset.num_samples, total)
        chosen[stream.size] = chosen.get(stream.size, 0) + num
    return {size: num for size, num in chosen.items() if num < global_batch_size}


def weight_problems(streams: Sequence[StreamConfig]) -> list[tuple[str, str]]:
    """(key, message) for weights that do not go together."""
    problems = []
    for number, stream in enumerate(streams):
        if len(stream.weight) > 1:
            weights = ", ".join(f"{name}: {value:g}" for name, value in stream.weight.items())
            problems.append((f"data.streams[{number}]", f"{weights} exclude each other. Give one of them."))
    if problems:
        return problems
    parts = [stream.proportion for stream in streams if stream.proportion is not None]
    if parts and len(parts) < len(streams):
        other = next(number for number, stream in enumerate(streams) if stream.proportion is None)
        text = "no proportion, but other streams have one. Give it to all of them, or to none."
        return [(f"data.streams[{other}]", text)]
    if parts and not math.isclose(total := sum(parts), 1.0, abs_tol=1e-6):
        proportions = ", ".join(f"{part / total:.6g}" for part in parts)
        problem = f"the proportions sum to {total:.6g}"
        text = f"{problem}. Possible: parts of an epoch, which sum to 1. In this ratio: {proportions}."
        return [("data.streams", text)]
    return []


def name_datasets(locations: Sequence[str]) -> list[str]:
    """Return a short name for each dataset: the last part of its location, numbered where two have the same."""
    last = [location.rstrip("/").rpartition("/")[2] or location for location in locations]
    return [name if last.count(name) == 1 else f"{number}-{name}" for number, name in enumerate(last)]


def build_stream(stream: ResolvedStream, patience_sec: float) -> RetryingStream:
    """Return the stream of a dataset."""
    (remote, local), columns, caption = stream.config.folders, stream.dataset.adopted, stream.config.caption
    assert local is not None
    if columns is not None and caption is not None:
        columns = dataclasses.replace(columns, captions=(caption,))
    return RetryingStream(
        remote=remote,
        local=local,
        patience_sec=patience_sec,
        index_sha256=stream.dataset.index_sha256,
        adopted=columns,
        table=stream.dataset.shards,
        **stream.config.weight,
    )


# --- checks of datasets against the section that names them ---
#
# Problems are (key, message).

FILE_ENTRY = re.compile(r'\{[^{}]*"hashes": ?\{[^{}]*\}[^{}]*\}')  # of index.json: name, bytes and hashes of a file
MOST_UNFILLED = 0.01  # of a run's samples may lie in buckets that fill no batch

Problems = list[tuple[str, str]]


def read_source(key: str, source: StreamConfig) -> tuple[Dataset | None, Problems]:
    """Return a dataset, or why it cannot be read. `key`: beginning of its keys. Raises Failed: its store is away."""
    where, location = f"{key}.remote" if source.remote else f"{key}.local", source.location or ""
    if is_remote(location) and (source.local is None or is_remote(source.local)):
        problem = f"{source.local} is not a folder on this machine"
        text = f"{problem}. It keeps the shards of {location}. Give a folder, or leave it out."
        return None, [(f"{key}.local", text)]
    try:
        dataset = source.dataset
    except Failed as error:  # no problem of the configuration: the same command may do well later
        raise Failed(f"{where}: {error}") from error
    except ValueError as error:
        return None, [(where, str(error))]
    if dataset.is_compressed and source.folders[0] is None:
        problem = f"{dataset.location} is compressed, and nothing is written there"
        return dataset, [
            (f"{key}.local", f"{problem}. Give it as {key}.remote, and as {key}.local a folder for its shards.")
        ]
    return dataset, []


def caption_problems(key: str, column: str, dataset: Dataset, text: str) -> Problems:
    """Check a column of captions that is named. `text`: stored or encoded, as the run reads it."""
    encodings = dict(zip(dataset.columns, dataset.encodings, strict=True))
    texts = ", ".join(name for name, encoding in encodings.items() if encoding in ("str", "json"))
    if encodings.get(column) not in ("str", "json"):
        problem = (
            f"{column}, but {dataset.location} has no column of that name"
            if column not in encodings
            else f"{column} is {encodings[column]}"
        )
        return [(key, f"{problem}. Possible: a column of str or json; it has {texts}.")]
    if text == "stored":
        return [(key, f"{column}, but data.text=stored: those are states of the dataset's own captions. Leave it out.")]
    return []


def folder_problems(key: str, source: StreamConfig, dataset: Dataset) -> Problems:
    """Check the folder that keeps a dataset's shards, if there is one."""
    if source.remote is None or source.local is None:
        return []
    if not is_remote(source.remote):
        local, remote = Path(os.path.realpath(source.local)), Path(os.path.realpath(source.remote))
        if local == remote:
            problem = f"{source.local} is {key.removesuffix('local')}remote too"
            return [(key, f"{problem}. Leave it out: a folder is read in place.")]
        advice = "Give another folder: a dataset's files and the shards of a run must not mix."
        if remote in local.parents:
            return [(key, f"{source.local} lies inside of the dataset at {source.remote}. {advice}")]
        if local in remote.parents:
            return [(key, f"{source.local} has the dataset at {source.remote} inside of it. {advice}")]
    if _holds_another_dataset(source.local, dataset):
        problem = f"{source.local} holds shards of another dataset than {dataset.location}"
        return [(key, f"{problem}. Give another folder, or remove this one.")]
    return []


def _holds_another_dataset(local: str, dataset: Dataset) -> bool:
    """True if a cache folder was filled from another dataset; an index that is only damaged lists most of the shards."""
    try:
        text = Path(local, INDEX).read_bytes()
        if hashlib.sha256(text).hexdigest() == dataset.index_sha256:
            return False
        cached = {_as_key(json.loads(entry)) for entry in FILE_ENTRY.findall(text.decode())}
    except (OSError, ValueError):  # none, or broken: it is fetched again
        return False
    files = (file for shard in dataset.shards for file in (shard["raw_data"], shard["zip_data"]) if file)
    return 2 * len(cached.intersection(map(_as_key, files))) < len(cached)


def _as_key(file: Mapping[str, Any]) -> str:
    return json.dumps(file, sort_keys=True)


def mixture_problems(
    named: Sequence[tuple[str, StreamConfig]], datasets: Sequence[Dataset], size: ImageSize, global_batch_size: int
) -> Problems:
    """Check that the datasets can be mixed, and fill batches.

    Args:
        named: each dataset's beginning of its keys, and its section.
        size: (width, height) of the run's images, px.
    """
    sources, samples = [source for _, source in named], [dataset.num_samples for dataset in datasets]
    problems = _duplicate_problems(sources, datasets)
    for (key, source), num in zip(named, samples, strict=True):
        if not source.count_chosen(num, sum(samples)):
            problems.append((key, f"none of its {num} samples would be in an epoch. Give it more."))
    if (total := count_epoch_samples(sources, samples)) < global_batch_size:
        where = f"the dataset at {datasets[0].location}" if len(datasets) == 1 else "an epoch of all streams"
        problem = f"{global_batch_size} is more than the {total} samples of {where}"
        return [*problems, ("global_batch_size", f"{problem}. Take a smaller one, or more data.")]
    streams = resolve_streams(sources, datasets, size)
    unfilled = find_unfilled_buckets(streams, global_batch_size) if bucket_sizes_of(streams) else {}
    if (num_unfilled := sum(unfilled.values())) > MOST_UNFILLED * total:
        few = ", ".join(f"{width}x{height} ({num})" for (width, height), num in list(unfilled.items())[:5])
        problem = f"{len(unfilled)} buckets have fewer samples than that, {num_unfilled / total:.1%} of all: {few}"
        advice = "Take a smaller one, or fewer buckets: python -m prepare.buckets ... max_aspect=2"
        problems.append(("global_batch_size", f"{global_batch_size}, but {problem}. {advice}."))
    return problems


def cache_limit_problems(
    cache_limit: str | None, sources: Sequence[StreamConfig], datasets: Sequence[Dataset]
) -> Problems:
    """Compare the cache's limit with the shards that it is for."""
    if cache_limit is None:
        return []
    largest = max((s.largest_shard_bytes for c, s in zip(sources, datasets, strict=True) if c.folders[0]), default=0)
    if not largest:
        in_place = f"{cache_limit} has no effect on a folder that is read in place. Give data.remote and data.local."
        return [("data.cache_limit", in_place)]
    if bytes_to_int(cache_limit) < 4 * largest:
        problem = f"{cache_limit} holds fewer than 4 of the largest shard ({largest:,} bytes)"
        return [("data.cache_limit", f"{problem}. Give at least {4 * largest // 2**20 + 1}mb, or null.")]
    return []


def _duplicate_problems(sources: Sequence[StreamConfig], datasets: Sequence[Dataset]) -> Problems:
    """Say where one dataset, or one folder of shards, is given to two streams."""
    problems = []
    digests = [dataset.index_sha256 for dataset in datasets]
    folders = [os.path.realpath(source.folders[1] or "") for source in sources]
    for number, (source, digest, folder) in enumerate(zip(sources, digests, folders, strict=True)):
        if (first := digests.index(digest)) < number:
            text = f"{source.location} is the dataset of data.streams[{first}]. Give it once, with repeat=2 for twice."
            problems.append((f"data.streams[{number}].remote", text))
        elif (first := folders.index(folder)) < number:
            text = f"{source.local} is that of data.streams[{first}]. Give each stream a separate folder."
            problems.append((f"data.streams[{number}].local", text))
    return problems
