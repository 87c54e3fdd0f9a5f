"""EMA updates of one UNet: ours, Composer's, diffusers', and one flat lerp, the limit that memory sets.

The UNet is Stable Diffusion 2's made narrower: its 686 tensors, of as many parameters as asked for. All contestants average
the same live weights in float32, each into a copy of its own:

    ema                      our Algorithm, on Composer's event BATCH_END
    ema_composer             Composer's Algorithm, on the same event
    ema_diffusers            EMAModel.step as it is by default
    ema_diffusers_foreach    EMAModel.step with foreach=True
    ema_flat                 torch.lerp_ of one tensor with as many elements: each byte read and written once

A turn is some updates in a row, each timed by itself and on a GPU synchronised; its value is the fastest one, since what else
a machine does only ever adds. `_temporary_mib` is the most that an update allocates while it runs, beside the copies: counted
by torch's allocator on a GPU and by its profiler on a CPU.

On a CPU with one thread, unless `threads` says otherwise: with more, each of 240 large tensors starts the threads anew, and
where one has to wait for a core, each start costs a slice of the scheduler (seen with two: 8 ms, 1.9 s an update). What is
compared is the traffic to memory, and with one thread an update on a busy machine is still an update.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from composer import Event, Timestamp
from torch import nn

from bench.command import threads
from bench.contest import Figures, rounded, take_turns
from ema import EMA, EMAConfig
from zoo.sd2 import FULL, SD2, Architecture

UPDATES_A_TURN = 9
TURN_SEC = 1.0  # no further update is begun then
FULL_WIDTH, FULL_PARAMETERS = FULL.unet["block_out_channels"][0], 865_910_724
IMAGES_A_BATCH = 256  # any: these averages count batches
COMPOSER_HALF_LIFE = "6931ba"  # its form of 0.9999 a batch

Update = Callable[[], object]


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
    return SD2(Architecture(unet=unet, vae={}, text={}), "stock", {}).build_denoiser().to(device)


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
        "ema": our_update,
        "ema_composer": lambda: composers.apply(Event.BATCH_END, state, None),
        "ema_diffusers": diffusers_update(foreach=False),
        "ema_diffusers_foreach": diffusers_update(foreach=True),
        "ema_flat": lambda: flat_average.lerp_(flat, 1e-4),
    }


def _ms(update: Update, device: torch.device) -> float:
    """Return the time of one update, ms: the fastest of a turn."""
    times_sec: list[float] = []
    while len(times_sec) < UPDATES_A_TURN and sum(times_sec) < TURN_SEC:
        _synchronize(device)
        started = time.perf_counter()
        update()
        _synchronize(device)
        times_sec.append(time.perf_counter() - started)
    return 1e3 * min(times_sec)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def temporary_mib(update: Update, device: torch.device) -> float:
    """Return the most memory that one update has allocated at any moment, MiB, beside what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        update()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it reports the GPU that is not there as an error
    activities = [torch.profiler.ProfilerActivity.CPU]
    # acc_events: one cycle has nothing to accumulate, but without it torch 2.11 warns.
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        update()
    # Each allocation and release by itself: the profiler's own tables add them up by operator.
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most / 2**20


def measure_ema(num_parameters: int, rounds: int, num_threads: int) -> Figures:
    """Measure all contestants on a UNet of about `num_parameters`, with so many threads."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = narrow_unet(num_parameters, device)
    tensors = list(model.parameters())
    contestants, figures = updates(model), Figures()
    turns = {name: functools.partial(_ms, update, device) for name, update in contestants.items()}
    with threads(num_threads):
        figures.flat = {
            "ema_num_parameters": sum(tensor.numel() for tensor in tensors),
            "ema_num_tensors": len(tensors),
            "ema_copy_mib": rounded(sum(tensor.nbytes for tensor in tensors) / 2**20),
            "ema_threads": num_threads,
        }
        for name, values in take_turns(turns, rounds).items():
            figures.add(f"{name}_ms", values)
    for other in ("composer", "diffusers", "diffusers_foreach"):
        figures.ratio(f"ema_speedup_vs_{other}", f"ema_{other}_ms", "ema_ms")
    figures.ratio("ema_over_flat", "ema_ms", "ema_flat_ms")
    # After the times: a profiler that has run once may leave something behind.
    figures.flat |= {f"{n}_temporary_mib": rounded(temporary_mib(u, device)) for n, u in contestants.items()}
    return figures
