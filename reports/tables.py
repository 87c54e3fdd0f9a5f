"""Show a record of the measuring commands that are in TABLES below: as a table, or in a page.

    python -m reports.tables RECORD.json                            # for the terminal
    python -m reports.tables RECORD.json PAGE.md                    # the table between a page's marks

A page says by marks where the table goes (reports/marks.py). Pages of the project: `make report`.
Exit code: 0, or 2 where a file cannot be read, is no such record, or a page has no marks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence

from cli.command import command
from reports.marks import Record, Row, Table, in_markdown, in_text, show_record, spread

# --- bench.step ---

CONTESTS = {"bare": "no EMA", "ema": "EMA"}
WHO = {"ours": "ours", "plain": "diffusers, a plain loop", "predecessor": "the predecessor"}


def table_of_step(record: Record) -> Table:
    """A row for each contestant of each contest."""
    config, size = record["config"], record["image_size"]
    what = f"SD2, preset {record['preset']}, {size} x {size} px, {config['stage']}, batch {config['batch_size']}"
    load = f"load average {record['load_average_before']:g} to {record['load_average_after']:g}"
    title = f"{what}, {record['precision']}; {config['rounds']} rounds of {config['steps']} steps; {load}:"
    head = ("contest", "step of", "ms", "processor, ms", "images/s")
    head += ("ours is times as fast", "by processor time")
    return Table(title, head, "llrrrrr", list(_rows_of_step(record)))


def _rows_of_step(record: Record) -> Iterator[Row]:
    for contest, shown in CONTESTS.items():
        for who, name in WHO.items():
            key = f"{contest}_{who}"
            if f"{key}_ms" not in record:
                continue
            speeds = [f"{contest}_{kind}speedup_vs_{who}" for kind in ("", "cpu_")]
            times = (f"{spread(record, f'{key}_{kind}ms', '.1f')}" for kind in ("", "cpu_"))
            ratios = (spread(record, speed, ".2f") if speed in record else None for speed in speeds)
            yield (shown, name, *times, f"{record[f'{key}_images_per_sec']:.1f}", *ratios)


# --- bench.scale ---

ROWS_OF_SCALE = (
    ("index.json, MB", "index_bytes", 1e-6, ".0f"),
    ("start: read_stage, s", "start_read_stage_sec", 1, ".2f"),
    ("start: the stream is made, s", "start_stream_sec", 1, ".2f"),
    ("start: first batch, s", "start_first_batch_sec", 1, ".2f"),
    ("of it the order, s", "start_order_sec", 1, ".2f"),
    ("start: all, s", "start_all_sec", 1, ".2f"),
    ("start: all, processor, s", "start_cpu_sec", 1, ".2f"),
    ("start: RSS, MiB", "start_peak_rss_mib", 1, ",.0f"),
    ("start: memory, MiB", "start_memory_mib", 1, ",.0f"),
    ("start: /dev/shm, MiB", "start_shm_mib", 1, ",.0f"),
    ("resume at half an epoch: first batch, s", "resume_first_batch_sec", 1, ".2f"),
    ("resume: RSS, MiB", "resume_peak_rss_mib", 1, ",.0f"),
    ("resume: memory, MiB", "resume_memory_mib", 1, ",.0f"),
    ("several ranks: all, s", "ranks_all_sec", 1, ".2f"),
    ("several ranks: memory, MiB", "ranks_memory_mib", 1, ",.0f"),
    ("several ranks: /dev/shm, MiB", "ranks_shm_mib", 1, ",.0f"),
    ("fetch into a full cache, ms", "fetch_sec", 1e3, ".1f"),
    ("of it under the machine's lock, ms", "fetch_locked_sec", 1e3, ".1f"),
    ("a reader keeps of each shard, bytes", "read_kept_bytes_a_shard", 1, ",.0f"),
)
"""What stands in a row, the key of its figure, what that is multiplied by, its digits."""
OF_NO_LINE = ("start_shm_mib", "ranks_shm_mib", "fetch_sec", "fetch_locked_sec", "read_kept_bytes_a_shard")
"""Keys that the table does not go on with: of one fetch or shard, or a peak that looks ten times a second may miss."""
FURTHER = 400_000_000
"""Samples that the table goes on to, from sizes of a tenth and more."""


def table_of_scale(record: Record) -> Table:
    """A row for each figure, a column for each size, and the straight line through the two largest."""
    config, sizes = record["config"], record["sizes"]
    of_ranks = f"several ranks: {config['ranks']} with {config['workers']} loader processes each"
    load = f"load average {record['load_average_before']:g} to {record['load_average_after']:g}"
    title = f"{config['samples_a_shard']:,} samples a shard; {of_ranks}; rounds: {config['rounds']}; {load}:"
    head = ("samples", *(f"{size['samples']:,}" for size in sizes))
    head += (f"{FURTHER:,}, by arithmetic",) if _goes_on(sizes) else ()
    head += ("the other checkout", "its times of this one's") if config.get("other") else ()
    rows = [row for name, *how in ROWS_OF_SCALE if (row := _row_of_scale(record, name, *how))]
    return Table(title, head, "l" + "r" * (len(head) - 1), rows)


def _goes_on(sizes: Sequence[Record]) -> bool:
    return len(sizes) > 1 and 10 * sizes[-1]["samples"] >= FURTHER


def _row_of_scale(record: Record, name: str, key: str, unit: float, digits: str) -> Row | None:
    sizes = record["sizes"]
    if key not in sizes[-1]:
        return None
    values = [unit * size[key] for size in sizes]
    cells = [format(value, digits) for value in values]
    if _goes_on(sizes):
        (n1, n2), (y1, y2) = ([size["samples"] for size in sizes[-2:]], values[-2:])
        further = y2 + (y2 - y1) / (n2 - n1) * (FURTHER - n2)
        cells.append("-" if key in OF_NO_LINE else format(further, digits))
    if record["config"].get("other"):
        other = sizes[-1].get(f"other_{key}")
        cells.append("-" if other is None else format(unit * other, digits))
        cells.append("-" if other is None or not values[-1] else f"{unit * other / values[-1]:.2f}")
    return name, *cells


# --- bench.saving ---

SAVED = {"in_step": "in the step", "behind": "behind the step", "uploaded": "behind the step, and uploaded"}


def table_of_saving(record: Record) -> Table:
    """A row for each way to write checkpoints."""
    config, load = record["config"], f"{record['load_average_before']:g} to {record['load_average_after']:g}"
    every = f"{record['checkpoint_gib']:.3g} GiB every {config['window_batches']} batches of {config['batch_size']}"
    runs = f"{config['rounds']} runs of {config['windows']} windows, {spread(record, 'images_per_sec', '.1f')} images/s"
    head = ("written", "one costs, s", "of it the step waits, s", "share of the time, here", "at the default cadence")
    rows: list[Row] = []
    for name, shown in SAVED.items():
        if f"{name}_cost_sec" in record:
            seconds = (spread(record, f"{name}_{key}_sec", ".3f") for key in ("cost", "step_wait"))
            shares = (spread(record, f"{name}_share_{key}", ".3%") for key in ("of_windows", "by_default"))
            rows.append((shown, *seconds, *shares))
    return Table(f"A checkpoint and a snapshot, {every}; {runs}; load average {load}:", head, "lrrrr", rows)


TABLES: dict[str, Callable[[Record], Table]] = {
    "step": table_of_step,
    "scale": table_of_scale,
    "saving": table_of_saving,
}
"""What a record says that it has measured -> its table."""


def about(record: Record) -> str:
    """Say what a record was made on."""
    commit = re.sub(r"^([0-9a-f]{12})[0-9a-f]*", r"\1", str(record["commit"]))
    return f"{record['device']}, torch {record['torch_version']}, commit {commit}."


def text_of(record: Record) -> str:
    """Format a record for the terminal."""
    return f"{about(record)}\n{in_text(TABLES[record['measured']](record))}"


def markdown_of(record: Record) -> str:
    """Format a record for a page."""
    return f"\n{about(record)} {in_markdown(TABLES[record['measured']](record))}\n"


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    return show_record(argv, " or ".join(f"bench.{name}" for name in TABLES), text_of, markdown_of)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
