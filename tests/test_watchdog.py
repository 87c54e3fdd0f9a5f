"""ranks/watchdog.py: who is behind, who is lost, and what may take long; training/health.py: what it is told."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, replace

import pytest
import torch
from composer import Event, State
from composer.devices import DeviceCPU

from ranks import collectives, rendezvous, watchdog
from ranks.watchdog import Beat, Watchdog, describe_stall
from training.health import Heartbeat

BEAT = Beat(marks=40, batch=7, phase="train", event="before backward", sec=30.0, may_take_long=False)
END = "The run ends on all ranks; the same command resumes it from its last checkpoint."


@pytest.fixture
def three(monkeypatch):
    """Three ranks on two machines."""
    monkeypatch.setattr(rendezvous, "_hosts", ["a", "a", "b"])
    monkeypatch.setattr(watchdog.dist, "get_world_size", lambda: 3)
    return dict.fromkeys(range(3), BEAT)


def test_the_rank_that_is_behind_or_was_first_at_a_place_is_named_with_its_machine(three):
    late = replace(BEAT, marks=39, event="before forward", sec=31.0)
    text = "no progress for 31 s: rank 2 (b) is behind, at batch 7, train (before forward) for 31 s; others: batch 7, "
    assert describe_stall({**three, 2: late}, 30.5) == f"{text}train (before backward) for 30 s"
    assert describe_stall({**three, 2: late}, 31.5) is None
    text = "no progress for 32 s: all ranks are at batch 7, train (before backward) for 30 s, rank 1 (a) first"
    assert describe_stall({**three, 1: replace(BEAT, sec=32.0)}, 10) == text


def test_nothing_is_stalled_while_a_rank_may_take_long_or_where_all_have_ended(three):
    """The others wait for it: for its compiling, its evaluation, its checkpoint. Nobody waits for one that has ended."""
    for rank in range(3):
        assert describe_stall({**three, rank: replace(BEAT, may_take_long=True, sec=9999.0)}, 10) is None
    ended = replace(BEAT, marks=99, has_finished=True, sec=9999.0)
    assert describe_stall(dict.fromkeys(range(3), ended), 10) is None
    assert "for 30 s: rank 0 is at batch 7" in str(describe_stall({0: BEAT, 1: ended, 2: ended}, 10))


class Store(dict):
    """The ranks' store: what others have written."""

    def check(self, keys):
        return all(key in self for key in keys)

    def multi_get(self, keys):
        return [self[key] for key in keys]

    def beat(self, rank: int, number: int, **more) -> None:
        self[f"beat/{rank}"] = json.dumps({**asdict(BEAT), "sec": 0.0, "number": number, **more})


def test_a_rank_whose_beats_stop_is_lost_after_the_limit_and_one_that_never_came_too(three, monkeypatch):
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: 1000.0)
    watch = Watchdog(300.0)
    assert watch.lost_sec == 120.0 and Watchdog(30.0).lost_sec == 30.0 and Watchdog(None).lost_sec is None
    watch._store = Store()
    for number, now in enumerate([1002.0, 1060.0, 1110.0, 1119.0]):
        watch._store.beat(0, number + 1)
        watch._store.beat(1, min(number + 1, 2))
        watch._read(now)
        assert watch._verdict(now) is None
    where = "batch 0, start (building) for 0 s"
    lost = f"nothing heard of rank 2 (b) for 121 s; last: {where}. It is stopped, dead or cut off."
    assert watch._verdict(1121.0) == f"health.stall_sec: {lost} {END}"
    watch._store.beat(2, 1)
    watch._read(1121.0)
    assert watch._verdict(1121.0) is None
    lost = "nothing heard of rank 1 (a) for 121 s; last: batch 7, train (before backward) for 0 s."
    assert lost in str(watch._verdict(1181.0))
    watch._store.beat(1, 9, has_finished=True)
    watch._store.beat(0, 9)
    watch._store.beat(2, 9)
    watch._read(1182.0)
    assert watch._verdict(1300.0) is None, "rank 1 has left as it should"
    without_limit = Watchdog(None)
    without_limit._store = Store()
    without_limit._store.beat(0, 1, sec=1e6)
    without_limit._read(0.0)
    assert without_limit._verdict(1e9) is None


def test_a_run_of_one_rank_ends_by_itself_but_not_after_it_was_asleep(monkeypatch):
    monkeypatch.setattr(watchdog, "BEAT_SEC", 0.01)
    left, quiet = [], threading.Event()
    monkeypatch.setattr(collectives, "exit_process", lambda text, code: (left.append((text, code)), quiet.set()))
    watch, now = Watchdog(60.0), [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    watch.progress.is_warm, watch.progress.phase = True, lambda: "train"
    watch.progress.mark("before forward", 3)
    looks = iter([1.0, 2.0, 5000.0, 5010.0, 5020.0, 5030.0, 5040.0, 5050.0, 5061.0])

    class Quiet:
        """Lets the time between two looks pass."""

        def wait(self, seconds: float) -> bool:
            now[0] = next(looks, now[0])
            return quiet.is_set()

    watch._watch_alone(Quiet())
    text = "no progress for 61 s: rank 0 is at batch 3, train (before forward) for 61 s"
    assert left == [(f"health.stall_sec: {text}. {END}", 1)] and now[0] == 5061.0


def test_phases_are_those_of_the_clocks_and_only_some_may_be_long(tmp_path):
    watch, clock = Watchdog(None), ["other"]
    heartbeat = Heartbeat(watch, tmp_path, lambda: clock[0])
    state = State(model=torch.nn.Linear(1, 1), rank_zero_seed=0, run_name="x", device=DeviceCPU())

    assert watch.progress.beat(0).may_take_long and watch.progress.beat(0).phase == "start"
    for event, on, phase, may_be_long in (
        (Event.FIT_START, "other", "between batches", True),
        (Event.BEFORE_FORWARD, "train", "train", True),  # the first step compiles
        (Event.BATCH_END, "other", "between batches", False),
        (Event.BATCH_CHECKPOINT, "other", "checkpoint", True),
        (Event.BATCH_CHECKPOINT, "eval", "evaluation", True),
        (Event.BEFORE_DATALOADER, "data_wait", "waiting for data", False),
        (Event.BEFORE_FORWARD, "train", "train", False),
        (Event.FIT_END, "other", "checkpoint", True),
    ):
        clock[0] = on
        heartbeat.run_event(event, state, None)
        beat = watch.progress.beat(0)
        assert (beat.phase, beat.may_take_long) == (phase, may_be_long), event
    assert watch.progress.marks == 8 and watch.progress.is_over
    heartbeat.close(state, None)
    assert watch.progress.beat(0).phase == "end"
    collectives.stop_watchdogs()
