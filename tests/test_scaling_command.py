"""scaling/__main__.py as a command: tables and pictures, what it begins at, what it refuses, and --print_config."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from PIL import Image
from test_plan import lines

from common.log import readable_time, three_digits
from scaling import __main__, devices, report
from scaling.law import Setup
from training.memory import Cost

RESULTS = ROOT / "reports/results"
EMOJI = str(RESULTS / "emoji_cpu_1_rank.json")
TINY = "model:\n  preset: tiny\nimage_size: 64\nglobal_batch_size: 64\nmax_duration: 1000ba\ndata:\n  synthetic: true\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("scaling") / "tiny_run.yaml"
    path.write_text(TINY)
    return str(path)


FLOPS = {
    ("sd2", "tiny"): (1_070_308, 1.98676352e8),
    ("sd2", "full"): (865_910_724, 2.453868343296e12),
    ("flux", "full"): (11_891_178_560, 2.0413685956608e13),
}
"""Family, preset -> trained parameters and FLOPs an image, as traced: tests/test_traced_cost.py compares those."""


@pytest.fixture(autouse=True)
def traced(monkeypatch) -> None:
    """Take the costs of steps from FLOPS: to trace a network takes half a minute."""

    def cost(model, *given: Any, **ways: Any) -> Cost:
        num, flops = FLOPS[model.family, model.preset]
        return Cost(num, 10**6, flops, activation_gib_per_image=0.875, activation_gib_once=1.5, frozen_gib=0.75)

    monkeypatch.setattr("training.builders.traced_cost", cost)


def a_record(folder: Path, name: str, num: int = 1, speed: float = 140.0, **changed: Any) -> str:
    """A rung's record as a GPU machine would write it: a committed one's keys, with the figures of a GPU."""
    content = json.loads((RESULTS / "sd2_tiny_cpu/moments.json").read_text())
    content |= {"rung": name, "run_name": name, "device": "NVIDIA H200", "num_devices": num, "preset": "full"}
    content |= {"image_size": [512, 512], "tflop_per_image": 2.41, "trained_parameters": 865_910_724}
    content |= {"images_per_sec": num * speed, "images_per_sec_per_device": speed, "precision": "bf16"}
    content |= {"images_per_sec_min": num * speed * 0.99, "images_per_sec_max": num * speed * 1.01}
    content |= {"global_batch_size": 64 * num, "device_train_microbatch_size": 64, **changed}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content))
    return str(path)


def made(words: list[str]) -> tuple[dict[str, Any], str]:
    """The command's record, and what it prints of it; without the pictures, which take the longest."""
    record = __main__.rounded_all(__main__.make_record(__main__.read_command(words)))
    return record, report.text_of(record)


def refused(words: list[str], capsys) -> str:
    assert __main__.main(words) == 2
    return capsys.readouterr().err


# --- tables and pictures ---


def test_one_command_makes_the_record_the_tables_and_the_pictures(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = ["gpus=[8,64,1024]", "results=out/scaling.json", "price_per_gpu_hour=2.5", "price_date=2026-11-01"]
    assert __main__.main([run, *keys]) == 0
    printed, record = capsys.readouterr().out, json.loads(Path("out/scaling.json").read_text())
    assert [row["num"] for row in record["estimates"]] == [8, 64, 1024]
    assert record["run"]["images"] == 64_000 and record["run"]["gpu"] == "H200"
    assert "tiny_run: 64,000 images at a global batch of 64 on H200; speed of a GPU: published: MLPerf" in printed
    assert "cost, at 2.5 an hour" in printed and "The price of a GPU-hour is of 2026-11-01." in printed
    for row in record["estimates"]:
        assert row["cost"] == pytest.approx(2.5 * row["gpu_hours"], rel=1e-5)
    for name in ("scaling_speed.png", "scaling_target.png"):
        with Image.open(Path("out", name)) as picture:
            assert picture.width > 1000 and len(set(picture.convert("L").resize((64, 64)).getdata())) > 10
    record, printed = made([run, "gpus=[8]"])  # neither a price nor a record
    assert "cost, at" not in printed and "Records laid over" not in printed and record["records"] == []


def test_records_of_gpus_are_where_the_prediction_begins_and_lie_over_it(run, tmp_path):
    speeds = {1: 140.0, 8: 134.0, 64: 120.0}
    places = [a_record(tmp_path, f"on_{num}", num, speed=speed) for num, speed in speeds.items()]
    record, printed = made([run, *places[::-1], "gpus=[8,64]"])
    assert "speed of a GPU: the record on_1 of 1 NVIDIA H200" in printed
    over = record["records"]
    assert [row["num"] for row in over] == [1, 8, 64] and over[0]["predicted"] == pytest.approx(140.0, rel=1e-4)
    assert [row["perfect"] for row in over] == [140.0, 1120.0, 8960.0]
    assert over[2]["predicted_low"] < over[2]["predicted"] < over[2]["predicted_high"]
    assert over[0]["published"] > 140.0 and over[0]["published"] != over[0]["predicted"]  # by published rows alone
    assert f"{over[2]['predicted'] / over[2]['images_per_sec'] - 1:+.1%}" in printed


def test_the_committed_record_shows_every_section_and_what_is_no_record_is_refused(tmp_path, capsys):
    assert report.main([str(RESULTS / "scaling.json")]) == 0
    printed = capsys.readouterr().out
    sections = ["MosaicML's table", "The best batch", "Error against published rows", "Every held-out row"]
    assert all(f"=== {name}" in printed for name in (*sections, "Parameters", "Failures"))
    (tmp_path / "a.json").write_text("{}")
    assert report.main([str(tmp_path / "a.json")]) == 2
    assert "a.json: is no record of scaling (KeyError: 'run')." in capsys.readouterr().err


def test_days_gpu_hours_and_money_come_from_the_speed_and_have_its_interval():
    record, printed = made(["gpus=[8,64]", "gpu=H100", "price_per_gpu_hour=2", "price_date=2026-11"])
    for row in record["estimates"]:
        hours = (row["train_hours"] + row["eval_hours"]) * (1 + row["overhead_frac"])
        assert row["train_hours"] == pytest.approx(record["run"]["images"] / row["images_per_sec"] / 3600, rel=1e-4)
        assert (row["days"], row["gpu_hours"]) == pytest.approx((hours / 24, row["num"] * hours), rel=1e-4)
        for end, other in (("low", "high"), ("high", "low")):
            hours = row["train_hours"] * row["images_per_sec"] / row[f"images_per_sec_{other}"] + row["eval_hours"]
            assert row[f"gpu_hours_{end}"] == pytest.approx(row["num"] * hours * (1 + row["overhead_frac"]), rel=1e-4)
            assert row[f"cost_{end}"] == pytest.approx(2 * row[f"gpu_hours_{end}"], rel=1e-5)
    has_price = {target["title"]: target["price"] for target in record["targets"]}
    assert list(has_price.values()) == [2.0, None, 2.0]  # a price is of this GPU: not of GB200
    best = record["targets"][2]["curves"][0]["best"]
    assert best["cost_low"] == pytest.approx(2 * best["device_hours_low"], rel=1e-5)
    assert best["cost_low"] < best["cost"] < best["cost_high"]
    assert printed.count("cost, at 2 an hour") == 3


# --- how a run exchanges ---


def test_sharded_weights_are_exchanged_in_each_pass():
    """Two gathers in the step's type and a scattering in float32, 8 bytes in bf16; p passes are p steps of one."""
    assert devices.exchange_of("bf16", "full") == devices.Exchange(4, 2.0, True)
    assert devices.exchange_of("bf16_params", "hybrid") == devices.Exchange(2, 4.0, True)
    assert devices.exchange_of("bf16_params", "off") == devices.Exchange(2, 2.0, False)
    setup = Setup("plain", 4.0, 450.0, 50.0, 8, microbatch=16)
    sharded, whole = devices.exchange_of("bf16", "full"), devices.exchange_of("bf16", "off")
    assert sharded.batch(setup, 64, 2048) == 1024 and whole.batch(setup, 64, 2048) == 2048
    assert sharded.batch(setup, 64, 512) == 512 and sharded.batch(setup, 64, 64 * 40) == pytest.approx(64 * 40 / 3)
    law, slow = devices.committed_law(), dataclasses.replace(setup, outer=1.0)
    speeds = [devices.Predictor(law, "mlperf_h100_v41", slow, of).predict(64, 8192).value for of in (sharded, whole)]
    assert speeds[0] < speeds[1] / 3


def test_a_card_is_known_by_the_whole_name_of_a_device(tmp_path):
    cards = {"NVIDIA H200": "H200", "NVIDIA A100-SXM4-80GB": "A100", "NVIDIA H100 80GB HBM3": "H100"}
    cards |= {"NVIDIA GB200": "GB200", "NVIDIA GH200 480GB": None, "NVIDIA H100 PCIe": None, "CPU AMD EPYC": None}
    assert {of: devices.read_measured(a_record(tmp_path, "a", device=of)).card for of in cards} == cards


# --- what is refused ---


IMPOSSIBLE = {
    "cluster_link=token_ring": "cluster_link is 'token_ring'. Possible: one of infiniband_hdr, infiniband_ndr, ethernet_",
    "gpu=H900": "gpu is 'H900'. Possible: one of A100, H100, H200, B200, GB200",
    "price_per_gpu_hour=2": "price_date: only one of price_per_gpu_hour and price_date is given.",
    "gpus=[]": "gpus: []. Possible: numbers from 1 to 65,536, e.g. [8,64,512].",
}


def test_keys_that_are_not_possible_are_refused_with_what_is(capsys):
    for word, message in IMPOSSIBLE.items():
        assert message in refused([word], capsys)


# --- --print_config ---


def test_print_config_reckons_its_ranks_from_a_record_with_an_interval(tmp_path):
    place = a_record(tmp_path, "one_gpu")
    told_of = devices.expected_speed(place, 8, 256)
    assert told_of.low < told_of.value < told_of.high and told_of.value < 8 * 140.0
    printed = lines(measure__expected_record=place, max_duration="2000ba")
    at = next(line for line in printed if line.startswith("time: "))
    assert f"at {three_digits(told_of.value)} images/s ({three_digits(told_of.low)} to" in at
    assert "for 8 ranks from" in at
    took = next(line for line in printed if line.startswith("max_duration: "))
    slowest = readable_time(512_000 / told_of.low)
    assert took.endswith(f"to {slowest})") and readable_time(512_000 / told_of.value) in took
    assert any("mean" in line and "minutes" in line for line in printed)  # to the target, too


def test_print_config_says_why_a_record_gives_no_speed():
    message = "time: measure.expected_record: a record of CPU AMD EPYC, 2 threads. Possible: A100, H100, H200, B200"
    assert any(line.startswith(message) for line in lines(measure__expected_record=EMOJI))
