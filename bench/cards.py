"""On how many cards the full networks fit, by the kind of weights and moments: the plan's numbers, nothing is measured.

    python -m bench.cards                          # some minutes: each network is traced once for each precision

SD2, SDXL, FLUX.1 dev and schnell in their full sizes, at the side of their images, from stored moments and text states, so
without encoders. Every block is computed twice (gradient_checkpointing=1); one image a pass; EMA weights with ema=true.
bench.states sets what a process held beside what the plan says.
Exit code: 0, or 2 when the command cannot be read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.command import keep, read_keys
from bench.contest import rounded
from cli.command import command
from cli.limits import ImageSize
from preflight.cards import CARDS_GIB, NUM_GPUS, fewest, is_possible, on_gpus, over
from training.cost import Cost
from training.kept_cost import kept_cost
from zoo.model_config import ModelConfig
from zoo.objectives import ObjectiveConfig

SCHEMA = 2
NETWORKS: tuple[tuple[str, str, ImageSize], ...] = (
    ("sd2", "stock", (512, 512)),
    ("sdxl", "stock", (1024, 1024)),
    ("flux", "dev", (1024, 1024)),
    ("flux", "schnell", (1024, 1024)),
    ("mochi", "stock", (960, 544, 7)),
    ("hunyuan_video", "stock", (960, 544, 9)),
    ("wan", "i2v", (768, 512, 129)),
    ("wan", "t2v_1.3b", (832, 480, 81)),
)
"""Family, variant, (width, height) of its images in px, or (width, height, frames) of its videos."""
WAYS = (("bf16", "fp32"), ("bf16", "bf16"), ("bf16", "8bit"))
WAYS += (("bf16_params", "fp32"), ("bf16_params", "bf16"), ("bf16_params", "8bit"))
"""precision, optimizer.states."""


@dataclass(frozen=True)
class CardsConfig:
    """The keys of this command."""

    ema: bool = False
    """With EMA weights on the card."""
    results: str = "reports/results/cards.json"
    """File of the record; an earlier one is replaced."""


def cost_of(family: str, variant: str, size: ImageSize, precision: str) -> Cost:
    """Trace a network's step."""
    has: dict[str, Any] = dict(stage="moments", stored_text=True, has_encoders=False, size=size)
    cost = kept_cost(
        ModelConfig(family, "full", variant), ObjectiveConfig(), **has, precision=precision, gradient_checkpointing=1.0
    )
    return on_gpus(cost, {"precision": precision, "compile": "off", "model.frozen_device": "device"})


def rows(ema: bool) -> Iterator[dict[str, Any]]:
    """Return a row of the record for each network and way."""
    for family, variant, size in NETWORKS:
        for precision, states in WAYS:
            cost = replace(cost_of(family, variant, size, precision), states=states)
            row: dict[str, Any] = {"network": family if variant == "stock" else f"{family} {variant}"}
            row |= {"image_size": list(size), "parameters": cost.trained_parameters}
            row |= {"precision": precision, "states": states}
            nums = [n for n in NUM_GPUS if n == 1 or (cost.can_be_shared and is_possible(cost, n, "full"))]
            row["gib"] = {str(num): rounded(over(cost, num, "full").memory_gib(1, ema=ema)) for num in nums}
            yield row | {f"cards_of_{gib}_gib": fewest(cost, gib, "full", ema=ema) for gib in CARDS_GIB}


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(CardsConfig, argv)
    if config is not None:
        keep(config.results, SCHEMA, "cards", config, lambda: {"networks": list(rows(config.ema))})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
