"""Contestants measured in turns: what else a machine does in the meantime falls on all of them alike.

A figure is the median over the rounds, with the least and the greatest beside it. A ratio is the median of the ratios
within each round, never a ratio of medians: two contestants of one round have met the same machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def take_turns(
    contestants: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: bool = True
) -> dict[str, list[float]]:
    """Return name -> one value a round.

    Each round another contestant begins, so that none always follows the same other one.

    Args:
        contestants: name -> one turn, which measures itself and returns its value.
        rounds: that are kept.
        warm_up: whether one more round goes before them and is thrown away.
    """
    values: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(-warm_up, rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            value = contestants[name]()
            if number >= 0:
                values[name].append(value)
    return values


class Figures:
    """What a part has measured: `flat`, key -> number, and `by_round`, key -> the values that a figure comes from."""

    def __init__(self) -> None:
        self.flat: dict[str, Any] = {}
        self.by_round: dict[str, list[float]] = {}

    def add(self, key: str, values: Sequence[float]) -> None:
        """Keep a series as KEY (median), KEY_min and KEY_max."""
        self.by_round[key] = [rounded(value) for value in values]
        self.flat |= self._spread(key, values)

    def ratio(self, key: str, over: str, under: str) -> None:
        """Keep the ratio of two series that were added before, as KEY, KEY_min and KEY_max."""
        pairs = zip(self.by_round[over], self.by_round[under], strict=True)
        self.flat |= self._spread(key, [a / b for a, b in pairs])

    def _spread(self, key: str, values: Sequence[float]) -> dict[str, float]:
        found = {key: statistics.median(values), f"{key}_min": min(values), f"{key}_max": max(values)}
        return {name: rounded(value) for name, value in found.items()}


def rounded(value: float) -> float:
    """Round to six digits, as the run record does."""
    return float(f"{value:.6g}")
