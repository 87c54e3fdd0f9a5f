"""Make a dataset in steps that can be interrupted and resumed: a plan, parts, and a finish.

    OUT/plan.json                    the inputs and settings; written first, and compared at every later start
    OUT/part-00012/shard.00000.mds   a part is made from one input (a tar, a shard): its shards ...
    OUT/part-00012/part.json         ... and, last, their entries of the index and the counts of samples
    OUT/skipped.jsonl                the finish, once all parts are done: every skipped sample with its reason,
    OUT/keys.u64                     a digest of every sample's key and caption (mds/dataset.py),
    OUT/index.json                   the index of all parts' shards,
    OUT/dataset.json                 and, last, the file that makes it a dataset (mds/dataset.py requires it)

A part's bytes depend only on its input and the plan, not on the process that makes it or on interruptions. A part with a
part.json is done and is never made again.

A part.json has the digests of its samples' keys too, in base64.

A set of buckets is a dataset for each size in OUT/576x448/, with a plan.json, an index.json without shards and a dataset.json
of their sizes and samples in OUT (mds/dataset.py reads it).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from filelock import Timeout
from streaming import MDSWriter

from common.errors import Failed, Refused
from common.files import write_atomic
from common.value_types import ImageSize
from mds.dataset import DIGEST_DTYPE, KEYS_DIGEST, KEYS_FILE, METADATA_FILE, key_digest, sort_digests, write_metadata
from mds.fetch import HASH, file_digest
from prepare.addresses import Address
from prepare.arguments import RESUME_HINT

# --- counts of samples and the time that they took ---

SKIPPED_FILE = "skipped.jsonl"
NO_SAMPLE = "has no sample"
"""The only fault of a source by which nothing is lost."""
COUNTERS = ("skipped", "left_out", "failed", "bad_sources")


@dataclass
class SampleCounts:
    """Outcomes of samples: found = written + skipped + left out + failed. The counters are by reason."""

    read: int = 0
    written: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Unusable."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Not wanted, by the command's filters."""
    failed: Counter[str] = field(default_factory=Counter)
    """Not read, since their source could not be; where the source says how many it has."""
    bad_sources: Counter[str] = field(default_factory=Counter)
    ignored_files: int = 0
    """Files that were not read."""
    ignored_example: str | None = None

    @property
    def found(self) -> int:
        return self.read + self.failed.total()

    @property
    def exit_code(self) -> int:
        """Return the command's: 1 where nothing was written, or a source was not read to its end."""
        return 0 if self.written and not set(self.bad_sources) - {NO_SAMPLE} else 1

    def check(self) -> None:
        """Assert that no sample was lost."""
        lost = self.read - self.written - self.skipped.total() - self.left_out.total()
        assert not lost, f"{lost} of {self.read} samples are unaccounted for"

    def add(self, other: SampleCounts) -> None:
        self.read += other.read
        self.written += other.written
        for name in COUNTERS:
            getattr(self, name).update(getattr(other, name))
        self.ignored_files += other.ignored_files
        self.ignored_example = self.ignored_example or other.ignored_example

    def as_metadata(self) -> dict[str, Any]:
        """Return it as JSON values, with sorted reasons."""
        counters = {name: dict(sorted(getattr(self, name).items())) for name in COUNTERS}
        return {"read": self.read, "written": self.written, **counters, "ignored_files": self.ignored_files}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> SampleCounts:
        """Return the counts that `as_metadata` has written."""
        values: dict[str, Any] = {
            name: Counter(value) if name in COUNTERS else value for name, value in metadata.items()
        }
        return cls(**values)

    def __str__(self) -> str:
        text = f"found {self.found:,} samples, wrote {self.written:,}, skipped {_format_reasons(self.skipped)}"
        text += f", left out {_format_reasons(self.left_out)}" if self.left_out else ""
        text += f", failed {_format_reasons(self.failed)}" if self.failed else ""
        text += f"; sources with a fault: {_format_reasons(self.bad_sources)}" if self.bad_sources else ""
        files = f"; files that were not read: {self.ignored_files:,}, e.g. {self.ignored_example}"
        return text + (files if self.ignored_files else "")

    def format_speed(self, unit: str, seconds: float) -> str:
        """Return how fast these samples were read. `seconds`: from the first of them to the last."""
        rate = self.read / seconds
        rate_text = f"{rate:,.1f}" if rate >= 10 else f"{rate:.3g}"
        return f"; {rate_text} {unit}/s over {seconds:,.1f} s" if self.read else ""


def _format_reasons(counter: Counter[str]) -> str:
    why = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(counter.items()))
    return f"{counter.total():,}" + (f" ({why})" if why else "")


def format_destination(counts: SampleCounts, address: str) -> str:
    """Return the end of a command's last line."""
    where = f"in {address}" if counts.written else "no dataset"
    is_all = counts.written == counts.found and not counts.bad_sources and not counts.ignored_files
    return where if is_all else f"{where}; reasons: {address.rstrip('/')}/{SKIPPED_FILE}"


class SampleLog:
    """Records the outcome of each sample of a source. For each, call `read`, then `skip`, `leave_out` or count it as written.

    lines: of skipped.jsonl, see `to_json_lines`.
    """

    def __init__(self, source: str):
        self.source = source
        self.counts = SampleCounts()
        self.lines: list[dict[str, Any]] = []

    def read(self) -> None:
        self.counts.read += 1

    def skip(self, key: str, reason: str) -> None:
        self.counts.skipped[reason] += 1
        self._add_line(key, reason)

    def leave_out(self, reason: str) -> None:
        """Count a sample that is not wanted. Not listed: a filter leaves out millions, and nothing is wrong with them."""
        self.counts.left_out[reason] += 1

    def record_fault(self, reason: str, lost: int = 0) -> None:
        """Record an error of the source itself. `lost`: samples that were not read for it, as far as is known."""
        self.counts.bad_sources[reason] += 1
        self.counts.failed += Counter({reason: lost})
        self._add_line(None, reason, **({"samples": lost} if lost else {}))

    def ignore_file(self, name: str, reason: str | None) -> None:
        """Record a file that is not read. `reason`: why it belongs to no sample; None: it does."""
        self.counts.ignored_files += 1
        self.counts.ignored_example = self.counts.ignored_example or name
        if reason is not None:
            self._add_line(None, reason, file=name)

    def _add_line(self, key: str | None, reason: str, **more: Any) -> None:
        self.lines.append({"source": self.source, "key": key, "reason": reason, **more})

    def write(self, path: Path) -> None:
        """Write skipped.jsonl, or remove an earlier command's if there is nothing to say."""
        path.unlink(missing_ok=True)
        if self.lines:
            write_atomic(path, to_json_lines(self.lines))


def to_json_lines(lines: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the content of skipped.jsonl: a line for each unusable sample, bad source, and file of no sample."""
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


# --- parts ---

PLAN_FILE = "plan.json"
PLAN_SCHEMA = 1
PART_FILE = "part.json"
PATIENCE_SEC = 1800.0
SHARED_TIMEOUT_SEC = 10.0


def part_name(number: int) -> str:
    """Return the name of a part, which is its folder's."""
    return f"part-{number:05d}"


class Part(SampleLog):
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
    """Inputs and settings of a dataset: everything that the bytes of a part depend on.

    Args:
        made_by: the command.
        kind: images, videos or moments.
        columns: of the MDS shards, name -> encoding.
        shard_size: largest size of a shard, bytes.
        facts: facts about the dataset for dataset.json, besides its counts.
        inputs: one per part, in order: its name, and what identifies it (bytes, digest).
    """

    made_by: str
    kind: str
    columns: dict[str, str]
    shard_size: int
    facts: dict[str, Any]
    inputs: list[dict[str, Any]]

    @cached_property
    def content(self) -> dict[str, Any]:
        """Return the content of plan.json."""
        head = {"schema": PLAN_SCHEMA, "made_by": self.made_by, "stage": self.kind}
        tail = {"shard_size": self.shard_size, "columns": self.columns, "parts": self.inputs}
        return {**head, **self.facts, **tail}

    @cached_property
    def text(self) -> bytes:
        return (json.dumps(self.content, indent=1) + "\n").encode()

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.text).hexdigest()


def begin_dataset(address: Address, plan: Plan) -> None:
    """Write the plan, or check that the existing one is the same.

    Raises:
        Refused: the address has other content (says what differs), or is not readable or writable.
    """
    try:
        names = address.list_files()
        text = address.read(PLAN_FILE) if PLAN_FILE in names else None
        if not names:
            address.put_bytes(PLAN_FILE, plan.text)
    except OSError as error:
        raise Refused(f"OUT: {address.location} cannot be written: {error}. Give another folder or store.") from error
    if text == plan.text or not names:
        return
    if text is None:
        raise Refused(f"OUT: {address.location} exists and is not empty. Give a new folder, or remove it.")
    try:
        differences = _differences(json.loads(text), json.loads(plan.text))
    except (ValueError, AttributeError):
        differences = ["its plan.json is of another kind"]
    state = "finished" if METADATA_FILE in names else "unfinished"
    differences = [text for text in differences if not text.startswith("columns.")] or differences  # these follow
    raise Refused(
        f"OUT: {address.location} holds the {state} work of another command: {'; '.join(differences)}. Give another OUT, or "
        f"remove this one."
    )


def _differences(old: dict[str, Any], new: dict[str, Any], at: str = "") -> list[str]:
    """List the differences between two plans by key; of the parts, only the first."""
    differences = []
    for key in [*new, *(key for key in old if key not in new)]:
        old_value, new_value = old.get(key), new.get(key)
        if old_value == new_value:
            continue
        if isinstance(old_value, dict) and isinstance(new_value, dict):
            differences += _differences(old_value, new_value, f"{at}{key}.")
        elif key != "parts" or not (isinstance(old_value, list) and isinstance(new_value, list)):
            differences.append(f"{at}{key} was {json.dumps(old_value)}, is {json.dumps(new_value)}")
        elif changed := _changed_folders(old_value, new_value):
            differences.append(f"files in {', '.join(changed)} changed since it was started")
        elif len(old_value) != len(new_value):
            differences.append(f"it had {len(old_value)} parts, now {len(new_value)}")
        else:
            number = next(number for number in range(len(new_value)) if old_value[number] != new_value[number])
            differences += _differences(old_value[number], new_value[number], f"{part_name(number)}.")
    return differences


def _changed_folders(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[str]:
    """Return the folders of files that two lists of parts share, but with other files."""
    names = {part["folder"] for part in old if "folder" in part} & {part["folder"] for part in new if "folder" in part}

    def files(parts: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
        return [part for part in parts if part.get("folder") == name]

    return sorted(name for name in names if files(old, name) != files(new, name))


# ---------------------------------------------------------------------------------------------------------------------
# Parts, and the finish
# ---------------------------------------------------------------------------------------------------------------------


def parts_to_make(address: Address, plan: Plan) -> list[int]:
    """Return the numbers of the missing parts, and print how many are done."""
    num = len(plan.inputs)
    todo = sorted(_missing_parts(address, num))
    if len(todo) < num:
        what = "the work continues" if todo else "nothing is left to make"
        print(f"{address.location}: {num - len(todo)} of {num} parts are done already, {what}", flush=True)
    return todo


def _missing_parts(address: Address, num_parts: int) -> set[int]:
    names = address.list_files()
    return {number for number in range(num_parts) if f"{part_name(number)}/{PART_FILE}" not in names}


def make_part(address: Address, plan: Plan, number: int, fill: Callable[[int, Part], None]) -> SampleCounts:
    """Make one part and upload it, with its part.json last.

    Args:
        fill: called with the number and a Part, to which it writes the samples.

    Raises:
        OSError: the address cannot be written.
    """
    name = part_name(number)
    work = address.scratch / name
    # A process that outlived its command (a rank whose launcher was killed) may still write this part: wait for it.
    with _hold_part_lock(address, name):
        if f"{name}/{PART_FILE}" in address.list_files(f"{name}/"):
            return _read_part(address, plan, number)[0]
        shutil.rmtree(work, ignore_errors=True)  # left by a killed writer
        with MDSWriter(out=str(work), columns=plan.columns, hashes=[HASH], size_limit=plan.shard_size) as writer:
            part = Part(plan.inputs[number]["name"], writer)
            fill(number, part)
        part.counts.check()
        for entry in writer.shards:
            basename = entry["raw_data"]["basename"]
            address.put(f"{name}/{basename}", work / basename)
        shutil.rmtree(work)
        content = {
            "plan": plan.digest,
            "made_from": plan.inputs[number],
            "account": {**part.counts.as_metadata(), "ignored_example": part.counts.ignored_example},
            "skipped": part.lines,
            "shards": writer.shards,
            "keys": base64.b64encode(sort_digests(part.keys).tobytes()).decode(),
        }
        address.put_bytes(f"{name}/{PART_FILE}", (json.dumps(content, indent=1) + "\n").encode())
        return part.counts


@contextlib.contextmanager
def _hold_part_lock(address: Address, name: str) -> Iterator[None]:
    """Hold a part's lock. Raises Failed: another process held it too long."""
    lock = address.lock(name, PATIENCE_SEC)
    try:
        lock.acquire()
    except Timeout as error:
        raise Failed(
            f"OUT: another process has been making {address.location}/{name} for too long. {RESUME_HINT}."
        ) from error
    try:
        yield
    finally:
        lock.release()


def _read_part(address: Address, plan: Plan, number: int) -> tuple[SampleCounts, dict[str, Any]]:
    """Return a done part's counts and its part.json. Raises Failed: the part is not from this plan."""
    name = part_name(number)
    content = json.loads(address.read(f"{name}/{PART_FILE}"))
    if content["plan"] != plan.digest:
        raise Failed(f"OUT: {address.location}/{name} was made by another command at the same time. Remove OUT.")
    return SampleCounts.from_metadata(content["account"]), content


def finish_dataset(address: Address, plan: Plan, extra_facts: Mapping[str, Any] | None = None) -> SampleCounts:
    """Write the index and the facts of a dataset whose parts are all done, if they do not exist yet.

    Args:
        extra_facts: facts for dataset.json that the plan does not have.

    Returns:
        The counts over all parts. If no sample was written, there is no dataset, only `skipped.jsonl`.
    """
    counts, skipped, shards, keys = SampleCounts(), [], [], []
    for number in range(len(plan.inputs)):
        of_part, content = _read_part(address, plan, number)
        counts.add(of_part)
        skipped += content["skipped"]
        keys.append(content["keys"])
        for entry in content["shards"]:
            raw = {**entry["raw_data"], "basename": f"{part_name(number)}/{entry['raw_data']['basename']}"}
            shards.append({**entry, "raw_data": raw})
    if METADATA_FILE not in address.list_files():
        address.put_bytes(SKIPPED_FILE, to_json_lines(skipped))
        if counts.written:
            facts = {**plan.facts, **(extra_facts or {}), "counts": counts.as_metadata(), **_put_keys(address, keys)}
            _put_index(address, plan, json.dumps({"version": 2, "shards": shards}, sort_keys=True), facts)
    address.clear_scratch()
    return counts


def _put_index(address: Address, plan: Plan, index: str, facts: Mapping[str, Any]) -> None:
    """Write index.json and, last, dataset.json."""
    with address.scratch_folder() as folder:
        (folder / "index.json").write_text(index)
        write_metadata(folder, plan.kind, {"made_by": plan.made_by, **facts})
        address.put("index.json", folder / "index.json")
        address.put(METADATA_FILE, folder / METADATA_FILE)


def _put_keys(address: Address, keys: Sequence[str]) -> dict[str, str]:
    """Write the digests of all parts' keys; return what dataset.json says of them."""
    with address.scratch_folder() as folder:
        path = folder / KEYS_FILE
        np.sort(np.frombuffer(b"".join(map(base64.b64decode, keys)), DIGEST_DTYPE)).tofile(path)
        digest = file_digest(path)
        address.put(KEYS_FILE, path)
    return {KEYS_DIGEST: digest}


# ---------------------------------------------------------------------------------------------------------------------
# Sets of buckets
# ---------------------------------------------------------------------------------------------------------------------


def bucket_name(size: ImageSize) -> str:
    """Return the name of a bucket, which is its folder's."""
    return f"{size[0]}x{size[1]}"


def build_bucket_set_plan(
    made_by: str, kind: str, shard_size: int, sizes: Sequence[ImageSize], facts: Mapping[str, Any]
) -> Plan:
    """Return the plan of a set; each bucket has a plan too."""
    return Plan(made_by, kind, {}, shard_size, {**facts, "sizes": [bucket_name(size) for size in sizes]}, [])


def finish_bucket_set(address: Address, plan: Plan, samples: Mapping[ImageSize, int]) -> None:
    """Make the finished buckets one dataset, if it is not yet. `samples`: of each size; those without any are left out."""
    if METADATA_FILE in address.list_files():
        return
    facts = {key: value for key, value in plan.facts.items() if key != "sizes"}
    facts["buckets"] = [bucket_name(size) for size, num in samples.items() if num]
    of_buckets = [address.read(f"{bucket_name(size)}/{SKIPPED_FILE}") for size in samples]
    address.put_bytes(SKIPPED_FILE, b"".join(of_buckets))
    _put_index(address, plan, json.dumps({"version": 2, "shards": []}), {**facts, "samples": sum(samples.values())})
    address.clear_scratch()


# ---------------------------------------------------------------------------------------------------------------------
# Waiting for other ranks and nodes
# ---------------------------------------------------------------------------------------------------------------------


def wait_for_plan(address: Address, plan: Plan, patience_sec: float = PATIENCE_SEC) -> None:
    """Wait, on all other ranks, until rank 0 has written or checked the plan. Raises Failed: it did not."""
    if not _has_plan(address, plan, patience_sec, address.poll_sec):
        raise Failed(f"OUT: {address.location}: rank 0 wrote no {PLAN_FILE} for this command. {RESUME_HINT}.")


def check_out_is_shared(address: Address, plan: Plan, patience_sec: float = SHARED_TIMEOUT_SEC) -> None:
    """Check in a cluster's worker that OUT is the address that the command writes to.

    Raises:
        Refused: it does not hold the plan of the command.
    """
    if not _has_plan(address, plan, patience_sec, 0.2):  # a folder that nodes share may show a new file late
        what = f"OUT: {address.location} does not hold the plan of this command on every node"
        raise Refused(f"{what}. Possible: a folder that all nodes share, at one path, or an address in a store.")


def _has_plan(address: Address, plan: Plan, patience_sec: float, poll_sec: float) -> bool:
    """Wait until an address holds a plan; False: it did not in time."""
    deadline = time.monotonic() + patience_sec
    while PLAN_FILE not in address.list_files() or address.read(PLAN_FILE) != plan.text:
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_sec)
    return True


def wait_for_parts(address: Address, num_parts: int, patience_sec: float) -> None:
    """Wait until the parts that other ranks make are done.

    Raises:
        Failed: no part was finished for `patience_sec`; names the missing ones.
    """
    num_left, last_news = num_parts, time.monotonic()
    while missing := _missing_parts(address, num_parts):
        if len(missing) != num_left:
            num_left, last_news = len(missing), time.monotonic()
            print(f"waiting for the other ranks' parts: {num_left} of {num_parts}", flush=True)
        if time.monotonic() - last_news > patience_sec:
            named = ", ".join(map(part_name, sorted(missing)[:5])) + (", ..." if num_left > 5 else "")
            raise Failed(
                f"OUT: {address.location}: no other rank finished a part for {patience_sec / 60:.0f} minutes; {num_left} are "
                f"missing: {named}. Start the command again: it resumes from what is done."
            )
        time.sleep(address.poll_sec)
