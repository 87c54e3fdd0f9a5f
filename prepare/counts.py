"""Counts of samples and the time that they took: in a part, in a stage, and in the last line that a command prints."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.files import write_whole

SKIPPED_FILE = "skipped.jsonl"
EMPTY = "has no sample"
"""The only fault of a source by which nothing is lost."""
COUNTERS = ("skipped", "left_out", "failed", "bad_sources")


@dataclass
class SampleCounts:
    """What has become of samples: found = written + skipped + left out + failed. The counters are by reason."""

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
        return 0 if self.written and not set(self.bad_sources) - {EMPTY} else 1

    def check(self) -> None:
        """Assert that no sample has got lost."""
        lost = self.read - self.written - self.skipped.total() - self.left_out.total()
        assert not lost, f"{lost} of {self.read} samples are unaccounted for"

    def add(self, other: SampleCounts) -> None:
        self.read += other.read
        self.written += other.written
        for name in COUNTERS:
            getattr(self, name).update(getattr(other, name))
        self.ignored_files += other.ignored_files
        self.ignored_example = self.ignored_example or other.ignored_example

    def as_facts(self) -> dict[str, Any]:
        """Return it as JSON values, with sorted reasons."""
        counters = {name: dict(sorted(getattr(self, name).items())) for name in COUNTERS}
        return {"read": self.read, "written": self.written, **counters, "ignored_files": self.ignored_files}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> SampleCounts:
        """Return what `as_facts` has made JSON of."""
        values: dict[str, Any] = {name: Counter(value) if name in COUNTERS else value for name, value in facts.items()}
        return cls(**values)

    def __str__(self) -> str:
        text = f"found {self.found:,} samples, wrote {self.written:,}, skipped {_with_reasons(self.skipped)}"
        text += f", left out {_with_reasons(self.left_out)}" if self.left_out else ""
        text += f", failed {_with_reasons(self.failed)}" if self.failed else ""
        text += f"; sources with a fault: {_with_reasons(self.bad_sources)}" if self.bad_sources else ""
        files = f"; files that were not read: {self.ignored_files:,}, e.g. {self.ignored_example}"
        return text + (files if self.ignored_files else "")

    def pace(self, unit: str, seconds: float) -> str:
        """Return how fast these samples were read. `seconds`: from the first of them to the last."""
        rate = self.read / seconds
        shown = f"{rate:,.1f}" if rate >= 10 else f"{rate:.3g}"
        return f"; {shown} {unit}/s over {seconds:,.1f} s" if self.read else ""


def _with_reasons(counter: Counter[str]) -> str:
    why = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(counter.items()))
    return f"{counter.total():,}" + (f" ({why})" if why else "")


def where_to_look(counts: SampleCounts, address: str) -> str:
    """Return the end of a command's last line."""
    where = f"in {address}" if counts.written else "no stage"
    is_all = counts.written == counts.found and not counts.bad_sources and not counts.ignored_files
    return where if is_all else f"{where}; reasons: {address.rstrip('/')}/{SKIPPED_FILE}"


class Ledger:
    """Records what becomes of a source's samples. For each, call `read`, then `skip`, `leave_out` or count it as written.

    lines: of skipped.jsonl, see `text_of`.
    """

    def __init__(self, source: str):
        self.source = source
        self.counts = SampleCounts()
        self.lines: list[dict[str, Any]] = []

    def read(self) -> None:
        self.counts.read += 1

    def skip(self, key: str, reason: str) -> None:
        self.counts.skipped[reason] += 1
        self._note(key, reason)

    def leave_out(self, reason: str) -> None:
        """Count a sample that is not wanted. Not listed: a filter leaves out millions, and nothing is wrong with them."""
        self.counts.left_out[reason] += 1

    def fault(self, reason: str, lost: int = 0) -> None:
        """Record an error of the source itself. `lost`: samples that were not read for it, as far as is known."""
        self.counts.bad_sources[reason] += 1
        self.counts.failed += Counter({reason: lost})
        self._note(None, reason, **({"samples": lost} if lost else {}))

    def ignore(self, name: str, reason: str | None) -> None:
        """Record a file that is not read. `reason`: why it belongs to no sample; None: it does."""
        self.counts.ignored_files += 1
        self.counts.ignored_example = self.counts.ignored_example or name
        if reason is not None:
            self._note(None, reason, file=name)

    def _note(self, key: str | None, reason: str, **more: Any) -> None:
        self.lines.append({"source": self.source, "key": key, "reason": reason, **more})

    def write(self, path: Path) -> None:
        """Write skipped.jsonl, or remove an earlier command's if there is nothing to say."""
        path.unlink(missing_ok=True)
        if self.lines:
            write_whole(path, text_of(self.lines))


def text_of(lines: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the content of skipped.jsonl: a line for each unusable sample, bad source, and file of no sample."""
    return "".join(json.dumps(line) + "\n" for line in lines).encode()
