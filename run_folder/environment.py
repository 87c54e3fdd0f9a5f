"""What a figure was made on: versions, commit, device, machine. Every record has it beside its figures."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import psutil
import torch

from common import dist

PACKAGES = ("torch", "mosaicml", "mosaicml-streaming", "diffusers", "transformers", "open_clip_torch")


def versions() -> dict[str, str | None]:
    """Return the versions of the libraries that a figure depends on: PACKAGE_version -> version, None: not installed."""
    versions_by_key: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions_by_key[f"{package}_version"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions_by_key[f"{package}_version"] = None
    return versions_by_key


def environment() -> dict[str, Any]:
    """Return versions, commit and device of this process, flat."""
    cuda = torch.cuda.is_available()
    return {
        "device": device_name(),
        "num_devices": dist.get_world_size(),
        "python_version": platform.python_version(),
        **versions(),
        "cuda_version": torch.version.cuda if cuda else None,
        "cudnn_version": torch.backends.cudnn.version() if cuda else None,
        "device_memory_gib": round(torch.cuda.get_device_properties().total_memory / 2**30, 1) if cuda else None,
        **_host(),
        "platform": f"{platform.system()} {platform.machine()}",
        "commit": commit(),
    }


@functools.cache
def start_cpu_query() -> threading.Thread:
    """Look up, in the background, the CPU model that Composer's Trainer asks for: py-cpuinfo takes a second."""

    def ask() -> None:
        from composer.utils.collect_env import get_cpu_model

        with contextlib.suppress(OSError):  # the Trainer asks again
            get_cpu_model()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def device_name() -> str:
    """Return the GPU's name as its driver gives it, or the CPU's with the threads that torch uses."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU {_host()['cpu']}, {torch.get_num_threads()} threads"


def _host() -> dict[str, Any]:
    """Return what the machine is beside its GPUs: processors, memory, system (in a container: the container's)."""
    name, system, cpu_lines = platform.processor() or platform.machine(), platform.system(), []
    with contextlib.suppress(OSError):  # not on every system
        cpu_lines = re.findall(r"(?m)^(model name|physical id)\s*: (.+?)\s*$", Path("/proc/cpuinfo").read_text())
    with contextlib.suppress(OSError):
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    return {
        "cpu": next((value for key, value in cpu_lines if key == "model name"), name),
        "cpu_sockets": len({value for key, value in cpu_lines if key == "physical id"}) or None,
        "cpu_cores": psutil.cpu_count(logical=False),
        "cpu_threads": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "os": f"{system}, kernel {platform.release()}",
    }


def commit() -> str | None:
    """Return the commit of this checkout, with `+changes` where the tree differs from it, records left out.

    EASEL_COMMIT names it for a copy of the tree, whose git may be that of another commit or missing. None: nobody knows.
    """
    if named := os.environ.get("EASEL_COMMIT"):
        return named
    root = Path(__file__).resolve().parent.parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!reports/results")
        return git("rev-parse", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return None
