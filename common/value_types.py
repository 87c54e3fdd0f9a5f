"""What a value may be, whatever its key: how large a number, how long a text, which file; and how a message shows it.

    workers: int = limited(4, 0, 512)                  # the limits stand next to the field; config.load checks them
    half_life: str | None = duration(None, "ba", "sp")
    image_size: Pixels = limited(512, 1, 16384)

Texts are names, paths and addresses here: a line of UTF-8 that a file system takes. Files are read to the end, so
only regular ones are taken: a pipe may have no end.
"""

from __future__ import annotations

import functools
import operator
import os
import stat
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from common import masking

MAX_NUMBER = 10**12  # of a number without its own limit: a larger one is a slip, and overflows further on
MAX_FRACTIONAL = 1e30
MAX_TEXT_BYTES = 1024  # Linux takes 4,096 for a path, what is added to it included
MAX_PART_BYTES = 255  # of a path: a file's or a folder's name
SIZE_UNITS = ("kb", "mb", "gb", "tb", "pb", "eb", "zb", "yb")
MAX_CAPTION = 10_000  # characters: a text encoder reads 77 tokens, and whatever is longer than this is no caption

ImageSize = tuple[int, ...]
"""(width, height) in pixels, of a video (width, height, number of frames)."""
# Types that OmegaConf cannot check (it knows no union with a list): config.load does, by what stands behind Any.
Pixels = Annotated[Any, int | tuple[int, int]]
Scales = Annotated[Any, float | tuple[float, ...]]


@dataclass(frozen=True)
class Limits:
    """From where to where a number makes sense; None: from or to where any number does.

    above, below: without its lower, its upper end; usual: what people give; of_text: reads a text, None if it is not
    one that its key takes, and says what is possible; is_prose: a text may be more than a name, path or address.
    """

    least: float | None = None
    most: float | None = None
    above: bool = False
    below: bool = False
    usual: str | None = None
    of_text: tuple[Callable[[str], Any], str] | None = None
    is_prose: bool = False

    def _ends(self, value: float) -> tuple[float, float]:
        widest = MAX_NUMBER if isinstance(value, int) else MAX_FRACTIONAL
        return -widest if self.least is None else self.least, widest if self.most is None else self.most

    def allow(self, value: float) -> bool:
        """False for nan, too."""
        least, most = self._ends(value)
        return least <= value <= most and not (self.above and value == least) and not (self.below and value == most)

    def possible(self, value: float) -> str:
        """Say what they are, for a message about a value that they do not allow: `1 and up`, `0 to 512`."""
        is_open = self.most is None and self.least is not None and not value > self._ends(value)[1]
        least, most = (f"{end:,}" if isinstance(value, int) else f"{end:.4g}" for end in self._ends(value))
        if is_open:
            return f"above {least}" if self.above else f"{least} and up"
        if self.above:
            return f"above {least}, {'below' if self.below else 'to'} {most}"
        return f"{least} to {'below ' if self.below else ''}{most}"


def limited(
    default: Any,
    least: float | None = None,
    most: float | None = None,
    *,
    above: bool = False,
    below: bool = False,
    usual: str | None = None,
) -> Any:
    """Return the field of a number, or a list of them, with its limits, for a dataclass whose values `config.load` reads."""
    return field(default=default, metadata={"limits": Limits(least, most, above, below, usual)})


def of_form(default: str | None, read: Callable[[str], Any], possible: str) -> Any:
    """Return the field of a text that `read` gives None for where it is not possible."""
    return field(default=default, metadata={"limits": Limits(of_text=(read, possible))})


def prose(default: str | None, possible: str) -> Any:
    """Return the field of a text of any length and with any letters, which its user checks."""
    return field(default=default, metadata={"limits": Limits(of_text=(lambda text: text, possible), is_prose=True)})


def duration(default: str | None, *units: str, least: int = 1) -> Any:
    """Return the field of one of Composer's time strings. `units`: of ba (batches), sp (samples), ep (epochs)."""
    words = {"ba": "30ba (batches)", "sp": "5120sp (samples)", "ep": "2ep (epochs)"}
    possible = f"{', '.join(words[unit] for unit in units)}, {least} and up"
    return of_form(default, functools.partial(read_duration, units=units, least=least), possible)


def size_in_bytes(default: str | None, least: int, most: int, possible: str) -> Any:
    """Return the field of a size such as 64mb or 1tb. `possible`: the limits in words."""

    def read(text: str) -> int | None:
        try:
            return size if least <= (size := bytes_to_int(text)) <= most else None
        except (ValueError, OverflowError):  # the latter of "infgb"
            return None

    return of_form(default, read, possible)


def exclusive(section: str, config: Any, *names: str) -> list[tuple[str, str]]:
    """(key, message) where more than one of these keys of a section is given."""
    conflicting = [(f"{section}.{name}", value) for name in names if (value := getattr(config, name)) is not None]
    if len(conflicting) < 2:
        return []
    (key, value), *others = conflicting
    return [
        (key, f"{value} and {' and '.join(f'{name}: {other}' for name, other in others)} conflict. Give one of them.")
    ]


# --- numbers and texts ---


def type_hints(schema: type) -> dict[str, Any]:
    """Field -> type, what stands behind Any included."""
    return {name: _declared(hint) for name, hint in typing.get_type_hints(schema, include_extras=True).items()}


def _declared(hint: Any) -> Any:
    if typing.get_origin(hint) is Annotated:
        return hint.__metadata__[0]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, map(_declared, typing.get_args(hint)))
    return hint


def limit_problem(value: Any, kind: type | None, limits: Limits) -> str | None:
    """Say what is possible where a value, or one in it, is beyond all limits, else None.

    Args:
        kind: what its key takes: int or float, as which a text is read then, as OmegaConf does; str, or anything; None: a
            choice, which its type lists.
    """
    if kind is None:
        return None
    if isinstance(value, list | tuple | dict):
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return next((text for part in inner if (text := limit_problem(part, kind, limits))), None)
    if isinstance(value, str) and kind in (int, float):
        try:
            value = kind(value)
        except ValueError:  # not a number, as the type check will say
            return None
    if isinstance(value, str):
        read, possible = limits.of_text or (lambda text: text, "")
        is_possible = limits.is_prose or text_problem(value) is None
        return (possible if read(value) is None else None) if is_possible else text_problem(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and isinstance(value, float)):
        return None
    value = float(value) if kind is float and abs(value) < MAX_FRACTIONAL else value
    is_own = limits != Limits() or isinstance(value, int)  # else what nan and inf are there, the key's section says
    return limits.possible(value) if is_own and not limits.allow(value) else None


def text_problem(text: str) -> str | None:
    """Say what is possible where a text can be no name, path or address, else None."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return "a string in UTF-8"
    if any(ord(letter) < 32 for letter in text):
        return "a string without control characters and line ends"
    parts = [] if "://" in text else text.split("/")
    if size > MAX_TEXT_BYTES or any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        return f"at most {MAX_TEXT_BYTES:,} bytes, {MAX_PART_BYTES} between slashes"
    return None


def read_duration(text: str, units: tuple[str, ...], least: int = 1) -> tuple[int, str] | None:
    """Read Composer's time string, e.g. 30ba, as a number and its unit; None: it is none of these, or too many.

    Args:
        units: of ba (batches), sp (samples), ep (epochs).
        least: the smallest number that is possible.
    """
    try:
        number, unit = float(text[:-2]), text[-2:].lower()
    except ValueError:
        return None
    is_possible = unit in units and least <= number <= MAX_NUMBER and number.is_integer()
    return (int(number), unit) if is_possible else None


def bytes_to_int(text: str) -> int:
    """Return the bytes of a size such as 64mb. Raises ValueError, OverflowError: it is not one.

    As `streaming` reads it, whose import takes seconds.
    """
    text = text.lower().strip()
    if text[-2:] in SIZE_UNITS:
        return int(float(text[:-2]) * 1024 ** (SIZE_UNITS.index(text[-2:]) + 1))
    if not (digits := text.removesuffix("b")).isdigit():
        raise ValueError(f"{text} is not a size")
    return int(digits)


# --- files ---


def kind_of_path(path: str | Path) -> Literal["file", "folder", "device, pipe or socket"] | None:
    """Return what lies at a path, links followed; None: nothing that can be looked at, or no path at all."""
    try:
        mode = Path(path).expanduser().stat().st_mode
    except (OSError, ValueError, RuntimeError):  # the latter two: a NUL in it, the folder of a user that there is not
        return None
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "device, pipe or socket"


def file_problem(path: str) -> str | None:
    """Return why a path is not a file that can be read to its end, or None."""
    kind, name = kind_of_path(path), truncate(path, 300)
    if kind is None:
        return f"no file {name}. Check the path."
    if kind != "file":
        return f"{name} is a {kind}. Give a file."
    is_readable = os.access(Path(path).expanduser(), os.R_OK)
    return None if is_readable else f"{name} cannot be read by this user. Change its permissions, or give another one."


# --- in messages ---


def truncate(text: str, most: int = 80) -> str:
    """Return what was given for a message: one printable line, the beginning of a long one, without an address's password."""
    text = masking.mask_value(text)  # before it is cut: half an address is not known as one
    plain = text if text.isprintable() else ascii(text)[1:-1]
    return plain if len(plain) <= most else f"{plain[: most - 20]}... ({len(text):,} characters)"


def join_first(names: Sequence[str], most: int) -> str:
    """List the first names, and say how many more there are: "a, b, c and 7 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def format_value(value: Any) -> str:
    """Return any value for a message, a text in quotes."""
    return "null" if value is None else truncate(repr(masking.mask_value(value) if isinstance(value, str) else value))
