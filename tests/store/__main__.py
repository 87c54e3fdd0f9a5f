"""Faults of a real object store, each many times, with streaming as it is and with Easel's reader.

    python -m tests.store
    python -m tests.store rounds=1 kinds=ours
    python -m tests.store only=stopped,killed kinds=plain,ours rounds=3 extras=none out=/tmp/faults.json

rounds=10                                  of each fault and kind
only=FAULT,...                             some of the faults; default all (faults.py)
kinds=plain,ours                           readers: StreamingDataset as it is; Easel's
extras=sftp                                a read over SFTP; or none
out=reports/results/store_faults.json      where the record goes; none: nowhere
store=swift                                or moto; default: Swift where Debian's packages are installed

Prints a line a round, then the table. Exit code: 0, 1 when a round of Easel's reader was not good, 2 when the words cannot
be read. Good is: a fault that heals ends in the whole epoch in order, another one in an error that names the cause. The
last line says which store it was.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from run_folder.environment import environment
from tests.store import processes
from tests.store.dataset import NUM_SAMPLES, NUM_SHARDS, Stage
from tests.store.extras import sftp
from tests.store.faults import FAULTS, PATIENCE_SEC, PLAIN_LIMIT_SEC, PREFIX, Round, Skipped
from tests.store.reader_outcomes import NAMED, OUTCOMES, RIGHT, Orders, Reading, Verdict
from tests.store.server import Store

EXTRAS = ("sftp",)
KINDS = ("plain", "ours")
SCHEMA = 1
DETAIL_CHARS = 300
Found = dict[str, dict[str, list[tuple[Verdict, float]]]]
"""Fault -> kind of reader -> verdicts with their seconds."""


@dataclass
class Options:
    """The words of the command line."""

    rounds: int = 10
    only: list[str] = field(default_factory=lambda: list(FAULTS))
    kinds: list[str] = field(default_factory=lambda: list(KINDS))
    extras: list[str] = field(default_factory=lambda: list(EXTRAS))
    out: str = "reports/results/store_faults.json"
    store: str | None = None


def parse(words: Sequence[str]) -> Options:
    """Read the command line. Raises ValueError, with the choices."""
    options = Options()
    choices = {"only": list(FAULTS), "kinds": list(KINDS), "extras": [*EXTRAS, "none"], "store": ["swift", "moto"]}
    for word in words:
        name, given, value = word.partition("=")
        if not given or not hasattr(options, name):
            raise ValueError(f"{word}: unknown. Possible: {', '.join(f'{key}=' for key in vars(options))}.")
        if name == "rounds":
            if not value.isdigit() or value == "0":
                raise ValueError(f"rounds: '{value}' is no number of rounds. Possible: 1 and up.")
            options.rounds = int(value)
            continue
        parts = value.split(",")
        if unknown := [part for part in parts if part not in choices.get(name, parts)]:
            raise ValueError(f"{name}: '{unknown[0]}' is unknown. Possible: {', '.join(choices[name])}.")
        setattr(options, name, value if name in ("out", "store") else [part for part in parts if part != "none"])
    return options


def order_without_faults(stage: Stage, folder: Path, shuffle: bool) -> Orders:
    """Return what each rank gets from a folder that is read in place."""
    name = folder / f"order{int(shuffle)}"
    local = str(stage.folder)
    ranks = Reading("ours", name, remote=None, local=local, shuffle=shuffle, pace_sec=0).finish(120)
    if any(rank.status != 0 or len(rank.batches) != rank.owed_batches or rank.wrong for rank in ranks):
        raise RuntimeError(f"a stage in a folder cannot be read: {ranks[0].error or ranks[1].error}; see {name}/0.log")
    return [rank.batches for rank in ranks]


def is_good(heals: bool, verdict: Verdict) -> bool:
    """True when a trustworthy reader may have done this."""
    return verdict.outcome == (RIGHT if heals else NAMED)


def run_fault(
    name: str, kind: str, number: int, store: Store, stage: Stage, home: Path, orders: dict[bool, Orders]
) -> tuple[Verdict, float]:
    """Run one round; the store is in order before and after it."""
    folder = home / f"{name}-{kind}-{number}"
    folder.mkdir()
    store.heal()
    at, started = Round(kind, number, store, stage, folder, orders), time.monotonic()
    try:
        verdict = FAULTS[name].act(at)
    finally:
        at.close()
        store.heal()
    if verdict.outcome == RIGHT or (verdict.outcome == NAMED and not FAULTS[name].heals):
        shutil.rmtree(folder, ignore_errors=True)
    return verdict, time.monotonic() - started


def run_all(options: Options, store: Store, stage: Stage, home: Path) -> tuple[Found, dict[str, str]]:
    """Run every round, and return what could not be done too."""
    found: Found = {}
    skipped: dict[str, str] = {}
    orders = {shuffle: order_without_faults(stage, home, shuffle) for shuffle in (False, True)}
    for number, name, kind in itertools.product(range(options.rounds), options.only, options.kinds):
        if name in skipped:
            continue
        try:
            verdict, seconds = run_fault(name, kind, number, store, stage, home, orders)
        except Skipped as reason:
            skipped[name] = str(reason)
            print(f"{name}: skipped, {reason}", flush=True)
            continue
        found.setdefault(name, {}).setdefault(kind, []).append((verdict, seconds))
        mark = "" if kind != "ours" or is_good(FAULTS[name].heals, verdict) else "  NOT GOOD"
        detail = " ".join(verdict.detail.split())[:DETAIL_CHARS]
        print(f"{number} {name} {kind} {seconds:.1f} s: {verdict.outcome}{mark}  {detail}".rstrip(), flush=True)
    return found, skipped


def table(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of counts as Markdown: kind of reader -> the record that its rounds stand in."""
    lines = [f"| fault | {' | '.join(records)} |", "|---" * (1 + len(records)) + "|"]
    for name, fault in next(iter(records.values()))["faults"].items():
        cells = []
        for kind, record in records.items():
            counts = record["faults"][name].get(kind, {}).get("counts", {})
            cells.append(", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if outcome in counts))
        lines.append(f"| {fault['text']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def record_of(options: Options, store: Store, found: Found, rest: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept."""
    faults: dict[str, Any] = {}
    for name, of_kind in found.items():
        heals = FAULTS[name].heals
        faults[name] = {"text": FAULTS[name].text, "heals": heals}
        for kind, verdicts in of_kind.items():
            details = [verdict.detail for verdict, _ in verdicts if not is_good(heals, verdict)]
            faults[name][kind] = {
                "counts": dict(Counter(verdict.outcome for verdict, _ in verdicts)),
                "good": sum(is_good(heals, verdict) for verdict, _ in verdicts),
                "mean_sec": round(sum(seconds for _, seconds in verdicts) / len(verdicts), 1),
                "first_details": [" ".join(detail.split())[:DETAIL_CHARS] for detail in details[:3]],
            }
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "what": "tests/store: faults of an object store and of a cache, by kind of reader; counts of rounds by outcome",
        "plain": "its index.json lies in its cache beforehand, but in healthy, cache_leftovers, no_bucket, "
        "wrong_credentials and no_permission; download_timeout=2 in frozen_for_good; the rest as it is",
    }
    head |= {"store": store.kind, "store_version": store.version, "date": time.strftime("%Y-%m-%d")}
    head |= {"rounds": options.rounds, "ranks": 2, "workers": 2, "samples": NUM_SAMPLES, "shards": NUM_SHARDS}
    head |= {"patience_sec": PATIENCE_SEC, "plain_limit_sec": PLAIN_LIMIT_SEC}
    return {**head, "faults": faults, **rest, **environment()}


def main(words: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    try:
        options = parse(words)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what is below is put away
    os.environ |= {processes.MARK: uuid.uuid4().hex, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="easel-store-"))
    stage = Stage(home / "stage")
    store = Store(home / "server", options.store)
    bad = False
    try:
        store.start()
        for name, content in stage.files.items():
            store.put(f"{PREFIX}/{name}", content)
        found, skipped = run_all(options, store, stage, home)
        rest: dict[str, Any] = {}
        if "sftp" in options.extras:
            try:
                rest["sftp"] = sftp(stage, home / "sftp", options.kinds)
            except Skipped as reason:
                skipped["sftp"] = str(reason)
        ours = [is_good(FAULTS[name].heals, v) for name, of_kind in found.items() for v, _ in of_kind.get("ours", ())]
        bad = not all(ours) or not all(entry["good"] for entry in rest.values())
        rest |= {"skipped": skipped, "seconds": round(time.monotonic() - started)}
        record = record_of(options, store, found, rest)
        print(f"\n{table(dict.fromkeys(options.kinds, record))}\n")
        for name in options.extras:
            print(f"{name}: {skipped.get(name) or rest[name]}")
        if options.out != "none":
            Path(options.out).write_text(json.dumps(record, indent=2) + "\n")
        print(f"{sum(ours)} of {len(ours)} rounds of ours good; {rest['seconds']} s")
    finally:
        store.close()
        if bad:
            print(f"what their ranks wrote: {home}", file=sys.stderr)
        else:
            shutil.rmtree(home, ignore_errors=True)
    print(f"store: {store.kind}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
