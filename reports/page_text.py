"""Numbers, times and texts as the page shows them."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import time
from pathlib import Path
from typing import Any

from markupsafe import Markup

from cli.masking import printable

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
    first = next(place for place, (value, _) in enumerate(parts) if value)
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
    text = printable(text)
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
