"""Whether one figure is beyond another: their ratio, its spread, and the one verdict that follows from the spread.

Each figure was measured several times: in the windows of a run, the rounds of a contest, or in repeated runs. The spread of
a ratio is the interval that belongs to the rank test of Mann and Whitney (1947), as Hodges and Lehmann (1963) have it: of
all ratios between a value of the one and a value of the other, it leaves out at either end as many as chance may put there.
Where only the least and the greatest value are known, or each side is one start's windows, none is left out.
docs/comparing.md has the rule in plain words.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

CHANCE = 0.01
"""How often figures that do not differ may be told apart."""
MOST_COUNTED = 10
"""Values of a sample of which only the extremes are known; more of them make the rule no stricter."""
MORE, LESS, ALIKE = "more", "less", "cannot be told apart"
ONE_START = f"{ALIKE} from one start each"
"""Two starts of the same run may differ by more than the windows of each: of two runs started once there is no verdict."""

Unit = Literal["window", "round", "run"]


@dataclass(frozen=True)
class Sample:
    """What a record says of a figure. All values are above 0."""

    middle: float
    """The median."""
    least: float
    greatest: float
    num: int
    """How often it was measured; 0: the record does not say."""
    values: tuple[float, ...] = ()
    """In the order in which they were measured; empty: the record does not have them."""
    unit: Unit = "window"


def sample_of(values: Sequence[float], unit: Unit) -> Sample:
    """Return the sample of values that are known."""
    return Sample(float(np.median(values)), min(values), max(values), len(values), tuple(values), unit)


@dataclass(frozen=True)
class Ratio:
    """How a figure stands to another one."""

    value: float
    """Of the medians."""
    least: float
    greatest: float
    is_enough: bool
    """False: of so few values nothing can be said."""
    is_one_start: bool = False
    """Each side's values are the windows of one start."""

    @property
    def verdict(self) -> str:
        """MORE or LESS where the whole spread says so, else ALIKE; ONE_START where each side was started once."""
        if self.is_one_start:
            return ONE_START
        if not self.is_enough or self.least <= 1.0 <= self.greatest:
            return ALIKE
        return MORE if self.least > 1.0 else LESS


def ratio_of(other: Sample, first: Sample) -> Ratio:
    """Return the ratio of a figure to the first one, with its spread."""
    is_one_start = first.unit == other.unit == "window"
    if first.unit != other.unit:
        first, other = _as_run(first), _as_run(other)
    value = other.middle / first.middle
    if is_one_start or not (first.values and other.values):
        nums = [min(sample.num, MOST_COUNTED) for sample in (first, other)]
        is_enough = min(nums) > 0 and left_out(*nums) > 0
        return Ratio(value, other.least / first.greatest, other.greatest / first.least, is_enough, is_one_start)
    ratios = sorted(b / a for a in first.values for b in other.values)
    out = left_out(first.num, other.num)
    end = max(out - 1, 0)
    return Ratio(value, ratios[end], ratios[-1 - end], out > 0)


def _as_run(sample: Sample) -> Sample:
    """Return what a single run is beside repeated ones: one value."""
    return sample if sample.unit == "run" else sample_of([sample.middle], "run")


@functools.cache
def left_out(num: int, other: int) -> int:
    """Return which of the sorted ratios, from either end, ends the spread: the first, the second, ...; 0: none may.

    Of the binomial(num + other, num) orders in which values that do not differ may lie, each is as likely. `ways[u]` is the
    number of those in which u of the num * other pairs have the second one's value below the first one's.
    """
    ways = [1] + [0] * (num * other)
    for step in range(1, other + 1):  # the Gaussian binomial coefficient, factor by factor
        for u in range(num * other, num + step - 1, -1):
            ways[u] -= ways[u - num - step]
        for u in range(step, num * other + 1):
            ways[u] += ways[u - step]
    beyond, most = 0, CHANCE / 2.0 * math.comb(num + other, num)
    for u, count in enumerate(ways):
        beyond += count
        if beyond > most:
            return u
    return 0
