"""Several runs beside each other: results with their ratios to the first, what differs, and what cannot be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from record.history import History, Line
from reports.page_facts import figures_of, result_of
from reports.page_text import NONE, TIMES, figure, plain, share, span

ABSENT = "not there"
OWN_KEYS = ("run_name", "run_folder")
"""What every run has for itself."""
FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "fid": ("FID", figure),
    "clip": ("CLIP score", figure),
    "images_to_target": ("images to the target", figure),
    "seconds_to_target": ("training to the target", span),
    "seconds_with_eval_to_target": ("time to the target, with evaluation", span),
    "images": ("images seen", figure),
    "seconds": ("time, all clocks", span),
    "images_per_sec": ("images/s", figure),
    "images_per_sec_per_device": ("images/s a device", figure),
    "mfu": ("MFU", share),
    "data_wait_frac": ("data wait", share),
    "peak_mem_gib": ("peak memory, GiB", figure),
    "loss": ("training loss, last window", figure),
    "val_loss": ("validation loss, last", figure),
    "device_hours": ("device-hours", figure),
    "cost": ("cost", figure),
}
"""Figure -> its name, and how it is written."""
OF_SCORES = ("prompts_sha256", "num_prompts", "image_size", "eval_image_size", "partial")
DECIDE = {
    "FIDs": ("statistics_sha256", "inception_fingerprint", "resize", *OF_SCORES),
    "CLIP scores": ("clip_fingerprint", *OF_SCORES),
    "Losses": ("model.family", "objective.prediction", "objective.weighting", "objective.timesteps", "image_size"),
    "Validation losses": ("stage_sha256", "num_samples", "times"),
    "Images/s": ("model.family", "model.preset", "image_size", "device"),
    "Scores": ("guidance", "steps", "sampler", "weights"),
}
"""Figures -> the keys in which runs have to agree, so that these figures compare."""


class Row(NamedTuple):
    """A row of a table: (text, hint) for each run."""

    name: str
    cells: Sequence[tuple[str, str | None]]


def results(runs: Sequence[History]) -> list[Row]:
    """Return the figures of all runs that any of them has, each with its ratio to the first run's."""
    found = [figures_of(run) for run in runs]
    rows = [Row("result", [(result_of(run).head, "" if place else None) for place, run in enumerate(runs)])]
    for key, (name, formatted) in FIGURES.items():
        values = [of.get(key) for of in found]
        texts = [NONE if value is None else formatted(value) for value in values]
        if any(value is not None for value in values):
            rows.append(Row(name, [(text, _ratio(values, place)) for place, text in enumerate(texts)]))
    return rows


def _ratio(values: Sequence[float | None], place: int) -> str | None:
    """Return a value's ratio to the first run's, nothing where there is none, None for the first run itself."""
    first, value = values[0], values[place]
    if not place:
        return None
    return f"{TIMES} {figure(value / first, 3)}" if first and value is not None else ""


def differing(all_of: Sequence[Mapping[str, Any]], without: Sequence[str] = ()) -> list[Row]:
    """Return the keys that are not the same in all of several mappings, in their order; an empty one differs in none."""
    keys = dict.fromkeys(key for of in all_of for key in of if key not in without)
    rows = []
    for key in keys:
        values = [of.get(key, _ABSENT) for of in all_of]
        told = [value for of, value in zip(all_of, values, strict=True) if of]
        if any(value != told[0] or (value is _ABSENT) != (told[0] is _ABSENT) for value in told):
            rows.append(Row(key, [(ABSENT if value is _ABSENT else plain(value), None) for value in values]))
    return rows


_ABSENT = object()


def not_comparable(runs: Sequence[History]) -> list[str]:
    """Say which figures do not compare between these runs, and why."""
    scored = [run.evaluations[-1] for run in runs if run.evaluations]
    validated = [{"times": "thousandths", **run.validations[-1]} for run in runs if run.validations]
    settings = [{**run.config, **run.environment} for run in runs]
    found = []
    for what, keys in DECIDE.items():
        lines = {"Losses": settings, "Images/s": settings, "Validation losses": validated}.get(what, scored)
        if why := [key for key in keys if _differs(lines, key)]:
            found.append(f"{what} do not compare: {', '.join(why)} differ.")
    return found


def _differs(lines: Sequence[Line], key: str) -> bool:
    values = [line[key] for line in lines if key in line]
    return any(value != values[0] for value in values)
