"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import tabulate

SIDES = {"l": "left", "r": "right"}


def as_table(head: Sequence[str], rows: Iterable[Sequence[Any]], align: str) -> str:
    """Return rows as text, cells as they are given, None as `-`.

    Args:
        align: a letter a column: l or r.
    """
    cells = [["-" if cell is None else str(cell) for cell in row] for row in (head, *rows)]
    sides = [SIDES[letter] for letter in align]
    text = tabulate(cells, tablefmt="plain", colalign=sides, disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines())
