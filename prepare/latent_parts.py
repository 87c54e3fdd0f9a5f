"""The parts of prepare.latents: what a stage of images or videos is encoded to, by a rank or in a worker of a cluster."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from composer.utils import dist
from streaming.base.util import bytes_to_int
from tqdm import tqdm

from cli.errors import Refused
from cli.limits import ImageSize
from cli.log import log
from prepare.bucket_sets import bucket_name
from prepare.counts import SampleCounts
from prepare.encoder import AGAIN, Encoder, decode_clip, decode_row, in_order, open_shard
from prepare.moments import mds_columns
from prepare.parts import Part, Plan, check_shared, make_part, part_name
from prepare.places import Place, address_problem, open_place
from stages.adopted import Columns
from stages.dataset import KINDS, Stage, read_stage
from stages.fetch import HASH
from stages.images import resize_name
from zoo.model_config import fetched

if TYPE_CHECKING:
    from prepare.latents import LatentsConfig

# ---------------------------------------------------------------------------------------------------------------------
# The input and the plan
# ---------------------------------------------------------------------------------------------------------------------


def open_input(
    location: str, facts: str | None = None, kind: str | None = "images"
) -> tuple[Place, Stage, Sequence[Mapping[str, Any]]]:
    """Return the place of a stage, its facts, and its shards as its index lists them.

    Args:
        kind: images or videos; None: whatever it is.

    Raises:
        ValueError: it is not of that kind, or is unreadable.
    """
    if text := address_problem(location):
        raise ValueError(f"IN: {text}")
    try:
        stage = read_stage(location, facts)
    except (ValueError, OSError) as error:
        raise ValueError(f"IN: {error}") from error
    if kind not in (stage.kind, None):
        raise ValueError(f"IN: {location} is a stage of {stage.kind}. Possible: a stage of {kind} (prepare.shards).")
    if stage.adopted is not None:
        firsts = (np.cumsum(stage.shards.samples) - stage.shards.samples).tolist()
        shards = [{**shard, "first": first} for shard, first in zip(stage.shards, firsts, strict=True)]
        return open_place(location), stage, shards
    missing = [name for name in KINDS[stage.kind] if name not in stage.columns]
    if missing:
        raise ValueError(f"IN: {location} has no column {', '.join(missing)}. {AGAIN}.")
    return open_place(location), stage, stage.shards


def plan_for(config: LatentsConfig, encoder: Encoder, stage: Stage, shards: Sequence[Mapping[str, Any]]) -> Plan:
    """Return the plan for the moments of a stage of images or videos."""
    facts = {
        "family": config.model.family,
        "preset": config.model.preset,
        "variant": config.model.variant,
        "image_size": list(config.size),
        "normalize": config.normalize,
        "resize": resize_name(encoder.image_dtype),
        "encoders": encoder.encoders.fingerprints,
        "precision": config.precision,
        "batch_size": config.images_at_once,
        "store_text": config.store_text,
        **({"flip": True} if config.flip else {}),
        **({"fps": config.fps} if config.fps else {}),
        **({"tiling": True} if config.tiling else {}),
        "source": {"index_sha256": stage.index_sha256, "samples": stage.num_samples},
    }
    columns = mds_columns(
        encoder.family,
        config.size,
        text=encoder.text_states(encoder.empty_text),
        metadata=stage.adopted is None and "metadata" in stage.columns,
        captions=stage.has_captions and not config.store_text,
        flip=config.flip,
        timestep=config.timestep,
    )
    inputs = [
        {"name": raw["basename"], "bytes": raw["bytes"], HASH: raw["hashes"].get(HASH), "samples": shard["samples"]}
        for shard in shards
        for raw in (shard["raw_data"],)
    ]
    if stage.adopted is not None:
        facts["source"]["columns"] = stage.adopted.as_facts()
    return Plan("prepare.latents", "moments", columns, bytes_to_int(config.shard_size), facts, inputs)


# ---------------------------------------------------------------------------------------------------------------------
# The parts
# ---------------------------------------------------------------------------------------------------------------------


def make_parts(
    place: Place,
    plan: Plan,
    todo: Sequence[int],
    encoder: Encoder,
    source: Place,
    shards: Sequence[Mapping[str, Any]],
    workers: int,
    adopted: Columns | None,
    rate: float | None = None,
    shown: bool = True,
) -> tuple[SampleCounts, float]:
    """Make parts one after the other; return their counts, and the time of the slowest in seconds.

    Args:
        rate: of clips, frames a second.
    """
    counts, longest_sec, num_images = SampleCounts(), 0.0, sum(shards[number]["samples"] for number in todo)
    if not todo:
        return counts, longest_sec  # do not create a scratch folder again: rank 0 may have removed it
    with (
        ThreadPoolExecutor(workers) as pool,
        place.scratch_folder() as folder,
        tqdm(
            total=num_images, unit=" images", desc="encode", disable=not shown or dist.get_global_rank() != 0
        ) as progress,
    ):

        def fill(number: int, part: Part) -> None:
            reader = open_shard(source, shards[number], folder, adopted)
            if len(encoder.size) > 2:
                one = functools.partial(decode_clip, reader, encoder.size, rate)
            else:
                one = functools.partial(decode_row, reader, encoder.size, encoder.image_dtype)
            samples = in_order(pool, one, range(len(reader)), ahead=2 * (encoder.batch_size + workers))
            encoder.fill(part, samples, plan.columns, progress.update)
            if Path(reader.dirname) == folder:
                (folder / reader.raw_data.basename).unlink()

        for number in todo:
            started = time.monotonic()
            counts.add(make_part(place, plan, number, fill))
            longest_sec = max(longest_sec, time.monotonic() - started)
    return counts, longest_sec


def build_encoder(config: LatentsConfig) -> Encoder:
    """Build the encoders."""
    return Encoder(
        fetched(config.model),
        size=config.size,
        normalize=config.normalize,
        precision=config.precision,
        batch_size=config.images_at_once,
        store_text=config.store_text,
        tiling=config.tiling,
    )


def tell_notes(config: LatentsConfig, stage: Stage, notes: Sequence[str]) -> None:
    """Say what is worth knowing about the encoders."""
    for note in notes:
        log.info(f"model.weights: {note}")
    if config.store_text and "captions" in stage.columns:
        log.info("store_text: true: of a picture's several captions the first is kept, whose text states are stored.")


# ---------------------------------------------------------------------------------------------------------------------
# In a worker of a cluster
# ---------------------------------------------------------------------------------------------------------------------


class Item(NamedTuple):
    """What a worker is asked for."""

    bucket: ImageSize | None = None
    """Of a set of buckets, one's size; None: of a stage that is no set, or of the set itself."""
    number: int | None = None
    """The part's; None: the plan."""

    def __str__(self) -> str:
        name = "the plan" if self.number is None else part_name(self.number)
        return name if self.bucket is None else f"{name} of {bucket_name(self.bucket)}"


class Planned(NamedTuple):
    """The plan as the encoders of a worker make it, and what else the command has to know of them."""

    plan: Plan
    empty: dict[str, np.ndarray]
    """See `Encoder.empty_states`."""
    notes: Sequence[str]


class Encoding:
    """A worker's encoders, for the parts of one stage or of all stages of a set of buckets.

    Args:
        source, out: addresses of the stage and of its moments.

    Raises:
        ValueError: IN is unreadable there.
        Refused: that node has no GPU, and precision needs one.
    """

    def __init__(self, config: LatentsConfig, source: str, out: str):
        if config.precision == "tf32" and not torch.cuda.is_available():
            raise Refused("precision: tf32 needs a GPU, and a worker has none. Possible on a CPU: fp32, bf16.")
        self._config, self._out = config, out
        try:
            self._given = open_input(source, config.facts, None)
        except ValueError as error:
            raise Refused(str(error)) from error
        self._encoder = build_encoder(config)
        self._plans: dict[ImageSize | None, Plan] = {}

    def __call__(self, item: Item) -> Any:
        """Return the plan, or make a part and return its counts."""
        source, stage, shards = self._given
        config, out = self._config, self._out
        if item.bucket is not None:
            config, out = dataclasses.replace(config, image_size=item.bucket), bucket_address(out, item.bucket)
            source, stage, shards = open_input(next(b.location for b in stage.buckets if b.size == item.bucket))
        self._encoder.size = config.size
        if item.number is None:
            plan = plan_for(config, self._encoder, stage, shards)
            return Planned(plan, self._encoder.empty_states(), list(self._encoder.encoders.notes))
        place = open_place(out)
        if item.bucket not in self._plans:
            plan = plan_for(config, self._encoder, stage, shards)
            check_shared(place, plan)
            self._plans[item.bucket] = plan
        plan = self._plans[item.bucket]
        given = source, shards, config.workers, stage.adopted, config.fps
        return make_parts(place, plan, [item.number], self._encoder, *given, shown=False)[0]


def bucket_address(out: str, bucket: ImageSize) -> str:
    """Return where the moments of a bucket go."""
    return f"{out.rstrip('/')}/{bucket_name(bucket)}"
