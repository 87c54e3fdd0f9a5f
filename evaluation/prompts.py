"""The prompts of an evaluation: the MLPerf reference's val2014_30k.tsv, or any file like it.

Tab-separated, UTF-8, with a header. The columns `image_id`, `id` and `caption` may have any order; others are ignored.
Quoting as in pandas: a caption that contains a quotation mark is put in quotation marks, and its own are doubled.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cli.files import read_regular
from cli.limits import MAX_CAPTION
from cli.masking import printable

COLUMNS = ("image_id", "id", "caption")
QUOTES = 'Its quotation marks do not close, or are not doubled: quote a caption that has some, as in """a"" cat"'
EXAMPLE = f"Its first line has to be {' TAB '.join(COLUMNS)}, as in the MLPerf reference's val2014_30k.tsv"


@dataclass(frozen=True)
class Prompt:
    """A caption to generate an image for; its noise depends on `number`."""

    number: int
    """The column `id`."""
    image_id: int
    caption: str


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one evaluation, in the order of their file."""

    prompts: Sequence[Prompt]
    num_in_file: int
    sha256: str
    """Of the file."""

    @property
    def partial(self) -> bool:
        """True if not all prompts of the file are used: a smoke run, whose score counts for no target."""
        return len(self.prompts) < self.num_in_file


def read_prompts(path: str, num_prompts: int | None = None) -> PromptSet:
    """Read a file of prompts.

    Args:
        num_prompts: use only the first ones; None: all.

    Raises:
        ValueError: the file is unreadable, lacks a column, has one twice, or has an invalid line. The message says which,
            and what to do.
    """
    try:
        content = read_regular(Path(path).expanduser())
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}. Give a tab-separated file of prompts.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start:,}). {EXAMPLE}.") from error
    rows = csv.reader(io.StringIO(text, newline=""), delimiter="\t", strict=True)
    prompts, begin = [], 1  # where a row begins: after an open quotation mark it spans many lines
    try:
        header = next(rows, [])
        _check_header(path, header)
        begin = rows.line_num + 1
        for row in rows:
            prompts += [_prompt(path, rows.line_num, header, row)] if row else []
            begin = rows.line_num + 1
    except csv.Error as error:
        said = str(error).replace("\t", "TAB")
        raise ValueError(
            f"{path}: line {begin:,} cannot be read: {said}. {EXAMPLE if begin == 1 else QUOTES}."
        ) from error
    if not prompts:
        raise ValueError(f"{path} has a header and no prompt. Give a file with at least one.")
    first_line: dict[int, int] = {}
    for place, prompt in enumerate(prompts):
        if prompt.number in first_line:
            twice = f"prompts {first_line[prompt.number] + 1:,} and {place + 1:,} both have the id {prompt.number}"
            raise ValueError(f"{path}: {twice}. An id names one prompt and its noise: give each its own.")
        first_line[prompt.number] = place
    if num_prompts is not None and not 1 <= num_prompts <= len(prompts):
        raise ValueError(f"eval.num_prompts: {num_prompts:,}, but {path} has {len(prompts):,}. Possible: 1 to that.")
    return PromptSet(prompts[:num_prompts], len(prompts), hashlib.sha256(content).hexdigest())


def _check_header(path: str, header: Sequence[str]) -> None:
    if missing := [name for name in COLUMNS if name not in header]:
        found = ", ".join(f"'{printable(name[:30])}'" for name in header[:5]) or "nothing"
        raise ValueError(f"{path}: no column {', '.join(missing)} in its first line, which has {found}. {EXAMPLE}.")
    if twice := [name for name in COLUMNS if header.count(name) > 1]:
        raise ValueError(f"{path}: more than one column {', '.join(twice)} in its first line. Keep one of each.")


def _prompt(path: str, line: int, header: Sequence[str], row: Sequence[str]) -> Prompt:
    if len(row) != len(header):
        raise ValueError(f"{path}: line {line:,} has {len(row)} columns, its header {len(header)}. Fix that line.")
    cells = dict(zip(header, row, strict=True))
    numbers = {}
    for name in ("id", "image_id"):
        if not re.fullmatch("-?[0-9]{1,4000}", cells[name]):  # int() takes 1_0 and other scripts' digits, too
            raise ValueError(
                f"{path}: line {line:,} has {name} '{printable(cells[name][:40])}', not a whole number. Fix it."
            )
        numbers[name] = int(cells[name])
    caption = cells["caption"].strip()
    if not caption:
        raise ValueError(f"{path}: line {line:,} (id {numbers['id']}) has an empty caption. Remove that line.")
    if "\0" in caption:
        given = f"{path}: line {line:,} (id {numbers['id']}) has a NUL character in its caption"
        raise ValueError(f"{given}. Take it out: no text encoder knows it.")
    if len(caption) > MAX_CAPTION:
        given = f"{path}: line {line:,} (id {numbers['id']}) has a caption of {len(caption):,} characters"
        raise ValueError(
            f"{given}. Possible: {MAX_CAPTION:,} at most. Shorten it: a text encoder reads the first 77 tokens."
        )
    return Prompt(numbers["id"], numbers["image_id"], caption)
