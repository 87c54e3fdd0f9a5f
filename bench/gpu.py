"""Measure on a GPU machine what there is time for, the most telling first: rungs of ladders, and tests/gpu.

    python -m bench.gpu                         # about nine minutes; call it again until nothing is left
    python -m bench.gpu budget_sec=3600
    python -m bench.gpu yamls/ladders/sd2_tiny_cpu.yaml results=/tmp/gpu     # rungs of some ladders; here on a CPU

A step is a rung of bench.ladder, or the tests. It is started if the time that is left is about what it needs, and ended when
the budget is spent; the first of a call is started in any case. A step whose record of this commit is ok is done, and any
other outcome is tried again after the steps without a record. Each has a file of its own, see bench.ladder; the tests
RESULTS/gpu_tests.json. Where a rung says device_train_microbatch_size, and the card has no memory for so many images, its
batch is divided into more passes, as its record says.
It needs neither make nor git: EASEL_COMMIT names the commit of a copy. It ends with the table of each ladder.
Exit code: 0, 1 when a step failed, or none was measured; 2 when the command cannot be read.
"""

from __future__ import annotations

import functools
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.ladder import (
    Ladder,
    Rung,
    is_clean,
    is_done,
    is_of,
    log_unknown_commit,
    read_ladder,
    read_record,
    run_rung,
    table,
    with_ratios,
)
from common.command import command
from common.command_line import parse_command_line
from common.errors import ConfigError
from common.files import write_json, write_problem
from common.value_types import limited
from config import load, to_yaml
from run_folder import processes
from run_folder.environment import commit, device_name

LADDERS = tuple(f"yamls/ladders/{name}.yaml" for name in ("sd2_512", "families", "sd2_512_evaluation"))
FIRST = ("cudnn_benchmark", "predecessor", "moments", "tests", "flux_512_mb10", "sdxl_1024_cudnn_attention", "mb64")
"""The most telling steps, in order; the others follow as in their files."""
SECONDS = {"compile=whole": 220, "yamls/flux_512_synthetic.yaml": 150, "yamls/sdxl_1024_synthetic.yaml": 60}
"""What a rung takes on an H200 besides SECONDS_OF_A_RUNG, if these are among its words: compiling, and drawing weights."""
SECONDS_OF_A_RUNG, SECONDS_OF_THE_TESTS = 70, 280
TESTS = "gpu_tests.json"
PASSES = "device_train_microbatch_size"


@dataclass(frozen=True)
class GpuConfig:
    """The keys of this command."""

    budget_sec: int = limited(540, 1)
    """Seconds that a call may take."""
    results: str = "reports/results"
    """Folder of the records."""


@dataclass(frozen=True)
class Step:
    """One thing to measure."""

    name: str
    path: Path
    """File of its record."""
    seconds: float
    """What it is expected to take."""
    measure: Callable[[float], dict[str, Any]]
    """It is given the seconds that are left, and returns its record."""


def _problems(config: GpuConfig, paths: Sequence[str]) -> list[str]:
    """Return what would be known only after minutes."""
    problems = [f"results: {text}"] if (text := write_problem(config.results)) else []
    if not torch.cuda.is_available() and (blocked := [path for path in paths if read_ladder(path).needs_gpu]):
        text = "need a GPU, and torch finds none here. Give yamls/ladders/sd2_tiny_cpu.yaml"
        problems.append(f"{', '.join(blocked)}: {text}.")
    if len({Path(path).stem for path in paths}) < len(paths):
        problems.append(f"{', '.join(paths)}: two have one name, and would share their records. Rename one of them.")
    return problems


def steps_of(ladders: Sequence[Ladder], results: Path) -> list[Step]:
    """Return all steps, the most telling first."""
    steps = [
        Step(rung.name, results / ladder.name / f"{rung.name}.json", _seconds(rung), functools.partial(fitted, rung))
        for ladder in ladders
        for rung in ladder.rungs
    ]
    if torch.cuda.is_available():
        steps.append(Step("tests", results / TESTS, SECONDS_OF_THE_TESTS, run_tests))
    return sorted(steps, key=lambda step: FIRST.index(step.name) if step.name in FIRST else len(FIRST))


def _seconds(rung: Rung) -> float:
    words = (rung.yaml, *rung.keys)
    return rung.limit_sec or SECONDS_OF_A_RUNG + sum(seconds for word, seconds in SECONDS.items() if word in words)


def fitted(rung: Rung, left_sec: float) -> dict[str, Any]:
    """Run a rung, in more passes a batch as long as the card has too little memory for fewer."""
    began = time.monotonic()
    record = run_rung(rung, max(1, int(left_sec)))
    fewer = _fewer_images_a_pass(rung, record)
    left_sec -= time.monotonic() - began
    if fewer is None or left_sec < 1:
        return record
    keys = [f"{PASSES}={fewer}" if key.startswith(f"{PASSES}=") else key for key in rung.keys]
    return fitted(replace(rung, keys=keys), left_sec)


def _fewer_images_a_pass(rung: Rung, record: dict[str, Any]) -> int | None:
    """Return how many images a pass to try after this record; None: memory is not the reason, or it was one image."""
    given = [int(key.split("=")[1]) for key in rung.keys if re.fullmatch(rf"{PASSES}=\d+", key)]
    room = re.search(rf"{PASSES}=(\d+) or less", record.get("output_end", ""))
    is_memory = record["status"] == "out_of_memory" or (record["status"] == "refused" and room is not None)
    if not is_memory or not given or given[-1] == 1:
        return None
    most = min(int(room[1]), given[-1] - 1) if room else given[-1] // 2
    return max(number for number in range(1, most + 1) if given[-1] % number == 0)


def run_tests(left_sec: float) -> dict[str, Any]:
    """Run tests/gpu and return the record: what pytest says last."""
    began = time.monotonic()
    code, output = processes.run([sys.executable, "-m", "pytest", "-q", "tests/gpu"], left_sec)
    lines = [
        line
        for line in output.splitlines()
        if line.startswith(("FAILED", "ERROR")) or " passed" in line or " failed" in line
    ]
    status = "ok" if code == 0 else "timeout" if code is None else "failed"
    found = {"status": status, "device": device_name(), "commit": commit(), "process_seconds": time.monotonic() - began}
    return {**found, "output_end": "\n".join(lines) if code is not None else output[-2000:]}


@command(keys=GpuConfig, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    paths = [word for word in argv if word.endswith(".yaml") and "=" not in word] or LADDERS
    command_line = parse_command_line([word for word in argv if word not in paths], {})
    config = load(GpuConfig, command_line, check=lambda config: [])
    if command_line.print_config:
        print(to_yaml(config), end="")
        return 0
    if problems := _problems(config, paths):
        raise ConfigError(problems)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an interrupt: the step is ended first
    until, here, results = time.monotonic() + config.budget_sec, commit(), Path(config.results).resolve()
    ladders = [read_ladder(path) for path in paths]
    call, started, statuses = f"{time.time():.0f}", False, []
    log_unknown_commit("bench.gpu", here)
    steps = steps_of(ladders, results)
    for step in sorted(steps, key=lambda step: _is_measured(step, here)):
        left_sec = until - time.monotonic()
        if is_done(step.path, here):
            outcome = "has a record of this commit"
        elif started and step.seconds > left_sec:
            outcome = f"not started, it needs about {step.seconds:.0f} s of {max(0.0, left_sec):.0f}"
        else:
            started = True
            record = {"call": call, "rung": step.name, **step.measure(left_sec)}
            step.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(step.path, record)
            statuses.append(record["status"])
            outcome = f"{record['status']} after {record['process_seconds']:.0f} s"
        print(f"{step.path.relative_to(results).with_suffix('')}: {outcome}", flush=True)
    print_tables(ladders, results)
    is_any = any(read_record(step.path) for step in steps)
    return 0 if is_any and not {"failed", "killed"} & set(statuses) else 1


def _is_measured(step: Step, here: str | None) -> bool:
    """True if there is a record of it, also of a failure; where no commit names the code, of any code."""
    record = read_record(step.path)
    return is_of(record, here) if is_clean(here) else record is not None


def print_tables(ladders: Sequence[Ladder], results: Path) -> None:
    """Print the table of each ladder that has records."""
    for ladder in ladders:
        found = {rung.name: read_record(results / ladder.name / f"{rung.name}.json") for rung in ladder.rungs}
        rows = with_ratios(ladder, {name: record for name, record in found.items() if record})
        if rows:
            of = dict.fromkeys(f"{row.get('device')}, commit {row.get('commit')}" for row in rows)
            print("", ladder.name, *of, table(rows), sep="\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
