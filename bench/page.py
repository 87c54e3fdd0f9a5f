"""How long the page of a run takes, and how large it is, by the number of windows in its record.

    python -m bench.page runs/NAME
    python -m bench.page runs/NAME windows=[1000] rounds=3

RUN: a finished run. Its record is copied, its windows repeated to each number with the batches counted on, and written by the
record's own writer. A turn is all that the command does but its imports: reading, plots, the file. Exit code: 0, 2 when the
command cannot be read.
"""

from __future__ import annotations

import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command import head, read_keys, write_record
from bench.contest import Figures, take_turns
from cli.command import command
from cli.errors import ConfigError
from cli.limits import limited, shown
from config import as_written
from record.files import METRICS, is_window, read_lines
from record.history import is_run
from record.writing import append_lines
from reports.page import write

SCHEMA = 1
COPIED = ("config.yaml", "later.yaml", "environment.json", "starts.jsonl", "summary.json", "eval.jsonl")


@dataclass(frozen=True)
class PageBenchConfig:
    """Keys of the command."""

    windows: tuple[int, ...] = limited((1000, 100_000), 1, 1_000_000)
    """Windows of a record."""
    rounds: int = limited(5, 1, 100)
    """Pages of each, after one that is not counted."""
    results: str = "reports/results/page_speed.json"
    """The record."""


def lengthened(run: Path, folder: Path, num_windows: int) -> None:
    """Write the record of a run with its windows repeated to so many, the samples and evaluations as they are."""
    folder.mkdir()
    for name in COPIED:
        if (run / name).is_file():
            shutil.copy(run / name, folder)
    if (run / "samples").is_dir():
        shutil.copytree(run / "samples", folder / "samples")
    lines = read_lines(run / METRICS)
    windows = [line for line in lines if is_window(line)]
    counted = ("batch", "images", "start_sec")

    def repeated(number: int) -> dict[str, Any]:
        rounds, place = divmod(number, len(windows))
        return windows[place] | {key: windows[place][key] + rounds * windows[-1][key] for key in counted}

    append_lines(folder / METRICS, map(repeated, range(num_windows)))
    append_lines(folder / METRICS, [line for line in lines if not is_window(line)])


def measured(folders: Mapping[int, Path], rounds: int) -> Figures:
    """Return seconds and bytes of the page of each record, in turns."""
    out = next(iter(folders.values())).parent / "page.html"

    def turn(folder: Path) -> Callable[[], float]:
        def seconds() -> float:
            began = time.perf_counter()
            write([folder], out)
            return time.perf_counter() - began

        return seconds

    figures = Figures()
    names = {f"windows_{num}_sec": turn(folder) for num, folder in folders.items()}
    for key, values in take_turns(names, rounds).items():
        figures.add(key, values)
    for num, folder in folders.items():
        figures.flat[f"windows_{num}_bytes"] = write([folder], out).stat().st_size
        figures.flat[f"windows_{num}_record_bytes"] = (folder / METRICS).stat().st_size
    figures.flat["peak_mem_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3)
    return figures


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    places, keys = [word for word in argv if "=" not in word], [word for word in argv if "=" in word]
    if len(places) != 1 or not is_run(Path(places[0])):
        raise ConfigError([f"command line: '{shown(' '.join(places))}' is no run. Give one, finished: runs/NAME."])
    config = read_keys(PageBenchConfig, keys)
    if config is None:
        return 0
    begun = head(SCHEMA)
    with tempfile.TemporaryDirectory() as work:
        folders = {num: Path(work, str(num)) for num in config.windows}
        for num, folder in folders.items():
            lengthened(Path(places[0]), folder, num)
        figures = measured(folders, config.rounds)
    write_record(config.results, {**begun, **as_written(config), **figures.flat, "by_round": figures.by_round})
    print(f"written: {config.results}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
