"""Contestants measured in turns: what else a machine does in the meantime falls on all of them alike.

A figure is the median over the rounds, with the least and the greatest beside it. A ratio is the median of the ratios
within each round, never a ratio of medians: two contestants of one round have met the same machine.

`compared` judges two codes by such rounds. A machine's own ups and downs are in it as the largest step from one round to the
next of one and the same code.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

LEAST_RATIO = 1.02
"""A smaller difference is none that anybody would act on, however often it is seen."""


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


@dataclass(frozen=True)
class Compared:
    """What turns say of a cost of two codes. Ratios are those of the second over the first, in each round."""

    ratio: float
    """The median."""
    least: float
    greatest: float
    step: float
    """The largest ratio of two neighbouring turns of one and the same code, 1 and more."""
    verdict: Literal["more", "less", "same"]


def compared(before: Sequence[float], after: Sequence[float]) -> Compared:
    """Judge a cost, such as seconds or bytes, that two codes had in turns.

    It is `more` where each round's ratio is above 1, and their median is above the largest step of one code and LEAST_RATIO;
    `less` likewise; else nothing is seen, which is `same`.

    Args:
        before, after: one value a round, above 0; two rounds at least.
    """
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    ratio = statistics.median(ratios)
    step = max(max(a / b, b / a) for values in (before, after) for a, b in itertools.pairwise(values))
    beyond = max(step, LEAST_RATIO)
    is_more, is_less = min(ratios) > 1 and ratio > beyond, max(ratios) < 1 and 1 / ratio > beyond
    verdict: Literal["more", "less", "same"] = "more" if is_more else "less" if is_less else "same"
    return Compared(ratio, min(ratios), max(ratios), step, verdict)


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
