"""Ranks that read the stage and write down what arrived.

    python -m tests.store.reader FOLDER

Started once: it imports everything (10 s), writes the stage to FOLDER/stage and a line of JSON to its standard output, and
then forks the ranks of each reading that it is asked for by a line of JSON on its standard input (0.1 s a rank). When that
ends, it kills what is left of them.

A rank has the variables that `composer` would give it and a process group of its own, and waits at its end for its threads
and workers, as every program does: one that has failed and cannot end is a hang too. What it sees goes to RANK.jsonl in
the reading's folder, a line an event: a file, because a pipe that nobody empties would stop the rank.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import select
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist
from filelock import FileLock
from streaming import StreamingDataLoader, StreamingDataset

from data import DataConfig, build_data
from families import load_family
from mds import fetch
from run_folder.environment import environment
from tests.store import dataset, processes

DEVICE_BATCH = 4
SEED = 17
DIST_TIMEOUT_SEC = 300.0


def plain(task: dict[str, Any]) -> Any:
    """Return the loader that a user of streaming would write down."""
    # Elsewhere on this machine plain loaders may be about to take a number for their shared memory, and streaming's own
    # search collides: what is measured here is the store.
    one_at_a_time = FileLock(Path(tempfile.gettempdir(), "plain-streams.lock"))
    with one_at_a_time if dist.get_local_rank() == 0 else contextlib.nullcontext():
        dist.barrier()
        dataset = StreamingDataset(
            remote=task["remote"],
            local=task["local"],
            batch_size=DEVICE_BATCH,
            shuffle=task["shuffle"],
            shuffle_seed=SEED,
            num_canonical_nodes=1,
            validate_hash=task["validate_hash"],
            **({"download_timeout": task["timeout_sec"]} if task["timeout_sec"] else {}),
        )
    return StreamingDataLoader(dataset, batch_size=DEVICE_BATCH, num_workers=task["workers"])


def ours(task: dict[str, Any]) -> Any:
    """Return the loader that benchmark.py makes. Raises ValueError: what it would refuse before it starts."""
    patience = {}
    if task["patience_sec"] and any(field.name == "patience_sec" for field in dataclasses.fields(DataConfig)):
        patience = {"patience_sec": task["patience_sec"]}
    config = DataConfig(
        stage="moments",
        remote=task["remote"],
        local=task["local"],
        workers=task["workers"],
        shuffle=task["shuffle"],
        **patience,
    )
    family = load_family("sd2", "tiny", "stock")
    made_for = {"model.family": "sd2", "image_size": list(dataset.IMAGE_SIZE)}
    if problems := config.problems(DEVICE_BATCH * task["ranks"], made_for):
        raise ValueError("; ".join(f"{key}: {text}" for key, text in problems))
    spec = build_data(
        config, family, size=dataset.IMAGE_SIZE, device_batch_size=DEVICE_BATCH, device=torch.device("cpu"), seed=SEED
    )
    return spec.dataloader


def shared_memory_of(loader: Any) -> tuple[int, int | None] | None:
    """Return the number of plain streaming's shared memory and its inode; None: Easel's has no name."""
    if not isinstance(loader.dataset, StreamingDataset):
        return None
    number = loader.dataset._shm_prefix_int
    return number, processes.inode_of_number(number)


def read(task: dict[str, Any], rank: int) -> None:
    """Read the epochs as one rank, and write down everything."""
    with open(Path(task["folder"], f"{rank}.jsonl"), "w", buffering=1) as file:

        def tell(event: str, **facts: Any) -> None:
            file.write(json.dumps({"event": event, "at": time.time(), **facts}) + "\n")

        tell("begun")
        try:
            dist.initialize_dist("cpu", timeout=DIST_TIMEOUT_SEC)
            loader = ours(task) if task["kind"] == "ours" else plain(task)
            tell("ready", batches=len(loader), shared_memory=shared_memory_of(loader))
            for epoch in range(task["epochs"]):
                for batch in loader:
                    numbers, wrong = dataset.unlike_truth(batch["moments"].numpy(), batch["tokens"].numpy())
                    tell("batch", epoch=epoch, numbers=numbers, wrong=wrong)
                    time.sleep(task["pace_sec"])
                tell("epoch", epoch=epoch)
            if hasattr(loader, "close"):
                loader.close()
            tell("end")
        except BaseException as error:
            tell("error", type=type(error).__name__, text=str(error))
            raise


def become_rank(task: dict[str, Any], rank: int) -> None:
    """Turn a forked copy of this process into a rank."""
    os.setpgid(0, 0)
    with open(os.devnull) as nothing, open(Path(task["folder"], f"{rank}.log"), "w") as log:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    of_rank = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
    of_all = {"WORLD_SIZE": task["ranks"], "LOCAL_WORLD_SIZE": task["ranks"], "MASTER_PORT": task["master_port"]}
    os.environ.update({name: str(value) for name, value in {**of_rank, **of_all, **task["environment"]}.items()})


def lines_of_input(ranks: dict[int, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what is asked for, and write down meanwhile which ranks have ended, and how.

    Args:
        ranks: process -> the folder of its reading, and its rank; whoever has ended is taken out. A number alone names no
            process in a run that goes on for an hour: the machine gives it again.
    """
    text = b""
    while True:
        if select.select([0], [], [], 0.03)[0]:
            piece = os.read(0, 1 << 16)
            if not piece:
                return
            *lines, text = (text + piece).split(b"\n")
            yield from map(json.loads, lines)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                rank, status = ranks.pop(ended[0]), os.waitstatus_to_exitcode(ended[1])
                with open(Path(rank["folder"], "ended.jsonl"), "a") as file:
                    file.write(json.dumps({"rank": rank["rank"], "status": status}) + "\n")


def serve() -> tuple[dict[str, Any], int] | None:
    """Fork ranks until the input ends; return in each of them with its task, and here with None."""
    groups: set[int] = set()
    alive: dict[int, dict[str, Any]] = {}
    told: set[Path] = set()
    for task in lines_of_input(alive):
        for rank in range(task["ranks"]):
            pid = os.fork()
            if pid == 0:
                become_rank(task, rank)
                return task, rank
            groups.add(pid)
            alive[pid] = {"folder": task["folder"], "rank": rank}
            told.add(Path(task["folder"], f"{rank}.jsonl"))
            with open(Path(task["folder"], "pids.jsonl"), "a") as file:
                file.write(json.dumps({"rank": rank, "pid": pid}) + "\n")
    for group in groups:
        processes.kill(group)
    time.sleep(0.5)  # until the killed are gone
    for path in told:  # nothing is left of them, unless the one who asked was killed
        with contextlib.suppress(OSError, ValueError):
            for line in map(json.loads, path.read_text().splitlines()):
                if line["event"] == "ready" and line["shared_memory"]:
                    processes.remove_shared_memory(*line["shared_memory"])
    return None


def end_as_the_interpreter_does(code: int) -> None:
    """Wait for threads, run the exit handlers, and leave out what comes then: to free two million objects takes 6 s."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    home = Path(sys.argv[1])
    dataset.write(home / "stage")
    dataset.truth()
    print(json.dumps({**environment(), "hash": fetch.HASH}), flush=True)
    if found := serve():
        try:
            read(*found)
        except BaseException:
            traceback.print_exc()
            end_as_the_interpreter_does(1)
        end_as_the_interpreter_does(0)
