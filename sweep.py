"""Run benchmark.py for every point of a sweep, each in a separate process and folder, and keep one table of all.

    python sweep.py yamls/sweeps/sd2_precision_microbatch.yaml                  # -> runs/sweeps/sd2_precision_microbatch/
    python sweep.py yamls/sweeps/guidance.yaml dry_run=true                     # what would run
    python sweep.py yamls/sweeps/lr_by_batch.yaml max_duration=5120sp           # with a key of each run
    python sweep.py yamls/sweeps/mlperf_256_ten_seeds.yaml seed=[11,12]         # with another list for an axis
    python sweep.py yamls/sweeps/sdxl_microbatch.yaml only=status:error         # again what did not end well

docs/sweeps.md has the file, the table's columns and what each status means. Every problem of a point's configuration is
reported before the first one runs. A crash, a hang or an out-of-memory is a row of the table; the sweep continues. A run with
eval.when=after is scored by eval.py when it has ended. The same command resumes a sweep that was stopped in any way, and runs
what its file or the code has changed. An interrupt, SIGTERM or SIGUSR1 ends the active runs, after a checkpoint where they
write some.

Exit code: 0 when every run is ok, was left out for its memory or ran out of it; 1 when one was refused, failed, was killed
or took too long; 2 when the sweep cannot run (every problem on a line of stderr); 128 + signal after a signal.
"""

from __future__ import annotations

if __name__ == "__main__":  # the imports below take seconds, and an interrupt in them never reaches main
    from common import command_help, interrupts

    interrupts.print_on_interrupt("sweep.py: interrupted while no run was active. The same command does what is left.")
    command_help.answer_help(__file__)

import shlex
from collections.abc import Sequence
from pathlib import Path

from common.command import command, start
from common.errors import ConfigError, Failed, Refused
from common.log import log
from config import pluralize
from reports import mlperf, page, study
from run_folder.environment import commit
from sweeps import table
from sweeps.plan import Point, Sweep, SweepCommand, is_commit, read_sweep, resolve_all
from sweeps.running import ERRORS, OK, STATUSES, UNFINISHED, Runner, SweepState, end_left_overs, lock_folder, slots_of

PAGE, LOSS, MLPERF = "page.html", "loss.png", "mlperf"
WRONG = ("refused", "timeout", "failed", "killed")


@command(keys=SweepCommand)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    sweep = read_sweep(argv)
    only, code = statuses_of(sweep.command.only), commit()

    # Points: all that is wrong with any of them, before anything runs.
    points = resolve_all(sweep)
    if not is_commit(code):
        problem = (
            "no commit is known (set EASEL_COMMIT where there is no git)" if code is None else f"the tree is {code}"
        )
        log.info(f"{sweep.name}: {problem}, so earlier runs may be of other code: all run again")
    if sweep.command.dry_run:
        return print_plan(sweep, points, SweepState(sweep.folder, code), only)

    # Runs: what outlived a killed sweep is ended first; what is done stays.
    with lock_folder(sweep.folder):
        state, durations = SweepState(sweep.folder, code), []
        end_left_overs(sweep.folder, {*state.names, *(point.name for point in points)})
        wanted = points_to_run(points, state, only)
        log.info(f"{sweep.folder}: {pluralize(len(wanted), 'run')} to run, of {len(points)}")

        def on_end(point: Point, status: str, seconds: float, left: int) -> None:
            durations.append(seconds)
            write_table(sweep, points, state)
            num = len(wanted)
            line = table.progress(
                point, status, seconds, done=num - left, of=num, took=durations, jobs=len(slots_of(sweep))
            )
            print(line, flush=True)

        write_table(sweep, points, state)
        runner = Runner(sweep, state, on_end)
        try:
            runner.run(wanted)
        except OSError as error:
            problem = f"{sweep.folder}: the sweep cannot continue: {error}"
            raise Failed(f"{problem} Its runs are ended; the same command resumes them.") from error

        # Table, plot and page of all results so far.
        rows = write_table(sweep, points, state)
        if runner.stopped is not None:
            log.info(f"{table.format_counts(rows)}. The same command resumes the sweep.")
            return 128 + runner.stopped
        finish(sweep, points, rows)
    return 1 if any(row["status"] in WRONG for row in rows) else 0


def statuses_of(only: str | None) -> tuple[str, ...] | None:
    """Return the statuses that `only` names, None: it is not given. Raises ConfigError: it names none."""
    if only is None:
        return None
    kind, _, status = only.partition(":")
    if kind != "status" or status not in (*STATUSES, "error"):
        known = ", ".join(f"status:{each}" for each in ("error", *STATUSES))
        raise ConfigError([f"only: '{only}' is not known. Possible: {known}."])
    return ERRORS if status == "error" else (status,)


def points_to_run(points: Sequence[Point], state: SweepState, only: Sequence[str] | None) -> list[Point]:
    """Return the points to run."""
    return [point for point in points if state.status_of(point)[0] in (only or UNFINISHED)]


def print_plan(sweep: Sweep, points: Sequence[Point], state: SweepState, only: Sequence[str] | None) -> int:
    """Print what would run, and the command of each."""
    rows = table.rows_of(points, state)
    print(table.format_table(rows), end="\n\n")
    for point in points_to_run(points, state, only):
        print(f"composer -n {sweep.command.ranks} benchmark.py {shlex.join(point.words)}")
    for line in table.messages(rows):
        print(line)
    return 0


def write_table(sweep: Sweep, points: Sequence[Point], state: SweepState) -> list[table.Row]:
    """Write summary.csv; return its rows."""
    rows = table.rows_of(points, state)
    table.write_csv(sweep.folder, rows, [*sweep.axes])
    return rows


def finish(sweep: Sweep, points: Sequence[Point], rows: Sequence[table.Row]) -> None:
    """Print the table, and write record, plot and page of what is ok, and MLPerf's report of its seeds."""
    print("\n".join([table.format_table(rows), *table.messages(rows)]))
    folders = [sweep.folder / row["run"] for row in rows if row["status"] == OK]
    written: list[Path] = [sweep.folder / table.CSV]
    try:
        record = table.record_of(sweep, rows)
        written.append(table.write_record(sweep, record))
        if study.has_curves(record):
            study.draw(record, sweep.folder / LOSS)
            written.append(sweep.folder / LOSS)
        if folders:
            written.append(page.write(folders[: page.MOST_RUNS], sweep.folder / PAGE))
    except (OSError, ValueError) as error:  # a folder that was removed, a file that cannot be written
        log.warning(f"{sweep.folder}: not all of record, plot and page could be written: {error}")
    if len(folders) > page.MOST_RUNS:
        log.info(f"{sweep.folder / PAGE}: shows the first {page.MOST_RUNS} of {len(folders)} runs, the most of a page")
    if folders and is_of_mlperf(sweep, points):
        ended = [sweep.folder / row["run"] for row in rows if row["status"] in (OK, *ERRORS)]  # one of ten may fail
        begun = [str(folder) for folder in ended if folder.is_dir()]
        try:
            mlperf.combine(begun, sweep.folder / MLPERF)
        except (ConfigError, Refused) as error:
            log.warning(f"{sweep.folder / MLPERF}: no report: {error}")
    print(f"{table.format_counts(rows)}. Written: {', '.join(map(str, written))}")


def is_of_mlperf(sweep: Sweep, points: Sequence[Point]) -> bool:
    """True where its runs may be one result: each has MLPerf's log, and they differ in nothing but the seed."""
    return set(sweep.axes) == {"seed"} and all(point.config.mlperf.enabled for point in points)


if __name__ == "__main__":
    start(main)
