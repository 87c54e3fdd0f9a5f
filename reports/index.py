"""The table of all runs in a folder: what each came to, how it stands, and a link to its page. reports/page.py calls it.

The file lies in the folder and links to the pages that lie in the runs' own. Sorted by start, the newest first; by any
column with a click or a key.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from cli.errors import Refused
from cli.files import write_whole
from record.history import is_run
from record.standing import Standing, runs_under, signature, standing_of
from reports.page_text import NONE, figure, moment, script_of, span, template

PAGE, INDEX = "page.html", "index.html"
COLUMNS = ("run", "state", "target", "images/s", "FID", "CLIP", "val. loss", "images seen", "time", "cost", "started")


def is_folder_of_runs(folder: Path) -> bool:
    """True for a folder with runs in it; false for a run's own."""
    return not is_run(folder) and bool(runs_under(folder))


def command_of(folder: Path, out: str | None) -> int:
    """Write the table of a folder's runs, say where and return the exit code. Raises Refused: it cannot be written."""
    place = Path(out or folder / INDEX)
    try:
        write_whole(place, html_of(folder, runs_under(folder)))
    except OSError as error:
        raise Refused(f"out: {place} cannot be written: {error.strerror}. Give another file: out=FILE.") from error
    print(f"written: {place}")
    return 0


def link_of(folder: Path, run: Path) -> str:
    """Return where a run's page lies from the folder of all runs."""
    return f"{run.relative_to(folder).as_posix()}/{PAGE}"


def html_of(folder: Path, runs: Sequence[Path], *, is_live: bool = False, now: float | None = None) -> str:
    """Return the table as a page.

    Args:
        is_live: every run has a page, made when it is asked for.
        now: when it is written, in seconds since 1970; None: now.
    """
    standings = [standing_of(run, folder, signature(run)) for run in runs]
    standings.sort(key=lambda run: -(run.started or 0.0))
    rows = [(_link(run, folder, is_live=is_live), run, _cells(run)) for run in standings]
    states = [run.state for run in standings]
    script, digest = script_of("index.js")
    return template("index.html.j2").render(
        folder=folder.resolve().name,
        columns=COLUMNS,
        rows=rows,
        counts=", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)),
        without=sum(link is None for link, _, _ in rows),
        written=moment(time.time() if now is None else now),
        script=script,
        script_hash=digest,
    )


def _link(run: Standing, folder: Path, *, is_live: bool) -> str | None:
    has_page = is_live or (run.folder / PAGE).is_file()
    return quote(os.fsencode(link_of(folder, run.folder))) if has_page else None


def _cells(run: Standing) -> list[tuple[str, float | str]]:
    """Return (text, what it is sorted by) of each column after the run; an empty text comes last."""
    figures = [run.images_per_sec, run.fid, run.clip, run.val_loss, run.images]
    texts = list(map(figure, figures))
    cells = [
        (run.state, run.state),
        (run.target or NONE, run.target or ""),
        *zip(texts, map(_key, figures), strict=True),
    ]
    cells += [(span(run.seconds), _key(run.seconds)), (figure(run.cost), _key(run.cost))]
    return [*cells, (moment(run.started), _key(run.started))]


def _key(value: float | None) -> float | str:
    return "" if value is None else value
