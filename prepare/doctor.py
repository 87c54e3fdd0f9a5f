"""Check for everything that would make a run fail, now or hours later, and say what to do; changes nothing.

    python -m prepare.doctor                                             # the defaults on this machine
    python -m prepare.doctor yamls/shapes.yaml run_name=shapes-1         # the command line of benchmark.py
    WORLD_SIZE=8 LOCAL_WORLD_SIZE=8 python -m prepare.doctor RUN.yaml    # as for composer -n 8

Each check prints one line: OK, warning (the run starts, but may not do what you want) or error (it would fail), and what to
do. The list of checks is in preflight/checks.py; each start of a run makes some of them. A check that takes too long is an
error; a store has 20 s.

Exit code: 0 without an error, 1 with one, 2 when the command line cannot be read.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch._subclasses.fake_tensor import FakeTensorMode

from common import dist
from common.command import command, start
from common.command_line import parse_command_line
from common.errors import ConfigError
from config import load
from preflight.checks import CHECKS, ERROR, OK, WARNING, Check, CheckedRun, Finding, findings_of
from training.config import ALIASES, RunConfig


def run_check(check: Check, case: CheckedRun) -> list[Finding]:
    """Make a check in a thread, and wait for it no longer than its limit."""
    outcome: list[Finding] = []

    def work() -> None:
        try:
            outcome.extend(findings_of(check, case))
        except Exception as error:  # the other checks run anyway
            text = f"the check itself failed: {type(error).__name__}: {error}. Report it, with this command line."
            outcome.append(Finding(ERROR, text))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(check.limit_sec)
    if thread.is_alive():
        locations = ", ".join(source.location or "" for source in case.config.data.sources)
        where = f"{locations} did not answer" if check.name == "store" else "no answer"
        text = (
            f"{where} within {check.limit_sec:g} s. Look whether the store, the name server or the file system hangs."
        )
        return [Finding(ERROR, text)]
    return outcome


@command(keys=RunConfig, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    if dist.get_local_rank() != 0:
        return 0  # started by a launcher: one process per machine prints
    command_line = parse_command_line(argv, ALIASES)
    if command_line.print_config:
        raise ConfigError(["command line: --print_config is for benchmark.py. Leave it out here."])
    with FakeTensorMode():
        pass  # without a GPU, torch 2.10 crashes in a second one if the first was in a thread that has ended, see `run_check`
    case = CheckedRun(load(RunConfig, command_line, check=lambda config: []), reads_datasets=False)
    levels = []
    for group, of_group in CHECKS.items():
        print(f"--- {group} ---", flush=True)
        for check in of_group:
            for finding in run_check(check, case):
                levels.append(finding.level)
                print(f"{finding.level:<7} {check.name:<11} {finding.text.removeprefix(f'{check.name}: ')}", flush=True)
    counts = {level: levels.count(level) for level in (ERROR, WARNING, OK)}
    print(f"{counts[ERROR]} errors, {counts[WARNING]} warnings, {counts[OK]} OK", flush=True)
    return 1 if counts[ERROR] else 0


if __name__ == "__main__":
    start(main)
