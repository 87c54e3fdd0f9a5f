"""A sweep's runs as one array job of Slurm: handed over, and their ends read by a later call.

NAME/slurm/TIME/NUMBER.sh       a run's commands as a function, for launch/slurm_job.sh
                NUMBER.end      its code and seconds; `timeout` in place of a code
                ranks/JOB/      what its ranks say; rank 0 writes into logs/RUN.txt
"""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from cli.errors import Failed, Refused
from cli.files import read_regular
from cli.log import log
from config import count
from record import processes
from record.environment import commit
from record.files import STARTS, SUMMARY, read_lines
from sweeps.file import Sweep
from sweeps.points import Point, is_commit
from sweeps.running import end_of_text, message_of, own_folders
from sweeps.state import LOGS, OK, STARTED, State

FOLDER = "slurm"
SCRIPT = "launch/slurm.sbatch"
BEFORE_LIMIT_SEC = 210  # launch/slurm.sbatch stops a run 180 seconds before the limit; Slurm looks every 30
COMMAND_SEC = 120
GONE = "its job {} is no longer in the queue and left no code: it was cancelled, or lost its node"


def _asked(*words: str, **variables: str) -> str:
    """Return what a command of Slurm's prints. Raises Failed: it cannot be run, or says no."""
    try:
        done = subprocess.run(
            words,
            cwd=processes.ROOT,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=COMMAND_SEC,
        )
    except FileNotFoundError as error:
        raise Failed(f"launch: no {words[0]} on the PATH. Call sweep.py where Slurm's commands are.") from error
    except subprocess.TimeoutExpired as error:
        raise Failed(f"launch: {words[0]} has not answered in {COMMAND_SEC} s. Try again later.") from error
    if done.returncode:
        raise Failed(f"launch: {words[0]}: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout


def in_queue(state: State) -> set[str]:
    """Return the runs whose jobs wait or go on. Raises Failed: Slurm does not answer."""
    jobs = {str(line["job"]): name for name, line in state.submitted.items()}
    if not jobs:
        return set()
    there = _asked("squeue", "--noheader", "--array", "--format=%i", f"--user={os.geteuid()}").split()
    return {jobs[job] for job in there if job in jobs}


def collect(sweep: Sweep, points: Sequence[Point], state: State, queued: Collection[str]) -> None:
    """Write down what became of each run whose job is over."""
    for point in points:
        line = state.line_of(point)
        if point.name in state.submitted and line and point.name not in queued:
            tasks, number = str(line["tasks"]), str(line["job"]).rpartition("_")[2]
            ended = Path(tasks, f"{number}.end")
            said = end_of_text(sweep.folder / LOGS / f"{point.name}.txt", int(line["from_byte"]))
            _add_end(sweep, point, state, read_regular(ended).decode().split() if ended.is_file() else [], said)


def _add_end(sweep: Sweep, point: Point, state: State, end: Sequence[str], said: str) -> None:
    """Add a run's last line. `end`: its code and seconds, or nothing."""
    line, folder = state.line_of(point), sweep.folder / point.name
    started, job = str(line["commit"]), line["job"]
    if not end:
        state.add(point, "killed", message=GONE.format(job), commit=started)
        return
    code, seconds = None if end[0] == "timeout" else int(end[0]), float(end[1])
    is_ok = code == 0 and (folder / SUMMARY).is_file()
    status = OK if is_ok else processes.status_of(code, said)
    message = "" if is_ok else message_of(status, code, said, folder, sweep.own.limit_sec)
    ran = (read_lines(folder / STARTS) or [{}])[-1].get("commit", started)
    made_of = started if ran == started else f"{started} to {ran}"
    state.add(point, status, seconds=seconds, message=message, commit=made_of)


def script_of(commands: Sequence[Sequence[str]], output: Path, ended: Path) -> str:
    """Return a run's commands as launch/slurm_job.sh sources them.

    Args:
        output: file of all that they print.
        ended: file of their code.
    """
    steps = " && ".join(f"run_step {shlex.join(words)}" for words in commands)
    return f"OUTPUT={shlex.quote(str(output))}\nENDED={shlex.quote(str(ended))}\nrun_steps() {{ {steps}; }}\n"


def submit(sweep: Sweep, state: State, wanted: Sequence[Point]) -> None:
    """Hand runs over to Slurm.

    Raises:
        Refused: not called in the checkout, or the code is no commit.
        Failed: sbatch says no.
    """
    if Path.cwd() != processes.ROOT:
        raise Refused(f"launch: slurm is for calls in the checkout. Run: cd {processes.ROOT}")
    if not is_commit(commit()):
        raise Refused(
            f"launch: the code is {commit()}, so that no later call would know the runs. Commit the changes first."
        )
    tasks = sweep.folder / FOLDER / time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    tasks.mkdir(parents=True)
    (sweep.folder / LOGS).mkdir(exist_ok=True)
    places = {}
    for number, point in enumerate(wanted):
        state.put_aside(point)
        output = sweep.folder / LOGS / f"{point.name}.txt"
        output.touch()
        places[point.name] = output.stat().st_size
        commands = [["benchmark.py", *point.words, *own_folders(point.config, number)]]
        commands += [["eval.py", str(sweep.folder / point.name)]] if point.config.eval.when == "after" else []
        (tasks / f"{number}.sh").write_text(script_of(commands, output, tasks / f"{number}.end"))
    at_once = f"%{sweep.own.jobs}" if sweep.own.jobs else ""
    minutes = math.ceil((sweep.own.limit_sec + BEFORE_LIMIT_SEC) / 60)
    name = re.sub(r"\W+", "-", sweep.name)
    options = [f"--array=0-{len(wanted) - 1}{at_once}", "--nodes=1", f"--time={minutes}", f"--job-name={name}"]
    options += [f"--output={tasks}/%a.txt", *(sweep.own.sbatch or ())]
    variables = {"TASKS": str(tasks), "RANKS_PER_NODE": str(sweep.own.ranks), "LOGDIR": str(tasks / "ranks")}
    said = _asked("sbatch", "--parsable", *options, SCRIPT, AT_LIMIT="end", MAX_RESTARTS="0", **variables)
    job, code = said.strip().partition(";")[0], commit()
    for number, point in enumerate(wanted):
        one = f"{job}_{number}"
        own_line = {"job": one, "tasks": str(tasks), "from_byte": places[point.name]}
        state.add(point, STARTED, commit=code, message=f"in Slurm's queue as {one}", **own_line)
    log.info(f"{sweep.folder}: {count(len(wanted), 'run')} handed to Slurm as job {job}")
