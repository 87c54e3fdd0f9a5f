"""Batches of images, moments or synthetic tensors, as zoo/spec.py defines them.

From a stage `images` to a batch (B samples a device, H W the run's image size):

    shard (MDS)   jpg bytes, caption str, key str                        streamed from `data.remote`, kept in `data.local`
    resized       uint8 (3, H, W); the variant mlperf: float32           decoded, scaled, cut to size (stages/images.py)
    batch         images (B, 3, H, W), tokens int64 (B, L)               in a loader worker, captions tokenised in one call

From a stage `moments` (prepare/latents.py), a batch is read as stored: moments float16 (B, 2C, h, w), tokens; or with
`data.text=stored` float16 text states (B, L, D) instead of tokens.
Images are normalised on the device (model.py), because uint8 has a quarter of the bytes to copy. An unusable sample is
reported, counted, and replaced by the next good one of its shard. So every batch is full, and all ranks have the same number.

`data.synthetic=true` gives one batch with the same columns, drawn once on the device, to measure the model's speed alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from composer.core import DataSpec
from composer.utils import dist
from streaming.base.util import bytes_to_int
from torch import Tensor

from cli.limits import ImageSize, limited, size_in_bytes
from cli.log import log
from cli.masking import printable
from stages.adopted import AdoptedSet, kept_digests
from stages.dataset import Stage, column_problem, holds_another_stage, is_remote, read_stage
from stages.fetch import PATIENCE_SEC, RetryingStream
from stages.images import captions_of, crop_room, decode_image, resize_and_crop
from stages.latents import LatentsStream
from stages.loader import Loader
from stages.mixture import StreamConfig, epoch_samples, own_folder, weight_problems
from stages.moments import MomentsStream, reading_problems
from stages.shared_memory import one_at_a_time, remove_dead_segments
from stages.stream import BatchStream
from zoo.spec import Column, Family

# Every setting that affects the order of samples is explicit, so it depends only on the seed and the global batch size.
ORDER = {
    "partition_algo": "relaxed",
    "sampling_method": "balanced",
    "shuffle_algo": "py1e",
    "shuffle_block_size": 1 << 18,  # samples
}
SYNTHETIC_EPOCH_BATCHES = 1000
MOST_BYTES = 10**18  # an exabyte
LOADER_MARGIN_SEC = 120.0  # a loader worker counts as hung if it is silent for this long beyond patience_sec


@dataclass(frozen=True)
class DataConfig:
    """The source and the order of batches."""

    stage: Literal["images", "moments"] = "images"
    """The kind of stage to read: images, or moments encoded beforehand."""
    synthetic: bool = False
    """One random batch, drawn once and kept on the device. remote and local are ignored."""
    remote: str | None = None
    """The stage: a folder, or an address such as s3://bucket/prefix."""
    local: str | None = None
    """Folder that keeps the shards of `remote`. null: a folder is read in place; an address has one in ~/.cache/easel."""
    facts: str | None = None
    """dataset.json of a data set that others have written (prepare.adopt), if it does not lie there: a file or address."""
    streams: list[StreamConfig] | None = None
    """Several stages that are mixed, in place of remote, local and facts."""
    workers: int = limited(4, 0, 512)
    """Loader processes for each device. 0: read in the training process."""
    cache_limit: str | None = size_in_bytes(None, 1, MOST_BYTES, "500mb, 100gb, 1tb")
    """Size limit of `local`, of all streams together. Shards being fetched, one per process, are extra. null: no limit."""
    patience_sec: float = limited(PATIENCE_SEC, 0.0, 1e6)
    """How long the run waits for an unreachable store before it stops."""
    num_canonical_nodes: int = limited(1, 1, 2**16)
    """Keeps the order of samples the same on any number of nodes. Set it to the largest number that the run may have."""
    shuffle: bool = True
    """Shuffle the samples. Their order depends only on seed, global batch size and num_canonical_nodes."""
    normalize: Literal["symmetric", "unit"] = "symmetric"
    """Range of the images that the VAE sees: [-1, 1], or [0, 1] (unit) as in the MLPerf reference."""
    posterior: Literal["sample", "mean"] = "sample"
    """The latent of an image: a new draw from the VAE's posterior at each reading, or the posterior's mean."""
    flip: bool = False
    """Mirror each picture in half of the epochs, at random. From moments: only where prepare.latents had flip=true."""
    crop: Literal["center", "random"] = "center"
    """The part of the scaled picture that is kept: its centre, or another place in each epoch (stage `images` only)."""
    text: Literal["encoded", "stored"] = "encoded"
    """stored: read the text states that prepare.latents wrote with store_text=true. encoded: encode captions in each step."""
    max_bad_samples: int = limited(100, 0)
    """The run stops if there are more unusable samples than this."""

    def __post_init__(self) -> None:
        """Name the folder of an address's shards, so that the record of the run has it."""
        if self.local is None and self.remote is not None and is_remote(self.remote) and not self.synthetic:
            object.__setattr__(self, "local", own_folder(self.remote))

    @property
    def sources(self) -> list[StreamConfig]:
        """The stages to read; none for synthetic data, or where none is given."""
        if self.synthetic:
            return []
        if self.streams is not None:
            return self.streams
        return [StreamConfig(self.remote, self.local, self.facts)] if self.remote or self.local else []

    def read(self) -> list[Stage]:
        """Read the facts of each stage. Raises ValueError: see `stages.dataset.read_stage`."""
        return [read_stage(source.location or "", source.facts) for source in self.sources]

    def columns(self, family: Family, size: ImageSize) -> dict[str, Column]:
        """Return the columns of a batch."""
        return family.columns(self.stage, size, stored_text=self.text == "stored")

    def problems(
        self, global_batch_size: int, made_for: Mapping[str, Any], encodings: Mapping[str, str] | None = None
    ) -> list[tuple[str, str]]:
        """(key, message) for every invalid value, including values that do not fit the stage.

        Args:
            made_for: key of the configuration -> its value, for everything that a stage of moments depends on; and `resize`,
                how the variant's images are resized.
            encodings: of that stage's columns, if known; see `stages.dataset.column_problem`.
        """
        return [] if self.synthetic else self._stage_problems(global_batch_size, made_for, encodings or {})

    def _stage_problems(
        self, global_batch_size: int, made_for: Mapping[str, Any], encodings: Mapping[str, str]
    ) -> list[tuple[str, str]]:
        beside = [f"data.{name}={value}" for name in ("remote", "local", "facts") if (value := getattr(self, name))]
        if self.streams is not None and beside:
            return [("data.streams", f"given beside {beside[0]}. Give one of them.")]
        sources = self.sources
        if not sources or not all(source.location for source in sources):
            where = "data.remote" if self.streams is None else "data.streams"
            return [(where, "not given. Give a stage's folder or s3:// address, or data.synthetic=true.")]
        found, stages = [], []
        for key, source in self.named_sources():
            stage, problems = self._source_problems(key, source, made_for, encodings)
            found += problems
            stages += [] if stage is None else [stage]
        found += weight_problems(sources)
        if len(stages) < len(sources):
            return found
        found += _twice(sources, stages)
        if self.stage == "moments" and len({stage.facts.get("latent_scale") for stage in stages}) > 1:
            text = "moments, and latents that others have stored, or latents of another scale. Mix stages of one kind."
            found.append(("data.streams", text))
        samples = [stage.num_samples for stage in stages]
        for (key, source), num in zip(self.named_sources(), samples, strict=True):
            if not source.chosen(num, sum(samples)):
                found.append((key, f"none of its {num} samples would be in an epoch. Give it more."))
        if (num := epoch_samples(sources, samples)) < global_batch_size:
            where = f"the stage at {stages[0].location}" if len(stages) == 1 else "an epoch of all streams"
            given = f"{global_batch_size} is more than the {num} samples of {where}"
            found.append(("global_batch_size", f"{given}. Take a smaller one, or more data."))
        return found + self._limit_problems(sources, stages)

    def named_sources(self) -> list[tuple[str, StreamConfig]]:
        """Return each stage with the beginning of its keys."""
        return [("data" if self.streams is None else f"data.streams[{n}]", s) for n, s in enumerate(self.sources)]

    def _source_problems(
        self, key: str, source: StreamConfig, made_for: Mapping[str, Any], encodings: Mapping[str, str]
    ) -> tuple[Stage | None, list[tuple[str, str]]]:
        """Return a stage's facts, and its problems by itself."""
        where, location = f"{key}.remote" if source.remote else f"{key}.local", source.location or ""
        if is_remote(location) and (source.local is None or is_remote(source.local)):
            given = f"{source.local} is not a folder on this machine"
            text = f"{given}. It keeps the shards of {location}. Give a folder, or leave it out."
            return None, [(f"{key}.local", text)]
        try:
            stage = read_stage(location, source.facts)
        except ValueError as error:
            return None, [(where, str(error))]
        found = []
        if stage.kind != self.stage:
            given = f"the config says '{self.stage}', {stage.location}/dataset.json says '{stage.kind}'"
            found.append(("data.stage", f"{given}. Use data.stage={stage.kind}, or another {where}."))
        else:
            found += reading_problems(stage, flip=self.flip, crop=self.crop, text=self.text)
        if stage.is_compressed and source.folders[0] is None:
            given = f"not given. {stage.location} is compressed, and nothing is written there"
            todo = f"Give its place as {key}.remote, and as {key}.local a folder for the decompressed shards"
            found.append((f"{key}.local", f"{given}. {todo}."))
        for name, value in made_for.items():
            made = stage.facts.get(name.rpartition(".")[2])  # an `images` stage does not depend on these
            if made is None or made == value:  # moments made by others may not say
                continue
            if name == "resize":
                given = f"its images are resized by '{value}', but the moments at {stage.location} were made of images"
                todo = f"Make the moments again with this variant, or use theirs: model.variant={stage.facts.get('variant')}"
                found.append(("model.variant", f"{given} resized by '{made}'. {todo}."))
            else:
                text = f"{value}, but the moments at {stage.location} were made for {made}. Use that value."
                found.append((name, text))
        if not found and (text := column_problem(stage, encodings)):
            found.append((where, text))
        return stage, found + _folder_problems(f"{key}.local", source, stage)

    def _limit_problems(self, sources: Sequence[StreamConfig], stages: Sequence[Stage]) -> list[tuple[str, str]]:
        """Compare the cache's limit with the shards that it is for."""
        if self.cache_limit is None:
            return []
        largest = max((s.largest_shard_bytes for c, s in zip(sources, stages, strict=True) if c.folders[0]), default=0)
        if not largest:
            in_place = (
                f"{self.cache_limit} has no effect on a folder that is read in place. Give data.remote and data.local."
            )
            return [("data.cache_limit", in_place)]
        if bytes_to_int(self.cache_limit) < 4 * largest:
            given = f"{self.cache_limit} holds fewer than 4 of the largest shard ({largest:,} bytes)"
            return [("data.cache_limit", f"{given}. Give at least {4 * largest // 2**20 + 1}mb, or null.")]
        return []


def _folder_problems(key: str, source: StreamConfig, stage: Stage) -> list[tuple[str, str]]:
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
    if holds_another_stage(source.local, stage):
        given = f"{source.local} holds shards of another stage than {stage.location}"
        return [(key, f"{given}. Give another folder, or remove this one.")]
    return []


def _twice(sources: Sequence[StreamConfig], stages: Sequence[Stage]) -> list[tuple[str, str]]:
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


# ---------------------------------------------------------------------------------------------------------------------
# Streamed batches
# ---------------------------------------------------------------------------------------------------------------------


class StreamingLAIONDataset(BatchStream):
    """The stage `images` as batches: {"images": (B, 3, H, W), text columns int64 (B, L), "bad": [...]}.

    Args:
        family: gives the images' type and the tokenizer.
        image_size: (width, height), px.
        flip, crop: see DataConfig.
        arguments: keyword arguments of StreamingDataset.
    """

    def __init__(
        self, *, family: Family, image_size: ImageSize, flip: bool = False, crop: str = "center", **arguments: Any
    ):
        super().__init__(**arguments)
        self.flip, self.crop = flip, crop
        self.image_size, self.image_dtype = image_size, family.columns("images", image_size)["images"].dtype
        self.tokenize = family.tokenize

    def read_batch(self, sample_ids: Sequence[int]) -> dict[str, Any]:
        """Decode and resize the samples, and tokenise their captions in one call."""
        samples = [self.read_sample(sample_id) for sample_id in sample_ids]
        return {
            "images": torch.stack([sample["images"] for sample in samples]),
            **self.tokenize([sample["caption"] for sample in samples]),
            "bad": [bad for sample in samples for bad in sample["bad"]],
        }

    def read_sample(self, sample_id: int) -> dict[str, Any]:
        """Return the sample, or the next good one of its shard; "bad" lists the skipped ones. Raises: see `first_good`."""
        used, bad = self.first_good(sample_id, self._use)
        return {**used, "bad": bad}

    def _use(self, sample_id: int) -> dict[str, Any]:
        sample, draw = self[sample_id], self.draw(sample_id)
        caption = draw.one_of(captions_of(sample))
        image = decode_image(sample["jpg"])
        at = draw.offset(crop_room(image.size, self.image_size)) if self.crop == "random" else None
        images = resize_and_crop(image, self.image_size, self.image_dtype, at)
        return {"images": images.flip(-1) if self.flip and draw.is_flipped else images, "caption": caption}


class SyntheticBatches:
    """One batch of random columns, drawn once on the device and returned every time.

    An epoch has 1,000 batches, since a duration may be given in epochs.
    """

    def __init__(self, columns: Mapping[str, Column], batch_size: int, device: torch.device, seed: int):
        generator = torch.Generator(device).manual_seed(seed)

        def draw(column: Column) -> Tensor:
            shape = (batch_size, *column.shape)
            if column.below is not None:
                return torch.randint(0, column.below, shape, generator=generator, device=device, dtype=column.dtype)
            return torch.randn(shape, generator=generator, device=device).to(column.dtype)

        self.batch = {name: draw(column) for name, column in columns.items()}
        self._batches_before = 0

    def __len__(self) -> int:
        return SYNTHETIC_EPOCH_BATCHES

    def resume(self, epoch: int, batch_in_epoch: int, global_batch_size: int) -> None:
        """Let the next iteration begin within an epoch, after that many of its batches."""
        self._batches_before = batch_in_epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        num_batches, self._batches_before = len(self) - self._batches_before, 0
        for _ in range(num_batches):
            yield dict(self.batch)


def _streams(config: DataConfig, stages: Sequence[Stage]) -> list[RetryingStream]:
    """Return the stages as streams, and say where their shards are kept if that was not given."""
    streams = []
    for source, stage in zip(config.sources, stages, strict=True):
        remote, local = source.folders
        if remote is not None and is_remote(remote) and local == own_folder(remote):
            log.info(f"data.local: not given: the shards of {printable(remote)} are kept in {local}")
        assert local is not None
        stream = RetryingStream(
            remote=remote,
            local=local,
            patience_sec=config.patience_sec,
            index_sha256=stage.index_sha256,
            adopted=_adopted(stage, None if remote is None else local),
            **source.weight,
        )
        streams.append(stream)
    return streams


def _adopted(stage: Stage, cache: str | None) -> AdoptedSet | None:
    """Return what a reader of a data set of others needs: missing digests are kept in the cache, else beside dataset.json."""
    if stage.adopted is None:
        return None
    beside = own_folder(stage.facts_at) if is_remote(stage.facts_at) else str(Path(stage.facts_at).parent)
    return AdoptedSet(stage.adopted, kept_digests(stage.index_sha256, cache or beside))


def _open_stream(
    config: DataConfig, family: Family, size: ImageSize, stages: Sequence[Stage], arguments: Mapping[str, Any]
) -> BatchStream:
    """Remove what ended runs have left in shared memory, then open the stage's stream."""
    columns = config.columns(family, size).items()
    kinds = {name: (c.shape, c.stored, str(c.dtype).removeprefix("torch.")) for name, c in columns}
    tokenize = family.tokenize if config.text == "encoded" else None
    with one_at_a_time() if dist.get_local_rank() == 0 else contextlib.nullcontext():
        if dist.get_local_rank() == 0:
            remove_dead_segments()
        dist.barrier()
        if config.stage == "moments" and stages[0].adopted is not None:
            shape, scale = family.latent_shape(size), stages[0].facts["latent_scale"]
            return LatentsStream(shape=shape, scale=scale, tokenize=family.tokenize, **arguments)
        if config.stage == "moments":
            return MomentsStream(columns=kinds, flip=config.flip, tokenize=tokenize, **arguments)
        return StreamingLAIONDataset(family=family, image_size=size, flip=config.flip, crop=config.crop, **arguments)


def build_data(
    config: DataConfig,
    family: Family,
    *,
    size: ImageSize,
    device_batch_size: int,
    device: torch.device,
    seed: int,
    stages: Sequence[Stage] = (),
    all_ready: Callable[[bool], bool] = lambda is_here: is_here,
) -> DataSpec:
    """Return the run's batches for this rank, as a Composer DataSpec.

    Args:
        family: gives the columns and the tokenizer.
        size: (width, height) of the images, px.
        device_batch_size: samples per rank and batch.
        device: where synthetic batches are kept.
        seed: of the order of samples, or of the synthetic batch.
        stages: what each stage says of itself; empty: it is read here.
        all_ready: see Loader.

    Raises:
        StreamFailure: the stage's index cannot be fetched; raised on all ranks.
        ValueError: the stage does not exist.
    """
    if config.synthetic:
        return DataSpec(SyntheticBatches(config.columns(family, size), device_batch_size, device, seed))
    stages = stages or config.read()
    arguments = {
        "streams": _streams(config, stages),
        "predownload": 8 * device_batch_size,
        "cache_limit": config.cache_limit,
        "batch_size": device_batch_size,
        "num_canonical_nodes": config.num_canonical_nodes,
        "shuffle": config.shuffle,
        "shuffle_seed": seed,
        **ORDER,
    }
    dataset = _open_stream(config, family, size, stages, arguments)
    loader = Loader(
        dataset,
        all_ready=all_ready,
        epoch_batches=dataset.epoch_size // (device_batch_size * dist.get_world_size()),
        max_bad_samples=config.max_bad_samples,
        num_workers=config.workers,
        pin_memory=device.type == "cuda",
        persistent_workers=config.workers > 0,
        timeout=config.patience_sec + LOADER_MARGIN_SEC if config.workers else 0,
    )
    return DataSpec(loader)
