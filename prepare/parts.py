"""Make a stage in steps that can be interrupted and resumed: a plan, parts, and a finish.

    OUT/plan.json                    the inputs and settings; written first, and compared at every later start
    OUT/part-00012/shard.00000.mds   a part is made from one input (a tar, a shard): its shards ...
    OUT/part-00012/part.json         ... and, last, their entries of the index and the counts of samples
    OUT/skipped.jsonl                the finish, once all parts are done: every skipped sample with its reason,
    OUT/keys.u64                     a digest of every sample's key and caption (stages/keys.py),
    OUT/index.json                   the index of all parts' shards,
    OUT/dataset.json                 and, last, the file that makes it a stage (stages/dataset.py requires it)

A part's bytes depend only on its input and the plan, not on the process that makes it or on interruptions. A part with a
part.json is done and is never made again.

A part.json has the digests of its samples' keys too, in base64.

A set of buckets is a stage for each size in OUT/576x448/, with a plan.json, an index.json without shards and a dataset.json
of their sizes and samples in OUT (stages/dataset.py reads it).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from filelock import Timeout
from streaming import MDSWriter

from cli.errors import Failed, Refused
from cli.limits import ImageSize
from prepare.counts import SKIPPED_FILE, Ledger, SampleCounts, text_of
from prepare.names import GO_ON, part_name
from prepare.places import Place
from stages.dataset import FACTS_FILE, KEYS_DIGEST, write_facts
from stages.fetch import HASH, file_digest
from stages.keys import KEYS_FILE, NUMBER, as_numbers, key_digest

PLAN_FILE = "plan.json"
PLAN_SCHEMA = 1
PART_FILE = "part.json"
PATIENCE_SEC = 1800.0
SHARED_SEC = 10.0


class Part(Ledger):
    """Takes the samples of one input. For each, call `read`, then `write`, `skip` or `leave_out`."""

    def __init__(self, source: str, writer: MDSWriter):
        super().__init__(source)
        self.keys: list[int] = []
        """Digests of the written samples' keys."""
        self._writer = writer

    def write(self, row: dict[str, Any]) -> None:
        self._writer.write(row)
        self.counts.written += 1
        self.keys.append(key_digest(row))


# ---------------------------------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Inputs and settings of a stage: everything that the bytes of a part depend on.

    Args:
        made_by: the command.
        stage: images or moments.
        columns: of the MDS shards, name -> encoding.
        shard_size: largest size of a shard, bytes.
        facts: facts about the stage for dataset.json, besides its counts.
        inputs: one per part, in order: its name, and what identifies it (bytes, digest).
    """

    made_by: str
    stage: str
    columns: dict[str, str]
    shard_size: int
    facts: dict[str, Any]
    inputs: list[dict[str, Any]]

    @cached_property
    def content(self) -> dict[str, Any]:
        """Return the content of plan.json."""
        head = {"schema": PLAN_SCHEMA, "made_by": self.made_by, "stage": self.stage}
        tail = {"shard_size": self.shard_size, "columns": self.columns, "parts": self.inputs}
        return {**head, **self.facts, **tail}

    @cached_property
    def text(self) -> bytes:
        return (json.dumps(self.content, indent=1) + "\n").encode()

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.text).hexdigest()


def begin(place: Place, plan: Plan) -> None:
    """Write the plan, or check that the existing one is the same.

    Raises:
        Refused: the place has other content (says what differs), or is not readable or writable.
    """
    try:
        names = place.names()
        text = place.read(PLAN_FILE) if PLAN_FILE in names else None
        if not names:
            place.put_bytes(PLAN_FILE, plan.text)
    except OSError as error:
        raise Refused(f"OUT: {place.address} cannot be written: {error}. Give another place.") from error
    if text == plan.text or not names:
        return
    if text is None:
        raise Refused(f"OUT: {place.address} exists and is not empty. Give a new folder, or remove it.")
    try:
        differences = _differences(json.loads(text), json.loads(plan.text))
    except (ValueError, AttributeError):
        differences = ["its plan.json is of another kind"]
    state = "finished" if FACTS_FILE in names else "unfinished"
    differences = [text for text in differences if not text.startswith("columns.")] or differences  # these follow
    raise Refused(
        f"OUT: {place.address} holds the {state} work of another command: {'; '.join(differences)}. Give another OUT, or "
        f"remove this one."
    )


def _differences(old: dict[str, Any], new: dict[str, Any], at: str = "") -> list[str]:
    """List the differences between two plans by key; of the parts, only the first."""
    found = []
    for key in [*new, *(key for key in old if key not in new)]:
        was, now = old.get(key), new.get(key)
        if was == now:
            continue
        if isinstance(was, dict) and isinstance(now, dict):
            found += _differences(was, now, f"{at}{key}.")
        elif key != "parts" or not (isinstance(was, list) and isinstance(now, list)):
            found.append(f"{at}{key} was {json.dumps(was)}, is {json.dumps(now)}")
        elif changed := _changed_folders(was, now):
            found.append(f"files in {', '.join(changed)} changed since it was started")
        elif len(was) != len(now):
            found.append(f"parts were {len(was)}, are {len(now)}")
        else:
            number = next(number for number in range(len(now)) if was[number] != now[number])
            found += _differences(was[number], now[number], f"{part_name(number)}.")
    return found


def _changed_folders(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[str]:
    """Return the folders of files that two lists of parts share, but with other files."""
    names = {one["folder"] for one in old if "folder" in one} & {one["folder"] for one in new if "folder" in one}

    def files(parts: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
        return [one for one in parts if one.get("folder") == name]

    return sorted(name for name in names if files(old, name) != files(new, name))


# ---------------------------------------------------------------------------------------------------------------------
# Parts, and the finish
# ---------------------------------------------------------------------------------------------------------------------


def parts_to_make(place: Place, plan: Plan) -> list[int]:
    """Return the numbers of the missing parts, and print how many are done."""
    num = len(plan.inputs)
    todo = sorted(_missing(place, num))
    if len(todo) < num:
        what = "the work continues" if todo else "nothing is left to make"
        print(f"{place.address}: {num - len(todo)} of {num} parts are done already, {what}", flush=True)
    return todo


def _missing(place: Place, num_parts: int) -> set[int]:
    names = place.names()
    return {number for number in range(num_parts) if f"{part_name(number)}/{PART_FILE}" not in names}


def make_part(place: Place, plan: Plan, number: int, fill: Callable[[int, Part], None]) -> SampleCounts:
    """Make one part and upload it, with its part.json last.

    Args:
        fill: called with the number and a Part, to which it writes the samples.

    Raises:
        OSError: the place cannot be written.
    """
    name = part_name(number)
    work = place.scratch / name
    # A process that outlived its command (a rank whose launcher was killed) may still write this part: wait for it.
    with _turn(place, name):
        if f"{name}/{PART_FILE}" in place.names(f"{name}/"):
            return _read_part(place, plan, number)[0]
        shutil.rmtree(work, ignore_errors=True)  # left by a killed writer
        with MDSWriter(out=str(work), columns=plan.columns, hashes=[HASH], size_limit=plan.shard_size) as writer:
            part = Part(plan.inputs[number]["name"], writer)
            fill(number, part)
        part.counts.check()
        for entry in writer.shards:
            basename = entry["raw_data"]["basename"]
            place.put(f"{name}/{basename}", work / basename)
        shutil.rmtree(work)
        content = {
            "plan": plan.digest,
            "made_from": plan.inputs[number],
            "account": {**part.counts.as_facts(), "ignored_example": part.counts.ignored_example},
            "skipped": part.lines,
            "shards": writer.shards,
            "keys": base64.b64encode(as_numbers(part.keys).tobytes()).decode(),
        }
        place.put_bytes(f"{name}/{PART_FILE}", (json.dumps(content, indent=1) + "\n").encode())
        return part.counts


@contextlib.contextmanager
def _turn(place: Place, name: str) -> Iterator[None]:
    """Hold a part's lock. Raises Failed: another process held it too long."""
    lock = place.lock(name, PATIENCE_SEC)
    try:
        lock.acquire()
    except Timeout as error:
        raise Failed(f"OUT: another process has been making {place.address}/{name} for too long. {GO_ON}.") from error
    try:
        yield
    finally:
        lock.release()


def _read_part(place: Place, plan: Plan, number: int) -> tuple[SampleCounts, dict[str, Any]]:
    """Return a done part's counts and its part.json. Raises Failed: the part is not from this plan."""
    name = part_name(number)
    content = json.loads(place.read(f"{name}/{PART_FILE}"))
    if content["plan"] != plan.digest:
        raise Failed(f"OUT: {place.address}/{name} was made by another command at the same time. Remove OUT.")
    return SampleCounts.from_facts(content["account"]), content


def finish(place: Place, plan: Plan, further: Mapping[str, Any] | None = None) -> SampleCounts:
    """Write the index and the facts of a stage whose parts are all done, if they do not exist yet.

    Args:
        further: facts for dataset.json that the plan does not have.

    Returns:
        The counts over all parts. If no sample was written, there is no stage, only `skipped.jsonl`.
    """
    counts, skipped, shards, keys = SampleCounts(), [], [], []
    for number in range(len(plan.inputs)):
        of_part, content = _read_part(place, plan, number)
        counts.add(of_part)
        skipped += content["skipped"]
        keys.append(content["keys"])
        for entry in content["shards"]:
            raw = {**entry["raw_data"], "basename": f"{part_name(number)}/{entry['raw_data']['basename']}"}
            shards.append({**entry, "raw_data": raw})
    if FACTS_FILE not in place.names():
        place.put_bytes(SKIPPED_FILE, text_of(skipped))
        if counts.written:
            facts = {**plan.facts, **(further or {}), "counts": counts.as_facts(), **_put_keys(place, keys)}
            _put_index(place, plan, json.dumps({"version": 2, "shards": shards}, sort_keys=True), facts)
    place.clear_scratch()
    return counts


def _put_index(place: Place, plan: Plan, index: str, facts: Mapping[str, Any]) -> None:
    """Write index.json and, last, dataset.json."""
    with place.scratch_folder() as folder:
        (folder / "index.json").write_text(index)
        write_facts(folder, plan.stage, {"made_by": plan.made_by, **facts})
        place.put("index.json", folder / "index.json")
        place.put(FACTS_FILE, folder / FACTS_FILE)


def _put_keys(place: Place, keys: Sequence[str]) -> dict[str, str]:
    """Write the digests of all parts' keys; return what dataset.json says of them."""
    with place.scratch_folder() as folder:
        path = folder / KEYS_FILE
        np.sort(np.frombuffer(b"".join(map(base64.b64decode, keys)), NUMBER)).tofile(path)
        digest = file_digest(path)
        place.put(KEYS_FILE, path)
    return {KEYS_DIGEST: digest}


# ---------------------------------------------------------------------------------------------------------------------
# Sets of buckets
# ---------------------------------------------------------------------------------------------------------------------


def bucket_name(size: ImageSize) -> str:
    """Return the name of a bucket, which is its folder's."""
    return f"{size[0]}x{size[1]}"


def plan_of_set(
    made_by: str, stage: str, shard_size: int, sizes: Sequence[ImageSize], facts: Mapping[str, Any]
) -> Plan:
    """Return the plan of a set; each bucket has a plan too."""
    return Plan(made_by, stage, {}, shard_size, {**facts, "sizes": [bucket_name(size) for size in sizes]}, [])


def finish_set(place: Place, plan: Plan, samples: Mapping[ImageSize, int]) -> None:
    """Make the finished buckets one data set, if it is not yet. `samples`: of each size; those without any are left out."""
    if FACTS_FILE in place.names():
        return
    facts = {key: value for key, value in plan.facts.items() if key != "sizes"}
    facts["buckets"] = [bucket_name(size) for size, num in samples.items() if num]
    of_buckets = [place.read(f"{bucket_name(size)}/{SKIPPED_FILE}") for size in samples]
    place.put_bytes(SKIPPED_FILE, b"".join(of_buckets))
    _put_index(place, plan, json.dumps({"version": 2, "shards": []}), {**facts, "samples": sum(samples.values())})
    place.clear_scratch()


# ---------------------------------------------------------------------------------------------------------------------
# Waiting for other ranks and nodes
# ---------------------------------------------------------------------------------------------------------------------


def wait_for_plan(place: Place, plan: Plan, patience_sec: float = PATIENCE_SEC) -> None:
    """Wait, on all other ranks, until rank 0 has written or checked the plan. Raises Failed: it did not."""
    if not _has_plan(place, plan, patience_sec, place.poll_sec):
        raise Failed(f"OUT: {place.address}: rank 0 wrote no {PLAN_FILE} for this command. {GO_ON}.")


def check_shared(place: Place, plan: Plan, patience_sec: float = SHARED_SEC) -> None:
    """Check in a cluster's worker that OUT is the place that the command writes to.

    Raises:
        Refused: it does not hold the plan of the command.
    """
    if not _has_plan(place, plan, patience_sec, 0.2):  # a folder that nodes share may show a new file late
        what = f"OUT: {place.address} does not hold the plan of this command on every node"
        raise Refused(f"{what}. Possible: a folder that all nodes share, at one path, or an address in a store.")


def _has_plan(place: Place, plan: Plan, patience_sec: float, poll_sec: float) -> bool:
    """Wait until a place holds a plan; False: it did not in time."""
    deadline = time.monotonic() + patience_sec
    while PLAN_FILE not in place.names() or place.read(PLAN_FILE) != plan.text:
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_sec)
    return True


def wait_for_parts(place: Place, num_parts: int, patience_sec: float) -> None:
    """Wait until the parts that other ranks make are done.

    Raises:
        Failed: no part was finished for `patience_sec`; names the missing ones.
    """
    known, last_news = num_parts, time.monotonic()
    while missing := _missing(place, num_parts):
        if len(missing) != known:
            known, last_news = len(missing), time.monotonic()
            print(f"waiting for the other ranks' parts: {known} of {num_parts}", flush=True)
        if time.monotonic() - last_news > patience_sec:
            named = ", ".join(map(part_name, sorted(missing)[:5])) + (", ..." if known > 5 else "")
            raise Failed(
                f"OUT: {place.address}: no other rank finished a part for {patience_sec / 60:.0f} minutes; {known} are "
                f"missing: {named}. Start the command again: it resumes from what is done."
            )
        time.sleep(place.poll_sec)
