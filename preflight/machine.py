"""Checks of a machine before a run: versions, variables, devices, memory, shared memory, ports. They change nothing.

Each check yields its findings; preflight/checks.py has the list of all. Memory in GiB (2**30 bytes).
"""

from __future__ import annotations

import importlib.metadata
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from cli.memory import host_bytes
from config import count
from stages import batch_memory, shared_memory
from training.device import missing_gpus

OK, WARNING, ERROR = "OK", "warning", "error"


@dataclass(frozen=True)
class Finding:
    """What a check found: `level` is OK, warning or error; `keys` of the configuration that it depends on.

    An error of a start says where it is: a key, or the check's name.
    """

    level: str
    text: str
    keys: tuple[str, ...] = ()


Findings = Iterator[Finding]
"""Of one check: its errors and warnings; then the line that is printed if there are none."""

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
    here, install = [], f"Install what was tested: pip install --no-deps -r {lock}"
    for name in (*PACKAGES, *(["wandb"] if wandb else [])):
        if (version := _installed(name)) is None:
            yield Finding(ERROR, f"{name} is not installed. {install}")
            continue
        here.append(f"{name} {version}")
        bound, reason = bounds[name]
        if not bound.specifier.contains(version, prereleases=True):
            given = f"{name} {version} is not {name}{bound.specifier}" + (f": {reason}" if reason else "")
            is_newer = name in NEWER_HAS_RUN and all(Version(version) > Version(pin.version) for pin in bound.specifier)
            yield Finding(WARNING if is_newer else ERROR, f"{given}. {install}")
    yield Finding(OK, f"Python {python}, {', '.join(here)}: as {lock} needs them")


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
    for name, what in CHANGES.items():
        if os.environ.get(name, "0") not in ("", "0"):
            text = f"{name}={os.environ[name]} {what}. Take it out of the environment, unless that is meant."
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
            f"{num} GPUs and {count(ranks_here, 'rank')}: the others stand idle. composer -n {num} takes all; what that "
            f"needs: WORLD_SIZE={num} LOCAL_WORLD_SIZE={num} python -m prepare.doctor ...",
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
    yield Finding(OK, f"{named}; CUDA {torch.version.cuda}, {count(ranks_here, 'rank')} here")


def _check_cores(ranks_here: int) -> Findings:
    """Check a machine whose GPUs, if there are any, torch does not see."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if any(Path("/dev").glob("nvidia[0-9]*")) and hidden != "":
        try:
            torch.cuda.init()
            reason = "no device"
        except (RuntimeError, AssertionError) as error:  # of a driver that is too old; of a build for a CPU
            reason = str(error).splitlines()[0].rstrip(".")
        given = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES={hidden})"
        text = f"there are NVIDIA GPUs, but torch {torch.__version__} cannot use them: {reason}{given}"
        yield Finding(ERROR, f"{text}. Install a driver for its CUDA, or say CUDA_VISIBLE_DEVICES= for none.")
    if text := missing_gpus():
        yield Finding(ERROR, text.removeprefix("devices: "))
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    text = f"no GPU: a CPU with {count(cores, 'core')}, {count(threads, 'thread')} a rank, {count(ranks_here, 'rank')} here"
    if ranks_here > cores or (ranks_here > 1 and "OMP_NUM_THREADS" in os.environ and threads * ranks_here > cores):
        yield Finding(WARNING, f"{text}: they wait for one another. Fewer ranks, or OMP_NUM_THREADS=1.")
    yield Finding(OK, text)


# --- memory ---

WORKER_GIB = 0.3  # private memory of a loader worker of SD2: 230 MiB at 64 px and 8 images, 287 at 512 px and 32 (seen)
ORDER = "an epoch's order"  # a kind of memory
FEWER_SAMPLES = "read fewer samples in an epoch: data.streams=[{remote: ..., choose: N}]"


@dataclass(frozen=True)
class OrderNeed:
    """What the order of an epoch takes on this machine (stages/order.py)."""

    samples: int
    shared_gib: float
    """Of /dev/shm, while an epoch begins."""
    gib: float
    """Of its memory, at most."""


def check_host_memory(gib_by_kind: Mapping[str, float]) -> Findings:
    """Compare the estimated host memory of this machine's processes with what is available.

    Args:
        gib_by_kind: purpose -> GiB, over all ranks of this machine.
    """
    total, free = _host_gib()
    need = sum(gib_by_kind.values())
    parts = ", ".join(f"{kind} {gib:.1f}" for kind, gib in gib_by_kind.items() if gib >= 0.05)
    given = f"about {need:.1f} GiB beside the step" + (f" ({parts})" if parts else "")
    given += f"; this machine has {total:.1f}, {free:.1f} of it free now"
    if need > total:
        way = FEWER_SAMPLES if gib_by_kind.get(ORDER, 0.0) > need / 2 else "fewer ranks here"
        yield Finding(ERROR, f"{given}. Lower data.workers, or {way}.")
    elif need > free:
        yield Finding(WARNING, f"{given}. End what takes it, or lower data.workers.")
    yield Finding(OK, given)


def _host_gib() -> tuple[float, float]:
    """Return (total, free now), GiB."""
    total, free = host_bytes()
    return total / 2**30, free / 2**30


def batches_on_their_way(workers: int) -> int:
    """Return the number of one rank's batches in shared memory at once: what each worker keeps, and two in use."""
    return batch_memory.KEPT * workers + 2 if workers else 0


def check_shared_memory(batch_gib: float, num_batches: int, order: OrderNeed | None = None) -> Findings:
    """Check the size of /dev/shm, where workers pass batches on, and an epoch's order lies at its start; Docker: 64 MB.

    Args:
        batch_gib: size of one rank's batch.
        num_batches: over all ranks of this machine, see `batches_on_their_way`.
        order: what the order of an epoch takes.
    """
    folder, keys = shared_memory.SEGMENTS, ("data.workers",)
    if not os.access(folder, os.W_OK):
        text = (
            f"/dev/shm: {folder} is missing or cannot be written: workers and streaming need it. Mount a tmpfs there."
        )
        yield Finding(ERROR, text, keys)
        return
    room = os.statvfs(folder)
    size, free = room.f_blocks * room.f_frsize / 2**30, room.f_bavail * room.f_frsize / 2**30
    of_batches, of_order = batch_gib * num_batches, order.shared_gib if order else 0.0
    need = of_batches + of_order
    if need > free:  # the run removes what dead ones have left
        dead = [path for paths in shared_memory.dead_segments().values() for path in paths if path.exists()]
        free += sum(path.stat().st_size for path in dead) / 2**30
    parts = [f"{num_batches} batches of {batch_gib:.3g} GiB"] if num_batches else []
    parts += [f"the order of {order.samples:,} samples ({of_order:.3g} GiB)"] if order and of_order > need / 100 else []
    given = f"{' and '.join(parts) or 'no batches'}: {need:.3g} GiB there; {size:.3g} GiB, {free:.3g} free"
    way = "lower data.workers" if of_batches >= of_order else FEWER_SAMPLES
    more = f"Enlarge it (docker run --shm-size=16g or --ipc=host, mount -o remount,size=16g /dev/shm), or {way}"
    if need > free:
        ends = "A worker would die of a bus error" if of_batches >= of_order else "The run would end at its first batch"
        yield Finding(ERROR, f"/dev/shm: {given}. {ends}. {more}.", keys)
    elif need > 0.5 * free:
        yield Finding(WARNING, f"{given}: little more than that. {more}.")
    yield Finding(OK, given)


# --- between ranks and machines ---


def check_port(num_ranks: int) -> Findings:
    """Check MASTER_ADDR and MASTER_PORT: the name has to resolve, and on that machine the port has to be free."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None or port is None:
        if num_ranks > 1 and (host or port):
            missing = "MASTER_ADDR" if host is None else "MASTER_PORT"
            yield Finding(ERROR, f"{missing} is not set, the other is. Set both, or let composer -n do it.")
        yield Finding(OK, "MASTER_ADDR and MASTER_PORT are not set: composer -n sets them")
        return
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except (OSError, ValueError, OverflowError) as error:  # a name without an address, a port that is no number
        text = f"MASTER_ADDR={host} with MASTER_PORT={port} is no address: {getattr(error, 'strerror', None) or error}"
        yield Finding(ERROR, f"{text}. Give the name of the machine of rank 0, and a port of 1 to 65535.")
        return
    where = f"MASTER_ADDR={host} is {address[0]}"
    if _refusal(family, (address[0], 0)):
        yield Finding(OK, f"{where}, another machine's: that port {port} answers is known when rank 0 runs there")
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        yield Finding(OK, f"{where}; the launcher holds port {port}")
    elif reason := _refusal(family, ("", int(port))):
        text = f"MASTER_PORT={port} cannot be taken here: {reason}. Give another one (composer --master_port)."
        yield Finding(ERROR, text)
    else:
        yield Finding(OK, f"{where}, port {port} is free")


def _refusal(family: int, address: tuple[str, int]) -> str | None:
    """Say why a server cannot listen at an address, or None."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ports of ended connections count as free
            server.bind(address)
    except OSError as error:
        return error.strerror
    return None
