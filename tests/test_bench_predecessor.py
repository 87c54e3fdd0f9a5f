"""bench/predecessor.py: settings that it does not support are refused; a non-finite last loss leaves no summary."""

from __future__ import annotations

import pytest
from conftest import TINY_RUN

from bench import predecessor

SYNTHETIC = [*TINY_RUN, "data.synthetic=true"]


def test_a_loss_that_is_not_finite_leaves_no_summary(tmp_path):
    words = ["optimizer.lr=1e30", "max_duration=4ba", "data.workers=0", f"run_folder={tmp_path}", "run_name=a"]
    with pytest.raises(ValueError, match="^loss: (nan|inf) at the end: "):
        predecessor.main([*SYNTHETIC, *words])
    assert not (tmp_path / "a" / "summary.json").exists()
