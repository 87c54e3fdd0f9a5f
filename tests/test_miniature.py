"""The miniature, shortened: its own data, encoders, scoring networks and YAML, end to end.

`make demo` runs all of it with Muon; docs/miniature.md has its record.
"""

from __future__ import annotations

import json
import sys

import pytest
import torch._dynamo
from conftest import ROOT, run
from miniature import READER
from test_page import Parsed

import benchmark
from eval import main as eval_main
from evaluation.table import read_rows
from prepare import shapes
from reports import mlperf, page
from reports.formatting import figure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90, func_only=True)]


def test_a_network_after_a_few_batches_misses_the_target_and_has_a_worse_fid_than_real_images(
    miniature, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(ROOT)
    shortened = ["max_duration=8ba", "eval.every_images=128", "eval.steps=6"]
    assert benchmark.main(miniature.words(tmp_path, "short", *shortened)) == 0
    summary = json.loads((tmp_path / "short/summary.json").read_text())
    assert (summary["family"], summary["target"], summary["batches"]) == ("shapes", "missed", 8)
    lines = map(json.loads, (tmp_path / "short/metrics.jsonl").read_text().splitlines())
    evaluations = [line for line in lines if line.get("evaluation")]
    assert [line["images"] for line in evaluations] == [128, 256]
    assert {(line["inception"], line["clip_model"]) for line in evaluations} == {("shapes-reader", "shapes-CLIP")}
    judged = ["-m", "mlperf_logging.compliance_checker", "--usage=training", "--ruleset=5.0.0", "--werror"]
    judged += [str(tmp_path / "short/mlperf.log"), f"--log_output={tmp_path / 'checker.log'}"]
    done = run(sys.executable, *judged, timeout=120)
    assert done.returncode == 0 and "training_5.0.0/open_stable_diffusion.yaml" in done.stderr, done.stderr
    assert mlperf.main([str(tmp_path / "short"), f"out={tmp_path / 'report'}"]) == 0
    assert "no result: 1 runs of 10.\n" in capsys.readouterr().out
    assert page.main([str(tmp_path / "short")]) == 0
    shown = Parsed((tmp_path / "short/page.html").read_text())
    assert shown.all("section", id="result")[0][0]["data-state"] == "missed"
    assert f"FID {figure(summary['fid'])} and CLIP {figure(summary['clip'])}" in shown.text("section", id="result")
    # Images of the prompts' own scenes, drawn: what a perfect model would make.
    assert shapes.main([str(tmp_path / "drawn"), "num_images=600", "part=prompts", "layout=files"]) == 0
    scored = [f"eval.statistics={miniature.statistics}", f"eval.{READER}"]
    assert eval_main([str(tmp_path / "drawn"), *scored, f"out={tmp_path / 'scores'}"]) == 0
    [row] = read_rows(tmp_path / "scores/eval.csv")
    assert row["fid"] < 60 < evaluations[-1]["fid"]


# --- the keys of speed: the loss curve of the plain path; 200 steps were run once (docs/speed.md) ---

STEPS = 60


def curve(miniature, runs, name: str, keys: str = "") -> list[float]:
    """Run the tiny preset by the miniature's own recipe and return the loss of each window of ten steps."""
    torch._dynamo.reset()
    words = ["model.preset=tiny", f"max_duration={STEPS}ba", "eval.when=off", "mlperf.enabled=false"]
    words += ["target.fid=null", "target.clip=null", "save.every_images=0", "save.snapshot_every_images=0"]
    assert benchmark.main(miniature.words(runs, name, *words, *keys.split())) == 0
    losses = [json.loads(line)["loss"] for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == STEPS // 10
    return losses


@pytest.mark.long
@pytest.mark.timeout(900, func_only=True)
def test_the_curve_with_all_keys_of_speed_is_the_plain_one_and_that_in_bf16_nearer_than_another_seeds(
    miniature, tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    plain = curve(miniature, tmp_path, "plain")
    keys = "channels_last=true attention=math gradient_checkpointing=0.5 device_train_microbatch_size=16"
    assert curve(miniature, tmp_path, "eager", keys) == pytest.approx(plain, rel=1e-4)

    def furthest(name: str, keys: str) -> float:
        return max(abs(a - b) for a, b in zip(curve(miniature, tmp_path, name, keys), plain, strict=True))

    assert 0.0 < furthest("bf16", "precision=bf16") < furthest("seed", "seed=18")
