"""How fast a stage comes from a store, against a plain download of the same objects.

    S3_ENDPOINT_URL=http://127.0.0.1:8080 python -m bench.store s3://bucket/prefix
    python -m bench.store s3://bucket/prefix num_samples=8192 rounds=7 results=/tmp/store.json

Writes a stage of random moments (64 KiB a sample at 512 px) under the prefix, where there is none yet; bucket and
credentials are those of the environment. Contestants take turns (bench/contest.py):

    download   boto3, object after object in one thread, to files                              MB/s
    cold       an epoch through data.build_data with one loader process, from an empty cache   MB/s, samples/s
    arrival    within `cold`: from the arrival of index.json to that of the last shard         MB/s
    cold_one, arrival_one: the same with one fetch thread, where `cold` has stages.stream.FETCHES
    warm       an epoch from the cache's files, each compared with its digest                  MB/s, samples/s
    verify     what `warm` spends on that: reading and hashing the files alone                 seconds a GB

A turn of `cold` and `warm` begins with the making of the stream and ends with the epoch's last batch: the start of the worker
and of its client counts. So does what is read after the last shard has come, which is nearly all in a stage no larger than
the 262,144 samples that are shuffled together: its first batch waits for almost every shard. `arrival` leaves that reading
out: it is about the speed that a long epoch keeps. All write to one folder, emptied outside of the clock: memory that a
virtual machine has never used is many times slower to write than what was freed a moment ago. Exit code: 0, 2 when the
command cannot be read.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import torch
from boto3.s3.transfer import TransferConfig

from bench.command import head, write_record
from bench.contest import Figures, take_turns
from bench.micro_data import MOMENTS_BATCH, SEED, SIZE, build_family, write_moments
from cli.command import command
from cli.command_line import parse_command_line
from cli.errors import ConfigError
from cli.limits import limited
from cli.masking import masked
from config import as_written, load
from data import DataConfig, build_data
from stages import stream
from stages.dataset import read_stage
from stages.fetch import INDEX, file_digest
from stages.store_errors import address_problem, scheme_of

SCHEMA = 2


@dataclass(frozen=True)
class StoreConfig:
    """The keys of this command."""

    num_samples: int = limited(24576, 2 * MOMENTS_BATCH)
    """Samples of moments, 64 KiB each."""
    rounds: int = limited(5, 1)
    """Turns of each contestant."""
    results: str = "reports/results/store_speed.json"
    """File of the record; an earlier one is replaced."""


def put_stage(client: Any, address: str, num_samples: int) -> None:
    """Write the stage under an address, unless one of as many samples is there."""
    with contextlib.suppress(ValueError):  # nothing there yet
        if read_stage(address).num_samples == num_samples:
            return
    place = urlsplit(address)
    with tempfile.TemporaryDirectory() as folder:
        write_moments(Path(folder), num_samples)
        stage = Path(folder, "stage")
        files = [path for path in stage.rglob("*") if path.is_file()]
        for path in sorted(files, key=lambda path: path.name == "dataset.json"):  # that one last of all
            client.upload_file(str(path), place.netloc, f"{place.path.strip('/')}/{path.relative_to(stage)}")


class Contest:
    """One stage in a store and the folders of its contestants; each turn returns MB/s, `verify` seconds a GB."""

    def __init__(self, client: Any, address: str, num_samples: int):
        self.client, self.address, self.num_samples = client, address, num_samples
        self.place = urlsplit(address)
        self.cache = Path(tempfile.mkdtemp(prefix="bench-store-"))
        index = client.get_object(Bucket=self.place.netloc, Key=f"{self.place.path.strip('/')}/index.json")
        with index["Body"] as body:
            shards = [shard["raw_data"] for shard in json.loads(body.read())["shards"]]
        self.names = [shard["basename"] for shard in shards]
        self.megabytes = sum(shard["bytes"] for shard in shards) / 1e6
        self.batches = num_samples // MOMENTS_BATCH
        self.arrivals: dict[str, float] = {}

    def download(self) -> float:
        """Fetch the shards one after the other."""
        self._empty()
        begun = time.monotonic()
        for name in self.names:
            key, path = f"{self.place.path.strip('/')}/{name}", self.cache / name
            path.parent.mkdir(parents=True, exist_ok=True)
            one_thread = TransferConfig(use_threads=False)
            self.client.download_file(self.place.netloc, key, str(path), Config=one_thread)
        return self.megabytes / (time.monotonic() - begun)

    def cold(self) -> float:
        """Read an epoch through an empty cache."""
        return self._cold("arrival")

    def cold_one(self) -> float:
        """Do so with one fetch thread; the reader too fetches a shard that it needs and nobody has begun with."""
        usual, stream.FETCHES = stream.FETCHES, 1
        try:
            return self._cold("arrival_one")
        finally:
            stream.FETCHES = usual

    def _cold(self, arrival: str) -> float:
        self._empty()
        speed = self.warm()
        last = max((self.cache / name).stat().st_mtime_ns for name in self.names)
        self.arrivals[arrival] = self.megabytes / (1e-9 * (last - (self.cache / INDEX).stat().st_mtime_ns))
        return speed

    def warm(self) -> float:
        """Read an epoch through the cache as it is."""
        keys = DataConfig(stage="moments", remote=self.address, local=str(self.cache), workers=1)
        batches = dict(size=SIZE, device_batch_size=MOMENTS_BATCH, device=torch.device("cpu"), seed=SEED)
        begun = time.monotonic()
        loader = build_data(keys, build_family(), **batches).dataloader
        assert sum(1 for _ in loader) == self.batches
        seconds = time.monotonic() - begun
        loader.close()
        return self.megabytes / seconds

    def verify(self) -> float:
        """Read and hash the cached files."""
        begun = time.monotonic()
        for name in self.names:
            file_digest(self.cache / name)
        return (time.monotonic() - begun) / (self.megabytes / 1e3)

    def _empty(self) -> None:
        shutil.rmtree(self.cache, ignore_errors=True)
        self.cache.mkdir()


def measure(address: str, config: StoreConfig) -> dict[str, Any]:
    """Let the contestants take turns and return the record."""
    client = boto3.client("s3", endpoint_url=os.environ.get("S3_ENDPOINT_URL"))
    put_stage(client, address, config.num_samples)
    contest = Contest(client, address, config.num_samples)
    try:
        contest.cold_one()
        contest.cold()  # so that the others have files, and arrivals, in the first round
        turns: dict[str, Callable[[], float]] = {}
        for name in ("download", "warm", "verify", "cold", "arrival", "cold_one", "arrival_one"):
            is_arrival = name.startswith("arrival")  # of the last `cold` or `cold_one`
            turns[name] = (
                functools.partial(contest.arrivals.__getitem__, name) if is_arrival else getattr(contest, name)
            )
        values = take_turns(turns, config.rounds, warm_up=False)
    finally:
        shutil.rmtree(contest.cache)
    figures, samples_each_mb = Figures(), contest.batches * MOMENTS_BATCH / contest.megabytes
    for name in ("download", "cold", "arrival", "cold_one", "arrival_one", "warm"):
        figures.add(f"{name}_mb_per_sec", values[name])
    for name in ("cold", "warm"):
        figures.add(f"{name}_samples_per_sec", [value * samples_each_mb for value in values[name]])
    figures.add("verify_sec_per_gb", values["verify"])
    figures.ratio("cold_over_download", "cold_mb_per_sec", "download_mb_per_sec")
    figures.ratio("arrival_over_download", "arrival_mb_per_sec", "download_mb_per_sec")
    figures.ratio("cold_over_one", "cold_mb_per_sec", "cold_one_mb_per_sec")
    figures.ratio("arrival_over_one", "arrival_mb_per_sec", "arrival_one_mb_per_sec")
    begin = {
        **head(SCHEMA),
        "store": store_name(client),
        "megabytes": round(contest.megabytes, 1),
        "num_shards": len(contest.names),
        "fetches": stream.FETCHES,
    }
    return {**begin, "config": as_written(config), **figures.flat, "by_round": figures.by_round}


def store_name(client: Any) -> str:
    """Return what the store calls itself in an answer's headers, for the record."""
    headers = client.list_buckets()["ResponseMetadata"]["HTTPHeaders"]
    return headers.get("server") or ("OpenStack Swift" if "x-openstack-request-id" in headers else "unknown")


def place_problem(address: str) -> str | None:
    """Say why no stage can be measured at an address, or None; nothing is asked for."""
    if scheme_of(address) != "s3":
        given = masked(address).rpartition("@")[2]
        return f"{given} is no address of an S3 store. Write s3://BUCKET/PREFIX."
    return address_problem(address)


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    places, words = [word for word in argv if "=" not in word], [word for word in argv if "=" in word]
    if len(places) != 1:
        raise ConfigError(["command line: one PLACE has to be given. python -m bench.store --help says more."])
    config = load(StoreConfig, parse_command_line(words, {}), check=lambda config: [])
    if text := place_problem(places[0]):
        raise ConfigError([text])
    record = measure(places[0], config)
    write_record(config.results, record)
    speeds = [f"{name}_mb_per_sec" for name in ("download", "cold", "arrival", "cold_one", "arrival_one", "warm")]
    ratios = ("cold_over_download", "arrival_over_download", "cold_over_one", "arrival_over_one")
    for key in (*speeds, *ratios, "verify_sec_per_gb"):
        print(f"{key}={record[key]} ({record[f'{key}_min']} to {record[f'{key}_max']})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
