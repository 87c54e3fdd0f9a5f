"""The checks before a run, one list: `python -m prepare.doctor` prints all; each start, and --print_config, has some of them.

A check yields findings: OK, warning (the run starts, but may not do what you want) or error (it would fail), and what to do.
It changes nothing. Checks share a `CheckedRun`. Those of keys are in preflight/config_checks.py and the sections.
Memory is in GiB (2**30 bytes).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import io
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from checkpointing.files import FULL, WEIGHTS, find_damage, is_whole, list_checkpoints
from checkpointing.sharded import count_file_bytes
from common import dist
from common.command_line import Problem
from common.errors import ConfigError
from common.files import nearest_existing, write_problem
from common.host_memory import read_host_bytes
from common.value_types import ImageSize, bytes_to_int
from config import pluralize
from data import DataConfig
from families import load_family
from families.encoders import RANDOM, ModelConfig, default_weights, list_hub_weights
from families.mlperf import find_logged_benchmark
from mds import loader
from mds.dataset import Dataset
from mds.mixture import StreamConfig, count_epoch_samples, resolve_streams
from mds.order import order_memory_gib
from preflight.config_checks import (
    MEMORY_KEYS,
    closed_data_problems,
    expected_metadata,
    num_batches,
    quick_problems,
)
from preflight.plan import planned_microbatch, ranks_on_device, savings, smaller_states
from ranks import collectives
from run_folder.history import is_held
from training import memory, sharding
from training.builders import apply_saved_settings, build_start_settings, measure_step_cost
from training.config import RunConfig, needs_encoders, resolve
from training.start import check_begun
from training.trainer import missing_gpus
from weights import hub

OK, WARNING, ERROR = "OK", "warning", "error"


@dataclass(frozen=True)
class Finding:
    """What a check found: `level` is OK, warning or error; `keys` of the configuration that it depends on.

    An error of a start names its place: a key, or the check's name.
    """

    level: str
    text: str
    keys: tuple[str, ...] = ()


Findings = Iterator[Finding]
"""Of one check: its errors and warnings; then the line that is printed if there are none."""

STORE_SEC = 20.0
CHECK_SEC = 120.0  # a hanging file system; the digest of a large checkpoint
WEIGHTS_KEYS = {"model.weights", "model.denoiser"}  # missing weights do not change the network
ROOM_KEYS = ("save.every_images", "save.snapshot_every_images", "save.keep", "run_folder", "max_duration")
NOT_CHECKED = Finding(WARNING, "not checked: it depends on an error above. Fix that first.")


@dataclass
class CheckedRun:
    """The run being checked, and results that several checks use."""

    config: RunConfig
    reads_datasets: bool = True
    """False: not this rank, or no store has answered yet."""
    streams: list[tuple[StreamConfig, Dataset]] = field(default_factory=list)
    """Each dataset that `check_store` has read, with its stream."""

    @functools.cached_property
    def data_problems(self) -> list[tuple[str, str]]:
        """(key, message): the sections `data` and `validation`, against their datasets if these are read."""
        config = self.config
        wanted = expected_metadata(config.model, config.data, config.size)
        if not self.reads_datasets:
            return dataclasses.replace(config.data, synthetic=True).problems(config.global_batch_size, *wanted)
        problems = config.data.problems(config.global_batch_size, *wanted)
        return problems + config.validation.problems(config.data, *wanted)

    @functools.cached_property
    def problems(self) -> list[Problem]:
        """Those of the keys, also against the datasets."""
        config, problems = self.config, quick_problems(self.config, self.data_problems)
        if self.reads_datasets:
            benchmark = find_logged_benchmark(config.model.family, config.model.variant)
            problems += closed_data_problems(config.mlperf, benchmark, config.data, config.validation)
        return problems

    @functools.cached_property
    def resolved(self) -> RunConfig | None:
        """The configuration with null replaced by its values; None: its problems make that impossible."""
        other_keys = [problem.keys for problem in self.problems if not WEIGHTS_KEYS.intersection(problem.keys)]
        if any(key in MEMORY_KEYS for keys in other_keys for key in keys):
            return None
        with contextlib.suppress(ValueError):  # reported as a problem
            return resolve(self.config)
        return None

    @functools.cached_property
    def cost(self) -> memory.Cost:
        assert self.resolved is not None
        return measure_step_cost(self.resolved)

    @functools.cached_property
    def num_batches(self) -> int | None:
        """Batches of the run; None: unknown, since its datasets cannot be read."""
        config, reads = self.config, self.reads_datasets
        return num_batches(config.max_duration, config.global_batch_size, config.data, reads_datasets=reads)

    @property
    def workers(self) -> int:
        return 0 if self.config.data.synthetic else self.config.data.workers

    @property
    def folder(self) -> Path:
        """The run's folder, or that of all runs if the run has no name."""
        return Path(self.config.run_folder, self.config.run_name or "")


# --- versions and variables ---

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "torchvision", "mosaicml", "mosaicml-streaming", "diffusers", "transformers", "open_clip_torch")
PACKAGES += ("omegaconf", "filelock")
NEWER_HAS_RUN = ("torch", "torchvision")  # docs/versions.md: torch 2.11 on a CPU
FIRST_PYTHON, LAST_PYTHON = (3, 11), (3, 13)


def check_versions(*, wandb: bool) -> Findings:
    """Compare Python and the packages that a run needs with the bounds of the set whose torch is installed.

    Args:
        wandb: the W&B logger is used.
    """
    python = ".".join(map(str, sys.version_info[:3]))
    if not FIRST_PYTHON <= sys.version_info[:2] <= LAST_PYTHON:
        first, last = (".".join(map(str, version)) for version in (FIRST_PYTHON, LAST_PYTHON))
        yield Finding(ERROR, f"Python {python}. Possible: {first} to {last}. Use one of them.")
    lock, bounds, newest = "requirements.lock", _bounds("requirements.txt"), _bounds("requirements/newest.txt")
    if any(Version(_installed("torch") or "0") >= Version(pin.version) for pin in newest["torch"][0].specifier):
        lock, bounds = "requirements/newest.lock", bounds | newest
    installed, install = [], f"Install what was tested: pip install --no-deps -r {lock}"
    for name in (*PACKAGES, *(["wandb"] if wandb else [])):
        if (version := _installed(name)) is None:
            yield Finding(ERROR, f"{name} is not installed. {install}")
            continue
        installed.append(f"{name} {version}")
        bound, reason = bounds[name]
        if not bound.specifier.contains(version, prereleases=True):
            problem = f"{name} {version} is not {name}{bound.specifier}" + (f": {reason}" if reason else "")
            is_newer = name in NEWER_HAS_RUN and all(Version(version) > Version(pin.version) for pin in bound.specifier)
            yield Finding(WARNING if is_newer else ERROR, f"{problem}. {install}")
    yield Finding(OK, f"Python {python}, {', '.join(installed)}: as {lock} needs them")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _bounds(file: str) -> dict[str, tuple[Requirement, str]]:
    """Read a requirements file of this checkout: package -> its bounds, and the reason."""
    lines = (line.partition("#") for line in (ROOT / file).read_text().splitlines())
    read = [(Requirement(text.strip()), reason.strip()) for text, _, reason in lines if text.strip()]
    return {wanted.name: (wanted, reason) for wanted, reason in read}


CHANGES = {  # name -> its effect on a run if it is not 0
    "NVIDIA_TF32_OVERRIDE": "decides about TF32, whatever `precision` says",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "turns TF32 on, whatever `precision` says",
    "CUDA_LAUNCH_BLOCKING": "makes every kernel wait: for debugging, not for measuring speed",
    "NCCL_P2P_DISABLE": "keeps a machine's GPUs from communicating directly: slow",
    "NCCL_SHM_DISABLE": "keeps ranks from sharing memory: slow",
    "NCCL_IB_DISABLE": "keeps machines from using InfiniBand: slow",
    "TORCH_NCCL_BLOCKING_WAIT": "makes the host wait for every collective: slow",
}


def check_variables() -> Findings:
    """Report environment variables that affect a run."""
    for name, effect in CHANGES.items():
        if os.environ.get(name, "0") not in ("", "0"):
            text = f"{name}={os.environ[name]} {effect}. Take it out of the environment, unless that is meant."
            yield Finding(WARNING, text)
    yield Finding(OK, "none of those that change a run's numbers or speed")


# --- devices ---

BUSY_GPU_FRACTION = 0.05


def check_devices(ranks_here: int) -> Findings:
    """Check that each rank of this machine has a GPU that computes and is free; without GPUs, that cores are enough."""
    if not torch.cuda.is_available():
        yield from _check_cores(ranks_here)
        return
    num = torch.cuda.device_count()
    gpus = [torch.cuda.get_device_properties(index) for index in range(num)]
    named = ", ".join(f"{gpu.name} with {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus)
    if ranks_here < num:
        yield Finding(
            WARNING,
            f"{num} GPUs and {pluralize(ranks_here, 'rank')}: the others are idle. composer -n {num} uses all; to check "
            f"that: WORLD_SIZE={num} LOCAL_WORLD_SIZE={num} python -m prepare.doctor ...",
        )
    for index in range(min(ranks_here, num)):
        try:
            torch.ones(1, device=f"cuda:{index}").add_(1).item()
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as error:
            text = f"GPU {index} cannot be used: {str(error).splitlines()[0]}. torch {torch.__version__} has code for "
            yield Finding(ERROR, f"{text}{', '.join(torch.cuda.get_arch_list())}. Check nvidia-smi.")
            continue
        if total - free - torch.cuda.memory_reserved(index) > max(BUSY_GPU_FRACTION * total, 2**30):
            used = f"{(total - free) / 2**30:.0f} of {total / 2**30:.0f} GiB in use"
            yield Finding(WARNING, f"GPU {index} has {used}. Another run? nvidia-smi")
    yield Finding(OK, f"{named}; CUDA {torch.version.cuda}, {pluralize(ranks_here, 'rank')} here")


def _check_cores(ranks_here: int) -> Findings:
    """Check a machine whose GPUs, if there are any, torch does not see."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if any(Path("/dev").glob("nvidia[0-9]*")) and hidden != "":
        try:
            torch.cuda.init()
            reason = "no device"
        except (RuntimeError, AssertionError) as error:  # of a driver that is too old; of a build for a CPU
            reason = str(error).splitlines()[0].rstrip(".")
        variable = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES={hidden})"
        text = f"there are NVIDIA GPUs, but torch {torch.__version__} cannot use them: {reason}{variable}"
        yield Finding(ERROR, f"{text}. Install a driver for its CUDA, or say CUDA_VISIBLE_DEVICES= for none.")
    if text := missing_gpus():
        yield Finding(ERROR, text.removeprefix("devices: "))
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    text = f"no GPU: a CPU with {pluralize(cores, 'core')}, {pluralize(threads, 'thread')} a rank"
    text += f", {pluralize(ranks_here, 'rank')} here"
    if ranks_here > cores or (ranks_here > 1 and "OMP_NUM_THREADS" in os.environ and threads * ranks_here > cores):
        yield Finding(WARNING, f"{text}: they wait for one another. Fewer ranks, or OMP_NUM_THREADS=1.")
    yield Finding(OK, text)


# --- memory of the machine ---


def order_gib(config: DataConfig) -> float:
    """Read the datasets, and return the memory that the order of an epoch takes on this machine, GiB."""
    with contextlib.suppress(ValueError):  # named by the section
        if datasets := config.read():
            samples = count_epoch_samples(config.sources, [dataset.num_samples for dataset in datasets])
            return order_memory_gib(samples // collectives.num_nodes(), dist.get_local_world_size())
    return 0.0


def batch_gib(model: ModelConfig, data: DataConfig, size: ImageSize, global_batch_size: int) -> float:
    """Return the size of one rank's batch from the loader, GiB. Raises ValueError: no such network, or dataset."""
    columns = data.columns(load_family(model.family, model.preset, model.variant), size).values()
    sample_bytes = sum(math.prod(column.shape) * column.dtype.itemsize for column in columns)
    return global_batch_size // dist.get_world_size() * sample_bytes / 2**30


WORKER_GIB = 0.3  # private memory of a loader worker of SD2: 230 MiB at 64 px and 8 images, 287 at 512 px and 32 (seen)
ORDER = "an epoch's order"  # a kind of memory
SHARED_MEMORY = Path("/dev/shm")
FEWER_SAMPLES = "read fewer samples in an epoch: data.streams=[{remote: ..., choose: N}]"


def compare_host_memory(gib_by_kind: Mapping[str, float]) -> Findings:
    """Compare the estimated host memory of this machine's processes with what is available.

    Args:
        gib_by_kind: purpose -> GiB, over all ranks of this machine.
    """
    total, free = (num / 2**30 for num in read_host_bytes())
    need = sum(gib_by_kind.values())
    parts = ", ".join(f"{kind} {gib:.1f}" for kind, gib in gib_by_kind.items() if gib >= 0.05)
    summary = f"about {need:.1f} GiB besides the step" + (f" ({parts})" if parts else "")
    summary += f"; this machine has {total:.1f}, {free:.1f} of it free now"
    if need > total:
        fix = FEWER_SAMPLES if gib_by_kind.get(ORDER, 0.0) > need / 2 else "fewer ranks here"
        yield Finding(ERROR, f"{summary}. Lower data.workers, or {fix}.")
    elif need > free:
        yield Finding(WARNING, f"{summary}. End what takes it, or lower data.workers.")
    yield Finding(OK, summary)


def num_batches_in_flight(workers: int) -> int:
    """Return the number of one rank's batches in shared memory at once: what each worker keeps, and two in use."""
    return loader.MAX_BUFFERS * workers + 2 if workers else 0


def compare_shared_memory(batch_gib: float, num_batches: int) -> Findings:
    """Check the size of /dev/shm, where workers pass batches on; Docker: 64 MB.

    Args:
        batch_gib: size of one rank's batch.
        num_batches: over all ranks of this machine, see `num_batches_in_flight`.
    """
    folder, keys = SHARED_MEMORY, ("data.workers",)
    if not num_batches:
        yield Finding(OK, "not used: data.workers=0")
        return
    if not os.access(folder, os.W_OK):
        text = f"/dev/shm: {folder} is missing or cannot be written: workers need it. Mount a tmpfs there."
        yield Finding(ERROR, text, keys)
        return
    room = os.statvfs(folder)
    size, free = room.f_blocks * room.f_frsize / 2**30, room.f_bavail * room.f_frsize / 2**30
    need = batch_gib * num_batches
    batches = f"{num_batches} batches of {batch_gib:.3g} GiB"
    summary = f"{batches}: {need:.3g} GiB there; {size:.3g} GiB, {free:.3g} free"
    fixes = "Enlarge it (docker run --shm-size=16g or --ipc=host, mount -o remount,size=16g /dev/shm), or lower data.workers"
    if need > free:
        yield Finding(ERROR, f"/dev/shm: {summary}. A worker would die of a bus error. {fixes}.", keys)
    elif need > 0.5 * free:
        yield Finding(WARNING, f"{summary}: that leaves little. {fixes}.")
    yield Finding(OK, summary)


# --- the data ---


def check_store(case: CheckedRun) -> Findings:
    """Open the datasets; later checks compare the run with the values they were made for."""
    for key, source in case.config.data.named_sources():
        try:
            case.streams += [
                (one.config, one.dataset) for one in resolve_streams([source], [source.dataset], case.config.size)
            ]
        except ValueError as error:
            yield Finding(ERROR, f"{key}.{'remote' if source.remote else 'local'}: {error}")
            return
    case.reads_datasets = True
    none = "none: data.synthetic=true" if case.config.data.synthetic else "no dataset"
    yield Finding(OK, "; ".join(describe_dataset(dataset) for _, dataset in case.streams) or none)


def describe_dataset(dataset: Dataset) -> str:
    """Describe a dataset in one line."""
    size = int(dataset.shards.raw_bytes.sum())
    readable = f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
    counts = f"{dataset.num_samples:,} samples in {len(dataset.shards):,} shards"
    return f"{dataset.location}: {dataset.kind}, {counts}, {readable}"


# --- the configuration ---


def check_keys(case: CheckedRun) -> Findings:
    """Check every key, against the datasets too."""
    for problem in case.problems:
        yield Finding(ERROR, problem.text, problem.keys)
    run = case.resolved or case.config
    yield Finding(OK, f"every key is possible ({run.model.family}, {run.model.preset}, {run.model.variant})")


def check_weights(case: CheckedRun) -> Findings:
    """Say which weights the run begins with, and what is downloaded for it; what is wrong with them is a key's problem."""
    if any(WEIGHTS_KEYS.intersection(problem.keys) for problem in case.problems):
        yield NOT_CHECKED
        return
    config, is_real = apply_saved_settings(case.config).model, not case.config.data.synthetic
    begins = f"denoiser: {config.denoiser or 'from random weights'}"
    if not needs_encoders(case.config):
        yield Finding(OK, f"encoders: none are built, batches have what they make; {begins}")
        return
    family = load_family(config.family, config.preset, config.variant)
    weights = config.weights or default_weights(family, is_real=is_real)
    text = f"encoders: {weights}" + (", which mean nothing" if weights == RANDOM else "")
    for name, need in list_hub_weights(family, weights, None).values():
        text = f"encoders: {'. '.join(hub.resolve_name(name, need).lines())}"
    yield Finding(OK, f"{text}; {begins}")


def check_memory(case: CheckedRun) -> Findings:
    """Compare a step's memory with the device's; traces the real network, which takes some seconds."""
    if (run := case.resolved) is None:
        yield NOT_CHECKED
        return
    on_device, microbatch = memory.has_average_on_device(run.ema), planned_microbatch(run, case.cost)
    kinds = dict(is_sharded=sharding.is_sharded(run.sharding), is_adapter=run.lora.is_given)
    options = savings(run)
    if run.optimizer.name == "adamw":
        options += smaller_states(run.optimizer.states, run.precision, **kinds)
    if text := memory.memory_problem(case.cost, microbatch, ranks_on_device(), ema=on_device, savings=options):
        yield Finding(ERROR, f"memory: {text}", MEMORY_KEYS)
    if text := memory.host_memory_problem(case.cost, dist.get_local_world_size()):
        yield Finding(ERROR, f"model.frozen_device: {text}", ("model.frozen_device", *MEMORY_KEYS))
    need = case.cost.memory_gib(microbatch, ema=on_device)
    yield Finding(OK, f"about {need:.3g} GiB at {microbatch} images a pass; {memory.room_of_a_rank(ranks_on_device())}")


def check_host_memory(case: CheckedRun) -> Findings:
    """Compare the memory of loader workers, of an epoch's order, and of models that are built here, with the machine's."""
    run, ranks = case.resolved, dist.get_local_world_size()
    if run is None:
        yield NOT_CHECKED
        return
    gib = batch_gib(run.model, run.data, run.size, run.global_batch_size)
    need = {
        pluralize(ranks * case.workers, "worker"): ranks * case.workers * WORKER_GIB,
        "batches": ranks * num_batches_in_flight(case.workers) * gib,
    }
    if case.reads_datasets:
        need[ORDER] = order_gib(run.data)
    if run.save.is_on and run.sharding == "off":
        need["copy of the state for checkpoints"] = case.cost.checkpoint_gib(ema=run.ema.enabled)
    if torch.cuda.is_available():
        of_ema = case.cost.trained_parameters if run.ema.enabled and run.ema.device == "cpu" else 0
        built = case.cost.trained_parameters + case.cost.frozen_parameters + of_ema
        need["models as they are built, float32"] = ranks * built * 4 / 2**30
    yield from compare_host_memory(need)


def check_shared_memory(case: CheckedRun) -> Findings:
    """Compare the workers' batches with the size of /dev/shm."""
    if case.config.data.synthetic:
        yield Finding(OK, "not used: data.synthetic=true")
        return
    run, num = case.config, dist.get_local_world_size() * num_batches_in_flight(case.workers)
    try:
        gib = batch_gib(run.model, run.data, run.size, run.global_batch_size)
        yield from compare_shared_memory(gib, num)
    except ValueError:  # there is no such network, or no such dataset: one of the keys' problems
        yield NOT_CHECKED


# --- the run ---


def check_schedule(case: CheckedRun) -> Findings:
    """Compare the length of the run with the dataset, the warm-up and the checkpoints."""
    run, num = case.resolved, case.num_batches
    if run is None or num is None:
        yield NOT_CHECKED
        return
    images, warmup = num * run.global_batch_size, run.schedule.num_warmup_batches(run.global_batch_size)
    length = f"{num:,} batches, {images:,} images"
    if warmup > num:
        text = f"schedule: the warm-up of {warmup:,} batches is longer than the run ({length}): the learning rate never"
        text += " reaches its value. Lower schedule.warmup_batches, or raise max_duration."
        yield Finding(WARNING if run.data.synthetic else ERROR, text)
    if (few := run.measure.warmup_batches) >= num:
        yield Finding(WARNING, f"measure.warmup_batches: {few} of {num:,} batches: no speed is measured. Lower it.")
    every = run.save.every_images or 0
    if not run.save.is_on and not run.data.synthetic:
        text = "save.every_images: 0: a stopped run starts over. Give an interval, unless that is intended."
        yield Finding(WARNING, text)
    if every > images and not run.save.every_min:
        text = f"save.every_images: {every:,} is more than the run ({length}): one checkpoint, at its end. Lower it, unless"
        yield Finding(WARNING, f"{text} that is intended.")
    samples = sum(dataset.num_samples for _, dataset in case.streams)
    epochs = f", {images / samples:.3g} times the dataset's {samples:,} samples" if samples else ""
    yield Finding(OK, f"{length}{epochs}; warm-up {warmup:,} batches")


def held_gib(folder: Path, kind: str) -> float:
    """Return the size of a run's checkpoints of a kind, GiB."""
    return sum(count_file_bytes(path) for path in list_checkpoints(folder.absolute() / "checkpoints", kind)) / 2**30


Need = tuple[str, str, Path, float]
"""Data that a run will write: its name, a way to need less, its folder, GiB."""


def check_disk(case: CheckedRun) -> Findings:
    """Compare checkpoints and snapshots of the whole run, and the shards that are fetched, with the space on their disks."""
    needs, run = _needs_of_cache(case.config.data, case.streams), case.resolved
    if run is None:
        yield NOT_CHECKED
        return
    snapshot_every, kinds = run.save.snapshot_every_images or 0, []
    if run.save.is_on:
        kinds.append(("full checkpoint", run.save.keep + 1, case.cost.checkpoint_gib(ema=run.ema.enabled)))
    if snapshot_every > 0:
        num = (case.num_batches or 0) * run.global_batch_size // snapshot_every
        kinds.append(("snapshot", num, case.cost.snapshot_gib(ema=run.ema.enabled)))
    if kinds and not any(problem.keys[0].startswith("save.") for problem in case.problems if problem.keys):
        description = " and ".join(f"{pluralize(num, name)} of {gib:.3g} GiB" for name, num, gib in kinds if num)
        held = sum(held_gib(case.folder, kind) for kind in (FULL, WEIGHTS))
        fixes = "Lower save.keep, raise save.snapshot_every_images (0: none), give another run_folder, or "
        gib = max(0.0, sum(num * each for _, num, each in kinds) - held)
        needs.append((description, f"{fixes}save.every_images=0 for none", case.folder, gib))
    yield from _check_room(needs)


def _needs_of_cache(config: DataConfig, sources: Sequence[tuple[StreamConfig, Dataset]]) -> list[Need]:
    """Return the expected growth of each `data.local`: the whole dataset, minus what is already there; in all, the limit."""
    needs, room = [], float("inf") if config.cache_limit is None else bytes_to_int(config.cache_limit)
    for source, dataset in sources:
        if source.remote and source.local:
            size = int(dataset.shards.raw_bytes.sum())
            paths = (Path(source.local, name) for name in dataset.shards.names)
            held = sum(path.stat().st_size for path in paths if path.is_file())
            gib = max(0, min(size, room) - held) / 2**30
            room = max(0, room - size)
            fix = "Give data.cache_limit, or another data.local"
            needs.append((f"shards of {gib:.3g} GiB in data.local", fix, Path(source.local), gib))
    return needs


def _check_room(needs: Sequence[Need]) -> Findings:
    """Compare what a run will write with the free space on each disk; folders that cannot be written have their own check."""
    by_disk: dict[int, list[Need]] = {}
    for need in needs:
        if need[-1] > 0.0 and not write_problem(need[2]):
            by_disk.setdefault(nearest_existing(need[2]).stat().st_dev, []).append(need)
    for wanted in by_disk.values():
        names, fixes, [folder, *_], gibs = zip(*wanted, strict=True)
        where, gib = nearest_existing(folder), sum(gibs)
        free = shutil.disk_usage(where).free / 2**30
        text = f"{' and '.join(names)}: {gib:.3g} GiB more; {where} has {free:.3g} free"
        if gib > free:
            yield Finding(ERROR, f"disk: {text}. Make room. {'; '.join(dict.fromkeys(fixes))}.", ROOM_KEYS)
        elif gib > 0.9 * free:
            yield Finding(WARNING, f"{text}: that leaves little.")
        else:
            yield Finding(OK, text)
    if not by_disk:
        yield Finding(OK, "nothing large will be written")


def check_earlier_starts(case: CheckedRun) -> Findings:
    """Report on an earlier run of this name: in use, finished, begun with other values, its newest checkpoint."""
    folder = case.folder
    if case.config.run_name is None or not folder.exists():
        none = "no run_name: every start is a new run, and none can be resumed"
        yield Finding(OK, f"{folder} is new" if case.config.run_name else none)
    elif is_held(folder):
        text = f"run_name: another process is training in {folder}. Wait for it, or take another run_name."
        yield Finding(ERROR, text)
    else:
        yield from _check_begun(case, folder)


def _check_begun(case: CheckedRun, folder: Path) -> Findings:
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # hides its own message that the run is finished
            result = check_begun(build_start_settings(case.resolved)) if case.resolved else None
    except ConfigError as error:
        for text in error.problems:
            yield Finding(ERROR, text)
        return
    if result is not None:
        text = f"{folder} is finished (max_duration={case.config.max_duration}). Raise max_duration, or use another run_name."
        yield Finding(WARNING, text)
        return
    checkpoints = list_checkpoints(folder / "checkpoints", FULL)
    newest = next((path for path in checkpoints if is_whole(path)), None)
    if newest is not None and newest != checkpoints[0]:
        yield Finding(
            WARNING, f"{checkpoints[0]} is damaged: {find_damage(checkpoints[0])}. The run resumes from {newest.name}."
        )
    damaged = [*checkpoints, *(folder / "checkpoints").glob(f"{FULL}*.damaged")]
    if newest is None and damaged:
        text = f"checkpoints: every one of the {len(damaged)} full checkpoints in {folder / 'checkpoints'} is damaged."
        yield Finding(ERROR, f"{text} Restore a copy, or use another run_name to start over.")
    begins = "has no checkpoint yet: it starts over"
    yield Finding(OK, f"{folder} {f'resumes from {newest.name}, which is whole' if newest else begins}")


# --- the list ---


@dataclass(frozen=True)
class Check:
    """A check and its name; `at_start`: each start makes it too."""

    name: str
    look: Callable[[CheckedRun], Findings]
    at_start: bool = False
    limit_sec: float = CHECK_SEC


CHECKS = {  # group -> its checks, in the order in which they run: later ones use results of earlier ones
    "machine": [
        Check("versions", lambda case: check_versions(wandb=case.config.loggers.wandb is not None)),
        Check("variables", lambda _: check_variables()),
        Check("devices", lambda _: check_devices(dist.get_local_world_size())),
    ],
    "data": [
        Check("store", check_store, limit_sec=STORE_SEC),
    ],
    "configuration": [
        Check("config", check_keys, at_start=True),
        Check("weights", check_weights),
        Check("/dev/shm", check_shared_memory, at_start=True),
        Check("memory", check_memory, at_start=True),
        Check("host memory", check_host_memory),
    ],
    "run": [
        Check("schedule", check_schedule),
        Check("disk", check_disk, at_start=True),
        Check("run", check_earlier_starts),
    ],
}


def findings_of(check: Check, case: CheckedRun) -> list[Finding]:
    """Return a check's errors and warnings; where there are none, the lines that say that all is well."""
    findings = list(check.look(case))
    return [finding for finding in findings if finding.level != OK] or findings


def check(config: RunConfig) -> list[Problem]:
    """Return every problem that can be found before anything is built; datasets on a machine's first rank only.

    In a container without GPUs only that is returned: it causes the others.
    """
    if text := missing_gpus():
        return [Problem(text, ())]
    case = CheckedRun(config, reads_datasets=dist.get_local_rank() == 0)
    checks = [check for of_group in CHECKS.values() for check in of_group if check.at_start]
    findings = [finding for check in checks for finding in findings_of(check, case) if finding.level == ERROR]
    return [Problem(finding.text, finding.keys) for finding in findings]
