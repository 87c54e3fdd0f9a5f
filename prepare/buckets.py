"""Sort a dataset `images` into aspect-ratio buckets, so that a batch has one size and little of an image is cut off.

    python -m prepare.buckets IN OUT image_size=512
    python -m prepare.buckets s3://bucket/images s3://bucket/images_512 image_size=512 max_aspect=2

IN: a dataset `images`, a folder or an address in a store. OUT: a folder that is new, empty or from the same command, or an
address in a store. The sizes are SDXL's (arXiv:2307.01952, appendix I), about image_size x image_size pixels each. An image
goes to the size whose aspect is nearest to its own. OUT has a dataset for each size, e.g. OUT/576x448, with the images' own
bytes. A run trains in buckets where data.remote is such a set; prepare.latents makes moments of it, bucket by bucket.

    image_size   side of the square whose pixels each size has about, 512
    step         sides are multiples of it, pixels, 8
    max_aspect   sizes longer than this are left out, null: those of SDXL, up to 4
    shard_size   largest size of a shard, 64mb; IN is read in groups of eight times that, which lie in memory
    metadata     dataset.json of a third-party dataset, if it does not lie in IN

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

from tqdm import tqdm

from common.command import command, start
from common.errors import ConfigError
from common.value_types import ImageSize, bytes_to_int, limited, size_in_bytes
from families.spec import MAX_SIDE_PX
from mds.dataset import Dataset
from mds.images import SampleError, bucket_sizes, decode_image, nearest_bucket, read_captions, size_of
from mds.shard_file import read_samples
from prepare.addresses import Address, open_address, out_problem, report_write_errors
from prepare.arguments import parse_arguments
from prepare.latents import open_input_dataset
from prepare.parts import (
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
)
from prepare.source_shards import open_shard

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
    metadata: str | None = None
    """dataset.json of a third-party dataset (prepare.adopt), if it is elsewhere: a file or address."""

    @property
    def sizes(self) -> list[ImageSize]:
        """(width, height) of the buckets, px."""
        return bucket_sizes(self.image_size, step_px=self.step, max_aspect=self.max_aspect or math.inf)


def group_shards(shards: Sequence[Mapping[str, Any]], group_bytes: int) -> list[list[Mapping[str, Any]]]:
    """Cut a dataset's shards into groups of at most so many bytes, at least one shard each."""
    groups, size = [], 0
    for shard in shards:
        num_bytes = shard["raw_data"]["bytes"]
        if not groups or size + num_bytes > group_bytes:
            groups.append([])
            size = 0
        groups[-1].append(shard)
        size += num_bytes
    return groups


def build_plan(
    size: ImageSize, config: BucketsConfig, dataset: Dataset, groups: Sequence[Sequence[Mapping[str, Any]]]
) -> Plan:
    """Return a bucket's plan: a part of it is made from each group of shards."""
    image_columns = {
        "caption": "str",
        "captions": "json",
        "key": "str",
        "jpg": "bytes",
        "width": "int",
        "height": "int",
    }
    columns = image_columns if dataset.adopted else dict(zip(dataset.columns, dataset.encodings, strict=True))
    source = {"index_sha256": dataset.index_sha256, "samples": dataset.num_samples}
    source |= {"columns": dataset.adopted.as_metadata()} if dataset.adopted else {}
    facts = {"image_size": list(size), "source": source}
    inputs = [
        {"name": group[0]["raw_data"]["basename"], "shards": len(group), "samples": sum(s["samples"] for s in group)}
        for group in groups
    ]
    return Plan("prepare.buckets", "images", columns, bytes_to_int(config.shard_size), facts, inputs)


def read_rows(
    dataset: Dataset, source: Address, shards: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yield the rows of some shards with their images' sizes, and why one cannot be used."""
    for shard in shards:
        with tempfile.TemporaryDirectory() as folder:
            for sample in read_samples(open_shard(source, shard, Path(folder), dataset.adopted)):
                try:
                    if dataset.adopted:
                        captions = read_captions(sample)
                        width, height = size_of(decode_image(sample["jpg"]))
                        sample |= {"caption": captions[0], "captions": captions, "width": width, "height": height}
                except SampleError as error:
                    yield sample, str(error)
                else:
                    yield sample, None


def make_parts(
    addresses: dict[ImageSize, Address],
    plans: dict[ImageSize, Plan],
    groups: Sequence[Sequence[Mapping[str, Any]]],
    rows: Any,
) -> None:
    """Make every bucket's part of each group, where one is missing."""
    todo = {size: set(parts_to_make(addresses[size], plan)) for size, plan in plans.items()}
    sizes = list(plans)
    for number in tqdm(sorted(set().union(*todo.values())), unit=" groups", desc="buckets"):
        of_bucket: dict[ImageSize, list[tuple[dict[str, Any], str | None]]] = {size: [] for size in sizes}
        for row, problem in rows(groups[number]):
            size = sizes[0] if problem else sizes[nearest_bucket((row["width"], row["height"]), sizes)]
            of_bucket[size].append((row, problem))
        for size, rows_of_bucket in of_bucket.items():
            if number in todo[size]:
                make_part(addresses[size], plans[size], number, functools.partial(_fill, rows_of_bucket))


def _fill(rows: Sequence[tuple[dict[str, Any], str | None]], number: int, part: Part) -> None:
    for row, problem in rows:
        part.read()
        if problem is None:
            part.write(row)
        else:
            part.skip(str(row["key"]), problem)


def write_bucket_set(
    config: BucketsConfig, source: Address, dataset: Dataset, shards: Sequence[Mapping[str, Any]], address: Address
) -> SampleCounts:
    """Make the set, or its missing parts. Raises Refused: OUT has other content; Failed, OSError: the work had to stop."""
    shard_size, sizes, counts = bytes_to_int(config.shard_size), config.sizes, SampleCounts()
    groups = group_shards(shards, GROUP * shard_size)
    plans = {size: build_plan(size, config, dataset, groups) for size in sizes}
    facts = {**plans[sizes[0]].facts, "image_size": [config.image_size] * 2}
    whole = build_bucket_set_plan("prepare.buckets", "images", shard_size, sizes, facts)
    with address.lock_for_writing():
        begin_dataset(address, whole)
        addresses = {size: open_address(f"{address.location.rstrip('/')}/{bucket_name(size)}") for size in sizes}
        for size in sizes:
            begin_dataset(addresses[size], plans[size])
        make_parts(addresses, plans, groups, functools.partial(read_rows, dataset, source))
        written = {}
        for size in sizes:
            of_bucket = finish_dataset(addresses[size], plans[size])
            counts.add(of_bucket)
            written[size] = of_bucket.written
        finish_bucket_set(address, whole, written)
    return counts


@command(keys=BucketsConfig)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    paths, config, problems = parse_arguments(argv, BucketsConfig)
    source_input = None
    if config is None:
        return 0
    if len(paths) != 2:
        problems.append("command line: IN and OUT have to be given. python -m prepare.buckets --help says more.")
    else:
        try:
            source_input = open_input_dataset(paths[0], config.metadata)
        except ValueError as error:
            problems.append(str(error))
        problem = out_problem(paths[1], paths[:1])
        problems += [problem] if problem else []
    problems += [] if source_input is None else input_problems(paths[0], source_input[1])
    if problems:
        raise ConfigError(problems)
    assert source_input is not None
    with report_write_errors(paths[1]):
        counts = write_bucket_set(config, *source_input, open_address(paths[1]))
    print(f"{counts}; {format_destination(counts, paths[1])}", flush=True)
    return counts.exit_code


def input_problems(location: str, dataset: Dataset) -> list[str]:
    """Say why a dataset cannot be sorted."""
    if dataset.buckets:
        return [f"IN: {location} has buckets already. Give the dataset that they were made of."]
    if (
        dataset.adopted is not None
        and dict(zip(dataset.columns, dataset.encodings, strict=True))[dataset.adopted.image] == "pil"
    ):
        return [f"IN: {location} has images as pixels, which no dataset holds. Write them as jpeg, png or bytes."]
    return []


if __name__ == "__main__":
    start(main)
