"""Write the page of a run, or of several beside each other: one HTML file that opens from disk, without a network.

    python -m reports.page runs/NAME                        # -> runs/NAME/page.html
    python -m reports.page runs/NAME runs/OTHER             # -> comparison.html
    python -m reports.page runs/NAME runs/OTHER out=FILE
    python -m reports.page runs                             # -> runs/index.html: a table of all runs

The page has the result and its target, FID and CLIP score over the images seen, losses, speed, memory, sample grids,
configuration, environment, starts and faults, time and cost. Of several runs it has their curves together, their results
side by side with ratios to the first, and the keys that differ. What cannot be read is said on the page.

Exit code: 0, or 2 where a folder is no run, or the file cannot be written (each problem on a line of stderr).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cli.command import command
from cli.errors import ConfigError, Refused
from cli.files import write_whole
from record.history import History, is_run, read_history
from record.standing import runs_under
from reports import index, page_facts
from reports.index import PAGE
from reports.marks import read_words
from reports.page_charts import groups_of
from reports.page_plots import NUM_COLOURS, svg_of, table_of
from reports.page_samples import samples_of
from reports.page_text import moment, plain, script_of, template

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
    return _written(out or (folders[0] / PAGE if len(folders) == 1 else Path(COMPARISON)), html_of(runs))


def _written(place: Path, text: str) -> Path:
    try:
        write_whole(place, text)
    except OSError as error:
        raise Refused(f"out: {place} cannot be written: {error.strerror}. Give another file: out=FILE.") from error
    return place


def html_of(runs: Sequence[History], *, now: float | None = None) -> str:
    """Return the page of these runs.

    Args:
        now: when it is written, in seconds since 1970; None: now.
    """
    several, runs = len(runs) > 1, _told_apart(runs)
    script, digest = script_of("page.js")
    told = [_told(run, place, len(runs)) for place, run in enumerate(runs)]
    return template("page.html.j2", MOST_OF_A_SENTENCE).render(
        title=_title([plain(run.name) for run in runs]),
        runs=told,
        several=several,
        groups=[(group, [(plot, svg_of(plot), table_of(plot)) for plot in group.plots]) for group in groups_of(runs)],
        results=page_facts.results(runs) if several else [],
        not_comparable=page_facts.not_comparable(runs) if several else [],
        differences=[
            ("Configuration", page_facts.differing([run.config for run in runs], page_facts.OWN_KEYS)),
            ("Environment", page_facts.differing([run.environment for run in runs], ("schema",))),
        ]
        if several
        else [],
        written=moment(time.time() if now is None else now),
        script=script,
        script_hash=digest,
    )


def _told_apart(runs: Sequence[History]) -> list[History]:
    """Return the runs with the folder above in the name of those that have the name of another one."""
    names = [run.name for run in runs]
    return [
        replace(run, label="/".join(run.folder.resolve().parts[-2:])) if names.count(run.name) > 1 else run
        for run in runs
    ]


def _title(names: Sequence[str]) -> str:
    return f"{len(names)} runs" if len(names) > 4 else " and ".join(names)


def _told(run: History, place: int, num: int) -> dict[str, Any]:
    """Return what the template says of a run."""
    return {
        "name": run.name,
        "number": place + 1,
        "colour": f"s{place % NUM_COLOURS}",
        "line": "line" if place < NUM_COLOURS else "dashed",
        "sentence": page_facts.sentence_of(run),
        "result": page_facts.result_of(run),
        "cards": page_facts.cards_of(run),
        "shares": page_facts.clock_shares(run),
        "times": page_facts.times_of(run),
        "has_cost": run.config.get(page_facts.PRICE) is not None,
        "price": run.config.get(page_facts.PRICE),
        "samples": samples_of(run, MOST_BYTES // num),
        "sections": _sections(run.config, run.later),
        "environment": run.environment,
        "starts": page_facts.starts_of(run),
        "faults": page_facts.faults_of(run),
        "bad_samples": page_facts.bad_samples_of(run),
        "num_bad_samples": len(run.bad_samples),
        "missing": run.missing,
    }


def _sections(config: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, list[tuple[str, Any, bool]]]:
    """Return section -> (key, value, whether it is otherwise than the run was begun with); keys of the run itself first."""
    found: dict[str, list[tuple[str, Any, bool]]] = {"run": []}
    for key, value in config.items():
        section, _, rest = key.partition(".")
        found.setdefault(section if rest else "run", []).append((key, value, key in later))
    return {section: keys for section, keys in found.items() if keys}


@dataclass(frozen=True)
class PageKeys:
    """The keys of this command."""

    out: str | None = None
    """The file. null: in the run's folder, or of several in the current one."""


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""

    def wrong(places: Sequence[str]) -> list[str]:
        given = f"command line: {len(places)} runs given"
        text = f"{given}. Possible: 1 to {MOST_RUNS} on a page. Give their folders: runs/NAME."
        return [] if 0 < len(places) <= MOST_RUNS else [text]

    words, keys = read_words(argv, PageKeys, wrong)
    places, out = list(dict.fromkeys(map(Path, words))), keys.out
    if len(places) == 1 and not is_run(places[0]) and runs_under(places[0]):
        text = index.html_of(places[0], runs_under(places[0]))
        print(f"written: {_written(Path(out or places[0] / index.INDEX), text)}")
    else:
        print(f"written: {write(places, Path(out) if out else None)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
