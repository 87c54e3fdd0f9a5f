"""bench/predecessor.py: settings that it does not support are refused; a non-finite last loss leaves no summary."""

from __future__ import annotations

import pytest
from conftest import TINY_RUN

from bench import predecessor

SYNTHETIC = [*TINY_RUN, "data.synthetic=true"]


def test_a_key_that_it_has_nothing_for_is_refused(capsys):
    words = ["compile=whole", "async_loss=true", "profile.batches=1", "device_train_microbatch_size=auto"]
    assert predecessor.main([*SYNTHETIC, *words]) == 2
    said = "The predecessor has nothing of the kind: leave it out."
    assert capsys.readouterr().err.splitlines() == [
        f"compile: whole. {said}",
        f"async_loss: True. {said}",
        f"profile.batches: 1. {said}",
        "device_train_microbatch_size: auto. This program tries none: give a number.",
    ]


def test_a_loss_that_is_not_finite_leaves_no_summary(tmp_path):
    words = ["optimizer.lr=1e30", "max_duration=4ba", "data.workers=0", f"run_folder={tmp_path}", "run_name=a"]
    with pytest.raises(ValueError, match="^loss: (nan|inf) at the end: "):
        predecessor.main([*SYNTHETIC, *words])
    assert not (tmp_path / "a" / "summary.json").exists()
