"""What a command says when it is interrupted (SIGINT, Ctrl-C), in its imports too: this file has none that take time."""

from __future__ import annotations

import sys
from types import TracebackType

from cli.log import EVERY_RANK, log


def told(text: str) -> None:
    """From here on an interrupt ends this process with a line instead of a traceback; Python then dies of the signal."""

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            log.error(text, extra=EVERY_RANK)
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = say
