"""The miniature's target against the records it was chosen from: the runs that should meet it do, the controls miss it.

`make controls` makes the records. A target that is changed in yamls/shapes.yaml alone fails here.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import ROOT
from omegaconf import OmegaConf

from evaluation.score_table import read_rows

RECORDS = ROOT / "reports/results/shapes"
YAML = OmegaConf.load(ROOT / "yamls/shapes.yaml")


def record_of(rung: str) -> dict[str, Any]:
    record = json.loads((RECORDS / f"{rung}.json").read_text())
    assert record["status"] == "ok"
    return record


def meets(scores: dict[str, Any]) -> bool:
    return scores["fid"] <= YAML.target.fid and scores["clip"] >= YAML.target.clip


@pytest.mark.parametrize("rung", ["seed17", "seed18", "seed19", "online"])
def test_three_seeds_and_a_run_from_images_meet_the_target_after_more_than_one_evaluation(rung):
    record = record_of(rung)
    met = [meets(scores) for scores in record["evaluations"]]
    assert met == [False, False, False, True, True]  # met once, met to the end; README says at the fourth
    assert record["max_duration"] == YAML.max_duration and record["stage"] == (
        "images" if rung == "online" else "moments"
    )


def test_the_table_of_the_page_is_that_of_the_records():
    page = (ROOT / "docs/miniature.md").read_text()
    records = {rung: record_of(rung) for rung in (path.stem for path in RECORDS.glob("*.json"))}
    ends = {rung: record["evaluations"] for rung, record in records.items()}
    named = {
        **{f"seed {seed}": f"seed{seed}" for seed in (17, 18, 19)},
        "seed 17, from images, encoders in the step": "online",
        "seed 17, without EMA": "no_ema",
        "seed 17, captions shuffled in training": "shuffled",
        "seed 17, after one batch": "untrained",
    }
    assert set(named.values()) == set(ends)
    for name, rung in named.items():
        first = next((f"{scores['images']:,} images" for scores in ends[rung] if meets(scores)), "never")
        fid, clip = ends[rung][-1]["fid"], ends[rung][-1]["clip"]
        assert f"| {name} | {fid:.1f} | {clip:.3f} | {first} | {records[rung]['commit'][:7]} |" in page
    unguided = next(row for row in read_rows(RECORDS / "guidance/eval.csv") if row["guidance"] == 1)
    [other] = read_rows(RECORDS / "other_world/eval.csv")
    for name, row in (
        ("scored without guidance", unguided),
        ("against the statistics of images with one object", other),
    ):
        # A table of scores names the snapshot, which is seed 17's, and no commit.
        assert row["snapshot"].startswith("weights-im000000064000-") and row["model"] == "seed17"
        commit = records["seed17"]["commit"][:7]
        assert f"| seed 17, {name} | {row['fid']:.1f} | {row['clip']:.3f} | not at its end | {commit} |" in page


def test_make_demo_met_it_with_three_seeds_within_eight_minutes_on_two_cores():
    records = [
        json.loads((ROOT / f"reports/results/shapes_cpu{n}.json").read_text()) for n in ("", "_seed18", "_seed19")
    ]
    assert [record["seed"] for record in records] == [17, 18, 19]
    for record in records:
        assert record["target"] == "reached" and meets(record) and record["command_seconds"] <= 480
        assert "+" not in record["commit"] and record["cpu_threads"] == 2


def test_the_seeds_are_three():
    seeds = [record_of(f"seed{seed}") for seed in (17, 18, 19)]
    assert [record["seed"] for record in seeds] == [17, 18, 19]
    assert len({record["fid"] for record in seeds}) == 3


@pytest.mark.parametrize("rung", ["untrained", "shuffled"])
def test_what_has_learned_nothing_of_the_captions_never_meets_it(rung):
    evaluations = record_of(rung)["evaluations"]
    assert evaluations and not any(meets(scores) for scores in evaluations)
    assert max(scores["clip"] for scores in evaluations) < 0.5


def test_without_an_average_of_the_weights_the_target_is_met_as_well():
    """A learning rate that goes to 0 averages by itself: the difference at the end is within that of the seeds."""
    plain = record_of("no_ema")["evaluations"]
    ends = [record_of(f"seed{seed}")["evaluations"][-1] for seed in (17, 18, 19)]
    assert {scores["weights"] for scores in plain} == {"training"} and {scores["weights"] for scores in ends} == {"ema"}
    for key in ("fid", "clip"):
        assert min(scores[key] for scores in ends) <= plain[-1][key] <= max(scores[key] for scores in ends)
    assert meets(plain[-1])


def test_guidance_has_its_bend_and_without_it_the_target_is_missed():
    rows = sorted(read_rows(RECORDS / "guidance/eval.csv"), key=lambda row: row["guidance"])
    guidances, fids, clips = ([row[key] for row in rows] for key in ("guidance", "fid", "clip"))
    assert guidances[0] == 1 and not meets(rows[0])
    for scores in ([-fid for fid in fids], clips):
        best = scores.index(max(scores))
        assert 0 < best < len(scores) - 1
        assert scores == [*sorted(scores[:best]), *sorted(scores[best:], reverse=True)]
    [own] = [row for row in rows if row["guidance"] == YAML.eval.guidance]
    assert meets(own) and own["fid"] == pytest.approx(record_of("seed17")["evaluations"][-1]["fid"])


def test_the_same_pictures_miss_it_against_the_statistics_of_another_world():
    [row] = read_rows(RECORDS / "other_world/eval.csv")
    assert row["clip"] == pytest.approx(record_of("seed17")["evaluations"][-1]["clip"])
    assert row["fid"] > 2 * YAML.target.fid


def test_the_target_lies_above_what_as_many_pictures_of_the_world_itself_score():
    [row] = read_rows(RECORDS / "drawn/eval.csv")
    assert row["num_images"] == record_of("seed17")["evaluations"][-1]["num_images"]
    assert row["fid"] < YAML.target.fid
    assert f"the prompts' part | {row['fid']:.1f} |" in (ROOT / "docs/miniature.md").read_text()
