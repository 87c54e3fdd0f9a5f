"""Composer's Trainer without its waits: the host reads a batch's loss while the device computes the next one.

In each step, Composer 0.32.1 reads seven numbers from the device: whether any rank has run out of batches, the batch size
over all ranks before the first pass, the loss before and after the optimizer's step, and samples, tokens and seconds. The
host waits for each of them, and the device's queue runs empty.
The weights are identical bit for bit (tests/test_trainer.py).

This class overrides private methods of Composer, so it is used only on request, by the key `async_loss`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from composer import Event, Trainer
from composer.devices import Device, DeviceCPU, DeviceGPU
from composer.trainer.trainer import TrainerMode
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from callbacks.losses import TOTAL, AsyncLosses
from common import dist
from common.errors import ConfigError
from common.private_api import require_private_api
from model import AUTOCAST_DTYPES

DIST_TIMEOUT_SEC = 1800.0
"""Of every collective of a run."""
OVERRIDDEN = (
    "_use_closures",
    "_iter_dataloader",
    "_accumulate_time_across_ranks",
    "_train_batch",
    "_train_microbatches",
)
CALLED = ("_train_microbatch", "_train_data_spec", "_use_grad_scaling")
require_private_api(Trainer, *OVERRIDDEN, *CALLED, why="async_loss: steps that do not wait for the loss")


class NonBlockingTrainer(Trainer):
    """A Trainer that passes each batch's loss to `losses`; Composer's own dictionary of losses stays empty.

    It requires the same number of batches on every rank, all of the same size, and no automatic microbatching by Composer.
    """

    def __init__(self, *args: Any, losses: AsyncLosses, **more: Any):
        self.losses = losses
        super().__init__(*args, **more)

    def _use_closures(self) -> bool:
        return False

    def _iter_dataloader(self, trainer_mode: TrainerMode) -> Iterator[Any]:
        assert trainer_mode == TrainerMode.TRAIN and self.state.dataloader is not None
        batches = iter(self.state.dataloader)
        while True:
            self.engine.run_event(Event.BEFORE_DATALOADER)
            try:
                batch = next(batches)
            except StopIteration:
                self.engine.run_marker_only_event(Event.AFTER_DATALOADER)
                return
            yield batch

    def _accumulate_time_across_ranks(
        self, num_samples: int | float, num_tokens: int, batch_time: datetime.timedelta
    ) -> tuple[int, int, datetime.timedelta]:
        ranks = dist.get_world_size()
        return int(num_samples) * ranks, num_tokens * ranks, batch_time

    def _train_batch(self, use_grad_scaling: bool) -> dict[str, Tensor]:
        losses = super()._train_batch(use_grad_scaling)
        self.losses.put(self.state.timestamp.batch.value, losses[TOTAL])
        return {}

    def _train_microbatches(
        self, microbatches: Sequence[Any], total_loss_dict: dict[str, Tensor], ddp_sync: bool = True
    ) -> Tensor:
        state, spec = self.state, self._train_data_spec
        assert state.scaler is not None and spec is not None
        ddp = state.model if isinstance(state.model, DistributedDataParallel) else None
        with ddp.no_sync() if ddp is not None and not ddp_sync else contextlib.nullcontext():
            self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
            use_grad_scaling = self._use_grad_scaling(state.precision, state.scaler)
            for optimizer in state.optimizers:
                optimizer.zero_grad(set_to_none=True)
            num_samples = sum(spec.get_num_samples_in_batch(microbatch) for microbatch in microbatches)
            device_batch = state.batch
            for number, microbatch in enumerate(microbatches, 1):
                state.batch = spec.microbatch_transforms(state.device.batch_to_device(microbatch))
                losses = self._train_microbatch(use_grad_scaling, num_samples, number == len(microbatches))
                total_loss_dict[TOTAL] += losses["total"]
            state.batch = device_batch
            if use_grad_scaling:
                for optimizer in state.optimizers:
                    state.scaler.unscale_(optimizer)
            self.engine.run_event(Event.AFTER_TRAIN_BATCH)
            return total_loss_dict[TOTAL]


# --- the device of a run ---


def missing_gpus() -> str | None:
    """Say that a container wants GPUs and has none, or None: it has some, or none are wanted (CUDA_VISIBLE_DEVICES=).

    Images for NVIDIA's container toolkit set NVIDIA_VISIBLE_DEVICES; void and none are its words for no GPU. A torch that is
    built for ROCm is one of AMD's images. Otherwise the run would silently use the CPU, and take weeks.
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


def torch_device(device: Device) -> torch.device:
    """Return torch's device of Composer's."""
    return torch.device("cuda", torch.cuda.current_device()) if device.name == "gpu" else torch.device("cpu")


def composer_precision(device: Device, precision: str) -> str:
    """Return Composer's name for a run's precision, i.e. the autocast that it opens around a step (on a GPU only)."""
    names: dict[torch.dtype | None, str] = {torch.bfloat16: "amp_bf16", torch.float16: "amp_fp16"}
    return names.get(AUTOCAST_DTYPES.get(precision), "fp32") if device.name == "gpu" else "fp32"
