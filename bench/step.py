"""How long a step of training takes: ours, a plain loop of diffusers, and the predecessor, in turns in one process.

    python -m bench.step                                        # tiny networks: under two minutes on two CPU cores
    python -m bench.step preset=full batch_size=32              # SD2 at 512 px, on a GPU
    python -m bench.step stage=moments precision=bf16 results=/tmp/step.json

Two contests, without EMA and with it, each around the same initial weights, optimizer (AdamW) and batch:

    ours          Composer's Trainer, LatentDiffusion, fused AdamW, gradient norm and clipping, ema.py, and a run's clocks,
                  record of losses and checkpointer, for which nothing falls due
    plain         diffusers' text-to-image example without accelerate: bench/step_contest.py says what is in it
    predecessor   bench.predecessor: Composer's own EMA, no clipping; in the contest with EMA alone, since it always has one

A batch lies on the device before the step, the same for all: what loaders take is in bench.data and bench.micro. Captions
are encoded in the step, and images too (stage=images). No captions are dropped.

Before the turns each takes some steps, ours and plain with the same random numbers. In fp32 their losses have to be equal up
to 1e-6 of their size, else nothing is recorded; in bf16 the plain loop draws other noise, in that type.

A turn is some steps, timed from the end of one before them: ms a step by the clock and of the processor (all threads of the
process; on a GPU the host's). `times as fast` is the other's time over ours.
Exit code: 0, 1 when the losses differ, 2 when the command cannot be read.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch

from bench.command import ends, head, read_keys, threads, write_record
from bench.contest import Figures, rounded, take_turns
from bench.latency_contest import free, precision_problem
from bench.step_contest import contestants, largest_difference
from cli.command import command
from cli.command_line import Problem
from cli.errors import Failed
from cli.limits import limited
from config import as_written
from data import DataConfig
from ema import EMAConfig
from reports.tables import text_of
from training.device import build_device
from training.optimizer import OptimizerConfig
from training.run_config import RunConfig, build, resolve
from zoo import load_family
from zoo.model_config import ModelConfig
from zoo.objectives import ObjectiveConfig
from zoo.spec import MAX_SIDE_PX, as_size

SCHEMA = 1
# Of 866 M parameters in float32: weights, gradients, AdamW's two, the average; and the encoders' 424 M; three times.
FULL_GIB = 53
SAME_STEPS = 2  # of each, before the turns: the second loss is of weights that the first step has changed
MOST_DIFFERENCE = 1e-6  # of two losses in fp32, as a part of one


@dataclass(frozen=True)
class StepConfig:
    """The keys of this command."""

    preset: Literal["full", "tiny"] | None = None
    """Size of the networks. null: full on a GPU, tiny on a CPU."""
    image_size: int | None = limited(None, 1, MAX_SIDE_PX)
    """Side of the images in pixels. null: 512 for full, 64 for tiny."""
    stage: Literal["images", "moments"] = "images"
    """What a batch has: images, encoded in the step, or the VAE's moments."""
    batch_size: int = limited(8, 1, 4096)
    """Images of a step."""
    precision: Literal["fp32", "tf32", "bf16"] | None = None
    """Precision of the step. null: bf16 on a GPU, fp32 on a CPU."""
    clip_norm: float = limited(1.0, 0.0, above=True)
    """Norm that ours and the plain loop clip gradients to; 1 is the example's default."""
    steps: int = limited(5, 1, 1000)
    """Steps of a turn."""
    rounds: int = limited(7, 1)
    """Turns of each contestant."""
    threads: int = limited(1, 1, 1024)
    """Threads of torch on a CPU."""
    results: str = "reports/results/step.json"
    """File of the record; an earlier one is replaced."""


def check(config: StepConfig) -> list[Problem]:
    """Return every problem of the keys."""
    found = []
    if text := load_family("sd2", "tiny", "stock").size_problem(as_size(_size_px(config))):
        found.append(Problem(f"image_size: {text}", ("image_size",)))
    if config.precision is not None and (text := precision_problem(config.precision)):
        found.append(Problem(f"precision: {config.precision} {text}", ("precision",)))
    if _preset(config) == "full" and (free := _free_gib()) < FULL_GIB:
        text = f"full needs {FULL_GIB} GiB for three contestants, beside their batches; {free:.1f} are free. Say preset=tiny."
        found.append(Problem(f"preset: {text}", ("preset",)))
    return found


def _free_gib() -> float:
    num_bytes = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else psutil.virtual_memory().available
    return num_bytes / 2**30


def _preset(config: StepConfig) -> Literal["full", "tiny"]:
    return config.preset or ("full" if torch.cuda.is_available() else "tiny")


def _size_px(config: StepConfig) -> int:
    return config.image_size or {"full": 512, "tiny": 64}[_preset(config)]


def run_of(config: StepConfig, *, ema: bool) -> RunConfig:
    """Return the run whose step is measured."""
    return resolve(
        RunConfig(
            run_name="step",
            global_batch_size=config.batch_size,
            image_size=_size_px(config),
            precision=config.precision,
            model=ModelConfig(preset=_preset(config), weights="random"),
            objective=ObjectiveConfig(caption_dropout=0.0),
            data=DataConfig(stage=config.stage, synthetic=True),
            optimizer=OptimizerConfig(clip_norm=config.clip_norm),
            ema=EMAConfig(enabled=ema),
        )
    )


def measure(config: StepConfig, *, ema: bool) -> Figures:
    """Let the contestants take turns. Raises Failed: their losses differ."""
    run, figures = run_of(config, ema=ema), Figures()
    assert run.precision is not None
    device = build_device(run.precision)
    torch.set_num_threads(config.threads)
    name = "ema" if ema else "bare"
    with contestants(run, build(run), device) as found:
        difference = largest_difference(found, run, SAME_STEPS)
        if run.precision == "fp32":
            if not difference <= MOST_DIFFERENCE:
                said = f"losses differ by {difference:.2g} of their size, {MOST_DIFFERENCE:g} is allowed"
                raise Failed(f"step: no record was written: with the same random numbers {said}.")
            figures.flat[f"{name}_loss_difference"] = rounded(difference)
        cpu_sec: dict[str, list[float]] = {each: [] for each in found}

        def turn(each: str) -> float:
            seconds, cpu = found[each].turn(config.steps)
            cpu_sec[each].append(cpu)
            return seconds

        seconds = take_turns({each: functools.partial(turn, each) for each in found}, config.rounds, warm_up=False)
    for each in found:
        figures.add(f"{name}_{each}_ms", [1e3 * value for value in seconds[each]])
        figures.add(f"{name}_{each}_cpu_ms", [1e3 * value for value in cpu_sec[each]])
        figures.add(f"{name}_{each}_images_per_sec", [config.batch_size / value for value in seconds[each]])
        if each != "ours":
            figures.ratio(f"{name}_speedup_vs_{each}", f"{name}_{each}_ms", f"{name}_ours_ms")
            figures.ratio(f"{name}_cpu_speedup_vs_{each}", f"{name}_{each}_cpu_ms", f"{name}_ours_cpu_ms")
    return figures


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(StepConfig, argv, check)
    if config is None:
        return 0
    began = time.monotonic()
    run, flat, by_round = run_of(config, ema=False), {}, {}
    record: dict[str, Any] = {**head(SCHEMA), "measured": "step", "config": as_written(config)}
    with threads(config.threads):
        for ema in (False, True):
            figures = measure(config, ema=ema)
            flat |= figures.flat
            by_round |= figures.by_round
            free()
    what: Mapping[str, Any] = {"precision": run.precision, "preset": _preset(config), "image_size": _size_px(config)}
    record |= {**what, **ends(began), **flat, "by_round": by_round}
    write_record(config.results, record)
    print(text_of(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
