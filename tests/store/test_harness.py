"""The harness itself: every kind of outcome is seen for what it is, and nothing needs a store."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

from tests.store import stage
from tests.store.__main__ import Options, is_good, parse
from tests.store.faults import FAULTS, damage
from tests.store.readings import HANG, LEFT, MISSED, NAMED, OUTCOMES, RIGHT, SHORT, UNNAMED, WRONG, Rank, Verdict, judge
from tests.store.server import HERE

ORDER = [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
CAUSE = [{"shard.00001.mds"}, {"e78e3c0c1560ab7c", "4,096 bytes"}]


class Read:
    """Two ranks that have read two batches of two samples each, as they should, unless told otherwise."""

    epochs = 1
    started = 0.0

    def __init__(self, **changes):
        self.ranks = [
            Rank(batches=[list(batch) for batch in batches], epochs=1, owed_batches=2, ended=True, status=0)
            for batches in ORDER
        ]
        for name, value in changes.items():
            setattr(self.ranks[1], name, value)

    def is_short(self, rank):
        return rank.ended and len(rank.batches) < rank.owed_batches


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, RIGHT),
        ({"wrong": [6]}, WRONG),
        ({"batches": [[2, 3], [2, 3]]}, WRONG),  # one shard's bytes under another's name
        ({"batches": [[6, 7], [2, 3]]}, WRONG),  # another order
        ({"batches": [[2, 3]]}, SHORT),
        ({"batches": [[2, 3]], "ended": False, "status": None}, HANG),
        ({"status": None}, HANG),  # all was read, and it does not end
        ({"batches": [[2, 3]], "ended": False, "status": 1, "error": ("E", "shard.00001.mds has 4,096 bytes")}, NAMED),
        ({"batches": [[2, 3]], "ended": False, "status": 1, "error": ("E", "shard.00001.mds is bad")}, UNNAMED),
        ({"batches": [[2, 3]], "ended": False, "status": -7}, UNNAMED),
    ],
)
def test_every_outcome_is_seen(changes, outcome):
    assert judge(Read(**changes), 8, ORDER, CAUSE).outcome == outcome


def test_wrong_data_is_worse_than_the_error_that_follows():
    read = Read(batches=[[2, 3]], wrong=[3], ended=False, status=1, error=("E", "shard.00001.mds has 4,096 bytes"))
    assert judge(read, 8, ORDER, CAUSE).outcome == WRONG


def test_an_error_without_a_known_cause_is_not_named():
    read = Read(batches=[[2, 3]], ended=False, status=1, error=("E", "something"))
    assert judge(read, 8, ORDER, []).outcome == UNNAMED


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_good_is_a_whole_epoch_after_a_fault_that_heals_and_a_named_cause_after_one_that_stays(outcome):
    assert {RIGHT, NAMED, UNNAMED, SHORT, HANG, LEFT, WRONG, MISSED} == set(OUTCOMES)
    assert is_good(True, Verdict(outcome)) == (outcome == RIGHT)
    assert is_good(False, Verdict(outcome)) == (outcome == NAMED)


def test_a_sample_is_known_by_its_number_and_every_bit_counts():
    moments, tokens = (stage.truth()[name][[3, 600]].copy() for name in ("moments", "tokens"))
    assert stage.unlike_truth(moments, tokens) == ([3, 600], [])
    moments.view(np.uint16)[1, 7, 15, 15] ^= 1
    assert stage.unlike_truth(moments, tokens.astype(np.int64)) == ([3, 600], [600])
    tokens[0, 0] = 60000
    assert stage.unlike_truth(moments, tokens) == ([60000, 600], [60000, 600])


def test_bad_bytes_are_of_three_kinds():
    good, other = bytes(range(100)), b"other"
    flipped, cut, swapped = (damage(good, other, form) for form in range(3))
    assert len(flipped) == 100 and sum(a != b for a, b in zip(good, flipped, strict=True)) == 1
    assert (cut, swapped) == (good[:50], other)


def test_words_of_the_command_line():
    assert parse(["rounds=2", "only=healthy,killed", "kinds=ours", "extras=none", "out=x"]) == Options(
        2, ["healthy", "killed"], ["ours"], [], "x"
    )
    with pytest.raises(ValueError, match=r"^only: 'no' is unknown\. Possible: healthy, stopped, .*, no_permission\.$"):
        parse(["only=no"])
    with pytest.raises(ValueError, match=r"^rounds: '0' is no number of rounds\. Possible: 1 and up\.$"):
        parse(["rounds=0"])
    with pytest.raises(
        ValueError, match=r"^round=1: unknown\. Possible: rounds=, only=, kinds=, extras=, out=, store=\.$"
    ):
        parse(["round=1"])
    assert len(FAULTS) == len({fault.text for fault in FAULTS.values()})


def test_the_script_of_the_server_can_be_parsed():
    done = subprocess.run(["bash", "-n", str(HERE / "swift_s3.sh")], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
