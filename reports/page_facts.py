"""What a run came to, in words and figures: its result and target, speed, time and cost, starts and faults."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from record import standing
from record.files import CLOCKS
from record.history import History, Line, number_of
from reports.page_charts import CLOCK_COLOURS, CLOCK_NAMES, LABELS, SIDE
from reports.page_text import NONE, TIMES, figure, moment, plain, share, span

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


@dataclass(frozen=True)
class Result:
    """How a run ended, and what that says of its target."""

    state: str
    text: str

    @property
    def head(self) -> str:
        return HEADS[self.state]


@dataclass(frozen=True)
class Card:
    """A figure that stands by itself. value: with its unit; hint: what it is to be held against."""

    label: str
    value: str
    unit: str = ""
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
    model = ", ".join(
        [plain(preset or NONE), *([plain(variant)] if variant not in (None, "stock") else [])]
        + ([f"{_parameters(trained)} trained parameters"] if trained else [])
    )
    where = "synthetic data" if config.get("data.synthetic") else f"{plain(config.get('data.stage') or 'data')}"
    remote = config.get("data.remote")
    source = f" from {plain(remote)}" if remote and not config.get("data.synthetic") else ""
    batch = f"global batch {figure(config.get('global_batch_size'))}"
    parts = [f"{plain(family)} ({model})", f"{where}{source} at {size_of(config.get('image_size'))}", batch]
    parts += [plain(config[key]) for key in ("precision",) if config.get(key)]
    return f"{', '.join(parts)}, on {device_of(run)}."


def _parameters(number: float) -> str:
    size, unit = next(
        ((size, unit) for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if number >= size), (1.0, "")
    )
    return f"{number / size:.3g} {unit}".strip()


def size_of(value: Any) -> str:
    """Return `image_size` in words: one number, or [width, height]."""
    width, height = value if isinstance(value, list) and len(value) == 2 else (value, value)
    return f"{plain(width)} {TIMES} {plain(height)} px" if value is not None else "an unknown size"


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
    found = [(SIDE[key] == "at most", value, target[key]) for key, value in values.items() if value is not None]
    return all(value <= wanted if is_most else value >= wanted for is_most, value, wanted in found)


def reached_by(run: History) -> Line | None:
    """Return the first evaluation that met the target: of training, else as eval.py has told summary.json."""
    target = target_of(run)
    lines = run.validations if "val_loss" in target else run.evaluations
    found = next((line for line in lines if is_met(line, target)), None)
    if found is None and run.summary.get("target") == "reached":
        keys = {
            "images": "images_to_target",
            "seconds": "seconds_to_target",
            "seconds_with_eval": "seconds_to_target_with_eval",
        }
        return {
            **{key: run.summary.get(name) for key, name in keys.items()},
            **{key: run.summary.get(key) for key in SIDE},
        }
    return found


def state_of(run: History) -> str:
    """Return one of HEADS: what summary.json says, else how the run stands (record/standing.py)."""
    said = run.summary.get("target")
    if said in ("reached", "missed", "pending"):
        return str(said)
    state = standing.state_of(run.folder, run.starts, run.summary)
    return "reached" if state in ("running", "stopped") and reached_by(run) is not None else state


def result_of(run: History) -> Result:
    """Say how a run ended."""
    state, target, line = state_of(run), target_of(run), reached_by(run)
    wanted = " and ".join(f"{_name(key)} {SIDE[key]} {value:g}" for key, value in target.items())
    ended = f"{figure(int(images_of(run)))} images in {span(run.seconds)}"
    what = "loss" if "val_loss" in target else "scores"
    if state == "reached" and line is not None:
        seconds, whole = number_of(line, "seconds"), number_of(line, "seconds_with_eval")
        times = [f"{span(seconds)} of training"] if seconds is not None else []
        times += [f"{span(whole)} with evaluation"] if whole is not None else []
        text = f"{scores_said(line)} after {figure(_int(line, 'images'))} images: {', '.join(times)}. The target is {wanted}."
    elif state == "missed":
        text = f"The target is {wanted}. The run ended after {ended}; its last {what}: {scores_said(last_scores(run))}."
    elif state == "pending":
        text = f"The target is {wanted}. The run ended after {ended}; "
        text += f"composer eval.py {plain(run.folder)} scores its snapshots."
    elif state == "finished":
        text = f"{ended}. {_without_target(run, wanted)}"
    elif state == "failed":
        text = f"{_sentence(run.starts[-1]['failed'])} It had seen {ended}. {_wants(wanted)}"
    elif state == "running":
        text = f"{ended} until {moment(run.changed_at)}. {_wants(wanted)}"
    elif number_of(run.starts[-1] if run.starts else {}, "seconds") is not None:
        text = f"A signal or an error ended its last process before the run's end: {ended}. {_wants(wanted)}"
    else:
        text = f"Its last process was killed: {ended} until {moment(run.changed_at)}. {_wants(wanted)}"
    return Result(state, text)


def _sentence(text: Any) -> str:
    said = plain(text)
    return said if said.endswith((".", ")")) else f"{said}."


def _without_target(run: History, wanted: str) -> str:
    scores = last_scores(run)
    said = f" Its last scores: {scores_said(scores)}." if scores else ""
    return f"{'No target was set.' if not wanted else f'The target is {wanted}; whether it was met is not recorded.'}{said}"


def _wants(wanted: str) -> str:
    return f"The target is {wanted}." if wanted else "No target was set."


def last_scores(run: History) -> Line:
    """Return the last evaluation, or that of a finished run that eval.py has scored."""
    if "val_loss" in target_of(run):
        return run.validations[-1] if run.validations else {}
    return run.evaluations[-1] if run.evaluations else run.summary if number_of(run.summary, "fid") is not None else {}


def _name(key: str) -> str:
    return "validation loss" if key == "val_loss" else key.upper()


def scores_said(line: Line) -> str:
    """Return the scores of a line in words."""
    keys = LABELS if any(number_of(line, key) is not None for key in LABELS) else SIDE  # a loss is no score
    said = [f"{_name(key)} {figure(value)}" for key in keys if (value := number_of(line, key)) is not None]
    return " and ".join(said) if said else "none"


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
    found = {
        key: number_of(run.summary, key)
        for key in ("mfu", "peak_mem_gib", "data_wait_frac", "loss", "val_loss", "images_per_sec_per_device")
    }
    clocks = {clock: float(np.nansum(run.windows[clock])) for clock in CLOCKS}
    found["images_per_sec"], _, _ = speed_of(run)
    found["images"], found["seconds"] = images_of(run) or None, run.seconds or None
    loss, memory = (values[np.isfinite(values)] for values in (run.windows["loss"], run.windows["peak_mem_gib"]))
    found["loss"] = found["loss"] if found["loss"] is not None or not len(loss) else float(loss[-1])
    found["peak_mem_gib"] = found["peak_mem_gib"] or (float(memory.max()) if len(memory) else None)
    fed = clocks["train_sec"] + clocks["data_wait_sec"]
    if found["data_wait_frac"] is None and fed:
        found["data_wait_frac"] = clocks["data_wait_sec"] / fed
    if found["val_loss"] is None and run.validations:
        found["val_loss"] = number_of(run.validations[-1], "val_loss")
    scores = reached_by(run) or last_scores(run)
    found |= {key: number_of(scores, key) for key in LABELS}
    line = reached_by(run) or {}
    found |= {f"{key}_to_target": number_of(line, key) for key in ("images", "seconds", "seconds_with_eval")}
    return found | {"device_hours": run.device_hours, "cost": cost_of(run, run.device_hours)}


def _memory_of(run: History) -> str:
    device = run.environment.get("device")
    return "" if not device else "resident" if str(device).startswith("CPU") else "of the fullest GPU"


def _slowest_of(run: History) -> Card:
    """Return the rank that was slowest in most windows; none where there is one, or in a record of before."""
    rank, over = (number_of(run.summary, key) for key in ("slowest_rank", "slowest_rank_over_median"))
    if rank is None or over is None:
        return Card("Slowest rank", NONE)
    hint = f"{plain(run.summary.get('slowest_host'))}, {share(over - 1.0)} above the median"
    return Card("Slowest rank", figure(int(rank)), "", hint)


def cards_of(run: History) -> list[Card]:
    """Return the figures that stand on top."""
    found, target = figures_of(run), target_of(run)
    _, least, most = speed_of(run)
    of_loss = f"target at most {target['val_loss']:g}" if "val_loss" in target else "last one"
    between = f"{figure(least, 3)} to {figure(most, 3)}" if least is not None else ""
    cards = [
        *(
            Card(
                key.upper() if key == "fid" else "CLIP score",
                figure(found[key]),
                "",
                f"target {SIDE[key]} {target[key]:g}" if key in target else "",
            )
            for key in LABELS
        ),
        Card("Images seen", figure(int(found["images"])) if found["images"] else NONE),
        Card("Time", span(found["seconds"]), "", "all clocks of all starts"),
        Card("Throughput", figure(found["images_per_sec"]), "images/s", between),
        Card("Training loss", figure(found["loss"]), "", "last window"),
        Card("Validation loss", figure(found["val_loss"]), "", of_loss),
        Card(
            "Peak memory",
            figure(found["peak_mem_gib"], 3),
            "GiB",
            _memory_of(run),
        ),
        Card("Data wait", share(found["data_wait_frac"]), "", "of training and waiting"),
        Card("MFU", share(found["mfu"])),
        _slowest_of(run),
    ]
    return [card for card in cards if card.value != NONE]


# --- time and cost ---


def cost_of(run: History, hours: float | None) -> float | None:
    """Return what device-hours cost, in the currency of the key."""
    price = number_of(run.config, PRICE)
    return None if hours is None or price is None else hours * price


def clock_shares(run: History) -> list[tuple[str, str, float, float]]:
    """Return (name, variable of its colour, seconds, share) of each clock, over all windows."""
    sums = {clock: float(np.nansum(run.windows[clock])) for clock in CLOCKS}
    whole = sum(sums.values())
    return [(CLOCK_NAMES[clock], CLOCK_COLOURS[clock], value, value / whole) for clock, value in sums.items() if whole]


def times_of(run: History) -> list[tuple[str, str, str, str]]:
    """Return (what, time, device-hours, cost) of the run so far, to the target, and to its end."""
    now, line, hours = number_of(run.environment, "num_devices"), reached_by(run), run.device_hours
    rows = [("the run" if run.summary else "so far", run.seconds, hours)]
    if line is not None:
        for name, key in (
            ("to the target, training alone", "seconds"),
            ("to the target, with evaluation", "seconds_with_eval"),
        ):
            if (seconds := number_of(line, key)) is not None:
                rows.append((name, seconds, None if now is None else seconds * now / 3600.0))
    images, whole = images_of(run), images_in_all(run)
    if state_of(run) in ("running", "failed", "stopped") and whole and 0 < images < whole and run.seconds:
        rest = run.seconds * whole / images
        rows.append(("to max_duration, at this speed (estimate)", rest, None if not hours else hours * whole / images))
    return [(name, span(seconds), figure(of), figure(cost_of(run, of))) for name, seconds, of in rows]


def images_in_all(run: History) -> float | None:
    """Return how many images max_duration is, or None where it is given in epochs."""
    found = re.fullmatch(r"(\d{1,15})(ba|sp)", str(run.config.get("max_duration")))
    batch = number_of(run.config, "global_batch_size")
    if not found or (found[2] == "ba" and batch is None):
        return None
    return float(found[1]) * (batch or 0.0 if found[2] == "ba" else 1.0)


# --- starts and faults ---


def starts_of(run: History) -> list[list[str]]:
    """Return a row for each start: number, when, how it ended, how long, from which batch, on what, commit."""
    rows = []
    for place, start in enumerate(run.starts):
        number = int(start["start"])
        is_running = (
            place == len(run.starts) - 1 and standing.state_of(run.folder, run.starts, run.summary) == "running"
        )
        end = "ended" if number_of(start, "seconds") is not None else "running" if is_running else "killed"
        end = f"failed: {plain(start['failed'])}" if "failed" in start else end
        device = f"{figure(_int(start, 'num_devices'))} {TIMES} {plain(start.get('device'))}"
        changed = _changed(run.starts[place - 1].get("how"), start.get("how")) if place else ""
        came_to = [f"{end}{changed}", span(run.seconds_of.get(number))]
        on = [figure(_int(start, "batch")), device, plain(start.get("commit"))[:12]]
        rows.append([str(number), moment(start.get("unix_time")), *came_to, *on])
    return rows if len(rows) <= 2 * MOST_ROWS else [*rows[:MOST_ROWS], ["…"] * 7, *rows[-MOST_ROWS:]]


def _changed(before: Any, now: Any) -> str:
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return ""
    keys = [key for key in now if before.get(key) != now[key] and key in before]
    return "".join(f"; {plain(key)}: {plain(before[key])} → {plain(now[key])}" for key in keys)


def faults_of(run: History) -> list[str]:
    """Return a sentence for each thing that went wrong and is on record."""
    found = []
    failed = sum("failed" in start for start in run.starts)
    if failed:
        found.append(f"Starts that ended with an error: {failed:,}.")
    if len(run.starts) > 1:
        found.append(f"Resumes: {len(run.starts) - 1:,}.")
    batches = [value for line in run.cut if (value := number_of(line, "batch")) is not None]
    if batches:
        ends = f"batch {figure(int(min(batches)))} to {figure(int(max(batches)))}"
        found.append(f"{len(batches):,} windows were trained again or closed anew after a resume ({ends}).")
    lost = sorted(
        {plain(name) for start in run.starts for name in _list(start.get("lost"))}
        | set(map(plain, _list(run.summary.get("history_lost"))))
    )
    if lost:
        found.append(
            f"A start found parts of its own record missing: {', '.join(lost)}. Figures over the whole run are incomplete."
        )
    if run.bad_samples:
        found.append(f"{len(run.bad_samples):,} samples could not be used and were left out of training.")
    missed = number_of(run.summary, "points_not_evaluated")
    if missed:
        found.append(
            f"{figure(int(missed))} evaluation points were not evaluated: the target may have been met before."
        )
    partial = sum(line.get("partial") is True for line in run.evaluations)
    if partial:
        found.append(f"{partial:,} evaluations are of some of the prompts only: they are no score, and meet no target.")
    for key, what in (("loss", "training loss"), ("gradient_norm", "gradient norm")):
        none = int(np.isnan(run.windows[key]).sum())
        if none and none < len(run.windows[key]):
            found.append(f"{none:,} windows have no finite {what}.")
    return found


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def bad_samples_of(run: History) -> list[list[str]]:
    """Return a row for each of the first unusable samples."""
    return [[plain(line.get(key)) for key in ("sample", "key", "reason")] for line in run.bad_samples[:MOST_ROWS]]
