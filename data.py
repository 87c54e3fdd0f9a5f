"""Batches of images, videos, moments or synthetic tensors, as families/spec.py defines them.

From a dataset `images` to a batch (B samples a device, H W the run's image size):

    shard (MDS)   jpg bytes, caption str, key str                        streamed from `data.remote`, kept in `data.local`
    resized       uint8 (3, H, W); the variant mlperf: float32           decoded, scaled, cut to size (mds/images.py)
    batch         images (B, 3, H, W), tokens int64 (B, L)               in a loader worker, captions tokenized in one call

A dataset `videos` gives clips (mds/videos.py). From a dataset `moments` (prepare/latents.py), a batch is read as
stored: moments float16 (B, 2C, h, w), tokens; or with `data.text=stored` float16 text states (B, L, D) instead of tokens.
Images are normalized on the device (model.py), because uint8 has a quarter of the bytes to copy. An unusable sample is
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
from torch import Tensor

from common import dist
from common.log import log
from common.masking import to_printable
from common.value_types import ImageSize, limited, size_in_bytes
from families.spec import Column, Family
from mds import mixture
from mds.dataset import Dataset, column_problem
from mds.fetch import PATIENCE_SEC
from mds.images import SampleDraw, crop_geometry, decode_image, max_crop_offset, read_captions, resize_and_crop, size_of
from mds.loader import BatchMemory, Loader
from mds.mixture import (
    ResolvedStream,
    StreamConfig,
    bucket_sizes_of,
    build_stream,
    count_epoch_samples,
    default_cache_folder,
    find_unfilled_buckets,
    resolve_streams,
    weight_problems,
)
from mds.moments import MomentsDataset, moments_problems
from mds.reader import BatchDataset
from mds.videos import VideosDataset
from ranks import collectives

SYNTHETIC_EPOCH_BATCHES = 1000
MAX_PICKS = 1_000_000
Encodings = Callable[[ImageSize], Mapping[str, str]]
MAX_BYTES = 10**18  # an exabyte
LOADER_MARGIN_SEC = 120.0  # a loader worker counts as hung if it is silent for this long beyond patience_sec


@dataclass(frozen=True)
class DataConfig:
    """The source and the order of batches."""

    stage: Literal["images", "videos", "moments"] = "images"
    """The kind of dataset: images, videos, or moments encoded beforehand."""
    synthetic: bool = False
    """One random batch on the device; remote and local are ignored."""
    remote: str | None = None
    """The dataset: a folder, or an address such as s3://bucket/prefix."""
    local: str | None = None
    """Cache of `remote`. null: in ~/.cache/easel; an uncompressed folder is read in place."""
    metadata: str | None = None
    """dataset.json of a third-party dataset (prepare.adopt), if it is elsewhere."""
    streams: list[StreamConfig] | None = None
    """Datasets to mix, instead of remote, local and metadata."""
    workers: int = limited(4, 0, 512)
    """Loader processes for each device. 0: read in the training process."""
    cache_limit: str | None = size_in_bytes(None, 1, MAX_BYTES, "500mb, 100gb, 1tb")
    """Size limit of `local`, over all streams. null: no limit."""
    patience_sec: float = limited(PATIENCE_SEC, 0.0, 1e6)
    """How long to wait for an unreachable store."""
    num_canonical_nodes: int | None = limited(None, 1, 2**16)
    """Fixes the order of samples, independent of the number of nodes. null: the nodes of the first start."""
    shuffle: bool = True
    """Shuffle the samples, by seed, global batch size and num_canonical_nodes."""
    normalize: Literal["symmetric", "unit"] = "symmetric"
    """Range of the VAE's input: [-1, 1], or [0, 1] (unit) as in MLPerf."""
    posterior: Literal["sample", "mean"] = "sample"
    """An image's latent: a new draw from the VAE's posterior each time, or its mean."""
    flip: bool = False
    """Mirror images at random. Moments need prepare.latents flip=true."""
    crop: Literal["center", "random"] = "center"
    """Crop of the scaled image; random: another one each epoch, not of moments."""
    fps: float | None = limited(None, 0.0, 1000.0, above=True)
    """Frames a second of a clip. null: the video's rate."""
    text: Literal["encoded", "stored"] = "encoded"
    """stored: text states of prepare.latents store_text=true. encoded: encode captions in each step."""
    max_bad_samples: int = limited(100, 0)
    """Unusable samples that a run may meet; one more stops it."""

    def __post_init__(self) -> None:
        """Name the folder that keeps the shards, so that the record of the run has it."""
        if self.local is None and self.remote is not None and not self.synthetic:
            object.__setattr__(self, "local", default_cache_folder(self.remote))

    @functools.cached_property
    def sources(self) -> list[StreamConfig]:
        """The datasets to read, each of which keeps what it has read; none for synthetic data, or where none is given."""
        if self.synthetic:
            return []
        if self.streams is not None:
            return self.streams
        return [StreamConfig(self.remote, self.local, self.metadata)] if self.remote or self.local else []

    def read(self) -> list[Dataset]:
        """Return each dataset. Raises ValueError: see `read_dataset`."""
        return [source.dataset for source in self.sources]

    def with_num_nodes(self, num_nodes: int) -> DataConfig:
        """Return this with as many canonical nodes, where none are given; what was read of the datasets is not read again."""
        config = dataclasses.replace(self, num_canonical_nodes=self.num_canonical_nodes or num_nodes)
        vars(config)["sources"] = self.sources
        return config

    def columns(self, family: Family, size: ImageSize) -> dict[str, Column]:
        """Return the columns of a batch."""
        return family.columns(self.stage, size, stored_text=self.text == "stored")

    def problems(
        self, global_batch_size: int, made_for: Mapping[str, Any], encodings: Encodings = lambda size: {}
    ) -> list[tuple[str, str]]:
        """(key, message) for every invalid value, including values that do not fit the dataset.

        Args:
            made_for: key of the configuration -> its value, for everything that a dataset of moments depends on; and
                `resize`, how the variant's images are resized.
            encodings: of that dataset's columns, for images of a size; see `mds.dataset.column_problem`.
        """
        problems = []
        if self.text == "stored" and self.stage != "moments":
            text = f"stored, but a dataset of {self.stage} has no text states. Use data.stage=moments, or data.text=encoded."
            problems.append(("data.text", text))
        if self.fps is not None and self.stage == "images":
            problems.append(("data.fps", f"{self.fps:g}, but images have no frames. Leave it out."))
        return problems if self.synthetic else problems + self._dataset_problems(global_batch_size, made_for, encodings)

    def _dataset_problems(
        self, global_batch_size: int, made_for: Mapping[str, Any], encodings: Encodings
    ) -> list[tuple[str, str]]:
        extra_keys = [
            f"data.{name}={value}" for name in ("remote", "local", "metadata") if (value := getattr(self, name))
        ]
        if self.streams is not None and extra_keys:
            return [("data.streams", f"given beside {extra_keys[0]}. Give one of them.")]
        sources = self.sources
        if not sources or not all(source.location for source in sources):
            where = "data.remote" if self.streams is None else "data.streams"
            return [(where, "not given. Give a dataset's folder or s3:// address, or data.synthetic=true.")]
        problems, datasets, size = [], [], tuple(made_for.get("image_size") or (1, 1))
        for key, source in self.named_sources():
            dataset, read_problems = mixture.read_source(key, source)
            problems += read_problems
            if dataset is not None:
                problems += self._source_problems(key, source, dataset, made_for, encodings)
                datasets.append(dataset)
        problems += weight_problems(sources)
        if len(datasets) < len(sources):
            return problems
        problems += mixture.mixture_problems(self.named_sources(), datasets, size, global_batch_size)
        if (samples := count_epoch_samples(sources, [dataset.num_samples for dataset in datasets])) < (
            self.num_canonical_nodes or 1
        ):
            problem = f"{self.num_canonical_nodes} is more than the {samples} samples of an epoch"
            problems.append(("data.num_canonical_nodes", f"{problem}. Take a smaller one, or leave it out."))
        return problems + mixture.cache_limit_problems(self.cache_limit, sources, datasets)

    def named_sources(self) -> list[tuple[str, StreamConfig]]:
        """Return each dataset with the beginning of its keys."""
        return [("data" if self.streams is None else f"data.streams[{n}]", s) for n, s in enumerate(self.sources)]

    def _source_problems(
        self, key: str, source: StreamConfig, dataset: Dataset, made_for: Mapping[str, Any], encodings: Encodings
    ) -> list[tuple[str, str]]:
        """Compare a dataset with what the run reads, and with what it was made for."""
        where = f"{key}.remote" if source.remote else f"{key}.local"
        problems = []
        if dataset.kind != self.stage:
            problem = f"the config says '{self.stage}', {dataset.metadata_address} says '{dataset.kind}'"
            problems.append(("data.stage", f"{problem}. Use data.stage={dataset.kind}, or another {where}."))
        elif dataset.kind == "moments":
            problems += moments_problems(dataset, flip=self.flip, crop=self.crop, text=self.text, fps=self.fps)
        if source.caption is not None:
            problems += mixture.caption_problems(f"{key}.caption", source.caption, dataset, self.text)
        for name, value in made_for.items():
            made = dataset.metadata.get(name.rpartition(".")[2])  # an `images` dataset does not depend on these
            if made is None or made == value:  # moments made by others may not say
                continue
            if name == "resize":
                problem = (
                    f"its images are resized by '{value}', but the moments at {dataset.location} were made of images"
                )
                variant = dataset.metadata.get("variant")
                advice = f"Make the moments again with this variant, or use theirs: model.variant={variant}"
                problems.append(("model.variant", f"{problem} resized by '{made}'. {advice}."))
            else:
                text = f"{value}, but the {dataset.kind} at {dataset.location} were made for {made}. Use that value."
                problems.append((name, text))
        streams = resolve_streams([source], [dataset], tuple(made_for.get("image_size") or (1, 1)))
        if not problems:
            texts = (column_problem(stream.dataset, encodings(stream.size)) for stream in streams)
            problems += [(where, text) for text in texts if text][:1]
        folders = [(source, dataset)] if dataset.buckets else []  # the set's own folder, then those of its buckets
        folders += [(stream.config, stream.dataset) for stream in streams]
        of_folders = [mixture.folder_problems(f"{key}.local", config, dataset) for config, dataset in folders]
        return problems + next((of_folder for of_folder in of_folders if of_folder), [])


# ---------------------------------------------------------------------------------------------------------------------
# Streamed batches
# ---------------------------------------------------------------------------------------------------------------------


class StreamingLAIONDataset(BatchDataset):
    """The dataset `images` as batches: {"images": (B, 3, H, W), text columns int64 (B, L), "bad": [...]}.

    Args:
        family: gives the images' type and the tokenizer.
        image_sizes: (width, height) of each stream's images in a batch, px.
        captions: of each stream, the column of its captions; None: the dataset's own.
        flip, crop: see DataConfig.
        arguments: keyword arguments of BatchDataset.
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
        """Decode and resize the samples, and tokenize their captions in one call."""
        ids = sample_ids.tolist()
        width, height = self.image_sizes[self.stream_of(ids[0])]
        # uint8 images stay interleaved (HWC): splitting the channels is slow in a worker, fast on a device.
        in_planes = self.image_dtype != torch.uint8
        shape = (3, height, width) if in_planes else (height, width, 3)
        memory, receipt = self.memory.allocate((len(ids), *shape), self.image_dtype)
        images, samples = memory if in_planes else memory.permute(0, 3, 1, 2), []
        for image, sample_id in zip(images, ids, strict=True):
            samples.append(self.read_good_sample(sample_id))
            image.copy_(samples[-1].pop("images"))
        return {
            "images": images,
            **self.columns_of(samples),
            "bad": [bad for sample in samples for bad in sample["bad"]],
            **receipt,
        }

    def columns_of(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the columns of a batch other than its images."""
        sizes = {"sizes": torch.tensor([sample["sizes"] for sample in samples])} if self.has_sizes else {}
        return {**self.tokenize([sample["caption"] for sample in samples]), **sizes}

    def read_good_sample(self, sample_id: int) -> dict[str, Any]:
        """Return the sample, or the next good one of its shard; "bad" lists those skipped. Raises: see `read_first_good`."""
        used, bad = self.read_first_good(sample_id, self.use_sample)
        return {**used, "bad": bad}

    def use_sample(self, sample_id: int) -> dict[str, Any]:
        """Return a sample's image (3, H, W), its caption, and its sizes (`crop_geometry`). Raises SampleError."""
        data, caption, size, draw = self.read_stored(sample_id)
        image = decode_image(data)
        at = draw.crop_offset(max_crop_offset(size_of(image), size)) if self.crop == "random" else None
        images, is_flipped = resize_and_crop(image, size, self.image_dtype, at), self.flip and draw.is_flipped
        sizes = crop_geometry(size_of(image), size, at, flipped=is_flipped)
        return {"images": images.flip(-1) if is_flipped else images, "caption": caption, "sizes": sizes}

    def read_stored(self, sample_id: int) -> tuple[bytes, str, ImageSize, SampleDraw]:
        """Return a sample's file, its caption, the size of its image in a batch, and what is drawn for it."""
        sample, draw, stream = self[sample_id], self.draw(sample_id), self.stream_of(sample_id)
        column = self.captions[stream]
        caption = draw.choose_caption(read_captions(sample if column is None else {"caption": sample[column]}))
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


def open_datasets(
    config: DataConfig, family: Family, streams: Sequence[ResolvedStream], *, device_batch_size: int, seed: int
) -> BatchDataset:
    """Open the datasets' streams. All ranks call it.

    Args:
        streams: see `mds.mixture.resolve_streams`.
        device_batch_size, seed: as of `build_data`.
    """
    sizes = bucket_sizes_of(streams)
    arguments: dict[str, Any] = {
        "streams": [build_stream(stream, config.patience_sec) for stream in streams],
        "sources": [stream.source for stream in streams] if len(config.sources) > 1 else None,
        "buckets": None if sizes is None else [sizes.index(stream.size) for stream in streams],
        "predownload": 8 * device_batch_size,
        "cache_limit": config.cache_limit,
        "batch_size": device_batch_size,
        "num_canonical_nodes": config.num_canonical_nodes or collectives.num_nodes(),
        "shuffle": config.shuffle,
        "shuffle_seed": seed,
        # A part of a dataset is picked so many samples at a time: one by one takes 3 s a million.
        "sampling_granularity": 1 + sum(stream.dataset.num_samples for stream in streams) // MAX_PICKS,
    }
    kinds = [
        {name: (c.shape, c.stored_dtype, str(c.dtype).removeprefix("torch.")) for name, c in columns.items()}
        for columns in (config.columns(family, stream.size) for stream in streams)
    ]
    tokenize = family.tokenize if config.text == "encoded" else None
    # An adopted dataset's reader decodes the named column alone: see mds.mixture.build_stream.
    captions = [None if stream.dataset.adopted else stream.config.caption for stream in streams]
    options: dict[str, Any] = dict(image_sizes=[stream.size for stream in streams], captions=captions, flip=config.flip)
    if config.stage == "moments":
        return MomentsDataset(columns=kinds, tokenize=tokenize, **options, **arguments)
    if config.stage == "videos":
        sizes = options.pop("image_sizes")
        clips = dict(sizes=sizes, rate=config.fps, tokenize=family.tokenize, crop=config.crop)
        return VideosDataset(**clips, **options, **arguments)
    return StreamingLAIONDataset(family=family, crop=config.crop, **options, **arguments)


def _log_defaults(config: DataConfig, streams: Sequence[ResolvedStream], global_batch_size: int) -> None:
    """Say where shards are kept if that was not given, and which buckets are left out."""
    for source in config.sources:
        remote, local = source.folders
        if remote is not None and local == default_cache_folder(remote):
            log.info(f"data.local: not given: the shards of {to_printable(remote)} are kept in {local}")
    if bucket_sizes_of(streams) and (unfilled := find_unfilled_buckets(streams, global_batch_size)):
        named = ", ".join(f"{width}x{height} ({num})" for (width, height), num in unfilled.items())
        log.info(f"data: these buckets fill no batch of {global_batch_size}, and are not trained on: {named}.")


def build_data(
    config: DataConfig,
    family: Family,
    *,
    size: ImageSize,
    device_batch_size: int,
    device: torch.device,
    seed: int,
    datasets: Sequence[Dataset] = (),
    all_ready: Callable[[bool], bool] = lambda is_here: is_here,
) -> DataSpec:
    """Return the run's batches for this rank, as a Composer DataSpec.

    Args:
        family: gives the columns and the tokenizer.
        size: (width, height) of the images, px.
        device_batch_size: samples per rank and batch.
        device: where synthetic batches are kept.
        seed: of the order of samples, or of the synthetic batch.
        datasets: what each dataset says of itself; empty: it is read here.
        all_ready: see Loader.

    Raises:
        StreamFailure: the dataset's index cannot be fetched; raised on all ranks.
        ValueError: the dataset does not exist.
    """
    if config.synthetic:
        return DataSpec(SyntheticBatches(config.columns(family, size), device_batch_size, device, seed))
    streams = resolve_streams(config.sources, datasets or config.read(), size)
    _log_defaults(config, streams, device_batch_size * dist.get_world_size())
    dataset = open_datasets(config, family, streams, device_batch_size=device_batch_size, seed=seed)
    loader = Loader(
        dataset,
        all_ready=all_ready,
        epoch_batches=dataset.count_epoch_batches(device_batch_size * dist.get_world_size()),
        max_bad_samples=config.max_bad_samples,
        num_workers=config.workers,
        pin_memory=device.type == "cuda",
        persistent_workers=config.workers > 0,
        limit_sec=config.patience_sec + LOADER_MARGIN_SEC,
    )
    return DataSpec(loader)
