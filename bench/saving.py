"""What checkpoints cost a run: its speed without any, with them written in the step, behind it, and uploaded too.

    python -m bench.saving                                        # some minutes on a quiet machine
    python -m bench.saving remote=s3://bucket/bench               # with an object store, as S3_ENDPOINT_URL and AWS_* say

Each contestant is a run of benchmark.py in a process of its own, in turns, of a network without data: synthetic tensors. A
full checkpoint and a snapshot fall due together at every window's end, far more often than by default. What one costs is a
window's time with it, less the same round's time without any; `step_wait` is the part in which the step stands still.
The share at the default cadence is that cost over the time of 512,000 images at this machine's own speed.
Exit code: 0, 1 when a run fails, 2 when the command cannot be read.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command import keep, read_keys
from bench.contest import Figures, rounded, take_turns
from cli.command import command
from cli.errors import Failed
from cli.limits import limited
from record.checkpoint_files import FULL, WEIGHTS, listed
from record.checkpoint_folders import size_of
from training.checkpoints import DEFAULT_EVERY_IMAGES

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent
WARMUP = 1  # windows of each run that do not count: the copy's memory is made in the first
LIMIT_SEC = 3600
IN_STEP = (
    "import sys; import benchmark; from training.host_copy import HostCopy; "
    "HostCopy.has_room = lambda self, content: False; sys.exit(benchmark.main(sys.argv[1:]))"
)
"""A run whose memory has no room for a copy: it waits while a checkpoint is written, as every run once did."""


@dataclass(frozen=True)
class SavingConfig:
    """The keys of this command."""

    batch_size: int = limited(32, 1, 10**6)
    """Images of a step, of shapes' full network."""
    window_batches: int = limited(20, 1)
    """Batches between two checkpoints."""
    windows: int = limited(5, 1)
    """Windows of a run that count; one more goes before them."""
    rounds: int = limited(3, 1)
    """Runs of each contestant."""
    remote: str | None = None
    """s3://BUCKET/PREFIX: also a run that uploads its checkpoints."""
    work: str | None = None
    """Folder for the runs, which are removed. null: where the system has temporary files."""
    results: str = "reports/results/saving.json"
    """File of the record; an earlier one is replaced."""


def words_of(config: SavingConfig, folder: Path, name: str, contestant: str) -> list[str]:
    """Return the words of a contestant's run."""
    window_images = config.batch_size * config.window_batches
    every = 0 if contestant == "none" else window_images
    words = ["model.family=shapes", "model.preset=full", "image_size=32", "data.synthetic=true", "model.weights=random"]
    words += [
        f"global_batch_size={config.batch_size}",
        f"max_duration={(WARMUP + config.windows) * config.window_batches}ba",
    ]
    words += [
        f"measure.window_batches={config.window_batches}",
        f"measure.warmup_batches={config.window_batches * WARMUP}",
    ]
    words += [f"save.every_images={every}", f"save.snapshot_every_images={every}", "ema.enabled=true"]
    words += [f"run_folder={folder}", f"run_name={name}", "loggers.progress_bar=false"]
    return [*words, f"save.remote={config.remote}"] if contestant == "uploaded" else words


def turn(config: SavingConfig, folder: Path, contestant: str, kept: dict[str, list[Any]]) -> float:
    """Run a contestant; return the median seconds of a window, and keep what else there is to know."""
    name = f"{contestant}-{uuid.uuid4().hex[:6]}"
    program = ["-c", IN_STEP] if contestant == "in_step" else ["benchmark.py"]
    words = words_of(config, folder, name, contestant)
    done = subprocess.run(
        [sys.executable, *program, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_SEC,
        env={**os.environ},
    )
    if done.returncode:
        raise Failed(f"{contestant}: the run has failed.\n{done.stderr}")
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    windows = [line for line in lines if not line["warmup"] and line["window_batches"] == config.window_batches]
    kept[f"{contestant}_other_sec"].append(statistics.median(line["other_sec"] for line in windows))
    kept[f"{contestant}_peak_mem_gib"].append(max(line["peak_mem_gib"] for line in windows))
    if contestant == "behind":
        sizes = [size_of(listed(folder / name / "checkpoints", kind)[0]) for kind in (FULL, WEIGHTS)]
        kept["checkpoint_gib"] = [sum(sizes) / 2**30]
    clocks = ("train_sec", "data_wait_sec", "eval_sec", "other_sec")
    return statistics.median(sum(line[clock] for clock in clocks) for line in windows)


def measured(config: SavingConfig) -> dict[str, Any]:
    """Measure all contestants in turns, and return the record's part."""
    names = ["none", "in_step", "behind", *(["uploaded"] if config.remote else [])]
    kept: dict[str, list[Any]] = {f"{name}_{what}": [] for name in names for what in ("other_sec", "peak_mem_gib")}
    with tempfile.TemporaryDirectory(dir=config.work) as place:

        def contestant(name: str) -> Any:
            return lambda: turn(config, Path(place), name, kept)

        seconds = take_turns({name: contestant(name) for name in names}, config.rounds, warm_up=False)
    figures, images = Figures(), config.batch_size * config.window_batches
    for name in names:
        figures.add(f"{name}_window_sec", seconds[name])
    figures.add("images_per_sec", [images / sec for sec in seconds["none"]])
    for name in names[1:]:
        cost = [one - none for one, none in zip(seconds[name], seconds["none"], strict=True)]
        wait = [a - b for a, b in zip(kept[f"{name}_other_sec"], kept["none_other_sec"], strict=True)]
        interval = [DEFAULT_EVERY_IMAGES / images * sec for sec in seconds["none"]]
        figures.add(f"{name}_cost_sec", cost)
        figures.add(f"{name}_step_wait_sec", wait)
        figures.add(f"{name}_share_of_windows", [c / s for c, s in zip(cost, seconds["none"], strict=True)])
        figures.add(f"{name}_share_by_default", [c / s for c, s in zip(cost, interval, strict=True)])
        figures.add(f"{name}_peak_mem_gib", kept[f"{name}_peak_mem_gib"])
    figures.add("none_peak_mem_gib", kept["none_peak_mem_gib"])
    return {**figures.flat, "checkpoint_gib": rounded(kept["checkpoint_gib"][0]), "by_round": figures.by_round}


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(SavingConfig, argv)
    if config is not None:
        keep(config.results, SCHEMA, "saving", config, lambda: measured(config))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
