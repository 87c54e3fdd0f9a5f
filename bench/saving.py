"""What checkpoints cost a run: its speed without any, with them written in the step, in the background, and uploaded too.

    python -m bench.saving                                        # some minutes on a quiet machine
    python -m bench.saving remote=s3://bucket/bench               # with an object store, as S3_ENDPOINT_URL and AWS_* say

Each contestant is a run of benchmark.py on synthetic tensors; they alternate in one process. A full checkpoint and a
snapshot fall due together at every window's end, far more often than by default. What one costs is a window's time with it,
less the same round's time without any; `step_wait` is the part in which the step stands still.
The share at the default cadence is that cost over the time of 512,000 images at this machine's own speed.
Exit code: 0, 1 when a run fails, 2 when the command cannot be read.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command import Figures, measure_and_record, rounded
from checkpointing.callback import DEFAULT_EVERY_IMAGES
from checkpointing.files import FULL, WEIGHTS, list_checkpoints
from checkpointing.sharded import count_file_bytes
from common.command import command
from common.errors import Failed
from common.value_types import limited

ROOT = Path(__file__).resolve().parent.parent
WARMUP = 1  # windows of each run that do not count
CLOCKS = ("train_sec", "data_wait_sec", "eval_sec", "other_sec")
LIMIT_SEC = 3600
NONE, IN_STEP, BEHIND, UPLOADED = "none", "in_step", "behind", "uploaded"
TURNS = """
import json, sys
import benchmark
from checkpointing.host_copy import HostCopy
has_room = HostCopy.has_room
for is_in_step, words in json.load(sys.stdin):
    HostCopy.has_room = (lambda self, content: False) if is_in_step else has_room
    if code := benchmark.main(words):
        sys.exit(code)
"""
"""The code of the process that runs them. In the step: there is no room for a host copy, so the run waits."""


@dataclass(frozen=True)
class SavingConfig:
    """The keys of this command."""

    batch_size: int = limited(32, 1, 10**6)
    """Images of a step, of shapes' full network."""
    window_batches: int = limited(20, 1)
    """Batches between two checkpoints."""
    windows: int = limited(5, 2)
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
    batches, window = (WARMUP + config.windows) * config.window_batches, config.batch_size * config.window_batches
    every = 0 if contestant == NONE else window
    words = ["model.family=shapes", "model.preset=full", "image_size=32", "data.synthetic=true", "model.weights=random"]
    words += [f"global_batch_size={config.batch_size}", f"max_duration={batches}ba", "ema.enabled=true"]
    words += [
        f"measure.{key}={n * config.window_batches}"
        for key, n in {"window_batches": 1, "warmup_batches": WARMUP}.items()
    ]
    words += [f"save.every_images={every}", f"save.snapshot_every_images={every}"]
    words += [f"run_folder={folder}", f"run_name={name}", "loggers.progress_bar=false"]
    return [*words, f"save.remote={config.remote}"] if contestant == UPLOADED else words


def run_all(turns: Sequence[tuple[bool, list[str]]]) -> None:
    """Run benchmark.py with these words, one run after the other. Raises Failed: one of them has failed."""
    command = [sys.executable, "-c", TURNS]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(turns), capture_output=True, text=True, timeout=LIMIT_SEC)
    if done.returncode:
        raise Failed(f"a run has failed.\n{done.stderr}")


def windows_of(run: Path, window_batches: int) -> list[dict[str, Any]]:
    """Return the lines of a run's windows that count."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if not line["warmup"] and line["window_batches"] == window_batches]


def measure(config: SavingConfig) -> dict[str, Any]:
    """Let the contestants alternate, and return the record's part."""
    names = [NONE, IN_STEP, BEHIND, *([UPLOADED] if config.remote else [])]
    starts = [number % len(names) for number in range(config.rounds)]
    order = [(number, name) for number, at in enumerate(starts) for name in names[at:] + names[:at]]
    tag, gib = uuid.uuid4().hex[:6], 0.0  # so that no earlier run is in the store
    all_sec: dict[str, list[float]] = {name: [] for name in names}
    other_sec: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(dir=config.work) as work:
        folder = Path(work)
        runs = [(name, f"{name}-{number}-{tag}") for number, name in order]
        first = (False, words_of(config, folder, f"first-{tag}", NONE))  # a process's first run is slower
        run_all([first, *((name == IN_STEP, words_of(config, folder, run, name)) for name, run in runs)])
        for name, run in runs:
            windows = windows_of(folder / run, config.window_batches)
            all_sec[name].append(statistics.median(sum(line[clock] for clock in CLOCKS) for line in windows))
            other_sec[name].append(statistics.median(line["other_sec"] for line in windows))
            if name == BEHIND:
                checkpoints = [list_checkpoints(folder / run / "checkpoints", kind)[0] for kind in (FULL, WEIGHTS)]
                gib = sum(map(count_file_bytes, checkpoints)) / 2**30
    figures, images = Figures(), config.batch_size * config.window_batches
    figures.add("images_per_sec", [images / sec for sec in all_sec[NONE]])
    for name in names:
        figures.add(f"{name}_window_sec", all_sec[name])
    for name in names[1:]:
        cost = [one - none for one, none in zip(all_sec[name], all_sec[NONE], strict=True)]
        figures.add(f"{name}_cost_sec", cost)
        waits = zip(other_sec[name], other_sec[NONE], strict=True)
        figures.add(f"{name}_step_wait_sec", [one - none for one, none in waits])
        shares = [one / none for one, none in zip(cost, all_sec[NONE], strict=True)]
        figures.add(f"{name}_share_of_windows", shares)
        figures.add(f"{name}_share_by_default", [share * images / DEFAULT_EVERY_IMAGES for share in shares])
    return {"checkpoint_gib": rounded(gib), **figures.as_record()}


@command(keys=SavingConfig, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    return measure_and_record("saving", SavingConfig, argv, measure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
