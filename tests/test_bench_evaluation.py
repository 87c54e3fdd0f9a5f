"""bench/evaluation.py: the run of one rung, and what it refuses; no speed."""

from __future__ import annotations

import json

import pytest
from conftest import TINY_RUN, run

from bench import evaluation

WORDS = [*[word for word in TINY_RUN if not word.startswith("max_duration")], "eval.num_prompts=4", "eval.steps=2"]


@pytest.mark.long
@pytest.mark.timeout(120, func_only=True)
def test_a_rung_is_scored_three_times_after_a_first(tmp_path):
    """In a process of its own: in this one the group of ranks would stand for all tests that come later."""
    words = [*WORDS, "eval.batch_size=2", f"run_folder={tmp_path}", "run_name=a"]
    done = run("python", "-m", "bench.evaluation", *words, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    same = {"clip_model": "random-CLIP", "compile": "off", "precision": "fp32"}
    same |= {"windows": 3, "num_prompts": 4, "eval_batch_size": 2}
    assert same.items() <= summary.items()
    assert summary["images_per_sec_min"] <= summary["images_per_sec"] <= summary["images_per_sec_max"]
    assert 0 < summary["figures_seconds"] < summary["seconds"] and summary["first_step_seconds"] > 0
    rounds = [4 / summary[f"images_per_sec{end}"] + summary["figures_seconds"] for end in ("_min", "", "_max")]
    assert sum(rounds) == pytest.approx(summary["seconds"], rel=1e-3)
    assert f"images_per_sec={summary['images_per_sec']}" in done.stdout


def test_impossible_keys_are_refused(tmp_path, capsys):
    for word, said in (
        ("eval.prompts=x.tsv", "eval.prompts: is made up here. Leave it out."),
        ("eval.num_prompts=1", "eval.num_prompts: 1, but FID compares covariances."),
    ):
        assert evaluation.main([*WORDS, word, f"run_folder={tmp_path}", "run_name=a"]) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "a").exists()
