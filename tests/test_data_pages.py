"""Figures of the pages about data and launching: each is that of a committed record."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from typing import Any

from conftest import ROOT

RESULTS = ROOT / "reports/results"


def read_page(name: str) -> str:
    return (ROOT / f"docs/{name}.md").read_text()


def record(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def spread(made: dict[str, Any], key: str, digits: str) -> str:
    value, least, greatest = (format(made[f"{key}{end}"], digits) for end in ("", "_min", "_max"))
    return f"{value} ({least} to {greatest})"


def test_the_seconds_of_a_restart_are_those_of_the_record():
    made = record("slurm_restarts")
    for kind, text in (("rank", "a killed rank"), ("node", "a lost node")):
        seconds = [each["seconds"] for each in made["rounds"] if each["kind"] == kind]
        median = f"{statistics.median(seconds):.0f} ({min(seconds):.0f} to {max(seconds):.0f})"
        assert f"{median} s after {text}" in read_page("launching")


def test_the_counts_of_store_faults_are_those_of_the_committed_records_and_ours_are_all_good():
    outcomes = ("right", "stopped, cause named", "stopped, no cause", "SHORT EPOCH", "HANG", "WRONG DATA")
    for kind, name in {"plain": "store_faults", "ours": "store_faults_ours"}.items():
        faults = record(name)["faults"].values()
        counts = sum((Counter(fault.get(kind, {}).get("counts", {})) for fault in faults), Counter())
        cells = " | ".join(str(counts[outcome]) for outcome in outcomes)
        assert f"| {cells} |" in read_page("data-and-stores") and counts.total() >= 200
    ours = [fault["ours"] for fault in faults]
    assert len(ours) >= 20 and all(of["good"] == sum(of["counts"].values()) >= 10 for of in ours)


def test_the_speeds_of_preparing_data_are_those_of_the_records():
    rows, made, page = record("rows_speed"), record("prepare_speed"), read_page("laion")
    for name in ("ours", "pandas"):
        speed = spread(rows, f"rows_{name}_per_sec", ",.0f")
        assert f"{speed} rows/s" in page and f" {rows[f'memory_{name}_whole_mib']:,.0f} MiB" in page
    assert f"{spread(made, 'local_per_sec', ',.0f')} images/s" in page
    assert f"{spread(made, 'latents_per_sec', '.2f')} images/s" in page
    assert f"{made['bytes_ours']:,.0f} bytes; the reference's take {made['bytes_reference']:,.0f}" in page
