"""A run's plan, before it starts: its microbatch, memory by kind, compute, images and time to the benchmark's target.

`format_plan` returns the output of `--print_config`: the resolved run as YAML, then the plan as comments. The whole is a YAML
file with the same configuration. Every number comes from the traced network (training/memory.py), from the run's keys, from a
record of the run on other devices (scaling/devices.py), or from the runs of the benchmark's reference (families/mlperf.py).
If a number cannot be computed, a line tells why.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from common import dist
from common.errors import ConfigError
from common.log import readable_time, three_digits
from common.value_types import ImageSize
from config import flatten, pluralize, to_yaml
from families import load_family, mlperf
from families.encoders import ModelConfig, model_problems
from families.mlperf import Benchmark, ReferencePoint
from model import AUTOCAST_DTYPES, LatentDiffusion
from training import memory
from training.builders import measure_step_cost
from training.config import RunConfig, needs_encoders, resolve
from training.memory import CUDA_AUTOCAST_FACTOR, USABLE_FRACTION, Cost, has_average_on_device, room_of_a_rank
from training.optimizer import images_of
from training.sharding import refusals

CARDS_GIB = (80, 139)  # H100 and A100; H200
SMALL_CARDS_GIB = (16, 24)
MOST_GPUS = 64
GPUS_A_MACHINE = 8
RATE_KEY, RECORD_KEY = "measure.expected_images_per_sec", "measure.expected_record"


# --- the microbatch, and the keys that lower the memory ---


def ranks_on_device() -> int:
    """Return how many of this machine's ranks share one device's memory."""
    return 1 if torch.cuda.is_available() else dist.get_local_world_size()


def planned_microbatch(config: RunConfig, cost: Cost) -> int:
    """Return the microbatch of a resolved run; with `auto`, the largest that fits by the estimate."""
    if isinstance(config.device_train_microbatch_size, int):
        return config.device_train_microbatch_size
    device_batch = config.global_batch_size // dist.get_world_size()
    return memory.estimated(cost, device_batch, ranks_on_device(), ema=has_average_on_device(config.ema))


def find_microbatch(config: RunConfig, model: LatentDiffusion, cost: Cost) -> int:
    """Return the images per pass; with `auto`, find them. Raises ConfigError: not even one fits."""
    if config.device_train_microbatch_size != memory.AUTO:
        return planned_microbatch(config, cost)
    columns = config.data.columns(model.family, config.size)
    device_batch = config.global_batch_size // dist.get_world_size()
    ema, options = has_average_on_device(config.ema), savings(config)
    try:
        return memory.find(model, columns, cost, device_batch, ranks_on_device(), ema=ema, savings=options)
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def savings(config: RunConfig) -> list[str]:
    """Return the keys, besides the microbatch, that lower a resolved run's memory without changing its network."""
    is_gpu = torch.cuda.is_available()
    possible = {
        "gradient_checkpointing=1": config.gradient_checkpointing < 1.0,
        "precision=bf16": config.precision in ("fp32", "tf32"),
        "sharding=full": dist.get_world_size() > 1 and config.sharding == "off" and not refusals(flatten(config)),
        "ema.device=cpu": is_gpu and config.sharding == "off" and has_average_on_device(config.ema),
        "model.frozen_device=cpu": is_gpu and config.model.frozen_device == "device" and needs_encoders(config),
    }
    return [assignment for assignment, is_possible in possible.items() if is_possible]


def smaller_states(states: str, precision: str | None, *, is_sharded: bool, is_adapter: bool) -> list[str]:
    """Return the keys that lower the memory of weights and moments; only before a run begins, since they change it."""
    smaller = {"fp32": "bf16", "bf16": None if is_sharded else "8bit"}.get(states)
    assignments = [f"optimizer.states={smaller}"] if smaller else []
    can_be_small = precision in ("fp32", "tf32", "bf16") and not is_adapter
    return assignments + (["precision=bf16_params"] if can_be_small else [])


# --- the text of the plan ---


def format_plan(config: RunConfig) -> str:
    """Return a run's resolved YAML and its plan; for an invalid run, as much of them as possible.

    Args:
        config: with valid names and types, not resolved.
    """
    try:
        config = resolve(config)
    except ValueError:  # unknown family, variant or size: reported by the problem that refuses the run
        return ""
    sizes = config.global_batch_size, config.device_train_microbatch_size
    if not _can_be_traced(config.model, config.size, config.objective.prediction, sizes):
        return to_yaml(config)
    for_gpus = dataclasses.replace(config, attention="flash")  # a CPU may attend in float32
    cost, on_a_gpu = measure_step_cost(config), measure_step_cost(for_gpus)
    values = {
        **flatten(config),
        "optimizer.lr": config.optimizer.learning_rate(config.global_batch_size),
        "device_train_microbatch_size": planned_microbatch(config, cost),
    }
    room, ema_on_device = room_of_a_rank(ranks_on_device()), has_average_on_device(config.ema)
    num_ranks = dist.get_world_size()
    plan = describe(cost, on_a_gpu, values, num_ranks=num_ranks, room=room, ema_on_device=ema_on_device)
    return to_yaml(config) + plan + f"# {on_small_cards(for_gpus)}\n"


def _can_be_traced(
    model: ModelConfig, size: ImageSize, prediction: str | None, batch_sizes: Iterable[int | str | None]
) -> bool:
    """True if there is a network for this size and prediction, and the batch sizes are valid."""
    unloaded = dataclasses.replace(model, weights=None)  # missing weights do not change it
    if model_problems(unloaded, size, needs_encoders=False):
        return False
    family = load_family(model.family, model.preset, model.variant)
    is_batch = min(number for number in batch_sizes if isinstance(number, int)) >= 1
    return is_batch and prediction in family.predictions


def describe(
    cost: Cost, on_a_gpu: Cost, values: Mapping[str, Any], *, num_ranks: int, room: str, ema_on_device: bool
) -> str:
    """Return the plan of a run, lines that begin with "# ".

    Args:
        cost, on_a_gpu: of one training step, traced: on this machine, and with a GPU's attention.
        values: key -> value of the resolved run, as `config.flatten` gives them, with `optimizer.lr` filled in. Microbatch
            and global batch size are at least 1. For every other invalid value, its line is left out.
        num_ranks: over all machines.
        room: the device's memory, see `training.memory.room_of_a_rank`.
        ema_on_device: the EMA weights are on the device too.
    """
    microbatch, host_gib = values["device_train_microbatch_size"], cost.frozen_host_gib
    is_muon = cost.optimizer == "muon"
    encoders = "the encoders run on the CPU" if host_gib else "encoders forward"
    on_host = (
        [f"memory of the machine: {three_digits(host_gib)} GiB for the frozen encoders of each rank"]
        if host_gib
        else []
    )
    lines = [
        "--- what this run will take, by estimate: nothing here was measured ---",
        f"parameters: {cost.trained_parameters:,} trained, {cost.frozen_parameters:,} frozen",
        f"compute: {three_digits(cost.flops_per_image / 1e12)} TFLOP an image and training step "
        f"(denoiser forward and backward, {encoders})",
        *([f"Muon: {three_digits(cost.muon_flops / 1e12)} TFLOP per step on each device"] if is_muon else []),
        _batch(values["global_batch_size"], num_ranks, microbatch),
        f"memory of one device at {pluralize(microbatch, 'image')} a pass in {values['precision']}, GiB:",
        *_memory(cost, microbatch, room, ema=ema_on_device),
        *on_host,
        *smallest_num_cards(on_a_gpu, values),
        f"full checkpoint: {three_digits(cost.checkpoint_gib(ema=bool(values['ema.enabled'])))} GiB",
        *_duration(values, speed := _speed(values, num_ranks, cost)),
        *_target(values, speed.rate),
    ]
    return "".join(f"# {line}\n" for line in lines)


def _batch(global_batch_size: int, num_ranks: int, microbatch: int) -> str:
    passes, rest = divmod(global_batch_size, num_ranks * microbatch)
    parts = [pluralize(num_ranks, "rank"), pluralize(passes, "pass", "passes"), pluralize(microbatch, "image")]
    return f"global batch: {pluralize(global_batch_size, 'image')}" + ("" if rest else f" = {' x '.join(parts)}")


def _memory(cost: Cost, microbatch: int, room: str, *, ema: bool) -> list[str]:
    kinds = cost.memory_by_kind(microbatch, ema=ema)
    formulas = {"activations": f" = {microbatch} x {cost.activation_gib_per_image:.3g}"}
    rows = [f"  {three_digits(gib):>8}  {kind}{formulas.get(kind, '')}" for kind, gib in kinds.items() if gib > 0.0]
    return [*rows, f"  {three_digits(sum(kinds.values())):>8}  sum; {room}"]


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


def cost_over_gpus(cost: Cost, num: int, sharding: str) -> Cost:
    """Return the cost on this number of GPUs; one alone has nobody to share with."""
    mode = sharding if num > 1 and cost.can_be_shared else "off"
    return dataclasses.replace(cost, num_ranks=num, ranks_a_machine=min(num, GPUS_A_MACHINE), sharding=mode)


def is_possible(cost: Cost, num: int, sharding: str) -> bool:
    """False where more ranks would share a copy of the weights than the denoiser has blocks."""
    return cost_over_gpus(cost, num, sharding).parts <= max(1, cost.num_blocks)


def images_a_pass(cost: Cost, card_gib: float, *, ema: bool) -> int:
    """Return how many images a pass fit on a card, 0: not one."""
    room = USABLE_FRACTION * card_gib - cost.memory_gib(0, ema=ema)
    return max(0, int(room / cost.activation_gib_per_image))


def fewest_cards(cost: Cost, card_gib: float, sharding: str, *, ema: bool) -> int | None:
    """Return the smallest number of cards that a run fits on with one image a pass; None: more than 64 or none."""
    numbers = (num for num in range(1, MOST_GPUS + 1) if is_possible(cost, num, sharding))
    return next((num for num in numbers if images_a_pass(cost_over_gpus(cost, num, sharding), card_gib, ema=ema)), None)


def smallest_num_cards(cost: Cost, values: Mapping[str, Any]) -> list[str]:
    """Return the smallest number of cards for the run's sharding, and for `full`.

    Args:
        values: key -> value of the resolved run.
    """
    ema = bool(values["ema.enabled"] and values["ema.device"] == "model")
    chosen, cost = values.get("sharding", "off"), on_gpus(cost, values)
    lines = []
    for sharding in dict.fromkeys([chosen, "full" if chosen == "off" and cost.can_be_shared else chosen]):
        nums = {gib: fewest_cards(cost, gib, sharding, ema=ema) for gib in CARDS_GIB}
        texts = [f"of {gib} GiB {'none is enough' if num is None else num}" for gib, num in nums.items()]
        lines.append(f"smallest number of cards with sharding={sharding}: {', '.join(texts)}")
    return lines


RECOMPUTE, ENCODERS_ON_CPU, STATES_8BIT = "gradient_checkpointing=1", "model.frozen_device=cpu", "optimizer.states=8bit"
SMALL_CARD_TFLOPS = 50  # in 16 bits: 30 % of an RTX 4090's published 165; FLUX.1 reached 28 % of an H200's peak


def on_small_cards(config: RunConfig) -> str:
    """Return the line that says which keys a resolved run needs for one image a pass on one small card, and how fast it is.

    The fewest keys are taken. The speed is of compute alone: there is none with encoders on the CPU, or in 32 bits.
    """
    possible = {
        RECOMPUTE: config.gradient_checkpointing < 1.0,
        ENCODERS_ON_CPU: config.model.frozen_device == "device" and needs_encoders(config),
        STATES_8BIT: config.optimizer.name == "adamw" and config.optimizer.states != "8bit",
    }
    keys = [key for key, is_possible in possible.items() if is_possible]
    choices = [chosen for num in range(len(keys) + 1) for chosen in itertools.combinations(keys, num)]
    texts = []
    for card_gib in SMALL_CARDS_GIB:
        usable_gib = USABLE_FRACTION * card_gib
        chosen = next((chosen for chosen in choices if _gib_on_one_card(config, chosen) <= usable_gib), None)
        text = "does not fit" if chosen is None else f"with {' '.join(chosen)}" if chosen else "as it is"
        if chosen is not None and ENCODERS_ON_CPU not in chosen and config.precision in AUTOCAST_DTYPES:
            cost, recomputed = measure_step_cost(config), 1.0 if RECOMPUTE in chosen else config.gradient_checkpointing
            flops = cost.flops_per_image + recomputed * cost.forward_flops
            if cost.optimizer == "muon":
                flops += cost.muon_flops / config.global_batch_size
            text += f" ({float(f'{3600e12 * SMALL_CARD_TFLOPS / flops:.3g}'):,.0f} images an hour)"
        texts.append(f"of {card_gib} GiB {text}")
    speed = f"; speed at {SMALL_CARD_TFLOPS} TFLOP/s" if any("an hour" in text for text in texts) else ""
    return f"one card, one image a pass: {', '.join(texts)}{speed}"


def _gib_on_one_card(config: RunConfig, keys: Collection[str]) -> float:
    """Return the memory of a run with these keys in addition, GiB."""
    if RECOMPUTE in keys:
        config = dataclasses.replace(config, gradient_checkpointing=1.0)
    cost = cost_over_gpus(on_gpus(measure_step_cost(config), flatten(config)), 1, "off")
    if ENCODERS_ON_CPU in keys:
        cost = dataclasses.replace(cost, frozen_gib=0.0)
    if STATES_8BIT in keys:
        cost = dataclasses.replace(cost, states="8bit")
    return cost.memory_gib(1, ema=config.ema.enabled and config.ema.device == "model")


# --- how long ---


@dataclasses.dataclass(frozen=True)
class _Speed:
    """images/s over all ranks, what 90 of 100 lie between, and the line that says where they are from."""

    rate: float | None
    line: str
    ends: tuple[float, float] | None = None


def _speed(values: Mapping[str, Any], num_ranks: int, cost: Cost) -> _Speed:
    rate, record = values[RATE_KEY], values.get(RECORD_KEY)
    if rate is not None and math.isfinite(rate) and rate > 0.0:
        return _Speed(rate, f"time: of training alone, at {rate:g} images/s ({RATE_KEY})")
    if record is None:
        return _Speed(None, f"time: give {RATE_KEY} (over all ranks) for an estimate")
    from scaling import devices  # it loads scipy, which no start of a run is to wait for

    source, batch = f"{RECORD_KEY}={record}", values["global_batch_size"]
    try:
        if card := devices.CARDS.get(record):
            keys = {**values, "family": values["model.family"]}
            step = devices.step_of(keys, cost.flops_per_image / 1e12, cost.trained_parameters)
            speed = step.published(devices.committed_law(), card).predict(num_ranks, batch)
            source += ", its published speed"
        else:
            speed = devices.expected_speed(record, num_ranks, batch)
    except ValueError as error:
        return _Speed(None, f"time: {RECORD_KEY}: {error}")
    ends = f"({three_digits(speed.low)} to {three_digits(speed.high)})"
    origin = f"estimated for {pluralize(num_ranks, 'rank')} from {source}, see docs/scaling.md"
    line = f"time: of training alone, at {three_digits(speed.value)} images/s {ends}, {origin}"
    return _Speed(speed.value, line, (speed.low, speed.high))


def _duration(values: Mapping[str, Any], speed: _Speed) -> list[str]:
    duration = values["max_duration"]
    images = images_of(duration, values["global_batch_size"])
    if images is None:
        text = f"max_duration: {duration}; how many images that is cannot be known before the data is read"
        return [speed.line, text]
    takes = f", {readable_time(images / speed.rate)}" if speed.rate else ""
    if speed.ends:
        takes += f" ({readable_time(images / speed.ends[1])} to {readable_time(images / speed.ends[0])})"
    return [speed.line, f"max_duration: {duration}, {pluralize(images, 'image')}{takes}"]


# --- the benchmark ---


def _target(values: Mapping[str, Any], rate: float | None) -> list[str]:
    """Return lines on the images to the target in the reference's runs, and on how this run differs from them."""
    benchmark = mlperf.find_benchmark(values["model.family"], values["model.variant"])
    if benchmark is None:
        return [f"images to a target: there are no reference points for model.variant={values['model.variant']}"]
    batch, every = values["global_batch_size"], benchmark.interval(values["global_batch_size"])
    one_every = f"{pluralize(every // batch, 'batch', 'batches')} ({pluralize(every, 'image')})"
    lines = [
        f"target: {benchmark.target_text}; one every {one_every}",
        *_images_to_target(benchmark, values, rate),
    ]
    if deviations := benchmark.deviations(values, _ruleset(benchmark, values)):
        return [*lines, "deviations from the reference:", *(f"  {text}" for text in deviations)]
    return [*lines, "no deviation from the reference's constants (data, encoders and precision are not compared)"]


def _ruleset(benchmark: Benchmark, values: Mapping[str, Any]) -> str:
    """Return the ruleset of a run; the newest where it has none, or another benchmark's, which is refused elsewhere."""
    ruleset = values.get("mlperf.ruleset")
    return ruleset if ruleset in benchmark.rulesets else benchmark.newest_ruleset


def _images_to_target(benchmark: Benchmark, values: Mapping[str, Any], rate: float | None) -> list[str]:
    fixed, ruleset = benchmark.fixed_deviations(values), _ruleset(benchmark, values)
    if others := [text for text in fixed if text.startswith(("model.preset:", "image_size:"))]:
        return [f"images to the target: there are no reference points for this network ({', '.join(others)})"]
    global_batch_size = values["global_batch_size"]
    point = benchmark.find_point(global_batch_size, ruleset)
    if point is None:
        problem = f"no reference point at a global batch of {global_batch_size} (ruleset {ruleset})"
        rows = [
            row for near in benchmark.nearest_points(global_batch_size, ruleset) for row in _runs(near, ruleset, None)
        ]
        return [f"images to the target: {problem}, and none is guessed. Nearest:", *rows]
    lines = ["images to the target, as the reference's own runs took them:", *_runs(point, ruleset, rate)]
    if fixed:
        lines.append("  those runs had none of the deviations below: this one may take more, or never get there")
    if any(text.startswith("optimizer.lr") for text in benchmark.free_deviations(values, ruleset)):
        rates = f"{point.lr:g}, not {values['optimizer.lr']:g}"
        lines.append(f"  those runs had another learning rate ({rates}): this one may take more, or fewer")
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
