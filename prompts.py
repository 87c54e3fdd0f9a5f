"""The prompts of an evaluation: the MLPerf reference's val2014_30k.tsv, or any file like it.

Tab-separated, UTF-8, with a header; the columns `image_id`, `id` and `caption` may stand in any order, others are left out.
Quotes as pandas writes them: a caption with a quotation mark in it stands in quotation marks, its own doubled.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COLUMNS = ("image_id", "id", "caption")
EXAMPLE = f"Its first line has to be {' TAB '.join(COLUMNS)}, as in the MLPerf reference's val2014_30k.tsv"


@dataclass(frozen=True)
class Prompt:
    """A caption to generate an image for; `number` names it, and its noise, for ever."""

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
        """True where not all prompts of the file are used: a smoke run, whose score is none."""
        return len(self.prompts) < self.num_in_file


def read_prompts(path: str, num_prompts: int | None = None) -> PromptSet:
    """Read a file of prompts.

    Args:
        num_prompts: use the first so many; None: all.

    Raises:
        ValueError: it cannot be read, lacks a column, or has a line that is no prompt; says which, and what to do.
    """
    try:
        content = Path(path).expanduser().read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}. Give a tab-separated file of prompts.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start:,}). {EXAMPLE}.") from error
    rows = csv.reader(io.StringIO(text, newline=""), delimiter="\t", strict=True)
    try:
        header = next(rows, [])
        missing = [name for name in COLUMNS if name not in header]
        if missing:
            found = ", ".join(f"'{name[:30]}'" for name in header[:5]) or "nothing"
            raise ValueError(f"{path}: no column {', '.join(missing)} in its first line, which has {found}. {EXAMPLE}.")
        prompts = [_prompt(path, rows.line_num, header, row) for row in rows if row]
    except csv.Error as error:
        raise ValueError(f"{path}: line {rows.line_num:,} cannot be read: {error}. {EXAMPLE}.") from error
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


def _prompt(path: str, line: int, header: Sequence[str], row: Sequence[str]) -> Prompt:
    if len(row) != len(header):
        raise ValueError(f"{path}: line {line:,} has {len(row)} columns, its header {len(header)}. Mend that line.")
    cells = dict(zip(header, row, strict=True))
    numbers = {}
    for name in ("id", "image_id"):
        try:
            numbers[name] = int(cells[name])
        except ValueError:
            raise ValueError(f"{path}: line {line:,} has {name} '{cells[name]}', no whole number. Mend it.") from None
    caption = cells["caption"].strip()
    if not caption:
        raise ValueError(f"{path}: line {line:,} (id {numbers['id']}) has an empty caption. Remove that line.")
    return Prompt(numbers["id"], numbers["image_id"], caption)
