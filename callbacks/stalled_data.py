"""Tells people when the data has stalled: where a logger can (record/metric_names.py), once in each wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from composer import Callback, Logger, State

from record.metric_names import alert


class StalledData(Callback):
    """Watches the loader's wait for the next batch. Where one rank waits, all do: so rank 0, which logs, knows of it.

    Args:
        all_ready: of stages.loader.Loader; `self.all_ready` takes its place there.
        limit_sec: of one wait, after which it is told.
    """

    def __init__(self, all_ready: Callable[[bool], bool], limit_sec: float):
        self._all_ready, self.limit_sec = all_ready, limit_sec
        self._loggers: Sequence[Any] = ()
        self._since: float | None = None
        self._is_told = False

    def init(self, state: State, logger: Logger) -> None:
        self._loggers = logger.destinations

    def all_ready(self, is_here: bool) -> bool:
        """Tell the others whether this rank has its batch, and return whether all have theirs."""
        are_here, now = self._all_ready(is_here), time.monotonic()
        if are_here:
            self._since, self._is_told = None, False
            return True
        self._since = now if self._since is None else self._since
        if not self._is_told and now - self._since >= self.limit_sec:
            self._is_told = True
            text = f"data: no batch for {now - self._since:.0f} s. The run waits on; its stderr says what has arrived."
            alert(self._loggers, "data has stalled", text)
        return False
