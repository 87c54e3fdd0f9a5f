"""What a run waits for: its checkpoints, and its own start.

    checkpoint_write         checkpoint_files.write: torch.save through a digest, synced to the disk, renamed
    checkpoint_torch_save    plain torch.save of the same content into the same folder, left in the page cache: the floor
    checkpoint_find          checkpoint_files.find_newest right after: one file, read whole out of the page cache
    first_step               from starting `composer benchmark.py` to the line of its first batch in metrics.jsonl
    first_step_traced        the same where no cost of a step is kept: the first start of its kind on a machine
    first_step_alone         `python benchmark.py`, without Composer's launcher
    first_step_predecessor   `composer -m bench.predecessor`, until its first batch is done

A checkpoint is what AdamW and an average make of the weights, float32: 16 bytes a parameter. Each file is removed before the
next one is written, outside the time. The run of a start is the tiny network on synthetic tensors: imports, set-up, one step
and its record, without a word about the size of a real model. Processor time (`_cpu_sec`) is that of the launcher and of all
that it has started. The predecessor reads its configuration as ours does, and has the same networks; it traces no step.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.contest import Figures, rounded, take_turns
from bench.micro_ema import narrow_unet
from bench.predecessor import FIRST_BATCH
from record.checkpoint_files import FULL, SCHEMA, find_newest, stem, write

MAX_ROUNDS = 3  # of seconds each
MAX_STARTS = 5
POLL_SEC = 0.02
LIMIT_SEC = 300
ROOT = Path(__file__).resolve().parent.parent
COMPOSER = (sys.executable, "-m", "composer.cli", "-n", "1")
TRACED = "first_step_traced"
STARTS = {
    TRACED: ((*COMPOSER, "benchmark.py"), "metrics.jsonl"),  # first: it leaves the cost that the others find
    "first_step": ((*COMPOSER, "benchmark.py"), "metrics.jsonl"),
    "first_step_alone": ((sys.executable, "benchmark.py"), "metrics.jsonl"),
    "first_step_predecessor": ((*COMPOSER, "-m", "bench.predecessor"), FIRST_BATCH),
}
"""Contestant -> its program, and the file of the run that has a line when the first batch is done."""
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
    """Measure starts of the tiny run, which take turns. They share a cache of their own under `folder`."""
    figures = Figures()
    figures.flat = {f"{name}_command": " ".join([*program[1:], *TINY_RUN]) for name, (program, _) in STARTS.items()}
    cpu: dict[str, list[float]] = defaultdict(list)

    def start(name: str) -> float:
        if name == TRACED:
            shutil.rmtree(folder / "cache" / "easel" / "costs", ignore_errors=True)
        program, marker = STARTS[name]
        seconds, cpu_seconds = first_step_sec(folder, f"{name}-{len(cpu[name])}", program, marker)
        cpu[name].append(cpu_seconds)
        return seconds

    turns = {name: functools.partial(start, name) for name in STARTS}
    for name, values in take_turns(turns, min(rounds, MAX_STARTS), warm_up=False).items():
        figures.add(f"{name}_sec", values)
        figures.add(f"{name}_cpu_sec", cpu[name])
    for other in {"predecessor", "traced"} & {name.removeprefix("first_step_") for name in STARTS}:
        figures.ratio(f"first_step_over_{other}", "first_step_sec", f"first_step_{other}_sec")
        figures.ratio(f"first_step_cpu_over_{other}", "first_step_cpu_sec", f"first_step_{other}_cpu_sec")
    return figures


def first_step_sec(folder: Path, run_name: str, program: tuple[str, ...], marker: str) -> tuple[float, float]:
    """Start a run and wait for its end.

    Args:
        marker: the file in the run's folder whose first line says that a batch is done.

    Returns:
        (seconds, processor seconds) until that line is there.

    Raises:
        RuntimeError: it failed, or took longer than its limit; with the end of what it printed.
    """
    command = [*program, *TINY_RUN, f"run_folder={folder}", f"run_name={run_name}"]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        started = time.perf_counter()
        with _running(command, output, XDG_CACHE_HOME=str(folder / "cache")) as process:
            seconds = _seconds_to_first_line(folder / run_name / marker, process, started)
            cpu_seconds = 0.0 if seconds is None else _cpu_sec(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(1.0, LIMIT_SEC - (time.perf_counter() - started)))
        if seconds is None or process.returncode != 0:
            output.seek(0)
            end = output.read()[-2000:].strip()
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}. It printed: {end}")
    return seconds, cpu_seconds


def _cpu_sec(pid: int) -> float:
    """Return the processor time of a process, and of all that it has started, until now."""
    process = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:4]) for each in (process, *process.children(recursive=True)))


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
def _running(command: list[str], output: Any, **variables: str) -> Iterator[subprocess.Popen]:
    """Run a command in a process group of its own, of which nothing is left afterwards."""
    streams = {"stdout": output, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables}, start_new_session=True, **streams)
    try:
        yield process
    finally:
        if process.poll() is None:  # beyond its limit, or this command is interrupted
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)
