"""Seconds from a kill to the first new batch, by part, on a Slurm of two nodes on this machine.

    python -m tests.cluster
    python -m tests.cluster rounds=1 only=rank out=none

rounds=5                                   of each kind
only=rank,node                             what is killed: a rank of the second node, or the node itself
out=reports/results/slurm_restarts.json    where the record goes; none: nowhere

Prints a line a round, then the table. Exit code: 0, 1 when a job did not come back, 2 when the words cannot be read.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from run_folder.environment import environment
from tests.cluster.slurm import ROOT, Cluster, missing, two_nodes

SCHEMA = 1
KINDS = {"rank": "a rank is killed", "node": "its node loses power"}
SETTINGS = {"CRED_EXPIRE": "10", "KILLWAIT": "30", "SLURMD_TIMEOUT": "30"}
SLOW = "tests/cluster/slow_ranks.py"
AT_BATCH, BATCH_SEC = 5, 0.2

PARTS = {
    "noticed": ("the kill -> the job is back in the queue", "ours for a rank, Slurm's for a node"),
    "queue": ("-> the batch script begins again", "Slurm's"),
    "step": ("-> the launchers begin", "Slurm's"),
    "launcher": ("-> rank 0's process begins", "Composer's"),
    "imports": ("-> its libraries are loaded", "ours"),
    "checks": ("-> its configuration is checked", "ours"),
    "rendezvous": ("-> the ranks have met", "torch's"),
    "resume": ("-> checkpoint, networks, data and optimizer are ready", "ours"),
    "batch": ("-> the first new batch is trained", "ours"),
}
"""Part -> from the end of the one before to what, and whose time it is."""


def make_data(folder: Path) -> list[str]:
    """Make the miniature's data, and return the words of a run on it: a tiny network, a checkpoint after every batch."""
    for words in (
        ["prepare.shapes", f"{folder}/tars", "num_images=192"],
        ["prepare.shards", f"{folder}/tars", f"{folder}/images"],
        ["prepare.latents", f"{folder}/images", f"{folder}/moments", "model.family=shapes", "image_size=32"],
    ):
        subprocess.run([sys.executable, "-m", *words], cwd=ROOT, check=True, capture_output=True, timeout=600)
    keys = ["model.preset=tiny", "global_batch_size=32", "max_duration=9ba", "schedule.warmup_batches=0"]
    keys += ["schedule.name=constant", "measure.warmup_batches=2", "eval.when=off", "target.fid=null"]
    keys += ["target.clip=null", "mlperf.enabled=false", "save.every_images=32", "save.snapshot_every_images=0"]
    data = [f"data.remote={folder}/moments", "data.local=null", "data.workers=1", f"run_folder={folder}/runs"]
    return ["yamls/shapes.yaml", *data, *keys, "loggers.progress_bar=false"]


def process_of(words: str, what: str, node: str) -> psutil.Process:
    """Return a rank or a launcher by a part of its words and the node that its environment names."""
    found = []
    for process in psutil.process_iter(["cmdline", "create_time"]):
        line = process.info["cmdline"] or []
        is_launcher = any(word.endswith("/composer") for word in line[:2])
        if line[:1] and "python" in line[0] and words in f"{' '.join(line)} " and is_launcher == (what == "launcher"):
            environ = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if f"SLURMD_NODENAME={node}".encode() in environ:
                found.append(process)  # a rank's loader worker has its words too, and is younger
    if not found:
        raise RuntimeError(f"no {what} of {words} on {node}")
    return min(found, key=lambda process: process.create_time())


def kill(cluster: Cluster, kind: str, name: str, job: str) -> tuple[float, float]:
    """Kill, and where it was a node give its power back as soon as Slurm has noticed.

    Returns when, and when the job was seen in the queue again, in seconds since 1970.
    """
    at = time.time()
    if kind == "rank":
        process_of(f"run_name={name} ", "rank", "node2").send_signal(signal.SIGKILL)
    else:
        cluster.lose("node2")
    try:
        cluster.until(job, lambda: cluster.job(job)["JobState"] == "PENDING")
        queued = time.time()
    finally:
        if kind == "node":
            cluster.revive("node2")
    return at, queued


def parts_of(times: Sequence[Mapping[str, Any]], killed: float, queued: float) -> dict[str, float]:
    """Return the seconds of each part of a job's second start."""
    second = [line for line in times if line["start"] == 1]

    def began(at: str) -> float:
        return min(line["unix_time"] for line in second if line["at"] == at and line.get("rank", 0) == 0)

    def last(at: str) -> float:
        return max(line["unix_time"] for line in second if line["at"] == at)

    edges = [killed, queued, began("job"), last("launcher"), began("process"), began("imported"), began("checked")]
    edges += [began("met"), began("set_up"), began("batch")]
    return {name: round(b - a, 2) for name, a, b in zip(PARTS, edges, edges[1:], strict=False)}


def run_round(cluster: Cluster, kind: str, name: str, words: Sequence[str]) -> dict[str, Any]:
    """Kill one run and wait for its end. Raises AssertionError: it did not come back."""
    job = cluster.submit([SLOW, str(BATCH_SEC), str(AT_BATCH), *words, f"run_name={name}"], "--nodes=2")
    cluster.until(job, lambda: cluster.batches(job) == AT_BATCH)
    time.sleep(2.0)  # its checkpoint is written
    killed, queued = kill(cluster, kind, name, job)
    end = cluster.end_of(job)
    assert (end["JobState"], end["Restarts"]) == ("COMPLETED", "1"), cluster.all_said(job)
    parts = parts_of(cluster.times(job), killed, queued)
    return {"kind": kind, "seconds": round(sum(parts.values()), 2), "parts": parts}


def table(record: Mapping[str, Any]) -> str:
    """Return a record as a table of Markdown: medians, and the extremes behind them."""
    kinds = [kind for kind in KINDS if any(each["kind"] == kind for each in record["rounds"])]
    lines = [f"| seconds | whose | {' | '.join(KINDS[kind] for kind in kinds)} |", f"|---|---|{'---|' * len(kinds)}"]

    def cell(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"

    for part, (text, whose) in PARTS.items():
        of = [cell([each["parts"][part] for each in record["rounds"] if each["kind"] == kind]) for kind in kinds]
        lines.append(f"| {text} | {whose} | {' | '.join(of)} |")
    sums = [cell([each["seconds"] for each in record["rounds"] if each["kind"] == kind]) for kind in kinds]
    return "\n".join([*lines, f"| all | | {' | '.join(sums)} |"])


def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    given = {"rounds": "5", "only": ",".join(KINDS), "out": "reports/results/slurm_restarts.json"}
    for word in argv:
        name, equals, value = word.partition("=")
        if not equals or name not in given:
            print(f"{word}: unknown. Possible: {', '.join(f'{key}=' for key in given)}.", file=sys.stderr)
            return 2
        given[name] = value
    kinds = given["only"].split(",")
    if not given["rounds"].isdigit() or not int(given["rounds"]) or set(kinds) - set(KINDS):
        print(f"rounds, only: possible are a number, and some of {','.join(KINDS)}.", file=sys.stderr)
        return 2
    if why := missing():
        print(f"no Slurm of two nodes: {why}", file=sys.stderr)
        return 2
    record = {
        "schema": SCHEMA,
        "measured": "slurm_restarts",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **environment(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "settings": SETTINGS,
        "rounds": [],
    }
    with tempfile.TemporaryDirectory() as home:
        words = make_data(Path(home))
        with two_nodes(Path(home, "cluster"), **SETTINGS) as cluster:
            for number in range(int(given["rounds"])):
                for kind in kinds:
                    try:
                        found = run_round(cluster, kind, f"{kind}-{number}", words)
                    except AssertionError as error:
                        print(error, file=sys.stderr)
                        return 1
                    record["rounds"].append(found)
                    if given["out"] != "none":
                        Path(given["out"]).write_text(json.dumps(record, indent=2) + "\n")
                    print(json.dumps(found), flush=True)
    print(table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
