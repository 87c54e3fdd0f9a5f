"""preflight/scaling.py as a command: tables and pictures, what it begins at, what it refuses, and --print_config."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from PIL import Image
from test_plan import lines

from preflight import plan, scaling
from preflight import scaling_devices as devices
from reports import scaling as report

RESULTS = ROOT / "reports/results"
EMOJI = tuple(str(RESULTS / f"emoji_cpu_{name}.json") for name in ("1_rank", "2_ranks"))
TINY = "model:\n  preset: tiny\nimage_size: 64\nglobal_batch_size: 64\nmax_duration: 1000ba\ndata:\n  synthetic: true\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("scaling") / "tiny_run.yaml"
    path.write_text(TINY)
    return str(path)


def a_record(folder: Path, name: str, num: int = 1, **changed: Any) -> str:
    """A rung's record as a GPU machine would write it: a committed one's keys, with the figures of a GPU."""
    content = json.loads((RESULTS / "sd2_tiny_cpu/moments.json").read_text())
    speed = changed.pop("speed", 140.0)
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
    record = scaling.rounded_all(scaling.reckoned(scaling.read_words(words)))
    return record, report.text_of(record)


def refused(words: list[str], capsys) -> str:
    assert scaling.main(words) == 2
    return capsys.readouterr().err


# --- tables and pictures ---


def test_one_command_makes_the_record_the_tables_and_the_pictures(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = ["gpus=[8,64,1024]", "results=out/scaling.json", "price_per_gpu_hour=2.5", "price_date=2026-11-01"]
    assert scaling.main([run, *keys]) == 0
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


def test_without_records_and_price_both_are_said(run):
    """And two processes on a CPU are laid over as what they are."""
    record, printed = made([run, "gpus=[8]"])
    assert "No price was given, so there is no cost: price_per_gpu_hour and price_date." in printed
    assert "cost, at" not in printed and "waits for the first record of a GPU" in printed
    assert "CPU processes that share one machine's cores, joined by gloo" in printed
    over = record["laid_over"]["rows"]
    assert [(row["num"], row["perfect"]) for row in over] == [(1, 200.933), (2, 200.933)]  # the same two cores
    assert "predicted" not in over[1] and over[1]["images_per_sec"] == pytest.approx(220.03, abs=0.01)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # RMSNorm of bf16 without a fused kernel
def test_flux_begins_at_the_published_speed_of_flux_where_there_is_one():
    """At 32 images a device NVIDIA's GB200 do 56.5 images/s each."""
    flux = [str(ROOT / "yamls/mlperf_flux_2048.yaml"), "gpus=[64]", "images=7000000"]
    for gpu, series, least in (("GB200", "FLUX.1, GB200", 50.0), ("H200", "H200", 0.0)):
        record, printed = made([*flux, f"gpu={gpu}"])
        assert re.search(rf"speed of a GPU: published: MLPerf [0-9. and]+, {series}, at the same TFLOP/s", printed)
        each = record["estimates"][0]["images_per_sec"] / 64
        assert each > least and (gpu != "GB200" or each < 63.0)


def test_records_of_gpus_are_where_the_prediction_begins_and_lie_over_it(run, tmp_path):
    speeds = {1: 140.0, 8: 134.0, 64: 120.0}
    places = [a_record(tmp_path, f"on_{num}", num, speed=speed) for num, speed in speeds.items()]
    record, printed = made([run, *places[::-1], "gpus=[8,64]"])
    assert "speed of a GPU: the record on_1 of 1 NVIDIA H200" in printed
    over = record["laid_over"]["rows"]
    assert [row["num"] for row in over] == [1, 8, 64] and over[0]["predicted"] == pytest.approx(140.0, rel=1e-4)
    assert [row["perfect"] for row in over] == [140.0, 1120.0, 8960.0]
    assert over[2]["predicted_low"] < over[2]["predicted"] < over[2]["predicted_high"]


def test_the_committed_record_shows_every_section(capsys):
    assert report.main([str(RESULTS / "scaling.json")]) == 0
    printed = capsys.readouterr().out
    sections = (
        "MosaicML's table",
        "NVIDIA's table",
        "The best batch",
        "Error against published rows",
        "Every held-out row",
    )
    assert all(f"=== {name}" in printed for name in (*sections, "Sensitivity", "Evaluation", "Records laid over"))


def test_what_is_no_record_is_refused(tmp_path, capsys):
    (tmp_path / "a.json").write_text("{}")
    assert report.main([str(tmp_path / "a.json")]) == 2
    assert (
        "a.json: is no record of preflight.scaling (KeyError: 'run'). Give its scaling.json." in capsys.readouterr().err
    )


# --- the first record of a GPU ---


def test_the_error_against_a_gpus_record_is_told_as_soon_as_there_is_one(run, tmp_path, monkeypatch):
    a_record(tmp_path, "first_rung", speed=100.0)
    (tmp_path / "other.json").write_text('{"device": "NVIDIA H200"}')
    monkeypatch.setattr(devices.gpu_records, "__defaults__", (tmp_path,))
    record, printed = made([run, "gpus=[8]"])
    [said] = record["gpu_records"]
    assert said["error"] == pytest.approx(said["predicted"] / 100.0 - 1, rel=1e-4) and said["error"] > 0.2
    assert "1 NVIDIA H200, record first_rung: 100.0 images/s measured," in printed and "waits for" not in printed


# --- what is refused ---


def test_records_of_different_configurations_are_refused_with_the_key(run, tmp_path, capsys):
    one, other = a_record(tmp_path, "a"), a_record(tmp_path, "b", 8, precision="fp16")
    message = "precision: bf16 in a, fp16 in b. Records of one configuration belong together. Leave one out."
    assert message in refused([run, one, other], capsys)
    assert "ema: True in a, False in b." in refused([run, one, a_record(tmp_path, "b", 8, ema=False)], capsys)
    assert "device: NVIDIA H200 in a, NVIDIA H100 in b" in refused(
        [run, one, a_record(tmp_path, "b", 8, device="NVIDIA H100")], capsys
    )
    assert "num_devices: 1 in several records. Give one of each" in refused([run, one, a_record(tmp_path, "b")], capsys)


def test_a_cpus_record_is_no_gpus(run, capsys):
    message = "emoji_cpu_1_rank: is of a CPU AMD EPYC, 2 threads, and a CPU's speed says nothing of a GPU's."
    assert message in refused([run, EMOJI[0]], capsys)


def test_one_record_alone_cannot_be_laid_over(run, capsys):
    message = "laid_over: one record only. Possible: 2 and more, of other numbers of devices. Give another."
    assert message in refused([run, f"laid_over={EMOJI[0]}"], capsys)


def test_another_gpu_than_the_key_says_is_refused(run, tmp_path, capsys):
    message = "a: is of NVIDIA H200. Possible: H100. Give its gpu, or another record."
    assert message in refused([run, a_record(tmp_path, "a"), "gpu=H100"], capsys)
    unknown = a_record(tmp_path, "a", device="AMD MI300X")
    assert "a: is of AMD MI300X. Possible: A100, H100, H200, B200, GB200." in refused([run, unknown], capsys)


def test_a_record_that_is_faster_than_its_links_is_refused_with_the_links(run, tmp_path, capsys):
    place = a_record(tmp_path, "a", 64)
    message = (
        "a: its step of 0.457 s is shorter than the exchange over these links alone. Possible: node_link, cluster_link"
    )
    words = [run, place, "cluster_link=ethernet_100", "node_link=pcie4", "domain=1"]
    assert message in refused(words, capsys)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "cluster_link=token_ring",
            "cluster_link is 'token_ring'. Possible: one of infiniband_hdr, infiniband_ndr, ethernet_3200,",
        ),
        ("node_link=nvlink9", "node_link is 'nvlink9'. Possible: one of nvlink3, nvlink4, nvlink5, pcie4, pcie5"),
        ("gpu=H900", "gpu is 'H900'. Possible: one of A100, H100, H200, B200, GB200"),
        (
            "price_per_gpu_hour=2",
            "price_date: price_per_gpu_hour is given, price_date is not. A price is of a day: give both,",
        ),
        ("price_date=2026", "price_per_gpu_hour: price_date is given, price_per_gpu_hour is not."),
        ("gpus=[0]", "gpus: [0]. Possible: numbers from 1 to 65,536, e.g. [8,64,512]."),
    ],
)
def test_keys_that_are_not_possible_are_refused_with_what_is(word, message, capsys):
    assert message in refused([word], capsys)


def test_what_cannot_be_read_is_refused(run, tmp_path, capsys):
    assert "nowhere.json: no such file or folder. Give runs/NAME or a record." in refused([run, "nowhere.json"], capsys)
    assert "command line: 2 YAML files given. Possible: one run." in refused([run, run], capsys)
    epochs = tmp_path / "epochs.yaml"
    epochs.write_text(TINY.replace("1000ba", "1ep"))
    assert "epochs.yaml: max_duration: 1ep; how many images that is cannot be known" in refused([str(epochs)], capsys)
    text = json.dumps({**json.loads(Path(EMOJI[0]).read_text()), "tflop_per_image": None})
    (tmp_path / "old.json").write_text(text)
    assert "old.json: it has no tflop_per_image or trained_parameters." in refused(
        [run, str(tmp_path / "old.json")], capsys
    )


# --- --print_config ---


def test_print_config_reckons_its_ranks_from_a_record_with_an_interval(tmp_path):
    place = a_record(tmp_path, "one_gpu")
    told_of = devices.expected(place, 8, 256)
    assert told_of.low < told_of.value < told_of.high and told_of.value < 8 * 140.0
    printed = lines(measure__expected_record=place, max_duration="2000ba")
    at = next(line for line in printed if line.startswith("time: "))
    assert f"at {plan._short(told_of.value)} images/s ({plan._short(told_of.low)} to" in at and "for 8 ranks from" in at
    took = next(line for line in printed if line.startswith("max_duration: "))
    slowest = plan.readable_time(512_000 / told_of.low)
    assert took.endswith(f"to {slowest})") and plan.readable_time(512_000 / told_of.value) in took
    assert any("mean" in line and "minutes" in line for line in printed)  # to the target, too


def test_print_config_says_why_a_record_gives_no_speed():
    printed = lines(measure__expected_record=EMOJI[0])
    message = (
        "time: measure.expected_record: a record of CPU AMD EPYC, 2 threads. Possible: A100, H100, H200, B200, GB200"
    )
    assert any(line.startswith(message) for line in printed)
    assert any(
        line.endswith("no such file or folder. Give runs/NAME or a record.")
        for line in lines(measure__expected_record="x")
    )
    given = lines(measure__expected_record=EMOJI[0], measure__expected_images_per_sec=1100.0)
    assert "time: of training alone, at 1100 images/s (measure.expected_images_per_sec)" in given
