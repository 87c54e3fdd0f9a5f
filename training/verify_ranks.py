"""The ranks connect, and compare code, configuration, versions, kind of device and data before anything is built.

Each machine has its own checkout, environment, YAML and copy of the data. If one of them differs, nothing fails by itself:
each rank trains something else. So what differs is reported with each value and who has it, and every rank exits with code 2.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common import dist, masking
from common.errors import ConfigError
from mds.dataset import Dataset
from ranks import collectives, rendezvous
from ranks.watchdog import Watchdog
from run_folder.environment import versions

if TYPE_CHECKING:
    from composer.devices import Device

ROOT = Path(__file__).resolve().parent.parent
MAY_DIFFER = (
    "run_name",  # each rank made one up where none was given; rank 0's counts
    "data.local",
    "data.metadata",
    "data.workers",
    "data.cache_limit",
    "validation.local",
)
"""Keys that may differ between machines: paths, and what a machine can take."""
OF_A_STREAM = ("local", "metadata")
TEXTS = {
    "code": "Check out one commit on every machine.",
    "config": "All ranks need one configuration: give every machine the same command and YAML.",
    "version": "All ranks need the same versions: install one lock on every machine.",
    "device": "All ranks need one kind of device: leave out the machines that have another.",
    "data": "All ranks need the same data: copy one dataset to every machine, or give one path that all can read.",
}


def verify_ranks_match(keys: Mapping[str, Any], device: Device, timeout_sec: float) -> tuple[str, Watchdog]:
    """Connect to the other ranks, begin to watch them, and verify that all are to do the same.

    Args:
        keys: every key of the resolved configuration -> plain value.
        timeout_sec: of every collective of the run.

    Returns:
        The run's name, rank 0's: each rank made one up if none was given. And the watchdog, which has begun.

    Raises:
        ConfigError: what differs, or keeps the ranks apart.
        common.errors.Failed: a rank is missing.
    """
    init_timeout_sec = keys["health.init_timeout_sec"]
    rendezvous.init_process_group(device, timeout_sec, init_timeout_sec, key="health.init_timeout_sec")
    collectives.watch_for_abort()
    watch = Watchdog(keys["health.stall_sec"])
    watch.begin()
    check(keys)
    return dist.all_gather_object(keys["run_name"])[0], watch


def check(keys: Mapping[str, Any]) -> None:
    """Compare code, versions, device and configuration of all ranks. All call it.

    Raises:
        ConfigError: on all ranks alike, what differs.
    """
    if dist.get_world_size() == 1:
        return
    differing = _differing({"code": code(), **_versions(), "device": _kind_of_device(), **_comparable(keys)})
    problems = []
    for key, text in differing.items():
        kind = key if key in ("code", "device") else "version" if key.endswith("_version") else "config"
        problems.append(f"{key}: {text}. {TEXTS[kind]}")
    if problems:
        raise ConfigError(problems)


def check_index_digests(digests: Mapping[str, str]) -> None:
    """Compare what each machine has read of the data. All ranks call it.

    Args:
        digests: key of a dataset's path -> sha256 of its index.

    Raises:
        ConfigError: on all ranks alike, what differs.
    """
    if dist.get_world_size() == 1:
        return
    differing = _differing({key: f"an index.json of sha256 {digest[:12]}" for key, digest in digests.items()})
    if differing:
        raise ConfigError([f"{key}: {text}. {TEXTS['data']}" for key, text in differing.items()])


def code() -> str:
    """Return the digest of the project's code, tests left out. Not the commit: a copy of the tree may have none."""
    rooms = sorted(init.parent for init in ROOT.glob("*/__init__.py") if init.parent.name != "tests")
    digest = hashlib.sha256()
    for file in sorted([*ROOT.glob("*.py"), *(file for room in rooms for file in room.rglob("*.py"))]):
        digest.update(file.read_bytes())
    return f"files of sha256 {digest.hexdigest()[:12]}"


def _versions() -> dict[str, str]:
    cuda = {"cuda_version": torch.version.cuda} if torch.cuda.is_available() else {}
    return {key: str(text) for key, text in {"python_version": platform.python_version(), **versions(), **cuda}.items()}


def _kind_of_device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _comparable(keys: Mapping[str, Any]) -> dict[str, str]:
    """Return key -> its value as text, without secrets, of all keys that have to be the same."""
    digests = {}
    for key, value in masking.restore_interpolations(keys).items():
        if key == "data.streams" and isinstance(value, list):
            value = [{name: part for name, part in stream.items() if name not in OF_A_STREAM} for stream in value]
        if key not in MAY_DIFFER:
            digests[key] = value if isinstance(value, str) else json.dumps(value)
    return digests


def _differing(own: Mapping[str, str]) -> dict[str, str]:
    """Return what is not the same on all ranks: key -> each value and who has it."""
    # Of a thousand ranks 64 bytes each; all of it only where that differs.
    if len(set(dist.all_gather_object(hashlib.sha256(json.dumps(own).encode()).hexdigest()))) == 1:
        return {}
    of_ranks = dist.all_gather_object(dict(own))
    differences = {}
    for key in dict.fromkeys(key for each in of_ranks for key in each):
        holders: dict[Any, list[int]] = {}
        for rank, each in enumerate(of_ranks):
            holders.setdefault(each.get(key), []).append(rank)
        if len(holders) > 1:
            values = [
                ("none" if value is None else value, rendezvous.format_ranks(ranks)) for value, ranks in holders.items()
            ]
            differences[key] = ", ".join(f"{value} on {ranks}" for value, ranks in values)
    return differences


def index_digests(
    sources: Sequence[tuple[str, Any]], datasets: Sequence[Dataset], held_out: Dataset | None
) -> dict[str, str]:
    """Return the key of each dataset's path -> sha256 of its index. `sources`: of DataConfig.named_sources()."""
    named = zip(sources, datasets, strict=False)  # synthetic data have no dataset
    digests = {f"{key}.remote": dataset.index_sha256 for (key, _), dataset in named}
    return digests | ({} if held_out is None else {"validation.remote": held_out.index_sha256})
