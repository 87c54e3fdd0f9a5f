"""prepare/parts.py: what the last line of a command says of speed."""

from __future__ import annotations

from prepare.parts import SampleCounts


def test_a_slow_pace_keeps_its_digits_and_nothing_made_has_none():
    assert SampleCounts(read=1).format_speed("images", 3.0) == "; 0.333 images/s over 3.0 s"
    assert SampleCounts(read=3000).format_speed("samples", 2.0) == "; 1,500.0 samples/s over 2.0 s"
    assert SampleCounts().format_speed("images", 3.0) == ""
