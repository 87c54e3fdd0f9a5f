"""What a run came to, in words and figures: its result and target, speed, time and cost, starts and faults.

Of several runs: their results with ratios to the first, what differs, and what does not compare.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from common.value_types import read_duration
from reports.charts import CLOCK_COLORS, CLOCK_NAMES, LABELS, SIDE, tick
from reports.formatting import NONE, TIMES, figure, moment, plain, share, span
from run_folder import history
from run_folder.files import CLOCKS
from run_folder.history import History, Line, grid_bytes, number_of

MOST_ROWS = 50  # of bad samples, and of starts at either end
HEADS = {
    "reached": "Target reached",
    "missed": "Target not reached",
    "pending": "Not measured yet",
    "finished": "Finished",
    "running": "Running",
    "failed": "Failed",
    "stopped": "Stopped before its end",
}
"""State of a run -> what stands on top."""
PRICE = "cost.per_device_hour"


class Result(NamedTuple):
    """How a run ended, and what that says of its target. state: one of HEADS."""

    state: str
    text: str

    @property
    def head(self) -> str:
        return HEADS[self.state]


class Figure(NamedTuple):
    """A figure that stands by itself. hint: what it is to be held against."""

    label: str
    value: str
    hint: str = ""


# --- the run ---


def sentence_of(run: History) -> str:
    """Say what a run is: model, data, batch, device."""
    config, summary = run.config, run.summary
    family, preset, variant = (
        config.get(f"model.{key}") or summary.get(key) for key in ("family", "preset", "variant")
    )
    if not family:
        return "What was trained is not known: there is no config.yaml."
    trained = number_of(summary, "trained_parameters")
    model = [plain(preset or NONE), *([plain(variant)] if variant not in (None, "stock") else [])]
    model += [f"{tick(float(f'{trained:.3g}'))} trained parameters"] if trained else []
    data = plain(config.get("data.stage") or "data")
    data += f" from {plain(config['data.remote'])}" if config.get("data.remote") else ""
    data = "synthetic data" if config.get("data.synthetic") else data
    size = config.get("image_size")
    sides = size if isinstance(size, list) else [size, size]
    parts = [f"{plain(family)} ({', '.join(model)})", f"{data} at {f' {TIMES} '.join(map(plain, sides))} px"]
    parts.append(f"global batch {figure(config.get('global_batch_size'))}")
    parts += [plain(config["precision"])] if config.get("precision") else []
    return f"{', '.join(parts)}, on {device_of(run)}."


def device_of(run: History) -> str:
    """Return how many devices a run had, and which."""
    number, name = number_of(run.environment, "num_devices"), run.environment.get("device")
    return f"{figure(int(number)) if number else '?'} {TIMES} {plain(name)}" if name else "an unknown device"


# --- its result ---


def target_of(run: History) -> dict[str, float]:
    """Return metric -> its target."""
    return {key: value for key in SIDE if (value := number_of(run.config, f"target.{key}")) is not None}


def is_met(line: Line, target: Mapping[str, float]) -> bool:
    """True where an evaluation of all prompts, or a validation, meets a target."""
    values = {key: number_of(line, key) for key in target}
    if not target or line.get("partial") or None in values.values():
        return False
    sign = {"at most": 1.0, "at least": -1.0}
    return all(sign[SIDE[key]] * (value or 0.0) <= sign[SIDE[key]] * target[key] for key, value in values.items())


def reached_by(run: History) -> Line | None:
    """Return the first evaluation that met the target: of training, else the one that eval.py wrote into summary.json."""
    target, summary = target_of(run), run.summary
    lines = run.validations if "val_loss" in target else run.evaluations
    reached = next((line for line in lines if is_met(line, target)), None)
    if reached is None and summary.get("target") == "reached":
        times = {key: summary.get(f"{key}_to_target") for key in ("images", "seconds")}
        whole = {"seconds_with_eval": summary.get("seconds_to_target_with_eval")}
        return {**times, **whole, **{key: summary.get(key) for key in SIDE}}
    return reached


def state_of(run: History) -> str:
    """Return one of HEADS: what summary.json says, else how the run stands (run_folder/history.py)."""
    target_state = run.summary.get("target")
    if target_state in ("reached", "missed", "pending"):
        return str(target_state)
    state = history.state_of(run.folder, run.starts, run.summary)
    return "reached" if state in ("running", "stopped") and reached_by(run) is not None else state


def result_of(run: History) -> Result:
    """Say how a run ended."""
    state, target, line, scores = state_of(run), target_of(run), reached_by(run), format_scores(last_scores(run))
    goal = " and ".join(f"{_name(key)} {SIDE[key]} {value:g}" for key, value in target.items())
    goal = f"The target is {goal}." if goal else "No target was set."
    ended = f"{figure(int(images_of(run)))} images in {span(run.seconds)}"
    if state == "reached" and line is not None:
        words = (("seconds", "of training"), ("seconds_with_eval", "with evaluation"))
        times = [f"{span(value)} {text}" for key, text in words if (value := number_of(line, key)) is not None]
        ended = f"{format_scores(line)} after {figure(_int(line, 'images'))} images: {', '.join(times)}"
    elif state == "pending":
        ended += f"; composer eval.py {plain(run.folder)} scores its snapshots"
    elif state in ("missed", "finished"):
        ended += f"; its last scores: {scores}" if scores != "none" else ""
    elif state == "failed":
        ended = f"{plain(run.starts[-1]['failed']).rstrip('.')}. It had seen {ended}"
    else:
        ended += f" until {moment(run.changed_at)}"
    return Result(state, f"{ended}. {goal}")


def last_scores(run: History) -> Line:
    """Return the last evaluation, or that of a finished run that eval.py has scored."""
    if "val_loss" in target_of(run):
        return run.validations[-1] if run.validations else {}
    return run.evaluations[-1] if run.evaluations else run.summary if number_of(run.summary, "fid") is not None else {}


def _name(key: str) -> str:
    return "validation loss" if key == "val_loss" else key.upper()


def format_scores(line: Line) -> str:
    """Return the scores of a line in words."""
    keys = LABELS if any(number_of(line, key) is not None for key in LABELS) else SIDE  # a loss is no score
    scores = [f"{_name(key)} {figure(value)}" for key in keys if (value := number_of(line, key)) is not None]
    return " and ".join(scores) if scores else "none"


def _int(line: Line, key: str) -> int | None:
    value = number_of(line, key)
    return None if value is None else int(value)


def images_of(run: History) -> float:
    """Return the images seen by the last line that there is."""
    seen = run.windows["images"][np.isfinite(run.windows["images"])]
    evaluated = [number_of(line, "images") or 0.0 for line in (*run.evaluations, *run.validations)]
    return max([*seen[-1:].tolist(), *evaluated], default=0.0)


# --- figures ---


def speed_of(run: History) -> tuple[float | None, float | None, float | None]:
    """Return median, least and greatest images/s: the summary's, or those of the measured windows so far."""
    keys = ("images_per_sec", "images_per_sec_min", "images_per_sec_max")
    if number_of(run.summary, keys[0]) is not None:
        return tuple(number_of(run.summary, key) for key in keys)  # type: ignore[return-value]
    speeds = run.speeds
    return (float(np.median(speeds)), float(speeds.min()), float(speeds.max())) if len(speeds) else (None, None, None)


def figures_of(run: History) -> dict[str, float | None]:
    """Return a run's figures by their names in summary.json; those of an unfinished run as far as they are known."""
    met = reached_by(run) or {}
    clocks = {clock: float(np.nansum(run.windows[clock])) for clock in CLOCKS}
    loss, memory = (run.windows[key][np.isfinite(run.windows[key])] for key in ("loss", "peak_mem_gib"))
    fed = clocks["train_sec"] + clocks["data_wait_sec"]
    so_far = {
        "loss": float(loss[-1]) if len(loss) else None,
        "peak_mem_gib": float(memory.max()) if len(memory) else None,
        "data_wait_frac": clocks["data_wait_sec"] / fed if fed else None,
        "val_loss": number_of(run.validations[-1], "val_loss") if run.validations else None,
    }
    figures = {key: number_of(run.summary, key) for key in (*so_far, "mfu", "images_per_sec_per_device")}
    figures |= {key: value for key, value in so_far.items() if figures[key] is None}
    figures |= {key: number_of(met or last_scores(run), key) for key in LABELS}
    figures |= {f"{key}_to_target": number_of(met, key) for key in ("seconds", "seconds_with_eval")}
    figures["images_to_target"] = _int(met, "images")
    figures |= {
        "images_per_sec": speed_of(run)[0],
        "images": int(images_of(run)) or None,
        "seconds": run.seconds or None,
    }
    return figures | {"device_hours": run.device_hours, "cost": cost_of(run, run.device_hours)}


def cards_of(run: History) -> list[Figure]:
    """Return the figures that stand on top."""
    figures, (_, least, most) = figures_of(run), speed_of(run)
    hints = {key: f"target {SIDE[key]} {value:g}" for key, value in target_of(run).items()}
    hints["images_per_sec"] = f"{figure(least, 3)} to {figure(most, 3)}"
    known = [(key, *FIGURES[key]) for key in CARD_KEYS if figures[key] is not None]
    cards = [Figure(name, formatted(figures[key]), hints.get(key, "")) for key, name, formatted in known]
    rank, over = (number_of(run.summary, key) for key in ("slowest_rank", "slowest_rank_over_median"))
    if rank is not None and over is not None:
        host = f"{plain(run.summary.get('slowest_host'))}, {share(over - 1.0)} above the median"
        cards.append(Figure("slowest rank", figure(int(rank)), host))
    return cards


# --- time and cost ---


def seconds_left(run: History) -> float | None:
    """Return how long a run still takes at its speed so far, evaluations included; None: not known.

    A target may end it earlier.
    """
    duration = read_duration(str(run.config.get("max_duration")), ("ba", "sp"))
    images, batch_size = images_of(run), number_of(run.config, "global_batch_size")
    if duration is None or batch_size is None or not images or not run.seconds:
        return None
    number, unit = duration
    left = number * (batch_size if unit == "ba" else 1) - images
    return max(0.0, left) * run.seconds / images


def cost_of(run: History, hours: float | None) -> float | None:
    """Return what device-hours cost, in the currency of the key."""
    price = number_of(run.config, PRICE)
    return None if hours is None or price is None else hours * price


def clock_shares(run: History) -> list[tuple[str, str, float, float]]:
    """Return (name, variable of its color, seconds, share) of each clock, over all windows."""
    sums = {clock: float(np.nansum(run.windows[clock])) for clock in CLOCKS}
    whole = sum(sums.values())
    return [(CLOCK_NAMES[clock], CLOCK_COLORS[clock], value, value / whole) for clock, value in sums.items() if whole]


def times_of(run: History) -> list[tuple[str, str, str, str]]:
    """Return (what, time, device-hours, cost) of the run so far, and to the target."""
    devices, line, hours = number_of(run.environment, "num_devices"), reached_by(run) or {}, run.device_hours
    rows = [("the run" if run.summary else "so far", run.seconds, hours)]
    for name, key in (("training alone", "seconds"), ("with evaluation", "seconds_with_eval")):
        if (seconds := number_of(line, key)) is not None:
            rows.append((f"to the target, {name}", seconds, None if devices is None else seconds * devices / 3600.0))
    return [(name, span(seconds), figure(hours), figure(cost_of(run, hours))) for name, seconds, hours in rows]


# --- starts and faults ---


def starts_of(run: History) -> list[list[str]]:
    """Return a row for each start: number, when, how it ended, how long, from which batch, on what, commit."""
    rows, is_running = [], history.state_of(run.folder, run.starts, run.summary) == "running"
    for index, start in enumerate(run.starts):
        number = int(start["start"])
        end = "running" if is_running and index == len(run.starts) - 1 else "killed"
        end = "ended" if number_of(start, "seconds") is not None else end
        end = f"failed: {plain(start['failed'])}" if "failed" in start else end
        device = f"{figure(_int(start, 'num_devices'))} {TIMES} {plain(start.get('device'))}"
        rows.append([str(number), moment(start.get("unix_time")), end, span(run.seconds_of.get(number))])
        rows[-1] += [figure(_int(start, "batch")), device, plain(start.get("commit"))[:12]]
    return rows if len(rows) <= 2 * MOST_ROWS else [*rows[:MOST_ROWS], ["…"] * 7, *rows[-MOST_ROWS:]]


def faults_of(run: History) -> list[str]:
    """Return a sentence for each thing that went wrong and is on record."""
    failed = sum("failed" in start for start in run.starts)
    partial = sum(line.get("partial") is True for line in run.evaluations)
    lost = [line.get(key) for line in (*run.starts, run.summary) for key in ("lost", "history_lost")]
    names = sorted({plain(name) for lost_names in lost if isinstance(lost_names, list) for name in lost_names})
    missed = number_of(run.summary, "points_not_evaluated") or 0.0
    faults = [
        (failed, f"Starts that ended with an error: {failed:,}."),
        (len(run.starts) > 1, f"Resumes: {len(run.starts) - 1:,}."),
        (run.cut, f"{len(run.cut):,} windows were trained again or closed again after a resume."),
        (
            names,
            f"A start found parts of the record missing: {', '.join(names)}. Figures of the run are incomplete.",
        ),
        (run.bad_samples, f"{len(run.bad_samples):,} samples could not be used and were left out of training."),
        (missed, f"{missed:,.0f} evaluation points were not evaluated: the target may have been met before."),
        (partial, f"{partial:,} evaluations are of some of the prompts only: they are no score, and meet no target."),
    ]
    for key, name in (("loss", "training loss"), ("gradient_norm", "gradient norm")):
        none = int(np.isnan(run.windows[key]).sum())
        faults.append((0 < none < len(run.windows[key]), f"{none:,} windows have no finite {name}."))
    return [text for is_so, text in faults if is_so]


def bad_samples_of(run: History) -> list[list[str]]:
    """Return a row for each of the first unusable samples."""
    return [[plain(line.get(key)) for key in ("sample", "key", "reason")] for line in run.bad_samples[:MOST_ROWS]]


# --- several runs next to each other ---

ABSENT = "not there"
FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "fid": ("FID", figure),
    "clip": ("CLIP score", figure),
    "cmmd": ("CMMD", figure),
    "images_to_target": ("images to the target", figure),
    "seconds_to_target": ("training to the target", span),
    "seconds_with_eval_to_target": ("time to the target, with evaluation", span),
    "images": ("images seen", figure),
    "seconds": ("time, all clocks", span),
    "images_per_sec": ("images/s", figure),
    "images_per_sec_per_device": ("images/s per device", figure),
    "mfu": ("MFU", share),
    "data_wait_frac": ("data wait", share),
    "peak_mem_gib": ("peak memory, GiB", figure),
    "loss": ("training loss, last window", figure),
    "val_loss": ("validation loss, last", figure),
    "device_hours": ("device-hours", figure),
    "cost": ("cost", figure),
}
"""Figure -> its name, and how it is written."""
CARD_KEYS = (
    "fid",
    "clip",
    "cmmd",
    "images",
    "seconds",
    "images_per_sec",
    "loss",
    "val_loss",
    "peak_mem_gib",
    "data_wait_frac",
    "mfu",
)
SCORE_KEYS = ("prompts_sha256", "num_prompts", "image_size", "eval_image_size", "partial")
COMPARABLE_KEYS = {
    "FIDs": ("statistics_sha256", "inception_fingerprint", "resize", *SCORE_KEYS),
    "CLIP scores": ("clip_fingerprint", *SCORE_KEYS),
    "CMMDs": ("cmmd_fingerprint",),
    "Losses": ("model.family", "objective.prediction", "objective.weighting", "objective.timesteps", "image_size"),
    "Validation losses": ("stage_sha256", "num_samples", "times"),
    "Images/s": ("model.family", "model.preset", "image_size", "device"),
    "Scores": ("guidance", "steps", "sampler", "weights"),
}
"""Figures -> the keys in which runs have to agree, so that these figures compare."""


class ComparisonRow(NamedTuple):
    """A row of a table: (text, hint) for each run."""

    name: str
    cells: Sequence[tuple[str, str | None]]


def results(runs: Sequence[History]) -> list[ComparisonRow]:
    """Return the figures of all runs that any of them has, each with its ratio to the first run's."""
    figures = [figures_of(run) for run in runs]
    rows = [ComparisonRow("result", [(result_of(run).head, "" if index else None) for index, run in enumerate(runs)])]
    for key, (name, formatted) in FIGURES.items():
        values = [run_figures.get(key) for run_figures in figures]
        texts = [NONE if value is None else formatted(value) for value in values]
        if any(value is not None for value in values):
            rows.append(ComparisonRow(name, [(text, _ratio(values, index)) for index, text in enumerate(texts)]))
    return rows


def _ratio(values: Sequence[float | None], index: int) -> str | None:
    """Return a value's ratio to the first run's, nothing where there is none, None for the first run itself."""
    first, value = values[0], values[index]
    if not index:
        return None
    return f"{TIMES} {figure(value / first, 3)}" if first and value is not None else ""


def differing(all_of: Sequence[Mapping[str, Any]], without: Sequence[str] = ()) -> list[ComparisonRow]:
    """Return the keys that are not the same in all of several mappings, in their order; an empty one differs in none."""
    keys = dict.fromkeys(key for mapping in all_of for key in mapping if key not in without)
    rows = []
    for key in keys:
        values = [mapping.get(key, _ABSENT) for mapping in all_of]
        present = [value for mapping, value in zip(all_of, values, strict=True) if mapping]
        if any(value != present[0] or (value is _ABSENT) != (present[0] is _ABSENT) for value in present):
            rows.append(ComparisonRow(key, [(ABSENT if value is _ABSENT else plain(value), None) for value in values]))
    return rows


_ABSENT = object()


def not_comparable(runs: Sequence[History]) -> list[str]:
    """Say which figures do not compare between these runs, and why."""
    scored = [run.evaluations[-1] for run in runs if run.evaluations]
    validated = [{"times": "thousandths", **run.validations[-1]} for run in runs if run.validations]
    settings = [{**run.config, **run.environment} for run in runs]
    problems = []
    for figures, keys in COMPARABLE_KEYS.items():
        lines = {"Losses": settings, "Images/s": settings, "Validation losses": validated}.get(figures, scored)
        if why := [key for key in keys if _differs(lines, key)]:
            problems.append(f"{figures} do not compare: the runs differ in {', '.join(why)}.")
    return problems


def _differs(lines: Sequence[Line], key: str) -> bool:
    values = [line[key] for line in lines if key in line]
    return any(value != values[0] for value in values)


# --- sample grids for the page ---

MOST_SIDE_PX, SMALL_SIDE_PX = 1100, 420
MOST_GRIDS, MOST_CAPTIONS = 60, 64
WEBP_QUALITY = 85


class Grid(NamedTuple):
    """One grid: images seen, and its bytes as an address that an <img> takes; for videos also those of the GIF."""

    images: int
    address: str
    gif: str | None = None


class SampleGrids(NamedTuple):
    """The sample grids of a run, over training.

    width, height: px, of the GIFs if any. is_small: shown enlarged without smoothing.
    left_out: what of them the page does not have, a sentence each.
    """

    grids: Sequence[Grid]
    captions: Sequence[str]
    width: int
    height: int
    left_out: Sequence[str]

    @property
    def has_gifs(self) -> bool:
        return any(grid.gif is not None for grid in self.grids)

    @property
    def is_small(self) -> bool:
        return max(self.width, self.height) <= SMALL_SIDE_PX


def samples_of(run: History, most_bytes: int) -> SampleGrids | None:
    """Return a run's sample grids within so many bytes, the first and the last among them; None where there are none."""
    if not run.grids:
        return None
    grids: list[Grid] = []
    left_out: list[str] = []
    size, room, last = (0, 0), most_bytes, _embedded(run.grids[-1][1])
    each = len(last[0]) + len(last[1] or "") if last else most_bytes
    for index in evenly_spaced(len(run.grids), max(1, min(MOST_GRIDS, most_bytes // each))):
        images, path = run.grids[index]
        if (packed := _embedded(path)) is None:
            left_out.append(f"{path.name} cannot be read.")
            continue
        address, film, size = packed
        if film and len(film) > room - len(address) >= 0:
            left_out.append(f"{path.with_suffix('.gif').name} is too large for this page.")
            film = None
        if (left := room - len(address) - len(film or "")) >= 0:
            grids.append(Grid(images, address, film))
            room = left
    if len(grids) + len(left_out) < len(run.grids):
        left_out.append(f"{len(grids):,} of {len(run.grids):,} sample grids are shown, evenly over training.")
    return SampleGrids(grids, [plain(caption) for caption in run.captions[:MOST_CAPTIONS]], *size, left_out)


def evenly_spaced(num: int, most: int) -> list[int]:
    """Return `most` places among `num`, evenly, the last one always and the first one where there are two."""
    if num <= most:
        return list(range(num))
    return sorted({num - 1, *(round(part * (num - 1) / max(1, most - 1)) for part in range(most if most > 1 else 0))})


def _embedded(path: Path) -> tuple[str, str | None, tuple[int, int]] | None:
    """Return the addresses of a grid and of its GIF, if any, and (width, height); None: it is not an image."""
    try:
        with Image.open(io.BytesIO(grid_bytes(path))) as picture:
            image = picture.convert("RGB")
        film = grid_bytes(path.with_suffix(".gif")) if path.with_suffix(".gif").is_file() else b""
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    image.thumbnail((MOST_SIDE_PX, MOST_SIDE_PX), Image.Resampling.LANCZOS)
    file, size = io.BytesIO(), image.size
    # Small ones are enlarged without smoothing, where every fault of WebP would be seen.
    image.save(file, format="webp", quality=WEBP_QUALITY, lossless=max(size) <= SMALL_SIDE_PX)
    address = f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"
    if not film.startswith((b"GIF87a", b"GIF89a")):
        return address, None, size
    size = int.from_bytes(film[6:8], "little"), int.from_bytes(film[8:10], "little")
    return address, f"data:image/gif;base64,{base64.b64encode(film).decode()}", size
