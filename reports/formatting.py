"""Numbers, times, texts and tables as reports show them, and what the commands share that show a record."""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import io
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from markupsafe import Markup

from common.command_line import Problem, parse_command_line
from common.errors import Refused
from common.files import read_json, read_regular, write_atomic
from common.log import render_table
from common.masking import to_printable
from config import load, to_yaml

MOST_CHARACTERS = 400  # of a text that the page shows; how long it is follows
NONE = "\u2013"
TIMES = "\u00d7"


def figure(value: Any, digits: int = 4) -> str:
    """Return a number with so many digits, at least all before its point: 172.963 -> 173.0; 51200 -> 51,200."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return NONE
    except OverflowError:  # JSON has integers of any length
        return NONE
    if isinstance(value, int) or value == 0.0 or (value == int(value) and 1000 <= abs(value) < 1e15):
        return f"{int(value):,}"
    if not 1e-3 <= abs(value) < 1e15:
        return f"{value:.{digits - 1}e}".replace("e-0", "e-").replace("e+0", "e+").replace("e+", "e")
    before = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    after = digits - before if before else digits - 1 - math.floor(math.log10(abs(value))) - 1 if value else 0
    return f"{value:,.{max(0, after)}f}"


def share(value: float | None) -> str:
    """Return a fraction in percent: 0.0112 -> 1.1 %."""
    return NONE if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def span(seconds: float | None) -> str:
    """Return a time in its two largest units: 285.4 -> 4 min 45 s."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 60:
        return f"{seconds:.1f} s"
    total = round(seconds)
    days, hours, minutes, rest = total // 86400, total // 3600 % 24, total // 60 % 60, total % 60
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next(index for index, (value, _) in enumerate(parts) if value)
    return " ".join(f"{value} {unit}" for value, unit in parts[first : first + 2] if value)


def moment(unix_sec: Any) -> str:
    """Return a moment in universal time, to the minute."""
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_sec))
    except (TypeError, ValueError, OverflowError, OSError):
        return NONE


def plain(value: Any, most: int = MOST_CHARACTERS) -> str:
    """Return any value of a record on one line, without control characters, and not the whole of a very long one."""
    if value is None:
        return NONE
    text = (
        value
        if isinstance(value, str)
        else f"{value:g}"
        if isinstance(value, float)
        else json.dumps(value, default=str)
    )
    text = to_printable(text)
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


@functools.cache
def template(name: str, most: int = MOST_CHARACTERS) -> Any:
    """Return one of this folder's templates; every text that it is given goes through `plain` and is escaped."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else plain(value, most),
    ).get_template(name)


def script_of(name: str) -> tuple[Markup, str]:
    """Return one of this folder's scripts, and its digest as a page's policy names it."""
    text = (Path(__file__).parent / name).read_text()
    return Markup(text), base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# --- tables of records ---

Record = Mapping[str, Any]
Row = tuple[str | None, ...]
Keys = TypeVar("Keys")


class RecordTable(NamedTuple):
    """A record's table: what stands above it, its head and sides (l or r), its rows."""

    title: str
    head: tuple[str, ...]
    align: str
    rows: list[Row]


def about(record: Record) -> str:
    """Say what a record was made on."""
    commit = re.sub(r"^([0-9a-f]{12})[0-9a-f]*", r"\1", str(record["commit"]))
    return f"{record['device']}, torch {record['torch_version']}, commit {commit}."


def format_range(record: Record, key: str, digits: str) -> str:
    """Return a figure's median, with the least and the greatest value."""
    middle, least, most = (format(record[f"{key}{end}"], digits) for end in ("", "_min", "_max"))
    return f"{middle} ({least} to {most})"


def in_text(table: RecordTable) -> str:
    """Format a table for the terminal."""
    return f"{table.title}\n{render_table(table.head, table.rows, table.align)}"


def in_markdown(table: RecordTable) -> str:
    """Format a table for a page, with an empty line at its end."""
    sides = tuple("---:" if side == "r" else "---" for side in table.align)
    rows = (
        "| " + " | ".join("-" if cell is None else cell for cell in row) + " |"
        for row in (table.head, sides, *table.rows)
    )
    return "\n".join([table.title, "", *rows, ""])


def in_csv(table: RecordTable) -> str:
    """Format a table as a CSV file; an empty cell has no value."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.head, *table.rows])
    return text.getvalue()


def read_words(
    argv: Sequence[str], schema: type[Keys], check: Callable[[Sequence[str]], Sequence[str]]
) -> tuple[list[str], Keys]:
    """Return the words and the keys of a command line. `check`: returns the problems of the words. Raises ConfigError."""
    line = parse_command_line(argv, {}, takes_arguments=True)
    words = [word for word in line.arguments if word]
    keys = load(schema, line, check=lambda keys: [Problem(text) for text in check(words)])
    if line.print_config:
        print(to_yaml(keys), end="")
        raise SystemExit(0)
    return words, keys


def rewrite(pages: Sequence[str], record_path: str, table: str) -> None:
    """Put the table of a record into pages, and name those that it changes.

    Args:
        record_path: as the pages' marks have it.
        table: Markdown.

    Raises:
        Refused: a page cannot be read or written, or has no marks for the table.
    """
    block = re.compile(rf"(<!-- table of {re.escape(record_path)} -->\n).*?(<!-- end of table -->)", re.S)
    try:
        for page in map(Path, pages):
            after, num = block.subn(lambda match: match[1] + table + match[2], before := read_regular(page).decode())
            if not num:
                marks = f"<!-- table of {record_path} --> and <!-- end of table -->"
                raise Refused(f"the page has no place for the table of {record_path}. Add {marks}.")
            if after != before:
                write_atomic(page, after)
                print(f"written: {page}")
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}. Check the path.") from error


def show_record(
    argv: Sequence[str],
    writer: str,
    text_of: Callable[[Record], str],
    markdown_of: Callable[[Record], str],
    draw: Callable[[Record, Path], object] | None = None,
    csv_table_of: Callable[[Record], RecordTable] | None = None,
    possible: str = "RECORD.json, PAGE.md",
) -> int:
    """Run a command that shows a record: RECORD.json [OUT] [OUT.csv] [PAGE.md].

    Args:
        writer: the command that writes such records.
        text_of, markdown_of: format a record; KeyError, TypeError, AttributeError or ValueError: it is none of `writer`.
        draw: writes its plots to OUT; ValueError: it has nothing to draw.
        csv_table_of: returns the table that OUT.csv holds.
        possible: the words that the command has.

    Raises:
        Refused: the words, a file or the record are wrong.
    """
    record_paths = [word for word in argv if word.endswith(".json")]
    pages = [word for word in argv if word.endswith(".md")]
    csv_paths = [word for word in argv if word.endswith(".csv")] if csv_table_of else []
    outs = [word for word in argv if word not in (*record_paths, *pages, *csv_paths)]
    if len(record_paths) != 1 or (outs and draw is None):
        raise Refused(f"command line: {' '.join(argv)}. Possible: {possible}. Give one record.")
    [record_path] = record_paths
    try:
        record = read_json(Path(record_path))
        text, table = text_of(record), markdown_of(record)
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}. Check the path.") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Refused(f"{record_path}: is no record of {writer} ({type(error).__name__}: {error}).") from error
    rewrite(pages, record_path, table)
    try:
        for path in csv_paths:
            assert csv_table_of is not None
            write_atomic(Path(path), in_csv(csv_table_of(record)))
            print(f"written: {path}")
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
