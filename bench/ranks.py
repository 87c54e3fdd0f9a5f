"""What several ranks cost, and how soon one that is lost is missed. Every run is a process a rank, of one thread on a CPU.

    python -m bench.ranks                       # seconds from a signal to the end -> reports/results/ranks_lost.json
    python -m bench.ranks measure=efficiency results=reports/results/ranks.json     # two ranks against one

efficiency: the miniature's network (yamls/shapes.yaml) on synthetic moments, launched by Composer's launcher, in turns.

    one          one rank, a batch of `device_batch`
    two          two ranks, each with such a batch: `efficiency` is its speed over twice that of `one`
    shared       two ranks that share one such batch: `speedup` is its speed over that of `one`
    all_reduce   as `two`, with bench/all_reduce.py in it: the part of a step in which gradients are on their way, and that in
                 which nothing else is done

lost: two ranks that no launcher joins, as on two machines, in training. One of them is sent SIGKILL or SIGSTOP. What counts
is the other's end, which is to come with exit code 1 and without a trace. `limit` is health.stall_sec.

    kill_RANK, stop_RANK        the rank that has the signal; the store is rank 0's
    stop_RANK_default           the same with the default limits

Exit code: 0, 1 when a run failed, 2 when the command cannot be read.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.command import keep, read_keys
from bench.contest import Figures, rounded, take_turns
from cli.command import command
from cli.errors import Failed
from cli.limits import limited

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent
RUN_SEC = 3600.0
TRAINED = 3  # windows in the record, before the signal
WARM_UP, WINDOW = 20, 10  # batches


@dataclass(frozen=True)
class RanksConfig:
    """The keys of this command."""

    measure: Literal["efficiency", "lost"] = "lost"
    """What is measured."""
    device_batch: int = limited(16, 2, 4096)
    """Images of a step on one rank, even."""
    batches: int = limited(80, 40)
    """Of each run; the first 20 are not measured."""
    limit: float = limited(10.0, 2.0, 600.0)
    """health.stall_sec of the runs that lose a rank."""
    rounds: int = limited(5, 1)
    """Turns of each contestant."""
    default_rounds: int = limited(2, 0)
    """Turns of a stopped rank with the default limits, more than two minutes each."""
    results: str = "reports/results/ranks_lost.json"
    """File of the record; an earlier one is replaced."""


def words_of(folder: str, name: str, *more: str) -> list[str]:
    """Return the words of a run of the miniature's network on synthetic moments."""
    data = ["data.synthetic=true", "data.remote=null", "data.local=null", "eval.when=off", "mlperf.enabled=false"]
    own = ["target.fid=null", "target.clip=null", "schedule.name=constant", "loggers.progress_bar=false"]
    return ["yamls/shapes.yaml", *data, *own, f"run_folder={folder}", f"run_name={name}", *more]


def variables(**more: str) -> dict[str, str]:
    """Return the environment of a run: one thread, no GPU."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}


# --- efficiency ---


def speed(
    config: RanksConfig, number: list[int], all_reduce: list[dict[str, float]] | None, num: int, batch: int
) -> float:
    """Run once, and return images/s. `all_reduce`: takes the medians of the run's all-reduce, and its step, ms."""
    with tempfile.TemporaryDirectory() as folder:
        number[0] += 1
        own = [f"global_batch_size={batch}", f"max_duration={config.batches}ba", f"measure.window_batches={WINDOW}"]
        words = words_of(folder, "run", *own, f"measure.warmup_batches={WARM_UP}")
        program = ["benchmark.py"] if all_reduce is None else ["-m", "bench.all_reduce", f"{folder}/steps.json"]
        launcher = str(Path(sys.executable).parent / "composer")
        done = subprocess.run(
            [launcher, "-n", str(num), *program, *words],
            cwd=ROOT,
            env=variables(),
            capture_output=True,
            text=True,
            timeout=RUN_SEC,
        )
        if done.returncode:
            raise Failed(f"ranks: a run of {num} ranks failed with exit code {done.returncode}: {done.stderr[-500:]}")
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
        found = float(summary["images_per_sec"])
        if all_reduce is not None:
            steps = json.loads(Path(folder, "steps.json").read_text())[WARM_UP:]
            medians = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
            all_reduce.append({**medians, "step_ms": 1e3 * batch / found})
        return found


def efficiency(config: RanksConfig) -> dict[str, Any]:
    """Let the contestants take turns."""
    number, steps, one = [0], list[dict[str, float]](), config.device_batch
    turn = functools.partial(speed, config, number)
    contestants: Mapping[str, Callable[[], float]] = {
        "one": functools.partial(turn, None, 1, one),
        "two": functools.partial(turn, None, 2, 2 * one),
        "shared": functools.partial(turn, None, 2, one),
        "all_reduce": functools.partial(turn, steps, 2, 2 * one),
    }
    speeds, figures = take_turns(contestants, config.rounds, warm_up=False), Figures()
    for name, values in speeds.items():
        figures.add(f"{name}_images_per_sec", values)
    figures.add("one_twice_images_per_sec", [2 * value for value in speeds["one"]])
    figures.ratio("efficiency", "two_images_per_sec", "one_twice_images_per_sec")
    figures.ratio("speedup_shared", "shared_images_per_sec", "one_images_per_sec")
    for key in ("step_ms", "in_flight_ms", "exposed_ms"):
        figures.add(f"all_reduce_{key}", [step[key] for step in steps])
    for part in ("in_flight", "exposed"):
        figures.ratio(f"all_reduce_{part}_frac", f"all_reduce_{part}_ms", "all_reduce_step_ms")
    return {**figures.flat, "by_round": figures.by_round}


# --- lost ---


def missed(name: signal.Signals, rank: int, limit: float | None) -> float:
    """Send a signal to one of two ranks in training, and return the seconds until the other has ended."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        own = ["global_batch_size=8", "max_duration=100000ba", "measure.window_batches=1"]
        words = words_of(folder, "run", *own, *([] if limit is None else [f"health.stall_sec={limit:g}"]))
        shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = []
        try:
            for number in range(2):
                with open(Path(folder, f"said{number}"), "w") as said:
                    env = variables(**shared, RANK=str(number), NODE_RANK=str(number))
                    command = [sys.executable, "benchmark.py", *words]
                    ranks.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=said, stderr=said))
            lines, other = Path(folder, "run", "metrics.jsonl"), ranks[1 - rank]
            while not lines.exists() or lines.read_bytes().count(b"\n") < TRAINED:
                if any(each.poll() is not None for each in ranks):
                    raise Failed(f"ranks: a run ended before it trained: {Path(folder, 'said0').read_text()[-500:]}")
                time.sleep(0.05)
            ranks[rank].send_signal(name)
            began = time.monotonic()
            code = other.wait(timeout=RUN_SEC)
            took = time.monotonic() - began
            said_by = Path(folder, f"said{1 - rank}").read_text()
            if code != 1 or "Traceback" in said_by:
                raise Failed(f"ranks: the other rank ended with {code}, not with 1 and a message: {said_by[-500:]}")
            return took
        finally:
            for each in ranks:
                each.kill()
                each.wait()


def lost(config: RanksConfig) -> dict[str, Any]:
    """Lose ranks in turns."""
    kinds = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    figures = Figures()

    def turns(limit: float | None, names: Sequence[str], rounds: int, suffix: str) -> None:
        contestants = {
            f"{name}_{rank}{suffix}": functools.partial(missed, kinds[name], rank, limit)
            for name in names
            for rank in (0, 1)
        }
        for name, values in take_turns(contestants, rounds, warm_up=False).items():
            figures.add(f"{name}_sec", [rounded(value) for value in values])

    turns(config.limit, ("kill", "stop"), config.rounds, "")
    if config.default_rounds:
        turns(None, ("stop",), config.default_rounds, "_default")
    return {**figures.flat, "by_round": figures.by_round}


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(RanksConfig, argv)
    if config is None:
        return 0
    work = {"efficiency": efficiency, "lost": lost}[config.measure]
    keep(config.results, SCHEMA, "ranks", config, functools.partial(work, config))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
