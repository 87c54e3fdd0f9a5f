"""bench/latency.py, reports/tables.py: images of the pipeline, what cannot be, what is lost, what a killed one keeps."""

from __future__ import annotations

import json
import statistics

import pytest

from bench import latency
from bench.latency import Contest, LatencyCase

CASE = LatencyCase("stock", "tiny", 64, "plms", 3, 7.5, "fp32", 2, False, 2, 1)
FEW = ["variants=stock", "samplers=plms", "steps=2", "batches=[1]", "precisions=fp32", "ways=eager", "rounds=1"]


def case(**changes) -> LatencyCase:
    return LatencyCase(**{**vars(CASE), **changes})


@pytest.fixture(autouse=True)
def threads(same_number_of_threads):
    """Each contest sets them."""


# --- a contest ---


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["stock", "sd15", "sdxl", "flux"])
def test_the_images_in_fp32_are_those_of_the_pipeline_and_every_figure_is_there(variant):
    of_family = {"sampler": "euler", "guidance": 3.5} if variant in ("sdxl", "flux") else {}
    made = Contest(case(variant=variant, **of_family), ["eager"]).measure()
    assert made["status"] == {"pipeline": "ok", "eager": "ok"} and made["reasons"] == {}
    assert made["eager_max_abs_difference"] < 2e-5 and made["eager_image_std"] > 0.05
    assert made["variant"] == variant and made["batch_size"] == 2 and made["load_average_before"] >= 0
    for name in ("pipeline", "eager"):
        rounds = made["by_round"][f"{name}_sec"]
        assert len(rounds) == 2 and made[f"{name}_sec"] == pytest.approx(statistics.median(rounds), rel=1e-5)
        assert min(rounds) == made[f"{name}_sec_min"] <= made[f"{name}_sec_p95"] <= max(rounds)
        assert made[f"{name}_first_sec"] > 0
    ratios = [a / b for a, b in zip(*(made["by_round"][f"{n}_sec"] for n in made["status"]), strict=True)]
    assert made["eager_speedup_vs_pipeline"] == pytest.approx(statistics.median(ratios), rel=1e-5)


# --- the command ---


def test_a_killed_command_continues_where_its_record_ends(monkeypatch, tmp_path, capsys):
    path = tmp_path / "latency.json"
    words = [*FEW, "batches=[1,2,3]", f"results={path}"]
    place = {"schema": 1, "device": "x", "commit": "abc", "torch_version": "y"}
    monkeypatch.setattr(latency, "head", lambda: dict(place))
    measured, status = [], {"pipeline": "failed", "eager": "skipped"}

    def measure(contest: Contest) -> dict:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(contest.case.batch_size)
        own = {"pipeline": "skipped"} if len(measured) > 1 else {}
        return {**vars(contest.case), "load_average_before": 0.0, "status": status | own, "reasons": dict(status)}

    monkeypatch.setattr(Contest, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        latency.main(words)
    assert [each["batch_size"] for each in json.loads(path.read_text())["contests"]] == [1, 2] == measured
    measured.clear()
    assert latency.main(words) == 1
    assert measured == [1, 3]  # 1 had failed, and is measured again
    assert "stock, plms, fp32, batch 2: has a record of this commit" in capsys.readouterr().err
    for changed in ({"device": "z"}, {"commit": "abc+changes"}):
        monkeypatch.setattr(latency, "head", lambda changed=changed: place | changed)
        assert latency.begun_record(latency.LatencyConfig(results=str(path)))["contests"] == []
