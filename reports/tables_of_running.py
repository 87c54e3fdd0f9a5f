"""Tables of what is around a step: other ranks, the way of the data, checkpoints."""

from __future__ import annotations

from reports.record_table import Record, Row, Table, spread

# --- bench.ranks ---

ROWS_OF_RANKS = (
    ("one rank, images/s", "one_images_per_sec", ".1f"),
    ("two ranks, images/s", "two_images_per_sec", ".1f"),
    ("their efficiency", "efficiency", ".2f"),
    ("two ranks share one's batch, images/s", "shared_images_per_sec", ".1f"),
    ("their speed over one rank's", "speedup_shared", ".2f"),
    ("a step of two ranks, ms", "all_reduce_step_ms", ".1f"),
    ("of it gradients are on their way, ms", "all_reduce_in_flight_ms", ".1f"),
    ("of it nothing else is done, ms", "all_reduce_exposed_ms", ".1f"),
    ("the same, part of the step", "all_reduce_exposed_frac", ".3f"),
)
LOST = {"kill": "SIGKILL", "stop": "SIGSTOP"}


def table_of_ranks(record: Record) -> Table:
    """Two ranks against one; or a row for each way to lose a rank."""
    config = record["config"]
    load = f"load average {record['load_average_before']:g} to {record['load_average_after']:g}"
    if config["measure"] == "efficiency":
        title = (
            f"Batch {config['device_batch']} a rank, {config['batches']} batches, {config['rounds']} rounds; {load}:"
        )
        rows: list[Row] = [(name, spread(record, key, digits)) for name, key, digits in ROWS_OF_RANKS]
        return Table(title, ("figure", "median, least to greatest"), "lr", rows)
    title = f"{config['rounds']} rounds, {config['default_rounds']} with the default limits; {load}:"
    rows = [
        (
            f"{LOST[name]} of rank {rank}",
            "the default" if suffix else f"{config['limit']:g}",
            spread(record, f"{name}_{rank}{suffix}_sec", ".1f"),
        )
        for suffix in ("", "_default")
        for name in LOST
        for rank in (0, 1)
        if f"{name}_{rank}{suffix}_sec" in record
    ]
    return Table(title, ("lost", "health.stall_sec", "the other rank ends after, s"), "lrr", rows)


# --- bench.rows ---

FILTERS = {"ours": "ours, by licence", "pandas": "pandas, by licence", "all": "ours, each condition, each URL once"}


def table_of_rows(record: Record) -> Table:
    """A row for each filter."""
    config, load = record["config"], f"{record['load_average_before']:g} to {record['load_average_after']:g}"
    gib = record["table_bytes"] / 2**30
    what = f"{config['num_rows']:,} rows in {config['num_parts']} files, {gib:.1f} GiB, on one core"
    speed = f"Ours is {spread(record, 'rows_speedup', '.2f')} times as fast as pandas"
    title = f"{what}; {config['rounds']} rounds; load average {load}. {speed}:"
    rows: list[Row] = []
    for name, shown in FILTERS.items():
        memory = (f"{record[f'memory_{name}_{part}_mib']:,.0f}" for part in ("tenth", "whole"))
        rows.append((shown, spread(record, f"rows_{name}_per_sec", ",.0f"), *memory))
    head = ("filter", "rows/s", "memory, a tenth of the rows, MiB", "memory, all rows, MiB")
    return Table(title, head, "lrrr", rows)


# --- bench.prepare ---

MAKERS = {
    "local": "tar -> images, processes",
    "ray": "tar -> images, Ray",
    "latents": "images -> moments, ranks",
}


def table_of_prepare(record: Record) -> Table:
    """A row for each command; the parts are those of its workers' time."""
    config, load = record["config"], f"{record['load_average_before']:g} to {record['load_average_after']:g}"
    title = f"{config['num_images']:,} pictures with {config['workers']} workers, {config['num_encoded']:,} encoded"
    title += f" ({config['preset']}, {config['image_size']} px); {config['rounds']} rounds; load average {load}. "
    if "ray_over_local" in record:
        title += f"Ray is {spread(record, 'ray_over_local_command', '.2f')} times as fast as processes, start and all, "
        title += f"for an eighth of the pictures {spread(record, 'ray_over_local_eighth_command', '.2f')} times. "
    ours, theirs = record["bytes_ours"], record["bytes_reference"]
    title += f"A sample's moments of 512 px take {ours:,.0f} bytes, the reference's {theirs:,.0f}:"
    kinds, rows = ("decode", "wait_for_decoding", "encode", "write", "rest"), []
    for name, shown in MAKERS.items():
        if f"{name}_per_sec" in record:
            parts = (record.get(f"{name}_{kind}_frac") for kind in kinds)
            shares = (None if part is None else f"{part:.1%}" for part in parts)
            seconds = spread(record, f"{name}_command_sec", ".1f")
            rows.append((shown, spread(record, f"{name}_per_sec", ",.2f"), seconds, *shares))
    head = ("command", "samples/s", "whole command, s", *(kind.replace("_", " ") for kind in kinds))
    return Table(title, head, "lrrrrrrr", rows)


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
