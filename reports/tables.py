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
from pathlib import Path
from typing import Any

from cli.command import command
from cli.errors import Refused
from cli.files import read_json
from cli.table import as_table
from reports.marks import rewrite
from reports.record_table import Record, Row, Table, spread
from reports.tables_of_running import table_of_prepare, table_of_ranks, table_of_rows, table_of_saving

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
    head += ("the other checkout", "its times of this one's") if config["other"] else ()
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
    if record["config"]["other"]:
        other = sizes[-1].get(f"other_{key}")
        cells.append("-" if other is None else format(unit * other, digits))
        cells.append("-" if other is None or not values[-1] else f"{unit * other / values[-1]:.2f}")
    return name, *cells


# --- bench.families ---


def table_of_families(record: Record) -> Table:
    """A row for each case: memory beside the estimate, and times where they were measured."""
    config = record["config"]
    load = f"load average {record['load_average_before']:g} to {record['load_average_after']:g}"
    title = "Moments and text states, fp32"
    title += f"; {config['rounds']} rounds of {config['steps']} steps" if config["times"] else ""
    head = ("family", "size", "parameters, M", "batch", "estimate, GiB", "measured, GiB")
    if config["times"]:
        head += ("a step, ms", "processor, ms", "compiled, ms", "processor, ms")
    rows = [_row_of_family(case, times=config["times"]) for case in record["cases"]]
    return Table(f"{title}; {load}:", head, "ll" + "r" * (len(head) - 2), rows)


def _row_of_family(case: Record, *, times: bool) -> Row:
    size = f"{case['what']}, {case['image_size']} px" + _frames(case)
    millions = case["parameters"] / 1e6
    shown = (
        case["case"].rpartition("_")[0],
        size,
        f"{millions:,.2f}",
        f"{case['batch_size']}",
        f"{case['estimated_gib']:.2f}",
    )
    if "left_out" in case:
        return (*shown, "left out", *[None] * (4 * times))
    of_times = ("ms", "cpu_ms", "compiled_ms", "compiled_cpu_ms") if times else ()
    cells = (spread(case, key, ".1f") if key in case else None for key in of_times)
    return (*shown, f"{case['gib']:.2f}", *cells)


# --- bench.cards and bench.states ---


def _frames(row: Record) -> str:
    return f", {row['num_frames']} frames" if "num_frames" in row else ""


def table_of_cards(record: Record) -> Table:
    """A row for each network and kind of weights and moments."""
    networks = record["networks"]
    ema = "with" if record["config"]["ema"] else "without"
    title = f"Stored moments and text, gradient_checkpointing=1, one image a pass, {ema} EMA weights, sharding=full:"
    ways = {"precision": "precision", "states": "optimizer.states"}
    nums = list(networks[0]["gib"])
    cards = [key for key in networks[0] if key.startswith("cards_of_")]
    head = ("network", "size", *ways.values(), *(f"GiB on {num}" for num in nums))
    head += tuple(f"cards of {key.split('_')[2]} GiB" for key in cards)
    rows: list[Row] = [
        (
            f"{row['network']}, {row['parameters'] / 1e9:.2f} B",
            _as_size(row["image_size"]),
            *(row[key] for key in ways),
            *(f"{row['gib'][num]:.1f}" if num in row["gib"] else None for num in nums),
            *("-" if row[key] is None else str(row[key]) for key in cards),
        )
        for row in networks
    ]
    return Table(title, head, "llll" + "r" * (len(head) - 4), rows)


def _as_size(size: Any) -> str:
    """Return (width, height) or (width, height, frames) in words."""
    width, height, *frames = size
    return f"{width} px" if width == height else f"{width} x {height} px" + "".join(f", {num} frames" for num in frames)


def table_of_states(record: Record) -> Table:
    """A row for each kind of weights and moments: memory beside the estimate."""
    load = f"load average {record['load_average_before']:g} to {record['load_average_after']:g}"
    millions = record["states"][0]["parameters"] / 1e6
    what = (
        f"{record['case'].rpartition('_')[0]}, {record['what']}, {millions:.1f} M parameters, {record['image_size']} px"
    )
    head = ("precision", "optimizer.states", "estimate, GiB", "measured, GiB", "measured over estimate", "a step, s")
    rows = [_row_of_states(row) for row in record["states"]]
    return Table(f"{what}, batch {record['batch_size']}. {load.capitalize()}:", head, "llrrrr", rows)


def _row_of_states(row: Record) -> Row:
    shown = (row["precision"], row["states"], f"{row['estimated_gib']:.2f}")
    if "left_out" in row:
        return (*shown, "left out", None, None)
    return (*shown, f"{row['gib']:.2f}", f"{row['gib'] / row['estimated_gib']:.2f}", f"{row['ms'] / 1e3:.1f}")


# --- bench.lora ---


def table_of_lora(record: Record) -> Table:
    """A row for each case: what full fine-tuning takes, and what an adapter does."""
    config = record["config"]
    load = f"load average {record['load_average_before']:g} to {record['load_average_after']:g}"
    title = f"Adapters of rank {config['rank']}; moments and text states, fp32"
    title += f"; {config['rounds']} rounds of {config['steps']} steps" if config["times"] else ""
    head = ("family", "size", "batch", "trained, full, M", "LoRA, M", "estimate, full, GiB", "LoRA, GiB")
    head += ("measured, full, GiB", "LoRA, GiB") + (("a step, full, ms", "LoRA, ms") if config["times"] else ())
    rows = [_row_of_lora(case, times=config["times"]) for case in record["cases"]]
    return Table(f"{title}; {load}:", head, "ll" + "r" * (len(head) - 2), rows)


def _row_of_lora(case: Record, *, times: bool) -> Row:
    ways = ("full", "lora")
    shown = (
        case["case"].rpartition("_")[0],
        f"{case['what']}, {case['image_size']} px{_frames(case)}",
        f"{case['batch_size']}",
    )
    shown += tuple(f"{case[f'{way}_parameters'] / 1e6:,.2f}" for way in ways)
    shown += tuple(f"{case[f'{way}_estimated_gib']:.2f}" for way in ways)
    if "left_out" in case:
        return (*shown, "left out", *[None] * (1 + 2 * times))
    shown += tuple(f"{case[f'{way}_gib']:.2f}" for way in ways)
    return (*shown, *(spread(case, f"{way}_ms", ".1f") if f"{way}_ms" in case else None for way in ways if times))


# --- bench.video ---

READERS = {
    "ours": "the stage, one loader process",
    "decoder": "PyAV, the clip's frames alone",
    "rgb": "PyAV, and they as RGB",
    "whole": "PyAV, the whole film",
}


def table_of_video(record: Record) -> Table:
    """A row for each contestant of each size of films."""
    config = record["config"]
    load = f"load average {record['load_average_before']:g} to {record['load_average_after']:g}"
    head = ("films, px", "clips", "read by", "clips/s", "processor ms a clip", "ours of it", "by processor time")
    title = f"{config['num_clips']} clips of a turn, {config['rounds']} rounds; {load}:"
    return Table(title, head, "lllrrrr", list(_rows_of_video(record)))


def _rows_of_video(record: Record) -> Iterator[Row]:
    for case in record["cases"]:
        films, clips = (" x ".join(map(str, case[key])) for key in ("film_size", "clip_size"))
        for who, name in READERS.items():
            cells = (spread(case, f"{who}_clips_per_sec", ".2f"), spread(case, f"{who}_cpu_ms_a_clip", ".0f"))
            ratios = (f"ours_of_{who}", f"ours_cpu_of_{who}")
            shown = (spread(case, ratio, ".2f") if ratio in case else None for ratio in ratios)
            yield (films, clips, name, *cells, *shown)


# --- bench.motion ---


def table_of_motion(record: Record) -> Table:
    """A row for each folder of videos."""
    title = "The moving miniature: fractions of the videos that are as their captions say; by chance 0.25 and 0.33:"
    head = ("model", "images seen", "videos", "direction", "place")
    rows: list[Row] = [
        (case["model"], f"{case['images_seen']:,}", f"{case['num_videos']:,}", *(f"{case[k]:.3f}" for k in head[3:]))
        for case in record["cases"]
    ]
    return Table(title, head, "lrrrr", rows)


TABLES: dict[str, Callable[[Record], Table]] = {
    "step": table_of_step,
    "scale": table_of_scale,
    "families": table_of_families,
    "cards": table_of_cards,
    "states": table_of_states,
    "lora": table_of_lora,
    "video": table_of_video,
    "motion": table_of_motion,
    "ranks": table_of_ranks,
    "rows_speed": table_of_rows,
    "prepare_speed": table_of_prepare,
    "saving": table_of_saving,
}
"""What a record says that it has measured -> its table."""


def about(record: Record) -> str:
    """Say what a record was made on."""
    commit = re.sub(r"^([0-9a-f]{12})[0-9a-f]*", r"\1", str(record["commit"]))
    return f"{record['device']}, torch {record['torch_version']}, commit {commit}."


def text_of(record: Record) -> str:
    """Format a record for the terminal."""
    table = TABLES[record["measured"]](record)
    return "\n".join([about(record), table.title, as_table(table.head, table.rows, table.align)])


def markdown_of(record: Record) -> str:
    """Format a record for a page."""
    table = TABLES[record["measured"]](record)
    return "\n".join(["", in_markdown(table._replace(title=f"{about(record)} {table.title}")), ""])


def in_markdown(table: Table) -> str:
    """Format a table for a page, with an empty line at its end."""
    sides = tuple("---:" if side == "r" else "---" for side in table.align)
    rows = (
        "| " + " | ".join("-" if cell is None else cell for cell in row) + " |"
        for row in (table.head, sides, *table.rows)
    )
    return "\n".join([table.title, "", *rows, ""])


def read_record(place: str) -> dict[str, Any]:
    """Read a record. Raises ValueError: it is none."""
    try:
        record = read_json(Path(place))
        text_of(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"no record of {' or '.join(f'bench.{name}' for name in TABLES)}"
        raise ValueError(f"{place}: is {what} ({type(error).__name__}: {error}).") from error
    return record


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    if not 1 <= len(argv) <= 2 or [Path(word).suffix for word in argv] != [".json", ".md"][: len(argv)]:
        raise Refused(f"command line: {' '.join(argv)}. Possible: RECORD.json, or RECORD.json PAGE.md.")
    try:
        record = read_record(argv[0])
        rewrite(argv[1:], argv[0], markdown_of(record))
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}. Check the path.") from error
    except ValueError as error:
        raise Refused(str(error)) from error
    if len(argv) == 1:
        print(text_of(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
