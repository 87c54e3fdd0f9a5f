"""Counts of samples and the time that they took: in a part, in a stage, and in the last line that a command prints."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

SKIPPED_FILE = "skipped.jsonl"


@dataclass
class SampleCounts:
    """Counts of read, written and skipped samples and of bad inputs; the counters are by reason."""

    read: int = 0
    written: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    bad_sources: Counter[str] = field(default_factory=Counter)
    ignored_files: int = 0
    """Files that belong to no sample."""
    ignored_example: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """What the samples that were made here took, by kind of work. In no file, since no two starts take the same time."""

    def add(self, other: SampleCounts) -> None:
        self.read += other.read
        self.written += other.written
        self.skipped.update(other.skipped)
        self.bad_sources.update(other.bad_sources)
        self.ignored_files += other.ignored_files
        self.ignored_example = self.ignored_example or other.ignored_example
        for kind, seconds in other.seconds.items():
            self.clock(kind, seconds)

    def clock(self, kind: str, seconds: float) -> None:
        """Add to the time of a kind of work."""
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def as_facts(self) -> dict[str, Any]:
        """Return it as JSON values, with sorted reasons."""
        return {
            "read": self.read,
            "written": self.written,
            "skipped": dict(sorted(self.skipped.items())),
            "bad_sources": dict(sorted(self.bad_sources.items())),
            "ignored_files": self.ignored_files,
        }

    def __str__(self) -> str:
        why = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.skipped.items()))
        sources = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.bad_sources.items()))
        return (
            f"read {self.read:,} samples, wrote {self.written:,}, skipped {self.skipped.total():,}"
            + (f" ({why})" if why else "")
            + (f"; sources with a fault: {self.bad_sources.total()} ({sources})" if sources else "")
            + (
                f"; files of no sample: {self.ignored_files:,}, e.g. {self.ignored_example}"
                if self.ignored_files
                else ""
            )
        )

    def pace(self, unit: str, seconds: float) -> str:
        """Say how fast these samples were read, and which part of the workers' time each kind of work took.

        Args:
            seconds: from the first of them to the last.
        """
        if not self.read:
            return ""
        shares = sorted(self.seconds.items(), key=lambda item: (item[0] == "rest", -item[1]))
        whole = sum(self.seconds.values())
        what = ", ".join(f"{kind} {part / whole:.1%}" for kind, part in shares) if whole else ""
        rate = self.read / seconds
        shown = f"{rate:,.1f}" if rate >= 10 else f"{rate:.3g}"
        return f"; {shown} {unit}/s over {seconds:,.1f} s" + (f" ({what})" if what else "")


def where_to_look(counts: SampleCounts, address: str) -> str:
    """Return the end of a command's last line."""
    return f"in {address}" if counts.written else f"no stage; why is in {address.rstrip('/')}/{SKIPPED_FILE}"
