"""The ranks meet, and all are to do the same: code, configuration, versions, kind of device, data. Nothing is built before.

Each machine has its own checkout, environment, YAML and copy of the data. Where one of them differs nothing fails: the ranks
train on, each on something else. What differs is named with each value and who has it, and every rank ends with exit code 2.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from composer.utils import dist

from cli import masking, meeting, ranks
from cli.errors import ConfigError
from cli.watching import Watch
from config import flat
from record.environment import versions
from stages.dataset import Stage
from training.run_config import RunConfig

if TYPE_CHECKING:
    from composer.devices import Device

ROOT = Path(__file__).resolve().parent.parent
MAY_DIFFER = (
    "run_name",  # each rank made one up where none was given; rank 0's counts
    "data.local",
    "data.facts",
    "data.workers",
    "data.cache_limit",
    "validation.local",
    "validation.facts",
)
"""Keys of a machine: places and what it can take."""
OF_A_STREAM = ("local", "facts")
TEXTS = {
    "code": "Check out one commit on every machine.",
    "config": "All ranks need one configuration: give every machine the same command and YAML.",
    "version": "All ranks need the same versions: install one lock on every machine.",
    "device": "All ranks need one kind of device: leave out the machines that have another.",
    "data": "All ranks need the same data: copy one stage to every machine, or give one place that all can read.",
}


def meet(config: RunConfig, device: Device, timeout_sec: float) -> tuple[RunConfig, Watch]:
    """Meet the other ranks, begin to watch them, and see that all are to do the same.

    Args:
        timeout_sec: of every collective of the run.

    Returns:
        The run with one name for all: each rank made one up where none was given.

    Raises:
        ConfigError: what differs, or keeps the ranks apart.
        cli.errors.Failed: a rank has not come.
    """
    meeting.meet(device, timeout_sec, config.health.meet_sec, key="health.meet_sec")
    ranks.watch_for_abort()
    watch = Watch(config.health.stall_sec)
    watch.begin()
    check(config)
    return replace(config, run_name=dist.all_gather_object(config.run_name)[0]), watch


def check(config: RunConfig) -> None:
    """Compare code, versions, device and configuration of all ranks. All call it.

    Raises:
        ConfigError: on all ranks alike, what differs.
    """
    if dist.get_world_size() == 1:
        return
    differing = _differing({"code": code(), **_versions(), "device": _kind_of_device(), **_keys(config)})
    problems = []
    for key, text in differing.items():
        kind = key if key in ("code", "device") else "version" if key.endswith("_version") else "config"
        problems.append(f"{key}: {text}. {TEXTS[kind]}")
    if problems:
        raise ConfigError(problems)


def check_stages(config: RunConfig, stages: Sequence[Stage], held_out: Stage | None) -> None:
    """Compare what each machine has read of the data: the digest of each index. All ranks call it.

    Raises:
        ConfigError: on all ranks alike, what differs.
    """
    if dist.get_world_size() == 1:
        return
    sources = config.data.named_sources()
    named = {f"{key}.remote": stage.index_sha256 for (key, _), stage in zip(sources, stages, strict=False)}
    named |= {} if held_out is None else {"validation.remote": held_out.index_sha256}
    differing = _differing({key: f"an index.json of sha256 {digest[:12]}" for key, digest in named.items()})
    if differing:
        raise ConfigError([f"{key}: {said}. {TEXTS['data']}" for key, said in differing.items()])


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


def _keys(config: RunConfig) -> dict[str, str]:
    """Return key -> its value as text, without secrets, of all keys that have to be the same."""
    found = {}
    for key, value in masking.written(flat(config)).items():
        if key == "data.streams" and isinstance(value, list):
            value = [{name: part for name, part in stream.items() if name not in OF_A_STREAM} for stream in value]
        if key not in MAY_DIFFER:
            found[key] = value if isinstance(value, str) else json.dumps(value)
    return found


def _differing(own: Mapping[str, str]) -> dict[str, str]:
    """Return what is not the same on all ranks: key -> each value and who has it."""
    # Of a thousand ranks 64 bytes each; all of it only where that differs.
    if len(set(dist.all_gather_object(hashlib.sha256(json.dumps(own).encode()).hexdigest()))) == 1:
        return {}
    of_ranks = dist.all_gather_object(dict(own))
    found = {}
    for key in dict.fromkeys(key for each in of_ranks for key in each):
        holders: dict[Any, list[int]] = {}
        for rank, each in enumerate(of_ranks):
            holders.setdefault(each.get(key), []).append(rank)
        if len(holders) > 1:
            said = [f"{'none' if value is None else value} on {meeting.named(who)}" for value, who in holders.items()]
            found[key] = ", ".join(said)
    return found
