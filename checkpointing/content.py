"""What a checkpoint of a run holds, and how a run takes it up. When one is written: checkpointing/callback.py.

Before anything is loaded, names, shapes and the run's `identity` are compared exactly. Where weights are shared out over the
ranks (training/sharding.py), the same names stand for tensors of which each rank has its part.
"""

from __future__ import annotations

import copy
import datetime
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from composer import Algorithm, Callback, State, Timestamp
from torch import Tensor, nn

from checkpointing import sharded
from checkpointing.files import SCHEMA
from common import masking
from common.errors import ConfigError
from common.plugins import LISTS
from ema import EMA
from weights.tensors import (
    canonical_name,
    format_difference,
    gather_tensor,
    is_sharded_tensor,
    local_shard,
    shard_like,
    tensor_specs,
)

FULL_KEYS = ("optimizer", "schedule", "scaler")
"""What a full checkpoint has, and a snapshot has not."""


@dataclass(frozen=True)
class Progress:
    """A run's progress at a batch's end: images over all ranks, seconds of training since its first start."""

    epoch: int
    batch: int
    images: int
    batch_in_epoch: int
    images_in_epoch: int
    seconds: float

    @classmethod
    def of(cls, state: State) -> Progress:
        """Read a run's progress. After the last batch of an epoch, it is the start of the next epoch."""
        now = state.timestamp
        if state.dataloader_len is not None and now.batch_in_epoch.value == state.dataloader_len.value:
            now = now.to_next_epoch()
        return cls(
            epoch=now.epoch.value,
            batch=now.batch.value,
            images=now.sample.value,
            batch_in_epoch=now.batch_in_epoch.value,
            images_in_epoch=now.sample_in_epoch.value,
            seconds=now.total_wct.total_seconds(),
        )

    def timestamp(self) -> Timestamp:
        """Return it as Composer's Timestamp."""
        return Timestamp(
            epoch=self.epoch,
            epoch_in_iteration=self.epoch,
            batch=self.batch,
            sample=self.images,
            batch_in_epoch=self.batch_in_epoch,
            sample_in_epoch=self.images_in_epoch,
            total_wct=datetime.timedelta(seconds=self.seconds),
        )


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {canonical_name(name): tensor for name, tensor in model.state_dict().items()}


def _optimizer_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of each group's parameters; torch itself only stores positions."""
    names = {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def stateful_callbacks(state: State) -> dict[str, Callback | Algorithm]:
    """Name in checkpoints -> callback or algorithm, for all that save state."""
    return {c.saved_as: c for c in (*state.callbacks, *state.algorithms) if hasattr(c, "saved_as")}


def _state_of(name: str, callback: Callback | Algorithm) -> dict[str, Any]:
    """Return a callback's state. Raises ValueError: that of a class from outside has what a checkpoint cannot hold."""
    state = callback.state_dict()
    if name.startswith(LISTS) and (kind := _unstorable(state)) is not None:
        allowed = "tensors, numbers, texts, None, and lists, tuples and dicts of them"
        raise ValueError(f"{name}: its state_dict has a {kind.__module__}.{kind.__qualname__}. Possible: {allowed}.")
    return state


def _unstorable(value: Any) -> type | None:
    """Return the first type in a value that reading a checkpoint would refuse, or None."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if type(value) in (list, tuple):
        return next((kind for part in value if (kind := _unstorable(part)) is not None), None)
    return None if isinstance(value, Tensor) or type(value) in (int, float, bool, str, NoneType) else type(value)


def collect_content(
    state: State, model: nn.Module, average: EMA | None, identity: Mapping[str, Any], *, full: bool
) -> dict[str, Any]:
    """Return a checkpoint's content as tensors and plain values; the tensors are not copied."""
    content = {
        "schema": SCHEMA,
        "identity": dict(identity),
        "progress": asdict(Progress.of(state)),
        "unix_time": time.time(),
        "model": _weights(model),
        "ema": None if average is None else average.state_dict(),
        "callbacks": {name: saved for name, c in stateful_callbacks(state).items() if (saved := _state_of(name, c))},
    }
    if full:
        [optimizer], [schedule] = state.optimizers, state.schedulers
        content |= {
            "optimizer": {"names": _optimizer_names(model, optimizer), **optimizer.state_dict()},
            "schedule": schedule.state_dict(),
            "scaler": state.scaler.state_dict() if state.scaler is not None else {},
        }
    return content


def gather_content(content: Any, *, here: bool) -> Any:
    """Return a content with whole tensors on the CPU in place of those in parts; all ranks call it.

    Args:
        here: False: they are not kept on this rank.
    """
    if isinstance(content, Mapping):
        return {key: gather_content(value, here=here) for key, value in content.items()}
    if isinstance(content, Tensor) and is_sharded_tensor(content):
        whole = gather_tensor(content)
        return whole.cpu() if here else None
    return content


def restore(
    checkpoint: tuple[Path, Mapping[str, Any]],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    average: EMA | None,
) -> None:
    """Load weights, optimizer, schedule and EMA weights from a checkpoint, after comparing every name and tensor spec.

    Raises:
        ConfigError: lists what does not fit; nothing has been changed then.
    """
    (path, content), problems = checkpoint, []
    saved = content["optimizer"]
    if text := format_difference(tensor_specs(_weights(model)), tensor_specs(content["model"])):
        fix = "Use the configuration that it was made with."
        problems.append(f"{path}: its weights do not fit the model: {text}. {fix}")
    if saved["names"] != _optimizer_names(model, optimizer):
        problems.append(
            f"{path}: its optimizer has other parameters or groups. Use the optimizer.decay that the run began with."
        )
    if (average is None) != (content.get("ema") is None):
        contents, needed = ("EMA weights", "false") if average is None else ("no EMA weights", "true")
        problems.append(f"ema.enabled: {needed}, but {path} has {contents}. Use the value that the run began with.")
    if problems:
        raise ConfigError(problems)
    if average is not None:
        average.bind(model)
        try:
            average.load_state_dict(content["ema"])
        except ValueError as error:
            raise ConfigError([f"{path}: {error}"]) from error
    load_optimizer_state(optimizer, saved)
    schedule.load_state_dict(content["schedule"])
    tensors = name_tensors(model, optimizer, average)
    _copy_tensors(_weights(model), content["model"])
    if path.is_dir():
        is_needed = dict(sharded.flatten_tensors(content, lambda tensor: tensor.is_meta))
        sharded.load_parts(path, {name: tensor for name, tensor in tensors.items() if name in is_needed})


@torch.no_grad()
def _copy_tensors(tensors: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy tensors by name, of each this rank's part; those of a folder follow."""
    for name, tensor in tensors.items():
        if not saved[name].is_meta:
            local_shard(tensor).copy_(shard_like(saved[name], tensor))


def load_optimizer_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Take an optimizer's groups and state: of each moment this rank's part, with its parameter's strides.

    Everything is copied: on a CPU the mapped file would be used otherwise, whose disk space stays occupied. Fused kernels
    need the parameter's strides, which differ where the checkpoint comes from a run in another memory format.
    """
    whole = {key: value for key, value in saved.items() if key not in ("names", "state")}
    optimizer.load_state_dict({**whole, "state": {}})
    parameters = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    others = {key: value for key, value in saved["state"].items() if key not in range(len(parameters))}
    optimizer.state.update(copy.deepcopy(others))
    # training/low_memory_adamw.py has it: its state is no copy of the parameter.
    begin_state = getattr(optimizer, "begin_state", None)
    for n, (parameter, group) in enumerate(parameters):
        if (saved_state := saved["state"].get(n)) is None:  # it never had a gradient
            continue
        if begin_state is not None:
            state = begin_state(parameter)
            moments = {name: moment for name, moment in state.items() if name != "step"}
        else:
            like = parameter.detach()
            moments = {
                k: torch.empty_like(like, dtype=v.dtype) for k, v in saved_state.items() if _is_moment(k, v, like)
            }
            state = dict(moments)
        _copy_tensors(moments, saved_state)
        # As torch has it: the number of steps is on the CPU, unless a kernel reads it.
        on_cpu = begin_state is not None or not (group.get("fused") or group.get("capturable"))
        for name in (name for name in saved_state if name not in moments):
            device = torch.device("cpu") if name == "step" and on_cpu else parameter.device
            state[name] = _copy(saved_state[name], device)
        optimizer.state[parameter] = state


def _is_moment(name: str, value: Any, parameter: Tensor) -> bool:
    """False for the number of steps, and what an optimizer from outside may keep: a number, a tensor of another shape."""
    return name != "step" and isinstance(value, Tensor) and value.shape == parameter.shape


def _copy(value: Any, device: torch.device) -> Any:
    return value.to(device, copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def name_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, average: EMA | None) -> dict[str, Tensor]:
    """Return the tensors of a run by the names that they have in a checkpoint's folder."""
    content = {
        "model": _weights(model),
        "ema": {} if average is None else average.state_dict(),
        "optimizer": {"state": optimizer.state_dict()["state"]},
    }
    return dict(sharded.flatten_tensors(content, lambda tensor: True))


def identity_problems(content: Mapping[str, Any], identity: Mapping[str, Any], path: Path) -> list[str]:
    """One message for each value of a run's identity that differs between a checkpoint and this run.

    A value that was given as `${...}` is not compared, because a checkpoint does not store what it resolved to.
    """
    saved = content["identity"]
    return [
        f"{key}: {value!r}, but {path} was made with {saved.get(key)!r}. A run resumes as it began: use that value, or "
        "another run_name."
        for key, value in identity.items()
        if saved.get(key) != value and not masking.is_interpolated(saved.get(key))
    ]
