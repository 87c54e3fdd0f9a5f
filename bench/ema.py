"""EMA updates of one UNet: ours, Composer's, diffusers', and one flat lerp, the limit that memory sets.

    python -m bench.ema                                         # -> runs/bench/ema.json
    python -m bench.ema num_parameters=1000000 rounds=3 results=/tmp/ema.json

The UNet is Stable Diffusion 2's made narrower: its 686 tensors. All contestants average the same live weights in float32,
each into its own copy:

    ours                 our Algorithm, on Composer's event BATCH_END
    composer             Composer's Algorithm, on the same event
    diffusers            EMAModel.step as it is by default
    diffusers_foreach    EMAModel.step with foreach=True
    flat                 torch.lerp_ of one tensor with as many elements: each byte read and written once

A turn is some updates in a row; its value is the fastest one, ms, since other load only ever adds.
On a CPU with one thread: with more, each of 240 large tensors starts the threads again, which on a busy machine takes most of
the time. Exit code: 0, or 2 if the command cannot be read.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from composer import Event, Timestamp
from torch import nn

from bench.command import Figures, measure_and_record, take_turns, threads
from common.command import command
from common.value_types import limited
from ema import EMA, EMAConfig
from families.sd2 import FULL, SD2, SD2Sizes

UPDATES_A_TURN = 9
TURN_SEC = 1.0  # after which no further update is started
FULL_WIDTH, FULL_PARAMETERS = FULL.unet["block_out_channels"][0], 865_910_724
IMAGES_A_BATCH = 256  # any: these averages count batches
COMPOSER_HALF_LIFE = "6931ba"  # its form of 0.9999 a batch

Update = Callable[[], object]


@dataclass(frozen=True)
class EMABenchConfig:
    """The keys of this command."""

    num_parameters: int = limited(100_000_000, 100_000)
    """About how many parameters the UNet has."""
    rounds: int = limited(7, 1)
    """Turns of each contestant."""
    threads: int = limited(1, 1, 1024)
    """Threads of torch on a CPU."""
    results: str = "runs/bench/ema.json"
    """File of the record; an earlier one is replaced."""


def narrow_unet(num_parameters: int, device: torch.device) -> nn.Module:
    """Build SD2's UNet with about this many parameters, from a fixed seed."""
    # Nearly all tensors have two sides that grow with the width.
    width = max(4, 4 * round(FULL_WIDTH / 4 * math.sqrt(num_parameters / FULL_PARAMETERS)))
    unet = dict(
        block_out_channels=(width, 2 * width, 4 * width, 4 * width),
        attention_head_dim=(1, 2, 4, 4),  # numbers of heads: they change no shape
        cross_attention_dim=round(width * FULL.unet["cross_attention_dim"] / FULL_WIDTH),
        norm_num_groups=4,
        use_linear_projection=True,
    )
    torch.manual_seed(0)
    return SD2(SD2Sizes(unet=unet, vae={}, text={}), "stock", {}).build_denoiser().to(device)


def updates(model: nn.Module) -> dict[str, Update]:
    """Name -> one update, of each contestant."""
    from composer.algorithms import EMA as ComposerEMA
    from diffusers.training_utils import EMAModel

    state = SimpleNamespace(model=model, timestamp=Timestamp(), previous_timestamp=Timestamp())
    ours, composers = EMA(EMAConfig(enabled=True)), ComposerEMA(half_life=COMPOSER_HALF_LIFE)
    ours.apply(Event.FIT_START, state, None)
    composers.apply(Event.INIT, state, None)

    def our_update() -> None:
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(samples=IMAGES_A_BATCH)
        ours.apply(Event.BATCH_END, state, None)

    def diffusers_update(foreach: bool) -> Update:
        average = EMAModel(model.parameters(), foreach=foreach)
        return lambda: average.step(model.parameters())

    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    flat_average = flat.clone()
    return {
        "ours": our_update,
        "composer": lambda: composers.apply(Event.BATCH_END, state, None),
        "diffusers": diffusers_update(foreach=False),
        "diffusers_foreach": diffusers_update(foreach=True),
        "flat": lambda: flat_average.lerp_(flat, 1e-4),
    }


def _ms(update: Update, synchronize: Update) -> float:
    """Return the fastest update of a turn, ms."""
    times_sec: list[float] = []
    while len(times_sec) < UPDATES_A_TURN and sum(times_sec) < TURN_SEC:
        synchronize()
        started = time.perf_counter()
        update()
        synchronize()
        times_sec.append(time.perf_counter() - started)
    return 1e3 * min(times_sec)


def measure(config: EMABenchConfig) -> dict[str, Any]:
    """Let the contestants alternate, and return the figures."""
    is_gpu, figures = torch.cuda.is_available(), Figures()
    model = narrow_unet(config.num_parameters, torch.device("cuda" if is_gpu else "cpu"))
    synchronize: Update = torch.cuda.synchronize if is_gpu else lambda: None
    turns = {name: functools.partial(_ms, update, synchronize) for name, update in updates(model).items()}
    with threads(config.threads):
        for name, values in take_turns(turns, config.rounds).items():
            figures.add(f"{name}_ms", values)
            if name != "ours":
                figures.ratio(f"speedup_vs_{name}", f"{name}_ms", "ours_ms")
    tensors = list(model.parameters())
    figures.flat |= {"num_tensors": len(tensors), "trained_parameters": sum(tensor.numel() for tensor in tensors)}
    return figures.as_record()


@command(keys=EMABenchConfig, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    return measure_and_record("ema", EMABenchConfig, argv, measure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
