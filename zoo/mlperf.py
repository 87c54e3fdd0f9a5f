"""MLPerf's text-to-image benchmarks: Stable Diffusion v2 (rounds v3.1 to v5.0) and FLUX.1 (from v5.1 on)."""

from __future__ import annotations

from zoo.mlperf_flux import FLUX
from zoo.mlperf_rules import Benchmark
from zoo.mlperf_sd import SD

BENCHMARKS = (SD, FLUX)


def benchmark_of(family: str, variant: str) -> Benchmark | None:
    """Return the benchmark that a network is the one of, or None."""
    return next((each for each in BENCHMARKS if (family, variant) == (each.family, "mlperf")), None)


def logged_as(family: str, variant: str) -> Benchmark:
    """Return the benchmark whose log a run writes: flux1 for FLUX.1 and the miniature as a flow, or else stable_diffusion."""
    return FLUX if family == FLUX.family or variant == "flow" else SD
