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

from typing import TYPE_CHECKING, Any

import torch
from composer.utils import dist
from torch import Tensor

from cli import ranks
from model import AUTOCAST_DTYPES, LatentDiffusion, cast_weights
from training.blocks import blocks_of
from weights.parts import is_part, part
from weights.tensors import on_meta
from zoo import load_family

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from training.run_config import RunConfig

PRECISIONS = ("fp32", "tf32", "bf16", "bf16_params")


def is_sharded(config: RunConfig) -> bool:
    """True where a run's weights are shared out; with one rank there is nobody to share with."""
    return config.sharding != "off" and dist.get_world_size() > 1


def ranks_of_a_copy(how: str) -> int:
    """Return over how many ranks one copy of the weights is shared out."""
    return dist.get_local_world_size() if how == "hybrid" else dist.get_world_size()


def problems(config: RunConfig) -> list[tuple[str, str]]:
    """(key, message) for every key that does not go with sharding, and for too many ranks."""
    if not is_sharded(config):
        return []
    how, found = config.sharding, refusals(config)
    num = ranks_of_a_copy(how)
    if num > (most := num_blocks(config)):
        given = f"{how} over {num} ranks, but the denoiser has {most} blocks: most ranks would have next to nothing"
        ways = f"hybrid, sharding=off, or {most} ranks at most" if how == "full" else f"off, or {most} ranks at most"
        found.append(("sharding", f"{given}. Say sharding={ways}."))
    return found


def refusals(config: RunConfig) -> list[tuple[str, str]]:
    """(key, message) for every key that does not go with sharding, on or off."""
    how = config.sharding if config.sharding != "off" else "full"
    is_searched = torch.cuda.is_available() and config.eval.when == "in_training" and config.eval.batch_size is None
    size, precision, states = config.device_train_microbatch_size, config.precision, config.optimizer.states
    few = precision not in (None, *PRECISIONS)
    scaler = f"the scaler cannot judge a part of the gradients. Possible: {', '.join(PRECISIONS)}"
    refused = [
        ("channels_last", "true", config.channels_last, "weights in NHWC cannot be split. Leave it out"),
        ("compile", "whole", config.compile == "whole", "one graph cannot gather block by block. Say compile=blocks"),
        ("device_train_microbatch_size", "auto", size == "auto", "ranks would run out of memory apart. Give a number"),
        ("ema.device", "cpu", config.ema.device == "cpu", "the EMA is in parts too. Say ema.device=model"),
        ("eval.batch_size", "null", is_searched, "ranks would run out of memory apart. Give a number"),
        ("lora.rank", config.lora.rank, config.lora.is_given, "an adapter is small. Say sharding=off"),
        (
            "optimizer.states",
            "8bit",
            states == "8bit",
            "its blocks do not end where parts do. Say optimizer.states=bf16",
        ),
        ("precision", precision, few, scaler),
    ]
    return [(key, f"{value}, but sharding={how}: {why}.") for key, value, is_refused, why in refused if is_refused]


def num_blocks(config: RunConfig) -> int:
    """Return the number of a denoiser's blocks; so many ranks can share it. Many, where there is no such network."""
    given = config.model
    try:
        family = load_family(given.family, given.preset, given.variant)
    except ValueError:  # named by model_problems
        return 2**31
    return len(blocks_of(on_meta(family.build_denoiser)))


def shard(model: LatentDiffusion, how: str, device: torch.device, precision: str) -> None:
    """Share out a denoiser that rank 0 has built, and leave this rank's parts on the device. All ranks call it.

    Args:
        model: on rank 0 with its weights on the CPU, elsewhere with a denoiser without memory (on meta).
        how: full or hybrid.
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
    ways: dict[str, Any] = dict(mesh=mesh_of(how, device), mp_policy=policy, reshard_after_forward=True)
    for block in blocks_of(denoiser):
        fully_shard(block, **ways)
    fully_shard(denoiser, **ways)
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


def mesh_of(how: str, device: torch.device) -> DeviceMesh:
    """Return the ranks as they share: all in a row, or the machines times the ranks of each."""
    from torch.distributed.device_mesh import init_device_mesh

    nodes = ranks.num_nodes()
    if how == "full" or nodes == 1:
        return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (nodes, dist.get_local_world_size()), mesh_dim_names=("replicate", "shard"))


@torch.no_grad()
def _fill(parameter: Tensor, whole: Tensor, device: torch.device) -> None:
    """Put rank 0's tensor into the parts of all ranks."""
    from torch.distributed.tensor import distribute_tensor

    assert is_part(parameter)
    of: Any = parameter
    is_first = dist.get_global_rank() == 0
    given = whole.to(device) if is_first else torch.empty(of.shape, dtype=of.dtype, device=device)
    part(parameter).copy_(part(distribute_tensor(given, of.device_mesh, of.placements)))
