"""One rank's failure, heard by the others: in a collective they would wait for it until its timeout, half an hour.

The ranks' own store (torch.distributed's, at rank 0) carries the message and the exit code. A rank that hears it prints the
message and leaves with that code. A machine's first rank leaves first: composer's launcher then ends its others, and returns
the code of the first one that has not ended well. If another left before it, that would be 143, of its SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed
from composer.utils import dist
from torch.distributed import PrefixStore, distributed_c10d

from config import ConfigError

Result = TypeVar("Result")

KEY = "stopped"
POLL_SEC = 2.0
STAY_SEC = 3 * POLL_SEC  # of the rank that failed: with rank 0 the store would go before the others have heard
FIRST_SEC = 30.0  # that a machine's other ranks leave to its first one: it may be long in reading what they have read

_quiet = threading.Event()


def _store() -> PrefixStore | None:
    """Return the ranks' store, or None: there is one rank, or a torch without `_get_default_store` (2.0 to 2.11 have it)."""
    if dist.get_world_size() == 1 or not torch.distributed.is_initialized():
        return None
    get = getattr(distributed_c10d, "_get_default_store", None)
    return None if get is None else PrefixStore("easel/alarm", get())


def listen() -> None:
    """Leave, and say why, as soon as another rank has called `sound`; until `be_quiet`."""
    store = _store()
    if store is None:
        return
    _quiet.clear()

    def wait() -> None:
        with contextlib.suppress(Exception):  # rank 0 has ended, and the store with it
            while not _quiet.wait(POLL_SEC):
                if store.check([KEY]) and not _quiet.is_set():
                    code, text = store.get(KEY).decode().split(" ", 1)
                    print(text, file=sys.stderr, flush=True)
                    time.sleep(POLL_SEC)  # until all have heard
                    _let_first_leave(STAY_SEC)
                    os._exit(int(code))  # the main thread is in a collective that will never end

    threading.Thread(target=wait, daemon=True).start()


def _let_first_leave(limit_sec: float) -> None:
    if dist.get_local_rank() != 0:
        time.sleep(limit_sec)


def on_rank_zero(work: Callable[[], Result]) -> Result:
    """Let rank 0 do what only one may, and give all ranks its result.

    Raises:
        ConfigError: on all ranks, what rank 0 has raised as a ValueError.
    """
    outcome: list[Any] = [None, None]
    if dist.get_global_rank() == 0:
        try:
            outcome[0] = work()
        except ValueError as error:
            outcome[1] = getattr(error, "problems", [str(error)])
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise ConfigError(outcome[1])
    return outcome[0]


def be_quiet() -> None:
    """Hear nothing any more: this rank has ended its work, or knows better."""
    _quiet.set()


def sound(text: str, code: int = 1) -> None:
    """Tell the other ranks that this one has stopped, and stay until they have heard.

    Args:
        code: what all ranks are to exit with.
    """
    be_quiet()
    with contextlib.suppress(Exception):  # the store is gone: so is rank 0
        if (store := _store()) is not None:
            store.set(KEY, f"{code} rank {dist.get_global_rank()} has stopped: {text}")
            time.sleep(STAY_SEC)
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(
            signal.SIGTERM, signal.SIG_DFL
        )  # the launcher's, which ends this rank now: nothing is left to save
    _let_first_leave(FIRST_SEC)
