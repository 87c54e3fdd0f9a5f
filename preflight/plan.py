"""A run's plan, before it starts: memory by kind, compute, images and time to the benchmark's target.

`shown` returns the output of `--print_config`: the resolved run as YAML, then the plan as comments. So the whole output is
a YAML file with the same configuration. Every number comes from the traced network (training/cost.py), from the run's keys,
from a record of the run on other devices (preflight/scaling_devices.py), or from the runs of the benchmark's reference
(zoo/mlperf_sd.py and zoo/mlperf_flux.py). If a number cannot be computed, a line says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from composer.utils import dist

from cli.limits import read_duration
from config import count, flat, to_yaml
from model import AUTOCAST_DTYPES
from preflight.run import cost_of, planned_microbatch, ranks_on_device
from training.cost import CUDA_AUTOCAST_FACTOR, USABLE_FRACTION, Cost, has_average_on_device, room_of_a_rank
from training.optimizer import total_batches
from training.run_config import RunConfig, resolve
from zoo import load_family, mlperf
from zoo.mlperf_rules import Benchmark, ReferencePoint
from zoo.model_config import model_problems

CARDS_GIB = (80, 139)  # H100 and A100; H200
MOST_GPUS = 64
GPUS_A_MACHINE = 8
RATE_KEY, RECORD_KEY = "measure.expected_images_per_sec", "measure.expected_record"


def shown(config: RunConfig) -> str:
    """Return a run's resolved YAML and its plan; for an invalid run, as much of them as possible.

    Args:
        config: with valid names and types, not resolved.
    """
    try:
        config = resolve(config)
    except ValueError:  # unknown family, variant or size: reported by the problem that refuses the run
        return ""
    if not _can_be_traced(config):
        return to_yaml(config)
    cost = cost_of(config)
    values = {
        **flat(config),
        "optimizer.lr": config.optimizer.learning_rate(config.global_batch_size),
        "device_train_microbatch_size": planned_microbatch(config, cost),
    }
    ways = dict(room=room_of_a_rank(ranks_on_device()), ema_on_device=has_average_on_device(config))
    return to_yaml(config) + describe(cost, values, num_ranks=dist.get_world_size(), **ways)


def _can_be_traced(config: RunConfig) -> bool:
    """True if there is a network for this size and prediction, and the batch sizes are valid."""
    unloaded = dataclasses.replace(config.model, weights=None)  # missing weights do not change it
    if model_problems(unloaded, config.size, encoders_wanted=False):
        return False
    family = load_family(config.model.family, config.model.preset, config.model.variant)
    sizes = (config.global_batch_size, config.device_train_microbatch_size)
    is_batch = min(size for size in sizes if isinstance(size, int)) >= 1
    return is_batch and config.objective.prediction in family.predictions


def describe(cost: Cost, values: Mapping[str, Any], *, num_ranks: int, room: str, ema_on_device: bool) -> str:
    """Return the plan of a run, lines that begin with "# ".

    Args:
        cost: of one training step, traced.
        values: key -> value of the resolved run, as `config.flat` gives them, with `optimizer.lr` filled in. Microbatch and
            global batch size are at least 1. For every other invalid value, its line is left out.
        num_ranks: over all machines.
        room: the device's memory, see `training.cost.room_of_a_rank`.
        ema_on_device: the EMA weights are on the device too.
    """
    microbatch, host_gib = values["device_train_microbatch_size"], cost.frozen_host_gib
    encoders = "the encoders run on the CPU" if host_gib else "encoders forward"
    on_host = (
        [f"memory of the machine: {_short(host_gib)} GiB for the frozen encoders of each rank"] if host_gib else []
    )
    lines = [
        "--- what this run will take, by estimate: nothing here was measured ---",
        f"parameters: {cost.trained_parameters:,} trained, {cost.frozen_parameters:,} frozen",
        f"compute: {_short(cost.flops_per_image / 1e12)} TFLOP an image and training step (denoiser forward and backward, "
        f"{encoders})",
        _batch(values["global_batch_size"], num_ranks, microbatch),
        f"memory of one device at {count(microbatch, 'image')} a pass in {values['precision']}, GiB:",
        *_memory(cost, microbatch, room, ema=ema_on_device),
        *on_host,
        *smallest_numbers(cost, values),
        f"full checkpoint: {_short(cost.checkpoint_gib(ema=bool(values['ema.enabled'])))} GiB",
        *_duration(values, speed := _speed(values, num_ranks, cost)),
        *_target(values, speed.rate),
    ]
    return "".join(f"# {line}\n" for line in lines)


def _batch(global_batch_size: int, num_ranks: int, microbatch: int) -> str:
    passes, rest = divmod(global_batch_size, num_ranks * microbatch)
    parts = [count(num_ranks, "rank"), count(passes, "pass", "passes"), count(microbatch, "image")]
    return f"global batch: {count(global_batch_size, 'image')}" + ("" if rest else f" = {' x '.join(parts)}")


def _memory(cost: Cost, microbatch: int, room: str, *, ema: bool) -> list[str]:
    kinds = cost.memory_by_kind(microbatch, ema=ema)
    of = {"activations": f" = {microbatch} x {cost.activation_gib_per_image:.3g}"}
    rows = [f"  {_short(gib):>8}  {kind}{of.get(kind, '')}" for kind, gib in kinds.items() if gib > 0.0]
    return [*rows, f"  {_short(sum(kinds.values())):>8}  sum; {room}"]


# --- on how many GPUs it fits: by one image a pass, since a batch of any size can be made of such passes ---


def on_gpus(cost: Cost, values: Mapping[str, Any]) -> Cost:
    """Return the cost of a run's step on a GPU; traced without one, it is that on a CPU.

    Args:
        values: key -> value of the resolved run: precision, compile, model.frozen_device.
    """
    if torch.cuda.is_available():
        return cost
    is_autocast = values["precision"] in AUTOCAST_DTYPES and values["compile"] == "off"
    each = cost.activation_gib_per_image * (CUDA_AUTOCAST_FACTOR if is_autocast else 1.0)
    is_apart = values["model.frozen_device"] == "cpu"
    return dataclasses.replace(cost, activation_gib_per_image=each, frozen_gib=0.0 if is_apart else cost.frozen_gib)


def over(cost: Cost, num: int, sharding: str) -> Cost:
    """Return the cost on this number of GPUs; one alone has nobody to share with."""
    how = sharding if num > 1 and cost.can_be_shared else "off"
    return dataclasses.replace(cost, num_ranks=num, ranks_a_machine=min(num, GPUS_A_MACHINE), sharding=how)


def is_possible(cost: Cost, num: int, sharding: str) -> bool:
    """False where more ranks would share a copy of the weights than the denoiser has blocks."""
    return over(cost, num, sharding).parts <= max(1, cost.num_blocks)


def images_a_pass(cost: Cost, card_gib: float, *, ema: bool) -> int:
    """Return how many images a pass fit on a card, 0: not one."""
    room = USABLE_FRACTION * card_gib - cost.memory_gib(0, ema=ema)
    return max(0, int(room / cost.activation_gib_per_image))


def fewest(cost: Cost, card_gib: float, sharding: str, *, ema: bool) -> int | None:
    """Return the smallest number of cards that a run fits on with one image a pass; None: more than 64 or none."""
    numbers = (num for num in range(1, MOST_GPUS + 1) if is_possible(cost, num, sharding))
    return next((num for num in numbers if images_a_pass(over(cost, num, sharding), card_gib, ema=ema)), None)


def smallest_numbers(cost: Cost, values: Mapping[str, Any]) -> list[str]:
    """Return the smallest number of cards for the run's sharding, and for `full`.

    Args:
        values: key -> value of the resolved run.
    """
    ema = bool(values["ema.enabled"] and values["ema.device"] == "model")
    given, cost = values.get("sharding", "off"), on_gpus(cost, values)
    lines = []
    for sharding in dict.fromkeys([given, "full" if given == "off" and cost.can_be_shared else given]):
        nums = {gib: fewest(cost, gib, sharding, ema=ema) for gib in CARDS_GIB}
        texts = [f"of {gib} GiB {'none is enough' if num is None else num}" for gib, num in nums.items()]
        lines.append(f"smallest number of cards with sharding={sharding}: {', '.join(texts)}")
    return lines


# --- how long ---


def images_of(max_duration: str, global_batch_size: int) -> int | None:
    """Return the images of a duration in batches or samples, in whole batches; None: it is in epochs, or invalid."""
    if read_duration(max_duration, ("ba", "sp")) is None:
        return None
    images = total_batches(max_duration, global_batch_size=global_batch_size, epoch_batches=0) * global_batch_size
    return images if images > 0 else None


def readable_time(seconds: float) -> str:
    """Return seconds in a readable unit, with three digits."""
    if seconds < 120.0:
        return f"{_short(seconds)} seconds"
    if seconds < 2 * 3600.0:
        return f"{_short(seconds / 60.0)} minutes"
    if seconds < 72 * 3600.0:
        return f"{_short(seconds / 3600.0)} hours"
    return f"{_short(seconds / 86400.0)} days" if seconds < 36525 * 86400.0 else "more than a century"


@dataclasses.dataclass(frozen=True)
class _Speed:
    """images/s over all ranks, what 90 of 100 lie between, and the line that says where they are from."""

    rate: float | None
    line: str
    ends: tuple[float, float] | None = None


def _speed(values: Mapping[str, Any], num_ranks: int, cost: Cost) -> _Speed:
    rate, place = values[RATE_KEY], values.get(RECORD_KEY)
    if rate is not None and math.isfinite(rate) and rate > 0.0:
        return _Speed(rate, f"time: of training alone, at {rate:g} images/s ({RATE_KEY})")
    if place is None:
        return _Speed(None, f"time: give {RATE_KEY} (over all ranks) for an estimate")
    from preflight import scaling_devices  # it loads scipy, which no start of a run is to wait for

    source, batch = f"{RECORD_KEY}={place}", values["global_batch_size"]
    try:
        if card := scaling_devices.CARDS.get(place):
            keys = {**values, "family": values["model.family"]}
            step = scaling_devices.step_of(keys, cost.flops_per_image / 1e12, cost.trained_parameters)
            told = step.published(scaling_devices.committed_law(), card).predict(num_ranks, batch)
            source += ", its published speed"
        else:
            told = scaling_devices.expected(place, num_ranks, batch)
    except ValueError as error:
        return _Speed(None, f"time: {RECORD_KEY}: {error}")
    ends = f"({_short(told.low)} to {_short(told.high)})"
    how = f"reckoned for {count(num_ranks, 'rank')} from {source}, see docs/scaling.md"
    line = f"time: of training alone, at {_short(told.value)} images/s {ends}, {how}"
    return _Speed(told.value, line, (told.low, told.high))


def _duration(values: Mapping[str, Any], speed: _Speed) -> list[str]:
    duration = values["max_duration"]
    images = images_of(duration, values["global_batch_size"])
    if images is None:
        given = f"max_duration: {duration}; how many images that is cannot be known before the data is read"
        return [speed.line, given]
    takes = f", {readable_time(images / speed.rate)}" if speed.rate else ""
    if speed.ends:
        takes += f" ({readable_time(images / speed.ends[1])} to {readable_time(images / speed.ends[0])})"
    return [speed.line, f"max_duration: {duration}, {count(images, 'image')}{takes}"]


# --- the benchmark ---


def _target(values: Mapping[str, Any], rate: float | None) -> list[str]:
    """Return lines on the images to the target in the reference's runs, and on how this run differs from them."""
    benchmark = mlperf.benchmark_of(values["model.family"], values["model.variant"])
    if benchmark is None:
        return [f"images to a target: there are no reference points for model.variant={values['model.variant']}"]
    batch, every = values["global_batch_size"], benchmark.interval(values["global_batch_size"])
    one_every = f"{count(every // batch, 'batch', 'batches')} ({count(every, 'image')})"
    lines = [
        f"target: {benchmark.target_said}; one every {one_every}",
        *_images_to_target(benchmark, values, rate),
    ]
    if deviations := benchmark.deviations(values, _ruleset(benchmark, values)):
        return [*lines, "deviations from the reference:", *(f"  {text}" for text in deviations)]
    return [*lines, "no deviation from the reference's constants (data, encoders and precision are not compared)"]


def _ruleset(benchmark: Benchmark, values: Mapping[str, Any]) -> str:
    """Return the ruleset of a run; the newest where it has none, or another benchmark's, which is refused elsewhere."""
    given = values.get("mlperf.ruleset")
    return given if given in benchmark.rulesets else benchmark.newest


def _images_to_target(benchmark: Benchmark, values: Mapping[str, Any], rate: float | None) -> list[str]:
    fixed, ruleset = benchmark.fixed_deviations(values), _ruleset(benchmark, values)
    if others := [text for text in fixed if text.startswith(("model.preset:", "image_size:"))]:
        return [f"images to the target: there are no reference points for this network ({', '.join(others)})"]
    global_batch_size = values["global_batch_size"]
    point = benchmark.reference_point(global_batch_size, ruleset)
    if point is None:
        given = f"no reference point at a global batch of {global_batch_size} (ruleset {ruleset})"
        rows = [row for near in benchmark.nearest(global_batch_size, ruleset) for row in _runs(near, ruleset, None)]
        return [f"images to the target: {given}, and none is guessed. Nearest:", *rows]
    lines = ["images to the target, as the reference's own runs took them:", *_runs(point, ruleset, rate)]
    if fixed:
        lines.append("  those runs had none of the deviations below: this one may take more, or never get there")
    if any(text.startswith("optimizer.lr") for text in benchmark.free_deviations(values, ruleset)):
        given = f"{point.lr:g}, not {values['optimizer.lr']:g}"
        lines.append(f"  those runs had another learning rate ({given}): this one may take more, or fewer")
    return lines


def _runs(point: ReferencePoint, ruleset: str, rate: float | None) -> list[str]:
    """Rows on the runs of a reference point; with a rate, also their time."""
    runs = f"{len(point.images)} runs on {point.platform}, lr_per_image {point.lr_per_image:g}"
    head = f"  global batch {point.global_batch_size:,}, ruleset {ruleset}, {runs}; mean without best and worst:"
    rows = {"mean": point.mean_images, "fastest": point.fastest_images, "slowest": point.slowest_images}
    return [head] + [
        f"    {name:7} {images:10,.0f} images, {point.batches(images):,} batches"
        + (f", {readable_time(images / rate)}" if rate else "")
        for name, images in rows.items()
    ]


# --- numbers ---


def _short(value: float) -> str:
    """Three digits, thousands separated."""
    return f"{value:,.0f}" if value >= 1000.0 else f"{value:.3g}"
