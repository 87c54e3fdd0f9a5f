"""prepare/counts.py: what the last line of a command says of speed."""

from __future__ import annotations

from prepare.counts import SampleCounts


def test_the_pace_has_each_kinds_part_of_the_time_the_largest_first_and_the_rest_last():
    counts = SampleCounts(read=3000)
    for other in (
        SampleCounts(seconds={"rest": 5.0, "decode": 1.0}),
        SampleCounts(seconds={"decode": 2.0, "write": 2.0}),
    ):
        counts.add(other)
    assert counts.pace("samples", 2.0) == "; 1,500.0 samples/s over 2.0 s (decode 30.0%, write 20.0%, rest 50.0%)"


def test_a_slow_pace_keeps_its_digits_and_nothing_made_has_none():
    assert SampleCounts(read=1).pace("images", 3.0) == "; 0.333 images/s over 3.0 s"
    assert SampleCounts(seconds={"write": 1.0}).pace("images", 3.0) == ""
