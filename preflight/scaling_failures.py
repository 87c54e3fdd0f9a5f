"""What failures cost, and how often to save: Young's and Daly's cadence, and the expected time of a run.

    M      mean time between failures of the whole run, s: that of a device over their number
    d      seconds that a checkpoint holds up training
    R      seconds from a failure until training goes on
    w      seconds of training between two checkpoints

Failures are a Poisson process. A segment is done when w + d pass without one; until then each failure costs what has
passed and a restart, and a restart may fail too. Its expected time is M exp(R / M) (exp((w + d) / M) - 1): Daly 2006, "A
higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22.
Young 1974, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import lambertw

LLAMA_HOURS = 16_384 * 54 * 24 / 419
"""Device-hours a failure: 419 unexpected interruptions in 54 days on 16,384 H100. The Llama 3 Herd of Models,
arXiv:2407.21783, section 3.3.4."""

NEVER = 30.0
"""w + d and R over M, together: exp() of it is 1e13. A run that takes so many times its training never ends."""


def young_sec(d: float, m: float) -> float:
    """Return Young's w: sqrt(2 d M)."""
    return math.sqrt(2 * d * m)


def daly_sec(d: float, m: float) -> float:
    """Return Daly's higher-order w."""
    if d >= 2 * m:
        return m
    x = d / (2 * m)
    return math.sqrt(2 * d * m) * (1 + math.sqrt(x) / 3 + x / 9) - d


def best_sec(d: float, m: float) -> float:
    """Return the w at which the expected time is least: the zero of its derivative, by Lambert's W."""
    return float(m * (1 + lambertw(-math.exp(-d / m - 1)).real))


def overhead_frac(w: float, d: float, r: float, m: float) -> float:
    """Return the expected time of a run over that of its training alone, less 1: checkpoints, lost work and restarts.

    A run without checkpoints is one segment: w its whole training, d 0. inf: it never ends.
    """
    if (w + d + r) / m > NEVER or not w:
        return math.inf
    return m * math.exp(r / m) * math.expm1((w + d) / m) / w - 1


def simulated_frac(w: float, d: float, r: float, m: float, segments: int, seed: int) -> float:
    """Return `overhead_frac` of one run that is played through, failure by failure."""
    draw, passed = np.random.default_rng(seed), 0.0
    for _ in range(segments):
        until = draw.exponential(m)
        while until < w + d:
            passed += until
            while (until := draw.exponential(m)) < r:
                passed += until
            passed += r
            until = draw.exponential(m)
        passed += w + d
    return passed / (segments * w) - 1
