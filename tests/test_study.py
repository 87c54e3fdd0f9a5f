"""reports/study.py: the record of a sweep as a table over its seeds and a picture; sweep.py writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reports import study

IMAGES = list(range(32, 321, 32))


def made_run(lr: float, seed: int, precision: str, loss: float, status: str = "ok") -> dict[str, Any]:
    """A run whose losses all are `loss`."""
    values = {"optimizer.lr": lr, "seed": seed, "precision": precision}
    run = {"run": f"{lr}-{seed}-{precision}", "status": status, "values": values}
    curve = {"images": IMAGES if status == "ok" else [], "loss": [loss] * (10 if status == "ok" else 0)}
    figures = {"val_loss": loss, "fid": 100.0 * loss, "clip": 1.0 - loss} if status == "ok" else {}
    return {**run, **figures, "curve": curve}


def made_record(*runs: dict[str, Any]) -> dict[str, Any]:
    """A sweep over the learning rate, the seed, and the points of a precision."""
    head = {
        "schema": 1,
        "measured": "sweep",
        "sweep": "small",
        "device": "CPU",
        "torch_version": "2",
        "commit": "a" * 40,
    }
    return {**head, "axes": ["optimizer.lr", "seed", "precision"], "of_points": ["precision"], "runs": list(runs)}


@pytest.fixture
def record() -> dict[str, Any]:
    """Two learning rates, two precisions and two seeds; bf16 is 10 % and 30 % above fp32 at the one, as fp32 at the other."""
    fp32 = [made_run(lr, seed, "fp32", loss) for lr in (0.1, 0.2) for seed, loss in ((1, 0.5), (2, 0.4))]
    above = {(0.1, 1): 0.55, (0.1, 2): 0.52, (0.2, 1): 0.5, (0.2, 2): 0.4}
    return made_record(*fp32, *(made_run(lr, seed, "bf16", loss) for (lr, seed), loss in above.items()))


def test_a_row_has_the_means_over_the_seeds_and_how_far_each_is_from_the_first_point_of_its_seed(record):
    table = study.table_of(record)
    assert table.head[:4] == ("lr", "precision", "runs", "validation loss") and len(table.align) == len(table.head)
    rows = {row[:2]: row for row in table.rows}
    assert rows["0.1", "fp32"][2:4] == ("2", "0.4500 (0.4000 to 0.5000)")
    assert rows["0.1", "fp32"][4:] == ("45.0 (40.0 to 50.0)", "0.550 (0.500 to 0.600)", "-")
    assert rows["0.1", "bf16"][-1] == "+20.00 % (+10.00 to +30.00)"
    assert rows["0.2", "bf16"][-1] == "+0.00 % (+0.00 to +0.00)"


def test_the_median_of_the_images_to_the_target_has_its_interval_and_a_missed_target_is_beyond_all(record):
    """The median of five draws from five seeds is the first one's with a probability of 5.8 %: three of five, binomial."""
    runs = [
        made_run(0.1, seed, "fp32", 0.5) | {"images_to_target": 100 * seed, "seconds_to_target": seed}
        for seed in range(1, 6)
    ]
    missed = [made_run(0.2, seed, "fp32", 0.5) | {"target": "missed"} for seed in range(1, 6)]
    missed[0] |= {"target": "reached", "images_to_target": 100, "seconds_to_target": 1.5}
    rows = study.table_of(made_record(*runs, *missed)).rows
    assert [row[-2] for row in rows] == ["300 (100 to 500)", "missed (100 to missed)"]
    assert [row[-1] for row in rows] == ["3 (1 to 5)", "missed (2 to missed)"]


def test_a_run_that_did_not_end_well_is_counted_and_is_in_no_mean(record):
    lost = made_run(0.1, 3, "fp32", 9.9, status="failed")
    table = study.table_of(made_record(*record["runs"], lost, made_run(0.1, 3, "bf16", 0.6)))
    assert "1 of 10 runs did not end well" in table.title
    rows = {row[:2]: row for row in table.rows}
    assert rows["0.1", "fp32"][2] == "2" and rows["0.1", "bf16"][2] == "3"
    assert rows["0.1", "bf16"][-1] == "+20.00 % (+10.00 to +30.00)"  # of the seeds whose first point ran
    del record["runs"][0]["val_loss"]
    rows = {row[:2]: row for row in study.table_of(record).rows}
    assert rows["0.1", "bf16"][-1] == "+30.00" and rows["0.1", "fp32"][3] == "0.4000"


@pytest.mark.parametrize("of_points", [("precision",), ()])
def test_the_command_draws_and_puts_the_table_between_a_page_s_marks(record, tmp_path, monkeypatch, of_points, capsys):
    monkeypatch.chdir(tmp_path)
    Path("record.json").write_text(json.dumps({**record, "of_points": of_points}))
    Path("page.md").write_text("<!-- table of record.json -->\n<!-- end of table -->\n")
    assert study.main(["record.json", "out.png", "page.md"]) == 0
    assert "| 0.1 | bf16 | 2 |" in Path("page.md").read_text()
    assert Path("out.png").stat().st_size > 5000
    assert study.main(["record.json"]) == 0
    assert "0.4500 (0.4000 to 0.5000)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "key", "name"), [("validations", "val_loss", "validation loss"), ("evaluations", "fid", "FID")]
)
def test_curves_are_of_a_score_that_each_run_has(record, lines, key, name):
    """Three scores, drawn as they are, without the untrained network's; where a run has none, all have the training loss."""
    for number, run in enumerate(record["runs"]):
        run[lines] = {"images": [0, 32, 96, 160], key: [9.0, 3.0, 2.0, 1.0 + number]}
    scored, what = study.with_scores(record)
    assert what == name
    bands = study.losses_of(scored["runs"], ["precision", "optimizer.lr"])
    assert bands["precision=fp32, lr=0.1"].tolist() == [[32, 96, 160], [3, 2, 1.5], [3, 2, 1], [3, 2, 2]]
    record["runs"][-1].pop(lines)
    assert study.with_scores(record) == (record, "training loss")
