"""What a sweep remembers of its runs: a line of sweep.jsonl for each start and each end. Figures are in their own folders.

NAME/sweep.jsonl        the lines; the last one of a run counts
     RUN/               the run of a point (callbacks/run_record.py says what is in it)
     logs/RUN.txt       all that its processes said, of every start
     stale/             runs of other configurations, data or code with the names of today's, and ok ones that were begun anew
     summary.csv, *.png, page.html
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cli.files import write_whole
from cli.log import log
from record.files import SUMMARY, append_lines, as_lines, read_lines
from sweeps.points import Point

STATE, LOGS, STALE = "sweep.jsonl", "logs", "stale"
STARTED = "started"
OK, OVER_PLAN, PENDING, OLD = "ok", "over_plan", "pending", "stale"
ERRORS = ("refused", "out_of_memory", "timeout", "failed", "killed")
STATUSES = (OK, *ERRORS, OVER_PLAN, PENDING, OLD)
GOES_ON = (PENDING, OLD, "killed")
"""What a call runs that was not told `only`; whatever else did not end well would do so again."""


class State:
    """The lines of a sweep's file, and what follows from them for each point.

    Args:
        folder: of the sweep; nothing is written into it before the first run.
        code: the commit of this call. What ran while the code was another one is of no point of today's. None: not looked at.
    """

    def __init__(self, folder: Path, code: str | None = None):
        self.folder = folder
        lines = read_lines(folder / STATE)
        self._last: dict[str, Mapping[str, Any]] = {
            line["run"]: line if code in (None, line.get("commit", code)) else {**line, "identity": line["commit"]}
            for line in lines
            if "run" in line
        }
        self._is_whole = False
        self._lines = lines

    def add(self, point: Point, status: str, **more: Any) -> None:
        """Remember a start or an end of a point's run."""
        line = {"run": point.name, "identity": point.identity, "status": status, "unix_time": time.time(), **more}
        self._last[point.name] = line
        self._lines.append(line)
        path = self.folder / STATE
        if self._is_whole:
            append_lines(path, [line])
        else:  # a killed sweep may have left half a line at its end
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, as_lines(self._lines))
            self._is_whole = True

    @property
    def names(self) -> list[str]:
        """Of all runs that were ever started, those of points that the file has no more among them."""
        return list(self._last)

    def line_of(self, point: Point) -> Mapping[str, Any]:
        """Return the last line of a point's run, or nothing where that is of another identity."""
        line = self._last.get(point.name, {})
        return line if line.get("identity") == point.identity else {}

    def is_begun(self, point: Point) -> bool:
        """True where the run of this very point was started."""
        return bool(self.line_of(point))

    def status_of(self, point: Point) -> tuple[str, str]:
        """Return a point's status, and what there is to say of it."""
        line = self.line_of(point)
        status, said = str(line.get("status", STARTED)), str(line.get("message", ""))
        if status == OK and not (self.folder / point.name / SUMMARY).is_file():
            status, said = STARTED, "its folder was removed"
        if status not in (STARTED, "killed"):
            return status, said
        if point.over_plan is not None:
            return OVER_PLAN, point.over_plan
        if status == "killed":
            return status, said
        if not line and (point.name in self._last or (self.folder / point.name).exists()):
            return OLD, "what lies there is of another configuration, data, code or device"
        return PENDING, said

    def put_aside(self, point: Point) -> None:
        """Move what has a point's name and is not of this point, or is ok: no start would change it.

        Of a run that is the folder, and all that it said.
        """
        if self.is_begun(point) and self.line_of(point).get("status") != OK:
            return
        before = str(self._last.get(point.name, {}).get("identity", "unknown"))[:8]
        for place, suffix in ((self.folder / point.name, ""), (self.folder / LOGS / f"{point.name}.txt", ".txt")):
            if not place.exists():
                continue
            there = self.folder / STALE
            there.mkdir(exist_ok=True)
            names = (f"{place.stem if suffix else place.name}-{before}-{n}{suffix}" for n in range(1, 10**6))
            free = next(there / name for name in names if not (there / name).exists())
            place.rename(free)
            if not suffix:
                log.info(f"{point.name}: an earlier run lay there; it is now {free}")
