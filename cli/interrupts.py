"""Ctrl-C (SIGINT): the line that a command prints, its exit code 130, and the second one, which ends a process at once.

A terminal sends SIGINT to a whole job: the launcher, all ranks and their workers. The first one is handled like any signal,
by a handler that ends the command or notes it (cli/ranks.py). Python runs handlers in the main thread alone, which may be
in C++ code for long. So a thread here ends the process at the second one, and at the first one during imports.

Nothing here takes long to import, so that a command has its line while it imports its libraries.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from cli.log import log

CODE = 128 + signal.SIGINT

_text = "Interrupted. The same command starts it again."
_at_once: int | None = None  # the exit code with which the next SIGINT ends this process; None: the second one does
_pipe: list[int] = []
_leaving = threading.RLock()  # a handler may interrupt who has it


def told(text: str) -> None:
    """From here on an interrupt ends this process with this line: at once until `begin`, then as a handler does it."""
    global _text, _at_once
    _text, _at_once = text, CODE
    _listen()


def begin() -> None:
    """A command's work begins: the first SIGINT unwinds it, or is noted by who replaces the handler; the second ends it."""
    global _at_once
    _at_once = None
    _listen()


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Let a SIGINT end this process at once, with its line: the main thread waits in C++ code, and nothing is to be saved."""
    global _at_once
    before, _at_once = _at_once, CODE
    yield
    _at_once = before


def end(code: int) -> None:
    """A command's work is done: a SIGINT ends what is left of the process, with the command's own exit code."""
    global _at_once
    _at_once = code
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, lambda number, frame: None)


def say() -> None:
    """Print the line of an interrupted command; rank 0 does."""
    log.error(_text)


def _listen() -> None:
    signal.signal(signal.SIGINT, _unwind)  # again where Composer has put its own in the place
    if not _pipe:
        _pipe[:] = os.pipe()
        for end in _pipe:
            os.set_blocking(end, end == _pipe[0])
        signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
        thread = threading.Thread(target=_count, daemon=True)
        thread.start()
        atexit.register(_settle, thread)
        os.register_at_fork(after_in_child=_ignore)


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    if _at_once is not None:
        _leave()
    # Composer's launcher sends SIGTERM next, which would change the exit code. If it is here, Python complains of SIG_IGN.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    sys.exit(CODE)


def _count() -> None:
    """End this process at the second SIGINT, or at the first one where nothing has begun or all is done."""
    num, numbers = 0, b""
    while 0 not in numbers:
        numbers = os.read(_pipe[0], 512)
        num += numbers.count(signal.SIGINT)
        if num > 1 or (signal.SIGINT in numbers and _at_once is not None):
            _leave()


def _leave() -> NoReturn:
    with _leaving:
        if _at_once == CODE:
            say()
        os._exit(CODE if _at_once is None else _at_once)


def _settle(thread: threading.Thread) -> None:
    """At exit let the thread handle what came before: the main thread may leave by another handler of the same SIGINT."""
    with contextlib.suppress(OSError):
        os.write(_pipe[1], b"\0")
        thread.join(1.0)


def _ignore() -> None:
    """In a forked child: it ends with its parent, and its signals are not the parent's."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
