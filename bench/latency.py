"""Measure the seconds from captions to images, by batch, precision and kind of compilation, beside diffusers' own pipeline.

    python -m bench.latency                                     # SD2 and SD 1.5: full size on a GPU, tiny on a CPU
    python -m bench.latency batches=[1] precisions=fp32 ways=eager,whole results=/tmp/latency.json
    python -m bench.latency processes=true variants=stock,shapes batches=[8,16,32] samplers=ddim precisions=fp32 ways=eager
    make gpu-latency                                            # the full form, for a GPU

    eager         LatentDiffusion.generate, as an evaluation uses it: 16-bit precisions are autocast over float32 weights
    whole         the same with denoiser and encoders compiled, the denoiser as one graph
    cuda_graphs   the same, replayed from CUDA graphs
    blocks        compiled block by block
    tensorrt      the denoiser compiled by Torch-TensorRT, where torch-tensorrt is installed
    pipeline      diffusers' own of the family, eager, its weights cast to the precision, as its documentation shows

A turn goes from before the tokenizer to after the VAE, the device idle at both ends. All take turns (bench/contest.py), with
the same random weights, noise, sampler and steps; the first call of each, which compiles, is kept apart. The shares of text
encoder, denoiser and VAE are from one more call of ours, with a clock around each: CUDA events on a GPU.

The third command is for batches as an evaluation's. With `processes` ours is set up as a command is, and
the pipeline as torch comes; without it they share a process, and its ways with memory.

The first of `samplers` is measured in all precisions and batches, the others in the first precision that this machine has
and in the first batch. What is not possible here is skipped with its reason; what runs out of memory is recorded as that.
The record is written after each contest. Called again, the command keeps what the same commit measured on the same device,
and goes on. `python -m reports.latency RECORD.json` shows it; no GPU is needed for that.
Exit code: 0, 1 when a contestant failed, 2 when the command cannot be read.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bench.command import head, read_keys, write_record
from bench.latency_contest import Contest, free
from bench.latency_makers import FAMILIES, PRECISIONS, WAYS, Case, family_of, precision_problem
from cli.command import command
from cli.command_line import Problem
from cli.limits import limited
from cli.log import log
from reports.latency import PIPELINE, text_of
from zoo import load_family
from zoo.sampling import FLOW, MAX_STEPS, MIN_STEPS, OF_FLOW, SAMPLERS
from zoo.sd2 import ARCHITECTURES
from zoo.spec import MAX_SIDE_PX, as_size

SCHEMA = 1


@dataclass(frozen=True)
class LatencyConfig:
    """The keys of this command."""

    variants: str = "stock,sd15"
    """Variants of SD2, as model.variant, with commas between: stock, sd15 (SD 1.5), mlperf; or shapes (the miniature), sdxl,
    flux (its variant dev)."""
    preset: Literal["full", "tiny"] | None = None
    """Size of the networks. null: full on a GPU, tiny on a CPU."""
    image_size: int | None = limited(None, 1, MAX_SIDE_PX)
    """Side of the images in pixels. null: 512 for full, 64 for tiny."""
    samplers: str = "plms,ddim,dpm++,euler"
    """The first is measured in all precisions and batches, the others in the first of each."""
    steps: int = limited(50, MIN_STEPS, MAX_STEPS)
    """Steps of the sampler."""
    guidance: float = limited(7.5, 0.0)
    """Scale of classifier-free guidance."""
    batches: tuple[int, ...] = (1, 2, 4)
    """Images of a call."""
    precisions: str = "fp16,bf16,fp32"
    """Of fp16, bf16, tf32 and fp32; a CPU has bf16 and fp32."""
    ways: str = "eager,whole,cuda_graphs,blocks,tensorrt"
    """How ours computes: eager, whole, cuda_graphs, blocks, tensorrt. The pipeline always takes part."""
    channels_last: bool = False
    """NHWC tensors in ours, as the key of a run."""
    rounds: int = limited(10, 1)
    """Turns of each contestant."""
    threads: int = limited(1, 1, 1024)
    """Threads of torch on a CPU."""
    processes: bool = False
    """A process for each contestant: the pipeline's is as torch comes, ours is set up as that of a command."""
    results: str = "reports/results/latency_cpu.json"
    """File of the record. One of the same commit and device is added to, another one replaced."""


def listed(text: str) -> list[str]:
    """Return the names of a key, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def check(config: LatencyConfig) -> list[Problem]:
    """Return every problem of the keys that does not depend on the machine."""
    known = {"variants": (*ARCHITECTURES, *FAMILIES), "samplers": SAMPLERS, "precisions": PRECISIONS, "ways": WAYS}
    found = []
    for key, possible in known.items():
        if unknown := [name for name in listed(getattr(config, key)) if name not in possible]:
            text = f"unknown {', '.join(map(repr, unknown))}. Known: {', '.join(possible)}."
            found.append(Problem(f"{key}: {text}", (key,)))
    if not config.batches or any(type(batch) is not int or not 1 <= batch <= 1024 for batch in config.batches):
        text = f"{list(config.batches)}. Possible: numbers from 1 to 1,024, e.g. [1,2,4]."
        found.append(Problem(f"batches: {text}", ("batches",)))
    wanted = [variant for variant in listed(config.variants) if variant in FAMILIES]
    for family in (load_family(*family_of(variant, "tiny")) for variant in ("stock", *wanted)):
        if text := family.size_problem(as_size(_size_px(config))):
            found.append(Problem(f"image_size: {text}", ("image_size",)))
    return found


def _preset(config: LatencyConfig) -> str:
    return config.preset or ("full" if torch.cuda.is_available() else "tiny")


def _size_px(config: LatencyConfig) -> int:
    return config.image_size or {"full": 512, "tiny": 64}[_preset(config)]


def cases_of(config: LatencyConfig) -> Iterator[Case]:
    """Yield the cases in the order in which they are measured; a flow is sampled by euler alone."""
    precisions = listed(config.precisions)
    possible = [precision for precision in precisions if not precision_problem(precision)]
    for variant in listed(config.variants):
        is_flow = load_family(*family_of(variant, _preset(config))).objective["prediction"] == FLOW
        samplers = list(OF_FLOW) if is_flow else listed(config.samplers)
        for precision in precisions:
            for sampler in samplers:
                is_first = sampler == samplers[0]
                if not is_first and precision != next(iter(possible), None):
                    continue
                for batch in dict.fromkeys(config.batches if is_first else config.batches[:1]):
                    yield Case(
                        variant=variant,
                        preset=_preset(config),
                        image_size=_size_px(config),
                        sampler=sampler,
                        steps=config.steps,
                        guidance=config.guidance,
                        precision=precision,
                        batch_size=batch,
                        channels_last=config.channels_last,
                        rounds=config.rounds,
                        threads=config.threads,
                        processes=config.processes,
                    )


# --- the record ---


def begun_record(config: LatencyConfig) -> dict[str, Any]:
    """Return the record to go on with: the one that is there, where it is of this commit and device, else a new one."""
    torch.set_num_threads(config.threads)
    new = {**head(SCHEMA), "contests": []}
    try:
        old = json.loads(Path(config.results).read_text())
        same = all(old[key] == new[key] for key in ("schema", "device", "commit")) and isinstance(old["contests"], list)
    except FileNotFoundError:
        return new
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    is_commit = new["commit"] is not None and not new["commit"].endswith("+changes")
    if same and is_commit:
        return old
    log.info(f"{config.results}: is not of this commit and device, or of uncommitted code. It is replaced.")
    return new


def done(record: dict[str, Any], case: Case, ways: Sequence[str]) -> bool:
    """True where the record has this contest with these contestants, and none of them failed."""
    found = [each for each in record["contests"] if _is_of(each, case, ways)]
    return bool(found) and "failed" not in found[0]["status"].values()


def _is_of(contest: Mapping[str, Any], case: Case, ways: Sequence[str]) -> bool:
    same = all(contest[key] == value for key, value in dataclasses.asdict(case).items())
    return same and list(contest["status"]) == [PIPELINE, *ways]


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(LatencyConfig, argv, check)
    if config is None:
        return 0
    record, ways = begun_record(config), listed(config.ways)
    for case in cases_of(config):
        name = f"{case.variant}, {case.sampler}, {case.precision}, batch {case.batch_size}"
        if done(record, case, ways):
            log.info(f"{name}: has a record of this commit")
            continue
        begun = time.monotonic()
        others = [each for each in record["contests"] if not _is_of(each, case, ways)]
        record["contests"] = [*others, Contest(case, ways).measure()]
        free()
        write_record(config.results, record)
        log.info(f"{name}: {time.monotonic() - begun:.0f} s")
    print(text_of(record))
    return 1 if any("failed" in contest["status"].values() for contest in record["contests"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
