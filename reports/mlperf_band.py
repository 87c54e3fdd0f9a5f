"""Compare runs with MLPerf's reference: FID and CLIP score over the images seen, by global batch.

mlperf_reference_runs.csv holds every published run of the reference: 14 at a global batch of 512, 13 at 1024, 13 at 2048.
Source: the README of mlcommons/training at aa344c7f, retired_benchmarks/stable_diffusion/. Columns: global_batch_size, run,
iterations, images, fid, clip. The learning rate is 1.25e-7 per image in all of them.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REFERENCE = Path(__file__).with_name("mlperf_reference_runs.csv")
TARGET = {"fid": 90.0, "clip": 0.15}  # FID at most, CLIP at least (rules)
LABELS = {"fid": "FID", "clip": "CLIP score (mean cosine)"}
BAND_COLOURS = ("#31688e", "#d95f02", "#35864a")
OUR_COLOURS = ("#000000", "#a6368c", "#8a6d1d", "#c02020", "#4040c0", "#207070")
NUM_NAMED = len(OUR_COLOURS)  # more runs than that share one colour and one label
FAR_BELOW = 0.5  # of the reference's first point; where a run ends before that, the axis of images is logarithmic
DPI = 120

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


def draw(runs: Sequence[tuple[str, Sequence[Line]]], path: Path, bands: Mapping[int, Mapping[str, Band]]) -> None:
    """Draw runs over the bands.

    Args:
        runs: (label, evaluations) of each.
        path: the picture, .png.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(matplotlib.rcParamsDefault):
        figure = Figure(figsize=(13.0, 5.8), layout="constrained")
        FigureCanvasAgg(figure)
        for number, key in enumerate(TARGET):
            axes = figure.add_subplot(1, len(TARGET), number + 1)
            _draw_bands(axes, key, bands)
            _draw_runs(axes, key, runs)
            axes.set_xlabel("images seen")
            axes.set_ylabel(LABELS[key])
            axes.grid(alpha=0.3)
            if key == "fid":
                axes.set_yscale("log")
                axes.grid(alpha=0.3, which="minor", axis="y")
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter("{x:g}")
                axes.tick_params(axis="y", which="minor", labelsize=7)
            _scale_images(axes, runs, bands)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
        num = sum(of_batch["fid"].num_runs for of_batch in bands.values())
        what = "line: mean, band: least to greatest"
        figure.suptitle(f"Ours over the {num} published runs of MLPerf's reference ({what})", fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI)


def _draw_bands(axes: Axes, key: str, bands: Mapping[int, Mapping[str, Band]]) -> None:
    for (batch, of_batch), colour in zip(bands.items(), BAND_COLOURS, strict=False):
        band = of_batch[key]
        axes.fill_between(band.images, band.low, band.high, color=colour, alpha=0.25, linewidth=0.0)
        label = f"reference, batch {batch}: {band.num_runs} runs"
        axes.plot(band.images, band.mean, color=colour, linewidth=1.0, label=label)
    axes.axhline(TARGET[key], linestyle="--", color="#666666", linewidth=1.0, label="target: FID 90, CLIP 0.15")


def _draw_runs(axes: Axes, key: str, runs: Sequence[tuple[str, Sequence[Line]]]) -> None:
    many = len(runs) > NUM_NAMED
    said = {name.partition(" (")[2] for name, _ in runs}  # "batch 512, random inception)": the same for all?
    together = f"ours: {len(runs)} runs{f' ({said.pop()}' if len(said) == 1 else ''}"
    style = {"linewidth": 0.7, "markersize": 2.5, "alpha": 0.8} if many else {"linewidth": 1.5, "markersize": 4}
    for number, (name, lines) in enumerate(runs):
        points = sorted((line["images"], line[key]) for line in lines if line.get(key) is not None)
        colour = OUR_COLOURS[0 if many else number]
        label = name if not many else together if number == 0 else None
        at, values = [images for images, _ in points], [value for _, value in points]
        axes.plot(at, values, "o-", color=colour, label=label, **style)


def _scale_images(
    axes: Axes, runs: Sequence[tuple[str, Sequence[Line]]], bands: Mapping[int, Mapping[str, Band]]
) -> None:
    first = min(of_batch["fid"].images[0] for of_batch in bands.values())
    ends = [max(line["images"] for line in lines) for _, lines in runs if lines]
    if any(end < FAR_BELOW * first for end in ends):
        axes.set_xscale("log")
    else:
        axes.xaxis.set_major_formatter(lambda images, _: f"{images / 1e6:g} M")
