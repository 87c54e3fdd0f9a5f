"""Check for everything that would make a run fail, now or hours later, and say what to do; changes nothing.

    python -m prepare.doctor                                             # the defaults on this machine
    python -m prepare.doctor yamls/shapes.yaml run_name=shapes-1         # the command line of benchmark.py
    WORLD_SIZE=8 LOCAL_WORLD_SIZE=8 python -m prepare.doctor RUN.yaml    # as for composer -n 8

Each check prints one line: OK, warning (the run starts, but may not do what you want) or error (it would fail), and what to
do. Checks of the machine are in preflight/machine.py, of the run in preflight/checks.py, of the stage in preflight/stage.py.
A check that takes too long is an error; a store has 20 s.

Exit code: 0 without an error, 1 with one, 2 when the command line cannot be read.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from composer.utils import dist
from torch._subclasses.fake_tensor import FakeTensorMode

from cli.command import command, start
from cli.command_line import parse_command_line
from cli.errors import ConfigError
from config import load
from preflight import checks as run_checks
from preflight import devices, machine, versions
from preflight import run as checks
from preflight import stage as stage_checks
from preflight.checks import Case, not_looked_at
from preflight.machine import ERROR, OK, WARNING, Finding
from stages.mixture import opened
from training.run_config import ALIASES, RunConfig

STORE_SEC = 20.0
CHECK_SEC = 120.0  # a hanging file system; the digest of a large checkpoint


# --- the data ---


def store(case: Case) -> list[Finding]:
    """Open the stage, and compare the run with the values it was made for."""
    config, data = case.config, case.config.data
    if data.synthetic:
        return [Finding(OK, "store", "none: data.synthetic=true")]
    wanted = checks.wanted_of_stage(config)
    for key, source in data.named_sources():
        try:
            case.opened += [(one.config, one.stage) for one in opened([source], [source.contents], config.size)]
        except ValueError as error:
            return [Finding(ERROR, "store", f"{key}.{'remote' if source.remote else 'local'}: {error}")]
    without = dataclasses.replace(data, synthetic=True).problems(config.global_batch_size, *wanted)
    found = data.problems(config.global_batch_size, *wanted)
    case.of_stage = [pair for pair in found if pair not in without]
    for problem in checks.closed_data_problems(config):
        case.of_stage.append((problem.keys[0], problem.text.partition(": ")[2]))
    if errors := case.errors("store"):
        return errors
    described = [Finding(OK, "store", stage_checks.described(stage)) for _, stage in case.opened]
    return described or [Finding(OK, "store", "no stage")]


def stage(case: Case) -> list[Finding]:
    """Say whether the stage was made for this run."""
    if not case.opened:
        return [Finding(OK, "stage", "none")] if case.config.data.synthetic else not_looked_at("stage")
    facts = case.opened[0][1].facts
    made = {key: facts[key] for key in ("family", "image_size", "normalize") if key in facts}
    text = ", ".join(f"{key} {value}" for key, value in made.items()) or "for any size and family"
    return case.errors("stage") or [Finding(OK, "stage", f"made for this run: {text}")]


def digests(case: Case) -> list[Finding]:
    """Read some shards of the stage."""
    if not case.opened:
        return [Finding(OK, "digests", "none")] if case.config.data.synthetic else not_looked_at("digests")
    return [found for _, stage in case.opened for found in stage_checks.digests(stage)]


def cache(case: Case) -> list[Finding]:
    """Check the shards that are already in `data.local`."""
    if errors := case.errors("cache"):
        return errors
    if not case.opened:
        return [Finding(OK, "cache", "none")] if case.config.data.synthetic else not_looked_at("cache")
    return [found for source, stage in case.opened for found in stage_checks.cache(source, stage.shards)]


# --- the command ---


@dataclass(frozen=True)
class Check:
    """A check and its name; `limit_sec` None: the usual limit."""

    name: str
    look: Callable[[Case], list[Finding]]
    limit_sec: float | None = None


def checks_of(case: Case) -> dict[str, list[Check]]:
    """Group -> its checks, in the order in which they run: later ones use results of earlier ones."""
    data, loggers = case.config.data, case.config.loggers
    cached = [source.local for source in data.sources if source.remote and source.local]
    remote = [source.remote for source in data.sources if source.remote]
    workers = 0 if data.synthetic else data.workers
    return {
        "machine": [
            Check("versions", lambda _: versions.versions(wandb=loggers.wandb is not None)),
            Check("variables", lambda _: machine.variables(remote)),
            Check("devices", lambda _: devices.devices(dist.get_local_world_size())),
            Check("open files", lambda _: machine.open_files(workers)),
            Check("segments", lambda _: machine.stale_segments(cached)),
            Check("port", lambda _: machine.rendezvous(dist.get_world_size()), STORE_SEC),
        ],
        "configuration": [
            Check("config", run_checks.config_values),
            Check("batch", run_checks.batch),
            Check("weights", run_checks.weights),
            Check("memory", run_checks.memory),
            Check("host memory", run_checks.host_memory),
            Check("/dev/shm", run_checks.shared_memory_room),
        ],
        "data": [
            Check("store", store, STORE_SEC),
            Check("stage", stage),
            Check("digests", digests),
            Check("cache", cache),
        ],
        "run": [
            Check("schedule", run_checks.schedule),
            Check("folders", run_checks.folders),
            Check("disk", run_checks.disk),
            Check("run", run_checks.begun_run),
        ],
    }


def look(check: Check, case: Case) -> list[Finding]:
    """Run a check in a thread, and wait for it no longer than its limit."""
    outcome: list[Finding] = []

    def work() -> None:
        try:
            outcome.extend(check.look(case))
        except Exception as error:  # the other checks run anyway
            text = f"the check itself failed: {type(error).__name__}: {error}. Report it, with this command line."
            outcome.append(Finding(ERROR, check.name, text))

    limit_sec = check.limit_sec or CHECK_SEC
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit_sec)
    if thread.is_alive():
        places = ", ".join(source.location or "" for source in case.config.data.sources)
        where = f"{places} did not answer" if check.name == "store" else "no answer"
        text = f"{where} within {limit_sec:g} s. Look whether the store, the name server or the file system hangs."
        return [Finding(ERROR, check.name, text)]
    return outcome


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    if dist.get_local_rank() != 0:
        return 0  # started by a launcher: one process per machine prints
    command_line = parse_command_line(argv, ALIASES)
    if command_line.print_config:
        raise ConfigError(["command line: --print_config is for benchmark.py. Leave it out here."])
    with FakeTensorMode():
        pass  # without a GPU, torch 2.10 crashes in a second one if the first was in a thread that has ended, see `look`
    case = Case(load(RunConfig, command_line, check=lambda config: []))
    levels = []
    for group, of_group in checks_of(case).items():
        print(f"--- {group} ---", flush=True)
        for check in of_group:
            for finding in look(check, case):
                levels.append(finding.level)
                print(f"{finding.level:<7} {finding.check:<11} {finding.text}", flush=True)
    counts = {level: levels.count(level) for level in (ERROR, WARNING, OK)}
    print(f"{counts[ERROR]} errors, {counts[WARNING]} warnings, {counts[OK]} OK", flush=True)
    return 1 if counts[ERROR] else 0


if __name__ == "__main__":
    start(main)
