"""The cost of a training step, kept on this machine: tracing it takes seconds, and each rank of each start asks for it.

    ~/.cache/easel/costs/NAME.json          NAME: a digest of what is traced; XDG_CACHE_HOME stands for ~/.cache

Beside the numbers lies a digest of them, of what they are the cost of, and of what has traced them: Python, the libraries and
the code of the networks. A file that does not agree (broken, changed by hand, another version's) is made anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from cli.files import cache_folder, write_json
from cli.log import log
from record.environment import versions
from training.cost import Cost, measure_cost
from zoo.model_config import ModelConfig
from zoo.objectives import ObjectiveConfig

TURN_SEC = 120.0  # that a process waits for another one to trace; SD2 takes 5 s, beside busy ones up to a minute
MAX_BYTES = 4096
ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "cli/later.py",
    "model.py",
    "training/adapter.py",
    "training/adamw.py",
    "training/blocks.py",
    "training/cost.py",
    "training/speed.py",
    "weights/*_text.py",
    "weights/clip_vision.py",
    "weights/tensors.py",
    "zoo/**/*.py",
)
"""The code that a trace goes through, beside the libraries'."""


@functools.cache
def kept_cost(config: ModelConfig, objective: ObjectiveConfig, **ways: Any) -> Cost:
    """Return what `measure_cost` returns for the same values; of processes that ask at the same time one traces.

    Where nothing can be kept, or another process takes too long over it, this one traces for itself.
    """
    machine = [torch.cuda.is_available(), torch.backends.cpu.get_cpu_capability()]
    model = {**asdict(config), "weights": None, "denoiser": None}  # no step costs more for the values of its weights
    given = [model, asdict(objective), ways, machine]
    try:
        path = cache_folder() / "costs" / f"{_digest(given)}.json"
    except RuntimeError:  # a user without a home
        return measure_cost(config, objective, **ways)
    if (kept := _read(path, given)) is not None:
        return kept
    with _turn(path):
        if (kept := _read(path, given)) is None:  # by now another process may have traced it
            kept = measure_cost(config, objective, **ways)
            _write(path, given, kept)
    return kept


def _read(path: Path, given: list[Any]) -> Cost | None:
    """Return the cost in a file; None where there is none, or not that of `given` by these versions."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        content = json.loads(path.read_bytes())
        numbers = content["cost"]
        return Cost(**numbers) if content["digest"] == _digest([given, _made_by(), numbers]) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _write(path: Path, given: list[Any], cost: Cost) -> None:
    """Keep a cost, or say why that cannot be."""
    numbers = asdict(cost)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"cost": numbers, "digest": _digest([given, _made_by(), numbers])})
    except OSError as error:
        told = "Each start traces its step anew, which takes seconds. XDG_CACHE_HOME=FOLDER names another place"
        log.info(f"cache: the cost of a step cannot be kept ({error}). {told}.")


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Keep other processes from a file for the time of a trace, where the file system can."""
    lock = FileLock(path.with_suffix(".lock"))
    with contextlib.suppress(OSError, NotImplementedError):  # filelock.Timeout is an OSError
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=TURN_SEC)
    try:
        yield
    finally:
        lock.release()


@functools.cache
def _made_by() -> list[Any]:
    """Return the versions of all that a trace depends on."""
    code = hashlib.blake2b()
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        code.update(path.read_bytes())
    return [platform.python_version(), versions(), code.hexdigest()]


def _digest(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
