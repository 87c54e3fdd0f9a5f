"""Write the page of a run, or of several next to each other: one HTML file that opens from disk, without a network.

    python -m reports.page runs/NAME                        # -> runs/NAME/page.html
    python -m reports.page runs/NAME runs/OTHER             # -> comparison.html
    python -m reports.page runs/NAME runs/OTHER out=FILE
    python -m reports.page runs                             # -> runs/index.html: a table of all runs

The page has the result and its target, FID and CLIP score over the images seen, losses, speed, memory, sample grids,
configuration, environment, starts and faults, time and cost. Of several runs it has their curves together, their results
side by side with ratios to the first, and the keys that differ. What cannot be read is named on the page.

Exit code: 0, or 2 if a folder is not a run, or the file cannot be written (each problem on a line of stderr).
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from common.command import command
from common.errors import ConfigError, Refused
from common.files import write_atomic
from reports import page_content
from reports.charts import NUM_COLORS, groups_of, svg_of, table_of
from reports.formatting import NONE, figure, moment, plain, read_words, script_of, span, template
from reports.page_content import figures_of, samples_of
from run_folder.files import RUN_ONLY_KEYS
from run_folder.history import History, is_run, read_history, runs_under, signature, state_of

MOST_BYTES = 6_000_000  # of all sample grids of a page; the rest stays far below 3 MB
MOST_RUNS = 16
MOST_OF_A_SENTENCE = 3000  # characters; what it quotes is cut to less
COMPARISON = "comparison.html"


def write(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of these runs. `out`: the file; None: in the run's folder, or of several in the current one.

    Returns:
        the file.

    Raises:
        ConfigError: folders are no runs'. Refused: the file cannot be written.
    """
    runs, problems = [], []
    for folder in folders:
        try:
            runs.append(read_history(folder))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    return _write_file(out or (folders[0] / PAGE if len(folders) == 1 else Path(COMPARISON)), html_of(runs))


def _write_file(path: Path, text: str) -> Path:
    try:
        write_atomic(path, text)
    except OSError as error:
        raise Refused(f"out: {path} cannot be written: {error.strerror}. Give another file: out=FILE.") from error
    return path


def html_of(runs: Sequence[History], *, now: float | None = None) -> str:
    """Return the page of these runs.

    Args:
        now: when it is written, in seconds since 1970; None: now.
    """
    several, runs = len(runs) > 1, _with_unique_names(runs)
    script, digest = script_of("page.js")
    values = [_template_values(run, index, len(runs)) for index, run in enumerate(runs)]
    return template("page.html.j2", MOST_OF_A_SENTENCE).render(
        title=_title([plain(run.name) for run in runs]),
        runs=values,
        several=several,
        groups=[(group, [(plot, svg_of(plot), table_of(plot)) for plot in group.plots]) for group in groups_of(runs)],
        results=page_content.results(runs) if several else [],
        not_comparable=page_content.not_comparable(runs) if several else [],
        differences=[
            ("Configuration", page_content.differing([run.config for run in runs], RUN_ONLY_KEYS)),
            ("Environment", page_content.differing([run.environment for run in runs], ("schema",))),
        ]
        if several
        else [],
        written=moment(time.time() if now is None else now),
        script=script,
        script_hash=digest,
    )


def _with_unique_names(runs: Sequence[History]) -> list[History]:
    """Return the runs with the folder above in the name of those that have the name of another one."""
    names = [run.name for run in runs]
    return [
        replace(run, label="/".join(run.folder.resolve().parts[-2:])) if names.count(run.name) > 1 else run
        for run in runs
    ]


def _title(names: Sequence[str]) -> str:
    return f"{len(names)} runs" if len(names) > 4 else " and ".join(names)


def _template_values(run: History, index: int, num: int) -> dict[str, Any]:
    """Return what the template says of a run."""
    return {
        "name": run.name,
        "number": index + 1,
        "color": f"s{index % NUM_COLORS}",
        "line": "line" if index < NUM_COLORS else "dashed",
        "sentence": page_content.sentence_of(run),
        "result": page_content.result_of(run),
        "cards": page_content.cards_of(run),
        "shares": page_content.clock_shares(run),
        "times": page_content.times_of(run),
        "has_cost": run.config.get(page_content.PRICE) is not None,
        "price": run.config.get(page_content.PRICE),
        "samples": samples_of(run, MOST_BYTES // num),
        "sections": _sections(run.config, run.overrides),
        "environment": run.environment,
        "starts": page_content.starts_of(run),
        "faults": page_content.faults_of(run),
        "bad_samples": page_content.bad_samples_of(run),
        "num_bad_samples": len(run.bad_samples),
        "missing": run.missing,
    }


def _sections(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, list[tuple[str, Any, bool]]]:
    """Return section -> (key, value, whether it is otherwise than the run was begun with); keys of the run itself first."""
    sections: dict[str, list[tuple[str, Any, bool]]] = {"run": []}
    for key, value in config.items():
        section, _, rest = key.partition(".")
        sections.setdefault(section if rest else "run", []).append((key, value, key in overrides))
    return {section: keys for section, keys in sections.items() if keys}


# --- the table of all runs in a folder: it lies there, and links to the pages that lie in the runs' own ---

PAGE, INDEX = "page.html", "index.html"
COLUMNS = (
    "run",
    "state",
    "target",
    "images/s",
    "FID",
    "CLIP",
    "val. loss",
    "loss",
    "images seen",
    "time",
    "left",
    "cost",
    "started",
)


def link_of(folder: Path, run: Path) -> str:
    """Return where a run's page lies from the folder of all runs."""
    return f"{run.relative_to(folder).as_posix()}/{PAGE}"


def html_of_all(folder: Path, runs: Sequence[Path], *, is_live: bool = False, now: float | None = None) -> str:
    """Return the table as a page.

    Args:
        is_live: every run has a page, made when it is asked for.
        now: when it is written, in seconds since 1970; None: now.
    """
    rows = sorted((_read_row(run, signature(run)) for run in runs), key=lambda row: -row.started)
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
class RunRow:
    """A run's row. cells: (text, what it is sorted by) of each column after the run; an empty text comes last."""

    folder: Path
    state: str
    error: str | None
    started: float
    cells: Sequence[tuple[str, float | str]]


@functools.lru_cache(maxsize=4096)
def _read_row(folder: Path, signed: tuple[object, ...]) -> RunRow:
    """Read a run; one whose `signature` has not changed is not read again."""
    run = read_history(folder)
    state, figures = state_of(run.folder, run.starts, run.summary), figures_of(run)
    target = run.summary.get("target")
    start = run.starts[0].get("unix_time") if run.starts else None
    started = start if moment(start) != NONE else None
    values = [figures[key] for key in ("images_per_sec", "fid", "clip", "val_loss", "loss", "images", "seconds")]
    values += [page_content.seconds_left(run) if state == "running" else None, figures["cost"]]
    texts = [*map(figure, values[:6]), *map(span, values[6:8]), figure(values[8]), moment(started)]
    keys = ["" if value is None else value for value in (*values, started)]
    target_text = target if isinstance(target, str) else ""
    cells = [(state, state), (target_text or NONE, target_text), *zip(texts, keys, strict=True)]
    return RunRow(folder, state, str(run.starts[-1]["failed"]) if state == "failed" else None, started or 0.0, cells)


# --- the command ---


@dataclass(frozen=True)
class PageKeys:
    """The keys of this command."""

    out: str | None = None
    """The file. null: in the run's folder, or of several in the current one."""


@command(keys=PageKeys)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""

    def wrong(folders: Sequence[str]) -> list[str]:
        problem = f"command line: {len(folders)} runs given"
        text = f"{problem}. Possible: 1 to {MOST_RUNS} on a page. Give their folders: runs/NAME."
        return [] if 0 < len(folders) <= MOST_RUNS else [text]

    words, keys = read_words(argv, PageKeys, wrong)
    folders, out = list(dict.fromkeys(map(Path, words))), keys.out
    if len(folders) == 1 and not is_run(folders[0]) and runs_under(folders[0]):
        text = html_of_all(folders[0], runs_under(folders[0]))
        print(f"written: {_write_file(Path(out or folders[0] / INDEX), text)}")
    else:
        print(f"written: {write(folders, Path(out) if out else None)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
