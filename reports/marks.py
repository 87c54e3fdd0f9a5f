"""Commands that show a record: as text, as a table between a page's marks, as a picture.

<!-- table of reports/results/step.json -->
<!-- end of table -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cli.command_line import Problem, parse_command_line
from cli.errors import Refused
from cli.files import read_json, read_regular, write_whole
from cli.table import as_table
from config import load, to_yaml

Record = Mapping[str, Any]
Row = tuple[str | None, ...]
Keys = TypeVar("Keys")


class Table(NamedTuple):
    """A record's table: what stands above it, its head and sides (l or r), its rows."""

    title: str
    head: tuple[str, ...]
    align: str
    rows: list[Row]


def spread(record: Record, key: str, digits: str) -> str:
    """Return a figure's median, with the least and the greatest value."""
    middle, least, most = (format(record[f"{key}{end}"], digits) for end in ("", "_min", "_max"))
    return f"{middle} ({least} to {most})"


def in_text(table: Table) -> str:
    """Format a table for the terminal."""
    return f"{table.title}\n{as_table(table.head, table.rows, table.align)}"


def in_markdown(table: Table) -> str:
    """Format a table for a page, with an empty line at its end."""
    sides = tuple("---:" if side == "r" else "---" for side in table.align)
    rows = (
        "| " + " | ".join("-" if cell is None else cell for cell in row) + " |"
        for row in (table.head, sides, *table.rows)
    )
    return "\n".join([table.title, "", *rows, ""])


def read_words(
    argv: Sequence[str], schema: type[Keys], check: Callable[[Sequence[str]], Sequence[str]]
) -> tuple[list[str], Keys]:
    """Return the places and the keys of a command line. `check`: says what is wrong with places. Raises ConfigError."""
    line = parse_command_line(argv, {}, takes_places=True)
    places = [word for word in line.places if word]
    keys = load(schema, line, check=lambda keys: [Problem(text) for text in check(places)])
    if line.print_config:
        print(to_yaml(keys), end="")
        raise SystemExit(0)
    return places, keys


def rewrite(pages: Sequence[str], place: str, table: str) -> None:
    """Put the table of a record into pages, and name those that it changes.

    Args:
        place: of the record, as the pages' marks have it.
        table: Markdown.

    Raises:
        Refused: a page cannot be read or written, or has no marks for the table.
    """
    block = re.compile(rf"(<!-- table of {re.escape(place)} -->\n).*?(<!-- end of table -->)", re.S)
    try:
        for page in map(Path, pages):
            after, num = block.subn(lambda found: found[1] + table + found[2], before := read_regular(page).decode())
            if not num:
                marks = f"<!-- table of {place} --> and <!-- end of table -->"
                raise Refused(f"the page has no place for the table of {place}. Add {marks}.")
            if after != before:
                write_whole(page, after)
                print(f"written: {page}")
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}. Check the path.") from error


def show_record(
    argv: Sequence[str],
    what: str,
    text_of: Callable[[Record], str],
    markdown_of: Callable[[Record], str],
    draw: Callable[[Record, Path], object] | None = None,
    possible: str = "RECORD.json, PAGE.md",
) -> int:
    """Run a command that shows a record: RECORD.json [OUT] [PAGE.md].

    Args:
        what: which command writes such records.
        text_of, markdown_of: format a record; KeyError, TypeError, AttributeError or ValueError: it is none of `what`.
        draw: writes its pictures to OUT; ValueError: it has nothing to draw.
        possible: the words that the command has.

    Raises:
        Refused: the words, a file or the record are wrong.
    """
    places = [word for word in argv if word.endswith(".json")]
    pages = [word for word in argv if word.endswith(".md")]
    outs = [word for word in argv if word not in (*places, *pages)]
    if len(places) != 1 or (outs and draw is None):
        raise Refused(f"command line: {' '.join(argv)}. Possible: {possible}. Give one record.")
    [place] = places
    try:
        record = read_json(Path(place))
        text, table = text_of(record), markdown_of(record)
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}. Check the path.") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Refused(f"{place}: is no record of {what} ({type(error).__name__}: {error}).") from error
    rewrite(pages, place, table)
    try:
        for out in outs:
            assert draw is not None
            draw(record, Path(out))
            print(f"written: {out}")
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}. Check the path.") from error
    except ValueError as error:
        raise Refused(str(error)) from error
    if len(argv) == 1:
        print(text)
    return 0
