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
from torch.distributed import PrefixStore, distributed_c10d

from common import dist
from common.command import wait_for_first_rank
from common.errors import ConfigError, Failed
from common.log import EVERY_RANK, log
from common.private_api import require_private_api

Result = TypeVar("Result")

KEY = "stopped"
POLL_SEC = 2.0
STAY_SEC = 3 * POLL_SEC  # of the rank that failed: with rank 0 the store would go before the others have heard
JOIN_SEC = 3.0  # for a thread that watches to end; longer where rank 0's store hangs
ASK_SEC = 0.5  # between two looks for another rank's signal
STALL_SEC = 1800.0  # without a piece of work done anywhere: a rank is lost, which the next collective reports
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

_watching: list[tuple[threading.Event, list[threading.Thread]]] = []
_before_exit: list[Callable[[str], None]] = []

require_private_api(distributed_c10d, "_get_default_store", why="what one rank says, the others hear there")


def num_nodes() -> int:
    """Return the number of machines that this run is on."""
    return max(1, dist.get_world_size() // dist.get_local_world_size())


def _store() -> PrefixStore | None:
    """Return the ranks' store, or None: there is one rank."""
    if dist.get_world_size() == 1 or not torch.distributed.is_initialized():
        return None
    return PrefixStore("easel/ranks", distributed_c10d._get_default_store())


def clone_store() -> PrefixStore | None:
    """Return the ranks' store on a separate connection, or None: there is one rank.

    Another thread may wait in the first one for half an hour, and anyone who asks there waits with it.
    """
    store = _store()
    return None if store is None else store.clone()  # type: ignore[attr-defined]  # torch's types lack it


def start_watchdogs(*works: Callable[[threading.Event], None]) -> None:
    """Run each in a separate thread, until `stop_watchdogs` sets the event that it is given."""
    stop = threading.Event()
    threads = [threading.Thread(target=work, args=(stop,), daemon=True) for work in works]
    _watching.append((stop, threads))
    for thread in threads:
        thread.start()


def watch_for_abort() -> None:
    """Leave, and say why, as soon as another rank has called `abort_all_ranks` or `end_all_ranks`; until `stop_watchdogs`."""
    store = clone_store()
    if store is None:
        return

    def wait(stop: threading.Event) -> None:
        with contextlib.suppress(Exception):  # rank 0 has ended, and the store with it
            while not stop.wait(POLL_SEC):
                if store.check([KEY]) and not stop.is_set():
                    code, text = store.get(KEY).decode().split(" ", 1)
                    exit_process(text, int(code))

    start_watchdogs(wait)


def call_before_exit(work: Callable[[str], None]) -> None:
    """Register a function that gets the error text before a forced exit; the last one registered runs first."""
    _before_exit.insert(0, work)


def exit_process(text: str, code: int) -> NoReturn:
    """End this process from a thread, and say why: the main thread is in a collective that will never end."""
    log.error(text, extra=EVERY_RANK)
    for work in _before_exit:
        work(text)
    # Wait until all ranks have read the message: rank 0, which hosts the store, the longest. Exit before the failed rank:
    # its exit breaks this rank's collective, and so changes the exit code.
    time.sleep((1.5 if dist.get_global_rank() == 0 else 1.0) * POLL_SEC)
    wait_for_first_rank(STAY_SEC)
    os._exit(code)


def end_all_ranks(store: PrefixStore, text: str) -> None:
    """Have every rank that can still hear leave with a text, this one too. Called by a thread of rank 0."""
    store.set(KEY, f"1 {text}")


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
            outcome[1] = _serialize_error(error)
    dist.broadcast_object_list(outcome)
    _raise_errors(outcome[1:])
    return outcome[0]


def _serialize_error(error: ValueError) -> tuple[bool, list[str]]:
    """Return an error as another rank can raise it: whether a new start may fix it, and its problems."""
    return isinstance(error, Failed), getattr(error, "problems", None) or str(error).splitlines()


def _raise_errors(errors: Sequence[tuple[bool, list[str]] | None]) -> None:
    """Raise the errors of the ranks as one. A new start fixes it only if it fixes each."""
    raised = [each for each in errors if each is not None]
    if raised:
        texts = list(dict.fromkeys(text for _, problems in raised for text in problems))
        raise Failed("\n".join(texts)) if all(may_pass for may_pass, _ in raised) else ConfigError(texts)


def on_one_rank_of_each_machine(work: Callable[[], None]) -> None:
    """Let one rank of each machine do what its others wait for.

    Raises:
        ConfigError: on all ranks, what one of them has raised as a ValueError.
        Failed: on all ranks, where each that has raised has raised that.
    """
    serialized = None
    if dist.get_local_rank() == 0:
        try:
            work()
        except ValueError as error:
            serialized = _serialize_error(error)
    _raise_errors(dist.all_gather_object(serialized))


def once_per_machine(work: Callable[[], Result]) -> Result:
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


def exit_code_for(stop: SystemExit, advice: str = "The same command starts it again.") -> int:
    """Say that a signal has ended this rank, perhaps alone, and tell the others; return the code.

    Args:
        advice: what is left, and what to do. Printed for an interrupt only: the sender of another signal knows.
    """
    code = int(stop.code or 0)
    if code in [128 + number for number in STOP_SIGNALS]:
        text, is_interrupt = f"{signal.Signals(code - 128).name}: stopped", code == 128 + signal.SIGINT
        # Without a store no rank hears it, and it may be the launcher's: another rank has left. Ctrl-C comes to all ranks of
        # a machine, but not to those of other machines.
        if _store() is not None and (num_nodes() > 1 or not is_interrupt):
            abort_all_ranks(text, code)
        log.error(f"{text}. {advice}" if is_interrupt else f"{text}.", extra={} if is_interrupt else EVERY_RANK)
    return code


def stop_watchdogs() -> None:
    """Stop listening to other ranks: this rank has ended its work, or knows better.

    Its watching threads end first: one that is in C++ code while the interpreter goes down aborts the process.
    """
    ending, _watching[:] = [*_watching], []
    for stop, _ in ending:
        stop.set()
    for thread in (thread for _, threads in ending for thread in threads):
        if thread is not threading.current_thread():
            thread.join(JOIN_SEC)
    _before_exit.clear()


def abort_all_ranks(text: str, code: int = 1) -> None:
    """Tell the other ranks that this one has stopped, and stay until they have heard.

    Args:
        code: what all ranks are to exit with.
    """
    stop_watchdogs()
    is_first, first_is_gone = dist.get_local_rank() == 0, False
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
        wait_for_first_rank()


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
def note_signals() -> Iterator[Callable[[], int]]:
    """Note the signals that stop a command instead of ending; gives what returns the first that came, 0: none."""
    noted: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: noted.append(number)) for number in STOP_SIGNALS}
    try:
        yield lambda: noted[0] if noted else 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stop_together() -> Iterator[Callable[[], int]]:
    """Note signals, as `note_signals`, and leave with all ranks at the end where one of them has had any by then.

    Raises:
        Signalled: on all ranks alike.
    """
    with note_signals() as first_signal:
        yield first_signal
        dist.barrier()  # a rank may wait long here, and its signal is seen only afterwards
        if number := max(dist.all_gather_object(first_signal())):
            raise Signalled(number)
    if late_signal := first_signal():
        # Too late for the others: this rank ends as by any signal between two pieces of work.
        signal.raise_signal(late_signal)


class SignalExchange:
    """One rank's signal, heard by the others while each has pieces of work to do; all ranks build it together.

    No rank waits in a collective for one that has more to do: signals are not seen there. They ask the ranks' store.
    Ranks in step are in one at each piece anyway: they agree there, and do equally many.

    Args:
        get_signal: returns the signal that this rank has had, 0: none.
        num_pieces: of this rank.
        in_step: a piece needs all ranks, which do equally many (training/sharding.py).
    """

    _numbers = itertools.count()

    def __init__(self, get_signal: Callable[[], int], num_pieces: int, *, in_step: bool = False):
        of_ranks = dist.all_gather_object(num_pieces)
        self.get_signal, self.num_pieces, self.in_step = get_signal, sum(of_ranks), in_step
        self._num_each = max(of_ranks) if in_step else num_pieces
        store = _store()
        self._store = None if store is None else PrefixStore(f"hearing/{next(self._numbers)}", store)
        self._asked_at, self._heard = -math.inf, False

    def iterate_pieces(self, own: Sequence[Result]) -> Iterator[Result | None]:
        """Yield this rank's pieces, and then None for each further one that other ranks in step do."""
        yield from own
        yield from [None] * (self._num_each - len(own))

    def has_signal(self) -> bool:
        """True from when this rank has had a signal, or another one has said so; in step, all ranks call it together."""
        if self.in_step:
            self._heard = self._heard or max(dist.all_gather_object(self.get_signal())) > 0
            return self._heard
        if self._heard or self._store is None:
            return self._heard or bool(self.get_signal())
        if self.get_signal():
            self._store.set(KEY, "")
            self._heard = True
        elif time.monotonic() - self._asked_at > ASK_SEC:
            self._heard, self._asked_at = self._store.check([KEY]), time.monotonic()
        return self._heard

    def done(self) -> None:
        """Say that a piece is done."""
        if self._store is not None:
            self._store.add("pieces", 1)

    def agree_on_signal(self) -> int:
        """Return the signal that a rank has had by the time when all pieces are done, or all ranks have heard; 0: none."""
        known, since = -1, time.monotonic()
        while (
            self._store is not None
            and not self.in_step
            and not self.has_signal()
            and time.monotonic() - since < STALL_SEC
        ):
            if (done := self._store.add("pieces", 0)) >= self.num_pieces:
                break
            if done > known:
                known, since = done, time.monotonic()
            time.sleep(ASK_SEC / 5)
        return max(dist.all_gather_object(self.get_signal()))
