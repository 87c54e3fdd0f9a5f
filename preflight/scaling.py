"""What a run takes on 8 to 4,096 GPUs: images/s, efficiency, days, GPU-hours and cost, each with its interval.

    python -m preflight.scaling                                     # MosaicML's 512 px recipe on H200, by published rates
    python -m preflight.scaling RUN.yaml runs/on-one-gpu            # a run, by the record of one GPU
    python -m preflight.scaling RUN.yaml a.json b.json              # records of several numbers of GPUs, laid over
    python -m preflight.scaling gpu=H100 price_per_gpu_hour=2.5 price_date=2026-11-01

A law of one step (preflight/scaling_law.py) is fitted to published figures (reports/scaling_published.csv).
Its error is that of rows that it had not seen. A record says how fast a device is; without one, a published series does, at
the same TFLOP/s. The record of the command, scaling.json, has all figures; pictures of speed and of time to the target lie
beside it (reports/scaling.py). docs/scaling.md has the law, its errors and the keys.

Exit code: 0, or 2 where words, records or keys are not possible.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cli.command import command
from cli.command_line import Problem, parse_command_line
from cli.errors import ConfigError, Refused
from cli.files import write_json
from cli.limits import kind_of_path, limited, of_form, shown
from config import as_written, load, to_yaml
from preflight import scaling_devices as devices
from preflight import scaling_run as runs
from preflight.limits import unwritable
from preflight.run import cost_of
from preflight.scaling_failures import LLAMA_HOURS
from preflight.scaling_fit import NAMES, Held, Law, fit, held_out, sensitivity
from preflight.scaling_law import PARAMETERS, Setup, points_of
from preflight.scaling_parts import (
    errors_of,
    evaluation_check,
    laid_over,
    mosaicml,
    published,
    row_of,
    single,
    targets,
)
from preflight.scaling_rows import TITLES, fitted, read_rows
from record.environment import environment
from record.summary import rounded
from reports import scaling as report
from training.run_config import ALIASES, RunConfig, resolve

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "yamls/mosaicml_512.yaml"
OVERLAID = ("reports/results/emoji_cpu_1_rank.json", "reports/results/emoji_cpu_2_ranks.json")
SCHEMA = 1
AT = 1024
"""GPUs of the row whose sensitivity is told."""


def _is_date(text: str) -> str | None:
    """Return a year, month or day, of which there is one."""
    if not re.fullmatch(r"20\d\d(-\d\d){0,2}", text):
        return None
    try:
        datetime.date.fromisoformat(f"{text}-01-01"[:10])
    except ValueError:
        return None
    return text


@dataclass(frozen=True)
class ScalingConfig:
    """The keys of this command."""

    gpu: Literal["A100", "H100", "H200", "B200", "GB200"] | None = None
    """Kind of GPU. null: the records', and H200 without one."""
    gpus: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    """Numbers of GPUs."""
    node_link: Literal["nvlink3", "nvlink4", "nvlink5", "pcie4", "pcie5"] | None = None
    """Link within a domain. null: the GPU's usual one."""
    cluster_link: (
        Literal["infiniband_hdr", "infiniband_ndr", "ethernet_3200", "ethernet_1600", "ethernet_400", "ethernet_100"]
        | None
    ) = None
    """Link between domains; Ethernet by the Gbit/s of a node of 8. null: the GPU's usual one."""
    domain: int | None = limited(None, 1, 4096)
    """GPUs that the inner link joins. null: 8, of GB200 72."""
    images: int | None = limited(None, 1)
    """Images to train. null: those of the run's max_duration."""
    price_per_gpu_hour: float | None = limited(None, 0.0, above=True)
    """Price of a GPU for an hour, in any currency. null: no cost is told."""
    price_date: str | None = of_form(None, _is_date, "a date: 2026, 2026-11 or 2026-11-25")
    """Of the price, as 2026-11-25; it belongs to a price."""
    mtbf_hours: float = limited(round(LLAMA_HOURS, -2), 1.0)
    """Hours between two failures of a GPU; the default is Llama 3's training: arXiv:2407.21783, section 3.3.4."""
    resume_sec: float = limited(300.0, 0.0)
    """Seconds from a failure until training goes on. The default is of the 80 to 340 that MLPerf's submissions start in."""
    write_gib_per_sec: float = limited(1.0, 0.0, above=True)
    """Speed at which a checkpoint is written."""
    holds_up: bool = True
    """Training waits while a checkpoint is written."""
    eval_gpu_sec: float | None = limited(None, 0.0, above=True)
    """Seconds of a measured evaluation times its GPUs. null: by its FLOPs."""
    store_mb_per_sec: float | None = limited(None, 0.0, above=True)
    """What the store gives each node. null: no limit is reckoned."""
    cores: int | None = limited(None, 1, 4096)
    """Processor cores of a node for its loaders. null: no limit is reckoned."""
    laid_over: str | None = None
    """Records of one run on several numbers of devices, with commas. CPUs' too. null: the given ones, or a committed pair."""
    results: str = "scaling/scaling.json"
    """File of the record; the pictures lie beside it."""


def problems_of(config: ScalingConfig) -> list[Problem]:
    """Return every problem of the keys alone."""
    found = []
    if not config.gpus or any(type(num) is not int or not 1 <= num <= 65536 for num in config.gpus):
        text = f"{list(config.gpus)}. Possible: numbers from 1 to 65,536, e.g. [8,64,512]."
        found.append(Problem(f"gpus: {text}", ("gpus",)))
    if (config.price_per_gpu_hour is None) != (config.price_date is None):
        given, missing = ("price_per_gpu_hour", "price_date")[:: 1 if config.price_date is None else -1]
        text = f"{given} is given, {missing} is not. A price is of a day: give both, or neither."
        found.append(Problem(f"{missing}: {text}", (missing,)))
    folder, kind = Path(config.results).parent, kind_of_path(config.results)
    if kind not in (None, "file"):
        text = (
            f"{shown(config.results, 300)} is a {kind}. Possible: a file, e.g. {Path(config.results) / 'scaling.json'}."
        )
        found.append(Problem(f"results: {text} Give one.", ("results",)))
    elif text := unwritable(folder):
        found.append(Problem(f"results: {text}", ("results",)))
    return found


@dataclass(frozen=True)
class Words:
    """A command line: a run's YAML, places of records, and keys."""

    yaml: str
    places: tuple[str, ...]
    config: ScalingConfig
    is_shown: bool = False


def read_words(argv: Sequence[str]) -> Words:
    """Read the command line, and no record. Raises ConfigError: each problem of it."""
    keys = [word for word in argv if word.startswith("--") or ("=" in word and kind_of_path(word) is None)]
    others = [word for word in argv if word not in keys]
    yamls = [word for word in others if word.endswith((".yaml", ".yml"))]
    line = parse_command_line(keys, {})
    config = load(ScalingConfig, line, check=problems_of)
    if len(yamls) > 1:
        raise ConfigError(
            [f"command line: {len(yamls)} YAML files given. Possible: one run. Give the others' records."]
        )
    places = tuple(word for word in others if word not in yamls)
    return Words(yamls[0] if yamls else str(RECIPE), places, config, line.print_config)


def facts_of(words: Words) -> tuple[runs.Facts, dict[str, Any]]:
    """Return the facts of the run of a YAML, traced without a GPU, and its settings. Raises ConfigError: it is no run."""
    run = load(RunConfig, parse_command_line([words.yaml], ALIASES), check=lambda config: [])
    if run.precision is None:
        run = dataclasses.replace(run, precision="bf16")  # null is float32 on a CPU, and this is about GPUs
    name = Path(words.yaml).stem
    try:
        resolved = resolve(run)
        return runs.facts_of(resolved, cost_of(resolved), name, words.config.images), runs.settings_of(resolved)
    except ValueError as error:
        raise ConfigError([f"{words.yaml}: {error}"]) from error


def records_of(places: Sequence[str], gpu: str | None) -> list[devices.Measured]:
    """Read the records that the prediction begins at. Raises ConfigError: mixed, of a CPU, or of another GPU."""
    try:
        found = [devices.read_measured(place) for place in places]
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    problems = devices.problems_of(found) if found else []
    for record in found:
        card = devices.card_of(record.device)
        if record.is_cpu:
            said = f"{record.name}: is of a {record.device}, and a CPU's speed says nothing of a GPU's"
            problems.append(f"{said}. Give records of a GPU; those of a CPU can be seen with laid_over=A.json,B.json.")
        elif card is None or gpu not in (None, card):
            wanted = gpu or ", ".join(devices.CARDS)
            problems.append(
                f"{record.name}: is of {record.device}. Possible: {wanted}. Give its gpu, or another record."
            )
    if problems:
        raise ConfigError(problems)
    return sorted(found, key=lambda record: record.num)


def overlaid(words: Words, given: Sequence[devices.Measured]) -> list[devices.Measured]:
    """Return the records that are laid over. Raises ConfigError: one alone, or of several configurations."""
    places = words.config.laid_over.split(",") if words.config.laid_over else []
    try:
        found = [devices.read_measured(place) for place in places]
    except ValueError as error:
        raise ConfigError([f"laid_over: {error}"]) from error
    if len(found) == 1:
        raise ConfigError(
            ["laid_over: one record only. Possible: 2 and more, of other numbers of devices. Give another."]
        )
    if not found:
        found = list(given) if len(given) > 1 else [devices.read_measured(str(ROOT / place)) for place in OVERLAID]
    if problems := devices.problems_of(found):
        raise ConfigError([f"laid_over: {text}" for text in problems])
    return sorted(found, key=lambda record: record.num)


@functools.cache
def _fitted() -> tuple[Law, list[Held], int]:
    """Return the law, its held-out places, and the number of rows that it is fitted to."""
    law, held = held_out(used := fitted(read_rows()), fit(used))
    return law, held, len(used)


def reckoned(words: Words) -> dict[str, Any]:
    """Return the record of the command: the law and its errors, the run's rows, the published ones beside them."""
    config = words.config
    given = records_of(words.places, config.gpu)
    over, (facts, settings) = overlaid(words, given), facts_of(words)
    law, held, used = _fitted()
    gpu = config.gpu or (devices.card_of(given[0].device) if given else None) or "H200"
    card = devices.CARDS[gpu]
    links = (config.node_link or card.node_link, config.cluster_link or card.cluster_link, config.domain or card.domain)
    setup = facts.step.over(*links)
    tuned, rate, by = _rated(law, given, card, links, facts)
    checks, share = evaluation_check(law)
    nums = sorted(set(config.gpus))
    base, *estimates = _estimates(config, tuned, rate, setup, facts, [runs.GPUS_A_NODE, *nums], share)
    run = {**dataclasses.asdict(facts), "gpu": gpu, "links": list(links), "rate": by}
    known, passed_over = devices.gpu_records()
    return {
        "schema": SCHEMA,
        **environment(),
        "measured": "scaling",
        "config": as_written(config),
        "run": {**run, "differs": runs.differences(settings, given[0]) if given else []},
        "law": law.as_record(),
        "parameters": _parameters(law),
        "rows": [row_of(each) for each in held],
        "errors": errors_of(law, held, used),
        "base": base,
        "estimates": estimates,
        "published": {**mosaicml(held, facts.images), **published(held)},
        "sensitivity": _sensitivity(tuned, rate, setup, facts),
        "targets": targets(law, read_rows(), (tuned, rate, setup, gpu, facts), nums, config.price_per_gpu_hour),
        "laid_over": laid_over(law, over, links if over == given else None),
        "evaluation": {"share": share, "rows": checks},
        "single": single(law, "H200"),
        "gpu_records": [devices.against(law, run) for run in known],
        "passed_over": passed_over,
    }


def _rated(
    law: Law, given: Sequence[devices.Measured], card: devices.Card, links: tuple[str, str, int], facts: runs.Facts
) -> tuple[Law, str, str]:
    """Return the law with the rate of the run, its name, and what it is by: the first record, or the card's series."""
    if not given:
        series = card.series_for(facts.step.over(*links))
        tuned, rate = devices.rated(law, series, facts.tflop)
        return tuned, rate, f"published: {TITLES[series]}, at the same TFLOP/s. No record was given"
    first = given[0]
    try:
        tuned, rate = first.tuned(law, first.step.over(*links))
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    return _carried(tuned, first.tflop / facts.tflop), rate, f"the record {first.name} of {first.num} {first.device}"


def _estimates(
    config: ScalingConfig, law: Law, rate: str, setup: Setup, facts: runs.Facts, nums: Sequence[int], share: float
) -> list[dict[str, Any]]:
    """Return a row for each number of GPUs; times: the speed over that of the first one, a node."""
    figures, rates = runs.read_figures(), _rates(config)
    rows = [runs.estimate(law, rate, setup, facts, num, rates, figures, share) for num in nums]
    return [{**row, **runs.over_one_node(law, rate, setup, facts, row, rows[0])} for row in rows]


def _carried(law: Law, factor: float) -> Law:
    """Scale the last rate: another network at the same TFLOP/s."""
    theta = law.theta.copy()
    theta[len(law.series) - 1] += math.log(factor)
    return dataclasses.replace(law, theta=theta)


def _rates(config: ScalingConfig) -> runs.Rates:
    return runs.Rates(
        config.mtbf_hours,
        config.resume_sec,
        config.write_gib_per_sec,
        config.holds_up,
        config.eval_gpu_sec,
        config.store_mb_per_sec,
        config.cores,
        config.price_per_gpu_hour,
    )


def _parameters(law: Law) -> list[dict[str, Any]]:
    found = []
    for name in NAMES:
        prior, value = PARAMETERS[name], law.parameter(name)
        ends = {"value": value.value, "value_low": value.low, "value_high": value.high}
        found.append({"name": name, "text": prior.text, "prior": prior.value, "factor": prior.factor, **ends})
    return found


def _sensitivity(law: Law, rate: str, setup: Setup, facts: runs.Facts) -> dict[str, Any]:
    place, batch = law.series.index(rate), facts.step.exchange.batch(setup, AT, max(facts.batch, AT))
    of = sensitivity(law, points_of([(setup, AT, batch, place)]), len(law.series))
    return {
        "num": AT,
        "of": [{"name": name, "for_1_percent": one, "for_1_deviation": dev} for name, (one, dev) in of.items()],
    }


def rounded_all(value: Any) -> Any:
    """Round every number of a record to six digits; null where there is none: a time without an end."""
    if isinstance(value, dict):
        return {key: of if key == "law" else rounded_all(of) for key, of in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return [rounded_all(of) for of in value] if isinstance(value, list | tuple) else rounded(value)


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    words = read_words(argv)
    if words.is_shown:
        print(to_yaml(words.config), end="")
        return 0
    began = time.monotonic()
    record = {**rounded_all(reckoned(words)), "seconds": round(time.monotonic() - began, 1)}
    results = Path(words.config.results)
    try:
        results.parent.mkdir(parents=True, exist_ok=True)
        write_json(results, record)
        pictures = report.draw(record, results.parent)
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}. Check the path.") from error
    print(report.text_of(record))
    print(f"written: {', '.join(map(str, [results, *pictures]))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
