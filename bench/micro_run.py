"""What a run waits for: its checkpoints, and its own start.

    checkpoint_write         checkpoint_files.write: torch.save through a digest, synced to the disk, renamed
    checkpoint_torch_save    plain torch.save of the same content into the same folder, left in the page cache: the floor
    checkpoint_find          checkpoint_files.find_newest right after: one file, read whole out of the page cache
    first_step               from starting `composer benchmark.py` to the line of its first batch in metrics.jsonl

A checkpoint is what AdamW and an average make of the weights, float32: 16 bytes a parameter. Each file is removed before the
next one is written, outside the time. The run of `first_step` is the tiny network on synthetic tensors: imports, set-up,
one step and its record, without a word about the size of a real model.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.contest import Figures, rounded, take_turns
from bench.micro_ema import narrow_unet
from record.checkpoint_files import FULL, SCHEMA, find_newest, stem, write

MAX_ROUNDS = 3  # of seconds each
POLL_SEC = 0.02
LIMIT_SEC = 300
ROOT = Path(__file__).resolve().parent.parent
PROGRAM = (sys.executable, "-m", "composer.cli", "-n", "1", "benchmark.py")
TINY_RUN = (
    "model.preset=tiny",
    "image_size=64",
    "global_batch_size=8",
    "max_duration=1ba",
    "measure.window_batches=1",
    "measure.warmup_batches=0",
    "loggers.progress_bar=false",
    "--use_synth_data",
)


# --- checkpoints ---


def checkpoint_content(num_parameters: int) -> dict[str, Any]:
    """Return a full checkpoint of a UNet: weights, average, both moments of AdamW."""
    parameters = narrow_unet(num_parameters, torch.device("cpu")).named_parameters()
    weights = {name: parameter.detach() for name, parameter in parameters}

    def like_weights() -> Iterator[torch.Tensor]:
        return (torch.randn_like(weight) for weight in weights.values())

    moments = zip(like_weights(), like_weights(), strict=True)
    states = {i: {"step": torch.tensor(1.0), "exp_avg": m, "exp_avg_sq": v} for i, (m, v) in enumerate(moments)}
    average = dict(zip(weights, like_weights(), strict=True))
    return {"schema": SCHEMA, "model": weights, "ema": {"weights": average}, "optimizer": {"state": states}}


def measure_checkpoint(folder: Path, num_parameters: int, rounds: int) -> Figures:
    """Measure writing and finding a checkpoint of about 16 bytes x `num_parameters`."""
    content, figures = checkpoint_content(num_parameters), Figures()
    find_sec, sizes = [], []

    def ours() -> float:
        started = time.perf_counter()
        path = write(folder, stem(FULL, 1), content)
        written = time.perf_counter()
        found = find_newest(folder)
        find_sec.append(time.perf_counter() - written)
        assert found == path
        sizes.append(path.stat().st_size)
        path.unlink()
        return written - started

    def plain() -> float:
        path = folder / "plain.pt"
        started = time.perf_counter()
        torch.save(content, path)
        seconds = time.perf_counter() - started
        path.unlink()
        return seconds

    turns = {"checkpoint_write_sec": ours, "checkpoint_torch_save_sec": plain}
    for name, values in take_turns(turns, min(rounds, MAX_ROUNDS), warm_up=False).items():
        figures.add(name, values)
    figures.add("checkpoint_find_sec", find_sec)
    figures.ratio("checkpoint_write_over_torch_save", "checkpoint_write_sec", "checkpoint_torch_save_sec")
    gib = max(sizes) / 2**30
    speeds = {
        f"checkpoint_{verb}_gib_per_sec": gib / figures.flat[f"checkpoint_{verb}_sec"] for verb in ("write", "find")
    }
    figures.flat |= {name: rounded(value) for name, value in {"checkpoint_gib": gib, **speeds}.items()}
    return figures


# --- the start of a run ---


def measure_first_step(folder: Path, rounds: int) -> Figures:
    """Measure some starts of the tiny run, one after the other."""
    figures = Figures()
    figures.flat = {"first_step_command": f"composer -n 1 benchmark.py {' '.join(TINY_RUN)}"}
    starts = [first_step_sec(folder, f"start-{number}") for number in range(min(rounds, MAX_ROUNDS))]
    figures.add("first_step_sec", starts)
    return figures


def first_step_sec(folder: Path, run_name: str) -> float:
    """Start a run, return the seconds until the record of its first batch is there, and wait for its end.

    Raises:
        RuntimeError: it failed, or took longer than its limit; with the end of what it printed.
    """
    command = [*PROGRAM, *TINY_RUN, f"run_folder={folder}", f"run_name={run_name}"]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        started = time.perf_counter()
        with _running(command, output) as process:
            seconds = _seconds_to_first_line(folder / run_name / "metrics.jsonl", process, started)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(1.0, LIMIT_SEC - (time.perf_counter() - started)))
        if seconds is None or process.returncode != 0:
            output.seek(0)
            end = output.read()[-2000:].strip()
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}. It printed: {end}")
    return seconds


def _seconds_to_first_line(path: Path, process: subprocess.Popen, started: float) -> float | None:
    """Wait for a whole line in a file; None where the process ended or its time was over before."""
    is_over = False
    while not is_over:
        is_over = process.poll() is not None or time.perf_counter() - started > LIMIT_SEC
        if path.is_file() and "\n" in path.read_text():  # looked at after the process: its last words count
            return time.perf_counter() - started
        time.sleep(POLL_SEC)
    return None


@contextlib.contextmanager
def _running(command: list[str], output: Any) -> Iterator[subprocess.Popen]:
    """Run a command in a process group of its own, of which nothing is left afterwards."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:  # beyond its limit, or this command is interrupted
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)
