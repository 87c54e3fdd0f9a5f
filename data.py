"""Batches of images, videos, moments or synthetic tensors, as zoo/spec.py defines them.

From a stage `images` to a batch (B samples a device, H W the run's image size):

    shard (MDS)   jpg bytes, caption str, key str                        streamed from `data.remote`, kept in `data.local`
    resized       uint8 (3, H, W); the variant mlperf: float32           decoded, scaled, cut to size (stages/images.py)
    batch         images (B, 3, H, W), tokens int64 (B, L)               in a loader worker, captions tokenised in one call

A stage `videos` gives clips (stages/videos.py). From a stage `moments` (prepare/latents.py), a batch is read as
stored: moments float16 (B, 2C, h, w), tokens; or with `data.text=stored` float16 text states (B, L, D) instead of tokens.
Images are normalised on the device (model.py), because uint8 has a quarter of the bytes to copy. An unusable sample is
reported, counted, and replaced by the next good one of its shard. So every batch is full, and all ranks have the same number.

`data.synthetic=true` gives one batch with the same columns, drawn once on the device, to measure the model's speed alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from composer.core import DataSpec
from composer.utils import dist
from torch import Tensor

from cli import ranks
from cli.limits import ImageSize, limited, size_in_bytes
from cli.log import log
from cli.masking import printable
from stages import stage_checks
from stages.batch_memory import BatchMemory
from stages.dataset import Stage, column_problem
from stages.draws import Draw
from stages.fetch import PATIENCE_SEC
from stages.images import captions_of, crop_room, decode_image, resize_and_crop, shown_part, size_of
from stages.loader import Loader
from stages.mixture import (
    Opened,
    StreamConfig,
    buckets_of,
    default_folder,
    epoch_samples,
    opened,
    stream_of,
    unfilled,
    weight_problems,
)
from stages.moments import MomentsStream, reading_problems
from stages.stream import BatchStream
from stages.videos import VideosStream
from zoo.spec import Column, Family

# Every setting that affects the order of samples is explicit, so it depends only on the seed and the global batch size.
ORDER = {
    "sampling_method": "balanced",
    "shuffle_algo": "py1e",
    "shuffle_block_size": 1 << 18,  # samples
}
SYNTHETIC_EPOCH_BATCHES = 1000
MOST_PICKS = 1_000_000
Encodings = Callable[[ImageSize], Mapping[str, str]]
MOST_BYTES = 10**18  # an exabyte
LOADER_MARGIN_SEC = 120.0  # a loader worker counts as hung if it is silent for this long beyond patience_sec


@dataclass(frozen=True)
class DataConfig:
    """The source and the order of batches."""

    stage: Literal["images", "videos", "moments"] = "images"
    """The kind of stage to read: images or videos, or moments encoded beforehand."""
    synthetic: bool = False
    """One random batch, drawn once and kept on the device. remote and local are ignored."""
    remote: str | None = None
    """The stage: a folder, or an address such as s3://bucket/prefix."""
    local: str | None = None
    """Folder that keeps the shards of `remote`. null: one in ~/.cache/easel; a folder is read in place, unless compressed."""
    facts: str | None = None
    """dataset.json of a data set that others have written (prepare.adopt), if it does not lie there: a file or address."""
    streams: list[StreamConfig] | None = None
    """Several stages that are mixed, in place of remote, local and facts."""
    workers: int = limited(4, 0, 512)
    """Loader processes for each device. 0: read in the training process."""
    cache_limit: str | None = size_in_bytes(None, 1, MOST_BYTES, "500mb, 100gb, 1tb")
    """Size limit of `local`, of all streams together, shards being fetched included. null: no limit."""
    patience_sec: float = limited(PATIENCE_SEC, 0.0, 1e6)
    """How long the run waits for an unreachable store before it stops."""
    num_canonical_nodes: int | None = limited(None, 1, 2**16)
    """Nodes whose samples lie in shards of their own. It fixes the order of samples. null: as many as begin the run."""
    shuffle: bool = True
    """Shuffle the samples. Their order depends only on seed, global batch size and num_canonical_nodes."""
    normalize: Literal["symmetric", "unit"] = "symmetric"
    """Range of the images that the VAE sees: [-1, 1], or [0, 1] (unit) as in the MLPerf reference."""
    posterior: Literal["sample", "mean"] = "sample"
    """The latent of an image: a new draw from the VAE's posterior at each reading, or the posterior's mean."""
    flip: bool = False
    """Mirror each picture in half of the epochs, at random. From moments: only where prepare.latents had flip=true."""
    crop: Literal["center", "random"] = "center"
    """The part of the scaled picture that is kept: its centre, or another place in each epoch (not of moments)."""
    fps: float | None = limited(None, 0.0, 1000.0, above=True)
    """Frames a second of a clip, each the one that a film shows at that time. null: the film's own rate."""
    text: Literal["encoded", "stored"] = "encoded"
    """stored: read the text states that prepare.latents wrote with store_text=true. encoded: encode captions in each step."""
    max_bad_samples: int = limited(100, 0)
    """The run stops if there are more unusable samples than this."""

    def __post_init__(self) -> None:
        """Name the folder that keeps the shards, so that the record of the run has it."""
        if self.local is None and self.remote is not None and not self.synthetic:
            object.__setattr__(self, "local", default_folder(self.remote))

    @functools.cached_property
    def sources(self) -> list[StreamConfig]:
        """The stages to read, each of which keeps what it has read; none for synthetic data, or where none is given."""
        if self.synthetic:
            return []
        if self.streams is not None:
            return self.streams
        return [StreamConfig(self.remote, self.local, self.facts)] if self.remote or self.local else []

    def read(self) -> list[Stage]:
        """Return the facts of each stage. Raises ValueError: see `read_stage`."""
        return [source.contents for source in self.sources]

    def on_nodes(self, num_nodes: int) -> DataConfig:
        """Return this with as many canonical nodes, where none are given; what was read of the stages is not read again."""
        found = dataclasses.replace(self, num_canonical_nodes=self.num_canonical_nodes or num_nodes)
        vars(found)["sources"] = self.sources
        return found

    def columns(self, family: Family, size: ImageSize) -> dict[str, Column]:
        """Return the columns of a batch."""
        return family.columns(self.stage, size, stored_text=self.text == "stored")

    def problems(
        self, global_batch_size: int, made_for: Mapping[str, Any], encodings: Encodings = lambda size: {}
    ) -> list[tuple[str, str]]:
        """(key, message) for every invalid value, including values that do not fit the stage.

        Args:
            made_for: key of the configuration -> its value, for everything that a stage of moments depends on; and `resize`,
                how the variant's images are resized.
            encodings: of that stage's columns, for images of a size; see `stages.dataset.column_problem`.
        """
        found = []
        if self.text == "stored" and self.stage != "moments":
            text = (
                f"stored, but a stage of {self.stage} has no text states. Use data.stage=moments, or data.text=encoded."
            )
            found.append(("data.text", text))
        if self.fps is not None and self.stage == "images":
            found.append(("data.fps", f"{self.fps:g}, but images have no frames. Leave it out."))
        return found if self.synthetic else found + self._stage_problems(global_batch_size, made_for, encodings)

    def _stage_problems(
        self, global_batch_size: int, made_for: Mapping[str, Any], encodings: Encodings
    ) -> list[tuple[str, str]]:
        beside = [f"data.{name}={value}" for name in ("remote", "local", "facts") if (value := getattr(self, name))]
        if self.streams is not None and beside:
            return [("data.streams", f"given beside {beside[0]}. Give one of them.")]
        sources = self.sources
        if not sources or not all(source.location for source in sources):
            where = "data.remote" if self.streams is None else "data.streams"
            return [(where, "not given. Give a stage's folder or s3:// address, or data.synthetic=true.")]
        found, stages, size = [], [], tuple(made_for.get("image_size") or (1, 1))
        for key, source in self.named_sources():
            stage, problems = stage_checks.read_source(key, source)
            found += problems
            if stage is not None:
                found += self._source_problems(key, source, stage, made_for, encodings)
                stages.append(stage)
        found += weight_problems(sources)
        if len(stages) < len(sources):
            return found
        found += stage_checks.together(self.named_sources(), stages, size, global_batch_size)
        if (samples := epoch_samples(sources, [stage.num_samples for stage in stages])) < (
            self.num_canonical_nodes or 1
        ):
            given = f"{self.num_canonical_nodes} is more than the {samples} samples of an epoch"
            found.append(("data.num_canonical_nodes", f"{given}. Take a smaller one, or leave it out."))
        return found + stage_checks.limit_problems(self.cache_limit, sources, stages)

    def named_sources(self) -> list[tuple[str, StreamConfig]]:
        """Return each stage with the beginning of its keys."""
        return [("data" if self.streams is None else f"data.streams[{n}]", s) for n, s in enumerate(self.sources)]

    def _source_problems(
        self, key: str, source: StreamConfig, stage: Stage, made_for: Mapping[str, Any], encodings: Encodings
    ) -> list[tuple[str, str]]:
        """Compare a stage with what the run reads, and with what it was made for."""
        where = f"{key}.remote" if source.remote else f"{key}.local"
        found = []
        if stage.kind != self.stage:
            given = f"the config says '{self.stage}', {stage.facts_at} says '{stage.kind}'"
            found.append(("data.stage", f"{given}. Use data.stage={stage.kind}, or another {where}."))
        elif stage.kind == "moments":
            found += reading_problems(stage, flip=self.flip, crop=self.crop, text=self.text, fps=self.fps)
        if source.caption is not None:
            found += stage_checks.caption_problems(f"{key}.caption", source.caption, stage, self.text)
        for name, value in made_for.items():
            made = stage.facts.get(name.rpartition(".")[2])  # an `images` stage does not depend on these
            if made is None or made == value:  # moments made by others may not say
                continue
            if name == "resize":
                given = f"its images are resized by '{value}', but the moments at {stage.location} were made of images"
                todo = f"Make the moments again with this variant, or use theirs: model.variant={stage.facts.get('variant')}"
                found.append(("model.variant", f"{given} resized by '{made}'. {todo}."))
            else:
                text = f"{value}, but the {stage.kind} at {stage.location} were made for {made}. Use that value."
                found.append((name, text))
        streams = opened([source], [stage], tuple(made_for.get("image_size") or (1, 1)))
        texts = [] if found else [said for one in streams if (said := column_problem(one.stage, encodings(one.size)))]
        found += [(where, said) for said in texts[:1]]
        places = [(source, stage)] if stage.buckets else []  # the set's own folder, then those of its buckets
        places += [(one.config, one.stage) for one in streams]
        of_folders = [stage_checks.folder_problems(f"{key}.local", config, stage) for config, stage in places]
        return found + next((problems for problems in of_folders if problems), [])


# ---------------------------------------------------------------------------------------------------------------------
# Streamed batches
# ---------------------------------------------------------------------------------------------------------------------


class StreamingLAIONDataset(BatchStream):
    """The stage `images` as batches: {"images": (B, 3, H, W), text columns int64 (B, L), "bad": [...]}.

    Args:
        family: gives the images' type and the tokenizer.
        image_sizes: (width, height) of each stream's pictures in a batch, px.
        captions: of each stream, the column of its captions; None: the stage's own.
        flip, crop: see DataConfig.
        arguments: keyword arguments of StreamingDataset.
    """

    def __init__(
        self,
        *,
        family: Family,
        image_sizes: Sequence[ImageSize],
        captions: Sequence[str | None] | None = None,
        flip: bool = False,
        crop: str = "center",
        **arguments: Any,
    ):
        super().__init__(**arguments)
        self.flip, self.crop, self.image_sizes = flip, crop, list(image_sizes)
        self.captions = captions or [None] * len(self.image_sizes)
        columns = family.columns("images", self.image_sizes[0])
        self.image_dtype, self.has_sizes = columns["images"].dtype, "sizes" in columns
        self.tokenize = family.tokenize
        self.memory = BatchMemory()

    def read_batch(self, sample_ids: np.ndarray) -> dict[str, Any]:
        """Decode and resize the samples, and tokenise their captions in one call."""
        ids = sample_ids.tolist()
        width, height = self.image_sizes[self.stream_of(ids[0])]
        # Of bytes a pixel's three lie together, as in its file: a worker would take long to part them, a device does not.
        in_planes = self.image_dtype != torch.uint8
        shape = (3, height, width) if in_planes else (height, width, 3)
        memory, receipt = self.memory.take((len(ids), *shape), self.image_dtype)
        images, samples = memory if in_planes else memory.permute(0, 3, 1, 2), []
        for image, sample_id in zip(images, ids, strict=True):
            samples.append(self.read_sample(sample_id))
            image.copy_(samples[-1].pop("images"))
        return {
            "images": images,
            **self.columns_of(samples),
            "bad": [bad for sample in samples for bad in sample["bad"]],
            **receipt,
        }

    def columns_of(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the columns of a batch beside its images."""
        sizes = {"sizes": torch.tensor([sample["sizes"] for sample in samples])} if self.has_sizes else {}
        return {**self.tokenize([sample["caption"] for sample in samples]), **sizes}

    def read_sample(self, sample_id: int) -> dict[str, Any]:
        """Return the sample, or the next good one of its shard; "bad" lists the skipped ones. Raises: see `first_good`."""
        used, bad = self.first_good(sample_id, self.use)
        return {**used, "bad": bad}

    def use(self, sample_id: int) -> dict[str, Any]:
        """Return a sample's image (3, H, W), its caption, and its sizes (`shown_part`). Raises SampleError."""
        data, caption, size, draw = self.look(sample_id)
        image = decode_image(data)
        at = draw.offset(crop_room(size_of(image), size)) if self.crop == "random" else None
        images, is_flipped = resize_and_crop(image, size, self.image_dtype, at), self.flip and draw.is_flipped
        sizes = shown_part(size_of(image), size, at, flipped=is_flipped)
        return {"images": images.flip(-1) if is_flipped else images, "caption": caption, "sizes": sizes}

    def look(self, sample_id: int) -> tuple[bytes, str, ImageSize, Draw]:
        """Return a sample's file, its caption, the size of its image in a batch, and what is drawn for it."""
        sample, draw, stream = self[sample_id], self.draw(sample_id), self.stream_of(sample_id)
        column = self.captions[stream]
        caption = draw.one_of(captions_of(sample if column is None else {"caption": sample[column]}))
        return sample["jpg"], caption, self.image_sizes[stream], draw


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


def open_stages(
    config: DataConfig, family: Family, given: Sequence[Opened], *, device_batch_size: int, seed: int
) -> BatchStream:
    """Open the stages' streams. All ranks call it.

    Args:
        given: see `stages.mixture.opened`.
        device_batch_size, seed: as of `build_data`.
    """
    sizes = buckets_of(given)
    arguments: dict[str, Any] = {
        "streams": [stream_of(one, config.patience_sec) for one in given],
        "sources": [one.source for one in given] if len(config.sources) > 1 else None,
        "buckets": None if sizes is None else [sizes.index(one.size) for one in given],
        "predownload": 8 * device_batch_size,
        "cache_limit": config.cache_limit,
        "batch_size": device_batch_size,
        "num_canonical_nodes": config.num_canonical_nodes or ranks.num_nodes(),
        "shuffle": config.shuffle,
        "shuffle_seed": seed,
        # A part of a stage is picked so many samples at a time: one by one takes 3 s a million.
        "sampling_granularity": 1 + sum(one.stage.num_samples for one in given) // MOST_PICKS,
        **ORDER,
    }
    kinds = [
        {name: (c.shape, c.stored, str(c.dtype).removeprefix("torch.")) for name, c in columns.items()}
        for columns in (config.columns(family, one.size) for one in given)
    ]
    tokenize = family.tokenize if config.text == "encoded" else None
    captions = [None if one.stage.adopted else one.config.caption for one in given]  # of others: see stream_of
    ways: dict[str, Any] = dict(image_sizes=[one.size for one in given], captions=captions, flip=config.flip)
    if config.stage == "moments":
        return MomentsStream(columns=kinds, tokenize=tokenize, **ways, **arguments)
    if config.stage == "videos":
        sizes = ways.pop("image_sizes")
        clips = dict(sizes=sizes, rate=config.fps, tokenize=family.tokenize, crop=config.crop)
        return VideosStream(**clips, **ways, **arguments)
    return StreamingLAIONDataset(family=family, crop=config.crop, **ways, **arguments)


def _say(config: DataConfig, given: Sequence[Opened], global_batch_size: int) -> None:
    """Say where shards are kept if that was not given, and which buckets are left out."""
    for source in config.sources:
        remote, local = source.folders
        if remote is not None and local == default_folder(remote):
            log.info(f"data.local: not given: the shards of {printable(remote)} are kept in {local}")
    if buckets_of(given) and (rare := unfilled(given, global_batch_size)):
        named = ", ".join(f"{width}x{height} ({num})" for (width, height), num in rare.items())
        log.info(f"data: these buckets fill no batch of {global_batch_size}, and are not trained on: {named}.")


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
    given = opened(config.sources, stages or config.read(), size)
    _say(config, given, device_batch_size * dist.get_world_size())
    dataset = open_stages(config, family, given, device_batch_size=device_batch_size, seed=seed)
    loader = Loader(
        dataset,
        all_ready=all_ready,
        epoch_batches=dataset.batches_of_epoch(device_batch_size * dist.get_world_size()),
        max_bad_samples=config.max_bad_samples,
        num_workers=config.workers,
        pin_memory=device.type == "cuda",
        persistent_workers=config.workers > 0,
        timeout=config.patience_sec + LOADER_MARGIN_SEC if config.workers else 0,
    )
    return DataSpec(loader)
