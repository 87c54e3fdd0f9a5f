"""The table of all runs in a folder: what each came to, how it stands, and a link to its page. reports/page.py calls it.

The file lies in the folder and links to the pages that lie in the runs' own. Sorted by start, the newest first; by any
column with a click or a key.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from record.history import read_history
from record.standing import signature, state_of
from reports.page_facts import figures_of
from reports.page_text import NONE, figure, moment, script_of, span, template

PAGE, INDEX = "page.html", "index.html"
COLUMNS = ("run", "state", "target", "images/s", "FID", "CLIP", "val. loss", "images seen", "time", "cost", "started")


def link_of(folder: Path, run: Path) -> str:
    """Return where a run's page lies from the folder of all runs."""
    return f"{run.relative_to(folder).as_posix()}/{PAGE}"


def html_of(folder: Path, runs: Sequence[Path], *, is_live: bool = False, now: float | None = None) -> str:
    """Return the table as a page.

    Args:
        is_live: every run has a page, made when it is asked for.
        now: when it is written, in seconds since 1970; None: now.
    """
    rows = sorted((_row_of(run, signature(run)) for run in runs), key=lambda row: -row.started)
    states = [row.state for row in rows]
    links = [
        quote(os.fsencode(link_of(folder, row.folder))) if is_live or (row.folder / PAGE).is_file() else None
        for row in rows
    ]
    script, digest = script_of("index.js")
    return template("index.html.j2").render(
        folder=folder.resolve().name,
        columns=COLUMNS,
        rows=[(link, row.folder.relative_to(folder).as_posix(), row) for link, row in zip(links, rows, strict=True)],
        counts=", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)),
        without=links.count(None),
        written=moment(time.time() if now is None else now),
        script=script,
        script_hash=digest,
    )


@dataclass(frozen=True)
class Row:
    """A run's row. cells: (text, what it is sorted by) of each column after the run; an empty text comes last."""

    folder: Path
    state: str
    error: str | None
    started: float
    cells: Sequence[tuple[str, float | str]]


@functools.lru_cache(maxsize=4096)
def _row_of(folder: Path, signed: tuple[object, ...]) -> Row:
    """Read a run; one whose `signature` has not changed is not read again."""
    run = read_history(folder)
    state, figures = state_of(run.folder, run.starts, run.summary), figures_of(run)
    target = run.summary.get("target")
    start = run.starts[0].get("unix_time") if run.starts else None
    started = start if moment(start) != NONE else None
    values = [figures[key] for key in ("images_per_sec", "fid", "clip", "val_loss", "images", "seconds", "cost")]
    texts = [*map(figure, values[:5]), span(values[5]), figure(values[6]), moment(started)]
    keys = ["" if value is None else value for value in (*values, started)]
    told = target if isinstance(target, str) else ""
    cells = [(state, state), (told or NONE, told), *zip(texts, keys, strict=True)]
    return Row(folder, state, str(run.starts[-1]["failed"]) if state == "failed" else None, started or 0.0, cells)
