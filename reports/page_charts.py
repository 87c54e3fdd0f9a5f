"""Which plots a page has: of one run with a colour for each figure, of several with a colour for each run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from record.files import CLOCKS
from record.history import History, Line, number_of
from reports.mlperf_band import Band, read_bands, standing
from reports.page_plots import NUM_COLOURS, Array, Plot, Series, smoothed, thinned
from reports.page_text import figure, plain

LABELS = {"fid": "FID", "clip": "CLIP score (mean cosine)"}
SIDE = {"fid": "at most", "clip": "at least", "val_loss": "at most"}
IMAGES = "images seen"
CLOCK_NAMES = dict(zip(CLOCKS, ("training", "waiting for data", "evaluation", "checkpoints and the rest"), strict=True))
CLOCK_COLOURS = dict(zip(CLOCKS, ("s0", "s5", "s1", "s7"), strict=True))
UNITS = ((7200.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
MOST_SPANS, MOST_STREAMS = 300, NUM_COLOURS
WIDE_RANGE = 30.0  # greatest over least: from there on an axis is logarithmic
SMOOTH_FROM = 30  # windows


@dataclass(frozen=True)
class Group:
    """A section of plots."""

    key: str
    title: str
    plots: Sequence[Plot]
    note: str = ""


def groups_of(runs: Sequence[History]) -> list[Group]:
    """Return the sections of plots that these runs have figures for."""
    found = [
        Group("quality", "Quality", [*_scores(runs), *_guidance(runs)], _band_note(runs)),
        Group("learning", "Loss and learning", [*_losses(runs), *_validation(runs)]),
        Group("speed", "Speed and memory", _speed(runs)),
    ]
    return [Group(group.key, group.title, plots, group.note) for group in found if (plots := _with_points(group.plots))]


def _with_points(plots: Sequence[Plot]) -> list[Plot]:
    return [plot for plot in plots if any(len(series.x) for series in plot.series)]


def _own(place: int, runs: Sequence[History], name: str = "") -> dict[str, Any]:
    """Return name, colour and dashes of a run's series; alone it needs no name."""
    if len(runs) == 1:
        return {"name": name, "colour": "s0"}
    return {"name": plain(runs[place].name), "colour": f"s{place % NUM_COLOURS}", "dash": place // NUM_COLOURS}


def column(lines: Sequence[Line], key: str) -> Array:
    """Return a key of all lines, float64 (N,), nan where there is none."""
    return np.array([math.nan if (value := number_of(line, key)) is None else value for line in lines])


# --- FID and CLIP score ---


def _scores(runs: Sequence[History]) -> list[Plot]:
    bands = read_bands()
    return [_score(runs, key, bands) for key in LABELS]


def _score(runs: Sequence[History], key: str, bands: Mapping[int, Mapping[str, Band]]) -> Plot:
    series = []
    batches = {number_of(run.config, "global_batch_size") for run in runs if is_mlperf(run)}
    for batch in [batch for batch in bands if batch in batches]:
        band = bands[batch][key]
        at, low, mean, high = (np.array(of, float) for of in (band.images, band.low, band.mean, band.high))
        name = f"MLPerf reference, batch {batch}: {band.num_runs} runs"
        series.append(Series(name, at, mean, low=low, high=high, kind="reference", colour="muted"))
    for place, run in enumerate(runs):
        series.append(
            thinned(
                x=column(run.evaluations, "images"),
                y=column(run.evaluations, key),
                kind="points",
                **_own(place, runs, "in training"),
            )
        )
        rows = later_scores(run)
        if rows:
            own = _own(place, runs)
            name = f"{own['name']}, scored later" if own["name"] else "scored later (eval.py)"
            colour = own["colour"] if len(runs) > 1 else "s1"
            series.append(
                thinned(name, column(rows, "images"), column(rows, key), kind="points", colour=colour, dash=1)
            )
    targets = _targets(runs, key)
    return Plot(
        f"{key}-over-images",
        LABELS[key].split(" (")[0],
        IMAGES,
        LABELS[key],
        series,
        targets,
        is_log=key == "fid" and _is_wide(series),
    )


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


def _band_note(runs: Sequence[History]) -> str:
    said = []
    for run in runs:
        lines = [line for line in run.evaluations if number_of(line, "images") is not None]
        batch = number_of(run.config, "global_batch_size")
        if is_mlperf(run) and lines and batch is not None:
            text = standing(
                {key: number_of(lines[-1], key) for key in LABELS} | {"images": int(lines[-1]["images"])},
                int(batch),
                read_bands(),
            )
            said.append(f"{plain(run.name)}, {text}." if len(runs) > 1 else f"{text[0].upper()}{text[1:]}.")
    return " ".join(said)


def _guidance(runs: Sequence[History]) -> list[Plot]:
    """FID over CLIP score, a line a model that was scored at several scales."""
    series: list[Series] = []
    for run in runs:
        lines: dict[str, list[Line]] = {}
        for row in run.scores:
            if all(number_of(row, key) is not None for key in ("guidance", "fid", "clip")):
                lines.setdefault(_way(row), []).append(row)
        for way, rows in lines.items():
            if len({row["guidance"] for row in rows}) > 1:
                rows = sorted(rows, key=lambda row: row["guidance"])
                labels = [f"{row['guidance']:g}" for row in rows]
                name = way if len(runs) == 1 else f"{plain(run.name)}, {way}"
                colour = f"s{len(series) % NUM_COLOURS}"
                series.append(Series(name, column(rows, "clip"), column(rows, "fid"), colour, "points", labels=labels))
    note = "The number at a point is the guidance scale; right and down is better."
    return [Plot("guidance", "Guidance", LABELS["clip"], "FID", series, note=note)] if series else []


def _way(row: Line) -> str:
    images = number_of(row, "images")
    parts = [f"{figure(int(images))} images" if images is not None else plain(row.get("model"))]
    parts += [plain(row[key]) for key in ("weights", "sampler") if row.get(key)]
    return ", ".join([*parts, *([f"{plain(row['steps'])} steps"] if row.get("steps") else [])])


# --- loss ---


def _losses(runs: Sequence[History]) -> list[Plot]:
    plots = [
        _noisy(runs, "loss", "Training loss", "loss"),
        _plain(runs, "lr", "Learning rate", "learning rate"),
        _noisy(runs, "gradient_norm", "Gradient norm", "gradient norm"),
    ]
    if len(runs) == 1 and len(runs[0].streams) > 1:
        images, streams = runs[0].windows["images"], list(runs[0].streams.items())
        series = [
            _smooth(thinned(plain(name), images, loss, colour=f"s{place}"))
            for place, (name, loss) in enumerate(streams[:MOST_STREAMS])
        ]
        note = f"The first {MOST_STREAMS} of {len(streams)} streams." if len(streams) > MOST_STREAMS else ""
        plots.insert(1, Plot("streams", "Loss by stream", IMAGES, "loss", series, note=note))
    return plots


def _plain(runs: Sequence[History], key: str, title: str, label: str) -> Plot:
    series = [
        thinned(x=run.windows["images"], y=run.windows[key], **_own(place, runs)) for place, run in enumerate(runs)
    ]
    return Plot(key.replace("_", "-"), title, IMAGES, label, series)


def _noisy(runs: Sequence[History], key: str, title: str, label: str) -> Plot:
    """A figure that differs much between neighbours: each window faintly, over it the mean of many."""
    series, said = [], ""
    for place, run in enumerate(runs):
        own, x, y = _own(place, runs), run.windows["images"], run.windows[key]
        there = np.isfinite(x) & np.isfinite(y)
        width = max(5, int(there.sum()) // 40)
        if there.sum() < SMOOTH_FROM:
            series.append(thinned(x=x, y=y, **own))
            continue
        raw = thinned(own["name"] and f"{own['name']}, windows", x[there], y[there], kind="faint", colour=own["colour"])
        series += [raw, thinned(x=x[there], y=smoothed(y[there], width), **own)]
        said = (
            f"Strong line: mean of {width:,} windows."
            if len(runs) == 1
            else "Strong lines: means of a fortieth of a run's windows."
        )
    return Plot(key.replace("_", "-"), title, IMAGES, label, series, note=said, is_log=_is_wide(series))


def _smooth(series: Series) -> Series:
    """Return a series with each point the mean of its neighbours."""
    if len(series.y) < SMOOTH_FROM:
        return series
    return Series(series.name, series.x, smoothed(series.y, max(5, len(series.y) // 40)), series.colour)


def _is_wide(series: Sequence[Series]) -> bool:
    """True where the values are positive and of very different sizes."""
    values = [of for each in series for of in (each.y, each.low, each.high) if of is not None and len(of)]
    least = min((float(of.min()) for of in values), default=0.0)
    return least > 0.0 and max(float(of.max()) for of in values) / least > WIDE_RANGE


def _validation(runs: Sequence[History]) -> list[Plot]:
    series, bins = [], []
    for place, run in enumerate(runs):
        lines = run.validations
        series.append(
            thinned(x=column(lines, "images"), y=column(lines, "val_loss"), kind="points", **_own(place, runs))
        )
        with_bins = [line for line in lines if isinstance(line.get("val_loss_bins"), list) and line["val_loss_bins"]]
        shown = (
            with_bins[-1:]
            if len(runs) > 1
            else [with_bins[n] for n in sorted({0, len(with_bins) // 2, len(with_bins) - 1}) if with_bins]
        )
        for number, line in enumerate(shown):
            values = column([{"bin": value} for value in line["val_loss_bins"]], "bin")
            inside = 0.0 if line.get("times") == "eighths" else 0.5  # at that time, or spread over a tenth of them
            middles = (np.arange(len(values)) + inside) * 1000 / len(values)
            own = (
                _own(place, runs)
                if len(runs) > 1
                else {"name": f"at {figure(int(number_of(line, 'images') or 0))} images", "colour": f"s{number}"}
            )
            bins.append(thinned(x=middles, y=values, kind="points", **own))
    by_time = Plot(
        "validation-by-time",
        "Validation loss by timestep",
        "timestep, of 1000",
        "loss",
        bins,
        is_log=_is_wide(bins),
    )
    targets = _targets(runs, "val_loss")
    return [Plot("validation", "Validation loss", IMAGES, "loss on held-out samples", series, targets), by_time]


# --- speed, memory ---


def _speed(runs: Sequence[History]) -> list[Plot]:
    last = max((float(np.nanmax(run.windows["elapsed_sec"], initial=0.0)) for run in runs), default=0.0)
    size, unit = next((size, unit) for least, size, unit in UNITS if last >= least)
    elapsed = f"elapsed time ({unit}, all clocks)"
    speeds, spans, marks = [], [], []
    for place, run in enumerate(runs):
        windows = run.windows
        measured = (windows["warmup"] + windows["profiled"] == 0.0) if len(windows["batch"]) else np.zeros(0, bool)
        measured = measured if measured.any() else np.ones(len(measured), bool)
        speeds.append(
            thinned(
                x=windows["elapsed_sec"][measured] / size, y=windows["images_per_sec"][measured], **_own(place, runs)
            )
        )
        if len(runs) == 1:
            spans, marks = _evaluation_spans(windows, size), _resumes(windows, size)
    note = "Of the training clock alone, without warm-up windows."
    plots = [
        Plot(
            "images-per-sec",
            "Throughput",
            elapsed,
            "images/s",
            speeds,
            (),
            spans,
            marks,
            note,
            y_range=_from_zero(speeds),
        )
    ]
    if len(runs) == 1:
        plots.append(_clocks(runs[0].windows, size, elapsed))
    memory = _plain(runs, "peak_mem_gib", "Peak memory", "GiB")
    return [*plots, replace(memory, y_range=_from_zero(memory.series))]


def _from_zero(series: Sequence[Series]) -> tuple[float, float] | None:
    tops = [float((of.y if of.high is None else of.high).max()) for of in series if len(of.y)]
    return (0.0, 1.08 * max(tops)) if tops and max(tops) > 0.0 else None


def _evaluation_spans(windows: Mapping[str, Array], size: float) -> list[tuple[float, float]]:
    """Return where evaluations lie on the axis of time; a window begins with what came after the one before it."""
    seconds = np.nan_to_num(windows["eval_sec"])
    begins = windows["elapsed_sec"] - np.nansum([windows[clock] for clock in CLOCKS], axis=0)
    places = np.flatnonzero((seconds > 0.0) & np.isfinite(begins))
    return [(begins[n] / size, (begins[n] + seconds[n]) / size) for n in places] if len(places) <= MOST_SPANS else []


def _resumes(windows: Mapping[str, Array], size: float) -> list[float]:
    places = np.flatnonzero(np.diff(windows["start"]) > 0.0) + 1
    return [float(windows["elapsed_sec"][n] / size) for n in places][:MOST_SPANS]


def _clocks(windows: Mapping[str, Array], size: float, label: str, most: int = 80) -> Plot:
    """Shares of the four clocks over time."""
    clocks = np.nan_to_num([windows[clock] for clock in CLOCKS])
    there = np.isfinite(windows["elapsed_sec"]) & (clocks.sum(axis=0) > 0.0)
    clocks, at = clocks[:, there], windows["elapsed_sec"][there] / size
    if len(at) > most:
        begins = np.linspace(0, len(at), most, endpoint=False).astype(int)
        clocks = np.add.reduceat(clocks, begins, axis=1)
        at = np.add.reduceat(at, begins) / np.diff([*begins, len(at)])
    shares = 100.0 * clocks / np.maximum(clocks.sum(axis=0), 1e-12)
    series = [
        Series(CLOCK_NAMES[clock], at, part, CLOCK_COLOURS[clock], "area")
        for clock, part in zip(CLOCKS, shares, strict=True)
    ]
    return Plot("clocks", "Where the time went", label, "% of a window's time", series, y_range=(0.0, 100.0))
