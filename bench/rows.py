"""Measure the filter of prepare.laion on generated rows: rows a second, and how memory grows with their number.

    PYTHONPATH=.venv/tables python -m bench.rows                   # 20 million rows -> reports/results/rows_speed.json
    python -m bench.rows num_rows=1000000 rounds=1 results=/tmp/rows.json

ours       python -m prepare.laion filter, by licence alone
pandas     what MLPerf's reference does: each part is read whole, filtered by licence, and written
all        ours with every condition, and each URL once

Each turn is a process of its own on one core, its start included. Memory is the most that a process held, for a tenth of
the parts and for all of them. Keys: num_rows num_parts rounds work results. It needs pyarrow, see docs/laion.md.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.command import keep, read_keys
from bench.contest import Figures, rounded, take_turns
from cli.command import command
from cli.errors import Failed, Refused
from cli.limits import limited
from record.processes import ROOT

SCHEMA = 1
GROUP_ROWS = 100_000
PANDAS = """
import pathlib, sys
import pandas
source, out = map(pathlib.Path, sys.argv[1:])
out.mkdir()
for path in sorted(source.glob("*.parquet")):
    rows = pandas.read_parquet(path)
    rows[rows["LICENSE"] != "?"].to_parquet(out / path.name)
"""
ALL = ("nsfw=UNLIKELY", "min_side_px=256", "max_aspect=2", "min_similarity=0.3", "unique=url")


@dataclass(frozen=True)
class RowsConfig:
    """The keys of this command."""

    num_rows: int = limited(20_000_000, 1000, 10**9)
    """Rows of the table."""
    num_parts: int = limited(20, 10, 10_000)
    """Files of the table."""
    rounds: int = limited(3, 1)
    """Turns of each contestant."""
    work: str | None = None
    """Folder for temporary files: about 200 bytes a row. null: the system's."""
    results: str = "reports/results/rows_speed.json"
    """File of the record; an earlier one is replaced."""


def needed(name: str) -> Any:
    """Return a module of pyarrow. Raises Refused: it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        text = "bench.rows: pyarrow is not installed, which writes the table"
        raise Refused(f"{text}. Run: pip install --no-deps -r requirements/prepare.lock") from error


def write_part(path: Path, first: int, num_rows: int) -> None:
    """Write rows of LAION-400M's columns: a tenth without a licence, some small, every twentieth URL a second time."""
    arrow, compute, parquet = needed("pyarrow"), needed("pyarrow.compute"), needed("pyarrow.parquet")
    schema = None
    writer = None
    for start in range(first, first + num_rows, GROUP_ROWS):
        numbers = np.arange(start, min(start + GROUP_ROWS, first + num_rows))
        draw = np.random.default_rng(start)
        of_url = np.where(numbers % 20 == 19, numbers - 19, numbers) * 7919 % 10**12
        texts = compute.cast(arrow.array(of_url), arrow.string())
        sides = draw.choice([128, 256, 400, 640, 1024], (2, len(numbers)))
        names = {"LICENSE": ["?", *["Creative Commons Attribution", "CC0"] * 5], "NSFW": ["UNLIKELY"] * 9 + ["NSFW"]}
        table = arrow.table(
            {
                "SAMPLE_ID": numbers.astype(np.float64),
                "URL": compute.binary_join_element_wise("https://host.example/pictures", texts, "/"),
                "TEXT": compute.binary_join_element_wise("a picture of something that has the number", texts, " "),
                "HEIGHT": sides[0],
                "WIDTH": sides[1],
                **{
                    name: np.array(values)[draw.integers(0, len(values), len(numbers))]
                    for name, values in names.items()
                },
                "similarity": draw.uniform(0.25, 0.45, len(numbers)),
            }
        )
        schema = schema or table.schema
        writer = writer or parquet.ParquetWriter(path, schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def on_one_core(words: Sequence[str]) -> tuple[float, float]:
    """Run a command on one core; return its seconds and the most memory that it held, MiB. Raises Failed."""
    core = min(os.sched_getaffinity(0))
    started = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            words, cwd=ROOT, stdout=said, stderr=said, preexec_fn=lambda: os.sched_setaffinity(0, {core})
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            said.seek(0)
            raise Failed(f"{words[2]}: ended with {process.returncode}: {said.read()[-300:].decode(errors='replace')}")
    return time.perf_counter() - started, usage.ru_maxrss / 1024


def measure(config: RowsConfig, work: Path) -> dict[str, Any]:
    """Return the figures."""
    whole, tenth, out = work / "whole", work / "tenth", work / "out"
    for folder in (whole, tenth):
        (folder / "metadata").mkdir(parents=True)
    length = config.num_rows // config.num_parts
    for part in range(config.num_parts):
        path = whole / "metadata" / f"part-{part:05d}.parquet"
        write_part(path, part * length, length)
        if part < config.num_parts // 10:
            os.link(path, tenth / "metadata" / path.name)
    num_bytes = sum(path.stat().st_size for path in (whole / "metadata").iterdir())
    memory: dict[str, list[float]] = {}

    def turn(name: str, folder: Path) -> float:
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(folder / "filtered", ignore_errors=True)
        keys = ["licenses=not ?", *(ALL if name == "all" else ())]
        ours = ["-m", "prepare.laion", "filter", f"folder={folder}", "workers=1", *(f"filter.{key}" for key in keys)]
        words = ["-c", PANDAS, str(folder / "metadata"), str(out)] if name == "pandas" else ours
        seconds, mib = on_one_core([sys.executable, *words])
        memory.setdefault(f"memory_{name}_{folder.name}_mib", []).append(mib)
        return seconds

    figures, names = Figures(), ("ours", "pandas", "all")
    for name in names:
        turn(name, tenth)
    taken = take_turns({name: lambda name=name: turn(name, whole) for name in names}, config.rounds, warm_up=False)
    rows = length * config.num_parts
    for name, seconds in taken.items():
        figures.add(f"rows_{name}_per_sec", [rows / one for one in seconds])
    figures.ratio("rows_speedup", "rows_ours_per_sec", "rows_pandas_per_sec")
    highest = {key: rounded(max(values)) for key, values in memory.items()}
    return {**figures.flat, **highest, "table_bytes": num_bytes, "by_round": figures.by_round}


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(RowsConfig, argv)
    if config is None:
        return 0
    with tempfile.TemporaryDirectory(dir=config.work, prefix="rows-") as work:
        keep(config.results, SCHEMA, "rows_speed", config, lambda: measure(config, Path(work)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
