"""Ctrl-C (SIGINT): the line that a command prints, and its exit code 130; the second one ends a process at once.

A terminal sends SIGINT to a whole job: the launcher, all ranks and their workers. The first one is handled like any signal,
by a handler that ends the command or notes it (ranks/collectives.py). Python runs handlers in the main thread alone, which
may be in C++ code for long. So a thread ends the process at the second one.

Nothing here takes long to import, so that a command has its line while it imports its libraries.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from common.log import log

CODE = 128 + signal.SIGINT

_text = "Interrupted. The same command starts it again."
_is_begun = False
_max_interrupts = 2  # the last one ends the process
_pipe: list[int] = []


def print_on_interrupt(text: str) -> None:
    """From here on an interrupt ends this process with this line: at once until `begin`, then as a handler does it."""
    global _text
    _text = text
    signal.signal(signal.SIGINT, _unwind)


def begin() -> None:
    """Start a command's work: the first SIGINT unwinds it, or is noted by who replaces the handler; the second ends it."""
    global _is_begun
    _is_begun = True
    signal.signal(signal.SIGINT, _unwind)  # again where Composer has put its own in the place
    if not _pipe:
        _pipe[:] = os.pipe()
        os.set_blocking(_pipe[1], False)
        signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=_end_at_the_last, daemon=True).start()
        os.register_at_fork(after_in_child=_ignore)


def _end_at_the_last() -> None:
    num = 0
    while num < _max_interrupts:
        num += os.read(_pipe[0], 512).count(signal.SIGINT)
    if _max_interrupts == 1:
        print_interrupt_line()
    os._exit(CODE)


@contextlib.contextmanager
def end_at_once() -> Iterator[None]:
    """Let SIGTERM and SIGINT end this process at once: the main thread waits in C++ code, and nothing is to be saved."""
    global _max_interrupts
    actions = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: _leave_to_thread if _pipe else signal.SIG_DFL}
    handlers = {number: signal.signal(number, action) for number, action in actions.items()}
    _max_interrupts = 1
    yield
    _max_interrupts = 2
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing: the thread hears it too."""


def print_interrupt_line() -> None:
    """Print the line of an interrupted command; rank 0 does."""
    log.error(_text)


@contextlib.contextmanager
def end_with_reader() -> Iterator[None]:
    """End this process quietly if the reader of its output has left, as `head` does when it has its lines."""
    try:
        yield
        print(end="", flush=True)  # stdout is None where it was closed
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout, 0)
        if not any(events & select.POLLERR for _, events in output.poll(0)):
            raise  # of another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        sys.exit(128 + signal.SIGPIPE)


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    if not _is_begun:
        print_interrupt_line()
        os._exit(CODE)
    # Composer's launcher sends SIGTERM next, which would change the exit code. If it is here, Python complains of SIG_IGN.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    sys.exit(CODE)


def _ignore() -> None:
    """In a forked child: it ends with its parent, and its signals are not the parent's."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
