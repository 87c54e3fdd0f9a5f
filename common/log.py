"""What a program logs on stderr, apart from its result: the standard `logging`, a line a message, rank 0's alone.

    log.info("data: 12 s: waiting for a batch")
    log.info(text, extra=EVERY_RANK)                  # what one rank alone knows

Before any process group there is a rank too: the launcher's variable says it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import tabulate

EVERY_RANK = {"every_rank": True}


class Stderr(logging.StreamHandler):
    """Writes to what sys.stderr is at that time: W&B, the masking of secrets and pytest put their own streams there."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        self.stream = sys.stderr
        super().emit(record)


def should_log(record: logging.LogRecord) -> bool:
    """True where this rank is to say it."""
    return getattr(record, "every_rank", False) or os.environ.get("RANK", "0") == "0"


log = logging.getLogger("easel")
log.setLevel(logging.INFO)
log.propagate = False  # the libraries' own handlers would say it again
log.handlers = [Stderr()]
log.filters = [should_log]

# Six lines at every start where it does not load, by an import of diffusers; attention=xformers is refused with the reason.
logging.getLogger("xformers").setLevel(logging.ERROR)


# --- text for the terminal ---


def progress_interval_sec() -> float:
    """Return the time between two updates of a progress bar: many in a terminal, few in a log file."""
    return 0.1 if sys.stderr.isatty() else 30.0


def three_digits(value: float) -> str:
    """Return a number with three digits, thousands separated."""
    return f"{value:,.0f}" if value >= 1000.0 else f"{value:.3g}"


def readable_time(seconds: float) -> str:
    """Return seconds in a readable unit, with three digits."""
    if seconds < 120.0:
        return f"{three_digits(seconds)} seconds"
    if seconds < 2 * 3600.0:
        return f"{three_digits(seconds / 60.0)} minutes"
    if seconds < 72 * 3600.0:
        return f"{three_digits(seconds / 3600.0)} hours"
    return f"{three_digits(seconds / 86400.0)} days" if seconds < 36525 * 86400.0 else "more than a century"


SIDES = {"l": "left", "r": "right"}


def render_table(head: Sequence[str], rows: Iterable[Sequence[Any]], align: str) -> str:
    """Return rows as text, cells as they are given, None as `-`.

    Args:
        align: a letter a column: l or r.
    """
    cells = [["-" if cell is None else str(cell) for cell in row] for row in (head, *rows)]
    sides = [SIDES[letter] for letter in align]
    text = tabulate(cells, tablefmt="plain", colalign=sides, disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines())
