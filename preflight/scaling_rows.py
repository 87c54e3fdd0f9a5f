"""The published rows that the law of scaling is fitted to, and how each series was run.

The rows are in reports/scaling_published.csv, one source a row. Steady images/s where the log's blocks have it
(is_steady = 1), else those of the whole run, start and checkpoints included; where both are known they differ by 3 % at most.

How a series exchanges gradients is in reports/scaling_series.csv, as far as its source says: NVIDIA's in fp16, autocast's in
fp32, FLUX.1's in bf16. SHARD_GRAD_OP reduces and scatters in float32, and gathers the weights once in half of that. The links
of a TPU v5p are ICI, 4,800 Gbit/s (Google's documentation), and a pod is one domain. NeMo's row of 4 nodes has 32 images a
device, which are assumed of its others. A series without these columns is not fitted.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from preflight.scaling_law import Setup

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
