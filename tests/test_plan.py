"""preflight/plan.py: every number of the plan against its formula; and the text where a number cannot be computed."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
from test_mlperf import REFERENCE

from common.log import readable_time
from families.mlperf import SD
from preflight import plan
from training import memory
from training.memory import Cost

KINDS = dict(activation_gib_per_image=0.875, activation_gib_once=1.5, frozen_gib=0.75)
COST = Cost(trained_parameters=865_910_724, frozen_parameters=424_041_703, flops_per_image=2.454e12, **KINDS)
RUN = {**REFERENCE, "device_train_microbatch_size": 4, "precision": "bf16", "max_duration": "2000ba", "compile": "off"}
RUN |= {"model.family": "sd2", "model.variant": "mlperf", "measure.expected_images_per_sec": None}
RUN |= {"model.frozen_device": "device", "ema.device": "model"}


def lines(cost: Cost = COST, *, on_a_gpu: Cost | None = None, ranks: int = 8, ema: bool = False, **values) -> list[str]:
    """The plan's lines without their "# "; a dot of a key is written as two underlines."""
    changed = {key.replace("__", "."): value for key, value in values.items()}
    room = "this GPU (N) has 80.0, of which 76.0 can be used"
    text = plan.describe(cost, on_a_gpu or cost, {**RUN, **changed}, num_ranks=ranks, room=room, ema_on_device=ema)
    assert text.endswith("\n") and all(line.startswith("# ") for line in text.splitlines())
    return [line[2:] for line in text.splitlines()]


def test_the_plan_of_the_benchmark_on_eight_gpus():
    printed = lines(measure__expected_images_per_sec=1100.0)
    expected = """
parameters: 865,910,724 trained, 424,041,703 frozen
compute: 2.45 TFLOP an image and training step (denoiser forward and backward, encoders forward)
global batch: 256 images = 8 ranks x 8 passes x 4 images
      18.7  sum; this GPU (N) has 80.0, of which 76.0 can be used
full checkpoint: 9.68 GiB
max_duration: 2000ba, 512,000 images, 7.76 minutes
target: FID 90 or less and CLIP 0.15 or more on one checkpoint; one every 2,000 batches (512,000 images)
  global batch 256, ruleset 5.0.0, 20 runs on 4xDGX-H100, lr_per_image 2.8e-07; mean without best and worst:
    mean     1,706,667 images, 6,667 batches, 25.9 minutes
    slowest  2,048,000 images, 8,000 batches, 31 minutes
no deviation from the reference's constants (data, encoders and precision are not compared)"""
    assert [line for line in printed if line in expected.splitlines()] == expected.splitlines()[1:]
    assert set(plan.smallest_num_cards(COST, RUN)) < set(printed)  # see tests/test_memory.py
    large = dataclasses.replace(COST, trained_parameters=10**11)
    assert set(plan.smallest_num_cards(large, RUN)) < set(lines(on_a_gpu=large)) - set(printed)


def test_the_rows_of_the_memory_sum_to_what_the_check_before_a_run_asks_for(monkeypatch):
    monkeypatch.setattr(memory.dist, "get_world_size", lambda: 8)
    of_this_device = "\n".join(lines(ema=True, ema__enabled=True)).partition("smallest number of cards")[0]
    rows = {name: float(gib) for gib, name in re.findall(r"^ +([\d.]+)  ([\w ]+)", of_this_device, re.M)}
    total = rows.pop("sum")
    assert rows.keys() >= {"EMA", "DDP buckets", "weights"} and sum(rows.values()) == pytest.approx(total, abs=0.05)
    assert total == pytest.approx(COST.memory_gib(4, ema=True), abs=0.05)
    # EMA weights in host memory are in the checkpoint, not on the device.
    printed = lines(ema=False, ema__enabled=True, ema__device="cpu")
    assert not any("EMA" in line for line in printed) and "full checkpoint: 12.9 GiB" in printed


@pytest.mark.parametrize(("rate", "global_batch_size"), [(3.0, 256), (40_000.0, 2048)])
def test_time_is_images_over_rate(rate, global_batch_size):
    point = SD.find_point(global_batch_size)
    values = {"optimizer__lr_per_image": point.lr_per_image, "measure__expected_images_per_sec": rate}
    printed = lines(global_batch_size=global_batch_size, **values)
    for name, images in {"mean": point.mean_images, "fastest": point.fastest_images}.items():
        batches = math.ceil(images / global_batch_size)
        row = f"    {name:7} {images:10,.0f} images, {batches:,} batches, {readable_time(images / rate)}"
        assert row in printed


@pytest.mark.parametrize("rate", [None, float("nan")])
def test_without_a_rate_a_line_names_the_key_to_give_and_no_time_is_printed(rate):
    printed = lines(measure__expected_images_per_sec=rate, global_batch_size=10)
    assert "time: give measure.expected_images_per_sec (over all ranks) for an estimate" in printed
    assert not any(re.search(r"\d (seconds|minutes|hours|days)", line) for line in printed)
    unknown = "max_duration: 2ep; how many images that is cannot be known before the data is read"
    assert unknown in lines(max_duration="2ep")


def test_times_are_in_the_unit_that_a_person_would_choose():
    rows = {119.0: "119 seconds", 121.0: "2.02 minutes", 7200.0: "2 hours", 86400.0 * 1234: "1,234 days"}
    assert {seconds: readable_time(seconds) for seconds in rows} == rows


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model__variant": "stock"}, "images to a target: there are no reference points for model.variant=stock"),
        ({"model__preset": "tiny"}, "this network (model.preset: tiny; the reference: full)"),
    ],
)
def test_another_network_than_the_benchmarks_has_no_estimate_to_the_target(values, reason):
    printed = lines(**values)
    assert any(line.endswith(reason) for line in printed) and not any("fastest" in line for line in printed)
