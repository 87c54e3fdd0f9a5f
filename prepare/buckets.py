"""Sort a stage `images` into aspect-ratio buckets, so that a batch has one size and little of a picture is cut off.

    python -m prepare.buckets IN OUT image_size=512
    python -m prepare.buckets s3://bucket/images s3://bucket/images_512 image_size=512 max_aspect=2

IN: a stage `images`, a folder or an address in a store. OUT: a folder that is new, empty or from the same command, or an
address in a store. The sizes are SDXL's (arXiv:2307.01952, appendix I), about image_size x image_size pixels each. A picture
goes to the size whose aspect is nearest to its own. OUT has a stage for each size, e.g. OUT/576x448, with the pictures' own
bytes. A run trains in buckets where data.remote is such a set; prepare.latents makes moments of it, bucket by bucket.

    image_size   side of the square whose pixels each size has about, 512
    step         sides are multiples of it, pixels, 8
    max_aspect   sizes longer than this are left out, null: those of SDXL, up to 4
    shard_size   largest size of a shard, 64mb; IN is read in groups of eight times that, which lie in memory
    facts        dataset.json of a data set of others, if it does not lie in IN

If stopped at any point, the same command resumes.
Exit code: 0 if at least one sample was written, 1 if none was or the work failed, 2 if it could not start.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streaming.base.util import bytes_to_int
from tqdm import tqdm

from cli.command import command, start
from cli.errors import ConfigError
from cli.limits import ImageSize, limited, size_in_bytes
from prepare.counts import SampleCounts, where_to_look
from prepare.encoder import open_shard
from prepare.latents import open_input
from prepare.parts import (
    Part,
    Plan,
    begin,
    bucket_name,
    finish,
    finish_set,
    make_part,
    parts_to_make,
    plan_of_set,
)
from prepare.places import Place, open_place, out_problem, writing
from prepare.words import read_words
from stages.buckets import bucket_of, bucket_sizes
from stages.dataset import Stage
from stages.images import SampleError, captions_of, decode_image, size_of
from zoo.spec import MAX_SIDE_PX

GROUP = 8  # shards' sizes that are in memory at once


@dataclass(frozen=True)
class BucketsConfig:
    """The keys of this command."""

    image_size: int = limited(512, 8, MAX_SIDE_PX)
    """Side of the square whose pixels each size has about, pixels."""
    step: int = limited(8, 1, 1024)
    """Sides are multiples of it, pixels."""
    max_aspect: float | None = limited(None, 1.0, 4.0)
    """Sizes whose longer side is more than this times the shorter one are left out. null: those of SDXL, up to 4."""
    shard_size: str = size_in_bytes("64mb", 1024, 2**32 - 1, "1kb to 4gb")  # MDS counts in 32 bits
    """Size of a shard."""
    facts: str | None = None
    """dataset.json of a data set that others have written (prepare.adopt), if it does not lie there: a file or address."""

    @property
    def sizes(self) -> list[ImageSize]:
        """(width, height) of the buckets, px."""
        return bucket_sizes(self.image_size, step_px=self.step, max_aspect=self.max_aspect or math.inf)


def groups_of(shards: Sequence[Mapping[str, Any]], group_bytes: int) -> list[list[Mapping[str, Any]]]:
    """Cut a stage's shards into groups of at most so many bytes, at least one shard each."""
    groups, size = [], 0
    for shard in shards:
        num_bytes = shard["raw_data"]["bytes"]
        if not groups or size + num_bytes > group_bytes:
            groups.append([])
            size = 0
        groups[-1].append(shard)
        size += num_bytes
    return groups


def plan_for(
    size: ImageSize, config: BucketsConfig, stage: Stage, groups: Sequence[Sequence[Mapping[str, Any]]]
) -> Plan:
    """Return a bucket's plan: a part of it is made from each group of shards."""
    own = {"caption": "str", "captions": "json", "key": "str", "jpg": "bytes", "width": "int", "height": "int"}
    columns = own if stage.adopted else dict(zip(stage.columns, stage.encodings, strict=True))
    source = {"index_sha256": stage.index_sha256, "samples": stage.num_samples}
    source |= {"columns": stage.adopted.as_facts()} if stage.adopted else {}
    facts = {"image_size": list(size), "source": source}
    inputs = [
        {"name": group[0]["raw_data"]["basename"], "shards": len(group), "samples": sum(s["samples"] for s in group)}
        for group in groups
    ]
    return Plan("prepare.buckets", "images", columns, bytes_to_int(config.shard_size), facts, inputs)


def rows_of(
    stage: Stage, source: Place, shards: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yield the rows of some shards with their pictures' sizes, and why one cannot be used."""
    for shard in shards:
        with tempfile.TemporaryDirectory() as folder:
            for sample in open_shard(source, shard, Path(folder), stage.adopted):
                try:
                    if stage.adopted:
                        captions = captions_of(sample)
                        width, height = size_of(decode_image(sample["jpg"]))
                        sample |= {"caption": captions[0], "captions": captions, "width": width, "height": height}
                except SampleError as error:
                    yield sample, str(error)
                else:
                    yield sample, None


def make_parts(
    places: dict[ImageSize, Place],
    plans: dict[ImageSize, Plan],
    groups: Sequence[Sequence[Mapping[str, Any]]],
    rows: Any,
) -> None:
    """Make every bucket's part of each group, where one is missing."""
    todo = {size: set(parts_to_make(places[size], plan)) for size, plan in plans.items()}
    sizes = list(plans)
    for number in tqdm(sorted(set().union(*todo.values())), unit=" groups", desc="buckets"):
        of_bucket: dict[ImageSize, list[tuple[dict[str, Any], str | None]]] = {size: [] for size in sizes}
        for row, problem in rows(groups[number]):
            size = sizes[0] if problem else sizes[bucket_of((row["width"], row["height"]), sizes)]
            of_bucket[size].append((row, problem))
        for size, found in of_bucket.items():
            if number in todo[size]:
                make_part(places[size], plans[size], number, functools.partial(_fill, found))


def _fill(rows: Sequence[tuple[dict[str, Any], str | None]], number: int, part: Part) -> None:
    for row, problem in rows:
        part.read()
        if problem is None:
            part.write(row)
        else:
            part.skip(str(row["key"]), problem)


def write_set(
    config: BucketsConfig, source: Place, stage: Stage, shards: Sequence[Mapping[str, Any]], place: Place
) -> SampleCounts:
    """Make the set, or its missing parts. Raises Refused: OUT has other content; Failed, OSError: the work had to stop."""
    shard_size, sizes, counts = bytes_to_int(config.shard_size), config.sizes, SampleCounts()
    groups = groups_of(shards, GROUP * shard_size)
    plans = {size: plan_for(size, config, stage, groups) for size in sizes}
    facts = {**plans[sizes[0]].facts, "image_size": [config.image_size] * 2}
    whole = plan_of_set("prepare.buckets", "images", shard_size, sizes, facts)
    with place.only_writer():
        begin(place, whole)
        places = {size: open_place(f"{place.address.rstrip('/')}/{bucket_name(size)}") for size in sizes}
        for size in sizes:
            begin(places[size], plans[size])
        make_parts(places, plans, groups, functools.partial(rows_of, stage, source))
        written = {}
        for size in sizes:
            of_bucket = finish(places[size], plans[size])
            counts.add(of_bucket)
            written[size] = of_bucket.written
        finish_set(place, whole, written)
    return counts


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    paths, config, problems = read_words(argv, BucketsConfig)
    found = None
    if config is None:
        return 0
    if len(paths) != 2:
        problems.append("command line: IN and OUT have to be given. python -m prepare.buckets --help says more.")
    else:
        try:
            found = open_input(paths[0], config.facts)
        except ValueError as error:
            problems.append(str(error))
        problem = out_problem(paths[1], paths[:1])
        problems += [problem] if problem else []
    problems += [] if found is None else input_problems(paths[0], found[1])
    if problems:
        raise ConfigError(problems)
    assert found is not None
    with writing(paths[1]):
        counts = write_set(config, *found, open_place(paths[1]))
    print(f"{counts}; {where_to_look(counts, paths[1])}", flush=True)
    return counts.exit_code


def input_problems(location: str, stage: Stage) -> list[str]:
    """Say why a stage cannot be sorted."""
    if stage.buckets:
        return [f"IN: {location} has buckets already. Give the stage that they were made of."]
    if (
        stage.adopted is not None
        and dict(zip(stage.columns, stage.encodings, strict=True))[stage.adopted.image] == "pil"
    ):
        return [f"IN: {location} has pictures as pixels, which no stage holds. Write them as jpeg, png or bytes."]
    return []


if __name__ == "__main__":
    start(main)
