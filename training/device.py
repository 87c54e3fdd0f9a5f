"""The device of a run: Composer's, the name of its precision, and the copies of batches to it."""

from __future__ import annotations

import os

import torch
from composer.devices import Device, DeviceCPU, DeviceGPU
from composer.utils import dist

from cli.errors import ConfigError
from cli.private_api import require_private_api
from model import AUTOCAST_DTYPES

require_private_api(Device, "_device", why="torch's own device, on which the networks are placed")


def missing_gpus() -> str | None:
    """Say that a container wants GPUs and has none, or None: it has some, or none are wanted (CUDA_VISIBLE_DEVICES=).

    Images for NVIDIA's container toolkit set NVIDIA_VISIBLE_DEVICES; void and none are its words for no GPU. A torch that is
    built for ROCm is one of AMD's images. Without a word the run would go on with the CPU, and take weeks.
    """
    if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    wanted = os.environ.get("NVIDIA_VISIBLE_DEVICES", "")
    if torch.version.hip is not None:
        why = f"torch {torch.__version__} is built for AMD's. Was the container started without its devices"
        todo = "Start it with --device /dev/kfd --device /dev/dri"
    elif wanted not in ("", "void", "none"):
        why = f"NVIDIA_VISIBLE_DEVICES={wanted} asks for some. Was the container started without --gpus all"
        todo = "Start it with that (the host needs NVIDIA's container toolkit), in a pod with a limit of nvidia.com/gpu"
    else:
        return None
    return f"devices: there is no GPU here, but {why}? {todo}; or say CUDA_VISIBLE_DEVICES= to run on the CPU."


def check_gpus() -> None:
    """Raise ConfigError: see `missing_gpus`."""
    if text := missing_gpus():
        raise ConfigError([text])


def build_device(precision: str) -> Device:
    """Return Composer's device. TF32 is off unless the precision is tf32.

    Ranks share a machine's cores, unless OMP_NUM_THREADS is set: two that each used both cores were 50 times slower.

    Raises:
        ConfigError: see `missing_gpus`.
    """
    check_gpus()
    if torch.cuda.is_available():
        return DeviceGPU(allow_tf32=precision != "fp32")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_local_world_size()))
    return DeviceCPU()


def composer_precision(device: Device, precision: str) -> str:
    """Return Composer's name for a run's precision, i.e. the autocast that it opens around a step (on a GPU only)."""
    names: dict[torch.dtype | None, str] = {torch.bfloat16: "amp_bf16", torch.float16: "amp_fp16"}
    return names.get(AUTOCAST_DTYPES.get(precision), "fp32") if device.name == "gpu" else "fp32"
