"""Batches of images, moments or synthetic tensors, as zoo/spec.py defines them.

From a stage `images` to a batch (B samples a device, H W the run's image size):

    shard (MDS)   jpg bytes, caption str, key str                        streamed from `data.remote`, kept in `data.local`
    resized       uint8 (3, H, W); the variant mlperf: float32           decoded, scaled, cut at its centre (stages/images.py)
    batch         images (B, 3, H, W), tokens int64 (B, L)               in a loader worker, captions tokenised in one call

From a stage `moments` (prepare/latents.py), a batch is read as stored: moments float16 (B, 2C, h, w), tokens.
Images are normalised on the device (model.py), because uint8 has a quarter of the bytes to copy. An unusable sample is
reported, counted, and replaced by the next good one of its shard. So every batch is full, and all ranks have the same number.

`data.synthetic=true` gives one batch with the same columns, drawn once on the device, to measure the model's speed alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from composer.core import DataSpec
from composer.utils import dist
from streaming import StreamingDataLoader
from streaming.base.util import bytes_to_int
from torch import Tensor
from torch.utils.data import DataLoader

from cli.limits import ImageSize, limited, size_in_bytes
from cli.log import log
from cli.masking import printable
from cli.private_api import require_private_api
from stages.batch_wait import END, files_and_bytes, next_batch
from stages.dataset import Stage, column_problem, holds_another_stage, is_remote, read_stage
from stages.fetch import PATIENCE_SEC, StreamFailure
from stages.images import check_caption, decode_image, resize_and_crop
from stages.moments import MomentsStream
from stages.shared_memory import one_at_a_time, remove_dead_segments
from stages.stream import BatchStream
from stages.workers import live_as_worker
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

require_private_api(DataLoader, "_iterator", why="worker processes are ended with the run")
require_private_api(
    "torch.utils.data.dataloader",
    "_MultiProcessingDataLoaderIter._shutdown_workers",
    why="worker processes are ended with the run",
)


def own_folder(remote: str) -> str:
    """Return the folder that keeps an address's shards where none is given: one for each address, whatever its password."""
    parts = urlsplit(remote.rstrip("/"))
    place = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    digest = hashlib.blake2b(place.encode(), digest_size=4).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return str(cache / "easel" / "stages" / f"{place.rpartition('/')[2]}-{digest}")


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
    workers: int = limited(4, 0, 512)
    """Loader processes for each device. 0: read in the training process."""
    cache_limit: str | None = size_in_bytes(None, 1, MOST_BYTES, "500mb, 100gb, 1tb")
    """Size limit of `local`. Shards being fetched, one per process, are extra. null: no limit."""
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
    max_bad_samples: int = limited(100, 0)
    """The run stops if there are more unusable samples than this."""

    def __post_init__(self) -> None:
        """Name the folder of an address's shards, so that the record of the run has it."""
        if self.local is None and self.remote is not None and is_remote(self.remote) and not self.synthetic:
            object.__setattr__(self, "local", own_folder(self.remote))

    @property
    def location(self) -> str | None:
        return self.remote or self.local

    @property
    def folders(self) -> tuple[str | None, str | None]:
        """(source of the shards, folder that they are read from); a local stage without `local` is read in place."""
        return (None, self.remote) if self.remote and self.local is None else (self.remote, self.local)

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
        if self.location is None:
            return [("data.remote", "not given. Give a stage's folder or s3:// address, or data.synthetic=true.")]
        where = "data.remote" if self.remote else "data.local"
        if is_remote(self.location) and (self.local is None or is_remote(self.local)):
            given = f"{self.local} is not a folder on this machine"
            return [("data.local", f"{given}. It keeps the shards of {self.location}. Give a folder, or leave it out.")]
        try:
            stage = read_stage(self.location)
        except ValueError as error:
            return [(where, str(error))]
        found = []
        if stage.kind != self.stage:
            given = f"the config says '{self.stage}', {stage.location}/dataset.json says '{stage.kind}'"
            found.append(("data.stage", f"{given}. Use data.stage={stage.kind}, or another {where}."))
        for key, value in made_for.items():
            made = stage.facts.get(key.rpartition(".")[2])  # an `images` stage does not depend on these
            if made is None or made == value:  # moments made by others may not say
                continue
            if key == "resize":
                given = f"its images are resized by '{value}', but the moments at {stage.location} were made of images"
                todo = f"Make the moments again with this variant, or use theirs: model.variant={stage.facts.get('variant')}"
                found.append(("model.variant", f"{given} resized by '{made}'. {todo}."))
            else:
                text = f"{value}, but the moments at {stage.location} were made for {made}. Use that value."
                found.append((key, text))
        if not found and (text := column_problem(stage, encodings)):
            found.append((where, text))
        if stage.num_samples < global_batch_size:
            given = f"{global_batch_size} is more than the {stage.num_samples} samples of the stage at {stage.location}"
            found.append(("global_batch_size", f"{given}. Take a smaller one, or more data."))
        return found + self._cache_problems(stage)

    def _cache_problems(self, stage: Stage) -> list[tuple[str, str]]:
        """Check the folder that keeps the shards, if there is one."""
        limit = None if self.cache_limit is None else bytes_to_int(self.cache_limit)
        if self.remote is None or self.local is None:
            in_place = (
                f"{self.cache_limit} has no effect on a folder that is read in place. Give data.remote and data.local."
            )
            return [("data.cache_limit", in_place)] if limit is not None else []
        if not is_remote(self.remote):
            local, remote = Path(os.path.realpath(self.local)), Path(os.path.realpath(self.remote))
            if local == remote:
                return [("data.local", f"{self.local} is data.remote too. Leave it out: a folder is read in place.")]
            apart = "Give a folder beside it: a stage's own files and the shards of a run are not to mix."
            if remote in local.parents:
                return [("data.local", f"{self.local} lies inside of the stage at {self.remote}. {apart}")]
            if local in remote.parents:
                return [("data.local", f"{self.local} has the stage at {self.remote} inside of it. {apart}")]
        if holds_another_stage(self.local, stage):
            given = f"{self.local} holds shards of another stage than {stage.location}"
            return [("data.local", f"{given}. Give another folder, or remove this one.")]
        if limit is not None and limit < 4 * stage.largest_shard_bytes:
            given = f"{self.cache_limit} holds fewer than 4 of the largest shard ({stage.largest_shard_bytes:,} bytes)"
            least = 4 * stage.largest_shard_bytes // 2**20 + 1
            return [("data.cache_limit", f"{given}. Give at least {least}mb, or null.")]
        return []


# ---------------------------------------------------------------------------------------------------------------------
# Streamed batches
# ---------------------------------------------------------------------------------------------------------------------


class StreamingLAIONDataset(BatchStream):
    """The stage `images` as batches: {"images": (B, 3, H, W), text columns int64 (B, L), "bad": [...]}.

    Args:
        family: gives the images' type and the tokenizer.
        image_size: (width, height), px.
        arguments: keyword arguments of StreamingDataset.
    """

    def __init__(self, *, family: Family, image_size: ImageSize, **arguments: Any):
        super().__init__(**arguments)
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
        sample = self[sample_id]
        caption = check_caption(sample["caption"])
        images = resize_and_crop(decode_image(sample["jpg"]), self.image_size, self.image_dtype)
        return {"images": images, "caption": caption}


class Loader(StreamingDataLoader):
    """A StreamingDataLoader with epochs of a fixed length; it removes the report of unusable samples from each batch.

    An epoch is the stage's number of whole batches. Streaming itself pads the samples to a multiple of the number of ranks.
    Then an epoch's length, and from the second epoch on the batches, would depend on that number. With a fixed length, a run
    can resume on another number of ranks at the same place (mosaicml/streaming issue 869).

    `bad_samples`: sample id -> (key, reason), of this rank so far; callbacks/run_record.py gathers them from all ranks.
    `all_ready`: called about once a second with false while this rank waits for its next batch, then with true. It returns
    whether all ranks have theirs; no rank starts its batch earlier. An error that it raises ends the wait.
    """

    def __init__(
        self,
        dataset: BatchStream,
        *,
        epoch_batches: int,
        max_bad_samples: int,
        all_ready: Callable[[bool], bool] = lambda is_here: is_here,
        **arguments: Any,
    ):
        super().__init__(dataset, batch_size=None, worker_init_fn=live_as_worker, **arguments)
        self.all_ready = all_ready
        self.epoch_batches = epoch_batches
        self.max_bad_samples = max_bad_samples
        self.bad_samples: dict[int, tuple[str, str]] = {}
        self._batches_before = 0

    def __len__(self) -> int:
        return self.epoch_batches

    def resume(self, epoch: int, batch_in_epoch: int, global_batch_size: int) -> None:
        """Let the next iteration begin within an epoch, after that many of its batches."""
        self.dataset.resume(epoch, batch_in_epoch * global_batch_size)
        self._batches_before = batch_in_epoch

    def close(self) -> None:
        """End the worker processes; the garbage collector would wait five seconds for each, for nothing."""
        if self._iterator is not None and self.num_workers:
            self._iterator._shutdown_workers()
        self.dataset.let_go()

    def check(self, bad_samples: Mapping[int, tuple[str, str]]) -> None:
        """Raise ValueError, with the first few names, if these are more than the limit."""
        if len(bad_samples) <= self.max_bad_samples:
            return
        named = "; ".join(f"{printable(key)}: {reason}" for key, reason in list(bad_samples.values())[:5])
        raise ValueError(
            f"data.max_bad_samples: {len(bad_samples)} samples cannot be used, {self.max_bad_samples} are allowed. First: "
            f"{named}. Raise data.max_bad_samples, or make the stage again without them."
        )

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        num_batches, self._batches_before = self._batches_before, 0
        batches = DataLoader.__iter__(self)  # not StreamingDataLoader's generator: an error in a wait would end that
        arrived = functools.partial(files_and_bytes, self.dataset.stream.local)
        while num_batches < self.epoch_batches:
            batch = next_batch(batches, arrived, self.timeout, lambda: self.all_ready(False))
            if batch is END:
                break
            if "failure" in batch:
                raise StreamFailure(batch["failure"][0])
            self.bad_samples.update({sample_id: (key, reason) for sample_id, key, reason in batch.pop("bad", ())})
            self.check(self.bad_samples)
            while not self.all_ready(True):
                pass  # each pass: the others have waited for another second
            num_batches += 1
            yield batch
        if num_batches < self.epoch_batches:
            given = f"the epoch ended after {num_batches} of {self.epoch_batches} batches, without an error"
            raise StreamFailure(f"data: {given}. Nothing was trained on less than it should; start the run again.")


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


def open_stage(
    config: DataConfig,
    family: Family,
    *,
    size: ImageSize,
    device_batch_size: int,
    seed: int,
    index_sha256: str,
) -> MomentsStream | StreamingLAIONDataset:
    """Remove what ended runs have left in shared memory, then open a stage. All ranks call it. Arguments: as `build_data`."""
    remote, local = config.folders
    arguments = {
        "remote": remote,
        "local": local,
        "patience_sec": config.patience_sec,
        "index_sha256": index_sha256,
        "predownload": 8 * device_batch_size,
        "cache_limit": config.cache_limit,
        "batch_size": device_batch_size,
        "num_canonical_nodes": config.num_canonical_nodes,
        "shuffle": config.shuffle,
        "shuffle_seed": seed,
        **ORDER,
    }
    columns = family.columns("moments", size).items()
    kinds = {name: (c.shape, c.stored, str(c.dtype).removeprefix("torch.")) for name, c in columns}
    with one_at_a_time() if dist.get_local_rank() == 0 else contextlib.nullcontext():
        if dist.get_local_rank() == 0:
            remove_dead_segments()
        dist.barrier()
        if config.stage == "moments":
            return MomentsStream(columns=kinds, **arguments)
        return StreamingLAIONDataset(family=family, image_size=size, **arguments)


def build_data(
    config: DataConfig,
    family: Family,
    *,
    size: ImageSize,
    device_batch_size: int,
    device: torch.device,
    seed: int,
    index_sha256: str | None = None,
    all_ready: Callable[[bool], bool] = lambda is_here: is_here,
) -> DataSpec:
    """Return the run's batches for this rank, as a Composer DataSpec.

    Args:
        family: gives the columns and the tokenizer.
        size: (width, height) of the images, px.
        device_batch_size: samples per rank and batch.
        device: where synthetic batches are kept.
        seed: of the order of samples, or of the synthetic batch.
        index_sha256: digest of the stage's index.json, from dataset.json; None: dataset.json is read here.
        all_ready: see Loader.

    Raises:
        StreamFailure: the stage's index cannot be fetched; raised on all ranks.
        ValueError: the stage does not exist.
    """
    if config.synthetic:
        return DataSpec(SyntheticBatches(family.columns(config.stage, size), device_batch_size, device, seed))
    remote, local = config.folders
    if remote is not None and is_remote(remote) and local == own_folder(remote):
        log.info(f"data.local: not given: the shards of {printable(remote)} are kept in {local}")
    dataset = open_stage(
        config,
        family,
        size=size,
        device_batch_size=device_batch_size,
        seed=seed,
        index_sha256=index_sha256 or read_stage(config.location).index_sha256,
    )
    loader = Loader(
        dataset,
        all_ready=all_ready,
        epoch_batches=dataset.size // (device_batch_size * dist.get_world_size()),
        max_bad_samples=config.max_bad_samples,
        num_workers=config.workers,
        pin_memory=device.type == "cuda",
        persistent_workers=config.workers > 0,
        timeout=config.patience_sec + LOADER_MARGIN_SEC if config.workers else 0,
    )
    return DataSpec(loader)
