"""What a program says on stderr beside its result: the standard `logging`, a line a message, rank 0's alone.

    log.info("data: 12 s: waiting for a batch")
    log.info(text, extra=EVERY_RANK)                  # what one rank alone knows

Before any process group there is a rank too: the launcher's variable says it.
"""

from __future__ import annotations

import logging
import os
import sys

EVERY_RANK = {"every_rank": True}


class Stderr(logging.StreamHandler):
    """Writes to what sys.stderr is at that time: W&B, the masking of secrets and pytest put streams of their own there."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        self.stream = sys.stderr
        super().emit(record)


def is_first_rank_or_asked(record: logging.LogRecord) -> bool:
    """True where this rank is to say it."""
    return getattr(record, "every_rank", False) or os.environ.get("RANK", "0") == "0"


log = logging.getLogger("easel")
log.setLevel(logging.INFO)
log.propagate = False  # the libraries' own handlers would say it again
log.handlers = [Stderr()]
log.filters = [is_first_rank_or_asked]

# Six lines at every start where it does not load, by an import of diffusers; attention=xformers is refused with the reason.
logging.getLogger("xformers").setLevel(logging.ERROR)
