"""bench/step.py, reports/tables.py: contestants that compute the same, the record, its table, what is refused; no speed."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from bench import step
from reports import tables

STEP = "reports/results/step.json"
FEW = ["batch_size=2", "steps=1", "rounds=2", "image_size=32"]


@pytest.fixture(autouse=True)
def threads(same_number_of_threads):
    """The command sets them."""


def test_after_some_steps_the_weights_of_the_plain_loop_are_ours():
    """With gradients that are clipped, and images that are encoded in the step."""
    config = step.StepConfig(preset="tiny", image_size=32, batch_size=2, clip_norm=0.01)
    recipe, model = step.recipe_of(config, ema=True)
    with step.contestants(recipe, model, step.build_device("fp32")) as (ours, plain):
        assert step.largest_difference(ours, plain, recipe.seed, 3) <= step.MOST_DIFFERENCE
        weights, theirs = ours.trainer.state.model.denoiser, plain.unet
    begin = model.denoiser
    pairs = zip(weights.parameters(), begin.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) > 2e-4  # AdamW's first steps are 1e-4 each
    apart = [(a - b).detach().abs().max() for a, b in zip(weights.parameters(), theirs.parameters(), strict=True)]
    assert float(max(apart)) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(90, func_only=True)
def test_the_record_has_every_contestant_and_its_ratios_are_those_of_its_rounds(tmp_path, capsys):
    results = tmp_path / "step.json"
    assert step.main([*FEW, "stage=moments", f"results={results}"]) == 0
    record, printed = json.loads(results.read_text()), capsys.readouterr().out.splitlines()
    shown = ["ours", "diffusers, a plain loop"] * 2
    assert len(printed) == 3 + len(shown) and all(
        f"  {name}  " in line for name, line in zip(shown, printed[3:], strict=True)
    )
    assert record["measured"] == "step" and record["precision"] == "fp32" and record["preset"] == "tiny"
    for contest in ("bare", "ema"):
        assert 0 <= record[f"{contest}_loss_difference"] <= 1e-6
        for kind in ("", "cpu_"):
            pairs = (record["by_round"][f"{contest}_{who}_{kind}ms"] for who in ("plain", "ours"))
            ratios = [a / b for a, b in zip(*pairs, strict=True)]
            assert len(ratios) == 2 and all(ratio > 0 for ratio in ratios)
            ratio = record[f"{contest}_{kind}speedup_vs_plain"]
            assert ratio == pytest.approx(statistics.median(ratios), rel=1e-4)


def test_contestants_that_compute_something_else_leave_no_record(tmp_path, monkeypatch, capsys):
    plain = step.PlainLoop.loss
    monkeypatch.setattr(step.PlainLoop, "loss", lambda self: 1.01 * plain(self))
    assert step.main([*FEW, f"results={tmp_path}/step.json"]) == 1
    text = "step: no record was written: with the same random numbers losses differ by 0.01 of their size, 1e-06 is allowed"
    assert capsys.readouterr().err.splitlines()[-1].startswith(text) and not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a CPU cannot do")
def test_every_wrong_key_is_reported_at_once(capsys, monkeypatch):
    assert step.main(["image_size=65", "precision=tf32"]) == 2
    size, precision = capsys.readouterr().err.splitlines()
    assert size.startswith("image_size: 65 x 65 px does not fit sd2.") and precision == "precision: tf32 needs a GPU."
    monkeypatch.setattr(step, "_free_gib", lambda: 23.46)
    assert step.main(["preset=full"]) == 2
    assert capsys.readouterr().err.startswith("preset: full needs 36 GiB for two contestants; 23.5 are free.")


# --- tables of records ---


@pytest.fixture
def record() -> dict:
    return json.loads((ROOT / STEP).read_text())


def test_a_table_stands_between_the_marks_of_its_record_and_nothing_else_changes(record, tmp_path, capsys):
    page, path, marks = tmp_path / "page.md", tmp_path / "r.json", "<!-- table of {} -->\n{}<!-- end of table -->\n"
    path.write_text(json.dumps(record))
    page.write_text("# A\n" + marks.format(path, "old\n") + "b\n" + marks.format("other.json", "kept\n"))
    assert tables.main([str(path), str(page)]) == 0
    drawn, kept = marks.format(path, tables.markdown_of(record)), marks.format("other.json", "kept\n")
    assert page.read_text() == f"# A\n{drawn}b\n{kept}"
    assert tables.main([str(path), str(page)]) == 0 and capsys.readouterr().out == f"written: {page}\n"


BENCHES = " or ".join(f"bench.{name}" for name in (*tables.TABLES, "latency"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a.md"], "command line: a.md. Possible: RECORD.json, OUT.csv, PAGE.md. Give one record."),
        (["none.json"], "none.json: No such file or directory. Check the path."),
        (["a.json"], f"a.json: is no record of {BENCHES} (KeyError: 'commit')."),
        (["b.json"], f"b.json: is no record of {BENCHES} (TypeError: "),
        (["step.json", "page.md"], "the page has no place for the table of step.json. Add <!-- table of step.json -->"),
    ],
)
def test_other_files_and_pages_without_marks_are_refused(words, said, record, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, content in {"a.json": "{}", "b.json": "[]", "step.json": json.dumps(record), "page.md": "# A\n"}.items():
        Path(name).write_text(content)
    assert tables.main(words) == 2
    assert capsys.readouterr().err.startswith(said)
