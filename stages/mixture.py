"""Several stages in one order of samples, each with its part of an epoch.

    proportion   its part of an epoch's samples; an epoch has as many samples as all stages together
    repeat       how often an epoch has each of its samples; 0.5: another half of them in each epoch
    choose       how many of its samples an epoch has

None of the three: each of its samples once. Which samples of a stage an epoch has depends on the seed and the epoch alone
(streaming's own semantics: docs.mosaicml.com/projects/streaming, "Mixing data sources").
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from cli.files import cache_folder
from cli.limits import ImageSize, limited
from stages.dataset import Stage, is_remote, read_stage
from stages.fetch import RetryingStream
from stages.index_file import is_compressed

WEIGHTS = ("proportion", "repeat", "choose")


def own_folder(remote: str) -> str:
    """Return the folder that keeps an address's shards where none is given: one for each address, whatever its password."""
    parts = urlsplit(remote.rstrip("/"))
    place = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    digest = hashlib.blake2b(place.encode(), digest_size=4).hexdigest()
    return str(cache_folder() / "stages" / f"{place.rpartition('/')[2]}-{digest}")


def default_folder(remote: str) -> str | None:
    """Return the folder that keeps a stage's shards where none is given; None: it is read in place."""
    if is_remote(remote):
        return own_folder(remote)
    return own_folder(os.path.realpath(remote)) if is_compressed(remote) else None


@dataclass(frozen=True)
class StreamConfig:
    """One of the stages that a run mixes."""

    remote: str | None = None
    """The stage: a folder, or an address such as s3://bucket/prefix."""
    local: str | None = None
    """Folder that keeps the shards of `remote`. null: one in ~/.cache/easel; a folder is read in place, unless compressed."""
    facts: str | None = None
    """dataset.json of a data set that others have written, if it does not lie there: a file or address."""
    caption: str | None = None
    """The column of its captions. null: the stage's own ones."""
    proportion: float | None = limited(None, 0.0, 1.0, above=True)
    """Its part of an epoch's samples. Those of all streams sum to 1."""
    repeat: float | None = limited(None, 0.0, 1e6, above=True)
    """How often an epoch has each of its samples. 0.5: half of them."""
    choose: int | None = limited(None, 1, 10**12)
    """How many of its samples an epoch has."""

    def __post_init__(self) -> None:
        """Name the folder that keeps the shards, so that the record of the run has it."""
        if self.local is None and self.remote is not None:
            object.__setattr__(self, "local", default_folder(self.remote))

    @property
    def location(self) -> str | None:
        return self.remote or self.local

    @functools.cached_property
    def contents(self) -> Stage:
        """What the stage says of itself: read when it is first asked for, then kept. Raises ValueError: see `read_stage`."""
        return read_stage(self.location or "", self.facts)

    @property
    def folders(self) -> tuple[str | None, str | None]:
        """(source of the shards, folder that they are read from); a local stage without `local` is read in place."""
        return (None, self.remote) if self.remote and self.local is None else (self.remote, self.local)

    @property
    def weight(self) -> dict[str, float]:
        """proportion, repeat or choose, whichever is given."""
        return {name: value for name in WEIGHTS if (value := getattr(self, name)) is not None}

    def chosen(self, num_samples: int, total: int) -> int:
        """Return how many samples of its stage an epoch has, to a sample. `total`: of all stages."""
        if self.proportion is not None:
            return round(self.proportion * total)
        return int(self.repeat * num_samples) if self.repeat is not None else self.choose or num_samples


def epoch_samples(streams: Sequence[StreamConfig], samples: Sequence[int]) -> int:
    """Return the number of samples of an epoch. `samples`: of each stage."""
    total = sum(samples)
    if streams[0].proportion is not None:
        return total
    return sum(stream.chosen(num, total) for stream, num in zip(streams, samples, strict=True))


@dataclass(frozen=True)
class Opened:
    """A stage that is read as one stream."""

    source: int
    """The number of its data set in the configuration."""
    config: StreamConfig
    stage: Stage
    size: ImageSize
    """(width, height) of its pictures in a batch, px."""


def opened(sources: Sequence[StreamConfig], stages: Sequence[Stage], size: ImageSize) -> list[Opened]:
    """Return each stage as a stream, and each bucket of a set as one with its part of the set's weight.

    Args:
        size: (width, height) of the pictures of a stage that has no buckets, px.
    """
    found = []
    for number, (source, stage) in enumerate(zip(sources, stages, strict=True)):
        if not stage.buckets:
            found.append(Opened(number, source, stage, size))
            continue
        ends = [round(source.choose * end / stage.num_samples) for end in _ends(stage)] if source.choose else None
        for at, bucket in enumerate(stage.buckets):
            name = bucket.location.rpartition("/")[2]
            own = StreamConfig(
                remote=source.remote and f"{source.remote.rstrip('/')}/{name}",
                local=source.local and f"{source.local.rstrip('/')}/{name}",
                proportion=source.proportion and source.proportion * bucket.num_samples / stage.num_samples,
                repeat=source.repeat,
                caption=source.caption,
                choose=ends and ends[at + 1] - ends[at],
            )
            if own.choose != 0:
                found.append(Opened(number, own, bucket, bucket.size))
    return found


def _ends(stage: Stage) -> list[int]:
    return [sum(bucket.num_samples for bucket in stage.buckets[:at]) for at in range(len(stage.buckets) + 1)]


def buckets_of(streams: Sequence[Opened]) -> list[ImageSize] | None:
    """Return the sizes of a run's batches, (width, height) in pixels; None: there is one."""
    sizes = list(dict.fromkeys(stream.size for stream in streams))
    return sizes if len(sizes) > 1 else None


def unfilled(streams: Sequence[Opened], global_batch_size: int) -> dict[ImageSize, int]:
    """Return the buckets that fill no batch of an epoch, with their samples of an epoch."""
    total, chosen = sum(stream.stage.num_samples for stream in streams), {}
    for stream in streams:
        num = stream.config.chosen(stream.stage.num_samples, total)
        chosen[stream.size] = chosen.get(stream.size, 0) + num
    return {size: num for size, num in chosen.items() if num < global_batch_size}


def weight_problems(streams: Sequence[StreamConfig]) -> list[tuple[str, str]]:
    """(key, message) for weights that do not go together."""
    found = []
    for number, stream in enumerate(streams):
        if len(stream.weight) > 1:
            given = ", ".join(f"{name}: {value:g}" for name, value in stream.weight.items())
            found.append((f"data.streams[{number}]", f"{given} exclude each other. Give one of them."))
    if found:
        return found
    parts = [stream.proportion for stream in streams if stream.proportion is not None]
    if parts and len(parts) < len(streams):
        other = next(number for number, stream in enumerate(streams) if stream.proportion is None)
        text = "no proportion, but other streams have one. Give it to all of them, or to none."
        return [(f"data.streams[{other}]", text)]
    if parts and not math.isclose(total := sum(parts), 1.0, abs_tol=1e-6):
        ways = ", ".join(f"{part / total:.6g}" for part in parts)
        text = (
            f"the proportions sum to {total:.6g}. Possible: parts of an epoch, which sum to 1. In this ratio: {ways}."
        )
        return [("data.streams", text)]
    return []


def names_of(locations: Sequence[str]) -> list[str]:
    """Return a short name for each stage: the last part of its place, numbered where two have the same."""
    last = [location.rstrip("/").rpartition("/")[2] or location for location in locations]
    return [name if last.count(name) == 1 else f"{number}-{name}" for number, name in enumerate(last)]


def stream_of(given: Opened, patience_sec: float) -> RetryingStream:
    """Return the stream of a stage."""
    (remote, local), columns, caption = given.config.folders, given.stage.adopted, given.config.caption
    assert local is not None
    if columns is not None and caption is not None:
        columns = dataclasses.replace(columns, captions=(caption,))
    return RetryingStream(
        remote=remote,
        local=local,
        patience_sec=patience_sec,
        index_sha256=given.stage.index_sha256,
        adopted=columns,
        table=given.stage.shards,
        **given.config.weight,
    )
