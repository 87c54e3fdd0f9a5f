"""One rank's failure or signal, heard by the others: in a collective they would wait for it until its timeout, half an hour.

The ranks' own store (torch.distributed's, at rank 0) carries the message and the exit code. A rank that hears it prints the
message and leaves with that code. A machine's first rank leaves first: composer's launcher then ends its others, and returns
the code of the first one that has not ended well. If another left before it, that would be 143, of its SIGTERM.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed
from composer.utils import dist
from torch.distributed import PrefixStore, distributed_c10d

from cli.command import let_first_leave
from cli.errors import ConfigError, Failed
from cli.log import EVERY_RANK, log
from cli.private_api import require_private_api

Result = TypeVar("Result")

KEY = "stopped"
POLL_SEC = 2.0
STAY_SEC = 3 * POLL_SEC  # of the rank that failed: with rank 0 the store would go before the others have heard
QUIET_SEC = 3.0  # for a thread that watches to end; longer where rank 0's store hangs
ASK_SEC = 0.5  # between two looks for another rank's signal
STALL_SEC = 1800.0  # without a piece of work done anywhere: a rank is lost, and the next collective says so
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

_watching: list[tuple[threading.Event, list[threading.Thread]]] = []
_before_leaving: list[Callable[[str], None]] = []

require_private_api(distributed_c10d, "_get_default_store", why="what one rank says, the others hear there")


def num_nodes() -> int:
    """Return the number of machines that this run is on."""
    return max(1, dist.get_world_size() // dist.get_local_world_size())


def _store() -> PrefixStore | None:
    """Return the ranks' store, or None: there is one rank."""
    if dist.get_world_size() == 1 or not torch.distributed.is_initialized():
        return None
    return PrefixStore("easel/ranks", distributed_c10d._get_default_store())


def own_store() -> PrefixStore | None:
    """Return the ranks' store on a connection of its own, or None: there is one rank.

    Another thread may wait in the first one for half an hour, and whoever asks there then waits with it.
    """
    store = _store()
    return None if store is None else store.clone()


def begin_watching(*works: Callable[[threading.Event], None]) -> None:
    """Run each in a thread of its own, until `be_quiet` sets the event that it is given."""
    quiet = threading.Event()
    threads = [threading.Thread(target=work, args=(quiet,), daemon=True) for work in works]
    _watching.append((quiet, threads))
    for thread in threads:
        thread.start()


def watch_for_abort() -> None:
    """Leave, and say why, as soon as another rank has called `abort_all_ranks` or `end_all_ranks`; until `be_quiet`."""
    store = own_store()
    if store is None:
        return

    def wait(quiet: threading.Event) -> None:
        with contextlib.suppress(Exception):  # rank 0 has ended, and the store with it
            while not quiet.wait(POLL_SEC):
                if store.check([KEY]) and not quiet.is_set():
                    code, text = store.get(KEY).decode().split(" ", 1)
                    leave(text, int(code))

    begin_watching(wait)


def before_leaving(work: Callable[[str], None]) -> None:
    """Have a rank that ends by another's word, or by its own watch, call this with the text first; the last given first."""
    _before_leaving.insert(0, work)


def leave(text: str, code: int) -> NoReturn:
    """End this process from a thread, and say why: the main thread is in a collective that will never end."""
    log.error(text, extra=EVERY_RANK)
    for work in _before_leaving:
        work(text)
    # Until all have heard, rank 0 with the store the longest; but gone before the rank that failed is, whose end would
    # break the main thread's collective first, and so give another code.
    time.sleep((1.5 if dist.get_global_rank() == 0 else 1.0) * POLL_SEC)
    let_first_leave(STAY_SEC)
    os._exit(code)


def end_all_ranks(store: PrefixStore, text: str, code: int = 1) -> None:
    """Have every rank that can still hear leave with a text, this one too. Called by a thread of rank 0."""
    store.set(KEY, f"{code} {text}")


def on_rank_zero(work: Callable[[], Result]) -> Result:
    """Let rank 0 do what only one may, and give all ranks its result.

    Raises:
        ConfigError: on all ranks, what rank 0 has raised as a ValueError.
        Failed: on all ranks, where rank 0 has raised that.
    """
    outcome: list[Any] = [None, None]
    if dist.get_global_rank() == 0:
        try:
            outcome[0] = work()
        except ValueError as error:
            outcome[1] = _told(error)
    dist.broadcast_object_list(outcome)
    _raise(outcome[1:])
    return outcome[0]


def _told(error: ValueError) -> tuple[bool, list[str]]:
    """Return an error as another rank can raise it: whether a new start may mend it, and its problems."""
    return isinstance(error, Failed), getattr(error, "problems", None) or str(error).splitlines()


def _raise(told: Sequence[tuple[bool, list[str]] | None]) -> None:
    """Raise what ranks have told. A new start mends it only if it mends each."""
    found = [each for each in told if each is not None]
    if found:
        texts = list(dict.fromkeys(text for _, problems in found for text in problems))
        raise Failed("\n".join(texts)) if all(may_pass for may_pass, _ in found) else ConfigError(texts)


def on_one_rank_of_each_machine(work: Callable[[], None]) -> None:
    """Let one rank of each machine do what its others wait for.

    Raises:
        ConfigError: on all ranks, what one of them has raised as a ValueError.
        Failed: on all ranks, where each that has raised has raised that.
    """
    told = None
    if dist.get_local_rank() == 0:
        try:
            work()
        except ValueError as error:
            told = _told(error)
    _raise(dist.all_gather_object(told))


def once_a_machine(work: Callable[[], Result]) -> Result:
    """Let one rank of each machine do the work, and give its others the result by a file.

    Raises:
        ConfigError: on all ranks, what one of them has raised as a ValueError.
    """
    if dist.get_world_size() == 1:
        return work()
    written: list[str] = []

    def write() -> None:
        result = work()
        try:
            with tempfile.NamedTemporaryFile(prefix="easel-", delete=False) as file:
                written.append(file.name)
                pickle.dump(result, file, protocol=5)
        except OSError as error:
            text = f"{tempfile.gettempdir()} cannot be written: {error.strerror}. Make room there."
            raise ConfigError([text]) from error

    try:
        on_one_rank_of_each_machine(write)
        [path] = dist.all_gather_object(written)[dist.get_global_rank() - dist.get_local_rank()]
        result = pickle.loads(Path(path).read_bytes())  # this machine's first rank has just written it
        dist.barrier()
    finally:
        for name in written:
            Path(name).unlink(missing_ok=True)
    return result


def stopped(stop: SystemExit, more: str = "The same command starts it again.") -> int:
    """Say that a signal has ended this rank, perhaps alone, and tell the others; return the code.

    Args:
        more: what is left, and what to do. It is said of an interrupt: after another signal the one who sent it knows.
    """
    code = int(stop.code or 0)
    if code in [128 + number for number in STOP_SIGNALS]:
        text, is_interrupt = f"{signal.Signals(code - 128).name}: stopped", code == 128 + signal.SIGINT
        # Without a store nobody hears it, and it may be the launcher's: another rank has left. Ctrl-C comes to all ranks of
        # a machine, and those of others have to be told.
        if _store() is not None and (num_nodes() > 1 or not is_interrupt):
            abort_all_ranks(text, code)
        log.error(f"{text}. {more}" if is_interrupt else f"{text}.", extra={} if is_interrupt else EVERY_RANK)
    return code


def be_quiet() -> None:
    """Hear nothing any more: this rank has ended its work, or knows better.

    Its watching threads end first: one that is in C++ code while the interpreter goes down aborts the process.
    """
    ending, _watching[:] = [*_watching], []
    for quiet, _ in ending:
        quiet.set()
    for thread in (thread for _, threads in ending for thread in threads):
        if thread is not threading.current_thread():
            thread.join(QUIET_SEC)
    _before_leaving.clear()


def abort_all_ranks(text: str, code: int = 1) -> None:
    """Tell the other ranks that this one has stopped, and stay until they have heard.

    Args:
        code: what all ranks are to exit with.
    """
    be_quiet()
    is_first, first_is_gone = os.environ.get("LOCAL_RANK", "0") == "0", False
    if not is_first:
        _obey_launcher()  # which ends it when the first one has heard, and left
    try:
        if (store := _store()) is not None:
            store.set(KEY, f"{code} rank {dist.get_global_rank()} has stopped: {text}")
            store.check([KEY])  # which asks for an answer, as `set` does not
            time.sleep(STAY_SEC)
    except Exception:  # the store is gone: so is rank 0, after which the launcher has sent its SIGTERM already
        first_is_gone = num_nodes() == 1
    _obey_launcher()
    if not first_is_gone:
        let_first_leave()


def _obey_launcher() -> None:
    """Let the launcher's SIGTERM end this rank at once: nothing is left to save."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# --- signals ---


class Signalled(Exception):
    """Work was left at a signal that one of the ranks has had, by all of them together."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def noting_signals() -> Iterator[Callable[[], int]]:
    """Note the signals that stop a command instead of ending; gives what returns the first that came, 0: none."""
    noted: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: noted.append(number)) for number in STOP_SIGNALS}
    try:
        yield lambda: noted[0] if noted else 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stopping_together() -> Iterator[Callable[[], int]]:
    """Note signals, as `noting_signals`, and leave with all ranks at the end where one of them has had any by then.

    Raises:
        Signalled: on all ranks alike.
    """
    with noting_signals() as noted:
        yield noted
        dist.barrier()  # a rank may wait long here, and its signal is seen only afterwards
        if number := max(dist.all_gather_object(noted())):
            raise Signalled(number)
    if late := noted():  # too late for the others: this rank ends as by any signal between two pieces of work
        signal.raise_signal(late)


class Hearing:
    """One rank's signal, heard by the others while each has pieces of work to do; all ranks build it together.

    No rank waits in a collective for one that has more to do: signals are not seen there. They ask the ranks' store.
    Ranks in step are in one at each piece anyway: they agree there, and do equally many.

    Args:
        own: returns the signal that this rank has had, 0: none.
        num_pieces: of this rank.
        in_step: a piece needs all ranks, which do equally many (training/sharding.py).
    """

    _numbers = itertools.count()

    def __init__(self, own: Callable[[], int], num_pieces: int, *, in_step: bool = False):
        of_ranks = dist.all_gather_object(num_pieces)
        self.own, self.num_pieces, self.in_step = own, sum(of_ranks), in_step
        self._num_each = max(of_ranks) if in_step else num_pieces
        store = _store()
        self._store = None if store is None else PrefixStore(f"hearing/{next(self._numbers)}", store)
        self._asked_at, self._heard = -math.inf, False

    def pieces(self, own: Sequence[Result]) -> Iterator[Result | None]:
        """Yield this rank's pieces, and then None for each that others in step do beside it."""
        yield from own
        yield from [None] * (self._num_each - len(own))

    def heard(self) -> bool:
        """True from when this rank has had a signal, or another one has said so; in step, all ranks call it together."""
        if self.in_step:
            self._heard = self._heard or max(dist.all_gather_object(self.own())) > 0
            return self._heard
        if self._heard or self._store is None:
            return self._heard or bool(self.own())
        if self.own():
            self._store.set(KEY, "")
            self._heard = True
        elif time.monotonic() - self._asked_at > ASK_SEC:
            self._heard, self._asked_at = self._store.check([KEY]), time.monotonic()
        return self._heard

    def done(self) -> None:
        """Say that a piece is done."""
        if self._store is not None:
            self._store.add("pieces", 1)

    def agreed(self) -> int:
        """Return the signal that a rank has had by the time when all pieces are done, or all ranks have heard; 0: none."""
        known, since = -1, time.monotonic()
        while (
            self._store is not None and not self.in_step and not self.heard() and time.monotonic() - since < STALL_SEC
        ):
            if (done := self._store.add("pieces", 0)) >= self.num_pieces:
                break
            if done > known:
                known, since = done, time.monotonic()
            time.sleep(ASK_SEC / 5)
        return max(dist.all_gather_object(self.own()))
