"""cli/watching.py: who is behind, who is lost, and what may take long; training/health.py: what it is told."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, replace

import pytest
import torch
from composer import Event, State
from composer.devices import DeviceCPU

from cli import meeting, ranks, watching
from cli.watching import Beat, Watch, dump_stacks, stall
from training.health import Heartbeat

BEAT = Beat(marks=40, batch=7, phase="train", doing="before backward", sec=30.0, may_stay=False)
END = "The run ends on all ranks; the same command resumes it from its last checkpoint."


@pytest.fixture
def three(monkeypatch):
    """Three ranks on two machines."""
    monkeypatch.setattr(meeting, "_hosts", ["a", "a", "b"])
    monkeypatch.setattr(watching.dist, "get_world_size", lambda: 3)
    return dict.fromkeys(range(3), BEAT)


def test_the_rank_that_has_come_least_far_is_behind_and_is_named_with_its_machine(three):
    late = replace(BEAT, marks=39, doing="before forward", sec=31.0)
    assert stall({**three, 2: late}, 30.5) == (
        "no progress for 31 s: rank 2 (b) is behind, at batch 7, train (before forward) for 31 s; others: batch 7, train "
        "(before backward) for 30 s"
    )
    assert stall({**three, 2: late}, 31.5) is None


def test_of_ranks_at_one_place_the_one_that_came_first_is_named(three):
    text = "no progress for 32 s: all ranks are at batch 7, train (before backward) for 30 s, rank 1 (a) first"
    assert stall({**three, 1: replace(BEAT, sec=32.0)}, 10) == text


@pytest.mark.parametrize("may_stay", [0, 1, 2])
def test_nothing_is_stalled_while_a_rank_may_be_long_where_it_is(three, may_stay):
    """The others wait for it: for its compiling, its evaluation, its checkpoint."""
    assert stall({**three, may_stay: replace(BEAT, may_stay=True, sec=9999.0)}, 10) is None


def test_ranks_that_have_ended_are_waited_for_by_nobody(three):
    ended = replace(BEAT, marks=99, has_ended=True, sec=9999.0)
    assert stall(dict.fromkeys(range(3), ended), 10) is None
    assert str(stall({0: BEAT, 1: ended, 2: ended}, 10)).startswith("no progress for 30 s: rank 0 is at batch 7")


class Store(dict):
    """The ranks' store: what others have written."""

    def check(self, keys):
        return all(key in self for key in keys)

    def multi_get(self, keys):
        return [self[key] for key in keys]

    def beat(self, rank: int, number: int, **more) -> None:
        self[f"beat/{rank}"] = json.dumps({**asdict(BEAT), "sec": 0.0, "number": number, **more})


def test_a_rank_whose_beats_stop_is_lost_after_the_limit_and_one_that_never_came_too(three, monkeypatch):
    monkeypatch.setattr(watching.time, "monotonic", lambda: 1000.0)
    watch = Watch(300.0)
    assert watch.lost_sec == 120.0 and Watch(30.0).lost_sec == 30.0 and Watch(None).lost_sec is None
    watch._store = Store()
    for number, now in enumerate([1002.0, 1060.0, 1110.0, 1119.0]):
        watch._store.beat(0, number + 1)
        watch._store.beat(1, min(number + 1, 2))
        watch._read(now)
        assert watch._verdict(now) is None
    where = "batch 0, start (building) for 0 s"
    text = (
        f"health.stall_sec: nothing heard of rank 2 (b) for 121 s; last: {where}. It is stopped, dead or cut off. {END}"
    )
    assert watch._verdict(1121.0) == text
    watch._store.beat(2, 1)
    watch._read(1121.0)
    assert watch._verdict(1121.0) is None
    assert "nothing heard of rank 1 (a) for 121 s; last: batch 7, train (before backward) for 0 s." in str(
        watch._verdict(1181.0)
    )
    watch._store.beat(1, 9, has_ended=True)
    watch._store.beat(0, 9)
    watch._store.beat(2, 9)
    watch._read(1182.0)
    assert watch._verdict(1300.0) is None, "rank 1 has left as it should"


def test_without_a_limit_nobody_is_lost_or_stalled(three):
    watch = Watch(None)
    watch._store = Store()
    watch._store.beat(0, 1, sec=1e6)
    watch._read(0.0)
    assert watch._verdict(1e9) is None


def test_a_run_of_one_rank_ends_by_itself_but_not_after_it_was_asleep(monkeypatch):
    monkeypatch.setattr(watching, "BEAT_SEC", 0.01)
    left, quiet = [], threading.Event()
    monkeypatch.setattr(ranks, "leave", lambda text, code: (left.append((text, code)), quiet.set()))
    watch, now = Watch(60.0), [0.0]
    monkeypatch.setattr(watching.time, "monotonic", lambda: now[0])
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
    watch, clock = Watch(None), ["other"]
    heartbeat = Heartbeat(watch, tmp_path, lambda: clock[0])
    state = State(model=torch.nn.Linear(1, 1), rank_zero_seed=0, run_name="x", device=DeviceCPU())

    def beat(event: Event, on: str) -> tuple[str, bool]:
        clock[0] = on
        heartbeat.run_event(event, state, None)
        found = watch.progress.beat(0)
        return found.phase, found.may_stay

    assert watch.progress.beat(0).may_stay and watch.progress.beat(0).phase == "start"
    assert beat(Event.FIT_START, "other") == ("between batches", True)
    assert beat(Event.BEFORE_FORWARD, "train") == ("train", True), "the first step compiles"
    assert beat(Event.BATCH_END, "other") == ("between batches", False)
    assert beat(Event.BATCH_CHECKPOINT, "other") == ("checkpoint", True)
    assert beat(Event.BATCH_CHECKPOINT, "eval") == ("evaluation", True)
    assert beat(Event.BEFORE_DATALOADER, "data_wait") == ("waiting for data", False)
    assert beat(Event.BEFORE_FORWARD, "train") == ("train", False)
    assert watch.progress.marks == 7
    assert beat(Event.FIT_END, "other") == ("checkpoint", True) and watch.progress.is_over
    heartbeat.close(state, None)
    assert watch.progress.beat(0).phase == "end"
    ranks.be_quiet()


def test_stacks_of_all_threads_are_written_and_a_folder_that_cannot_be_made_is_passed_over(tmp_path):
    dump_stacks(tmp_path / "stacks" / "rank00000.txt")
    assert "test_watching.py" in (tmp_path / "stacks" / "rank00000.txt").read_text()
    dump_stacks(tmp_path / "no" / "stacks" / "rank00000.txt")


def test_watching_threads_end_before_the_run_does():
    """One that is in C++ code while the interpreter goes down aborts the process."""
    ended = []
    ranks.begin_watching(lambda quiet: ended.append(quiet.wait(60.0)))
    ranks.be_quiet()
    assert ended == [True]
