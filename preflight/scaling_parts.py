"""The parts of the record of preflight.scaling: errors, published rows, time to the target, and records laid over."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from preflight import scaling_devices as devices
from preflight.scaling_fit import Held, Interval, Law
from preflight.scaling_law import REFERENCE_TFLOP, Setup
from preflight.scaling_rows import SETUPS, TITLES, Row, setup_of
from preflight.scaling_run import Facts, eval_sec
from preflight.scaling_target import Choice, Convergence, batches_of, best, choice, convergence
from zoo.mlperf_flux import FLUX
from zoo.mlperf_rules import Benchmark
from zoo.mlperf_sd import SD

MOSAICML_IMAGES = (
    2_867_200_000  # 1,126,400,000 at 256 px and 1,740,800,000 at 512: their own days are these at the rate of 512
)
MOSAICML_PRICE = 160_000 / 79_000  # USD an A100-hour: their "$160k, 79k A100-hours", of January 2023
EVALUATIONS = (
    ("mlperf_h100_v41", 8, 1125.0),
    ("mlperf_h200_v41", 8, 1088.0),
    ("mlperf_b200_v50", 8, 713.0),
    ("mlperf_gb200", 8, 742.0),
    ("mlperf_h100_v41", 64, 143.0),
)
"""Series, devices, median seconds of an evaluation of 30,000 images in MLPerf's logs. NVIDIA's own of 8 H100 has 1,130 of
generation and 65 of scoring."""
SIZES = ((8, 31), (32, 127), (128, 255), (256, 4096), (8, 4096))
"""Numbers of devices, least and most, whose errors are told apart; the last are all."""
ALONE = 64  # images of a batch on one GPU
NEAR = 0.1  # by which a network's FLOPs may differ from the benchmark's for its images to the target to hold


def row_of(held: Held) -> dict[str, Any]:
    """Return a held-out place for the record."""
    return {
        "series": held.series,
        "title": TITLES[held.series],
        "num": held.num,
        "global_batch_size": held.batch,
        "systems": len(held.systems),
        "images_per_sec": held.measured,
        **_ends("predicted", held.predicted),
        "error": held.error,
        "fitted_error": held.fitted,
        **({} if held.alone is None else {**_ends("alone", held.alone), "alone_error": held.alone_error}),
    }


def _ends(name: str, of: Interval) -> dict[str, float]:
    return {name: of.value, f"{name}_low": of.low, f"{name}_high": of.high}


def errors_of(law: Law, held: Sequence[Held], num_rows: int) -> dict[str, Any]:
    """Return what the errors come to: of places held out one by one, and of those predicted from the smallest alone."""
    each = np.abs([of.error for of in held])
    inside = [of.predicted.low <= of.measured <= of.predicted.high for of in held]
    return {
        "rows": num_rows,
        "fitted": len(law.theta),
        "places": len(held),
        "median": float(np.median(each)),
        "worst": float(each.max()),
        "covered": float(np.mean(inside)),
        "alone": [_alone(held, *ends) for ends in SIZES],
        "noise": law.noise,
        "by_doubling": law.by_doubling,
    }


def _alone(held: Sequence[Held], least: int, most: int) -> dict[str, Any]:
    """Return the errors of places of these numbers of devices, each predicted from the smallest of its series."""
    own = [(of.alone, of.measured) for of in held if of.alone is not None and least <= of.num <= most]
    off = [abs(told.value / measured - 1) for told, measured in own]
    inside = [told.low <= measured <= told.high for told, measured in own]
    found = {"places": len(own), "median": float(np.median(off)), "worst": max(off), "covered": float(np.mean(inside))}
    return {"from": least, "to": most, **found}


def published(held: Sequence[Held]) -> dict[str, Any]:
    """Return NVIDIA's rows with their speed-up, each with the prediction."""
    of = {name: [each for each in held if each.series == name] for name in SETUPS}
    nvidia = []
    for name in ("nemo_a100", "nemo_h100"):
        first = of[name][0].measured
        for each in of[name]:
            row = {"title": TITLES[name], "nodes": each.num // 8, "images_per_sec": each.measured}
            nvidia.append({**row, "times": each.measured / first, **_ends("predicted", each.predicted)})
    return {"nvidia": nvidia}


def mosaicml(held: Sequence[Held], images: int) -> dict[str, Any]:
    """Return MosaicML's rows, each with the prediction; days, device-hours and money of so many images at their rate."""
    rows = []
    for each in (each for each in held if each.series == "mosaicml_online_512"):
        hours = images / each.measured / 3600
        cost = each.num * hours * MOSAICML_PRICE
        row = {"num": each.num, "days": hours / 24, "gpu_hours": each.num * hours, "cost": cost}
        rows.append({**row, "images_per_sec": each.measured, **_ends("predicted", each.predicted)})
    return {"mosaicml_images": MOSAICML_IMAGES, "mosaicml": rows}


def evaluation_check(law: Law) -> tuple[list[dict[str, Any]], float]:
    """Set the seconds of an evaluation by FLOPs beside MLPerf's logs.

    Returns:
        a row for each: at training's utilisation, and at the share of it that the others ask for; and that share of all.
    """
    told = {}
    for name, num, said in EVALUATIONS:
        tflops = float(np.exp(law.theta[law.series.index(name)])) * REFERENCE_TFLOP
        told[name, num] = (said, eval_sec(num, tflops))
    logs = {place: float(np.log(by_flops / said)) for place, (said, by_flops) in told.items()}
    found = []
    for place, (said, by_flops) in told.items():
        share = float(np.exp(np.mean([of for other, of in logs.items() if other != place])))
        row = {"title": TITLES[place[0]], "num": place[1], "seconds": said, "by_flops": by_flops}
        found.append({**row, "predicted": by_flops / share, "error": by_flops / share / said - 1})
    return found, float(np.exp(np.mean([*logs.values()])))


def single(law: Law, gpu: str) -> dict[str, Any]:
    """Return the prediction for a GPU alone that trains SD2 at 512 px from moments, by its card's series."""
    card = devices.CARDS[gpu]
    setup = dataclasses.replace(SETUPS[card.series], fixed="plain")
    return {"gpu": gpu, "global_batch_size": ALONE, **_ends("predicted", law.predict(setup, card.series, 1, ALONE))}


# --- time to the target ---


def targets(
    law: Law, rows: Sequence[Row], own: tuple[Law, str, Setup, str, Facts], nums: Sequence[int], price: float | None
) -> list[dict[str, Any]]:
    """Return time, device-hours and money to the target over the batch: of SD on H100, of FLUX on GB200, and of the run.

    Args:
        own: the run's law, rate, setup, GPU and facts; price: of an hour of that GPU.
    """
    h100, gb200 = "mlperf_h100_v41", "flux_gb200"
    of_run, rate, setup, gpu, facts = own
    of_sd = dict.fromkeys((8, 64, 512, 1024), SETUPS[h100])
    of_flux = {row.num: setup_of(row) for row in rows if row.series == gb200}
    prices = {name: price if gpu == name else None for name in ("H100", "GB200")}
    named = "Stable Diffusion v2, H100 as in MLPerf 4.1", "FLUX.1, GB200 as in MLPerf 5.1"
    found = [
        _target(named[0], SD, "4.1.0", Tried(law, h100, of_sd, price=prices["H100"])),
        _target(named[1], FLUX, "5.1.0", Tried(law, gb200, of_flux, price=prices["GB200"])),
    ]
    found[0]["published"] = [_point(row) for row in rows if row.minutes and row.series.startswith("mlperf_h100")]
    found[1]["published"] = [_point(row) for row in rows if row.minutes and row.series == gb200]
    if abs(facts.tflop / REFERENCE_TFLOP - 1) <= NEAR:
        title = f"Stable Diffusion v2, this run on {gpu}"
        tried = Tried(of_run, rate, dict.fromkeys(nums, setup), facts.step.exchange, price)
        found.append({**_target(title, SD, None, tried), "published": []})
    return found


@dataclasses.dataclass(frozen=True)
class Tried:
    """Whose batches are tried: a device as fast as `rate`, its setup by the number of devices, and the price of its hour."""

    law: Law
    rate: str
    setups: Mapping[int, Setup]
    exchange: devices.Exchange = devices.AS_DDP
    price: float | None = None


def _point(row: Row) -> dict[str, Any]:
    return {
        "title": TITLES[row.series],
        "system": row.system,
        "device": row.device,
        "num": row.num,
        "global_batch_size": row.batch,
        "minutes": row.minutes,
        "device_hours": row.num * (row.minutes or 0.0) / 60,
    }


def _target(title: str, benchmark: Benchmark, ruleset: str | None, of: Tried) -> dict[str, Any]:
    images = convergence(benchmark, ruleset)
    curves = []
    for num in of.setups:
        tried = [_choice(benchmark, images, of, num, batch) for batch in batches_of(images, num, 64)]
        if (first := best(tried)) is not None:
            shown = [_shown(each, of.price) for each in tried]
            curves.append({"num": num, "best": _shown(first, of.price), "tried": shown})
    e, c = images.parameters()
    points = [
        {
            "global_batch_size": point.global_batch_size,
            "mean_images": point.mean_images,
            "least": point.fastest_images,
            "most": point.slowest_images,
            "images": images.images(point.global_batch_size).value,
        }
        for point in benchmark.points_of(ruleset)
    ]
    law_of = {"e": e.value, "e_low": e.low, "e_high": e.high, "c": c.value, "c_low": c.low, "c_high": c.high}
    ruleset = ruleset or benchmark.newest
    return {
        "title": title,
        "benchmark": benchmark.name,
        "target": benchmark.target_said,
        "ruleset": ruleset,
        "price": of.price,
        "images": law_of,
        "points": points,
        "curves": curves,
    }


def _choice(benchmark: Benchmark, images: Convergence, of: Tried, num: int, batch: int) -> Choice:
    setup = of.setups[num]
    speed = of.law.predict(setup, of.rate, num, of.exchange.batch(setup, num, batch))
    counts = benchmark is FLUX  # its evaluations are in the time; those of SD may be made afterwards
    each = benchmark.eval_samples / 3 / speed.value  # one forward pass a sample, a third of a training step

    def extra(seen: float) -> float:
        return seen / benchmark.every_images * each if counts else 0.0

    return choice(num, batch, speed, images.images(batch), extra)


def _shown(of: Choice, price: float | None) -> dict[str, Any]:
    hours = of.seconds.times(of.num / 3600)
    return {
        "global_batch_size": of.batch,
        "images_per_sec": of.images_per_sec.value,
        "images": of.images.value,
        **_ends("minutes", of.seconds.times(1 / 60)),
        **_ends("device_hours", hours),
        **({} if price is None else _ends("cost", hours.times(price))),
    }


# --- records laid over ---


def laid_over(law: Law, records: Sequence[devices.Measured], links: tuple[str, str, int] | None) -> dict[str, Any]:
    """Return records of several numbers of devices beside perfect scaling and, on GPUs, beside the prediction.

    Args:
        links: as `Measured.setup` takes them; None: the card's usual ones.
    """
    first, card = records[0], devices.card_of(records[0].device)
    rows = []
    for run in records:
        speed = run.num * run.speed.middle
        row = {"name": run.name, "device": run.device, "num": run.num, "global_batch_size": run.batch}
        row |= {"images_per_sec": speed, "least": run.num * run.speed.least, "greatest": run.num * run.speed.greatest}
        row["perfect"] = first.num * first.speed.middle * _cores(run) / _cores(first)
        if card is not None and not first.is_cpu:
            setup = first.step.over(*links) if links else first.step.on(first.card)
            tuned, rate = first.tuned(law, setup)
            row |= _ends("predicted", run.step.predict(tuned, rate, setup, run.num, run.batch))
        rows.append(row)
    what = "CPU processes that share one machine's cores, joined by gloo" if first.is_cpu else str(first.device)
    return {"what": what, "is_cpu": first.is_cpu, "rows": rows}


def _cores(run: devices.Measured) -> int:
    """Devices, on a CPU threads: two processes of one thread have no more than one process of two."""
    threads = re.search(r", (\d+) threads$", run.device)
    return run.num * (int(threads[1]) if threads else 1)
