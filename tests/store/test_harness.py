"""The harness itself: every kind of outcome is seen for what it is, and nothing needs a store."""

from __future__ import annotations

import numpy as np
import pytest

from tests.store import dataset
from tests.store.__main__ import is_good
from tests.store.reader_outcomes import HANG, NAMED, RIGHT, SHORT, UNNAMED, WRONG, Rank, Verdict, judge

ORDER = [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
CAUSE = [{"shard.00001.mds"}, {"e78e3c0c1560ab7c", "4,096 bytes"}]


DIED = {"batches": [[2, 3]], "ended": False, "status": 1}


BAD = ("E", "shard.00001.mds has 4,096 bytes")


class Read:
    """Two ranks that have read two batches of two samples each, as they should, unless told otherwise."""

    started = 0.0

    def __init__(self, **changes):
        self.ranks = [
            Rank(batches=[list(batch) for batch in batches], owed_batches=2, ended=True, status=0) for batches in ORDER
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
        ({**DIED, "wrong": [3], "error": BAD}, WRONG),  # worse than the error that follows
        ({"batches": [[2, 3]]}, SHORT),
        ({**DIED, "status": None}, HANG),
        ({"status": None}, HANG),  # all was read, and it does not end
        ({**DIED, "error": BAD}, NAMED),
        ({**DIED, "error": ("E", "shard.00001.mds is bad")}, UNNAMED),
        ({**DIED, "status": -7}, UNNAMED),
    ],
)
def test_every_outcome_is_seen(changes, outcome):
    assert judge(Read(**changes), 8, ORDER, CAUSE).outcome == outcome
    assert is_good(True, Verdict(outcome)) == (outcome == RIGHT)
    assert is_good(False, Verdict(outcome)) == (outcome == NAMED)


def test_a_sample_is_known_by_its_number_and_every_bit_counts():
    moments, tokens = (dataset.truth()[name][[3, 600]].copy() for name in ("moments", "tokens"))
    assert dataset.unlike_truth(moments, tokens) == ([3, 600], [])
    moments.view(np.uint16)[1, 7, 15, 15] ^= 1
    assert dataset.unlike_truth(moments, tokens.astype(np.int64)) == ([3, 600], [600])
    tokens[0, 0] = 60000
    assert dataset.unlike_truth(moments, tokens) == ([60000, 600], [60000, 600])
