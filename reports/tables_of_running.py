"""Table of what checkpoints cost a run."""

from __future__ import annotations

from reports.record_table import Record, Row, Table, spread

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
