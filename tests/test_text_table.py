"""common/log.py: cells are shown as they are given."""

from __future__ import annotations

from common.log import render_table


def test_cells_are_shown_as_they_are_given_none_as_a_dash_and_no_line_ends_in_blanks():
    rows = [("a", "1,234", "x y"), ("longer", 0.10, None), ("1e3", "007", "z")]
    expected = ["what     ours  note", "a       1,234  x y", "longer    0.1  -", "1e3       007  z"]
    assert render_table(("what", "ours", "note"), rows, "lrl").splitlines() == expected
    assert render_table(("what", "ours"), [], "lr") == "what  ours"
