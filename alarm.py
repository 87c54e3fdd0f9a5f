"""One rank's failure, heard by the others: in a collective they would wait for it until its timeout, half an hour.

The ranks' own store (torch.distributed's, at rank 0) carries the message. A rank that hears it prints it and leaves.
"""

from __future__ import annotations

import contextlib
import os
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

_quiet = threading.Event()


def _store() -> PrefixStore | None:
    """Return the ranks' store, or None: there is one rank, or a torch without `_get_default_store` (2.0 to 2.11 have it)."""
    if dist.get_world_size() == 1 or not torch.distributed.is_initialized():
        return None
    get = getattr(distributed_c10d, "_get_default_store", None)
    return None if get is None else PrefixStore("easel/alarm", get())


def listen() -> None:
    """Leave with exit code 1, and say why, as soon as another rank has called `sound`; until `be_quiet`."""
    store = _store()
    if store is None:
        return
    _quiet.clear()

    def wait() -> None:
        with contextlib.suppress(Exception):  # rank 0 has ended, and the store with it
            while not _quiet.wait(POLL_SEC):
                if store.check([KEY]) and not _quiet.is_set():
                    print(store.get(KEY).decode(), file=sys.stderr, flush=True)
                    os._exit(1)  # the main thread is in a collective that will never end

    threading.Thread(target=wait, daemon=True).start()


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


def sound(text: str) -> None:
    """Tell the other ranks that this one has stopped, and stay until they have heard."""
    be_quiet()
    with contextlib.suppress(Exception):  # the store is gone: so is rank 0
        if (store := _store()) is not None:
            store.set(KEY, f"rank {dist.get_global_rank()} has stopped: {text}")
            time.sleep(STAY_SEC)
