"""callbacks/steady_clock.py and the MLPerf log's clock: a training's seconds where the machine's clock is set."""

from __future__ import annotations

import datetime
import time
from types import SimpleNamespace

import pytest
from composer import Timestamp

from callbacks.steady_clock import SteadyClock
from record.mlperf_events import EventLog, read_events


def seconds(of: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=of)


@pytest.mark.parametrize("set_sec", [-3600.0, 3600.0, 0.0])
def test_a_batch_in_which_the_clock_was_set_takes_as_long_as_it_took(monkeypatch, set_sec):
    """Three batches of 2 s; the clock is set in the second."""
    clock, at = SteadyClock(), iter([100.0, 102.0, 104.0, 106.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(at))
    state = SimpleNamespace(timestamp=Timestamp())
    clock.epoch_start(state, None)
    for took in (2.1, 2.0 + set_sec, 1.9):  # as Composer measures them
        state.timestamp = state.timestamp.to_next_batch(samples=8, duration=seconds(took))
        clock.batch_end(state, None)
    assert state.timestamp.total_wct == state.timestamp.epoch_wct == seconds(6.0)


def test_the_mlperf_log_counts_on_where_the_clock_is_set_back(tmp_path, monkeypatch):
    log = EventLog(tmp_path / "mlperf.log")
    log.event("init_start")
    wall, began = time.time(), time.monotonic()
    monkeypatch.setattr(time, "time", lambda: wall - 3600.0)
    monkeypatch.setattr(time, "monotonic", lambda: began + 5.0)
    log.event("init_stop")
    first, last = (event["time_ms"] for event in read_events(tmp_path / "mlperf.log"))
    assert 4900 <= last - first <= 60_000
