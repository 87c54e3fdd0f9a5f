"""bench/micro.py: turns and ratios, contestants that do the same work, its record and its messages; no speed."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path

import pytest
import torch

from bench import contest, micro, micro_data, micro_ema

TINY = ["num_parameters=100000", "num_samples=128", "num_images=32", "rounds=2"]
CPU = torch.device("cpu")


# --- turns and figures ---


def test_contestants_take_turns_and_each_round_begins_with_another_one():
    order: list[str] = []

    def turn(name: str):
        return lambda: order.append(name) or len(order)

    values = contest.take_turns({name: turn(name) for name in "abc"}, 3)
    assert "".join(order) == "cab" + "abc" + "bca" + "cab"
    assert values == {"a": [4, 9, 11], "b": [5, 7, 12], "c": [6, 8, 10]}  # the first three were for warming up


def test_a_ratio_is_the_median_of_the_ratios_of_each_round():
    figures = contest.Figures()
    figures.add("ours", [1.0, 2.0, 10.0])
    figures.add("theirs", [4.0, 4.0, 30.0])
    figures.ratio("speedup", "theirs", "ours")
    assert figures.flat["speedup"] == 3.0 and figures.flat["speedup_min"] == 2.0 and figures.flat["speedup_max"] == 4.0
    assert figures.flat["ours"] == 2.0 and figures.by_round["theirs"] == [4.0, 4.0, 30.0]


def test_samples_count_from_the_arrival_of_the_first_batch(monkeypatch):
    arrivals = iter([5.0, 6.0, 9.0])
    monkeypatch.setattr(micro_data.time, "perf_counter", lambda: next(arrivals))
    batches = [{"moments": torch.zeros(size)} for size in (100, 8, 4)]
    assert micro_data.samples_per_sec(batches, "moments") == (8 + 4) / (9.0 - 5.0)


# --- the same work ---


def test_the_unet_has_the_tensors_of_sd2_and_about_as_many_parameters_as_asked():
    sizes = [p.numel() for p in micro_ema.narrow_unet(16_000_000, CPU).parameters()]
    assert len(sizes) == 686 and 15_000_000 < sum(sizes) < 17_000_000


def test_every_update_moves_its_own_average_only():
    """After an update the weights are as they were: five contestants share them."""
    model = micro_ema.narrow_unet(100_000, CPU)
    before = [p.detach().clone() for p in model.parameters()]
    for update in micro_ema.updates(model).values():
        update()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_temporary_memory_equals_what_the_expression_needs():
    """A sum of two products, x * 0.9 + y * 0.1, holds both and itself at once; an update in place holds nothing."""
    x, y = torch.ones(2**18), torch.ones(2**18)  # 1 MiB each
    assert micro_ema.temporary_mib(lambda: x.copy_(x * 0.9 + y * 0.1), CPU) == pytest.approx(3.0, abs=0.01)
    assert micro_ema.temporary_mib(lambda: x.lerp_(y, 0.1), CPU) == pytest.approx(0.0, abs=0.01)


def test_all_loaders_of_moments_deliver_the_same_samples(tmp_path):
    micro_data.write_moments(tmp_path, 128)
    moments, tokens = {}, {}
    for name, loader in micro_data.loaders(tmp_path, "moments").items():
        batches = list(loader)
        assert [tuple(batch["moments"].shape) for batch in batches] == [(64, 8, 64, 64)] * 2
        moments[name] = Counter(float(m.double().sum()) for batch in batches for m in batch["moments"])
        tokens[name] = [batch.get("tokens") for batch in batches]
    assert len(moments["moments"]) == 128
    assert moments["moments"] == moments["moments_plain"] == moments["moments_webdataset"]
    for ours, plain in zip(tokens["moments"], tokens["moments_plain"], strict=True):
        assert ours.dtype == torch.int64 and torch.equal(ours, plain)


def test_all_loaders_of_images_deliver_the_same_pictures(tmp_path):
    micro_data.write_images(tmp_path, 32)
    found = {name: list(loader) for name, loader in micro_data.loaders(tmp_path, "images").items()}
    for ours, plain in zip(found["images"], found["images_plain"], strict=True):
        assert ours["images"].shape == (16, 3, 512, 512) and ours["images"].dtype == torch.uint8
        assert torch.equal(ours["images"], plain["images"]) and torch.equal(ours["tokens"], plain["tokens"])
    means = [sorted(float(image.mean()) for image in batch["images"].float()) for batch in found["images"]]
    theirs = [float(image.mean()) * 255 for batch in found["images_webdataset"] for image in batch["images"]]
    assert sorted(theirs) == pytest.approx(sorted(sum(means, [])), abs=0.5)


# --- the command ---


@pytest.mark.slow
@pytest.mark.timeout(200, func_only=True)
def test_the_record_has_every_figure_and_its_ratios_are_those_of_its_rounds(tmp_path, capsys):
    results, work = tmp_path / "new" / "micro.json", tmp_path / "work"
    work.mkdir()
    words = [*TINY, f"results={results}", f"work={work}"]
    assert micro.main(words) == 0
    record, printed = json.loads(results.read_text()), capsys.readouterr().out.splitlines()
    assert list(work.iterdir()) == []
    assert record["schema"] == 1 and record["device"] and record["date"] and record["torch_version"]
    assert "commit" in record and record["config"]["num_samples"] == 128
    assert printed[0].split() == ["what", "ours", "other", "ratio", "spread"]
    assert len(printed) == 1 + len(micro.ROWS)
    for _, ours, other, ratio in micro.ROWS:
        assert record[ours] >= 0 and (other is None or record[other] >= 0)
        if ratio:
            pairs = (record["by_round"][ours], record["by_round"][other])
            over, under = pairs if "samples" in ours or "over" in ratio else reversed(pairs)
            ratios = [a / b for a, b in zip(over, under, strict=True)]
            assert len(ratios) == 2 and record[ratio] == pytest.approx(statistics.median(ratios), rel=1e-5)
            assert record[f"{ratio}_min"] == pytest.approx(min(ratios), rel=1e-5)
            assert record[f"{ratio}_max"] == pytest.approx(max(ratios), rel=1e-5)
    for key, values in record["by_round"].items():
        assert record[key] == pytest.approx(statistics.median(values), rel=1e-5)
    assert {"ema_speedup_vs_composer", "moments_speedup_vs_webdataset"} <= record.keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("parts=ema,speed", "parts: unknown 'speed'. Known: ema, moments, images."),
        ("rounds=0", "command line: rounds is 0. Possible: 1 and up."),
        ("num_samples=127", "command line: num_samples is 127. Possible: 128 and up."),
        ("num_images=16", "command line: num_images is 16. Possible: 32 and up."),
        ("num_parameters=1", "command line: num_parameters is 1. Possible: 100,000 and up."),
        ("threads=0", "command line: threads is 0. Possible: 1 to 1,024."),
        ("rounds=many", "command line: rounds is 'many'. Possible: an integer."),
        ("round=3", "command line: unknown key 'round'. Did you mean 'rounds'?"),
        ("results=tests", "results: tests is a folder. Give a file in it."),
        ("work=/no/where", "work: no folder /no/where. Make it, or leave it out."),
    ],
)
def test_bad_values_are_named(capsys, monkeypatch, words, message):
    monkeypatch.chdir(Path(__file__).resolve().parent.parent)
    assert micro.main(words.split()) == 2
    assert capsys.readouterr().err == message + "\n"


def test_a_full_disk_is_known_before_anything_is_measured(capsys, tmp_path):
    assert micro.main([f"work={tmp_path}", "num_samples=1000000000"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"work: {tmp_path} has ") and "183105.5 GiB are needed. Give another folder" in error
