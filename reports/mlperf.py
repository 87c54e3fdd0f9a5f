"""Combine runs into an MLPerf result: the olympic mean of their times, the reference points, a submission.

    python -m reports.mlperf runs/mlperf-256-*                     # -> mlperf_report/
    python -m reports.mlperf runs/mlperf-256-* out=submission

A result is ten runs of one configuration with ten seeds. One of them may fail; it counts as the slowest. In the closed
division none may have been restarted. A run that cannot count is named with the reason.
`reports.page` draws the runs over the reference's 40. Written are

    ORG/results/SYSTEM/BENCHMARK/result_0.txt ...  the logs, by seed; BENCHMARK: stable_diffusion or flux1
    ORG/systems/SYSTEM.json                        the system, as far as environment.json knows it
    ORG/benchmarks/BENCHMARK/implementations/easel/README.md

and every missing field is named. MLCommons' own check of a submission:

    python -m mlperf_logging.package_checker OUT/ORG training RULESET

Exit code: 0, or 2 where the runs cannot be combined (each problem on a line of stderr).
Source: mlcommons/training_policies at d73e20f1, training_rules.adoc; mlcommons/logging at 7bbf7926, system_desc_checker.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from common.command import command
from common.errors import ConfigError, Refused
from common.files import read_regular, write_atomic, write_json
from common.log import log, render_table
from reports.formatting import read_words
from run_folder.files import CONFIG, RUN_ONLY_KEYS, masked_text, read_config
from run_folder.history import read_history
from run_folder.mlperf_log import LOG_FILE, events_to_fault

NUM_RUNS = 10  # of a result (mlperf_logging.benchmark_meta)
MAX_FAILED = 1
STATUS = "Research, Development, or Internal (RDI)"  # until it is submitted
SYSTEM_FIELDS = """
submitter division status system_name number_of_nodes host_processors_per_node host_processor_model_name
host_processor_core_count host_processor_vcpu_count host_processor_frequency host_processor_caches
host_processor_interconnect host_memory_capacity host_storage_type host_storage_capacity host_networking
host_networking_topology host_memory_configuration accelerators_per_node accelerator_model_name
accelerator_host_interconnect accelerator_frequency accelerator_on-chip_memories accelerator_memory_configuration
accelerator_memory_capacity accelerator_interconnect accelerator_interconnect_topology cooling hw_notes framework
other_software_stack operating_system sw_notes
""".split()  # noqa: SIM905
VERSIONS = {"mosaicml": "Composer", "mosaicml-streaming": "Streaming", "diffusers": "diffusers"}
VERSIONS |= {"cuda": "CUDA", "cudnn": "cuDNN"}


@dataclass(frozen=True)
class ReportKeys:
    """The keys of this command."""

    out: str = "mlperf_report"
    """Folder of the submission."""


@command(keys=ReportKeys)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""

    def wrong(words: Sequence[str]) -> list[str]:
        return [f"{word} is not a folder. Give runs: runs/NAME ..." for word in words if not Path(word).is_dir()]

    folders, keys = read_words(argv, ReportKeys, wrong)
    combine(folders, Path(keys.out))
    return 0


def combine(folders: Sequence[str], out: Path) -> None:
    """Report on the runs in some folders, see the head of this file.

    Raises:
        ConfigError: none of them is a run, or together they are no result's.
        Refused: `out` cannot be written.
    """
    runs, broken = read_runs(folders)
    fix = "A result needs one configuration and ten seeds: leave one of them out."
    with_log = [run for run in runs if run.values("seed")]
    problems = [f"{text}. {fix}" for text in [*differences(with_log), *same_seeds(with_log)]] if with_log else []
    if not runs:
        no_run = f"{', '.join(folders) or 'nothing'}: no run (config.yaml)"
        problems = [f"{text}. No run is left. Give others: runs/NAME ..." for text in broken or [no_run]]
    if problems:
        raise ConfigError(problems)
    for text in broken:
        log.info(f"{text}. Left out.")
    report(runs, out)


def read_runs(paths: Sequence[str]) -> tuple[list[Run], list[str]]:
    """Return the runs among folders, each once, sorted by name, and the broken files of the others."""
    runs, broken = {}, []
    for path in paths:
        folder = Path(path).resolve()
        try:
            run = read_run(folder)
        except (ValueError, OSError) as error:
            broken.append(str(error))
            continue
        if run is None:
            log.info(f"{path}: not a run, it has no config.yaml. Left out.")
        else:
            runs[folder] = run
    return sorted(runs.values(), key=lambda run: run.name), broken


def report(runs: Sequence[Run], out: Path) -> None:
    """Print the verdict on each run and on the result; write the submission."""
    problems = {run.folder: run.problem() for run in runs}
    for run in runs:
        if problem := problems[run.folder]:
            print(f"run={run.name} left out: {problem}.")
    counted = sorted((run for run in runs if problems[run.folder] is None), key=lambda run: run.seed)
    if not counted:
        return
    print(table(counted))
    try:
        folder = write_submission(counted, out)
    except OSError as error:
        problem = f"out: {error.filename or out} cannot be written: {error.strerror}"
        raise Refused(f"{problem}. Give a folder that this user may write in: out=FOLDER.") from error
    print_result(counted, folder)


def table(runs: Sequence[Run]) -> str:
    """Return the runs that count as a table for the terminal, in their order."""
    rows = []
    for run in runs:
        status = "success" if run.has_passed else "aborted"
        rows.append((run.name, run.seed, status, run.images, f"{run.minutes:.3f}", f"{run.init_sec:.1f}"))
    return render_table(("run", "seed", "status", "images", "minutes", "init_sec"), rows, "lrlrrr")


def print_result(runs: Sequence[Run], folder: Path) -> None:
    """Print the means of the runs that count, and whether they are a result.

    Args:
        folder: with their result_*.txt.
    """
    passed = [run for run in runs if run.has_passed]
    num_failed = len(runs) - len(passed)
    reasons = []
    if len(runs) != NUM_RUNS:
        reasons.append(f"{len(runs)} runs of {NUM_RUNS}")
    if num_failed > MAX_FAILED:
        names = ", ".join(run.name for run in runs if not run.has_passed)
        reasons.append(f"{num_failed} runs failed ({names}), the rules allow {MAX_FAILED}")
    if passed and not any(run.is_scored_throughout for run in passed):
        rule = "the rules ask for that of one run: composer eval.py RUN without from_images"
        reasons.append(f"no run has scores at every point up to its first pass; {rule}")
    minutes = olympic_mean([run.minutes for run in passed], num_failed)
    images = olympic_mean([run.images for run in passed], num_failed)
    figures = f"runs={len(runs)} failed={num_failed}"
    if minutes is not None and images is not None:
        figures += f" olympic_mean_minutes={minutes:.4f} olympic_mean_images={images:.0f}"
    print(figures)
    division, ruleset = runs[0].logged_value("division"), runs[0].ruleset
    if not reasons and division == "closed" and minutes is not None:
        is_slow_enough, message, factor = reference_points(folder, ruleset)
        print(
            f"reference points of {ruleset}: {message}: {'passed' if is_slow_enough else 'FAILED'}; score x {factor:.4f}"
        )
        if not is_slow_enough:
            fewer = "it converges in fewer images than the reference points allow"
            reasons.append(
                f"MLPerf has no reference point for it: {message}" if message.startswith("Missing") else fewer
            )
        minutes *= factor
    elif division == "open":
        print("reference points: the open division has none")
    commits = sorted({str(run.environment.get("commit")) for run in runs})
    if len(commits) > 1:
        print(f"commits: the runs come from {len(commits)}: {', '.join(commits)}")
    if reasons:
        print(f"no result: {'; '.join(reasons)}.")
    else:
        print(f"result: {minutes:.4f} minutes, {division} division, ruleset {ruleset}.")


# --- a submission's folders ---


def write_submission(runs: Sequence[Run], out: Path) -> Path:
    """Write the logs, the system and a README in a submission's layout; name the missing fields.

    Returns:
        the folder with the result_*.txt.
    """
    system = system_of(runs[0])
    org, name = system["submitter"] or "ORG", system["system_name"] or "SYSTEM"
    results = out / org / "results" / name / runs[0].benchmark
    results.mkdir(parents=True, exist_ok=True)
    for old in results.glob("result_*.txt"):
        old.unlink()
    for number, run in enumerate(runs):
        shutil.copyfile(run.folder / LOG_FILE, results / f"result_{number}.txt")
    systems = out / org / "systems"
    systems.mkdir(exist_ok=True)
    by_hand = _read_system(systems / f"{name}.json")  # fields filled in since the last report stay
    filled = {field: system[field] or by_hand.get(field, "") for field in SYSTEM_FIELDS}
    write_json(systems / f"{name}.json", filled)
    code = out / org / "benchmarks" / runs[0].benchmark / "implementations" / "easel"
    code.mkdir(parents=True, exist_ok=True)
    write_atomic(code / "config.yaml", masked_text(runs[0].folder))
    commit = runs[0].environment.get("commit")
    command = "composer benchmark.py config.yaml seed=SEED run_name=NAME"
    text = f"Easel at commit {commit}. A run, with the seed of its log: {command}\n"
    write_atomic(code / "README.md", text)
    missing = [field for field in SYSTEM_FIELDS if not filled[field]]
    print(f"written: {results}/result_*.txt ({len(runs)}), {systems / name}.json, {code}/README.md")
    print(f"missing in {name}.json: {', '.join(missing) or 'nothing'}.")
    others = ["the source code (implementations/easel)"]
    if runs[0].values("cache_clear") == [False]:
        others.append("cleared caches before each run (its log says false)")
    print(f"missing next to it: {'; '.join(others)}.")
    return results


def _read_system(path: Path) -> dict[str, Any]:
    """Return the system description of an earlier report, or nothing."""
    try:
        return {**json.loads(read_regular(path))} if path.is_file() else {}
    except (OSError, ValueError, TypeError):
        log.info(f"{path} cannot be read. It is written again.")
        return {}


def system_of(run: Run) -> dict[str, str]:
    """Return the system description of a run's machine; a field that the record does not know is empty."""
    known, sockets = run.environment, run.environment.get("cpu_sockets")
    device = str(known.get("device") or "")
    is_gpu = not device.startswith("CPU ")

    def per_processor(key: str) -> Any:
        return known[key] // sockets if known.get(key) and sockets else None

    versions = [f"{text} {version}" for key, text in VERSIONS.items() if (version := known.get(f"{key}_version"))]
    stated: dict[str, Any] = {
        "submitter": run.logged_value("org"),
        "division": run.logged_value("division"),
        "status": STATUS,
        "system_name": run.logged_value("platform"),
        "number_of_nodes": next(iter(run.values("number_of_nodes")), None),
        "host_processors_per_node": sockets,
        "host_processor_model_name": known.get("cpu") or (None if is_gpu else device[4:].split(",")[0]),
        "host_processor_core_count": per_processor("cpu_cores"),
        "host_processor_vcpu_count": per_processor("cpu_threads"),
        "host_memory_capacity": _gib(known.get("memory_gib")),
        "accelerators_per_node": next(iter(run.values("accelerators_per_node")), None),
        "accelerator_model_name": device if is_gpu else "none",
        "accelerator_memory_capacity": _gib(known.get("device_memory_gib")),
        "framework": f"PyTorch {known['torch_version']}" if known.get("torch_version") else None,
        "other_software_stack": ", ".join(versions),
        "operating_system": known.get("os") or known.get("platform"),
        "sw_notes": f"Easel, commit {known['commit']}" if known.get("commit") else "Easel",
    }
    return {field: "" if stated.get(field) is None else str(stated[field]) for field in SYSTEM_FIELDS}


def _gib(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f} GiB"


# --- a run as the MLPerf report sees it ---


@dataclass(frozen=True)
class Rules:
    """What a benchmark asks of a run's log. A report reads runs alone, so it has these for itself (families/mlperf.py)."""

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
    *RUN_ONLY_KEYS,
    *("seed", "max_duration", "data.local", "loggers.", "measure.", "eval.batch_size", "cost."),
)
SAME_MACHINE = ("device", "num_devices")
"""Keys of environment.json in which they may not."""


@dataclass(frozen=True)
class Run:
    """A run's record and log, and what they say of a result."""

    folder: Path
    config: Mapping[str, Any]
    """Key -> value of config.yaml and overrides.yaml."""
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

    def logged_value(self, key: str) -> Any:
        """Return a key of the submission: from the log, else from the configuration, which a resume may have changed."""
        return next(iter(self.values(f"submission_{key}")), self.config.get(f"mlperf.{key}"))

    @property
    def benchmark(self) -> str:
        """As its log says, else as its network is."""
        usual = "flux1" if self.config.get("model.family") == "flux" else "stable_diffusion"
        return next((name for name in self.values("submission_benchmark") if name in RULES), usual)

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
        by_images: dict[int, dict[str, Any]] = {}
        for event in self.events or ():
            if event["key"] == "eval_accuracy":
                images = event["metadata"]["samples_count"]
                of_point = by_images.setdefault(images, {"images": images, **dict.fromkeys(self.rules.target)})
                of_point[event["metadata"]["metric"].lower()] = event["value"]
        return [by_images[images] for images in sorted(by_images)]

    @property
    def foreign_scores(self) -> list[str]:
        """Reasons why its scores do not compare with the reference's."""
        num = next(iter(self.values("eval_samples")), self.rules.num_images)
        ends = [event["metadata"] for event in self.events or () if event["key"] == "eval_stop"]
        others = sorted({end[key] for end in ends for key, name in NETWORKS.items() if end.get(key, name) != name})
        scorers = [f"{num:,} images a {'score' if self.rules.is_late else 'validation'}"]
        scorers = [] if num == self.rules.num_images else scorers
        return scorers + ([f"scored by {' and '.join(others)}"] if others else [])

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
        return check(self.folder / LOG_FILE, self.ruleset)

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
        return self._submission_problem() or self._end_problem() or (self.checked if self.has_passed else None)

    def _submission_problem(self) -> str | None:
        """What the rules of a submission forbid; None: nothing."""
        is_closed = self.logged_value("division") == "closed"
        for key in ("org", "platform"):
            if (name := self.logged_value(key)) is not None and not re.fullmatch(r"\w[\w.+ -]*", str(name)):
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
            problem = f"trained on {self.values('train_samples')[0]:,} samples"
            return f"{problem}: no result of the closed division, which asks for {self.rules.num_samples:,}"
        return None

    def _end_problem(self) -> str | None:
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
    """Return the run of a folder, or None if it is not a run's. Raises ValueError: names a broken file."""
    if not (folder / CONFIG).is_file():
        return None
    history = read_history(folder)
    for text in history.missing:
        if "cannot be read" in text or text.startswith(str(folder)):
            raise ValueError(f"{folder}/{text.removeprefix(f'{folder}/').rstrip('.')}")
    events, fault = events_to_fault(folder / LOG_FILE)
    return Run(folder, read_config(folder), history.environment, events, fault)


def differences(runs: Sequence[Run]) -> list[str]:
    """Say how the other runs of a result differ from the first."""
    first, problems = runs[0], []
    for run in runs[1:]:
        keys = [key for key in dict.fromkeys([*first.config, *run.config]) if not key.startswith(MAY_DIFFER)]
        differing = _differing(first.config, run.config, keys)
        differing |= _differing(first.environment, run.environment, SAME_MACHINE)
        if not differing and run.header:  # the configuration may have changed since the log began
            differing = _differing(first.header, run.header, first.header)
        problems += [f"{key}: {a} in {first.folder}, {b} in {run.folder}" for key, (a, b) in differing.items()]
    return problems


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any], keys: Iterable[str]) -> dict[str, tuple[Any, Any]]:
    return {key: (ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)}


def same_seeds(runs: Sequence[Run]) -> list[str]:
    """Say which runs share a seed."""
    first = {run.seed: run for run in reversed(runs)}
    same = [(run, other) for run in runs if (other := first[run.seed]) is not run]
    return [f"seed: {run.seed} in {other.folder} and in {run.folder}" for run, other in same]


def olympic_mean(values: Sequence[float], num_failed: int = 0) -> float | None:
    """Return the mean without the least and the greatest; a failed run is the greatest. None: nothing is left."""
    middle = sorted(values)[1 : len(values) - max(0, 1 - num_failed)]
    return sum(middle) / len(middle) if middle else None


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
    message = " ".join(" ".join([lines[0].rstrip(":"), *(f"({test})" for test in tests[:1])]).split())
    return f"MLPerf's checker ({ruleset}) refuses its log: {message}"


def reference_points(folder: Path, ruleset: str) -> tuple[bool, str, float]:
    """Ask the checker of reference points about the result_*.txt of a folder.

    Returns:
        whether they pass; the checker's reason; the factor on the mean time.
    """
    from mlperf_logging.rcp_checker import rcp_checker

    with _silence():
        passed, message, factor = rcp_checker.check_directory(
            str(folder), "training", ruleset, False, False, rcp_pass="pruned_rcps"
        )
    return bool(passed), message, float(factor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
