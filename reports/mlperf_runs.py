"""A run's record and its MLPerf log as a report reads them, and whether the run can count in a result."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

TOKEN = ":::MLLOG "
BENCHMARK = "stable_diffusion"
NUM_IMAGES = 30_000  # of each score of the benchmark
NETWORKS = {"inception": "inception-2015-12-05", "clip_model": "ViT-H-14"}
"""What the benchmark's scores are made with, as an evaluation's line names it."""

EVENT = {"time_ms", "key", "value", "metadata"}

# Two runs of one result may differ in these keys: which run it is, where it lies, and what is shown of it.
MAY_DIFFER = ("run_name", "run_folder", "seed", "max_duration", "data.local", "loggers.", "measure.", "eval.batch_size")
SAME_MACHINE = ("device", "num_devices")
"""Of environment.json."""


@dataclass(frozen=True)
class Run:
    """What a run has left.

    config: key -> value; events: of the log, None where it has none; is_cut: its last line is not whole.
    """

    folder: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    recorded: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]] | None
    is_cut: bool

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def log(self) -> Path:
        return self.folder / "mlperf.log"

    def values(self, key: str) -> list[Any]:
        """Return the values of a key's events, in order."""
        return [event["value"] for event in self.events or () if event["key"] == key]

    @property
    def seed(self) -> int:
        return self.values("seed")[0]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Images, fid and clip of each evaluation, by images: of the log, and of the record where that knows more."""
        found = {line["images"]: {key: line.get(key) for key in ("images", "fid", "clip")} for line in self.recorded}
        for event in self.events or ():
            if event["key"] == "eval_accuracy":
                images = event["metadata"]["samples_count"]
                of_point = found.setdefault(images, {"images": images, "fid": None, "clip": None})
                of_point[event["metadata"]["metric"].lower()] = event["value"]
        return [found[images] for images in sorted(found)]

    @property
    def label(self) -> str:
        """Its name and global batch, and what keeps its scores from being compared with the reference's."""
        num = next(iter([*self.values("eval_samples"), *(line.get("num_images") for line in self.recorded)]), None)
        networks = [key for key in ("inception", "clip") if self.config.get(f"eval.{key}") == "random"]
        others = {line[key] for line in self.recorded for key, name in NETWORKS.items() if line.get(key, name) != name}
        said = [f"batch {self.config['global_batch_size']}"]
        said += [f"{num:,} images a score"] if num not in (None, NUM_IMAGES) else []
        said += ["a fixture"] if self.values("fixture") else []
        said += [f"random {' and '.join(networks)}"] if networks else []
        said += [f"scored by {' and '.join(sorted(others - {None}))}"] if others - {None} else []
        return f"{self.name} ({', '.join(said)})"

    @property
    def first_pass(self) -> dict[str, Any] | None:
        """The first evaluation that meets the run's own target."""
        fid, clip = self.config.get("target.fid"), self.config.get("target.clip")
        for line in self.evaluations:
            fid_met = fid is None or (line["fid"] is not None and line["fid"] <= fid)
            if fid_met and (clip is None or (line["clip"] is not None and line["clip"] >= clip)):
                return line
        return None

    @property
    def stops(self) -> list[Mapping[str, Any]]:
        return [event for event in self.events or () if event["key"] == "run_stop"]

    @property
    def has_passed(self) -> bool:
        return bool(self.stops) and self.stops[-1]["metadata"]["status"] == "success"

    @property
    def minutes(self) -> float:
        """From run_start to run_stop: the time to train."""
        [start] = [event["time_ms"] for event in self.events or () if event["key"] == "run_start"]
        return (self.stops[-1]["time_ms"] - start) / 60_000

    @cached_property
    def checked(self) -> str | None:
        """What MLPerf's own checker has against the log, in a line; None: nothing."""
        return check(self.log, self.config["mlperf.ruleset"])

    def problem(self) -> str | None:
        """Why this run cannot count in a result, not even as one that failed; None where it can."""
        if self.events is None:
            return "has no mlperf.log (mlperf.enabled=true)"
        if self.is_cut:
            return "its log ends in the middle of a line: the run was killed. Start it again, with the same command"
        if not self.values("eval_accuracy") and (
            self.has_passed or not self.stops
        ):  # a loss of NaN ends before the first
            return "its log has no evaluation: composer eval.py RUN makes them (eval.when=after)"
        if not self.stops:
            return "its log is open: the run goes on, or composer eval.py RUN has not come to its end"
        if len(self.stops) > 1 or len(self.values("run_start")) != 1:
            return "its log has more than one run in it"
        if self.values("fixture"):
            return f"a fixture: {self.values('fixture')[0]}"
        if self.values("restart") and self.values("submission_division") == ["closed"]:
            where = next(event["metadata"]["samples_count"] for event in self.events if event["key"] == "restart")
            return f"was restarted at {where:,} images: no result of the closed division"
        ended = self.stops[-1]["metadata"]["samples_count"]
        if self.has_passed and (first := self.first_pass) is not None and first["images"] != ended:
            return f"its run_stop is at {ended:,} images, but it passed first at {first['images']:,}"
        return self.checked if self.has_passed else None


def read_run(folder: Path) -> Run | None:
    """Return what lies in a folder, or None where it is no run's. Raises ValueError: a file of it cannot be read."""
    if not (folder / "config.yaml").is_file():
        return None
    try:
        config = dict(_leaves(OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))))
    except (YAMLError, OSError, AttributeError) as error:
        raise ValueError(f"{folder / 'config.yaml'} cannot be read: {' '.join(str(error).split())}") from error
    if "global_batch_size" not in config:
        raise ValueError(f"{folder / 'config.yaml'} has no global_batch_size: it is no run's")
    lines = _whole_lines(folder / "metrics.jsonl")[0]
    events, is_cut = _whole_lines(folder / "mlperf.log", TOKEN) if (folder / "mlperf.log").is_file() else (None, False)
    return Run(
        folder,
        config,
        _json(folder / "environment.json"),
        _json(folder / "summary.json"),
        [line for line in lines if line.get("evaluation") and not line.get("partial")],
        events,
        is_cut,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _whole_lines(path: Path, token: str = "") -> tuple[list[dict[str, Any]], bool]:
    """Return the lines up to one that is not whole, and whether there is one."""
    found = []
    for line in path.read_text(errors="replace").splitlines(keepends=True) if path.is_file() else ():
        try:
            content = json.loads(line.removeprefix(token))
        except ValueError:
            return found, True
        if not (line.startswith(token) and line.endswith("\n") and (not token or content.keys() >= EVENT)):
            return found, True
        found.append(content)
    return found, False


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(runs: Sequence[Run]) -> list[str]:
    """Say in what runs differ that are to be one result; the first run is what the others are compared with."""
    first, found = runs[0], []
    for run in runs[1:]:
        keys = dict.fromkeys([*first.config, *run.config])
        for key in (key for key in keys if not key.startswith(MAY_DIFFER)):
            ours, theirs = first.config.get(key), run.config.get(key)
            if ours != theirs:
                found.append(f"{key}: {ours} in {first.folder}, {theirs} in {run.folder}")
        for key in SAME_MACHINE:
            ours, theirs = first.environment.get(key), run.environment.get(key)
            if ours != theirs:
                found.append(f"{key}: {ours} in {first.folder}, {theirs} in {run.folder}")
    return found


def same_seeds(runs: Sequence[Run]) -> list[str]:
    """Say which runs have the seed of another."""
    first: dict[int, Run] = {}
    found = []
    for run in runs:
        other = first.setdefault(run.seed, run)
        if other is not run:
            found.append(f"seed: {run.seed} in {other.folder} and in {run.folder}")
    return found


def olympic_mean(values: Sequence[float], num_failed: int = 0) -> float | None:
    """Return the mean without the best (least) and the worst; a run that failed is the worst. None: nothing is left."""
    kept = sorted(values)[1 : len(values) - max(0, 1 - num_failed)]
    return sum(kept) / len(kept) if kept else None


# --- MLPerf's own checkers ---


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """The checkers speak through logging, at length."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def check(log: Path, ruleset: str) -> str | None:
    """Return what the compliance checker has against a log, in a line; None: nothing."""
    from mlperf_logging.compliance_checker import mlp_compliance

    mlp_compliance.enqueued_configs.clear()  # what a check that broke off has left there
    checker = mlp_compliance.make_checker("training", ruleset, quiet=False, werror=False)
    try:
        with _silence():
            if checker.check_file(str(log), f"training_{ruleset}/common.yaml"):
                return None
    except KeyError as error:  # an evaluation of one metric
        return f"MLPerf's checker ({ruleset}) refuses its log: an evaluation without {error}"
    said = [*checker.overwritable.values(), *checker.not_overwritable]
    return f"MLPerf's checker ({ruleset}) refuses its log: {' '.join(said[0].splitlines()[0].split())}"


def reference_points(folder: Path, ruleset: str) -> tuple[bool, str, float]:
    """Ask the checker of reference points about the result_*.txt of a folder.

    Returns:
        whether they pass; in its own words why; what the mean time is multiplied with.
    """
    from mlperf_logging.rcp_checker import rcp_checker

    with _silence():
        passed, said, factor = rcp_checker.check_directory(
            str(folder), "training", ruleset, False, False, rcp_pass="pruned_rcps"
        )
    return bool(passed), said, float(factor)
