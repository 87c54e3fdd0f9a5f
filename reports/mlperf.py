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

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.command import command
from cli.errors import ConfigError, Refused
from cli.files import read_regular, write_json, write_whole
from cli.log import log
from cli.table import as_table
from record.config_file import masked_text
from record.mlperf_events import NAME
from reports.marks import read_words
from reports.mlperf_runs import Run, differences, olympic_mean, read_run, reference_points, same_seeds

NUM_RUNS = 10  # of a result (mlperf_logging.benchmark_meta)
MAX_FAILED = 1
STATUS = "Research, Development, or Internal (RDI)"  # until somebody submits it
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


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    places, keys = read_words(
        argv,
        ReportKeys,
        lambda places: [
            f"{place} is no folder. Give runs: runs/NAME ..." for place in places if not Path(place).is_dir()
        ],
    )
    combine(places, Path(keys.out))
    return 0


def combine(places: Sequence[str], out: Path) -> None:
    """Report on the runs in some folders, see the head of this file.

    Raises:
        ConfigError: none of them is a run, or together they are no result's.
        Refused: `out` cannot be written.
    """
    runs, broken = read_runs(places)
    fix = "A result needs one configuration and ten seeds: leave one of them out."
    with_log = [run for run in runs if run.values("seed")]
    problems = [f"{text}. {fix}" for text in [*differences(with_log), *same_seeds(with_log)]] if with_log else []
    if not runs:
        no_run = f"{', '.join(places) or 'nothing'}: no run (config.yaml)"
        problems = [f"{text}. No run is left. Give others: runs/NAME ..." for text in broken or [no_run]]
    if problems:
        raise ConfigError(problems)
    for text in broken:
        log.info(f"{text}. Left out.")
    report(runs, out)


def read_runs(places: Sequence[str]) -> tuple[list[Run], list[str]]:
    """Return the runs among folders, each once, sorted by name, and the broken files of the others."""
    found, broken = {}, []
    for place in places:
        folder = Path(place).resolve()
        try:
            run = read_run(folder)
        except (ValueError, OSError) as error:
            broken.append(str(error))
            continue
        if run is None:
            log.info(f"{place}: not a run, it has no config.yaml. Left out.")
        else:
            found[folder] = run
    return sorted(found.values(), key=lambda run: run.name), broken


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
        given = f"out: {error.filename or out} cannot be written: {error.strerror}"
        raise Refused(f"{given}. Give a folder that this user may write in: out=FOLDER.") from error
    print_result(counted, folder)


def table(runs: Sequence[Run]) -> str:
    """Return the runs that count as a table for the terminal, in their order."""
    rows = []
    for run in runs:
        status = "success" if run.has_passed else "aborted"
        rows.append((run.name, run.seed, status, run.images, f"{run.minutes:.3f}", f"{run.init_sec:.1f}"))
    return as_table(("run", "seed", "status", "images", "minutes", "init_sec"), rows, "lrlrrr")


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
        how = "the rules ask for that of one run: composer eval.py RUN without from_images"
        reasons.append(f"no run has scores at every point up to its first pass; {how}")
    minutes = olympic_mean([run.minutes for run in passed], num_failed)
    images = olympic_mean([run.images for run in passed], num_failed)
    figures = f"runs={len(runs)} failed={num_failed}"
    if minutes is not None and images is not None:
        figures += f" olympic_mean_minutes={minutes:.4f} olympic_mean_images={images:.0f}"
    print(figures)
    division, ruleset = runs[0].said("division"), runs[0].ruleset
    if not reasons and division == "closed" and minutes is not None:
        is_slow_enough, said, factor = reference_points(folder, ruleset)
        print(
            f"reference points of {ruleset}: {said}: {'passed' if is_slow_enough else 'FAILED'}; score x {factor:.4f}"
        )
        if not is_slow_enough:
            fewer = "it converges in fewer images than the reference points allow"
            reasons.append(f"MLPerf has no reference point for it: {said}" if said.startswith("Missing") else fewer)
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
        shutil.copyfile(run.folder / NAME, results / f"result_{number}.txt")
    systems = out / org / "systems"
    systems.mkdir(exist_ok=True)
    by_hand = _read_system(systems / f"{name}.json")  # fields filled in since the last report stay
    filled = {field: system[field] or by_hand.get(field, "") for field in SYSTEM_FIELDS}
    write_json(systems / f"{name}.json", filled)
    code = out / org / "benchmarks" / runs[0].benchmark / "implementations" / "easel"
    code.mkdir(parents=True, exist_ok=True)
    write_whole(code / "config.yaml", masked_text(runs[0].folder))
    commit = runs[0].environment.get("commit")
    command = "composer benchmark.py config.yaml seed=SEED run_name=NAME"
    text = f"Easel at commit {commit}. A run, with the seed of its log: {command}\n"
    write_whole(code / "README.md", text)
    missing = [field for field in SYSTEM_FIELDS if not filled[field]]
    print(f"written: {results}/result_*.txt ({len(runs)}), {systems / name}.json, {code}/README.md")
    print(f"missing in {name}.json: {', '.join(missing) or 'nothing'}.")
    others = ["the source code (implementations/easel)"]
    if runs[0].values("cache_clear") == [False]:
        others.append("cleared caches before each run (its log says false)")
    print(f"missing beside it: {'; '.join(others)}.")
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

    versions = [f"{text} {found}" for key, text in VERSIONS.items() if (found := known.get(f"{key}_version"))]
    stated: dict[str, Any] = {
        "submitter": run.said("org"),
        "division": run.said("division"),
        "status": STATUS,
        "system_name": run.said("platform"),
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
