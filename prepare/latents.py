"""Encode the stage `images` or `videos` once into the stage `moments`: each picture's VAE moments, each caption's tokens.

    python -m prepare.latents IN OUT model.weights=checkpoints/sd/512-base-ema.ckpt
    composer -n 8 -m prepare.latents /data/laion_images /data/laion_moments model.weights=/weights/sd2 image_size=512
    composer -n 8 -m prepare.latents s3://bucket/images s3://bucket/moments model.weights=random store_text=true

IN: a stage `images` or a set of buckets, or `videos` for a family of videos, a folder or an address in a store. OUT: a folder
that is new, empty or from the same command, or an address in a store. Images are resized as in training, and cropped at
their centre; of a film the clip in its middle is taken. What the network is told of the pictures is stored too
(zoo/spec.py). Unusable samples are skipped, counted, and listed with their reasons in OUT/skipped.jsonl. A missing or
damaged shard of IN stops the command.

Each shard of IN becomes a part of OUT (prepare/parts.py), made by rank (shard number) modulo (number of ranks). If stopped
at any point, the same command resumes with the missing parts, also on another number of ranks. OUT then has the same bytes
as without the stop (on the same kind of device). On a CPU a rank computes with one thread, since the number of threads
changes the last bits: start one rank per core, `composer -n CORES`. Ranks beyond the number of shards have nothing to do
(a smaller shard_size of prepare.shards gives more shards). The default precision is fp32: moments are made once and used
for days.

model.weights: a name on the hub, a diffusers folder, an LDM checkpoint, or random for meaningless encoders; none: the hub's
for this network.

Keys: model.family preset variant weights, image_size (512, or [width,height]), normalize (symmetric, unit), batch_size
(16; of videos 1), precision (fp32, tf32, bf16), store_text (false), flip (false: no moments of the mirrored picture),
timestep (false: the metadata's is no column), shard_size (64mb), workers (decoding threads per rank, 4), facts (dataset.json
of a data set of others, if it does not lie in IN). Of videos num_frames (the family's), fps (each film's own); tiling
(false), for a VAE that takes too much memory.
Exit code: 0 if at least one sample was written, 1 if none was or the work failed, 2 if it could not start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from composer.utils import dist
from tqdm import tqdm

from cli.command import command, start
from cli.command_line import Problem
from cli.errors import ConfigError
from cli.limits import ImageSize, Pixels, limited, size_in_bytes
from prepare.bucket_sets import finish_set, plan_of_set
from prepare.counts import SampleCounts, where_to_look
from prepare.encoder import Encoder
from prepare.engines import ActorKeys, check_actor_keys
from prepare.latent_parts import (
    Encoding,
    Item,
    bucket_address,
    build_encoder,
    make_parts,
    open_input,
    plan_for,
    tell_notes,
)
from prepare.moments import put_empty_text
from prepare.parts import (
    PATIENCE_SEC,
    Plan,
    begin,
    finish,
    parts_to_make,
    wait_for_parts,
    wait_for_plan,
)
from prepare.places import Place, open_place, out_problem, writing
from prepare.words import read_words
from stages.dataset import Stage
from zoo import load_family
from zoo.model_config import ModelConfig, model_problems, own_frames
from zoo.spec import MAX_FRAMES, MAX_SIDE_PX, as_size

# ---------------------------------------------------------------------------------------------------------------------
# The keys
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LatentsConfig(ActorKeys):
    """The keys of this command."""

    model: ModelConfig = field(default_factory=ModelConfig)
    image_size: Pixels = limited(512, 1, MAX_SIDE_PX, usual="512, or [width, height]")
    """Pixels: one number for a square, or [width, height]."""
    num_frames: int | None = limited(None, 1, MAX_FRAMES, usual="9 to 129")
    """Frames of a clip. null: the family's own number. Families of images have none."""
    fps: float | None = limited(None, 0.0, 1000.0, above=True)
    """Frames a second of a clip, each the one that a film shows at that time. null: the film's own rate."""
    normalize: Literal["symmetric", "unit"] = "symmetric"
    """Range of the images that the VAE sees: [-1, 1], or [0, 1] (unit) as in the MLPerf reference."""
    batch_size: int | None = limited(None, 1, 2**16)
    """Images per call of the VAE. It changes last bits, so it is fixed for a stage. null: 16, of videos 1."""
    tiling: bool = False
    """Encode each clip in overlapping tiles: less memory, slightly other moments. Of videos alone."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Precision of the encoders. Moments are made once and used for days."""
    store_text: bool = False
    """Also store the text encoder's states: 158 kB per caption for SD2."""
    flip: bool = False
    """Also store the moments of the mirrored picture, for data.flip=true: 66 kB for SD2 at 512 pixels."""
    timestep: bool = False
    """Also store the metadata's `timestep`, at which validation.times=eighths then sees the sample (prepare.coco)."""
    shard_size: str = size_in_bytes("64mb", 1024, 2**32 - 1, "1kb to 4gb")  # MDS counts in 32 bits
    """Size of a shard."""
    workers: int = limited(4, 1, 512)
    """Decoding threads for each rank or worker."""
    facts: str | None = None
    """dataset.json of a data set of others (prepare.adopt), if it does not lie in IN."""

    @property
    def size(self) -> ImageSize:
        """(width, height) in pixels; of a family of videos (width, height, frames)."""
        own = own_frames(self.model)
        return as_size(self.image_size) + (() if own is None else (self.num_frames or own,))

    @property
    def images_at_once(self) -> int:
        """Images per call of the VAE."""
        return self.batch_size or (16 if len(self.size) == 2 else 1)


def check(config: LatentsConfig) -> list[Problem]:
    """Return every problem that can be found before anything is built."""
    found = check_actor_keys(config, "prepare.latents")
    if config.precision == "tf32" and not torch.cuda.is_available() and config.engine == "local":
        found.append(Problem("precision: tf32 needs a GPU. Possible on a CPU: fp32, bf16.", ("precision",)))
    if torch.cuda.is_available() and dist.get_local_world_size() > torch.cuda.device_count():
        given = f"{dist.get_local_world_size()} ranks on this machine, which has {torch.cuda.device_count()} GPUs"
        found.append(Problem(f"composer -n: {given}. Start at most that many."))
    if config.model.denoiser is not None:
        found.append(Problem("model.denoiser: has no use here: nothing is trained. Leave it out.", ("model.denoiser",)))
    of_videos = {"num_frames": config.num_frames, "fps": config.fps, "tiling": config.tiling or None}
    for key, value in of_videos.items():
        if value is not None and len(config.size) == 2:
            given = f"{key}: {str(value).lower()}, but {config.model.family} makes images"
            found.append(Problem(f"{given}. Leave it out.", (key,)))
    found += model_problems(config.model, config.size, encoders_wanted=True)
    return found if found else _problems_of_family(config)


def _problems_of_family(config: LatentsConfig) -> list[Problem]:
    """Return what a known family cannot do."""
    family = load_family(config.model.family, config.model.preset, config.model.variant)
    if config.flip and (beside := family.beside(config.size)):
        given = f"flip: true, but {family.name} is told of the first frame, and {', '.join(beside)} of its mirrored one"
        return [Problem(f"{given} are not stored. Leave it out.", ("flip",))]
    return []


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def built(config: LatentsConfig, stage: Stage) -> Encoder:
    """Build the encoders, and say what is worth knowing about them."""
    encoder = build_encoder(config)
    tell_notes(config, stage, encoder.encoders.notes)
    return encoder


def write_set(config: LatentsConfig, source: Place, stage: Stage, place: Place) -> tuple[SampleCounts, str] | None:
    """Make the moments of a set of buckets, one bucket after the other; otherwise as `write_stage`.

    Returns:
        On rank 0 the counts over all parts, and a text with the speed; on the others None.
    """
    encoder, counts, made, written = built(config, stage), SampleCounts(), SampleCounts(), {}
    started = time.monotonic()
    whole, is_first = plan_of_whole(plan_for(config, encoder, stage, []), stage), dist.get_global_rank() == 0
    if is_first:
        begin(place, whole)
    for bucket in stage.buckets:
        given, own = open_input(bucket.location), dataclasses.replace(config, image_size=bucket.size)
        to = open_place(bucket_address(place.address, bucket.size))
        encoder.size = bucket.size
        result = write_stage(own, encoder, *given, to)
        if result is not None:
            of_bucket, made_now = result
            counts.add(of_bucket)
            made.add(made_now)
            written[bucket.size] = of_bucket.written
    if not is_first:
        return None
    finish_set(place, whole, written)
    return counts, made.pace("images", time.monotonic() - started)


def plan_of_whole(plan: Plan, stage: Stage) -> Plan:
    """Return the plan of a set of buckets, from that of its size."""
    facts = {key: value for key, value in plan.facts.items() if key != "batch_size"}
    return plan_of_set(plan.made_by, plan.stage, plan.shard_size, [bucket.size for bucket in stage.buckets], facts)


def write_stage(
    config: LatentsConfig,
    encoder: Encoder,
    source: Place,
    stage: Stage,
    shards: Sequence[Mapping[str, Any]],
    place: Place,
) -> tuple[SampleCounts, SampleCounts] | None:
    """Make this rank's share of the stage's missing parts, and finish the stage.

    Returns:
        On rank 0 the counts over all parts, and what was made now: samples read by all ranks, with this one's seconds;
        on the others None.

    Raises:
        Refused: OUT has other content.
        Failed, OSError: the work had to stop.
    """
    plan, ranks = plan_for(config, encoder, stage, shards), dist.get_world_size()
    if dist.get_global_rank() != 0:
        wait_for_plan(place, plan)
        todo = parts_to_make(place, plan)
        mine = [number for number in todo if number % ranks == dist.get_global_rank()]
        make_parts(place, plan, mine, encoder, source, shards, config.workers, stage.adopted, config.fps)
        return None
    with place.only_writer():
        begin(place, plan)
        todo = parts_to_make(place, plan)
        mine = [number for number in todo if number % ranks == 0]
        made, longest_sec = make_parts(
            place, plan, mine, encoder, source, shards, config.workers, stage.adopted, config.fps
        )
        wait_for_parts(place, len(shards), patience_sec=max(PATIENCE_SEC, 4 * longest_sec))
        counts = finish(place, plan, put_empty_text(place, encoder.empty_states()))
    return counts, SampleCounts(read=sum(shards[number]["samples"] for number in todo), seconds=made.seconds)


def write_on_cluster(config: LatentsConfig, stage: Stage, source: str, out: str) -> tuple[SampleCounts, str]:
    """Make the missing parts of a stage or of a set of buckets on a cluster, and finish it; returns as `write_set`.

    Here no encoder is built: a worker says what the plan is.
    """
    started, counts, made, written = time.monotonic(), SampleCounts(), SampleCounts(), {}
    buckets = [bucket.size for bucket in stage.buckets]
    with (
        config.opened(functools.partial(Encoding, config, source, out), config.actors, gpu=config.gpus) as engine,
        contextlib.ExitStack() as held,
    ):
        plans = dict(engine.run([Item(size) for size in (None, *buckets)]))
        whole = plans[Item()]
        tell_notes(config, stage, whole.notes)
        if buckets:
            begin(open_place(out), plan_of_whole(whole.plan, stage))
        places = {size: open_place(bucket_address(out, size)) for size in buckets} or {None: open_place(out)}
        todo: list[Item] = []
        for size, place in places.items():
            held.enter_context(place.only_writer())
            begin(place, plans[Item(size)].plan)
            todo += [Item(size, number) for number in parts_to_make(place, plans[Item(size)].plan)]
        with tqdm(unit=" images", desc=f"{len(todo)} parts", disable=not todo) as progress:
            for _, of_part in engine.run(todo):
                progress.update(of_part.read)
                made.add(of_part)
        for size, place in places.items():
            planned = plans[Item(size)]
            of_stage = finish(place, planned.plan, put_empty_text(place, planned.empty))
            counts.add(of_stage)
            written[size] = of_stage.written
    if buckets:
        finish_set(open_place(out), plan_of_whole(whole.plan, stage), written)
    return counts, made.pace("images", time.monotonic() - started)


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file. Only rank 0 prints."""
    if dist.get_local_rank() < torch.cuda.device_count():
        torch.cuda.set_device(dist.get_local_rank())  # so that no rank opens a context on the first GPU
    paths, config, problems = read_words(argv, LatentsConfig, check)
    found = None
    if config is None:
        return 0
    if len(paths) != 2:
        problems.append("command line: IN and OUT have to be given. python -m prepare.latents --help says more.")
    else:
        try:
            kind = None if problems else "images" if len(config.size) == 2 else "videos"
            found = open_input(paths[0], config.facts, kind)
        except ValueError as error:
            problems.append(str(error))
        if found is not None and found[1].buckets and found[1].facts["image_size"] != list(config.size):
            given = f"image_size: {config.image_size}, but the buckets of {paths[0]} are for"
            problems.append(f"{given} {found[1].facts['image_size'][0]}. Use that value.")
        problem = out_problem(paths[1], paths[:1])
        problems += [problem] if problem else []
    if problems:
        raise ConfigError(problems)
    assert found is not None
    with writing(paths[1]):
        place, (source, stage, shards) = open_place(paths[1]), found
        if config.engine != "local":
            result = write_on_cluster(config, stage, *paths)
        elif stage.buckets:
            result = write_set(config, source, stage, place)
        else:
            encoder, started = built(config, stage), time.monotonic()
            of_stage = write_stage(config, encoder, source, stage, shards, place)
            result = of_stage and (of_stage[0], of_stage[1].pace("images", time.monotonic() - started))
    if result is None:
        return 0
    counts, speed = result
    print(f"{counts}{speed}; {where_to_look(counts, paths[1])}", flush=True)
    return counts.exit_code


if __name__ == "__main__":
    from prepare.latents import main as named  # workers of a cluster know the classes by this module's name

    start(named)
