"""Prompts: of an evaluation, the MLPerf reference's val2014_30k.tsv, or any file like it.

Tab-separated, UTF-8, with a header. The columns `image_id`, `id` and `caption` may have any order; others are ignored.
Quoting as in pandas: a caption that contains a quotation mark is put in quotation marks, and its own are doubled.

Sample grids and images of given captions also take a caption in each line, or a list of captions.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from common.files import read_regular
from common.masking import to_printable
from common.value_types import MAX_CAPTION, file_problem, truncate

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
    content = read_file(path, EXAMPLE)
    rows = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), delimiter="\t", strict=True)
    prompts, begin = [], 1  # where a row begins: after an open quotation mark it spans many lines
    try:
        header = next(rows, [])
        if any(header.count(name) != 1 for name in COLUMNS):
            columns = ", ".join(f"'{to_printable(name[:30])}'" for name in header[:5]) or "nothing"
            raise ValueError(f"{path}: its first line has {columns}, not each of {', '.join(COLUMNS)} once. {EXAMPLE}.")
        begin = rows.line_num + 1
        for row in rows:
            prompts += [_prompt(path, rows.line_num, header, row)] if row else []
            begin = rows.line_num + 1
    except csv.Error as error:
        reason = str(error).replace("\t", "TAB")
        way = EXAMPLE if begin == 1 else QUOTES
        raise ValueError(f"{path}: line {begin:,} cannot be read: {reason}. {way}.") from error
    if not prompts:
        raise ValueError(f"{path} has a header and no prompt. Give a file with at least one.")
    twice = [number for number, count in Counter(prompt.number for prompt in prompts).items() if count > 1]
    if twice:
        raise ValueError(f"{path}: several prompts have the id {twice[0]}. An id names one prompt and its noise.")
    if num_prompts is not None and not 1 <= num_prompts <= len(prompts):
        raise ValueError(f"eval.num_prompts: {num_prompts:,}, but {path} has {len(prompts):,}. Possible: 1 to that.")
    return PromptSet(prompts[:num_prompts], len(prompts), hashlib.sha256(content).hexdigest())


def read_file(path: str, wanted: str) -> bytes:
    """Return a text file's bytes. Raises ValueError: it cannot be read, or is not UTF-8; `wanted`: what should be there."""
    try:
        content = read_regular(Path(path).expanduser())
        content.decode()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}. {wanted}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start:,}). {wanted}.") from error
    return content


def _prompt(path: str, line: int, header: Sequence[str], row: Sequence[str]) -> Prompt:
    where = f"{path}: line {line:,}"
    if len(row) != len(header):
        raise ValueError(f"{where} has {len(row)} columns, its header {len(header)}. Fix that line.")
    cells = dict(zip(header, row, strict=True))
    for name in ("id", "image_id"):
        if not re.fullmatch("-?[0-9]{1,18}", cells[name]):  # int() takes 1_0 and other scripts' digits, too
            raise ValueError(f"{where} has {name} '{to_printable(cells[name][:40])}', not a whole number. Fix it.")
    caption = cells["caption"].strip()
    if text := caption_problem(caption):
        raise ValueError(f"{where} (id {cells['id']}) has a caption {text}. Fix it, or remove that line.")
    return Prompt(int(cells["id"]), int(cells["image_id"]), caption)


def caption_problem(caption: str) -> str | None:
    """Say why this is no caption, or None."""
    if not caption or "\0" in caption:
        return "that is empty, or has a NUL character"
    if len(caption) > MAX_CAPTION:
        return f"of {len(caption):,} characters; possible: {MAX_CAPTION:,} at most"
    return None


# --- captions alone ---

CAPTIONS_EXAMPLE = "Give a file with a caption in each line, or captions: prompts='[a red circle, a blue square]'"


def read_captions(path: str) -> Sequence[Prompt]:
    """Read prompts from a .tsv file, as `read_prompts` does, or from lines, whose numbers are their ids.

    Raises:
        ValueError: it cannot be read, or a line is no caption; says which.
    """
    if path.endswith(".tsv"):
        return read_prompts(path).prompts
    lines = read_file(path, "Give a file with a caption in each line").decode("utf-8-sig").splitlines()
    prompts = [Prompt(number, number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    for prompt in prompts:
        if text := caption_problem(prompt.caption):
            raise ValueError(f"{path}: line {prompt.number:,} has a caption {text}. Fix it, or remove that line.")
    if not prompts:
        raise ValueError(f"{path} has no caption. Give one in each line.")
    return prompts


def parse_captions(text: str | None) -> Sequence[Prompt]:
    """Read the key `prompts`: a list of captions, whose places are their numbers, or a file. Raises ValueError."""
    if text is None:
        raise ValueError(f"not given. {CAPTIONS_EXAMPLE}.")
    if not text.lstrip().startswith("["):
        if len(text) < MAX_CAPTION and (problem := file_problem(text)):
            raise ValueError(f"{problem} {CAPTIONS_EXAMPLE}.")
        return read_captions(text)
    try:
        captions = yaml.load(text, Loader=yaml.BaseLoader)  # every word a text: no, 1e3, 2024-01-01
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{truncate(text)} cannot be read as a list. Put captions with a comma in quotes.") from error
    for number, caption in enumerate(captions, 1):
        if not isinstance(caption, str) or not caption.strip() or "\0" in caption or len(caption) > MAX_CAPTION:
            possible = f"a text of 1 to {MAX_CAPTION:,} characters, in quotes where it has a colon or a bracket"
            raise ValueError(f"the caption at place {number} is {truncate(repr(caption))}. Possible: {possible}.")
    if not captions:
        raise ValueError(f"an empty list. {CAPTIONS_EXAMPLE}.")
    return [Prompt(number, number, caption.strip()) for number, caption in enumerate(captions, 1)]
