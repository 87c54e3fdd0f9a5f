"""On how many GPUs a run fits: the memory of one by kind, for 1 to 64 of them, and the smallest number that is enough.

The numbers are those of `training.cost.Cost`, so nothing is allocated and no GPU is needed. It is reckoned with one image a
pass, since a batch of any size can be made of such passes; and with 8 GPUs a machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from cli.table import as_table
from model import AUTOCAST_DTYPES
from training.cost import CUDA_AUTOCAST_FACTOR, USABLE_FRACTION, Cost

CARDS_GIB = (80, 139)  # H100 and A100; H200
NUM_GPUS = (1, 2, 4, 8, 16, 32, 64)
GPUS_A_MACHINE = 8


def on_gpus(cost: Cost, values: Mapping[str, Any]) -> Cost:
    """Return the cost of a run's step on a GPU; traced without one, it is that on a CPU.

    Args:
        values: key -> value of the resolved run: precision, compile, model.frozen_device.
    """
    if torch.cuda.is_available():
        return cost
    is_autocast = values["precision"] in AUTOCAST_DTYPES and values["compile"] == "off"
    each = cost.activation_gib_per_image * (CUDA_AUTOCAST_FACTOR if is_autocast else 1.0)
    is_apart = values["model.frozen_device"] == "cpu"
    return replace(cost, activation_gib_per_image=each, frozen_gib=0.0 if is_apart else cost.frozen_gib)


def over(cost: Cost, num: int, sharding: str) -> Cost:
    """Return the cost on this number of GPUs; one alone has nobody to share with."""
    how = sharding if num > 1 and cost.can_be_shared else "off"
    return replace(cost, num_ranks=num, ranks_a_machine=min(num, GPUS_A_MACHINE), sharding=how)


def is_possible(cost: Cost, num: int, sharding: str) -> bool:
    """False where more ranks would share a copy of the weights than the denoiser has blocks."""
    return over(cost, num, sharding).parts <= max(1, cost.num_blocks)


def images_a_pass(cost: Cost, card_gib: float, *, ema: bool) -> int:
    """Return how many images a pass fit on a card, 0: not one."""
    room = USABLE_FRACTION * card_gib - cost.memory_gib(0, ema=ema)
    return max(0, int(room / cost.activation_gib_per_image))


def fewest(cost: Cost, card_gib: float, sharding: str, *, ema: bool) -> int | None:
    """Return the smallest number of cards that a run fits on with one image a pass; None: more than 64 or none."""
    numbers = (num for num in range(1, NUM_GPUS[-1] + 1) if is_possible(cost, num, sharding))
    return next((num for num in numbers if images_a_pass(over(cost, num, sharding), card_gib, ema=ema)), None)


def lines(cost: Cost, values: Mapping[str, Any]) -> list[str]:
    """Return the lines of a run's plan on GPUs.

    Args:
        values: key -> value of the resolved run.
    """
    ema = bool(values["ema.enabled"] and values["ema.device"] == "model")
    given = values.get("sharding", "off")
    shown = given if given != "off" or not cost.can_be_shared else "full"
    cost = on_gpus(cost, values)
    title = f"memory of one GPU in {values['precision']} with sharding={shown} from 2 on, one image a pass, GiB:"
    return [
        title,
        *_table(cost, shown, ema=ema),
        *(_smallest(cost, way, ema=ema) for way in dict.fromkeys([given, shown])),
    ]


def _table(cost: Cost, sharding: str, *, ema: bool) -> list[str]:
    nums = [num for num in NUM_GPUS if is_possible(cost, num, sharding)]
    rows = [over(cost, num, sharding) for num in nums]
    kinds = [row.memory_by_kind(1, ema=ema) for row in rows]
    names = [name for name in kinds[0] if any(of[name] >= 0.005 for of in kinds)]
    head = ("GPUs", *names, "sum", *(f"images on {gib} GiB" for gib in CARDS_GIB))
    cells = [
        (
            str(num),
            *(f"{of[name]:.2f}" for name in names),
            f"{sum(of.values()):.2f}",
            *(str(images_a_pass(row, gib, ema=ema)) for gib in CARDS_GIB),
        )
        for num, row, of in zip(nums, rows, kinds, strict=True)
    ]
    return [f"  {line}" for line in as_table(head, cells, "r" * len(head)).splitlines()]


def _smallest(cost: Cost, sharding: str, *, ema: bool) -> str:
    said = []
    for gib in CARDS_GIB:
        num = fewest(cost, gib, sharding, ema=ema)
        said.append(f"of {gib} GiB {'none is enough' if num is None else num}")
    return f"smallest number of cards with sharding={sharding}: {', '.join(said)}"
