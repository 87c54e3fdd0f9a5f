"""What a run takes on 8 to 4,096 GPUs: images/s, efficiency, days, GPU-hours and cost, each with its interval.

    python -m scaling                                             # MosaicML's 512 px recipe on H200, by published rates
    python -m scaling RUN.yaml runs/on-one-gpu                    # a run, by the record of one GPU
    python -m scaling RUN.yaml a.json b.json                      # records of several numbers of GPUs, laid over
    python -m scaling gpu=H100 price_per_gpu_hour=2.5 price_date=2026-11-01

A law of one step (scaling/law.py) is fitted to published figures (reports/scaling_published.csv).
Its error is that of rows that it had not seen. A record says how fast a device is; without one, a published series does, at
the same TFLOP/s. The record of the command, scaling.json, has all figures; plots of speed and of time to the target lie
next to it (scaling/report.py). docs/scaling.md has the law and its errors.

Exit code: 0, or 2 where words, records or keys are not possible.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.command import command
from common.command_line import YAML, Problem, parse_command_line
from common.errors import ConfigError, Refused
from common.files import write_json, write_problem
from config import load, to_written_dict, to_yaml
from families.mlperf import FLUX, SD
from run_folder.environment import environment
from run_folder.history import rounded
from scaling import devices, estimates, report
from scaling.devices import CARDS, MeasuredRun, Predictor
from scaling.estimates import RunSpec, ScalingConfig, time_to_target
from scaling.law import (
    NAMES,
    PARAMETERS,
    REFERENCE_TFLOP,
    SETUPS,
    SHARES,
    TITLES,
    HeldOutPlace,
    Interval,
    Law,
    fit,
    hold_out_places,
    jacobian,
    read_rows,
    usable_rows,
)
from training.builders import measure_step_cost
from training.config import ALIASES, RunConfig, resolve

RECIPE = Path(__file__).resolve().parent.parent / "yamls/mosaicml_512.yaml"
SCHEMA = 2
AT = 1024
"""GPUs of the row whose sensitivity is reported."""
EVALUATIONS = (
    *(("mlperf_h100_v41", 8, 1125.0), ("mlperf_h200_v41", 8, 1088.0), ("mlperf_b200_v50", 8, 713.0)),
    *(("mlperf_gb200", 8, 742.0), ("mlperf_h100_v41", 64, 143.0)),
)
"""Series, devices, median seconds of an evaluation of 30,000 images in MLPerf's logs. NVIDIA's own of 8 H100 has 1,130 of
generation and 65 of scoring."""
SIZES = ((1, 31), (32, 127), (128, 255), (256, 4096), (1, 4096))
"""Numbers of devices, least and most, whose errors are reported separately; the last are all."""
NEAR = 0.1  # by which a network's FLOPs may differ from the benchmark's for its images to the target to hold


@dataclass(frozen=True)
class ScalingCommand:
    """A command line: a run's YAML, paths of records, and keys."""

    yaml: str
    record_paths: tuple[str, ...]
    config: ScalingConfig
    print_config: bool = False


def problems_of(config: ScalingConfig) -> list[Problem]:
    """Return every problem across the keys."""
    problems = []
    if not config.gpus:
        problems.append(Problem("gpus: []. Possible: numbers from 1 to 65,536, e.g. [8,64,512].", ("gpus",)))
    if (config.price_per_gpu_hour is None) != (config.price_date is None):
        text = "only one of price_per_gpu_hour and price_date is given. A price is of a day: give both, or neither."
        problems.append(Problem(f"price_date: {text}", ("price_date", "price_per_gpu_hour")))
    if problem := write_problem(Path(config.results).parent):
        problems.append(Problem(f"results: {problem}", ("results",)))
    return problems


def read_command(argv: Sequence[str]) -> ScalingCommand:
    """Read the command line, and no record. Raises ConfigError: each problem of it."""
    line = parse_command_line(argv, {}, takes_arguments=True)
    config = load(ScalingConfig, line, check=problems_of)
    yamls = [word for word in line.arguments if word.endswith(YAML)]
    if len(yamls) > 1:
        raise ConfigError([f"command line: {len(yamls)} YAML files given. Possible: one run. Give its records."])
    record_paths = tuple(word for word in line.arguments if word not in yamls)
    return ScalingCommand(yamls[0] if yamls else str(RECIPE), record_paths, config, line.print_config)


def read_run(words: ScalingCommand) -> tuple[RunSpec, RunConfig]:
    """Return the spec of the run of a YAML, traced without a GPU, and its configuration. Raises ConfigError."""
    run = load(RunConfig, parse_command_line([words.yaml], ALIASES), check=lambda config: [])
    if run.precision is None:
        run = dataclasses.replace(run, precision="bf16")  # null is float32 on a CPU, and this is about GPUs
    try:
        resolved = resolve(run)
        cost = measure_step_cost(dataclasses.replace(resolved, attention="flash"))  # a CPU may attend in float32
        return estimates.run_spec_of(resolved, cost, Path(words.yaml).stem, words.config.images), resolved
    except ValueError as error:
        raise ConfigError([f"{words.yaml}: {error}"]) from error


def read_records(sources: Sequence[str], gpu: str | None) -> list[MeasuredRun]:
    """Read the records that the prediction begins at. Raises ConfigError: mixed, or not of this GPU."""
    records = [devices.read_measured(source) for source in sources]
    problems = devices.problems_of(records) if records else []
    for record in records:
        if record.card is None or gpu not in (None, record.card):
            possible = f"Possible: {gpu or ', '.join(CARDS)}. Give its gpu, or another record."
            problems.append(f"{record.name}: is of {record.device}. {possible}")
    if problems:
        raise ConfigError(problems)
    return sorted(records, key=lambda record: record.num)


@functools.cache
def _fit_law() -> tuple[Law, list[HeldOutPlace], int]:
    """Return the law, its held-out places, and the number of rows that it is fitted to."""
    law, held = hold_out_places(used := usable_rows(read_rows()), fit(used))
    return law, held, len(used)


def make_record(words: ScalingCommand) -> dict[str, Any]:
    """Return the record of the command: the law and its errors, the run's rows, the published ones beside them."""
    config = words.config
    records = read_records(words.record_paths, config.gpu)
    (spec, run), (law, held, num_rows) = read_run(words), _fit_law()
    gpu = config.gpu or (records[0].card if records else None) or "H200"
    card, usual = CARDS[gpu], CARDS[gpu].links
    links = (config.node_link or usual[0], config.cluster_link or usual[1], config.domain or usual[2])
    differs = estimates.differences(run, records[0]) if records else []
    if records:
        measured, of_run = (records[0].predictor(law, links, step) for step in (records[0].step, spec.step))
        rate = f"the record {records[0].name} of {records[0].num} {records[0].device}"
    else:
        of_run = spec.step.published(law, card, links)
        rate = f"published: {TITLES[spec.step.series_for(card)]}, at the same TFLOP/s. No record was given"
    evaluation, nums = evaluation_check(law), sorted(set(config.gpus))
    base, *rows = estimates.estimate_all(of_run, spec, [estimates.GPUS_A_NODE, *nums], config, evaluation["share"])
    return {
        "schema": SCHEMA,
        **environment(),
        "measured": "scaling",
        "config": to_written_dict(config),
        "run": {**dataclasses.asdict(spec), "gpu": gpu, "links": list(links), "rate": rate, "differs": differs},
        "law": law.as_record(),
        "parameters": _parameters(law, of_run, spec),
        "rows": [held_out_row(each) for each in held],
        "errors": errors_of(law, held, num_rows),
        "base": base,
        "estimates": rows,
        "targets": times_to_targets(law, of_run, gpu, spec, nums, config.price_per_gpu_hour),
        "records": compare_with_predictions(law, records, measured, card, links) if records else [],
        "evaluation": evaluation,
    }


# --- parts of the record ---


def held_out_row(held: HeldOutPlace) -> dict[str, Any]:
    """Return a held-out place for the record."""
    row = {"series": held.series, "title": TITLES[held.series], "num": held.num, "global_batch_size": held.batch}
    row |= {"systems": held.systems, "images_per_sec": held.measured, **held.predicted.named("predicted")}
    row |= {"error": held.error(held.predicted), "fitted_error": held.fitted}
    return row | ({**held.alone.named("alone"), "alone_error": held.error(held.alone)} if held.alone else {})


def errors_of(law: Law, held: Sequence[HeldOutPlace], num_rows: int) -> dict[str, Any]:
    """Return what the errors come to: of places held out one by one, and of those predicted from the smallest alone."""

    def errors(kind: str, least: int, most: int) -> dict[str, Any]:
        pairs = [(place, getattr(place, kind)) for place in held if getattr(place, kind) and least <= place.num <= most]
        differences = np.abs([place.error(interval) for place, interval in pairs])
        inside = float(np.mean([interval.low <= place.measured <= interval.high for place, interval in pairs]))
        return {
            "places": len(pairs),
            "median": float(np.median(differences)),
            "worst": float(differences.max()),
            "covered": inside,
        }

    sizes = [
        {
            "from": least,
            "to": most,
            **{kind: errors(kind, least, most) for kind in ("predicted", "alone")},
        }
        for least, most in SIZES
    ]
    of_law = {"fitted": len(law.theta), "noise": law.noise, "by_doubling": law.by_doubling}
    return {"rows": num_rows, **of_law, "sizes": sizes}


def _parameters(law: Law, predictor: Predictor, spec: RunSpec) -> list[dict[str, Any]]:
    """Return the shared parameters, and how much each changes the images/s of `AT` GPUs; the run's rate comes first.

    for_1_percent: the change in % for 1 % more of it. for_1_deviation: for one deviation more.
    """
    points = predictor.points([(AT, max(spec.batch, AT))])
    slope, rate = jacobian(predictor.law.theta, points)[0], int(points.rate[0])
    by_deviation = 100 * np.expm1(slope * np.sqrt(np.diag(predictor.law.covariance)))
    rows: list[dict[str, Any]] = [
        {"name": "rate", "for_1_percent": float(slope[rate]), "for_1_deviation": float(by_deviation[rate])}
    ]
    for name, one, more in zip(NAMES, slope[-len(NAMES) :], by_deviation[-len(NAMES) :], strict=True):
        prior, odds = PARAMETERS[name], 1 - predictor.law.parameter(name).value if name in SHARES else 1
        row = {"name": name, "text": prior.text, "prior": prior.value, "factor": prior.factor}
        row |= {"for_1_percent": float(one / odds), "for_1_deviation": float(more)}
        rows.append(row | law.parameter(name).named("value"))
    return rows


def evaluation_check(law: Law) -> dict[str, Any]:
    """Compare the seconds of an evaluation by FLOPs with MLPerf's logs.

    Returns:
        the share of training's utilization that all ask for; and a row for each, by FLOPs and at the share of the others.
    """

    def at_training(name: str, num: int) -> float:
        return estimates.eval_sec(num, math.exp(law.theta[law.series.index(name)]) * REFERENCE_TFLOP)

    logs, rows = [math.log(at_training(name, num) / seconds) for name, num, seconds in EVALUATIONS], []
    for index, (name, num, seconds) in enumerate(EVALUATIONS):
        by_flops, share = at_training(name, num), math.exp(np.mean(logs[:index] + logs[index + 1 :]))
        row = {"title": TITLES[name], "num": num, "seconds": seconds, "by_flops": by_flops}
        rows.append({**row, "predicted": by_flops / share, "error": by_flops / share / seconds - 1})
    return {"share": math.exp(np.mean(logs)), "rows": rows}


def times_to_targets(
    law: Law, of_run: Predictor, gpu: str, spec: RunSpec, nums: Sequence[int], price: float | None
) -> list[dict[str, Any]]:
    """Return time, device-hours and money to the target over the batch: of SD on H100, of FLUX on GB200, and of the run.

    Args:
        price: of an hour of the run's GPU.
    """
    rows, h100, gb200 = read_rows(), "mlperf_h100_v41", "flux_gb200"
    sd, flux = ([row for row in rows if row.series.startswith(name)] for name in ("mlperf_h100", gb200))
    of_sd = {num: Predictor(law, h100, SETUPS[h100]) for num in (8, 64, 512, 1024)}
    of_flux = {row.num: Predictor(law, gb200, dataclasses.replace(SETUPS[gb200], tensor=row.tensor)) for row in flux}
    sd_price, flux_price = (price if gpu == card else None for card in ("H100", "GB200"))
    parts = [
        time_to_target("Stable Diffusion v2, H100 as in MLPerf 4.1", SD, "4.1.0", of_sd, sd, sd_price),
        time_to_target("FLUX.1, GB200 as in MLPerf 5.1", FLUX, "5.1.0", of_flux, flux, flux_price),
    ]
    if abs(spec.step.tflop / REFERENCE_TFLOP - 1) <= NEAR:
        of_nums = dict.fromkeys(nums, of_run)
        parts.append(time_to_target(f"Stable Diffusion v2, this run on {gpu}", SD, None, of_nums, [], price))
    return parts


def compare_with_predictions(
    law: Law, records: Sequence[MeasuredRun], first: Predictor, card: devices.GPUModel, links: devices.Links
) -> list[dict[str, Any]]:
    """Return records beside perfect scaling, what the first one predicts, and what the published series does."""
    rows = []
    for run in records:
        row: dict[str, Any] = {"name": run.name, "device": run.device, "num": run.num, "global_batch_size": run.batch}
        speeds = Interval(run.speed.middle, run.speed.least, run.speed.greatest).times(run.num)
        row |= {**speeds.named("images_per_sec"), "perfect": run.num * records[0].speed.middle}
        row |= first.predict(run.num, run.batch).named("predicted")
        rows.append(row | run.step.published(law, card, links).predict(run.num, run.batch).named("published"))
    return rows


def rounded_all(value: Any) -> Any:
    """Round every number of a record to six digits; null where there is none: a time without an end."""
    if isinstance(value, dict):
        return {key: part if key == "law" else rounded_all(part) for key, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return [rounded_all(part) for part in value] if isinstance(value, list | tuple) else rounded(value)


@command(keys=ScalingConfig, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    words = read_command(argv)
    if words.print_config:
        print(to_yaml(words.config), end="")
        return 0
    began, results = time.monotonic(), Path(words.config.results)
    try:
        record = {**rounded_all(make_record(words)), "seconds": round(time.monotonic() - began, 1)}
        results.parent.mkdir(parents=True, exist_ok=True)
        write_json(results, record)
        plots = report.draw(record, results.parent)
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}. Check the path.") from error
    except ValueError as error:
        raise Refused(str(error)) from error
    print(report.text_of(record))
    print(f"written: {', '.join(map(str, [results, *plots]))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
