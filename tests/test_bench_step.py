"""bench/step.py, reports/tables.py: contestants that compute the same, the record, its table, what is refused; no speed."""

from __future__ import annotations

import json

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


@pytest.mark.slow
def test_after_some_steps_the_weights_of_the_plain_loop_are_ours():
    """With gradients that are clipped, and images that are encoded in the step."""
    config = step.StepConfig(preset="tiny", image_size=32, batch_size=2, clip_norm=0.01)
    recipe, model = step.recipe_of(config, ema=True)
    with step.contestants(recipe, model, step.build_device("fp32")) as (ours, plain):
        assert step.largest_difference(ours, plain, recipe.seed, 3) <= step.MOST_DIFFERENCE
        weights, theirs = ours.trainer.state.model.denoiser, plain.unet
    begin = model.denoiser

    def most_apart(other: torch.nn.Module) -> float:
        pairs = zip(weights.parameters(), other.parameters(), strict=True)
        return max(float((a - b).detach().abs().max()) for a, b in pairs)

    assert most_apart(begin) > 2e-4  # AdamW's first steps are 1e-4 each
    assert most_apart(theirs) < 1e-5


@pytest.mark.slow
def test_contestants_that_compute_something_else_leave_no_record(tmp_path, monkeypatch, capsys):
    plain = step.PlainLoop.loss
    monkeypatch.setattr(step.PlainLoop, "loss", lambda self: 1.01 * plain(self))
    assert step.main([*FEW, f"results={tmp_path}/step.json"]) == 1
    text = "step: no record was written: with the same random numbers losses differ by 0.01 of their size"
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


def test_a_table_stands_between_the_marks_of_its_record_and_nothing_else_changes(tmp_path, capsys):
    page, path, marks = tmp_path / "page.md", tmp_path / "r.json", "<!-- table of {} -->\n{}<!-- end of table -->\n"
    path.write_text((ROOT / STEP).read_text())
    page.write_text("# A\n" + marks.format(path, "old\n") + "b\n" + marks.format("other.json", "kept\n"))
    assert tables.main([str(path), str(page)]) == 0
    drawn, kept = (
        marks.format(path, tables.markdown_of(json.loads(path.read_text()))),
        marks.format("other.json", "kept\n"),
    )
    assert page.read_text() == f"# A\n{drawn}b\n{kept}"
    assert tables.main([str(path), str(page)]) == 0 and capsys.readouterr().out == f"written: {page}\n"
