"""Compare runs with MLPerf's reference: FID and CLIP score over the images seen, by global batch.

mlperf_reference_runs.csv holds every published run of the reference: 14 at a global batch of 512, 13 at 1024, 13 at 2048.
Source: the README of mlcommons/training at aa344c7f, retired_benchmarks/stable_diffusion/. Columns: global_batch_size, run,
iterations, images, fid, clip. The learning rate is 1.25e-7 per image in all of them.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).with_name("mlperf_reference_runs.csv")
TARGET = {"fid": 90.0, "clip": 0.15}  # FID at most, CLIP at least (rules)

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Band:
    """One metric over the reference's runs at one global batch.

    images: seen at each point, ascending; low, mean, high: over the runs at that point.
    """

    num_runs: int
    images: tuple[int, ...]
    low: tuple[float, ...]
    mean: tuple[float, ...]
    high: tuple[float, ...]

    def at(self, images: float) -> tuple[float, float, float] | None:
        """Return low, mean and high at a number of images, linear between two points; None outside all points."""
        if not self.images[0] <= images <= self.images[-1]:
            return None
        right = max(1, bisect_left(self.images, images))
        left, span = right - 1, self.images[right] - self.images[right - 1]
        part = (images - self.images[left]) / span
        low, mean, high = (of[left] + part * (of[right] - of[left]) for of in (self.low, self.mean, self.high))
        return low, mean, high


def read_bands(path: Path = REFERENCE) -> dict[int, dict[str, Band]]:
    """Return global batch -> metric (fid, clip) -> the reference's band."""
    values: dict[int, dict[int, list[dict[str, float]]]] = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            of_batch = values.setdefault(int(row["global_batch_size"]), {})
            of_batch.setdefault(int(row["images"]), []).append({key: float(row[key]) for key in TARGET})
    bands: dict[int, dict[str, Band]] = {}
    for batch, points in sorted(values.items()):
        images = tuple(sorted(points))
        for key in TARGET:
            columns = [[point[key] for point in points[count]] for count in images]
            low, high = tuple(map(min, columns)), tuple(map(max, columns))
            mean = tuple(sum(column) / len(column) for column in columns)
            bands.setdefault(batch, {})[key] = Band(len(columns[0]), images, low, mean, high)
    return bands


def standing(line: Line, global_batch_size: int, bands: Mapping[int, Mapping[str, Band]]) -> str:
    """Say whether an evaluation is better than all runs of the reference, among them, or worse than all."""
    where = f"at {line['images']:,} images"
    if global_batch_size not in bands:
        known = ", ".join(map(str, bands))
        return f"{where}: the reference has no runs at a global batch of {global_batch_size}, but at {known}"
    said = []
    for key, band in bands[global_batch_size].items():
        if (value := line.get(key)) is None:
            continue
        figure = f"{key.upper()} {value:.4g}"
        if (at := band.at(line["images"])) is None:
            said.append(f"{figure}, outside of the reference's {band.images[0]:,} to {band.images[-1]:,} images")
            continue
        low, mean, high = at
        worse = value > high if key == "fid" else value < low
        better = value < low if key == "fid" else value > high
        place = "worse than all" if worse else "better than all" if better else "among"
        said.append(f"{figure}, {place} {band.num_runs} of the reference ({low:.4g} to {high:.4g}, mean {mean:.4g})")
    return f"{where}: {'; '.join(said)}"
