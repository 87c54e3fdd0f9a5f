"""Show a record of bench.step, bench.scale, bench.saving or bench.latency: as a table, or in a page.

    python -m reports.tables RECORD.json                            # for the terminal
    python -m reports.tables RECORD.json PAGE.md                    # the table between a page's marks
    python -m reports.tables RECORD.json OUT.csv                    # the table as CSV

A page says by marks where the table goes (reports/formatting.py). Nothing here needs a GPU.
Pages of the project: `make report`.
Exit code: 0, or 2 where a file cannot be read, is no such record, or a page has no marks.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from common.command import command
from reports.formatting import Record, RecordTable, Row, about, format_range, in_markdown, in_text, show_record

# --- bench.step ---

CONTESTS = {"bare": "no EMA", "ema": "EMA"}
CONTESTANTS = {"ours": "ours", "plain": "diffusers, a plain loop"}


def table_of_step(record: Record) -> RecordTable:
    """A row for each contestant of each contest."""
    config, size = record["config"], record["image_size"]
    subject = f"SD2, preset {record['preset']}, {size} x {size} px, {config['stage']}, batch {config['batch_size']}"
    load = f"load average {record['load_average_before']:g} to {record['load_average_after']:g}"
    title = f"{subject}, {record['precision']}; {config['rounds']} rounds of {config['steps']} steps; {load}:"
    head = ("contest", "step of", "ms", "images/s", "ours is times as fast")
    return RecordTable(title, head, "llrrr", list(_rows_of_step(record)))


def _rows_of_step(record: Record) -> Iterator[Row]:
    for contest, label in CONTESTS.items():
        for who, name in CONTESTANTS.items():
            key = f"{contest}_{who}"
            if f"{key}_ms" not in record:
                continue
            speedup = f"{contest}_speedup_vs_{who}"
            ratio = format_range(record, speedup, ".2f") if speedup in record else None
            yield label, name, format_range(record, f"{key}_ms", ".1f"), f"{record[f'{key}_images_per_sec']:.1f}", ratio


# --- bench.scale ---

ROWS_OF_SCALE = (
    ("index.json, MB", "index_bytes", 1e-6, ".0f"),
    ("start: the stream is made, s", "start_stream_sec", 1, ".2f"),
    ("start: first batch, s", "start_first_batch_sec", 1, ".2f"),
    ("start: all, s", "start_all_sec", 1, ".2f"),
    ("start: all, processor, s", "start_cpu_sec", 1, ".2f"),
    ("start: RSS, MiB", "start_peak_rss_mib", 1, ",.0f"),
    ("resume at half an epoch: first batch, s", "resume_first_batch_sec", 1, ".2f"),
    ("resume: RSS, MiB", "resume_peak_rss_mib", 1, ",.0f"),
    ("several ranks: all, s", "ranks_all_sec", 1, ".2f"),
    ("fetch into a full cache, ms", "fetch_sec", 1e3, ".1f"),
    ("a reader keeps of each shard, bytes", "read_kept_bytes_a_shard", 1, ",.0f"),
)
"""What stands in a row, the key of its figure, what that is multiplied by, its digits."""
NOT_EXTRAPOLATED = ("fetch_sec", "read_kept_bytes_a_shard")
"""Keys of one fetch or shard."""
EXTRAPOLATED_SAMPLES = 400_000_000
"""Samples that the table extrapolates to, from sizes of a tenth and more."""


def table_of_scale(record: Record) -> RecordTable:
    """A row for each figure, a column for each size, and the straight line through the two largest."""
    config, sizes = record["config"], record["sizes"]
    of_ranks = f"several ranks: {config['ranks']} with {config['workers']} loader processes each"
    load = f"load average {record['load_average_before']:g} to {record['load_average_after']:g}"
    title = f"{config['samples_a_shard']:,} samples a shard; {of_ranks}; rounds: {config['rounds']}; {load}:"
    head = ("samples", *(f"{size['samples']:,}" for size in sizes))
    head += (f"{EXTRAPOLATED_SAMPLES:,}, by arithmetic",) if _is_extrapolated(sizes) else ()
    rows = [row for name, *columns in ROWS_OF_SCALE if (row := _row_of_scale(record, name, *columns))]
    return RecordTable(title, head, "l" + "r" * (len(head) - 1), rows)


def _is_extrapolated(sizes: Sequence[Record]) -> bool:
    return len(sizes) > 1 and 10 * sizes[-1]["samples"] >= EXTRAPOLATED_SAMPLES


def _row_of_scale(record: Record, name: str, key: str, unit: float, digits: str) -> Row | None:
    sizes = record["sizes"]
    if key not in sizes[-1]:
        return None
    values = [unit * size[key] for size in sizes]
    cells = [format(value, digits) for value in values]
    if _is_extrapolated(sizes):
        (n1, n2), (y1, y2) = ([size["samples"] for size in sizes[-2:]], values[-2:])
        further = y2 + (y2 - y1) / (n2 - n1) * (EXTRAPOLATED_SAMPLES - n2)
        cells.append("-" if key in NOT_EXTRAPOLATED else format(further, digits))
    return name, *cells


# --- bench.saving ---

SAVING_MODES = {"in_step": "in the step", "behind": "in the background", "uploaded": "in the background, and uploaded"}


def table_of_saving(record: Record) -> RecordTable:
    """A row for each way to write checkpoints."""
    config, load = record["config"], f"{record['load_average_before']:g} to {record['load_average_after']:g}"
    every = f"{record['checkpoint_gib']:.3g} GiB every {config['window_batches']} batches of {config['batch_size']}"
    runs = f"{config['rounds']} runs of {config['windows']} windows, {format_range(record, 'images_per_sec', '.1f')} images/s"
    head = ("written", "one costs, s", "of it the step waits, s", "share of the time, here", "at the default cadence")
    rows: list[Row] = []
    for name, label in SAVING_MODES.items():
        if f"{name}_cost_sec" in record:
            seconds = (format_range(record, f"{name}_{key}_sec", ".3f") for key in ("cost", "step_wait"))
            shares = (format_range(record, f"{name}_share_{key}", ".3%") for key in ("of_windows", "by_default"))
            rows.append((label, *seconds, *shares))
    return RecordTable(f"A checkpoint and a snapshot, {every}; {runs}; load average {load}:", head, "lrrrr", rows)


# --- bench.latency ---

Contest = Record

CONTESTS_KEY = "contests"  # such a record has several tables
PIPELINE = "pipeline"
"""The contestant that is diffusers' own."""
MODELS = {"stock": "SD2", "sd15": "SD 1.5", "mlperf": "SD2 as in MLPerf", "shapes": "the miniature"}
MODELS |= {"sdxl": "SDXL", "flux": "FLUX.1 dev"}
LATENCY_HEAD = (
    *("model", "sampler", "precision", "batch", "how", "s (median)", "least", "p95"),
    *("times as fast as eager", "times as fast as the pipeline", "in processor time"),
    *("text, denoiser, VAE, %", "first call, s"),
)
LATENCY_ALIGN = "lllrlrrrlllrr"
LATENCY_RATIOS = ("speedup_vs_eager", f"speedup_vs_{PIPELINE}", f"cpu_speedup_vs_{PIPELINE}")
GROUP_KEYS = ("preset", "image_size", "steps", "guidance", "channels_last", "rounds")
"""What has a table of its own, with `processes`, which older records do not name."""
SIZE_KEYS = ("preset", "image_size", "steps")
"""Of GROUP_KEYS, those that are columns where all contests are in one table."""


def contest_groups(record: Record) -> list[list[Contest]]:
    """Return the contests that stand in one table, in the record's order."""
    groups: dict[tuple[Any, ...], list[Contest]] = {}
    for contest in record[CONTESTS_KEY]:
        groups.setdefault((*(contest[key] for key in GROUP_KEYS), contest.get("processes")), []).append(contest)
    return list(groups.values())


def title_of_latency(contests: Sequence[Contest]) -> str:
    """Say what the contests of one table have in common, and how busy the machine was."""
    one, loads = contests[0], [contest["load_average_before"] for contest in contests]
    size, nhwc = one["image_size"], ", NHWC" if one["channels_last"] else ""
    subject = f"Preset {one['preset']}, {size} x {size} px, {one['steps']} steps, guidance {one['guidance']:g}{nhwc}"
    apart = "; each in a process of its own" if one.get("processes") else ""
    return f"{subject}; {one['rounds']} rounds{apart}; load average {min(loads):g} to {max(loads):g}:"


def rows_of_latency(contests: Sequence[Contest]) -> Iterator[tuple[str | None, ...]]:
    """Yield a row for each contestant that was not skipped."""
    for contest in contests:
        case = (MODELS[contest["variant"]], contest["sampler"], contest["precision"], str(contest["batch_size"]))
        for name, status in contest["status"].items():
            if status == "skipped":
                continue
            label = "diffusers' pipeline" if name == PIPELINE else name
            if status != "ok":
                yield (*case, label, status.replace("_", " "), *[None] * 7)
                continue
            shares = [contest.get(f"{name}_{part}_frac") for part in ("text", "denoiser", "vae")]
            yield (
                *case,
                label,
                *(f"{contest[f'{name}_sec{end}']:.3g}" for end in ("", "_min", "_p95")),
                *(_ratio(contest, f"{name}_{key}") for key in LATENCY_RATIOS),
                None if None in shares else ", ".join(f"{100 * share:.0f}" for share in shares),
                f"{contest[f'{name}_first_sec']:.3g}",
            )


def _ratio(contest: Contest, key: str) -> str | None:
    if key not in contest:
        return None
    return f"{contest[key]:.2f} ({contest[f'{key}_min']:.2f} to {contest[f'{key}_max']:.2f})"


def skip_reasons(contests: Sequence[Contest]) -> list[str]:
    """Say what was skipped or lost and why, each reason once."""
    reasons: dict[str, None] = {}
    for contest in contests:
        for name, reason in contest["reasons"].items():
            status = contest["status"][name].replace("_", " ")
            # A precision that a machine does not have takes all contestants with it, and says its own name.
            of_all = len(set(contest["reasons"].values())) == 1 and len(contest["reasons"]) == len(contest["status"])
            where = contest["precision"] if of_all else name
            reasons.setdefault(f"{where}, {status}: {reason}" if status != "skipped" else f"{where}: {reason}")
    return list(reasons)


def largest_difference(contests: Sequence[Contest]) -> float | None:
    """Return how far an image in fp32 is from the pipeline's at most, of values in [0, 1]; None where none was compared."""
    values = [
        value
        for contest in contests
        if contest["precision"] == "fp32"
        for key, value in contest.items()
        if key.endswith("_max_abs_difference") and value is not None
    ]
    return max(values, default=None)


def _overall_speedups(contests: Sequence[Contest]) -> Iterator[str]:
    """Yield what the contests say of a way together, where it was in several."""
    kinds = {"": "times as fast as the pipeline", "cpu_": "times in processor time"}
    for contestant in dict.fromkeys(name for contest in contests for name in contest["status"]):
        for kind, meaning in kinds.items():
            key = f"{contestant}_{kind}speedup_vs_{PIPELINE}"
            speeds = [contest[key] for contest in contests if key in contest]
            if len(speeds) > 1:
                middle, ends = statistics.median(speeds), f"{min(speeds):.2f} to {max(speeds):.2f}"
                yield f"{contestant}, over {len(speeds)} contests: {middle:.2f} {meaning} ({ends})."


def notes_of_latency(contests: Sequence[Contest]) -> list[str]:
    """Return what stands below a table."""
    notes, difference = list(_overall_speedups(contests)), largest_difference(contests)
    if difference is not None:
        notes.append(f"fp32 images differ from the pipeline's by {difference:.2g} at most, of 0 to 1.")
    return notes + skip_reasons(contests)


def table_of_latency(record: Record) -> RecordTable:
    """A row for each contestant of every contest; first what its contest does not share with all others."""
    rows: list[Row] = []
    for contests in contest_groups(record):
        group = tuple(str(contests[0][key]) for key in SIZE_KEYS)
        rows += [(*group, *row) for row in rows_of_latency(contests)]
    return RecordTable("Every contest:", (*SIZE_KEYS, *LATENCY_HEAD), "lrr" + LATENCY_ALIGN, rows)


def text_of_latency(record: Record) -> str:
    """Format a record for the terminal."""
    parts = [f"{record['device']}, commit {record['commit']}"]
    for contests in contest_groups(record):
        table = RecordTable(title_of_latency(contests), LATENCY_HEAD, LATENCY_ALIGN, list(rows_of_latency(contests)))
        parts += ["", in_text(table), *notes_of_latency(contests)]
    return "\n".join(parts)


# --- all of them ---

TABLES: dict[str, Callable[[Record], RecordTable]] = {
    "step": table_of_step,
    "scale": table_of_scale,
    "saving": table_of_saving,
}
"""What a record says that it has measured -> its table."""


def text_of(record: Record) -> str:
    """Format a record for the terminal."""
    if CONTESTS_KEY in record:
        return text_of_latency(record)
    return f"{about(record)}\n{in_text(TABLES[record['measured']](record))}"


def table_of(record: Record) -> RecordTable:
    """Return all rows of a record in one table."""
    return table_of_latency(record) if CONTESTS_KEY in record else TABLES[record["measured"]](record)


def markdown_of(record: Record) -> str:
    """Format a record for a page."""
    return f"\n{about(record)} {in_markdown(table_of(record))}\n"


@command()
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    writer = " or ".join(f"bench.{name}" for name in (*TABLES, "latency"))
    words = "RECORD.json, OUT.csv, PAGE.md"
    return show_record(argv, writer, text_of, markdown_of, csv_table_of=table_of, possible=words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
