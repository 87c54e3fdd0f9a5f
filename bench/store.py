"""How fast a dataset arrives from a store, against a plain download of the same objects.

    S3_ENDPOINT_URL=http://127.0.0.1:8080 python -m bench.store address=s3://bucket/prefix

Writes a dataset of random moments (64 KiB a sample at 512 px) under the prefix if there is none of this size; bucket and
credentials are those of the environment. Contestants alternate, MB/s:

    download   boto3, object after object in one thread, to files
    cold       an epoch through data.build_data with one loader process, from an empty cache
    warm       an epoch from the cache's files, each compared with its digest

A turn of `cold` and `warm` goes from creating the stream to the epoch's last batch, so it includes the start of the worker
and of its client. Exit code: 0, or 2 if the command cannot be read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
from boto3.s3.transfer import TransferConfig

from bench.command import Figures, measure_and_record, take_turns
from bench.data import MOMENTS_BATCH, our_loader, write_moments
from common.command import command
from common.command_line import Problem
from common.masking import mask_secrets
from common.value_types import limited
from config import to_written_dict
from data import DataConfig
from mds.dataset import read_dataset
from mds.stores import address_problem, scheme_of


@dataclass(frozen=True)
class StoreConfig:
    """The keys of this command."""

    address: str | None = None
    """s3://BUCKET/PREFIX of the dataset; the record does not have it."""
    num_samples: int = limited(24576, 2 * MOMENTS_BATCH)
    """Samples of moments, 64 KiB each."""
    rounds: int = limited(5, 1)
    """Turns of each contestant."""
    results: str = "runs/bench/store.json"
    """File of the record; an earlier one is replaced."""


def check(config: StoreConfig) -> list[Problem]:
    """Return what is wrong with the address; nothing is asked of the store."""
    address = config.address or ""
    if scheme_of(address) == "s3":
        text = address_problem(address)
    else:
        masked = mask_secrets(address).rpartition("@")[2] or "none"
        text = f"{masked} is no address of an S3 store. Write address=s3://BUCKET/PREFIX."
    return [Problem(f"address: {text}", ("address",))] if text else []


def put_stage(client: Any, address: str, num_samples: int) -> None:
    """Write the dataset under an address, unless one of this size is there."""
    with contextlib.suppress(ValueError):  # nothing there yet
        if read_dataset(address).num_samples == num_samples:
            return
    url = urlsplit(address)
    with tempfile.TemporaryDirectory() as folder:
        write_moments(Path(folder), num_samples)
        stage = Path(folder, "stage")
        files = [path for path in stage.rglob("*") if path.is_file()]
        for path in sorted(files, key=lambda path: path.name == "dataset.json"):  # that one last
            client.upload_file(str(path), url.netloc, f"{url.path.strip('/')}/{path.relative_to(stage)}")


class StoreContest:
    """A dataset in a store, and a cache folder; each turn returns MB/s."""

    def __init__(self, client: Any, address: str, cache: Path):
        self.client, self.address, self.cache = client, address, cache
        self.bucket, self.prefix = urlsplit(address).netloc, urlsplit(address).path.strip("/")
        with client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/index.json")["Body"] as body:
            shards = [shard["raw_data"] for shard in json.loads(body.read())["shards"]]
        self.names = [shard["basename"] for shard in shards]
        self.megabytes = sum(shard["bytes"] for shard in shards) / 1e6

    def download(self) -> float:
        """Fetch the shards one after the other."""
        self._empty()
        begun, one_thread = time.monotonic(), TransferConfig(use_threads=False)
        for name in self.names:
            path = self.cache / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self.client.download_file(self.bucket, f"{self.prefix}/{name}", str(path), Config=one_thread)
        return self.megabytes / (time.monotonic() - begun)

    def cold(self) -> float:
        """Read an epoch through an empty cache."""
        self._empty()
        return self.warm()

    def warm(self) -> float:
        """Read an epoch through the cache as it is."""
        begun = time.monotonic()
        config = DataConfig(stage="moments", remote=self.address, local=str(self.cache), workers=1)
        loader = our_loader(config, MOMENTS_BATCH)
        assert sum(1 for _ in loader) == len(loader)
        seconds = time.monotonic() - begun
        loader.close()
        return self.megabytes / seconds

    def _empty(self) -> None:
        shutil.rmtree(self.cache, ignore_errors=True)
        self.cache.mkdir()


def measure(config: StoreConfig) -> dict[str, Any]:
    """Let the contestants alternate, and return the figures."""
    assert config.address is not None
    client, figures = boto3.client("s3", endpoint_url=os.environ.get("S3_ENDPOINT_URL")), Figures()
    put_stage(client, config.address, config.num_samples)
    with tempfile.TemporaryDirectory(prefix="bench-store-") as folder:
        contest = StoreContest(client, config.address, Path(folder, "cache"))
        turns = {"download": contest.download, "cold": contest.cold, "warm": contest.warm}
        for name, speeds in take_turns(turns, config.rounds).items():
            figures.add(f"{name}_mb_per_sec", speeds)
    figures.ratio("cold_over_download", "cold_mb_per_sec", "download_mb_per_sec")
    size = {"megabytes": round(contest.megabytes, 1), "num_shards": len(contest.names)}
    return {"config": to_written_dict(dataclasses.replace(config, address=None)), **size, **figures.as_record()}


@command(keys=StoreConfig)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    return measure_and_record("store", StoreConfig, argv, measure, check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
