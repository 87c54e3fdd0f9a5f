"""A run as the MLPerf report sees it: its evaluations, its times, and whether it can count in a result."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from record.config_file import CONFIG, read_config
from record.history import read_history
from record.mlperf_events import NAME, events_to_fault


@dataclass(frozen=True)
class Rules:
    """What a benchmark asks of a run's log. A report reads runs alone, so it has these for itself (zoo/mlperf_*.py)."""

    rulesets: tuple[str, ...]
    num_samples: int
    """Of training."""
    num_images: int
    """Of an evaluation."""
    target: Mapping[str, str]
    """Metric -> how it meets its target."""
    is_late: bool
    """Scores may be made after training, so points may lack them, and the rules ask for two."""


AT_MOST, AT_LEAST = "at most", "at least"
RULES = {
    "stable_diffusion": Rules(
        ("4.0.0", "4.1.0", "5.0.0"), 6_513_144, 30_000, {"fid": AT_MOST, "clip": AT_LEAST}, is_late=True
    ),
    "flux1": Rules(("5.1.0", "6.0.0", "6.1.0"), 1_099_776, 29_696, {"val_loss": AT_MOST}, is_late=False),
}
NETWORKS = {"inception": "inception-2015-12-05", "clip_model": "ViT-H-14"}
"""The benchmark's networks, as the line of an evaluation names them."""

# Keys in which two runs of one result may differ.
MAY_DIFFER = (
    *("run_name", "run_folder", "seed", "max_duration", "data.local", "loggers.", "measure.", "eval.batch_size"),
    "cost.",
)
SAME_MACHINE = ("device", "num_devices")
"""Keys of environment.json in which they may not."""


@dataclass(frozen=True)
class Run:
    """A run's record and log, and what they say of a result."""

    folder: Path
    config: Mapping[str, Any]
    """Key -> value of config.yaml and later.yaml."""
    environment: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]] | None
    """Events of the MLPerf log, up to the first that cannot be read; None: there is no log."""
    fault: str | None = None
    """What is wrong with that event."""

    @property
    def name(self) -> str:
        return self.folder.name

    def values(self, key: str) -> list[Any]:
        """Return the values of a key's events, in order."""
        return [event["value"] for event in self.events or () if event["key"] == key]

    @property
    def seed(self) -> int:
        return self.values("seed")[0]

    def said(self, key: str) -> Any:
        """Return a key of the submission: from the log, else from the configuration, which a resume may have changed."""
        return next(iter(self.values(f"submission_{key}")), self.config.get(f"mlperf.{key}"))

    @property
    def benchmark(self) -> str:
        """As its log says, else as its network is."""
        own = "flux1" if self.config.get("model.family") == "flux" else "stable_diffusion"
        return next((name for name in self.values("submission_benchmark") if name in RULES), own)

    @property
    def rules(self) -> Rules:
        return RULES[self.benchmark]

    @property
    def ruleset(self) -> str:
        return str(self.config.get("mlperf.ruleset") or self.rules.rulesets[-1])

    @property
    def header(self) -> dict[str, Any]:
        """Key -> value of the events before init_stop, without the seed."""
        keys = [event["key"] for event in self.events or ()]
        end = keys.index("init_stop") if "init_stop" in keys else 0
        return {event["key"]: event["value"] for event in (self.events or ())[:end] if event["key"] != "seed"}

    @property
    def logged(self) -> list[dict[str, Any]]:
        """Images and metrics of each evaluation in the log, by images."""
        found: dict[int, dict[str, Any]] = {}
        for event in self.events or ():
            if event["key"] == "eval_accuracy":
                images = event["metadata"]["samples_count"]
                of_point = found.setdefault(images, {"images": images, **dict.fromkeys(self.rules.target)})
                of_point[event["metadata"]["metric"].lower()] = event["value"]
        return [found[images] for images in sorted(found)]

    @property
    def foreign_scores(self) -> list[str]:
        """Reasons why its scores do not compare with the reference's."""
        num = next(iter(self.values("eval_samples")), self.rules.num_images)
        ends = [event["metadata"] for event in self.events or () if event["key"] == "eval_stop"]
        others = sorted({end[key] for end in ends for key, name in NETWORKS.items() if end.get(key, name) != name})
        found = [f"{num:,} images a {'score' if self.rules.is_late else 'validation'}"]
        found = [] if num == self.rules.num_images else found
        return found + ([f"scored by {' and '.join(others)}"] if others else [])

    @property
    def first_pass(self) -> dict[str, Any] | None:
        """The first evaluation in the log that meets the run's own target; None: there is none, or no target."""
        target = {key: value for key, value in self._target.items() if value is not None}
        met = (line for line in self.logged if all(self._meets(key, line[key], target[key]) for key in target))
        return next(met, None) if target else None

    @property
    def _target(self) -> dict[str, Any]:
        return {key: self.config.get(f"target.{key}") for key in self.rules.target}

    def _meets(self, key: str, value: float | None, wanted: float) -> bool:
        return value is not None and (value <= wanted if self.rules.target[key] == AT_MOST else value >= wanted)

    @property
    def points(self) -> list[int]:
        """Images seen at each evaluation point, up to run_stop."""
        blocks = {event["metadata"]["samples_count"] for event in self.events or () if event["key"] == "block_stop"}
        return sorted(images for images in blocks if images <= self.images)

    @property
    def is_scored_throughout(self) -> bool:
        """Every evaluation point up to run_stop has scores; the rules ask for that in one run of a result."""
        return {*self.points} <= {line["images"] for line in self.logged}

    @property
    def stops(self) -> list[Mapping[str, Any]]:
        return [event for event in self.events or () if event["key"] == "run_stop"]

    @property
    def has_passed(self) -> bool:
        return bool(self.stops) and self.stops[-1]["metadata"]["status"] == "success"

    @property
    def images(self) -> int:
        """Images seen by run_stop."""
        return self.stops[-1]["metadata"]["samples_count"]

    def _ms(self, key: str) -> float:
        return next(event["time_ms"] for event in self.events or () if event["key"] == key)

    @property
    def minutes(self) -> float:
        """From run_start to run_stop: the time to train."""
        return (self.stops[-1]["time_ms"] - self._ms("run_start")) / 60_000

    @property
    def init_sec(self) -> float:
        return (self._ms("init_stop") - self._ms("init_start")) / 1000

    @cached_property
    def checked(self) -> str | None:
        """What MLPerf's own checker objects to in the log, in one line; None: nothing."""
        return check(self.folder / NAME, self.ruleset)

    def problem(self) -> str | None:
        """Why this run cannot count in a result, not even as a failed one; None: it can."""
        if self.events is None:
            return "has no mlperf.log (mlperf.enabled=true)"
        if self.fault is not None:
            return self.fault
        counts = {key: len(self.values(key)) for key in ("seed", "init_start", "init_stop", "run_start")}
        if not all(counts.values()):
            return (
                "its log ends before run_start: the run is just starting, or was killed. Start it again (same command)"
            )
        if not self.logged and (self.has_passed or not self.stops):  # a NaN loss ends a run before its first evaluation
            made = "composer eval.py RUN makes them (eval.when=after)"
            return f"its log has no evaluation: {made if self.rules.is_late else 'the run has come to none yet'}"
        if not self.stops:
            return "its log is open: the run is still going or was killed, or composer eval.py RUN is not finished"
        if len(self.stops) > 1 or max(counts.values()) > 1:
            return "its log has more than one run in it"
        return self._of_submission() or self._of_its_end() or (self.checked if self.has_passed else None)

    def _of_submission(self) -> str | None:
        """What the rules of a submission forbid; None: nothing."""
        is_closed = self.said("division") == "closed"
        for key in ("org", "platform"):
            if (name := self.said(key)) is not None and not re.fullmatch(r"\w[\w.+ -]*", str(name)):
                return f"mlperf.{key}: '{name}' cannot be a folder's name, and a submission has a folder of that name"
        if self.ruleset not in self.rules.rulesets:
            return f"mlperf.ruleset: '{self.ruleset}' is not known here. Possible: {', '.join(self.rules.rulesets)}"
        if self.values("fixture"):
            return f"a fixture: {self.values('fixture')[0]}"
        if is_closed and (restart := next((e for e in self.events or () if e["key"] == "restart"), None)):
            where = f"{restart['metadata']['samples_count']:,} images"
            return f"was restarted at {where}: no result of the closed division"
        if is_closed and self.foreign_scores:
            networks = ", by the benchmark's networks" if self.rules.is_late else ""
            asked = f"{self.rules.num_images:,} images{networks}"
            return f"{', '.join(self.foreign_scores)}: no result of the closed division, which asks for {asked}"
        if is_closed and {*self.values("train_samples")} - {self.rules.num_samples}:
            given = f"trained on {self.values('train_samples')[0]:,} samples"
            return f"{given}: no result of the closed division, which asks for {self.rules.num_samples:,}"
        return None

    def _of_its_end(self) -> str | None:
        """What is wrong with its end; None: nothing."""
        first, ended = self.first_pass, self.images
        if not self.has_passed:
            changed = "its target was changed after its end, or its log was"
            return (
                None
                if first is None
                else f"its log says aborted, but it passed at {first['images']:,} images: {changed}"
            )
        if first is None:
            target = " and ".join(f"target.{key}={value}" for key, value in self._target.items())
            return f"its log says success, but none of its evaluations meets {target}"
        if first["images"] != ended:
            return f"its run_stop is at {ended:,} images, but it passed first at {first['images']:,}"
        if missing := {*self.points[-2:]} - {line["images"] for line in self.logged}:
            return f"its log has no scores at {min(missing):,} images: the rules ask for the first pass and the point before"
        if len(self.logged) < 2 and self.rules.is_late:
            return (
                "it passed at its first evaluation, the checkers ask for two: evaluate more often (eval.every_images)"
            )
        return None


def read_run(folder: Path) -> Run | None:
    """Return the run of a folder, or None where it is not a run's. Raises ValueError: names a broken file."""
    if not (folder / CONFIG).is_file():
        return None
    history = read_history(folder)
    for text in history.missing:
        if "cannot be read" in text or text.startswith(str(folder)):
            raise ValueError(f"{folder}/{text.removeprefix(f'{folder}/').rstrip('.')}")
    events, fault = events_to_fault(folder / NAME)
    return Run(folder, read_config(folder), history.environment, events, fault)


def differences(runs: Sequence[Run]) -> list[str]:
    """Say how the other runs of a result differ from the first."""
    first, found = runs[0], []
    for run in runs[1:]:
        keys = [key for key in dict.fromkeys([*first.config, *run.config]) if not key.startswith(MAY_DIFFER)]
        differing = _differing(first.config, run.config, keys)
        differing |= _differing(first.environment, run.environment, SAME_MACHINE)
        if not differing and run.header:  # the configuration may have changed since the log began
            differing = _differing(first.header, run.header, first.header)
        found += [f"{key}: {a} in {first.folder}, {b} in {run.folder}" for key, (a, b) in differing.items()]
    return found


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any], keys: Iterable[str]) -> dict[str, tuple[Any, Any]]:
    return {key: (ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)}


def same_seeds(runs: Sequence[Run]) -> list[str]:
    """Say which runs share a seed."""
    first = {run.seed: run for run in reversed(runs)}
    same = [(run, other) for run in runs if (other := first[run.seed]) is not run]
    return [f"seed: {run.seed} in {other.folder} and in {run.folder}" for run, other in same]


def olympic_mean(values: Sequence[float], num_failed: int = 0) -> float | None:
    """Return the mean without the least and the greatest; a failed run is the greatest. None: nothing is left."""
    kept = sorted(values)[1 : len(values) - max(0, 1 - num_failed)]
    return sum(kept) / len(kept) if kept else None


# --- MLPerf's own checkers ---


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Turn logging off: the checkers log a great deal."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def check(log: Path, ruleset: str) -> str | None:
    """Return what the compliance checker objects to in a log, in one line; None: nothing."""
    from mlperf_logging.compliance_checker import mlp_compliance

    mlp_compliance.enqueued_configs.clear()  # left there by a check that failed
    checker = mlp_compliance.make_checker("training", ruleset, quiet=False, werror=False)
    try:
        with _silence():
            if checker.check_file(str(log), f"training_{ruleset}/common.yaml"):
                return None
    except KeyError as error:  # an evaluation has only one metric
        return f"MLPerf's checker ({ruleset}) refuses its log: an evaluation without {error}"
    lines = [*checker.overwritable.values(), *checker.not_overwritable][0].splitlines()
    tests = [line for line in lines if line.startswith("failed test:")]  # the line before it says where in the log
    said = " ".join(" ".join([lines[0].rstrip(":"), *(f"({test})" for test in tests[:1])]).split())
    return f"MLPerf's checker ({ruleset}) refuses its log: {said}"


def reference_points(folder: Path, ruleset: str) -> tuple[bool, str, float]:
    """Ask the checker of reference points about the result_*.txt of a folder.

    Returns:
        whether they pass; the checker's reason; the factor on the mean time.
    """
    from mlperf_logging.rcp_checker import rcp_checker

    with _silence():
        passed, said, factor = rcp_checker.check_directory(
            str(folder), "training", ruleset, False, False, rcp_pass="pruned_rcps"
        )
    return bool(passed), said, float(factor)
