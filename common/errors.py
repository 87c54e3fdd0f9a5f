"""The errors that a user sees, and what a process says of one that ends it."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import masking
from common.log import EVERY_RANK, log

ROOT = Path(__file__).resolve().parent.parent
# What libraries say, in plain RuntimeErrors, of a process that was ended from outside.
ENDED_BY_OTHERS = {
    "DataLoader worker (pid": "A worker was killed: too little memory or /dev/shm. Lower data.workers, or add more.",
    "by peer": "Another rank died without an error: the kernel kills a process when memory runs out.",
    "Timed out waiting": "Another rank did not reach this collective: it hangs, or its machine is unreachable.",
}


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one problem a line.

    config: the typed configuration where every name and type was right and only checks across keys failed, else None.
    """

    def __init__(self, problems: Sequence[str], config: Any = None):
        self.problems = [masking.mask_secrets(text) for text in problems]
        self.config = config
        super().__init__("\n".join(self.problems))


class Refused(ValueError):
    """The work cannot start there; the message says why and what to do."""


class Failed(ValueError):
    """The work had to stop; the message says why and what to do. Finished work is kept."""


def is_expected(error: BaseException) -> bool:
    """True for an error that any run may meet, and whose text says what to do.

    That is what this project raises itself as a ValueError, or as its own class of error; what the system says of a file or a
    connection; and what W&B says. Any other is a defect, of which the trace is wanted.
    """
    is_known = isinstance(error, OSError | MemoryError) or type(error).__module__.startswith("wandb.")
    return is_known or _is_own(error) or _explain_end(error) is not None


def _explain_end(error: BaseException) -> str | None:
    text = str(error) if isinstance(error, RuntimeError) else ""
    return next((why for part, why in ENDED_BY_OTHERS.items() if part in text), None)


def _is_own(error: BaseException) -> bool:
    """True if a `raise` statement of this project raised it, and it is a ValueError or one of this project's classes."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not _is_ours(frames[-1].filename) or not (frames[-1].line or "").startswith("raise"):
        return False
    module = sys.modules.get(type(error).__module__)
    return isinstance(error, ValueError) or _is_ours(getattr(module, "__file__", None) or "")


def _is_ours(file: str) -> bool:
    path = Path(file).resolve()
    return path.is_file() and path.is_relative_to(ROOT) and "site-packages" not in path.parts


def error_text(error: BaseException) -> str:
    """Return what an error says; where its text is not ours, what it is comes first."""
    if (why := _explain_end(error)) is not None and not _is_own(error):
        return f"{str(error).splitlines()[0]} {why} The same command resumes from the last checkpoint."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is not None:
        return f"{error.filename} cannot be written: {error.strerror}. Make room, and start the same command again."
    return str(error) if _is_own(error) or _is_message(error) else f"{type(error).__name__}: {error}"


def _is_message(error: BaseException) -> bool:
    """True for an OSError that has a text of ours instead of the system's number."""
    return isinstance(error, OSError) and error.errno is None


def report_error(error: BaseException, *, debug: bool) -> None:
    """Print an error's text; before it the traceback, if the error is unexpected or with `debug`."""
    if debug or not is_expected(error):
        traceback.print_exception(error)
    log.error(error_text(error), extra=EVERY_RANK)
