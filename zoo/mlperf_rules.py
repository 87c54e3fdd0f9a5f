"""What MLPerf's text-to-image benchmarks have in common: reference points, and how a run differs from the reference.

The constants of each are in a file of its own, zoo/mlperf_sd.py and zoo/mlperf_flux.py. Sources of both:

    rules        mlcommons/training_policies at d73e20f1, training_rules.adoc
    points       mlcommons/logging, rcp_checker/training_RULESET/rcps_BENCHMARK.json

A reference point (RCP in the rules) is a set of runs of the reference at one global batch size and learning rate. It lists
the samples that each run took to the target. A submission that converges in clearly fewer is not accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

RELATIVE_TOLERANCE = 1e-6  # a learning rate typed with seven digits counts as equal


@dataclass(frozen=True)
class ReferencePoint:
    """Runs of the reference at one global batch.

    rulesets: the ones that list it; lr_per_image: learning rate after the warm-up / global batch size;
    platform: the hardware; images: samples to the target, one number per run, sorted.
    """

    rulesets: tuple[str, ...]
    global_batch_size: int
    lr_per_image: float
    warmup_batches: int
    platform: str
    images: tuple[int, ...]

    @property
    def lr(self) -> float:
        """Learning rate after the warm-up."""
        return self.lr_per_image * self.global_batch_size

    @property
    def mean_images(self) -> float:
        """Mean samples to the target without the best and the worst run (the rules' olympic mean)."""
        kept = self.images[1:-1]
        return sum(kept) / len(kept)

    @property
    def fastest_images(self) -> int:
        """Samples of the run that took the fewest."""
        return self.images[0]

    @property
    def slowest_images(self) -> int:
        """Samples of the run that took the most."""
        return self.images[-1]

    def batches(self, images: float) -> int:
        """Return the number of batches after which this many images have been seen, rounded up."""
        return math.ceil(images / self.global_batch_size)


def sorted_runs(runs: Mapping[int, int]) -> tuple[int, ...]:
    """Return the samples of each run. `runs`: samples to the target -> number of runs that took that many."""
    return tuple(sorted(count for count, num in runs.items() for _ in range(num)))


@dataclass(frozen=True)
class Benchmark:
    """A benchmark's constants, as its rules, its reference and its reference points have them."""

    name: str
    """As submissions have it."""
    family: str
    """Of its network; the variant is mlperf."""
    rulesets: tuple[str, ...]
    """Rulesets that a run can be compared with, the newest last."""
    points: tuple[ReferencePoint, ...]
    train_samples: int
    """All samples of its training set."""
    eval_samples: int
    """Of an evaluation."""
    target: Mapping[str, float]
    """Key of the section `target` -> what an evaluation has to come to."""
    target_said: str
    every_images: int
    """Images between two evaluations, before `interval` rounds them up to whole batches."""
    warmup_start: Callable[[int], float]
    """Batches of warm-up -> the learning rate's factor at the first of them."""
    evaluated_by: tuple[str, Any]
    """The key that says whether a run is evaluated, and its value where it is not."""
    fixed: Mapping[str, Any]
    """The reference's values. A submission to the closed division must use the same."""
    evaluation: Mapping[str, Any]
    """The same for runs with evaluation."""
    intervals: tuple[str, ...]
    """Keys that have to be the interval where they are given and data are real."""
    closed: Mapping[str, Any]
    """Further values that the closed division asks for."""
    not_random: tuple[str, ...]
    """Weights that have to be the published ones in the closed division."""

    @property
    def newest(self) -> str:
        """The newest ruleset."""
        return self.rulesets[-1]

    def interval(self, global_batch_size: int) -> int:
        """Return the images between two evaluations that the rules ask for, e.g. 512,256 for SD at a batch of 384."""
        return -(-self.every_images // global_batch_size) * global_batch_size

    def points_of(self, ruleset: str | None = None) -> tuple[ReferencePoint, ...]:
        """Return a ruleset's reference points, sorted by global batch size; null: the newest's.

        Raises:
            ValueError: an unknown ruleset.
        """
        ruleset = ruleset or self.newest
        if ruleset not in self.rulesets:
            raise ValueError(
                f"ruleset: '{ruleset}' has no reference points of {self.name} here. Known: {', '.join(self.rulesets)}."
            )
        found = [point for point in self.points if ruleset in point.rulesets]
        return tuple(sorted(found, key=lambda point: point.global_batch_size))

    def reference_point(self, global_batch_size: int, ruleset: str | None = None) -> ReferencePoint | None:
        """Return a ruleset's point at exactly this global batch size, or None. Raises ValueError: an unknown ruleset."""
        points = self.points_of(ruleset)
        return next((point for point in points if point.global_batch_size == global_batch_size), None)

    def nearest(self, global_batch_size: int, ruleset: str | None = None) -> tuple[ReferencePoint, ...]:
        """Return the points at the next smaller and the next larger global batch size; at an end of the table only one.

        Raises ValueError: an unknown ruleset.
        """
        points = self.points_of(ruleset)
        below = [point for point in points if point.global_batch_size < global_batch_size]
        above = [point for point in points if point.global_batch_size > global_batch_size]
        return (*below[-1:], *above[:1])

    def no_point(self, global_batch_size: int, ruleset: str | None = None) -> str:
        """Return the message that there is no point at this global batch size; it names the nearest."""
        near = ", ".join(
            f"{p.global_batch_size} ({p.lr_per_image:g} an image)" for p in self.nearest(global_batch_size, ruleset)
        )
        where = f"{global_batch_size} (ruleset {ruleset or self.newest})"
        return f"no reference point at a global batch of {where}. Nearest: {near}."

    def lr_per_image(self, global_batch_size: int, ruleset: str | None = None) -> float:
        """Return the reference's learning rate per image of the global batch.

        Values are not interpolated: the reference's rate per image follows no rule (SD: 2.8e-7 at 256, 1.25e-7 at 1024).

        Raises:
            ValueError: no point at this global batch size (names the nearest), or an unknown ruleset.
        """
        point = self.reference_point(global_batch_size, ruleset)
        if point is None:
            raise ValueError(f"{self.no_point(global_batch_size, ruleset)} Give optimizer.lr_per_image.")
        return point.lr_per_image

    def warmup_batches(self, global_batch_size: int, ruleset: str | None = None) -> int | None:
        """Return the reference's batches of warm-up, or None where its points differ and this batch has none."""
        points = self.points_of(ruleset)
        own = self.reference_point(global_batch_size, ruleset)
        known = {point.warmup_batches for point in ([own] if own else points)}
        return known.pop() if len(known) == 1 else None

    # --- how a run differs from the reference ---

    def deviations(self, values: Mapping[str, Any], ruleset: str | None = None) -> list[str]:
        """Return one line per key in which a run differs from the benchmark's reference: "KEY: GIVEN; the reference: X".

        Args:
            values: key -> value of a resolved run, as `config.flat` gives them. Missing keys are not compared.
            ruleset: the free keys are compared with its reference points; None: with those of the newest.
        """
        return self.fixed_deviations(values) + self.free_deviations(values, ruleset)

    def fixed_deviations(self, values: Mapping[str, Any]) -> list[str]:
        """Return the `deviations` that the closed division forbids."""
        found = []
        key, off = self.evaluated_by
        evaluated = {} if values.get(key, off) == off else self.evaluation
        for key, wanted in {**self.fixed, **evaluated}.items():
            given = values.get(key, wanted)
            square = [given, given] if key == "image_size" and isinstance(given, int) else given
            if not _same(square, [wanted, wanted] if key == "image_size" else wanted):
                found.append(f"{key}: {_shown(given)}; the reference: {_shown(wanted)}")
        every = self.interval(values["global_batch_size"])
        for key in () if values.get("data.synthetic") else self.intervals:
            if values.get(key) not in (None, every):
                found.append(f"{key}: {_shown(values[key])}; the rules: {every}")
        return found

    def not_closed(self, values: Mapping[str, Any]) -> list[str]:
        """Return everything that keeps a run out of the closed division, in the format of `deviations`.

        Args:
            values: as in `deviations`, with all keys of a run.
        """
        found = []
        own = {"model.family": self.family, "model.variant": "mlperf", "model.denoiser": None, "data.synthetic": False}
        for key, wanted in {**own, **self.closed}.items():
            if values.get(key) != wanted:
                found.append(f"{key}: {_shown(values[key])}; the reference: {_shown(wanted)}")
        for key in self.not_random:
            if values.get(key) == "random":
                found.append(f"{key}: random; the reference: its published weights")
        size, every = self.fixed["image_size"], self.interval(values["global_batch_size"])
        for key, wanted in {"eval.every_images": every, "eval.image_size": size}.items():
            is_evaluated = values.get("eval.when", "off") != "off"
            if is_evaluated and values.get(key) not in (None, wanted, [wanted, wanted], (wanted, wanted)):
                found.append(f"{key}: {_shown(values[key])}; the rules: {wanted}")
        return found + self.fixed_deviations(values)

    def free_deviations(self, values: Mapping[str, Any], ruleset: str | None = None) -> list[str]:
        """Return the `deviations` in what the closed division leaves free: global batch size, learning rate, warm-up."""
        free, batch = "free in the closed division", values["global_batch_size"]
        point, found = self.reference_point(batch, ruleset), []
        key = "optimizer.lr" if values.get("optimizer.lr_per_image") is None else "optimizer.lr_per_image"
        if point is None:
            found.append(f"global_batch_size: {batch}; {free}; {self.no_point(batch, ruleset)}")
        elif not _same(given := values.get(key), wanted := point.lr if key == "optimizer.lr" else point.lr_per_image):
            found.append(f"{key}: {_shown(given)}; {free}; the reference point has {wanted:g}")
        batches, images = values.get("schedule.warmup_batches"), values.get("schedule.warmup_images")
        given_batches = batches if images is None else math.ceil(images / batch)
        warmup = self.warmup_batches(batch, ruleset)
        if warmup is not None and given_batches != warmup and (warmup, given_batches) != (0, None):
            key, given = ("schedule.warmup_batches", batches) if images is None else ("schedule.warmup_images", images)
            points = "the reference point has" if point else "every reference point has"
            found.append(f"{key}: {_shown(given)}; {free}; {points} {warmup} batches")
        return found


def _same(given: Any, wanted: Any) -> bool:
    if isinstance(given, list | tuple) and isinstance(wanted, list | tuple):
        return len(given) == len(wanted) and all(map(_same, given, wanted))
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (given, wanted))
    return math.isclose(given, wanted, rel_tol=RELATIVE_TOLERANCE) if are_numbers else given == wanted


def _shown(value: Any) -> str:
    """A value as YAML writes it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
