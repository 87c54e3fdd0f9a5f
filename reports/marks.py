"""Tables between a page's marks, made anew from a record.

<!-- table of reports/results/step.json -->
<!-- end of table -->
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cli.files import read_regular, write_whole


def rewrite(pages: Sequence[str], place: str, table: str) -> None:
    """Put the table of a record into pages, and name those that it changes.

    Args:
        place: of the record, as the pages' marks have it.
        table: Markdown.

    Raises:
        OSError: a page cannot be read or written. ValueError: it has no marks for the table.
    """
    for page in map(Path, pages):
        if (after := written_into(before := read_regular(page).decode(), place, table)) != before:
            write_whole(page, after)
            print(f"written: {page}")


def written_into(page: str, place: str, table: str) -> str:
    """Return a page with one record's table. Raises ValueError: it has no marks for it."""
    block = re.compile(rf"(<!-- table of {re.escape(place)} -->\n).*?(<!-- end of table -->)", re.S)
    if not block.search(page):
        marks = f"<!-- table of {place} --> and <!-- end of table -->"
        raise ValueError(f"the page has no place for the table of {place}. Add {marks}.")
    return block.sub(lambda found: found[1] + table + found[2], page)
