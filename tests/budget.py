"""A limit in seconds for each test that starts a run: `@pytest.mark.budget(60)`, or for a whole file in its `pytestmark`.

It holds for the test itself and not for its fixtures, which may be made for others too: for these pytest-timeout's limit in
pyproject.toml stands. A budget is several times what the test takes on two quiet cores, so that one beside a busy neighbour
still passes; a test that hangs is interrupted when its budget is spent. tests/test_budget.py sees that every such test
has one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from pytest_timeout import Settings

OF_FILES = {
    "test_ladder.py": 500,
    "test_microbatch.py": 120,
    "test_miniature_speed.py": 900,
    "test_mlperf_log.py": 200,
    "test_profile.py": 120,
    "test_trainer.py": 300,
    "test_reports_mlperf.py": 120,
    "test_speed.py": 300,
    "test_sync.py": 60,
    "test_yamls.py": 120,
}
"""File -> budget of its tests that name none."""


def budget_of(item: pytest.Item) -> float | None:
    """The seconds that a test may take, None where it has no budget. The nearest marker counts."""
    marker = item.get_closest_marker("budget")
    if marker is None:
        return OF_FILES.get(item.path.name)
    [seconds] = marker.args
    return seconds


def set_timer(item: pytest.Item, seconds: float) -> None:
    """Let pytest-timeout interrupt the test after so many seconds from now, and not before."""
    hooks = item.config.pluginmanager.hook
    hooks.pytest_timeout_cancel_timer(item=item)
    settings = Settings(timeout=seconds, method="signal", func_only=True, disable_debugger_detection=False)
    hooks.pytest_timeout_set_timer(item=item, settings=settings)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    seconds = budget_of(item)
    if seconds is None:
        return (yield)
    set_timer(item, seconds)
    begin, cause = time.monotonic(), None
    try:
        return (yield)
    except BaseException as error:
        cause = error
        raise
    finally:
        took_sec = time.monotonic() - begin
        set_timer(item, float(item.config.getini("timeout")))  # for what the fixtures have to put away
        if took_sec > seconds:
            raise pytest.fail.Exception(f"budget: {took_sec:.1f} s, of {seconds:g} s that it may take.") from cause
