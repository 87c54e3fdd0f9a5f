"""How long a data set of others takes to be adopted, and how fast its shards are read, plain and compressed.

    python -m bench.adopt /tmp/theirs
    S3_ENDPOINT_URL=http://127.0.0.1:8080 python -m bench.adopt s3://bucket/prefix rounds=5

PLACE: a folder, or an address in an S3 store, for the data sets, which streaming's own writer makes; those of an earlier run
are replaced. Contestants take turns (bench/contest.py):

    adopt      prepare.adopt of `num_shards` small shards: seconds and bytes as it says them, without its imports

and an epoch of the same 512 px JPEGs through data.build_data without a loader process, from an empty cache: samples/s, and
samples a second of processor time, of which a busy machine changes less:

    ours       a stage of our own
    plain      as others have written it: no hashes, so that digests are made and kept
    zstd, gz   the same, compressed by streaming's writer with these
    unpack     within them, alone: zstd shards decompressed to files, megabytes that come out a second

Exit code: 0, 2 when the command cannot be read.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import torch
from streaming import MDSWriter

from bench.command import head, write_record
from bench.contest import Figures, take_turns
from bench.micro_data import IMAGES_BATCH, PICTURE_SIZES, SEED, SIZE, build_family, picture, words
from cli.command import command
from cli.command_line import parse_command_line
from cli.errors import ConfigError
from cli.limits import limited
from config import as_written, load
from data import DataConfig, build_data
from preflight.limits import unwritable
from stages.adopted import Columns
from stages.dataset import is_remote, read_json, write_facts
from stages.fetch import HASH, unpack
from stages.store_errors import address_problem, scheme_of
from stages.stores import download_once

SCHEMA = 1
COMMAND_SEC = 300.0
SAID = re.compile(r"written; ([0-9,]+) bytes of .* read in ([0-9.]+) s$", re.M)
KINDS = ("ours", "plain", "zstd", "gz")


@dataclass(frozen=True)
class AdoptBenchConfig:
    """The keys of this command."""

    num_shards: int = limited(1000, 1, 10**5)
    """Shards of the data set that is adopted."""
    num_images: int = limited(192, 2 * IMAGES_BATCH, 10**6)
    """Pictures of the data sets that are read."""
    rounds: int = limited(5, 1)
    """Turns of each contestant."""
    results: str = "reports/results/adopt_speed.json"
    """File of the record; an earlier one is replaced."""


def write_many(folder: Path, num_shards: int) -> None:
    """Write shards of two small pictures each."""
    small = [picture(number, (64, 64)) for number in range(8)]
    limit = 2 * max(map(len, small)) + 400  # and their captions
    with MDSWriter(out=str(folder), columns={"jpg": "bytes", "caption": "str"}, size_limit=limit) as writer:
        number = 0
        while len(writer.shards) < num_shards - 1 or not writer.new_samples:
            writer.write({"jpg": small[number % len(small)], "caption": words(number)["caption"]})
            number += 1


def write_pictures(folder: Path, num_images: int, kind: str) -> None:
    """Write pictures in shards of 1 MB, and dataset.json as for a stage of our own or as prepare.adopt writes it."""
    columns = {"jpg": "bytes", "caption": "str", "key": "str"}
    compression, hashes = kind if kind in ("zstd", "gz") else None, [HASH] * (kind == "ours")
    with MDSWriter(
        out=str(folder), columns=columns, compression=compression, hashes=hashes, size_limit="1mb"
    ) as writer:
        for number in range(num_images):
            writer.write({"jpg": picture(number, PICTURE_SIZES[number % len(PICTURE_SIZES)]), **words(number)})
    columns_read = Columns(captions=("caption",), image="jpg", key="key").as_facts()
    write_facts(folder, "images", {} if kind == "ours" else {"columns": columns_read})


def put(folder: Path, place: str) -> None:
    """Copy a data set to its place, in place of what is there."""
    if not is_remote(place):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder, place)
        return
    client = boto3.client("s3", endpoint_url=os.environ.get("S3_ENDPOINT_URL"))
    bucket, _, prefix = place.removeprefix("s3://").partition("/")
    for path in folder.iterdir():
        client.upload_file(str(path), bucket, f"{prefix}/{path.name}")


def adopt(place: str) -> tuple[float, int]:
    """Run prepare.adopt; return (seconds, bytes read) as it says them."""
    command = [sys.executable, "-m", "prepare.adopt", place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SEC, check=True)
    found = SAID.search(done.stdout)
    assert found, done.stdout
    return float(found[2]), int(found[1].replace(",", ""))


class Contest:
    """The data sets at a place, and the folders that their shards come to."""

    def __init__(self, place: str, config: AdoptBenchConfig):
        self.place, self.config, self.cache = place, config, Path(tempfile.mkdtemp(prefix="bench-adopt-"))
        self.num_bytes = 0
        self.of_processor: dict[str, list[float]] = {kind: [] for kind in KINDS}
        with tempfile.TemporaryDirectory() as folder:
            write_many(Path(folder, "many"), config.num_shards)
            put(Path(folder, "many"), f"{place}/many")
            for kind in KINDS:
                write_pictures(Path(folder, kind), config.num_images, kind)
                put(Path(folder, kind), f"{place}/{kind}")

    def adopt(self) -> float:
        """Adopt the data set of many shards; return seconds."""
        seconds, self.num_bytes = adopt(f"{self.place}/many")
        return seconds

    def epoch(self, kind: str) -> float:
        """Read an epoch through an empty cache; return samples/s."""
        shutil.rmtree(self.cache, ignore_errors=True)
        keys = DataConfig(remote=f"{self.place}/{kind}", local=str(self.cache / kind), workers=0)
        begun, begun_cpu, cpu = time.monotonic(), time.process_time(), torch.device("cpu")
        loader = build_data(
            keys, build_family(), size=SIZE, device_batch_size=IMAGES_BATCH, device=cpu, seed=SEED
        ).dataloader
        samples = sum(len(batch["images"]) for batch in loader)
        seconds, cpu_sec = time.monotonic() - begun, time.process_time() - begun_cpu
        loader.close()
        self.of_processor[kind].append(samples / cpu_sec)
        return samples / seconds

    def unpack(self) -> float:
        """Decompress the zstd shards alone; return megabytes that come out a second."""
        index = read_json(f"{self.place}/zstd", "index.json")[1]
        shutil.rmtree(self.cache, ignore_errors=True)
        self.cache.mkdir()
        seconds, num_bytes = 0.0, 0
        for shard in index["shards"]:
            name = shard["zip_data"]["basename"]
            download_once(f"{self.place}/zstd/{name}", str(packed := self.cache / name))
            begun = time.monotonic()
            unpack(packed, self.cache / "unpacked.mds", shard["compression"])
            seconds += time.monotonic() - begun
            num_bytes += shard["raw_data"]["bytes"]
        return num_bytes / 1e6 / seconds


def measure(place: str, config: AdoptBenchConfig) -> dict[str, Any]:
    """Let the contestants take turns and return the record."""
    contest = Contest(place, config)
    try:
        turns = {"adopt": contest.adopt, **{kind: functools.partial(contest.epoch, kind) for kind in KINDS}}
        values = take_turns({**turns, "unpack": contest.unpack}, config.rounds)
    finally:
        shutil.rmtree(contest.cache, ignore_errors=True)
    figures = Figures()
    figures.add("adopt_sec", values["adopt"])
    for kind in KINDS:
        figures.add(f"{kind}_samples_per_sec", values[kind])
        figures.add(f"{kind}_samples_per_cpu_sec", contest.of_processor[kind][-config.rounds :])  # but the warm-up
    figures.add("unpack_zstd_mb_per_sec", values["unpack"])
    for over, under in (("plain", "ours"), ("zstd", "plain"), ("gz", "plain")):
        figures.ratio(f"{over}_over_{under}", f"{over}_samples_per_sec", f"{under}_samples_per_sec")
        per_cpu = (f"{kind}_samples_per_cpu_sec" for kind in (over, under))
        figures.ratio(f"{over}_over_{under}_cpu", *per_cpu)
    sizes = {kind: _num_bytes(f"{place}/{kind}") for kind in ("plain", "zstd", "gz", "many")}
    of_sizes = {f"{kind}_bytes": size for kind, (size, _) in sizes.items()}
    begin = {**head(SCHEMA), "store": place.partition("://")[0] if "://" in place else "folder", **of_sizes}
    adopted = {"many_shards": sizes["many"][1], "adopt_bytes_read": contest.num_bytes}
    return {**begin, **adopted, "config": as_written(config), **figures.flat, "by_round": figures.by_round}


def _num_bytes(place: str) -> tuple[int, int]:
    """Return the bytes that a store has of a data set's shards, and their number."""
    shards = read_json(place, "index.json")[1]["shards"]
    return sum((shard["zip_data"] or shard["raw_data"])["bytes"] for shard in shards), len(shards)


def place_problem(place: str) -> str | None:
    """Say why nothing can be measured at a place, or None; nothing is asked for."""
    if scheme_of(place) == "s3":
        return address_problem(place)
    return (
        f"{place} is in no S3 store. Write s3://BUCKET/PREFIX, or a folder." if is_remote(place) else unwritable(place)
    )


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    places, keys = [word for word in argv if "=" not in word], [word for word in argv if "=" in word]
    if len(places) != 1:
        raise ConfigError(["command line: one PLACE has to be given. python -m bench.adopt --help says more."])
    config = load(AdoptBenchConfig, parse_command_line(keys, {}), check=lambda config: [])
    if text := place_problem(places[0]):
        raise ConfigError([f"PLACE: {text}"])
    record = measure(places[0].rstrip("/"), config)
    write_record(config.results, record)
    print(f"adopt_bytes_read={record['adopt_bytes_read']} of {record['many_bytes']} in {record['many_shards']} shards")
    rates = [f"{kind}_samples_per_sec" for kind in KINDS]
    ratios = [
        f"{ratio}{end}" for ratio in ("plain_over_ours", "zstd_over_plain", "gz_over_plain") for end in ("", "_cpu")
    ]
    for key in ("adopt_sec", *rates, *ratios, "unpack_zstd_mb_per_sec"):
        print(f"{key}={record[key]} ({record[f'{key}_min']} to {record[f'{key}_max']})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
