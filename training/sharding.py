"""Sharding: each rank keeps a part of the trained weights, their gradients, optimizer states and EMA weights (FSDP2).

    sharding=full      over all ranks
    sharding=hybrid    over the ranks of each machine, with a copy on every machine

torch's `fully_shard` makes each of the denoiser's blocks a unit: its weights are gathered before it runs, and given up after
it; in the backward pass again. The mean of the gradients over the ranks is DDP's, and is left in parts.

It is applied here and not by Composer (0.32.1, FSDP_VERSION=2), which shards when its Trainer is built. By then optimizer,
EMA and checkpoint have been read, for whole weights on every rank. Its Trainer sees the units and leaves DDP out.

Source: PyTorch FSDP, Zhao et al. 2023 (arXiv:2304.11277); ZeRO stage 3, Rajbhandari et al. 2020 (arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common import dist
from families import load_family
from families.encoders import ModelConfig
from model import AUTOCAST_DTYPES, LatentDiffusion, cast_weights
from ranks import collectives
from training import speed
from training.speed import SpeedKeys, blocks_of
from weights.tensors import build_on_meta, is_sharded_tensor, local_shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PRECISIONS = ("fp32", "tf32", "bf16", "bf16_params")


def is_sharded(sharding: str) -> bool:
    """Return whether weights are shared out with this value of the key; with one rank they never are."""
    return sharding != "off" and dist.get_world_size() > 1


def ranks_per_copy(sharding: str) -> int:
    """Return over how many ranks one copy of the weights is shared out."""
    return dist.get_local_world_size() if sharding == "hybrid" else dist.get_world_size()


def problems(keys: Mapping[str, Any], model: ModelConfig) -> list[tuple[str, str]]:
    """(key, message) for every key that does not go with sharding, and for too many ranks. `keys`: all of a run."""
    sharding = keys["sharding"]
    if not is_sharded(sharding):
        return []
    messages, ranks = refusals(keys), ranks_per_copy(sharding)
    if ranks > (most := num_blocks(model)):
        problem = (
            f"{sharding} over {ranks} ranks, but the denoiser has {most} blocks: most ranks would have next to nothing"
        )
        values = "hybrid, sharding=off, or" if sharding == "full" else "off, or"
        messages.append(("sharding", f"{problem}. Set sharding={values} {most} ranks at most."))
    return messages


def refusals(keys: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(key, message) for every key that does not go with sharding, on or off. `keys`: all of a run."""
    sharding = keys["sharding"] if keys["sharding"] != "off" else "full"
    is_searched = torch.cuda.is_available() and keys["eval.when"] == "in_training"
    precisions, ranks_apart = ", ".join(PRECISIONS), "ranks may run out of memory at different sizes. Give a number"
    refused: list[tuple[str, Callable[[Any], bool], str]] = [
        ("channels_last", lambda value: value, "weights in NHWC cannot be split. Leave it out"),
        ("compile", lambda value: value == "whole", "one graph cannot gather block by block. Set compile=blocks"),
        ("device_train_microbatch_size", lambda value: value == "auto", ranks_apart),
        ("ema.device", lambda value: value == "cpu", "the EMA is in parts too. Set ema.device=model"),
        ("eval.batch_size", lambda value: value is None and is_searched, ranks_apart),
        ("lora.rank", lambda value: value is not None, "an adapter is small. Set sharding=off"),
        (
            "optimizer.states",
            lambda value: value == "8bit",
            "its blocks do not end where parts do. Set optimizer.states=bf16",
        ),
        (
            "precision",
            lambda value: value not in (None, *PRECISIONS),
            f"the scaler cannot judge a part of the gradients. Possible: {precisions}",
        ),
    ]
    return [
        (key, f"{_as_in_yaml(keys[key])}, but sharding={sharding}: {reason}.")
        for key, is_refused, reason in refused
        if is_refused(keys[key])
    ]


def _as_in_yaml(value: Any) -> Any:
    return "null" if value is None else "true" if value is True else value


def num_blocks(model: ModelConfig) -> int:
    """Return the number of a denoiser's blocks; so many ranks can share it. Many, where there is no such network."""
    try:
        family = load_family(model.family, model.preset, model.variant)
    except ValueError:  # named by model_problems
        return 2**31
    return len(blocks_of(build_on_meta(family.build_denoiser)))


def shard(model: LatentDiffusion, sharding: str, device: torch.device, precision: str) -> None:
    """Share out a denoiser that rank 0 has built, and leave this rank's parts on the device. All ranks call it.

    Args:
        model: on rank 0 with its weights on the CPU, elsewhere with a denoiser without memory (on meta).
        sharding: full or hybrid.
        precision: of the run: weights are gathered in its compute type, gradients are averaged in float32.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    denoiser = model.denoiser
    cast_weights(denoiser, precision)
    whole = {name: tensor.detach() for name, tensor in denoiser.named_parameters()}
    buffers = {name: tensor.detach() for name, tensor in denoiser.named_buffers()}
    denoiser.to_empty(device="meta", recurse=True)
    # Inputs are cast by autocast, as without sharding.
    compute = AUTOCAST_DTYPES.get(precision)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = dict(mesh=mesh_of(sharding, device), mp_policy=policy, reshard_after_forward=True)
    for block in blocks_of(denoiser):
        fully_shard(block, **options)
    fully_shard(denoiser, **options)
    denoiser.to_empty(device=device)
    if device.type == "cpu":  # gloo has no mean
        for unit in denoiser.modules():
            if isinstance(unit, FSDPModule):
                unit.set_force_sum_reduction_for_comms(True)
    for name, parameter in denoiser.named_parameters():
        _fill(parameter.detach(), whole.pop(name), device)
    for name, buffer in denoiser.named_buffers():
        buffer.copy_(buffers.pop(name) if dist.get_global_rank() == 0 else buffer)
        dist.broadcast(buffer, 0)
    model.in_step = True


def mesh_of(sharding: str, device: torch.device) -> DeviceMesh:
    """Return the ranks as they share: all in a row, or the machines times the ranks of each."""
    from torch.distributed.device_mesh import init_device_mesh

    nodes = collectives.num_nodes()
    if sharding == "full" or nodes == 1:
        return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (nodes, dist.get_local_world_size()), mesh_dim_names=("replicate", "shard"))


@torch.no_grad()
def _fill(parameter: Tensor, whole: Tensor, device: torch.device) -> None:
    """Put rank 0's tensor into the parts of all ranks."""
    from torch.distributed.tensor import distribute_tensor

    assert is_sharded_tensor(parameter)
    of: Any = parameter
    is_first = dist.get_global_rank() == 0
    source = whole.to(device) if is_first else torch.empty(of.shape, dtype=of.dtype, device=device)
    local_shard(parameter).copy_(local_shard(distribute_tensor(source, of.device_mesh, of.placements)))


def move_to_device(
    model: LatentDiffusion, keys: SpeedKeys, precision: str, device: torch.device, *, num_sizes: int
) -> None:
    """Move a model to the device, as the keys of speed say; of sharded weights this rank's part."""
    is_shared = is_sharded(keys.sharding)
    (model.move_frozen_to_device if is_shared else model.to_device)(device, precision)
    speed.apply(model, keys, num_sizes=num_sizes)
    if is_shared:
        shard(model, keys.sharding, device, precision)
