"""The time of a step on N devices: what is computed, what all devices exchange, and how much of that is hidden.

    step = (b + p b0) / r * (1 + s * sqrt(2 ln N)) + max(0, within + across - hidden) + 2 h log2(n)

    N devices in n domains of g, whose inner link is fast; b images a device and step, r images/s of a device
    b0         what a pass takes at any size, in images: kernels too small for the device, the optimizer's step; p passes
    s          the slowest of N devices: sqrt(2 ln N) is what the maximum of N normal variables grows by
    within     a ring all-reduce in a domain: 2 G (g - 1) / g bytes over the inner link, and 2 log2(g) hops for each bucket
    across     the same of each device's share over the outer link: 2 (G / g) (n - 1) / n
    hidden     a share of the last pass's backward pass, which is 2/3 of its time: DDP exchanges in that one alone
    h          a hop between domains, for all buckets together; a tree has log2(n) of them, up and down

Where t devices share the matrices of each layer, each has b images for a t-th of the work: of their batch the t-th part is
counted. Each has a t-th of G, and exchanges it with the devices that have the same part.

G is the gradient in bytes. Sharded weights are gathered in passes of G bytes each, so `volume` says how many such passes a
step makes: an all-reduce 2. The maximum is rounded off over `ROUNDED_SEC`, so that a fit has a derivative everywhere.
Rings: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms; DDP's buckets and overlap: Li et al. 2020,
arXiv:2006.15704.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

Array = np.ndarray

ROUNDED_SEC = 0.003
BACKWARD_FRAC = 2 / 3  # of a pass's time: twice the matrix products of the forward pass
INNER_HOP_SEC = 4e-6  # NCCL's own table (src/graph/tuning.cc): a tree's hop over NVLink, protocol Simple
BUCKET_GB = 0.025  # of DDP: 25 MB of gradients are exchanged together
INNER_SHARE = 0.8  # of an inner link's nominal bandwidth, what NCCL's tests reach within a node
REFERENCE_TFLOP = 2.41  # an image and step of SD2 at 512 px from moments: what b0 is counted in
NODE_LINKS = {"nvlink3": 300.0, "nvlink4": 450.0, "nvlink5": 900.0, "pcie4": 32.0, "pcie5": 64.0}
"""Inner link -> GB/s of a device and direction: NVIDIA's data sheets of A100, H100 and B200; PCIe x16."""
CLUSTER_LINKS = {"infiniband_hdr": 25.0, "infiniband_ndr": 50.0}
CLUSTER_LINKS |= {f"ethernet_{gbit}": gbit / 64 for gbit in (3200, 1600, 400, 100)}
"""Outer link -> GB/s of a device and direction. InfiniBand: 200 and 400 Gbit/s a device; Ethernet: Gbit/s of a node of 8."""


@dataclass(frozen=True)
class Prior:
    """What is taken for a parameter before any row is seen: its median, and by what factor one deviation changes it.

    Of a share the factor is that of its odds, v / (1 - v): no share is above 1.
    """

    value: float
    factor: float
    text: str


PARAMETERS = {
    "fixed_graphs": Prior(2.0, 2.0, "b0 of a pass in a step that is one CUDA graph, images"),
    "fixed_plain": Prior(4.0, 2.0, "b0 of a pass that is launched kernel by kernel, images"),
    "fixed_tpu": Prior(4.0, 2.0, "b0 of a TPU, images"),
    "fixed_flux": Prior(20.0, 4.0, "b0 of a pass of FLUX.1, images of SD2"),
    "link_share": Prior(0.6, 2.0, "share of an outer link's nominal bandwidth"),
    "mosaicml_online": Prior(3.0, 4.0, "outer link of MosaicML's first benchmark, GB/s a device"),
    "mosaicml_latents": Prior(10.0, 4.0, "outer link of MosaicML's second benchmark, GB/s a device"),
    "hop_sec": Prior(1e-3, 5.0, "h: a hop between domains, all buckets, s"),
    "hidden": Prior(0.8, 2.5, "share of the last backward pass that hides the exchange"),
    "jitter": Prior(0.005, 3.0, "s: deviation of a device's step, of the step"),
}
"""What is fitted beside each series' rate. The fit moves the logarithm of each, of a share that of its odds."""
NAMES = tuple(PARAMETERS)
SHARES = ("link_share", "hidden")
_IS_SHARE = np.array([name in SHARES for name in NAMES])


@dataclass(frozen=True)
class Setup:
    """How a series or a run exchanges gradients.

    fixed: which b0. gradient_gb: G, 1e9 bytes. inner, outer: GB/s of a device; outer may name a parameter. domain: devices
    within the inner link. microbatch: images of a pass at most; None: the device batch. volume: see the head of this file.
    tflop: an image and step. tensor: devices that share each layer.
    """

    fixed: str
    gradient_gb: float
    inner: float
    outer: float | str
    domain: int
    microbatch: int | None = None
    volume: float = 2.0
    tflop: float = REFERENCE_TFLOP
    tensor: int = 1


class Points(NamedTuple):
    """Points to predict, as arrays (R,): of a setup each its devices, global batch and the place of its rate."""

    rate: Array
    outer_of: Array
    fixed_of: Array
    num: Array
    batch: Array
    domain: Array
    inner_sec: Array
    across_gb: Array
    outer: Array
    scale: Array
    microbatch: Array
    passes: Array


def to_theta(values: Array) -> Array:
    """Return what the fit moves of parameters (..., P)."""
    with np.errstate(divide="ignore", invalid="ignore"):  # of what is no share
        return np.log(np.where(_IS_SHARE, values / (1 - np.where(_IS_SHARE, values, 0.0)), values))


def to_values(shared: Array) -> Array:
    """Return the parameters (..., P) of what the fit moves."""
    values = np.exp(shared)
    return np.where(_IS_SHARE, values / (1 + values), values)


def fixed_of(family: str, has_graphs: bool) -> str:
    """Return which b0 a run has."""
    return "flux" if family == "flux" else "graphs" if has_graphs else "plain"


def domain_of(setup: Setup, num: int) -> int:
    """Return the devices of a domain: a whole number of domains of one size; of 512 in racks of 72 these are 64."""
    size = min(setup.domain, num)
    while num % size:
        size -= 1
    return size


def points_of(given: Sequence[tuple[Setup, int, float, int]]) -> Points:
    """Return (setup, devices, global batch, place of its rate) as arrays."""
    rows = []
    for setup, num, batch, rate in given:
        domain, gb = domain_of(setup, num), setup.volume * setup.gradient_gb / setup.tensor
        inner = domain / setup.tensor  # devices of a domain that exchange one part with each other
        hops = np.ceil(setup.gradient_gb / setup.tensor / BUCKET_GB) * 2 * np.log2(inner) * INNER_HOP_SEC
        inner_sec, across_gb = (
            gb * (1 - 1 / inner) / (INNER_SHARE * setup.inner) + hops,
            gb / inner * (1 - domain / num),
        )
        outer, outer_of = (1.0, setup.outer) if isinstance(setup.outer, str) else (setup.outer, "link_share")
        microbatch = min(setup.microbatch or np.inf, batch / num)
        passes = np.ceil(batch / num / microbatch - 1e-9)
        places = rate, NAMES.index(outer_of), NAMES.index(f"fixed_{setup.fixed}")
        of_setup = outer, REFERENCE_TFLOP / setup.tflop, microbatch, passes
        rows.append((*places, num, batch, domain, inner_sec, across_gb, *of_setup))
    columns = np.array(rows, float).T
    return Points(*columns[:3].astype(int), *columns[3:])


def doublings_of(points: Points) -> Array:  # -> (R,)
    """Return log2 of the domains of each point: 0 where one joins all devices."""
    return np.log2(points.num / points.domain)


def log_speed(theta: Array, points: Points) -> Array:
    """Return log images/s over all devices.

    Args:
        theta: (..., S + P): logarithms of the S rates, images/s of a device, then `to_theta` of PARAMETERS.

    Returns:
        (..., R).
    """
    rate, shared = np.exp(theta[..., points.rate]), to_values(theta[..., -len(NAMES) :])

    def of(name: str) -> Array:
        return shared[..., NAMES.index(name), None]

    fixed = shared[..., points.fixed_of] * points.scale
    jitter = 1 + of("jitter") * np.sqrt(2 * np.log(points.num))
    computed = (points.batch / points.num + points.passes * fixed) / rate * jitter
    exchanged = points.inner_sec + points.across_gb / (points.outer * shared[..., points.outer_of])
    seen = exchanged - of("hidden") * BACKWARD_FRAC * (points.microbatch + fixed) / rate
    seen = (seen + np.sqrt(seen**2 + ROUNDED_SEC**2)) / 2 * (points.num > 1)
    return np.log(points.batch) - np.log(computed + seen + 2 * of("hop_sec") * doublings_of(points))


# --- the published rows, reports/scaling_published.csv: one source a row ---

# Steady images/s where the log's blocks have it (is_steady = 1), else those of the whole run, start and checkpoints included;
# where both are known they differ by 3 % at most. How a series exchanges gradients is in reports/scaling_series.csv, as far
# as its source says: NVIDIA's in fp16, autocast's in fp32, FLUX.1's in bf16. SHARD_GRAD_OP reduces and scatters in float32,
# and gathers the weights once in half of that. The links of a TPU v5p are ICI, 4,800 Gbit/s (Google's documentation), and a
# pod is one domain. NeMo's row of 4 nodes has 32 images a device, which are assumed of its others. A series without these
# columns is not fitted.
REPORTS = Path(__file__).resolve().parent.parent / "reports"
PUBLISHED = REPORTS / "scaling_published.csv"


@dataclass(frozen=True)
class Row:
    """One published figure. batch: as published, or images a device that are assumed of the series, times the devices."""

    series: str
    system: str
    num: int
    batch: int | None
    images_per_sec: float | None
    minutes: float | None
    tensor: int
    note: str

    @property
    def place(self) -> tuple[str, int]:
        """Series and devices: rows of one place are left out together."""
        return self.series, self.num


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _setup(of: dict[str, str]) -> Setup:
    outer = of["outer"] if of["outer"][0].isalpha() else float(of["outer"])
    numbers = float(of["gradient_gb"]), float(of["inner_gb_per_sec"]), outer, int(of["domain"])
    return Setup(of["fixed"], *numbers, int(of["microbatch"] or 0) or None, float(of["volume"]), float(of["tflop"]))


_SERIES = {of["series"]: of for of in _read(REPORTS / "scaling_series.csv")}
TITLES = {name: of["title"] for name, of in _SERIES.items()}
SETUPS = {name: _setup(of) for name, of in _SERIES.items() if of["fixed"]}


def read_rows() -> list[Row]:
    """Return all published rows, in the file's order."""

    def read(of: dict[str, str]) -> Row:
        num, assumed = int(of["num_devices"]), _SERIES.get(of["series"], {}).get("assumed_device_batch")
        return Row(
            of["series"],
            of["system"],
            num,
            int(of["global_batch_size"] or num * int(assumed or 0)) or None,
            float(of["images_per_sec"] or 0) or None,
            float(of["minutes_to_target"] or 0) or None,
            int(of["tensor_parallel"] or 1),
            of["note"],
        )

    return [read(of) for of in _read(PUBLISHED)]


def fitted(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that say something of scaling: of a series with a setup, measured once, the batch known or assumed."""
    of = [row for row in rows if row.series in SETUPS and row.images_per_sec and row.batch]
    return [row for row in of if "not counted twice" not in row.note]
