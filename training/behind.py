"""Work that a thread does behind the step, one piece at a time: whoever brings a second one waits for the first."""

from __future__ import annotations

import threading
from collections.abc import Callable

from cli import ranks

LEAVE_SEC = (
    600.0  # of a piece that is waited for because another rank has failed: a disk that hangs must not hold the job
)


class Behind:
    """A thread for one piece of work. A process that ends, of itself or because another rank has failed, waits for it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._error: Exception | None = None
        ranks.before_leaving(lambda text: self.join(LEAVE_SEC))

    def start(self, work: Callable[[], str | None]) -> None:
        """Let the thread do it; the piece before has been waited for. `work` returns why it has failed, or None."""
        assert self._thread is None

        def do() -> None:
            try:
                self._failure = work()
            except Exception as error:  # raised where it is waited for
                self._error = error

        self._thread = threading.Thread(target=do, name="behind")  # no daemon: the interpreter waits for it
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """True if a piece has ended badly, and nobody has waited for it yet."""
        return self._failure is not None or self._error is not None

    def join(self, limit_sec: float | None = None) -> None:
        """Wait for the piece that there is; no longer than the limit, if one is given."""
        if self._thread is not None:
            self._thread.join(limit_sec)

    def wait(self) -> str | None:
        """Wait for the piece that there is, and return why it has failed. Raises what it has not foreseen."""
        self.join()
        self._thread, failure, error = None, self._failure, self._error
        self._failure = self._error = None
        if error is not None:
            raise error
        return failure
