"""Encode the dataset `images` or `videos` once into the dataset `moments`: each image's VAE moments, each caption's tokens.

    python -m prepare.latents IN OUT model.weights=checkpoints/sd/512-base-ema.ckpt
    composer -n 8 -m prepare.latents /data/laion_images /data/laion_moments model.weights=/weights/sd2 image_size=512
    composer -n 8 -m prepare.latents s3://bucket/images s3://bucket/moments model.weights=random store_text=true

IN: a dataset `images` or a set of buckets, or `videos` for a family of videos, a folder or an address in a store. OUT: a
folder that is new, empty or from the same command, or an address in a store. Images are resized as in training, and cropped
at their center; of a video the clip in its middle is taken. The network's other inputs about the images are stored too
(families/spec.py). Unusable samples are skipped, counted, and listed with their reasons in OUT/skipped.jsonl. A missing or
damaged shard of IN stops the command.

Each shard of IN becomes a part of OUT (prepare/parts.py), made by rank (shard number) modulo (number of ranks). If stopped
at any point, the same command resumes with the missing parts, also on another number of ranks. OUT then has the same bytes
as without the stop (on the same kind of device). Ranks of several machines share the work where all see IN and OUT: folders
at one path, or stores. On a CPU a rank computes with one thread, since the number of threads changes the last bits: start one
rank per core, `composer -n CORES`. Ranks beyond the number of shards have nothing to do (a smaller shard_size of
prepare.shards gives more shards). The default precision is fp32: moments are made once and used for days.

model.weights: a name on the hub, a diffusers folder, an LDM checkpoint, or random for meaningless encoders; none: the hub's
for this network.

Keys: model.family preset variant weights, image_size (512, or [width,height]), normalize (symmetric, unit), batch_size
(16; of videos 1), precision (fp32, tf32, bf16), store_text (false), flip (false: no moments of the mirrored image),
timestep (false: the metadata's is no column), shard_size (64mb), workers (decoding threads per rank, 4), metadata
(dataset.json of a third-party dataset, if it does not lie in IN). Of videos num_frames (the family's), fps (each video's
own); tiling (false), for a VAE that takes too much memory.
Exit code: 0 if at least one sample was written, 1 if none was or the work failed, 2 if it could not start.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from common import dist
from common.command import command, start
from common.command_line import Problem
from common.errors import ConfigError
from common.log import log
from common.value_types import ImageSize, Pixels, bytes_to_int, limited, size_in_bytes
from families import load_family
from families.encoders import ModelConfig, default_num_frames, fetch_model_weights, model_problems
from families.spec import MAX_FRAMES, MAX_SIDE_PX, parse_size
from mds.dataset import KINDS, Dataset, read_dataset
from mds.fetch import HASH
from mds.images import resize_name
from prepare.addresses import Address, open_address, out_problem, report_write_errors, writable_store_problem
from prepare.arguments import parse_arguments
from prepare.encoder import Encoder, decode_row
from prepare.moment_rows import mds_columns, put_empty_text
from prepare.parts import (
    PATIENCE_SEC,
    Part,
    Plan,
    SampleCounts,
    begin_dataset,
    bucket_name,
    build_bucket_set_plan,
    finish_bucket_set,
    finish_dataset,
    format_destination,
    make_part,
    parts_to_make,
    wait_for_parts,
    wait_for_plan,
)
from prepare.source_shards import REMAKE_HINT, map_in_order, open_shard

# ---------------------------------------------------------------------------------------------------------------------
# The keys
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LatentsConfig:
    """The keys of this command."""

    model: ModelConfig = field(default_factory=ModelConfig)
    image_size: Pixels = limited(512, 1, MAX_SIDE_PX, usual="512, or [width, height]")
    """Pixels: one number for a square, or [width, height]."""
    num_frames: int | None = limited(None, 1, MAX_FRAMES, usual="9 to 129")
    """Frames of a clip. null: the family's own number. Families of images have none."""
    fps: float | None = limited(None, 0.0, 1000.0, above=True)
    """Frames a second of a clip, each the one that a video shows at that time. null: the video's own rate."""
    normalize: Literal["symmetric", "unit"] = "symmetric"
    """Range of the images that the VAE sees: [-1, 1], or [0, 1] (unit) as in the MLPerf reference."""
    batch_size: int | None = limited(None, 1, 2**16)
    """Images per call of the VAE. It changes last bits, so it is fixed for a dataset. null: 16, of videos 1."""
    tiling: bool = False
    """Encode each clip in overlapping tiles: less memory, slightly other moments. Of videos alone."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Precision of the encoders. Moments are made once and used for days."""
    store_text: bool = False
    """Also store the text encoder's states: 158 kB per caption for SD2."""
    flip: bool = False
    """Also store the moments of the mirrored image, for data.flip=true: 66 kB for SD2 at 512 pixels."""
    timestep: bool = False
    """Also store the metadata's `timestep`, at which validation.times=eighths then sees the sample (prepare.coco)."""
    shard_size: str = size_in_bytes("64mb", 1024, 2**32 - 1, "1kb to 4gb")  # MDS counts in 32 bits
    """Size of a shard."""
    workers: int = limited(4, 1, 512)
    """Decoding threads for each rank or worker."""
    metadata: str | None = None
    """dataset.json of a third-party dataset (prepare.adopt), if it does not lie in IN."""

    @property
    def size(self) -> ImageSize:
        """(width, height) in pixels; of a family of videos (width, height, frames)."""
        family_frames = default_num_frames(self.model)
        return parse_size(self.image_size) + (() if family_frames is None else (self.num_frames or family_frames,))

    @property
    def vae_batch_size(self) -> int:
        """Images per call of the VAE."""
        return self.batch_size or (16 if len(self.size) == 2 else 1)


def check(config: LatentsConfig) -> list[Problem]:
    """Return every problem that can be found before anything is built."""
    problems = []
    if config.precision == "tf32" and not torch.cuda.is_available():
        problems.append(Problem("precision: tf32 needs a GPU. Possible on a CPU: fp32, bf16.", ("precision",)))
    if torch.cuda.is_available() and dist.get_local_world_size() > torch.cuda.device_count():
        text = f"{dist.get_local_world_size()} ranks on this machine, which has {torch.cuda.device_count()} GPUs"
        problems.append(Problem(f"composer -n: {text}. Start at most that many."))
    if config.model.denoiser is not None:
        problems.append(
            Problem("model.denoiser: has no use here: nothing is trained. Leave it out.", ("model.denoiser",))
        )
    of_videos = {"num_frames": config.num_frames, "fps": config.fps, "tiling": config.tiling or None}
    for key, value in of_videos.items():
        if value is not None and len(config.size) == 2:
            text = f"{key}: {str(value).lower()}, but {config.model.family} makes images"
            problems.append(Problem(f"{text}. Leave it out.", (key,)))
    problems += model_problems(config.model, config.size, needs_encoders=True)
    if config.flip and not problems:
        family = load_family(config.model.family, config.model.preset, config.model.variant)
        if beside := family.image_columns(config.size):
            text = f"flip: true, but {family.name} needs {', '.join(beside)}, which are not stored of mirrored images"
            problems.append(Problem(f"{text}. Leave it out.", ("flip",)))
    return problems


# ---------------------------------------------------------------------------------------------------------------------
# The input, the plan and the parts
# ---------------------------------------------------------------------------------------------------------------------


def open_input_dataset(
    location: str, facts: str | None = None, kind: str | None = "images"
) -> tuple[Address, Dataset, Sequence[Mapping[str, Any]]]:
    """Return the address of a dataset, its facts, and its shards as its index lists them.

    Args:
        kind: images or videos; None: whatever it is.

    Raises:
        ValueError: it is not of that kind, or is unreadable.
    """
    if text := writable_store_problem(location):
        raise ValueError(f"IN: {text}")
    try:
        dataset = read_dataset(location, facts)
    except (ValueError, OSError) as error:
        raise ValueError(f"IN: {error}") from error
    if kind not in (dataset.kind, None):
        raise ValueError(
            f"IN: {location} is a dataset of {dataset.kind}. Possible: a dataset of {kind} (prepare.shards)."
        )
    if dataset.adopted is not None:
        firsts = (np.cumsum(dataset.shards.samples) - dataset.shards.samples).tolist()
        shards = [{**shard, "first": first} for shard, first in zip(dataset.shards, firsts, strict=True)]
        return open_address(location), dataset, shards
    missing = [name for name in KINDS[dataset.kind] if name not in dataset.columns]
    if missing:
        raise ValueError(f"IN: {location} has no column {', '.join(missing)}. {REMAKE_HINT}.")
    return open_address(location), dataset, dataset.shards


class EncodeTarget(NamedTuple):
    """A dataset to encode, the whole of IN or one of its buckets, and where its moments go."""

    config: LatentsConfig
    source: Address
    dataset: Dataset
    shards: Sequence[Mapping[str, Any]]
    address: Address


def build_targets(
    config: LatentsConfig, source: Address, dataset: Dataset, shards: Sequence[Mapping[str, Any]], out: str
) -> list[EncodeTarget]:
    """Return what is encoded. Raises ValueError: a bucket is unreadable."""
    if not dataset.buckets:
        return [EncodeTarget(config, source, dataset, shards, open_address(out))]
    targets = []
    for bucket in dataset.buckets:
        address = open_address(f"{out.rstrip('/')}/{bucket_name(bucket.size)}")
        bucket_config = dataclasses.replace(config, image_size=bucket.size)
        targets.append(EncodeTarget(bucket_config, *open_input_dataset(bucket.location), address))
    return targets


def build_plan(target: EncodeTarget, encoder: Encoder) -> Plan:
    """Return the plan for the moments of a target, whose size the encoder gets."""
    config, dataset = target.config, target.dataset
    encoder.size = config.size
    facts = {
        "family": config.model.family,
        "preset": config.model.preset,
        "variant": config.model.variant,
        "image_size": list(config.size),
        "normalize": config.normalize,
        "resize": resize_name(encoder.image_dtype),
        "encoders": encoder.encoders.fingerprints,
        "precision": config.precision,
        "batch_size": config.vae_batch_size,
        "store_text": config.store_text,
        **({"flip": True} if config.flip else {}),
        **({"fps": config.fps} if config.fps else {}),
        **({"tiling": True} if config.tiling else {}),
        "source": {"index_sha256": dataset.index_sha256, "samples": dataset.num_samples},
    }
    columns = mds_columns(
        encoder.family,
        config.size,
        text=encoder.encode_text_states(encoder.empty_text),
        metadata=dataset.adopted is None and "metadata" in dataset.columns,
        captions=dataset.has_captions and not config.store_text,
        flip=config.flip,
        timestep=config.timestep,
    )
    inputs = [
        {"name": raw["basename"], "bytes": raw["bytes"], HASH: raw["hashes"].get(HASH), "samples": shard["samples"]}
        for shard in target.shards
        for raw in (shard["raw_data"],)
    ]
    if dataset.adopted is not None:
        facts["source"]["columns"] = dataset.adopted.as_metadata()
    return Plan("prepare.latents", "moments", columns, bytes_to_int(config.shard_size), facts, inputs)


def build_whole_plan(config: LatentsConfig, dataset: Dataset, of_bucket: Plan) -> Plan:
    """Return the plan of a set of buckets, from that of one of them."""
    facts = {key: value for key, value in of_bucket.facts.items() if key != "batch_size"}
    facts["image_size"] = list(config.size)
    facts["source"] = {"index_sha256": dataset.index_sha256, "samples": dataset.num_samples}
    sizes = [bucket.size for bucket in dataset.buckets]
    return build_bucket_set_plan(of_bucket.made_by, of_bucket.kind, of_bucket.shard_size, sizes, facts)


def make_parts(encoder: Encoder, target: EncodeTarget, plan: Plan, todo: Sequence[int]) -> float:
    """Make parts of a target one after the other; return the time of the slowest in seconds."""
    config, source, dataset, shards, address = target
    workers, longest_sec = config.workers, 0.0
    if not todo:
        return longest_sec  # do not create a scratch folder again: rank 0 may have removed it
    num_images, is_first = sum(shards[number]["samples"] for number in todo), dist.get_global_rank() == 0
    with (
        ThreadPoolExecutor(workers) as pool,
        address.scratch_folder() as folder,
        tqdm(total=num_images, unit=" images", desc="encode", disable=not is_first) as progress,
    ):

        def fill(number: int, part: Part) -> None:
            shard = open_shard(source, shards[number], folder, dataset.adopted)
            decode = functools.partial(decode_row, shard, encoder.size, encoder.image_dtype, config.fps)
            samples = map_in_order(pool, decode, range(shard.samples), ahead=2 * (encoder.batch_size + workers))
            encoder.fill(part, samples, plan.columns, progress.update)
            if Path(shard.folder) == folder:
                Path(shard.path).unlink()

        for number in todo:
            started = time.monotonic()
            make_part(address, plan, number, fill)
            longest_sec = max(longest_sec, time.monotonic() - started)
    return longest_sec


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def write_dataset(
    config: LatentsConfig, dataset: Dataset, targets: Sequence[EncodeTarget], out: str
) -> tuple[SampleCounts, str] | None:
    """Make this rank's share of the missing parts, and finish what is whole.

    Returns:
        On rank 0 the counts over all parts, and a text with the speed; on the others None.

    Raises:
        Refused: OUT has other content.
        Failed, OSError: the work had to stop.
    """
    rank, ranks = dist.get_global_rank(), dist.get_world_size()
    encoder = Encoder(
        fetch_model_weights(config.model),
        size=config.size,
        normalize=config.normalize,
        precision=config.precision,
        batch_size=config.vae_batch_size,
        store_text=config.store_text,
        tiling=config.tiling,
    )
    for note in encoder.encoders.notes:
        log.info(f"model.weights: {note}")
    if config.store_text and "captions" in dataset.columns:
        log.info("store_text: true: of an image's several captions the first is kept, whose text states are stored.")
    started, counts, new_counts, written = time.monotonic(), SampleCounts(), SampleCounts(), {}
    whole = build_whole_plan(config, dataset, build_plan(targets[0], encoder)) if dataset.buckets else None
    if whole and rank == 0:
        begin_dataset(open_address(out), whole)
    for target in targets:
        plan, address = build_plan(target, encoder), target.address
        if rank != 0:
            wait_for_plan(address, plan)
            mine = [number for number in parts_to_make(address, plan) if number % ranks == rank]
            make_parts(encoder, target, plan, mine)
            continue
        with address.lock_for_writing():
            begin_dataset(address, plan)
            todo = parts_to_make(address, plan)
            longest_sec = make_parts(encoder, target, plan, [number for number in todo if number % ranks == 0])
            wait_for_parts(address, len(target.shards), patience_sec=max(PATIENCE_SEC, 4 * longest_sec))
            of_target = finish_dataset(address, plan, put_empty_text(address, encoder.encode_empty_text()))
        counts.add(of_target)
        written[target.config.size] = of_target.written
        new_counts.read += sum(target.shards[number]["samples"] for number in todo)  # by all ranks
    if rank != 0:
        return None
    if whole:
        finish_bucket_set(open_address(out), whole, written)
    return counts, new_counts.format_speed("images", time.monotonic() - started)


@command(keys=LatentsConfig)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file. Only rank 0 prints."""
    if dist.get_local_rank() < torch.cuda.device_count():
        torch.cuda.set_device(dist.get_local_rank())  # so that no rank opens a context on the first GPU
    paths, config, problems = parse_arguments(argv, LatentsConfig, check)
    targets, dataset = [], None
    if config is None:
        return 0
    if len(paths) != 2:
        problems.append("command line: IN and OUT have to be given. python -m prepare.latents --help says more.")
    else:
        try:
            kind = None if problems else "images" if len(config.size) == 2 else "videos"
            source, dataset, shards = open_input_dataset(paths[0], config.metadata, kind)
            targets = build_targets(config, source, dataset, shards, paths[1])
        except ValueError as error:
            problems.append(str(error))
        if dataset is not None and dataset.buckets and dataset.metadata["image_size"] != list(config.size):
            text = f"image_size: {config.image_size}, but the buckets of {paths[0]} are for"
            problems.append(f"{text} {dataset.metadata['image_size'][0]}. Use that value.")
        problem = out_problem(paths[1], paths[:1])
        problems += [problem] if problem else []
    if problems:
        raise ConfigError(problems)
    assert dataset is not None
    with report_write_errors(paths[1]):
        result = write_dataset(config, dataset, targets, paths[1])
    if result is None:
        return 0
    counts, speed = result
    print(f"{counts}{speed}; {format_destination(counts, paths[1])}", flush=True)
    return counts.exit_code


if __name__ == "__main__":
    start(main)
