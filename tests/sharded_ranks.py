"""One step of every family's tiny network, shared out over the ranks and whole: losses and gradients.

composer -n 2 tests/sharded_ranks.py OUT full      -> OUT: JSON, "family way" -> greatest difference over greatest gradient
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from conftest import with_frames
from test_families import TRAINED, TRAINED_ON_VIDEO

from common import dist
from families.encoders import ModelConfig
from families.objectives import ObjectiveConfig
from model import LatentDiffusion, build_model, step_seed
from training import sharding, speed
from training.speed import SpeedKeys
from weights.tensors import gather_tensor

CPU = torch.device("cpu")
VARIANTS = {
    "plain": SpeedKeys(),
    "recomputed": SpeedKeys(gradient_checkpointing=0.5),
    "compiled": SpeedKeys(compile="blocks"),
    "bf16": SpeedKeys(),
}


def built(name: str, variant: str, *, has_denoiser: bool) -> LatentDiffusion:
    config = ModelConfig(name, "tiny", variant, weights="random")
    objective = ObjectiveConfig()
    options = dict(size=with_frames(name, (64, 64)), normalize="symmetric", seed=0)
    return build_model(config, objective, **options, has_denoiser=has_denoiser)


def gradients(model: LatentDiffusion) -> dict[str, torch.Tensor]:
    """Each rank has a batch of its own; the mean of the gradients is what counts."""
    rank = dist.get_global_rank()
    columns = model.family.columns("moments", with_frames(model.family.name, (64, 64)), stored_text=False)
    own = torch.Generator().manual_seed(step_seed(1, 0, rank))
    batch = {
        name: torch.randn(2, *column.shape, generator=own)
        if column.dtype.is_floating_point
        else torch.ones(2, *column.shape, dtype=column.dtype)
        for name, column in columns.items()
    }
    batch = model.draw(batch, torch.Generator().manual_seed(step_seed(0, 0, rank)))
    model.loss(model(batch), batch).backward()
    result = {}
    for name, parameter in model.denoiser.named_parameters():
        grad = parameter.grad
        if model.in_step:
            result[name] = gather_tensor(grad)
        else:
            dist.all_reduce(grad)
            result[name] = grad / dist.get_world_size()
    return result


def difference(name: str, variant: str, way: str, how: str) -> float:
    keys, precision = VARIANTS[way], "bf16" if way == "bf16" else "fp32"
    whole = built(name, variant, has_denoiser=True).to_device(CPU, precision)
    wanted = gradients(whole)
    shared = built(name, variant, has_denoiser=dist.get_global_rank() == 0)
    shared.move_frozen_to_device(CPU, precision)
    keys = SpeedKeys(**{**vars(keys), "sharding": how})
    speed.apply(shared, keys)
    sharding.shard(shared, how, CPU, precision)
    for tensor, other in zip(shared.denoiser.state_dict().values(), whole.denoiser.state_dict().values(), strict=True):
        assert torch.equal(gather_tensor(tensor), other)
    result = gradients(shared)
    assert result.keys() == wanted.keys()
    greatest = max(float(grad.abs().max()) for grad in wanted.values())
    return max(float((result[key] - wanted[key]).abs().max()) for key in wanted) / greatest


if __name__ == "__main__":
    out, how = sys.argv[1:]
    speed.BACKEND = "aot_eager"
    dist.initialize_dist("cpu", timeout=60.0)
    differences = {
        f"{name} {way}": difference(name, variant, way, how)
        for name, variant in [*TRAINED, *TRAINED_ON_VIDEO]
        for way in (VARIANTS if name in ("sd2", "flux", "wan") else ["plain"])
    }
    if dist.get_global_rank() == 0:
        Path(out).write_text(json.dumps(differences))
