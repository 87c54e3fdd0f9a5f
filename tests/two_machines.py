"""Runs on two ranks that are pretended to be two machines: a process each, which no launcher ends with the other."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from conftest import TINY_RUN, started
from test_collectives import free_port

WAIT_SEC = 240  # many times what a run takes on two quiet cores


def words_of(folder: Path, name: str, *more: str) -> list[str]:
    """The words of a run of the tiny network on synthetic moments, longer than any test lets it be."""
    own = ["--use_synth_data", "data.stage=moments", f"run_folder={folder}", f"run_name={name}", "max_duration=4000ba"]
    return [*TINY_RUN, *own, "measure.window_batches=1", *more]


@contextlib.contextmanager
def machines(*commands: Sequence[str], **variables: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a Python program on each."""
    shared = {"WORLD_SIZE": str(len(commands)), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), **variables}
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                started(sys.executable, *words, output=subprocess.PIPE, **shared, RANK=str(rank), NODE_RANK=str(rank))
            )
            for rank, words in enumerate(commands)
        ]


def said_by(*ranks: subprocess.Popen[str]) -> list[str]:
    """Wait for the end of some, and return what each has said."""
    return ["".join(rank.communicate(timeout=WAIT_SEC)) for rank in ranks]


def until_trained(folder: Path, windows: int, *ranks: subprocess.Popen[str]) -> None:
    """Wait until the record has so many windows."""
    path, until = folder / "metrics.jsonl", time.monotonic() + WAIT_SEC
    while not path.exists() or len(path.read_text().splitlines()) < windows:
        assert time.monotonic() < until and all(rank.poll() is None for rank in ranks), said_by(*ranks)
        time.sleep(0.05)


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
