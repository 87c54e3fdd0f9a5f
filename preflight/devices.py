"""Checks of a machine's GPUs or cores before a run: one for each rank, with a driver and code in torch's wheel for it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from config import count
from preflight.machine import ERROR, OK, WARNING, Finding
from training.device import missing_gpus

BUSY_GPU_FRACTION = 0.05
LEAST_DRIVER = {12: 525, 13: 580}
"""CUDA's major version -> the oldest Linux driver that runs it (CUDA Compatibility, table 1)."""
CODES = {
    "make env": ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
    "make env SET=newest": ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
}
"""What makes a set -> the GPUs that its torch holds code for, as the wheels of 2.10.0 and 2.15.0 say."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def devices(ranks_here: int) -> list[Finding]:
    """Check this machine's GPUs or cores, and whether each rank has its own."""
    if not torch.cuda.is_available():
        return _cpu(ranks_here)
    num, found = torch.cuda.device_count(), []
    properties = [torch.cuda.get_device_properties(index) for index in range(num)]
    named = ", ".join(f"{gpu.name} with {gpu.total_memory / 2**30:.0f} GiB" for gpu in properties)
    if ranks_here > num:
        text = (
            f"{ranks_here} ranks on this machine, which has {num} GPUs ({named}). Start at most that many: composer -n"
        )
        return [Finding(ERROR, "devices", text)]
    if ranks_here < num:
        text = (
            f"{num} GPUs and {count(ranks_here, 'rank')}: the others stand idle. composer -n {num} takes all; what that "
            f"needs: WORLD_SIZE={num} LOCAL_WORLD_SIZE={num} python -m prepare.doctor ..."
        )
        found.append(Finding(WARNING, "devices", text))
    for index in range(ranks_here):
        if text := _no_code_for(index):
            found.append(Finding(ERROR, "devices", text))
            continue
        try:
            torch.ones(1, device=f"cuda:{index}").add_(1).item()
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            found.append(Finding(ERROR, "devices", f"GPU {index} cannot be used: {reason}. Check nvidia-smi."))
            continue
        own = torch.cuda.memory_reserved(index)
        if total - free - own > max(BUSY_GPU_FRACTION * total, 2**30):
            text = f"GPU {index} has {(total - free) / 2**30:.0f} of {total / 2**30:.0f} GiB in use. Another run? nvidia-smi"
            found.append(Finding(WARNING, "devices", text))
    used = f"{named}; CUDA {torch.version.cuda}, {count(ranks_here, 'rank')} here"
    return found or [Finding(OK, "devices", used)]


def _no_code_for(index: int) -> str | None:
    """Say that torch's wheel holds no code for a GPU, or None."""
    card, codes = torch.cuda.get_device_capability(index), torch.cuda.get_arch_list()
    if torch.version.cuda is None or not codes or _runs(codes, card):
        return None
    name = f"{torch.cuda.get_device_name(index)} is sm_{10 * card[0] + card[1]}"
    ways = " or ".join(way for way, theirs in CODES.items() if _runs(theirs, card))
    todo = f"Possible: {ways}" if ways else "No set of this project has code for it."
    return f"GPU {index}: {name}, torch {torch.__version__} holds code for {', '.join(codes)}. {todo}"


def _runs(codes: Sequence[str], card: tuple[int, int]) -> bool:
    """True where a GPU runs one of these codes, as `sm_90`, `sm_100a` or `compute_90` (CUDA C++ Programming Guide, 5.1)."""
    for code in codes:
        if not (parts := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", code)):
            return True  # a form that is not known here: torch itself will say
        kind, major, minor, suffix = parts.groups()
        own = (int(major), int(minor))
        if suffix == "a":  # for one GPU alone
            fits = own == card
        elif kind == "sm" or suffix == "f":  # for later ones of its major version too
            fits = own[0] == card[0] and own <= card
        else:  # the driver compiles it, for every later one
            fits = own <= card
        if fits:
            return True
    return False


def _driver_problem() -> str | None:
    """Say that the driver is too old for torch's CUDA, or None: it is not, or nothing says which it is."""
    found = (
        re.search(r"Kernel Module\s+(?:for \w+\s+)?(\d+)\.", DRIVER_FILE.read_text(errors="replace"))
        if DRIVER_FILE.is_file()
        else None
    )
    least = LEAST_DRIVER.get(int((torch.version.cuda or "0").partition(".")[0]))
    if found is None or least is None or int(found[1]) >= least:
        return None
    given = f"the driver is {found[1]}, CUDA {torch.version.cuda} of torch {torch.__version__} needs {least} and up"
    older = ", or take the set whose CUDA it runs: make env" if int(found[1]) >= LEAST_DRIVER[12] else ""
    return f"{given}. Install a newer driver{older}"


def _cpu(ranks_here: int) -> list[Finding]:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if any(Path("/dev").glob("nvidia[0-9]*")) and hidden != "":
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for a CPU alone"
        text = f"there are NVIDIA GPUs, but torch {torch.__version__} ({build}) cannot use them"
        if driver := _driver_problem():
            return [Finding(ERROR, "devices", f"{text}: {driver}.")]
        chosen = f"CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else "nvidia-smi says which driver is there"
        return [
            Finding(ERROR, "devices", f"{text}; {chosen}. A driver for that CUDA, or CUDA_VISIBLE_DEVICES= for none.")
        ]
    if text := missing_gpus():
        return [Finding(ERROR, "devices", text.removeprefix("devices: "))]
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    text = f"no GPU: a CPU with {count(cores, 'core')}, {count(threads, 'thread')} a rank, {count(ranks_here, 'rank')} here"
    if ranks_here > cores or (ranks_here > 1 and "OMP_NUM_THREADS" in os.environ and threads * ranks_here > cores):
        return [Finding(WARNING, "devices", f"{text}: they wait for one another. Fewer ranks, or OMP_NUM_THREADS=1.")]
    return [Finding(OK, "devices", text)]
