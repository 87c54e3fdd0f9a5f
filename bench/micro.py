"""Measure the parts of a run that its speed and its start depend on, each against what others use for it.

    python -m bench.micro                                      # one table, and reports/results/micro.json
    python -m bench.micro parts=ema,moments rounds=15 results=/tmp/micro.json

    ema           an update of the average, against Composer's, diffusers' and one flat lerp         bench/micro_ema.py
    moments       samples/s of one loader process, against plain streaming and WebDataset            bench/micro_data.py
    images        the same from JPEGs

Contestants of a part take turns, round by round, in one process (bench/contest.py). The record is flat: KEY is a median,
KEY_min and KEY_max the spread, a ratio the median of the rounds' own; `by_round` has every value. What is written on the
way lies in a temporary folder under work=FOLDER (null: the system's), which is removed again.
Exit code: 0 when every part was measured, 1 when one failed (no record is written), 2 when the command cannot be read.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command import head, read_keys, write_record
from bench.contest import Figures
from bench.micro_data import IMAGES_BATCH, MOMENTS_BATCH, measure_data
from bench.micro_ema import measure_ema
from cli.command import command
from cli.command_line import Problem
from cli.errors import Failed
from cli.limits import limited
from cli.log import log
from cli.table import as_table
from config import as_written

SCHEMA = 1


@dataclass(frozen=True)
class MicroConfig:
    """The keys of this command."""

    parts: str = "ema,moments,images"
    """What is measured: ema, moments, images, with commas between. Their order is fixed."""
    rounds: int = limited(7, 1)
    """Turns of each contestant."""
    num_parameters: int = limited(100_000_000, 100_000)
    """About how many parameters the UNet has whose weights are averaged."""
    threads: int = limited(1, 1, 1024)
    """Threads of torch for updates of the EMA on a CPU; bench/micro_ema.py says why one."""
    num_samples: int = limited(8192, 2 * MOMENTS_BATCH)  # one batch begins the clock
    """Samples of the stage `moments`: 64 KiB each, twice that in the tars."""
    num_images: int = limited(256, 2 * IMAGES_BATCH)
    """Images of the stage `images`."""
    results: str = "reports/results/micro.json"
    """File of the record; an earlier one is replaced."""
    work: str | None = None
    """Folder for temporary files, on the disk to be measured. null: the system's."""

    @property
    def names(self) -> list[str]:
        """The parts, as they were given."""
        return [name.strip() for name in self.parts.split(",")]


PARTS: dict[str, Callable[[MicroConfig, Path], Figures]] = {
    "ema": lambda config, folder: measure_ema(config.num_parameters, config.rounds, config.threads),
    "moments": lambda config, folder: measure_data("moments", folder, config.num_samples, config.rounds),
    "images": lambda config, folder: measure_data("images", folder, config.num_images, config.rounds),
}

# what, our key, the other's key or None, the ratio's key or None
ROWS: tuple[tuple[str, str, str | None, str | None], ...] = (
    ("EMA update, ms: Composer", "ema_ms", "ema_composer_ms", "ema_speedup_vs_composer"),
    ("EMA update, ms: diffusers", "ema_ms", "ema_diffusers_ms", "ema_speedup_vs_diffusers"),
    ("EMA update, ms: diffusers, foreach", "ema_ms", "ema_diffusers_foreach_ms", "ema_speedup_vs_diffusers_foreach"),
    ("EMA update, ms: one flat lerp (ours over it)", "ema_ms", "ema_flat_ms", "ema_over_flat"),
    ("EMA temporary memory, MiB: Composer", "ema_temporary_mib", "ema_composer_temporary_mib", None),
    ("EMA temporary memory, MiB: diffusers", "ema_temporary_mib", "ema_diffusers_temporary_mib", None),
    ("EMA temporary memory, MiB: diffusers, foreach", "ema_temporary_mib", "ema_diffusers_foreach_temporary_mib", None),
    *(
        (
            f"{stage}, samples/s: {words}",
            f"{stage}_samples_per_sec",
            f"{stage}_{other}_samples_per_sec",
            f"{stage}_speedup_vs_{ratio}",
        )
        for stage in ("moments", "images")
        for words, other, ratio in (
            ("plain streaming", "plain", "plain_streaming"),
            ("WebDataset", "webdataset", "webdataset"),
        )
    ),
)


# --- is it possible ---


def check(config: MicroConfig) -> list[Problem]:
    """Return every problem of the keys."""
    found = []
    if unknown := [name for name in config.names if name not in PARTS]:
        found.append(Problem(f"parts: unknown {', '.join(map(repr, unknown))}. Known: {', '.join(PARTS)}.", ("parts",)))
    return found + _work_problems(config)


def _work_problems(config: MicroConfig) -> list[Problem]:
    """Check the folder for temporary files; a full disk would be found minutes later, and by all its users."""
    folder = Path(config.work or tempfile.gettempdir())
    if not folder.is_dir():
        return []  # said of every command: bench/command.py
    need_gib = 3 * 2**16 * config.num_samples / 2**30 if "moments" in config.names else 0
    free_gib = shutil.disk_usage(folder).free / 2**30
    if free_gib > need_gib:
        return []
    keys = ("work", "parts", "num_samples")
    given = f"{folder} has {free_gib:.1f} GiB free, {need_gib:.1f} GiB are needed"
    return [Problem(f"work: {given}. Give another folder, or fewer num_samples.", keys)]


# --- the record ---


def measure(config: MicroConfig) -> dict[str, Any]:
    """Measure the parts and return the record.

    Raises:
        RuntimeError: a part failed; its own exception is the cause.
    """
    started = time.monotonic()
    begin = {
        **head(SCHEMA),
        "webdataset_version": importlib.metadata.version("webdataset"),
    }
    figures: dict[str, Any] = {}
    by_round: dict[str, list[float]] = {}
    for name in (name for name in PARTS if name in config.names):
        begun = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(dir=config.work, prefix=f"micro-{name}-") as folder:
                found = PARTS[name](config, Path(folder))
        except Exception as error:
            raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error
        figures |= found.flat
        by_round |= found.by_round
        log.info(f"{name}: measured in {time.monotonic() - begun:.0f} s")
    seconds = round(time.monotonic() - started, 1)
    return {**begin, "seconds": seconds, "config": as_written(config), **figures, "by_round": by_round}


def table(record: Mapping[str, Any]) -> str:
    """Format a record for the terminal: one row for each comparison that it has."""
    rows = []
    for what, ours, other, ratio in ROWS:
        if {ours, other or ours, ratio or ours} <= record.keys():
            spread = f"{_cell(record, f'{ratio}_min')} to {_cell(record, f'{ratio}_max')}" if ratio else None
            rows.append((what, *(_cell(record, key) for key in (ours, other, ratio)), spread))
    return as_table(("what", "ours", "other", "ratio", "spread"), rows, "lrrrl")


def _cell(record: Mapping[str, Any], key: str | None) -> str | None:
    if key is None:
        return None
    value = record[key]
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(MicroConfig, argv, check)
    if config is None:
        return 0
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    if busy > cores / 4:
        text = f"{busy:.1f} before the start, on {cores} cores. The figures are of a busy machine"
        log.info(f"micro: load average is {text}; run again when it is idle.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an interrupt: temporary folders are removed first
    try:
        record = measure(config)
        write_record(config.results, record)
    except (RuntimeError, OSError) as error:
        traceback.print_exception(error.__cause__ or error)
        raise Failed(f"micro: no record was written. {error}") from error
    print(table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
