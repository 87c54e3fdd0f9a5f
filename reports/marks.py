"""Commands that show a record: as text, as a table between a page's marks, as a picture.

<!-- table of reports/results/step.json -->
<!-- end of table -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cli.errors import Refused
from cli.files import read_json, read_regular, write_whole


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


def show_record(
    argv: Sequence[str],
    what: str,
    text_of: Callable[[Mapping[str, Any]], str],
    markdown_of: Callable[[Mapping[str, Any]], str],
    draw: Callable[[Mapping[str, Any], Path], None] | None = None,
) -> int:
    """Run a command that shows a record: RECORD.json [OUT.png] [PAGE.md].

    Args:
        what: which command writes such records.
        text_of, markdown_of: format a record; KeyError, TypeError, AttributeError or ValueError: it is none of `what`.
        draw: writes its picture; ValueError: it has nothing to draw.

    Raises:
        Refused: the words, a file or the record are wrong.
    """
    suffixes = (".json", ".png", ".md") if draw else (".json", ".md")
    kinds = {suffix: [word for word in argv if word.endswith(suffix)] for suffix in suffixes}
    if len(kinds[".json"]) != 1 or sum(map(len, kinds.values())) != len(argv):
        possible = "RECORD.json, OUT.png, PAGE.md" if draw else "RECORD.json, PAGE.md"
        raise Refused(f"command line: {' '.join(argv)}. Possible: {possible}. Give one record.")
    [place] = kinds[".json"]
    try:
        record = read_json(Path(place))
        text, table = text_of(record), markdown_of(record)
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}. Check the path.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{place}: is no record of {what} ({type(error).__name__}: {error}).") from error
    try:
        rewrite(kinds[".md"], place, table)
        for path in kinds.get(".png", []):
            assert draw is not None
            draw(record, Path(path))
            print(f"written: {path}")
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}. Check the path.") from error
    except ValueError as error:
        raise Refused(str(error)) from error
    if len(argv) == 1:
        print(text)
    return 0
