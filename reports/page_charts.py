"""Which plots a page has: of one run with a colour for each figure, of several with a colour for each run."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from record.files import CLOCKS
from record.history import History, Line, number_of
from reports.page_plots import MOST_POINTS, NUM_COLOURS, Array, Plot, Series, thinned
from reports.page_text import plain

LABELS = {"fid": "FID", "clip": "CLIP score (mean cosine)"}
SIDE = {"fid": "at most", "clip": "at least", "val_loss": "at most"}
IMAGES = "images seen"
CLOCK_NAMES = dict(zip(CLOCKS, ("training", "waiting for data", "evaluation", "checkpoints and the rest"), strict=True))
CLOCK_COLOURS = dict(zip(CLOCKS, ("s0", "s5", "s1", "s7"), strict=True))
REFERENCE = Path(__file__).with_name("mlperf_reference_runs.csv")
"""Every published run of MLPerf's reference: 14 at a global batch of 512, 13 at 1024, 13 at 2048.

Source: the README of mlcommons/training at aa344c7f, retired_benchmarks/stable_diffusion/. The learning rate is 1.25e-7 per
image in all of them.
"""
NUM_MEANS = 100  # of a figure that differs much between neighboring windows
WIDE_RANGE = 30.0  # greatest over least: from there on an axis is logarithmic


class Group(NamedTuple):
    """A section of plots."""

    key: str
    title: str
    plots: Sequence[Plot]


def groups_of(runs: Sequence[History]) -> list[Group]:
    """Return the sections of plots that these runs have figures for."""
    found = [
        Group("quality", "Quality", [_score(runs, key) for key in LABELS]),
        Group("learning", "Loss and learning", [*_losses(runs), *_validation(runs)]),
        Group("speed", "Speed and memory", _speed(runs)),
    ]
    found = [group._replace(plots=[plot for plot in group.plots if plot.has_points]) for group in found]
    return [group for group in found if group.plots]


def _own(place: int, runs: Sequence[History], name: str = "") -> dict[str, Any]:
    """Return name, colour and dashes of a run's series; alone it needs no name."""
    if len(runs) == 1:
        return {"name": name, "colour": "s0"}
    return {"name": plain(runs[place].name), "colour": f"s{place % NUM_COLOURS}", "dash": place // NUM_COLOURS}


def column(lines: Sequence[Line], key: str) -> Array:
    """Return a key of all lines, float64 (N,), nan where there is none."""
    return np.array([math.nan if (value := number_of(line, key)) is None else value for line in lines])


# --- FID and CLIP score ---


def reference_bands(key: str, batches: Collection[float | None]) -> list[Series]:
    """Return the mean of a metric over the reference's runs, with its extremes, for each of these global batches."""
    rows, found = np.genfromtxt(REFERENCE, delimiter=",", names=True), []
    for batch in np.unique(rows["global_batch_size"]):
        of = rows[rows["global_batch_size"] == batch]
        if batch in batches:
            images = np.unique(of["images"])
            values = np.array([of[key][of["images"] == each] for each in images])
            name = f"MLPerf reference, batch {batch:.0f}: {values.shape[1]} runs"
            ends = {"low": values.min(1), "high": values.max(1)}
            found.append(Series(name, images, values.mean(1), **ends, kind="reference", colour="muted"))
    return found


def _score(runs: Sequence[History], key: str) -> Plot:
    series = reference_bands(key, {number_of(run.config, "global_batch_size") for run in runs if is_mlperf(run)})
    for place, run in enumerate(runs):
        own = _own(place, runs, "in training")
        series.append(_points(run.evaluations, key, **own))
        if rows := later_scores(run):
            one = {"name": "scored later (eval.py)", "colour": "s1"}
            more = {"name": f"{own['name']}, scored later"} if len(runs) > 1 else one
            series.append(_points(rows, key, **own | more | {"dash": 1}))
    title, is_log = LABELS[key].split(" (")[0], key == "fid" and _is_wide(series)
    return Plot(f"{key}-over-images", title, IMAGES, LABELS[key], series, _targets(runs, key), is_log=is_log)


def _points(lines: Sequence[Line], key: str, **own: Any) -> Series:
    return thinned(x=column(lines, "images"), y=column(lines, key), kind="points", **own)


def _targets(runs: Sequence[History], key: str) -> list[tuple[float, str]]:
    """Return each value that is a target once; whose it is where they are not all the same."""
    found: dict[float, list[str]] = {}
    for run in runs:
        if (value := number_of(run.config, f"target.{key}")) is not None:
            found.setdefault(value, []).append(plain(run.name))
    whose = {value: f" of {', '.join(names)}" if len(found) > 1 else "" for value, names in found.items()}
    return [(value, f"target{whose[value]}: {SIDE[key]} {value:g}") for value in sorted(found)]


def later_scores(run: History) -> list[Line]:
    """Return the rows of eval.py over a run's snapshots, in the way in which the run was configured."""
    guidance = run.config.get("eval.guidance")
    rows = [
        row for row in run.scores if number_of(row, "images") is not None and row.get("guidance") in (guidance, None)
    ]
    known = [[line.get(key) for key in ("images", *LABELS)] for line in run.evaluations]
    rows = [row for row in rows if [row.get(key) for key in ("images", *LABELS)] not in known]
    return sorted(rows, key=lambda row: number_of(row, "images") or 0.0)


def is_mlperf(run: History) -> bool:
    """True for a run of the benchmark's model, which the reference's curves are of."""
    is_variant = run.config.get("model.variant") == "mlperf"
    return run.config.get("model.family", "sd2") == "sd2" and (is_variant or run.config.get("mlperf.enabled") is True)


# --- loss ---


def _losses(runs: Sequence[History]) -> list[Plot]:
    plots = [_plain(runs, "loss", "Training loss", "loss", NUM_MEANS)]
    if len(runs) == 1 and len(runs[0].streams) > 1:
        images, streams = runs[0].windows["images"], list(runs[0].streams.items())
        series = [
            thinned(plain(name), images, loss, NUM_MEANS, colour=f"s{place}")
            for place, (name, loss) in enumerate(streams[:NUM_COLOURS])
        ]
        note = f"The first {NUM_COLOURS} of {len(streams)} streams." if len(streams) > NUM_COLOURS else ""
        plots.append(Plot("streams", "Loss by stream", IMAGES, "loss", series, note=note))
    plots.append(_plain(runs, "lr", "Learning rate", "learning rate"))
    return [*plots, _plain(runs, "gradient_norm", "Gradient norm", "gradient norm", NUM_MEANS)]


def _plain(runs: Sequence[History], key: str, title: str, label: str, most: int = MOST_POINTS) -> Plot:
    series = [
        thinned(x=run.windows["images"], y=run.windows[key], most=most, **_own(at, runs)) for at, run in enumerate(runs)
    ]
    return Plot(key.replace("_", "-"), title, IMAGES, label, series, is_log=most == NUM_MEANS and _is_wide(series))


def _is_wide(series: Sequence[Series]) -> bool:
    """True where the values are positive and of very different sizes."""
    shown = [of for of in series if len(of.y)]
    least = min((float(of.lows.min()) for of in shown), default=0.0)
    return least > 0.0 and max(float(of.highs.max()) for of in shown) / least > WIDE_RANGE


def _validation(runs: Sequence[History]) -> list[Plot]:
    losses = [_points(run.validations, "val_loss", **_own(place, runs)) for place, run in enumerate(runs)]
    label, targets = "loss on held-out samples", _targets(runs, "val_loss")
    return [Plot("validation", "Validation loss", IMAGES, label, losses, targets)]


# --- speed, memory ---


def _speed(runs: Sequence[History]) -> list[Plot]:
    speeds = []
    for place, run in enumerate(runs):
        measured = run.windows["warmup"] + run.windows["profiled"] == 0.0
        measured = measured if measured.any() else ~measured
        x, y = run.windows["images"][measured], run.windows["images_per_sec"][measured]
        speeds.append(thinned(x=x, y=y, **_own(place, runs)))
    memory = _plain(runs, "peak_mem_gib", "Peak memory", "GiB")
    note = "Of the training clock alone, without warm-up windows."
    return [
        Plot("images-per-sec", "Throughput", IMAGES, "images/s", speeds, note=note, y_range=_from_zero(speeds)),
        replace(memory, y_range=_from_zero(memory.series)),
    ]


def _from_zero(series: Sequence[Series]) -> tuple[float, float] | None:
    top = max((float(of.highs.max()) for of in series if len(of.y)), default=0.0)
    return (0.0, 1.08 * top) if top > 0.0 else None
