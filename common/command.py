"""What all commands share: --help, no secret is printed, how a refusal ends, and their exit codes."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from common import dist, interrupts, masking
from common.command_help import print_help
from common.errors import ConfigError, Failed, Refused
from common.log import EVERY_RANK, log

FIRST_SEC = 30.0  # that a machine's other ranks wait for its first one, which may still read what they have read
LEAVE_SEC = 15.0  # for what loggers and libraries do at a process's exit after a signal: some wait for a network


def command(
    *, keys: type | None = None, needs_words: bool = True, keeps_secrets: bool = False
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Make a function of argv a command: it prints the head of its file and its keys for --help, and reports refusals.

    Args:
        keys: the class of its keys, for --help. common/command_help.py reads all this from the source.
        needs_words: without any it prints its help too, and its exit code is 2.
        keeps_secrets: its words are for another command, and keep the passwords in their addresses.
    """

    def wrap(main: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(main)
        @interrupts.end_with_reader()
        def run(argv: Sequence[str], **more: object) -> int:
            if (code := print_help(main.__code__.co_filename, argv)) is not None:
                return code
            try:
                words, warnings = (argv, []) if keeps_secrets else masking.remove_secrets(argv)
                for warning in warnings:
                    log.warning(warning)
                return main(words, **more)
            except Failed as error:
                log.error(error, extra=EVERY_RANK)
                return 1
            except (ConfigError, Refused) as error:
                wait_for_first_rank()  # it refuses the same
                log.error(error, extra=EVERY_RANK)
                return 2

        return run

    return wrap


def wait_for_first_rank(limit_sec: float = FIRST_SEC) -> None:
    """Wait on a machine's other ranks: the launcher ends them when the first one leaves, and returns its code."""
    if dist.get_local_rank() > 0:
        time.sleep(limit_sec)


def start(main: Callable[[list[str]], int]) -> NoReturn:
    """Run a command as this process, and end with its code, whatever the launcher sends in the meantime.

    The first rank to leave has the launcher send SIGTERM to the others. SIGUSR1 ends it as SIGTERM does, see Composer.
    An interrupt that the command leaves by ends it with the line of common/interrupts.py.
    """
    signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(128 + number))
    interrupts.begin()
    try:
        code = main(sys.argv[1:])
    except (KeyboardInterrupt, SystemExit) as stop:
        if not isinstance(stop, KeyboardInterrupt) and stop.code != interrupts.CODE:
            raise
        interrupts.print_interrupt_line()
        code = interrupts.CODE
    sys.stdout.flush()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # stays so while the interpreter goes down; a handler would not
    if code > 128:
        threading.Thread(target=lambda: (time.sleep(LEAVE_SEC), os._exit(code)), daemon=True).start()
    sys.exit(code)
